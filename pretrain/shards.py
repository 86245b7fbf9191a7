"""Sets of tokens on disk: written in llm.c's format, read from any of `token_files`, as one stream over all files of a split.

A prepared set is a folder with `manifest.json`, written last: without it the set is unfinished. Anything else is a bare set: a file,
or a folder of files whose names say `train` or `val`. Where no name in a folder does, all its files are one split, whatever it is called.
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.token_files import HEADER, MAGIC, SUFFIXES, Int64s, Shard, open_llm_c, open_shard, tokens_of
from pretrain.token_files import ShardError as ShardError  # what everything here raises

MAX_TOKENS = 2**31 - 1  # the header's field is an int32
MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_MAPS = 128  # files mapped at a time: each takes a descriptor, and many systems give a process 1,024
_SPLIT = re.compile(r"(?<![a-z])(train|val)(?:ing|id|idation)?(?![a-z])", re.IGNORECASE)

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2") if vocab_size <= 65536 else np.dtype("<u4")


class ShardWriter:
    """Writes the token files of one split: appends are cut into files of `shard_tokens`, each renamed when complete."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], shard_tokens: int = 100_000_000, first: int = 0) -> None:
        assert 0 < shard_tokens <= MAX_TOKENS
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.files: list[dict[str, Any]] = []
        self.first = first  # number of its first file
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
        return self.folder / f"{self.split}_{self.first + len(self.files):06d}.bin{'.tmp' if temporary else ''}"

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


class TokenStream:
    """One split of one set, as one stream. Window i is tokens [i·T, i·T+T], so that inputs and targets both have T tokens."""

    def __init__(self, shards: Sequence[Shard], fingerprint: str, manifest: Mapping[str, Any] | None, name: str) -> None:
        self.shards, self.fingerprint, self.manifest, self.name = shards, fingerprint, manifest, name
        self.starts = np.cumsum([0, *(s.tokens for s in shards)], dtype=np.int64)
        self._map = functools.lru_cache(_MAPS)(lambda file: tokens_of(shards[file]))

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def format(self) -> str:
        """Whose format the files are in: a name of `token_files`."""
        return self.shards[0].format

    def windows(self, T: int) -> int:
        return max(0, (self.tokens - 1) // T)

    def read(self, start: int, length: int) -> Int64s:
        """Tokens [start, start + length) across file borders, as int64. Raises ShardError at a negative id."""
        assert 0 <= start <= self.tokens - length, f"tokens [{start}, {start + length}) of {self.tokens}"
        out = np.empty(length, np.int64)
        filled = 0
        for at, part in self.parts(start, start + length, length):
            out[at - start : at - start + len(part)] = part
            filled += len(part)
        assert filled == length
        if out.min(initial=0) < 0:
            at = int(out.argmin())
            raise ShardError(f"{self.where(start + at)}: token id {out[at]:,}: tokens are not negative; the file is damaged")
        return out

    def parts(self, start: int, stop: int, length: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Tokens [start, stop) in the type of the files, as (position, at most `length` tokens of one file) without a copy."""
        file = int(np.searchsorted(self.starts, start, "right")) - 1
        while start < stop:
            end = min(start + length, stop, int(self.starts[file + 1]))
            yield start, self._map(file)[start - int(self.starts[file]) : end - int(self.starts[file])]
            start, file = end, file + (end == self.starts[file + 1])

    def where(self, token: int) -> str:
        """The file and offset of a token, for messages."""
        file = int(np.searchsorted(self.starts, token, "right")) - 1
        return f"{self.shards[file].path}, token {token - int(self.starts[file]):,}"


def splits(path: Path) -> list[str]:
    """The splits of a set; ["all"] of a bare one whose files name none, which opens under any name. Raises ShardError as `open_split`."""
    manifest = read_manifest(path)
    files = manifest["files"] if manifest is not None else _bare_files(path)
    return [split for split in files if files[split]]


def open_split(path: str | Path, split: str) -> TokenStream:
    """Open the `split` ("train" or "val") of a prepared set, or of a bare file or folder in one of the formats of `token_files`.

    Raises ShardError when the set is missing, unfinished, damaged, or has no such split.
    """
    path = Path(path)
    manifest = read_manifest(path)
    if manifest is not None:
        shards = [_open_listed(path / file["name"], file["tokens"]) for file in manifest["files"].get(split, [])]
        mark = manifest["fingerprint"]
    else:
        bare = _bare_files(path)
        opened = [open_shard(file) for file in bare.get(split, bare.get("all", []))]
        shards = [shard for shard in opened if shard.tokens] or opened
        mark = _bare_fingerprint(shards)
    if not shards:
        raise ShardError(
            f"{path} has no {split} split" + (f"; prepare it with --val-fraction 0.01, or set data.{split}" if split == "val" else "")
        )
    for kinds, what in (({s.format for s in shards}, "formats"), ({str(s.dtype) for s in shards}, "tokens")):
        if len(kinds) > 1:
            raise ShardError(f"{path}: its {split} files mix {' and '.join(sorted(kinds))} {what}")
    return TokenStream(shards, mark, manifest, f"{path} ({split})")


def _bare_files(path: Path) -> dict[str, list[Path]]:
    """The files of each split; under "all" where no name says of which they are."""
    if not path.exists() and Path(f"{path}.idx").exists():  # as Megatron names a pair
        path = Path(f"{path}.idx")
    if not path.exists():
        raise ShardError(f"{path}: no such set; make it with: pretrain prepare SOURCE --output {path}")
    if path.is_file():
        return {"all": [path]}
    if list(path.glob("*.tmp")) or any((path / mark).exists() for mark in (".lock", ".parts")):
        raise ShardError(
            f"{path} is unfinished (it has no {MANIFEST}); run the same pretrain prepare again, or pretrain merge where it is made in parts"
        )
    found: dict[str, list[Path]] = {"train": [], "val": [], "all": []}
    for file in sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file()):
        named = {match.lower() for match in _SPLIT.findall(file.stem)}
        if len(named) > 1:
            raise ShardError(f"{file} names both splits; rename it, or name the files themselves in data.train and data.val")
        found[named.pop() if named else "all"].append(file)
    whole = {"all": found.pop("all")}
    return found if any(found.values()) else whole


def _open_listed(path: Path, tokens: int) -> Shard:
    if not path.exists():
        raise ShardError(f"{path} is listed in {MANIFEST} but missing; copy it again or prepare the set again")
    shard = open_llm_c(path)
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
