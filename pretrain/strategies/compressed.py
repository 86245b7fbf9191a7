"""Replicas whose gradients travel compressed. DDP's communication hooks run once per update, in the backward of the last micro-batch:
gradients accumulate in fp32, and the optimiser gets fp32."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from pretrain.collectives import bytes_sent
from pretrain.config import Config, ConfigError, Layout, Limits
from pretrain.strategies.ddp import DDP, DDPOptions

_WORTH_IT = 2  # a matrix is compressed if P and Q are smaller than it by more than this: PowerSGDState's min_compression_rate


class DDPHalf(DDP):
    """Rounded to 16 bits on their way, and added up in 16 bits: the smallest of fp16 vanish, bf16 keeps 8 bits of mantissa."""

    exact = False
    half: ClassVar[torch.dtype]

    def wrap(self, module: nn.Module) -> nn.Module:
        wrapped = super().wrap(module)
        wrapped.register_comm_hook(self.half, average_in_half)  # type: ignore[operator]
        return wrapped

    def wire(self, step: int) -> int:
        """Half of DDP's."""
        return super().wire(step) // 2


class DDPFp16(DDPHalf):
    half = torch.float16


class DDPBf16(DDPHalf):
    half = torch.bfloat16


def average_in_half(state: torch.dtype, bucket: GradBucket) -> Future[Tensor]:
    """torch's fp16_compress_hook and bf16_compress_hook, but they cast before they divide, where fp16 overflows earlier, and DDP refuses
    the latter's name on gloo. A value that overflows is infinite on every rank, and the gradient's norm with it."""
    buffer = bucket.buffer()
    half = buffer.div_(dist.get_world_size()).to(state)
    future = dist.all_reduce(half, async_op=True).get_future()
    averaged: Future[Tensor] = future.then(lambda done: buffer.copy_(done.value()[0]))
    return averaged


@dataclass(frozen=True)
class PowerSGDOptions(DDPOptions):
    rank: int = 1  # columns of P and Q
    start_step: int | None = None  # updates reduced in full before; default: the warm-up's or a tenth of the run's, whichever are more
    use_error_feedback: bool = True  # what an update left out is added to the next one's gradient
    warm_start: bool = True  # from the last update's Q, not from a random one
    limits: ClassVar[Limits] = {**DDPOptions.limits, "rank": (1, math.inf), "start_step": (0, math.inf)}


class DDPPowerSGD(DDP):
    """Matrices travel as a product of two thin ones."""

    Options = PowerSGDOptions
    exact = False

    def check(self, cfg: Config, layout: Layout) -> None:
        super().check(cfg, layout)
        o: PowerSGDOptions = self.options
        tenth = layout.steps // 10
        self.start = max(2, cfg.optim.warmup_steps, tenth) if o.start_step is None else o.start_step
        self.options = replace(o, start_step=self.start)  # config.yaml has what is in use
        if self.start >= layout.steps:
            raise ConfigError(
                f"strategy.name={self.name} compresses after {self.start:,} updates (strategy.options.start_step, by default the larger of "
                f"optim.warmup_steps and a tenth of the run), and the run ends at {layout.steps:,}; write strategy.options.start_step={tenth}"
            )

    def wrap(self, module: nn.Module) -> nn.Module:
        self.all_train(module)
        wrapped = super().wrap(module)
        self.powersgd = PowerSGD(self.options, self.start, dict(module.named_parameters()))
        wrapped.register_comm_hook(self.powersgd, average_by_powersgd)  # type: ignore[operator]
        return wrapped

    def backward(self, loss: Tensor) -> None:
        if self.scaler is not None:
            self.powersgd.scale = self.scaler._scale  # type: ignore[assignment]
        super().backward(loss)

    def update(self, refused: Tensor) -> None:
        super().update(refused)
        self.powersgd.settle(refused)

    def must_retry(self, result: Any) -> bool:
        retry = super().must_retry(result)
        self.powersgd.updates -= retry
        return retry

    def state(self) -> dict[str, dict[str, Tensor]]:
        errors = {f"rank{self.accelerator.process_index}.{name}.error": error for name, error in self.powersgd.errors.items()}
        return {**super().state(), "extras": {**errors, **{f"{name}.q": q for name, q in self.powersgd.qs.items()}}}

    def extras_kind(self) -> dict[str, Any]:
        o: PowerSGDOptions = self.options
        return {"strategy": self.name, "processes": self.accelerator.num_processes, "rank": o.rank,
                "error_feedback": o.use_error_feedback, "warm_start": o.warm_start}  # fmt: skip

    def load_numbers(self, numbers: Mapping[str, Any]) -> list[str]:
        notes = super().load_numbers(numbers)
        self.powersgd.updates = numbers["progress"]["step"]
        return notes

    def notes(self) -> list[str]:
        return [f"gradients in full until update {self.start:,}, then as products of rank {self.options.rank}"]

    def wire(self, step: int) -> int:
        """DDP's until it starts; then a ring all-reduce of P and Q of every compressed matrix, and of the others in full."""
        world: int = self.accelerator.num_processes
        return super().wire(step) if step <= self.start else bytes_sent("ring", "all_reduce", 4 * self.powersgd.elements, world)


class PowerSGD:
    """M ≈ P·Qᵀ with P = M·Q made orthonormal and Q = Mᵀ·P, both averaged over ranks (Vogels et al. 2019, arXiv 1905.13727).

    Not torch's powerSGD_hook, whose callbacks wait for all-reduces: gloo runs callbacks in the threads that communicate, and with more than
    one bucket they wait for each other for ever. Here the hook of the last bucket waits, in autograd's thread, for two all-reduces in all.
    So little travels that nothing starts before the last. Errors and Qs belong to parameters, since DDP reorders its buckets.
    """

    def __init__(self, options: PowerSGDOptions, start: int, parameters: Mapping[str, Tensor]) -> None:
        self.start, self.updates = start, 0
        self.names = {id(p): name for name, p in parameters.items()}
        self.shapes = {name: (len(p), p.numel() // len(p)) for name, p in parameters.items() if p.ndim > 1}
        ranks = {name: min(*shape, options.rank) for name, shape in self.shapes.items()}
        self.ranks = {name: r for name, r in ranks.items() if sum(self.shapes[name]) * r * _WORTH_IT < parameters[name].numel()}
        if not self.ranks:
            raise ConfigError(f"strategy.options.rank={options.rank}: no matrix of this model would travel smaller; write a lower rank")
        self.elements = sum(sum(self.shapes[n]) * self.ranks[n] if n in self.ranks else p.numel() for n, p in parameters.items())
        device = next(iter(parameters.values())).device
        self.errors = {n: torch.zeros(self.shapes[n], device=device) for n in self.ranks} if options.use_error_feedback else {}
        self.qs = {n: self.random_q(n).to(device) for n in self.ranks} if options.warm_start else {}
        # This update's errors and Qs, until one knows whether it is applied; the warm-up's never are.
        self.found: dict[str, tuple[Tensor, Tensor]] = {}
        self.scale = torch.ones((), device=device)  # fp16's loss scale, which changes between updates: errors are kept without it
        self.gradients: dict[str, Tensor] = {}  # of the buckets that wait for the last one
        self.waiting: list[tuple[Future[Tensor], Tensor]] = []

    def random_q(self, name: str) -> Tensor:
        """By the number of the update, and the same on every rank: nothing to save, and no random state touched."""
        generator = torch.Generator().manual_seed(self.updates * len(self.ranks) + list(self.ranks).index(name))
        return torch.randn(self.shapes[name][1], self.ranks[name], generator=generator)

    def average(self) -> None:
        """Turn the gradients into what arrives of their average."""
        matrices = {name: self.gradients.pop(name).view(self.shapes[name]) for name in self.ranks}
        for name, error in self.errors.items():
            matrices[name].addcmul_(error, self.scale)
        old = self.qs or {name: self.random_q(name).to(matrix.device) for name, matrix in matrices.items()}
        rest = list(self.gradients.values())
        averages = average([*(matrix @ orthonormal(old[name]) for name, matrix in matrices.items()), *rest])
        ps = [orthonormal(p) for p in averages[: len(matrices)]]
        qs = average([matrix.T @ p for matrix, p in zip(matrices.values(), ps, strict=True)])
        for (name, matrix), p, q in zip(matrices.items(), ps, qs, strict=True):
            product = p @ q.T
            self.found[name] = (matrix - product) / self.scale, q
            matrix.copy_(product)
        torch._foreach_copy_(rest, averages[len(matrices) :])
        self.gradients = {}

    def settle(self, refused: Tensor) -> None:
        """A refused update leaves errors and Qs as they were: it is tried again, or is none to learn from."""
        for name, (error, q) in self.found.items():
            for kept, new in ((self.errors, error), (self.qs, q)):
                if name in kept:
                    kept[name].copy_(torch.where(refused > 0, kept[name], new))
        self.found.clear()
        self.updates += 1


def average_by_powersgd(state: PowerSGD, bucket: GradBucket) -> Future[Tensor]:
    if state.updates < state.start:
        return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]
    buffer = bucket.buffer()
    future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
    state.waiting.append((future, buffer))
    state.gradients |= {state.names[id(p)]: gradient for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)}
    if bucket.is_last():
        state.average()
        for waiting, averaged in state.waiting:
            waiting.set_result(averaged)
        state.waiting = []
    return future


def average(tensors: list[Tensor]) -> list[Tensor]:
    """Over ranks, as one all-reduce."""
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat)
    parts = flat.div_(dist.get_world_size()).split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def orthonormal(matrix: Tensor) -> Tensor:
    """The columns made orthonormal. By Householder's reflections those of a zero matrix, too, which as a Q would stay zero for ever."""
    q: Tensor = torch.linalg.qr(matrix)[0]
    return q
