"""The optimiser as a recipe (groups by parameter name, so that it survives any wrapping), and the learning rate by step."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from pretrain.config import Optim

MUON_STATE = "momentum_buffer"
_BATCH = 1 << 24  # elements of matrices that Muon orthogonalises at a time


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
    """Muon for the hidden matrices (momentum, orthogonalised update, decoupled decay; Jordan et al. 2024, kellerjordan.github.io/posts/muon)
    and AdamW for everything else. A matrix that holds Q, K and V side by side counts as three.

    GPT-2's Conv1D weights are (in, out), so the learning rate follows `match_rms_adamw` (Liu et al. 2025, arXiv 2502.16982), which
    is symmetric in the shape and lets AdamW's learning rate serve both. torch.optim.Muon does the same one matrix at a time and in bf16,
    which CPUs without bf16 units emulate: 25 to 80 times slower than fp32 there. Its refusal of an update needs no copies here.
    """

    def __init__(self, hidden: list[tuple[Tensor, int]], adamw: AdamW, optim: Optim) -> None:
        super().__init__([{"params": [p for p, _ in hidden], "weight_decay": optim.weight_decay}], {"lr": optim.lr})
        self._adamw = adamw
        self._momentum = 0.95 if optim.momentum is None else optim.momentum
        self.param_groups += adamw.param_groups  # whole parameters, for whoever unscales or zeroes gradients
        self._batches: dict[tuple[int, ...], list[tuple[Tensor, int, int]]] = {}  # by shape: (parameter, part, parts)
        for p, parts in hidden:
            self.state[p] = {MUON_STATE: torch.zeros_like(p)}
            for part in range(parts):
                self._batches.setdefault(tuple(p.chunk(parts, dim=1)[part].shape), []).append((p, part, parts))
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for shape, matrices in self._batches.items():
            many = max(1, _BATCH // math.prod(shape))
            for start in range(0, len(matrices), many):
                self._update(matrices[start : start + many])
        gated_step(self._adamw, self.found_inf)
        self.state.update(self._adamw.state)

    def _update(self, matrices: list[tuple[Tensor, int, int]]) -> None:
        """All of one shape. Parts of a parameter are views of it."""
        group = self.param_groups[0]
        trained = [(p.chunk(n, dim=1)[k], self.state[p][MUON_STATE].chunk(n, dim=1)[k], p.grad.chunk(n, dim=1)[k])
                   for p, k, n in matrices if p.grad is not None]  # fmt: skip
        if not trained:
            return
        gradient = torch.stack([g for _, _, g in trained])
        momentum = torch.stack([m for _, m, _ in trained]).lerp_(gradient, 1 - self._momentum)
        update = orthogonal(gradient.lerp_(momentum, self._momentum))  # Nesterov's
        rate = group["lr"] * 0.2 * math.sqrt(max(update.shape[1:]))
        for (weight, kept, _), new, step in zip(trained, momentum, update, strict=True):
            moved = (weight * (1 - group["lr"] * group["weight_decay"])).sub_(step, alpha=rate)
            if self.found_inf is not None:
                new, moved = torch.where(self.found_inf > 0, kept, new), torch.where(self.found_inf > 0, weight, moved)
            kept.copy_(new)
            weight.copy_(moved)


def orthogonal(matrices_NAB: Tensor) -> Tensor:
    """U·Vᵀ of each, its singular values between about 0.7 and 1.2: five Newton-Schulz iterations with Jordan's coefficients."""
    x = matrices_NAB.bfloat16() if matrices_NAB.is_cuda else matrices_NAB.float()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices_NAB.dtype)


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
    if not parameters:  # a rank of ZeRO-1 that owns none
        return
    if isinstance(optimizer, SGD):  # its fused first step would leave an uninitialised buffer behind
        for p in parameters if optimizer.defaults["momentum"] else ():
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return
    largest = max(parameters, key=lambda p: 0 if isinstance(p, DTensor) else p.numel())
    zeros = torch.zeros(largest.numel(), device=largest.device)
    for p in parameters:  # a step reads them and does no more: all can be views of one
        shared = not isinstance(p, DTensor) and (p.device, p.dtype) == (zeros.device, zeros.dtype)
        p.grad = zeros[: p.numel()].view(p.shape) if shared else torch.zeros_like(p)
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
