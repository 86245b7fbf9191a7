"""Rewrites the README's table of config keys from the dataclasses. `--check` only says whether it is up to date (status 1 if not)."""

import dataclasses
import sys
import typing
from pathlib import Path

from pretrain.config import Config, to_dict

README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- config table: scripts/write_config_table.py -->\n", "<!-- end of config table -->"


def table() -> str:
    lines = ["| key | default | what |", "|---|---|---|"]
    for section in dataclasses.fields(Config):
        for key in dataclasses.fields(typing.get_type_hints(Config)[section.name]):
            default = to_dict(key.default) if key.default is not dataclasses.MISSING else {}
            shown = "" if default in (None, "", [], {}) else f"`{str(default).lower() if isinstance(default, bool) else default}`"
            lines.append(f"| `{section.name}.{key.name}` | {shown} | {key.metadata['doc']} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    text = README.read_text("utf-8")
    before, rest = text.split(START)
    wanted = before + START + table() + END + rest.split(END, 1)[1]
    if "--check" in sys.argv:
        return int(text != wanted)
    README.write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
