"""Sees every update on the device, and tells about it on schedule: a line, metrics.jsonl, and whether all was finite."""

import faulthandler
import gc
import time
from typing import Any

import torch
from torch import Tensor

from pretrain.job import Job
from pretrain.loader import GlobalBatch
from pretrain.optim import lr_at
from pretrain.resume import Progress
from pretrain.strategies import StepResult
from pretrain.throughput import peak_memory_bytes


class NonFinite(RuntimeError):
    """An update that was refused because its gradient was not finite."""


class Watch:
    """Sees every update on the device, and looks at what it saw once per logging interval and before each save."""

    def __init__(self, job: Job, step: int) -> None:
        self.job, self.logged_step = job, step
        device = job.clock.device
        self.refused = torch.zeros((), device=device)  # updates since the last log line
        self.first_refused = torch.zeros((), device=device)  # step, 0 for none
        self.first_bad_loss = torch.zeros((), device=device)  # the same, for this rank's own loss
        job.clock.begin()

    def note(self, step: int, loss_sum: Tensor, result: StepResult) -> None:
        refused = (~result.applied).float()
        self.refused += refused
        self.first_refused += torch.where(self.first_refused == 0, refused * step, 0.0)
        bad_loss = (~torch.isfinite(loss_sum)).float()
        self.first_bad_loss += torch.where(self.first_bad_loss == 0, bad_loss * step, 0.0)

    def gather(self, *values: Tensor) -> list[list[float]]:
        """One row per rank of (first refused, first bad loss, memory, values …): the interval's one host synchronisation."""
        memory = torch.tensor(float(peak_memory_bytes(self.job.clock.device)))
        row = torch.stack(
            [
                v.double().cpu() if v.device.type == "mps" else v.double()
                for v in (self.first_refused, self.first_bad_loss, memory.to(self.refused.device), *values)
            ]
        )
        rows: list[list[float]] = self.job.strategy.accelerator.gather(row[None]).tolist()
        if rows[0][0] and self.job.cfg.train.nonfinite == "stop":
            culprit = [f"rank {rank} had a loss that is not finite at step {bad:.0f}" for rank, (_, bad, *_) in enumerate(rows) if bad]
            raise NonFinite(f"the gradient of step {rows[0][0]:.0f} was not finite (its update and later such were not applied): "
                            + (culprit[0] if culprit else "every rank's loss was finite") + "; train.nonfinite=skip goes on instead")  # fmt: skip
        return rows

    def log(self, progress: Progress, batch: GlobalBatch, loss_sum: Tensor, result: StepResult) -> None:
        job = self.job
        rows = self.gather(loss_sum, result.grad_norm, self.refused)
        seconds, data_seconds = job.clock.interval()
        steps = progress.step - self.logged_step
        wire = job.strategy.wire(progress.step)
        tokens_per_second = steps * job.layout.windows * job.layout.sequence_length / seconds
        flops_per_second = tokens_per_second * job.flops_per_token / job.world.size
        metrics = {
            "step": progress.step,
            "tokens": progress.tokens,
            "position": progress.position,
            "epoch": progress.position / job.sets.windows_per_epoch,
            "loss": sum(row[3] for row in rows) / batch.tokens,
            "lr": lr_at(progress.step, job.cfg.optim, job.layout.steps),
            "grad_norm": rows[0][4],
            "skipped": int(rows[0][5]),
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": tokens_per_second / job.world.size,
            **({"mfu": flops_per_second / job.peak[1]} if job.peak else {}),
            "step_seconds": seconds / steps,
            "data_seconds": data_seconds / steps,
            "train_seconds": job.clock.train_seconds,
            "peak_memory_bytes": int(max(row[2] for row in rows)),
            "wire_bytes": wire,
            "wire_bytes_total": progress.wire_bytes_total,
            "restarts": progress.restarts,
            "time": time.time(),
        }
        progress.train_seconds = job.clock.train_seconds
        self.logged_step = progress.step
        self.refused.zero_()
        gc.collect(1)  # here, on every rank at once, and nowhere else
        if job.tracker:
            job.tracker.log(metrics)
            job.status.write("running", step=progress.step)
        job.say(progress_line(job, metrics))

    def for_hangs(self) -> "HangWatch":
        return HangWatch(self.job.cfg.train.hang_timeout)


class HangWatch:
    """Dumps every thread's stack and ends the process when its block takes too long, even inside a collective."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        if self.seconds:
            faulthandler.dump_traceback_later(self.seconds, exit=True)

    def __exit__(self, *exc: object) -> None:
        faulthandler.cancel_dump_traceback_later()


def progress_line(job: Job, m: dict[str, Any]) -> str:
    left = (job.layout.steps - m["step"]) * m["step_seconds"]
    mfu = f"  {m['mfu']:.1%} MFU ({job.peak[0]})" if job.peak else ""
    skipped = f"  {m['skipped']} skipped" if m["skipped"] else ""
    return (f"step {m['step']:,}/{job.layout.steps:,}  loss {m['loss']:.4f}  lr {m['lr']:.1e}  |g| {m['grad_norm']:.2f}  {_short(m['tokens_per_second'])} tok/s"
            f"{mfu}  {m['peak_memory_bytes'] / 1e9:.1f} GB{skipped}  {_duration(left)} left")  # fmt: skip


def _short(number: float) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.3g}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 5400 else f"{seconds / 3600:.1f}h"
