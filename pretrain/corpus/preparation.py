"""Text to a prepared set: sources -> units -> parts -> shards and their manifest.

A set is made of all of its sources or not at all, in their order. Its bytes depend on nothing but them and `Settings`: not on the
number of workers, parts or machines, nor on interruptions.
"""

import contextlib
import dataclasses
import errno
import fcntl
import glob
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from pretrain import __version__, shards
from pretrain.corpus import formats
from pretrain.corpus.documents import Bad
from pretrain.corpus.folder import PARTS, all_parts, locked, publish, refuse_foreign, tidy
from pretrain.corpus.hub import DatasetName, open_dataset
from pretrain.corpus.manifest import Settings, reusable
from pretrain.corpus.parts import Cut, Part, Unit, folder_of, share, tasks, uncut, units_of
from pretrain.corpus.sources import FORMATS, STDIN, CorpusError, Source, find_sources
from pretrain.corpus.tokenise import RECORD, Characters, Task, Tokenise, clean, is_blank, validates
from pretrain.corpus.workers import WorkerDied, cores, in_order
from pretrain.shards import ShardError
from pretrain.tokenization import Tokenizer, TokenizerError, cuts_at_lines, identify, load


def prepare(sources: Sequence[str], output: Path, settings: Settings, *, workers: int | None = None, overwrite: bool = False,
            part: tuple[int, int] | None = None, format: str = "", dataset: DatasetName | None = None) -> tuple[dict[str, Any] | None, bool]:  # fmt: skip
    """Make the set `output`, or its part (i, n), of sources or of a dataset. Returns its manifest (None for a part), and whether it
    was there already.

    `settings.tokenizer` is a name that `tokenization.load` knows. `workers` (default: one per core) tokenise. Raises CorpusError.
    """
    settings.check()
    if workers is not None and workers < 1:
        raise CorpusError(f"--workers {workers}: expected 1 or more")
    if format and format not in FORMATS:
        raise CorpusError(f"--format {format[1:]}: expected one of {', '.join(known[1:] for known in FORMATS)}")
    if bool(sources) == bool(dataset):
        raise CorpusError("name either sources or a --dataset" + ", not both" * bool(sources))
    if part:
        _check_part(part, sources, settings, dataset)
    with _told(output), _spooled(sources, output) as spool:
        found, ignored = ([open_dataset(dataset)], 0) if dataset else find_sources(sources, spool, format)
        identified = dataclasses.replace(settings, tokenizer=identify(settings.tokenizer))
        if not overwrite and (manifest := reusable(output, identified, found)):
            tidy(output)
            return manifest, True
        refuse_foreign(output, part)
        work = _Work(found, ignored, identified, settings.tokenizer, workers or cores())
        if part:
            folder = folder_of(output / PARTS, *part)
            with _emptied(output / PARTS), locked(folder):
                if not overwrite and (manifest := reusable(output, identified, found)):  # merged while we waited
                    return manifest, True
                _make_part(folder, work, *part).finish()
            return None, False
        with locked(output):
            if not overwrite and (manifest := reusable(output, identified, found)):  # made while we waited
                return manifest, True
            folder = folder_of(output / PARTS, 1, 1)
            try:
                made = _make_part(folder, work, 1, 1)
                return publish([made], output, work.workers), False
            except CorpusError as error:
                if not isinstance(error.__cause__, (WorkerDied, MemoryError)):  # after which the same command goes on
                    shutil.rmtree(output / PARTS, ignore_errors=True)
                raise


def merge(output: Path, workers: int | None = None, overwrite: bool = False) -> dict[str, Any]:
    """Make the set of the parts that `prepare` with `part` has made of it. Returns its manifest. Raises CorpusError, PartsMissing."""
    with _told(output):
        if not (output / PARTS).is_dir() and not (output / shards.MANIFEST).exists():
            raise CorpusError(f"{output} holds no parts; make them with pretrain prepare … --output {output} --part 1/8, 2/8 and so on")
        with locked(output):
            finished = shards.read_manifest(output)
            if finished and not (output / PARTS).exists():  # merged already, or while we waited
                return finished
            if finished and not overwrite:
                raise CorpusError(f"{output} holds a finished set beside the parts; add --overwrite to replace it")
            return publish(all_parts(output / PARTS), output, workers or cores())


@contextlib.contextmanager
def _told(output: Path) -> Iterator[None]:
    """What the system and the other modules raise, as one line for the user."""
    try:
        yield
    except (TokenizerError, ShardError) as error:
        raise CorpusError(str(error)) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise CorpusError(f"{error.filename or output}: {error.strerror or error}") from error
        free = shutil.disk_usage(next(place for place in (output, *output.absolute().parents) if place.exists())).free
        kept = "what was tokenised is kept: free some space and run the same command to go on" if (output / PARTS).exists() else "free some"
        raise CorpusError(f"{output}: no space left ({free:,} bytes free); {kept}, or choose an --output on another disk") from error


@contextlib.contextmanager
def _emptied(folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # where nothing is left in it


def _check_part(part: tuple[int, int], sources: Sequence[str], settings: Settings, dataset: DatasetName | None) -> None:
    number, parts = part
    if not 1 <= number <= parts:
        raise CorpusError(f"--part {number}/{parts}: expected a part from 1/{parts} to {parts}/{parts}")
    if settings.val_split == "tail" and settings.val_fraction:
        raise CorpusError("--val-split tail needs the whole text, and a part reads its share alone; use --val-split hash")
    if settings.tokenizer.startswith("train:"):
        raise CorpusError(f"--tokenizer {settings.tokenizer} would be trained by each part; train it once, and name the folder of that set")
    if dataset and dataset.streaming:
        raise CorpusError("a streamed dataset is read from its start and can't be shared between parts; leave out --streaming")
    if STDIN in sources:
        raise CorpusError("standard input can't be shared between parts; write it to a file first")


@contextlib.contextmanager
def _spooled(sources: Sequence[str], output: Path) -> Iterator[Path | None]:
    """Standard input as a file beside the set, as long as it is needed: a preparation reads more than once."""
    if STDIN not in sources:
        yield None
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    path = output.parent / f".{output.name}.stdin.{os.getpid()}"
    try:
        with open(path, "wb") as file:
            with contextlib.suppress(OSError):  # a file system without locks keeps them all
                fcntl.flock(file, fcntl.LOCK_EX)
            _clear_spools(output)
            shutil.copyfileobj(sys.stdin.buffer, file)
            file.flush()
            yield path
    finally:
        path.unlink(missing_ok=True)


def _clear_spools(output: Path) -> None:
    """Of processes that were killed: their locks are free."""
    for path in output.parent.glob(f".{glob.escape(output.name)}.stdin.*"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


@dataclass(frozen=True)
class _Work:
    """What all parts of a preparation share."""

    sources: Sequence[Source]
    ignored: int
    settings: Settings
    tokenizer: str  # the name to load it by
    workers: int

    @property
    def skip_bad(self) -> bool:
        return self.settings.on_bad == "skip"

    @property
    def fragments(self) -> bool:
        return cuts_at_lines(self.tokenizer)

    def tasks(self, units: Sequence[Unit], cut: Cut = uncut) -> Iterator[Task]:
        """Of all units, in order."""
        return tasks(units, range(len(units)), self.sources, self.settings.reading, self.fragments, {}, cut)

    def refusal(self, source: int, place: str, message: str) -> CorpusError:
        return CorpusError(f"{formats.locate(self.sources[source], place)}: {message}")

    def plan(self, tokenizer: Tokenizer, number: int, parts: int) -> dict[str, Any]:
        return {
            "settings": dataclasses.asdict(self.settings),
            "sources": [dataclasses.asdict(source) for source in self.sources],
            "ignored_files": self.ignored,
            "tokenizer": tokenizer.identity(),
            "eos_id": tokenizer.eos_id,
            "vocab_size": tokenizer.vocab_size,
            "token_bytes": shards.token_dtype(tokenizer.vocab_size).itemsize,
            "record_bytes": RECORD.itemsize,
            "version": __version__,
            "parts": parts,
            "part": number,
        }


def _make_part(folder: Path, work: _Work, number: int, parts: int) -> Part:
    """Tokenise what is still missing of a part."""
    settings, reading = work.settings, work.settings.reading
    units = units_of(work.sources, reading)
    cut = _cut(work, units)
    tokenizer = load(work.tokenizer, _training_texts(work, units, cut))
    made = Part.open(folder, work.plan(tokenizer, number, parts))
    made.forget(work.sources)
    if not made.has_tokenizer():
        shutil.rmtree(folder / "tokenizer", ignore_errors=True)
        tokenizer.save(folder / "tokenizer")
    dtype = shards.token_dtype(tokenizer.vocab_size)
    tokenise = Tokenise(tokenizer, dtype, reading, settings.val_fraction, work.skip_bad, work.fragments, folder)
    mine = share(units, number, parts)
    todo = tasks(units, mine, work.sources, reading, work.fragments, made.done, cut)
    if len(mine) == 1 and not units[mine[0]].stream:
        work = dataclasses.replace(work, workers=1)  # a single task: starting workers would take longer
    for _, result in _run(tokenise, todo, work, "tokens", [units[unit] for unit in mine]):
        made.add(result)
    for unit in mine:
        for source in units[unit].sources:
            if work.sources[source].changed():
                raise _changed(work.sources[source])
    return made


def _changed(source: Source) -> CorpusError:
    return CorpusError(f"{source.path} changed while it was being read; run the same command again")


def _run(
    do: Callable[[Task], dict[str, Any]], todo: Iterator[Task], work: _Work, what: str, units: Sequence[Unit]
) -> Iterator[tuple[Task, dict[str, Any]]]:
    """Each task with its result, in order. Raises CorpusError for the first one that failed."""
    from tqdm import tqdm

    total = sum(unit.bytes for unit in units)
    with tqdm(desc=what, total=total, unit="B", unit_scale=True, disable=None) as bar:  # None: only on a terminal
        try:
            with contextlib.closing(in_order(do, todo, work.workers)) as results:
                for task, result in results:
                    if error := result.get("error"):
                        raise work.refusal(*error)
                    yield task, result
                    bar.update(task.bytes)
        except WorkerDied as error:
            first, last = (f"{path}{place}" for path, place in error.item.ends())
            raise CorpusError(f"{error} at {first} to {last}; if memory ran out, use fewer --workers") from error
        except MemoryError as error:
            raise CorpusError("memory ran out; use fewer --workers") from error


def _cut(work: _Work, units: Sequence[Unit]) -> Cut:
    """Where validation begins with `--val-split tail`, in characters from the start of a task, by nanoGPT's rule. A pass over the text."""
    settings = work.settings
    if settings.val_split == "hash" or not settings.val_fraction:
        return uncut
    counted = _run(Characters(settings.reading, work.skip_bad, work.fragments), work.tasks(units), work, "characters", units)
    counts = {(task.unit, task.number): result["characters"] for task, result in counted}
    before: dict[tuple[int, int], int] = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
    cut: int = int(sum(counts.values()) * (1 - settings.val_fraction))

    def left(unit: int, number: int) -> int:
        if (unit, number) not in before:
            raise _changed(work.sources[units[unit].sources[-1]])
        return cut - before[unit, number]

    return left


def _training_texts(work: _Work, units: Sequence[Unit], cut: Cut) -> Iterator[str]:
    """What a tokenizer may be trained on."""
    for task in work.tasks(units, cut):
        before = 0
        for number, found in task.read(work.settings.reading, work.fragments):
            if isinstance(found, Bad):
                if not work.skip_bad:
                    raise work.refusal(number, found.place, found.message)
                continue
            if is_blank(found):
                continue
            text = clean(found.text)
            if task.cut is not None:
                yield text[: max(task.cut - before, 0)]
            elif not validates(found, text.encode(), work.settings.val_fraction):
                yield text
            before += len(text)
