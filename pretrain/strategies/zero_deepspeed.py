"""DeepSpeed's ZeRO: optimiser states (stage 1), gradients (2) and weights (3) divided among the processes, as its engine does it
(Rajbhandari et al. 2020, arXiv 1910.02054). bf16 and fp16 are DeepSpeed's own: the module is cast, weights and moments stay in fp32.
"""

import importlib.util
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from pretrain.config import Config, ConfigError, Layout
from pretrain.optim import MUON_STATE, Recipe, parameter_groups
from pretrain.strategies.base import _MIN_LOSS_SCALE, _SETUP_TIMEOUT, StepResult, Strategy


@dataclass(frozen=True)
class Stage12Options:
    """DeepSpeed's names and defaults."""

    reduce_bucket_size: int = 500_000_000  # gradients reduced at a time; a buffer of so many elements is allocated
    allgather_bucket_size: int = 500_000_000  # updated weights gathered at a time, in elements
    overlap_comm: bool = False  # reduce while the backward still runs
    offload_optimizer: bool = False  # fp32 weights and optimiser states in host memory, where the optimiser then runs


@dataclass(frozen=True)
class Stage3Options:
    """DeepSpeed's names (without `stage3_`) and defaults."""

    reduce_bucket_size: int = 500_000_000  # gradients reduced at a time; a buffer of so many elements is allocated
    overlap_comm: bool = True  # reduce while the backward still runs
    offload_optimizer: bool = False  # fp32 weights and optimiser states in host memory, where the optimiser then runs
    prefetch_bucket_size: int = 50_000_000  # elements of weights gathered ahead of their use
    param_persistence_threshold: int = 100_000  # smaller weights are kept whole by every process
    max_live_parameters: int = 1_000_000_000  # elements gathered at once, above which none is prefetched
    max_reuse_distance: int = 1_000_000_000  # weights used again within so many elements are not released: gathered once if all are


class EngineScale(torch.amp.GradScaler):
    """DeepSpeed's dynamic loss scale under the names of torch's, so that `must_retry` and any strategy's checkpoint fit it."""

    def __init__(self, scaler: Any) -> None:
        super().__init__("cpu", enabled=False)  # scales nothing itself
        self._scaler = scaler
        scaler.min_scale, scaler.raise_error_at_min_scale = _MIN_LOSS_SCALE / 2, False  # `must_retry` says when to give up

    def get_scale(self) -> float:
        return float(self._scaler.cur_scale)

    def state_dict(self) -> dict[str, Any]:
        s = self._scaler
        steady = s.cur_iter - s.last_overflow_iter - 1  # grows at multiples of the window, where torch's starts anew
        return {"scale": s.cur_scale, "growth_factor": s.scale_factor, "backoff_factor": 1 / s.scale_factor,
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
        self.on_cpu = cfg.run.device == "cpu" or (cfg.run.device == "auto" and not torch.cuda.is_available())
        if self.on_cpu:
            pretend_no_cpu()
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # it reports each bucket and buffer on standard output
        # Without zero3_init_flag=False, transformers would divide a model that is only just being loaded.
        plugin = DeepSpeedPlugin(hf_ds_config=self.engine_config(cfg), zero3_init_flag=False)
        self.accelerator = Accelerator(deepspeed_plugin=plugin, **self.accelerator_arguments())
        from deepspeed.utils import logger

        logger.setLevel(logging.ERROR)
        return self.accelerator

    def engine_config(self, cfg: Config) -> dict[str, Any]:
        options = dict(vars(self.options))
        offload = {"offload_optimizer": {"device": "cpu"}} if options.pop("offload_optimizer") else {}
        stage3_only = ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
        return {
            "train_micro_batch_size_per_gpu": cfg.batch.micro,
            "gradient_accumulation_steps": 1,  # with more it would divide the loss; `accumulate` marks the last micro-batch
            "gradient_clipping": cfg.optim.grad_clip,
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
            "bf16": {"enabled": self.precision == "bf16", "check_grad_overflow": True},
            # With the default hysteresis of 2 a retry at the same scale would overflow just as surely.
            "fp16": {"enabled": self.precision == "fp16", "hysteresis": 1},
            "zero_optimization": {
                "stage": self.stage,
                **{f"stage3_{key}" if key in stage3_only else key: value for key, value in options.items()},
                **offload,
            },
            "zero_allow_untested_optimizer": True,  # SGD
            "zero_force_ds_cpu_optimizer": False,  # torch's, which needs no compiler
        }

    def prepare(self, module: nn.Module, recipe: Recipe) -> tuple[nn.Module, Optimizer]:
        """The module's parameters stay the same objects; what is updated are fp32 pieces of them, laid out flat."""
        self.module = module
        exact = {name: p.detach().clone() for name, p in module.named_parameters()} if self.precision != "fp32" else {}
        self.engine, _ = self.accelerator.prepare(module, bare_optimizer(recipe, dict(module.named_parameters())))
        self.model, self.zero = self.engine, self.engine.optimizer
        self.optimizer = self.zero.optimizer  # torch's own, whose learning rate the loop sets
        self.allocate_state()
        if exact:  # DeepSpeed took its fp32 weights from those that it had cast
            self.load_weights(exact)
        if self.precision == "fp16":
            self.scaler = EngineScale(self.zero.loss_scaler)
        return self.model, self.optimizer

    def pieces(self) -> list[Tensor]:
        """This process's part of the fp32 weights, as the optimiser sees it."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def allocate_state(self) -> None:
        """DeepSpeed leaves it to the first step, before which there would be nothing to load into; and it would then link the states of
        one parameter group alone to their parameters."""
        for piece in self.pieces():
            moments = ("exp_avg", "exp_avg_sq") if isinstance(self.optimizer, AdamW) else (MUON_STATE,) * self.has_momentum()
            self.optimizer.state[piece] = {key: torch.zeros_like(piece) for key in moments}
            if isinstance(self.optimizer, AdamW):
                self.optimizer.state[piece]["step"] = torch.zeros((), device=piece.device)
        self.link_state()

    def has_momentum(self) -> bool:
        return bool(self.optimizer.defaults.get("momentum"))

    def link_state(self) -> None:
        self.zero._lazy_init_hp_params_optimizer_state()

    def warm_up(self, inputs_BT: Tensor, targets_BT: Tensor) -> None:
        """A forward, and a backward of NaN: that the engine refuses an update is the one way to make it drop its gradients."""
        scale = self.numbers()
        with self.accumulate(self.model, last=True):
            loss_sum, _ = self.model(inputs_BT, targets_BT)
            self.backward(loss_sum * math.nan)
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

    def state(self) -> dict[str, dict[str, Tensor]]:
        """In host memory, gathered tensor by tensor, since a device that holds a share may have no room for all."""
        return {
            "model": {name: tensor.cpu() for name, tensor in self.whole_weights()},
            "optimizer": {f"{name}.{key}": value.cpu() for name, key, value in self.whole_states()},
            "extras": {},
        }

    @torch.no_grad()
    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_fp32_param

        for name, p in self.module.named_parameters():
            yield name, safe_get_full_fp32_param(p)
        yield from self.buffers().items()

    def buffers(self) -> dict[str, Tensor]:
        """The persistent ones."""
        weights = dict(self.module.named_parameters(remove_duplicate=False))
        return {name: tensor for name, tensor in self.module.state_dict().items() if name not in weights}

    def whole_states(self) -> Iterator[tuple[str, str, Tensor]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        state = self.optimizer.state[self.pieces()[0]]
        for name, p in self.module.named_parameters():
            for key, value in state.items():
                yield name, key, safe_get_full_optimizer_state(p, key) if value.ndim else value.clone()

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.load_weights(state["model"])
        for name, tensor in self.buffers().items():
            tensor.copy_(state["model"][name])
        for name, p in self.module.named_parameters():
            for key, piece_value in self.optimizer.state[self.pieces()[0]].items():
                if piece_value.ndim:
                    self.set_piece(p, state["optimizer"][f"{name}.{key}"], key)
                else:  # one count for all: no parameter is ever left out of an update
                    for piece in self.pieces():
                        self.optimizer.state[piece][key].copy_(state["optimizer"][f"{name}.{key}"])

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        for name, p in self.module.named_parameters():
            self.set_piece(p, weights[name])
        self.zero.update_lp_params()  # the weights that compute, which DeepSpeed's setters leave as they were

    def set_piece(self, p: Tensor, whole: Tensor, key: str | None = None) -> None:
        """This process's part of a weight, or of the state `key` of one."""
        p.set_full_hp_param(whole, key)  # type: ignore[attr-defined]

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

    def pieces(self) -> list[Tensor]:
        return list(self.zero.fp32_partitioned_groups_flat)

    def link_state(self) -> None:
        """Stage 3 finds states by position."""

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        from deepspeed.zero import GatheredParameters

        for name, p in self.module.named_parameters():
            self.set_piece(p, weights[name])
            with GatheredParameters([p], modifier_rank=0):
                p.data.copy_(weights[name])

    def set_piece(self, p: Tensor, whole: Tensor, key: str | None = None) -> None:
        """DeepSpeed's setter of whole tensors fails where they don't divide evenly."""
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        size, rank = p.ds_tensor.ds_numel, self.accelerator.process_index  # type: ignore[attr-defined]
        part = torch.zeros(size)
        mine = whole.flatten()[rank * size : (rank + 1) * size]
        part[: mine.numel()] = mine
        if key is None:
            safe_set_local_fp32_param(p, part)
        else:
            safe_set_local_optimizer_state(p, part, key)

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


def bare_optimizer(recipe: Recipe, parameters: Mapping[str, Tensor]) -> Optimizer:
    """`make_optimizer` would allocate states for whole parameters, which DeepSpeed then replaces by pieces."""
    o, groups = recipe.optim, parameter_groups(recipe, parameters)
    if o.name == "sgd":
        return SGD(groups, lr=o.lr, momentum=o.momentum or 0.0, fused=True)
    return AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps, fused=True)


def pretend_no_cpu() -> None:
    """Accelerate has no DeepSpeed for CPUs: `cpu=True` makes it DDP in silence. So the process group is made as for a CPU, DeepSpeed is
    told of it, and the state that an `Accelerator` without `cpu` then finds says that it is DeepSpeed's."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is first imported
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference; compiling it takes minutes, or hangs on an old lock
    PartialState(cpu=True, timeout=_SETUP_TIMEOUT)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, timeout=_SETUP_TIMEOUT)
    PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
