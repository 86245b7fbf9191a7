"""A checkpoint belongs to no strategy, precision or number of processes: any takes it over whole and hands it on as it was (promise 3)."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drive
import numpy as np
import pytest
import torch
from group import Ranks
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from pretrain import checkpoint
from pretrain.strategies import STRATEGIES

Config = Callable[..., Path]
START = 3  # the step of the checkpoint that all begin with
LOCAL = ["strategy.options.sync_every=1"]
OPTIONS = {"local_sgd": LOCAL, "diloco": [*LOCAL, "strategy.options.outer_lr=1", "strategy.options.outer_momentum=0"],
           "ddp_powersgd": ["strategy.options.start_step=5"]}  # fmt: skip
BASE = {"train.max_steps": START, "train.checkpoint_every": START, "optim.grad_clip": 0.5}


def canonical(path: Path) -> dict[str, bytes]:
    """The bytes of every weight and moment, whatever files hold parts of it."""
    found: dict[str, bytes] = {}
    for group in ("model", "optimizer"):
        entries = HuggingFaceStorageReader(str(path / group)).read_metadata().state_dict_metadata
        tensors: dict[str, Any] = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in entries.items()}  # type: ignore[union-attr]
        checkpoint.load(path, {group: tensors})
        found |= {f"{group}.{name}": tensor.numpy().tobytes() for name, tensor in tensors.items()}
    return found


def hand_on(path: Path, start: Path, tag: str, names: list[str], overrides: list[str], count: int) -> dict[str, tuple[Path, list[float]]]:
    """Of each strategy, the checkpoint that it writes before any step, and the losses of so many steps after."""
    found = {}
    for name in names:
        mine = [f"strategy.name={name}", f"run.name={tag}-{name}", f"run.resume={start}", "train.max_steps=6", "train.checkpoint_every=1"]
        job, progress = drive.begin(path, [*overrides, *mine, *OPTIONS.get(name, [])])
        saved = checkpoint.save(job.saver.folder, progress.step, job.strategy.state(), {}, job.described, job.control)
        rows = drive.steps(job, progress, count)
        job.loader.close()
        found[name] = saved, [row["loss"] for row in rows]
        drive.leave()
    return found


@pytest.fixture
def first(ranks: Ranks, config: Config) -> tuple[Path, Path]:
    """(config, checkpoint of one process in fp32)."""
    path = config(BASE)
    ranks.run(drive.whole, path, ["run.name=first"], size=1)
    return path, checkpoint.path_of(path.parent / "runs" / "first" / "checkpoints", START)


def possible(size: int) -> list[str]:
    return [name for name, cls in STRATEGIES.items() if cls.processes[0] <= size <= cls.processes[1] and (size > 1 or cls.exact)]


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_loaded_and_saved_again_it_is_the_same_to_the_byte(ranks: Ranks, first: tuple[Path, Path], size: int) -> None:
    """And trained on, it loses what one process does."""
    path, start = first
    before = canonical(start)
    assert before["optimizer.transformer.wte.weight.exp_avg"] != before["optimizer.transformer.wte.weight.exp_avg_sq"]
    expected = ranks.run(hand_on, path, start, "alone", ["single"], ["batch.micro=8"], 3, size=1)[0]["single"][1]
    layout = [f"batch.micro={2 if size < 4 else 1}"]
    for name, (saved, losses) in ranks.run(hand_on, path, start, "again", possible(size), layout, 3, size=size)[0].items():
        assert checkpoint.verify(saved) is None
        assert canonical(saved) == before, name
        assert np.allclose(losses, expected, rtol=1e-5 if STRATEGIES[name].exact else 1e-2, atol=0), name


def take_twice(path: Path, start: Path, names: list[str]) -> dict[str, list[drive.Rows]]:
    """Of each strategy, two updates from the checkpoint, and after an evaluation the same two from it again."""
    found = {}
    for name in names:
        mine = [f"strategy.name={name}", f"run.name=twice-{name}", f"run.resume={start}", "train.max_steps=6", "train.checkpoint_every=1"]
        job, progress = drive.begin(path, [*mine, *OPTIONS.get(name, [])])
        again = dataclasses.replace(progress)
        first = drive.steps(job, progress, 2)
        inputs_BT = torch.zeros(1, job.layout.sequence_length, dtype=torch.long)
        with job.strategy.evaluation_weights() as module, torch.no_grad():
            module(inputs_BT, inputs_BT)
        job.strategy.restore(checkpoint.Stored(start), moments=True, extras=False)
        job.strategy.load_numbers(checkpoint.read_json(start, "state.json"))
        found[name] = [first, drive.steps(job, again, 2)]
        job.loader.close()
        drive.leave()
    return found


def test_taken_over_in_the_middle_of_a_run(ranks: Ranks, first: tuple[Path, Path]) -> None:
    """As a rollback does, whatever an evaluation has left gathered."""
    path, start = first
    for name, (rows, again) in ranks.run(take_twice, path, start, possible(2), size=2)[0].items():
        assert rows == again, name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_keep_the_weights_in_32(ranks: Ranks, first: tuple[Path, Path], precision: str) -> None:
    """From a checkpoint written in fp32, fp16 finding its loss scale anew."""
    path, start = first
    names = [name for name in possible(2) if precision in STRATEGIES[name].precisions]
    found = ranks.run(hand_on, path, start, precision, names, [f"run.precision={precision}"], 0, size=2)[0]
    before = canonical(start)
    for name, (saved, _) in found.items():
        assert canonical(saved) == before, name
