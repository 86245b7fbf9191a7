"""Every form of launching trains to the same losses, or is refused before step 1 with one line that says what to do (promises 1, 5, 6)."""

import shlex
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from launching import (
    BIN,
    TRAINER,
    TWO,
    Launch,
    accelerate,
    launch,
    launches,
    losses,
    make_set,
    pretrain_train,
    python,
    run,
    run_all,
    torchrun,
    write_config,
)
from torch import device

from pretrain import config, machine

pytestmark = pytest.mark.launch
ROOT = TRAINER.parents[1]
CONFIGS = ROOT / "configs" / "accelerate"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "a place with spaces"
    place.mkdir()
    make_set(place / "set")
    return place


@pytest.fixture
def path(place: Path) -> Path:
    return write_config(place / "tiny.yaml", place / "set", train={"max_steps": 4})


def written(line: str, path: Path) -> list[str]:
    """A launch as the README writes it, of this config."""
    program, *words = shlex.split(line.replace("configs/quickstart.yaml", shlex.quote(f"{path}")))
    return [str(BIN / program), *(str(ROOT / word) if (ROOT / word).is_file() else word for word in words)]


@pytest.mark.long
def test_forms_train_to_the_same_losses(place: Path, path: Path, tmp_path: Path) -> None:
    """The README's four, and some more."""
    home = tmp_path / "home"
    (home / "accelerate").mkdir(parents=True)
    personal = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_machines": 1, "num_processes": 2, "machine_rank": 0,
                "main_process_port": 0, "mixed_precision": "no", "dynamo_config": {"dynamo_backend": "INDUCTOR"}}  # fmt: skip
    (home / "accelerate" / "default_config.yaml").write_text(yaml.safe_dump(personal))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def named(name: str) -> tuple[str, str]:
        return str(path), f"run.name={name}"

    readme = dict(zip(("accelerate launch", "ddp.yaml", "torchrun", "plain python"), launches(), strict=True))
    forms: dict[str, tuple[int, list[str]]] = {
        **{name: (1 if "python" in name else 2, [*written(line, path), f"run.name={name}"]) for name, line in readme.items()},
        "python -m": (1, [sys.executable, "-m", "pretrain.train", *named("python -m")]),
        "pretrain train": (1, pretrain_train(*named("pretrain train"))),
        "pretrain train, 2": (2, pretrain_train(*named("pretrain train, 2"), flags=TWO)),
        "single.yaml": (1, accelerate(["--config_file", str(CONFIGS / "single.yaml")], *named("single.yaml"))),
        "personal": (2, accelerate([], *named("personal"))),
        "pretrain train, personal": (1, pretrain_train(*named("pretrain train, personal"), flags=["--num_processes", "1"])),
    }
    done: dict[str, Launch] = {}
    second = ("personal", "pretrain train, personal", "torchrun")  # which wants the first form's port
    for with_home in (False, True):
        chosen = {name: (command, place / "runs" / name) for name, (_, command) in forms.items() if (name in second) == with_home}
        env: dict[str, Any] = (
            {"HF_HOME": str(home), "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"} if with_home else {"HF_HOME": str(tmp_path / "none")}
        )
        for name, (status, started) in run_all(chosen, cwd=elsewhere, **env).items():
            assert status == 0, f"{name}\n{started.story()}"
            done[name] = started

    expected = losses(place / "runs" / "plain python")
    assert len(expected) == 4
    for name, (processes, _) in forms.items():
        np.testing.assert_allclose(losses(place / "runs" / name), expected, rtol=1e-6, err_msg=name)
        facts = yaml.safe_load((place / "runs" / name / "config.yaml").read_text())["facts"]
        assert (facts["world_size"], facts["strategy"]) == (processes, "ddp" if processes == 2 else "single"), name
        assert f"× {processes}" in done[name].out.splitlines()[0]
        assert (done[name].status()["state"], done[name].status()["exit_status"]) == ("finished", 0)
    said = done["personal"].out
    assert f"the launcher read {home}/accelerate/default_config.yaml" in said
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4, set by the launcher, has no effect" in said
    assert "ACCELERATE_DYNAMO_BACKEND=INDUCTOR, set by the launcher, has no effect" in said
    assert "DYNAMO" not in done["pretrain train, personal"].out  # it passes a config file of its own
    assert "has no effect" not in done["ddp.yaml"].out


def only_line(started: Launch) -> str:
    """The trainer's one line on standard error; whatever else is there is the launcher's own."""
    assert "starting at step 0" not in started.out
    assert 'train.py", line' not in started.err, started.story()  # no traceback of ours
    ours = [
        line for line in started.err.splitlines() if line.startswith(("accelerate launch was asked", "the launcher asks", "run.precision"))
    ]
    assert len(ours) == 1, started.story()
    return ours[0]


def test_a_launch_with_fewer_processes_than_asked_for_is_refused(place: Path, path: Path) -> None:
    """What else is refused, test_launched_strategy.py asks without a launch."""
    status, started = run(accelerate(TWO, path), place / "runs" / "tiny", cwd=place)
    assert status != 0
    line = only_line(started)
    assert "asked for 2 processes and started 1" in line
    assert "--multi_gpu --num_processes 2" in line
    assert (started.status()["state"], started.status()["exit_status"]) == ("refused", 2)
    assert started.metrics() == []


@pytest.mark.parametrize(("told", "wanted", "found"), [
    ("no", "auto", ("fp32", "bf16")), ("bf16", "auto", ("bf16",)), ("fp16", "auto", ("fp16",)), ("no", "fp16", ("fp16",)), ("bf16", "bf16", ("bf16",)),
    ("bf16", "fp32", "asks for bf16 and run.precision for fp32"), ("fp16", "bf16", "asks for fp16"), ("fp8", "auto", "'fp8'"), ("fp8", "bf16", "'fp8'"),
])  # fmt: skip
def test_precision_is_one_that_both_can_mean(path: Path, monkeypatch: pytest.MonkeyPatch, told: str, wanted: str, found: tuple[str, ...] | str) -> None:  # fmt: skip
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", told)
    cfg = config.load(path, [f"run.precision={wanted}"])
    if isinstance(found, tuple):
        assert machine.choose_precision(cfg, device("cpu"))[0] in found
    else:
        with pytest.raises(config.ConfigError, match=found):
            machine.choose_precision(cfg, device("cpu"))


def test_mistakes_are_all_listed_once(place: Path, path: Path) -> None:
    """A wrong key, a wrong type, a missing file, a folder, no arguments: status 2, by either way in, without a traceback."""
    typo = place / "typo.yaml"
    typo.write_text(path.read_text().replace("  max_steps: 4", "  max_stepz: 4"))
    broken = place / "broken.yaml"
    broken.write_text("train: [1, 2")
    two = ["optim.lr=fast", "train.log_evry=1"]
    cases: Mapping[str, tuple[list[str], list[str]]] = {
        "a wrong key": (pretrain_train(typo), ["train.max_stepz: unknown key; did you mean train.max_steps?", "train: give exactly one of max_steps"]),
        "two mistakes": (pretrain_train(path, *two), ["optim.lr: expected a number, found 'fast'", "train.log_evry: unknown key; did you mean train.log_every?"]),
        "no such strategy": (pretrain_train(path, "strategy.name=fsdp3"), ["strategy.name: unknown strategy 'fsdp3'; did you mean fsdp2?"]),
        "a wrong option": (pretrain_train(path, "strategy.name=diloco", "strategy.options.sync_evry=2"), ["strategy.options.sync_evry: unknown key"]),
        "no such file": (pretrain_train("no/such.yaml"), ["no/such.yaml: no such config file"]),
        "a folder": (pretrain_train(place), [f"{place}: a folder, not a config file"]),
        "not YAML": (pretrain_train(broken), [f"{broken}: not valid YAML"]),
        "dashes": (pretrain_train(path, "train.log_every=1", "--train.max_steps=3"), ["train.max_steps=3"]),
        "two mistakes, two ranks": (torchrun(2, path, *two), ["optim.lr: expected a number, found 'fast'", "train.log_evry: unknown key"]),
        "a folder, python": (python(place), [f"{place}: a folder, not a config file"]),
        "no such device": (python(path, "run.device=mps"), ["run.device=mps: torch finds no Apple GPU here; write run.device=auto"]),
        "no arguments": ([sys.executable, str(TRAINER)], ["usage: pretrain/train.py CONFIG.yaml"]),
        "no verb": ([str(BIN / "pretrain"), "train"], ["usage: pretrain train"]),
    }  # fmt: skip
    results = run_all({name: (command, None) for name, (command, _) in cases.items()}, cwd=place)
    for name, (status, started) in results.items():
        if "two ranks" in name:
            assert status != 0  # torchrun's own
        else:
            assert status == 2, f"{name}\n{started.story()}"
            assert started.out == "", name
            assert "Traceback" not in started.err, f"{name}\n{started.story()}"
        assert 'train.py", line' not in started.err
        for text in cases[name][1]:
            assert started.err.count(text) == 1, f"{name}\n{started.story()}"


def test_a_second_launch_disturbs_nothing(place: Path, path: Path) -> None:
    """It names the owner and what to do, ends with 2, and the owner's records stay the owner's."""
    folder = place / "runs" / "tiny"
    with launch(python(path, "train.max_steps=1000000"), folder, cwd=place) as owner:
        owner.wait_for_step(2)
        before = owner.status()
        for command in (pretrain_train(path, flags=TWO), python(path, "train.max_steps=1000000")):
            status, second = run(command, cwd=place)
            assert status == 2, second.story()
            assert second.err.count("\n") == 1
            assert second.out == ""
            assert f"{folder} is in use by process {owner.process.pid} on " in second.err
            assert f"touch {folder}/stop" in second.err
            now = owner.status()
            assert (now["state"], now["pid"], now["host"]) == ("running", before["pid"], before["host"])
        owner.wait_for_step(owner.metrics()[-1]["step"] + 2)
        owner.signal(signal.SIGTERM)
        assert owner.wait() == 75
        steps = [m["step"] for m in owner.metrics()]
        assert steps == list(range(1, owner.status()["step"] + 1))


def test_a_race_for_the_folder_has_one_winner(place: Path, path: Path) -> None:
    """Both start at once, so neither finds an owner when it looks: one trains, the other is refused, and the status is the winner's."""
    folder = place / "runs" / "tiny"
    command = pretrain_train(path, "train.max_steps=30", "model.build=faulty:model")
    with launch(command, folder, cwd=place, PACE="0.4") as one, launch(command, folder, cwd=place, PACE="0.4") as other:
        end = time.monotonic() + 90
        while (statuses := {launched.process.poll() for launched in (one, other)}) == {None}:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert statuses == {2, None}, one.story() + other.story()
        loser, winner = (one, other) if one.process.poll() == 2 else (other, one)
        assert "is in use by" in loser.out + loser.err
        assert winner.status()["state"] == "running"
        winner.signal(signal.SIGTERM)
        assert winner.wait() == 75
