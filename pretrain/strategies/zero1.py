"""Replicas of the weights, each rank with its share of the optimiser's states (Rajbhandari et al. 2020, arXiv 1910.02054, stage 1)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pretrain.collectives import bytes_sent
from pretrain.optim import Recipe, make_optimizer, parameter_groups
from pretrain.strategies.ddp import DDP, DDPOptions


@dataclass(frozen=True)
class Zero1Options(DDPOptions):
    parameters_as_bucket_view: bool = False  # one broadcast per rank and device instead of one per parameter, for copies into a bucket


class Zero1(DDP):
    """Gradients are reduced as under DDP; each rank updates the parameters that it owns and broadcasts them."""

    Options = Zero1Options

    def optimize(self, recipe: Recipe) -> Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # most of a second, which other strategies need not spend

        named = self.named_parameters()
        names = {id(p): name for name, p in named.items()}

        def local_optimizer(groups: Iterable[dict[str, Any]], **defaults: Any) -> Optimizer:
            mine = {names[id(p)] for group in groups for p in group["params"]}
            return make_optimizer(recipe, {name: p for name, p in named.items() if name in mine})

        return ZeroRedundancyOptimizer(
            parameter_groups(recipe, named),
            local_optimizer,  # type: ignore[arg-type]
            parameters_as_bucket_view=self.options.parameters_as_bucket_view,
            lr=recipe.optim.lr,
        )

    def update(self, refused: Tensor) -> None:
        own = self.optimizer.optim  # type: ignore[attr-defined]
        own.found_inf, own.grad_scale = refused, None
        self.optimizer.step()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        return super().optimizer_state(optimizer.optim)  # type: ignore[attr-defined]

    def wire(self, step: int) -> int:
        """DDP's all-reduce, and every weight broadcast by its owner: (W − 1)/W of them per rank on average."""
        world: int = self.accelerator.num_processes
        weights = sum(p.numel() * p.element_size() for p in self.module.parameters())
        return super().wire(step) + bytes_sent("ring", "broadcast", weights, world)
