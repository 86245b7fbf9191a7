"""What this machine is told to use: device, precision, compiler, threads and allocator. Rules and no timings, so that a resumed run chooses the same."""

import ctypes
import os
import platform
import shutil

import torch

from pretrain.config import Config, ConfigError

_WORTH_COMPILING = 1e13  # FLOPs of a whole run below which a CPU trains sooner than it compiles


def device_type(cfg: Config) -> str:
    """Raises ConfigError where there is no such device."""
    if cfg.run.device == "cuda" and not torch.cuda.is_available():
        why = "and finds no GPU" if torch.version.cuda else "a build for CPUs"
        raise ConfigError(f"run.device=cuda: torch here is {torch.__version__}, {why}; install its CUDA build, or write run.device=auto")
    if cfg.run.device == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("run.device=mps: torch finds no Apple GPU here; write run.device=auto")
    if cfg.run.device != "auto":
        return cfg.run.device
    if torch.cuda.is_available():
        return "cuda"
    if (allotted := os.environ.get("SLURM_GPUS_ON_NODE", "0")) != "0":
        raise ConfigError(
            f"Slurm allotted GPUs on {platform.node()} ({allotted}), and torch {torch.__version__} can use none of them: "
            f"{'see pretrain doctor' if torch.version.cuda else 'it is a build for CPUs'}; run.device=cpu trains on CPUs all the same"
        )
    return "cpu"


def unused_gpus(cfg: Config, there: int) -> list[str]:
    """A note where a run on the CPU was meant to use the GPUs that are there."""
    if cfg.run.device != "auto" or not there or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return []
    return [f"{there} GPUs are there, and torch {torch.__version__} can use none of them: pretrain doctor says why"]


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


def prepare_cpu(cores: int, processes: int) -> str:
    """One thread per core, shared out over the processes, and an allocator that keeps its pages. Returns what was done.

    torchrun exports OMP_NUM_THREADS=1 for several processes. glibc returns every large block to the kernel and maps it anew at the
    next step, hundreds of megabytes of logits each time; the settings below keep them (mallopt(3)).
    """
    told = os.environ.get("OMP_NUM_THREADS")
    if told is None or (told == "1" and processes > 1 and "PRETRAIN_LAUNCHED" not in os.environ):
        torch.set_num_threads(max(1, cores // processes))
    kept = ""
    if platform.libc_ver()[0] == "glibc" and "MALLOC_MMAP_THRESHOLD_" not in os.environ and not os.environ.get("LD_PRELOAD"):
        mallopt = ctypes.CDLL(None).mallopt
        m_trim_threshold, m_top_pad, m_mmap_max, m_arena_max = -1, -2, -4, -8
        wanted = ((m_mmap_max, 0), (m_trim_threshold, -1), (m_top_pad, 1 << 28), (m_arena_max, 1))
        if all(mallopt(parameter, value) for parameter, value in wanted):
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
