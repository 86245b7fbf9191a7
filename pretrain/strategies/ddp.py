"""Replicas of the whole model; gradients are averaged while the backward still runs (Li et al. 2020, arXiv 2006.15704)."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pretrain.collectives import bytes_sent
from pretrain.config import Config, ConfigError, Limits
from pretrain.strategies.base import Strategy


@dataclass(frozen=True)
class DDPOptions:
    bucket_cap_mb: int = 25  # gradients are reduced in buckets of this size
    gradient_as_bucket_view: bool = True  # saves one copy of the gradients
    static_graph: bool = False  # the same weights take part in every update: DDP may plan ahead
    limits: ClassVar[Limits] = {"bucket_cap_mb": (1, 100_000)}


@dataclass
class _Handler(DistributedDataParallelKwargs):  # type: ignore[misc]  # Accelerate has no types
    init_sync: bool = True  # the argument that Accelerate's leaves out


class DDP(Strategy):
    Options = DDPOptions
    processes = (2, math.inf)

    def handlers(self) -> list[Any]:
        o: DDPOptions = self.options
        return [
            DistributedDataParallelKwargs(
                bucket_cap_mb=o.bucket_cap_mb,
                gradient_as_bucket_view=o.gradient_as_bucket_view,
                static_graph=o.static_graph,
            )
        ]

    def make_accelerator(self, cfg: Config) -> Accelerator:
        """All ranks have made or read the same weights, and have said so to each other: none need be sent."""
        super().make_accelerator(cfg)
        self.accelerator.ddp_handler = _Handler(**vars(self.accelerator.ddp_handler), init_sync=False)
        return self.accelerator

    def wrap(self, module: nn.Module) -> nn.Module:
        wrapped = self.accelerator.prepare_model(module)
        assert isinstance(wrapped, DistributedDataParallel), "Accelerate fell back to one process"
        return wrapped

    def accumulate(self, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.accelerator.no_sync(model)

    def warm_up(self, inputs_BT: Tensor, targets_BT: Tensor) -> None:
        super().warm_up(inputs_BT, targets_BT)
        if self.unused:
            raise ConfigError(
                f"{self.unused[0]} takes no part in the loss: strategy.name={self.name} would wait for its gradient; give it one, set its "
                "requires_grad to False, or use single, fsdp2 or deepspeed2"
            )

    def wire(self, step: int) -> int:
        """A ring all-reduce of fp32 gradients: 2·(W−1)/W of them (Patarasuk and Yuan 2009)."""
        world: int = self.accelerator.num_processes
        gradients = sum(p.numel() * p.element_size() for p in self.module.parameters())
        return bytes_sent("ring", "all_reduce", gradients, world)
