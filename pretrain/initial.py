"""Weights get their first values one at a time, so that no process need hold a whole model of which it keeps a part."""

from collections.abc import Callable
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

Initial = Callable[[str], Tensor]  # a weight's plain name -> its first value in full, in host memory


class Filling:
    """Puts real weights in the place of a module's that are on the meta device; those that were one stay one."""

    def __init__(self, module: nn.Module, initial: Initial, device: torch.device) -> None:
        self._initial, self._device = initial, device
        self._named = {id(p): (name, p) for name, p in module.named_parameters()}  # held, so that no other comes to its id
        self._made: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()  # nothing is kept that a strategy lets go

    def fill(self, owner: nn.Module) -> nn.Module:
        """Those that belong to this module, and not to its children. Returns it, as FSDP's `param_init_fn` must under Accelerate."""
        for key, p in owner._parameters.items():
            if p is not None and p.is_meta:
                made = self._made.get(id(p))
                if made is None:
                    made = nn.Parameter(self._initial(self._named[id(p)][0]).to(self._device), p.requires_grad)
                    self._made[id(p)] = made
                owner._parameters[key] = made
        return owner


def fill(module: nn.Module, initial: Initial, device: torch.device) -> None:
    filling = Filling(module, initial, device)
    for owner in module.modules():
        filling.fill(owner)


def on_meta(module: nn.Module) -> bool:
    return any(p.is_meta for p in module.parameters())
