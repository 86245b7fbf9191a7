"""Real processes, cheaply: `pretrain train`, its launcher and its trainers are forked from a process that has imported everything.

Starting them the ordinary way costs each some seconds of imports. A fork has the same parents, sessions, signals, descriptors and deaths;
what it lacks is the command line of its own (the trainer reads the launcher's, to see what that was asked for), so that a share of the
launches is made the ordinary way.
"""

import atexit
import ctypes
import faulthandler
import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import psutil

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[1]
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MODULES = ("pretrain.train", "pretrain.cli", "pretrain.supervise", "pretrain.export", "torch._dynamo", "torch.distributed.run",
            "accelerate.commands.launch", "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler")  # fmt: skip
_STACKS = 1 << (signal.SIGUSR2 - 1)
_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_NAMESPACE, _READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE, _DETACH, _MOVE = 0x20000, 1, 32, 4096, 16384, 1 << 18, 2, 8192


def import_all(strategies: Sequence[str]) -> None:
    """What the forks will need, before any of them: they must find no thread running, and nothing left to import."""
    for name in _MODULES:
        import_module(name)
    if any(name.startswith("deepspeed") for name in strategies):
        os.environ["DS_ACCELERATOR"] = "cpu"
        import_module("deepspeed")
    import_module("torch").set_num_threads(1)  # sums must not depend on how many there are


def environment() -> dict[str, str]:
    """Of every launch: this checkout, one thread, no GPU, no network, nothing left of another launcher."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_", "PET_", "TORCHELASTIC_", "PRETRAIN_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


class Fork(subprocess.Popen[bytes]):
    """A Popen that forks where the command is one of ours, and executes everything else.

    A launcher's trainers are held at a gate until all are forked: its store's thread looks up the name of each that connects, and a child
    forked in that moment has the resolver's lock (glibc, resolv_conf.c) without the thread that would open it.
    """

    gate: ClassVar[tuple[int, int] | None] = None  # a pipe: open when nobody can write any more

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any, env: Any, *rest: Any) -> None:  # fmt: skip
        act = entry(args)
        if act is None:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)  # type: ignore[misc]
            return
        pipes, new_session = rest[3:9], rest[14]
        sys.stdout.flush()
        sys.stderr.flush()
        number, of = int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1))
        if number == 0 and of > 1:
            Fork.gate = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            become(act, [str(word) for word in args], dict(env), (pipes[0], pipes[3], pipes[5]), new_session, preexec_fn)
        if Fork.gate and number == of - 1:
            for end in Fork.gate:
                os.close(end)
            Fork.gate = None
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._child_created = True


def entry(command: Any) -> Callable[[list[str]], int | None] | None:
    """What a command of ours does with its arguments; None for any other command."""
    if isinstance(command, str | bytes):
        return None
    words = [str(word) for word in command]
    script = next((i for i, word in enumerate(words) if i and not word.startswith("-")), 0)
    if Path(words[0]).name == "pretrain":
        return lambda _: sys.modules["pretrain.cli"].main(words[1:])
    if words[1:3] == ["-m", "accelerate.commands.launch"]:
        return lambda _: sys.modules["accelerate.commands.launch"].main()
    if words[0] == sys.executable and words[script].endswith("pretrain/train.py"):
        return lambda _: sys.modules["pretrain.train"].main(words[script + 1 :])
    return None


def become(act: Callable[[list[str]], int | None], words: list[str], env: Mapping[str, str], descriptors: Sequence[int],
           new_session: bool, prepare: Callable[[], object] | None) -> None:  # fmt: skip
    """In a forked child: do what executing the command would, from its first line to its exit status. Does not return."""
    status: Any = 1
    try:
        gc.freeze()  # what our parents held, files among it, is not ours to close
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):  # a new program keeps what is ignored, and nothing else
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for standard, descriptor in enumerate(descriptors):
            if descriptor != -1:
                os.dup2(descriptor, standard)
        if Fork.gate:
            os.close(Fork.gate[1])
            os.read(Fork.gate[0], 1)
            Fork.gate = None
        os.closerange(3, 1 << 14)  # the launcher's sockets among them
        os.environ.clear()
        os.environ.update(env)
        if new_session:
            os.setsid()
        faulthandler.register(signal.SIGUSR2)  # where it hangs is for its standard error: see `show_stacks`
        if prepare:
            prepare()
        atexit._clear()
        sys.argv = words[2:] if words[1:2] == ["-m"] else words
        for module in (subprocess, sys.modules[_MODULES[-1]]):  # what it starts is forked too
            vars(module)["Popen"] = Fork
        status = _status(act, words)
    finally:  # nothing may reach our parent's frames below
        os._exit(status)


def _status(act: Callable[[list[str]], int | None], words: list[str]) -> int:
    """As an interpreter makes it, whatever fails; threads that are not daemons are waited for."""
    status: Any = 1
    with suppress(OSError):  # a full disk does not take what we say
        try:
            status = act(words)
        except SystemExit as request:
            status = request.code
            if status is not None and not isinstance(status, int):
                print(status, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    with suppress(OSError):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    return status & 255 if isinstance(status, int) else int(status is not None)


class Launch:
    """One start of `pretrain train`, and everything that came of it. This process adopts whatever loses its parents."""

    def __init__(self, command: Sequence[str], output: Path, *, fast: bool) -> None:
        self.output, self.began, self.fast = output, time.monotonic(), fast
        with open(output, "wb") as file:
            self.top = (Fork if fast else subprocess.Popen)(
                command, cwd=output.parent, env=environment(), stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )

    def text(self) -> str:
        return self.output.read_text("utf-8", errors="replace")

    def tree(self) -> tuple[psutil.Process, psutil.Process | None, list[psutil.Process]]:
        """(`pretrain train`, the launcher, the trainers in the order of their ranks), as far as they have been started."""
        top = psutil.Process(self.top.pid)
        try:
            launchers = sorted(top.children(), key=lambda p: p.pid)
            ranks = sorted(launchers[0].children(), key=lambda p: p.pid) if launchers else []
        except psutil.Error:
            return top, None, []
        return top, launchers[0] if launchers else None, ranks

    def running(self) -> bool:
        return self.top.poll() is None

    def until(self, look: Callable[[], bool], seconds: float) -> bool:
        """Wait for something to be seen. False where `pretrain train` ended, or the time was up, before it was."""
        end = time.monotonic() + seconds
        while not look():
            if not self.running() or time.monotonic() > end:
                return look()
            time.sleep(0.001)
        return True

    def wait(self, seconds: float) -> bool:
        """Until everything that it started is gone; False where something was left, which is then ended."""
        end = time.monotonic() + seconds
        while self.running() or alive():
            if time.monotonic() > end:
                show_stacks()
                end_all()
                self.top.wait()
                return False
            time.sleep(0.01)
        reap()
        return True


def adopt() -> None:
    """This process gets the orphans of everything that it starts, and dies with its parent."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def alive() -> list[psutil.Process]:
    """Everything below this process that has not ended. A process whose first thread has ended, and another not yet, looks like a zombie and
    still holds its locks."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1:
                found.append(process)
        except psutil.Error:
            continue
    return found


def show_stacks() -> None:
    """Each forked process below this one writes where its threads are to its own standard error."""
    left = [process for process in alive() if _signals(process, "SigCgt") & _STACKS]
    for process in left:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGUSR2)
    end = time.monotonic() + 5
    while any((_signals(process, "ShdPnd") | _signals(process, "SigBlk")) & _STACKS for process in left) and time.monotonic() < end:
        time.sleep(0.01)  # it has not been handled yet, or is just being


def _signals(process: psutil.Process, which: str) -> int:
    """A set of signals of a process's /proc/PID/status, number n being bit n − 1; none of a process that has ended."""
    with suppress(OSError):
        found = re.search(rf"^{which}:\t(.*)$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
        return int(found[1], 16) if found else 0
    return 0


def end_all() -> None:
    while left := alive():
        for process in left:
            try:
                process.kill()
            except psutil.Error:
                continue
        time.sleep(0.01)


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass


def in_fork(act: Callable[[], Any]) -> Any:
    """The result of `act`, which may start threads and show progress: this process must not."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        for standard in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), standard)
        try:
            result = [act(), None]
        except Exception as error:
            result = [None, f"{type(error).__name__}: {error}"]
        with open(write, "wb") as file:
            pickle.dump(result, file)
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        value, problem = pickle.load(file)
    os.waitpid(pid, 0)
    if problem:
        raise RuntimeError(problem)
    return value


class Disk:
    """A small disk of this process's own, that can be filled and written-protected in part; nobody else sees it, and it ends with us."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        """Raises OSError where we may not."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if _LIBC.unshare(_NEW_NAMESPACE):
            raise OSError(ctypes.get_errno(), "no mount namespace of our own")
        _mount(b"none", b"/", None, _RECURSIVE | _PRIVATE)
        _mount(b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={megabytes}m".encode())

    def fill(self, room: int) -> None:
        """Leave about so many bytes: a run is writing too."""
        with open(self.folder / "filler", "wb") as file:
            for attempt in range(100):
                stat = os.statvfs(self.folder)
                try:
                    os.posix_fallocate(file.fileno(), 0, max(1, stat.f_bavail * stat.f_frsize - room - attempt * stat.f_frsize))
                    return
                except OSError:
                    continue

    def empty(self) -> None:
        (self.folder / "filler").unlink(missing_ok=True)

    def protect(self, folder: Path) -> None:
        """From one moment to the next: a mount that somebody writes through already cannot be made read-only."""
        aside = self.folder / "aside"
        aside.mkdir(exist_ok=True)
        _mount(bytes(folder), bytes(aside), None, _BIND)
        _mount(b"none", bytes(aside), None, _REMOUNT | _READ_ONLY | _BIND)
        _mount(bytes(aside), bytes(folder), None, _MOVE)

    def unprotect(self, folder: Path) -> None:
        _LIBC.umount2(bytes(folder), _DETACH)

    def unmount(self) -> None:
        _LIBC.umount2(bytes(self.folder), _DETACH)


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int, data: bytes | None = None) -> None:
    if _LIBC.mount(source, target, kind, ctypes.c_ulong(flags), data):
        number = ctypes.get_errno()
        raise OSError(number, f"mount: {os.strerror(number)}")
