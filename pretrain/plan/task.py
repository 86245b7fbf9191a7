"""What a config comes to before anything runs: precision, model without weights, batch; and what cannot be known without its data."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pretrain import machine as machines
from pretrain import model as models
from pretrain.config import Config, ConfigError, Layout, layout, replace
from pretrain.loader import open_sets
from pretrain.plan.rates import Machine
from pretrain.strategies import STRATEGIES, Strategy, choose

GPT2_VOCABULARY, GPT2_END = 50_257, 50_256
_MANY = 1_000_000


@dataclass(frozen=True)
class Model:
    """Sizes that the formulas need. Elements of weights count padded rows of the vocabulary."""

    module: nn.Module  # on the meta device
    sizes: dict[str, int]  # elements by parameter name
    block: int  # elements of the largest block
    root: int  # elements outside the blocks
    products: int  # elements of the weights of matrix products
    head: int  # elements of the tied embedding and head
    hidden: dict[str, list[tuple[int, int]]]  # by parameter, shapes of the matrices that Muon orthogonalises
    layers: int
    heads: int
    width: int
    vocabulary: int  # padded
    parameters: int  # without padding
    flops_per_token: float

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


@dataclass(frozen=True)
class Task:
    cfg: Config
    precision: str
    model: Model
    windows_per_epoch: int | None  # None: the data is not here
    notes: tuple[str, ...] = ()

    @property
    def steps_known(self) -> bool:
        return self.windows_per_epoch is not None or self.cfg.train.epochs is None

    @property
    def compiled(self) -> bool:
        return self.cfg.train.compile != "off"


@dataclass(frozen=True)
class Case:
    """One strategy on so many processes: what a launch would have settled before its process group."""

    task: Task
    strategy: Strategy
    layout: Layout
    machine: Machine

    @property
    def width(self) -> int:
        """Bytes of a number in the arithmetic."""
        return 4 if self.task.precision == "fp32" else 2

    @property
    def offloads(self) -> bool:
        """Whether something that trains lives in host memory."""
        return any(getattr(self.strategy.options, key, False) for key in ("cpu_offload", "offload_optimizer"))


def understand(cfg: Config, machine: Machine) -> Task:
    """Raises ConfigError and ShardError for what a launch would refuse whatever the strategy; data that is not here is a note."""
    cfg = replace(cfg, "run.device", machine.device)
    notes, windows, vocabulary, end = [], None, GPT2_VOCABULARY, GPT2_END
    missing = [source.path for source in (*cfg.data.train, *cfg.data.val) if not Path(source.path).exists()]
    if missing:
        assumed = f"{cfg.model.vocab_size or vocabulary:,}"
        notes.append(f"{missing[0]} is not here: a vocabulary of {assumed} tokens is assumed{'' if cfg.model.vocab_size else ', GPT-2’s'}")
    else:
        sets = open_sets(cfg)
        windows, vocabulary, end = sets.windows_per_epoch, sets.tokenizer["vocab_size"], sets.tokenizer["eos_id"]
    if windows is None and cfg.train.epochs is not None:
        notes.append(f"train.epochs={cfg.train.epochs:g} of data that is not here: updates, days and hours are not known")
    module, _ = models.outline(cfg, vocabulary, end)
    model = _sizes(module, cfg.data.sequence_length)
    if cfg.model.build is not None:
        notes.append(
            f"model.build={cfg.model.build}: what it keeps for the backward is taken to be what GPT-2 of the same width and depth keeps"
        )
    return Task(cfg, _precision(cfg, machine), model, windows, tuple(notes))


def case(task: Task, name: str, processes: int, machine: Machine) -> Case:
    """Raises ConfigError with the strategy's own words where a launch would be refused."""
    cfg = with_strategy(task.cfg, name, machine.per_node if machine.per_node < processes else None)
    windows = task.windows_per_epoch
    if not task.steps_known:  # a number that no check stumbles over
        every = getattr(STRATEGIES[name].Options(), "sync_every", 1)
        every = cfg.strategy.options.get("sync_every", every)
        cfg = replace(replace(cfg, "train.epochs", None), "train.max_steps", _MANY * every)
    numbers = layout(cfg, processes, windows or 0)
    return Case(dataclasses.replace(task, cfg=cfg), choose(cfg, numbers, task.precision), numbers, machine)


def with_strategy(cfg: Config, name: str, node: int | None) -> Config:
    """The config under another strategy: options stay with the one that they are for, the section's keys with those that take them.
    `node`: processes of one, where there are several."""
    keys: dict[str, Any] = {
        key: getattr(cfg.strategy, key)
        for key in ("shard_size", "replicas", "simulate")
        if name == cfg.strategy.name or key in STRATEGIES[name].keys
    }
    if "shard_size" in STRATEGIES[name].keys and keys["shard_size"] is None and node is not None and node > 1:
        keys["shard_size"] = node  # which a launcher would tell it
    options = cfg.strategy.options if name == cfg.strategy.name else {}
    return dataclasses.replace(cfg, strategy=dataclasses.replace(type(cfg.strategy)(), name=name, options=options, **keys))


def _precision(cfg: Config, machine: Machine) -> str:
    """By `machine.choose_precision`'s rule, which asks the GPU that is here."""
    if machine.device == "cpu" or machine.gpu is None:
        return machines.choose_precision(cfg, torch.device(machine.device))[0]
    if cfg.run.precision == "bf16" and not machine.gpu.bf16:
        raise ConfigError(f"run.precision=bf16: {machine.name} has no bf16 arithmetic; write run.precision=fp16 or fp32")
    return cfg.run.precision if cfg.run.precision != "auto" else "bf16" if machine.gpu.bf16 else "fp32"


def _sizes(module: models.PretrainGPT2, sequence_length: int) -> Model:
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    lists = ([*found] for found in module.modules() if isinstance(found, nn.ModuleList))
    blocks: list[nn.Module] = max(lists, key=len, default=[])
    in_blocks = [sum(p.numel() for p in block.parameters()) for block in blocks]
    matrices = {name: p for name, p in module.named_parameters() if p.ndim > 1 and "wpe" not in name}
    config = module.config
    parts = {name: 3 if name.endswith("c_attn.weight") else 1 for name in matrices if ".h." in name}
    hidden = {name: [(matrices[name].shape[0], matrices[name].shape[1] // many)] * many for name, many in parts.items()}
    return Model(
        module, sizes, max(in_blocks, default=0), sum(sizes.values()) - sum(in_blocks), sum(p.numel() for p in matrices.values()),
        config.vocab_size * config.n_embd, hidden, config.n_layer, config.n_head, config.n_embd, config.vocab_size,
        models.parameter_count(module), models.flops_per_token(module, sequence_length),
    )  # fmt: skip
