"""The machine that a plan is for: a row of the table, what is here, or what was measured here."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from pretrain.config import ConfigError
from pretrain.plan.gpus import GB, Gpu, find, recognise

_USABLE, _RESERVED = 0.92, 0.5 * GB  # the rest is the CUDA context's, NCCL's and the allocator's, or the interpreter's
LINK_SHARE = 0.8  # of a link's data sheet that a large all-reduce reaches (nccl-tests: 235 of 300 GB/s on A100)
MEMORY_SHARE = 0.85  # of memory bandwidth that element-wise kernels reach
MEASURED_KEYS = ("flops_per_second", "bus_bandwidth", "latency", "memory_bandwidth", "memory_bytes")


@dataclass(frozen=True)
class Measured:
    """What --measured FILE holds; None for what it does not."""

    flops_per_second: float | None = None  # of training, by one process: flops_per_token × its tokens a second
    bus_bandwidth: float | None = None  # bytes a second of all ranks' all-reduce, as `pretrain doctor` measures it
    latency: float | None = None  # seconds of an all-reduce of four bytes, as `pretrain doctor` measures it
    memory_bandwidth: float | None = None  # bytes a second
    memory_bytes: float | None = None  # that one process may use


@dataclass(frozen=True)
class Machine:
    name: str
    device: str  # cuda or cpu
    per_node: int  # processes
    memory: float  # bytes that one process may use
    gpu: Gpu | None = None  # None: no rates but measured ones
    measured: Measured = Measured()
    said: str = ""  # how it is described on the page


def from_table(name: str, per_node: int | None) -> Machine:
    gpu = find(name)
    return Machine(name, "cuda", per_node or gpu.per_node, usable(gpu.memory), gpu)


def here(per_node: int | None) -> Machine:
    """This machine's GPUs, or its CPU: one process each, or as many as are asked for."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        name = torch.cuda.get_device_name(0)
        gpu = recognise(name, properties.total_memory)
        return Machine(name, "cuda", per_node or torch.cuda.device_count(), usable(properties.total_memory), gpu)
    processes = per_node or 1
    return Machine("this CPU", "cpu", processes, usable(psutil.virtual_memory().total / processes))


def with_measured(machine: Machine, file: Path) -> Machine:
    """Raises ConfigError for a file that cannot be read as rates."""
    try:
        found = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--measured {file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--measured {file}: not JSON: {error}") from None
    if not isinstance(found, dict) or not found or set(found) - set(MEASURED_KEYS):
        keys = sorted(set(found) - set(MEASURED_KEYS)) if isinstance(found, dict) else found
        raise ConfigError(f"--measured {file}: expected an object of some of {', '.join(MEASURED_KEYS)}; found {keys!r}")
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"--measured {file}: {key} must be a number above 0, found {value!r}")
    measured = Measured(**found)
    return replace(machine, measured=measured, memory=measured.memory_bytes or machine.memory)


def usable(memory: float) -> float:
    return max(0.0, memory * _USABLE - _RESERVED)
