"""What is in a run folder, and whether it is whole."""

import json
from pathlib import Path

from pretrain import checkpoint
from pretrain.config import ConfigError
from pretrain.runfolder import read_status


def inspect_run(folder: Path, *, ledger: bool) -> list[str]:
    """Raises ConfigError where --ledger finds a window that was skipped or trained on twice."""
    status = read_status(folder)
    lines = (
        [f"state       {status['state']} at step {status['step']:,}" + (f": {status['reason']}" if status["reason"] else "")]
        if status
        else ["state       never started"]
    )
    for _, path in sorted(checkpoint.numbered(folder / "checkpoints")):
        lines.append(f"checkpoint  {path.name}: {checkpoint.verify(path) or 'whole'}")
    return [*lines, *(check_ledger(folder / "ledger.jsonl") if ledger else ())]


def check_ledger(path: Path) -> list[str]:
    """Follows the ledger over all restarts: the positions of the steps that count must join, from 0 or from where the checkpoint of another
    run was taken. Raises ConfigError where they don't."""
    if not path.exists():
        raise ConfigError(f"{path} is missing: no step was taken")
    history: dict[int, tuple[int, int]] = {}
    passed_over: dict[int, int] = {}  # first window -> end
    repeated = retried = torn = 0
    restarts = set()
    begins, begun_from = 0, ""
    for line in path.read_text("utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            torn += 1
            continue
        if "from" in entry:
            begins, begun_from = entry["position"], entry["from"]
            repeated += len(history)
            history, passed_over = {}, {}
            continue
        if "passed_over" in entry:
            begin, passed_over[begin] = entry["passed_over"]
            given_up = [step for step in history if step > entry["back_to"]]
            repeated += len(given_up)
            history = {step: span for step, span in history.items() if step not in given_up}
            continue
        restarts.add(entry["restart"])
        step = entry["step"]
        if entry["attempt"]:
            retried += 1
        else:
            repeated += step in history
            for later in [s for s in history if s > step]:  # given up: the run went back to a checkpoint
                del history[later]
                repeated += 1
        history[step] = tuple(entry["position"])
    if not history:
        raise ConfigError(f"{path}: no step was taken")
    position = begins
    for step in sorted(history):
        start, stop = history[step]
        while position < start and position in passed_over:
            position = passed_over[position]
        if start != position:
            what = "skipped" if start > position else "trained on twice"
            raise ConfigError(
                f"{path}: step {step} starts at position {start:,}, the step before it ended at {position:,}: windows were {what}"
            )
        for begin, end in passed_over.items():
            if start < end and begin < stop:
                raise ConfigError(f"{path}: step {step} was trained on windows {begin:,} to {end:,}, which a rollback had passed over")
        position = stop
    left_out = sum(end - begin for begin, end in passed_over.items())
    return [
        f"ledger      steps {min(history):,} to {max(history):,} join without gap or overlap: positions {begins:,} to {position:,}, each window once per epoch",
        *([f"            begun from {begun_from}"] if begun_from else ()),
        f"            {len(restarts)} starts; {repeated:,} steps were taken again after a restart, {retried:,} retried at a lower loss scale",
        *([f"            {torn} lines are torn"] if torn else ()),
        *([f"            {left_out:,} windows were passed over by rollbacks"] if left_out else ()),
    ]
