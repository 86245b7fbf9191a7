"""After a bad update a run goes back, past the windows that caused it, and ends up where a run without them does."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import drive
import pytest
import torch
from group import Ranks

from pretrain import checkpoint, train
from pretrain.inspection import check_ledger
from pretrain.job import Finished
from pretrain.resume import Progress, past
from pretrain.spikes import FEWEST, Spikes
from pretrain.watch import NonFinite

Config = Callable[..., Path]
WINDOWS = 8  # of an update


def never(progress: Progress) -> bool:
    return False


def at_step_37(progress: Progress) -> bool:
    return progress.step == 37


def has_gone_back(progress: Progress) -> bool:
    return bool(progress.passed_over)


def whole(
    path: Path, overrides: list[str], bad: list[int], times: float, passed_over: list[list[int]],
    stop: Callable[[Progress], bool] = never,
) -> tuple[drive.Rows, drive.Weights, str | None]:  # fmt: skip
    """Updates whose first window is in `bad` report a loss so many times too large, not a number included, on the last rank. Returns this
    start's log lines and weights, and why it stopped."""
    original = train.update

    def update(job: Any, step: int, position: int) -> Any:
        batch, loss_sum, result = original(job, step, position)
        if batch.start in bad:
            applied = torch.tensor(times == times)
            loss_sum = loss_sum * (times if job.world.rank == job.world.size - 1 else 1)
            result = replace(result, grad_norm=result.grad_norm * times, applied=applied)
        return batch, loss_sum, result

    train.update = update
    try:
        job, progress = drive.begin(path, overrides)
        progress.passed_over += passed_over
        job.stops.agreed = lambda group: "SIGTERM" if stop(progress) else None  # type: ignore[method-assign]
        before = progress.step
        with contextlib.closing(job.loader):
            reason = train.train(job, progress)
        if job.tracker:
            job.tracker.finish()
        rows = drive.lines(job.cfg.folder / "metrics.jsonl") if job.is_main else []
        return [row for row in rows if "loss" in row and row["step"] > before], drive.weights(job), reason
    finally:
        train.update = original
        drive.leave()


def folder_of(path: Path, name: str) -> Path:
    return path.parent / "runs" / name


ROLLBACK = ["train.nonfinite=rollback", "train.max_steps=9", "train.checkpoint_every=2", "train.keep_last=9", "train.log_every=3",
            "optim.schedule=constant"]  # fmt: skip


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed2"])
def test_a_run_goes_on_past_what_broke_it(ranks: Ranks, config: Config, strategy: str) -> None:
    """Steps 1 and 5 are not finite; step 5 is noticed when step 6 is logged, after the checkpoint of step 4."""
    overrides = [*ROLLBACK, f"strategy.name={strategy}", "batch.micro=4"]
    path = config()
    bad = [0, 5 * WINDOWS]
    gone_back = ranks.run(whole, path, [*overrides, "run.name=back"], bad, float("nan"), [], size=2)
    without = ranks.run(whole, path, [*overrides, "run.name=without"], [], 1.0, [[0, 8], [40, 48]], size=2)
    for (_, weights, _), (_, expected, _) in zip(gone_back, without, strict=True):
        assert drive.largest_difference(weights, expected)[0] == 0
    keys = ("step", "position", "tokens", "loss", "lr", "grad_norm")
    assert [[row[k] for k in keys] for row in gone_back[0][0]] == [[row[k] for k in keys] for row in without[0][0]]
    assert [row["step"] for row in gone_back[0][0]] == [3, 6, 9]
    said = check_ledger(folder_of(path, "back") / "ledger.jsonl")
    assert "positions 0 to 88" in said[0]
    assert "16 windows were passed over by rollbacks" in said[2]
    newest = checkpoint.newest_valid(folder_of(path, "back") / "checkpoints", pytest.fail)
    assert newest is not None
    assert checkpoint.read_json(newest, "state.json")["progress"]["passed_over"] == [[0, 8], [40, 48]]


def test_not_for_ever(ranks: Ranks, config: Config) -> None:
    path, everything = config(), [WINDOWS * k for k in range(20)]
    (outcome,) = ranks.outcomes(whole, path, [*ROLLBACK, "train.rollbacks=2"], everything, float("nan"), [], size=1)
    assert outcome.error.startswith(f"{NonFinite.__module__}.NonFinite: the gradient of step 1 was not finite")
    assert outcome.error.endswith("the run has gone back 2 times already (train.rollbacks)")


def test_a_loss_that_jumps(ranks: Ranks, config: Config) -> None:
    """At step 40, once there are enough losses to judge by; noticed before the checkpoint of that step, which would hold it."""
    overrides = [*ROLLBACK, "train.max_steps=45", "train.checkpoint_every=8", "train.log_every=6", "optim.lr=0.001", "train.spike=8"]
    path = config()
    (gone_back,) = ranks.run(whole, path, [*overrides, "run.name=back"], [39 * WINDOWS], 3.0, [], size=1)
    (without,) = ranks.run(whole, path, [*overrides, "run.name=without"], [], 1.0, [[39 * WINDOWS, 40 * WINDOWS]], size=1)
    assert drive.largest_difference(gone_back[1], without[1])[0] == 0
    assert [row["step"] for row in gone_back[0]] == [6, 12, 18, 24, 30, 36, 42, 45]
    assert "8 steps were taken again" in check_ledger(folder_of(path, "back") / "ledger.jsonl")[1]


def test_what_a_run_has_learnt_of_its_data_outlives_a_restart(ranks: Ranks, config: Config) -> None:
    """Stopped before the spike of step 40, which a start with nothing to compare with would miss; and stopped once it has gone back, before
    there is another checkpoint to remember it, or a spike to see again: it ends with the weights of the uninterrupted run."""
    overrides = [*ROLLBACK, "train.max_steps=45", "train.checkpoint_every=8", "train.log_every=6", "optim.lr=0.001", "train.spike=8"]
    path, spike = config(), [39 * WINDOWS]
    (expected,) = ranks.run(whole, path, [*overrides, "run.name=whole"], spike, 3.0, [], size=1)
    rows: drive.Rows = []
    for bad, stop in ((spike, at_step_37), (spike, has_gone_back), ([], never)):
        (part,) = ranks.run(whole, path, [*overrides, "run.name=parts"], bad, 3.0, [], stop, size=1)
        assert part[2] == (None if stop is never else "SIGTERM")
        rows += part[0]
    assert drive.largest_difference(part[1], expected[1])[0] == 0
    assert [(row["step"], row["loss"]) for row in rows] == [(row["step"], row["loss"]) for row in expected[0]]
    for name in ("whole", "parts"):
        said = check_ledger(folder_of(path, name) / "ledger.jsonl")
        assert "positions 0 to 368" in said[0]
        assert "8 windows were passed over by rollbacks" in said[2]


@pytest.mark.parametrize(("checkpoint_every", "logged"), [(2, [3, 5]), (1, [3])])
def test_a_rollback_of_the_last_update_ends_the_run_with_the_one_before(
    ranks: Ranks, config: Config, checkpoint_every: int, logged: list[int]
) -> None:
    """Of a run that ends with its data: nothing is left after the windows of step 6. With a checkpoint of step 5 no step is taken again."""
    path = config({"data.val": str(config().parent / "toy")})
    overrides = [
        *ROLLBACK,
        "train.max_steps=null",
        "train.max_tokens=768",
        "train.eval_every=4",
        f"train.checkpoint_every={checkpoint_every}",
    ]
    ((rows, _, reason),) = ranks.run(whole, path, overrides, [5 * WINDOWS], float("nan"), [], size=1)
    assert reason is None
    assert [row["step"] for row in rows] == logged
    assert [row["step"] for row in drive.lines(folder_of(path, "tiny") / "metrics.jsonl") if "val_loss" in row] == [0, 4, 5]
    newest = checkpoint.newest_valid(folder_of(path, "tiny") / "checkpoints", pytest.fail)
    assert newest is not None
    assert newest.name == "step_00000005"
    assert "positions 0 to 40" in check_ledger(folder_of(path, "tiny") / "ledger.jsonl")[0]
    (again,) = ranks.outcomes(whole, path, overrides, [5 * WINDOWS], float("nan"), [], size=1)
    assert Finished.__name__ in again.error


def test_spikes() -> None:
    found = Spikes(6.0)
    calm = [5 + 0.01 * (k % 7) for k in range(FEWEST)]
    assert found.first([*calm[:-1], 99.0]) is None, "too few to judge by"
    found = Spikes(6.0)
    assert found.first(calm) is None
    assert found.first([5.02, 6.0, 5.02]) == 1
    assert found.first([5.02, 4.0, 5.02]) is None, "a loss that falls is welcome"
    assert Spikes(0.0).first([*calm, 1e9]) is None


def test_past() -> None:
    assert [past([[8, 16], [16, 24], [40, 48]], p) for p in (0, 8, 15, 16, 24, 40, 47, 48)] == [0, 24, 24, 24, 24, 48, 48, 48]
