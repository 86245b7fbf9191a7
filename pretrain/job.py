"""Everything that exists before step 1: data, processes, model, strategy, checkpoint, run folder; or one line why not."""

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn

from pretrain import checkpoint, launch, runfolder
from pretrain import model as models
from pretrain.config import Config, ConfigError, Layout, identity_hash, layout, to_dict
from pretrain.loader import Loader, Sets, open_sets
from pretrain.optim import make_recipe
from pretrain.resume import Progress, check_fits, find_start
from pretrain.stopping import StopRequests
from pretrain.strategies import Strategy, choose
from pretrain.throughput import Clock, peak_flops
from pretrain.tracking import Tracker


class Finished(Exception):
    """The run's last checkpoint is already its end."""


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
    described: dict[str, Any]  # model.json
    tracker: Tracker | None  # main process only
    tokenizer: Any  # main process only, None where the set has none
    peak: tuple[str, float] | None
    flops_per_token: float
    lock: IO[str] | None  # held by the main process for as long as the run lives

    @property
    def is_main(self) -> bool:
        return self.world.rank == 0

    def say(self, line: str) -> None:
        if self.is_main:
            print(line, flush=True)


def start(
    cfg: Config, config_file: Path, overrides: list[str], world: launch.World, notes: list[str], stops: StopRequests
) -> tuple[Job, Progress]:
    """Every rank calls it. Raises ConfigError or ShardError, the same on every rank, for what the user can mend; Finished at the end."""
    began = time.perf_counter()
    cpu_note = launch.prepare_cpu(world)
    sets = open_sets(cfg)
    windows_per_epoch = sum(s.windows(cfg.data.sequence_length) for s in sets.train)
    numbers = layout(cfg, world.size, windows_per_epoch)
    device_type = (
        "cuda"
        if cfg.run.device == "auto" and torch.cuda.is_available()
        else "cpu"
        if cfg.run.device == "auto"
        else cfg.run.device
    )
    precision, precision_why = launch.choose_precision(cfg, torch.device(device_type))
    name, strategy = choose(cfg, world.size, precision)
    _set_kernels(cfg)
    accelerator = strategy.make_accelerator(cfg)
    control = dist.new_group(backend="gloo") if world.size > 1 else None
    say = _printer(world)

    lock = together(control, lambda: runfolder.claim(cfg.folder) if world.rank == 0 else None)
    if world.rank:
        _send_errors_to(cfg.folder / "logs" / f"rank_{world.rank}.txt")
    found = broadcast(control, together(control, lambda: find_start(cfg, say) if world.rank == 0 else None))
    assert found is not None
    progress = found.progress
    if found.checkpoint is not None and numbers.finished(progress.step, progress.position):
        longer = (
            "train.max_steps" if cfg.train.max_steps else "train.max_tokens" if cfg.train.max_tokens else "train.epochs"
        )
        raise Finished(
            f"{cfg.folder} is finished: step {progress.step:,}. To train longer: run.resume=must {longer}=MORE; to look: pretrain report {cfg.folder}"
        )

    module = models.build(cfg, sets.tokenizer["vocab_size"], sets.tokenizer["eos_id"])
    described = models.describe(module, cfg.model.build)
    changed = check_fits(cfg, found, sets.fingerprints, sets.tokenizer, described) if found.checkpoint else []
    init_hash = models.weights_hash(module)
    agree(
        control,
        {
            "config": identity_hash(cfg),
            "data": sets.fingerprints,
            "initial weights": init_hash,
            "code": version("pretrain"),
        },
    )
    parameters, flops = models.parameter_count(module), models.flops_per_token(module, numbers.sequence_length)
    total_flops = flops * cfg.batch.tokens * numbers.steps
    compile_mode, compile_why = launch.choose_compile(cfg, accelerator.device, total_flops)
    if compile_mode != "off":
        models.compile_model(module, compile_mode)
    recipe = make_recipe(dict(module.named_parameters()), cfg.optim)
    model, _ = strategy.prepare(module, recipe)
    if found.checkpoint is not None:
        checkpoint.load(found.checkpoint, strategy.state(), control)
        strategy.load_numbers(found.numbers)

    facts = {
        "config_file": config_file.stem, "overrides": overrides, "world_size": world.size, "strategy": name,
        "strategy_options": to_dict(strategy.options), "precision": precision, "compile": compile_mode, "device": _device_name(accelerator.device),
        "parameters": parameters, "init_hash": init_hash, "threads": torch.get_num_threads(), "tokenizer": sets.tokenizer["name"],
        "fingerprints": sets.fingerprints, "accumulation": numbers.accumulation, "steps": numbers.steps,
        "versions": {"python": sys.version.split()[0], **{p: version(p) for p in ("pretrain", "torch", "accelerate", "transformers", "numpy")}},
    }  # fmt: skip
    clock = Clock(accelerator.device, progress.train_seconds)
    status = runfolder.Status(cfg.folder, world.rank)
    tracker, tokenizer = None, None
    if world.rank == 0:
        tracker, tokenizer = _open_records(cfg, sets, facts, progress, say, status, bool(changed))
        stops.watch(cfg.folder / "stop")
    loader = Loader(sets.train, [s.weight for s in cfg.data.train], numbers, rank=world.rank, seed=cfg.data_seed,
                    shuffle=cfg.data.shuffle, vocab_size=module.vocab_size, device=accelerator.device)  # fmt: skip
    job = Job(cfg, world, numbers, sets, strategy, model, loader, clock, stops, status, control, described, tracker, tokenizer,
              peak_flops(accelerator.device, precision), flops, lock)  # fmt: skip

    say(_headline(job, name, precision, parameters, init_hash, windows_per_epoch))
    for note in (
        *notes,
        f"precision {precision}: {precision_why}",
        f"compile {compile_mode}: {compile_why}",
        *([cpu_note] if device_type == "cpu" else []),
    ):
        say(f"  {note}")
    if torch.cuda.device_count() > world.local_size and device_type == "cuda":
        say(f"  {world.local_size} of {torch.cuda.device_count()} GPUs in use")
    for line in changed:
        say(f"  changed since the checkpoint: {line}")
    say(
        f"resuming from {found.checkpoint} at step {progress.step:,}"
        if found.checkpoint
        else f"starting at step 0 in {cfg.folder}"
    )
    with clock.apart("warm-up"):
        warm_up(job)
    say(
        f"  ready for step {progress.step + 1:,} after {time.perf_counter() - began:.1f}s, of them {clock.other['warm-up']:.1f}s compiling and warming up"
    )
    return job, progress


def warm_up(job: Job) -> None:
    """One forward and backward whose gradients are thrown away: compiles, and makes DDP order its buckets before the first step of
    every start. It reorders them after its first backward, so that otherwise a resumed run would sum in another order."""
    torch.manual_seed(0)
    tokens_BT = torch.zeros(job.layout.micro, job.layout.sequence_length, dtype=torch.long, device=job.clock.device)
    with job.strategy.accumulate(job.model, last=True):
        loss_sum, _ = job.model(tokens_BT, tokens_BT)
        job.strategy.backward(loss_sum / tokens_BT.numel())
    job.strategy.optimizer.zero_grad(set_to_none=True)


def together(group: dist.ProcessGroup | None, act: Callable[[], Any]) -> Any:
    """Run `act` on every rank; what one rank finds wrong, every rank raises."""
    result, problem = None, None
    try:
        result = act()
    except ValueError as error:
        problem = str(error)
    problems: list[Any] = [problem]
    if group is not None:
        problems = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
    for found in problems:
        if found:
            raise ConfigError(found)
    return result


def broadcast(group: dist.ProcessGroup | None, value: Any) -> Any:
    if group is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def agree(group: dist.ProcessGroup | None, facts: dict[str, Any]) -> None:
    """Raises ConfigError, on every rank, when one rank's config, data, code or initial weights differ from rank 0's."""
    if group is None:
        return
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, facts, group=group)
    for rank, theirs in enumerate(everyone):
        for what, value in theirs.items():
            if value != everyone[0][what]:
                raise ConfigError(
                    f"rank {rank} has another {what} than rank 0 ({value}, not {everyone[0][what]}); start every rank from the same files"
                )


def _open_records(cfg: Config, sets: Sets, facts: dict[str, Any], progress: Progress, say: Callable[[str], None],
                  status: runfolder.Status, changed: bool) -> tuple[Tracker, Any]:  # fmt: skip
    """The main process's files: config.yaml, code/, metrics cut back to where the run starts, the tokenizer, the trackers."""
    checkpoint.clean(cfg.folder / "checkpoints")
    for line in runfolder.record_config(cfg.folder, to_dict(cfg), facts):
        say(f"  changed since the last start: {line}")
    if files := runfolder.record_code(cfg.folder):
        say(f"  code changed since the first start: {', '.join(files)}")
    runfolder.cut_back(cfg.folder / "metrics.jsonl", progress.step if progress.step else -1)
    (cfg.folder / "checkpoints").mkdir(exist_ok=True)
    tokenizer_folder = cfg.folder / "tokenizer"
    source = Path(cfg.data.train[0].path) / "tokenizer"
    if source.is_dir() and not tokenizer_folder.exists():
        shutil.copytree(source, tokenizer_folder)
    tokenizer = None
    if cfg.train.sample_every and tokenizer_folder.exists():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    status.write("running", step=progress.step)
    return Tracker(cfg, facts, progress.step, say), tokenizer


def _headline(job: Job, name: str, precision: str, parameters: int, init_hash: str, windows_per_epoch: int) -> str:
    cfg, L = job.cfg, job.layout
    size = cfg.model.preset or cfg.model.init_from or "×".join(str(n) for n in cfg.shape)
    backend = f" ({dist.get_backend()})" if dist.is_initialized() else ""
    total = cfg.batch.tokens * L.steps if L.last_position is None else L.last_position * L.sequence_length
    return (f"{size} · {parameters / 1e6:.1f}M parameters · init {init_hash[:4]}… · {name} × {job.world.size}{backend} · {precision} · "
            f"batch {cfg.batch.tokens:,} tokens = {job.world.size} ranks × {L.micro} × {L.accumulation} × {L.sequence_length:,} · "
            f"{L.steps:,} steps = {_count(total)} tokens = {total / L.sequence_length / windows_per_epoch:.2f} epochs")  # fmt: skip


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"


def _printer(world: launch.World) -> Callable[[str], None]:
    return (lambda line: print(line, flush=True)) if world.rank == 0 else (lambda line: None)


def _send_errors_to(path: Path) -> None:
    """Standard error of this rank goes to its own file: the terminal is the main process's."""
    with open(path, "a") as file:
        os.dup2(file.fileno(), 2)


def _set_kernels(cfg: Config) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = (
        True  # fp32 matrix products keep 10 bits of mantissa on GPUs
    )
    if cfg.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    import platform

    return f"{device.type} {torch.backends.cpu.get_cpu_capability()} {platform.machine()}"
