"""An ordered map over worker processes: bounded in memory, and it neither hangs nor leaves a process behind.

Not a ProcessPoolExecutor: its workers outlive a parent that is killed, and it cannot tell whose work killed a worker. Here each
worker has a pipe of its own, and a pipe ends with the process at its other end.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerDied(RuntimeError):
    """A worker process ended without an answer to `item`."""

    def __init__(self, item: Any, exit_status: int | None) -> None:
        super().__init__(f"a worker process died (exit status {exit_status})")
        self.item = item


def cores() -> int:
    """Those that this process may use, where the system can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(work: Callable[[Item], Result], items: Iterator[Item], workers: int) -> Generator[tuple[Item, Result]]:
    """Each item with its result, in the order of `items`; at most two items for each worker are held at once.

    One worker is this very process. Raises what `work` raises, and WorkerDied.
    """
    if workers == 1:
        yield from ((item, work(item)) for item in items)
        return
    processes: dict[Connection, BaseProcess] = {}
    idle: list[Connection] = []
    busy: dict[Connection, tuple[int, Item]] = {}
    done: dict[int, tuple[Item, Result]] = {}
    sent = given = 0
    try:
        while True:
            while len(busy) < workers and len(busy) + len(done) < 2 * workers and (item := next(items, None)) is not None:
                if not idle:
                    pipe, process = _start(work)
                    processes[pipe] = process
                    idle.append(pipe)
                pipe = idle.pop()
                with contextlib.suppress(OSError):  # the worker is dead: receiving will say so
                    pipe.send(item)
                busy[pipe] = sent, item
                sent += 1
            if given in done:
                yield done.pop(given)
                given += 1
            elif busy:
                pipe = next(pipe for pipe in wait(list(busy)) if isinstance(pipe, Connection))
                number, item = busy.pop(pipe)
                done[number] = item, _receive(pipe, processes[pipe], item)
                idle.append(pipe)
            else:
                return
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def _start(work: Callable[[Any], Any]) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")  # a fork takes along the locks of threads, and our ends of the pipes
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, work), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _serve(pipe: Connection, work: Callable[[Any], Any]) -> None:
    for request in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # these reach all; the parent deals with them
        signal.signal(request, signal.SIG_IGN)
    with contextlib.suppress(EOFError, OSError):
        while True:
            item = pipe.recv()
            try:
                result, error = work(item), None
            except Exception as raised:
                result, error = None, raised
            pipe.send((result, error))


def _receive(pipe: Connection, process: BaseProcess, item: Any) -> Any:
    try:
        result, error = pipe.recv()
    except (EOFError, OSError):
        process.join()
        raise WorkerDied(item, process.exitcode) from None
    if error is not None:
        raise error
    return result
