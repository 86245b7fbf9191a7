"""What the launch really is: processes, precision, threads. Accelerate's launcher falls back in silence; nothing here does."""

import ctypes
import os
import platform
import shutil
from dataclasses import dataclass

import psutil
import torch

from pretrain.config import Config, ConfigError

# Launcher settings that would change the arithmetic if Accelerate read them; ours come from the config alone.
_IGNORED = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("1", "batch.tokens and batch.micro decide the accumulation"),
    "ACCELERATE_DYNAMO_BACKEND": ("NO", "train.compile decides"),
    "ACCELERATE_GRADIENT_CLIPPING": ("none", "optim.grad_clip decides"),
}
_PLUGINS = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)
_WORTH_COMPILING = 1e13  # FLOPs of a whole run below which a CPU trains sooner than it compiles


@dataclass(frozen=True)
class World:
    rank: int
    local_rank: int
    size: int
    local_size: int


def read_world() -> World:
    """From the environment that torchrun and Accelerate's launcher make; one process without it."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    return World(rank, int(os.environ.get("LOCAL_RANK", rank)), size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))


def has_launcher() -> bool:
    return any(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION", "PRETRAIN_LAUNCHED"))


def is_orphan() -> bool:
    """Whether the launcher died before we could ask to be told so: what adopted us is init, and no program that starts workers."""
    if not has_launcher() or os.getppid() != 1:
        return False
    try:
        command = " ".join(psutil.Process(1).cmdline())
    except psutil.Error:
        return True
    return not any(word in command for word in ("python", "accelerate", "torchrun", "pretrain"))


def check_launcher(world: World) -> list[str]:
    """Notes about launcher settings that have no effect. Raises ConfigError where the launch is not what was asked for."""
    asked = _processes_asked_for()
    if asked is not None and asked != world.size:
        raise ConfigError(
            f"accelerate launch was asked for {asked} processes and started {world.size} (on a CPU it does so for --cpu, MULTI_CPU and plain "
            f"--num_processes); write accelerate launch --multi_gpu --num_processes {asked} …, or pretrain train CONFIG -- --num_processes {asked}"
        )
    for name in _PLUGINS:
        if os.environ.get(name, "false").lower() == "true":
            raise ConfigError(
                f"the launcher asks for a plugin ({name}=true) that strategy.name does not name; launch without it, or name its strategy"
            )
    notes = []
    if asked is not None and _default_config() and "--config_file" not in " ".join(_launcher_command()):
        notes.append(f"the launcher read {_default_config()} (pass --config_file to choose)")
    for name, (neutral, why) in _IGNORED.items():
        value = os.environ.get(name, neutral)
        if value.lower() != neutral.lower():
            notes.append(f"{name}={value}, set by the launcher, has no effect: {why}")
    return notes


def device_type(cfg: Config) -> str:
    if cfg.run.device != "auto":
        return cfg.run.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def choose_precision(cfg: Config, device: torch.device) -> tuple[str, str]:
    """(precision, why). A rule and not a timing, so that a resumed run chooses the same. Raises ConfigError on disagreement."""
    told = {"no": None, "": None}.get(raw := os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower(), raw)
    if told not in (None, "bf16", "fp16"):
        raise ConfigError(f"the launcher asks for precision {told!r}; fp32, bf16 and fp16 are here")
    wanted = cfg.run.precision
    if wanted != "auto":
        if told not in (None, wanted):
            raise ConfigError(
                f"the launcher asks for {told} and run.precision for {wanted}; drop one (run.precision=auto takes the launcher's)"
            )
        return _possible(wanted, device), "as configured"
    if told:
        return _possible(told, device), "as the launcher was told"
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
        return ("bf16", "this GPU has it") if native else ("fp32", "this GPU has no bf16")
    if device.type == "cpu" and _has_amx():
        return "bf16", "this CPU has AMX"
    return "fp32", "this CPU has no AMX" if device.type == "cpu" else f"bf16 is untested on {device.type}"


def choose_compile(cfg: Config, device: torch.device, precision: str, total_flops: float) -> tuple[str, str]:
    """(`off`, `block` or `whole`, why). Raises ConfigError where compiling was asked for and cannot be."""
    wanted = cfg.train.compile
    compiler = device.type != "cpu" or any(shutil.which(c) for c in (os.environ.get("CXX", "g++"), "clang++"))
    if wanted == "auto":
        if not compiler:
            return "off", "no C++ compiler was found"
        if device.type == "mps":
            return "off", "untested on mps"
        if device.type == "cpu" and precision == "fp32":
            return "off", "fp32 on a CPU is matrix products, as fast without"
        if device.type == "cpu" and total_flops < _WORTH_COMPILING:
            return "off", "the run is too short to win back the compilation"
        return ("block" if device.type == "cuda" else "whole"), "worth it for this run"
    if wanted != "off" and not compiler:
        raise ConfigError(f"train.compile={wanted} needs a C++ compiler (g++ or clang++ on PATH); install one, or write train.compile=off")
    return wanted, "as configured"


def prepare_cpu(world: World) -> str:
    """One thread per core, shared out over the processes, and an allocator that keeps its pages. Returns what was done.

    torchrun exports OMP_NUM_THREADS=1 for several processes. glibc returns every large block to the kernel and maps it anew at the
    next step, hundreds of megabytes of logits each time; the settings below keep them (mallopt(3)).
    """
    told = os.environ.get("OMP_NUM_THREADS")
    if told is None or (told == "1" and world.size > 1 and "PRETRAIN_LAUNCHED" not in os.environ):
        cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            cores = min(cores, len(os.sched_getaffinity(0)))
        torch.set_num_threads(max(1, cores // world.local_size))
    kept = ""
    if platform.libc_ver()[0] == "glibc" and "MALLOC_MMAP_THRESHOLD_" not in os.environ and not os.environ.get("LD_PRELOAD"):
        mallopt = ctypes.CDLL(None).mallopt
        m_trim_threshold, m_top_pad, m_mmap_max, m_arena_max = -1, -2, -4, -8
        if all(
            [
                mallopt(m_mmap_max, 0),
                mallopt(m_trim_threshold, -1),
                mallopt(m_top_pad, 1 << 28),
                mallopt(m_arena_max, 1),
            ]
        ):
            kept = ", malloc keeps its pages"
    return f"{torch.get_num_threads()} threads per process{kept}"


def _possible(precision: str, device: torch.device) -> str:
    if precision == "bf16" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise ConfigError(
            f"run.precision=bf16: {torch.cuda.get_device_name(device)} has no bf16 arithmetic; write run.precision=fp16 or fp32"
        )
    return precision


def _has_amx() -> bool:
    """Whether oneDNN may use AMX tiles for bf16: the CPU has them and no variable hides them."""
    capped = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "DEFAULT")).upper()
    plain = os.environ.get("ATEN_CPU_CAPABILITY", "").lower() in ("default", "avx2")
    return torch.cpu._is_amx_tile_supported() and not plain and (capped in ("DEFAULT", "ALL") or "AMX" in capped)


def _launcher_command() -> list[str]:
    """The arguments of the `accelerate launch` that is our parent process; empty where it is something else."""
    try:
        command = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return []
    for i, word in enumerate(command):
        if word == "launch" and "accelerate" in " ".join(command[:i]):
            return command[i + 1 :]
        if word.endswith(("accelerate-launch", "commands/launch.py", "accelerate.commands.launch")):
            return command[i + 1 :]
    return []


def _default_config() -> str | None:
    from accelerate.commands.config.config_args import default_config_file

    return default_config_file if os.path.isfile(default_config_file) else None


def _processes_asked_for() -> int | None:
    """What the parent `accelerate launch` was told, by flag or by the config file that it reads; None where nobody said."""
    command = _launcher_command()
    if not command:
        return None
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    try:
        args, _ = launch_command_parser().parse_known_args(command)
        if args.num_processes is not None:
            return int(args.num_processes)
        if args.config_file is not None or (_default_config() and not args.cpu):
            return int(load_config_from_file(args.config_file).num_processes)
    except (SystemExit, ValueError, OSError, TypeError):
        return None
    return None
