"""README is true: its commands run as written, its table is the config's, its example module trains, its scripts are sound."""

import gzip
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drive
import pytest
from forked import Forks
from group import Ranks
from launching import BIN, README, commands, launches

from pretrain import strategies
from pretrain.collectives import CollectiveCounter

ROOT = Path(__file__).parents[1]
TINY = """
data: {train: data/quickstart, sequence_length: 16}
model: {n_layer: 1, n_head: 2, n_embd: 32}
batch: {tokens: 64, micro: 2}
optim: {name: muon, lr: 1.0e-3}
train: {max_steps: 8, log_every: 4, eval_every: 4, eval_tokens: 64, checkpoint_every: 4}
"""
COMPARISON = (
    TINY.replace("muon", "adamw")
    + """
compare:
  repetitions: 1
  skip_steps: 2
  members: [{strategy.name: single}, {strategy.name: diloco, strategy.simulate: 2, strategy.options.sync_every: 2}]
"""
)


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose quickstart is tiny: same names, same commands."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("pretrain", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "configs/quickstart.yaml").write_text(TINY)
    (folder / "configs/compare.yaml").write_text(COMPARISON)
    (folder / "my_texts").mkdir()
    letters = random.Random(0)
    words = ["".join(letters.choices("etaoinshrdlu", k=letters.randint(3, 9))) for _ in range(3000)]
    for i in range(60):  # enough variety for a tokenizer of 4,096 ids
        (folder / f"my_texts/{i}.txt").write_text("My fellow citizens " + " ".join(letters.choices(words, k=400)))
    posts = [json.dumps({"body": " ".join(letters.choices(words, k=100))}) for _ in range(300)]
    (folder / "my_posts.jsonl.gz").write_bytes(gzip.compress("\n".join([*posts, *posts[:5], "{"]).encode()))
    (folder / "my_notes").mkdir()
    for i in range(30):
        (folder / f"my_notes/{i}.txt").write_text(" ".join(letters.choices(words, k=100)))
    run(folder, "pretrain prepare my_texts/ --output data/quickstart --tokenizer train:300 --val-fraction 0.2")
    return folder


def run(folder: Path, command: str, forks: Forks | None = None) -> str:
    """Its standard output. With `forks`, what would import torch and has no launcher is a fork."""
    program, *arguments = shlex.split(command)
    if forks and program == "pretrain" and arguments[0] in ("train", "generate", "evaluate", "export") and "--" not in arguments:
        status, out, err = forks.pretrain(arguments, folder)
    else:
        done = subprocess.run([str(BIN / program), *arguments], cwd=folder, capture_output=True, text=True, timeout=300)
        status, out, err = done.returncode, done.stdout, done.stderr
    assert status == 0, f"{command}\n{out[-2000:]}\n{err[-2000:]}"
    return out


@pytest.mark.long
@pytest.mark.launch
def test_every_command_of_the_readme_runs_in_its_order(sandbox: Path, forks: Forks) -> None:
    """Those that launch the quickstart's run are test_launch.py's."""
    ran = ["pretrain train configs/quickstart.yaml" if command in launches() else command for command in commands()]
    assert len(ran) >= 13, "the README's commands were not found"
    said = {command: run(sandbox, command, forks) for command in ran if "scripts/" not in command}
    (table,) = (out for command, out in said.items() if "--parity" in command)
    assert "| fsdp2 | 2 | ok: one_weight" in table
    ending = re.findall(r"^  (pretrain .*)$", (ROOT / "scripts/quickstart.sh").read_text("utf-8"), re.MULTILINE)
    assert len(ending) == 3
    for command in ending:
        run(sandbox, command.replace("$folder", "runs/quickstart"), forks)
    assert (sandbox / "report/loss_steps.png").stat().st_size > 10_000
    assert (sandbox / "exported/mine/model.safetensors").exists()
    assert re.search(r"(single|diloco) is fastest with", (sandbox / "runs/compare/report/report.md").read_text())


def python_block(words: str) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    (found,) = (block for block in blocks if words in block)
    return str(found)


def run_under_int8(path: Path, code: str) -> tuple[drive.Rows, int, int]:
    """(rows, bytes by formula, bytes of the large collectives of one update)."""
    module: dict[str, Any] = {}
    exec(code, module)
    strategies.STRATEGIES["ddp_int8"] = module["DDPInt8"]  # the line in __init__.py
    strategies.OPTIONS["ddp_int8"] = module["DDPInt8"].Options
    job, progress = drive.begin(path, ["strategy.name=ddp_int8"])
    rows = drive.steps(job, progress, 3)
    with CollectiveCounter() as counter:
        rows += drive.steps(job, progress, 1)
    job.loader.close()
    return rows, job.strategy.wire(4), sum(c.sent("ring") for c in counter.collectives if c.payload > 1024)


def test_the_strategy_of_the_readme_trains_and_sends_a_quarter(ranks: Ranks, config: Callable[..., Path]) -> None:
    code = python_block("class DDPInt8")
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    ((exact, _),) = ranks.run(drive.run, config({"run.name": "exact"}), [], 4, size=1)
    for rows, predicted, sent in ranks.run(run_under_int8, config(), code, size=2):
        assert sent == pytest.approx(predicted, rel=0.03)
        for key, bound in (("loss", 0.005), ("grad_norm", 0.05)):  # 63 levels for the largest element, and noise of half a level for each
            assert [row[key] for row in rows] == pytest.approx([row[key] for row in exact], rel=bound)
        assert [row["grad_norm"] for row in rows] != [row["grad_norm"] for row in exact]


@pytest.mark.launch
def test_the_swiglu_of_the_readme_trains_resumes_and_samples(sandbox: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    code = python_block("class SwiGLU")
    assert len([line for line in code.splitlines() if line.strip()]) <= 24
    (sandbox / "swiglu.py").write_text(code)
    monkeypatch.syspath_prepend(sandbox)
    command = "pretrain train configs/quickstart.yaml run.name=swiglu model.build=swiglu:build"
    assert "finished at step 8" in run(sandbox, command, forks)
    assert "is finished" in run(sandbox, command, forks)
    assert run(sandbox, "pretrain generate runs/swiglu --prompt My", forks).startswith("My")


def shape(text: str) -> list[str]:
    """The lines that start a part of `pretrain inspect`, with numbers for what differs between sets."""
    lines = [" ".join(re.sub(r"[0-9a-f]{32}|[\d,.]+", "#", line).split()) for line in text.splitlines()]
    return [shaped for line, shaped in zip(text.splitlines(), lines, strict=True) if re.match("[a-z]", line)]


@pytest.mark.launch
def test_what_the_readme_shows_of_a_set_is_what_is_said(sandbox: Path) -> None:
    shown = README.split("```text\ndata/quickstart: a prepared set\n")[1].split("```")[0]
    said = shape(run(sandbox, "pretrain inspect data/quickstart"))
    assert len(shape(shown)) == 9
    assert [line for line in shape(shown) if line not in said] == []


def test_the_table_of_config_keys_is_generated() -> None:
    done = subprocess.run([sys.executable, "scripts/write_config_table.py", "--check"], cwd=ROOT)
    assert done.returncode == 0, "run: python scripts/write_config_table.py"


def test_the_run_folder_of_the_readme_is_what_a_run_makes(sandbox: Path, forks: Forks) -> None:
    run(sandbox, "pretrain train configs/quickstart.yaml run.name=tree", forks)
    run(sandbox, "pretrain report runs/tree")
    tree = README.split("runs/NAME/\n")[1].split("```")[0]
    for line in tree.splitlines():
        name = line.split()[0].replace("step_00001000", "step_00000008")
        assert (sandbox / "runs/tree" / name).exists(), name
    made = {path.name for path in (sandbox / "runs/tree").iterdir() if not path.name.startswith(".")}
    assert made == {line.split()[0].split("/")[0] for line in tree.splitlines()}


MADE_OF = ("pyproject.toml", "scripts/constraints.txt", "scripts/setup.sh")


def set_up() -> bool:
    stamp = ROOT / ".venv/installed.txt"
    return stamp.exists() and stamp.read_text() == "".join((ROOT / name).read_text() for name in MADE_OF).rstrip("\n")


@pytest.mark.parametrize("name", ["quickstart.sh", "test.sh", "setup.sh", "get_shakespeare.sh", "get_fineweb.sh"])
def test_scripts_parse(name: str) -> None:
    assert subprocess.run(["bash", "-n", str(ROOT / "scripts" / name)]).returncode == 0
    assert (ROOT / "scripts" / name).stat().st_mode & 0o111


PYTHON = r"""#!/usr/bin/env bash
# Stands for a Python, and for that of the environment that it makes; says what it was asked for.
case "$*" in
  *"-m venv"*) rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python && printf '#!/bin/sh\necho pip' > .venv/bin/pip && chmod +x .venv/bin/pip ;;
  *"pip --version"*) echo pip ;;
esac
case "$*" in *"-m venv"* | *"pip install"*) echo "$@" ;; esac
"""


@pytest.mark.parametrize("state", ["none", "without pip", "dead", "of another checkout"])
def test_setup_makes_a_broken_environment_anew_whatever_its_stamp_says(tmp_path: Path, state: str) -> None:
    (tmp_path / "scripts").mkdir()
    for name in MADE_OF:
        shutil.copy(ROOT / name, tmp_path / name)
    python, there = tmp_path / "python", tmp_path / ".venv"
    python.write_text(PYTHON)
    python.chmod(0o755)
    if state != "none":
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", there], check=True)
        (there / "installed.txt").write_text("".join((ROOT / name).read_text() for name in MADE_OF).rstrip("\n"))
    if state == "dead":
        (there / "bin/python").unlink()
        (there / "bin/python").symlink_to(tmp_path / "gone")
    if state == "of another checkout":
        (next(there.glob("lib/python*/site-packages")) / "pretrain.pth").write_text(f"{ROOT}\n")
        (tmp_path / "pretrain").mkdir()
        (tmp_path / "pretrain/__init__.py").touch()

    def calls() -> list[str]:
        done = subprocess.run(["scripts/setup.sh"], cwd=tmp_path, env={**os.environ, "PYTHON": str(python)}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [line.split(" --quiet")[0] for line in done.stdout.splitlines() if line.startswith("-m")]

    assert calls() == ["-m venv --clear .venv", "-m pip install", "-m pip install"]
    assert calls() == []


@pytest.mark.long
@pytest.mark.launch
@pytest.mark.skipif(not set_up(), reason="needs a .venv that scripts/setup.sh has brought up to date: else the test would change it")
def test_the_quickstart_runs_and_says_that_it_is_done_when_called_again(tmp_path: Path) -> None:
    checkout = tmp_path / "a checkout"
    checkout.mkdir()
    for name in (".venv", "pretrain", "configs", "scripts", "pyproject.toml"):
        (checkout / name).symlink_to(ROOT / name)
    script = [
        "bash",
        "scripts/quickstart.sh",
        "train.max_steps=2",
        "train.eval_tokens=2560",
        "train.log_every=1",
        "train.sample_every=1",
        "optim.warmup_steps=1",
        "run.name=mine",
    ]
    first, second = (subprocess.run(script, cwd=checkout, capture_output=True, text=True, timeout=300) for _ in range(2))
    assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
    for words in (
        "ddp × 2 (gloo)",
        "validation loss",
        "  | My fellow citizens",
        "finished at step 2",
        "Your model is in runs/mine,",
        "source .venv/bin/activate",
    ):
        assert words in first.stdout
    assert second.returncode == 0
    assert "is finished: step 2" in second.stdout
    assert (checkout / "runs/mine/report/loss_steps.png").exists()
