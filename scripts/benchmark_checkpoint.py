"""What a checkpoint costs: how long training waits for one that is written beside it, against one that is written while it waits, and how
fast both are against `dd oflag=direct` with as many writers on the same disk.

    python scripts/benchmark_checkpoint.py [FOLDER [NAME …]]        (on two processes; FOLDER: on the disk to measure)

The three alternate, so that a drifting machine slows all. Prints medians. No training goes on meanwhile: that would slow the writing, and
the writing it.
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

from pretrain import config, launch
from pretrain.job import Job, start
from pretrain.pieces import pieces, share
from pretrain.ranks import gather
from pretrain.stopping import StopRequests
from pretrain.strategies import OPTIONS, release

NAMES = ("ddp", "zero1", "fsdp1", "fsdp2", "deepspeed2", "deepspeed3")
_ROUNDS = 6
_MODEL = ["model.n_layer=12", "model.n_head=12", "model.n_embd=768"]  # GPT-2: 124 M parameters, 1.5 GB with the moments


def main(arguments: Sequence[str]) -> int:
    """Start two processes of this file."""
    with tempfile.TemporaryDirectory(dir=arguments[0] if arguments else None) as folder:
        return start_processes(__file__, 2, [folder, *(arguments[1:] or NAMES)])


def worker(folder: Path, names: Sequence[str]) -> None:
    world = launch.read_world()
    if world.rank == 0:
        prepare(folder)
        print("| strategy | MB | beside training: it waits, s | whole, s | synchronous, s | waits / synchronous | MB/s | dd, MB/s |\n"
              "|---|---|---|---|---|---|---|---|", flush=True)  # fmt: skip
    stops = StopRequests(follow_launcher=True)
    for name in names:
        measure(folder, name, world, stops)


def measure(folder: Path, name: str, world: launch.World, stops: StopRequests) -> None:
    path = folder / "benchmark.yaml"
    while not path.exists():  # the other rank is writing it
        time.sleep(0.05)
    cfg = config.load(path, [*_MODEL, f"strategy.name={name}", f"run.name={name}", "train.keep_last=99"], OPTIONS)
    silent = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    job, _ = start(cfg, path, [], world, [], stops)
    mine = sum(piece.tensor.nbytes for piece in share(pieces(job.strategy.state()), job.control))
    rounds = [(*save(job, 2 * k + 1, True), *save(job, 2 * k + 2, False), dd(folder, world.rank, mine)) for k in range(_ROUNDS)]
    waits, beside, _, synchronous, raw = (median(column[1:]) for column in zip(*rounds, strict=True))  # the first makes the buffers
    total = sum(gather(job.control, mine)) / 1e6
    job.loader.close()
    shutil.rmtree(job.saver.folder, ignore_errors=True)
    os.dup2(silent, 1)
    release()
    if world.rank == 0:
        print(f"| {name} | {total:.0f} | {waits:.3f} | {beside:.2f} | {synchronous:.2f} | {waits / synchronous:.1%} | "
              f"{total / synchronous:.0f} | {total / raw:.0f} |", flush=True)  # fmt: skip


def save(job: Job, step: int, beside: bool) -> tuple[float, float]:
    """(seconds until training may go on, seconds until the checkpoint stands)."""
    job.saver.train = replace(job.saver.train, async_checkpoint=beside)
    dist.barrier()
    began = time.perf_counter()
    job.saver.start(step, job.strategy.state(), {}, job.described)
    waited = time.perf_counter() - began
    assert job.saver.wait() is None
    return waited, time.perf_counter() - began


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
