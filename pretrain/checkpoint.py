"""Checkpoints: complete or not there at all. Plain dicts of tensors in and out; no strategy is known here.

A checkpoint is a folder `step_00001000/` with `model/`, `optimizer/` and `extras/` (safetensors, a file or a few per rank, as
torch.distributed.checkpoint's HuggingFaceStorageReader reads them: no pickle), `state.json` (numbers), `model.json` (how to build the
model) and, written last, `manifest.json` (size and xxh3 of every file). It is written as `step_00001000.tmp` and renamed.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from pretrain.hashed_file import BLOCK, HashedFile
from pretrain.pieces import Piece, by_file, pieces, share, write_safetensors
from pretrain.ranks import gather, rank_in

GROUPS = ("model", "optimizer", "extras")
MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_NAME = re.compile(r"step_(\d{8,})")
T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, or could not be written: which, and why."""


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def save(folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], numbers: Mapping[str, Any], model: Mapping[str, Any],
         group: dist.ProcessGroup | None) -> Path:  # fmt: skip
    """Every rank calls it with its tensors, sharded, its own, or those that others have too. Raises CheckpointError on every rank if any
    failed."""
    return write(folder, step, share(pieces(tensors), group), numbers, model, group)


def write(folder: Path, step: int, mine: Sequence[Piece], numbers: Mapping[str, Any], model: Mapping[str, Any],
          group: dist.ProcessGroup | None) -> Path:  # fmt: skip
    """Every rank calls it with its share. Raises CheckpointError on every rank if any failed."""
    final, temporary = path_of(folder, step), path_of(folder, step).with_suffix(".tmp")
    rank = rank_in(group)

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def write_share() -> dict[str, Any]:
        written = {}
        for name in GROUPS:
            for number, part in enumerate(by_file([piece for piece in mine if piece.group == name]), start=1):
                (temporary / name).mkdir(exist_ok=True)
                file = f"{name}/shard_{rank + 1:05d}{f'_{number}' if number > 1 else ''}.safetensors"
                written[file] = write_safetensors(temporary / file, part)
                synchronise(temporary / name)
        return written

    def publish() -> None:
        files = {name: entry for part in written if part for name, entry in part.items()}
        for name, content in (("state.json", numbers), ("model.json", model)):
            files[name] = _write_json(temporary / name, content)
        _write_json(temporary / MANIFEST, {"format_version": FORMAT_VERSION, "step": step, "files": files})
        synchronise(temporary)
        if final.exists():  # damaged, or of a future that was given up: a valid one is never written twice
            shutil.rmtree(final)
        temporary.rename(final)
        synchronise(folder)

    try:
        _together(begin if rank == 0 else None, group, f"cannot write {temporary}")
        written = _together(write_share, group, f"cannot write {temporary}")
        _together(publish if rank == 0 else None, group, f"cannot publish {final}")
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def load(path: Path, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Reads into the given tensors, sharded or whole, each rank what it asks for; each must be there with its shape."""
    stored = Stored(path)
    for group, named in tensors.items():
        stored.fill(group, named, all_of_them=group == "model")  # of the others a rank may want its share alone


class Stored:
    """A checkpoint to read from, piece by piece where memory is short. Nothing here waits for other ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._readers: dict[str, _Reader] = {}

    def fill(self, group: str, tensors: Mapping[str, Tensor], *, all_of_them: bool = False) -> None:
        """Read into these. Raises CheckpointError as `check` does."""
        if tensors:
            self.check(group, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, all_of_them=all_of_them)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp_load(dict(tensors), storage_reader=self._reader(group), no_dist=True)

    def check(self, group: str, shapes: Mapping[str, tuple[int, ...]], *, all_of_them: bool) -> None:
        """Raises CheckpointError for a tensor that is not there, has another shape, or, if all were meant, is not asked for."""
        entries = self._reader(group).read_metadata().state_dict_metadata.items()
        stored = {name: tuple(entry.size) for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
        differ = sorted(name for name in shapes if stored.get(name) != shapes[name])
        if all_of_them:
            differ += sorted(stored.keys() - shapes.keys())
        if differ:
            raise CheckpointError(
                f"{self.path / group} does not fit this run: {differ[0]} is {stored.get(differ[0])} there and {shapes.get(differ[0])} here"
            )

    def _reader(self, group: str) -> "_Reader":
        if group not in self._readers:
            self._readers[group] = _Reader(str(self.path / group))
        return self._readers[group]


class _Reader(HuggingFaceStorageReader):
    """Reads the headers of its files once."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._headers = super().read_metadata()

    def read_metadata(self) -> Metadata:
        return self._headers


def read_json(path: Path, name: str) -> dict[str, Any]:
    """`state.json` or `model.json` of a checkpoint."""
    content: dict[str, Any] = json.loads((path / name).read_text("utf-8"))
    return content


def verify(path: Path, group: dist.ProcessGroup | None = None) -> str | None:
    """What is wrong with a checkpoint, or None. Reads every byte; with a group all ranks call it, and each reads a part."""
    problem, files = _read_manifest(path)
    if problem is None:
        rank, size = rank_in(group), dist.get_world_size(group) if group else 1
        mine = sorted(files, key=lambda name: files[name]["bytes"])[rank::size]
        problem = next(filter(None, (_check(path, name, files[name]) for name in mine)), None)
    return next(filter(None, gather(group, problem)), None)


def _read_manifest(path: Path) -> tuple[str | None, dict[str, Any]]:
    try:
        manifest = json.loads((path / MANIFEST).read_text("utf-8"))
        files, step = dict(manifest["files"]), manifest["step"]
        assert all({"bytes", "xxh3_128"} <= entry.keys() for entry in files.values())
    except OSError:
        return f"{MANIFEST} is missing", {}
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
        return f"{MANIFEST} is damaged", {}
    if (match := _NAME.fullmatch(path.name)) and int(match[1]) != step:
        return f"by its {MANIFEST} it is of step {step:,}", {}
    return None, files


def _check(path: Path, name: str, entry: Mapping[str, Any]) -> str | None:
    file = path / name
    if not file.exists():
        return f"{name} is missing"
    if file.stat().st_size != entry["bytes"]:
        return f"{name} has {file.stat().st_size:,} bytes instead of {entry['bytes']:,}"
    digest = xxhash.xxh3_128()
    try:
        with open(file, "rb") as f:
            while block := f.read(BLOCK):
                digest.update(block)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None if digest.hexdigest() == entry["xxh3_128"] else f"{name} has changed since it was written"


def newest_valid(folder: Path, say: Callable[[str], object]) -> Path | None:
    """The valid checkpoint of the highest step; names each one that it passes over."""
    found, problems = first_valid(newest_first(folder))
    for problem in problems:
        say(f"skipping checkpoint {problem}")
    return found


def newest_first(folder: Path) -> list[Path]:
    return [path for _, path in sorted(numbered(folder), reverse=True)]


def first_valid(paths: Sequence[Path], group: dist.ProcessGroup | None = None) -> tuple[Path | None, list[str]]:
    """It, and what is wrong with those before it. With a group all ranks call it with the same paths, and get the same."""
    problems: list[str] = []
    for path in paths:
        problem = verify(path, group)
        if problem is None:
            return path, problems
        problems.append(f"{path}: {problem}")
    return None, problems


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of everything named like a checkpoint."""
    found = ((_NAME.fullmatch(p.name), p) for p in (folder.iterdir() if folder.is_dir() else ()))
    return [(int(match[1]), path) for match, path in found if match]


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match, f"{path} is not named like a checkpoint"
    return int(match[1])


def rotate(folder: Path, newest: int, keep_last: int, keep_every: int, damaged: Collection[Path] = ()) -> None:
    """Delete old checkpoints, now that the one at step `newest` stands. Later steps are not of this history: left alone. What is known to be
    damaged does not count among those to keep."""
    ours = sorted((step, path) for step, path in numbered(folder) if step <= newest and (path / MANIFEST).exists())
    whole = [step for step, path in ours if path not in damaged]
    for step, path in ours:
        if step < min(whole[-keep_last:]) and (not keep_every or step % keep_every or path in damaged):
            delete(path)


def delete(path: Path) -> None:
    """Under a name that `clean` knows: a deletion that is cut short leaves nothing that looks complete, and nothing for ever."""
    shutil.rmtree(path.rename(path.with_suffix(".deleted.tmp")))


def clean(folder: Path) -> None:
    """Remove what interrupted or failed saves left. Only for the run folder's owner, while nothing is being saved."""
    for path in folder.glob("step_*.tmp"):
        shutil.rmtree(path)


def _together(act: Callable[[], T] | None, group: dist.ProcessGroup | None, failing: str) -> list[T | None]:
    """Run `act` here (or nothing), share the verdict, and raise on every rank if it failed on any. Returns each rank's result."""
    result, problem = None, None
    try:
        result = act() if act else None
    except OSError as error:
        problem = str(error)
    except Exception as error:  # the others wait to hear of it
        problem = f"{type(error).__name__}: {error}"
    outcomes = gather(group, (result, problem))
    for rank, (_, cause) in enumerate(outcomes):
        if cause:
            raise CheckpointError(f"{failing}: rank {rank}: {cause}")
    return [outcome for outcome, _ in outcomes]


def _write_json(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the manifest's entry."""
    with HashedFile(path) as file:
        file.write(memoryview(json.dumps(content, indent=1).encode()))
    return file.entry


def synchronise(path: Path) -> None:
    """A folder's names, or a file's bytes: on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
