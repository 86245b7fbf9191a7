"""What goes wrong in a trial: which faults, drawn from a seed; the moment each waits for; the damage itself."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from conformance_check import last_step, verified
from conformance_launch import Disk, Launch, alive

from pretrain import checkpoint

KILLS = ("kill a rank", "kill the launcher", "kill pretrain train", "kill everything")
STOPS = ("stop", "stop a rank", "stop file", "stop twice")
ENDING = (*KILLS, *STOPS)
PASSING = ("pause a rank", "second launch")
DISK = ("full disk", "read-only folder")
BETWEEN = (
    "truncate a file",
    "flip a bit",
    "delete a file",
    "empty manifest",
    "delete a checkpoint",
    "foreign folder",
    "cut the records short",
)
MOMENTS = ("a step", "a save", "an evaluation", "rotation", "start-up", "the end")


@dataclass(frozen=True)
class Fault:
    """Everything about it that is drawn; which process, file or byte that means depends on what is there."""

    kind: str
    moment: str  # that it waits for
    ahead: int  # steps after the one that the start begins from
    delay: float  # seconds after the moment
    draw: int

    def random(self) -> random.Random:
        return random.Random(self.draw)


@dataclass(frozen=True)
class Plan:
    number: int
    strategy: str
    fast: bool  # forked launches
    faults: Sequence[Fault]


def draw_plan(seed: int, number: int, strategies: Sequence[str], kinds: Sequence[str], *, fast: bool, faults: int, start_up: float) -> Plan:
    """The trial of this number under this seed."""
    draw = random.Random(f"{seed}, trial {number}")
    strategy = strategies[number % len(strategies)]
    found: list[Fault] = []
    while len(found) < faults:
        if found and found[-1].kind in ENDING and draw.random() < 0.4:
            found.append(_between(draw, kinds))
        if draw.random() < 0.2 and (passing := [kind for kind in (*PASSING, *DISK) if kind in kinds]):
            found.append(_during(draw, draw.choice(passing), ("a step", "a save", "an evaluation"), start_up))
        endings = KILLS if draw.random() < 0.7 else STOPS
        kind = draw.choice([kind for kind in endings if kind in kinds])
        moments = MOMENTS if len(found) > 3 else MOMENTS[:-1]  # the end would be the trial's, too
        found.append(_during(draw, kind, MOMENTS[:4] if kind == "stop file" else moments, start_up))
    return Plan(number, strategy, fast, found)


def _between(draw: random.Random, kinds: Sequence[str]) -> Fault:
    return Fault(draw.choice([kind for kind in BETWEEN if kind in kinds]), "between starts", 0, 0.0, draw.getrandbits(32))


def _during(draw: random.Random, kind: str, moments: Sequence[str], start_up: float) -> Fault:
    moment = draw.choices(moments, [4, 3, 2, 2, 1, 1][: len(moments)])[0]
    longest = {"start-up": start_up, "the end": 0.4, "rotation": 0.004}.get(moment, 0.04)
    return Fault(kind, moment, draw.randint(1, 9), draw.uniform(0, longest), draw.getrandbits(32))


def waits_for(fault: Fault, folder: Path, base: int, steps: int, evaluated: int) -> Callable[[], bool]:
    """Whether the moment has come, in a start that begins after step `base`."""
    ledger, checkpoints = folder / "ledger.jsonl", folder / "checkpoints"
    wanted = min(base + fault.ahead, steps)
    begun = ledger.stat().st_size if ledger.exists() else 0
    if fault.moment == "start-up":
        return lambda: True
    if fault.moment == "an evaluation":
        wanted = min(-(-wanted // evaluated) * evaluated, steps)
    if fault.moment == "the end":
        wanted = steps

    def taken(step: int) -> bool:
        return ledger.exists() and ledger.stat().st_size > begun and last_step(ledger) >= step

    def saving() -> bool:
        return any(name.endswith(".tmp") for name in _names(checkpoints))

    there = set(_names(checkpoints))
    if fault.moment == "a save":
        return lambda: (taken(wanted) or wanted >= steps) and saving()
    if fault.moment == "rotation":
        return lambda: any(name not in there and not name.endswith(".tmp") for name in _names(checkpoints))
    return lambda: taken(wanted)


def phase(folder: Path, ready: bool, evaluated: int, damaged: Collection[Path]) -> str:
    """Where the run is, as far as its folder shows. damaged: checkpoints that were so before it began."""
    if not ready:
        return "start-up"
    names = _names(folder / "checkpoints")
    if any(name.endswith(".tmp") for name in names):
        return "a save"
    paths = [path for _, path in checkpoint.numbered(folder / "checkpoints") if path not in damaged]
    if any(not (path / checkpoint.MANIFEST).exists() for path in paths):
        return "rotation"
    step = last_step(folder / "metrics.jsonl")
    with suppress(OSError, ValueError, IndexError):
        if step % evaluated == 0 and "val_loss" not in json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]):
            return "an evaluation"
    return "a step"


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def strike(fault: Fault, launch: Launch, folder: Path) -> bool:
    """Kill or ask to stop, as the fault says. False where there is nothing left to strike."""
    draw = fault.random()
    try:
        top, launcher, ranks = launch.tree()
        number = signal.SIGKILL if fault.kind in KILLS else signal.SIGTERM
        launchers = [launcher] if launcher else []  # none before it is started, and after its end
        if fault.kind in ("kill a rank", "stop a rank"):
            victims = [draw.choice(ranks or launchers)] if ranks or launchers else []
        elif fault.kind == "kill the launcher":
            victims = launchers
        elif fault.kind == "kill everything":
            victims = alive()
            draw.shuffle(victims)
        else:
            victims = [top]
        if not victims or not launch.running():
            return False
        if fault.kind == "stop file":
            (folder / "stop").touch()
            return folder.exists()
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.send_signal(number)
        if fault.kind == "stop twice":
            time.sleep(draw.uniform(0, 0.3))
            top.send_signal(number)
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False
    return True


def pause(fault: Fault, launch: Launch) -> bool:
    """One rank stands still for a moment."""
    draw = fault.random()
    _, _, ranks = launch.tree()
    if not ranks:
        return False
    victim = draw.choice(ranks)
    try:
        victim.suspend()
        time.sleep(draw.uniform(0.05, 0.5))
        victim.resume()
    except psutil.NoSuchProcess:
        return False
    return True


def spoil_disk(fault: Fault, disk: Disk, launch: Launch, folder: Path) -> None:
    """No room, or no writing in the checkpoints' folder, for some steps or until the run has given up; then all is well again."""
    draw = fault.random()
    checkpoints = folder / "checkpoints"
    if fault.kind == "full disk":
        disk.fill(draw.choice([0, 5_000, draw.randrange(400_000)]))
    else:
        disk.protect(checkpoints)
    try:
        end = last_step(folder / "ledger.jsonl") + draw.randint(2, 12)
        launch.until(lambda: last_step(folder / "ledger.jsonl") >= end, draw.uniform(2, 6))
    finally:
        disk.empty()
        disk.unprotect(checkpoints)


def damage(fault: Fault, folder: Path) -> str | None:
    """Spoil something while nobody runs. What was done, or None where it would have left nothing to go on from."""
    draw, checkpoints = fault.random(), folder / "checkpoints"
    if fault.kind == "foreign folder":
        return _leave_behind(draw, checkpoints)
    found = sorted(checkpoint.numbered(checkpoints))
    valid = [path for _, path in found if verified(path) is None]
    if fault.kind == "cut the records short":
        return _cut_records(draw, folder, checkpoint.step_of(valid[-1]) if valid else 0)
    if len(valid) < 2:
        return None
    newest = valid[-1]
    if fault.kind == "delete a checkpoint":
        shutil.rmtree(newest)
        return f"deleted {newest.name}"
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    victim = newest / checkpoint.MANIFEST if fault.kind == "empty manifest" or draw.random() < 0.2 else draw.choice(files)
    size = victim.stat().st_size
    name = f"{newest.name}/{victim.relative_to(newest)}"
    if fault.kind == "delete a file":
        victim.unlink()
        return f"deleted {name}"
    if fault.kind == "flip a bit":
        content, at = bytearray(victim.read_bytes()), draw.randrange(size)
        content[at] ^= 1 << (bit := draw.randrange(8))
        victim.write_bytes(content)
        return f"flipped bit {bit} of byte {at} of {name}"
    left = 0 if fault.kind == "empty manifest" else draw.randrange(size)
    os.truncate(victim, left)
    return f"cut {name} from {size} to {left} bytes"


def _leave_behind(draw: random.Random, checkpoints: Path) -> str | None:
    """What an interrupted save, or a user, may have left."""
    if not checkpoints.exists():
        return None
    folder = checkpoints / draw.choice(["step_00000005.tmp", "step_00000020.tmp", "step_00000040.tmp", "step_00000099.tmp", "notes"])
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "shard-00001-model-00001-of-00001.safetensors").write_bytes(draw.randbytes(draw.randrange(5000)))
    return f"left {folder.name} behind"


def _cut_records(draw: random.Random, folder: Path, kept: int) -> str | None:
    """A machine that goes down loses the end of a line; only of steps that will be taken again, the others being the checkpoint's."""
    path = folder / draw.choice(["metrics.jsonl", "ledger.jsonl"])
    if last_step(path) <= kept:
        return None
    last = path.read_bytes().splitlines(keepends=True)[-1]
    left = path.stat().st_size - draw.randrange(1, len(last))
    os.truncate(path, left)
    return f"cut {path.name} to {left} bytes"
