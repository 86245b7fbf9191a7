"""Tokens on disk: llm.c's format, read as one stream over all files of a split.

A shard is 256 little-endian int32 of header, then the tokens. uint16: header[0] = 20240520, header[1] = 1. uint32, for
vocabularies above 65,536: header[0] = 20240801, header[1] = 7. header[2] is the number of tokens. Sources: `dev/data/data_common.py`
in karpathy/llm.c, which modded-nanogpt reads too. Headerless uint16 files are nanoGPT's (`data/openwebtext/prepare.py`).
A prepared set is a folder with `manifest.json`, written last: without it the set is unfinished.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HEADER = 256
MAGIC: dict[int, tuple[int, np.dtype[Any]]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
MAX_TOKENS = 2**31 - 1  # the header's field is an int32
MANIFEST = "manifest.json"
FORMAT_VERSION = 1

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class ShardError(ValueError):
    """A file that is not what it claims to be: names the file and the numbers."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2") if vocab_size <= 65536 else np.dtype("<u4")


class ShardWriter:
    """Writes the token files of one split: appends are cut into files of `shard_tokens`, each renamed when complete."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], shard_tokens: int = 100_000_000) -> None:
        assert 0 < shard_tokens <= MAX_TOKENS
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.files: list[dict[str, Any]] = []
        self.tokens = 0
        self._file: Any = None
        self._in_file = 0

    def append(self, tokens: Tokens) -> None:
        assert tokens.dtype == self.dtype, f"{tokens.dtype} tokens for a {self.dtype} shard"
        while len(tokens):
            if self._file is None:
                self._file = open(self._path(temporary=True), "wb")  # noqa: SIM115 — closed by _finish_file
                self._file.write(bytes(4 * HEADER))
            part = tokens[: self.shard_tokens - self._in_file]
            self._file.write(np.ascontiguousarray(part).data)
            self._in_file += len(part)
            self.tokens += len(part)
            tokens = tokens[len(part) :]
            if self._in_file == self.shard_tokens:
                self._finish_file()

    def close(self) -> list[dict[str, Any]]:
        """Finish the last file. Returns the manifest's rows: name, tokens, sha256."""
        if self._file is not None:
            self._finish_file()
        return self.files

    def _path(self, *, temporary: bool) -> Path:
        return self.folder / f"{self.split}_{len(self.files):06d}.bin{'.tmp' if temporary else ''}"

    def _finish_file(self) -> None:
        header = np.zeros(HEADER, "<i4")
        header[0] = next(magic for magic, (_, dtype) in MAGIC.items() if dtype == self.dtype)
        header[1:3] = MAGIC[int(header[0])][0], self._in_file
        self._file.seek(0)
        self._file.write(header.tobytes())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        temporary, final = self._path(temporary=True), self._path(temporary=False)
        self.files.append({"name": final.name, "tokens": self._in_file, "sha256": sha256(temporary)})
        temporary.rename(final)
        self._file, self._in_file = None, 0


def sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    temporary = folder / f"{MANIFEST}.tmp"
    with open(temporary, "w", encoding="utf-8") as f:
        f.write(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
        f.flush()
        os.fsync(f.fileno())
    temporary.rename(folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """None where there is none."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise ShardError(f"{folder / MANIFEST} is not valid JSON ({error}); prepare the set again") from None
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ShardError(f"{folder / MANIFEST} has format_version {manifest.get('format_version')!r}; this pretrain reads {FORMAT_VERSION}")
    return manifest


def fingerprint(files: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """What a prepared set is, whatever its name: the hash of its splits' file hashes, in order."""
    digest = hashlib.sha256()
    for split in sorted(files):
        digest.update(f"{split}:".encode())
        for file in files[split]:
            digest.update(f"{file['tokens']},{file['sha256']};".encode())
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class Shard:
    path: Path
    dtype: np.dtype[Any]
    offset: int  # bytes before the first token
    tokens: int


def open_shard(path: Path) -> Shard:
    """Read the header. Raises ShardError when size and header disagree."""
    size = path.stat().st_size
    with open(path, "rb") as f:
        header = np.frombuffer(f.read(4 * HEADER), "<i4") if size >= 4 * HEADER else np.zeros(3, "<i4")
    if int(header[0]) not in MAGIC:
        if size == 0 or size % 2:
            raise ShardError(f"{path} has {size:,} bytes and no shard header: neither llm.c's format nor a row of uint16")
        return Shard(path, np.dtype("<u2"), 0, size // 2)
    version, dtype = MAGIC[int(header[0])]
    if int(header[1]) != version:
        raise ShardError(f"{path} has version {int(header[1])} in its header; expected {version}")
    held = (size - 4 * HEADER) / dtype.itemsize
    if held != int(header[2]):
        raise ShardError(
            f"{path} says {int(header[2]):,} tokens in its header but holds {held:,.10g}: cut short or damaged; prepare or copy it again"
        )
    return Shard(path, dtype, 4 * HEADER, int(header[2]))


class TokenStream:
    """One split of one set, as one stream. Window i is tokens [i·T, i·T+T], so that inputs and targets both have T tokens."""

    def __init__(self, shards: Sequence[Shard], fingerprint: str, manifest: Mapping[str, Any] | None, name: str) -> None:
        self.shards, self.fingerprint, self.manifest, self.name = shards, fingerprint, manifest, name
        self.starts = np.cumsum([0, *(s.tokens for s in shards)], dtype=np.int64)
        self._maps = [np.memmap(s.path, s.dtype, "r", s.offset, (s.tokens,)) for s in shards]

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    def windows(self, T: int) -> int:
        return max(0, (self.tokens - 1) // T)

    def read(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """Tokens [start, start + length) across file borders, as int64."""
        assert 0 <= start <= self.tokens - length, f"tokens [{start}, {start + length}) of {self.tokens}"
        out = np.empty(length, np.int64)
        file, filled = int(np.searchsorted(self.starts, start, "right")) - 1, 0
        while filled < length:
            at = start + filled - int(self.starts[file])
            part = self._maps[file][at : at + length - filled]
            out[filled : filled + len(part)] = part
            filled, file = filled + len(part), file + 1
        return out

    def where(self, token: int) -> str:
        """The file and offset of a token, for messages."""
        file = int(np.searchsorted(self.starts, token, "right")) - 1
        return f"{self.shards[file].path}, token {token - int(self.starts[file]):,}"


def open_split(path: str | Path, split: str) -> TokenStream:
    """Open the `split` ("train" or "val") of a prepared set, or of a bare folder or file of llm.c, modded-nanogpt or nanoGPT.

    Raises ShardError when the set is missing, unfinished, damaged, or has no such split.
    """
    path = Path(path)
    if not path.exists():
        raise ShardError(f"{path}: no such set; make it with: pretrain prepare SOURCE --output {path}")
    manifest = read_manifest(path)
    if manifest is not None:
        names = [file["name"] for file in manifest["files"].get(split, [])]
        shards = [_open_listed(path / file["name"], file["tokens"]) for file in manifest["files"].get(split, [])]
        mark = manifest["fingerprint"]
    else:
        if path.is_dir() and (list(path.glob("*.tmp")) or (path / ".lock").exists()):
            raise ShardError(f"{path} is unfinished (it has no {MANIFEST}); run the same pretrain prepare again")
        files = [path] if path.is_file() else sorted(path.glob(f"*{split}*.bin"))
        names = [file.name for file in files]
        shards = [open_shard(file) for file in files]
        mark = _bare_fingerprint(shards)
    if not names:
        raise ShardError(
            f"{path} has no {split} split" + (f"; prepare it with --val-fraction 0.01, or set data.{split}" if split == "val" else "")
        )
    if len({s.dtype for s in shards}) > 1:
        raise ShardError(f"{path}: its {split} files mix uint16 and uint32 tokens")
    return TokenStream(shards, mark, manifest, f"{path} ({split})")


def _open_listed(path: Path, tokens: int) -> Shard:
    if not path.exists():
        raise ShardError(f"{path} is listed in {MANIFEST} but missing; copy it again or prepare the set again")
    shard = open_shard(path)
    if shard.tokens != tokens:
        raise ShardError(f"{path} holds {shard.tokens:,} tokens, {MANIFEST} says {tokens:,}; copy it again or prepare the set again")
    return shard


def _bare_fingerprint(shards: Sequence[Shard]) -> str:
    """Sizes plus the first and last 64 KiB of each file: no manifest holds their hashes, and hashing 20 GB at each start would."""
    digest = hashlib.sha256()
    for shard in shards:
        with open(shard.path, "rb") as f:
            digest.update(f"{shard.tokens}:".encode() + f.read(65536))
            f.seek(max(0, shard.path.stat().st_size - 65536))
            digest.update(f.read(65536))
    return digest.hexdigest()[:32]
