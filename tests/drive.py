"""Drives the product's own start and loop, in this process or as one rank of a group, and says what came of it."""

import importlib.util
import json
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pretrain import config, launch, runfolder, train
from pretrain.job import Job, start
from pretrain.resume import Progress
from pretrain.strategies import OPTIONS, STRATEGIES, release

Weights = Mapping[str, npt.NDArray[np.float32]]
Rows = list[dict[str, Any]]
torch.set_num_threads(1)


def stops(after: int | None = None) -> Any:
    """Stands in for StopRequests, which would take over the signals of the test's process; asks to stop after so many steps."""
    asked = iter(range(10**9))
    agreed = lambda group: "SIGTERM" if after is not None and next(asked) >= after else None  # noqa: E731
    return types.SimpleNamespace(agreed=agreed, watch=lambda path, limit: None, at_once=print)


def begin(path: Path, overrides: Sequence[str] = (), stop_after: int | None = None) -> tuple[Job, Progress]:
    cfg = config.load(path, overrides, OPTIONS)
    return start(cfg, path, list(overrides), launch.read_world(), [], stops(stop_after))


def steps(job: Job, progress: Progress, count: int) -> Rows:
    """`count` updates as the loop makes them: the global loss, the gradient norm and the windows of each."""
    rows = []
    for _ in range(count):
        batch, loss_sum, result = train.update(job, progress.step + 1, progress.position)
        train.advance(job, progress, batch)
        loss = float(job.strategy.reduce_sum(loss_sum)) / batch.tokens
        rows.append({"loss": loss, "grad_norm": float(result.grad_norm), "windows": batch.windows_hash, "tokens": progress.tokens})
    return rows


def weights(job: Job) -> Weights:
    """In full, without padded rows: all ranks call it."""
    real = {"transformer.wte.weight": slice(job.described["vocab_size"])}
    with job.strategy.evaluation_weights():
        return {name: tensor.detach().cpu().numpy()[real.get(name, ...)].copy() for name, tensor in job.strategy.whole_weights()}


def run(path: Path, overrides: Sequence[str] = (), count: int = 3) -> tuple[Rows, Weights]:
    """From step 0: (rows, weights after the last of them)."""
    job, progress = begin(path, overrides)
    rows = steps(job, progress, count)
    job.loader.close()
    return rows, weights(job)


def whole(path: Path, overrides: Sequence[str] = (), stop_after: int | None = None,
          tamper: Callable[[Job], None] | None = None) -> tuple[Rows, Weights, str | None]:  # fmt: skip
    """The real loop with its records: (this start's lines of metrics.jsonl on the main process, weights, reason to stop)."""
    job, progress = begin(path, overrides, stop_after)
    before = progress.step
    if tamper:
        tamper(job)
    try:
        reason = train.train(job, progress)
    finally:
        job.loader.close()
        if job.tracker:
            job.tracker.finish()
    rows = [row for row in lines(job.cfg.folder / "metrics.jsonl") if row["step"] > before] if job.is_main else []
    return rows, weights(job), reason


def every_strategy(world: int) -> dict[str, list[str]]:
    """Name -> overrides with which two updates have all of its collectives, on so many processes."""
    options = {"ddp_powersgd": ["strategy.options.start_step=2"], "local_sgd": ["strategy.options.sync_every=2"],
               "diloco": ["strategy.options.sync_every=2"], "deepspeed3": ["strategy.options.stage3_param_persistence_threshold=0"]}  # fmt: skip
    names = [name for name, cls in STRATEGIES.items() if cls.processes[0] <= world <= cls.processes[1]]
    if importlib.util.find_spec("deepspeed") is None:
        names = [name for name in names if not name.startswith("deepspeed")]
    return {name: [f"strategy.name={name}", *options.get(name, [])] for name in names}


def leave() -> None:
    """Make room for another run in the same process group."""
    release()
    for lock in runfolder._owned.values():
        if lock:
            lock.close()
    runfolder._owned.clear()


def lines(path: Path) -> Rows:
    """None where there is no file yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def distance(a: Weights, b: Weights) -> float:
    """Of all weights together, as a share of their norm."""
    apart = np.sqrt(sum(float(((a[name] - b[name]).astype(np.float64) ** 2).sum()) for name in a))
    return float(apart / np.sqrt(sum(float((w.astype(np.float64) ** 2).sum()) for w in a.values())))


def largest_difference(a: Weights, b: Weights) -> tuple[float, str]:
    """(largest difference of one number, the tensor that it is in)."""
    assert a.keys() == b.keys()
    return max((float(np.abs(a[name] - b[name]).max()), name) for name in a)
