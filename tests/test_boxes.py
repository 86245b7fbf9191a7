"""A stretch of a flattened tensor is few rectangles that hold its elements in order, and is saved and read as they are."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from pretrain import checkpoint
from pretrain.boxes import Stretch, boxes_of
from pretrain.pieces import by_file, pieces, write_safetensors

SHAPES = [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2), (2, 2, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_hold_the_stretch_in_order(shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    whole = torch.arange(size).reshape(shape)
    for start, stop in itertools.combinations_with_replacement(range(size + 1), 2):
        boxes = boxes_of(shape, start, stop)
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        found = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].flatten() for box in boxes]
        assert all(math.prod(sizes) for _, sizes in boxes)
        assert torch.equal(torch.cat([torch.empty(0, dtype=torch.long), *found]), torch.arange(start, stop))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_division_reads_any_other(shape: tuple[int, ...], tmp_path: Path) -> None:
    """What two processes have of a tensor, saved by each, is read by two that divide it elsewhere, and by one."""
    size = math.prod(shape)
    flat = torch.randn(size)
    for n, cut in enumerate({0, size // 2, size - 1}):
        path = tmp_path / f"step_{n:08d}"
        for rank, (start, stop) in enumerate(((0, cut), (cut, size))):
            mine = pieces({"model": {"w": Stretch(flat[start:stop], shape, start)}})
            for k, part in enumerate(by_file(mine)):
                (path / "model").mkdir(parents=True, exist_ok=True)
                write_safetensors(path / "model" / f"shard_{rank}_{k}.safetensors", part)
        whole = torch.zeros(shape)
        checkpoint.load(path, {"model": {"w": whole}})
        assert torch.equal(whole.flatten(), flat)
        for other in {size // 3, size}:
            halves = [torch.zeros(other), torch.zeros(size - other)]
            for half, start in zip(halves, (0, other), strict=True):
                checkpoint.load(path, {"model": {"w": Stretch(half, shape, start)}})
            assert torch.equal(torch.cat(halves), flat)


def test_several_rectangles_of_one_tensor_go_to_files_of_their_own(tmp_path: Path) -> None:
    tensors = {"model": {"a": Stretch(torch.arange(8.0), (4, 5), 3), "b": torch.ones(2)}}
    path = checkpoint.save(tmp_path, 1, tensors, {}, {}, None)
    names = {}
    for file in (path / "model").iterdir():
        with safe_open(file, "pt") as opened:
            names[file.name] = {name: list(opened.get_tensor(name).shape) for name in opened.keys()}  # noqa: SIM118
    assert names == {
        "shard_00001.safetensors": {"a": [1, 2], "b": [2]},
        "shard_00001_2.safetensors": {"a": [1, 5]},
        "shard_00001_3.safetensors": {"a": [1, 1]},
    }
    assert checkpoint.verify(path) is None
