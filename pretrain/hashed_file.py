"""A new file whose checksum is taken while it is written, past the page cache where the file system allows that (as dd's oflag=direct): the
kernel's copy costs more than a fast disk does, and would push out the data set's pages."""

import errno
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
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
        self._blocks = deque(memoryview(mmap.mmap(-1, BLOCK)) for _ in range(3))  # aligned; one is filled, one written, one in between
        self._thread = ThreadPoolExecutor(1)
        self._writing: deque[Future[None]] = deque()
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
        self._size += len(data)
        while len(data):
            part = data[: BLOCK - self._filled]
            self._digest.update(part)
            self._blocks[0][self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == BLOCK:
                self._write_block()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._filled = -(-self._filled // _PAGE) * _PAGE
                self._write_block()
                self._wait(0)
                os.ftruncate(self._file, self._size)
                os.fsync(self._file)
                self.entry = {"bytes": self._size, "xxh3_128": self._digest.hexdigest()}
        finally:
            self._thread.shutdown()
            os.close(self._file)

    def _write_block(self) -> None:
        """Start to, as soon as the next one is free to be filled."""
        self._writing.append(self._thread.submit(self._write, self._blocks[0][: self._filled]))
        self._wait(len(self._blocks) - 1)
        self._blocks.rotate(-1)
        self._filled = 0

    def _wait(self, left: int) -> None:
        """Until no more than so many blocks are to be written."""
        while len(self._writing) > left:
            self._writing.popleft().result()

    def _write(self, block: memoryview) -> None:
        while len(block):
            block = block[os.write(self._file, block) :]
