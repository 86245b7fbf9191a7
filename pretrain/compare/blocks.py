"""A report as a list of blocks, written as Markdown, and as one HTML file that needs nothing beside it."""

import base64
import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #111; background: #fff; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { vertical-align: bottom; border-bottom: 2px solid #111; white-space: normal; } th:first-child, td:first-child { text-align: left; }
figure { display: inline-block; margin: 1rem 1.5rem 1rem 0; } img { max-width: 100%; } figcaption { font-size: 14px; max-width: 32rem; }
pre { background: #f4f4f4; padding: .8rem; overflow-x: auto; } p.note { background: #fff6d6; border-left: 4px solid #c90; padding: .5rem .8rem; }
"""


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str
    note: bool = False  # not to be missed


@dataclass(frozen=True)
class Command:
    text: str


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    png: Path
    caption: str


Block = Heading | Text | Command | Table | Figure


def as_markdown(blocks: Sequence[Block]) -> str:
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return "#" * level + " " + text
        case Text(text, note):
            return f"> {text}" if note else text
        case Command(text):
            return f"```\n{text}\n```"
        case Table(header, rows):
            lines = [header, [":--", *["--:"] * (len(header) - 1)], *rows]
            return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        case Figure(png, caption):
            return f"![{caption}]({png.name})\n\n{caption}"


def as_html(title: str, blocks: Sequence[Block]) -> str:
    body = "\n".join(_html(block) for block in blocks)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Text(text, note):
            return f"<p{' class=note' if note else ''}>{html.escape(text)}</p>"
        case Command(text):
            return f"<pre>{html.escape(text)}</pre>"
        case Table(header, rows):
            return f'<div class="table"><table>\n{"".join(_html_rows(header, rows))}</table></div>'
        case Figure(png, caption):
            data = base64.b64encode(png.read_bytes()).decode()
            return f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,{data}"><figcaption>{html.escape(caption)}</figcaption></figure>'


def _html_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "<thead><tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in header) + "</tr></thead>\n<tbody>\n"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n"
    yield "</tbody>"
