"""Everything that exists before step 1: data, processes, model, strategy, checkpoint, run folder; or one line why not."""

import math
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pretrain import checkpoint, document_mask, launch, machine, runfolder
from pretrain import model as models
from pretrain.config import Config, Layout, as_run, duration, everything_hash, layout, to_dict
from pretrain.launched import Launched, forget_plugins
from pretrain.loader import Loader, Sets, open_sets
from pretrain.network.emulation import emulate
from pretrain.optim import make_recipe
from pretrain.precision import check_in_use
from pretrain.ranks import agree, set_timeout, together
from pretrain.resume import Progress, Start, check_data, check_model, check_settings, find_start, is_over, length_key
from pretrain.saver import Saver
from pretrain.staging import stage
from pretrain.stopping import StopRequests, TimeLimit
from pretrain.strategies import Strategy, choose
from pretrain.throughput import Clock, peak_flops
from pretrain.tokenization import load_tokenizer
from pretrain.tracking import Tracker

_AFTER_THE_WATCH = 60.0  # seconds: the watch over a step tells more than a collective that times out


class Finished(Exception):
    """The run's last checkpoint is already its end."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


@dataclass
class Job:
    """What travels through the run."""

    cfg: Config
    world: launch.World
    layout: Layout
    sets: Sets
    strategy: Strategy
    model: nn.Module  # as wrapped
    loader: Loader
    clock: Clock
    stops: StopRequests
    status: runfolder.Status
    control: dist.ProcessGroup | None  # CPU group of all ranks; None for one process
    saver: Saver
    described: dict[str, Any]  # model.json
    init_hash: str  # of the weights at step 0
    tracker: Tracker | None  # main process only
    ledger: runfolder.Lines | None  # main process only
    tokenizer: Any  # main process only, None where the set has none
    peak: tuple[str, float] | None
    flops_per_token: float
    compile_mode: str

    @property
    def is_main(self) -> bool:
        return self.world.rank == 0

    def say(self, line: str) -> None:
        if self.is_main:
            say(line)


def say(line: str) -> None:
    """A whole line at once: the checkpoint's thread has something to say, too. The run goes on where nobody listens any more."""
    with suppress(OSError):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def silent(line: str) -> None:
    """What the other ranks say."""


def start(
    cfg: Config, config_file: Path, overrides: list[str], world: launch.World, notes: list[str], stops: StopRequests,
    launched: Launched | None = None,
) -> tuple[Job, Progress]:  # fmt: skip
    """Every rank calls it. Raises ConfigError or ShardError, the same on every rank, for what the user can mend; Finished at the end."""
    began = time.perf_counter()
    cpu_note = machine.prepare_cpu(launch.usable_cores(), world.local_size)
    sets = open_sets(cfg)
    numbers = layout(cfg, world.size, sets.windows_per_epoch)
    device = torch.device(machine.device_type(cfg))
    precision, precision_why = machine.choose_precision(cfg, device)
    strategy = choose(cfg, numbers, precision, launched)
    forget_plugins()
    _set_kernels(cfg)
    device = strategy.make_accelerator(cfg).device
    control, for_saving = (dist.new_group(backend="gloo") if world.size > 1 else None for _ in range(2))
    emulated = emulate(cfg.compare.network, device.type, (control, for_saving))

    _own_folder(cfg, world, control)
    tell = say if world.rank == 0 else silent
    found = _find_start(cfg, numbers, tell, control)
    if world.rank == 0:
        runfolder.Status(cfg.folder, 0).reached(found.progress.step)
    progress, changed = found.progress, check_settings(cfg, found, strategy.identity())

    module, initial = models.outline(cfg, sets.tokenizer["vocab_size"], sets.tokenizer["eos_id"])
    described = models.describe(module, cfg.model.build)
    init_hash, parameters = found.numbers.get("init_hash") or models.weights_hash(module, initial), models.parameter_count(module)
    if initial is not None and found.checkpoint is not None:
        initial = module.padded(lambda name, real: None)  # the checkpoint has them all
    agree(control, {"device": device.type, "config": everything_hash(cfg), "data": sets.fingerprints, "initial weights": init_hash,
                    "code": runfolder.code_hash()})  # fmt: skip
    flops = models.flops_per_token(module, numbers.sequence_length)
    compile_mode, compile_why = machine.choose_compile(cfg, device, precision, flops * cfg.batch.tokens * numbers.steps / world.size)
    if compile_mode != "off":
        models.compile_model(module, compile_mode)
    model, _ = strategy.prepare(module, make_recipe(dict(module.named_parameters()), cfg.optim), initial)
    if found.checkpoint is not None:
        check_data(found, cfg, sets.fingerprints, sets.shares, sets.tokenizer)
        check_model(found, described)
        notes = [*notes, *load(found, cfg, strategy)]
    if cfg.data.stage_to:
        sets = together(control, lambda: stage(sets, cfg.data.stage_to, tell))

    loader = Loader(sets.train, sets.shares, numbers, rank=world.rank, seed=cfg.data_seed,
                    shuffle=cfg.data.shuffle, vocab_size=module.vocab_size, device=device)  # fmt: skip
    saver = Saver(cfg.folder / "checkpoints", for_saving, cfg.train, numbers.steps, tell)
    saver.step, saver.damaged, saver.seconds = progress.step, set(found.damaged), found.numbers.get("save_seconds", 0.0)
    saver.of_main = strategy.buffers().keys()
    saver.records = [cfg.folder / name for name in ("ledger.jsonl", "metrics.jsonl") if world.rank == 0]
    job = Job(cfg, world, numbers, sets, strategy, model, loader, Clock(device, progress.train_seconds), stops, runfolder.Status(cfg.folder, world.rank),
              control, saver, described, init_hash, None, None, None, peak_flops(device, precision, cfg.run.tf32), flops, compile_mode)  # fmt: skip
    facts = {
        "config_file": config_file.stem,
        "overrides": overrides,
        "parameters": parameters,
        "init_hash": init_hash,
        **_facts(job),
        **emulated.facts,
    }
    end = numbers.steps * numbers.windows if numbers.last_position is None else numbers.last_position
    notes = [*notes, *sets.describe_mixture(end), *document_mask.note(module, device),
             f"precision {precision}: {precision_why}", f"compile {compile_mode}: {compile_why}", *strategy.notes(), *emulated.notes,
             *(f"{stream.name}: bare files in the format of {stream.format}, tokenizer {sets.tokenizer['name']}"
               for stream in (*sets.train, *sets.val) if stream.manifest is None),
             *_device_notes(cfg, device, world, strategy.devices // world.size, cpu_note), *(f"changed since the checkpoint: {line}" for line in changed)]  # fmt: skip
    _open(job, found, facts, notes, began)
    return job, progress


def _open(job: Job, found: Start, facts: dict[str, Any], notes: list[str], began: float) -> None:
    """From a job that is made to one that trains: its records, what the user should know of it, and the warm-up."""
    if job.is_main:
        _open_records(job, facts, found)
    job.say("\n".join([_headline(job, facts), *(f"  {note}" for note in notes)]))
    step = found.progress.step
    job.say(f"resuming from {found.checkpoint} at step {step:,}" if found.checkpoint else f"starting at step 0 in {job.cfg.folder}")
    with job.clock.apart("warm-up"):
        facts["in_use"] = warm_up(job)
    if job.cfg.train.hang_timeout:  # start-up and saving may wait long for the slowest; from here on a rank that stays away is lost
        set_timeout(job.cfg.train.hang_timeout + _AFTER_THE_WATCH, leave_out=job.saver.group)
    if job.is_main:
        runfolder.record_config(job.cfg.folder, as_run(job.cfg), facts)
    warming = job.clock.other["warm-up"]
    job.say(f"ready for step {step + 1:,} after {time.perf_counter() - began:.1f}s, of them {warming:.1f}s compiling and warming up")


def _facts(job: Job) -> dict[str, Any]:
    """What config.yaml keeps beside the configuration: what it came to on this machine."""
    return {
        "world_size": job.world.size, "strategy": job.strategy.name, "strategy_options": to_dict(job.strategy.options),
        "precision": job.strategy.precision, "compile": job.compile_mode, "device": _device_name(job.clock.device),
        "threads": torch.get_num_threads(), "tokenizer": job.sets.tokenizer["name"], "fingerprints": job.sets.fingerprints,
        "accumulation": job.layout.accumulation, "steps": job.layout.steps, "versions": _versions(),
    }  # fmt: skip


def _own_folder(cfg: Config, world: launch.World, control: dist.ProcessGroup | None) -> None:
    together(control, lambda: _claim(cfg.folder) if world.rank == 0 else None)
    if world.rank:
        runfolder.join(cfg.folder)
        _send_errors_to(cfg.folder / "logs" / f"rank_{world.rank}.txt")


def _find_start(cfg: Config, numbers: Layout, tell: Callable[[str], None], control: dist.ProcessGroup | None) -> Start:
    found = find_start(cfg, tell, control)
    if is_over(found, cfg, numbers):
        raise Finished(
            f"{cfg.folder} is finished: step {found.progress.step:,}. To train longer: run.resume=must {length_key(cfg)}=MORE; to look: pretrain report {cfg.folder}",
            found.progress.step,
        )
    return found


def load(found: Start, cfg: Config, strategy: Strategy) -> list[str]:
    """Take over a checkpoint of whatever strategy. Returns notes on what of it could not be used."""
    assert found.checkpoint is not None
    numbers, before = found.numbers, found.numbers["identity"]["config"]
    was, now = before["optim.name"], cfg.optim.name
    same = was == now and (now != "sgd" or bool(before["optim.momentum"]) == bool(cfg.optim.momentum))
    theirs, ours = numbers.get("extras"), strategy.extras_kind()
    strategy.restore(checkpoint.Stored(found.checkpoint), moments=same, extras=same and theirs == ours)
    notes = strategy.load_numbers(numbers)
    if not same:
        notes.append(f"the optimiser's states start anew: the checkpoint has those of optim.name={was}")
    if theirs != ours:
        notes.append(f"extras of {theirs or 'nothing'} in the checkpoint, {ours or 'none'} here: going on from its canonical part")
    return notes


def warm_up(job: Job) -> dict[str, str]:
    """One forward and backward whose gradients are thrown away: compiles, and makes DDP order its buckets before the first step of
    every start. It reorders them after its first backward, so that otherwise a resumed run would sum in another order. Returns the dtypes
    that are really in use."""
    torch.manual_seed(0)
    module = job.strategy.module
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    tokens_BT = torch.zeros(job.layout.micro, job.layout.sequence_length, dtype=torch.long, device=job.clock.device)
    targets_BT = tokens_BT.clone()  # not the same tensor twice: a compiler would make a rule of it
    job.strategy.warm_up(tokens_BT, targets_BT)
    in_use = check_in_use(job.strategy, tokens_BT, targets_BT)
    for name, buffer in module.named_buffers():
        if name in before:  # a forward may change it, as it does running statistics, and make others
            buffer.copy_(before[name])
    return in_use


def _claim(folder: Path) -> None:
    """And remove what starts that were killed have left, whatever this one comes to."""
    runfolder.claim(folder)
    try:
        runfolder.Status(folder, 0).write("running")  # over what the last start came to: a failure from here on is this start's
    except OSError as error:
        raise runfolder.cannot_write(folder, error) from None
    checkpoint.clean(folder / "checkpoints")  # what cannot be removed, as on NFS while a lost process has it open, may be at the next start
    runfolder.remove_leftovers(folder)


def _open_records(job: Job, facts: dict[str, Any], found: Start) -> None:
    """The main process's files: config.yaml, code/, metrics cut back to where the run starts, the tokenizer, the trackers."""
    cfg, folder, progress = job.cfg, job.cfg.folder, found.progress
    (folder / "checkpoints").mkdir(exist_ok=True)
    job.ledger = runfolder.Lines(folder / "ledger.jsonl", job.say)
    for line in runfolder.record_config(folder, as_run(cfg), facts):
        job.say(f"changed since the last start: {line}")
    if files := runfolder.record_code(folder):
        job.say(f"code changed since the first start: {', '.join(files)}")
    runfolder.cut_back(folder / "metrics.jsonl", progress.step if progress.step and not found.foreign else -1)
    runfolder.cut_back(folder / "ledger.jsonl", math.inf)
    if found.foreign:
        job.ledger.write(
            {"step": progress.step, "restart": progress.restarts, "position": progress.position, "from": str(found.checkpoint)}
        )
    source = Path(cfg.data.train[0].path) / "tokenizer"
    if source.is_dir() and not (folder / "tokenizer").exists():
        runfolder.copy_whole(source, folder / "tokenizer")
    if cfg.train.sample_every and (folder / "tokenizer").exists():
        job.tokenizer = load_tokenizer(folder)
    job.tracker = Tracker(cfg, facts, progress.step, job.say)
    limit = duration(cfg.train.time_limit) if cfg.train.time_limit else None
    saving = (lambda: job.saver.seconds, job.strategy.save_interval)
    job.stops.watch(folder / "stop", TimeLimit(limit, launch.launch_time(), *saving) if limit else None)


def _headline(job: Job, facts: dict[str, Any]) -> str:
    cfg, L = job.cfg, job.layout
    size = cfg.model.preset or cfg.model.init_from or "×".join(str(n) for n in cfg.shape)
    backend = f" ({dist.get_backend()})" if dist.is_initialized() else ""
    total = cfg.batch.tokens * L.steps if L.last_position is None else L.last_position * L.sequence_length
    return (f"{size} · {facts['parameters'] / 1e6:.1f}M parameters · init {facts['init_hash'][:4]}… · {facts['strategy']} × {job.world.size}{backend} · "
            f"{facts['precision']} · batch {cfg.batch.tokens:,} tokens = {job.world.size} ranks × {L.micro} × {L.accumulation} × {L.sequence_length:,} · "
            f"{L.steps:,} steps = {_count(total)} tokens = {total / L.sequence_length / job.sets.windows_per_epoch:.2f} epochs")  # fmt: skip


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"


def _send_errors_to(path: Path) -> None:
    """Standard error of this rank goes to its own file: the terminal is the main process's."""
    with open(path, "a") as file:
        os.dup2(file.fileno(), 2)


def _set_kernels(cfg: Config) -> None:
    torch.set_float32_matmul_precision("high" if cfg.run.tf32 else "highest")
    if cfg.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _device_notes(cfg: Config, device: torch.device, world: launch.World, of_each: int, cpu_note: str) -> list[str]:
    """`of_each`: devices of one process."""
    if device.type == "cpu":
        return [cpu_note, *machine.unused_gpus(cfg, launch.gpu_files())]
    busy, there = world.local_size * of_each, torch.cuda.device_count()
    return [f"{busy} of {there} GPUs in use"] if device.type == "cuda" and there > busy else []


@cache  # 60 ms
def _versions() -> dict[str, str]:
    return {"python": sys.version.split()[0], **{p: version(p) for p in ("pretrain", "torch", "accelerate", "transformers", "numpy")}}


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()} {platform.machine()}"
