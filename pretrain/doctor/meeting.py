"""How the ranks of a launch find each other without one: through a key-value store that the first keeps, or the launcher."""

import os
import pickle
import re
import socket
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from pretrain import launch
from pretrain.config import ConfigError

MEASURING = 90.0  # seconds that the measurements of all ranks may take, before who has not reported is named


class NotMet(Exception):
    """The other ranks cannot be reached: the reason."""


@dataclass(frozen=True)
class Place:
    """Which of which processes this one is."""

    world: launch.World
    kind: str  # `alone`, `srun`, `launcher`
    host: str = ""  # where the first rank listens
    port: int = 0


def find_place() -> Place:
    """From the environment of `torchrun` and `accelerate launch`, else of `srun`. Raises ConfigError where that is incomplete."""
    env = os.environ
    if "RANK" in env or "WORLD_SIZE" in env:
        world = launch.read_world()
        if world.size == 1:
            return Place(world, "launcher")
        if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not env.get(name)]:
            raise ConfigError(
                f"WORLD_SIZE={world.size} in the environment, and no {missing[0]}; launchers set both, and without one neither is set"
            )
        return Place(world, "launcher", env["MASTER_ADDR"], _whole("MASTER_PORT"))
    # A batch script and an interactive step have the job's SLURM_NTASKS, and are one process: the step's number of tasks says so.
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and (size := _whole("SLURM_STEP_NUM_TASKS", _whole("SLURM_NTASKS", 1))) > 1:
        world = launch.World(_whole("SLURM_PROCID"), _whole("SLURM_LOCALID", 0), size, _tasks_here(size))
        return Place(world, "srun", _first_host(), 12000 + _whole("SLURM_JOB_ID") % 20000)
    return Place(launch.World(0, 0, 1, 1), "alone")


def _whole(variable: str, default: int | None = None) -> int:
    value = os.environ.get(variable, "" if default is None else str(default))
    if not value.isdigit():
        raise ConfigError(f"{variable}={value!r} in the environment is no whole number; srun and launchers set it")
    return int(value)


def _tasks_here(size: int) -> int:
    """From `4(x2),3` and this node's number."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", str(size))):
        counts += [int(count)] * int(times or 1)
    node = _whole("SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else counts[-1]


def _first_host() -> str:
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    try:
        listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True, timeout=30)
        return _address(listed.stdout.split()[0])
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        if nodes and not set(nodes) & set("[,"):  # one node is its own list
            return nodes
        raise ConfigError(
            f"srun's nodes {nodes!r} cannot be listed: `scontrol show hostnames` failed ({error}); put scontrol on PATH, inside a container too"
        ) from None


def _address(node: str) -> str:
    """Of a node that Slurm may be alone to know by this name."""
    with suppress(OSError):
        socket.getaddrinfo(node, None)
        return node
    shown = subprocess.run(["scontrol", "show", "node", "--oneliner", node], capture_output=True, text=True, timeout=30).stdout
    return next((word.removeprefix("NodeAddr=") for word in shown.split() if word.startswith("NodeAddr=")), node)


class Meeting:
    """Of all ranks, around the store. Every wait has an end."""

    def __init__(self, place: Place, wait: float) -> None:
        """Raises NotMet where the store cannot be made or reached within `wait` seconds."""
        self.place, self.world, self.wait = place, place.world, wait
        self.store: Store | None = None
        self.complete = True  # whether all ranks have come
        if self.world.size == 1:
            return
        keeper = self.world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            store = TCPStore(place.host, place.port, is_master=keeper, timeout=timedelta(seconds=wait), wait_for_workers=False)
        except (DistError, RuntimeError, ValueError) as error:
            raise NotMet(_first_line(error)) from None
        self.store = PrefixStore(f"pretrain doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def facts(self, mine: Any) -> list[Any]:
        """On the first rank everyone's, None of who did not come; elsewhere this rank's alone. Raises NotMet where the first did not answer."""
        if self.store is None:
            return [mine]
        self.put("facts", mine)
        if self.world.rank == 0:
            everyone = self.collect("facts", self.wait, range(self.world.size))
            self.complete = None not in everyone
            self.store.set("complete", "yes" if self.complete else "no")
            return everyone
        try:
            self.store.wait(["complete"], timedelta(seconds=2 * self.wait))
            self.complete = self.store.get("complete") == b"yes"
        except (DistError, RuntimeError):
            raise NotMet("rank 0 did not answer") from None
        return [mine]

    def results(self, mine: Any, everyone: Sequence[Any]) -> list[Any]:
        """On the first rank what each of those who came has measured, None of who did not report; elsewhere this rank's."""
        if self.store is None:
            return [mine]
        self.put("results", mine)
        if self.world.rank:
            return [mine]
        return self.collect("results", MEASURING, [rank for rank, facts in enumerate(everyone) if facts is not None])

    def put(self, what: str, value: Any) -> None:
        assert self.store is not None
        try:
            self.store.set(f"{what}/{self.world.rank}", pickle.dumps(value))  # type: ignore[arg-type]
        except (DistError, RuntimeError):
            raise NotMet("rank 0 has ended") from None

    def collect(self, what: str, seconds: float, ranks: Iterable[int]) -> list[Any]:
        assert self.store is not None
        end, found = time.monotonic() + seconds, []
        for rank in ranks:
            key = f"{what}/{rank}"
            try:
                self.store.wait([key], timedelta(seconds=max(0.01, end - time.monotonic())))
                found.append(pickle.loads(self.store.get(key)))
            except (DistError, RuntimeError):
                found.append(None)
        return found


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
