"""DeepSpeed's ZeRO: optimiser states (stage 1), gradients (2) and weights (3) divided among the processes, as its engine does it
(Rajbhandari et al. 2020, arXiv 1910.02054). bf16 and fp16 are DeepSpeed's own: the module is cast, weights and moments stay in fp32.
"""

import importlib.util
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from pretrain.boxes import Stretch
from pretrain.config import Config, ConfigError, Layout, Limits
from pretrain.initial import Filling, Initial, fill
from pretrain.optim import MUON_STATE, Recipe, make_optimizer
from pretrain.strategies.base import MIN_LOSS_SCALE, SETUP_TIMEOUT, StepResult, Strategy, on_cpu

_MOST = 10**12  # elements


@dataclass(frozen=True)
class StageOptions:
    reduce_bucket_size: int = 500_000_000  # gradients reduced at a time; a buffer of so many elements is allocated
    overlap_comm: bool = False  # reduce while the backward still runs
    offload_optimizer: bool = False  # fp32 weights and optimiser states in host memory, where the optimiser then runs
    limits: ClassVar[Limits] = {"reduce_bucket_size": (1, _MOST)}


@dataclass(frozen=True)
class Stage12Options(StageOptions):
    """DeepSpeed's names and defaults."""

    allgather_bucket_size: int = 500_000_000  # updated weights gathered at a time, in elements
    limits: ClassVar[Limits] = {**StageOptions.limits, "allgather_bucket_size": (1, _MOST)}


@dataclass(frozen=True)
class Stage3Options(StageOptions):
    """DeepSpeed's names and defaults."""

    overlap_comm: bool = True  # reduce while the backward still runs
    stage3_prefetch_bucket_size: int = 50_000_000  # elements of weights gathered ahead of their use
    stage3_param_persistence_threshold: int = 100_000  # smaller weights are kept whole by every process
    stage3_max_live_parameters: int = 1_000_000_000  # elements gathered at once, above which none is prefetched
    stage3_max_reuse_distance: int = 1_000_000_000  # elements; weights used again within so many are not released
    limits: ClassVar[Limits] = {
        **StageOptions.limits, "stage3_prefetch_bucket_size": (0, _MOST), "stage3_param_persistence_threshold": (0, _MOST),
        "stage3_max_live_parameters": (0, _MOST), "stage3_max_reuse_distance": (0, _MOST),
    }  # fmt: skip


class EngineScale(torch.amp.GradScaler):
    """DeepSpeed's dynamic loss scale under the names of torch's, so that `must_retry` and any strategy's checkpoint fit it."""

    def __init__(self, scaler: Any) -> None:
        super().__init__("cpu", enabled=False)  # scales nothing itself
        self._scaler = scaler
        scaler.min_scale, scaler.raise_error_at_min_scale = MIN_LOSS_SCALE / 2, False  # `must_retry` says when to give up

    def get_scale(self) -> float:
        return float(self._scaler.cur_scale)

    def state_dict(self) -> dict[str, Any]:
        s = self._scaler
        steady = s.cur_iter - s.last_overflow_iter - 1  # grows at multiples of the window, where torch's starts anew
        return {"scale": float(s.cur_scale), "growth_factor": s.scale_factor, "backoff_factor": 1 / s.scale_factor,
                "growth_interval": s.scale_window, "_growth_tracker": (steady - 1) % s.scale_window + 1 if steady else 0}  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        s = self._scaler
        s.cur_scale, s.cur_iter, s.last_overflow_iter = state_dict["scale"], state_dict["_growth_tracker"], -1


class DeepSpeed(Strategy):
    processes = (2, math.inf)
    optimizers = ("adamw", "sgd")
    stage: ClassVar[int]
    engine: Any  # DeepSpeed's, around the module
    zero: Any  # its optimiser, around torch's

    def check(self, cfg: Config, layout: Layout) -> None:
        super().check(cfg, layout)
        if importlib.util.find_spec("deepspeed") is None:
            raise ConfigError(f"strategy.name={self.name} needs DeepSpeed; pip install 'pretrain[deepspeed]'")
        self.accumulation = layout.accumulation

    def why_not(self, key: str) -> str:
        return ", which needs whole matrices where DeepSpeed updates flat pieces" if key == "optim.name" else ""

    def make_accelerator(self, cfg: Config) -> Accelerator:
        self.on_cpu = on_cpu(cfg)
        if self.on_cpu:
            os.environ["DS_ACCELERATOR"] = "cpu"  # read at the first import
        deepspeed().utils.logger.setLevel(logging.ERROR)  # it reports every bucket and buffer on standard output
        warnings.filterwarnings("ignore", "`torch.distributed.(all_gather_into|reduce_scatter)_tensor` is deprecated", FutureWarning)
        if self.on_cpu:
            prepare_cpu()
        # Without zero3_init_flag=False, transformers would divide a model that is only being loaded.
        plugin = DeepSpeedPlugin(hf_ds_config=self.engine_config(cfg), zero3_init_flag=False)
        self.accelerator = Accelerator(deepspeed_plugin=plugin, **self.accelerator_arguments())
        return self.accelerator

    def engine_config(self, cfg: Config) -> dict[str, Any]:
        zero = {"stage": self.stage, **vars(self.options)}
        zero["offload_optimizer"] = {"device": "cpu" if zero["offload_optimizer"] else "none"}
        return {
            "train_micro_batch_size_per_gpu": cfg.batch.micro,
            "gradient_accumulation_steps": 1,  # with more it would divide the loss; `accumulate` marks the last micro-batch
            "gradient_clipping": cfg.optim.grad_clip,
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
            "bf16": {"enabled": self.precision == "bf16", "check_grad_overflow": True},
            # With the default hysteresis of 2 a retry at the same scale would overflow just as surely.
            "fp16": {"enabled": self.precision == "fp16", "hysteresis": 1},
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,  # SGD
            "zero_force_ds_cpu_optimizer": False,  # torch's AdamW runs in host memory too, and needs no compiler
        }

    def prepare(self, module: nn.Module, recipe: Recipe, initial: Initial | None = None) -> tuple[nn.Module, Optimizer]:
        """The module's parameters stay the same objects; what is updated are fp32 pieces of them, laid out flat."""
        self.all_train(module)
        self.module = module
        if initial is not None:
            self.fill(initial)
        elif self.precision != "fp32":
            initial = {name: p.detach().clone() for name, p in module.named_parameters()}.__getitem__
        self.engine, _ = self.accelerator.prepare(module, make_optimizer(recipe, dict(module.named_parameters()), allocate=False))
        self.model, self.zero = self.engine, self.engine.optimizer
        self.optimizer = self.zero.optimizer  # torch's own, whose learning rate the loop sets
        self.allocate_state({"adamw": ("exp_avg", "exp_avg_sq"), "sgd": (MUON_STATE,) if recipe.optim.momentum else ()}[recipe.optim.name])
        if initial is not None and self.precision != "fp32":  # DeepSpeed took its fp32 weights from those that it had cast
            self.set_pieces(initial)
        if self.precision == "fp16":
            self.scaler = EngineScale(self.zero.loss_scaler)
        return self.engine, self.optimizer

    def fill(self, initial: Initial) -> None:
        """A module that is on the meta device."""
        fill(self.module, initial, self.accelerator.device)

    @torch.no_grad()
    def set_pieces(self, initial: Initial) -> None:
        """The fp32 weights, of which those that compute are roundings already."""
        flat = self.pieces()
        for name, p in self.module.named_parameters():
            piece, begin, size, start = self.part_of(p)
            flat[piece][begin : begin + size] = initial(name).flatten()[start : start + size]

    def pieces(self) -> list[Tensor]:
        """This process's part of the fp32 weights, as the optimiser sees it."""
        if self.stage == 3:
            return list(self.zero.fp32_partitioned_groups_flat)
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def allocate_state(self, moments: tuple[str, ...]) -> None:
        """DeepSpeed leaves it to the first step: before it there is nothing to load into."""
        for piece in self.pieces():
            self.optimizer.state[piece] = {key: torch.zeros_like(piece) for key in moments}
            if isinstance(self.optimizer, AdamW):
                self.optimizer.state[piece]["step"] = torch.zeros((), device=piece.device)

    def warm_up(self, inputs_BT: Tensor, targets_BT: Tensor) -> None:
        """A forward, and a backward of NaN: that the engine refuses an update is the one way to make it drop its gradients."""
        scale = self.numbers()
        with self.accumulate(self.model, last=True):
            loss_sum, _ = self.model(inputs_BT, targets_BT)
            self.backward(loss_sum * math.nan)
        self.in_use = {"weights": {p.dtype for p in self.pieces()}, "gradients": {self.engine.communication_data_type}}
        assert not self.step(0.0).applied, "DeepSpeed applied an update of NaN"
        self.load_numbers(scale)

    def accumulate(self, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        self.engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Accelerate's would run the engine's step after the last micro-batch: before ours has begun."""
        self.engine.backward(loss * self.accelerator.num_processes)

    def step(self, grad_clip: float) -> StepResult:
        """The engine unscales, clips by the value of its config, and refuses what is not finite, waiting for the device."""
        self.engine.step()
        device = self.accelerator.device
        norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32, device=device)
        return StepResult(norm, torch.tensor(self.engine.was_step_applied(), device=device))

    def part_of(self, p: Any) -> tuple[int, int, int, int]:
        """What this process has of a weight: in which of `pieces`, from where on, how many elements, and the first one's index in the flattened
        weight."""
        part = p._hp_mapping
        if part is None:
            return 0, 0, 0, 0
        return part.param_group_index, part.hp_fragment_address.start, part.hp_fragment_address.numel, part.lp_fragment_address.start

    def stretches(self, flat: Sequence[Tensor]) -> dict[str, Stretch]:
        """What this process has of each weight, of tensors that are laid out as `pieces`. DeepSpeed's own getters and setters need it whole."""
        found = {}
        for name, p in self.module.named_parameters():
            piece, begin, size, start = self.part_of(p)
            found[name] = Stretch(flat[piece].detach()[begin : begin + size], getattr(p, "ds_shape", p.shape), start)
        return found

    def model_state(self) -> dict[str, Tensor]:
        return {**self.stretches(self.pieces()), **self.buffers()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        pieces = self.pieces()
        found: dict[str, Tensor] = {}
        for key, value in optimizer.state[pieces[0]].items():
            if value.ndim:
                parts = self.stretches([optimizer.state[piece][key] for piece in pieces])
                found |= {f"{name}.{key}": part for name, part in parts.items() if part.boxes}
            else:  # one count for all: no parameter is ever left out of an update
                found |= {f"{name}.{key}": value for name, _ in self.module.named_parameters()}
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """They have been read into the fp32 pieces."""
        counted, *others = self.pieces()
        for piece in others:
            for key, value in self.optimizer.state[counted].items():
                if not value.ndim:
                    self.optimizer.state[piece][key].copy_(value)
        self.use_weights()

    def use_weights(self) -> None:
        """Let those that compute be the fp32 pieces again."""
        self.zero.update_lp_params()

    @torch.no_grad()
    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.module.named_parameters():
            yield name, deepspeed().utils.safe_get_full_fp32_param(p)
        yield from self.buffers().items()

    def replica_key(self) -> int:
        index: int = self.accelerator.process_index
        return index if self.sharded else 0

    def wire(self, step: int) -> int:
        """By a ring (Patarasuk and Yuan 2009): DeepSpeed all-reduces whole fp32 gradients, of which each process keeps its part (the
        paper's reduce-scatter would be half of it); stage 2 after every micro-batch. Then the updated weights are gathered."""
        world: int = self.accelerator.num_processes
        reductions = self.accumulation if self.stage == 2 else 1
        return sum((2 * 4 * reductions + p.element_size()) * p.numel() for p in self.module.parameters()) * (world - 1) // world


class DeepSpeed1(DeepSpeed):
    stage = 1
    Options = Stage12Options


class DeepSpeed2(DeepSpeed):
    stage = 2
    Options = Stage12Options


class DeepSpeed3(DeepSpeed):
    stage = 3
    Options = Stage3Options
    sharded = True

    def fill(self, initial: Initial) -> None:
        """One module after the other, each divided before the next, as DeepSpeed would divide a whole one."""
        config = self.accelerator.state.deepspeed_plugin.deepspeed_config
        zero = deepspeed().zero.Init(module=nn.Module(), config_dict_or_path=config)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]
        filling = Filling(self.module, lambda name: initial(name).to(dtype), self.accelerator.device)
        for owner in self.module.modules():
            filling.fill(owner)
            zero._convert_to_zero_parameters(owner.parameters(recurse=False))

    def part_of(self, p: Any) -> tuple[int, int, int, int]:
        """The last parts are padded, or nothing but padding."""
        piece, begin, size = self.zero.grad_position[self.zero.get_param_id(p)]
        start = size * self.accelerator.process_index
        return piece, begin, max(0, min(size, p.ds_numel - start)), start

    def use_weights(self) -> None:
        """As DeepSpeed does after an update."""
        self.zero.parameter_offload.partition_all_parameters()
        for group in range(len(self.zero.fp16_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(group)
        if kept := self.zero.persistent_parameters:
            kept[0].all_gather(kept)

    def wire(self, step: int) -> int:
        """By a ring. Per micro-batch, gradients are reduce-scattered in fp32 and the divided weights gathered in the dtype of the
        arithmetic: once, for the forward and the backward (the paper's twice), while all are used again within max_reuse_distance.
        Per update, the weights that all keep whole are gathered."""
        world: int = self.accelerator.num_processes
        moved = 0
        for p in self.module.parameters():
            size: int = p.ds_numel  # type: ignore[attr-defined]
            gathered = 1 if p.ds_persist else self.accumulation  # type: ignore[attr-defined]
            moved += size * (4 * self.accumulation + p.element_size() * gathered)
        return moved * (world - 1) // world


def deepspeed() -> Any:
    """Imported by those who use it, since it takes seconds."""
    return importlib.import_module("deepspeed")


def prepare_cpu() -> None:
    """Accelerate has no DeepSpeed for CPUs: `cpu=True` makes it DDP in silence. So the process group is made as for a CPU, DeepSpeed is
    told of it, and the state that an `Accelerator` without `cpu` then finds says that it is DeepSpeed's."""
    engine = deepspeed()
    engine.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # of use in inference; to compile it takes minutes
    engine.get_accelerator().is_fp16_supported = lambda: True  # torch has it on every CPU, fast or not
    PartialState(cpu=True, timeout=SETUP_TIMEOUT)
    engine.init_distributed("gloo", auto_mpi_discovery=False, timeout=SETUP_TIMEOUT)
    PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
