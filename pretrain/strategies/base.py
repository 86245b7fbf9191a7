"""What every strategy can do, as one process does it. A family overrides what differs, in a file of its own."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.optim import Optimizer

from pretrain.config import Config, ConfigError
from pretrain.optim import Recipe, gated_step, make_optimizer

_SETUP_TIMEOUT = timedelta(minutes=30)  # collectives of start-up wait for the slowest reader
_MIN_LOSS_SCALE = 2.0**-14  # below fp16's smallest normal number no scale can help


@dataclass(frozen=True)
class NoOptions:
    """For strategies without options of their own."""


@dataclass(frozen=True)
class StepResult:
    grad_norm: Tensor  # 0-d, before clipping, over the whole global batch
    applied: Tensor  # 0-d bool: False where the gradient was not finite and the update was refused


class Strategy:
    """One process. Call make_accelerator, then prepare; then, for every update, accumulate and backward per micro-batch, and step."""

    Options: type = NoOptions

    def __init__(self, options: Any, precision: str) -> None:
        self.options, self.precision = options, precision
        self.accelerator: Accelerator
        self.model: nn.Module  # as wrapped
        self.module: nn.Module  # plain: its names are the checkpoint's
        self.optimizer: Optimizer
        self.scaler: torch.amp.GradScaler | None = None

    def make_accelerator(self, cfg: Config) -> Accelerator:
        """Plugins are built from our config alone: nothing that a launcher exported gets a say."""
        on_cpu = cfg.run.device == "cpu" or (cfg.run.device == "auto" and not torch.cuda.is_available())
        self.accelerator = Accelerator(
            cpu=on_cpu,
            mixed_precision="no",  # autocast and loss scaling are here, since Accelerate's fp16 on a CPU is fp32
            dynamo_backend="no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            log_with=None,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=_SETUP_TIMEOUT), *self.handlers()],
        )
        if self.accelerator.num_processes != 1 and type(self) is Strategy:
            raise ConfigError(
                f"strategy.name=single runs in one process; {self.accelerator.num_processes} were started: use strategy.name=ddp"
            )
        return self.accelerator

    def handlers(self) -> list[Any]:
        """Accelerate's keyword handlers for this family."""
        return []

    def prepare(self, module: nn.Module, recipe: Recipe) -> tuple[nn.Module, Optimizer]:
        self.module = module.to(self.accelerator.device)
        if self.precision != "fp32":  # here and not in the loop, so that training and evaluation go through the same forward
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]
            self.module.forward = torch.autocast(self.accelerator.device.type, dtype)(self.module.forward)
        self.model = self.wrap(self.module)
        self.optimizer = make_optimizer(recipe, dict(self.module.named_parameters()))
        if self.precision == "fp16":
            self.scaler = torch.amp.GradScaler(self.accelerator.device.type)
            self.scaler.scale(torch.zeros((), device=self.accelerator.device))  # makes the scale a tensor, so that it can be saved
        return self.model, self.optimizer

    def wrap(self, module: nn.Module) -> nn.Module:
        return module

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
        parameters = list(self.module.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if grad_clip > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip, norm)
        applied = torch.isfinite(norm)
        gated_step(self.optimizer, (~applied).float())
        if self.scaler is not None:
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(norm, applied)

    def must_retry(self, result: StepResult) -> bool:
        """fp16 alone: whether the update overflowed and the same windows must be tried at the lower scale. Waits for the device."""
        if self.scaler is None or bool(result.applied):
            return False
        if self.scaler.get_scale() < _MIN_LOSS_SCALE:
            raise FloatingPointError(
                f"fp16: the gradient overflows at every loss scale down to {_MIN_LOSS_SCALE:g}; use run.precision=bf16 or fp32"
            )
        return True

    @contextmanager
    def evaluation_weights(self) -> Iterator[nn.Module]:
        """The module whose weights are evaluated, sampled from and exported."""
        yield self.module

    def may_save(self, step: int) -> bool:
        """Whether the replicas agree after `step`, so that a checkpoint can be taken."""
        return True

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Live tensors under plain names, tied ones once: `model`, `optimizer` (NAME.KEY), `extras`. Loading writes into them."""
        named = dict(self.module.named_parameters())
        tied = dict(self.module.named_parameters(remove_duplicate=False)).keys() - named.keys()
        model = {name: tensor for name, tensor in self.module.state_dict().items() if name not in tied}
        optimizer = {
            f"{name}.{key}": value
            for name, p in named.items()
            for key, value in self.optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor)
        }
        return {"model": model, "optimizer": optimizer, "extras": {}}

    def numbers(self) -> dict[str, Any]:
        """What the checkpoint keeps beside tensors."""
        return {} if self.scaler is None else {"scaler": self.scaler.state_dict()}

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        if self.scaler is not None:
            if "scaler" not in numbers:
                raise ConfigError(
                    "the checkpoint has no loss scale: it was not written in fp16; resume with the precision that it was written in"
                )
            self.scaler.load_state_dict(dict(numbers["scaler"]))

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over processes."""
        return tensor if self.accelerator.num_processes == 1 else self.accelerator.reduce(tensor, "sum")

    def wire(self, step: int) -> int:
        """Bytes that this rank sends for update `step`, by formula."""
        return 0

    def finish(self) -> None:
        self.accelerator.end_training()
