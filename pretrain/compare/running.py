"""Launch after launch, each by `pretrain train` with its own folder; what is done is not done again."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean

from omegaconf import OmegaConf

from pretrain.checkpoint import newest_first
from pretrain.compare.members import Launch
from pretrain.config import ConfigError, as_run
from pretrain.runfolder import in_use, read_status, take_lock, write_atomic
from pretrain.supervise import end_with_parent
from pretrain.watch import duration

DONE = "measured.json"  # in a run folder: what compare itself saw of the launch; without it the launch is not done
STOPPED = 75


class Interrupted(Exception):
    """A launch was asked to stop: the comparison goes on another time."""


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """One comparison at a time in a folder: two would measure each other. Raises ConfigError naming the other one."""
    folder.mkdir(parents=True, exist_ok=True)
    with take_lock(folder, partial(in_use, instead="compare.dir")):
        yield


def run_all(launches: Sequence[Launch], kind: str, say: Callable[[str], None]) -> None:
    """Raises Interrupted, and ConfigError where a launch is still running."""
    every = {launch.folder: launch for launch in launches}  # two members that are the same are one launch
    todo = [launch for folder, launch in every.items() if not (folder / DONE).exists()]
    if len(todo) < len(every):
        say(f"{len(every) - len(todo)} of {len(every)} launches are done already")
    took: dict[str, list[float]] = {}
    so_far: list[float] = []
    for number, launch in enumerate(todo, 1):
        began = time.monotonic()
        outcome = run(launch, kind)
        so_far.append(time.monotonic() - began)
        took.setdefault(launch.member.name, []).append(so_far[-1])
        left = sum(mean(took.get(later.member.name, so_far)) for later in todo[number:])
        say(f"[{number}/{len(todo)}] {title(launch, kind)}: {outcome}, {so_far[-1]:.0f}s" + (f"; {duration(left)} left" if left else ""))


def title(launch: Launch, kind: str) -> str:
    which = f"repetition {launch.repetition + 1}" if kind == "speed" else f"seed {launch.seed}"
    return f"{launch.member.name} on {launch.member.processes} process{'es' if launch.member.processes > 1 else ''}, {which}"


def run(launch: Launch, kind: str) -> str:
    """How it ended, in a few words. Raises Interrupted, and ConfigError where it is still running."""
    begin_anew(launch, kind)
    config, log_file = write_config(launch), said_in(launch.folder)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with open(log_file, "w", encoding="utf-8") as log:
        status = _wait(subprocess.Popen(
            [sys.executable, "-m", "pretrain.cli", "train", str(config), "--", "--num_processes", str(launch.member.processes)],
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=end_with_parent, env=environment(launch)))  # fmt: skip
    if status == STOPPED:
        raise Interrupted
    return take_note(launch, kind) or f"no run, see {log_file}"


def environment(launch: Launch) -> dict[str, str]:
    """nn.DataParallel takes every GPU that it sees: here as many as other members have processes."""
    count = next(iter(launch.cfg.compare.processes), None)
    if launch.member.strategy != "dataparallel" or count is None:
        return dict(os.environ)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[:count])}


def begin_anew(launch: Launch, kind: str) -> None:
    """Of speed, where the second half of a launch would not be one. Raises ConfigError where it is still running."""
    if owner := in_use(launch.folder):
        raise ConfigError(owner)
    if kind == "speed":
        shutil.rmtree(launch.folder, ignore_errors=True)


def said_in(folder: Path) -> Path:
    """What the launch with this run folder said."""
    return folder.parent.parent / "logs" / f"{folder.name}.txt"


def write_config(launch: Launch) -> Path:
    """The launch's whole config, for `pretrain train`."""
    config = launch.folder.parent.parent / "configs" / f"{launch.cfg.run.name}.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(as_run(launch.cfg)), config)
    return config


def take_note(launch: Launch, kind: str) -> str:
    """Of a launch that has ended: how, in a few words; empty where there is no run. One that has finished is done from here on."""
    folder, found = launch.folder, read_status(launch.folder)
    if not found or found["state"] != "finished":
        return f"{found['state']}: {found['reason'].splitlines()[0]}" if found and found["reason"] else ""
    if not (folder / DONE).exists():
        newest = newest_first(folder / "checkpoints")[0]
        size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
        write_atomic(folder / DONE, json.dumps({"checkpoint_bytes": size, "machine": machine()}))
    if kind == "speed":
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return "finished"


def machine() -> str:
    """`2 × NVIDIA H100 80GB HBM3`, or `2 cores of AMD EPYC 7B13`."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}"
    name = "an unknown CPU"
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{os.cpu_count()} cores of {name}"


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
            signal.signal(number, signal.SIG_IGN if asked else handler)  # the comparison ends, and says so
    return STOPPED if asked else status
