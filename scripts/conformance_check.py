"""Is an interrupted run the uninterrupted one? Reads two run folders, and says in words where they differ. Changes nothing."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from pretrain import checkpoint
from pretrain.config import ConfigError
from pretrain.inspection import check_ledger
from pretrain.runfolder import read_status

# How fast, how much memory and in which start a step was taken, and what a resumed local method knows when it next meets: may differ.
MAY_DIFFER = {"tokens_per_second", "tokens_per_second_per_device", "mfu", "step_seconds", "data_seconds", "train_seconds", "peak_memory_bytes",
              "restarts", "time"}  # fmt: skip
Line = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """What the uninterrupted run came to."""

    metrics: Sequence[Line]
    windows: dict[int, Any]
    tensors: dict[str, str]
    exported: dict[str, str]

    @property
    def steps(self) -> int:
        return int(self.metrics[-1]["step"])


def read_reference(folder: Path) -> Reference:
    metrics = [_comparable(line) for line in _lines(folder / "metrics.jsonl")[0]]
    windows = {line["step"]: (line["position"], line["windows"]) for line in _steps_taken(folder)[0]}
    final = checkpoint.path_of(folder / "checkpoints", metrics[-1]["step"])
    return Reference(metrics, windows, tensor_hashes(final), exported_hashes(folder))


def whole(folder: Path, reference: Reference) -> list[str]:
    """Everything that a finished run must share with its reference."""
    problems = [*records(folder, reference), *_status_of_the_end(folder, reference.steps)]
    missing = reference.metrics[len(_lines(folder / "metrics.jsonl")[0]) :]
    problems += [f"metrics.jsonl ends before {_name(missing[0])}"] if missing else []
    steps = {line["step"] for line in _steps_taken(folder)[0]}
    problems += [f"ledger.jsonl has no step {step}" for step in sorted(reference.windows.keys() - steps)[:1]]
    try:
        check_ledger(folder / "ledger.jsonl")
    except (ConfigError, ValueError, KeyError, TypeError) as error:
        problems.append(f"pretrain inspect --ledger: {type(error).__name__}: {error}")
    final = checkpoint.path_of(folder / "checkpoints", reference.steps)
    if problem := verified(final):
        return [*problems, f"{final.name}: {problem}"]
    problems += _differing(f"{final.name}: tensor", tensor_hashes(final), reference.tensors)
    problems += [f"{path.relative_to(folder)} was left behind" for path in folder.glob("checkpoints/*.tmp")]
    return problems + _differing("exported", exported_hashes(folder), reference.exported)


def records(folder: Path, reference: Reference) -> list[str]:
    """What holds at any moment between two starts: the log is the reference's beginning, and so are the windows of every step taken."""
    lines, problems = _lines(folder / "metrics.jsonl")
    for i, line in enumerate(lines):
        if i >= len(reference.metrics):
            problems.append(f"metrics.jsonl goes on with {_name(line)} after the end")
            break
        if (found := _comparable(line)) != (expected := reference.metrics[i]):
            keys = [key for key in {**expected, **found} if found.get(key) != expected.get(key)]
            what = f"{keys[0]} {found.get(keys[0])!r} instead of {expected.get(keys[0])!r}"
            problems.append(f"metrics.jsonl, line {i + 1}, {_name(line)}: {what}")
            break
    taken = [_name(line) for line in lines]
    problems += [f"metrics.jsonl has {twice} twice" for twice in sorted({name for name in taken if taken.count(name) > 1})[:1]]
    entries, torn = _steps_taken(folder)
    problems += torn
    for entry in entries:
        if (entry["position"], entry["windows"]) != reference.windows.get(entry["step"]):
            problems.append(f"ledger.jsonl: step {entry['step']} was trained on other windows ({entry['position']}, {entry['windows']})")
            break
    return problems


def steps_repeated(folder: Path) -> int:
    steps = [line["step"] for line in _steps_taken(folder)[0]]
    return len(steps) - len(set(steps))


def last_step(path: Path) -> int:
    """Of metrics.jsonl or ledger.jsonl, as far as it is written; -1 before its first line."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 4096))
            tail = file.read()
        return int(json.loads(tail[: tail.rindex(b"\n")].splitlines()[-1])["step"])
    except (OSError, ValueError, KeyError, IndexError):
        return -1


def verified(path: Path) -> str | None:
    """What is wrong with a checkpoint, by the product's own word; an exception of its is wrong too."""
    try:
        return checkpoint.verify(path)
    except Exception as error:
        return f"checkpoint.verify raises {type(error).__name__}: {error}"


def valid_steps(folder: Path) -> list[int]:
    return sorted(step for step, path in checkpoint.numbered(folder / "checkpoints") if verified(path) is None)


def status_problems(folder: Path, status: Line | None, exit_status: int | None, steps: int, *, trained: bool) -> list[str]:
    """Whether status.json and the exit status (None: nobody was left to return one) say what the run folder shows.

    status: what this start wrote, None where it wrote nothing. trained: whether it got so far; the step is that of the last start if not.
    """
    if status is None:
        return [f"exit status {exit_status}, and status.json is of an earlier start"] if exit_status == 0 else []
    state, valid = status["state"], valid_steps(folder)
    problems = []
    if exit_status is not None:
        expected = {"finished": 0, "stopped": 75, "refused": 2, "failed": 1}.get(state)
        if exit_status != expected:
            problems.append(f"exit status {exit_status}, and status.json says {state}")
        elif status["exit_status"] != expected:
            problems.append(f"status.json says {state} and exit_status {status['exit_status']}")
    if state == "finished" and (status["step"] != steps or steps not in valid):
        problems.append(f"status.json says finished at step {status['step']}; valid checkpoints are {valid}")
    if state == "stopped" and trained and status["step"] not in (valid or [0]):
        problems.append(f"status.json says stopped at step {status['step']} ({status['reason']}); valid checkpoints are {valid}")
    if state in ("failed", "refused") and not status["reason"]:
        problems.append(f"status.json says {state} without a reason")
    return problems


def tensor_hashes(path: Path) -> dict[str, str]:
    """Every tensor of a checkpoint, weights, moments and extras, by group, file and name."""
    return dict(_tensors(path, sorted(path.glob("*/*.safetensors"))))


def exported_hashes(folder: Path) -> dict[str, str]:
    """The weights that `pretrain export` makes of a run's last checkpoint."""
    import tempfile

    from pretrain import export

    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "exported"
        export.export(export.open_trained(folder, lambda _: None), output)
        return dict(_tensors(output, sorted(output.glob("*.safetensors"))))


def _tensors(root: Path, paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    for path in paths:
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 — not a dict
                tensor = file.get_tensor(name)
                digest = hashlib.sha256(f"{tensor.dtype}{tensor.shape}".encode() + tensor.tobytes()).hexdigest()
                yield f"{path.relative_to(root)}: {name}", digest


def _differing(what: str, found: dict[str, str], expected: dict[str, str]) -> list[str]:
    differ = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    return [f"{what} {differ[0]} differs, with {len(differ) - 1} others of {len(expected)}"] if differ else []


def _status_of_the_end(folder: Path, steps: int) -> list[str]:
    status = read_status(folder)
    if status is None or (status["state"], status["exit_status"], status["step"]) != ("finished", 0, steps):
        return [f"status.json is {status}"]
    return []


def _steps_taken(folder: Path) -> tuple[list[Line], list[str]]:
    """The ledger's, without rollbacks and starts from other runs' checkpoints."""
    found, problems = _lines(folder / "ledger.jsonl")
    return [entry for entry in found if "windows" in entry], problems


def _lines(path: Path) -> tuple[list[Line], list[str]]:
    """(a file's JSON lines, what is wrong with others): a line that was cut short is named."""
    found: list[Line] = []
    problems = []
    content = path.read_text("utf-8", errors="replace") if path.exists() else ""
    for number, line in enumerate(content.splitlines(), 1):
        try:
            entry = json.loads(line)
            entry["step"]
            found.append(entry)
        except (ValueError, KeyError, TypeError):
            problems.append(f"{path.name}, line {number}, is no record: {line[:80]!r}")
    return found, problems


def _comparable(line: Line) -> Line:
    return {key: value for key, value in line.items() if key not in MAY_DIFFER}


def _name(line: Line) -> str:
    return f"{'the evaluation at ' if 'val_loss' in line else ''}step {line['step']}"
