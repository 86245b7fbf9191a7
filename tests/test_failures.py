"""A failure on any rank ends all of them, says why once, and never looks like success (promises 4, 5 and 6)."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forks
from imported import forking
from launching import (
    SEQUENCE,
    START,
    TRAINER,
    Launch,
    checkpoints,
    launch,
    make_set,
    pretrain_train,
    python,
    read_lines,
    run,
    run_all,
    torchrun,
    write_config,
)

from pretrain import checkpoint, runfolder, train
from pretrain.config import ConfigError
from pretrain.launch import World
from pretrain.train import explain
from pretrain.watch import HangWatch

pytestmark = pytest.mark.launch
TOGETHER = 20.0  # seconds in which all processes must be gone after a failure
TWO = ["--num_processes", "2"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_set(tmp_path / "sets" / "set0")


@pytest.fixture
def config(tmp_path: Path, data: Path) -> Callable[..., Path]:
    """config(section={…}): a run of two ranks whose model can be told to fail; one micro-batch per update."""

    def write(**sections: dict[str, Any]) -> Path:
        every: dict[str, dict[str, Any]] = {"model": {"build": "faulty:model"}, "batch": {"tokens": 64}, **sections}
        return write_config(tmp_path / "bad.yaml", data, **every)

    return write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "bad"


# Of each family: its options, on how many ranks, and a collective of its own.
FAMILIES: dict[str, tuple[dict[str, object], int, str]] = {
    "ddp": ({}, 2, "all_reduce"),
    "ddp_powersgd": ({"start_step": 0}, 2, "all_reduce"),
    "zero1": ({}, 2, "broadcast"),
    "fsdp1": ({}, 2, "reduce_scatter"),
    "fsdp2": ({}, 2, "all_gather"),
    "hsdp": ({}, 4, "all_reduce"),
    "deepspeed3": ({"stage3_param_persistence_threshold": 0}, 2, "reduce_scatter"),
    "diloco": ({"sync_every": 2}, 2, "all_reduce"),
}
if not importlib.util.find_spec("deepspeed"):
    del FAMILIES["deepspeed3"]
# Of each fault: whether it comes in that collective or between two micro-batches, the step, and what is said of it.
FAULTS = {
    "hang": (True, 5, "no step was finished in 4 seconds"),
    "raise": (True, 6, "RuntimeError: a fault made to order"),
    "kill": (False, 6, "lost contact with another rank"),
}
AT_ONCE = 4
GIVE_UP = 10.0  # seconds after which what should have been ended ends by itself, with status 0


def complete(folder: Path) -> list[int]:
    """The checkpoints that stand, each of them valid; of step 4 there may be half of one, which was being written."""
    found = sorted(checkpoint.numbered(folder / "checkpoints"))
    assert [checkpoint.verify(path) for _, path in found] == [None] * len(found)
    return [step for step, _ in found]


class Case:
    """The ranks of one run, one of which fails in its sixth update."""

    def __init__(self, forks: Forks, place: Path, data: Path, family: str, fault: str) -> None:
        options, size, collective = FAMILIES[family]
        self.folder = place / "runs" / f"{family}-{fault}"
        path = write_config(
            place / f"{family}-{fault}.yaml", data, run={"device": "cpu"}, model={"build": "faulty:model"},
            batch={"tokens": 4 * SEQUENCE * size}, strategy={"name": family, "options": options},
            train={"max_steps": 50, "checkpoint_every": 2, "hang_timeout": 4 if fault == "hang" else 0},
        )  # fmt: skip
        order = f"{fault}:1:12" + (f":{collective}" if FAULTS[fault][0] else "")  # the second micro-batch of two
        self.run = forks.start(path, size=size, out=path.with_suffix(".out"), FAULT=order)
        self.failed, self.deadline = False, time.monotonic() + START

    def awaited(self) -> list[int]:
        """Those that are left; none once their time is up, which is TOGETHER seconds after the first of them has ended."""
        left = self.run.left
        if not self.failed and len(left) < len(self.run.ranks):
            self.failed, self.deadline = True, time.monotonic() + TOGETHER
        if left and time.monotonic() > self.deadline:
            self.run.kill()
            return []
        return left


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Case]:
    """The chosen cases after their end; some at a time."""
    items: list[dict[str, Any]] = [
        item.callspec.params for item in request.session.items if isinstance(item, pytest.Function) and "matrix" in item.fixturenames
    ]
    waiting = sorted(((params["family"], params["fault"]) for params in items), key=lambda case: list(FAULTS).index(case[1]))
    place = tmp_path_factory.mktemp("matrix")
    data = make_set(place / "set")
    started: dict[tuple[str, str], Case] = {}
    while waiting or any(case.awaited() for case in started.values()):
        if waiting and sum(bool(case.awaited()) for case in started.values()) < AT_ONCE:
            chosen = waiting.pop(0)
            started[chosen] = Case(forks, place, data, *chosen)
        else:
            connection.wait([left for case in started.values() for left in case.awaited()], 1.0)
    return started


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_bad_rank_ends_all_of_every_family(matrix: dict[tuple[str, str], Case], family: str, fault: str) -> None:
    """While the others wait for it in a collective, and with no launcher to end them."""
    case = matrix[family, fault]
    story = case.run.story(case.folder)
    assert case.run.statuses == [-signal.SIGKILL if (rank, fault) == (1, "kill") else 1 for rank in range(FAMILIES[family][1])], story
    _, step, reason = FAULTS[fault]
    status = json.loads((case.folder / "status.json").read_text())
    assert (status["state"], status["exit_status"], status["step"]) == ("failed", 1, step), story
    assert fault == "hang" or (status["rank"] == 1) == (fault == "raise")
    assert reason in status["reason"], story
    assert case.run.said.count("failed at step") == 1, story
    assert "Traceback" not in case.run.said
    assert complete(case.folder) in ([2], [2, 4])


LAUNCHED = {
    "raise:1:6": (1, 6, "RuntimeError: a fault made to order", "faulty.py"),
    "kill:1:6": (0, 6, "lost contact with another rank", "Traceback"),
    "hang:1:6": (None, 5, "no step was finished in 3 seconds", "pretrain/train.py"),
}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, Launch]]:
    """`pretrain train` with each of these faults on rank 1, and what a rank alone finds wrong before step 1: (status, the launch)."""
    place = tmp_path_factory.mktemp("launched")
    train = {"max_steps": 50, "checkpoint_every": 2, "hang_timeout": 3}
    keys: dict[str, dict[str, Any]] = {"model": {"build": "faulty:model"}, "batch": {"tokens": 64}, "train": train}
    path = write_config(place / "bad.yaml", make_set(place / "sets" / "set0"), **keys)
    by_rank = write_config(place / "by_rank.yaml", place / "sets" / "set${oc.env:RANK,0}", **keys)
    late = place / "late"
    late.mkdir()
    (late / "sitecustomize.py").write_text(
        "import os, time\nif os.environ.get('RANK') == '0' and 'LOCAL_WORLD_SIZE' in os.environ: time.sleep(5)\n"
    )
    cases = {
        "no data on rank 1": ([], by_rank, []),
        "no data, late": ([f"PYTHONPATH={late}:{Path(__file__).parent}:{TRAINER.parents[1]}"], path, ["data.train=no/such/set"]),
        **{fault: ([f"FAULT={fault}"], path, []) for fault in LAUNCHED},
    }
    commands = {
        name: (["env", *env, *pretrain_train(config, f"run.name={number}", *overrides, flags=TWO)], place / "runs" / str(number))
        for number, (name, (env, config, overrides)) in enumerate(cases.items())
    }
    return run_all(commands, cwd=place, at_once=3)


@pytest.mark.parametrize("fault", LAUNCHED)
def test_one_bad_rank_ends_all(launched: dict[str, tuple[int, Launch]], fault: str) -> None:
    """And the launcher, which says nothing of its own."""
    code, started = launched[fault]
    rank, step, reason, log = LAUNCHED[fault]
    assert code == 1, started.story()
    folder, status = started.folder, started.status()
    assert folder is not None
    assert (status["state"], status["exit_status"], status["step"]) == ("failed", 1, step)
    assert reason in status["reason"]
    assert rank is None or status["rank"] == rank
    said = [line for line in started.out.splitlines() if "failed at step" in line]
    assert len(said) == 1, started.story()
    where = folder / "logs" / f"rank_{status['rank']}.txt"
    assert reason in said[0]
    assert str(where) in said[0]
    assert log in where.read_text()
    assert "Traceback" not in started.out + started.err
    assert complete(folder) in ([2], [2, 4])


def test_a_failure_is_told_although_the_last_start_failed_too(config: Callable[..., Path], tmp_path: Path, folder: Path) -> None:
    """The status still says `failed` from the start before: this one's failure is news all the same."""
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(
        '{"state": "failed", "exit_status": 1, "step": 9, "reason": "an older one", "rank": 0, "time": 1.0}'
    )
    status, started = run(python(config()), folder, cwd=tmp_path, FAULT="build:0:0")  # before anything is recorded
    assert status == 1
    assert started.out.count("RuntimeError: a fault made to order") == 1
    assert started.status()["reason"] == "RuntimeError: a fault made to order"
    assert "faulty.py" in (folder / "logs" / "rank_0.txt").read_text()


def test_nan_ends_the_run(forks: Forks, config: Callable[..., Path], tmp_path: Path, folder: Path) -> None:
    """Found at the next save, although the next log line is far: nothing is saved, and the right step and rank are named."""
    path = config(train={"max_steps": 20, "log_every": 10, "checkpoint_every": 3})
    run = forks.start(path, size=2, out=tmp_path / "out", FAULT="nan:1:5")
    assert run.wait() == [1, 1]
    said = [line for line in run.said.splitlines() if "failed at step" in line]
    assert len(said) == 1, run.story(folder)
    assert said[0].startswith("rank 1 failed at step 5: the gradient of step 5 was not finite (rank 1 had a loss that is not finite)")
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["rank"], status["step"]) == ("failed", 1, 5)
    assert checkpoints(folder) == [3]


IMPATIENT = {"hang_timeout": 20}, "-17"  # the others give up 3 seconds after they have begun to wait


def test_a_save_may_take_longer_than_a_collective(forks: Forks, config: Callable[..., Path], tmp_path: Path, folder: Path) -> None:
    """B44: while rank 0 writes, the others wait for it."""
    gate, (train, patience) = tmp_path / "gate", IMPATIENT
    path = config(train={"max_steps": 2, "checkpoint_every": 2, **train})
    run = forks.start(path, size=2, out=tmp_path / "out", GATE_SAVE=str(gate), PATIENCE=patience)
    run.wait_for_file(Path(f"{gate}.here"))
    time.sleep(4.5)  # that nothing happens is what is to be seen
    gate.touch()
    assert run.wait() == [0, 0], run.story(folder)


def test_a_rank_that_hangs_in_an_evaluation(forks: Forks, config: Callable[..., Path], tmp_path: Path, folder: Path) -> None:
    """No watch looks there: the others give up."""
    gate, (train, patience) = tmp_path / "gate", IMPATIENT  # the gate stays shut, for rank 0
    path = config(train={"max_steps": 2, "eval_every": 2, **train})
    run = forks.start(path, size=2, out=tmp_path / "out", GATE_EVALUATION=str(gate), PATIENCE=patience)
    run.wait_for_file(Path(f"{gate}.here"))
    run.ranks[1].join(TOGETHER)
    assert run.statuses == [None, 1], run.story(folder)
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["rank"]) == ("failed", 1)
    assert "imed out" in status["reason"]
    run.kill()


def test_nan_is_skipped(forks: Forks, config: Callable[..., Path], tmp_path: Path, folder: Path) -> None:
    run = forks.start(config(train={"max_steps": 8, "nonfinite": "skip"}), size=2, out=tmp_path / "out", FAULT="nan:1:5")
    assert run.wait() == [0, 0], run.story(folder)
    metrics = read_lines(folder / "metrics.jsonl")
    assert [m["skipped"] for m in metrics] == [0, 0, 0, 0, 1, 0, 0, 0]
    assert [m["step"] for m in metrics if m["loss"] is None] == [5]
    assert "1 skipped" in run.said


def test_full_disk(config: Callable[..., Path], tmp_path: Path, small_disk: Path) -> None:
    """A save that fails costs a checkpoint, not the run; the next interval tries again."""
    path = config(run={"dir": str(small_disk)}, train={"max_steps": 9, "checkpoint_every": 3, "keep_last": 9})
    folder, ballast = small_disk / "bad", small_disk / "ballast"
    with launch(torchrun(2, path), folder, cwd=tmp_path, PACE="0.5") as started:
        started.wait_for_line("step 3/9  checkpoint")
        free = shutil.disk_usage(small_disk).free
        ballast.write_bytes(bytes(free))
        said = started.wait_for_line("no checkpoint was written")
        assert checkpoint.verify(folder / "checkpoints" / "step_00000003") is None
        assert not list((folder / "checkpoints").glob("*.tmp"))
        ballast.unlink()
        assert started.wait(START) == 0, started.story()
    assert said.startswith("step 6:")
    assert "No space left on device" in said
    assert "0.0 MB are free" in said
    assert checkpoints(folder) == [3, 9]
    assert [m["step"] for m in started.metrics()] == list(range(1, 10))


def test_a_disk_that_stays_full_is_a_failure_that_is_told(config: Callable[..., Path], tmp_path: Path, small_disk: Path) -> None:
    """By the exit status, by one line, and by status.json, for which there is no new room either."""
    path = config(run={"dir": str(small_disk)}, train={"max_steps": 6, "checkpoint_every": 3})
    folder = small_disk / "bad"
    with launch(pretrain_train(path, flags=TWO), folder, cwd=tmp_path, PACE="0.5") as started:
        started.wait_for_line("step 3/6  checkpoint")
        (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free))
        assert started.wait(START) == 1, started.story()
    causes = [line for line in started.out.splitlines() if " failed at step " in line]
    assert len(causes) == 1, started.story()
    assert "No space left on device" in causes[0]
    found = json.loads((folder / "status.json").read_text())
    assert (found["state"], found["exit_status"], checkpoints(folder)) == ("failed", 1, [3])
    assert "No space left on device" in found["reason"]
    assert started.err == ""


def test_output_on_a_full_disk_is_lost_and_nothing_else(forks: Forks, config: Callable[..., Path], folder: Path) -> None:
    """`pretrain train CONFIG > log`: what goes wrong is said there too, and has its own status all the same."""
    path = config(train={"max_steps": 2})
    assert forks.start(path, size=1, out=Path("/dev/full")).wait() == [0]
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    assert checkpoints(folder) == [2]
    assert forks.start(path, "data.train=no/such/set", size=1, out=Path("/dev/full")).wait() == [2]
    assert json.loads((folder / "status.json").read_text())["state"] == "refused"


def fail_with(folder: Path, out: Path, ours: bool, explain: Callable[..., str]) -> None:
    """What the user has to mend, found too late: with a status that no exception has."""
    for number, path in ((1, out), (2, Path("/dev/full"))):
        with open(path, "a") as file:
            os.dup2(file.fileno(), number)
    if ours:
        runfolder.join(folder)
    train.explain = explain
    train.fail(folder, World(0, 0, 1, 1), ConfigError("something to mend"), 3, None)


def unexplained(*_: object) -> str:
    raise RuntimeError("no words for it")


@pytest.mark.parametrize(("ours", "out"), [(True, "/dev/full"), (False, "out")])
def test_a_failure_that_cannot_be_told_everywhere_is_told_elsewhere(tmp_path: Path, ours: bool, out: str) -> None:
    """Standard error, and with it perhaps standard output, is on a full disk."""
    (tmp_path / "logs").mkdir()
    process = forking().Process(target=fail_with, args=(tmp_path, tmp_path / out, ours, explain))
    process.start()
    process.join(START)
    assert process.exitcode == 2
    told = tmp_path / ("logs/rank_0.txt" if ours else "out")
    assert "something to mend" in told.read_text()
    assert not ours or (runfolder.read_status(tmp_path) or {})["reason"] == "something to mend"


def lose_contact(rank: int, out: Path, error: Path) -> None:
    for number, path in ((1, out), (2, error)):
        with open(path, "a") as file:
            os.dup2(file.fileno(), number)
    train.fail(None, World(rank, rank, 4, 4), RuntimeError("Connection closed by peer"), 0, None)


def test_a_rank_that_dies_before_there_is_a_run_folder_is_told_once(tmp_path: Path) -> None:
    """Seen in conformance: each of those that were left had a line to say of it. Their tracebacks are the launcher's log's."""
    for rank in range(4):
        process = forking().Process(target=lose_contact, args=(rank, tmp_path / "out", tmp_path / f"error{rank}"))
        process.start()
        process.join(START)
        assert process.exitcode == 1
        assert "Connection closed by peer" in (tmp_path / f"error{rank}").read_text()
    told = (tmp_path / "out").read_text()
    assert told == "rank 0 failed at step 0: lost contact with another rank, which was killed or crashed (Connection closed by peer)\n"


def test_a_failure_in_telling_of_one_ends_the_process(tmp_path: Path) -> None:
    """Otherwise it would wait for the threads that still save."""
    process = forking().Process(target=fail_with, args=(tmp_path, tmp_path / "out", True, unexplained))
    process.start()
    process.join(START)
    assert process.exitcode == 2


def hang(log: Path, told: Path) -> None:
    def report(reason: str, *, again: bool, log: str) -> None:
        told.write_text(reason)
        raise OSError("nowhere to say it")

    with HangWatch(0.2, report, str(log)):
        threading.Event().wait(GIVE_UP)


def test_a_hang_ends_where_it_cannot_be_told(tmp_path: Path) -> None:
    process = forking().Process(target=hang, args=(tmp_path / "none" / "rank_0.txt", tmp_path / "told"))
    process.start()
    process.join(START)
    assert process.exitcode == 1
    assert "no step was finished in 0.2 seconds" in (tmp_path / "told").read_text()


@pytest.mark.parametrize("free", [0, 4096])
def test_a_start_on_a_full_disk(forks: Forks, config: Callable[..., Path], tmp_path: Path, small_disk: Path, free: int) -> None:
    """Where there is no room for the first record, and where there is for one and no second."""
    path, folder = config(run={"dir": str(small_disk)}), small_disk / "bad"
    (folder / "logs").mkdir(parents=True)
    (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free - free))
    said = f"cannot write the run folder {folder}: No space left on device; choose another with run.dir or run.name\n"
    ranks = forks.start(path, size=2, out=tmp_path / "out")
    assert ranks.wait() == [2, 2]
    assert ranks.said == said
    (folder / ".lock").unlink()
    assert forks.pretrain(["train", str(path)], cwd=tmp_path) == (2, "", said)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "read only"
    place.mkdir()
    if os.geteuid():
        place.chmod(0o500)
        yield place
        place.chmod(0o700)
        return
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"root writes anywhere, and mount -t tmpfs -o ro failed: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def test_read_only_run_folder(config: Callable[..., Path], tmp_path: Path, read_only: Path) -> None:
    path = config(run={"dir": str(read_only)})
    for command in (pretrain_train(path), python(path)):
        status, started = run(command, cwd=tmp_path)
        assert status == 2, started.story()
        assert started.out == ""
        assert started.err.startswith(f"cannot write the run folder {read_only}/bad: ")
        assert started.err.endswith("choose another with run.dir or run.name\n")
        assert started.err.count("\n") == 1


def refused(launched: tuple[int, Launch]) -> str:
    """What two ranks under `pretrain train` said when they refused: one line, before step 1, and the status says so too."""
    code, started = launched
    assert code == 2, started.story()
    assert (started.status()["state"], started.status()["exit_status"]) == ("refused", 2)
    assert started.metrics() == []
    assert "Traceback" not in started.out + started.err
    assert started.out.count("\n") == 1, started.story()
    assert started.status()["reason"] == started.out.strip()
    return started.out


def test_what_one_rank_alone_finds_wrong_is_said(launched: dict[str, tuple[int, Launch]]) -> None:
    said = refused(launched["no data on rank 1"])
    assert said.startswith("rank 1: ")
    assert "set1" in said
    assert "pretrain prepare" in said
    _, started = launched["no data on rank 1"]
    assert started.folder is not None
    launcher = (started.folder / "logs" / "launcher.log").read_text()
    assert "forcefully exiting" not in launcher  # rank 0, waiting for rank 1 to join, let itself be ended


def test_the_main_process_has_time_to_say_why(launched: dict[str, tuple[int, Launch]]) -> None:
    """Rank 1 finds the mistake seconds earlier; had it left at once, the launcher would have ended rank 0 unheard."""
    said = refused(launched["no data, late"])
    assert said.startswith("no/such/set")
    assert "pretrain prepare" in said


def test_a_rank_that_disagrees(forks: Forks, config: Callable[..., Path], tmp_path: Path) -> None:
    """Another initial weight, or other data, on rank 1 alone: all refuse, and one says why."""
    make_set(tmp_path / "sets" / "set1", seed=1)
    by_rank = write_config(tmp_path / "by_rank.yaml", tmp_path / "sets" / "set${oc.env:RANK,0}", batch={"tokens": 64})
    for what, path, fault in (("initial weights", config(), "init:1:0"), ("data", by_rank, "")):
        folder = tmp_path / "runs" / path.stem
        run = forks.start(path, size=2, out=tmp_path / what, FAULT=fault)
        assert run.wait() == [2, 2], run.story(folder)
        assert run.said.startswith(f"rank 1 has another {what} than rank 0")
        assert run.said.count("\n") == 1
        status = json.loads((folder / "status.json").read_text())
        assert (status["state"], status["exit_status"], status["reason"]) == ("refused", 2, run.said.strip())


def test_out_of_memory_says_what_to_try() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    said = explain(caught.value, 6)
    assert said.startswith("out of memory: write batch.micro=6 (it trains exactly the same), or model.activation_checkpointing=true")
    assert "\n" not in said
    assert explain(torch.OutOfMemoryError("CUDA out of memory.")).startswith("out of memory: write model.activation_checkpointing=true")
    assert explain(KeyError("x")) == "KeyError: 'x'"
