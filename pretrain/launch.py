"""What the launch really is: processes, precision, threads. Accelerate's launcher falls back in silence; nothing here does."""

import argparse
import ctypes
import json
import os
import platform
import shutil
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from pretrain.config import Config, ConfigError

# Launcher settings that would change the arithmetic if Accelerate read them; ours come from the config alone.
_IGNORED = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("1", "batch.tokens and batch.micro decide the accumulation"),
    "ACCELERATE_DYNAMO_BACKEND": ("NO", "train.compile decides"),
    "ACCELERATE_GRADIENT_CLIPPING": ("none", "optim.grad_clip decides"),
}
_IGNORED_OF_FSDP = {
    "FSDP_OFFLOAD_PARAMS": ("false", "strategy.options.cpu_offload decides"),
    "FSDP_AUTO_WRAP_POLICY": ("TRANSFORMER_BASED_WRAP", "transformer blocks are the units"),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": ("GPT2Block", "transformer blocks are the units"),
    "FSDP_BACKWARD_PREFETCH": ("BACKWARD_PRE", "strategy.options.backward_prefetch decides, in FSDP1 alone"),
    "FSDP_FORWARD_PREFETCH": ("false", "strategy.options decides"),
    "FSDP_USE_ORIG_PARAMS": ("true", "the optimiser needs the parameters' names"),
    "FSDP_STATE_DICT_TYPE": ("SHARDED_STATE_DICT", "checkpoints have one form"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("false", "model.activation_checkpointing decides"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("false", "model.activation_checkpointing decides"),
    "FSDP_IGNORED_MODULES": ("none", "all weights are sharded"),
}
_IGNORED_OF_DEEPSPEED = {
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ("none", "strategy.options.offload_optimizer decides"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("none", "strategy.options decides"),
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": ("false", "checkpoints have one form"),
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": ("none", "GPT-2 has no experts"),
}
# What the launcher exports of its plugins, by the start of the name.
_PLUGIN_VARIABLES = (
    "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG",
    "ACCELERATE_DEEPSPEED_", "ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_GRADIENT_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_",
)  # fmt: skip
_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # FSDP1's, which count from 1
_WORTH_COMPILING = 1e13  # FLOPs of a whole run below which a CPU trains sooner than it compiles


@dataclass(frozen=True)
class World:
    rank: int
    local_rank: int
    size: int
    local_size: int


@dataclass(frozen=True)
class Launched:
    """What the launcher's plugin asks for."""

    strategy: str
    shard_size: int | None = None  # of a mesh


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
    launched = launched_strategy()
    if launched is None and (file := _plugin_file()):
        raise ConfigError(
            f"the launcher's config file {file[0]} asks for {file[1]}, which another of the launcher's flags (--multi_gpu, --cpu, …) turns off; "
            "drop that flag, or the file"
        )
    asked = _processes_asked_for()
    if asked is not None and asked != world.size:
        raise ConfigError(
            f"accelerate launch was asked for {asked} processes and started {world.size} (on a CPU it does so for --cpu, MULTI_CPU and plain "
            f"--num_processes); write accelerate launch --multi_gpu --num_processes {asked} …, or pretrain train CONFIG -- --num_processes {asked}"
        )
    notes = []
    if asked is not None and _default_config() and "--config_file" not in " ".join(_launcher_command()):
        notes.append(f"the launcher read {_default_config()} (pass --config_file to choose)")
    for name, (neutral, why) in _ignored(launched).items():
        value = os.environ.get(name, neutral)
        if value.lower() != neutral.lower():
            notes.append(f"{name}={value}, set by the launcher, has no effect: {why}")
    if _is_on("ACCELERATE_USE_DEEPSPEED") and (keys := _settings(_deepspeed_file())):
        path = os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"]
        notes.append(f"{', '.join(keys)} in {path}, named by the launcher, without effect: the config and strategy.options decide")
    return notes


def launched_strategy() -> Launched | None:
    """The strategy that the launcher's plugin is; None where it names none. Raises ConfigError for a plugin that no strategy here is."""
    if _is_on("ACCELERATE_USE_MEGATRON_LM"):
        raise ConfigError("the launcher asks for Megatron-LM, which is not here; use one of configs/accelerate/*.yaml")
    if _is_on("ACCELERATE_USE_FSDP") and _is_on("ACCELERATE_USE_DEEPSPEED"):
        raise ConfigError("the launcher asks for both FSDP and DeepSpeed (ACCELERATE_USE_FSDP, ACCELERATE_USE_DEEPSPEED); drop one")
    copies, shards = _mesh()
    if _is_on("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION", "1") == "2":
        return _launched_fsdp2(copies, shards)
    if (copies, shards) != (1, 1):
        raise ConfigError(f"the launcher's mesh of {copies} copies × {shards} shards needs FSDP2; use configs/accelerate/hsdp.yaml")
    if _is_on("ACCELERATE_USE_FSDP"):
        return _launched_fsdp1()
    return Launched(f"deepspeed{_zero_stage()}") if _is_on("ACCELERATE_USE_DEEPSPEED") else None


def forget_plugins() -> None:
    """Drop what the launcher exported of its plugins, once `launched_strategy` has read it, and what Accelerate itself has set since.
    It builds a plugin from these variables wherever it is given none (DDP under a launch with FSDP would be wrapped by FSDP), completes
    ours from them where we leave a field out, and transformers loads weights differently when it sees them."""
    for name in [name for name in os.environ if name.startswith(_PLUGIN_VARIABLES)]:
        del os.environ[name]


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


def _is_on(name: str) -> bool:
    return _is_true(os.environ.get(name, "false"))


def _is_true(value: str) -> bool:
    return value.lower() in ("1", "true", "yes", "y", "t", "on")  # as Accelerate reads them


def _mesh() -> tuple[int, int]:
    """(copies, shards of each) that the launcher's ParallelismConfig names; (1, 1) without one."""
    if not _is_on("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return 1, 1
    sizes = {}
    for name in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP"):
        value = os.environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1")
        if not value.isdigit() or int(value) < 1:
            raise ConfigError(f"the launcher's parallelism_config_{name.lower()}_size is {value}; write a whole number above 0")
        sizes[name] = int(value)
    for name, what in (("TP", "tensor"), ("CP", "context"), ("SP", "sequence")):
        if sizes[name] > 1:
            raise ConfigError(
                f"the launcher asks for {what} parallelism (parallelism_config_{name.lower()}_size={sizes[name]}), which is not here: every "
                "strategy is data-parallel; leave it out"
            )
    return sizes["DP_REPLICATE"], sizes["DP_SHARD"]


def _launched_fsdp1() -> Launched:
    sharding = _sharding()
    if sharding not in ("FULL_SHARD", "SHARD_GRAD_OP"):
        instead = {"NO_SHARD": "ddp", "HYBRID_SHARD": "hsdp", "HYBRID_SHARD_ZERO2": "hsdp"}.get(sharding, "fsdp1")
        raise ConfigError(
            f"the launcher asks for FSDP1's {sharding}, which is not here; use strategy {instead} (configs/accelerate/{instead}.yaml)"
        )
    return Launched("fsdp1" if sharding == "FULL_SHARD" else "fsdp1_grad_op")


def _sharding() -> str:
    """FSDP1's. `accelerate config` writes it as fsdp_reshard_after_forward, which Accelerate itself then overlooks."""
    value = os.environ.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD").upper()
    also = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").upper()
    if value in ("FULL_SHARD", "1") and also not in ("TRUE", "FALSE"):
        value = also
    return _SHARDING[int(value) - 1] if value in ("1", "2", "3", "4", "5") else value


def _launched_fsdp2(copies: int, shards: int) -> Launched:
    world = read_world().size
    if copies > 1 and shards == 1:
        raise ConfigError(f"the launcher's mesh has {copies} copies and no shards, which is DDP; use configs/accelerate/ddp.yaml")
    if copies * shards not in ((1, world) if copies == 1 else (world,)):
        raise ConfigError(
            f"the launcher's mesh is {copies} copies × {shards} shards and {world} processes were started; change "
            "--parallelism_config_dp_replicate_size, --parallelism_config_dp_shard_size or --num_processes"
        )
    if copies > 1:
        return Launched("hsdp", shards)
    return Launched("fsdp2" if _is_true(os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true")) else "fsdp2_grad_op")


def _zero_stage() -> int:
    """By DeepSpeed's own file, else by the launcher, else what Accelerate takes."""
    told = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    stage = told or "2"
    if file := _deepspeed_file():
        in_file = str(file.get("zero_optimization", {}).get("stage", 0))
        stage = stage if in_file == "auto" else in_file
        if told not in (None, stage):
            path = os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"]
            raise ConfigError(f"the launcher asks for DeepSpeed's stage {told} and {path} for {stage}; drop one")
    if stage not in ("1", "2", "3"):
        raise ConfigError(f"the launcher asks for DeepSpeed's stage {stage}; 1, 2 and 3 are here (without sharding: strategy.name=ddp)")
    return int(stage)


def _deepspeed_file() -> dict[str, Any]:
    """DeepSpeed's own config file, if the launcher names one."""
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if path == "none":
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}, which the launcher names as DeepSpeed's config file, cannot be read as JSON ({error})") from None
    if not isinstance(found, dict) or not isinstance(found.get("zero_optimization", {}), dict):
        raise ConfigError(f"{path}, which the launcher names as DeepSpeed's config file, is not DeepSpeed's; write zero_optimization.stage")
    return found


def _settings(deepspeed: dict[str, Any]) -> list[str]:
    """The keys of DeepSpeed's config file that say more than the stage."""

    def says(value: Any) -> bool:
        return any(map(says, value.values())) if isinstance(value, dict) else value not in ("auto", "none", None, False)

    flat = {key: value for key, value in deepspeed.items() if key != "zero_optimization"}
    flat |= {f"zero_optimization.{key}": value for key, value in deepspeed.get("zero_optimization", {}).items() if key != "stage"}
    return [key for key, value in flat.items() if says(value) and (key, value) != ("gradient_accumulation_steps", 1)]


def _ignored(launched: Launched | None) -> dict[str, tuple[str, str]]:
    """Settings of the launcher that nothing here takes over: (what is no opinion, what decides instead)."""
    ignored = dict(_IGNORED)
    if _is_on("ACCELERATE_USE_DEEPSPEED"):
        ignored |= _IGNORED_OF_DEEPSPEED
    if launched is None or not _is_on("ACCELERATE_USE_FSDP"):
        return ignored
    ignored |= _IGNORED_OF_FSDP
    if launched.strategy == "hsdp":
        ignored["FSDP_RESHARD_AFTER_FORWARD"] = ("true", "strategy.options.reshard_after_forward decides")
    if not launched.strategy.startswith("fsdp1"):
        ignored["FSDP_SHARDING_STRATEGY"] = ("FULL_SHARD", "in FSDP2 fsdp_reshard_after_forward decides")
    elif os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "false":
        ignored["FSDP_RESHARD_AFTER_FORWARD"] = ("true", "in FSDP1 fsdp_sharding_strategy decides")
    return ignored


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


def _launcher_arguments() -> argparse.Namespace | None:
    """What the parent `accelerate launch` was given; None where there is none."""
    command = _launcher_command()
    if not command:
        return None
    from accelerate.commands.launch import launch_command_parser

    try:
        args: argparse.Namespace = launch_command_parser().parse_known_args(command)[0]
    except SystemExit:
        return None
    return args


def _processes_asked_for() -> int | None:
    """What the parent `accelerate launch` was told, by flag or by the config file that it reads; None where nobody said."""
    args = _launcher_arguments()
    if args is None:
        return None
    from accelerate.commands.config.config_args import load_config_from_file

    try:
        if args.num_processes is not None:
            return int(args.num_processes)
        if args.config_file is not None or (_default_config() and not args.cpu):
            return int(load_config_from_file(args.config_file).num_processes)
    except (ValueError, OSError, TypeError):
        return None
    return None


def _plugin_file() -> tuple[str, str] | None:
    """(--config_file of the parent `accelerate launch`, the plugin that it names), if it names one."""
    args = _launcher_arguments()
    if args is None or args.config_file is None:
        return None
    from accelerate.commands.config.config_args import load_config_from_file

    try:
        kind = str(load_config_from_file(args.config_file).distributed_type.value)
    except (ValueError, OSError, TypeError):
        return None
    return (args.config_file, kind) if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM") else None
