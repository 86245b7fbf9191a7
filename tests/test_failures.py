"""A failure on any rank ends all of them, says why once, and never looks like success (promises 4, 5 and 6)."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from launching import START, TRAINER, checkpoints, launch, make_set, pretrain_train, python, run, torchrun, write_config

from pretrain import checkpoint
from pretrain.train import explain

pytestmark = pytest.mark.launch
TOGETHER = 20.0  # seconds in which all processes must be gone after a failure
TWO = ["--num_processes", "2"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_set(tmp_path / "sets" / "set0")


@pytest.fixture
def config(tmp_path: Path, data: Path) -> Callable[..., Path]:
    """config(section={…}): a run of two ranks whose model can be told to fail; one micro-batch per update."""

    def write(**sections: dict[str, object]) -> Path:
        return write_config(tmp_path / "bad.yaml", data, **{"model": {"build": "faulty:model"}, "batch": {"tokens": 64}, **sections})

    return write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "bad"


@pytest.mark.parametrize(("fault", "rank", "step", "reason", "log"), [
    ("raise:1:4", 1, 4, "RuntimeError: a fault made to order", "faulty.py"),
    ("kill:1:4", 0, 4, "lost contact with another rank", "Traceback"),
    ("hang:1:4", None, 3, "no step was finished in 3 seconds", "pretrain/train.py"),
])  # fmt: skip
def test_one_bad_rank_ends_all(config: Callable[..., Path], tmp_path: Path, folder: Path, fault: str, rank: int | None, step: int,
                               reason: str, log: str) -> None:  # fmt: skip
    path = config(train={"max_steps": 50, "checkpoint_every": 2, "hang_timeout": 3})
    with launch(pretrain_train(path, flags=TWO), folder, cwd=tmp_path, FAULT=fault) as started:
        started.wait_for_step(3)
        assert started.wait(TOGETHER) == 1
    status = started.status()
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
    assert checkpoints(folder) == [2]  # the last one stands


@pytest.mark.parametrize(("strategy", "fault", "reason"), [
    ("fsdp2", "kill:1:4", "lost contact with another rank"),
    ("deepspeed3", "raise:1:4", "RuntimeError: a fault made to order"),
    ("diloco", "hang:1:4", "no step was finished in 3 seconds"),
])  # fmt: skip
def test_one_bad_rank_ends_all_of_every_family(config: Callable[..., Path], tmp_path: Path, folder: Path, strategy: str, fault: str,
                                               reason: str) -> None:  # fmt: skip
    options = {"options": {"sync_every": 2}} if strategy == "diloco" else {}
    path = config(train={"max_steps": 50, "checkpoint_every": 2, "hang_timeout": 3}, strategy={"name": strategy, **options})
    with launch(pretrain_train(path, flags=TWO), folder, cwd=tmp_path, FAULT=fault) as started:
        started.wait_for_step(3)
        assert started.wait(TOGETHER) == 1
    assert started.status()["state"] == "failed"
    assert reason in started.status()["reason"]
    assert len([line for line in started.out.splitlines() if "failed at step" in line]) == 1, started.story()
    assert checkpoints(folder) == [2]


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


def test_nan_ends_the_run(config: Callable[..., Path], tmp_path: Path, folder: Path) -> None:
    """Found at the next save, although the next log line is far: nothing is saved, and the right step and rank are named."""
    path = config(train={"max_steps": 20, "log_every": 10, "checkpoint_every": 3})
    status, started = run(pretrain_train(path, flags=TWO), folder, cwd=tmp_path, FAULT="nan:1:5")
    assert status == 1
    said = [line for line in started.out.splitlines() if "failed at step" in line]
    assert len(said) == 1, started.story()
    assert said[0].startswith("rank 1 failed at step 5: the gradient of step 5 was not finite (rank 1 had a loss that is not finite)")
    assert (started.status()["state"], started.status()["rank"], started.status()["step"]) == ("failed", 1, 5)
    assert checkpoints(folder) == [3]


def test_nan_is_skipped(config: Callable[..., Path], tmp_path: Path, folder: Path) -> None:
    path = config(train={"max_steps": 8, "nonfinite": "skip"})
    status, started = run(pretrain_train(path, flags=TWO), folder, cwd=tmp_path, FAULT="nan:1:5")
    assert status == 0, started.story()
    assert [m["skipped"] for m in started.metrics()] == [0, 0, 0, 0, 1, 0, 0, 0]
    assert [m["step"] for m in started.metrics() if m["loss"] is None] == [5]
    assert "1 skipped" in started.out


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 5 MB."""
    place = tmp_path / "small disk"
    place.mkdir()
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("needs root and mount, to make a small file system")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mount -t tmpfs: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def test_full_disk(config: Callable[..., Path], tmp_path: Path, small_disk: Path) -> None:
    """A save that fails costs a checkpoint, not the run; the next interval tries again."""
    path = config(run={"dir": str(small_disk)}, train={"max_steps": 9, "checkpoint_every": 3, "keep_last": 9})
    folder, ballast = small_disk / "bad", small_disk / "ballast"
    with launch(torchrun(2, path), folder, cwd=tmp_path, PACE="0.5") as started:
        started.wait_for_line("step 3/9  checkpoint")
        free = shutil.disk_usage(small_disk).free
        ballast.write_bytes(bytes(free - 100_000))
        said = started.wait_for_line("no checkpoint was written")
        assert checkpoint.verify(folder / "checkpoints" / "step_00000003") is None
        assert not list((folder / "checkpoints").glob("*.tmp"))
        ballast.unlink()
        assert started.wait(START) == 0, started.story()
    assert said.startswith("step 6:")
    assert "No space left on device" in said
    assert "0.1 MB are free" in said
    assert checkpoints(folder) == [3, 9]
    assert [m["step"] for m in started.metrics()] == list(range(1, 10))


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


def refusal(path: Path, folder: Path, cwd: Path, **env: str) -> str:
    """What two ranks under `pretrain train` say when they refuse: one line, before step 1, and the status says so too."""
    status, started = run(pretrain_train(path, flags=TWO), folder, cwd=cwd, seconds=START + 20, **env)
    assert status == 2, started.story()
    assert (started.status()["state"], started.status()["exit_status"]) == ("refused", 2)
    assert started.metrics() == []
    assert "Traceback" not in started.out + started.err
    assert started.out.count("\n") == 1, started.story()
    assert started.status()["reason"] == started.out.strip()
    return started.out


def test_a_rank_that_disagrees(config: Callable[..., Path], tmp_path: Path, folder: Path) -> None:
    """Another initial weight, other data, or no data, on rank 1 alone."""
    said = refusal(config(), folder, tmp_path, FAULT="init:1:0")
    assert said.startswith("rank 1 has another initial weights than rank 0")

    path = config(data={"train": f"{tmp_path}/sets/set${{oc.env:RANK,0}}"})
    said = refusal(path, folder, tmp_path)
    assert said.startswith("rank 1: ")
    assert "set1" in said
    assert "pretrain prepare" in said
    launcher = (folder / "logs" / "launcher.log").read_text()
    assert "forcefully exiting" not in launcher  # rank 0, waiting for rank 1 to join, let itself be ended

    make_set(tmp_path / "sets" / "set1", seed=1)
    assert refusal(path, folder, tmp_path).startswith("rank 1 has another data than rank 0")


def test_the_main_process_has_time_to_say_why(config: Callable[..., Path], tmp_path: Path, folder: Path) -> None:
    """Rank 1 finds the mistake seconds earlier; had it left at once, the launcher would have ended rank 0 unheard."""
    late = tmp_path / "late"
    late.mkdir()
    (late / "sitecustomize.py").write_text(
        "import os, time\nif os.environ.get('RANK') == '0' and 'LOCAL_WORLD_SIZE' in os.environ: time.sleep(5)\n"
    )
    said = refusal(
        config(data={"train": "no/such/set"}), folder, tmp_path, PYTHONPATH=f"{late}:{Path(__file__).parent}:{TRAINER.parents[1]}"
    )
    assert said.startswith("no/such/set")
    assert "pretrain prepare" in said


def test_out_of_memory_says_what_to_try() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    said = explain(caught.value, 6)
    assert said.startswith("out of memory: write batch.micro=6 (it trains exactly the same), or model.activation_checkpointing=true")
    assert "\n" not in said
    assert explain(torch.OutOfMemoryError("CUDA out of memory.")).startswith("out of memory: write model.activation_checkpointing=true")
    assert explain(KeyError("x")) == "KeyError: 'x'"
