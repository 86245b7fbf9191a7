"""What a comparison's launches came to, from their run folders alone: a row for each, and what the rows of a member have in common."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np

from pretrain import step_parts
from pretrain.compare.running import DONE, said_in
from pretrain.report import Run, read_run
from pretrain.runfolder import read_status

PARTS = ("compute", "communication", "optimizer", "data", "host")
ROUNDS = 20  # outer rounds below which what a local method learnt says nothing about it
SEEDS = 3
UNSETTLED = ("not run", "running", "stopped", "unfinished")  # states of launches that may still come to something
LAST = 0.05  # share of the tokens over which a final training loss is averaged: one update alone is noisy


@dataclass
class Row:
    """One launch."""

    member: str
    folder: Path
    given: dict[str, Any]  # as comparison.json has it
    state: str = "not run"
    reason: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    run: Run | None = None
    method: str = ""  # by which exposed communication was told


@dataclass
class Summary:
    """One member: its rows taken together."""

    member: str
    given: dict[str, Any]
    rows: list[Row]

    @property
    def finished(self) -> list[Row]:
        return [row for row in self.rows if row.state == "finished"]

    @property
    def facts(self) -> Mapping[str, Any]:
        return next((row.run.facts for row in self.finished if row.run), {})

    def values(self, key: str) -> list[float]:
        return [row.numbers[key] for row in self.finished if key in row.numbers and math.isfinite(row.numbers[key])]

    def middle(self, key: str) -> float | None:
        return median(found) if (found := self.values(key)) else None

    def average(self, key: str) -> float | None:
        return mean(found) if (found := self.values(key)) else None

    def spread(self, key: str) -> float | None:
        """Standard deviation over launches."""
        return stdev(found) if len(found := self.values(key)) > 1 else None

    @property
    def lost(self) -> list[Row]:
        """Launches that ended with nothing, or with a loss that is no number."""
        ends = [(row, [row.numbers[key] for key in ("loss", "val_loss") if key in row.numbers]) for row in self.finished]
        return [row for row in self.rows if row.state in ("failed", "refused")] + [
            row for row, found in ends if not np.all(np.isfinite(found))
        ]

    @property
    def reason(self) -> str:
        return next((f"{row.state}: {row.reason}" for row in self.rows if row.state not in ("finished", "not run")), "not run")


def read_row(given: Mapping[str, Any], folder: Path, skip_steps: int) -> Row:
    """`given`: a launch as comparison.json has it."""
    row = Row(str(given["member"]), folder, dict(given))
    status = read_status(folder)
    if status is not None:
        row.state, row.reason = status["state"], " ".join(str(status["reason"]).split("\n")[0].split())
    elif (log := said_in(folder)).exists() and (said := log.read_text("utf-8", "replace").split("\n")[:-1]):
        row.state, row.reason = "failed", f"no run: {' '.join(said[-1].split())}"
    if not (folder / DONE).exists():
        row.state = "unfinished" if row.state == "finished" else row.state
        return row
    row.run = read_run(folder)
    measured = json.loads((folder / DONE).read_text("utf-8"))
    row.given |= {"precision": row.run.facts.get("precision", row.given["precision"]), "machine": measured["machine"]}
    row.numbers = {**_trained(row.run, skip_steps), "checkpoint_bytes": float(measured["checkpoint_bytes"])}
    if (parts_file := folder / step_parts.FILE).exists():
        found = json.loads(parts_file.read_text("utf-8"))
        row.method = found["method"]
        row.numbers |= _parts(found, slowed=bool(row.run.facts.get("network")))
    row.numbers |= _replicas(row.run, row.numbers)
    if row.numbers.pop("whole_rounds", 1.0) == 0 and "step_seconds" in row.numbers:  # then the parts lack what the synchronisation took
        own = sum(row.numbers[f"{part}_seconds"] for part in PARTS if part != "communication")
        row.numbers["communication_seconds"] = max(0.0, row.numbers["step_seconds"] - own)
    simulated = row.run.config["strategy"].get("simulate")  # replicas that take turns say nothing about time or bytes
    unknown = _TIMES if simulated else ("loss", "val_loss") if row.given["kind"] == "speed" else ()
    row.numbers = {key: value for key, value in row.numbers.items() if not key.startswith(unknown)}
    return row


_TIMES = ("train_seconds", "tokens_per_second", "step_", "sent_", "wire_", *(f"{part}_seconds" for part in PARTS))


def _trained(run: Run, skip_steps: int) -> dict[str, float]:
    """Speeds are of the updates after `skip_steps`, as far as the log tells them apart; of local methods, of whole rounds among them; of PowerSGD,
    of those that it compresses."""
    logged = [line for line in run.rows if "loss" in line]
    if not logged:
        return {}
    last = logged[-1]
    found: dict[str, float] = {
        key: float(last[key]) for key in ("tokens", "train_seconds", "wire_bytes_total", "peak_memory_bytes", "step") if key in last
    }
    found["loss"] = mean(line["loss"] for line in logged if line["tokens"] > (1 - LAST) * last["tokens"])
    validated = [line["val_loss"] for line in run.rows if "val_loss" in line]
    if validated:
        found["val_loss"] = validated[-1]
    options = run.facts.get("strategy_options") or {}
    counted = [line for line in logged if line["step"] >= max(skip_steps, options.get("start_step") or 0)]
    every = options.get("sync_every", 1)
    whole = [line for line in counted if (last["step"] - line["step"]) % every == 0]
    first = whole[0] if len(whole) > 1 else (counted or [last])[0]
    if last["step"] > first["step"]:
        seconds, steps = last["train_seconds"] - first["train_seconds"], last["step"] - first["step"]
        found["step_seconds"], found["tokens_per_second"] = seconds / steps, (last["tokens"] - first["tokens"]) / seconds
        found["sent_predicted"] = (last["wire_bytes_total"] - first["wire_bytes_total"]) / steps
        apart = [line["step_seconds"] for line in logged if line["step"] > first["step"]]
        found["step_spread"] = float(np.subtract(*np.percentile(apart, [75, 25])))
    return found


def _parts(found: Mapping[str, Any], *, slowed: bool) -> dict[str, float]:
    """`slowed`: by an emulated network, on which every collective sends what a ring does."""
    seconds = {f"{part}_seconds": found["seconds"].get(part, 0.0) for part in PARTS}
    sent = {
        "sent_ring": found["sent"]["ring"],
        "whole_rounds": float(found["whole_rounds"]),
        "checkpoint_seconds": found["checkpoint_seconds"],
    }
    if found["backend"] in ("gloo", "nccl"):
        sent["sent_measured"] = found["sent"]["gloo" if found["backend"] == "gloo" and not slowed else "ring"]
    if not found["whole_rounds"]:
        sent = {key: value for key, value in sent.items() if not key.startswith("sent_")}
    return {**seconds, **sent}


def _replicas(run: Run, numbers: Mapping[str, float]) -> dict[str, float]:
    """Of local methods: how many copies trained apart, how often they met, and what each saw."""
    every = run.facts.get("strategy_options", {}).get("sync_every")
    if every is None or "tokens" not in numbers:
        return {}
    strategy = run.config["strategy"]
    replicas = strategy.get("simulate") or strategy.get("replicas") or run.facts["world_size"]
    return {"replicas": replicas, "rounds": numbers["step"] // every, "tokens_per_replica": numbers["tokens"] / replicas}


def summaries(rows: Iterable[Row]) -> list[Summary]:
    """In the order of the config."""
    found: dict[str, Summary] = {}
    for row in rows:
        found.setdefault(row.member, Summary(row.member, row.given, [])).rows.append(row)
    return list(found.values())


def best_tried(rows: Sequence[Row]) -> dict[str, tuple[str, int]]:
    """Of members that were tuned: the group's name -> (its best member, how many it was chosen from). By validation loss, or speed where there
    is none, and by the first seed, which is the one that all have."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.given.get("tried"):
            groups.setdefault(row.given["group"], []).append(row)
    best = {}
    for group, launched in groups.items():
        tried = summaries(row for row in launched if row.given["seed"] == launched[0].given["seed"])
        done = [one for one in tried if one.finished]
        if done:
            best[group] = min(done, key=_badness).member, len(done)
    return best


def _badness(summary: Summary) -> float:
    for key, sign in (("val_loss", 1), ("loss", 1)) if summary.given["kind"] == "learning" else (("tokens_per_second", -1),):
        if (value := summary.average(key)) is not None:
            return sign * value
    return math.inf


def loss_after(run: Run, seconds: float) -> float | None:
    """The training loss after so many seconds of training, on a line between logs; None where the run was shorter."""
    over, losses = run.series("loss", "train_seconds")
    return float(np.interp(seconds, over, losses)) if len(over) and over[-1] >= seconds * (1 - 1e-9) and over[0] <= seconds else None
