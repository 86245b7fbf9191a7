"""Runs on several sets: what was drawn is logged, each set is evaluated by itself, and no restart changes the mixture."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drive
import numpy as np
import pytest
from group import Ranks

from pretrain import config as configs
from pretrain import evaluate_trained
from pretrain.strategies import OPTIONS


def listed(*sources: tuple[Path, float]) -> list[dict[str, Any]]:
    return [{"path": str(path), "weight": weight} for path, weight in sources]


@pytest.fixture
def two(make_set: Callable[..., Path]) -> tuple[Path, Path]:
    """20 windows and 64 to train on, 3 and 8 to validate on."""
    draw = np.random.default_rng(3)
    sizes = {"short": (20, 3), "long": (64, 8)}
    short, long = (make_set(name, *(draw.integers(0, 50, n * 16 + 1) for n in windows)) for name, windows in sizes.items())
    return short, long


def test_what_was_drawn_is_logged_and_goes_on_alike_on_other_processes(
    ranks: Ranks, config: Callable[..., Path], two: tuple[Path, Path]
) -> None:
    """Six updates of 8 windows, two of three from the short set, which is passed over 1.6 times."""
    path = config({"data.train": listed((two[0], 2), (two[1], 1)), "train.eval_every": 3})
    ((rows, weights, _),) = ranks.run(drive.whole, path, ["run.name=whole"], size=1)
    logged = [row for row in rows if "loss" in row]
    assert logged[-1]["tokens/short"] == 32 * 16
    assert (logged[-1]["epoch/short"], logged[-1]["epoch/long"]) == (32 / 20, 16 / 64)
    for row in logged:
        assert row["tokens/short"] + row["tokens/long"] == row["tokens"]
        assert abs(row["tokens/short"] / 16 - row["tokens"] / 16 * 2 / 3) <= 0.5
    evaluated = [row for row in drive.lines(configs.load(path, ["run.name=whole"]).folder / "metrics.jsonl") if "val_loss" in row]
    assert len(evaluated) == 3
    for row in evaluated:
        assert row["val_loss"] == pytest.approx((3 * row["val_loss/short"] + 8 * row["val_loss/long"]) / 11, rel=1e-12)
        assert row["val_loss/short"] != row["val_loss/long"]

    ranks.run(drive.whole, path, ["run.name=parts"], 3, size=2)
    resumed, other_weights, _ = ranks.run(drive.whole, path, ["run.name=parts"], size=4)[0]
    again = [row for row in resumed if "loss" in row]
    for key in ("loss", "grad_norm", "tokens/short", "epoch/long"):
        assert [row[key] for row in again] == pytest.approx([row[key] for row in logged[3:]], rel=1e-5)
    assert drive.distance(weights, other_weights) < 1e-5
    ledgers = [drive.lines(configs.load(path, [f"run.name={name}"]).folder / "ledger.jsonl") for name in ("whole", "parts")]
    assert [entry["windows"] for entry in ledgers[0]] == [entry["windows"] for entry in ledgers[1]]


def test_another_mixture_is_another_run(ranks: Ranks, config: Callable[..., Path], two: tuple[Path, Path]) -> None:
    """Even where asked to go on: positions count windows of one mixture. The same one in other numbers goes on."""
    short, long = two
    path = config({"data.train": listed((short, 2), (long, 1))})
    ranks.run(drive.whole, path, [], 2, size=1)
    for sources, words in (
        (listed((short, 1), (long, 1)), "data.train's weights are not those that"),
        (listed((long, 1), (short, 2)), "the training data is not what"),
        (str(short), "the training data is not what"),
    ):
        for resume in ("auto", "must"):
            (outcome,) = ranks.outcomes(drive.whole, path, [f"data.train={json.dumps(sources)}", f"run.resume={resume}"], size=1)
            assert words in outcome.error
            assert "run.name=NEW" in outcome.error
    ((rows, _, _),) = ranks.run(drive.whole, path, [f"data.train={json.dumps(listed((short, 6), (long, 3)))}"], size=1)
    assert rows[-1]["step"] == 6


def test_an_epoch_of_several_sets_is_all_their_tokens(ranks: Ranks, config: Callable[..., Path], two: tuple[Path, Path]) -> None:
    """84 windows in updates of 8, the last one short: by size each set once. And every set is evaluated afterwards."""
    path = config({"data.train": [str(folder) for folder in two], "train.max_steps": None, "train.epochs": 1, "train.log_every": 11})
    ((rows, _, _),) = ranks.run(drive.whole, path, size=1)
    assert (rows[-1]["step"], rows[-1]["epoch"], rows[-1]["epoch/short"], rows[-1]["epoch/long"]) == (11, 1.0, 1.0, 1.0)
    said = evaluate_trained.evaluate(configs.load(path, [], OPTIONS).folder, None, "val", 2, print).splitlines()
    assert [line.split(" (val)")[0] for line in said] == [str(folder) for folder in two]
