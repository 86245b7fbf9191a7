"""What one strategy comes to on one machine, or why it is refused: pure functions of the config."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from pretrain.config import Config, ConfigError, replace
from pretrain.plan.memory import checkpoint_bytes, memory
from pretrain.plan.rates import Machine
from pretrain.plan.seconds import flops, peak_flops, seconds
from pretrain.plan.task import Case, Task, case, understand
from pretrain.plan.wires import wire_bytes


@dataclass(frozen=True)
class Prediction:
    """Of one update on one rank where it does not say otherwise. With `refused` nothing else is known."""

    strategy: str
    processes: int
    micro: int = 0  # sequences, that all of this is for
    memory: dict[str, float] = field(default_factory=dict)  # bytes by part, each at its largest
    peak_memory: float = 0.0  # bytes at once, by torch's allocator
    fits: bool = False
    wire_bytes: float = 0.0  # mean over the run
    step_seconds: float | None = None  # None: no rates are known
    compute_seconds: float | None = None
    network_seconds: float | None = None  # what the computation does not hide
    optimiser_seconds: float | None = None
    tokens_per_second: float | None = None  # of all ranks
    mfu: float | None = None
    run_seconds: float | None = None  # to the end of the config; without evaluations and checkpoints
    checkpoint_bytes: float = 0.0
    exact: bool = True  # computes what one process does
    offloads: bool = False  # to host memory, which leaves no times to foretell
    refused: str = ""


def predict(cfg: Config, strategy: str, processes: int, machine: Machine) -> Prediction:
    """With the config's own `batch.micro`. Raises ConfigError or ShardError for what is wrong whatever the strategy."""
    return of_task(understand(cfg, machine), strategy, processes, machine)


def of_task(task: Task, strategy: str, processes: int, machine: Machine) -> Prediction:
    try:
        c = case(task, strategy, processes, machine)
        wire = wire_bytes(c)
    except ConfigError as error:
        return Prediction(strategy, processes, refused="; ".join(str(error).splitlines()))
    needed, took, peak = memory(c), seconds(c, wire), peak_flops(c)
    common = Prediction(
        strategy, processes, c.layout.micro, needed.parts, needed.peak, needed.peak <= machine.memory, wire,
        checkpoint_bytes=checkpoint_bytes(c), exact=c.strategy.exact, offloads=c.offloads,
    )  # fmt: skip
    if took is None:
        return common
    return dataclasses.replace(
        common, step_seconds=took.total, compute_seconds=took.compute, network_seconds=took.network, optimiser_seconds=took.optimiser,
        tokens_per_second=task.cfg.batch.tokens / took.total,
        mfu=None if peak is None else flops(c) / took.total / peak,
        run_seconds=_updates(c) * took.total if task.steps_known else None,
    )  # fmt: skip


def _updates(c: Case) -> float:
    return c.layout.steps if c.layout.last_position is None else c.layout.last_position / c.layout.windows


def micros(cfg: Config, processes: int) -> list[int]:
    """Values of `batch.micro` that divide the batch, ascending; none where the batch does not divide among the processes."""
    unit = cfg.data.sequence_length * processes
    share = cfg.batch.tokens // unit if cfg.batch.tokens % unit == 0 else 0
    return [m for m in range(1, share + 1) if share % m == 0]


def largest_micro(task: Task, strategy: str, processes: int, machine: Machine, among: Sequence[int]) -> int | None:
    """The largest that fits; None where not even the smallest does, or the strategy is refused."""
    for micro in reversed(among):
        try:
            c = case(dataclasses.replace(task, cfg=replace(task.cfg, "batch.micro", micro)), strategy, processes, machine)
        except ConfigError:
            continue
        if memory(c).peak <= machine.memory:
            return micro
    return None
