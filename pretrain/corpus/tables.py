"""Documents in columns: `.csv`, `.parquet` and `.arrow`."""

import csv
import io
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from pretrain.corpus.documents import Bad, Document, Found, Reading, open_source
from pretrain.corpus.sources import Source

ROWS = 64  # of a table at a time, so that Arrow's 32-bit offsets are enough
BYTES = 16 << 20  # of a table at a time, where its rows are large


def read_csv(source: Source, reading: Reading) -> Iterator[Found]:
    """The first row names the columns."""
    csv.field_size_limit(sys.maxsize)
    encoding = reading.bytewise or "utf-8"
    field = reading.text_field
    with open_source(source, reading) as file:
        # Bytes that are not text pass as surrogates, so that one row is bad and not the rest of the file.
        text = io.TextIOWrapper(file, "utf-8-sig" if encoding == "utf-8" else encoding, errors="surrogateescape", newline="")
        rows = csv.reader(text, strict=True)
        try:
            names = next(rows, None)
            if names is None:
                return
            if names.count(field) != 1:
                yield Bad("", f"file without {field}", _no_column(names, field))
                return
            column = names.index(field)
            line = rows.line_num + 1
            for row in rows:
                if row:
                    yield _csv_row(row, column, len(names), f":{line}", reading)
                line = rows.line_num + 1
        except csv.Error as error:
            yield Bad(f":{rows.line_num}", "rest of a file, not CSV", f"not CSV ({error}); mend it (the rest of the file can't be read)")


def _csv_row(row: list[str], column: int, columns: int, place: str, reading: Reading) -> Found:
    if len(row) != columns:
        return Bad(place, "not CSV", f"{len(row)} columns, the first row has {columns}; mend it")
    try:
        row[column].encode()
    except UnicodeEncodeError:
        return Bad(place, f"not {reading.encoding}", f"not {reading.encoding.upper()}; name its --encoding, or convert it with iconv")
    if "\0" in row[column]:
        return Bad(place, "NUL bytes", "holds NUL bytes, so it is no text")
    return Document(place, row[column])


def read_parquet(source: Source, reading: Reading) -> Iterator[Found]:
    yield from row_groups(source, reading, 0, source.bytes)


def row_groups(source: Source, reading: Reading, start: int, stop: int) -> Iterator[Found]:
    """Those that begin in [start, stop) if all were of one size: which is read where needs no look into the file."""
    import pyarrow
    import pyarrow.parquet

    row, mine = 0, [0] if start == 0 else []  # whoever reads the start tells what is wrong with the whole
    try:
        with pyarrow.parquet.ParquetFile(source.file) as file:
            if bad := _column(file.schema_arrow, reading.text_field):
                yield from [bad] if start == 0 else []
                return
            groups = file.num_row_groups
            mine = [group for group in range(groups) if start <= group * source.bytes // groups < stop]
            row = sum(file.metadata.row_group(group).num_rows for group in range(mine[0])) if mine else 0
            rows = rows_at_once(file.metadata, mine, reading.text_field)
            for batch in file.iter_batches(rows, row_groups=mine, columns=[reading.text_field]) if mine else ():
                yield from rows_of(_texts(batch.column(0)), row, reading)
                row += len(batch)
    except (pyarrow.ArrowException, OSError) as error:
        if mine:
            yield _damaged("Parquet", row, error)


def rows_at_once(metadata: Any, groups: Iterable[int], field: str) -> int:
    """Of Parquet: about `BYTES` of text by what the file states of its row groups, and at most `ROWS`."""
    column = next(n for n in range(len(metadata.schema)) if metadata.schema.column(n).path == field)
    sizes = ((group.num_rows, group.column(column).total_uncompressed_size) for group in map(metadata.row_group, groups))
    return int(min([ROWS, *(max(1, BYTES * rows // max(size, 1)) for rows, size in sizes)]))


def _damaged(kind: str, row: int, error: Exception) -> Bad:
    reason = " ".join(str(error).split())[:200]
    return Bad(
        f", after row {row}" if row else "", "rest of a file, damaged table", f"not a readable {kind} file ({reason}); copy it again"
    )


def read_arrow(source: Source, reading: Reading) -> Iterator[Found]:
    """Arrow's IPC file, or its stream, which `datasets` saves."""
    import pyarrow

    row = 0
    try:
        with pyarrow.memory_map(source.file) as file:
            try:
                opened: Any = pyarrow.ipc.open_file(file)
                batches: Iterable[Any] = (opened.get_batch(n) for n in range(opened.num_record_batches))
            except pyarrow.ArrowInvalid:
                file.seek(0)
                opened = batches = pyarrow.ipc.open_stream(file)
            if bad := _column(opened.schema, reading.text_field):
                yield bad
                return
            for batch in batches:
                column = batch.column(opened.schema.names.index(reading.text_field))
                for begin in range(0, len(column), ROWS):
                    yield from rows_of(_texts(column.slice(begin, ROWS)), row + begin, reading)
                row += len(column)
    except (pyarrow.ArrowException, OSError) as error:
        yield _damaged("Arrow", row, error)


def rows_of(values: Iterable[Any], before: int, reading: Reading) -> Iterator[Found]:
    """The documents of a column, after `before` rows."""
    for number, value in enumerate(values, before + 1):
        place = f", row {number}"
        if isinstance(value, str):
            yield Document(place, value)
        elif isinstance(value, bytes):
            yield Bad(place, "not utf-8", f"the column {reading.text_field!r} is not UTF-8")
        else:
            what = "null" if value is None else "not text"
            yield Bad(place, what, f"the column {reading.text_field!r} is {'null' if value is None else f'{value!r:.40}'}, expected text")


def _texts(column: Any) -> list[Any]:
    try:
        texts: list[Any] = column.to_pylist()
        return texts
    except UnicodeDecodeError:
        return [_or_bytes(value) for value in column]


def _or_bytes(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return b""


def _no_column(names: list[str], field: str) -> str:
    if field in names:
        return f"two columns {field!r}: rename one"
    commas = "; columns are separated by commas alone" * (len(names) == 1 and any(mark in names[0] for mark in ";\t|"))
    return f"no column {field!r} (found: {', '.join(names)[:200]}); choose one with --text-field{commas}"


def _column(schema: Any, field: str) -> Bad | None:
    from pyarrow import types

    if schema.names.count(field) != 1:
        return Bad("", f"file without {field}", _no_column(schema.names, field))
    found = schema.field(field).type
    value = found.value_type if types.is_dictionary(found) else found
    if not (types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)):
        return Bad("", "not text", f"the column {field!r} is of type {found}, expected text")
    return None
