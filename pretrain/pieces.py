"""The pieces that ranks hold of tensors: who writes which, and the file that a rank writes them to.

A file is as torch.distributed.checkpoint's HuggingFaceStorageReader reads it. It is not written by HuggingFaceStorageWriter, since that
copies all of a rank's share before it writes, takes no checksum, and plans each save anew with collectives.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from pretrain.boxes import Stretch
from pretrain.hashed_file import HashedFile
from pretrain.ranks import gather, rank_in

_DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


Key = tuple[str, str, tuple[int, ...]]  # a piece's group, name and offsets


@dataclass(frozen=True)
class Piece:
    """A rectangle of a named tensor, as this process holds it: all of it, or a shard."""

    group: str  # of checkpoint.GROUPS
    name: str
    offsets: tuple[int, ...]  # of its first element in the whole tensor
    tensor: Tensor

    @property
    def key(self) -> Key:
        return self.group, self.name, self.offsets


def pieces(tensors: Mapping[str, Mapping[str, Tensor]]) -> list[Piece]:
    """What this process holds of them."""
    found = []
    for group, named in tensors.items():
        for name, tensor in sorted(named.items()):
            if isinstance(tensor, Stretch):
                local = tensor.boxes
            elif isinstance(tensor, DTensor):
                _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
                local = [(tuple(offsets), tensor.to_local())]
            else:
                local = [((0,) * tensor.ndim, tensor)]
            found += [Piece(group, name, offsets, part.detach()) for offsets, part in local if part.numel()]
    return found


def unsavable(state: Mapping[str, Any]) -> str | None:
    """What of a module's state has no place in a checkpoint, and why; None where all has."""
    for name, value in state.items():
        if not isinstance(value, Tensor):
            return f"{name} is {type(value).__name__} and no tensor"
        if value.dtype not in _DTYPES:
            return f"{name} is of {str(value.dtype).removeprefix('torch.')}, which safetensors does not know"
    return None


def share(mine: Sequence[Piece], group: dist.ProcessGroup | None) -> list[Piece]:
    """Those of its pieces that this rank writes: what several ranks hold is written by the one that has least to write so far."""
    if group is None:
        return list(mine)
    holders: dict[tuple[int, Any], list[int]] = defaultdict(list)
    everyone = gather(group, [(piece.tensor.nbytes, piece.key) for piece in mine])
    for rank, theirs in enumerate(everyone):
        for sized in theirs:
            holders[sized].append(rank)
    load, writer = [0] * len(everyone), {}
    for (size, key), ranks in sorted(holders.items(), key=lambda item: (-item[0][0], item[0][1])):
        writer[key] = min(ranks, key=lambda rank: load[rank])
        load[writer[key]] += size
    return [piece for piece in mine if writer[piece.key] == rank_in(group)]


def by_file(part: Sequence[Piece]) -> list[list[Piece]]:
    """Lists in which no tensor comes twice, since a file has room for one rectangle of it: the first of each, the second of those that have more …"""
    files: list[list[Piece]] = []
    count: dict[str, int] = defaultdict(int)
    for piece in part:
        if count[piece.name] == len(files):
            files.append([])
        files[count[piece.name]].append(piece)
        count[piece.name] += 1
    return files


def write_safetensors(path: Path, part: Sequence[Piece]) -> dict[str, Any]:
    """One piece a name, straight from the tensors' memory. Returns the manifest's entry: the checksum is taken on the way."""
    assert len({piece.name for piece in part}) == len(part), "see by_file"
    offsets = {piece.name: {"saved_offsets": list(piece.offsets)} for piece in part}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}}
    end = 0
    for piece in part:
        begin, end = end, end + piece.tensor.nbytes
        header[piece.name] = {"dtype": _DTYPES[piece.tensor.dtype], "shape": list(piece.tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    with HashedFile(path) as file:
        file.write(memoryview(len(text).to_bytes(8, "little") + text))
        for piece in part:
            file.write(piece.tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return file.entry
