"""Which function reads which source. A new format is a function from (source, reading) to documents, and its line in `READERS`."""

import shlex
import zlib
from collections.abc import Callable, Iterator

from pretrain.corpus.documents import Bad, Found, Reading
from pretrain.corpus.json_array import read_json
from pretrain.corpus.lines import documents_in, overlaps_itself, read_fragments, read_jsonl, read_txt
from pretrain.corpus.sources import BLOCK, Source
from pretrain.corpus.tables import read_arrow, read_csv, read_parquet, row_groups

READERS: dict[str, Callable[[Source, Reading], Iterator[Found]]] = {
    ".txt": read_txt,
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}


_DAMAGED = "rest of a file, damaged archive"


def has_ranges(source: Source, reading: Reading) -> bool:
    """Whether documents can be read from the middle of the file."""
    if source.format == ".parquet":
        return True
    if source.compression or not reading.bytewise:
        return False
    if source.format == ".txt":
        return reading.documents in ("line", "blank-line") or (reading.documents != "file" and not overlaps_itself(reading.separator))
    return source.format in (".jsonl", ".ndjson")


def read(source: Source, reading: Reading, fragments: bool = False) -> Iterator[Found]:
    """All documents of a source. With `fragments` a `.txt` that is one document comes cut at line breaks, in bounded memory."""
    if source.compression and not source.bytes:
        yield Bad("", _DAMAGED, "cut short: it is empty, and no archive; copy it again")
        return
    try:
        if fragments and source.format == ".txt" and reading.documents == "file":
            yield from read_fragments(source, reading)
        else:
            yield from READERS[source.format](source, reading)
    except UnicodeError as error:  # more than UnicodeDecodeError: UTF-16 without a mark
        reason = getattr(error, "reason", error)
        yield Bad(
            "",
            f"rest of a file, not {reading.encoding}",
            f"not {reading.encoding} ({reason}); name its --encoding, or convert it with iconv",
        )
    except (EOFError, zlib.error, OSError) as error:
        if not source.compression:
            raise
        if "too much memory" in str(error):  # zstd's word: it opens a window of 128 MiB at most
            piped = f"zstd -d --long=31 -c {shlex.quote(source.path)} | pretrain prepare - --format {source.format[1:]}"
            yield Bad("", "file of a large zstd window", f"made with a larger window than is opened here; pipe it in: {piped}")
            return
        yield Bad("", _DAMAGED, f"cut short or damaged ({' '.join(str(error).split())}); copy it again")


def read_range(source: Source, reading: Reading, start: int, stop: int) -> Iterator[Found]:
    """The documents that begin in bytes [start, stop) of a source that `has_ranges`."""
    if source.format == ".parquet":
        yield from row_groups(source, reading, start, stop)
        return
    with open(source.file, "rb") as file:
        yield from documents_in(file, source, reading, start, stop)


def locate(source: Source, place: str) -> str:
    """A place for the user: a byte becomes a line, at the cost of reading the file up to there."""
    if not place.startswith("@"):
        return source.path + place
    left, line = int(place[1:]), 1
    try:
        with open(source.file, "rb") as file:
            while left and (block := file.read(min(left, BLOCK))):
                line += block.count(b"\n")
                left -= len(block)
    except OSError:  # parts may be merged where the sources are not
        return f"{source.path}, byte {int(place[1:]):,}"
    return f"{source.path}:{line}"
