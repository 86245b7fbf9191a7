"""Parts -> token files: duplicates are found, and the tokens put into shards in the order of the sources, by several workers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.corpus.parts import Part
from pretrain.corpus.tokenise import RECORD, SPLITS
from pretrain.corpus.workers import in_order
from pretrain.shards import ShardWriter

AT_ONCE = 8 << 20  # documents compared with each other at a time: about 300 MB
COPIED = 16 << 20  # bytes copied at a time


@dataclass(frozen=True)
class Run:
    """Tokens that follow each other in a file of a worker."""

    path: Path
    first: int  # byte
    tokens: int


@dataclass(frozen=True)
class Assembled:
    splits: dict[str, dict[str, int]]  # documents, tokens, bytes of each
    files: dict[str, list[dict[str, Any]]]  # the manifest's rows
    duplicates: int  # documents whose text an earlier one has


def assemble(parts: Sequence[Part], folder: Path, dtype: np.dtype[Any], shard_tokens: int, deduplicate: bool, workers: int) -> Assembled:
    """Write the shards into `folder`. Where duplicates are dropped, the first of equal documents stays."""
    spans = [(part.folder / result["file"], span) for part in parts for result in part.in_order() for span in result["spans"]]
    repeated = _repeated(spans)
    splits = {split: {"documents": 0, "tokens": 0, "bytes": 0} for split in SPLITS}
    runs: dict[str, list[Run]] = {split: [] for split in SPLITS}
    before, last = 0, False
    for path, span in spans:
        records = _records(path, span)
        again = _carried(repeated[before : before + len(records)], records["first"], last)
        before, last = before + len(records), bool(again[-1])
        for index, split in enumerate(SPLITS):
            mine = records["split"] == index
            dropped = again[mine] if deduplicate else np.zeros(int(mine.sum()), bool)
            kept = records[mine][~dropped]
            for key, column in (("documents", "begins"), ("tokens", "tokens"), ("bytes", "bytes")):
                splits[split][key] += int(kept[column].sum(dtype=np.int64))
            runs[split] += _kept_runs(path, span[split][0], dtype.itemsize, records["tokens"][mine], dropped)
    files: dict[str, list[dict[str, Any]]] = {}
    for split in SPLITS:
        wanted = list(_shards(runs[split], shard_tokens, dtype.itemsize))
        write = _WriteShard(folder, split, dtype, shard_tokens)
        files[split] = [row for _, row in in_order(write, iter(enumerate(wanted)), min(workers, max(1, len(wanted))))]
    return Assembled(splits, files, int(repeated.sum()))


def _records(path: Path, span: Mapping[str, Any]) -> npt.NDArray[Any]:
    first, count = span["records"]
    return np.fromfile(path, RECORD, count, offset=first)


def _repeated(spans: Sequence[tuple[Path, Mapping[str, Any]]]) -> npt.NDArray[np.bool_]:
    """For the first piece of each document whether an earlier document has the same text; False for the others.

    In bounded memory, whatever their number: those whose hashes end alike are compared with each other, one such share after the other.
    """
    total = sum(span["records"][1] for _, span in spans)
    repeated = np.zeros(total, bool)
    passes = -(-total // AT_ONCE)
    for remainder in range(passes):
        hashes, indices = [], []
        before = 0
        for path, span in spans:
            records = _records(path, span)
            found = records["hash"]
            mine = np.flatnonzero(records["first"] & (found[:, 1] % np.uint64(passes) == remainder))
            hashes.append(found[mine])
            indices.append(mine + before)
            before += len(found)
        both, index = np.concatenate(hashes), np.concatenate(indices)
        order = np.lexsort((both[:, 1], both[:, 0]))  # stable: equal ones stay in the order of the sources
        both, index = both[order], index[order]
        repeated[index[1:][(both[1:] == both[:-1]).all(1)]] = True
    return repeated


def _carried(found: npt.NDArray[np.bool_], first: npt.NDArray[np.bool_], last: bool) -> npt.NDArray[np.bool_]:
    """What is so of the first piece of each document, for all of its pieces; `last`: of the document before."""
    latest = np.maximum.accumulate(np.where(first, np.arange(1, len(first) + 1), 0))
    return np.concatenate([[last], found])[latest]


def _kept_runs(path: Path, first: int, width: int, tokens: npt.NDArray[np.uint32], dropped: npt.NDArray[np.bool_]) -> list[Run]:
    """What is left of a span: one run, or those between the documents that are dropped."""
    ends = np.cumsum(tokens, dtype=np.int64)
    starts = ends - tokens
    edges = np.flatnonzero(np.diff(np.concatenate([[True], dropped, [True]]).astype(np.int8)))
    pairs = zip(edges[::2], edges[1::2], strict=True)  # of documents, kept from the first to before the second
    return [Run(path, first + int(starts[a]) * width, int(ends[b - 1] - starts[a])) for a, b in pairs]


def _shards(runs: Sequence[Run], shard_tokens: int, width: int) -> Iterator[list[Run]]:
    held: list[Run] = []
    room = shard_tokens
    for run in runs:
        first, left = run.first, run.tokens
        while left:
            taken = min(left, room)
            held.append(Run(run.path, first, taken))
            first, left, room = first + taken * width, left - taken, room - taken
            if not room:
                yield held
                held, room = [], shard_tokens
    if held:
        yield held


@dataclass(frozen=True)
class _WriteShard:
    """Goes to the workers by pickle."""

    folder: Path
    split: str
    dtype: np.dtype[Any]
    shard_tokens: int

    def __call__(self, shard: tuple[int, Sequence[Run]]) -> dict[str, Any]:
        number, runs = shard
        writer = ShardWriter(self.folder, self.split, self.dtype, self.shard_tokens, first=number)
        width = self.dtype.itemsize
        for run in runs:
            for start in range(0, run.tokens, COPIED // width):
                count = min(run.tokens - start, COPIED // width)
                writer.append(np.fromfile(run.path, self.dtype, count, offset=run.first + start * width))
        (row,) = writer.close()
        return row
