"""Every knob, as frozen dataclasses. `load` reads YAML plus `section.key=value` overrides, and lists every mistake at once.

A key marked `free` may change between two starts of one run: it alters layout, logging or intervals, not what is computed.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

# (n_layer, n_head, n_embd). gpt2*: OpenAI's four sizes (Radford et al. 2019, table 2, as released). The others are for one CPU.
PRESETS = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
    "small": (6, 6, 384),
    "tiny": (4, 4, 128),
}


Limits = Mapping[str, tuple[float, float]]  # of a strategy's options


class ConfigError(ValueError):
    """One line for each thing that the user can mend; the trainer and the verbs end with status 2."""


def key(default: Any, doc: str, *, free: bool = False) -> Any:
    metadata = {"doc": doc, "free": free}
    return field(default_factory=dict, metadata=metadata) if default == {} else field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Source:
    """One prepared set and its share of the training tokens."""

    path: str
    weight: float | None = None  # None: as many as it has


@dataclass(frozen=True)
class Run:
    name: str = key("", "the run's folder under `run.dir`; by default the config file's name")
    dir: str = key("runs", "where run folders are made", free=True)
    seed: int = key(1337, "seed of everything that has no seed of its own")
    init_seed: int | None = key(None, "seed of the initial weights (default: `run.seed`)")
    data_seed: int | None = key(None, "seed of the data order (default: `run.seed`)")
    resume: str = key("auto", "`auto`, `never`, `must`, or the path of a checkpoint to start from", free=True)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = key("auto", "arithmetic of forward and backward; weights stay fp32")
    device: Literal["auto", "cpu", "cuda", "mps"] = key("auto", "`auto` takes GPUs where there are some", free=True)
    tf32: bool = key(True, "on GPUs, let fp32 matrix products round their inputs to TF32 (10 bits of mantissa)")
    deterministic: bool = key(False, "use only deterministic kernels (slower on GPUs; CPUs need nothing)")


@dataclass(frozen=True)
class Data:
    train: tuple[Source, ...] = key((), "a prepared set, or a list of paths or `{path, weight}`, shares of the tokens (default: by size)")
    val: tuple[Source, ...] = key((), "the set to validate on, or a list (default: the validation splits of `data.train`)")
    sequence_length: int = key(1024, "tokens in a window: the model's context")
    shuffle: bool = key(True, "a new order of windows for every epoch; `false` is file order")
    document_mask: bool = key(False, "keep attention and positions inside documents; GPT-2 lets them run across those of a window")
    stage_to: str = key("", "a folder on a disk of each node: token files are copied there once, checked, and read from there", free=True)


@dataclass(frozen=True)
class Model:
    preset: str | None = key(None, "a size by name: " + ", ".join(f"`{name}`" for name in PRESETS))
    n_layer: int | None = key(None, "blocks (instead of `preset`)")
    n_head: int | None = key(None, "attention heads")
    n_embd: int | None = key(None, "width")
    vocab_size: int | None = key(None, "rows of the embedding that stand for tokens (default: the tokenizer's)")
    dropout: float = key(0.0, "after embeddings, attention and both halves of a block")
    init_from: str | None = key(None, "a Hugging Face folder or name whose weights to start from")
    build: str | None = key(None, "`module:function` that makes the model in place of ours: model config -> module")
    activation_checkpointing: bool = key(False, "recompute each block in the backward: less memory, about a third more work", free=True)


@dataclass(frozen=True)
class Batch:
    tokens: int = key(524288, "tokens per update, over all replicas and micro-batches")
    micro: int = key(8, "sequences per process and forward; changes memory and speed, not the result", free=True)


@dataclass(frozen=True)
class Optim:
    name: Literal["adamw", "muon", "sgd"] = key("adamw", "`muon` is for the hidden matrices; the rest gets AdamW")
    lr: float = key(6e-4, "peak learning rate")
    weight_decay: float = key(0.1, "decay of matrices and embeddings, never of biases and norms; decoupled, but for `sgd`")
    betas: tuple[float, float] = key((0.9, 0.95), "AdamW's two")
    eps: float = key(1e-8, "AdamW's epsilon")
    momentum: float | None = key(None, "Muon's (default 0.95) or SGD's (default 0)")
    grad_clip: float = key(1.0, "largest global gradient norm; 0 never clips")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = key("cosine", "after the warm-up; `wsd` holds, then falls linearly")
    warmup_steps: int = key(0, "updates of linear warm-up")
    decay_fraction: float = key(0.2, "share of the updates in which `wsd` falls")
    min_lr_ratio: float = key(0.1, "the last update's learning rate, as a share of the peak")


@dataclass(frozen=True)
class Train:
    max_steps: int | None = key(None, "end after so many updates")
    max_tokens: int | None = key(None, "or after so many tokens")
    epochs: float | None = key(None, "or after so many passes over the data; of several sets, so many times their tokens together")
    log_every: int = key(10, "updates between log lines", free=True)
    eval_every: int = key(250, "updates between evaluations (and at 0 and the end); 0 never evaluates", free=True)
    eval_tokens: int | None = key(None, "tokens of the validation split to evaluate on (default: all)", free=True)
    checkpoint_every: int = key(1000, "updates between checkpoints (and at the end); 0 only at the end", free=True)
    async_checkpoint: bool = key(True, "write checkpoints while training goes on, from a copy in host memory", free=True)
    keep_last: int = key(2, "newest checkpoints to keep", free=True)
    keep_every: int = key(0, "keep for ever each checkpoint whose step is a multiple of this", free=True)
    sample_every: int = key(0, "updates between printed samples; 0 prints none", free=True)
    sample_prompt: str = key("", "what a printed sample continues; empty starts a new document", free=True)
    compile: Literal["auto", "off", "block", "whole"] = key("auto", "torch.compile: each block, or the whole model", free=True)
    nonfinite: Literal["stop", "skip", "rollback"] = key(
        "stop", "after an update with a NaN or infinite gradient (never applied): end, go on, or go back to the last checkpoint and past these windows",
        free=True,
    )  # fmt: skip
    spike: float = key(
        0.0, "go back as well after a loss so many robust standard deviations above the 128 before it; 0 never does", free=True
    )
    rollbacks: int = key(3, "go back at most so often", free=True)
    check_replicas_every: int = key(0, "updates between comparisons of the replicas' weights, bit by bit; 0 never compares", free=True)
    time_limit: str | None = key(
        None, "stop with a checkpoint before the launch is so old: `3h50m`, `45m`, `1d12h`; what saving takes is allowed for", free=True
    )
    hang_timeout: float = key(1800.0, "seconds without a finished step after which stacks are dumped and the run ends; 0 waits", free=True)
    profile: str | None = key(
        None, "`'START:STEPS'`: trace so many updates after update START into `logs/` (Perfetto), on GPUs with a memory snapshot", free=True
    )
    step_parts: bool = key(
        False,
        "after the last update, time a few more part by part, with their communication and without it, into `step_parts.json`",
        free=True,
    )


@dataclass(frozen=True)
class Strategy:
    name: str = key(
        "auto",
        "how the work is spread over processes; `auto`: what the launch asks for, else `ddp` or `single`",
        free=True,
    )
    options: Mapping[str, Any] = key({}, "the strategy's own options", free=True)
    shard_size: int | None = key(None, "`hsdp`: processes that share one copy (default: those of a node, or half of them)", free=True)
    replicas: int | None = key(
        None, "local methods: copies that train apart, each one or more processes (default: one per process)", free=True
    )
    simulate: int | None = key(
        None, "local methods: train so many replicas in turn in one process, for learning and not for speed", free=True
    )


@dataclass(frozen=True)
class Track:
    wandb: Literal["off", "offline", "online"] = key("off", "Weights & Biases", free=True)
    tensorboard: bool = key(False, "TensorBoard files in the run folder's `logs/`", free=True)
    project: str = key("pretrain", "the W&B project", free=True)
    tags: tuple[str, ...] = key((), "W&B tags", free=True)


@dataclass(frozen=True)
class Network:
    """Links between processes, as `compare.network` makes them."""

    bandwidth_gbit: float | None = None  # each way, of each process; None: as fast as it is
    latency_ms: float = 0.0  # one way


@dataclass(frozen=True)
class Compare:
    """Read by `pretrain compare`; of a single run, `network` alone means something."""

    dir: str = key("runs/compare", "the comparison's folder: its runs and its report", free=True)
    kind: Literal["speed", "learning"] = key(
        "speed", "`speed`: few updates, several times, in turn; `learning`: the same tokens for every member and several seeds", free=True
    )
    members: tuple[Mapping[str, Any], ...] = key(
        (), "what is compared: `{name, any section.key, grid: {section.key: [values]}, processes}`", free=True
    )
    best_of: Mapping[str, Any] = key({}, "`section.key: [values]` that every member tries; each is reported at its best", free=True)
    seeds: tuple[int, ...] = key((), "values of `run.seed` (default: the one of `run`)", free=True)
    precisions: tuple[Literal["fp32", "bf16", "fp16"], ...] = key((), "values of `run.precision` (default: the one of `run`)", free=True)
    processes: tuple[int, ...] = key((), "numbers of processes (default: one per GPU, or 2)", free=True)
    accumulation: tuple[int, ...] = key((), "micro-batches per update and process (default: as `batch.micro` has it)", free=True)
    scaling: Literal["strong", "weak"] = key(
        "strong", "over numbers of processes, `batch.tokens` stays (`strong`), or is per process (`weak`)", free=True
    )
    repetitions: int = key(3, "`speed`: launches of every member, in turn", free=True)
    skip_steps: int = key(5, "`speed`: first updates of a launch, which are not counted", free=True)
    network: Network | None = key(  # noqa: RUF009 — None is no default to share
        None, "`{bandwidth_gbit, latency_ms}`: emulate such links between the processes of this machine", free=True
    )


@dataclass(frozen=True)
class Config:
    run: Run = field(default_factory=Run)
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    batch: Batch = field(default_factory=Batch)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    strategy: Strategy = field(default_factory=Strategy)
    track: Track = field(default_factory=Track)
    compare: Compare = field(default_factory=Compare)

    @property
    def init_seed(self) -> int:
        return self.run.seed if self.run.init_seed is None else self.run.init_seed

    @property
    def data_seed(self) -> int:
        return self.run.seed if self.run.data_seed is None else self.run.data_seed

    @property
    def shape(self) -> tuple[int, int, int]:
        """(n_layer, n_head, n_embd)."""
        m = self.model
        return PRESETS[m.preset] if m.preset else (m.n_layer or 0, m.n_head or 0, m.n_embd or 0)

    @property
    def folder(self) -> Path:
        return Path(self.run.dir) / self.run.name


@dataclass(frozen=True)
class Layout:
    """The batch numbers that follow from the config, the world size and the length of the data. A window is one sequence."""

    world_size: int
    micro: int
    accumulation: int
    sequence_length: int
    steps: int  # updates to the end of the run: the horizon of the schedule
    last_position: int | None  # windows after which it ends, the last update being short if need be; None: it ends by steps

    @property
    def windows(self) -> int:
        """Windows per update."""
        return self.world_size * self.micro * self.accumulation

    def finished(self, step: int, position: int) -> bool:
        return step >= self.steps if self.last_position is None else position >= self.last_position


def layout(cfg: Config, world_size: int, windows_per_epoch: int) -> Layout:
    """Raises ConfigError where `batch.tokens` does not divide, or where the schedule does not fit into the run."""
    T, micro = cfg.data.sequence_length, cfg.batch.micro
    unit = T * micro * world_size
    if cfg.batch.tokens % unit:
        below, above = cfg.batch.tokens // unit * unit, (cfg.batch.tokens // unit + 1) * unit
        nearest = " or ".join(f"batch.tokens={n}" for n in (below, above) if n)
        raise ConfigError(
            f"batch.tokens={cfg.batch.tokens:,} does not divide into {world_size} ranks × {micro} sequences × {T:,} tokens = {unit:,}"
            f"; write {nearest}" + _micro_that_divides(cfg.batch.tokens, T, micro, world_size)
        )
    windows = cfg.batch.tokens // T
    if cfg.train.max_steps is not None:
        steps, last = cfg.train.max_steps, None
    else:
        wanted = (cfg.train.epochs or 0) * windows_per_epoch if cfg.train.max_tokens is None else cfg.train.max_tokens / T
        last = max(1, round(wanted))
        steps = -(-last // windows)
    if cfg.optim.warmup_steps > steps:
        raise ConfigError(
            f"optim.warmup_steps={cfg.optim.warmup_steps:,} is longer than the run ({steps:,} updates); write optim.warmup_steps={steps // 10}"
        )
    return Layout(world_size, micro, cfg.batch.tokens // unit, T, steps, last)


def smaller_micro(cfg: Config, world_size: int) -> int | None:
    """The largest `batch.micro` below the present one that divides the batch: what to try when memory runs out. None below 1."""
    return largest_micro(cfg.batch.tokens // (cfg.data.sequence_length * world_size), cfg.batch.micro - 1)


def largest_micro(sequences: int, most: int) -> int | None:
    """Of the micro-batches up to `most` into which a process's sequences divide; None below 1."""
    return max((m for m in range(1, most + 1) if sequences % m == 0), default=None)


def _micro_that_divides(tokens: int, T: int, micro: int, world_size: int) -> str:
    if tokens % (T * world_size):
        return ""
    per_rank = tokens // (T * world_size)
    nearest = min((d for d in range(1, per_rank + 1) if per_rank % d == 0), key=lambda d: (abs(d - micro), d))
    return f", or keep the batch with batch.micro={nearest}"


def load(path: str | Path, overrides: Sequence[str] = (), options: Mapping[str, type] | None = None) -> Config:
    """Read a YAML file and `section.key=value` overrides. `options` maps strategy names to their `Options` dataclasses.

    Raises ConfigError with one line per mistake: dotted path, what was found, what would be right.
    """
    path = Path(path)
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: a folder, not a config file") from None
    except Exception as error:  # yaml raises a dozen classes; all of them mean that the file is not valid YAML
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected sections such as `data:` and `train:`, found {type(loaded).__name__}")

    errors: list[str] = []
    tree: dict[str, Any] = {}
    for section, content in ((str(k), v) for k, v in loaded.items()):
        if isinstance(content, Mapping):
            for name, value in content.items():
                tree[f"{section}.{name}"] = value
        elif content is not None:
            errors.append(f"{section}: expected a section of keys, found {content!r}")
    for override in overrides:
        _read_override(override, tree, errors)

    sections = {f.name: _build_section(f.name, typing.get_type_hints(Config)[f.name], tree, errors) for f in dataclasses.fields(Config)}
    known = [f"{f.name}.{k.name}" for f in dataclasses.fields(Config) for k in dataclasses.fields(sections[f.name])]
    errors += [f"{name}: unknown key{_nearest(name, known)}" for name in tree if name not in known]
    cfg = Config(**sections)
    if not cfg.run.name:
        cfg = replace(cfg, "run.name", path.stem)
    wrong = {error.partition(":")[0] for error in errors}
    errors += [found for found in _contradictions(cfg) if (key := found.partition(":")[0]) not in wrong or "." not in key]
    errors += _check_options(cfg, options or {})
    if errors:
        raise ConfigError("\n".join(errors))
    return cfg


def replace(cfg: Config, dotted: str, value: Any) -> Config:
    section, name = dotted.split(".")
    return dataclasses.replace(cfg, **{section: dataclasses.replace(getattr(cfg, section), **{name: value})})


def build_options(cls: type, given: Mapping[str, Any]) -> Any:
    """A strategy's `Options` from `strategy.options`; its class may have `limits`: name -> (least, most). Raises ConfigError, one line per mistake."""
    errors: list[str] = []
    known = [f.name for f in dataclasses.fields(cls)]
    errors += [f"strategy.options.{name}: unknown key{_nearest(name, known)}" for name in given if name not in known]
    built = _build_section("strategy.options", cls, {f"strategy.options.{k}": v for k, v in given.items()}, errors)
    for name, (least, most) in getattr(cls, "limits", {}).items():
        value = getattr(built, name)
        if value is not None and not least <= value <= most:
            allowed = f"must be {least:g} or more" if most == math.inf else f"must lie between {least:g} and {most:g}"
            errors.append(f"strategy.options.{name}: {allowed}, found {value}")
    if errors:
        raise ConfigError("\n".join(errors))
    return built


def to_dict(cfg: Any) -> Any:
    """Plain YAML-able values, as `config.yaml` holds them."""
    if dataclasses.is_dataclass(cfg):
        return {f.name: to_dict(getattr(cfg, f.name)) for f in dataclasses.fields(cfg)}
    if isinstance(cfg, Mapping):
        return {k: to_dict(v) for k, v in cfg.items()}
    return [to_dict(v) for v in cfg] if isinstance(cfg, tuple | list) else cfg


def as_run(cfg: Config) -> dict[str, Any]:
    """`to_dict` of a single run, to which of a comparison only its network matters."""
    sections: dict[str, Any] = to_dict(cfg)
    network = sections.pop("compare")["network"]
    return sections | ({"compare": {"network": network}} if network else {})


def identity(cfg: Config) -> dict[str, Any]:
    """The keys that decide what is computed, flat; data sets count by fingerprint, which the checkpoint compares itself."""
    return {
        f"{section.name}.{k.name}": to_dict(getattr(getattr(cfg, section.name), k.name))
        for section in dataclasses.fields(Config)
        for k in dataclasses.fields(getattr(cfg, section.name))
        if not k.metadata["free"] and f"{section.name}.{k.name}" not in ("run.name", "data.train", "data.val")
    }


def identity_hash(cfg: Config) -> str:
    return _hash(identity(cfg))


def everything_hash(cfg: Config) -> str:
    """Of what the ranks of one launch must agree on: every key but where things lie, which may differ between machines."""
    sections = to_dict(cfg)
    del sections["run"]["dir"], sections["data"]["stage_to"]
    for source in (*sections["data"]["train"], *sections["data"]["val"]):
        del source["path"]
    return _hash(sections)


def _hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _read_override(override: str, tree: dict[str, Any], errors: list[str]) -> None:
    name, equals, text = override.partition("=")
    if override.startswith("-"):
        errors.append(f"{override}: write it without --: {override.lstrip('-').replace(' ', '=')}")
    elif not equals or "." not in name:
        errors.append(f"{override}: expected section.key=value, for example train.max_steps=100")
    else:
        if re.fullmatch(r"\d+:\d+", text):
            text = f"'{text}'"  # YAML 1.1 reads 20:5 as a number to the base of sixty
        try:
            value = OmegaConf.to_container(OmegaConf.create(f"value: {text}" if text.strip() else "value: ''"))["value"]  # type: ignore[index,call-overload]
        except Exception:  # as in load
            value = text
        if isinstance(value, bool | int | float) and _is_text(name):
            value = text.strip()  # run.name=007 and run.name=off are names
        mapping = next((key for key in ("strategy.options", "compare.network") if name.startswith(f"{key}.")), None)
        if mapping is None:
            tree[name] = value
        elif isinstance(given := tree.get(mapping) or {}, Mapping):  # anything else is reported when the section is built
            tree[mapping] = {**given, name.removeprefix(f"{mapping}."): value}


def _is_text(dotted: str) -> bool:
    section, _, name = dotted.partition(".")
    keys = typing.get_type_hints(typing.get_type_hints(Config).get(section, object))
    return keys.get(name) in (str, str | None)


def _build_section(prefix: str, cls: type, tree: Mapping[str, Any], errors: list[str]) -> Any:
    hints, values = typing.get_type_hints(cls), {}
    for f in dataclasses.fields(cls):
        name = f"{prefix}.{f.name}"
        if name in tree:
            try:
                values[f.name] = _convert(tree[name], hints[f.name])
            except ValueError as error:
                errors.append(f"{name}: {error}")
    return cls(**values)


def _convert(value: Any, hint: Any) -> Any:
    """`value` as the type `hint`; raises ValueError that says what was expected."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint == tuple[Source, ...]:
        return _convert_sources(value)
    if hint is Network:
        return _convert_network(value)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        *others, last = [a for a in args if a is not type(None)]
        for other in others:
            with contextlib.suppress(ValueError):
                return _convert(value, other)
        return _convert(value, last)
    if origin is Literal:
        if value is False and "off" in args:  # YAML 1.1 reads a bare `off` as a boolean
            value = "off"
        if value not in args:
            raise ValueError(f"expected one of {', '.join(args)}; found {value!r}{_nearest(str(value), args)}")
        return value
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        if args[-1] is Ellipsis:
            return tuple(_convert(v, args[0]) for v in items)
        if len(items) != len(args):
            raise ValueError(f"expected {len(args)} values, found {value!r}")
        return tuple(_convert(v, a) for v, a in zip(items, args, strict=True))
    if hint is bool:
        if (isinstance(value, int) and value in (0, 1)) or str(value).lower() in ("true", "false", "yes", "no", "on", "off"):
            return str(value).lower() in ("true", "1", "yes", "on")
        raise ValueError(f"expected true or false, found {value!r}")
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ValueError(f"expected a finite number, found {value}")
        return float(value)
    if hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    expected = {int: int, float: float, str: str}.get(hint, Mapping)
    if not isinstance(value, expected) or isinstance(value, bool):
        words = {int: "a whole number", float: "a number", str: "text"}.get(hint, "a mapping")
        quoted = "; write it in quotes if it is one" if hint is str and isinstance(value, bool) else ""
        raise ValueError(f"expected {words}, found {value!r}{quoted}")
    return value


def _convert_sources(value: Any) -> tuple[Source, ...]:
    if isinstance(value, str) and value:
        return (Source(value),)
    expected = ValueError(f"expected the path of a prepared set, or a list of paths or of {{path, weight}}; found {value!r}")
    if not isinstance(value, list):
        raise expected
    sources = []
    for item in ({"path": item} if isinstance(item, str) and item else item for item in value):
        if not isinstance(item, Mapping) or set(item) not in ({"path"}, {"path", "weight"}):
            raise expected
        weight = _convert(item["weight"], float) if item.get("weight") is not None else None
        if weight is not None and not weight > 0:
            raise ValueError(f"the weight of {item['path']} must be above 0, found {weight}")
        sources.append(Source(_convert(item["path"], str), weight))
    if len({source.weight is None for source in sources}) > 1:
        raise ValueError("some sets have weights and others have not; give all of them one, or none to mix them by size")
    return tuple(sources)


def _convert_network(value: Any) -> Network:
    if not isinstance(value, Mapping) or not set(value) <= {"bandwidth_gbit", "latency_ms"}:
        raise ValueError(f"expected a mapping of bandwidth_gbit and latency_ms; found {value!r}")
    numbers = {name: None if number is None else _convert(number, float) for name, number in value.items()}
    bandwidth, latency = numbers.get("bandwidth_gbit"), numbers.get("latency_ms") or 0.0
    if (bandwidth is not None and bandwidth <= 0) or latency < 0:
        raise ValueError(f"expected a bandwidth above 0 and a latency of 0 or more; found {value!r}")
    return Network(bandwidth, latency)


def _contradictions(cfg: Config) -> list[str]:
    """Impossible values and combinations, one line each."""
    found = []
    m, t, o = cfg.model, cfg.train, cfg.optim
    if m.preset is not None and m.preset not in PRESETS:
        found.append(f"model.preset: unknown size {m.preset!r}{_nearest(m.preset, PRESETS)}")
    elif m.preset and (m.n_layer or m.n_head or m.n_embd):
        found.append("model.preset: give either a preset or n_layer, n_head and n_embd, not both")
    elif not m.preset and not m.init_from and not (m.n_layer and m.n_head and m.n_embd):
        found.append(f"model: give a preset ({', '.join(PRESETS)}) or all of n_layer, n_head and n_embd")
    elif not m.init_from and cfg.shape[2] % cfg.shape[1]:
        found.append(f"model.n_embd: {cfg.shape[2]} is not divisible by n_head={cfg.shape[1]}")
    if not cfg.data.train:
        found.append("data.train: missing; give the path of a prepared set (pretrain prepare makes one)")
    if sum(x is not None for x in (t.max_steps, t.max_tokens, t.epochs)) != 1:
        found.append("train: give exactly one of max_steps, max_tokens and epochs")
    if any(source.weight is not None for source in cfg.data.val):
        found.append("data.val: every set is evaluated by itself, and weights have no meaning; leave them out")
    positive = {"data.sequence_length", "batch.tokens", "batch.micro", "train.log_every", "train.max_steps", "train.max_tokens",
                "train.epochs", "train.eval_tokens", "train.keep_last", "model.n_layer", "model.n_head", "model.n_embd", "model.vocab_size",
                "strategy.shard_size", "strategy.replicas", "strategy.simulate"}  # fmt: skip
    for name, value in ((n, _get(cfg, n)) for n in sorted(positive)):
        if value is not None and value <= 0:
            found.append(f"{name}: must be above 0, found {value}")
    for name in ("optim.lr", "optim.weight_decay", "optim.grad_clip", "optim.warmup_steps", "optim.eps", "train.eval_every",
                 "train.checkpoint_every", "train.keep_every", "train.sample_every", "train.check_replicas_every", "train.hang_timeout",
                 "train.spike", "train.rollbacks"):  # fmt: skip
        if not _get(cfg, name) >= 0:
            found.append(f"{name}: must not be below 0, found {_get(cfg, name)}")
    for name, value in (
        ("optim.min_lr_ratio", o.min_lr_ratio),
        ("optim.decay_fraction", o.decay_fraction),
        ("model.dropout", m.dropout),
    ):
        if not 0 <= value <= 1:
            found.append(f"{name}: must lie between 0 and 1, found {value}")
    if t.time_limit is not None and duration(t.time_limit) is None:
        found.append(f"train.time_limit: expected a duration such as 3h50m, 45m or 1d12h, found {t.time_limit!r}")
    if t.profile is not None and profile_window(t.profile) is None:
        found.append(f"train.profile: expected START:STEPS in quotes, such as '20:5'; found {t.profile!r}")
    if "/" in cfg.run.name or cfg.run.name in (".", ".."):
        found.append(f"run.name: must be one folder name, found {cfg.run.name!r}; run.dir is where it goes")
    return found


def duration(text: str) -> float | None:
    """Seconds of `1d12h`, `3h50m`, `90s`; None for what is no duration."""
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.strip())
    if not match or not any(match.groups()):
        return None
    return float(sum(int(n or 0) * unit for n, unit in zip(match.groups(), (86400, 3600, 60, 1), strict=True)))


def profile_window(text: str) -> range | None:
    """The updates of `START:STEPS`: START + 1 … START + STEPS; None for what is no window."""
    match = re.fullmatch(r"(\d+):([1-9]\d*)", text.strip())
    return range(int(match[1]) + 1, int(match[1]) + int(match[2]) + 1) if match else None


def _check_options(cfg: Config, options: Mapping[str, type]) -> list[str]:
    if not options:
        return []
    names = ["auto", *options]
    if cfg.strategy.name not in names:
        return [f"strategy.name: unknown strategy {cfg.strategy.name!r}{_nearest(cfg.strategy.name, names)}"]
    if cfg.strategy.name == "auto":
        return ["strategy.options: name the strategy that they are for"] if cfg.strategy.options else []
    try:
        build_options(options[cfg.strategy.name], cfg.strategy.options)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def _get(cfg: Config, dotted: str) -> Any:
    section, name = dotted.split(".")
    return getattr(getattr(cfg, section), name)


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    known = list(known)
    close = [k for k in known if k.split(".")[-1] == name.split(".")[-1]]  # the right key in the wrong section, or without one
    close = close or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
