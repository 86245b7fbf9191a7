"""`.json`: an array of objects, or objects one after the other, never all of it in memory."""

import codecs
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from pretrain.corpus.documents import Bad, Found, Reading, open_source
from pretrain.corpus.lines import JSON, of_row
from pretrain.corpus.sources import Source

BLOCK = 1 << 16  # bytes


def read_json(source: Source, reading: Reading) -> Iterator[Found]:
    with open_source(source, reading) as file:
        encoding = reading.bytewise or "utf-8"
        decode = codecs.getincrementaldecoder("utf-8-sig" if encoding == "utf-8" else encoding)().decode
        for number, (value, error) in enumerate(_values(_decoded(file, decode)), 1):
            if error:
                yield Bad(f", item {number}", "rest of a file, not JSON", f"{error}; mend it (the rest of the file can't be read)")
            else:
                yield of_row(value, f", item {number}", reading)


def _decoded(file: BinaryIO, decode: Callable[..., str]) -> Iterator[str]:
    while block := file.read(BLOCK):
        yield decode(block)
    yield decode(b"", True)


class _Buffer:
    """The text at hand of a longer one: `text[at:]` is still to be read."""

    def __init__(self, blocks: Iterator[str]) -> None:
        self.blocks, self.text, self.at, self.ended = blocks, "", 0, False

    def fill(self, size: int) -> None:
        """Hold `size` more characters, or all that there are."""
        parts, held = [self.text[self.at :]], 0
        while held < size and not self.ended:
            block = next(self.blocks, None)
            self.ended = block is None
            parts.append(block or "")
            held += len(parts[-1])
        self.text, self.at = "".join(parts), 0

    def peek(self) -> str:
        """The next character that is no white space; "" at the end."""
        while True:
            self.at = cast(re.Match[str], _SPACE.match(self.text, self.at)).end()
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self.fill(1)

    def value(self) -> Any:
        """The JSON value that begins here. Raises ValueError or RecursionError."""
        while True:
            try:
                value, end = JSON.raw_decode(self.text, self.at)
                if end < len(self.text) or self.ended:  # else a number may go on
                    self.at = end
                    return value
            except (ValueError, RecursionError) as error:
                incomplete = isinstance(error, json.JSONDecodeError) and (error.pos > len(self.text) - 16 or "Unterminated" in error.msg)
                if not incomplete or self.ended:
                    raise
            self.fill(len(self.text) - self.at)


_SPACE = re.compile(r"[ \t\r\n]*")


def _values(blocks: Iterator[str]) -> Iterator[tuple[Any, str]]:
    """(value, "") of each item; at last (None, what is wrong) where it ends too soon."""
    buffer = _Buffer(blocks)
    array = buffer.peek() == "["
    buffer.at += array
    first = True
    while mark := buffer.peek():
        if array and mark == "]":
            buffer.at += 1
            if buffer.peek():
                yield None, "there is text after the end of the array"
            return
        if array and not first:
            if mark != ",":
                yield None, f"expected a comma or the end of the array, found {mark!r}"
                return
            buffer.at += 1
            buffer.peek()
        first = False
        try:
            yield buffer.value(), ""
        except (ValueError, RecursionError) as error:
            yield None, f"not a JSON value ({getattr(error, 'msg', error)})"
            return
    if array:
        yield None, "the array has no end: the file is cut short"
