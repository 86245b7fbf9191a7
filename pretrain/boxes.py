"""A stretch of a flattened tensor, as FSDP1 gives each process, cut into the rectangles that a checkpoint is made of: nothing is gathered."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offsets, sizes)


def boxes_of(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements [start, stop) of a tensor in row-major order: at most 2·ndim − 1 rectangles, in that order."""
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [((start,), (stop - start,)) if shape else ((), ())]
    row = math.prod(shape[1:])

    def within(index: int, begin: int, end: int) -> list[Box]:
        return [((index, *offsets), (1, *sizes)) for offsets, sizes in boxes_of(shape[1:], begin, end)]

    first, last = start // row, stop // row
    if first == last:
        return within(first, start % row, stop % row)
    whole = first + (start % row > 0)
    found = within(first, start % row, row) if start % row else []
    if whole < last:
        found.append(((whole, *[0] * (len(shape) - 1)), (last - whole, *shape[1:])))
    return found + within(last, 0, stop % row)


class Stretch(Tensor):
    """The elements from `start` on of a tensor of `shape`, as many as `flat` has. It holds no numbers itself: `boxes` are views of `flat`,
    each with its offsets, that torch.distributed.checkpoint reads into by the methods that it looks for."""

    boxes: list[tuple[tuple[int, ...], Tensor]]

    @staticmethod
    def __new__(cls, flat: Tensor, shape: Sequence[int], start: int) -> "Stretch":
        made: Stretch = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=flat.dtype, device=flat.device)
        found = boxes_of(shape, start, start + flat.numel())
        parts = flat.split([math.prod(sizes) for _, sizes in found]) if found else ()
        made.boxes = [(offsets, part.view(sizes)) for (offsets, sizes), part in zip(found, parts, strict=True)]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} on a stretch of a tensor")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Stretch({tuple(self.shape)}, {[offsets for offsets, _ in self.boxes]})"

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), part.shape) for offsets, part in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return dict(self.boxes)[tuple(index.offset)]
