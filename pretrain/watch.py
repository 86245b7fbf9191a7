"""Sees every update on the device, and tells about it on schedule: a line, metrics.jsonl, and whether all was finite."""

import faulthandler
import gc
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.config import profile_window
from pretrain.job import Job
from pretrain.loader import GlobalBatch
from pretrain.model import tensors_hash
from pretrain.optim import local, lr_at
from pretrain.resume import Progress
from pretrain.spikes import Spikes
from pretrain.strategies import StepResult
from pretrain.throughput import peak_memory_bytes
from pretrain.tracing import Tracer


class NonFinite(RuntimeError):
    """An update that was refused because its gradient was not finite: at which step, and whose loss was it."""

    def __init__(self, message: str, step: int, rank: int | None) -> None:
        super().__init__(message)
        self.step, self.rank = step, rank


class GoBack(Exception):
    """What to go back for: the step, its windows [first, end), and the rank whose loss it was, if it was one's."""

    def __init__(self, message: str, step: int, windows: tuple[int, int], rank: int | None = None) -> None:
        super().__init__(message)
        self.step, self.windows, self.rank = step, windows, rank


class Watch:
    """Sees every update on the device, and looks at what it saw once per logging interval and before each save."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self.job = job
        self.hang = HangWatch(job.cfg.train.hang_timeout, job.stops.at_once, f"{job.cfg.folder}/logs/rank_{job.world.rank}.txt")
        window = profile_window(job.cfg.train.profile) if job.cfg.train.profile else None
        self.tracer = Tracer(window, job.cfg.folder / "logs", job.world.rank, job.clock)
        self.begin(progress)

    def begin(self, progress: Progress) -> None:
        """Training goes on from here; what it has seen before is what a checkpoint tells."""
        device = self.job.clock.device
        self.logged_step = progress.step
        self.refused = torch.full((), float(progress.skipped), device=device)  # updates since the last log line
        self.first_refused = torch.zeros((), device=device)  # step, 0 for none
        self.first_bad_loss = torch.zeros((), device=device)  # the same, for this rank's own loss
        self.seen: list[GlobalBatch] = []  # since the last log line
        self.losses: list[Tensor] = []  # of the last of these, not yet looked at, where spikes are looked for
        self.spikes = Spikes(self.job.cfg.train.spike, progress.losses)
        self.job.clock.begin()

    def note(self, step: int, batch: GlobalBatch, loss_sum: Tensor, result: StepResult) -> None:
        self.seen.append(batch)
        if self.job.cfg.train.spike:
            self.losses.append(loss_sum)
        refused = (~result.applied).float()
        self.refused += refused
        self.first_refused += torch.where(self.first_refused == 0, refused * step, 0.0)
        bad_loss = (~torch.isfinite(loss_sum)).float()
        self.first_bad_loss += torch.where(self.first_bad_loss == 0, bad_loss * step, 0.0)

    def gather(self, *values: Tensor) -> list[list[float]]:
        """One row per rank of (first refused, first bad loss, memory, refused, values …): the interval's one host synchronisation."""
        memory = torch.tensor(float(peak_memory_bytes(self.job.clock.device)))
        row = torch.stack(
            [
                v.double().cpu() if v.device.type == "mps" else v.double()
                for v in (self.first_refused, self.first_bad_loss, memory.to(self.refused.device), self.refused, *values)
            ]
        )
        rows: list[list[float]] = self.job.strategy.accelerator.gather(row[None]).tolist()
        refused = [row[0] for row in rows if row[0]]  # replicas that train apart refuse apart
        if refused and (reaction := self.job.cfg.train.nonfinite) != "skip":
            step = int(min(refused))
            culprit = next((rank for rank, (_, bad, *_) in enumerate(rows) if bad == step), None)
            whose = "every rank's loss was finite" if culprit is None else f"rank {culprit} had a loss that is not finite"
            if reaction == "rollback":
                raise GoBack(f"the gradient of step {step:,} was not finite ({whose})", step, self.windows_of(step), culprit)
            raise NonFinite(f"the gradient of step {step:,} was not finite ({whose}); its update and later such were not applied; "
                            "train.nonfinite=skip goes on instead", step, culprit)  # fmt: skip
        return rows

    def windows_of(self, step: int) -> tuple[int, int]:
        batch = self.seen[step - self.logged_step - 1]
        return batch.start, batch.stop

    def look(self, progress: Progress, *values: Tensor) -> list[list[float]]:
        """`gather`, and the losses that have not been looked at: a checkpoint holds no spike, and those that it knows are of steps before it.
        Raises GoBack, on all ranks alike."""
        rows = self.gather(*values, *self.losses)
        progress.skipped = int(max(row[3] for row in rows))
        if self.losses:
            self.find_spike([row[-len(self.losses) :] for row in rows])
            self.losses = []
            progress.losses = list(self.spikes.before)
        return rows

    def find_spike(self, rows: list[list[float]]) -> None:
        """`rows`: every rank's loss sums of the last updates."""
        batches = self.seen[-len(self.losses) :]
        losses = [sum(column) / batch.tokens for column, batch in zip(zip(*rows, strict=True), batches, strict=True)]
        index = self.spikes.first(losses)
        if index is not None:
            step = self.logged_step + 1 + len(self.seen) - len(batches) + index
            score = self.spikes.score(losses[index])
            raise GoBack(f"the loss of step {step:,}, {losses[index]:.4f}, lies {score:.1f} deviations above those before it",
                         step, self.windows_of(step))  # fmt: skip

    def log(self, progress: Progress, batch: GlobalBatch, loss_sum: Tensor, result: StepResult) -> None:
        job = self.job
        rows = self.look(progress, loss_sum, result.grad_norm)
        seconds, data_seconds = job.clock.interval()
        steps = progress.step - self.logged_step
        wire = job.strategy.wire(progress.step)
        tokens_per_second = sum(batch.tokens for batch in self.seen) / seconds
        of_one = tokens_per_second / job.strategy.devices
        metrics = {
            "step": progress.step,
            "tokens": progress.tokens,
            "position": progress.position,
            "epoch": progress.position / job.sets.windows_per_epoch,
            **job.sets.mixture(progress.position, progress.passed_over),
            "loss": sum(row[4] for row in rows) / batch.tokens,
            "lr": lr_at(progress.step, job.cfg.optim, job.layout.steps),
            "grad_norm": math.sqrt(sum(row[5] ** 2 for row in rows) / len(rows)),  # differs between replicas that train apart
            "skipped": progress.skipped,
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": of_one,
            **({"mfu": of_one * job.flops_per_token / job.peak[1]} if job.peak else {}),
            "step_seconds": seconds / steps,
            "data_seconds": data_seconds / steps,
            "train_seconds": job.clock.train_seconds,
            "peak_memory_bytes": int(max(row[2] for row in rows)),
            "wire_bytes": wire,
            "wire_bytes_total": progress.wire_bytes_total,
            **{name: float(value) for name, value in job.strategy.telemetry().items()},
            "restarts": progress.restarts,
            "time": time.time(),
        }
        progress.train_seconds = job.clock.train_seconds
        self.logged_step = progress.step
        self.seen = []
        self.refused.zero_()
        progress.skipped = 0
        gc.collect(1)  # here, on every rank at once, and nowhere else
        if job.tracker:
            job.tracker.log(metrics)
            job.status.reached(progress.step)
        job.say(progress_line(job, metrics))


class ReplicasDiffer(RuntimeError):
    """Processes that should hold the same weights do not."""


def compare_replicas(job: Job, step: int) -> None:
    """All ranks call it. Raises ReplicasDiffer, on all of them, naming the first rank that differs; between synchronisations does nothing."""
    if job.control is None or not job.strategy.may_save(step):
        return
    digest = tensors_hash((name, local(p.detach())) for name, p in job.strategy.named_parameters().items())
    everyone: list[Any] = [None] * job.world.size
    dist.all_gather_object(everyone, (job.strategy.replica_key(), digest), group=job.control)
    first: dict[int, tuple[int, str]] = {}
    for rank, (key, found) in enumerate(everyone):
        other, expected = first.setdefault(key, (rank, found))
        if found != expected:
            raise ReplicasDiffer(f"after step {step:,} ranks {other} and {rank} hold different weights, and should hold the same; "
                                 "earlier checkpoints may be sound: a fault of memory, network or code")  # fmt: skip


class HangWatch:
    """Dumps every thread's stack and ends the process when its block takes too long: from a thread, since no exception and no signal
    handler of Python's reaches a process inside a collective."""

    def __init__(self, seconds: float, report: Callable[..., object], log: str) -> None:
        self.seconds, self.report, self.log = seconds, report, log
        self._since: float | None = None
        if seconds:
            threading.Thread(target=self._look, name="hang-watch", daemon=True).start()

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        self._since = None

    def _look(self) -> None:
        while True:
            time.sleep(min(1.0, self.seconds / 4))
            since = self._since
            if since is not None and time.monotonic() - since > self.seconds:
                try:
                    with suppress(OSError), open(self.log, "a", encoding="utf-8") as log:
                        faulthandler.dump_traceback(log, all_threads=True)
                    self.report(
                        f"no step was finished in {self.seconds:g} seconds (train.hang_timeout); every rank's stacks are in {os.path.dirname(self.log)}",
                        again=True,
                        log=self.log,
                    )
                finally:
                    os._exit(1)


def progress_line(job: Job, m: dict[str, Any]) -> str:
    left = (job.layout.steps - m["step"]) * m["step_seconds"]
    mfu = f"  {m['mfu']:.1%} MFU ({job.peak[0]})" if job.peak else ""
    skipped = f"  {m['skipped']} skipped" if m["skipped"] else ""
    return (f"step {m['step']:,}/{job.layout.steps:,}  loss {m['loss']:.4f}  lr {m['lr']:.1e}  |g| {m['grad_norm']:.2f}  {_short(m['tokens_per_second'])} tok/s"
            f"{mfu}  {m['peak_memory_bytes'] / 1e9:.1f} GB{skipped}  {duration(left)} left")  # fmt: skip


def _short(number: float) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """`85s`, `41m`, `2.3h`."""
    if seconds < 90:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 5400 else f"{seconds / 3600:.1f}h"
