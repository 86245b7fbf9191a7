"""Replicas that train apart and meet every H updates: local SGD (Stich 2019, arXiv 1805.09767), and DiLoCo (Douillard et al. 2023,
arXiv 2311.08105), whose outer optimiser treats what the replicas moved as a gradient.

A replica is one process or a group of processes under DDP; with `strategy.simulate` all replicas live in one process and take turns.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from pretrain.collectives import bytes_sent
from pretrain.config import Config, ConfigError, Layout, Limits
from pretrain.optim import Recipe, make_optimizer, set_lr
from pretrain.strategies.base import HOW_MANY, StepResult, Strategy


@dataclass(frozen=True)
class LocalOptions:
    sync_every: int = 8  # updates between synchronisations
    bucket_mb: int = 25  # weights are averaged in buckets of this size
    limits: ClassVar[Limits] = {"sync_every": (1, math.inf), "bucket_mb": (1, 100_000)}


@dataclass(frozen=True)
class DiLoCoOptions(LocalOptions):
    sync_every: int = 500
    outer_lr: float = 0.7  # how far the anchor follows what the replicas moved on average
    outer_momentum: float = 0.9  # Nesterov's
    limits: ClassVar[Limits] = {**LocalOptions.limits, "outer_lr": (1e-6, 100), "outer_momentum": (0, 0.9999)}


@dataclass
class Replica:
    """What differs between replicas that one process holds. The module's parameters are pointed at one replica at a time."""

    optimizer: Optimizer
    weights: list[Tensor]
    gradients: list[Tensor | None] = field(default_factory=list)


class LocalSGD(Strategy):
    """Every replica makes its own updates; every `sync_every` of them the weights are averaged, the moments stay apart."""

    Options = LocalOptions
    processes = (1, math.inf)
    precisions = ("fp32", "bf16")
    optimizers = ("adamw", "sgd")
    keys = ("replicas", "simulate")
    exact = False

    def why_not(self, key: str) -> str:
        return ", whose replicas would skip different updates" if key == "run.precision" else ""

    def check(self, cfg: Config, layout: Layout) -> None:
        super().check(cfg, layout)
        self.simulated = cfg.strategy.simulate or 1  # replicas in this process
        self.replica_count = cfg.strategy.simulate or cfg.strategy.replicas or layout.world_size
        self.group_size = layout.world_size * self.simulated // self.replica_count  # processes per replica
        self.accumulation, self.save_interval = layout.accumulation, self.options.sync_every
        self.steps = 0  # of the run; a resumed one loads it
        every = self.options.sync_every
        if layout.world_size == 1 and not cfg.strategy.simulate:
            raise ConfigError(
                f"strategy.name={self.name} needs at least 2 processes; 1 was started: write {HOW_MANY.format(2)}, or strategy.simulate=2"
            )
        if cfg.strategy.simulate and (layout.world_size > 1 or cfg.strategy.replicas):
            raise ConfigError("strategy.simulate runs all replicas in one process: launch one, and leave strategy.replicas out")
        if layout.accumulation % self.simulated:
            raise ConfigError(
                f"strategy.simulate={self.simulated}: {layout.accumulation} micro-batches do not divide among so many replicas; "
                f"write batch.tokens={layout.sequence_length * layout.micro * self.simulated * max(1, layout.accumulation // self.simulated)}"
            )
        if self.group_size * self.replica_count != layout.world_size * self.simulated:
            raise ConfigError(f"strategy.replicas={self.replica_count} does not divide {layout.world_size} processes")
        misfits = [
            f"{key}: {steps} is no multiple of strategy.options.sync_every={every}; write {key}={max(every, round(steps / every) * every)}"
            for key, steps in (("train.checkpoint_every", cfg.train.checkpoint_every), ("train.max_steps", layout.steps))
            if steps % every
        ]
        if misfits:  # the replicas agree, and can be saved, when they have met
            raise ConfigError("\n".join(misfits))

    def wrap(self, module: nn.Module) -> nn.Module:
        rank, size = self.accelerator.process_index, self.group_size
        world = self.accelerator.num_processes
        self.peers = self.mates = None  # those that hold the same part of other replicas, and those of one's own
        for first in range(size if world > 1 else 0):
            peers = dist.new_group(list(range(first, world, size)))
            self.peers = peers if rank % size == first else self.peers
        for first in range(0, world, size) if size > 1 else ():
            mates = dist.new_group(list(range(first, first + size)))
            self.mates = mates if rank // size * size == first else self.mates
        if self.mates is None:
            return module
        devices = None if self.accelerator.device.type == "cpu" else [self.accelerator.device]
        return DistributedDataParallel(module, device_ids=devices, process_group=self.mates, gradient_as_bucket_view=True, init_sync=False)

    def optimize(self, recipe: Recipe) -> Optimizer:
        self.parameters = list(self.module.parameters())
        weights = [p.data for p in self.parameters]
        self.replicas = [
            Replica(make_optimizer(recipe, self.named_parameters()), weights if r == 0 else [w.clone() for w in weights])
            for r in range(self.simulated)
        ]
        self.anchor = [w.clone() for w in weights]  # what the replicas last agreed on
        self._micro = 0
        self._telemetry: dict[str, Tensor] = {}
        return self.replicas[0].optimizer

    @contextmanager
    def at(self, replica: Replica) -> Iterator[None]:
        """The module is this replica."""
        if self.simulated == 1:
            yield
            return
        for p, weight, gradient in zip(self.parameters, replica.weights, replica.gradients or [None] * len(self.parameters), strict=True):
            p.data, p.grad = weight, gradient
        yield
        replica.gradients = [p.grad for p in self.parameters]

    def warm_up(self, inputs_BT: Tensor, targets_BT: Tensor) -> None:
        super().warm_up(inputs_BT, targets_BT)
        for replica in self.replicas:
            replica.gradients = []

    @contextmanager
    def accumulate(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Simulated replicas take the micro-batches one after the other, each the share that its ranks would have."""
        replica = self.replicas[self._micro * self.simulated // self.accumulation]
        self._micro = 0 if last else self._micro + 1
        silent: AbstractContextManager[Any] = nullcontext() if last or self.mates is None else model.no_sync()  # type: ignore[operator]
        with self.at(replica), silent:
            yield

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * self.simulated)  # each replica's own mean

    def step(self, grad_clip: float) -> StepResult:
        """Every replica's own update. `grad_norm` is the root mean square over this process's replicas."""
        lr, results = self.replicas[0].optimizer.param_groups[0]["lr"], []
        for replica in self.replicas:
            self.optimizer = replica.optimizer
            set_lr(self.optimizer, lr)
            with self.at(replica):
                results.append(super().step(grad_clip))
        self.optimizer = self.replicas[0].optimizer
        self.steps += 1
        if self.may_save(self.steps):
            self.synchronise()
        norm = torch.stack([result.grad_norm for result in results]).square().mean().sqrt()
        return StepResult(norm, torch.stack([result.applied for result in results]).all())

    @torch.no_grad()
    def synchronise(self) -> None:
        mean = self.mean([replica.weights for replica in self.replicas])
        self._telemetry = self.measure(mean)
        self.outer_step(mean)
        for replica in self.replicas:
            torch._foreach_copy_(replica.weights, self.anchor)

    def outer_step(self, mean: list[Tensor]) -> None:
        """Move the anchor, where all replicas go on from."""
        torch._foreach_copy_(self.anchor, mean)

    def mean(self, replicas: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Over all replicas, here and in other processes, in fp32 and in buckets."""
        means, bucket, size = [], [], 0
        for tensors in zip(*replicas, strict=True):
            bucket.append(torch.stack([t.float() for t in tensors]).sum(dim=0) if len(tensors) > 1 else tensors[0].float())
            size += bucket[-1].nbytes
            if size > self.options.bucket_mb << 20:
                means += self._mean_of_bucket(bucket)
                bucket, size = [], 0
        return means + (self._mean_of_bucket(bucket) if bucket else [])

    def _mean_of_bucket(self, bucket: list[Tensor]) -> list[Tensor]:
        flat = torch.cat([t.reshape(-1) for t in bucket])  # a copy even of one tensor, which may be what trains
        if self.peers is not None:
            dist.all_reduce(flat, group=self.peers)
        return list(_unflatten_dense_tensors(flat / self.replica_count, bucket))

    def measure(self, mean: list[Tensor]) -> dict[str, Tensor]:
        """How far apart the replicas are, from the norms of what each moved (d) and of what they moved on average:
        Σ|w − mean|² = Σ|d|² − R·|mean d|², and the mean over pairs of their cosine, weighted by length: (R²·|mean d|² − Σ|d|²) / ((R − 1)·Σ|d|²).
        """
        R = self.replica_count
        moved = sum((_square(torch._foreach_sub(replica.weights, self.anchor)) for replica in self.replicas), torch.zeros(()))
        if self.peers is not None:
            moved = moved.to(self.accelerator.device)
            dist.all_reduce(moved, group=self.peers)
        together = _square(torch._foreach_sub(mean, self.anchor))
        return {
            "replica_distance": (moved / R - together).clamp(min=0).sqrt(),
            "replica_drift": (moved / R).sqrt(),
            "pseudo_gradient_cosine": (R * R * together - moved) / (max(1, R - 1) * moved).clamp(min=1e-30),
        }

    def notes(self) -> list[str]:
        how = "in turn in this process: what they learn is real, the speed is not"
        if self.simulated == 1:
            how = f"of {self.group_size} process{'es' if self.group_size > 1 else ''} each"
        return [
            f"{self.replica_count} replica{'s' if self.replica_count > 1 else ''} {how}; they meet every {self.options.sync_every:,} updates"
        ]

    def telemetry(self) -> dict[str, Tensor]:
        return self._telemetry

    @contextmanager
    def evaluation_weights(self) -> Iterator[nn.Module]:
        """The replicas' average. What trains is left as it is."""
        mean = self.anchor if self.may_save(self.steps) else self.mean([replica.weights for replica in self.replicas])
        kept = [p.data for p in self.parameters]
        for p, weight in zip(self.parameters, mean, strict=True):
            p.data = weight
        try:
            yield self.module
        finally:
            for p, weight in zip(self.parameters, kept, strict=True):
                p.data = weight

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The canonical moments are the replicas' mean; each replica's own are extras."""
        own = [self.optimizer_state(replica.optimizer) for replica in self.replicas]
        means = dict(zip(own[0], self.mean([list(moments.values()) for moments in own]), strict=True))
        first = self.accelerator.process_index // self.group_size
        extras = {f"replica{first + r}.{name}": tensor for r, moments in enumerate(own) for name, tensor in moments.items()}
        return {"model": self.model_state(), "optimizer": means, "extras": {**extras, **self.outer_state()}}

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "strategy.replicas": self.replica_count}

    def extras_kind(self) -> dict[str, Any]:
        return {"strategy": self.name, "replicas": self.replica_count}

    def outer_state(self) -> dict[str, Tensor]:
        return {}

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Every replica from the checkpoint's weights; with its own moments where they were there, else with the mean."""
        weights = [p.data for p in self.parameters]
        torch._foreach_copy_(self.anchor, weights)
        for replica in self.replicas:
            torch._foreach_copy_(replica.weights, self.anchor)
            for name, moment in self.optimizer_state(replica.optimizer).items() if not state["extras"] and state["optimizer"] else ():
                moment.copy_(state["optimizer"][name])

    def numbers(self) -> dict[str, Any]:
        return {**super().numbers(), "telemetry": {name: float(value) for name, value in self._telemetry.items()}}

    def load_numbers(self, numbers: Mapping[str, Any]) -> list[str]:
        notes = super().load_numbers(numbers)
        self.steps = numbers["progress"]["step"]
        if numbers.get("extras") == self.extras_kind():
            self._telemetry = {name: torch.tensor(value) for name, value in numbers["telemetry"].items()}
        return notes

    def wire(self, step: int) -> int:
        """A ring all-reduce of the weights among the replicas at each synchronisation, and of the gradients inside a replica at each step."""
        size = sum(p.numel() * 4 for p in self.parameters)
        replicas, mates = self.replica_count // self.simulated, self.group_size
        between = bytes_sent("ring", "all_reduce", size, replicas) if self.may_save(step) else 0
        return between + bytes_sent("ring", "all_reduce", size, mates)


class DiLoCo(LocalSGD):
    """At each synchronisation the anchor takes a step of SGD with Nesterov momentum along the replicas' mean pseudo-gradient."""

    Options = DiLoCoOptions

    def optimize(self, recipe: Recipe) -> Optimizer:
        inner = super().optimize(recipe)
        o: DiLoCoOptions = self.options
        self.outer = SGD(self.anchor, lr=o.outer_lr, momentum=o.outer_momentum, nesterov=o.outer_momentum > 0, foreach=True)
        for anchor in self.anchor if o.outer_momentum else ():
            self.outer.state[anchor]["momentum_buffer"] = torch.zeros_like(anchor)
        return inner

    def extras_kind(self) -> dict[str, Any]:
        o: DiLoCoOptions = self.options
        return {**super().extras_kind(), "outer_momentum": o.outer_momentum > 0}

    def outer_step(self, mean: list[Tensor]) -> None:
        for anchor, average in zip(self.anchor, mean, strict=True):
            anchor.grad = anchor - average
        self.outer.step()
        self.outer.zero_grad(set_to_none=True)

    def outer_state(self) -> dict[str, Tensor]:
        names = self.named_parameters()
        states = (self.outer.state[anchor] for anchor in self.anchor)
        return {f"outer.{name}": state["momentum_buffer"] for name, state in zip(names, states, strict=True) if state}


def _square(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(list(tensors))).square().sum()
