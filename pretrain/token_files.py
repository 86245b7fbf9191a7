"""Files of token ids, ours and other people's. A format is recognised by content and name and never guessed: what is not what it
claims to be raises ShardError with the numbers. Opening reads headers and sizes alone, whatever the size.
"""

import bisect
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HEADER = 256
MAGIC: dict[int, tuple[int, np.dtype[Any]]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
SUFFIXES = (".bin", ".npy", ".ds")
_MEGATRON_MAGIC, _MEGATRON_HEADER = b"MMIDIDX\x00\x00", 34
_MEGATRON_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floating point

Int64s = npt.NDArray[np.int64]


class ShardError(ValueError):
    """A file that is not what it claims to be: names the file and the numbers."""


@dataclass(frozen=True)
class Shard:
    path: Path
    dtype: np.dtype[Any]
    offset: int  # bytes before the first token
    tokens: int
    format: str


@dataclass(frozen=True)
class DocumentEnds:
    """Where the documents of a file end, for formats that keep it beside the tokens. Nothing is read before it is asked for."""

    documents: int
    at: Callable[[int, int], Int64s]  # of documents [i, j), as tokens from the start of the file; raises ShardError

    def before(self, token: int) -> int:
        """Documents that end at `token` or before."""
        return bisect.bisect_right(range(self.documents), token, key=lambda i: int(self.at(i, i + 1)[0]))


def open_shard(path: Path) -> Shard:
    """A file of any format that is read. Raises ShardError where it is of none, or damaged."""
    if path.suffix == ".npy":
        return _open_npy(path)
    if path.suffix == ".ds":
        return _open_datatrove(path)
    if path.suffix in (".bin", ".idx") and path.with_suffix(".idx").exists():
        return _open_megatron(path.with_suffix(".bin"))
    if _first_words(path)[0] in MAGIC:
        return open_llm_c(path)
    if path.name in ("train.bin", "val.bin"):
        return _open_nanogpt(path)
    raise ShardError(
        f"{path} is in none of the formats that are read: {_unlike_a_header(path)}, and it is not called as other formats' files"
    )


def document_ends(shard: Shard) -> DocumentEnds | None:
    """None where the format marks documents in the tokens alone."""
    if shard.format == "Megatron":
        return _megatron_ends(shard)
    return _datatrove_ends(shard) if shard.format == "datatrove" else None


def open_llm_c(path: Path) -> Shard:
    """llm.c's shard, which modded-nanogpt reads and `pretrain prepare` writes: 256 little-endian int32 of header, then the tokens.
    uint16: header[0] = 20240520, header[1] = 1. uint32, for vocabularies above 65,536: header[0] = 20240801, header[1] = 7. header[2] is
    the number of tokens. Source: `dev/data/data_common.py` in karpathy/llm.c.
    """
    header = _first_words(path)
    if header[0] not in MAGIC:
        raise ShardError(f"{path} is damaged: {_unlike_a_header(path)}; prepare or copy it again")
    version, dtype = MAGIC[header[0]]
    if header[1] != version:
        raise ShardError(f"{path} has version {header[1]} in its header; expected {version}")
    return _checked(Shard(path, dtype, 4 * HEADER, header[2], "llm.c"))


def _open_nanogpt(path: Path) -> Shard:
    """nanoGPT's `train.bin` and `val.bin`: uint16 tokens without a header, so their names are all that tells. A `meta.pkl` beside them is
    the vocabulary of its character sets; unpickling runs code, so it is left alone. Sources: `data/openwebtext/prepare.py` and
    `data/shakespeare_char/prepare.py` in karpathy/nanoGPT.
    """
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise ShardError(f"{path} has {size:,} bytes and no shard header: neither llm.c's format nor a row of uint16")
    words = _first_words(path)
    blank = len(words) == HEADER and not any(words[3:])
    if blank or any(size == 4 * HEADER + width * words[2] for width in (2, 4)):
        raise ShardError(f"{path} is damaged: the rest of a header is there, but {_unlike_a_header(path)}; prepare or copy it again")
    return Shard(path, np.dtype("<u2"), 0, size // 2, "nanoGPT")


def _open_npy(path: Path) -> Shard:
    """build-nanogpt's shard: numpy's own file of one row of integers (uint16 there, any width here). Sources: `fineweb.py` in
    karpathy/build-nanogpt; the header is numpy's, `numpy/lib/format.py`, whose object arrays (pickles) are refused.
    """
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    with open(path, "rb") as file:
        try:
            shape, _, dtype = read[np.lib.format.read_magic(file)](file)
        except (ValueError, KeyError) as error:
            raise ShardError(f"{path} has no header of numpy's ({' '.join(str(error).split())}); copy it again") from None
        offset = file.tell()
    if len(shape) != 1 or dtype.kind not in "iu":
        raise ShardError(f"{path} is an array of shape {shape} of {dtype}; expected one row of integers")
    return _checked(Shard(path, dtype, offset, shape[0], "npy"))


def _open_megatron(path: Path) -> Shard:
    """Megatron-LM's pair, `X.bin` of tokens alone and `X.idx`: MMIDIDX and two zero bytes; uint64 version, 1; one byte for the type of
    the tokens; uint64 number of sequences; uint64 number of document ends, the leading 0 included; then int32 lengths in tokens and
    int64 pointers in bytes of the sequences, and int64 ends of the documents in sequences. The stream is the `.bin`, in its order.
    Source: `megatron/core/datasets/indexed_dataset.py` in NVIDIA/Megatron-LM.
    """
    index = path.with_suffix(".idx")
    if not path.exists():
        raise ShardError(f"{path} is missing beside {index.name}; copy it again")
    dtype, lengths, pointers, ends = _megatron_index(index)
    size = path.stat().st_size
    covered = int(pointers[-1]) + int(lengths[-1]) * dtype.itemsize if len(pointers) else 0
    if covered != size or (len(pointers) and pointers[0] != 0):
        first = int(pointers[0]) if len(pointers) else 0
        raise ShardError(f"{index} has its sequences at bytes {first:,} to {covered:,}, {path.name} has {size:,} bytes; copy both again")
    if (int(ends[0]), int(ends[-1])) != (0, len(pointers)):
        raise ShardError(f"{index} has {len(pointers):,} sequences, its documents are {int(ends[0]):,} to {int(ends[-1]):,}; copy it again")
    return Shard(path, dtype, 0, size // dtype.itemsize, "Megatron")


def _megatron_index(index: Path) -> tuple[np.dtype[Any], Any, Any, Any]:
    """(type of the tokens, lengths, pointers, document ends), the three as maps."""
    size = index.stat().st_size
    with open(index, "rb") as file:
        head = file.read(_MEGATRON_HEADER)
    if not head.startswith(_MEGATRON_MAGIC) or len(head) < _MEGATRON_HEADER:
        raise ShardError(f"{index} starts with {head[:9]!r}; expected Megatron's {_MEGATRON_MAGIC!r}")
    version, code, sequences, ends = struct.unpack("<QBQQ", head[len(_MEGATRON_MAGIC) :])
    if version != 1 or code not in _MEGATRON_TYPES:
        known = ", ".join(map(str, _MEGATRON_TYPES))
        raise ShardError(f"{index} has version {version} and tokens of type {code}; expected version 1 and one of the types {known}")
    expected = _MEGATRON_HEADER + 12 * sequences + 8 * ends
    if size != expected or not ends:
        raise ShardError(
            f"{index} has {size:,} bytes; {sequences:,} sequences and {ends:,} document ends make {expected:,}: cut short, or multimodal"
        )
    at = (_MEGATRON_HEADER, _MEGATRON_HEADER + 4 * sequences, _MEGATRON_HEADER + 12 * sequences)
    parts = zip(at, ("<i4", "<i8", "<i8"), (sequences, sequences, ends), strict=True)
    lengths, pointers, documents = (_map(index, np.dtype(dtype), offset, count) for offset, dtype, count in parts)
    return np.dtype(_MEGATRON_TYPES[code]), lengths, pointers, documents


def _megatron_ends(shard: Shard) -> DocumentEnds:
    index = shard.path.with_suffix(".idx")
    dtype, lengths, pointers, ends = _megatron_index(index)

    def at(i: int, j: int) -> Int64s:
        sequences = np.asarray(ends[i : j + 1])
        if (np.diff(sequences) < 0).any():
            raise ShardError(f"{index}: among documents {i:,} to {j:,} one ends before it begins; copy it again")
        first, last = int(sequences[0]), int(sequences[-1])
        starts = np.append(pointers[first : last + 1], shard.tokens * dtype.itemsize)[: last + 1 - first]
        wrong = np.flatnonzero(np.diff(starts) != lengths[first:last].astype(np.int64) * dtype.itemsize)
        if len(wrong):
            k = first + int(wrong[0])
            raise ShardError(f"{index}: sequence {k:,} of {int(lengths[k]):,} tokens does not end where the next begins; copy it again")
        tokens: Int64s = starts[sequences[1:] - first] // dtype.itemsize
        return tokens

    return DocumentEnds(len(ends) - 1, at)


def _open_datatrove(path: Path) -> Shard:
    """datatrove's tokens, `X.ds`, of 2 bytes or 4 (vocabularies above 65,535); beside it `X.ds.index`, a uint64 for the end of each
    document in tokens, and `X.ds.metadata`, text: tokenizer and bytes per token with a | between (older ones: the tokenizer alone), then
    the number of tokens. `X.ds.loss` masks tokens out of the loss, which is refused. Source: `src/datatrove/pipeline/tokens/tokenizer.py`
    in huggingface/datatrove.
    """
    index, metadata, mask = (Path(f"{path}.{kind}") for kind in ("index", "metadata", "loss"))
    if mask.exists():
        raise ShardError(f"{mask} masks tokens out of the loss, which is not supported; move it away to train on all of {path.name}")
    counts, said = {}, None
    if index.exists():
        ends = _map(index, np.dtype("<u8"), 0, index.stat().st_size // 8)
        counts[index] = int(ends[-1]) if len(ends) else 0
    if metadata.exists():
        first, count, *_ = [*metadata.read_text("utf-8", "replace").splitlines(), "", ""]
        if not count.isdecimal():
            raise ShardError(f"{metadata}, line 2: expected the number of tokens, found {count!r}")
        counts[metadata] = int(count)
        said = int(first[-1]) if first.endswith(("|2", "|4")) else None
    if not counts:
        raise ShardError(f"{path} has neither {index.name} nor {metadata.name} beside it, which tell 2 bytes per token from 4")
    size, tokens = path.stat().st_size, max(counts.values())
    width = said or (4 if tokens and size == 4 * tokens else 2)
    if {size} != {width * count for count in counts.values()}:
        numbers = ", ".join(f"{source.name} says {count:,} tokens" for source, count in counts.items())
        raise ShardError(f"{path} has {size:,} bytes, {numbers} of {said or '2 or 4'} bytes: cut short or damaged; copy it again")
    return Shard(path, np.dtype(f"<u{width}"), 0, tokens, "datatrove")


def _datatrove_ends(shard: Shard) -> DocumentEnds | None:
    index = Path(f"{shard.path}.index")
    if not index.exists():
        return None
    ends = _map(index, np.dtype("<u8"), 0, index.stat().st_size // 8)

    def at(i: int, j: int) -> Int64s:
        with_one_before: Int64s = ends[max(i - 1, 0) : j].astype(np.int64)
        if (np.diff(with_one_before) < 0).any() or with_one_before[-1] > shard.tokens:
            raise ShardError(f"{index}: among documents {i:,} to {j:,} one ends before it begins, or after the tokens; copy it again")
        return with_one_before[min(i, 1) :]

    return DocumentEnds(len(ends), at)


def datatrove_tokenizer(shard: Shard) -> str | None:
    """The name in `X.ds.metadata`; None without one."""
    metadata = Path(f"{shard.path}.metadata")
    if shard.format != "datatrove" or not metadata.exists():
        return None
    name = re.sub(r"(\|\d)+$", "", metadata.read_text("utf-8", "replace").split("\n", 1)[0].strip())
    return name if name and name != "Unknown Tokenizer" else None


def tokens_of(shard: Shard) -> Any:
    """The tokens as a map."""
    return _map(shard.path, shard.dtype, shard.offset, shard.tokens)


def _map(path: Path, dtype: np.dtype[Any], offset: int, count: int) -> Any:
    return np.memmap(path, dtype, "r", offset, (count,)) if count else np.empty(0, dtype)  # an empty file cannot be mapped


def _first_words(path: Path) -> list[int]:
    """llm.c's header, or what is there of it; [0, 0, 0] for less than three words."""
    with open(path, "rb") as file:
        start = file.read(4 * HEADER)
    return np.frombuffer(start[: len(start) // 4 * 4], "<i4").tolist() if len(start) >= 12 else [0, 0, 0]


def _unlike_a_header(path: Path) -> str:
    if not path.stat().st_size:
        return "it is empty"
    return f"it starts with {_first_words(path)[0]}, not with llm.c's {' or '.join(map(str, MAGIC))}"


def _checked(shard: Shard) -> Shard:
    held = (shard.path.stat().st_size - shard.offset) / shard.dtype.itemsize
    if held != shard.tokens:
        raise ShardError(
            f"{shard.path} says {shard.tokens:,} tokens in its header but holds {held:,.10g}: cut short or damaged; prepare or copy it again"
        )
    return shard
