"""Local SGD and DiLoCo: degenerate cases, replicas in processes and simulated, telemetry, what an evaluation leaves alone."""

from collections.abc import Callable
from pathlib import Path

import drive
import numpy as np
import pytest
import torch
from group import Ranks

from pretrain.strategies.local import LocalSGD

Config = Callable[..., Path]
SGD = ["optim.name=sgd", "optim.lr=0.1", "optim.grad_clip=0"]
ADAMW = ["optim.name=adamw", "optim.lr=0.01", "optim.grad_clip=0.5"]
H2 = ["strategy.options.sync_every=2"]


def final(ranks: Ranks, path: Path, overrides: list[str], size: int, count: int = 4) -> drive.Weights:
    name = "run.name=" + "-".join([str(size), *overrides]).replace("/", "")[-100:].replace(".", "")
    return ranks.run(drive.run, path, [*overrides, name], count, size=size)[0][1]


def test_local_sgd_that_always_meets_is_ddp(ranks: Ranks, config: Config) -> None:
    """Averaging after one step of SGD is averaging its gradients."""
    ddp = final(ranks, config(), [*SGD, "strategy.name=ddp"], 4)
    local = final(ranks, config(), [*SGD, "strategy.name=local_sgd", "strategy.options.sync_every=1"], 4)
    assert drive.largest_difference(local, ddp)[0] < 1e-6


def test_diloco_without_momentum_at_rate_1_is_averaging(ranks: Ranks, config: Config) -> None:
    plain = ["strategy.name=diloco", "strategy.options.outer_lr=1", "strategy.options.outer_momentum=0"]
    for every in ("strategy.options.sync_every=1", "strategy.options.sync_every=2"):
        averaged = final(ranks, config(), [*ADAMW, "strategy.name=local_sgd", every], 2)
        assert drive.distance(final(ranks, config(), [*ADAMW, *plain, every], 2), averaged) < 1e-5
        assert drive.distance(final(ranks, config(), [*ADAMW, "strategy.name=diloco", every], 2), averaged) > 1e-3


@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
def test_replicas_may_be_groups_of_processes(ranks: Ranks, config: Config, name: str) -> None:
    """Two replicas of two processes under DDP, against two in one process with the same windows."""
    grouped = final(ranks, config(), [*ADAMW, *H2, f"strategy.name={name}", "strategy.replicas=2", "batch.micro=2"], 4)
    simulated = final(ranks, config(), [*ADAMW, *H2, f"strategy.name={name}", "strategy.simulate=2", "batch.micro=4"], 1)
    assert drive.distance(grouped, simulated) < 1e-5


def test_one_replica_of_local_sgd_is_single(ranks: Ranks, config: Config) -> None:
    one = final(ranks, config(), [*ADAMW, *H2, "strategy.name=local_sgd", "strategy.simulate=1"], 1)
    assert drive.largest_difference(one, final(ranks, config(), ADAMW, 1))[0] == 0


def test_the_user_is_told_who_meets_when(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    drive.run(config(), [*H2, "strategy.name=diloco", "strategy.simulate=4"])
    assert (
        "4 replicas in turn in this process: what they learn is real, the speed is not; they meet every 2 updates"
        in capsys.readouterr().out
    )


def test_accumulation_changes_nothing_nor_what_a_replica_sees(ranks: Ranks, config: Config) -> None:
    found = [final(ranks, config(), [*ADAMW, *H2, "strategy.name=diloco", f"batch.micro={micro}"], 2) for micro in (4, 2)]
    assert drive.distance(*found) < 1e-5


def test_telemetry_is_logged_from_the_first_meeting_on(ranks: Ranks, config: Config) -> None:
    path = config({"train.checkpoint_every": 0})
    rows = ranks.run(drive.whole, path, [*ADAMW, "strategy.name=local_sgd", "strategy.options.sync_every=3"], size=2)[0][0]
    assert ["replica_distance" in row for row in rows] == [False, False, True, True, True, True]
    for row in rows[2:]:
        assert 0 < row["replica_distance"] < row["replica_drift"]
        assert -1 <= row["pseudo_gradient_cosine"] <= 1
    assert rows[2]["replica_drift"] == rows[4]["replica_drift"] != rows[5]["replica_drift"]


def test_the_formulas_of_the_telemetry() -> None:
    """Two replicas that moved by (3, 0) and (0, 4) from the anchor."""
    strategy = LocalSGD("local_sgd", LocalSGD.Options(), "fp32")
    strategy.replica_count, strategy.peers = 2, None
    strategy.anchor = [torch.zeros(2)]
    strategy.replicas = [
        type("R", (), {"weights": [torch.tensor([3.0, 0.0])]})(),
        type("R", (), {"weights": [torch.tensor([0.0, 4.0])]})(),
    ]
    found = {key: float(value) for key, value in strategy.measure([torch.tensor([1.5, 2.0])]).items()}
    assert found["replica_drift"] == pytest.approx(np.sqrt((9 + 16) / 2))
    assert found["replica_distance"] == pytest.approx(2.5)  # half of the hypotenuse
    assert found["pseudo_gradient_cosine"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("rows", [64, 5000], ids=["many tensors to a bucket", "a bucket of one tensor"])
def test_looking_and_saving_change_nothing(ranks: Ranks, config: Config, rows: int) -> None:
    """A bucket that holds one tensor must be a copy of it as well: it may be a weight or a moment that trains."""
    path = config({"train.checkpoint_every": 0, "model.vocab_size": rows, "model.n_embd": 64})
    overrides = [*ADAMW, "strategy.name=diloco", "strategy.options.sync_every=3", "strategy.options.bucket_mb=1"]
    looked = ranks.run(drive.whole, path, [*overrides, "train.eval_every=1", "train.checkpoint_every=3", "run.name=looked"], size=2)
    left_alone = ranks.run(drive.whole, path, [*overrides, "run.name=alone"], size=2)
    for (_, weights, _), (_, expected, _) in zip(looked, left_alone, strict=True):
        assert drive.largest_difference(weights, expected)[0] == 0
    simulated = [*overrides, "strategy.simulate=2", "batch.micro=4", "run.name=simulated"]
    assert drive.distance(ranks.run(drive.whole, path, simulated, size=1)[0][1], left_alone[0][1]) < 1e-5


def test_the_logged_norm_is_the_root_mean_square_over_replicas(ranks: Ranks, config: Config) -> None:
    path = config({"train.checkpoint_every": 0})
    overrides = [*SGD, "strategy.name=local_sgd", "strategy.options.sync_every=3"]
    logged = ranks.run(drive.whole, path, [*overrides, "run.name=logged"], size=2)[0][0]
    steps = ranks.run(drive.run, path, [*overrides, "run.name=steps"], 6, size=2)
    norms = np.array([[row["grad_norm"] for row in rows] for rows, _ in steps])
    assert (norms[0] != norms[1]).all()
    assert [row["grad_norm"] for row in logged] == pytest.approx(list(np.sqrt((norms**2).mean(axis=0))), rel=1e-6)
