"""One folder per run, with one owner: its lock, its status, what ran in it, and its line-by-line records."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf

from pretrain.config import ConfigError

PACKAGE = Path(__file__).parent
_BLOCK = 1 << 16  # bytes


def write_atomic(path: Path, text: str, *, sync: bool = True) -> None:
    """Readers find the old text or the new one; with `sync`, some milliseconds, after a loss of power too."""
    temporary = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")  # nodes may have the same numbers
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path) -> None:
    """Of files that were being replaced. Only for the run folder's owner."""
    for leftover in folder.glob("*.*.*.tmp"):  # a name, a node and a process
        leftover.unlink()


def copy_whole(source: Path, target: Path) -> None:
    """A folder that appears complete or not at all."""
    temporary = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary)
    temporary.rename(target)


class Lines:
    """A file of JSON lines. What cannot be written, on a full disk, is kept and written with what comes next."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path, self.say = path, say
        self._waiting: list[Mapping[str, Any]] = []

    def write(self, record: Mapping[str, Any]) -> None:
        self._waiting.append(record)
        if (error := self.flush()) and len(self._waiting) == 1:
            self.say(f"{self.path} cannot be written: {error.strerror}; its lines are kept in memory until there is room")

    def flush(self) -> OSError | None:
        """Write what waits; why it waits on, if it does."""
        text = "".join(json.dumps(record) + "\n" for record in self._waiting).encode()
        size: int | None = None  # before these lines; unknown where the file cannot be opened
        try:
            if text:
                with open(self.path, "ab", buffering=0) as file:
                    size = file.tell()
                    if file.write(text) < len(text):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if size is not None:
                with suppress(OSError):
                    os.truncate(self.path, size)  # half a line
            return error
        self._waiting.clear()
        return None

    def close(self) -> None:
        """Nothing comes after: the last chance of what waits, which is told where it fails."""
        if error := self.flush():
            self.say(f"{len(self._waiting)} lines of {self.path} were never written: {error.strerror}")

    def cut_back(self, step: float) -> None:
        """Drop the records of steps after `step`, those that wait, too."""
        self._waiting = [record for record in self._waiting if record["step"] <= step]
        cut_back(self.path, step)


_HELD = (BlockingIOError, PermissionError)  # what flock raises where another has the lock; the latter over NFS
_owned: dict[Path, IO[bytes] | None] = {}  # run folders of this launch; the main process holds their locks for as long as it lives


def claim(folder: Path) -> None:
    """Become the run folder's only owner for as long as this process lives. Raises ConfigError naming the owner."""
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        _owned[folder] = take_lock(folder, in_use)
    except OSError as error:
        raise cannot_write(folder, error) from None


def take_lock(folder: Path, in_use: Callable[[Path], str | None]) -> IO[bytes]:
    """Held until it is closed. Raises ConfigError with what `in_use` says of the folder, and OSError where it cannot be written."""
    lock = open(folder / ".lock", "a+b", buffering=0)  # noqa: SIM115 — the caller's to close
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if problem := in_use(folder):
                    raise ConfigError(problem) from None
                if not isinstance(error, _HELD):
                    raise
                # somebody else was looking just then
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}".encode())
    except BaseException:
        lock.close()
        raise
    return lock


def join(folder: Path) -> None:
    """For the other ranks, once the main process has claimed the folder."""
    _owned.setdefault(folder, None)


def is_ours(folder: Path | None) -> bool:
    return folder in _owned


def in_use(folder: Path, instead: str = "") -> str | None:
    """Why nobody else may have the folder, who owns it for one, and how to go on: by another key `instead` of a run's; None where nobody
    does."""
    try:
        with open(folder / ".lock", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            except _HELD:
                owner = lock.read().strip() or "another process"
            except OSError as error:
                where = instead or "run.dir"
                return f"{folder}'s file system keeps no locks ({error.strerror}): mount it with flock, or put {where} elsewhere"
    except OSError:
        return None
    way = f"or choose another {instead}" if instead else f"stop it (touch {folder}/stop), or choose another run.name"
    return f"{folder} is in use by {owner}; wait for it, {way}"


def check_writable(folder: Path) -> None:
    """Raises ConfigError where `claim` would, as far as can be seen without writing."""
    try:
        if not stat.S_ISDIR(folder.stat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except FileNotFoundError:
        return
    except OSError as error:
        raise cannot_write(folder, error) from None


def cannot_write(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write the run folder {folder}: {error.strerror}; choose another with run.dir or run.name")


class Status:
    """`status.json`, for scripts. Any rank may report a failure; the first one stands."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path, self.rank = folder / "status.json", rank

    def write(self, state: str, *, step: int | None = None, exit_status: int | None = None, reason: str = "", again: bool = False) -> None:
        if step is None:  # where the last start left it
            step = (read_status(self.path.parent) or {}).get("step", 0)
        record = {"state": state, "exit_status": exit_status, "step": step, "reason": reason, "again": again,
                  "rank": self.rank, "launch": os.environ.get("PRETRAIN_LAUNCHED", ""), "host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}  # fmt: skip
        text = json.dumps(record) + "\n"
        try:
            write_atomic(self.path, text, sync=state != "running")  # how far it is, which it says at every log line, is not worth the wait
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self.path.exists():
                raise
            with open(self.path, "r+b", buffering=0) as file:  # a full disk has room where the last record lies
                file.write(text.encode())
                file.truncate()

    def reached(self, step: int) -> None:
        """Record how far the run is, unless a rank has failed meanwhile: then that stands. A full disk costs this record and no more."""
        with suppress(OSError), open(self.path.with_name(".status-lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (read_status(self.path.parent) or {}).get("state") == "running":
                self.write("running", step=step)

    def fail(self, reason: str, *, step: int, exit_status: int = 1, again: bool = False) -> bool:
        """Record a failure unless another rank did so first; True for the one whose failure this is. `again`: it may not happen twice."""
        with open(self.path.with_name(".status-lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = read_status(self.path.parent) or {}
            ours = found.get("launch") and found["launch"] == os.environ.get("PRETRAIN_LAUNCHED")
            if found.get("state") == "failed" or (
                ours and found["state"] == "stopped"
            ):  # the latter: we miss a rank that has gone as asked
                return False
            self.write("failed", step=step, exit_status=exit_status, reason=reason, again=again)
            return True

    def stop(self, reason: str, *, exit_status: int) -> None:
        """Record a stop before step 1, unless the launch has failed or was refused: then the request came from its launcher."""
        with open(self.path.with_name(".status-lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (read_status(self.path.parent) or {}).get("state") == "running":
                self.write("stopped", exit_status=exit_status, reason=reason)


def note_end(folder: Path, rank: int, state: str, exit_status: int, reason: str, step: int | None = None) -> None:
    """Record how a start ended before step 1, unless the folder is somebody else's."""
    try:
        if not is_ours(folder):
            claim(folder)
        Status(folder, rank).write(state, step=step, exit_status=exit_status, reason=reason)
    except (ConfigError, OSError):
        return


def read_status(folder: Path) -> dict[str, Any] | None:
    try:
        status: dict[str, Any] = json.loads((folder / "status.json").read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return status


def wait_for_end(folder: Path | None, seconds: float) -> bool:
    """Whether this launch's main process records how it ended before so many seconds are over."""
    launch, until = os.environ.get("PRETRAIN_LAUNCHED"), time.monotonic() + seconds
    while time.monotonic() < until:
        status = (read_status(folder) if folder else None) or {}
        if launch and status.get("launch") == launch and status["state"] != "running":
            return True
        time.sleep(0.1)
    return False


def record_config(folder: Path, effective: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Write config.yaml. Returns a line per fact that differs from the previous start: versions, machine, threads."""
    path, changed = folder / "config.yaml", []
    before = _facts_in(path)
    for name, value in facts.items():
        if name in before and before[name] != value and name not in ("overrides", "config_file"):
            changed.append(f"{name}: {before[name]} -> {value}")
    write_atomic(path, OmegaConf.to_yaml(OmegaConf.create({**effective, "facts": dict(facts)})))
    return changed


def _facts_in(path: Path) -> Mapping[str, Any]:
    """Those of a config.yaml; none of one that is not there or, after a loss of power, not whole."""
    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
    except Exception:  # yaml raises a dozen classes
        return {}
    facts = found.get("facts") if isinstance(found, dict) else None
    return facts if isinstance(facts, dict) else {}


def code_hash() -> str:
    """Of our own source files."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def record_code(folder: Path) -> list[str]:
    """At the first start, copy our source, the commit and what differs from it; later, name the files that have changed since."""
    code = folder / "code"
    if code.exists():
        ours, theirs = ({p.relative_to(root): p.read_text("utf-8") for p in root.rglob("*.py")} for root in (PACKAGE, code / "pretrain"))
        return sorted(str(p) for p in ours.keys() | theirs.keys() if ours.get(p) != theirs.get(p))
    temporary = folder / "code.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(PACKAGE, temporary / "pretrain", ignore=shutil.ignore_patterns("__pycache__"))
    for name, command in (("commit.txt", ["rev-parse", "HEAD"]), ("diff.patch", ["diff", "HEAD"])):
        try:
            ran = subprocess.run(["git", "-C", str(PACKAGE), *command], capture_output=True, text=True, timeout=10)
            (temporary / name).write_text(ran.stdout if ran.returncode == 0 else "not a git checkout\n", encoding="utf-8")
        except (OSError, subprocess.TimeoutExpired):
            (temporary / name).write_text("git is not available\n", encoding="utf-8")
    temporary.rename(code)
    return []


def cut_back(path: Path, step: float) -> None:
    """Drop the records of steps after `step`, and what a kill or a loss of power left of a last line: the next one would be joined to it. Reads
    no further back, so that a start costs the same at any step."""
    if path.exists():
        with open(path, "r+b") as file:
            file.truncate(next((end for end, record in records_newest_first(file) if record["step"] <= step), 0))


def records_newest_first(file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(where it ends, record) of every whole line that is one."""
    start, later = file.seek(0, os.SEEK_END), b""  # what has been read of a line whose beginning has not
    while start:
        end, start = start, max(0, start - _BLOCK)
        file.seek(start)
        block = file.read(end - start) + later
        lines = block.splitlines(keepends=True)
        later = lines.pop(0) if start else b""
        end = start + len(block)
        for line in reversed(lines):
            if line.endswith(b"\n"):
                with suppress(ValueError):
                    yield end, json.loads(line)
            end -= len(line)


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`key: old -> new` for each key of two flat configs that differs."""
    return [
        f"{name}: {before.get(name)} -> {now.get(name)}" for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)
    ]
