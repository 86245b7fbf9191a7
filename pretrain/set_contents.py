"""What is in the tokens of a split: how often each id, how long the documents, where a text. One pass over maps, in bounded memory."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.shards import TokenStream
from pretrain.token_bytes import TokenBytes
from pretrain.token_files import DocumentEnds, Int64s, ShardError, document_ends

CHUNK = 1 << 20  # tokens at a time
HITS = 10  # of a text that are shown
_LARGEST_VOCABULARY = 1 << 24  # above which a number is no token id, if nothing else is known of the set


class Documents:
    """Where the documents of a stream end: by the files' own index where all have one, else by the end-of-text token.

    That token ends a document, or, where a stream begins with it (as karpathy's scripts for FineWeb write it), begins one. It counts as
    a token of its document.
    """

    def __init__(self, stream: TokenStream, eos_id: int | None) -> None:
        self.stream, self.eos_id = stream, eos_id
        found = [document_ends(shard) for shard in stream.shards]
        self.index: Sequence[DocumentEnds] = [ends for ends in found if ends is not None] if None not in found else ()
        self.marked = bool(self.index) or eos_id is not None
        self._offset = 1
        if not self.index and stream.tokens and int(stream.read(0, 1)[0]) == eos_id:
            self._offset = 0

    def ends(self, start: int, stop: int) -> Int64s:
        """Positions in (start, stop] before which a document ends, in order; for start = 0 also those of empty documents at 0."""
        parts = self._indexed(start, stop) if self.index else self._of_eos(start, stop) if self.eos_id is not None else []
        return np.concatenate([np.empty(0, np.int64), *parts])

    def numbers(self, tokens: Sequence[int]) -> list[int]:
        """Of the documents that hold these tokens, which ascend; the first document is 0."""
        if self.index:
            files = list(zip(self.index, self.stream.starts, strict=False))
            return [sum(ends.before(int(token - start)) for ends, start in files if start <= token) for token in tokens]
        found, number, passed = list[int](), 0, 0
        for token in tokens:
            number += sum(len(self.ends(at, min(at + CHUNK, token))) for at in range(passed, token, CHUNK))
            found.append(number)
            passed = token
        return found

    def _indexed(self, start: int, stop: int) -> list[Int64s]:
        found = list[Int64s]()
        for ends, begin, end in zip(self.index, self.stream.starts, self.stream.starts[1:], strict=False):
            if begin < stop and end > start:
                first = ends.before(int(start - begin)) if start > begin else 0
                last = ends.before(int(min(stop, end) - begin))
                found.extend([ends.at(first, last) + begin] if last > first else ())
        return found

    def _of_eos(self, start: int, stop: int) -> list[Int64s]:
        late = 1 - self._offset  # a token that begins a document ends the one before it, one position earlier
        parts = self.stream.parts(start + late, min(stop + late, self.stream.tokens), CHUNK)
        return [np.flatnonzero(part == self.eos_id) + at + self._offset for at, part in parts]


@dataclass
class Contents:
    tokens: int  # looked at
    counts: Int64s  # (largest id + 1,): how often each id occurs
    lengths: Counter[int] = field(default_factory=Counter)  # tokens of a document -> how many documents

    @property
    def documents(self) -> int:
        return self.lengths.total()

    def length_at(self, share: float) -> int:
        """The length that this share of the documents does not exceed."""
        ordered = sorted(self.lengths)
        passed = np.cumsum([self.lengths[n] for n in ordered])
        return ordered[int(np.searchsorted(passed, share * passed[-1]))]


def scan(stream: TokenStream, documents: Documents, vocab_size: int | None, limit: int) -> Contents:
    """Of the first `limit` tokens. Raises ShardError at an id outside the vocabulary and at an index that contradicts itself.

    Distinct lengths are few, whatever the split: n of them need n²/2 tokens.
    """
    contents = Contents(min(limit, stream.tokens), np.zeros(0, np.int64))
    begun = 0  # where the document under way begins
    for start in range(0, contents.tokens, CHUNK):
        stop = min(start + CHUNK, contents.tokens)
        for at, part in stream.parts(start, stop, CHUNK):
            check_ids(stream, at, part, vocab_size)
            counts = np.bincount(part.astype(np.int64, copy=False), minlength=len(contents.counts))
            counts[: len(contents.counts)] += contents.counts
            contents.counts = counts
        ends = documents.ends(start, stop)
        if len(ends):
            contents.lengths.update(_tally(np.diff(ends, prepend=begun)))
            begun = int(ends[-1])
    if documents.marked and begun < contents.tokens == stream.tokens:
        contents.lengths[stream.tokens - begun] += 1
    return contents


def _tally(lengths: Int64s) -> dict[int, int]:
    values, counts = np.unique(lengths, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def check_ids(stream: TokenStream, start: int, part: npt.NDArray[Any], vocab_size: int | None) -> None:
    """`part` are the tokens from `start`, not none. Raises ShardError where one is negative, or not below the size of the vocabulary."""
    if part.max() >= (vocab_size or _LARGEST_VOCABULARY) or part.min() < 0:
        at = int(part.argmin() if part.min() < 0 else part.argmax())
        bound = f"a vocabulary of {vocab_size:,}" if vocab_size else "any vocabulary"
        raise ShardError(f"{stream.where(start + at)}: token id {part[at]:,} is outside {bound}; is this the set that it is said to be?")


@dataclass(frozen=True)
class Found:
    count: int  # occurrences that do not overlap
    first: Sequence[int]  # the tokens in which the first ones begin


def find(stream: TokenStream, table: TokenBytes, text: bytes, limit: int) -> Found:
    """`text` in the first `limit` tokens, within documents, across borders of tokens and files.

    Only tokens that an occurrence can touch are decoded; one other token after a row of those keeps apart what does not belong together.
    """
    touches, apart = table.touches(text), TokenBytes("", 0, [*table.pieces, b"\xff"])  # no byte of UTF-8
    pattern, count, first = re.compile(re.escape(text)), 0, list[int]()
    ids, at, searched = np.empty(0, np.int64), np.empty(0, np.int64), 0  # of what is carried over; bytes of it that are done with
    for start, part in stream.parts(0, min(limit, stream.tokens), CHUNK):
        check_ids(stream, start, part, table.vocab_size)
        touched = touches[part]
        kept = np.flatnonzero(touched | np.concatenate([[True], touched[:-1]]))
        ids = np.concatenate([ids, np.where(touched[kept], part[kept], table.vocab_size)])
        at = np.concatenate([at, kept + start])
        ends = np.cumsum(apart.lengths[ids])
        for match in pattern.finditer(apart.decode(ids), searched):
            count, searched = count + 1, match.end()
            if len(first) < HITS:
                first.append(int(at[np.searchsorted(ends, match.start(), "right")]))
        carried = max(0, len(ids) - (len(text) - 1))  # each has a byte or more
        searched = max(0, searched - (int(ends[carried - 1]) if carried else 0))
        ids, at = ids[carried:], at[carried:]
    return Found(count, first)
