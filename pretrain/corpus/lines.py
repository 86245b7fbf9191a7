"""Documents made of lines: `.txt` and JSON Lines. Each belongs to the range of bytes in which it begins, so that ranges, read by anyone
in any order, give each document once.

Lines end with LF or CRLF (a `.txt` that is one document, or one for each line, also with a lone CR); a byte-order mark at the start of a
file is dropped.
"""

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from pretrain.corpus.documents import Bad, Document, Found, Reading, WholeHash, decode, open_source
from pretrain.corpus.sources import BLOCK, Source

PIECE = 1 << 20  # bytes of a text that comes in fragments, at least
# Where GPT-2's regular expression cuts in any case: before a line break after what is no white space. In UTF-8, and in others after ASCII.
_SPACES = ("\xc2[\x85\xa0]", "\xe1\x9a\x80", "\xe2\x80[\x80-\x8a\xa8\xa9\xaf]", "\xe2\x81\x9f", "\xe3\x80\x80")
_CUT_UTF8 = re.compile(f"(?<=[!-~\x80-\xbf]){''.join(f'(?<!{space})' for space in _SPACES)}\r?\n".encode("latin-1"))
_CUT_ASCII = re.compile(rb"(?<=[!-~])\r?\n")
_BLANK = b" \t\n\r\x0b\x0c"


def _plain(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _text(data: bytes, place: str, reading: Reading) -> Found:
    """A document of a `.txt`."""
    if b"\0" in data:
        return Bad(place, "NUL bytes", "holds NUL bytes, so it is no text; UTF-16 would be --encoding utf-16, or utf-16-le")
    text = decode(data, place, reading)
    return text if isinstance(text, Bad) else Document(place, _plain(text))


def read_txt(source: Source, reading: Reading) -> Iterator[Found]:
    with open_source(source, reading) as file:
        if reading.documents == "file":
            yield _text(file.read().removeprefix(codecs.BOM_UTF8), "", reading)
        else:
            yield from documents_in(file, source, reading)


def read_fragments(source: Source, reading: Reading) -> Iterator[Found]:
    """One document in pieces of about a megabyte, which tokenise as the whole does. Two passes: its hash comes with each piece."""
    whole, blank, line, size = WholeHash(), True, 1, 0
    for piece in _pieces(source, reading):
        found = _text(piece, f":{line}", reading)
        if isinstance(found, Bad):
            yield found
            return
        whole.update(found.text.encode())
        blank, size = blank and (not found.text or found.text.isspace()), size + len(piece)
        line += piece.count(b"\n")
    if blank:
        yield Document("", " " if size else "")
        return
    ahead = None
    for number, piece in enumerate(_pieces(source, reading)):
        if ahead is not None:
            yield ahead
        found = _text(piece, "", reading)
        if isinstance(found, Bad):
            return  # it has changed since the first pass, which the preparation finds out
        ahead = Document("", found.text, number, False, whole.digest())
    if ahead is not None:
        yield ahead._replace(last=True) if ahead.fragment else Document("", ahead.text)


def _pieces(source: Source, reading: Reading) -> Iterator[bytes]:
    searched, safe_cut = PIECE, _CUT_UTF8 if reading.bytewise in ("utf-8", "") else _CUT_ASCII
    with open_source(source, reading) as file:
        held = bytearray(file.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8))
        while block := file.read(PIECE):
            held += block
            while cut := safe_cut.search(held, searched):
                piece = bytes(held[: cut.start()])
                yield piece
                del held[: len(piece)]
                searched = PIECE
            searched = max(PIECE, len(held) - 1)
    yield bytes(held)


def documents_in(file: BinaryIO, source: Source, reading: Reading, start: int = 0, stop: float = float("inf")) -> Iterator[Found]:
    """Of a format made of lines; `file` must be able to seek only if the range has a start."""
    numbered = start == 0 and stop == float("inf")  # read from the start, so that the number of a line is known
    if source.format != ".txt":
        for number, at, line in _lines(file, start, stop):
            if line.strip():
                yield json_line(line, f":{number}" if numbered else f"@{at}", reading)
    elif reading.documents == "line":
        for number, at, line in _lines(file, start, stop):
            for part in line.replace(b"\r\n", b"\n").removesuffix(b"\n").removesuffix(b"\r").split(b"\r"):
                yield _text(part, f":{number}" if numbered else f"@{at}", reading)
    elif reading.documents == "blank-line":
        yield from _paragraphs(file, reading, start, stop, numbered)
    else:
        yield from _separated(file, reading, start, stop, numbered)


def _lines(file: BinaryIO, start: int, stop: float) -> Iterator[tuple[int, int, bytes]]:
    """(number, counted from where it starts; first byte; bytes) of each line that begins in [start, stop)."""
    at = _first_line(file, start, stop) if start else 0
    for number, line in enumerate(file if at < stop else (), 1):
        yield number, at, line.removeprefix(codecs.BOM_UTF8) if at == 0 else line
        at += len(line)
        if at >= stop:
            return


def _first_line(file: BinaryIO, start: int, stop: float) -> int:
    """Where the first line at or after `start` begins; at least `stop` if none does before it, for which no more is read."""
    at = start - 1
    file.seek(at)
    while at < stop and (part := file.readline(PIECE)):
        at += len(part)
        if part.endswith(b"\n"):
            break
    return at


def _paragraphs(file: BinaryIO, reading: Reading, start: int, stop: float, numbered: bool) -> Iterator[Found]:
    """Lines that follow each other without a blank one between."""
    first = _first_line(file, start, stop) if start else 0
    if first >= stop:
        return
    before = _line_before(file, first)
    held: list[bytes] = []
    place, within = "", bool(before.strip(_BLANK))  # within: the lines at hand belong to a paragraph that began before
    for number, at, line in _lines(file, first, float("inf")):
        if not line.strip(_BLANK):
            if held:
                yield _text(b"".join(held).rstrip(b"\r\n"), place, reading)
            held, within = [], False
            if at >= stop:
                return
        elif not within and not held:
            if at >= stop:
                return
            held, place = [line], f":{number}" if numbered else f"@{at}"
        elif not within:
            held.append(line)
        elif at >= stop:
            return
    if held:
        yield _text(b"".join(held).rstrip(b"\r\n"), place, reading)


def _line_before(file: BinaryIO, end: int) -> bytes:
    """The line that ends at `end`: at least whatever of it is not blank."""
    begin = end
    while begin:
        begin = max(0, begin - 4096)
        file.seek(begin)
        line = file.read(end - begin).removesuffix(b"\n").rpartition(b"\n")
        if line[1] or line[2].strip(_BLANK):
            return line[2]
    return b""


def _separated(file: BinaryIO, reading: Reading, start: int, stop: float, numbered: bool) -> Iterator[Found]:
    """What lies between separators, without the line breaks around them."""
    separator = re.compile(re.escape(reading.separator).replace(b"\\\n", rb"\r?\n"))
    longest = len(reading.separator) + reading.separator.count(b"\n")
    offset = max(0, start - longest)  # of what is held, in the file
    if start:
        file.seek(offset)
    held, at, line, mine = file.read(BLOCK), 0, 1, start == 0
    if mine:
        at = len(codecs.BOM_UTF8) if held.startswith(codecs.BOM_UTF8) else 0
    searched = at
    while True:
        found = separator.search(held, searched)
        if not found and not mine and offset + len(held) >= stop:
            return  # a document that began before, and goes on
        if not found and (more := file.read(max(BLOCK, len(held) - at))):
            searched = max(at, len(held) - longest + 1) - at
            held, at, offset = held[at:] + more, 0, offset + at
            continue
        data = held[at : found.start()] if found else held[at:]
        if mine and (data or found or not offset + at):  # after a last separator there is no document
            lead = len(data) - len(data.lstrip(b"\r\n"))
            first = line + data.count(b"\n", 0, lead)
            yield _text(data.strip(b"\r\n"), f":{first}" if numbered else f"@{offset + at + lead}", reading)
        if not found:
            return
        line += held.count(b"\n", at, found.end())
        at = searched = found.end()
        mine = offset + at >= start
        if offset + at >= stop:
            return


def overlaps_itself(separator: bytes) -> bool:
    """Then where it is found depends on where the search began."""
    return any(separator[:n] == separator[-n:] for n in range(1, len(separator)))


def read_jsonl(source: Source, reading: Reading) -> Iterator[Found]:
    with open_source(source, reading) as file:
        yield from documents_in(file, source, reading)


def json_line(line: bytes, place: str, reading: Reading) -> Found:
    text = decode(line.rstrip(), place, reading)
    if isinstance(text, Bad):
        return text
    try:
        return of_row(JSON.decode(text), place, reading)
    except (ValueError, RecursionError) as error:
        at = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        return Bad(place, "not JSON", f"not one JSON object ({getattr(error, 'msg', error)}{at}); mend the line")


def of_row(row: Any, place: str, reading: Reading) -> Found:
    field = reading.text_field
    if not isinstance(row, dict):
        return Bad(place, "no object", f"expected a JSON object with a field {field!r}, found {_kind(row)}")
    if field not in row:
        found = ", ".join(row) or "no field"
        return Bad(place, f"no {field}", f"no field {field!r} (found: {found}); choose one with --text-field, or mend the line")
    text = row[field]
    if not isinstance(text, str):
        kind = _kind(text)
        return Bad(place, kind if text is None else "not text", f"the field {field!r} is {kind}, expected text")
    return Document(place, text)


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return row


JSON = json.JSONDecoder(object_pairs_hook=_unique, parse_int=float)  # Python refuses to read an int of 5,000 digits


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
