"""What our strategies cost: each against the same written by hand around the same model, optimiser settings and batches.

    python scripts/benchmark_strategies.py [NAME …]        (ddp zero1 fsdp2 deepspeed2 by default, on two processes)

Blocks of steps alternate in one process group (ours, by hand, ours, …), so that a drifting machine slows both. Prints the medians and the
median of the paired ratios.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from pretrain import config, launch, shards
from pretrain import model as models
from pretrain.job import Job, start
from pretrain.loader import Micro
from pretrain.optim import make_recipe, parameter_groups
from pretrain.resume import Progress
from pretrain.stopping import StopRequests
from pretrain.strategies import OPTIONS, release
from pretrain.train import take_step
from pretrain.watch import Watch

NAMES = ("ddp", "zero1", "fsdp2", "deepspeed2")
_CONFIG = {
    "run": {"precision": "fp32"},
    "model": {"n_layer": 4, "n_head": 4, "n_embd": 256},
    "data": {"sequence_length": 128},
    "batch": {"tokens": 1024, "micro": 2},
    "train": {"max_steps": 100000, "log_every": 10, "eval_every": 0, "checkpoint_every": 0, "compile": "off"},
}
_ROUNDS, _STEPS = 7, 3
Step = Callable[[Sequence[Micro], int], None]


def main(names: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        return start_processes(__file__, 2, [folder, *names])


def start_processes(file: str, processes: int, arguments: Sequence[str], **environment: str) -> int:
    """Processes of a benchmark's file, called with `--worker` and the arguments, one thread each. Returns the launcher's status."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [*launcher, file, "--worker", *arguments]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}).returncode


def worker(folder: Path, names: Sequence[str]) -> None:
    world = launch.read_world()
    if world.rank == 0:
        prepare(folder)
    stops = StopRequests(follow_launcher=True)
    if world.rank == 0:
        print("| strategy | ours, ms a step | by hand, ms a step | ratio |\n|---|---|---|---|", flush=True)
    for name in names:
        ours, bare = measure(folder, name, world, stops)
        if world.rank == 0:
            ratio = median(a / b for a, b in zip(ours, bare, strict=True))
            print(f"| {name} | {median(ours) * 1e3:.1f} | {median(bare) * 1e3:.1f} | {ratio:.3f} |", flush=True)


def measure(folder: Path, name: str, world: launch.World, stops: StopRequests) -> tuple[list[float], list[float]]:
    path = folder / "benchmark.yaml"
    while not path.exists():  # the other rank is writing it
        time.sleep(0.05)
    cfg = config.load(path, [f"strategy.name={name}", f"run.name={name}"], OPTIONS)
    silent = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    job, progress = start(cfg, path, [], world, [], stops)
    watch = Watch(job, progress)
    by_hand = BY_HAND[name](models.build(cfg, 50257, None).to(job.clock.device), cfg)
    batches = [job.loader.global_batch(i * job.layout.windows) for i in range(_STEPS)]
    ours, bare = [], []
    for _ in range(_ROUNDS):
        ours.append(timed(lambda: our_steps(job, progress, watch)))
        bare.append(timed(lambda: [by_hand(batch.micros, batch.tokens) for batch in batches]))
    job.loader.close()
    os.dup2(silent, 1)
    release()
    return ours[1:], bare[1:]  # the first round warms up


def timed(act: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    act()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / _STEPS


def our_steps(job: Job, progress: Progress, watch: Watch) -> None:
    for _ in range(_STEPS):
        assert job.stops.agreed(job.control) is None
        assert take_step(job, progress, watch)


def groups_of(module: nn.Module, cfg: config.Config) -> list[dict[str, Any]]:
    named = dict(module.named_parameters())
    return parameter_groups(make_recipe(named, cfg.optim), named)


def adamw(module: nn.Module, cfg: config.Config) -> AdamW:
    return AdamW(groups_of(module, cfg), lr=cfg.optim.lr, betas=cfg.optim.betas, eps=cfg.optim.eps, fused=True)


def ddp(module: nn.Module, cfg: config.Config) -> Step:
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    return replicated(model, adamw(module, cfg), cfg)


def zero1(module: nn.Module, cfg: config.Config) -> Step:
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    o = cfg.optim
    optimizer = ZeroRedundancyOptimizer(groups_of(module, cfg), AdamW, lr=o.lr, betas=o.betas, eps=o.eps, fused=True)
    return replicated(model, optimizer, cfg)


def replicated(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, cfg: config.Config) -> Step:
    def step(micros: Sequence[Micro], tokens: int) -> None:
        for micro in micros:
            model.require_backward_grad_sync = micro.last
            loss_sum, _ = model(micro.inputs, micro.targets)
            (loss_sum * dist.get_world_size() / tokens).backward()
        finish(model, optimizer, cfg)

    return step


def fsdp2(module: nn.Module, cfg: config.Config) -> Step:
    for block in module.transformer.h:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard([module.transformer.ln_f, module.transformer.wte, module.lm_head], reshard_after_forward=False)  # type: ignore[union-attr,list-item]
    model = fully_shard(module)
    optimizer = adamw(model, cfg)

    def step(micros: Sequence[Micro], tokens: int) -> None:
        for micro in micros:
            loss_sum, _ = model(micro.inputs, micro.targets)
            (loss_sum * dist.get_world_size() / tokens).backward()
        finish(model, optimizer, cfg)

    return step


def deepspeed2(module: nn.Module, cfg: config.Config) -> Step:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": cfg.batch.micro,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": cfg.optim.grad_clip,
        "zero_optimization": {"stage": 2},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=adamw(module, cfg), config=settings)

    def step(micros: Sequence[Micro], tokens: int) -> None:
        for micro in micros:
            engine.set_gradient_accumulation_boundary(micro.last)
            loss_sum, _ = engine(micro.inputs, micro.targets)
            engine.backward(loss_sum * dist.get_world_size() / tokens)
        engine.step()

    return step


BY_HAND: dict[str, Callable[[Any, config.Config], Step]] = {"ddp": ddp, "zero1": zero1, "fsdp2": fsdp2, "deepspeed2": deepspeed2}


def finish(model: nn.Module, optimizer: torch.optim.Optimizer, cfg: config.Config) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def prepare(folder: Path) -> None:
    """Random tokens, and then the config that the other rank waits for."""
    writer = shards.ShardWriter(folder, "train", np.dtype(np.uint16), 10**8)
    writer.append(np.random.default_rng(0).integers(0, 50257, 2_000_000).astype(np.uint16))
    writer.close()
    sections = {**_CONFIG, "run": {**_CONFIG["run"], "dir": str(folder / "runs")}, "data": {**_CONFIG["data"], "train": str(folder)}}
    part = folder / "benchmark.part"
    part.write_text(json.dumps(sections), "utf-8")  # JSON is YAML
    part.rename(folder / "benchmark.yaml")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main(sys.argv[1:] or NAMES))
