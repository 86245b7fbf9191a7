"""The members of a sweep: what they are called, and what a table says of them."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrain.config import ConfigError
from pretrain.sweep import main, members, table


def test_lines_are_members(tmp_path: Path) -> None:
    file = tmp_path / "rates.txt"
    file.write_text("optim.lr=1e-3 run.seed=2\n# nothing\n\ndata.train='a set'  # and why\n")
    assert members(Path("tiny.yaml"), file, ["train.max_steps=5"]) == [
        ["run.dir=runs/rates", "train.max_steps=5", "optim.lr=1e-3", "run.seed=2", "run.name=tiny-lr=1e-3-seed=2"],
        ["run.dir=runs/rates", "train.max_steps=5", "data.train=a set", "run.name=tiny-train=a_set-aa1462"],
    ]


def test_a_grid_is_every_combination(tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text("optim.lr: [0.001, 1e-4]\nstrategy.name: [ddp, diloco]\nstrategy.options: [{sync_every: 5}]\n")
    found = members(Path("tiny.yaml"), file)
    assert [member[1:3] for member in found] == [[f"optim.lr={lr}", f"strategy.name={name}"] for lr in (0.001, 0.0001) for name in ("ddp", "diloco")]  # fmt: skip
    assert all(member[3] == 'strategy.options={"sync_every": 5}' for member in found)
    assert len({member[-1] for member in found}) == 4


def test_a_name_is_what_a_member_is(tmp_path: Path) -> None:
    """A line before it changes nothing, so that a sweep can grow."""
    file = tmp_path / "rates.txt"
    file.write_text("optim.lr=1\n")
    (before,) = members(Path("tiny.yaml"), file)
    file.write_text("optim.lr=2\noptim.lr=1\n")
    assert members(Path("tiny.yaml"), file)[1] == before
    file.write_text(f"optim.lr={'1' * 100}\noptim.lr={'1' * 101}\n")
    long, longer = members(Path("tiny.yaml"), file)
    assert long[-1] != longer[-1]
    assert len(long[-1]) < 80


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.txt", "", "a.txt names no member"),
        ("a.txt", "optim.lr=1\nlr=2\n", "line 2: expected section.key=value, found 'lr=2'"),
        ("a.txt", "optim.lr='1\n", "line 1: No closing quotation"),
        ("a.txt", "optim.lr=1\noptim.lr=1 # again\n", r"two members would be one run \(run.name=tiny-lr=1\)"),
        ("a.yaml", "optim.lr: 1\n", "expected section.key: .values. and nothing else"),
        ("a.yaml", "optim: [\n", "not valid YAML"),
        ("a.yaml", "optim.lr: []\n", "expected section.key"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        members(Path("tiny.yaml"), tmp_path / name)


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("optim.lr=1\nrun.name='with a space'\n")

    def sweep(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "pretrain.sweep", *arguments], cwd=tmp_path, capture_output=True, text=True)

    assert sweep("tiny.yaml", "a.txt").stdout == "2\n"
    assert sweep("--member", "2", "tiny.yaml", "a.txt").stdout == "run.dir=runs/a\0run.name=with a space\0"
    outside = sweep("--member", "3", "tiny.yaml", "a.txt")
    assert (outside.returncode, outside.stdout) == (2, "")
    assert outside.stderr == "a.txt has 2 members and no number 3; write --array=1-2\n"


def test_a_table_before_and_after(config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a.txt"
    file.write_text("optim.lr=1 run.name=first\noptim.lrr=2 run.name=second\n")
    path = config()
    folder, text = table(path, members(path, file))
    assert folder == Path("runs/a")
    first, second = text.splitlines()[2:]
    assert first == "| first | not started | 0 |  |  |  |  |  |"
    assert second.startswith("| second | refused |")
    run = folder / "first"
    run.mkdir(parents=True)
    (run / "status.json").write_text('{"state": "failed", "step": 7, "reason": "a | b\\nc"}')
    records = ['{"step": 0, "val_loss": 5.0}', '{"step": 5, "val_loss": 3.0}', '{"step": 6, "loss": 2.5, "train_seconds": 61.4}', '{"step": 7, "val_loss": 4.0}', '{"step": 8, "lo']  # fmt: skip
    (run / "metrics.jsonl").write_text("\n".join(records))
    assert table(path, members(path, file))[1].splitlines()[2] == "| first | failed | 7 | 3.0000 | 4.0000 | 2.5000 | 61 | a \\| b c |"


def test_a_table_that_has_no_place(
    config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of members that are all refused nothing is written where one happens to be; what cannot be written is one line."""
    monkeypatch.chdir(tmp_path)
    path, file = config(), tmp_path / "a.txt"
    file.write_text("optim.lrr=2 run.name=second\n")
    assert main(["--table", str(path), str(file)]) == 0
    assert not (tmp_path / "summary.md").exists()
    file.write_text("optim.lr=2 run.name=second\n")
    (tmp_path / "runs/a/summary.md/in the way").mkdir(parents=True)
    assert main(["--table", str(path), str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Is a directory" in line
