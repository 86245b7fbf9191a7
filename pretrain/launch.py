"""What the launch really is: how many processes, and whether as many as were asked for. Accelerate's launcher falls back in silence; nothing
here does."""

import argparse
import math
import os
from dataclasses import dataclass
from glob import glob

import psutil

from pretrain.config import ConfigError
from pretrain.launched import Launched, settings_without_effect


@dataclass(frozen=True)
class World:
    rank: int
    local_rank: int
    size: int
    local_size: int


def read_world() -> World:
    """From the environment that torchrun and Accelerate's launcher make; one process without it. Raises ConfigError."""
    check_not_side_by_side()
    rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    return World(rank, _number("LOCAL_RANK", rank), size, _number("LOCAL_WORLD_SIZE", size))


def check_not_side_by_side() -> None:
    """Raises ConfigError in several processes that srun or mpirun started without a launcher: each would take itself for the whole run."""
    if has_launcher() or {"RANK", "WORLD_SIZE"} & os.environ.keys():
        return
    for variable in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        if (count := _number(variable, 1)) > 1:
            raise ConfigError(
                f"{count} processes were started side by side ({variable}), and each would train by itself: start one launcher a node (torchrun, "
                f"accelerate launch), as slurm/train.sbatch does; for one process on purpose, unset {variable}"
            )


def _number(variable: str, default: int) -> int:
    value = os.environ.get(variable, str(default))
    if not value.isdigit():
        raise ConfigError(f"{variable}={value} in the environment is no whole number; launchers set it, and without one it is left unset")
    return int(value)


def usable_cores() -> int:
    """Of the machine's, without hyper-threads: those that this process may run on."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return min(cores, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else cores


def gpu_files() -> int:
    """How many NVIDIA GPUs the kernel shows, whether or not torch can use them. Importing torch to ask it takes seconds."""
    return len(glob("/dev/nvidia[0-9]*"))


def has_launcher() -> bool:
    return any(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION", "PRETRAIN_LAUNCHED"))


def is_in_slurm_step() -> bool:
    """Started by slurm/*.sbatch: then Slurm signals every process of the step, some of them several times, and the script repeats it."""
    return os.environ.get("PRETRAIN_LAUNCHED", "").startswith("slurm-")


def launch_time() -> float:
    """When the launch began (UNIX): with a launcher, before this process."""
    process = psutil.Process()
    parent = process.parent() if has_launcher() else None
    return min(process.create_time(), parent.create_time() if parent else math.inf)


def is_orphan() -> bool:
    """Whether the launcher died before we could ask to be told so: what adopted us is init, and no program that starts workers."""
    if not has_launcher():
        return False
    try:
        parent = psutil.Process(os.getppid())
        if parent.pid != 1 and parent.name() != "systemd":  # of a user's session, which adopts what is started in it
            return False
        command = " ".join(parent.cmdline())
    except psutil.Error:
        return True
    return not any(word in command for word in ("python", "accelerate", "torchrun", "pretrain"))


def check_launcher(world: World, launched: Launched | None) -> list[str]:
    """Notes about launcher settings that have no effect. Raises ConfigError where the launch is not what was asked for."""
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
    notes = settings_without_effect(launched)
    if asked is not None and _default_config() and "--config_file" not in " ".join(_launcher_command()):
        notes.insert(0, f"the launcher read {_default_config()} (pass --config_file to choose)")
    return notes


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
