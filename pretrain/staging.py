"""Copies of a run's token files on a disk of the node, for sets on a disk that is slow or shared (`data.stage_to`).

A copy is STAGE_TO/NAME-KEY/FILE. NAME is the folder of the original; KEY its manifest's fingerprint, or of a bare set, whose fingerprint
does not see every byte, a hash of that, its files' paths, sizes and times. So data that has changed is copied anew, and sets whose folders
have the same name do not meet. Token files alone are copied: everything else was read when the set was opened.

A file gets its name when all of it was read as the manifest says, written, and read back alike. Whoever finds that name later compares the
size and no more, as with the originals: hashing them at each start would take as long as copying. Damage done to a copy afterwards goes
unseen; without its folder the set is copied again.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import xxhash

from pretrain.config import ConfigError
from pretrain.hashed_file import BLOCK, HashedFile
from pretrain.loader import Sets
from pretrain.shards import MANIFEST, ShardError, TokenStream

_LOCK = ".lock"
_INSTEAD = "name another folder on a disk of the node, or leave data.stage_to out"


@dataclass(frozen=True)
class Copy:
    """One token file's."""

    original: Path
    path: Path
    size: int  # bytes
    sha256: str | None  # as in the manifest; None without one

    @property
    def temporary(self) -> Path:
        return self.path.with_name(f"{self.path.name}.tmp")

    @property
    def is_made(self) -> bool:
        try:
            return self.path.stat().st_size == self.size
        except OSError:
            return False


def stage(sets: Sets, stage_to: str, say: Callable[[str], None]) -> Sets:
    """The same sets, read from copies in the folder `stage_to`; those that are missing are made. Every process of a node calls it, and
    processes of other runs may: one copies at a time, and the others find what it has made.

    Raises ConfigError where the folder does not take them, ShardError where an original is damaged.
    """
    began, folder, streams = time.perf_counter(), Path(stage_to), [*sets.train, *sets.val]
    copies = [_copies(stream, folder) for stream in streams]
    missing = [[copy for copy in of_one if not copy.is_made] for of_one in copies]
    if found := [stream.name for stream, left in zip(streams, missing, strict=True) if not left]:
        say(f"found {', '.join(found)} staged in {folder}")
    if wanted := [copy for left in missing for copy in left]:
        names = ", ".join(stream.name for stream, left in zip(streams, missing, strict=True) if left)
        size = sum(copy.size for copy in wanted)
        amount = f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
        say(f"staging {names} ({amount}) to {folder}")
        _make(wanted, folder)
        say(f"staged {names} ({amount}) to {folder} in {time.perf_counter() - began:.1f}s")
    moved = [_moved(stream, of_one) for stream, of_one in zip(streams, copies, strict=True)]
    return replace(sets, train=moved[: len(sets.train)], val=moved[len(sets.train) :])


def _copies(stream: TokenStream, folder: Path) -> list[Copy]:
    """In the order of the stream's files."""
    listed = (
        {} if stream.manifest is None else {file["name"]: file["sha256"] for files in stream.manifest["files"].values() for file in files}
    )
    name = stream.shards[0].path.parent.resolve().name
    place = folder / f"{name}-{_key(stream)}"
    return [
        Copy(shard.path, place / shard.path.name, shard.offset + shard.tokens * shard.dtype.itemsize, listed.get(shard.path.name))
        for shard in stream.shards
    ]


def _key(stream: TokenStream) -> str:
    if stream.manifest is not None:
        return stream.fingerprint[:16]
    found = [(str(path.resolve()), stat.st_size, stat.st_mtime_ns) for path, stat in ((s.path, s.path.stat()) for s in stream.shards)]
    return hashlib.sha256(repr((stream.fingerprint, found)).encode()).hexdigest()[:16]


def _moved(stream: TokenStream, copies: Sequence[Copy]) -> TokenStream:
    shards = [replace(shard, path=copy.path) for shard, copy in zip(stream.shards, copies, strict=True)]
    return TokenStream(shards, stream.fingerprint, stream.manifest, stream.name)


def _make(copies: Sequence[Copy], folder: Path) -> None:
    """Make those that are still missing when it is this process's turn. The system frees the lock of a process that died."""
    where = f"data.stage_to={folder} on {socket.gethostname()}"
    if not folder.is_dir():
        raise ConfigError(f"{where}: no such folder; {_INSTEAD}")
    try:
        with _open_lock(folder / _LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _make_all([copy for copy in copies if not copy.is_made], folder, where)
    except OSError as error:
        full = f" ({_room(copies, folder)[1]})" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise ConfigError(f"{where} cannot be written: {error.strerror}{full}; {_INSTEAD}") from None


def _open_lock(path: Path) -> BinaryIO:
    """Where it is another user's to read, which is enough to lock it but on NFS. Not with "w": that refuses a file of another user in a folder
    like /tmp, may he write to it or not (fs.protected_regular)."""
    with suppress(FileExistsError), open(path, "xb") as made:
        os.fchmod(made.fileno(), 0o644)  # whatever the umask, for other users
    try:
        return open(path, "r+b")
    except PermissionError:
        return open(path, "rb")


def _make_all(copies: Sequence[Copy], folder: Path, where: str) -> None:
    _clear(copies)  # of a process that was killed, or damaged since
    enough, room = _room(copies, folder)
    if not enough:
        raise ConfigError(f"{where}: {room}; free some, or {_INSTEAD}")
    try:
        for copy in copies:
            copy.path.parent.mkdir(exist_ok=True)
            _make_one(copy, where)
    except OSError:  # a full disk, most of all: leave it as it was
        _clear(copies)
        for copy in copies:
            with suppress(OSError):
                copy.path.parent.rmdir()
        raise


def _clear(copies: Sequence[Copy]) -> None:
    for path in (path for copy in copies for path in (copy.path, copy.temporary)):
        path.unlink(missing_ok=True)


def _room(copies: Sequence[Copy], folder: Path) -> tuple[bool, str]:
    needed, free = sum(copy.size for copy in copies), shutil.disk_usage(folder).free
    return needed <= free, f"{needed:,} bytes to copy, {free:,} are free"


def _make_one(copy: Copy, where: str) -> None:
    try:
        read = hashlib.sha256()
        with HashedFile(copy.temporary) as file:
            for block in _blocks(copy.original):
                read.update(block)
                file.write(block)
        if copy.sha256 not in (None, read.hexdigest()):
            raise ShardError(f"{copy.original} is damaged: {MANIFEST} has another SHA-256; copy it again or prepare the set again")
        if file.entry["bytes"] != copy.size:
            raise ShardError(f"{copy.original} has changed since it was opened: {file.entry['bytes']:,} bytes, not {copy.size:,}")
        written = xxhash.xxh3_128()
        for block in _blocks(copy.temporary, from_disk=True):
            written.update(block)
        if written.hexdigest() != file.entry["xxh3_128"]:
            raise ConfigError(f"{where}: {copy.temporary} does not read as it was written: that disk is faulty; {_INSTEAD}")
        copy.temporary.rename(copy.path)
    finally:
        copy.temporary.unlink(missing_ok=True)


def _blocks(path: Path, *, from_disk: bool = False) -> Iterator[memoryview]:
    """The file's bytes, in one buffer that is filled again; `from_disk`: not from memory, where the system lets us say so."""
    buffer = memoryview(bytearray(BLOCK))
    try:
        with open(path, "rb", buffering=0) as file:
            if from_disk and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while n := file.readinto(buffer):
                yield buffer[:n]
    except OSError as error:
        raise ShardError(f"{path} cannot be read: {error.strerror}") from None
