"""A preparation cut into units, and a part: the units of one process or array task, with a journal of what is done.

The units depend on the sources alone, and a part is a run of them, so that parts put one after the other are the whole, whoever made
them. A part is a folder that one process writes: nothing is locked or shared between machines, and one that was interrupted goes on
after its last whole task.
"""

import contextlib
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from pretrain.corpus import formats
from pretrain.corpus.documents import Document, Found, Reading
from pretrain.corpus.hub import read_dataset
from pretrain.corpus.sources import BLOCK, DATASET, STDIN, Source, block_hashes
from pretrain.corpus.tokenise import RECORD, SPLITS, Task

PLAN, JOURNAL, FINISHED = "plan.json", "journal.jsonl", "finished"
BATCH = 1 << 20  # characters of documents that this process reads for the workers
BATCH_DOCUMENTS = 8192

Result = dict[str, Any]
Cut = Callable[[int, int], int | None]  # (unit, number) -> characters of the task to train on


@dataclass(frozen=True)
class Unit:
    """Small sources together, a range of a large one, or a large one that only reads from its start."""

    sources: Sequence[int]
    start: int = 0
    stop: int | None = None  # None: whole
    stream: bool = False
    at: int = 0  # bytes of all sources before it
    bytes: int = 0


def units_of(sources: Sequence[Source], reading: Reading) -> list[Unit]:
    units: list[Unit] = []
    small: list[int] = []
    held = at = 0

    def together() -> None:
        nonlocal small, held
        if small:
            units.append(Unit(tuple(small), at=at - held, bytes=held))
        small, held = [], 0

    for number, source in enumerate(sources):
        if held + source.bytes > BLOCK or len(small) >= BATCH_DOCUMENTS:
            together()
        if source.format == DATASET:
            units += _row_units(number, source, at)
        elif source.bytes <= BLOCK:
            small.append(number)
            held += source.bytes
        elif formats.has_ranges(source, reading):
            for start in range(0, source.bytes, BLOCK):
                stop = min(start + BLOCK, source.bytes)
                units.append(Unit((number,), start, stop, at=at + start, bytes=stop - start))
        else:
            units.append(Unit((number,), stream=True, at=at, bytes=source.bytes))
        at += source.bytes
    together()
    return units


def _row_units(number: int, source: Source, at: int) -> list[Unit]:
    if not source.rows:
        return [Unit((number,), stream=True, at=at, bytes=source.bytes)]
    step = max(1, source.rows * BLOCK // source.bytes)
    starts = range(0, source.rows, step)
    size = source.bytes * step // source.rows
    return [Unit((number,), start, min(start + step, source.rows), True, at + k * size, size) for k, start in enumerate(starts)]


def share(units: Sequence[Unit], part: int, parts: int) -> range:
    """The units of part 1, 2 … `parts`: those that begin in its share of the bytes."""
    total = sum(unit.bytes for unit in units)
    mine = [number for number, unit in enumerate(units) if min(unit.at * parts // max(total, 1), parts - 1) == part - 1]
    return range(mine[0], mine[-1] + 1) if mine else range(0)


def uncut(unit: int, number: int) -> int | None:
    """The split is by hash."""
    return None


def tasks(units: Sequence[Unit], mine: Iterable[int], sources: Sequence[Source], reading: Reading, fragments: bool,
          done: Mapping[tuple[int, int], Result], cut: Cut) -> Iterator[Task]:  # fmt: skip
    """What is still to do, in order."""
    finished = _finished(done)
    for number in mine:
        unit = units[number]
        named = [(source, sources[source]) for source in unit.sources]
        if not unit.stream:
            if (number, 0) not in done:
                yield Task(number, 0, True, named, unit.start, unit.stop, cut=cut(number, 0))
            continue
        if number in finished:
            continue
        ((source, opened),) = named
        hashes = [(source, 0, list(block_hashes(opened)))]
        documents = (
            read_dataset(opened, reading, unit.start, unit.stop) if opened.format == DATASET else formats.read(opened, reading, fragments)
        )
        for k, (found, last) in enumerate(_batches(documents)):
            if (number, k) not in done:
                yield Task(number, k, last, named, found=found, blocks=hashes if last or not k else (), cut=cut(number, k))


def _finished(done: Mapping[tuple[int, int], Result]) -> set[int]:
    """The units of which no task is missing, from the first to the last: a crash may have taken any of them."""
    counts = Counter(unit for unit, _ in done)
    return {unit for (unit, number), result in done.items() if result["last"] and counts[unit] == number + 1}


def _batches(documents: Iterable[Found]) -> Iterator[tuple[list[Found], bool]]:
    """(documents, whether they are the last ones)"""
    held: list[Found] = []
    characters = 0
    for found in documents:
        if characters >= BATCH or len(held) == BATCH_DOCUMENTS:
            yield held, False
            held, characters = [], 0
        held.append(found)
        characters += len(found.text) if isinstance(found, Document) else 0
    yield held, True


class Part:
    """Its folder: plan, journal, and the files of the workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan: dict[str, Any] = json.loads((folder / PLAN).read_text("utf-8"))
        self.finished = (folder / FINISHED).exists()
        self.done = self._read()

    @classmethod
    def open(cls, folder: Path, plan: Mapping[str, Any]) -> "Part":
        """Go on with a part of the same plan, or begin it anew."""
        try:
            same = decisive(json.loads((folder / PLAN).read_text("utf-8"))) == decisive(json.loads(json.dumps(plan)))
        except (OSError, ValueError):
            same = False
        folder.mkdir(parents=True, exist_ok=True)
        for old in () if same else folder.iterdir():
            if old.is_dir():
                shutil.rmtree(old)
            elif not old.name.startswith("."):
                old.unlink()
        _write(folder / PLAN, json.dumps(plan))
        return cls(folder)

    def add(self, result: Result) -> None:
        """The journal has a line when all that it tells of is written."""
        with open(self.folder / JOURNAL, "a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        self.done[result["unit"], result["number"]] = result

    def finish(self) -> None:
        """Nothing more will be done, or go wrong. A journal with all units in it doesn't say so: a part may have none to do."""
        (self.folder / FINISHED).touch()

    def missing(self, units: range) -> int:
        """How many of the units are not finished."""
        finished = _finished(self.done)
        return sum(unit not in finished for unit in units)

    def forget(self, sources: Sequence[Source]) -> None:
        """Leave out what was made of bytes that have changed since, or of which nothing tells that they have not.

        The journal is then of what is left alone: a torn line would spoil the next, and an old result of a larger number stay.
        """
        known, stale = set(), set()
        for (unit, _), result in self.done.items():
            for number, first, hashes in result["blocks"]:
                known.add(unit)
                if list(islice(block_hashes(sources[number], first * BLOCK), len(hashes))) != hashes:
                    stale.add(unit)
        left = {key: result for key, result in self.done.items() if key[0] in known - stale}
        if len(left) < len(self.done):
            (self.folder / FINISHED).unlink(missing_ok=True)
        self.done = left
        path, journal = self.folder / JOURNAL, "".join(json.dumps(result) + "\n" for result in left.values())
        if path.exists() and path.read_bytes() != journal.encode():
            _write(path, journal)

    def has_tokenizer(self) -> bool:
        """Whether the one that it was tokenised with is saved in it."""
        try:
            saved = (self.folder / "tokenizer" / "tokenizer.json").read_bytes()
        except OSError:
            return False
        expected: str = self.plan["tokenizer"]["sha256"]
        return hashlib.sha256(saved).hexdigest() == expected

    def in_order(self) -> list[Result]:
        return [self.done[key] for key in sorted(self.done)]

    def _read(self) -> dict[tuple[int, int], Result]:
        """What the journal tells and the files hold. A torn line, or tokens that a crash of the machine lost, count as not done."""
        done: dict[tuple[int, int], Result] = {}
        with contextlib.suppress(FileNotFoundError), open(self.folder / JOURNAL, "rb") as file:
            for line in file:
                try:
                    result = json.loads(line)
                except ValueError:
                    continue
                if self._holds(result):
                    done[result["unit"], result["number"]] = result  # a later one is of newer bytes
        return done

    def _holds(self, result: Result) -> bool:
        """Whether the tokens of a result are there, and are those that were written."""
        size = RECORD.itemsize
        for span in result["spans"]:
            width = self.plan["token_bytes"]
            first = span[SPLITS[0]][0]
            count = (span[SPLITS[0]][1] + span[SPLITS[1]][1]) * width + span["records"][1] * size
            try:
                with open(self.folder / result["file"], "rb") as file:
                    file.seek(first)
                    if xxhash.xxh3_64_intdigest(file.read(count)) != span["check"][0]:
                        return False
            except OSError:
                return False
        return True


def decisive(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What of a plan decides the tokens: neither files that are not read, nor where and when standard input was written to a file."""
    sources = [source | {"file": "", "modified": 0} if source["path"] == STDIN else source for source in plan["sources"]]
    return {**plan, "ignored_files": 0, "sources": sources}


def _write(path: Path, text: str) -> None:
    """At once or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, "utf-8")
    temporary.rename(path)


def folder_of(parts_folder: Path, part: int, parts: int) -> Path:
    return parts_folder / f"{part:05d}-of-{parts:05d}"
