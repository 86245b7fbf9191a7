"""What a comparison consists of: the section `compare` turned into launches, each a whole config of its own with a run folder of its own.

A launch is known by the hash of all that decides what it computes and how: another seed, member or repetition, or another name, leaves the
others done.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.config import Config, ConfigError, as_run, build_options, largest_micro, load, replace
from pretrain.strategies import OPTIONS, STRATEGIES

_OWN_KEYS = ("name", "grid", "processes", "baselines")
_LOCAL = ("local_sgd", "diloco")
# What a config may have for local methods, and ddp would refuse.
_ALONE: dict[str, Any] = {"strategy.options": {}, "strategy.replicas": None, "strategy.simulate": None}
# What a local method with M replicas is held against, for the same tokens: name -> (factor on `batch.tokens`, by which
# the updates are divided, whether by ddp).
# Douillard et al. 2023 (arXiv 2311.08105, table 2) have such rows, with one replica's batch as the unit; here the unit is all replicas'.
_BASELINES: dict[str, tuple[Callable[[int], float], bool]] = {
    "same batch": (lambda M: 1.0, True),
    "M × batch": (lambda M: float(M), True),
    "M × updates": (lambda M: 1.0 / M, True),
    "M = 1": (lambda M: 1.0, False),
}

Values = Mapping[str, Any]  # section.key -> value


@dataclass(frozen=True)
class Member:
    """A row of the tables; its launches differ in seed and repetition alone."""

    name: str
    values: dict[str, Any]
    processes: int
    place: str  # where in the config, for messages
    tried: dict[str, Any] = field(default_factory=dict)  # of `best_of`
    group: str = ""  # the name without what is tried
    base: str = ""  # the name without the number of processes

    @property
    def strategy(self) -> str:
        return str(self.values.get("strategy.name"))


@dataclass(frozen=True)
class Launch:
    member: Member
    cfg: Config
    seed: int
    repetition: int

    @property
    def folder(self) -> Path:
        return self.cfg.folder


def members(cfg: Config) -> list[Member]:
    """Raises ConfigError, one line for each mistake."""
    errors: list[str] = []
    found: list[Member] = []
    _check(cfg)
    for number, entry in enumerate(cfg.compare.members):
        place = f"compare.members[{number}]" + (f" ({entry['name']})" if "name" in entry else "")
        try:
            for member in _written(entry, place, cfg):
                found += [member, *(_baselines(member, cfg) if entry.get("baselines") else ())]
        except ConfigError as error:
            errors.append(str(error))
    if errors:
        raise ConfigError("\n".join(errors))
    found = [one for member in found for one in _multiplied(member, cfg)]
    names = [member.name for member in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"compare.members: {len(twice)} names are used twice ({', '.join(twice)}); give each member a name of its own")
    return found


def _check(cfg: Config) -> None:
    """What no member is to blame for."""
    compare, errors = cfg.compare, []
    if not compare.members:
        errors.append("compare.members: missing; write a list such as  - {name: ddp, strategy.name: ddp}")
    if wrong := [key for key, tried in compare.best_of.items() if not isinstance(tried, list | tuple) or not tried]:
        errors.append(f"compare.best_of.{wrong[0]}: expected a list of values to try, found {compare.best_of[wrong[0]]!r}")
    for key, numbers in (("processes", compare.processes), ("accumulation", compare.accumulation), ("repetitions", (compare.repetitions,))):
        if any(number < 1 for number in numbers):
            errors.append(f"compare.{key}: must be above 0, found {min(numbers)}")
    if len(set(compare.seeds)) < len(compare.seeds):
        errors.append(f"compare.seeds: {', '.join(map(str, compare.seeds))}: the same seed twice is the same run")
    if len(compare.seeds) > 1 and None not in (cfg.run.init_seed, cfg.run.data_seed) and not cfg.model.dropout:
        errors.append("compare.seeds: run.init_seed and run.data_seed are given, and every seed would be the same run; leave them out")
    if errors:
        raise ConfigError("\n".join(errors))


def _written(entry: Values, place: str, cfg: Config) -> Iterator[Member]:
    """Every combination of the entry's grid, on every number of processes."""
    name, values, grid, counts = _checked(entry, place, cfg)
    for chosen in itertools.product(*grid.values()):
        own = dict(zip(map(str, grid), chosen, strict=True))
        every = {**values, **own}
        strategy = str(every["strategy.name"])
        if strategy not in STRATEGIES:
            raise ConfigError(f"{place}: strategy.name: expected one of {', '.join(STRATEGIES)}; found {strategy!r}")
        alone = STRATEGIES[strategy].processes[1] == 1 or (strategy in _LOCAL and _value(every, cfg, "strategy.simulate"))
        several = dict.fromkeys((1,) if alone else counts)
        for count in several:
            base = _named(name, own)
            scaled = (
                {"batch.tokens": int(_value(every, cfg, "batch.tokens")) * count // min(several)} if cfg.compare.scaling == "weak" else {}
            )
            yield Member(base + (f" × {count}" if len(several) > 1 else ""), {**every, **scaled}, count, place, base=base)


def _checked(entry: Values, place: str, cfg: Config) -> tuple[str, dict[str, Any], Mapping[str, list[Any]], list[int]]:
    """(name, values, grid, numbers of processes)."""
    if wrong := [key for key in entry if key not in _OWN_KEYS and not re.fullmatch(r"\w+\.\w+(\.\w+)?", str(key))]:
        raise ConfigError(f"{place}: unknown key {wrong[0]!r}; expected {', '.join(_OWN_KEYS)}, or section.key")
    values = {"strategy.name": cfg.strategy.name, **{str(key): value for key, value in entry.items() if key not in _OWN_KEYS}}
    grid, name = entry.get("grid") or {}, str(entry.get("name") or entry.get("strategy.name") or "")
    if not name:
        raise ConfigError(f"{place}: give it a name, or strategy.name")
    if not isinstance(grid, Mapping) or not all(isinstance(tried, list) and tried for tried in grid.values()):
        raise ConfigError(f"{place}: grid: expected section.key: [values], found {grid!r}")
    counts = entry.get("processes", list(cfg.compare.processes) or [_default_processes()])
    counts = counts if isinstance(counts, list) else [counts]
    if not counts or not all(isinstance(count, int) and count > 0 for count in counts):
        raise ConfigError(f"{place}: processes: expected a number above 0, or a list of them; found {counts}")
    return name, values, grid, counts


def _named(name: str, own: Values) -> str:
    return " ".join([name, *(f"{key.rpartition('.')[2]}={_shown(value)}" for key, value in own.items())])


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _baselines(member: Member, cfg: Config) -> Iterator[Member]:
    if member.strategy not in _LOCAL:
        raise ConfigError(f"{member.place}: baselines are for {' and '.join(_LOCAL)}; {member.strategy} trains one copy already")
    simulated, replicas = (_value(member.values, cfg, f"strategy.{key}") for key in ("simulate", "replicas"))
    M, batch, steps = simulated or replicas or member.processes, *_both(member, cfg)
    if batch % M or steps % M:
        raise ConfigError(
            f"{member.place}: baselines: batch.tokens={batch:,} and train.max_steps={steps:,} must be multiples of the {M} replicas, for the same "
            "tokens with more or fewer updates"
        )
    for what, (factor, by_ddp) in _BASELINES.items():
        values = {**member.values, "batch.tokens": round(batch * factor(M)), "train.max_steps": round(steps / factor(M))}
        if by_ddp:
            values = {key: value for key, value in values.items() if not key.startswith("strategy.")}
            values |= {key: none for key, none in _ALONE.items() if _value({}, cfg, key) != none}
            values["strategy.name"] = "ddp" if member.processes > 1 else "single"
        else:
            values |= {"strategy.replicas": 1} if member.processes > 1 else {"strategy.simulate": 1}
        values["batch.micro"] = _micro_that_divides(values, cfg, member.processes)
        yield Member(f"{member.name}: {what}", values, member.processes, member.place, base=f"{member.base}: {what}")


def _both(member: Member, cfg: Config) -> tuple[int, int]:
    steps = _value(member.values, cfg, "train.max_steps")
    if steps is None:
        raise ConfigError(f"{member.place}: baselines need train.max_steps: they have other numbers of updates for the same tokens")
    return int(_value(member.values, cfg, "batch.tokens")), int(steps)


def _micro_that_divides(values: Values, cfg: Config, processes: int) -> int:
    """The largest up to the one that is given: it changes memory and not what is learnt."""
    given = int(_value(values, cfg, "batch.micro"))
    sequences = int(_value(values, cfg, "batch.tokens")) // (int(_value(values, cfg, "data.sequence_length")) * processes)
    return largest_micro(sequences, given) or given


def _value(values: Values, cfg: Config, dotted: str) -> Any:
    """A member's own, or what the config has for all."""
    section, key = dotted.split(".")
    return values[dotted] if dotted in values else getattr(getattr(cfg, section), key)


def _default_processes() -> int:
    import torch

    return torch.cuda.device_count() or 2


def _multiplied(member: Member, cfg: Config) -> Iterator[Member]:
    """× precisions × accumulation × what `best_of` tries."""
    compare = cfg.compare
    for precision in compare.precisions or (None,):
        for accumulation in compare.accumulation or (None,):
            own = dict(member.values)
            name = member.name
            if precision is not None:
                own["run.precision"] = precision
                name += f" {precision}" if len(compare.precisions) > 1 else ""
            if accumulation is not None:
                own["batch.micro"] = _micro(own, cfg, member, accumulation)
                name += f" accumulation {accumulation}" if len(compare.accumulation) > 1 else ""
            for chosen in itertools.product(*compare.best_of.values()):
                tried = dict(zip(map(str, compare.best_of), chosen, strict=True))
                base = member.base + name.removeprefix(member.name)
                yield Member(_named(name, tried), {**own, **tried}, member.processes, member.place, tried, name, _named(base, tried))


def _micro(values: Values, cfg: Config, member: Member, accumulation: int) -> int:
    tokens, T = int(_value(values, cfg, "batch.tokens")), int(_value(values, cfg, "data.sequence_length"))
    sequences, rest = divmod(tokens, T * member.processes * accumulation)
    if rest or not sequences:
        raise ConfigError(
            f"{member.place}: batch.tokens={tokens:,} does not divide into {member.processes} processes × {accumulation} micro-batches of whole "
            f"sequences of {T:,}; change batch.tokens or compare.accumulation"
        )
    return sequences


def launches(config_file: Path, cfg: Config, overrides: Sequence[str], found: Sequence[Member], seeds: Sequence[int]) -> list[Launch]:
    """In the order in which they run: all members once, then all again. Raises ConfigError, one line for each mistake."""
    rounds = [(seed, r) for seed in seeds for r in range(cfg.compare.repetitions if cfg.compare.kind == "speed" else 1)]
    errors: dict[str, None] = {}
    made = []
    for seed, repetition in rounds:
        for member in found:
            values = {**_settings(cfg), **member.values, "run.seed": seed}
            try:
                one = load(config_file, [*overrides, *(f"{key}={json.dumps(value)}" for key, value in values.items())], OPTIONS)
            except ConfigError as error:
                errors |= {f"{member.place}: {line}": None for line in str(error).splitlines()}
                continue
            if cfg.compare.kind == "speed" and (why := _no_speed(one)):
                errors[f"{member.place}: {why}"] = None
            made.append(_launch(one, cfg, member, seed, repetition))
    if errors:
        raise ConfigError("\n".join(errors))
    if cfg.compare.kind == "learning" and not errors:
        _check_tokens(made)
    return made


def _check_tokens(made: Sequence[Launch]) -> None:
    """Losses after other numbers of tokens are no comparison."""
    tokens = {one.member.name: one.cfg.train.max_steps * one.cfg.batch.tokens for one in made if one.cfg.train.max_steps is not None}
    if len(set(tokens.values())) > 1:
        (less, fewest), (more, most) = (pick(tokens.items(), key=lambda item: item[1]) for pick in (min, max))
        raise ConfigError(
            f"compare.kind=learning compares after equal tokens: {less} would see {fewest:,} (train.max_steps × batch.tokens) and {more} {most:,}"
        )


def _settings(cfg: Config) -> dict[str, Any]:
    """What every launch has beside its own: short ones are logged at every update and measured part by part."""
    common: dict[str, Any] = {"track.wandb": cfg.track.wandb}
    if cfg.compare.kind == "speed":
        common |= {"train.step_parts": True, "train.eval_every": 0, "train.checkpoint_every": 0, "train.sample_every": 0}
    return common


def _no_speed(one: Config) -> str:
    """Why no speed would come of it; empty where one does. It is told between two log lines, of a local method whole rounds apart."""
    steps, skip, options = one.train.max_steps, one.compare.skip_steps, OPTIONS[one.strategy.name]
    if steps is None:
        return ""
    every = getattr(build_options(options, one.strategy.options), "sync_every", 1)
    first = next((s for s in range(one.train.log_every, steps, one.train.log_every) if s >= skip and (steps - s) % every == 0), None)
    if first is not None:
        return ""
    rounds = f", a multiple of strategy.options.sync_every={every} before the last update" if every > 1 else ""
    return (
        f"train.max_steps={steps} leaves no log line (train.log_every={one.train.log_every}) after the first {skip} updates{rounds}, and so no speed; "
        f"write train.log_every=1 and train.max_steps={-(-(skip + 1) // every) * every + every}"
    )


def _launch(one: Config, cfg: Config, member: Member, seed: int, repetition: int) -> Launch:
    sections = as_run(one)
    for section, key in (("run", "name"), ("run", "dir"), ("run", "resume")):
        sections[section].pop(key)
    sections.pop("track")
    known = hashlib.sha256(json.dumps([sections, member.processes], sort_keys=True).encode()).hexdigest()[:8]
    name = f"{one.strategy.name}-seed{seed}-{known}" + (f"-r{repetition + 1}" if cfg.compare.kind == "speed" else "")
    one = replace(replace(one, "run.name", name), "run.dir", str(Path(cfg.compare.dir) / "runs"))
    return Launch(member, one, seed, repetition)
