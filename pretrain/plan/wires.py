"""Bytes that a rank sends, by the strategies' own formulas, from a model that has no weights and processes that do not run."""

import copy
from types import SimpleNamespace

import torch

from pretrain.plan.task import Case
from pretrain.strategies import Strategy
from pretrain.strategies.compressed import DDPPowerSGD, PowerSGD
from pretrain.strategies.ddp import DDP
from pretrain.strategies.fsdp import FSDP1, FSDP2
from pretrain.strategies.local import LocalSGD
from pretrain.strategies.zero1 import Zero1
from pretrain.strategies.zero_deepspeed import DeepSpeed, DeepSpeed3

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def stand_in(case: Case) -> Strategy:
    """The strategy with what its `wire` reads of a prepared one."""
    s, m = case.strategy, case.task.model
    s.accelerator = SimpleNamespace(num_processes=case.layout.world_size)
    s.module = m.module
    if isinstance(s, FSDP1 | FSDP2):
        s.plugin = SimpleNamespace()
        s.find_blocks(m.module)
    if isinstance(s, FSDP1):
        again = m.total - m.root if s.sharding.name == "FULL_SHARD" else 0
        s.gathered_elements = lambda: (m.total, again, s.shard_size)  # type: ignore[method-assign]
    if isinstance(s, LocalSGD):
        s.parameters = list(m.module.parameters())
    if isinstance(s, DDPPowerSGD):
        s.powersgd = PowerSGD(s.options, s.start, dict(m.module.named_parameters()))
    if isinstance(s, DeepSpeed) and case.task.precision in _HALF:
        s.module = copy.deepcopy(m.module).to(_HALF[case.task.precision])
    if isinstance(s, DeepSpeed3):
        for p in s.module.parameters():
            p.ds_numel = p.numel()  # type: ignore[attr-defined]
            p.ds_persist = p.numel() < s.options.stage3_param_persistence_threshold  # type: ignore[attr-defined]
    return s


def wire_bytes(case: Case) -> float:
    """Of an update, in the mean over the run."""
    s, steps = stand_in(case), case.layout.steps
    if isinstance(s, DDPPowerSGD):
        return (s.start * s.wire(1) + (steps - s.start) * s.wire(steps)) / steps
    every = s.save_interval
    return ((every - 1) * s.wire(1) + s.wire(every)) / every


def under_the_backward(case: Case) -> float:
    """Of an update's bytes, those that DDP's reducer sends while the last micro-batch's backward runs."""
    s = case.strategy
    if isinstance(s, DDPPowerSGD):
        return s.start * DDP.wire(s, 1) / case.layout.steps
    if isinstance(s, Zero1):
        return DDP.wire(s, 1)
    if isinstance(s, LocalSGD):
        return s.wire(1) if s.save_interval > 1 else 0
    return s.wire(1) if isinstance(s, DDP) else 0
