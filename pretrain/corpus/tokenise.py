"""Documents -> tokens, by a worker. What a worker makes stays in a file of its own; what it tells of it is a line of JSON.

A text of white space alone is skipped and counted; half a surrogate pair becomes U+FFFD and is counted; exactly one end-of-text token
follows each document. Validation takes a document by the hash of its text: duplicates stay together, and neither order nor other
documents matter. Or it takes what lies behind a number of characters (`Task.cut`), inside a document if need be.
"""

import functools
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from pretrain.corpus import formats
from pretrain.corpus.documents import Bad, Document, Found, Reading, WholeHash
from pretrain.corpus.sources import BLOCK, Source, block_hashes
from pretrain.tokenization import Encode, Tokenizer

SPLITS = ("train", "val")
EXAMPLES = 5  # places told for each reason to skip
SPAN = 4 << 20  # tokens after which they are written
# Of each document, or piece of one: a hash of the document's text; what it adds to its split; whether it begins a document there, and
# whether it is a document's first piece (not so where the end of one is cut off for validation).
RECORD = np.dtype([("hash", "<u8", (2,)), ("tokens", "<u4"), ("bytes", "<u4"), ("split", "u1"), ("begins", "u1"), ("first", "?")])
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Task:
    """What a worker gets at a time: whole sources, a range of one, or documents that were read already."""

    unit: int
    number: int  # in its unit
    last: bool
    sources: Sequence[tuple[int, Source]]  # with their numbers
    start: int = 0
    stop: int | None = None  # None: whole sources
    found: Sequence[Found] | None = None  # None: the worker reads
    blocks: Sequence[tuple[int, int, Sequence[str]]] = ()  # (source, first block, hashes) where another process reads
    cut: int | None = None  # characters of it to train on; None: by hash

    def read(self, reading: Reading, fragments: bool) -> Iterator[tuple[int, Found]]:
        """(number of the source, document)"""
        for number, source in self.sources:
            if self.found is not None:
                documents: Iterator[Found] = iter(self.found)
            elif self.stop is None:
                documents = formats.read(source, reading, fragments)
            else:
                documents = formats.read_range(source, reading, self.start, self.stop)
            for found in documents:
                yield number, found

    @property
    def bytes(self) -> int:
        """Of sources, for a progress bar: those that this process reads count when the last is done."""
        if not self.last:
            return 0
        return sum(source.bytes for _, source in self.sources) if self.stop is None else self.stop - self.start

    def ends(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """(path, place) of where it begins and ends."""
        first, last = self.sources[0][1].path, self.sources[-1][1].path
        if self.found:
            return (first, self.found[0].place), (last, self.found[-1].place)
        return (first, f", byte {self.start:,}"), (last, f", byte {self.stop:,}" if self.stop else "")


def is_blank(found: Document) -> bool:
    """A fragment never is one: then all of its document would be."""
    return not found.fragment and found.last and (not found.text or found.text.isspace())


def clean(text: str) -> str:
    """Without halves of surrogate pairs, which have no UTF-8."""
    return _SURROGATE.sub("\ufffd", text)


def validates(found: Document, utf8: bytes, fraction: float) -> bool:
    """By the hash of the whole text."""
    return fraction > 0 and int.from_bytes((found.whole or WholeHash(utf8).digest())[:8]) / 2**64 < fraction


@dataclass
class _Gathered:
    """What a task has given so far."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    tokens: tuple[list[Any], list[Any]] = field(default_factory=lambda: ([], []))  # of training and validation
    records: list[tuple[Any, ...]] = field(default_factory=list)
    spans: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    held: int = 0  # tokens not written yet

    def note(self, reason: str, number: int, place: str) -> None:
        self.counts[reason] += 1
        if len(found := self.examples.setdefault(reason, [])) < EXAMPLES:
            found.append((number, place))


@dataclass(frozen=True)
class Tokenise:
    """Goes to the workers by pickle; its tokenizer and its file are made there."""

    tokenizer: Tokenizer
    dtype: np.dtype[Any]
    reading: Reading
    val_fraction: float
    skip_bad: bool
    fragments: bool  # of large documents, as `formats.read` has it
    folder: Path

    @functools.cached_property
    def encode(self) -> Encode:
        return self.tokenizer.encoder(self.dtype)

    @functools.cached_property
    def file(self) -> BinaryIO:
        """Named so that no other worker on any machine has the same."""
        name = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}.tokens"
        return open(self.folder / name, "xb")  # lives as long as the worker

    def __call__(self, task: Task) -> dict[str, Any]:
        """The result for the journal, or {"error": (number of the source, place, message)}."""
        gathered = _Gathered()
        characters = 0
        for number, found in task.read(self.reading, self.fragments):
            if isinstance(found, Bad):
                if not self.skip_bad:
                    return {"error": (number, found.place, found.message)}
                gathered.counts["read"] += 1
                gathered.note(found.reason, number, found.place)
                continue
            try:
                self._add(gathered, number, found, None if task.cut is None else task.cut - characters)
            except (KeyboardInterrupt, SystemExit, OSError, MemoryError):
                raise
            except BaseException as error:  # a panic in a tokenizer's Rust is no Exception
                reason = " ".join(str(error).split())[:200]
                return {"error": (number, found.place, f"the tokenizer failed ({reason}); take this document out")}
            characters += 0 if is_blank(found) else len(found.text)
            if gathered.held >= SPAN:
                self._write(gathered)
        self._write(gathered)
        return {
            "unit": task.unit,
            "number": task.number,
            "last": task.last,
            "file": os.path.basename(self.file.name),
            "spans": gathered.spans,
            "counts": gathered.counts,
            "examples": gathered.examples,
            "blocks": self._blocks(task),
        }

    def _blocks(self, task: Task) -> list[tuple[int, int, Sequence[str]]]:
        if task.found is not None:
            return list(task.blocks)
        if task.stop is None:
            return [(number, 0, list(block_hashes(source))) for number, source in task.sources]
        ((number, source),) = task.sources
        return [(number, task.start // BLOCK, [next(block_hashes(source, task.start))])]

    def _add(self, gathered: _Gathered, number: int, found: Document, cut: int | None) -> None:
        counts, text = gathered.counts, found.text
        counts["read"] += not found.fragment
        if is_blank(found):
            gathered.note("blank" if text else "empty", number, found.place)
            return
        try:
            utf8 = text.encode()
        except UnicodeEncodeError:
            gathered.note("lone surrogate", number, found.place)
            text = clean(text)
            utf8 = text.encode()
        whole, first = found.whole[8:] or xxhash.xxh3_128_digest(utf8), not found.fragment
        if cut is None:
            self._encode(gathered, validates(found, utf8, self.val_fraction), utf8, whole, first, first, found.last)
            return
        at = min(max(cut, 0), len(text))
        ends_training = 0 < cut <= len(text)
        if at:
            piece = text[:at].encode() if at < len(text) else utf8
            self._encode(gathered, False, piece, whole, first, first, found.last or ends_training)
        if at < len(text):
            piece = text[at:].encode() if at else utf8
            self._encode(gathered, True, piece, whole, first and not at, first or cut >= 0, found.last)

    def _encode(self, gathered: _Gathered, val: bool, utf8: bytes, whole: bytes, first: bool, begins: bool, ends: bool) -> None:
        ids = self.encode(utf8)
        gathered.tokens[val].append(ids)
        if ends:
            gathered.tokens[val].append(self._end)
        high, low = int.from_bytes(whole[:8]), int.from_bytes(whole[8:])
        gathered.records.append(((high, low), len(ids) + ends, len(utf8), val, begins, first))
        gathered.held += len(ids) + ends

    @functools.cached_property
    def _end(self) -> Any:
        return np.array([self.tokenizer.eos_id], self.dtype)

    def _write(self, gathered: _Gathered) -> None:
        """One after the other: tokens to train on, tokens to validate on, records. A span gives (first byte, how many) of each."""
        if not gathered.records:
            return
        digest, span = xxhash.xxh3_64(), {}
        parts = {
            split: np.concatenate(held) if held else np.empty(0, self.dtype) for split, held in zip(SPLITS, gathered.tokens, strict=True)
        }
        for name, array in (parts | {"records": np.array(gathered.records, RECORD)}).items():
            span[name] = (self.file.tell(), len(array))
            digest.update(array.data.cast("B") if len(array) else b"")
            self.file.write(array.data.cast("B") if len(array) else b"")
        self.file.flush()
        span["check"] = (digest.intdigest(), 0)
        gathered.spans.append(span)
        gathered.tokens = ([], [])
        gathered.records, gathered.held = [], 0


@dataclass(frozen=True)
class Characters:
    """Counts what a task would train or validate on, for a split by position. Goes to the workers by pickle."""

    reading: Reading
    skip_bad: bool
    fragments: bool

    def __call__(self, task: Task) -> dict[str, Any]:
        count = 0
        for number, found in task.read(self.reading, self.fragments):
            if isinstance(found, Document):
                count += 0 if is_blank(found) else len(found.text)
            elif not self.skip_bad:
                return {"error": (number, found.place, found.message)}
        return {"characters": count}
