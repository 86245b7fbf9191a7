"""`train.profile`: traces of a few updates for Perfetto (ui.perfetto.dev) or chrome://tracing, and what can be told from one."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pretrain.throughput import Clock

Span = tuple[float, float]  # microseconds


class Tracer:
    """Around every update: traces those of the window, of this rank, into `folder`."""

    def __init__(self, window: range | None, folder: Path, rank: int, clock: Clock) -> None:
        self.window, self.clock = window or range(0), clock
        self.on_gpu = clock.device.type == "cuda"
        self.trace, self.snapshot = folder / f"trace_rank_{rank}.json.gz", folder / f"memory_rank_{rank}.pickle"
        self._profiler: Any = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        if step in self.window and self._profiler is None:
            self._begin()
        yield
        if self._profiler is not None and step >= self.window[-1]:
            self.end()

    def _begin(self) -> None:
        with self.clock.apart("traces"):
            if self.on_gpu:
                torch.cuda.memory._record_memory_history()
            self._profiler = _profiler()
            self._profiler.start()

    def end(self) -> None:
        """Also where the run ends within the window."""
        if self._profiler is None:
            return
        with self.clock.apart("traces"):
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self.trace))
            self._profiler, self.window = None, range(0)
            if self.on_gpu:
                torch.cuda.memory._dump_snapshot(str(self.snapshot))
                torch.cuda.memory._record_memory_history(enabled=None)


def _profiler() -> profile:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    return profile(activities=activities, record_shapes=True)


@contextmanager
def traced() -> Iterator[profile]:
    with _profiler() as profiler:
        yield profiler


def exposed_seconds(profiler: profile) -> float:
    """Time in which this GPU communicates and does nothing else."""
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False):
            spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    return uncovered(spans[True], spans[False]) / 1e6


def uncovered(of: Iterable[Span], by: Iterable[Span]) -> float:
    """The length of the union of `of` outside the union of `by`."""
    together = merged([*of, *(by := list(by))])
    return sum(end - start for start, end in together) - sum(end - start for start, end in merged(by))


def merged(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
