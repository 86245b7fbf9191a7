"""What a start, a save and a load need at their peak, on the process that needs most, beyond the state that it holds.

    python scripts/benchmark_memory.py [--processes N] [NAME …]        (strategies; on two processes by default)

GPT-2's 124 M parameters, 154 MB in the largest. On CPUs peaks of resident memory, less what was resident before (of a start until its optimiser is
made, which would hide what was before: and less the weights that the process holds); on GPUs those of torch's allocator, and of host memory after the slash. Saves are measured after one update, beside
training (which copies the process's share to host memory) and without. Figures below a few MB are noise.
"""

import ctypes
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from benchmark_strategies import prepare, start_processes

from pretrain import checkpoint, config, job, launch
from pretrain.optim import local
from pretrain.pieces import pieces
from pretrain.ranks import gather
from pretrain.stopping import StopRequests
from pretrain.strategies import OPTIONS, base, zero_deepspeed
from pretrain.strategies.zero_deepspeed import DeepSpeed, deepspeed
from pretrain.train import take_step
from pretrain.watch import Watch

NAMES = ("ddp", "fsdp1", "fsdp2", "deepspeed2", "deepspeed3")
_LARGEST = 50304 * 768 * 4
_MODEL = ["model.n_layer=12", "model.n_head=12", "model.n_embd=768", "data.sequence_length=64", "batch.tokens=128", "batch.micro=1"]
_HEADER = "| strategy | held: weights | with moments | start | save beside training | save | load |\n|---|---|---|---|---|---|---|"


def main(arguments: Sequence[str]) -> int:
    """Start processes of this file, anew for each strategy: what one leaves behind would hide the next one's."""
    processes, names = (arguments[1], arguments[2:]) if arguments[:1] == ["--processes"] else ("2", arguments)
    print(f"On {processes} processes, MB.\n\n{_HEADER}", flush=True)
    for name in names or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            # freed memory goes back to the kernel at once
            at_once = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
            if status := start_processes(__file__, int(processes), [folder, name], **at_once):
                return status
    return 0


def worker(folder: Path, name: str) -> None:
    world = launch.read_world()
    if world.rank == 0:
        prepare(folder)
    path = folder / "benchmark.yaml"
    while not path.exists():  # the other rank is writing it
        time.sleep(0.05)
    if name.startswith("deepspeed"):
        os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.is_available() else "cpu"
        deepspeed()
    torch.cuda.init() if torch.cuda.is_available() else None
    silent = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    cfg = config.load(path, [*_MODEL, f"strategy.name={name}", f"run.name={name}", "train.keep_last=99"], OPTIONS)

    peak = Peak()
    at_start: list[float] = []
    for module in (base, zero_deepspeed):  # the optimiser's states, gradients and activations would hide what comes before them
        module.make_optimizer = partial(read_first, peak, at_start, module.make_optimizer)
    made, progress = job.start(cfg, path, [], world, [], StopRequests(follow_launcher=True))
    take_step(made, progress, Watch(made, progress))
    weights, state = held(made)
    at_start = [at_start[0] - weights / 1e6, *at_start[1:]]

    def save(step: int, beside: bool) -> None:
        made.saver.train = replace(made.saver.train, async_checkpoint=beside)
        made.saver.start(step, made.strategy.state(), {}, made.described)
        assert made.saver.wait() is None

    beside = peak.of(lambda: save(1, True))
    whole = peak.of(lambda: save(2, False))
    stored = checkpoint.Stored(checkpoint.path_of(made.saver.folder, 1))
    loading = peak.of(lambda: made.strategy.restore(stored, moments=True, extras=True))
    rows = gather(made.control, (weights, state, at_start, beside, whole, loading))
    made.loader.close()
    os.dup2(silent, 1)
    if world.rank == 0:
        most = [[max(values) for values in zip(*column, strict=True)] for column in list(zip(*rows, strict=True))[2:]]
        cells = [" / ".join(f"{value:.0f}" for value in values) for values in most]
        print(f"| {name} | {rows[0][0] / 1e6:.0f} | {rows[0][1] / 1e6:.0f} | {' | '.join(cells)} |", flush=True)


def read_first(peak: "Peak", found: list[float], act: Callable[..., object], *arguments: object, **keywords: object) -> object:
    found[:] = found or peak.read()
    return act(*arguments, **keywords)


def held(made: job.Job) -> tuple[int, int]:
    """Bytes of this process's weights in fp32, and with the optimiser's states."""
    strategy = made.strategy
    if isinstance(strategy, DeepSpeed):
        parts = strategy.pieces()
        whole = sum(math.prod(getattr(p, "ds_shape", p.shape)) for p in strategy.module.parameters()) * 4
        weights = whole // made.world.size if strategy.sharded else whole
        return weights, weights + sum(p.nbytes for p in parts) * (3 if strategy.sharded else 2)
    weights = sum(local(p).nbytes for p in strategy.named_parameters().values())
    return weights, sum(piece.tensor.nbytes for piece in pieces(strategy.state()))


class Peak:
    """In MB since it was last reset, beyond what there was then: of the device where it has an allocator of its own, and of the host.

    The kernel's own mark of the highest counts a file's pages, which a reader maps and the kernel takes back at need; so a thread looks.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._highest = 0
        threading.Thread(target=self._look, daemon=True).start()
        self.reset()

    def _look(self) -> None:
        while True:
            self._highest = max(self._highest, anonymous())
            time.sleep(0.005)

    def reset(self) -> None:
        self._libc.malloc_trim(0)
        self._highest = anonymous()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._before = self._now()

    def read(self) -> list[float]:
        return [(now - before) / 1e6 for now, before in zip(self._now(), self._before, strict=True)]

    def of(self, act: Callable[[], object]) -> list[float]:
        self.reset()
        act()
        return self.read()

    def _now(self) -> list[int]:
        return [*([torch.cuda.max_memory_allocated()] if torch.cuda.is_available() else []), self._highest]


def anonymous() -> int:
    """Bytes resident, without those of files."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(main(sys.argv[1:]))
