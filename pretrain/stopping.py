"""Requests to stop: signals, the stop file, the launcher's death. Decided by all ranks together, for the next step."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

_REASONS = ("", "stop file", "SIGINT", "SIGTERM", "SIGUSR1", "the launcher is gone", "time limit")
_SIGNALS = {signal.SIGINT: 2, signal.SIGTERM: 3, signal.SIGUSR1: 4}
_LAUNCHER_GONE, _TIME_LIMIT = 5, 6
_UNKNOWN = 60.0  # seconds that a first checkpoint is taken to need, or a tenth of the time limit where that is less
_GOING = 10.0  # seconds from the last checkpoint to the end of the process
_ECHO = 5.0  # seconds in which a launcher passes on what its workers have been sent, too: by systemd, or Slurm without our scripts
_PR_SET_PDEATHSIG = 1


class TimeLimit:
    """Whether it is time to save and go: asked at every step boundary, answered for the one after the next, when all ranks have heard."""

    def __init__(self, seconds: float, launch_time: float, save_seconds: Callable[[], float], save_interval: int) -> None:
        """`save_seconds`: the longest that a checkpoint has taken, 0 where none was written yet. `save_interval`: updates between the steps
        after which a checkpoint can be taken."""
        self._until = launch_time + seconds
        self._unknown, self._save_seconds, self._interval = min(_UNKNOWN, seconds / 10), save_seconds, save_interval
        self._first: float | None = None
        self._before, self._longest, self._steps = 0.0, 0.0, 0  # the longest with what happens between steps: evaluations, samples

    def reached(self) -> bool:
        now = time.time()
        if self._first is None:
            self._first = now
        else:
            self._steps += 1
            self._longest = max(self._longest, now - self._before)
        self._before = now
        ahead = 2 * self._longest + (self._interval - 1) * (now - self._first) / max(1, self._steps)
        return now + ahead + 1.5 * (self._save_seconds() or self._unknown) + _GOING >= self._until


class StopRequests:
    """Listens from construction on. Until training begins, with nothing to save, a request ends the process at once; then the first one
    ends the run at a step boundary, and the second signal ends the process at once.

    A signal handler in Python never runs inside a collective, so handlers only write to a pipe (signal.set_wakeup_fd) and a thread acts.
    """

    def __init__(self, *, follow_launcher: bool, orphaned: bool = False, repeated: bool = False, launch_time: float = 0.0,
                 at_start: Callable[[str], object] = print) -> None:  # fmt: skip
        """`repeated`: requests come several times each, and a second one means nothing. `launch_time`: a stop file that is older is a leftover;
        by the time that we listen, the user has waited through seconds of imports."""
        self._requested, self._repeated = 0, repeated
        self._first_signal: float | None = None  # when it came; a stop file or a time limit may have asked before
        self._echo = _ECHO if follow_launcher else 0.0
        self.at_start = at_start  # told why, before a request ends a process that has not begun to train
        self.at_once: Callable[..., object] = print  # the same for one that has
        self._training = False
        self._launcher = os.getppid()
        self._gone, self._follow = False, follow_launcher and sys.platform == "linux"
        self._vote: tuple[dist.Work, torch.Tensor] | None = None
        self._stop_file: Path | None = None
        self._limit: TimeLimit | None = None
        self._launch_time = launch_time
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._listen, args=(read,), name="stop-requests", daemon=True).start()
        if self._follow:  # a launcher that is killed leaves its workers behind: ask the kernel to tell us
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if orphaned or os.getppid() != self._launcher:
                self._launcher = 0  # nobody's number
                os.write(write, bytes([signal.SIGTERM]))

    def begin(self) -> None:
        """From here on there is something to save."""
        self._training = True

    def end(self) -> None:
        """What this process came to is settled. Python, as it ends, would give signals back their power to kill, and with it another status."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def watch(self, stop_file: Path, limit: "TimeLimit | None" = None) -> None:
        """Main process only."""
        self._stop_file, self._limit = stop_file, limit

    def agreed(self, group: dist.ProcessGroup | None) -> str | None:
        """Call at every step boundary, on every rank: the reason to stop before the next step, or None. Waits for last step's vote alone."""
        if self._stop_file is not None and self._stop_file_is_new():
            self._requested = self._requested or 1
        if self._limit is not None and self._limit.reached():
            self._requested = self._requested or _TIME_LIMIT
        if group is None:
            decided = self._requested
        else:
            decided = 0
            if self._vote is not None:
                self._vote[0].wait()
                decided = int(self._vote[1])
            flag = torch.tensor(self._requested)
            work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=group, async_op=True)
            assert work is not None
            self._vote = (work, flag)
        if decided and self._stop_file is not None:
            self._stop_file.unlink(missing_ok=True)
        return _REASONS[decided] if decided else None

    def _stop_file_is_new(self) -> bool:
        assert self._stop_file is not None
        try:
            return self._stop_file.stat().st_mtime >= self._launch_time
        except OSError:
            return False

    def _listen(self, read: int) -> None:
        while True:
            for number in os.read(read, 64):
                if number in _SIGNALS:
                    self._receive(signal.Signals(number))

    def _receive(self, number: signal.Signals) -> None:
        while self._follow and os.getppid() == self._launcher and is_ending(self._launcher):
            time.sleep(0.01)  # a launcher's dying threads hand us to one another, with a signal each time, before it is gone
        if os.getppid() != self._launcher:  # its death is one request, however often the kernel says so
            if not self._gone:
                self._gone = True
                self._requested = self._requested or _LAUNCHER_GONE
        elif self._first_signal is None:
            self._first_signal = time.monotonic()
            self._requested = self._requested or _SIGNALS[number]
        elif self._repeated or time.monotonic() < self._first_signal + self._echo:
            return
        else:
            try:
                self.at_once(f"second request to stop ({number.name})")
            finally:
                os._exit(1)
        if not self._training:
            try:
                self.at_start(_REASONS[self._requested])
            finally:
                os._exit(75)


def is_ending(process: int) -> bool:
    """Whether the kernel is ending it, thread by thread: those that are left have a SIGKILL to come (proc(5))."""
    for status in Path(f"/proc/{process}/task").glob("*/status"):
        with suppress(OSError):  # it has just gone
            found = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            if found["State"][0] in "ZX" or int(found["SigPnd"], 16) >> (signal.SIGKILL - 1) & 1:
                return True
    return False
