"""Drives the product's own start and loop for a few steps, in this process or as one rank of a group, and says what came of it."""

import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pretrain import config, launch, train
from pretrain import model as models
from pretrain.job import Job, start
from pretrain.resume import Progress
from pretrain.strategies import OPTIONS


def never_stopping() -> Any:
    """Stands in for StopRequests, which would take over the signals of the test's process."""
    return types.SimpleNamespace(agreed=lambda group: None, watch=lambda path: None, at_once=print)


def begin(path: Path, overrides: Sequence[str] = ()) -> tuple[Job, Progress]:
    cfg = config.load(path, overrides, OPTIONS)
    return start(cfg, path, list(overrides), launch.read_world(), [], never_stopping())


def steps(job: Job, progress: Progress, count: int) -> list[Mapping[str, float]]:
    """`count` updates as the loop makes them: the global loss, the gradient norm and the windows of each."""
    rows = []
    for _ in range(count):
        batch, loss_sum, result = train.update(job, progress.step + 1, progress.position)
        train.advance(job, progress, batch)
        loss = float(job.strategy.reduce_sum(loss_sum)) / batch.tokens
        rows.append({"loss": loss, "grad_norm": float(result.grad_norm), "applied": bool(result.applied), "windows": batch.windows_hash})
    return rows


def weights(job: Job) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy().copy() for name, tensor in models.plain_state(job.strategy.module).items()}


def run(path: Path, overrides: Sequence[str] = (), count: int = 3) -> tuple[list[Mapping[str, float]], dict[str, np.ndarray]]:
    """From the start: (rows, weights after the last of them)."""
    job, progress = begin(path, overrides)
    rows = steps(job, progress, count)
    job.loader.close()
    return rows, weights(job)
