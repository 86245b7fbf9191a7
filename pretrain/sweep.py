"""The members of a sweep, for slurm/sweep.sbatch: one array task trains one of them, and each writes the table of all when it ends.

    python -m pretrain.sweep CONFIG MEMBERS [section.key=value …]             how many there are
    python -m pretrain.sweep --member K CONFIG MEMBERS [section.key=value …]  the overrides of the K-th, from 1, each ended by a NUL
    python -m pretrain.sweep --table CONFIG MEMBERS [section.key=value …]     what has become of them, also in RUNS/summary.md

MEMBERS is a text file of lines of overrides, or a YAML file of `section.key: [values]`, of which every combination is a member.
"""

import argparse
import hashlib
import itertools
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pretrain import config
from pretrain.config import ConfigError
from pretrain.runfolder import read_status, write_atomic

_LONGEST = 60  # characters of a run's name


def members(config_file: Path, file: Path, common: Sequence[str] = ()) -> list[list[str]]:
    """Each member's overrides, with a run.name that says what is its own and a run.dir for the sweep. Raises ConfigError."""
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}; expected lines of section.key=value, or a YAML file of section.key: [values]"
        ) from None
    found = _grid(file) if file.suffix in (".yaml", ".yml") else _lines(file, text)
    if not found:
        raise ConfigError(f"{file} names no member; expected lines of section.key=value, or a YAML file of section.key: [values]")
    complete = []
    for own in found:
        given = {override.partition("=")[0] for override in (*common, *own)}
        where = [] if "run.dir" in given else [f"run.dir=runs/{file.stem}"]
        name = [] if "run.name" in {o.partition("=")[0] for o in own} else [f"run.name={_name(config_file, own)}"]
        complete.append([*where, *common, *own, *name])
    names = [next(o for o in reversed(member) if o.startswith("run.name=")) for member in complete]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{file}: two members would be one run ({', '.join(twice)})")
    return complete


def _lines(file: Path, text: str) -> list[list[str]]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            overrides = shlex.split(line, comments=True)
        except ValueError as error:
            raise ConfigError(f"{file}, line {number}: {error}") from None
        if wrong := [word for word in overrides if not re.match(r"\w+\.[\w.]+=", word)]:
            raise ConfigError(f"{file}, line {number}: expected section.key=value, found {wrong[0]!r}")
        if overrides:
            found.append(overrides)
    return found


def _grid(file: Path) -> list[list[str]]:
    try:
        keys = OmegaConf.to_container(OmegaConf.load(file))
    except Exception as error:  # yaml raises a dozen classes; all of them mean that the file is not valid YAML
        raise ConfigError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(keys, dict) or not all("." in str(key) and isinstance(values, list) and values for key, values in keys.items()):
        raise ConfigError(f"{file}: expected section.key: [values] and nothing else, as in  optim.lr: [1e-3, 3e-4]")
    return [
        [f"{key}={_as_written(value)}" for key, value in zip(keys, values, strict=True)] for values in itertools.product(*keys.values())
    ]


def _as_written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _name(config_file: Path, own: Sequence[str]) -> str:
    """`quickstart-lr=0.001-seed=2`: of what the member is, so that a line added before it changes nothing."""
    parts = [override.partition(".")[2].replace("options.", "") for override in own]
    name = "-".join([config_file.stem, *parts])
    plain = re.sub(r"[^\w.=+-]", "_", name)
    if plain == name and len(name) <= _LONGEST:
        return name
    return f"{plain[:_LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def table(config_file: Path, all_members: Sequence[Sequence[str]]) -> tuple[Path | None, str]:
    """(the sweep's folder, None where every member is refused; a Markdown table of every member: how it stands, and its best and last
    validation loss)."""
    lines = ["| run | state | step | best val_loss | last val_loss | loss | seconds | |", "|---|---|---:|---:|---:|---:|---:|---|"]
    folder: Path | None = None
    for member in all_members:
        try:
            run = config.load(str(config_file), list(member)).folder
        except ConfigError as error:
            lines.append(f"| {_given(member, 'run.name')} | refused | | | | | | {_cell(error)} |")
            continue
        folder = run.parent
        status = read_status(run) or {"state": "not started", "step": 0, "reason": ""}
        records = [json.loads(line) for line in _whole_lines(run / "metrics.jsonl")]
        val = [record["val_loss"] for record in records if record.get("val_loss") is not None]
        trained: dict[str, Any] = next((record for record in reversed(records) if "loss" in record), {})
        numbers = [f"{min(val):.4f}" if val else "", f"{val[-1]:.4f}" if val else "", f"{trained['loss']:.4f}" if trained.get("loss") else "",
                   f"{trained['train_seconds']:.0f}" if trained.get("train_seconds") else ""]  # fmt: skip
        reason = "" if status["state"] == "finished" else _cell(status["reason"])
        lines.append(f"| {run.name} | {status['state']} | {status['step']:,} | {' | '.join(numbers)} | {reason} |")
    return folder, "\n".join(lines) + "\n"


def _given(member: Sequence[str], key: str) -> str:
    return next(override.partition("=")[2] for override in reversed(member) if override.startswith(f"{key}="))


def _cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")[:200]


def _whole_lines(path: Path) -> list[str]:
    return [line for line in path.read_text("utf-8").splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pretrain.sweep", description="The members of a sweep, for slurm/sweep.sbatch.")
    parser.add_argument("--member", type=int, metavar="K")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("config", type=Path)
    parser.add_argument("members", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    o = parser.parse_args(arguments)
    try:
        found = members(o.config, o.members, o.overrides)
        if o.member is None and not o.table:
            print(len(found))
        elif o.table:
            folder, text = table(o.config, found)
            if folder and folder.is_dir():
                write_atomic(folder / "summary.md", text)
            print(text, end="")
        elif not 1 <= o.member <= len(found):
            raise ConfigError(f"{o.members} has {len(found)} members and no number {o.member}; write --array=1-{len(found)}")
        else:
            print(*found[o.member - 1], sep="\0", end="\0")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
