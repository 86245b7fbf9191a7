"""One key chooses how the work is spread over processes. A new strategy is a new file and a line here."""

import gc
import sys
from dataclasses import replace

import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState

from pretrain.config import Config, ConfigError, Layout, build_options
from pretrain.launched import Launched
from pretrain.strategies.base import StepResult, Strategy
from pretrain.strategies.compressed import DDPBf16, DDPFp16, DDPPowerSGD
from pretrain.strategies.dataparallel import DataParallel
from pretrain.strategies.ddp import DDP
from pretrain.strategies.fsdp import FSDP1, FSDP2, HSDP, FSDP1GradOp, FSDP2GradOp
from pretrain.strategies.local import DiLoCo, LocalSGD
from pretrain.strategies.zero1 import Zero1
from pretrain.strategies.zero_deepspeed import DeepSpeed1, DeepSpeed2, DeepSpeed3

STRATEGIES: dict[str, type[Strategy]] = {
    "single": Strategy,
    "dataparallel": DataParallel,
    "ddp": DDP,
    "ddp_comm_fp16": DDPFp16,
    "ddp_comm_bf16": DDPBf16,
    "ddp_powersgd": DDPPowerSGD,
    "zero1": Zero1,
    "fsdp1": FSDP1,
    "fsdp1_grad_op": FSDP1GradOp,
    "fsdp2": FSDP2,
    "fsdp2_grad_op": FSDP2GradOp,
    "hsdp": HSDP,
    "local_sgd": LocalSGD,
    "diloco": DiLoCo,
    "deepspeed1": DeepSpeed1,
    "deepspeed2": DeepSpeed2,
    "deepspeed3": DeepSpeed3,
}
OPTIONS: dict[str, type] = {name: cls.Options for name, cls in STRATEGIES.items()}

__all__ = ["OPTIONS", "STRATEGIES", "StepResult", "Strategy", "choose", "release"]


def choose(cfg: Config, layout: Layout, precision: str, launched: Launched | None = None) -> Strategy:
    """The strategy that the config names; `auto` is what the launch asks for, else `ddp` for several processes and `single` for one.

    Raises ConfigError where the two disagree, or where it cannot do what the config wants of it.
    """
    name, asked = cfg.strategy.name, launched.strategy if launched else None
    if name == "auto":
        name = asked or ("ddp" if layout.world_size > 1 else "single")
    elif asked not in (None, name):
        raise ConfigError(f"the launch asks for {asked} and strategy.name for {name}; drop one (strategy.name=auto takes the launch's)")
    if launched and launched.shard_size:
        cfg = _sized(cfg, launched.shard_size)
    cls = STRATEGIES[name]
    strategy = cls(name, build_options(cls.Options, cfg.strategy.options), precision)
    strategy.check(cfg, layout)
    return strategy


def release() -> None:
    """Forget what Accelerate keeps for the whole process, so that another strategy can start in the same process group, and end the groups
    beside it: gloo's threads of each look for work a hundred times a second, and a hundred groups leave a core time for little else."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if dist.is_initialized():
        deepspeed = sys.modules.get("deepspeed")  # keeps one of its own for the next engine
        destroy = deepspeed.comm.destroy_process_group if deepspeed and deepspeed.comm.is_initialized() else dist.destroy_process_group
        groups = list(dist.distributed_c10d._world.pg_map)  # held until they are collected: see groups.end_all
        for group in groups:
            if group != dist.group.WORLD and not group.group_desc.startswith("mesh_"):  # torch's caches know those of a mesh by name
                destroy(group)
    gc.collect()  # which ends those threads


def _sized(cfg: Config, shard_size: int) -> Config:
    """With the launch's mesh."""
    if cfg.strategy.shard_size not in (None, shard_size):
        raise ConfigError(
            f"the launch's mesh shards among {shard_size} processes and strategy.shard_size says {cfg.strategy.shard_size}; drop one"
        )
    return replace(cfg, strategy=replace(cfg.strategy, shard_size=shard_size))
