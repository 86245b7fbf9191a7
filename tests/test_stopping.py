"""Asked to stop, every form of launch ends at a step boundary with a checkpoint of that step, and goes on from there (promises 3, 4, 6)."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked import Forks
from imported import forking
from launching import START, Launch, accelerate, checkpoints, launch, make_set, pretrain_train, read_lines, several, write_config

from pretrain import checkpoint, runfolder, stopping, train
from pretrain.inspection import check_ledger
from pretrain.launch import World

pytestmark = pytest.mark.launch
# A request that comes while Python ends: module objects go when it has put the signals' handlers back.
AT_THE_VERY_END = """
import os, signal
from pretrain.stopping import StopRequests
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)
stops = StopRequests(follow_launcher=False)
stops.end()
late = Late()
"""
SOON = 25.0  # seconds in which a launch must be gone after a request
TERM, INT, USR1, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL


@pytest.fixture
def config(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ends only when it is asked to; 4 windows per update, for 1 or 2 processes."""
    data = make_set(tmp_path_factory.mktemp("sets") / "set")
    return write_config(tmp_path / "long.yaml", data, batch={"tokens": 64, "micro": 2}, train={"max_steps": 10**6}, model={"build": "faulty:model"})  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "long"


def test_a_request_at_the_very_end_changes_nothing() -> None:
    assert subprocess.run([sys.executable, "-c", AT_THE_VERY_END]).returncode == 0


def fail_to_tell(*_: object) -> None:
    raise OSError("nowhere to say it")


def ask_twice(training: bool) -> None:
    stops = stopping.StopRequests(follow_launcher=False)
    stops.at_start = stops.at_once = fail_to_tell
    if training:
        stops.begin()
    for number in (TERM, INT):
        os.kill(os.getpid(), number)
    threading.Event().wait(10)  # then with status 0


def exit_status_of(act: Callable[..., None], *arguments: object) -> int | None:
    process = forking().Process(target=act, args=arguments)
    process.start()
    process.join(START)
    return process.exitcode


def ask_with_an_echo(seconds: float) -> None:
    stops = stopping.StopRequests(follow_launcher=True)
    stops.begin()
    stops._receive(TERM)
    assert stops._first_signal is not None
    stops._first_signal -= seconds
    stops._receive(TERM)
    os._exit(0 if stops.agreed(None) == "SIGTERM" else 2)


def test_what_a_launcher_passes_on_is_no_second_request() -> None:
    """systemd, and Slurm without our scripts, signal trainers and launcher alike."""
    assert exit_status_of(ask_with_an_echo, 0) == 0
    assert exit_status_of(ask_with_an_echo, 60) == 1


def signal_after(asked: int) -> None:
    stops = stopping.StopRequests(follow_launcher=False)
    stops.begin()
    stops._requested = asked
    stops._receive(TERM)
    os._exit(0 if stops.agreed(None) == stopping._REASONS[asked] else 2)


@pytest.mark.parametrize("asked", [1, stopping._TIME_LIMIT])
def test_the_first_signal_after_a_stop_file_or_a_time_limit_is_no_second_one(asked: int) -> None:
    """Slurm's SIGTERM while the last checkpoint is being written, which a time limit has asked for."""
    assert exit_status_of(signal_after, asked) == 0


def test_a_request_that_cannot_be_told_ends_the_process_all_the_same() -> None:
    assert exit_status_of(ask_twice, False) == 75
    assert exit_status_of(ask_twice, True) == 1


def test_a_stop_that_cannot_be_recorded_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "gone"
    monkeypatch.setitem(runfolder._owned, folder, None)
    train.stop_early(folder, World(0, 0, 1, 1), "SIGTERM")
    assert capfd.readouterr().out == "stopped on request (SIGTERM) before training began; the same command starts it again\n"


def look_for(stop_file: Path, launch_time: float) -> None:
    stops = stopping.StopRequests(follow_launcher=False, launch_time=launch_time)
    stops.watch(stop_file)
    os._exit(10 if stops.agreed(None) == "stop file" else 20)


def test_a_stop_file_is_for_the_launch_that_it_is_younger_than(tmp_path: Path) -> None:
    """However long that imported before it could listen."""
    stop_file = tmp_path / "stop"
    stop_file.touch()
    os.utime(stop_file, (1000.0, 1000.0))
    assert exit_status_of(look_for, stop_file, 1001.0) == 20
    assert stop_file.exists()
    assert exit_status_of(look_for, stop_file, 999.0) == 10


def check_stopped(started: Launch, reason: str | tuple[str, ...], exit_status: int | None = 75) -> int:
    """Everything is gone soon, and what was trained is in a checkpoint. Returns the step reached. `reason`: or one of these."""
    found = started.wait(SOON)
    assert found == exit_status if exit_status is not None else found != 0, started.story()
    assert started.folder is not None
    return check_records(started.folder, started.out, reason)


def check_records(folder: Path, said: str, reason: str | tuple[str, ...]) -> int:
    status = json.loads((folder / "status.json").read_text())
    reason = status["reason"] if status["reason"] in reason and isinstance(reason, tuple) else reason
    assert (status["state"], status["exit_status"], status["reason"]) == ("stopped", 75, reason), said
    steps = [m["step"] for m in read_lines(folder / "metrics.jsonl")]
    assert steps == list(range(1, status["step"] + 1))  # each once, over all restarts
    newest = checkpoint.path_of(folder / "checkpoints", status["step"])
    assert checkpoint.verify(newest) is None
    assert checkpoint.read_json(newest, "state.json")["progress"]["position"] == 4 * status["step"]
    assert f"stopped on request ({reason}) at step {status['step']:,}" in said
    assert "failed" not in said
    return int(status["step"])


def go_on(started: Launch, after: int) -> None:
    """Wait until it has resumed after step `after` and made two steps more."""
    started.wait_for_step(after + 2)
    if after:
        assert f"step_{after:08d} at step {after}" in started.out


def test_one_process_stops_on_each_signal_and_goes_on(config: Path, folder: Path, tmp_path: Path) -> None:
    reached = 0
    for number in (TERM, INT, USR1):
        with launch(pretrain_train(config), folder, cwd=tmp_path) as started:
            go_on(started, reached)
            started.signal(number)
            reached = check_stopped(started, "SIGTERM")
    check_ledger(folder / "ledger.jsonl")


def test_two_processes_stop_together(config: Path, folder: Path, tmp_path: Path) -> None:
    """A signal to the command, to one rank alone, a stop file, and the command's own death."""
    command = pretrain_train(config, flags=["--num_processes", "2"])
    with launch(command, folder, cwd=tmp_path) as started:
        go_on(started, 0)
        started.signal(TERM)
        reached = check_stopped(started, "SIGTERM")

    (folder / "stop").touch()  # a leftover: no reason to stop the next start
    os.utime(folder / "stop", (time.time() - 2,) * 2)  # the kernel knows to a second when a process has started
    with launch(command, folder, cwd=tmp_path) as started:
        go_on(started, reached)
        started.rank(1).send_signal(USR1)
        reached = check_stopped(started, "SIGUSR1")

    with launch(command, folder, cwd=tmp_path) as started:
        go_on(started, reached)
        (folder / "stop").touch()
        reached = check_stopped(started, "stop file")
        assert not (folder / "stop").exists()

    with launch(command, folder, cwd=tmp_path) as started:
        go_on(started, reached)
        started.process.kill()
        check_stopped(started, "SIGTERM", exit_status=-KILL)
    check_ledger(folder / "ledger.jsonl")


def ctrl_c(started: Launch) -> None:
    os.killpg(started.process.pid, INT)  # a terminal sends it to the launcher and to whatever shares its group


def usr1_to_all(started: Launch) -> None:
    for process in started.alive():
        process.send_signal(USR1)


def send(number: int) -> Callable[[Launch], None]:
    return lambda started: started.signal(number)


def test_no_trainer_outlives_a_launcher_that_is_killed_while_they_import(config: Path, folder: Path, tmp_path: Path) -> None:
    """Seen in conformance: they looked for its store for half an hour. `pretrain train` adopts them, and init where there is none."""
    for command in (pretrain_train(config, flags=["--num_processes", "2"]), accelerate(several(2), config)):
        with launch(command, folder, cwd=tmp_path) as started:
            first, _ = started.wait_for("two trainers", lambda: found if len(found := trainers(started)) == 2 else None)
            launcher = first.parent()
            assert launcher
            launcher.kill()
            assert started.wait(SOON) in (1, -KILL), started.story()
            told = ["stopped on request (the launcher is gone) before training began; the same command starts it again"]
            assert started.out.splitlines() == (told if command[0].endswith("accelerate") else [])


@pytest.mark.long
def test_accelerate_launch(config: Path, folder: Path, tmp_path: Path) -> None:
    """Accelerate's launcher dies of SIGTERM with one process and forwards it with two; killed, or by SIGUSR1, it can do neither. Slurm's
    `--signal=USR1` comes to every process of a step at once, with a `B:` to the launcher alone. No trainer is left."""
    one = ["--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    reached = 0
    forms: list[tuple[list[str], Callable[[Launch], None], str | tuple[str, ...]]]
    forms = [(one, send(TERM), "the launcher is gone"), (several(2), send(TERM), "SIGTERM"),
             (several(2), ctrl_c, "SIGINT"), (several(2), send(KILL), "the launcher is gone"),
             (several(2), send(USR1), "the launcher is gone"), (several(2), usr1_to_all, ("SIGUSR1", "the launcher is gone"))]  # fmt: skip
    for flags, ask, reason in forms:
        with launch(accelerate(flags, config), folder, cwd=tmp_path) as started:
            go_on(started, reached)
            ask(started)
            reached = check_stopped(started, reason, exit_status=None)


def test_before_the_first_step(forks: Forks, config: Path, folder: Path, tmp_path: Path) -> None:
    """While Python is still importing, in the warm-up, and during the evaluation before step 1."""
    with launch(pretrain_train(config), folder, cwd=tmp_path) as started:
        started.wait_for("the trainer", lambda: trainers(started))
        started.signal(TERM)
        assert started.wait(SOON) == 75
        assert "stopped on request" in started.out

    with launch(accelerate(["--num_processes", "1"], config), folder, cwd=tmp_path) as started:
        started.wait_for("the trainer", lambda: trainers(started))
        started.signal(TERM)
        assert started.wait(SOON) != 0
    assert checkpoints(folder) in ([], [1])

    early = tmp_path / "runs" / "early"
    early.mkdir()
    with launch(pretrain_train(config, "run.name=early"), early, cwd=tmp_path) as started:
        started.wait_for("the trainer", lambda: trainers(started))
        (early / "stop").touch()
        assert started.wait(SOON) == 75
        assert (started.status()["reason"], started.status()["step"] < 3, (early / "stop").exists()) == ("stop file", True, False)

    warm = forks.start(config, "run.name=warm", size=1, out=tmp_path / "warm.out", FAULT="hang:0:0")  # in the warm-up
    warm.wait_for_line("starting at step 0")
    warm.ranks[0].terminate()
    assert warm.wait(5) == [75]
    status = json.loads((tmp_path / "runs" / "warm" / "status.json").read_text())
    assert (status["state"], status["exit_status"], status["reason"]) == ("stopped", 75, "SIGTERM")

    gate = tmp_path / "gate"
    gated = forks.start(config, "train.eval_every=1000", "run.name=gated", size=1, out=tmp_path / "gated.out", GATE_EVALUATION=str(gate))
    gated.wait_for_file(Path(f"{gate}.here"))
    gated.ranks[0].terminate()
    gate.touch()
    assert gated.wait(SOON) == [75]
    status = json.loads((tmp_path / "runs" / "gated" / "status.json").read_text())
    assert (status["state"], status["step"]) == ("stopped", 0)


def trainers(started: Launch) -> list[psutil.Process]:
    return [p for p in started.alive() if any(word.endswith("train.py") for word in p.cmdline()[1:3])]


def test_during_a_checkpoint_and_twice(forks: Forks, config: Path, folder: Path, tmp_path: Path) -> None:
    """A request during a save lets it finish; a second request ends everything at once, and the checkpoint before stands."""
    gate = tmp_path / "gate"
    here = Path(f"{gate}.here")
    every = ["train.checkpoint_every=3", "train.async_checkpoint=false"]
    alone = forks.start(config, *every, size=1, out=tmp_path / "once.out", GATE_SAVE=str(gate))
    alone.wait_for_file(here)
    alone.ranks[0].terminate()
    gate.touch()
    assert alone.wait(SOON) == [75]
    assert check_records(folder, alone.said, "SIGTERM") == 3

    command = pretrain_train(config, *every, flags=["--num_processes", "2"])
    with launch(command, folder, cwd=tmp_path, GATE_SAVE=str(gate)) as started:
        started.wait_for_file(here)
        gate.touch()
        started.wait_for_line("step 6/1,000,000  checkpoint")
        started.signal(TERM)
        started.wait_for("the stop's checkpoint", lambda: here.exists() and not gate.exists())
        started.signal(TERM)
        assert started.wait(5) == 1
        assert started.status()["state"] == "failed"
    assert_only_complete(folder, [3, 6])

    here.unlink()
    alone = forks.start(config, *every, size=1, out=tmp_path / "twice.out", GATE_SAVE=str(gate))
    alone.wait_for_file(here)
    pid = alone.ranks[0].pid
    assert pid is not None
    for number in (TERM, INT):
        os.kill(pid, number)
    assert alone.wait(5) == [1]
    reason = json.loads((folder / "status.json").read_text())["reason"]
    assert reason in (
        "second request to stop (SIGINT)",
        "second request to stop (SIGTERM)",
    )  # the kernel may hand them over in either order
    assert reason in alone.said
    assert "traceback" not in alone.said  # there is none
    assert "step_00000006 at step 6" in alone.said
    assert_only_complete(folder, [3, 6])


def test_while_a_checkpoint_is_written(forks: Forks, config: Path, folder: Path, tmp_path: Path) -> None:
    """Training goes on beside it; a stop waits for it, then writes its own: no two at a time."""
    gate = tmp_path / "gate"
    here = Path(f"{gate}.here")
    started = forks.start(config, "train.checkpoint_every=3", size=2, out=tmp_path / "written.out", GATE_SAVE=str(gate))
    started.wait_for_file(here)
    started.wait_for_line("step 5/1,000,000  loss")
    assert not checkpoints(folder)
    for rank in started.ranks:
        rank.terminate()
    while started.left:
        gate.touch()
        connection.wait(started.left, 0.01)
    gate.unlink(missing_ok=True)
    assert started.wait(SOON) == [75, 75], started.story(folder)
    last = check_records(folder, started.said, "SIGTERM")
    assert "step 3/1,000,000  checkpoint" in started.said
    assert last >= 5
    assert_only_complete(folder, checkpoints(folder))


def test_a_terminal_that_goes_does_not_take_the_run_with_it(forks: Forks, config: Path, folder: Path, tmp_path: Path) -> None:
    """As `| tee` does, which gets the Ctrl-C first, and a window that is closed: nobody reads any more, and there is a stop to say."""
    terminal = tmp_path / "terminal"
    os.mkfifo(terminal)
    started = forks.start(config, size=1, out=terminal)
    with open(terminal) as said:
        assert any(line.startswith("step 3/") for line in said)
    started.ranks[0].terminate()
    assert started.wait(SOON) == [75]
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("stopped", "SIGTERM")
    assert_only_complete(folder, [status["step"]])


def test_a_time_limit_leaves_time_for_the_last_checkpoint(config: Path, folder: Path, tmp_path: Path) -> None:
    """Long before the limit is over, the first guess at a checkpoint's time being a tenth of it."""
    with launch(pretrain_train(config, "train.time_limit=45s", flags=["--num_processes", "2"]), folder, cwd=tmp_path) as started:
        began = psutil.Process(started.process.pid).create_time()
        started.wait_for_line("stopped on request (time limit)")
        check_stopped(started, "time limit")
        assert started.status()["time"] - began < 45


def assert_only_complete(folder: Path, steps: list[int]) -> None:
    found: dict[int, Any] = {step: checkpoint.verify(path) for step, path in checkpoint.numbered(folder / "checkpoints")}
    assert found == dict.fromkeys(steps)
    assert read_lines(folder / "metrics.jsonl")


def test_how_early_a_time_limit_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a second and one of five: two more of the longest, up to `interval` ordinary ones, one and a half checkpoints, ten seconds."""

    def asked_at(limit: float, save_seconds: float, interval: int) -> float:
        clock, subject = 0.0, stopping.TimeLimit(limit, 0.0, lambda: save_seconds, interval)
        for seconds in (0.0, 1.0, 5.0, *[1.0] * 1000):
            clock += seconds
            monkeypatch.setattr(time, "time", lambda now=clock: now)
            if subject.reached():
                return clock
        raise AssertionError("never")

    assert asked_at(200, 20.0, 1) == 200 - 10 - 30 - 10
    assert asked_at(200, 0.0, 1) == 200 - 10 - 30 - 10, "a tenth of the limit is the first guess"
    assert 200 - 65 <= asked_at(200, 20.0, 11) <= 200 - 60
