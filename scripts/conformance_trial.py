"""One trial: a run that is struck again and again until it has finished, always by the same command, and what it has lost by then."""

import fcntl
import json
import pickle
import re
import shutil
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import conformance_check as check
import conformance_faults as faults
import numpy as np
from conformance_launch import BIN, Disk, Launch, adopt, end_all, in_fork

from pretrain import checkpoint, shards
from pretrain.runfolder import read_status
from pretrain.strategies import STRATEGIES

STEPS, SAVED, EVALUATED, KEPT = 40, 5, 7, 2
_SEQUENCE, _WINDOWS = 16, 100  # tokens in a window, windows in an epoch
_PATIENCE = 300.0  # for a moment that a fault waits for, or for the end of a run that nothing holds up
_SHUTDOWN = 125.0  # the launcher's time-out and five seconds, in which everything must be gone
_OPTIONS = {
    "local_sgd": [f"strategy.options.sync_every={SAVED}"],
    "diloco": [f"strategy.options.sync_every={SAVED}"],
    "ddp_powersgd": ["strategy.options.start_step=8"],
}


@dataclass(frozen=True)
class Setting:
    """What all trials of one call share."""

    place: Path
    processes: int
    keep: bool

    @property
    def config(self) -> Path:
        return self.place / "conformance.yaml"

    def processes_of(self, strategy: str) -> int:
        return self.processes if STRATEGIES[strategy].processes[1] > 1 else 1

    def command(self, strategy: str, folder: Path) -> list[str]:
        overrides = [f"run.dir={folder.parent}", f"run.name={folder.name}", f"strategy.name={strategy}", *_OPTIONS.get(strategy, [])]
        return [str(BIN / "pretrain"), "train", str(self.config), *overrides, "--", "--num_processes", str(self.processes_of(strategy))]


@dataclass
class Struck:
    """A fault that hit something."""

    kind: str
    where: str  # what the run was doing
    repeated: int = 0  # steps taken again because of it
    survived: bool = True


@dataclass
class Outcome:
    plan: faults.Plan
    struck: list[Struck] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)  # what was done, in order
    kept: Path | None = None
    seconds: float = 0.0


def prepare(place: Path, processes: int) -> None:
    """A set that can be learned a little, and a config of 40 updates over several epochs, the last of them short; dropout and all."""
    data = place / "set"
    data.mkdir(parents=True)
    draw = np.random.default_rng(0)
    files = {}
    for split, windows in (("train", _WINDOWS), ("val", 16)):
        writer = shards.ShardWriter(data, split, shards.token_dtype(257), shard_tokens=1000)
        writer.append((np.cumsum(draw.integers(0, 3, windows * _SEQUENCE + 1)) % 257).astype("<u2"))
        files[split] = writer.close()
    shards.write_manifest(data, {"format_version": shards.FORMAT_VERSION, "fingerprint": shards.fingerprint(files), "files": files, "vocab_size": 257,
                                 "eos_id": 256, "tokenizer": {"name": "toy", "sha256": "of toy"},
                                 "splits": {"val": {"tokens": 16 * _SEQUENCE + 1, "bytes": 16 * _SEQUENCE + 1}}})  # fmt: skip
    windows = 2 * processes
    config: Mapping[str, Mapping[str, Any]] = {
        "run": {"precision": "fp32", "device": "cpu"},
        "data": {"train": str(data), "sequence_length": _SEQUENCE},
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "dropout": 0.1},
        "batch": {"tokens": windows * _SEQUENCE, "micro": 1},
        "optim": {"lr": 1e-3, "warmup_steps": 4},
        "train": {"epochs": (STEPS * windows - 1) / _WINDOWS, "log_every": 1, "eval_every": EVALUATED, "checkpoint_every": SAVED, "keep_last": KEPT,
                  "compile": "off", "hang_timeout": 60},
    }  # fmt: skip
    (place / "conformance.yaml").write_text(json.dumps(config), "utf-8")  # JSON is YAML


def reference(setting: Setting, strategy: str) -> check.Reference:
    """The uninterrupted run, made when it is first asked for. Raises RuntimeError where there is none."""
    folder = setting.place / "references" / strategy
    folder.parent.mkdir(exist_ok=True)
    stored = folder.with_suffix(".pickle")
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stored.exists():
            launch = Launch(setting.command(strategy, folder), folder.with_suffix(".out"), fast=True)
            if not launch.wait(_PATIENCE) or launch.top.returncode:
                raise RuntimeError(f"the uninterrupted run of {strategy} failed: {' | '.join(launch.text().splitlines()[-3:])}")
            partial = stored.with_suffix(".part")
            partial.write_bytes(pickle.dumps(in_fork(lambda: check.read_reference(folder))))
            partial.rename(stored)
    found: check.Reference = pickle.loads(stored.read_bytes())
    return found


class Trial:
    def __init__(self, setting: Setting, plan: faults.Plan, place: Path, disk: Disk | None) -> None:
        self.setting, self.plan, self.disk, self.place = setting, plan, disk, place
        self.folder = place / f"trial-{plan.number:04d}"
        self.outcome = Outcome(plan)
        self.expected = reference(setting, plan.strategy)
        self.launch: Launch | None = None
        self.starts = self.repeated = 0
        self.torn = False  # a line was cut in two, and no start has got as far as to cut it back
        self.struck_here = self.spoilt = False  # this start: whether a fault has passed over it, and whether one spoilt its disk

    def run(self) -> Outcome:
        began = time.monotonic()
        try:
            for fault in self.plan.faults:
                if self.over():
                    break
                self.between(fault) if fault.moment == "between starts" else self.during(fault)
            while not self.over():
                self.begin()
                self.end(None)
            if not self.outcome.problems:
                self.outcome.problems += in_fork(lambda: check.whole(self.folder, self.expected))
        except Exception as error:  # of the suite itself, or of the product's own functions that it calls
            self.outcome.problems.append(f"{type(error).__name__}: {error}")
            self.outcome.story.append(traceback.format_exc())
        end_all()
        if self.outcome.problems and self.outcome.struck:
            self.outcome.struck[-1].survived = False
        if self.outcome.problems or self.setting.keep:
            self.keep()
        shutil.rmtree(self.place, ignore_errors=True)
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def over(self) -> bool:
        if self.outcome.problems:
            return True
        status = read_status(self.folder)
        return self.launch is None and status is not None and status["state"] == "finished"

    def between(self, fault: faults.Fault) -> None:
        if self.launch is None and (done := faults.damage(fault, self.folder)):
            self.note(fault.kind, "between starts", done)
            self.torn |= fault.kind == "cut the records short"

    def during(self, fault: faults.Fault) -> None:
        launch = self.launch or self.begin()
        now = max(self.base, check.last_step(self.folder / "ledger.jsonl") if self.struck_here else self.base)
        if not launch.until(faults.waits_for(fault, self.folder, now, STEPS, EVALUATED), _PATIENCE):
            self.end(None)  # it was over before
            return
        time.sleep(fault.delay)
        ready = "ready for step" in launch.text()
        where = faults.phase(self.folder, ready, EVALUATED, self.damaged.values())
        if where == "a step" and fault.moment in ("rotation", "the end"):
            where = {"rotation": "just after a save", "the end": "the end"}[fault.moment]
        step = check.last_step(self.folder / "ledger.jsonl")
        if fault.kind in faults.ENDING:
            if faults.strike(fault, launch, self.folder):
                self.note(fault.kind, where, f"{fault.kind} at step {step}, in {where}")
                self.end(fault, ready)
            else:
                self.end(None)
            return
        self.struck_here = True
        if not ready or not launch.running():
            return
        if fault.kind == "pause a rank":
            hit = faults.pause(fault, launch)
        elif fault.kind == "second launch":
            hit = self.start_a_second()
        else:
            assert self.disk
            self.spoilt = hit = True
            faults.spoil_disk(fault, self.disk, launch, self.folder)
        if hit:
            self.note(fault.kind, where, f"{fault.kind} at step {step}, in {where}")

    def note(self, kind: str, where: str, what: str) -> None:
        self.outcome.struck.append(Struck(kind, where))
        self.outcome.story.append(f"start {self.starts}: {what}")

    def begin(self) -> Launch:
        self.starts += 1
        self.place.mkdir(parents=True, exist_ok=True)
        self.valid = check.valid_steps(self.folder)
        self.damaged = {step: path for step, path in checkpoint.numbered(self.folder / "checkpoints") if step not in self.valid}
        self.base = max(self.valid, default=0)
        self.earlier = read_status(self.folder)
        self.cause = self.outcome.struck[-1] if self.outcome.struck else None  # of what this start takes again
        self.struck_here = self.spoilt = False
        command = self.setting.command(self.plan.strategy, self.folder)
        self.launch = Launch(command, self.place / f"start-{self.starts:02d}.txt", fast=self.plan.fast)
        return self.launch

    def end(self, fault: faults.Fault | None, ready: bool = True) -> None:
        """Wait until everything is gone, and see whether all is as it should be."""
        launch, problems = self.launch, self.outcome.problems
        assert launch is not None
        struck = time.monotonic()
        if not launch.wait(_SHUTDOWN if fault else _PATIENCE):
            problems.append(f"still running {time.monotonic() - struck:.0f}s after {fault.kind if fault else 'nothing'}")
        code: int | None = launch.top.returncode
        code = None if fault and fault.kind in ("kill pretrain train", "kill everything") and code and code < 0 else code
        text, self.launch = launch.text(), None
        problems += self._beginning(text)
        problems += self._ending(text, code, fault, ready)
        problems += self._checkpoints()
        self.torn &= "ready for step" not in text
        problems += [f for f in check.records(self.folder, self.expected) if not ((self.spoilt or self.torn) and "is no record" in f)]
        if self.cause:
            now = check.steps_repeated(self.folder)
            self.cause.repeated += now - self.repeated
            self.repeated = now
        if problems:
            self.outcome.story.append(f"start {self.starts} ended with status {code}: {' | '.join(text.splitlines()[-4:])}")

    def _beginning(self, text: str) -> list[str]:
        """It goes on from the newest valid checkpoint, and names those that it passes over."""
        if "ready for step" not in text:
            return []
        found = re.search(r"^resuming from \S+step_(\d+) at step", text, re.MULTILINE)
        step = int(found[1]) if found else 0
        problems = [] if step == self.base else [f"began at step {step}; valid checkpoints were {self.valid}"]
        unnamed = [path.name for later, path in self.damaged.items() if later > self.base and f"skipping checkpoint {path}: " not in text]
        return problems + [f"passed over {name} in silence" for name in unnamed]

    def _ending(self, text: str, code: int | None, fault: faults.Fault | None, ready: bool) -> list[str]:
        status = read_status(self.folder)
        if status == self.earlier or (status and self.earlier and status["time"] <= self.earlier["time"]):
            status = None
        problems = []
        if not self.spoilt or code == 0:  # on a full disk there is no status to write
            problems = check.status_problems(self.folder, status, code, STEPS, trained="ready for step" in text)
        causes = re.findall(r"^rank \d+ failed at step.*$", text, re.MULTILINE)
        problems += [f"{len(causes)} causes were printed: {causes}"] if len(causes) > 1 else []
        if fault is None:
            unasked = code != 0 and not (self.spoilt and code in (1, 75))
            return problems + ([f"ended by itself with status {code}"] if unasked else [])
        expected = "failed" if fault.kind == "kill a rank" else "stopped"
        if ready and not self.spoilt and fault.kind not in ("kill everything", "stop twice"):
            state = status["state"] if status else "of an earlier start"
            problems += [] if state in (expected, "finished") else [f"after {fault.kind} status.json says {state}, not {expected}"]
        return problems

    def _checkpoints(self) -> list[str]:
        """Complete or not there; an old one goes only when there are newer ones, and damaged ones don't count."""
        valid = check.valid_steps(self.folder)
        newest = max(valid, default=0)
        expected = min(KEPT, len(self.valid) + (newest > self.base))
        problems = [f"valid checkpoints are {valid}, and were {self.valid}"] if len(valid) < expected or newest < self.base else []
        for step, path in checkpoint.numbered(self.folder / "checkpoints"):
            problem = check.verified(path)
            if problem and step not in self.damaged:
                problems.append(f"{path.name}: {problem}")
        return problems

    def start_a_second(self) -> bool:
        """The same command while the run goes on: it must name the owner and end."""
        assert self.launch is not None
        output = self.place / f"start-{self.starts:02d}-second.txt"
        second = Launch(self.setting.command(self.plan.strategy, self.folder), output, fast=self.plan.fast)
        code = second.top.wait(_PATIENCE)
        if not self.launch.running():
            return False
        if code != 2 or "is in use by" not in second.text():
            self.outcome.problems.append(f"a second launch ended with status {code}: {second.text()[-200:]!r}")
        return True

    def keep(self) -> None:
        kept = self.setting.place / "kept" / self.folder.name
        kept.mkdir(parents=True, exist_ok=True)
        if self.place.exists():
            shutil.copytree(self.place, kept, dirs_exist_ok=True, symlinks=True)
        (kept / "story.txt").write_text("\n".join([*self.outcome.story, *self.outcome.problems]) + "\n", "utf-8")
        self.outcome.kept = kept


def serve(setting: Setting, slot: int, with_disk: bool, pipe: Any) -> None:
    """In a process of its own: trials, one after the other, as they are asked for."""
    adopt()
    place = setting.place / f"slot-{slot}"
    try:
        disk = Disk(place, megabytes=64) if with_disk else None
        while (plan := pipe.recv()) is not None:
            try:
                pipe.send(Trial(setting, plan, place / "runs", disk).run())
            except RuntimeError as error:
                pipe.send(Outcome(plan, problems=[str(error)]))
    except (KeyboardInterrupt, EOFError):
        pass
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):  # a group and our parent may both tell us to end
            signal.signal(number, signal.SIG_IGN)
        end_all()
