"""Real processes for tests: started once, they run any importable function as the ranks of a fresh gloo group of any smaller size."""

import faulthandler
import gc
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from imported import forking

_DEADLINE = 900.0  # seconds until a function counts as stuck: the parity matrix on 4 ranks takes minutes, more beside another file
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RankError(AssertionError):
    """What the ranks raised: the tracebacks of all of them."""


@dataclass(frozen=True)
class Outcome:
    value: Any = None
    error: str = ""  # last line of the traceback
    trace: str = ""


class Ranks:
    """The same processes for a whole session; what a function leaves behind in one is forgotten before the next."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._stacks = tempfile.TemporaryDirectory()

    def run(self, function: Callable[..., Any], *args: Any, size: int | None = None) -> list[Any]:
        """Each rank's result. The function finds its rank where a launcher would have put it: in the environment."""
        outcomes = self.outcomes(function, *args, size=size)
        if any(outcome.error for outcome in outcomes):
            raise RankError("\n".join(f"rank {rank}: {o.trace}" for rank, o in enumerate(outcomes) if o.error))
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function: Callable[..., Any], *args: Any, size: int | None = None) -> list[Outcome]:
        """The same, with what a rank raised in the place of its result."""
        if not self._processes:
            self._start()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pipes = self._pipes[: size or self.size]
        try:
            for pipe in pipes:
                pipe.send((function, args, len(pipes), port))
        except OSError:
            self.close()
            raise RankError("a rank has died since it answered, of what it ran before; see its standard error") from None
        deadline = time.monotonic() + _DEADLINE
        outcomes: list[Any] = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                stacks = self._where(rank)
                self.close()
                raise RankError(f"rank {rank} gave no answer within {_DEADLINE:.0f} s, those below it did; where it is:\n{stacks}")
            try:
                outcomes.append(pipe.recv())
            except (EOFError, ConnectionError):
                self._processes[rank].join(5)
                status = self._processes[rank].exitcode
                self.close()
                raise RankError(f"rank {rank} died with status {status}; see its standard error") from None
        return outcomes

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _where(self, rank: int) -> str:
        """The stacks of all its threads, which it writes on a signal."""
        dump = Path(self._stacks.name, str(rank))
        os.kill(self._processes[rank].pid, signal.SIGUSR2)
        until = time.monotonic() + 5
        while "Current thread" not in dump.read_text() and time.monotonic() < until:
            time.sleep(0.1)
        return dump.read_text()

    def _start(self) -> None:
        context = forking()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, self._stacks.name), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(rank: int, pipe: Connection, stacks: str) -> None:
    dump = os.open(Path(stacks, str(rank)), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    faulthandler.register(signal.SIGUSR2, dump)
    gc.freeze()  # the modules: a collection would look through all of them
    while True:
        function, args, size, port = pipe.recv()
        values = (rank, rank, size, size, "127.0.0.1", port) if size > 1 else ()
        os.environ.update(dict(zip(_VARIABLES, map(str, values), strict=False)))
        try:
            outcome = Outcome(function(*args))
        except Exception as error:
            lines = traceback.format_exception_only(error)
            outcome = Outcome(None, "".join(lines).strip(), traceback.format_exc())
        _forget()
        pipe.send(outcome)


def _forget() -> None:
    """As in a new process: no group, no accelerator, no locks, no environment of a launcher."""
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from pretrain import groups, runfolder

    held: list[dist.ProcessGroup] = []
    if "deepspeed" in sys.modules:
        import deepspeed

        if deepspeed.comm.is_initialized():
            held = list(dist.distributed_c10d._world.pg_map)  # as in groups.end_all
            deepspeed.comm.destroy_process_group()
        deepspeed.comm.comm.cdb = None
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

        # Stage 3 numbers parameters and modules over all models of a process, and demands that ranks agree.
        deepspeed.zero.Init.param_id = 0
        DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__ = ([0],)
    groups.end_all()
    _clear_sharding_prop_cache()  # these remember meshes of the groups that are gone
    _gen_transform_infos.cache_clear()
    clear_redistribute_planner_cache()
    GradientState._reset_state()
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    for lock in runfolder._owned.values():
        if lock:
            lock.close()
    runfolder._owned.clear()
    for name in _VARIABLES:
        os.environ.pop(name, None)
    gc.collect()
    groups._ended.clear()
    held.clear()
