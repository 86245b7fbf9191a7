"""The ranks of a run as forks of one process that has imported everything.

There is no launcher: what its presence decides needs a real launch. Here nobody ends the other ranks when one fails. The `pretrain` command
on one process is a fork, too.
"""

import gc
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from pathlib import Path

from imported import forking
from launching import START

from pretrain import cli, supervise, train

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Forks:
    """Starts them."""

    def __init__(self) -> None:
        self._context = forking()
        self._started: list[ForkedRun] = []

    def start(self, config: Path, *overrides: str, size: int, out: Path, **env: str) -> "ForkedRun":
        """What its ranks say goes to `out`."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        run = ForkedRun(out)
        for rank in range(size):
            values = (rank, rank, size, size, "127.0.0.1", port) if size > 1 else ()
            variables = {**env, **dict(zip(VARIABLES, map(str, values), strict=False))}
            run.ranks.append(self._context.Process(target=_train, args=([str(config), *overrides], variables, out)))
            run.ranks[-1].start()
        self._started.append(run)
        return run

    def pretrain(self, arguments: Sequence[str], cwd: Path) -> tuple[int | None, str, str]:
        """(exit status, standard output, standard error) of the command."""
        out, err = cwd / "forked.out", cwd / "forked.err"
        process = self._context.Process(target=_pretrain, args=(arguments, cwd, out, err))
        process.start()
        process.join()
        return process.exitcode, out.read_text(), err.read_text()

    def close(self) -> None:
        for run in self._started:
            run.kill()


class ForkedRun:
    def __init__(self, out: Path) -> None:
        self.ranks: list[multiprocessing.process.BaseProcess] = []
        self.out = out

    @property
    def said(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    @property
    def statuses(self) -> list[int | None]:
        """By rank; None where it still runs, negative where a signal ended it."""
        return [rank.exitcode for rank in self.ranks]

    @property
    def left(self) -> list[int]:
        """Something to wait for, per rank that still runs."""
        return [rank.sentinel for rank in self.ranks if rank.exitcode is None]

    def wait_for_line(self, text: str, seconds: float = START) -> None:
        self.wait_for(f"a line with {text!r}", lambda: text in self.said, seconds)

    def wait_for_file(self, path: Path, seconds: float = START) -> None:
        self.wait_for(str(path), path.exists, seconds)

    def wait_for(self, what: str, happened: Callable[[], bool], seconds: float = START) -> None:
        end = time.monotonic() + seconds
        while not happened():
            assert self.left, f"all ended before {what}: {self.statuses}\n{self.said}"
            assert time.monotonic() < end, f"not in {seconds:.0f}s: {what}\n{self.said}"
            time.sleep(0.01)

    def wait(self, seconds: float = START) -> list[int | None]:
        """Every rank's exit status; of one that does not end in time, that of SIGKILL."""
        end = time.monotonic() + seconds
        while self.left and time.monotonic() < end:
            connection.wait(self.left, end - time.monotonic())
        self.kill()
        return self.statuses

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join()

    def story(self, folder: Path) -> str:
        """Everything that it said, for a failing test's message."""
        logs = (f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(folder.glob("logs/rank_*.txt")))
        return "\n".join([f"exit statuses {self.statuses}", self.said, *logs])


def _train(arguments: Sequence[str], variables: dict[str, str], out: Path) -> None:
    gc.freeze()  # the modules: a collection would make copies of their pages
    os.environ |= variables
    with open(out, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(train.main(list(arguments)))


def _pretrain(arguments: Sequence[str], cwd: Path, out: Path, err: Path) -> None:
    os.chdir(cwd)
    for number, path in ((1, out), (2, err)):
        with open(path, "w") as file:
            os.dup2(file.fileno(), number)
    supervise._run = _fork_trainer
    sys.exit(cli.main(arguments))


def _fork_trainer(command: list[str], environment: dict[str, str], stderr: int) -> tuple[int, bool]:
    assert command[:2] == [sys.executable, str(supervise.TRAINER)], "a launcher needs a real launch"
    if (trainer := os.fork()) == 0:
        os.environ |= environment
        os.dup2(stderr, 2)
        status = train.main(command[2:])
        sys.stdout.flush()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(trainer, 0)[1]), False
