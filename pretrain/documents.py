"""Text sources -> documents, each with its origin. The only importer of pyarrow.

A document is a whole `.txt` file (a byte-order mark at its start is dropped, CRLF and lone CR become LF), or the text field of a
line of `.jsonl` (blank lines are ignored) or a row of `.parquet`, as it stands; `.txt` and `.jsonl` may be gzipped. What is not
as it should be is an error with its file and line: a set is made of all of its sources or not at all. A new format is a function
from (path, text field) to documents, and its line in `READERS`.
"""

import codecs
import glob
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

ROWS = 64  # of Parquet at a time: 64 documents of 30 MB still fit into Arrow's 32-bit offsets


class CorpusError(ValueError):
    """What the user can mend, in one line: what is wrong, where, what to do."""


def find_sources(sources: Iterable[str]) -> tuple[list[Path], int]:
    """The files to read, in the order named, each once; and how many others the folders hold. Hidden files are not looked at.

    Links to folders inside a folder are not followed. Raises CorpusError for a source that is missing or has nothing to read.
    """
    found: dict[Path, Path] = {}
    ignored = 0
    for source in sources:
        path = Path(source)
        places = [path] if path.exists() else [Path(match) for match in sorted(glob.glob(source, recursive=True))]
        if not places:
            raise CorpusError(f"{source}: no such file or folder, and no file matches it as a pattern")
        files = [file for place in places for file in ([place] if place.is_file() else _below(place))]
        readable = [file for file in files if format_of(file)]
        if not readable:
            held = "is not one" if path.is_file() else f"has none ({len(files):,} other files)"
            raise CorpusError(f"{source}: {held} of the formats {', '.join(READERS)} (.txt and .jsonl also as .gz)")
        ignored += len(files) - len(readable)
        for file in readable:
            found.setdefault(file.resolve(), file)
    return list(found.values()), ignored


def read(path: Path, text_field: str) -> Iterator[tuple[str, str]]:
    """(origin, text) of each document of a file. Raises CorpusError; a text may hold half a surrogate pair from JSON."""
    try:
        yield from READERS[format_of(path)](path, text_field)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CorpusError(f"{path}: cut short or damaged ({error}); copy it again") from None


def _below(folder: Path) -> list[Path]:
    visible = (p for p in folder.rglob("*") if not any(part.startswith(".") for part in p.relative_to(folder).parts))
    return sorted(path for path in visible if path.is_file())


def format_of(path: Path) -> str:
    """The key in READERS, or "" where no reader fits."""
    name = path.name.lower()
    suffix = Path(name.removesuffix(".gz")).suffix
    return suffix if suffix in READERS and not name.endswith(".parquet.gz") else ""


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path) if path.name.lower().endswith(".gz") else open(path, "rb"))


def _decode(data: bytes, path: Path, line: int = 1) -> str:
    """`data` begins at the start of `line`."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        column = error.start - data.rfind(b"\n", 0, error.start)
        found = f"byte {column} of the line is 0x{data[error.start]:02x}"
        raise CorpusError(f"{path}:{line}: not UTF-8 ({found}); convert the file, for example with iconv -t utf-8") from None


def _read_txt(path: Path, _: str) -> Iterator[tuple[str, str]]:
    with _open(path) as file:
        text = _decode(file.read(), path).removeprefix("\ufeff")
    yield str(path), text.replace("\r\n", "\n").replace("\r", "\n")


def _read_jsonl(path: Path, text_field: str) -> Iterator[tuple[str, str]]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                origin = f"{path}:{number}"
                yield origin, _text_of(_decode(line.rstrip(), path, number), text_field, origin)


def _text_of(line: str, text_field: str, origin: str) -> str:
    try:
        row = _JSON.decode(line)
    except (ValueError, RecursionError) as error:
        at = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise CorpusError(f"{origin}: not one JSON object ({getattr(error, 'msg', error)}{at}); mend the line") from None
    if not isinstance(row, dict):
        raise CorpusError(f"{origin}: expected a JSON object with a field {text_field!r}, found {_kind(row)}")
    if text_field not in row:
        found = ", ".join(row) or "no field"
        raise CorpusError(f"{origin}: no field {text_field!r} (found: {found}); choose one with --text-field, or mend the line")
    text = row[text_field]
    if not isinstance(text, str):
        raise CorpusError(f"{origin}: the field {text_field!r} is {_kind(text)}, expected text")
    return text


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return row


_JSON = json.JSONDecoder(object_pairs_hook=_unique)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _read_parquet(path: Path, text_field: str) -> Iterator[tuple[str, str]]:
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_column(file.schema_arrow, text_field, path)
            for batch in file.iter_batches(ROWS, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    if text is None:
                        raise CorpusError(f"{path}, row {row}: the column {text_field!r} is null, expected text")
                    yield f"{path}, row {row}", text
    except UnicodeDecodeError:
        raise CorpusError(f"{path}, between rows {row + 1} and {row + ROWS}: not UTF-8") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise CorpusError(f"{path}: not a readable Parquet file ({' '.join(str(error).split())}); copy it again") from None


def _check_column(schema: Any, text_field: str, path: Path) -> None:
    from pyarrow import types

    if text_field not in schema.names:
        raise CorpusError(f"{path}: no column {text_field!r} (found: {', '.join(schema.names)}); choose one with --text-field")
    found = schema.field(text_field).type
    value = found.value_type if types.is_dictionary(found) else found
    if not (types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)):
        raise CorpusError(f"{path}: the column {text_field!r} is of type {found}, expected text")


READERS: dict[str, Callable[[Path, str], Iterator[tuple[str, str]]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
