"""`pretrain compare`: the same work under every strategy, launch by launch, and a report of what came of it."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from pretrain.compare.members import Launch, Member, launches, members
from pretrain.compare.reporting import PLAN, read, report
from pretrain.compare.results import UNSETTLED, best_tried
from pretrain.compare.running import Interrupted, run_all
from pretrain.config import Config, load, to_dict
from pretrain.plan import here, predict
from pretrain.runfolder import write_atomic
from pretrain.strategies import OPTIONS

__all__ = ["Interrupted", "compare", "planned", "report"]


def compare(config_file: Path, overrides: Sequence[str], say: Callable[[str], None]) -> int:
    """Exit status: 0, or 1 where a member failed, 2 where every one was refused. Raises ConfigError, Interrupted."""
    cfg, todo = planned(config_file, overrides)
    folder = Path(cfg.compare.dir)
    say(f"{len(todo)} launches into {folder}")
    try:
        run_all(todo, cfg.compare.kind, say)
        if cfg.compare.best_of:
            run_all(planned(config_file, overrides)[1], cfg.compare.kind, say)
    finally:
        files = report([folder], folder / "report")
    for file in files:
        say(str(file))
    states = {row.state for row in read(folder).rows}
    return 2 if states == {"refused"} else int("failed" in states)


def planned(config_file: Path, overrides: Sequence[str]) -> tuple[Config, list[Launch]]:
    """All launches, as far as they are known: of what is tuned, only the best goes on with seeds after the first, once all have been tried.

    Writes comparison.json. Raises ConfigError.
    """
    cfg = load(config_file, overrides, OPTIONS)
    found, seeds = members(cfg), cfg.compare.seeds or (cfg.run.seed,)
    tuned, folder = bool(cfg.compare.best_of), Path(cfg.compare.dir)
    todo = launches(config_file, cfg, overrides, found, seeds[:1] if tuned else seeds)
    _write_plan(folder, cfg, config_file, overrides, todo)
    rows = read(folder).rows if tuned and seeds[1:] else []
    if rows and not any(row.state in UNSETTLED for row in rows):
        best = {member for member, _ in best_tried(rows).values()}
        todo += launches(config_file, cfg, overrides, [member for member in found if member.name in best], seeds[1:])
        _write_plan(folder, cfg, config_file, overrides, todo)
    return cfg, todo


def _write_plan(folder: Path, cfg: Config, config_file: Path, overrides: Sequence[str], todo: Sequence[Launch]) -> None:
    predictions: dict[str, dict[str, object]] = {}
    plan = {
        "kind": cfg.compare.kind,
        "config_file": str(config_file),
        "overrides": list(overrides),
        "machine": machine(),
        "scaling": cfg.compare.scaling,
        "network": to_dict(cfg.compare.network),
        "repetitions": cfg.compare.repetitions,
        "skip_steps": cfg.compare.skip_steps,
        "launches": [_described(launch, predictions) for launch in todo],
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / PLAN, json.dumps(plan, indent=1))


def _described(launch: Launch, predictions: dict[str, dict[str, object]]) -> dict[str, object]:
    cfg, member = launch.cfg, launch.member
    if member.name not in predictions:
        predictions[member.name] = _predicted(cfg, member)
    return {
        "member": member.name,
        "group": member.group,
        "base": member.base,
        "strategy": member.strategy,
        "values": member.values,
        "tried": member.tried,
        "processes": member.processes,
        "precision": cfg.run.precision,
        "batch_tokens": cfg.batch.tokens,
        "micro": cfg.batch.micro,
        "seed": launch.seed,
        "repetition": launch.repetition,
        "run": cfg.run.name,
        "predicted": predictions[member.name],
    }


def _predicted(cfg: Config, member: Member) -> dict[str, object]:
    """What the planner says of it beforehand; empty where it would be refused."""
    found = predict(cfg, member.strategy, member.processes, here(None))
    if found.refused:
        return {}
    return {"memory": found.memory, "peak_memory": found.peak_memory, "step_seconds": found.step_seconds, "sent": found.wire_bytes}


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
