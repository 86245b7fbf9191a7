"""What is to be read: files, folders, patterns, lists of paths and standard input -> sources, in the order named, each file once.

The hash of a source is taken block by block, so that many processes and machines can each take the hash of the part that they read.
"""

import glob
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

BLOCK = 4 << 20  # bytes: what is hashed, and about what is tokenised, at a time
FORMATS = (".txt", ".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".arrow")
COMPRESSIONS = (".gz", ".zst")
COLUMNAR = (".parquet", ".arrow")  # compressed inside, if at all
STDIN = "-"
DATASET = "dataset"  # the format of a source that `hub` reads
# Files of other programs beside the data: of Hugging Face's datasets, tokenizers and models, and our own.
_NO_DATA = {"dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json", "config.json", "generation_config.json",
            "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "manifest.json",
            "model.safetensors.index.json"}  # fmt: skip


class CorpusError(ValueError):
    """What the user can mend, in one line: what is wrong, where, what to do."""


@dataclass(frozen=True)
class Source:
    """A file as it was when it was found."""

    path: str  # as it is told
    file: str  # where its bytes are
    format: str
    compression: str
    bytes: int
    modified: int  # nanoseconds
    identity: str = ""  # of a dataset: what stands for its content
    rows: int = 0  # of a dataset whose rows can be read from the middle

    def changed(self) -> bool:
        """Since it was found; that its content is the same is another question."""
        if self.format == DATASET:
            return False
        try:
            now = os.stat(self.file)
        except OSError:
            return True
        return (now.st_size, now.st_mtime_ns) != (self.bytes, self.modified)


def find_sources(names: Iterable[str], spool: Path | None = None, format: str = "") -> tuple[list[Source], int]:
    """The files to read, and how many others the folders hold. Hidden files are not looked at.

    `@FILE` stands for the paths in FILE, one a line; `spool` is what standard input was written to; `format` is that of files named
    themselves or by a pattern, whatever they are called. Raises CorpusError for a source that is missing or has nothing to read.
    """
    found: dict[str, Source] = {}
    ignored, formatted = 0, not format
    for name in _listed(names):
        if name == STDIN:
            if spool is None:
                raise CorpusError(f"{STDIN}: standard input is named on the command line, not in an @FILE")
            formatted = True
            found.setdefault(STDIN, _source(STDIN, str(spool), format or ".txt", ""))
            continue
        places = _places(name)
        formatted = formatted or not all(map(os.path.isdir, places))
        files, others = _files(name, places, format)
        ignored += others
        for path, kind, compression in files:
            found.setdefault(os.path.realpath(path), _source(path, path, kind, compression))
    if found and not formatted:
        raise CorpusError(f"--format {format[1:]}: in folders the files go by their names; name the files, as in {os.path.join(name, '*')}")
    return list(found.values()), ignored


def format_of(path: str) -> tuple[str, str]:
    """(format, compression) by the name, ("", "") where no reader fits."""
    stem, suffix = os.path.splitext(path.lower())
    compression = suffix if suffix in COMPRESSIONS else ""
    kind = os.path.splitext(stem)[1] if compression else suffix
    readable = kind in FORMATS and not (compression and kind in COLUMNAR)
    return (kind, compression) if readable else ("", "")


def block_hashes(source: Source, start: int = 0) -> Iterator[str]:
    """Of each block from the byte `start` on; of a dataset, that of its identity."""
    if source.format == DATASET:
        yield xxhash.xxh3_128_hexdigest(source.identity.encode())
        return
    with open(source.file, "rb") as file:
        file.seek(start)
        while block := file.read(BLOCK):
            yield xxhash.xxh3_128_hexdigest(block)


def joined(hashes: Sequence[str]) -> str:
    """The hash of a source: xxh3-128 over those of its blocks of 4 MiB."""
    return xxhash.xxh3_128_hexdigest("".join(hashes).encode())


def _source(path: str, file: str, format: str, compression: str) -> Source:
    found = os.stat(file)
    return Source(_told(path), file, format, compression, found.st_size, found.st_mtime_ns)


def _told(path: str) -> str:
    """A name may be any bytes, the manifest is UTF-8."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _is_beside_data(path: str) -> bool:
    """What other programs keep where data are; `datasets` also what it has computed from them."""
    folder, name = os.path.split(path)
    return name in _NO_DATA or (name.startswith("cache-") and os.path.exists(os.path.join(folder, "state.json")))


def _listed(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if not name.startswith("@") or os.path.exists(name):
            yield name
            continue
        try:
            lines = [line for line in Path(name[1:]).read_text("utf-8-sig").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise CorpusError(f"{name}: {getattr(error, 'strerror', error)}; expected a file with a path on each line") from None
        if not lines:
            raise CorpusError(f"{name}: has no path in it; expected one on each line")
        yield from lines


def _places(name: str) -> list[str]:
    """The files and folders that `name` stands for."""
    places = [name] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
    if not places:
        raise CorpusError(f"{name}: no such file or folder, and no file matches it as a pattern")
    return places


def _files(name: str, places: Sequence[str], format: str) -> tuple[list[tuple[str, str, str]], int]:
    """(path, format, compression) of each file in `places`, which `name` stands for, and how many others there are."""
    files, others = [], 0
    for place in places:
        folder = os.path.isdir(place)
        named = not folder and (place == name or format != "")  # one that a pattern matches and a format is given for is meant, too
        for path in _below(place) if folder else [place]:
            kind, compression = format_of(path)
            if format and named:
                kind, compression = format, next((c for c in COMPRESSIONS if path.lower().endswith(c)), "")
            if not kind or (not named and _is_beside_data(path)):
                others += 1
            elif not os.path.exists(path):
                raise CorpusError(f"{path}: a link to a file that is not there")
            elif not stat.S_ISREG(os.stat(path).st_mode):
                raise CorpusError(f"{path}: not a regular file; pipe it into `pretrain prepare -` instead")
            elif (kind in COLUMNAR or compression == ".zst") and _told(path) != path:
                raise CorpusError(f"{_told(path)}: pyarrow opens no file whose name is not UTF-8; give it another")
            else:
                files.append((path, kind, compression))
    if not files:
        held = f"has none ({others:,} other files)" if os.path.isdir(name) else "is not one"
        raise CorpusError(f"{name}: {held} of the formats {', '.join(FORMATS)} (text also as .gz or .zst); --format names that of a file")
    return files, others


def _below(folder: str) -> Iterator[str]:
    """Every visible file, in the order of the paths. Links to folders are followed, each folder once."""

    def refuse(error: OSError) -> None:
        raise CorpusError(f"{error.filename}: {error.strerror}; nothing is left out in silence: name what to read, or make it readable")

    seen, found = set(), []
    for here, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        mark = os.stat(here)
        if (mark.st_dev, mark.st_ino) in seen:
            folders.clear()  # a link that leads back
            continue
        seen.add((mark.st_dev, mark.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [os.path.join(here, name) for name in files if not name.startswith(".")]
    return iter(sorted(found, key=lambda path: path.split(os.sep)))
