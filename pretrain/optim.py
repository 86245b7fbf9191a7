"""The optimiser as a recipe (groups by parameter name, so that it survives any wrapping), and the learning rate by step."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Muon, Optimizer

from pretrain.config import Optim

MUON_STATE = "momentum_buffer"


@dataclass(frozen=True)
class Recipe:
    """Which parameter goes where, computed on the plain model: after FSDP1 wraps, every parameter is 1-D."""

    decayed: frozenset[str]
    hidden: frozenset[str]  # matrices inside the blocks: Muon's
    fused_qkv: frozenset[str]  # of those, the ones that hold Q, K and V side by side: orthogonalised apart
    optim: Optim


def make_recipe(parameters: Mapping[str, Tensor], optim: Optim) -> Recipe:
    """Matrices and embeddings decay; biases and norms don't. A tied head counts once, as the embedding."""
    matrices = frozenset(name for name, p in parameters.items() if p.ndim >= 2)
    hidden = frozenset(name for name in matrices if ".h." in name)
    return Recipe(matrices, hidden, frozenset(n for n in hidden if n.endswith("c_attn.weight")), optim)


def parameter_groups(recipe: Recipe, parameters: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Every parameter in exactly one group, the groups in one order, some of them perhaps empty: Muon's first, where it has one."""
    muon = recipe.hidden if recipe.optim.name == "muon" else frozenset()
    chosen = ([muon] if muon else []) + [recipe.decayed - muon, parameters.keys() - recipe.decayed]
    decays = [recipe.optim.weight_decay] * (len(chosen) - 1) + [0.0]
    return [
        {"params": [p for name, p in parameters.items() if name in names], "weight_decay": decay}
        for names, decay in zip(chosen, decays, strict=True)
    ]


def make_optimizer(recipe: Recipe, parameters: Mapping[str, Tensor], *, allocate: bool = True) -> Optimizer:
    """`parameters`: the recipe's names, as wrapped; some may be missing. State is allocated at once (memory runs out now or never), but for
    whoever replaces the parameters by pieces of them."""
    o = recipe.optim
    groups = parameter_groups(recipe, parameters)
    optimizer: Optimizer
    if o.name == "sgd":
        fused = not any(isinstance(p, DTensor) for p in parameters.values())  # torch's fused SGD knows no shards
        optimizer = SGD(groups, lr=o.lr, momentum=o.momentum or 0.0, fused=fused)
    elif o.name == "adamw":
        optimizer = AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps, fused=True)
    else:
        hidden = [(p, 3 if name in recipe.fused_qkv else 1) for name, p in parameters.items() if name in recipe.hidden]
        optimizer = MuonAndAdamW(hidden, AdamW(groups[-2:], lr=o.lr, betas=o.betas, eps=o.eps, fused=True), o)
    if allocate:
        _allocate_state(optimizer)
    return optimizer


class MuonAndAdamW(Optimizer):
    """torch's Muon for the hidden matrices (momentum, orthogonalised update, decoupled decay) and AdamW for everything else.

    GPT-2's Conv1D weights are (in, out), so the learning rate follows `match_rms_adamw` (Liu et al. 2025, arXiv 2502.16982), which
    is symmetric in the shape and lets AdamW's learning rate serve both. Muon steps on views: a matrix that holds Q, K and V is three.
    """

    def __init__(self, hidden: list[tuple[Tensor, int]], adamw: AdamW, optim: Optim) -> None:
        super().__init__([{"params": [p for p, _ in hidden]}], {"lr": optim.lr})
        self._adamw = adamw
        self._views = [(p, part) for p, parts in hidden for part in range(parts)]
        self._parts = {id(p): parts for p, parts in hidden}
        momentum = 0.95 if optim.momentum is None else optim.momentum
        pieces = [nn.Parameter(self._piece(p.detach(), p, part)) for p, part in self._views]
        self._muon = Muon(
            [{"params": pieces}], lr=optim.lr, weight_decay=optim.weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
        )
        self.param_groups += adamw.param_groups  # whole parameters, for whoever unscales or zeroes gradients
        for p, _ in hidden:
            self.state[p] = {MUON_STATE: torch.zeros_like(p)}
        for piece, (p, part) in zip(pieces, self._views, strict=True):
            self._muon.state[piece][MUON_STATE] = self._piece(self.state[p][MUON_STATE], p, part)
        self.found_inf: Tensor | None = None

    def _piece(self, tensor: Tensor, p: Tensor, part: int) -> Tensor:
        return tensor.chunk(self._parts[id(p)], dim=1)[part]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pieces = self._muon.param_groups[0]["params"]
        for piece, (p, part) in zip(pieces, self._views, strict=True):
            piece.grad = None if p.grad is None else self._piece(p.grad, p, part)
        self._muon.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        gated_step(self._muon, self.found_inf)
        for piece in pieces:
            piece.grad = None
        gated_step(self._adamw, self.found_inf)
        self.state.update(self._adamw.state)


@torch.no_grad()
def gated_step(optimizer: Optimizer, found_inf: Tensor | None) -> None:
    """A step that the device itself refuses where `found_inf` (0-d float32) is 1: weights, moments and counters stay untouched."""
    if found_inf is None or optimizer.defaults.get("fused") or isinstance(optimizer, MuonAndAdamW):
        optimizer.found_inf, optimizer.grad_scale = found_inf, None  # type: ignore[attr-defined]
        optimizer.step()
        return
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    touched = [local(t) for t in (*every_parameter(optimizer), *states)]
    before = [t.clone() for t in touched]
    optimizer.step()
    for tensor, old in zip(touched, before, strict=True):  # it knows no gate: put back what a refused update touched
        tensor.copy_(torch.where(found_inf > 0, old, tensor))


def local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor, sharing its memory; a plain tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _allocate_state(optimizer: Optimizer) -> None:
    """A refused step on zero gradients: allocates what the class keeps and changes nothing."""
    parameters = list(every_parameter(optimizer))
    if isinstance(optimizer, SGD):  # its fused first step would leave an uninitialised buffer behind
        for p in parameters if optimizer.defaults["momentum"] else ():
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return
    for p in parameters:
        p.grad = torch.zeros_like(p)
    gated_step(optimizer, torch.ones((), dtype=torch.float32, device=parameters[0].device))
    optimizer.zero_grad(set_to_none=True)


def every_parameter(optimizer: Optimizer) -> Iterable[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def set_lr(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def lr_at(step: int, optim: Optim, steps: int) -> float:
    """Learning rate of update `step` (1 … steps): the peak at the end of the warm-up, `min_lr_ratio` of it at the last update."""
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    floor = optim.lr * optim.min_lr_ratio
    if optim.schedule == "constant":
        return optim.lr
    start = optim.warmup_steps
    if optim.schedule == "wsd":
        start = max(start, steps - round(optim.decay_fraction * steps))
        if step <= start:
            return optim.lr
    done = min(1.0, (step - start) / max(1, steps - start))
    share = 0.5 * (1 + math.cos(math.pi * done)) if optim.schedule == "cosine" else 1 - done
    return floor + (optim.lr - floor) * share
