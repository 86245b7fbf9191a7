"""What the training loop costs: our step against a bare PyTorch loop over the same compiled model, optimiser and batch.

    python scripts/benchmark_loop.py [section.key=value …]

Blocks of steps alternate in one process (ours, bare, ours, …), so that a drifting machine slows both. Prints the median of each and
the median of the paired ratios. Both read random tokens; the bare loop has its batches in memory, ours comes through the loader.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from pretrain import config, launch, shards
from pretrain.job import Job, start
from pretrain.resume import Progress
from pretrain.stopping import StopRequests
from pretrain.train import take_step
from pretrain.watch import Watch

_CONFIG = """
model: {preset: small}
data: {sequence_length: 256}
batch: {tokens: 4096, micro: 8}
train: {max_steps: 100000, log_every: 10, eval_every: 0, checkpoint_every: 0}
"""
_ROUNDS, _STEPS = 7, 3


def main(overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job, progress = _start(Path(folder), overrides)
        watch = Watch(job, progress)
        batches = [job.loader.global_batch(i * job.layout.windows).micros for i in range(_STEPS)]
        ours, bare = [], []
        for _ in range(_ROUNDS):
            ours.append(_ours(job, progress, watch))
            bare.append(_bare(job, batches))
        ratio = median(a / b for a, b in zip(ours[1:], bare[1:], strict=True))  # the first round warms up
        print(f"ours {median(ours[1:]) * 1e3:.1f} ms a step, bare {median(bare[1:]) * 1e3:.1f} ms, ratio {ratio:.4f}")
        job.loader.close()


def _ours(job: Job, progress: Progress, watch: Watch) -> float:
    began = time.perf_counter()
    for _ in range(_STEPS):
        assert job.stops.agreed(job.control) is None
        assert take_step(job, progress, watch)
    _synchronize(job)
    return (time.perf_counter() - began) / _STEPS


def _bare(job: Job, batches: list[object]) -> float:
    model, optimizer = job.model, job.strategy.optimizer
    optimizer.found_inf = None  # type: ignore[attr-defined]
    tokens = job.cfg.batch.tokens
    began = time.perf_counter()
    for micros in batches:
        for micro in micros:  # type: ignore[attr-defined]
            loss_sum, _ = model(micro.inputs, micro.targets)
            (loss_sum / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.cfg.optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    _synchronize(job)
    return (time.perf_counter() - began) / _STEPS


def _synchronize(job: Job) -> None:
    if job.clock.device.type == "cuda":
        torch.cuda.synchronize()


def _start(folder: Path, overrides: list[str]) -> tuple[Job, Progress]:
    writer = shards.ShardWriter(folder, "train", np.dtype("<u2"))
    writer.append(np.random.default_rng(0).integers(0, 50257, 4_000_000).astype("<u2"))
    writer.close()
    (folder / "benchmark.yaml").write_text(_CONFIG)
    cfg = config.load(folder / "benchmark.yaml", [f"data.train={folder}", f"run.dir={folder}", *overrides])
    return start(cfg, folder / "benchmark.yaml", overrides, launch.read_world(), [], StopRequests(follow_launcher=False))


if __name__ == "__main__":
    main(sys.argv[1:])
