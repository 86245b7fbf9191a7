"""Rewrites the README's tables of config keys and of strategies' options from the dataclasses. `--check` only says whether they are up to
date (status 1 if not)."""

import dataclasses
import inspect
import math
import re
import sys
import typing
from pathlib import Path
from typing import Any

from pretrain.config import Config, to_dict
from pretrain.strategies import OPTIONS

README = Path(__file__).parents[1] / "README.md"


def config_table() -> str:
    lines = ["| key | default | what |", "|---|---|---|"]
    for section in dataclasses.fields(Config):
        for key in dataclasses.fields(typing.get_type_hints(Config)[section.name]):
            default = key.default if key.default is not dataclasses.MISSING else {}
            lines.append(f"| `{section.name}.{key.name}` | {shown(default)} | {key.metadata['doc']} |")
    return "\n".join(lines) + "\n"


def options_table() -> str:
    """What several strategies have alike is one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for strategy, cls in OPTIONS.items():
        for option in dataclasses.fields(cls):
            row = (option.name, shown(option.default), allowed(cls, option.name), comment(cls, option.name))
            rows.setdefault(row, []).append(strategy)
    lines = ["| `strategy.options.` | of | default | what |", "|---|---|---|---|"]
    for (name, default, limits, what), strategies in rows.items():
        lines.append(f"| `{name}` | {' '.join(f'`{s}`' for s in strategies)} | {default} | {what}{limits} |")
    return "\n".join(lines) + "\n"


def shown(default: Any) -> str:
    default = to_dict(default)
    return "" if default in (None, "", [], {}) else f"`{str(default).lower() if isinstance(default, bool) else default}`"


def allowed(cls: type, name: str) -> str:
    least, most = getattr(cls, "limits", {}).get(name, (None, None))
    if least is None:
        return ""
    return f" (at least {least:g})" if most == math.inf else f" ({least:g} to {most:g})"


def comment(cls: type, name: str) -> str:
    """The comment behind the option, in its class or the nearest one above that has one."""
    for parent in cls.__mro__[:-1]:
        if match := re.search(rf"^    {name}: [^#\n]*#\s*(.+)$", inspect.getsource(parent), re.MULTILINE):
            return match[1]
    return ""


def main() -> int:
    text = wanted = README.read_text("utf-8")
    for name, table in (("config", config_table()), ("options", options_table())):
        start, end = f"<!-- {name} table: scripts/write_config_table.py -->\n", f"<!-- end of {name} table -->"
        before, rest = wanted.split(start)
        wanted = before + start + table + end + rest.split(end, 1)[1]
    if "--check" in sys.argv:
        return int(text != wanted)
    README.write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
