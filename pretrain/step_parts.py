"""Where the time of an update goes, and what it sends: measured after a run's last update and checkpoint, when its weights no longer matter.

Blocks of updates as they are and of the same updates whose collectives do nothing take turns, in one process, so that what the machine
does meanwhile falls on both. The difference is *exposed* communication: what was not hidden behind computing. On GPUs it is told from a
trace instead: the time in which NCCL's kernels run and no other does.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pretrain.collectives import CollectiveCounter, without_collectives
from pretrain.job import Job
from pretrain.ranks import gather
from pretrain.resume import Progress
from pretrain.runfolder import write_atomic
from pretrain.tracing import exposed_seconds, traced

FILE = "step_parts.json"
PAIRS = 3  # blocks of each kind
STEPS = 4  # updates of a block, or a whole round of a local method that is no longer than ROUND
ROUND = 16
MOST = 24  # updates of all blocks of a kind

Update = Callable[[int, int], Any]  # (step, position) -> anything


def measure(job: Job, progress: Progress, update: Update) -> None:
    """All ranks call it; the main process writes the file. What trains is garbage afterwards."""
    steps, pairs = blocks_of(job.strategy.save_interval)
    counter = CollectiveCounter(_ours(job))
    with counter:
        _run(job, progress, update, steps)  # also warms up what follows
    blocks: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(pairs):
        blocks[False].append(_run(job, progress, update, steps))
        with without_collectives(_ours(job)):
            blocks[True].append(_run(job, progress, update, steps))
    real, silent = ({part: sum(block[part] for block in found) / pairs / steps for part in found[0]} for found in blocks.values())
    communication, method = sum(real.values()) - sum(silent.values()), "step with its collectives minus step without them"
    if job.clock.device.type == "cuda":
        communication, method = _from_trace(job, progress, update, steps) / steps, "from a trace: NCCL's kernels while no other ran"
    found = {
        "steps": pairs * steps,
        "whole_rounds": steps % job.strategy.save_interval == 0,  # of a local method; else the synchronisation is in none of the numbers
        "method": method,
        "seconds": {**silent, "communication": communication},
        "with_communication": real,
        "sent": {network: counter.sent(network) / steps for network in ("ring", "gloo")},  # bytes per update and rank
        "backend": dist.get_backend() if dist.is_initialized() else "none",
        "checkpoint_seconds": job.saver.seconds,
    }
    everyone = gather(job.control, found)
    if job.is_main:
        write_atomic(job.cfg.folder / FILE, json.dumps(_mean(everyone), indent=1))


def blocks_of(round_: int) -> tuple[int, int]:
    """(updates of a block, blocks of each kind) where replicas meet every `round_` updates, and have just met: whole rounds, or so few
    updates in all, the one that counts and the one that is traced included, that they do not meet again."""
    if round_ > ROUND:
        return STEPS, min(PAIRS, (round_ - 1 - 2 * STEPS) // (2 * STEPS))
    steps = -(-STEPS // round_) * round_
    return steps, min(PAIRS, MOST // steps)


def _ours(job: Job) -> list[dist.ProcessGroup]:
    """Groups that carry votes and files, not training."""
    return [group for group in (job.control, job.saver.group) if group is not None]


def _run(job: Job, progress: Progress, update: Update, steps: int) -> dict[str, float]:
    """Seconds of each part of `steps` updates, the rest being `host`."""
    job.clock.parts = {}
    with job.clock.part("whole"):
        for _ in range(steps):
            progress.step += 1
            batch, *_ = update(progress.step, progress.position)
            progress.position = batch.stop if job.layout.last_position is None else 0
    parts, job.clock.parts = job.clock.parts, None
    whole = parts.pop("whole")
    return {**parts, "host": whole - sum(parts.values())}


def _from_trace(job: Job, progress: Progress, update: Update, steps: int) -> float:
    with traced() as profiler:
        _run(job, progress, update, steps)
        torch.cuda.synchronize()
    return exposed_seconds(profiler)


def _mean(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the ranks' numbers; all else is the same on all."""
    first = everyone[0]
    return {
        key: {name: sum(one[key][name] for one in everyone) / len(everyone) for name in value} if isinstance(value, dict) else value
        for key, value in first.items()
    }
