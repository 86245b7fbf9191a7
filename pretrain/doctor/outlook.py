"""What a launch of a config would come to here, by the very rules that a launch applies; what it would refuse, in the words of the refusal."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from pretrain import launch, machine, runfolder, supervise, tracking
from pretrain import model as models
from pretrain.config import Config, ConfigError, Layout, layout, load
from pretrain.doctor.meeting import Place
from pretrain.launched import Launched, launched_strategy
from pretrain.loader import Sets, open_sets
from pretrain.resume import Start, check_data, check_model, check_settings, foresee_start, is_over
from pretrain.strategies import OPTIONS, Strategy, choose
from pretrain.token_files import ShardError

T = TypeVar("T")


@dataclass(frozen=True)
class Outlook:
    """Empty texts for what is not known."""

    config: str | None = None  # the file, where one was given
    processes: int = 1
    per_node: int = 1
    device: str = "cpu"
    device_asked: bool = False  # by `run.device`
    precision: tuple[str, str] = ("", "")  # (it, why)
    compile: tuple[str, str] = ("", "")
    strategy: str = ""
    threads: str = ""
    parameters: int | None = None
    run_folder: str = ""
    data_files: dict[str, tuple[str, ...]] = field(default_factory=dict)  # set -> its files
    refused: tuple[str, ...] = ()  # a launch would end with each of these
    notes: tuple[str, ...] = ()  # on settings of the launcher that have no effect


def foresee(config_file: str | None, overrides: Sequence[str], place: Place) -> Outlook:
    refused: list[str] = []
    per_node = _per_node(place)
    processes = max(place.world.size, place.world.size // place.world.local_size * per_node)
    cfg = _attempt(refused, lambda: load(config_file, overrides, OPTIONS)) if config_file else Config()
    outlook = Outlook(config_file, processes, per_node, threads=machine.prepare_cpu(launch.usable_cores(), per_node))
    if cfg is None:
        return replace(outlook, refused=tuple(refused))
    launched, notes = _attempt(refused, lambda: _launcher(place, processes)) or (None, [])
    outlook = replace(outlook, device=cfg.run.device, device_asked=cfg.run.device != "auto", notes=tuple(notes))
    kind = _attempt(refused, lambda: machine.device_type(cfg))
    if kind is None:
        return replace(outlook, refused=tuple(refused))
    device, outlook = torch.device(kind), replace(outlook, device=kind)
    precision = _attempt(refused, lambda: machine.choose_precision(cfg, device)) or ("", "")
    flops = math.inf  # without a config: of a run that is long enough
    if config_file:
        outlook, flops = _with_data(replace(outlook, precision=precision), cfg, launched, place.world.rank == 0, refused)
        if place.world.rank == 0 and (owner := runfolder.in_use(cfg.folder)):
            refused.append(owner)
    compile = _attempt(refused, lambda: machine.choose_compile(cfg, device, precision[0], flops)) or ("", "")
    return replace(outlook, precision=precision, compile=compile, refused=tuple(dict.fromkeys(refused)))


def _with_data(outlook: Outlook, cfg: Config, launched: Launched | None, main: bool, refused: list[str]) -> tuple[Outlook, float]:
    """What the data and the model decide, and the FLOPs of one process's share of the run; infinitely many where they are not known."""
    _attempt(refused, lambda: tracking.check(cfg))
    _attempt(refused, lambda: runfolder.check_writable(cfg.folder))
    outlook = replace(outlook, run_folder=cfg.run.dir)
    sets = _attempt(refused, lambda: open_sets(cfg))
    if sets is None:
        return replace(outlook, data_files={source.path: () for source in (*cfg.data.train, *cfg.data.val)}), math.inf
    outlook = replace(outlook, data_files=_files(sets))
    numbers = _attempt(refused, lambda: layout(cfg, outlook.processes, sets.windows_per_epoch))
    if numbers is None:
        return outlook, math.inf
    strategy = _attempt(refused, lambda: choose(cfg, numbers, outlook.precision[0], launched)) if outlook.precision[0] else None
    outlook = replace(outlook, strategy=strategy.name if strategy else "")
    found = _attempt(refused, lambda: _goes_on(cfg, numbers, strategy, sets)) if strategy and main else None  # it looks for all ranks
    if cfg.model.build is not None or cfg.model.init_from is not None:  # whose size shows when they are made, with all their weights
        return outlook, math.inf
    module, _ = models.outline(cfg, sets.tokenizer["vocab_size"], sets.tokenizer["eos_id"])
    if found:
        _attempt(refused, lambda: check_model(found, models.describe(module, cfg.model.build)))
    flops = models.flops_per_token(module, numbers.sequence_length) * cfg.batch.tokens * numbers.steps / outlook.processes
    return replace(outlook, parameters=models.parameter_count(module)), flops


def _goes_on(cfg: Config, numbers: Layout, strategy: Strategy, sets: Sets) -> Start | None:
    """From where a launch would, with a model that fits; None for a run that begins, or is over. Raises ConfigError where it would not."""
    found = foresee_start(cfg)
    if found.checkpoint is None or is_over(found, cfg, numbers):
        return None
    try:
        check_settings(cfg, found, strategy.identity())
    except ConfigError as error:
        held, *keys, way = (line.strip() for line in str(error).splitlines())
        raise ConfigError(f"{held} {', '.join(keys)}; {way}") from None
    check_data(found, cfg, sets.fingerprints, sets.shares, sets.tokenizer)
    return found


def _attempt(refused: list[str], act: Callable[[], T]) -> T | None:
    """Its result; None, with the reason noted, where a launch would be refused."""
    try:
        return act()
    except (ConfigError, ShardError) as error:
        refused += str(error).splitlines()
    except OSError as error:
        refused.append(f"{error.filename}: {error.strerror}")
    return None


def _launcher(place: Place, processes: int) -> tuple[Launched | None, list[str]]:
    launched = launched_strategy(processes)
    return launched, launch.check_launcher(place.world, launched) if launch.has_launcher() else []


def _per_node(place: Place) -> int:
    """Processes on this node: the ranks that a launcher made, or several that `srun` did; alone, and for each node where `srun` started one
    per node, as many as `pretrain train` would start."""
    if place.kind == "launcher" or place.world.local_size > 1:
        return place.world.local_size
    return supervise._processes(())


def _files(sets: Sets) -> dict[str, tuple[str, ...]]:
    """Of each set's folder."""
    found: dict[str, tuple[str, ...]] = {}
    for stream in (*sets.train, *sets.val):
        for shard in stream.shards:
            folder = os.path.dirname(shard.path)
            found[folder] = (*found.get(folder, ()), str(shard.path))
    return found
