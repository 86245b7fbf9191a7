"""Where a run starts: at step 0, or at a checkpoint that fits its config, data and model."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pretrain import checkpoint
from pretrain.config import Config, ConfigError, Layout, identity
from pretrain.order import shares
from pretrain.ranks import broadcast, rank_in, together
from pretrain.runfolder import changed_keys, records_newest_first


@dataclass
class Progress:
    """What has been trained so far. Everything here is in the checkpoint; nothing is recomputed from the step."""

    step: int = 0
    position: int = 0  # windows
    tokens: int = 0
    train_seconds: float = 0.0
    wire_bytes_total: int = 0
    restarts: int = 0
    attempt: int = 0  # retries of the current update
    skipped: int = 0  # updates since the last log line that were refused
    begun_from: str = ""  # the last `run.resume=PATH` of this history
    passed_over: list[list[int]] = field(default_factory=list)  # [first, end) of the windows that a rollback leaves out
    losses: list[float] = field(default_factory=list)  # of the last updates, where spikes are looked for

    @property
    def next_position(self) -> int:
        """Where the next update begins."""
        return past(self.passed_over, self.position)

    def over(self, layout: Layout) -> bool:
        """Whether there is no next update: what a rollback leaves out may have been the last of a run that ends with its data."""
        return layout.finished(self.step, self.next_position)


def length_key(cfg: Config) -> str:
    """The key that says when the run is over."""
    return next(f"train.{key}" for key in ("max_steps", "max_tokens", "epochs") if getattr(cfg.train, key) is not None)


def past(windows: list[list[int]], position: int) -> int:
    """The first position from here on that is not to be passed over."""
    for begin, end in sorted(windows):
        position = end if begin <= position < end else position
    return position


@dataclass
class Start:
    progress: Progress
    checkpoint: Path | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)
    damaged: list[Path] = field(default_factory=list)  # newer checkpoints that were passed over
    foreign: bool = False  # whether the checkpoint is another run's


def find_start(cfg: Config, say: Callable[[str], object], group: dist.ProcessGroup | None = None) -> Start:
    """Every rank calls it. Raises ConfigError, on all, where `run.resume` forbids what is found, or where a checkpoint is asked for and
    none can be used."""
    main = rank_in(group) == 0
    paths, otherwise = broadcast(group, together(group, lambda: _candidates(cfg) if main else ([], "")))
    start, problems = open_first_valid(paths, group) if paths else (Start(Progress()), [])
    for problem in problems if otherwise else ():
        say(f"skipping checkpoint {problem}")
    if start is None:
        raise _none_valid(otherwise, problems)
    progress, ledger = start.progress, cfg.folder / "ledger.jsonl"
    told = (starts_in(ledger), rollbacks_since(ledger, progress.step) if paths else []) if main else (0, [])
    starts, forgotten = broadcast(group, told)
    progress.restarts = max(starts, progress.restarts + 1 if paths else 0)
    if start.checkpoint is not None:
        progress.passed_over += [windows for windows in forgotten if windows not in progress.passed_over]
        start.foreign = _is_foreign(cfg, start.checkpoint)
        progress.begun_from = _path_asked_for(cfg) or progress.begun_from
    return start


def foresee_start(cfg: Config) -> Start:
    """The same in one process, of the newest checkpoint whose descriptions can be read; its tensors are not."""
    paths, otherwise = _candidates(cfg)
    for path in paths:
        with suppress(OSError, ValueError, KeyError, TypeError):
            for name in (checkpoint.MANIFEST, "model.json"):
                checkpoint.read_json(path, name)
            numbers = checkpoint.read_json(path, "state.json")
            return Start(Progress(**numbers["progress"]), path, numbers, foreign=_is_foreign(cfg, path))
    if paths:
        raise _none_valid(otherwise, checkpoint.first_valid(paths)[1])
    return Start(Progress())


def is_over(start: Start, cfg: Config, layout: Layout) -> bool:
    """Whether the run has ended. Raises ConfigError where that would be before it has begun: with another run's checkpoint."""
    over = start.checkpoint is not None and start.progress.over(layout)
    if over and start.foreign:
        raise ConfigError(
            f"run.resume={cfg.run.resume}: {start.checkpoint} is of step {start.progress.step:,}, where this run would end; write {length_key(cfg)}=MORE"
        )
    return over


def _is_foreign(cfg: Config, path: Path) -> bool:
    return path.resolve().parent != (cfg.folder / "checkpoints").resolve()


def _none_valid(otherwise: str, problems: Sequence[str]) -> ConfigError:
    return ConfigError(otherwise or f"run.resume={problems[0]}")


def starts_in(ledger: Path) -> int:
    """How many have taken a step, and their number if they are counted from 0: some ended before a checkpoint that would tell of them."""
    if not ledger.exists():
        return 0
    with open(ledger, "rb") as file:
        return next((entry["restart"] + 1 for _, entry in records_newest_first(file)), 0)


def rollbacks_since(ledger: Path, step: int) -> list[list[int]]:
    """What rollbacks pass over, [first, end) windows, that came after the checkpoint of `step` and before another: no checkpoint tells of
    them. Reads no further back than to that step."""
    found = []
    if ledger.exists():
        with open(ledger, "rb") as file:
            for _, entry in records_newest_first(file):
                if "passed_over" in entry:
                    found.append(entry["passed_over"])
                elif entry["step"] <= step:
                    break
    return found[::-1]


def open_first_valid(paths: list[Path], group: dist.ProcessGroup | None) -> tuple[Start | None, list[str]]:
    """Where the first valid one of these was taken, and what is wrong with those before it. Every rank calls it with the same paths."""
    path, problems = checkpoint.first_valid(paths, group)
    if path is None:
        return None, problems
    numbers = broadcast(group, checkpoint.read_json(path, "state.json") if rank_in(group) == 0 else {})
    return Start(Progress(**numbers["progress"]), path, numbers, paths[: paths.index(path)]), problems


def _candidates(cfg: Config) -> tuple[list[Path], str]:
    """(checkpoints to try one after the other, what to say where none of them is valid, or nothing where it is the one that was asked for)."""
    wanted, folder = cfg.run.resume, cfg.folder / "checkpoints"
    existing = checkpoint.newest_first(folder)
    begins = _path_asked_for(cfg)
    if begins and not any(_begun_from(own) == begins for own in existing):  # the same command goes on, whatever has become of the path
        asked_for, nothing = _from_path(wanted)
        ours = [path for path in existing if path.resolve() in [given.resolve() for given in asked_for]]
        if ours and ours[0] != existing[0]:
            raise ConfigError(
                f"run.resume={wanted}: {existing[0].name} in the same folder is of a later step; delete what you give up, or go on in a new run: run.name=NEW"
            )
        if ours or not existing:  # a path is where a run starts from; once it has checkpoints of its own it goes on from these
            return asked_for, nothing
    if wanted == "never" and existing:
        step = checkpoint.step_of(existing[0])
        raise ConfigError(f"run.resume=never, but {folder} holds step {step:,}; choose another run.name, or delete {cfg.folder}")
    if wanted == "must" and not existing:
        raise ConfigError(f"run.resume=must, but there is no checkpoint in {folder}; run.resume=auto starts from step 0")
    start_over = f"choose another run.name, or delete {cfg.folder} to start over"
    return existing, f"none of the {len(existing)} checkpoints in {folder} is valid; {start_over}"


def _path_asked_for(cfg: Config) -> str:
    return "" if cfg.run.resume in ("auto", "never", "must") else os.path.abspath(cfg.run.resume)


def _begun_from(path: Path) -> str:
    """A checkpoint's; nothing for one that cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return str(checkpoint.read_json(path, "state.json")["progress"].get("begun_from", ""))
    return ""


def _from_path(wanted: str) -> tuple[list[Path], str]:
    """The same for `run.resume=PATH`, a run or a checkpoint."""
    given = Path(wanted)
    if not wanted or not given.is_dir():
        raise ConfigError(f"run.resume={wanted}: no such checkpoint; write auto, never, must, or the path of a run or checkpoint")
    if (given / checkpoint.MANIFEST).exists():
        return [given], ""
    if not (given / "checkpoints").is_dir():
        raise ConfigError(f"run.resume={wanted}: {checkpoint.MANIFEST} is missing: neither a run nor a whole checkpoint")
    found, nothing = checkpoint.newest_first(given / "checkpoints"), f"run.resume={given}: no valid checkpoint in {given / 'checkpoints'}"
    if not found:
        raise ConfigError(nothing)
    return found, nothing


def check_settings(cfg: Config, start: Start, strategy: Mapping[str, Any]) -> list[str]:
    """Keys that differ from the checkpoint's run and are allowed to (run.resume=must, or a path). Raises ConfigError under `auto`.

    strategy: what of it decides what is computed.
    """
    if start.checkpoint is None:
        return []
    theirs = {**identity(Config()), **start.numbers["identity"]["config"]}  # a key that is newer than the checkpoint had its default
    changed = changed_keys({**theirs, **start.numbers["identity"].get("strategy", {})}, {**identity(cfg), **strategy})
    if changed and cfg.run.resume == "auto":
        lines = "\n  ".join(changed)
        raise ConfigError(
            f"{cfg.folder} holds step {start.progress.step:,} of a run with other settings:\n  {lines}\n"
            f"start a new run with run.name=NEW, or go on with the new settings with run.resume=must"
        )
    return changed


def check_data(start: Start, cfg: Config, fingerprints: list[str], mixture: Sequence[Sequence[int]], tokenizer: Mapping[str, Any]) -> None:
    """Raises ConfigError where data, their mixture, order or tokenizer are not the checkpoint's: that is another run, whatever is asked."""
    assert start.checkpoint is not None
    theirs = start.numbers["identity"]
    for what, before, now in (
        ("the training data", theirs["data"], fingerprints),
        ("the tokenizer", theirs["tokenizer"], tokenizer["sha256"]),
    ):
        if before != now:
            raise ConfigError(
                f"{what} is not what {start.checkpoint} was trained on (fingerprint {before}, now {now}); train it in a new run: run.name=NEW"
            )
    order = {**identity(Config()), **theirs["config"], "run.data_seed": start.numbers["seeds"]["data"]}
    ours = {**identity(cfg), "run.data_seed": cfg.data_seed}
    for key in ("run.data_seed", "data.shuffle", "data.sequence_length"):  # another order's position would skip windows, and repeat others
        if order[key] != ours[key]:
            raise ConfigError(
                f"{key} decides which windows come next, and was {order[key]} for {start.checkpoint}, now {ours[key]}: some would come twice in an epoch, "
                f"and others never; write {key}={order[key]}, or train in a new run: run.name=NEW"
            )
    if theirs.get("mixture", shares([1.0])) != mixture:  # likewise
        raise ConfigError(
            f"data.train's weights are not those that {start.checkpoint} was trained with; train the new mixture in a new run: run.name=NEW"
        )


def check_model(start: Start, model: Mapping[str, Any]) -> None:
    """The same for the model, as described."""
    assert start.checkpoint is not None
    described = checkpoint.read_json(start.checkpoint, "model.json")
    shape = ("n_layer", "n_head", "n_embd", "n_positions")
    differ = [
        f"{key} {described['config'][key]} -> {model['config'][key]}" for key in shape if described["config"][key] != model["config"][key]
    ]
    differ += [f"{key} {described[key]} -> {model[key]}" for key in ("vocab_size", "build") if described[key] != model[key]]
    if differ:
        raise ConfigError(f"the model is not the one in {start.checkpoint} ({', '.join(differ)}); train it in a new run: run.name=NEW")
