"""The folders that a run would read and write, and how fast they are."""

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from pretrain.doctor.outlook import Outlook

_BLOCK, _BYTES, _SECONDS = 1 << 24, 1 << 26, 5.0  # a measurement ends after so many bytes, or seconds
_WORTH_READING = 1 << 20  # bytes of a file below which its bandwidth says nothing


@dataclass(frozen=True)
class Folder:
    role: str  # `run` or `data`
    asked: str  # as written
    place: str  # itself, or the nearest one above that exists
    inode: int  # of `place`
    filesystem: str
    free_bytes: int
    writable: bool
    obstacle: str = ""  # what is no folder, where one would have to be made
    files: tuple[str, ...] = ()  # of data, to read from


def find_folders(outlook: Outlook) -> tuple[Folder, ...]:
    """Those of the config; without one `runs` and `data` under the current folder where they are, else the current folder."""
    run = outlook.run_folder or ("runs" if os.path.isdir("runs") else ".")
    data = outlook.data_files or ({"data": _files_below("data")} if os.path.isdir("data") else {})
    return (_look("run", run, ()), *(_look("data", asked, files) for asked, files in data.items()))


def nearest(folder: str) -> str:
    """The folder, or the nearest one above it that exists."""
    path = Path(folder).expanduser().absolute()
    return str(next(level for level in (path, *path.parents) if os.path.isdir(level)))  # is_dir raises where it may not look


def _look(role: str, asked: str, files: Sequence[str]) -> Folder:
    place = nearest(asked)
    mounts = [part for part in psutil.disk_partitions(all=True) if Path(os.path.realpath(place)).is_relative_to(part.mountpoint)]
    kind = max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown"
    below = os.path.join(place, *Path(asked).expanduser().absolute().relative_to(place).parts[:1])
    return Folder(
        role, asked, place, os.stat(place).st_ino, kind, shutil.disk_usage(place).free, os.access(place, os.W_OK | os.X_OK),
        below if below != place and os.path.lexists(below) else "", tuple(files),
    )  # fmt: skip


def _files_below(folder: str) -> tuple[str, ...]:
    """Of prepared sets."""
    return tuple(str(path) for pattern in ("*.bin", "*/*.bin", "*.npy", "*/*.npy") for path in sorted(Path(folder).glob(pattern)))


@dataclass(frozen=True)
class Speed:
    """Bytes a second; None where it was not measured."""

    write: float | None = None
    read: float | None = None
    error: str = ""


def measure(folder: Folder) -> Speed:
    """A run folder is written to and read from, by way of a file that has no name, so that nothing can be left behind; of data a file that is
    there is read. The page cache is told to forget first; a file system in memory cannot, nor one that another machine caches."""
    if folder.role == "data":
        largest = max(folder.files, key=_size, default="")
        if _size(largest) < _WORTH_READING:
            return Speed()
        try:
            with open(largest, "rb", buffering=0) as file:
                return Speed(read=_read(file.fileno()))
        except OSError as error:
            return Speed(error=f"{largest}: {error.strerror}")
    if not folder.writable or folder.free_bytes < 4 * _BYTES:
        return Speed()
    try:
        with tempfile.TemporaryFile(dir=folder.place, buffering=0) as file:
            write = _write(file.fileno())
            return Speed(write, _read(file.fileno()))
    except OSError as error:
        return Speed(error=str(error.strerror))


def shows(folder: str, name: str, seconds: float) -> bool:
    """Whether a file is there that another machine has made, or comes to be seen within so many seconds."""
    end = time.monotonic() + seconds
    while not os.path.exists(os.path.join(folder, name)):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
        with suppress(OSError):
            os.listdir(folder)  # for which NFS looks again
    return True


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.isfile(path) else 0


def _write(file: int) -> float:
    """Bytes a second that reach the disk."""
    block = os.urandom(_BLOCK)  # a file system that compresses gains nothing
    began, written = time.perf_counter(), 0
    while written < _BYTES and time.perf_counter() - began < _SECONDS:
        written += os.write(file, block)
        os.fsync(file)
    return written / (time.perf_counter() - began)


def _read(file: int) -> float:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, _BYTES, os.POSIX_FADV_DONTNEED)
    began, done = time.perf_counter(), 0
    while done < _BYTES and time.perf_counter() - began < _SECONDS and (block := os.pread(file, _BLOCK, done)):
        done += len(block)
    return done / (time.perf_counter() - began)
