"""Documents, as all readers give them, and the bytes that they are read from. Imports pyarrow, as `tables` does: it knows zstd."""

import codecs
import gzip
import hashlib
import io
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, cast

import xxhash

from pretrain.corpus.sources import Source


@dataclass(frozen=True)
class Reading:
    """How sources are read."""

    text_field: str = "text"
    encoding: str = "utf-8"
    documents: str = "file"  # of a .txt: file, line, blank-line, or a separator

    @property
    def separator(self) -> bytes:
        return self.documents.encode().decode("unicode_escape").encode("latin-1").decode().encode(self.bytewise or "utf-8")

    @property
    def bytewise(self) -> str:
        """The encoding if a line break is the same byte in it as in ASCII, and never part of another character; else ""."""
        name = codecs.lookup(self.encoding).name
        return name if name in ("utf-8", "ascii") or name.startswith(("iso8859", "cp125", "koi8")) else ""


class Document(NamedTuple):
    place: str  # in its source: ":7" is a line, "@7" a byte whose line is not known, ", row 7" a row
    text: str  # may hold half a surrogate pair from JSON
    fragment: int = 0
    last: bool = True
    whole: bytes = b""  # the `WholeHash` of a document that comes in fragments


class WholeHash:
    """Of a document's UTF-8: what draws its split (64 bits), and what tells duplicates (128 bits)."""

    def __init__(self, utf8: bytes = b"") -> None:
        self.split, self.text = hashlib.blake2b(utf8, digest_size=8), xxhash.xxh3_128(utf8)

    def update(self, utf8: bytes) -> None:
        self.split.update(utf8)
        self.text.update(utf8)

    def digest(self) -> bytes:
        return self.split.digest() + self.text.digest()


class Bad(NamedTuple):
    place: str
    reason: str  # its kind, for the counts
    message: str


Found = Document | Bad


class _Recoded(io.RawIOBase):
    """Any encoding -> UTF-8, so that a line break is one byte. Raises UnicodeDecodeError in the middle of a read."""

    def __init__(self, file: BinaryIO, encoding: str) -> None:
        self.file, self.decode, self.left = file, codecs.getincrementaldecoder(encoding)().decode, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.left:
            block = self.file.read(1 << 16)
            self.left = self.decode(block, not block).encode()
            if not block:
                break
        taken, self.left = self.left[: len(buffer)], self.left[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)


def open_source(source: Source, reading: Reading) -> BinaryIO:
    """Its bytes, decompressed, in an encoding that `decode` reads."""
    if source.compression == ".zst":
        import pyarrow

        file: Any = io.BufferedReader(pyarrow.input_stream(source.file, compression="zstd"), 1 << 17)
    else:
        file = gzip.open(source.file) if source.compression else open(source.file, "rb")  # noqa: SIM115 — closed by whoever reads
    return cast(BinaryIO, file if reading.bytewise else io.BufferedReader(_Recoded(file, reading.encoding), 1 << 17))


def decode(data: bytes, place: str, reading: Reading) -> str | Bad:
    """`data` begins at `place`, which is a line, a byte, or nothing for the first line of a file."""
    try:
        return data.decode(reading.bytewise or "utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start)
        column = error.start - data.rfind(b"\n", 0, error.start)
        place = f":{int(place[1:] or 1) + line}" if place[:1] in ("", ":") else f"@{int(place[1:]) + error.start}"
        message = f"not {reading.encoding.upper()} (byte {column} of the line is 0x{data[error.start]:02x}); name its --encoding, or convert it with iconv"
        return Bad(place, f"not {reading.encoding}", message)
