"""Weights, gradients and optimiser states sharded over processes: flat parameters (FSDP1, Zhao et al. 2023, arXiv 2304.11277), whole
parameters split by rows (FSDP2), and FSDP2 inside groups that are replicas of each other (HSDP). Made by Accelerate's own functions."""

import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard

from pretrain.boxes import Stretch
from pretrain.config import Config, ConfigError, Layout, Limits
from pretrain.initial import Filling, Initial
from pretrain.pieces import pieces
from pretrain.strategies.base import Strategy, on_cpu

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class FSDP1Options:
    cpu_offload: bool = False  # weights, gradients and optimiser states live in host memory
    backward_prefetch: Literal["backward_pre", "backward_post"] = "backward_pre"  # gather the next unit before or after this one's gradient
    sync_each_micro: bool = True  # reduce after every micro-batch: gradients stay sharded; False keeps whole ones and reduces once


@dataclass(frozen=True)
class FSDP2Options:
    blocks_per_unit: int = 1  # transformer blocks that are gathered together
    reshard_after_forward: bool | int = True  # free gathered weights after the forward; a number reshards to so many processes
    cpu_offload: bool = False  # weights, gradients and optimiser states live in host memory
    sync_each_micro: bool = True  # reduce after every micro-batch: gradients stay sharded; False keeps whole ones and reduces once
    limits: ClassVar[Limits] = {"blocks_per_unit": (1, math.inf)}


@dataclass(frozen=True)
class FSDP2GradOpOptions(FSDP2Options):
    reshard_after_forward: bool | int = False


class _Sharded(Strategy):
    """What both generations share."""

    processes = (2, math.inf)
    optimizers = ("adamw", "sgd")
    sharded = True
    replicate = 1  # groups that hold a whole copy each

    def why_not(self, key: str) -> str:
        return ", which wants whole matrices and would gather each of them" if key == "optim.name" else ""

    def check(self, cfg: Config, layout: Layout) -> None:
        super().check(cfg, layout)
        if self.options.cpu_offload and on_cpu(cfg):
            raise ConfigError("strategy.options.cpu_offload=true moves weights off a GPU, and this run is on a CPU; leave it out")
        self.accumulation, self.shard_size = layout.accumulation, layout.world_size // self.replicate

    def accelerator_arguments(self) -> dict[str, Any]:
        self.plugin = self.make_plugin()
        self.parallelism = (
            ParallelismConfig(dp_replicate_size=self.replicate, dp_shard_size=self.shard_size) if self.replicate > 1 else None
        )
        on_gpus = {} if self.on_cpu else {"fsdp_plugin": self.plugin, "parallelism_config": self.parallelism}
        return {**super().accelerator_arguments(), **on_gpus}

    def make_accelerator(self, cfg: Config) -> Accelerator:
        super().make_accelerator(cfg)
        if self.on_cpu:
            _shard_on_cpu(self.accelerator, self.plugin, self.parallelism)
        assert self.accelerator.distributed_type == DistributedType.FSDP, "Accelerate fell back from FSDP"
        self.shards = self.accelerator.torch_device_mesh["dp_shard"].get_group() if self.replicate > 1 else dist.group.WORLD
        return self.accelerator

    def make_plugin(self) -> FullyShardedDataParallelPlugin:
        raise NotImplementedError

    def find_blocks(self, module: nn.Module) -> list[nn.Module]:
        """The modules of the longest list, transformer blocks in any GPT: what is gathered one after the other."""
        lists = ([*found] for found in module.modules() if isinstance(found, nn.ModuleList))
        blocks: list[nn.Module] = max(lists, key=len, default=[])
        self.plugin.transformer_cls_names_to_wrap = sorted({type(block).__name__ for block in blocks})
        inside = {id(p) for block in blocks for p in block.parameters()}
        self.in_blocks = {name for name, p in module.named_parameters() if id(p) in inside}
        return blocks

    def place(self, module: nn.Module) -> nn.Module:
        """Where it is: a unit at a time comes to the device, to be divided there."""
        return module

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        squares = (super().total_norm(gradients) ** 2).to(self.accelerator.device)
        dist.all_reduce(squares, group=self.shards)
        return squares.sqrt()

    @contextmanager
    def evaluation_weights(self) -> Iterator[nn.Module]:
        yield self.model

    def replica_key(self) -> int:
        index: int = self.accelerator.process_index
        return index % self.shard_size

    def wire(self, step: int) -> int:
        """Per micro-batch: every unit gathered for the forward, the resharded ones again for the backward, in the dtype of the arithmetic;
        gradients reduced in fp32, by a reduce-scatter among the shards and an all-reduce among the copies. By a ring's formulas."""
        micros, gathered = self.accumulation, 2 if self.precision in _HALF else 4
        weights, again, among = self.gathered_elements()
        reductions = micros if self.options.sync_each_micro else 1
        shards, copies = self.shard_size, self.replicate
        in_shards = (micros * weights * gathered + reductions * weights * 4) * (shards - 1) // shards
        in_shards += micros * again * gathered * (among - 1) // among
        return in_shards + reductions * 2 * (copies - 1) * (weights * 4 // shards) // copies

    def gathered_elements(self) -> tuple[int, int, int]:
        """(of all units, of those that the backward gathers again, among how many processes it does), padding included."""
        raise NotImplementedError


def _shard_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin, parallelism: ParallelismConfig | None) -> None:
    """Let Accelerate's FSDP and HSDP run on CPUs. Its launcher starts the processes and torch shards on gloo, but its state turns FSDP on
    for accelerators alone, stays MULTI_CPU, and `prepare` would wrap DDP in silence. The state is all that has to be told."""
    for state in (AcceleratorState._shared_state, PartialState._shared_state):
        state["distributed_type"] = DistributedType.FSDP
        state["device"] = torch.device("cpu")  # FSDP1 takes no index
    accelerator.state.fsdp_plugin = plugin
    if parallelism is not None:
        accelerator.state.parallelism_config = parallelism
        accelerator.state.device_mesh = parallelism.get_device_mesh("cpu")


def _plugin(**arguments: Any) -> FullyShardedDataParallelPlugin:
    """Every field that the plugin would otherwise read from a launcher's environment is given."""
    return FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap",
        activation_checkpointing=False,  # transformers' own is exact with dropout, this one is not
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
        **arguments,
    )


def _plain(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


class FSDP1(_Sharded):
    Options = FSDP1Options
    sharding = ShardingStrategy.FULL_SHARD

    def check(self, cfg: Config, layout: Layout) -> None:
        super().check(cfg, layout)
        if self.precision != "fp32" and not self.options.sync_each_micro and layout.accumulation > 1:
            raise ConfigError(
                f"strategy.options.sync_each_micro=false: {self.name} would add up micro-batches in {self.precision}; leave it true, or use fsdp2"
            )
        if self.options.cpu_offload and self.options.sync_each_micro and layout.accumulation > 1:  # torch: "outside no_sync()"
            whole = "strategy.options.sync_each_micro=false, " if self.precision == "fp32" else ""
            raise ConfigError(
                f"strategy.options.cpu_offload=true: {self.name} would train on the last of {layout.accumulation} micro-batches alone; "
                f"write {whole}batch.micro={layout.micro * layout.accumulation}, or use fsdp2"
            )

    def make_plugin(self) -> FullyShardedDataParallelPlugin:
        half = _HALF.get(self.precision)
        warnings.filterwarnings("ignore", "sharding_strategy is deprecated", FutureWarning)  # the name that replaces it means FSDP2's
        return _plugin(
            fsdp_version=1,
            sharding_strategy=self.sharding,
            backward_prefetch=self.options.backward_prefetch.upper(),
            mixed_precision_policy=MixedPrecision(param_dtype=half, reduce_dtype=torch.float32) if half else None,
            cpu_offload=self.options.cpu_offload,
            use_orig_params=True,
            sync_module_states=False,
            forward_prefetch=False,
        )

    def wrap(self, module: nn.Module) -> nn.Module:
        self.find_blocks(module)
        if self.initial is not None:
            self.plugin.param_init_fn = Filling(module, self.initial, self.accelerator.device).fill
        wrapped = self.accelerator.prepare_model(module)
        assert isinstance(wrapped, FullyShardedDataParallel), "Accelerate fell back from FSDP"
        return wrapped

    def named_parameters(self) -> dict[str, Tensor]:
        return {_plain(name): p for name, p in self.module.named_parameters()}

    def accumulate(self, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last or self.options.sync_each_micro else self.accelerator.no_sync(model)

    def units(self) -> list[Any]:
        """Those that have parameters of their own, the root first."""
        return [unit for unit in FullyShardedDataParallel.fsdp_modules(self.model) if unit._flat_param is not None]

    def names(self) -> dict[int, str]:
        """By the identity of the parameter."""
        return {id(p): name for name, p in self.named_parameters().items()}

    def places(self) -> dict[str, tuple[Tensor, torch.Size, int]]:
        """Of each weight what this process has of it, possibly nothing, its whole shape, and where in it, flattened, its part begins. torch's
        own state dicts gather unit by unit and divide anew."""
        names, found = self.names(), {}
        for unit in self.units():
            flat = unit._flat_param
            shard = getattr(flat, "_local_shard", flat).detach()  # the former from the first forward on, whatever is gathered
            for p, shape, part in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
                begin = part.offset_in_shard or 0
                found[names[id(p)]] = shard[begin : begin + (part.numel_in_shard or 0)], shape, part.intra_param_start_idx or 0
        return found

    def buffers(self) -> dict[str, Tensor]:
        return {_plain(name): buffer for name, buffer in super().buffers().items()}

    def model_state(self) -> dict[str, Tensor]:
        return {name: Stretch(*place) for name, place in self.places().items()} | self.buffers()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        parameters = self.named_parameters()
        return {
            f"{name}.{key}": Stretch(value, shape, start) if value.ndim else value
            for name, (part, shape, start) in self.places().items()
            for key, value in optimizer.state.get(parameters[name], {}).items()
            if isinstance(value, Tensor) and part.numel()
        }

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """They have been read into what trains; what is gathered is gathered anew."""
        for unit in self.units():
            if hasattr(unit._flat_param, "_local_shard"):
                unit._handle.reshard(free_unsharded_flat_param=True)

    @torch.no_grad()
    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        names = self.names()
        for unit in self.units():
            with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
                for p in unit._flat_param._params:
                    yield names[id(p)], p.detach().clone()  # whoever keeps it keeps nothing that FSDP will resize
        yield from self.buffers().items()

    def gathered_elements(self) -> tuple[int, int, int]:
        sizes = [unit._flat_param._unpadded_unsharded_size.numel() for unit in self.units()]
        again = 0 if self.sharding == ShardingStrategy.SHARD_GRAD_OP else sum(sizes[1:])  # the first is the root, which is kept
        return sum(sizes), again, self.shard_size


class FSDP1GradOp(FSDP1):
    sharding = ShardingStrategy.SHARD_GRAD_OP


class FSDP2(_Sharded):
    Options = FSDP2Options

    def check(self, cfg: Config, layout: Layout) -> None:
        super().check(cfg, layout)
        if self.options.cpu_offload and self.precision == "fp16":  # torch sums overflows over shards where the gradients are, with NCCL
            raise ConfigError(
                f"strategy.options.cpu_offload=true: {self.name} does not work with run.precision=fp16; use bf16 or fp32, or fsdp1"
            )
        reshard, shards = self.options.reshard_after_forward, layout.world_size // self.replicate
        if not isinstance(reshard, bool) and (not 1 < reshard < shards or shards % reshard):
            possible = [n for n in range(2, shards) if shards % n == 0]
            raise ConfigError(
                f"strategy.options.reshard_after_forward={reshard}: must divide the {shards} shards; write true, false"
                + "".join(f" or {n}" for n in possible)
            )

    def make_plugin(self) -> FullyShardedDataParallelPlugin:
        half = _HALF.get(self.precision)
        # Accelerate's own policy would reduce in 16 bits and return the loss sum in them
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, output_dtype=None) if half else None
        plugin = _plugin(fsdp_version=2, reshard_after_forward=True, mixed_precision_policy=policy, cpu_offload=self.options.cpu_offload)
        plugin.reshard_after_forward = self.options.reshard_after_forward  # its constructor takes no number
        return plugin

    def wrap(self, module: nn.Module) -> nn.Module:
        mesh = self.accelerator.torch_device_mesh if self.replicate > 1 else None
        many = self.options.blocks_per_unit
        blocks = self.find_blocks(module)
        if many > 1:
            self.plugin.auto_wrap_policy = None  # Accelerate makes units of one block
        for start in range(0, len(blocks) if many > 1 else 0, many):
            fully_shard(
                blocks[start : start + many],
                mesh=mesh,
                reshard_after_forward=self.options.reshard_after_forward,
                mp_policy=self.plugin.mixed_precision_policy or MixedPrecisionPolicy(),
                offload_policy=self.plugin.cpu_offload,
            )
        sharded: nn.Module = fsdp2_prepare_model(self.accelerator, module)
        assert isinstance(sharded, FSDPModule), "Accelerate fell back from FSDP2"
        if self.initial is not None:
            self.fill(sharded, self.initial)
        return sharded

    @torch.no_grad()
    def fill(self, sharded: nn.Module, initial: Initial) -> None:
        """Its share of each weight, of one after the other."""
        sharded.to_empty(device="cpu" if self.options.cpu_offload else self.accelerator.device)
        for name, p in sharded.named_parameters():
            whole = initial(name)
            for part in pieces({"": {name: p}}):
                part.tensor.copy_(whole[tuple(slice(o, o + n) for o, n in zip(part.offsets, part.tensor.shape, strict=True))])

    def accumulate(self, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        model.set_requires_gradient_sync(last or self.options.sync_each_micro)  # type: ignore[operator]
        return nullcontext()

    @contextmanager
    def evaluation_weights(self) -> Iterator[nn.Module]:
        try:
            yield self.model
        finally:
            for unit in self.model.modules():  # a forward without a backward leaves some gathered
                if isinstance(unit, FSDPModule):
                    unit.reshard()

    def gathered_elements(self) -> tuple[int, int, int]:
        padded = {
            name: -(-p.shape[0] // self.shard_size) * self.shard_size * math.prod(p.shape[1:])
            for name, p in self.named_parameters().items()
        }
        reshard = self.options.reshard_after_forward
        again = sum(n for name, n in padded.items() if name in self.in_blocks) if reshard else 0
        return sum(padded.values()), again, self.shard_size if isinstance(reshard, bool) else reshard


class FSDP2GradOp(FSDP2):
    Options = FSDP2GradOpOptions


class HSDP(FSDP2):
    """Sharded among the processes of a node, replicated between nodes."""

    processes = (4, math.inf)
    keys = ("shard_size",)

    def check(self, cfg: Config, layout: Layout) -> None:
        world = layout.world_size
        node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        size = cfg.strategy.shard_size or (node if node < world else max(1, world // 2))
        possible = [n for n in range(2, world) if world % n == 0]
        if world >= self.processes[0] and size not in possible:
            raise ConfigError(
                f"strategy.shard_size={size}: {world} processes are groups of "
                + (" or ".join(map(str, possible)) if possible else "no size but 1 and all; use another number of processes, or fsdp2")
            )
        self.replicate = world // size
        super().check(cfg, layout)
