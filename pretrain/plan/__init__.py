"""`pretrain plan`: before launching, for every strategy, will it fit, how fast, how many bytes. Nothing is allocated, nothing is launched."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from pretrain.config import ConfigError, layout, load, replace
from pretrain.plan.page import Asked, Row, page
from pretrain.plan.prediction import Prediction, largest_micro, micros, of_task, predict
from pretrain.plan.rates import Machine, Measured, from_table, here, with_measured
from pretrain.plan.task import Task, understand
from pretrain.strategies import OPTIONS, STRATEGIES

__all__ = ["Machine", "Measured", "Prediction", "from_table", "here", "plan", "predict", "with_measured"]


def plan(config_file: str, overrides: Sequence[str], gpu: str | None, nodes: int, gpus_per_node: int | None, measured: Path | None) -> int:
    """Prints the page and returns 0. Raises ConfigError or ShardError for what the user can mend."""
    for name, value in (("--nodes", nodes), ("--gpus-per-node", gpus_per_node)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value}: must be 1 or more")
    cfg = load(config_file, overrides, OPTIONS)
    machine = from_table(gpu, gpus_per_node) if gpu else here(gpus_per_node)
    if measured is not None:
        machine = with_measured(machine, measured)
    asked = Asked(config_file, overrides, nodes, machine, cfg.batch.micro)
    among = micros(cfg, asked.processes)
    if not among:
        layout(replace(cfg, "batch.micro", 1), asked.processes, 0)  # which says what would divide
    task, said = understand(cfg, machine), []
    if cfg.batch.micro not in among:
        micro = max(m for m in among if m <= cfg.batch.micro)
        said.append(f"batch.micro={cfg.batch.micro} does not divide {among[-1]} sequences per process: planned with {micro}")
        task = dataclasses.replace(task, cfg=replace(task.cfg, "batch.micro", micro))
    task = dataclasses.replace(task, notes=(*said, *task.notes))
    sys.stdout.write(page(asked, task, [_row(task, name, asked, among) for name in STRATEGIES]))
    return 0


def _row(task: Task, name: str, asked: Asked, among: Sequence[int]) -> Row:
    """With the config's batch.micro, or the largest that fits where that does not."""
    found = of_task(task, name, asked.processes, asked.machine)
    if found.refused:
        return Row(found, None)
    largest = largest_micro(task, name, asked.processes, asked.machine, among)
    if not found.fits and largest is not None:
        smaller = dataclasses.replace(task, cfg=replace(task.cfg, "batch.micro", largest))
        found = of_task(smaller, name, asked.processes, asked.machine)
    return Row(found, largest)
