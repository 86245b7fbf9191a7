"""The folder of a set: one preparation at a time, and a set in it that is whole or not there."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pretrain import shards
from pretrain.corpus.assemble import assemble
from pretrain.corpus.manifest import Settings, manifest_of, sources_of
from pretrain.corpus.parts import PLAN, Part, decisive, folder_of, share, units_of
from pretrain.corpus.sources import CorpusError
from pretrain.corpus.tokenise import RECORD, SPLITS
from pretrain.shards import MANIFEST

LOCK, PARTS, BUILDING = ".lock", ".parts", ".building"


def refuse_foreign(output: Path, part: tuple[int, int] | None) -> None:
    """Only a set, finished or begun, may be replaced. Looking in this order never refuses one that appears meanwhile."""
    holds_files = _holds_files(output)
    begun = any((output / name).exists() for name in (LOCK, PARTS))
    ours = _is_set(output) if (output / MANIFEST).exists() else begun
    if holds_files and not ours:
        raise CorpusError(f"{output} holds files that are no prepared set; choose another --output")
    others = [folder.name for folder in (output / PARTS).glob("*-of-*") if not folder.name.endswith("-of-00001")]
    if others and not part:
        raise CorpusError(
            f"{output} holds {len(others)} parts of an array job; pretrain merge {output} joins them (or delete {output / PARTS})"
        )


def _is_set(folder: Path) -> bool:
    """By its manifest, of whatever version: other programs, and our checkpoints, call theirs the same."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    except FileNotFoundError:  # its owner is replacing it
        return True
    except ValueError:  # damaged
        return any(folder.glob("train_*.bin"))
    return isinstance(manifest, dict) and {"format_version", "files", "splits", "tokenizer"} <= manifest.keys()


def tidy(output: Path) -> None:
    """Remove what a process that was killed just after it had published the set has left of its making: all of its tokens once more."""
    left = [output / BUILDING, folder_of(output / PARTS, 1, 1)]
    if any(path.exists() for path in left):
        with locked(output):
            for path in left:
                shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                (output / PARTS).rmdir()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only one to prepare `folder`; wait for another. The system frees the lock of a process that died.

    A file system without locks has none: there, nothing but the user keeps two processes from the same work.
    """
    path = folder / LOCK
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = open(path, "w")  # noqa: SIM115 — closed below
        except FileNotFoundError:
            continue  # the owner before us has just removed the folder, which was empty
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another preparation of {folder} to end", file=sys.stderr, flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
            if not path.exists() or not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                continue  # the owner before us has removed its file: others would lock a new one
            try:
                yield
            finally:
                # Files without a manifest keep their lock: it marks them as unfinished.
                if (folder / MANIFEST).exists() or not _holds_files(folder):
                    path.unlink(missing_ok=True)  # a part may have been merged already
                    with contextlib.suppress(OSError):
                        folder.rmdir()  # where nothing came of it
            return


def _holds_files(output: Path) -> bool:
    return output.is_dir() and any(not path.name.startswith(".") for path in output.iterdir())


class PartsMissing(CorpusError):
    """Some parts have still to be made, or finished."""


def all_parts(folder: Path) -> list[Part]:
    """Every part of an array job. Raises PartsMissing, or CorpusError where one is made of something else."""
    parts = [Part(path) for path in sorted(folder.glob("*-of-*")) if (path / PLAN).exists()]
    counts = sorted({part.plan["parts"] for part in parts})
    if len(counts) != 1:
        found = f"parts of {' and of '.join(map(str, counts))}" if counts else "no part"
        raise CorpusError(f"{folder} holds {found}; delete what is of another job, and make the rest with pretrain prepare --part")
    (count,) = counts
    missing = sorted({*range(1, count + 1)} - {part.plan["part"] for part in parts})
    if missing:
        raise PartsMissing(f"{folder}: part {', '.join(map(str, missing))} of {count} is missing; make it with --part {missing[0]}/{count}")
    first = parts[0].plan
    if first.get("record_bytes") != RECORD.itemsize:
        raise CorpusError(f"{folder}: the parts were made by another version of pretrain; make them again")
    sources, settings = sources_of(first), Settings(**first["settings"])
    units = units_of(sources, settings.reading)
    for part in parts:
        number = part.plan["part"]
        plan = decisive(part.plan)
        different = [key for key, value in decisive(first).items() if key != "part" and plan.get(key) != value]
        if different:
            raise CorpusError(f"{folder}: part {number} was made with other {' and '.join(different)} than part 1; make it again")
        left = part.missing(share(units, number, count))
        if left or not part.finished:
            units_left = f" ({left:,} units are missing)" if left else ""
            raise PartsMissing(f"{folder}: part {number} is unfinished{units_left}; run --part {number}/{count} again")
    return parts


def publish(parts: Sequence[Part], output: Path, workers: int) -> dict[str, Any]:
    """Put the parts together, and the set in the place of an old one. At no moment does a manifest stand beside files not its own."""
    if not parts[0].has_tokenizer():
        raise CorpusError(f"{parts[0].folder} has lost its tokenizer; run --part 1/{parts[0].plan['parts']} again")
    building = output / BUILDING
    shutil.rmtree(building, ignore_errors=True)  # left by a process that was killed
    building.mkdir()
    try:
        plan = parts[0].plan
        settings = Settings(**plan["settings"])
        dtype = shards.token_dtype(plan["vocab_size"])
        assembled = assemble(parts, building, dtype, settings.shard_tokens, settings.deduplicate, workers)
        manifest = manifest_of(plan, [result for part in parts for result in part.in_order()], assembled)
        shutil.copytree(parts[0].folder / "tokenizer", building / "tokenizer")
        shards.write_manifest(building, manifest)
        (output / MANIFEST).unlink(missing_ok=True)
        for old in (old for split in SPLITS for old in output.glob(f"{split}_{'[0-9]' * 6}*.bin")):
            old.unlink()
        shutil.rmtree(output / "tokenizer", ignore_errors=True)
        for new in sorted(building.iterdir(), key=lambda path: path.name == MANIFEST):
            new.rename(output / new.name)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    (output / PARTS).rename(building)  # gone at once: a part that starts again just now sees either all of it or the finished set
    shutil.rmtree(building, ignore_errors=True)
    return manifest
