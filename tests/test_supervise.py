"""What `pretrain train` makes of an end: the status of its own launch, whatever somebody else does to the run folder meanwhile."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest
from launching import make_set, write_config

from pretrain import launch, supervise
from pretrain.config import ConfigError
from pretrain.runfolder import Status, claim

Ended = Callable[..., tuple[int, bool]]


def own(folder: Path, claimed: object, done: object) -> None:
    claim(folder)
    Status(folder, 0).write("running")
    claimed.set()  # type: ignore[attr-defined]
    done.wait()  # type: ignore[attr-defined]


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """What `pretrain train` returns where the launcher ended with `code`, the trainer left `state`, and `then` somebody else came."""
    config = write_config(tmp_path / "config.yaml", make_set(tmp_path / "set"), run={"name": "run"})
    monkeypatch.chdir(tmp_path)

    def train(code: int, state: tuple[str, int | None] | None, *, taken_over: bool) -> int:
        spawn = get_context("spawn")
        claimed, done = spawn.Event(), spawn.Event()
        other = spawn.Process(target=own, args=(tmp_path / "runs" / "run", claimed, done))

        def launch(command: object, environment: dict[str, str], stderr: int) -> tuple[int, bool]:
            if state:
                with monkeypatch.context() as patch:
                    patch.setenv("PRETRAIN_LAUNCHED", environment["PRETRAIN_LAUNCHED"])
                    Status(tmp_path / "runs" / "run", 0).write(state[0], step=3, exit_status=state[1], reason="so")
            if taken_over:
                other.start()
                claimed.wait()
            return code, False

        monkeypatch.setattr(supervise, "_run", launch)
        try:
            return supervise.train(str(config), [], [])
        finally:
            done.set()
            if taken_over:
                other.join()

    return train


@pytest.mark.parametrize(
    ("code", "state", "status"),
    [
        (0, ("finished", 0), 0),
        (1, ("stopped", 75), 75),  # launchers turn everything into 1
        (1, ("refused", 2), 2),
        (1, ("failed", 1), 1),
        (-9, ("running", None), 1),
        (1, None, 1),
    ],
)
def test_the_trainers_own_status_is_returned(ended: Callable[..., int], code: int, state: tuple[str, int | None], status: int) -> None:
    assert ended(code, state, taken_over=False) == status


def test_a_check_leaves_the_records_of_a_run_alone(ended: Callable[..., int], tmp_path: Path) -> None:
    config, status = str(tmp_path / "config.yaml"), tmp_path / "runs" / "run" / "status.json"
    with pytest.raises(ConfigError, match="unknown strategy"):
        supervise.check(config, ["strategy.name=ddpp"])
    assert not status.parent.exists()
    assert ended(0, ("finished", 0), taken_over=False) == 0
    before = status.read_text()
    with pytest.raises(ConfigError, match="unknown strategy"):
        supervise.check(config, ["strategy.name=ddpp"])
    assert status.read_text() == before
    with pytest.raises(ConfigError, match="unknown strategy"):
        supervise.train(config, ["strategy.name=ddpp"], [])
    assert json.loads(status.read_text())["state"] == "refused"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinities of processes, as Linux has them")
def test_threads_are_of_the_cores_that_may_be_used() -> None:
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, [min(cores)])
        assert supervise._environment(1)["OMP_NUM_THREADS"] == "1"
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.parametrize("variable", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_processes_side_by_side_without_a_launcher_are_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun -n 4 python pretrain/train.py` would be four runs of one process."""
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION", "PRETRAIN_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "1")
    assert launch.read_world().size == 1
    monkeypatch.setenv(variable, "4")
    for start in (launch.read_world, lambda: supervise.train("none.yaml", [], [])):
        with pytest.raises(ConfigError, match="4 processes were started side by side"):
            start()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch.read_world().size == 2


def test_who_finished_has_finished_although_the_next_launch_is_there(ended: Callable[..., int]) -> None:
    """Seen in conformance: seed 5, trial 1 came to status 2 after its last step, since a second launch looked in just then."""
    assert ended(0, ("finished", 0), taken_over=True) == 0


def test_who_was_refused_by_a_faster_launch_says_so(ended: Callable[..., int], tmp_path: Path) -> None:
    assert ended(1, None, taken_over=True) == 2
    assert '"running"' in (tmp_path / "runs" / "run" / "status.json").read_text()  # theirs


LATE = """
import os, signal, sys
from pretrain import supervise
ended = supervise._run([sys.executable, "-c", ""], dict(os.environ), 2)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    os.kill(os.getpid(), number)
print(*ended)
"""


def test_a_request_after_the_end_changes_no_status() -> None:
    """Seen in conformance: a second SIGTERM came when the run had stopped, and -15 came out instead of 75."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "0 False\n"), done.stderr


ASK_TWICE = """
import os, signal, subprocess, sys, threading, time, psutil
from pretrain import supervise
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
ended = subprocess.Popen([sys.executable, "-c", ""])
ghost = psutil.Process(ended.pid)
ended.wait()
children, send = psutil.Process.children, subprocess.Popen.send_signal
psutil.Process.children = lambda process, recursive: [ghost, *children(process, recursive=recursive)]
ready, sent = os.pipe(), os.pipe()
subprocess.Popen.send_signal = lambda process, number: (send(process, number), os.write(sent[1], b"."))
def ask():
    for happened in ready[0], sent[0]:
        os.read(happened, 1)
        while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # its child may be up before it listens
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=ask).start()
os.dup2(ready[1], 1)  # the command's standard output
print(supervise._run([sys.executable, "-c", STUBBORN], dict(os.environ), 2), file=sys.stderr)
"""


def test_a_second_request_kills_those_that_are_left() -> None:
    """Seen in conformance: a process that had ended since it was listed, and a traceback."""
    done = subprocess.run([sys.executable, "-c", ASK_TWICE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "(-9, True)\n")


def test_each_launch_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETRAIN_LAUNCHED", "of our parent")
    names = {supervise._environment(2)["PRETRAIN_LAUNCHED"] for _ in range(2)}
    assert len(names - {os.environ["PRETRAIN_LAUNCHED"]}) == 2
