"""`pretrain compare`: the same work under every strategy, launch by launch, and a report of what came of it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from pretrain.compare.members import Launch, Member, launches, members
from pretrain.compare.reporting import PLAN, read, report
from pretrain.compare.results import UNSETTLED, best_tried, read_row
from pretrain.compare.running import Interrupted, machine, owned, run_all
from pretrain.config import Config, ConfigError, load, to_dict
from pretrain.plan import here, predict
from pretrain.runfolder import write_atomic
from pretrain.strategies import OPTIONS

__all__ = ["Interrupted", "compare", "planned", "report", "write_plan"]


def compare(config_file: Path, overrides: Sequence[str], say: Callable[[str], None]) -> int:
    """Exit status: 0, or 1 where a member failed, 2 where every one was refused. Raises ConfigError, Interrupted."""
    cfg, todo = planned(config_file, overrides)
    folder = Path(cfg.compare.dir)
    _check_folder(folder, config_file)
    with owned(folder):
        write_plan(cfg, config_file, overrides, todo)
        say(f"{len(todo)} launches into {folder}" + ("; more, when it is known what is best" if _tuned(cfg) else ""))
        try:
            run_all(todo, cfg.compare.kind, say)
            if _tuned(cfg) and (more := planned(config_file, overrides)[1][len(todo) :]):
                write_plan(cfg, config_file, overrides, [*todo, *more])
                say(f"{len(more)} launches more, of what is best")
                run_all(more, cfg.compare.kind, say)
        finally:
            files = report([folder], folder / "report")
    for file in files:
        say(str(file))
    states = {row.state for row in read(folder).rows}
    return 2 if states == {"refused"} else int(not states <= {"finished", "refused"})


def planned(config_file: Path, overrides: Sequence[str]) -> tuple[Config, list[Launch]]:
    """All launches, as far as they are known: of what is tuned, only the best goes on with seeds after the first, once all have been tried.
    Raises ConfigError."""
    cfg = load(config_file, overrides, OPTIONS)
    found, seeds = members(cfg), cfg.compare.seeds or (cfg.run.seed,)
    if not _tuned(cfg):
        return cfg, launches(config_file, cfg, overrides, found, seeds)
    todo = launches(config_file, cfg, overrides, found, seeds[:1])
    rows = [
        read_row({**_described(launch), "kind": cfg.compare.kind, "machine": ""}, launch.folder, cfg.compare.skip_steps) for launch in todo
    ]
    if not any(row.state in UNSETTLED for row in rows):
        best = {member for member, _ in best_tried(rows).values()}
        todo += launches(config_file, cfg, overrides, [member for member in found if member.name in best], seeds[1:])
    return cfg, todo


def _tuned(cfg: Config) -> bool:
    return bool(cfg.compare.best_of and cfg.compare.seeds[1:])


def _check_folder(folder: Path, config_file: Path) -> None:
    """A folder holds one comparison, and its report."""
    try:
        other = str(json.loads((folder / PLAN).read_text("utf-8"))["config_file"])
    except (OSError, ValueError, KeyError):
        return
    if Path(other).name != config_file.name:
        raise ConfigError(f"{folder} holds the comparison of {other}; write another compare.dir for {config_file}, or move that away")


def write_plan(cfg: Config, config_file: Path, overrides: Sequence[str], todo: Sequence[Launch]) -> None:
    """comparison.json."""
    predictions: dict[str, dict[str, object]] = {}
    for launch in todo:
        if launch.member.name not in predictions:
            predictions[launch.member.name] = _predicted(launch.cfg, launch.member)
    plan = {
        "kind": cfg.compare.kind,
        "config_file": str(config_file),
        "overrides": list(overrides),
        "machine": machine(),
        "scaling": cfg.compare.scaling,
        "network": to_dict(cfg.compare.network),
        "repetitions": cfg.compare.repetitions,
        "skip_steps": cfg.compare.skip_steps,
        "launches": [{**_described(launch), "predicted": predictions[launch.member.name]} for launch in todo],
    }
    folder = Path(cfg.compare.dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / PLAN, json.dumps(plan, indent=1))


def _described(launch: Launch) -> dict[str, object]:
    cfg, member = launch.cfg, launch.member
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
    }


def _predicted(cfg: Config, member: Member) -> dict[str, object]:
    """What the planner says of it beforehand; empty where it would be refused."""
    found = predict(cfg, member.strategy, member.processes, here(None))
    if found.refused:
        return {}
    return {"memory": found.memory, "peak_memory": found.peak_memory, "step_seconds": found.step_seconds, "sent": found.wire_bytes}
