"""What one rank sees of its machine. Nothing is judged here, and nothing that is secret leaves the process."""

import os
import platform
import re
import resource
import shutil
import socket
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
import torch
from omegaconf import OmegaConf
from packaging.requirements import Requirement

from pretrain import launch, machine, runfolder
from pretrain.doctor.folders import Folder, find_folders, nearest
from pretrain.doctor.meeting import Place
from pretrain.doctor.outlook import Outlook, foresee

_SHOWN = re.compile(r"(ACCELERATE|FSDP|PARALLELISM_CONFIG|NCCL|GLOO|PET|TORCH|TORCHELASTIC|SLURM|MASTER|WANDB|HF|CUDA|OMP|MKL|PRETRAIN)_"
                    r"|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|LD_PRELOAD)$")  # fmt: skip
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|JWT")
_CONSTRAINTS = Path(__file__).parents[2] / "scripts" / "constraints.txt"


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    uuid: str
    free_bytes: int | None = None  # of those that this rank would use


@dataclass(frozen=True)
class Facts:
    rank: int = 0
    local_rank: int = 0
    node: str = "here"
    address: str = ""  # what the node's name resolves to there
    kind: str = "alone"  # of launch: `alone`, `srun`, `launcher`
    launched: bool = False  # whether a launcher is the parent
    # Versions, by name; `required` is what our own package says of them, `tested` what a checkout's constraints say.
    versions: dict[str, str] = field(default_factory=dict)
    required: dict[str, str] = field(default_factory=dict)
    tested: dict[str, str] = field(default_factory=dict)
    # Devices
    gpus: tuple[Gpu, ...] = ()
    gpu_devices: int = 0  # that the kernel shows, whatever torch sees
    gpu_error: str = ""
    infiniband: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()  # of the network
    amx: bool = False
    # Limits; None is unlimited
    open_files: int | None = None
    locked_memory: int | None = None
    processes: int | None = None
    core_bytes: int | None = None
    cores: frozenset[int] = frozenset((0,))  # that this process may run on, by number
    cpu_quota: float | None = None  # cores' worth of time that the cgroup gets
    memory_bytes: int = 0
    memory_limit: int | None = None  # of the cgroup
    # Surroundings
    shm_free: int | None = None  # bytes in /dev/shm, where there is one
    environment: dict[str, str] = field(default_factory=dict)
    accelerate_file: str | None = None  # that `accelerate launch` would read unasked
    accelerate_settings: dict[str, str] = field(default_factory=dict)
    compiler: str | None = None
    python_headers: bool = True
    unwritable_caches: tuple[str, ...] = ()
    folders: tuple[Folder, ...] = ()
    outlook: Outlook = field(default_factory=Outlook)


def gather(config_file: str | None, overrides: Sequence[str], place: Place) -> Facts:
    """Of this process. What cannot be found out is left out."""
    accelerate_file = launch._default_config()
    outlook = foresee(config_file, overrides, place)
    required = _required()
    quota, limit = _cgroup()
    gpus, gpu_error = _gpus(place)
    return Facts(
        rank=place.world.rank, local_rank=place.world.local_rank, node=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        address=_address(), kind=place.kind, launched="TORCHELASTIC_RUN_ID" in os.environ or bool(launch._launcher_command()),
        versions=_versions(required), required=required, tested=_tested(),
        gpus=gpus, gpu_devices=launch.gpu_files(), gpu_error=gpu_error,
        infiniband=_names("/sys/class/infiniband"), interfaces=tuple(psutil.net_if_addrs()), amx=machine._has_amx(),
        open_files=_limit(resource.RLIMIT_NOFILE), locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        processes=_limit(resource.RLIMIT_NPROC), core_bytes=_limit(resource.RLIMIT_CORE),
        shm_free=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        cores=frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)),
        cpu_quota=quota, memory_bytes=psutil.virtual_memory().total, memory_limit=limit,
        environment=_environment(), accelerate_file=accelerate_file, accelerate_settings=_accelerate_settings(accelerate_file),
        compiler=next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))), None),
        python_headers=os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")),
        unwritable_caches=_unwritable_caches(), folders=find_folders(outlook), outlook=outlook,
    )  # fmt: skip


def _required() -> dict[str, str]:
    """Package -> the range that pyproject.toml gives it, as installed; optional ones where they are there."""
    found: dict[str, str] = {}
    try:
        lines = requires("pretrain") or []
    except PackageNotFoundError:  # on PYTHONPATH, not installed
        return {}
    for requirement in map(Requirement, lines):
        optional = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        if not optional or (requirement.specifier and _version(requirement.name)):
            found[requirement.name] = str(requirement.specifier)
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _versions(required: dict[str, str]) -> dict[str, str]:
    """Empty for a required package that is not there."""
    found = {
        "python": platform.python_version(),
        "pretrain's code": runfolder.code_hash()[:8],
        **{name: _version(name) for name in required},
    }
    if torch.version.cuda or torch.version.hip:
        found["CUDA" if torch.version.cuda else "ROCm"] = str(torch.version.cuda or torch.version.hip)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists() and (number := re.search(r"\b\d+\.\d+(\.\d+)?\b", driver.read_text())):
        found["driver"] = number[0]
    return found


def _tested() -> dict[str, str]:
    if not _CONSTRAINTS.is_file():
        return {}
    pinned = (line.strip().partition("==") for line in _CONSTRAINTS.read_text("utf-8").splitlines() if not line.startswith("#"))
    return {name.replace("_", "-"): number for name, equals, number in pinned if equals}


def _gpus(place: Place) -> tuple[tuple[Gpu, ...], str]:
    """(those that torch sees, why it sees none)."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            return (), "torch is a build for CPUs"
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            return (), str(error).strip().splitlines()[0]
        return (), ""
    found = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        used = place.world.local_size == 1 or i == place.world.local_rank  # looking takes some of its memory
        free = torch.cuda.mem_get_info(i)[0] if used else None
        found.append(Gpu(p.name, p.total_memory, (p.major, p.minor), str(p.uuid), free))
    return tuple(found), ""


def _address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _names(folder: str) -> tuple[str, ...]:
    return tuple(sorted(os.listdir(folder))) if os.path.isdir(folder) else ()


def _limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _cgroup() -> tuple[float | None, int | None]:
    """(cores' worth of time, bytes of memory) that this process's control groups allow, from its own up to the root's."""
    quotas, limits = [], []
    own = Path("/proc/self/cgroup")
    lines = own.read_text().splitlines() if own.exists() else []
    root = Path("/sys/fs/cgroup")
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers:  # version 1, a tree for each controller
            if "memory" in controllers.split(","):
                limits += _first_numbers(root / "memory", path, "memory.limit_in_bytes")
            continue
        limits += _first_numbers(root, path, "memory.max")
        quotas += [quota / period for quota, period in _pairs(root, path, "cpu.max")]
    sensible = [limit for limit in limits if limit < 1 << 60]  # version 1 writes a huge number for none
    return min(quotas, default=None), min(sensible, default=None)


def _cgroup_files(root: Path, path: str, name: str) -> list[list[str]]:
    """The words of each group's file from `path` up."""
    folder = root / path.lstrip("/")
    files = [level / name for level in (folder, *folder.parents) if level.is_relative_to(root)]
    return [file.read_text().split() for file in files if file.is_file()]


def _first_numbers(root: Path, path: str, name: str) -> list[int]:
    return [int(words[0]) for words in _cgroup_files(root, path, name) if words and words[0].isdigit()]


def _pairs(root: Path, path: str, name: str) -> list[tuple[int, int]]:
    return [(int(words[0]), int(words[1])) for words in _cgroup_files(root, path, name) if len(words) == 2 and words[0].isdigit()]


def _environment() -> dict[str, str]:
    """The variables that decide how processes start and talk; of secrets only that they are set."""
    return {
        name: "(set)" if _SECRET.search(name) else re.sub(r"://[^/@\s]*@", "://…@", value)
        for name, value in sorted(os.environ.items())
        if _SHOWN.match(name) and name != "TORCH_CPP_LOG_LEVEL"  # which is ours
    }


def _accelerate_settings(path: str | None) -> dict[str, str]:
    """What the file that `accelerate launch` reads unasked would decide."""
    if path is None:
        return {}
    try:
        read = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # yaml raises a dozen classes; all of them mean that the file is not valid YAML
        return {"unreadable": str(error).splitlines()[0]}
    keys = ("num_processes", "mixed_precision", "distributed_type")
    return {key: str(read[key]) for key in keys if key in read} if isinstance(read, dict) else {}


def _unwritable_caches() -> tuple[str, ...]:
    """Folders that the compiler and the Hub would write to and cannot."""
    home = os.path.expanduser("~")
    hub = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"), "huggingface")
    triton = os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton")
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.environ.get("TMPDIR") or "/tmp"
    return tuple(folder for folder in (hub, triton, inductor) if not os.access(nearest(folder), os.W_OK | os.X_OK))
