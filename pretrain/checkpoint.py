"""Checkpoints: complete or not there at all. Plain dicts of tensors in and out; no strategy is known here.

A checkpoint is a folder `step_00001000/` with `model/`, `optimizer/` and `extras/` (safetensors, each rank its share, through
torch.distributed.checkpoint: no pickle), `state.json` (numbers), `model.json` (how to build the model) and, written last,
`manifest.json` (size and xxh3 of every file). It is written as `step_00001000.tmp` and renamed.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

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
    """Every rank calls it. `group` is a CPU group of all ranks, None for one process. Raises CheckpointError on every rank if any failed."""
    final, temporary = path_of(folder, step), path_of(folder, step).with_suffix(".tmp")
    rank = dist.get_rank(group) if group else 0

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        for name in GROUPS:
            if tensors.get(name):
                (temporary / name).mkdir(parents=True)

    def write() -> dict[str, Any]:
        for name in GROUPS:
            if tensors.get(name):
                with _no_group_is_meant():
                    writer = HuggingFaceStorageWriter(str(temporary / name), save_distributed=True)
                    dcp_save(dict(tensors[name]), storage_writer=writer, process_group=group, no_dist=group is None)
        mine = [p for p in sorted(temporary.glob("*/*.safetensors")) if p.name.startswith(f"shard-{rank + 1:05d}-")]
        return {str(p.relative_to(temporary)): _describe(p) for p in mine}

    def publish() -> None:
        files = {name: entry for part in written if part for name, entry in part.items()}
        for name, content in (("state.json", numbers), ("model.json", model)):
            _write_json(temporary / name, content)
            files[name] = _describe(temporary / name)
        _write_json(temporary / MANIFEST, {"format_version": FORMAT_VERSION, "step": step, "files": files})
        if final.exists():  # damaged, or of a future that was given up: a valid one is never written twice
            shutil.rmtree(final)
        temporary.rename(final)
        _sync_folder(folder)

    try:
        _together(begin if rank == 0 else None, group, f"cannot write {temporary}")
        written = _together(write, group, f"cannot write {temporary}")
        _together(publish if rank == 0 else None, group, f"cannot publish {final}")
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def load(path: Path, tensors: Mapping[str, Mapping[str, Tensor]], group: dist.ProcessGroup | None) -> None:
    """Every rank calls it. Reads into the given tensors; each must be there with its shape."""
    for name in GROUPS:
        if tensors.get(name):
            reader = HuggingFaceStorageReader(str(path / name))
            stored = {
                key: tuple(entry.size)
                for key, entry in reader.read_metadata().state_dict_metadata.items()
                if isinstance(entry, TensorStorageMetadata)
            }
            wanted = {key: tuple(tensor.shape) for key, tensor in tensors[name].items()}
            differ = sorted(key for key in wanted if stored.get(key) != wanted[key])
            if name == "model":  # of the others a rank may want its share alone
                differ += sorted(stored.keys() - wanted.keys())
            if differ:
                raise CheckpointError(
                    f"{path / name} does not fit this run: {differ[0]} is {stored.get(differ[0])} there and {wanted.get(differ[0])} here"
                )
            with _no_group_is_meant():
                dcp_load(
                    dict(tensors[name]),
                    storage_reader=HuggingFaceStorageReader(str(path / name)),
                    process_group=group,
                    no_dist=group is None,
                )


def read_json(path: Path, name: str) -> dict[str, Any]:
    """`state.json` or `model.json` of a checkpoint."""
    content: dict[str, Any] = json.loads((path / name).read_text("utf-8"))
    return content


def verify(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None. Reads every byte."""
    try:
        manifest = json.loads((path / MANIFEST).read_text("utf-8"))
        files, step = manifest["files"].items(), manifest["step"]
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, AttributeError):
        return f"{MANIFEST} is damaged"
    if (match := _NAME.fullmatch(path.name)) and int(match[1]) != step:
        return f"by its {MANIFEST} it is of step {step:,}"
    for name, entry in files:
        file = path / name
        if not file.exists():
            return f"{name} is missing"
        if file.stat().st_size != entry["bytes"]:
            return f"{name} has {file.stat().st_size:,} bytes instead of {entry['bytes']:,}"
        if _describe(file) != entry:
            return f"{name} has changed since it was written"
    return None


def newest_valid(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The valid checkpoint of the highest step; names each one that it passes over."""
    for _, path in sorted(numbered(folder), reverse=True):
        problem = verify(path)
        if problem is None:
            return path
        say(f"skipping checkpoint {path}: {problem}")
    return None


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of everything named like a checkpoint."""
    found = ((_NAME.fullmatch(p.name), p) for p in (folder.iterdir() if folder.is_dir() else ()))
    return [(int(match[1]), path) for match, path in found if match]


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match, f"{path} is not named like a checkpoint"
    return int(match[1])


def rotate(folder: Path, newest: int, keep_last: int, keep_every: int) -> None:
    """Delete old checkpoints, now that the one at step `newest` stands. Later steps are not of this history: left alone."""
    ours = sorted((step, path) for step, path in numbered(folder) if step <= newest and (path / MANIFEST).exists())
    for step, path in ours[:-keep_last]:
        if not keep_every or step % keep_every:
            (path / MANIFEST).unlink()  # first: a deletion that is cut short leaves nothing that looks complete
            shutil.rmtree(path)


def clean(folder: Path) -> None:
    """Remove what an interrupted save left. Only for the run folder's owner."""
    for path in folder.glob("step_*.tmp"):
        shutil.rmtree(path)


def _together(act: Callable[[], T] | None, group: dist.ProcessGroup | None, failing: str) -> list[T | None]:
    """Run `act` here (or nothing), share the verdict, and raise on every rank if it failed on any. Returns each rank's result."""
    result, problem = None, None
    try:
        result = act() if act else None
    except (OSError, CheckpointException) as error:
        problem = _first_cause(error, dist.get_rank(group) if group else 0)
    if group is None:
        outcomes: list[Any] = [(result, problem)]
    else:
        outcomes = [None] * dist.get_world_size(group)
        dist.all_gather_object(outcomes, (result, problem), group=group)
    problems = [problem for _, problem in outcomes if problem]
    if problems:
        rank, cause = problems[0]
        raise CheckpointError(f"{failing}: rank {rank}: {cause}")
    return [outcome for outcome, _ in outcomes]


@contextmanager
def _no_group_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _first_cause(error: OSError | CheckpointException, rank: int) -> tuple[int, str]:
    """(the rank that failed, why): torch's exception tells every rank of every rank's failure."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, failure = min(error.failures.items())
        return rank, str(failure[0] if isinstance(failure, tuple) else failure)
    return rank, str(error)


def _describe(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as f:
        while block := f.read(1 << 22):
            digest.update(block)
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as f:
        json.dump(content, f, indent=1)
        f.flush()
        os.fsync(f.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
