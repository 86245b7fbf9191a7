"""Launch after launch, each by `pretrain train` with its own folder; what is done is not done again."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

from omegaconf import OmegaConf

from pretrain.checkpoint import newest_first
from pretrain.compare.members import Launch
from pretrain.config import as_run
from pretrain.runfolder import read_status, write_atomic
from pretrain.supervise import end_with_parent

DONE = "measured.json"  # in a run folder: what compare itself saw of the launch; without it the launch is not done
STOPPED = 75


class Interrupted(Exception):
    """A launch was asked to stop: the comparison goes on another time."""


def run_all(launches: Sequence[Launch], kind: str, say: Callable[[str], None]) -> None:
    """Raises Interrupted."""
    todo = [launch for launch in launches if not (launch.folder / DONE).exists()]
    if len(todo) < len(launches):
        say(f"{len(launches) - len(todo)} of {len(launches)} launches are done already")
    took: dict[str, list[float]] = {}
    so_far: list[float] = []
    for number, launch in enumerate(todo, 1):
        began = time.monotonic()
        outcome = run(launch, kind)
        so_far.append(time.monotonic() - began)
        took.setdefault(launch.member.name, []).append(so_far[-1])
        left = sum(mean(took.get(later.member.name, so_far)) for later in todo[number:])
        say(f"[{number}/{len(todo)}] {title(launch, kind)}: {outcome}, {so_far[-1]:.0f}s" + _left(left))


def title(launch: Launch, kind: str) -> str:
    which = f"repetition {launch.repetition + 1}" if kind == "speed" else f"seed {launch.seed}"
    return f"{launch.member.name} on {launch.member.processes} process{'es' if launch.member.processes > 1 else ''}, {which}"


def _left(seconds: float) -> str:
    if not seconds:
        return ""
    return f"; {seconds:.0f}s left" if seconds < 90 else f"; {seconds / 60:.0f}m left"


def run(launch: Launch, kind: str) -> str:
    """How it ended, in a few words. Raises Interrupted."""
    folder, name = launch.folder, launch.cfg.run.name
    if kind == "speed":  # the second half of a launch would not be one
        shutil.rmtree(folder, ignore_errors=True)
    base = folder.parent.parent
    for place in ("configs", "logs"):
        (base / place).mkdir(parents=True, exist_ok=True)
    config = base / "configs" / f"{name}.yaml"
    OmegaConf.save(OmegaConf.create(as_run(launch.cfg)), config)
    began = time.monotonic()
    with open(base / "logs" / f"{name}.txt", "w", encoding="utf-8") as log:
        status = _wait(subprocess.Popen(
            [sys.executable, "-m", "pretrain.cli", "train", str(config), "--", "--num_processes", str(launch.member.processes)],
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=end_with_parent))  # fmt: skip
    if status == STOPPED:
        raise Interrupted
    found = read_status(folder)
    if status == 0 and found and found["state"] == "finished":
        write_atomic(folder / DONE, json.dumps(_measured(folder, time.monotonic() - began)))
        if kind == "speed":
            shutil.rmtree(folder / "checkpoints")
        return "finished"
    return f"{found['state']}: {_first_line(found['reason'])}" if found else f"no run, see {log.name}"


def _wait(child: "subprocess.Popen[bytes]") -> int:
    """A first request to stop is passed on, a second one ends the launch at once."""
    asked = False

    def pass_on(*_: object) -> None:
        nonlocal asked
        asked = True
        child.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        status = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return STOPPED if asked else status


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def _measured(folder: Path, wall: float) -> dict[str, float]:
    newest = newest_first(folder / "checkpoints")[0]
    return {"launch_seconds": wall, "checkpoint_bytes": sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())}
