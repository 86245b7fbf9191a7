"""What takes measuring: how fast the ranks' all-reduce is, how far apart their clocks are, how fast their disks are."""

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from pretrain.doctor import folders
from pretrain.doctor.facts import Facts
from pretrain.doctor.meeting import Meeting

_TOGETHER = 40.0  # seconds in which the ranks' collectives must be done
_LARGEST = {"nccl": 1 << 26, "gloo": 1 << 24}  # bytes of an all-reduce
_LOOKING = 4.0  # seconds in which a file that one node has made shows on another,
_ANSWERING = 10.0  # and in which the ranks must say so
_LONG_ENOUGH = 0.1  # seconds of one that need not grow
_ROUNDS = 50


@dataclass(frozen=True)
class AllReduce:
    backend: str
    ranks: int
    latency: float  # seconds of one of four bytes
    bytes: int
    seconds: float

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes a second, as the caller sees it."""
        return self.bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """What each rank sends in a ring, 2(W − 1)/W of the bytes, a second: comparable between numbers of ranks, as nccl-tests defines it."""
        return 2 * (self.ranks - 1) / self.ranks * self.algorithm_bandwidth


@dataclass(frozen=True)
class Measured:
    """By one rank; None and empty for what was not measured."""

    rank: int = 0
    all_reduce: AllReduce | None = None
    clock_offset: float | None = None  # seconds ahead of the first rank's
    clock_resolution: float | None = None
    disks: dict[str, folders.Speed] = field(default_factory=dict)  # by the folder as asked for; the first rank of a node alone
    sees_runs: bool | None = None  # whether its folder of runs is the first rank's
    error: str = ""  # why the collectives failed
    stuck: bool = False  # in one


def measure(meeting: Meeting, facts: Facts) -> Measured:
    """The collectives only where all ranks have come, and in a thread: one that waits for a lost rank cannot be called off."""
    box = [Measured(facts.rank)]

    def together() -> None:
        try:
            box[0] = _together(meeting, facts)
        except Exception as error:  # whatever a network can do to it is a finding
            box[0] = Measured(facts.rank, error=str(error).strip().splitlines()[0] or type(error).__name__)

    sees_runs = None
    if meeting.complete and meeting.store is not None:
        sees_runs = _sees_runs(meeting, facts)
        thread = threading.Thread(target=together, daemon=True)
        thread.start()
        thread.join(_TOGETHER)
        if thread.is_alive():
            box[0] = Measured(facts.rank, error=f"not done in {_TOGETHER:g} s", stuck=True)
    disks = {} if facts.local_rank else {folder.asked: folders.measure(folder) for folder in facts.folders}
    return replace(box[0], disks=disks, sees_runs=sees_runs)


def _sees_runs(meeting: Meeting, facts: Facts) -> bool | None:
    """Whether a file that the first rank makes in its folder of runs shows in this rank's. Its path and inode do not tell: the roots of two
    local disks have the same. None for the first rank, and where it could make none."""
    place = next(folder.place for folder in facts.folders if folder.role == "run")
    if meeting.world.rank == 0:
        try:
            with tempfile.NamedTemporaryFile(prefix=".pretrain-doctor-", dir=place) as file:
                meeting.put("file", os.path.basename(file.name))
                meeting.collect("sees", _ANSWERING, range(1, meeting.world.size))
        except OSError:
            meeting.put("file", None)
        return None
    (name,) = meeting.collect("file", _ANSWERING, [0])
    sees = None if name is None else folders.shows(place, name, _LOOKING)
    meeting.put("sees", sees)
    return sees


def _together(meeting: Meeting, facts: Facts) -> Measured:
    world = meeting.world
    assert meeting.store is not None
    dist.init_process_group("gloo", store=meeting.store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=_TOGETHER))
    try:
        offset, resolution = _clocks(world.size)
        group, device = dist.group.WORLD, torch.device("cpu")
        everyone: list[tuple[str, str]] = [("", "")] * world.size
        index = world.local_rank if world.local_rank < len(facts.gpus) else 0
        mine = facts.gpus[index].uuid if facts.gpus and facts.outlook.device == "cuda" else ""
        dist.all_gather_object(everyone, (facts.node, mine))
        backend = "gloo"
        if all(gpu for _, gpu in everyone) and len(set(everyone)) == world.size:  # NCCL refuses two ranks on one GPU
            device, backend = torch.device("cuda", index), "nccl"
            torch.cuda.set_device(device)
            group = dist.new_group(backend="nccl", timeout=timedelta(seconds=_TOGETHER))
        found = Measured(world.rank, _all_reduce(group, device, backend, world.size), offset, resolution)
        dist.barrier()
        return found
    finally:
        dist.destroy_process_group()


def _clocks(size: int) -> tuple[float, float]:
    """(seconds that this clock is ahead of the first rank's, how far that may be off): everyone looks at the clock as a barrier opens."""
    times, took = [], []
    for _ in range(11):
        began = time.perf_counter()
        dist.barrier()
        times.append(time.time())
        took.append(time.perf_counter() - began)
    everyone: list[list[float]] = [[] for _ in range(size)]
    dist.all_gather_object(everyone, times)
    ahead = [mine - first for mine, first in zip(times, everyone[0], strict=True)]
    return statistics.median(ahead), statistics.median(took)


def _all_reduce(group: dist.ProcessGroup | None, device: torch.device, backend: str, size: int) -> AllReduce:
    def once(tensor: torch.Tensor) -> Callable[[], object]:
        return lambda: dist.all_reduce(tensor, group=group)

    small = torch.zeros(1, device=device)
    _seconds(once(small), device, 5)  # the first makes the connections
    latency = _seconds(once(small), device, _ROUNDS)
    count = 1 << 20
    while True:  # all ranks go by the slowest's time
        large = torch.zeros(count // 4, device=device)
        _seconds(once(large), device, 1)
        slowest = torch.tensor([_seconds(once(large), device, 5)], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        if count >= _LARGEST[backend] or slowest.item() > _LONG_ENOUGH:
            return AllReduce(backend, size, latency, count, slowest.item())
        count *= 4


def _seconds(act: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The median of so many."""
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - began)
    return statistics.median(took)
