"""What a checkpoint costs: how long training waits for one that is written beside it, against one that is written while it waits, and how
fast the latter is against `dd oflag=direct` with as many writers on the same disk.

    python scripts/benchmark_checkpoint.py [FOLDER [NAME …]]        (on two processes; FOLDER: on the disk to measure)

They alternate with an update alone, so that a drifting machine slows all. Prints medians. "Waits" is what stands still. "Later" is by how
much the update ends later that goes on beside the copying and the writing: on CPUs without an idle core, what these take from it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch.distributed as dist
from benchmark_strategies import prepare, start_processes

from pretrain import config, launch, train
from pretrain.job import Job, start
from pretrain.pieces import pieces, share
from pretrain.ranks import gather
from pretrain.resume import Progress
from pretrain.stopping import StopRequests
from pretrain.strategies import OPTIONS, release

NAMES = ("ddp", "zero1", "fsdp1", "fsdp2", "deepspeed2", "deepspeed3")
_ROUNDS = 6
_MODEL = ["model.n_layer=12", "model.n_head=12", "model.n_embd=768"]  # GPT-2: 124 M parameters, 1.5 GB with the moments
_BATCH = ["batch.tokens=256", "batch.micro=1"]  # the least: a longer update would only hide more


def main(arguments: Sequence[str]) -> int:
    """Start two processes of this file."""
    with tempfile.TemporaryDirectory(dir=arguments[0] if arguments else None) as folder:
        return start_processes(__file__, 2, [folder, *(arguments[1:] or NAMES)])


def worker(folder: Path, names: Sequence[str]) -> None:
    world = launch.read_world()
    if world.rank == 0:
        prepare(folder)
        print("| strategy | MB | an update, s | beside training: it waits, s | later, s | written after, s | synchronous, s | "
              "waits / synchronous | MB/s | dd, MB/s |\n|---|---|---|---|---|---|---|---|---|---|", flush=True)  # fmt: skip
    stops = StopRequests(follow_launcher=True)
    for name in names:
        measure(folder, name, world, stops)


def measure(folder: Path, name: str, world: launch.World, stops: StopRequests) -> None:
    path = folder / "benchmark.yaml"
    while not path.exists():  # the other rank is writing it
        time.sleep(0.05)
    cfg = config.load(path, [*_MODEL, *_BATCH, f"strategy.name={name}", f"run.name={name}", "train.keep_last=99"], OPTIONS)
    silent = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    job, progress = start(cfg, path, [], world, [], stops)
    step(job, progress)
    mine = sum(piece.tensor.nbytes for piece in share(pieces(job.strategy.state()), job.control))
    rounds = [
        (step(job, progress), *save_beside(job, progress), save_synchronously(job, progress), dd(folder, world.rank, mine))
        for _ in range(_ROUNDS)
    ]
    alone, waits, together, beside, synchronous, raw = (median(column[1:]) for column in zip(*rounds, strict=True))  # the first makes room
    total = sum(gather(job.control, mine)) / 1e6
    job.loader.close()
    shutil.rmtree(job.saver.folder, ignore_errors=True)
    os.dup2(silent, 1)
    release()
    if world.rank == 0:
        print(f"| {name} | {total:.0f} | {alone:.2f} | {waits:.3f} | {together - alone:.2f} | {beside:.2f} | {synchronous:.2f} | "
              f"{waits / synchronous:.1%} | {total / synchronous:.0f} | {total / raw:.0f} |", flush=True)  # fmt: skip


def step(job: Job, progress: Progress) -> float:
    """The next update: how many seconds it took."""
    dist.barrier()
    began = time.perf_counter()
    batch, *_ = train.update(job, progress.step + 1, progress.position)
    train.advance(job, progress, batch)
    return time.perf_counter() - began


def save_beside(job: Job, progress: Progress) -> tuple[float, float, float]:
    """(seconds that training stood still, until the next update was made, until the checkpoint stood)."""
    job.saver.train = replace(job.saver.train, async_checkpoint=True)
    dist.barrier()
    began, settled = time.perf_counter(), job.clock.other.get("checkpoint", 0.0)
    job.saver.start(progress.step, job.strategy.state(), {}, job.described)
    waited = time.perf_counter() - began
    step(job, progress)
    together = time.perf_counter() - began
    assert job.saver.wait() is None
    return waited + job.clock.other["checkpoint"] - settled, together, time.perf_counter() - began


def save_synchronously(job: Job, progress: Progress) -> float:
    job.saver.train = replace(job.saver.train, async_checkpoint=False)
    dist.barrier()
    began = time.perf_counter()
    job.saver.start(progress.step, job.strategy.state(), {}, job.described)
    assert job.saver.wait() is None
    return time.perf_counter() - began


def dd(folder: Path, rank: int, size: int) -> float:
    """As many bytes as this rank has written, past the page cache, at the same time as the other ranks."""
    target = folder / f"dd{rank}"
    dist.barrier()
    began = time.perf_counter()
    command = ["dd", "if=/dev/zero", f"of={target}", "bs=4M", f"count={max(1, size >> 22)}", "oflag=direct", "conv=fsync"]
    subprocess.run(command, check=True, capture_output=True)
    dist.barrier()
    seconds = time.perf_counter() - began
    target.unlink()
    return seconds


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main(sys.argv[1:]))
