"""A new file whose checksum is taken while it is written, past the page cache where the file system allows that (as dd's oflag=direct): the
kernel's copy costs more than a fast disk does, and would push out the data set's pages."""

import errno
import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

BLOCK = 1 << 22  # bytes written at a time
_PAGE = 4096  # what direct writes must be a multiple of


class HashedFile:
    """Use it in a `with`, at whose end all is on the disk and `entry` is known."""

    def __init__(self, path: Path) -> None:
        self.entry: dict[str, Any] = {}
        self._digest, self._size, self._filled = xxhash.xxh3_128(), 0, 0
        self._memory = mmap.mmap(-1, BLOCK)  # aligned
        self._block = memoryview(self._memory)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._file = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:  # what a file system without direct writes answers
                raise
            self._file = os.open(path, flags, 0o666)

    def __enter__(self) -> "HashedFile":
        return self

    def write(self, data: memoryview) -> None:
        self._digest.update(data)
        self._size += len(data)
        while len(data):
            part = data[: BLOCK - self._filled]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == BLOCK:
                self._write_block()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._filled = -(-self._filled // _PAGE) * _PAGE
                self._write_block()
                os.ftruncate(self._file, self._size)
                os.fsync(self._file)
                self.entry = {"bytes": self._size, "xxh3_128": self._digest.hexdigest()}
        finally:
            os.close(self._file)
            self._block.release()
            self._memory.close()

    def _write_block(self) -> None:
        written = 0
        while written < self._filled:
            written += os.write(self._file, self._block[written : self._filled])
        self._filled = 0
