"""Where the time goes, how fast that is, and what it is measured against."""

import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function

# Dense peak FLOP/s with fp32 accumulation: {name: (16-bit, fp32 through TF32 where there is that)}, as the makers' data sheets have them,
# without sparsity. Those of RTX (at boost clock) and MI300X are as others quote their makers: look them up before you publish an MFU.
PEAKS = {
    "B200": (2250e12, 1125e12),
    "H200": (989.4e12, 494.7e12),
    "H100": (989.4e12, 494.7e12),
    "H100 NVL": (835.5e12, 417.5e12),
    "H100 PCIe": (756e12, 378e12),
    "A100": (312e12, 156e12),
    "A100 PCIe": (312e12, 156e12),
    "V100": (125e12, 15.7e12),
    "V100 PCIe": (112e12, 14e12),
    "L40S": (362e12, 183e12),
    "L40": (181e12, 90.5e12),
    "L4": (121e12, 60e12),
    "RTX 4090": (165.2e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12),
    "T4": (65e12, 8.1e12),
    "MI300X": (1307.4e12, 653.7e12),
}
_SAYS_NOTHING = re.compile(r"nvidia|geforce|tesla|amd|instinct|oam|vf|sxm\d?|hbm\d?e?|\d+gb")  # of the peak


def known_as(device_name: str) -> str | None:
    """The row of PEAKS for a name as CUDA reports it. All its words count but maker, socket and memory: a "Laptop GPU", a "D", a "Ti" and a
    slice by MIG are other GPUs."""
    words = {word for word in re.split(r"[ -]+", device_name.lower()) if not _SAYS_NOTHING.fullmatch(word)}
    return next((known for known in PEAKS if set(known.lower().split()) == words), None)


def peak_of(known: str, precision: str, tf32: bool) -> float | None:
    """FLOP/s of dense matrix products; None for fp32 without TF32, which the table does not have."""
    sixteen, fp32 = PEAKS[known]
    if precision == "fp32":
        return fp32 if tf32 else None
    return sixteen


def peak_flops(device: torch.device, precision: str, tf32: bool) -> tuple[str, float] | None:
    """("H100 bf16 989e12", FLOP/s), or None where no peak is known (CPUs, other GPUs): then there is no MFU."""
    known = known_as(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    peak = peak_of(known, precision, tf32) if known else None
    return (f"{known} {precision} {peak / 1e12:.0f}e12", peak) if peak else None


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory that this process ever held: the allocator's on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Clock:
    """Splits the wall clock into training and everything else, so that tokens/s never counts an evaluation or a save."""

    def __init__(self, device: torch.device, train_seconds: float) -> None:
        self.device = device
        self.train_seconds = train_seconds  # cumulative over restarts
        self.other: dict[str, float] = {}  # "evaluation", "checkpoint", "warm-up", "sample": seconds since this start
        self.data_seconds = 0.0  # of the current interval
        self.parts: dict[str, float] | None = None  # seconds of each part of an update, where they are measured
        self._mark = time.perf_counter()
        self._paused = 0.0
        self._apart_since: float | None = None

    def begin(self) -> None:
        """Training starts now: what came before was set-up."""
        self._mark, self._paused, self.data_seconds = time.perf_counter(), 0.0, 0.0

    @contextmanager
    def apart(self, what: str) -> Iterator[None]:
        """Time in here is not training."""
        self._synchronize()
        self._apart_since = start = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            seconds = time.perf_counter() - start
            self._apart_since = None
            self.other[what] = self.other.get(what, 0.0) + seconds
            self._paused += seconds

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of an update, named in traces; the wait for `data` is always timed, others where `parts` asks, which waits for the device."""
        start = self._now()
        with record_function(name):
            yield
        seconds = self._now() - start
        if name == "data":
            self.data_seconds += seconds
        if self.parts is not None:
            self.parts[name] = self.parts.get(name, 0.0) + seconds

    def _now(self) -> float:
        if self.parts is not None:
            self._synchronize()
        return time.perf_counter()

    def interval(self) -> tuple[float, float]:
        """(training seconds, of them waiting for data) since the last call. Call it after the interval's host synchronisation."""
        now = time.perf_counter()
        seconds, data = now - self._mark - self._paused, self.data_seconds
        self._mark, self._paused, self.data_seconds = now, 0.0, 0.0
        self.train_seconds += seconds
        return seconds, data

    def train_seconds_now(self) -> float:
        """Cumulative, up to this moment, or up to where time was set apart, which it still is."""
        now = time.perf_counter() if self._apart_since is None else self._apart_since
        return self.train_seconds + now - self._mark - self._paused

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
