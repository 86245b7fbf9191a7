"""Models and options that a strategy cannot take are named before step 1; what it can take, trains."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drive
import pytest
from group import Ranks

from pretrain import config as configs
from pretrain.strategies import OPTIONS

Config = Callable[..., Path]
LOCAL = ["strategy.options.sync_every=2", "train.checkpoint_every=2"]


def train_all(path: Path, runs: dict[str, list[str]]) -> dict[str, Any]:
    """Of each name, the losses of two updates and a checkpoint's tensors; or what refused it."""
    found: dict[str, Any] = {}
    for name, overrides in runs.items():
        try:
            rows, _, _ = drive.whole(path, [f"strategy.name={name}", "train.max_steps=2", f"run.name={name}", *overrides])
            found[name] = [row["loss"] for row in rows]
        except configs.ConfigError as error:
            found[name] = str(error)
        drive.leave()
    return found


def test_weights_that_do_not_train(ranks: Ranks, config: Config) -> None:
    runs = {"ddp": [], "zero1": [], "fsdp1": [], "fsdp2": [], "deepspeed2": [], "deepspeed3": [],
            "ddp_powersgd": ["strategy.options.start_step=0"]}  # fmt: skip
    found = ranks.run(train_all, config({"model.build": "custom_models:frozen"}), runs, size=2)[0]
    for name in ("deepspeed2", "deepspeed3", "ddp_powersgd"):
        message = found.pop(name)
        assert message.startswith(
            f"strategy.name={name} does not work with weights that do not train (transformer.wpe.weight of model.build)"
        )
    for name, losses in found.items():
        assert losses == pytest.approx(found["ddp"], rel=1e-5), name


def test_a_weight_that_takes_no_part(ranks: Ranks, config: Config) -> None:
    runs: dict[str, list[str]] = {"ddp": [], "zero1": [], "fsdp2": [], "local_sgd": LOCAL}
    found = ranks.run(train_all, config({"model.build": "custom_models:with_a_spare"}), runs, size=2)[0]
    for name in ("ddp", "zero1"):
        assert found[name].startswith(f"spare takes no part in the loss: strategy.name={name} would wait for its gradient")
    for name in ("fsdp2", "local_sgd"):
        assert len(found[name]) == 2, found[name]


def test_a_weight_without_dimensions(ranks: Ranks, config: Config) -> None:
    runs: dict[str, list[str]] = {"ddp": [], "zero1": [], "diloco": LOCAL}
    found = ranks.run(train_all, config({"model.build": "custom_models:Scaled"}), runs, size=2)[0]
    assert found["ddp"] == pytest.approx(found["zero1"], rel=1e-5)
    assert len(found["diloco"]) == 2


@pytest.mark.parametrize(
    ("strategy", "option", "words"),
    [
        ("ddp", "bucket_cap_mb=0", "must lie between 1 and "),
        ("ddp_powersgd", "bucket_cap_mb=-3", "must lie between 1 and "),
        ("ddp_powersgd", "rank=0", "must be 1 or more, found 0"),
        ("ddp_powersgd", "start_step=-1", "must be 0 or more, found -1"),
        ("zero1", "bucket_cap_mb=1000000000", "must lie between 1 and "),
        ("fsdp2", "blocks_per_unit=0", "must be 1 or more, found 0"),
        ("local_sgd", "sync_every=0", "must be 1 or more, found 0"),
        ("local_sgd", "bucket_mb=0", "must lie between 1 and "),
        ("diloco", "outer_lr=0", "must lie between 1e-06 and 100, found 0.0"),
        ("diloco", "outer_momentum=1", "must lie between 0 and 0.9999, found 1.0"),
        ("deepspeed1", "reduce_bucket_size=0", "must lie between 1 and 1e+12, found 0"),
        ("deepspeed2", "allgather_bucket_size=-5", "must lie between 1 and "),
        ("deepspeed3", "stage3_max_live_parameters=-1", "must lie between 0 and "),
    ],
)
def test_numbers_beyond_their_limits_are_refused_with_the_config(config: Config, strategy: str, option: str, words: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(configs.ConfigError) as raised:
        configs.load(config(), [f"strategy.name={strategy}", f"strategy.options.{option}"], OPTIONS)
    assert str(raised.value).startswith(f"strategy.options.{name}: {words}")


def test_every_number_among_the_options_has_limits() -> None:
    """Or a strategy says itself what it can be."""
    own = {"reshard_after_forward"}
    for name, cls in OPTIONS.items():
        hints = {field.name: field.type for field in dataclasses.fields(cls)}
        numbers = {field for field, hint in hints.items() if any(kind in str(hint) for kind in ("int", "float"))}
        assert numbers - own == set(getattr(cls, "limits", {})), name


def start_sgd_then(path: Path, second: list[str]) -> list[float]:
    first = ["optim.name=sgd", "optim.lr=0.1", "train.checkpoint_every=2", "strategy.name=ddp"]
    drive.whole(path, first, stop_after=2)
    drive.leave()
    rows, _, _ = drive.whole(path, ["run.resume=must", *second])
    return [row["loss"] for row in rows]


@pytest.mark.parametrize("second", [["optim.name=adamw"], ["optim.name=sgd", "optim.momentum=0.9", "strategy.name=zero1"]], ids=str)
def test_another_optimiser_starts_anew_and_says_so(ranks: Ranks, config: Config, second: list[str]) -> None:
    losses = ranks.run(start_sgd_then, config(), second, size=2)[0]
    assert len(losses) == 4
    assert all(loss > 0 for loss in losses)
