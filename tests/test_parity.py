"""The parity matrix: every strategy, on 1, 2 and 4 processes, against one process; and that the matrix can fail."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import drive
import pytest
from group import Ranks

from pretrain import cli, launch, parity
from pretrain.parity import Cell
from pretrain.strategies import STRATEGIES, Strategy
from pretrain.strategies.ddp import DDP


def run_cells(wanted: Sequence[Cell], folder: Path, fault: str = "") -> None:
    with FAULTS[fault]():
        parity.run_cells(wanted, folder, launch.read_world().rank, drive.stops())


def forgotten_factor() -> Any:
    """The loss is not multiplied by the world size: every gradient is that much too small."""
    return mock.patch.object(Strategy, "backward", lambda self, loss: self.accelerator.backward(loss))


def never_reduced() -> Any:
    """Every micro-batch under no_sync: each rank trains on its own gradient."""
    return mock.patch.object(DDP, "accumulate", lambda self, model, *, last: self.accelerator.no_sync(model))


FAULTS: dict[str, Callable[[], Any]] = {"": nullcontext, "factor": forgotten_factor, "reduce": never_reduced}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parity")
    parity.prepare(folder)
    return folder


@pytest.mark.parametrize("worlds", [(1, 2), pytest.param((4,), marks=pytest.mark.long)], ids=["few", "four"])
def test_every_strategy_computes_the_same(ranks: Ranks, folder: Path, worlds: tuple[int, ...]) -> None:
    wanted = list(parity.cells(list(STRATEGIES), worlds))
    for world in dict.fromkeys((1, *worlds)):
        ranks.run(run_cells, parity.with_references(wanted, world), folder, size=world)
    verdicts = [(cell, *parity.judge(cell, folder)) for cell in wanted]
    assert [f"{cell.name}: {why}" for cell, verdict, why in verdicts if verdict == "FAILED"] == []


@pytest.mark.parametrize("fault", ["factor", "reduce"])
def test_a_broken_strategy_fails(ranks: Ranks, tmp_path: Path, fault: str) -> None:
    parity.prepare(tmp_path / "here")
    wanted = [Cell("ddp", 2, accumulation, probe) for accumulation in (1, 2) for probe in ("sgd", "adamw")]
    ranks.run(run_cells, parity.with_references(wanted, 1), tmp_path / "here", size=1)
    ranks.run(run_cells, wanted, tmp_path / "here", fault, size=2)
    assert [parity.judge(cell, tmp_path / "here")[0] for cell in wanted] == ["FAILED"] * 4


def test_the_table_tells_what_cannot_exist_and_what_failed(tmp_path: Path) -> None:
    cell = Cell("ddp", 2, 1, "sgd")
    parity._write(cell, tmp_path, parity.Result(failed="rank 1: RuntimeError: gone"))
    parity._write(
        Cell("hsdp", 2, 1, "sgd"), tmp_path, parity.Result(refused="strategy.name=hsdp needs at least 4 processes; 2 were started")
    )
    verdicts = [(c, *parity.judge(c, tmp_path)) for c in (cell, Cell("hsdp", 2, 1, "sgd"))]
    text = parity.table(verdicts)
    assert "| ddp | 2 | FAILED |" in text
    assert "- ddp on 2, sgd, fp32: rank 1: RuntimeError: gone" in text
    assert "- hsdp on 2, sgd, fp32: strategy.name=hsdp needs at least 4 processes" in text
    assert text.endswith("0 ok, 1 n/a, 1 FAILED")


@pytest.mark.parametrize(("arguments", "message"), [
    (["--strategies", "ddp,fsdp3"], "unknown strategy 'fsdp3'; there are single, dataparallel, ddp,"),
    (["--processes", "2,x"], "expected numbers of processes such as 1,2,4; found '2,x'"),
    (["--processes", "0"], "expected numbers of processes such as 1,2,4; found '0'"),
])  # fmt: skip
def test_the_command_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", "--parity", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
