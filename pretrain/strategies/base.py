"""What every strategy can do, as one process does it. A family overrides what differs, in a file of its own."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pretrain import groups
from pretrain.config import Config, ConfigError, Layout, to_dict
from pretrain.initial import Initial, fill
from pretrain.optim import Recipe, gated_step, local, make_optimizer

SETUP_TIMEOUT = timedelta(minutes=30)  # collectives of start-up wait for the slowest reader
HOW_MANY = "pretrain train CONFIG -- --num_processes {0}, or accelerate launch --multi_gpu --num_processes {0} …"
MIN_LOSS_SCALE = 2.0**-14  # below fp16's smallest normal number no scale can help


@dataclass(frozen=True)
class NoOptions:
    """For strategies without options of their own."""


@dataclass(frozen=True)
class StepResult:
    grad_norm: Tensor  # 0-d, before clipping, over the whole global batch
    applied: Tensor  # 0-d bool: False where the gradient was not finite and the update was refused


class Stored(Protocol):
    """A checkpoint to read from (checkpoint.Stored)."""

    def fill(self, group: str, tensors: Mapping[str, Tensor], *, all_of_them: bool = False) -> None: ...
    def check(self, group: str, shapes: Mapping[str, tuple[int, ...]], *, all_of_them: bool) -> None: ...


def on_cpu(cfg: Config) -> bool:
    return cfg.run.device == "cpu" or (cfg.run.device == "auto" and not torch.cuda.is_available())


class Strategy:
    """One process. Call make_accelerator, then prepare; then, for every update, accumulate and backward per micro-batch, and step."""

    Options: type = NoOptions
    processes: tuple[int, float] = (1, 1)  # fewest and most that it runs in
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16")
    optimizers: tuple[str, ...] = ("adamw", "muon", "sgd")
    keys: tuple[str, ...] = ()  # of the section `strategy`, those that only some families take
    exact = True  # whether it computes what one process does, to rounding
    sharded = False  # whether one process alone lacks some of the weights
    save_interval = 1  # updates between steps after which `may_save` is true

    def __init__(self, name: str, options: Any, precision: str) -> None:
        self.name, self.options, self.precision = name, options, precision
        self.accelerator: Accelerator
        self.model: nn.Module  # as wrapped
        self.module: nn.Module  # plain: its names are the checkpoint's
        self.optimizer: Optimizer
        self.scaler: torch.amp.GradScaler | None = None
        self.unused: list[str]  # weights that got no gradient in the warm-up
        self.in_use: dict[str, set[torch.dtype]]  # of weights and gradients, as the warm-up found them

    def check(self, cfg: Config, layout: Layout) -> None:
        """Before any process group is made. Raises ConfigError for what this family cannot do, naming what can."""
        world, (fewest, most) = layout.world_size, self.processes
        if world > most:
            raise ConfigError(
                f"strategy.name={self.name} runs in one process; {world} were started: "
                "write pretrain train CONFIG -- --num_processes 1, or use strategy.name=ddp"
            )
        if world < fewest:
            started = "1 was" if world == 1 else f"{world} were"
            raise ConfigError(
                f"strategy.name={self.name} needs at least {fewest} processes; {started} started: write {HOW_MANY.format(fewest)}"
                + ("" if world > 1 else ", or use strategy.name=single")
            )
        for key in ("shard_size", "replicas", "simulate"):
            if getattr(cfg.strategy, key) is not None and key not in self.keys:
                raise ConfigError(f"strategy.{key}={getattr(cfg.strategy, key)} means nothing to strategy.name={self.name}; leave it out")
        for key, value, possible in (
            ("run.precision", self.precision, self.precisions),
            ("optim.name", cfg.optim.name, self.optimizers),
        ):
            if value not in possible:
                raise ConfigError(
                    f"strategy.name={self.name} does not work with {key}={value}{self.why_not(key)}; use {' or '.join(possible)}"
                )

    def all_train(self, module: nn.Module) -> None:
        """For families that take no weights without a gradient. Raises ConfigError naming one."""
        if frozen := [name for name, p in module.named_parameters() if not p.requires_grad]:
            raise ConfigError(
                f"strategy.name={self.name} does not work with weights that do not train ({frozen[0]} of model.build); use ddp or fsdp2"
            )

    def why_not(self, key: str) -> str:
        """The reason that a refusal of this key's value gives, from a comma on."""
        return ""

    @property
    def devices(self) -> int:
        """How many work, those of all processes together."""
        count: int = self.accelerator.num_processes
        return count

    def make_accelerator(self, cfg: Config) -> Accelerator:
        """Plugins are built from our config alone: nothing that a launcher exported gets a say."""
        self.on_cpu = on_cpu(cfg)
        self.accelerator = Accelerator(cpu=self.on_cpu, **self.accelerator_arguments())
        return self.accelerator

    def accelerator_arguments(self) -> dict[str, Any]:
        return {
            "mixed_precision": "no",  # autocast and loss scaling are here, since Accelerate's fp16 on a CPU is fp32
            "dynamo_backend": "no",
            "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=1),
            "log_with": None,
            "kwargs_handlers": [InitProcessGroupKwargs(timeout=SETUP_TIMEOUT), *self.handlers()],
        }

    def handlers(self) -> list[Any]:
        """Accelerate's keyword handlers for this family."""
        return []

    def prepare(self, module: nn.Module, recipe: Recipe, initial: Initial | None = None) -> tuple[nn.Module, Optimizer]:
        """`initial`: the weights of a module that is on the meta device."""
        self.module, self.initial = module, initial
        if self.precision != "fp32":  # here and not in the loop, so that training and evaluation go through the same forward
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]
            self.module.forward = torch.autocast(self.accelerator.device.type, dtype)(self.module.forward)
        self.model = self.wrap(self.place(module))
        self.optimizer = self.optimize(recipe)
        if self.precision == "fp16":
            self.scaler = torch.amp.GradScaler(self.accelerator.device.type)
            self.scaler.scale(torch.zeros((), device=self.accelerator.device))  # makes the scale a tensor, so that it can be saved
        return self.model, self.optimizer

    def place(self, module: nn.Module) -> nn.Module:
        """On the device, with weights, for `wrap`."""
        if self.initial is not None:
            fill(module, self.initial, self.accelerator.device)
        return module.to(self.accelerator.device)

    def wrap(self, module: nn.Module) -> nn.Module:
        return module

    def optimize(self, recipe: Recipe) -> Optimizer:
        return make_optimizer(recipe, self.named_parameters())

    def named_parameters(self) -> dict[str, Tensor]:
        """This process's parameters, or parts of them, as the optimiser sees them, under their plain names."""
        return dict(self.module.named_parameters())

    def warm_up(self, inputs_BT: Tensor, targets_BT: Tensor) -> None:
        """A forward and backward whose gradients are thrown away: see `job.warm_up`."""
        with self.accumulate(self.model, last=True):
            loss_sum, _ = self.model(inputs_BT, targets_BT)
            self.backward(loss_sum / targets_BT.numel())
        parameters = self.named_parameters().values()
        self.unused = [name for name, p in self.named_parameters().items() if p.requires_grad and p.grad is None]
        self.in_use = {"weights": {p.dtype for p in parameters}, "gradients": {p.grad.dtype for p in parameters if p.grad is not None}}
        self.optimizer.zero_grad(set_to_none=True)

    def accumulate(self, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Around one micro-batch's forward and backward; gradients are reduced after the last."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """`loss`: this micro-batch's loss sum over the *global* number of targets. Families that average over processes get it × their number."""
        loss = loss * self.accelerator.num_processes
        self.accelerator.backward(loss if self.scaler is None else self.scaler.scale(loss))

    def step(self, grad_clip: float) -> StepResult:
        """Unscale, clip, update where the norm is finite, zero. Waits for no device."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        gradients = [local(p.grad) for p in self.named_parameters().values() if p.grad is not None]
        norm = self.total_norm(gradients)
        if grad_clip > 0:
            torch._foreach_mul_(gradients, (grad_clip / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].device))
        applied = torch.isfinite(norm)
        refused = (~applied).float()
        self.update(refused.to(gradients[0].device))
        if self.scaler is not None:
            for found in self.scaler._found_inf_per_device(self.optimizer).values():
                found.copy_(refused)  # the verdict on all ranks' gradients, so that their scales stay equal
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(norm, applied)

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Of the whole gradient, from this process's part of it."""
        return torch.nn.utils.get_total_norm(gradients)

    def update(self, refused: Tensor) -> None:
        """One step of the optimiser, which the device itself refuses where `refused` is 1."""
        gated_step(self.optimizer, refused)

    def must_retry(self, result: StepResult) -> bool:
        """fp16 alone: whether the update overflowed and the same windows must be tried at the lower scale. Waits for the device."""
        if self.scaler is None or bool(result.applied):
            return False
        if self.scaler.get_scale() < MIN_LOSS_SCALE:
            raise FloatingPointError(
                f"fp16: the gradient overflows at every loss scale down to {MIN_LOSS_SCALE:g}; use run.precision=bf16 or fp32"
            )
        return True

    @contextmanager
    def evaluation_weights(self) -> Iterator[nn.Module]:
        """The module whose weights are evaluated, sampled from and exported."""
        yield self.module

    def may_save(self, step: int) -> bool:
        """Whether the replicas agree after `step`, so that a checkpoint can be taken."""
        return step % self.save_interval == 0

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Tensors under plain names, tied ones once: `model`, `optimizer` (NAME.KEY), `extras`; each rank its share."""
        return {"model": self.model_state(), "optimizer": self.optimizer_state(self.optimizer), "extras": {}}

    def buffers(self) -> dict[str, Tensor]:
        """The persistent ones, under plain names."""
        return {
            f"{prefix}.{name}" if prefix else name: buffer
            for prefix, owner in self.module.named_modules()
            for name, buffer in owner.named_buffers(recurse=False)
            if name not in owner._non_persistent_buffers_set
        }

    def model_state(self) -> dict[str, Tensor]:
        named = dict(self.module.named_parameters())
        tied = dict(self.module.named_parameters(remove_duplicate=False)).keys() - named.keys()
        return {name: tensor for name, tensor in self.module.state_dict().items() if name not in tied}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": value
            for name, p in self.named_parameters().items()
            for key, value in optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor)
        }

    def identity(self) -> dict[str, Any]:
        """What of it decides what is computed: nothing, or its name and options."""
        options = {f"strategy.options.{key}": value for key, value in to_dict(self.options).items()}
        return {} if self.exact else {"strategy.name": self.name, **options}

    def replica_key(self) -> int:
        """Processes with the same number hold the same weights, wherever `may_save` is true."""
        return 0

    def extras_kind(self) -> dict[str, Any] | None:
        """What a checkpoint's extras must be of to be used here; None for families without extras."""
        return None

    def restore(self, stored: Stored, *, moments: bool, extras: bool) -> None:
        """Take over a checkpoint, of whatever strategy: its optimiser states where they are of this optimiser, its extras where they are of
        this strategy's kind."""
        state = self.state()
        if not moments:
            state["optimizer"] = {}
        if not extras:
            state["extras"] = {}
        for group, tensors in state.items():
            stored.fill(group, tensors, all_of_them=group == "model")
        self.load(state)

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over what was read into the tensors of `state()`: nothing to do where these are the ones that train."""

    @torch.no_grad()
    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight in full under its plain name, one after the other. All ranks call it. Shards in host memory are gathered on the
        device: NCCL knows no other place."""
        for name, tensor in self.model_state().items():
            yield name, tensor.to(self.accelerator.device).full_tensor() if isinstance(tensor, DTensor) else tensor  # type: ignore[attr-defined]

    def numbers(self) -> dict[str, Any]:
        """What the checkpoint keeps beside tensors."""
        return {} if self.scaler is None else {"scaler": self.scaler.state_dict()}

    def load_numbers(self, numbers: Mapping[str, Any]) -> list[str]:
        """Returns notes on what was not there."""
        if self.scaler is not None and "scaler" in numbers:
            self.scaler.load_state_dict(dict(numbers["scaler"]))
        elif self.scaler is not None:
            return ["the checkpoint has no loss scale, since it was not written in fp16: it is found anew, some updates may be retried"]
        return []

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over processes."""
        return tensor if self.accelerator.num_processes == 1 else self.accelerator.reduce(tensor, "sum")

    def wire(self, step: int) -> int:
        """Bytes that this rank sends for update `step`, by formula."""
        return 0

    def notes(self) -> list[str]:
        """What the user should know of how it runs, beside its name and options."""
        return []

    def telemetry(self) -> dict[str, Tensor]:
        """More 0-d numbers for metrics.jsonl, the same on all ranks."""
        return {}

    def finish(self) -> None:
        groups.end_all()
