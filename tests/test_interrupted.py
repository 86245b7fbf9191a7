"""Interrupted and resumed = uninterrupted: bit for bit on the same layout, to rounding on another (promises 2, 3 and 4)."""

import json
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import Forks
from launching import (
    SEQUENCE,
    Launch,
    checkpoints,
    launch,
    losses,
    make_set,
    pretrain_train,
    read_lines,
    run,
    training_metrics,
    weights,
    write_config,
)

from pretrain import checkpoint, config, export, resume
from pretrain.inspection import check_ledger
from pretrain.runfolder import Status

pytestmark = pytest.mark.launch
WINDOWS, EPOCHS, STEPS, LAST = 100, 4.79, 60, 479  # 60 updates of 8 windows; the last has 7


def four(path: Path, *overrides: str) -> list[str]:
    return pretrain_train(path, *overrides, flags=["--num_processes", "4"])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs of one module")


@pytest.fixture(scope="module")
def path(place: Path) -> Path:
    """Dropout, five epochs in different orders, a checkpoint every 5 updates, a short last update."""
    data = make_set(place / "set", tokens=WINDOWS * SEQUENCE + 5, val_tokens=20 * SEQUENCE + 1)
    return write_config(
        place / "config.yaml",
        data,
        run={"dir": str(place / "runs")},
        model={"dropout": 0.1},
        train={"max_steps": None, "epochs": EPOCHS, "eval_every": 15, "checkpoint_every": 5, "keep_last": 100},
    )


@pytest.fixture(scope="module")
def whole(place: Path, path: Path) -> Launch:
    """The uninterrupted run on 4 ranks, with W&B offline (B90)."""
    status, started = run(four(path, "run.name=whole", "track.wandb=offline"), place / "runs" / "whole", cwd=place)
    assert status == 0, started.story()
    return started


def folder_of(started: Launch) -> Path:
    assert started.folder is not None
    return started.folder


def windows(folder: Path) -> dict[int, tuple[Any, str]]:
    """What each step that counts was trained on."""
    return {line["step"]: (line["position"], line["windows"]) for line in read_lines(folder / "ledger.jsonl")}


def test_uninterrupted(whole: Launch) -> None:
    """B79 by epochs, B90: ends with the last window, and four ranks keep one record."""
    folder = folder_of(whole)
    status = whole.status()
    assert (status["state"], status["exit_status"], status["step"]) == ("finished", 0, STEPS)
    assert checkpoints(folder) == list(range(5, STEPS + 1, 5))
    train = [m for m in whole.metrics() if "loss" in m]
    assert [m["step"] for m in train] == list(range(1, STEPS + 1))
    assert [m["step"] for m in whole.metrics() if "val_loss" in m] == [0, 15, 30, 45, 60]
    assert (train[-1]["position"], train[-1]["tokens"]) == (LAST, LAST * SEQUENCE)
    assert windows(folder)[STEPS][0] == [LAST - 7, LAST]
    assert len({hashed for _, hashed in windows(folder).values()}) == STEPS  # each epoch is another order
    assert len(list((folder / "logs" / "wandb").glob("offline-run-*"))) == 1
    lines = [line for line in whole.out.splitlines() if line.startswith("step ")]
    assert len(lines) == len(set(lines)) == STEPS + 5 + 12
    assert sum("ready for step 1 " in line for line in whole.out.splitlines()) == 1


def newest(folder: Path) -> int:
    """Of the complete checkpoints; one more may be half written."""
    return max(step for step, _ in checkpoint.numbered(folder / "checkpoints"))


def test_killed_three_times(forks: Forks, whole: Launch, place: Path, path: Path) -> None:
    """Started again after SIGKILL of one rank, of everything, and of the launcher, each in an arbitrary step. A launcher is there where one
    is killed."""
    rng = random.Random(20)
    folder = place / "runs" / "killed"
    for kill, step in (("a rank", rng.randint(6, 12)), ("everything", rng.randint(21, 30))):
        started = forks.start(path, "run.name=killed", size=4, out=place / f"{kill}.out")
        victims = started.ranks if kill == "everything" else [started.ranks[rng.randrange(4)]]
        started.wait_for_line(f"step {step}/{STEPS}  loss")
        for victim in victims:
            victim.kill()
        statuses = started.wait(25)
        assert statuses.count(-signal.SIGKILL) == len(victims), started.story(folder)
        assert newest(folder) < STEPS, "it was over before it was killed"
    with launch(four(path, "run.name=killed"), folder, cwd=place) as launched:
        launched.wait_for_line("ready for step")
        (launcher,) = [p for p in launched.alive() if "accelerate.commands.launch" in p.cmdline()]
        launched.wait_for_step(rng.randint(38, 44))
        launcher.kill()
        assert launched.wait(25) != 0
    assert newest(folder) < STEPS, "it was over before it was killed"
    last = forks.start(path, "run.name=killed", size=4, out=place / "killed.out")
    assert last.wait() == [0] * 4, last.story(folder)

    assert training_metrics(folder) == training_metrics(folder_of(whole))
    assert windows(folder) == windows(folder_of(whole))
    assert weights(folder, STEPS) == weights(folder_of(whole), STEPS)
    assert exported(folder) == exported(folder_of(whole))
    metrics = read_lines(folder / "metrics.jsonl")
    assert metrics[-1]["step"] == STEPS
    assert max(m.get("restarts", 0) for m in metrics) == 3
    assert f"steps 1 to {STEPS} join without gap or overlap" in check_ledger(folder / "ledger.jsonl")[0]


def exported(folder: Path) -> bytes:
    output = folder.with_name(f"{folder.name}, exported")
    export.export(export.open_trained(folder, print), output)
    return (output / "model.safetensors").read_bytes()


def test_fewer_ranks_and_damaged_checkpoints(forks: Forks, whole: Launch, place: Path, path: Path) -> None:
    """4 ranks, then 2, then 1, and the last start finds its two newest checkpoints damaged (B68, B74)."""
    folder = place / "runs" / "fewer"
    shutil.copytree(folder_of(whole), folder)
    for step in range(25, STEPS + 1, 5):
        shutil.rmtree(checkpoint.path_of(folder / "checkpoints", step))
    started = forks.start(path, "run.name=fewer", size=2, out=place / "fewer.out")
    started.wait_for_line("step_00000020 at step 20")
    started.wait_for_line("checkpoint " + str(checkpoint.path_of(folder / "checkpoints", 30)))
    for rank in started.ranks:
        rank.terminate()
    assert started.wait(25) == [75, 75], started.story(folder)
    left = checkpoints(folder)
    assert left[:6] == [5, 10, 15, 20, 25, 30]
    assert left[-1] < STEPS, "it was over before it was asked to stop"
    newest, before, expected = (checkpoint.path_of(folder / "checkpoints", step) for step in left[:-4:-1])
    next((newest / "model").iterdir()).unlink()
    moments = next((before / "optimizer").iterdir())
    moments.write_bytes(moments.read_bytes()[:-1])

    last = forks.start(path, "run.name=fewer", size=1, out=place / "fewest.out")
    assert last.wait() == [0], last.story(folder)
    lines = last.said.splitlines()
    assert any(f"skipping checkpoint {newest}: " in line and "is missing" in line for line in lines)
    assert any(f"skipping checkpoint {before}: optimizer/" in line and "bytes instead of" in line for line in lines)
    assert any(line.startswith(f"resuming from {expected} at step {int(expected.name[5:])}") for line in lines)
    assert any("world_size: 2 -> 1" in line for line in lines)

    assert windows(folder) == windows(folder_of(whole))
    a, b = training_metrics(folder), training_metrics(folder_of(whole))
    assert [(m["step"], m.get("lr"), m.get("tokens"), m.get("position")) for m in a] == [(m["step"], m.get("lr"), m.get("tokens"), m.get("position")) for m in b]  # fmt: skip
    for key in ("loss", "grad_norm", "val_loss"):
        np.testing.assert_allclose([m[key] for m in a if key in m], [m[key] for m in b if key in m], rtol=1e-5)
    check_ledger(folder / "ledger.jsonl")


def test_end_rotation_and_a_finished_run(forks: Forks, whole: Launch, place: Path, path: Path) -> None:
    """B78, B79: the true last step is saved, once; only old checkpoints of this run are deleted; a finished run says so."""
    folder = place / "runs" / "short"
    foreign = folder / "checkpoints" / "step_99999999"
    shutil.copytree(checkpoint.path_of(folder_of(whole) / "checkpoints", STEPS), foreign)
    junk = folder / "checkpoints" / "step_12345678"
    junk.mkdir()
    (junk / "notes.txt").write_text("mine")

    def short(name: str, *overrides: str) -> tuple[int | None, str]:
        base = ["run.name=short", "train.epochs=null", "train.eval_every=0", "train.keep_last=2"]
        started = forks.start(path, *base, *overrides, size=1, out=place / f"{name}.out")
        return started.wait()[0], started.said

    seven = ["train.max_steps=7", "train.checkpoint_every=5"]
    status, said = short("damaged", *seven)
    assert status == 2, "only damaged checkpoints are there: starting over is the user's decision"
    assert f"none of the 2 checkpoints in {folder}/checkpoints is valid" in said

    aside = place / "aside"
    (folder / "checkpoints").rename(aside)
    status, said = short("first", *seven)
    assert status == 0, said
    assert checkpoints(folder) == [5, 7]
    assert [line.split("  ")[0] for line in said.splitlines() if "  checkpoint " in line] == ["step 5/7", "step 7/7"]

    shutil.copytree(aside, folder / "checkpoints", dirs_exist_ok=True)
    ten = ["train.max_steps=10", "train.checkpoint_every=1", "run.resume=must"]
    status, said = short("second", *ten)
    assert status == 0, said
    assert "by its manifest.json it is of step 60" in said
    assert "step_00000007 at step 7" in said
    assert checkpoints(folder) == [9, 10, 12345678, 99999999]
    assert checkpoint.verify(foreign) is not None
    assert (foreign / checkpoint.MANIFEST).exists()
    assert (junk / "notes.txt").exists()

    before = losses(folder)
    Status(folder, 0).write("failed", step=11, exit_status=1, reason="a rank was lost after the last save")
    status, said = short("third", *ten)
    assert status == 0
    assert f"{folder} is finished: step 10" in said
    found = json.loads((folder / "status.json").read_text())
    assert (found["state"], found["step"]) == ("finished", 10)
    assert losses(folder) == before


@pytest.fixture
def start(whole: Launch, place: Path, path: Path) -> Callable[..., resume.Start]:
    """start("auto"): where run.resume=auto would start, in the finished run's folder."""
    return lambda value, name="whole": resume.find_start(config.load(path, [f"run.name={name}", f"run.resume={value}"]), print)


def test_resume_values(start: Callable[..., resume.Start], whole: Launch) -> None:
    """B77: every value does what it says, and says what it did."""
    folder = folder_of(whole)
    newest = checkpoint.path_of(folder / "checkpoints", STEPS)
    assert start("auto").checkpoint == start("must").checkpoint == newest
    assert start("auto").progress.step == STEPS
    assert start(f"{folder}/", "another").checkpoint == newest
    assert start(f"{checkpoint.path_of(folder / 'checkpoints', 10)}/", "another").progress.position == 80
    assert start("auto", "another").checkpoint is start("never", "another").checkpoint is None
    for value, name, expected in [("never", "whole", "run.resume=never, but"), ("must", "another", "there is no checkpoint in"),
                                  ("latest", "whole", "no such checkpoint; write auto, never, must, or the path"), ("''", "whole", "write auto, never, must"),
                                  (str(folder / "logs"), "whole", "manifest.json is missing")]:  # fmt: skip
        with pytest.raises(config.ConfigError, match=expected):
            start(value, name)


def test_resume_at_step_90000_reads_nothing_before_it(forks: Forks, tmp_path: Path) -> None:
    """B65, on a set that would take minutes to read through."""
    data = make_set(tmp_path / "set")
    manifest = json.loads((data / "manifest.json").read_text())
    entry = manifest["files"]["train"][0]
    with open(data / entry["name"], "r+b") as file:
        file.seek(8)
        file.write(np.array([200_000 * SEQUENCE + 1], "<i4").tobytes())
        file.truncate(1024 + 2 * (200_000 * SEQUENCE + 1))
    for other in manifest["files"]["train"][1:]:
        (data / other["name"]).unlink()
    manifest["files"]["train"] = [{**entry, "tokens": 200_000 * SEQUENCE + 1}]
    (data / "manifest.json").write_text(json.dumps(manifest))
    path = write_config(tmp_path / "far.yaml", data, batch={"tokens": 2 * SEQUENCE}, train={"max_steps": 90_002, "log_every": 1})
    folder = tmp_path / "runs" / "far"
    started = forks.start(path, size=1, out=tmp_path / "near.out")
    started.wait_for_line("step 2/")
    started.ranks[0].terminate()
    assert started.wait(20) == [75], started.story(folder)

    step = json.loads((folder / "status.json").read_text())["step"]
    far = checkpoint.path_of(folder / "checkpoints", step).rename(checkpoint.path_of(folder / "checkpoints", 90_000))
    state = json.loads((far / "state.json").read_text())
    state["progress"] |= {"step": 90_000, "position": 180_000}
    record = json.loads((far / "manifest.json").read_text())
    record["step"], record["files"]["state.json"] = 90_000, checkpoint._write_json(far / "state.json", state)
    (far / "manifest.json").write_text(json.dumps(record))

    again = forks.start(path, size=1, out=tmp_path / "far.out")
    assert again.wait() == [0], again.story(folder)
    last = [m for m in read_lines(folder / "metrics.jsonl") if m["step"] > 90_000]
    assert [m["position"] for m in last] == [180_002, 180_004]
    ready = float(again.said.split("ready for step 90,001 after ")[1].split("s")[0])
    assert ready < 10
    assert last[0]["data_seconds"] < 1
