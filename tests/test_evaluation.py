"""Validation loss: the sum of token losses over the number of targets, for any layout, changing nothing of the training."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drive
import pytest
import torch
from group import Ranks
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from pretrain import config as configs
from pretrain import loader
from pretrain import model as models
from pretrain.config import Config, Model, replace
from pretrain.evaluation import evaluate, evaluation_metrics
from pretrain.loader import IGNORED
from pretrain.strategies import OPTIONS

CPU = torch.device("cpu")


def make(dropout: float = 0.5) -> models.PretrainGPT2:
    return models.build(replace(Config(model=Model(n_layer=2, n_head=2, n_embd=32, dropout=dropout)), "data.sequence_length", 16), 50, 0)


def batches(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Four windows of 16 targets, of the last of which 3 count; as micro-batches of 1."""
    rows = torch.randint(0, 50, (4, 17), generator=torch.Generator().manual_seed(seed))
    targets = rows[:, 1:].clone()
    targets[3, 3:] = IGNORED
    return [(rows[k : k + 1, :-1], targets[k : k + 1]) for k in range(4)]


def alone(total: Tensor) -> Tensor:
    return total


@pytest.mark.parametrize("micro", [1, 2, 3, 4])
def test_every_target_weighs_the_same(micro: int) -> None:
    model = make()
    inputs, targets = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    grouped = list(zip(inputs.split(micro), targets.split(micro), strict=True))
    loss, count = evaluate(model, grouped, alone, CPU)
    model.eval()
    logits = model.as_causal_lm()(inputs).logits[..., :50]
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED) / 51
    assert count == 51
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)


def test_dropout_is_off_and_afterwards_on_again() -> None:
    model = make()
    first, second = (evaluate(model, batches(), alone, CPU) for _ in range(2))
    assert first == second
    assert all(module.training for module in model.modules())
    model.eval()
    assert evaluate(model, batches(), alone, CPU) == first
    assert not any(module.training for module in model.modules())


def test_training_mode_returns_after_a_failure() -> None:
    model = make()

    def failing() -> Any:
        yield batches()[0]
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        evaluate(model, failing(), alone, CPU)
    assert all(module.training for module in model.modules())
    assert torch.is_grad_enabled()


def test_evaluation_keeps_no_gradient_and_no_graph() -> None:
    for same_graph in (False, True):
        model = make(dropout=0.0)
        evaluate(model, batches(), alone, CPU, same_graph)
        assert all(p.grad is None for p in model.parameters())
        assert model.training


def test_sums_of_ranks_are_added_before_dividing() -> None:
    """A rank whose windows are all padding counts for nothing."""
    model = make()
    exact = evaluate(model, batches(), alone, CPU)
    nothing = [(inputs, torch.full_like(targets, IGNORED)) for inputs, targets in batches()[2:]]
    totals: list[Tensor] = []

    def keep(total: Tensor) -> Tensor:
        totals.append(total.clone())
        raise KeyError("stop")

    for part in (batches()[:2], batches()[2:], nothing):
        with pytest.raises((KeyError, ZeroDivisionError)):
            evaluate(model, part, keep, CPU)
    loss, count = evaluate(model, batches()[:2], lambda total: totals[0] + totals[1] + totals[2], CPU)
    assert loss == pytest.approx(exact[0], rel=1e-12)
    assert count == exact[1]


def test_bits_per_byte_by_hand() -> None:
    """4.2 bytes per token, a loss of 2.1·ln 2 nats per token: half a bit per byte."""
    found = evaluation_metrics(2.1 * math.log(2), 4.2)
    assert found["val_bits_per_byte"] == pytest.approx(0.5)
    assert found["val_perplexity"] == pytest.approx(2**2.1)
    assert evaluation_metrics(3.0, None)["val_bits_per_byte"] is None
    assert math.isfinite(evaluation_metrics(1e6, None)["val_perplexity"] or math.inf)
    assert math.isnan(evaluation_metrics(math.nan, None)["val_loss"] or 0.0)


def by_hand(cfg: configs.Config, windows: int) -> float:
    """With transformers' own model, one window after the other, from the initial weights."""
    built = models.build(cfg, 50, 0)
    model = GPT2LMHeadModel(GPT2Config.from_dict({**built.config.to_dict(), "vocab_size": 50})).eval()
    for name, tensor in models.plain_state(built).items():
        model.get_parameter(name).data.copy_(tensor)
    (stream,) = loader.open_sets(cfg).val
    total = 0.0
    with torch.no_grad():
        for w in range(windows):
            tokens = torch.from_numpy(stream.read(16 * w, 17))
            total += float(nn.functional.cross_entropy(model(tokens[None, :-1]).logits[0], tokens[1:], reduction="sum"))
    return total / (16 * windows)


@pytest.mark.parametrize("windows", [1, 5, 8])
def test_one_value_for_any_layout_and_at_any_time(ranks: Ranks, config: Callable[..., Path], windows: int) -> None:
    """Fewer windows than ranks, an odd number, and all of them; a frozen model, evaluated at steps 0, 1, 2, and after a restart."""
    changes = {"optim.lr": 0.0, "train.eval_every": 1, "train.max_steps": 2, "model.dropout": 0.3, "train.eval_tokens": 16 * windows}
    path = config(changes)
    expected = by_hand(configs.load(path), windows)
    for size, micro in ((1, 1), (1, 8), (2, 2), (4, 2)):
        name = [f"run.name=w{size}m{micro}", f"batch.micro={micro}"]
        ranks.run(drive.whole, path, name, size=size)
        if size == 2:
            ranks.run(drive.whole, path, [*name, "run.resume=must", "train.max_steps=3"], size=4)
        folder = configs.load(path, name, OPTIONS).folder
        values = [row["val_loss"] for row in drive.lines(folder / "metrics.jsonl") if "val_loss" in row]
        assert len(values) == (4 if size == 2 else 3)
        assert len(set(values[:3])) == 1, "bit for bit the same on one layout"
        assert values == pytest.approx([expected] * len(values), rel=1e-6)


def test_evaluating_changes_nothing_of_the_training(ranks: Ranks, config: Callable[..., Path]) -> None:
    path = config({"model.dropout": 0.2})
    (quiet,) = ranks.run(drive.whole, path, ["run.name=quiet"], size=1)
    (often,) = ranks.run(drive.whole, path, ["run.name=often", "train.eval_every=1"], size=1)
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in (quiet[0], often[0])]
    assert losses[0] == losses[1]
    assert drive.largest_difference(quiet[1], often[1])[0] == 0


def test_bits_per_byte_use_the_validation_splits_own_ratio(ranks: Ranks, config: Callable[..., Path]) -> None:
    """2 bytes per token in the manifest of the toy set."""
    path = config({"train.eval_every": 5, "train.max_steps": 1})
    ranks.run(drive.whole, path, size=1)
    row = drive.lines(configs.load(path).folder / "metrics.jsonl")[0]
    assert row["val_bits_per_byte"] == pytest.approx(row["val_loss"] / math.log(2) / 2, rel=0.01)
