"""The same work whatever the layout: losses, norms and weights of every strategy, against one process and against plain PyTorch."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drive
import numpy as np
import pytest
import torch
from group import Ranks
from transformers import GPT2Config, GPT2LMHeadModel

from pretrain import config as configs
from pretrain import loader, train
from pretrain import model as models
from pretrain.job import Job
from pretrain.optim import lr_at
from pretrain.order import shuffled
from pretrain.strategies import OPTIONS, STRATEGIES, choose
from pretrain.watch import NonFinite

Config = Callable[..., Path]
SGD = ["optim.name=sgd", "optim.lr=0.5", "optim.grad_clip=0"]
ADAMW = ["optim.name=adamw", "optim.lr=0.01", "optim.grad_clip=0.5"]
# (processes, sequences per micro-batch): 8 windows per update in all of them.
LAYOUTS = [(1, 2), (2, 2), (4, 2), (1, 8), (4, 1)]


def in_layouts(ranks: Ranks, path: Path, overrides: list[str], layouts: list[tuple[int, int]], count: int = 3) -> list[Any]:
    """(rows, weights) of each layout, after checking that all its ranks agree to the bit."""
    found = []
    for size, micro in layouts:
        by_rank = ranks.run(drive.run, path, [*overrides, f"batch.micro={micro}", f"run.name=w{size}m{micro}"], count, size=size)
        for rows, weights in by_rank[1:]:
            assert rows == by_rank[0][0]
            assert drive.largest_difference(weights, by_rank[0][1])[0] == 0
        found.append(by_rank[0])
    return found


def assert_same_curve(rows: drive.Rows, reference: drive.Rows, rel: float = 2e-6) -> None:
    assert [row["windows"] for row in rows] == [row["windows"] for row in reference]
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in reference]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in reference], rel=rel)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_any_layout_with_sgd_agrees_tensor_by_tensor(ranks: Ranks, config: Config, dropout: float) -> None:
    """AdamW would hide a gradient that is wrong by a factor. With dropout, only the micro-batch must be the same."""
    layouts = LAYOUTS if dropout == 0 else [(1, 2), (2, 2), (4, 2)]
    reference, *others = in_layouts(ranks, config(), [*SGD, f"model.dropout={dropout}"], layouts)
    for rows, weights in others:
        assert_same_curve(rows, reference[0])
        assert drive.largest_difference(weights, reference[1])[0] < 1e-6


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_any_layout_with_adamw_and_clipping_agrees(ranks: Ranks, config: Config, dropout: float) -> None:
    """As one norm: AdamW amplifies rounding where the true gradient is zero, as it is for the key part of `c_attn.bias`."""
    layouts = [(1, 2), (2, 2), (4, 2)]
    reference, *others = in_layouts(ranks, config(), [*ADAMW, f"model.dropout={dropout}"], layouts)
    assert min(row["grad_norm"] for row in reference[0]) > 0.5, "the case must clip"
    for rows, weights in others:
        assert_same_curve(rows, reference[0], rel=1e-5)
        assert drive.distance(weights, reference[1]) < 1e-5


def test_every_micro_batch_of_every_step_drops_out_something_else() -> None:
    places = [(seed, step, index) for seed in (1, 2) for step in (1, 2, 11) for index in (0, 1, 12)]
    draws = []
    for place in (*places, *places):
        train.seed_forward(*place, torch.device("cpu"))
        draws.append(float(torch.rand(())))
    assert draws[: len(places)] == draws[len(places) :]
    assert len(set(draws)) == len(places)


def plain_pytorch(cfg: configs.Config, updates: int) -> tuple[drive.Rows, drive.Weights]:
    """SGD on transformers' model, one window after the other, loss = sum of token losses over the number of targets."""
    sets, T = loader.open_sets(cfg), cfg.data.sequence_length
    layout = configs.layout(cfg, 1, sets.windows_per_epoch)
    n_layer, n_head, n_embd = cfg.shape
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_layer=n_layer, n_head=n_head, n_embd=n_embd, n_positions=T,
                                       resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))  # fmt: skip
    for name, tensor in models.plain_state(models.build(cfg, 50, 0)).items():
        model.get_parameter(name).data.copy_(tensor)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.optim.lr)
    rows, position = [], 0
    for step in range(1, updates + 1):
        optimizer.param_groups[0]["lr"] = lr_at(step, cfg.optim, layout.steps)
        stop = min(position + cfg.batch.tokens // T, layout.last_position or 10**9)
        windows = shuffled(np.arange(position, stop), sets.windows_per_epoch, cfg.data_seed, 0)
        total = 0.0
        for window in windows:
            tokens = torch.from_numpy(sets.train[0].read(int(window) * T, T + 1))[None]
            loss_sum = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).logits[0], tokens[0, 1:], reduction="sum")
            (loss_sum / (len(windows) * T)).backward()
            total += loss_sum.item()
        norm = math.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters() if p.grad is not None))
        optimizer.step()
        optimizer.zero_grad()
        rows.append({"loss": total / (len(windows) * T), "grad_norm": norm})
        position = stop
    return rows, {name: p.detach().numpy() for name, p in model.named_parameters()}


def test_an_uneven_last_update_is_plain_pytorchs(ranks: Ranks, config: Config) -> None:
    """The third update holds 3 windows of 8: on four ranks two of them have none. Every token weighs the same all the same."""
    path = config({"train.max_steps": None, "train.max_tokens": 19 * 16})
    overrides = [*SGD, "optim.weight_decay=0", "optim.schedule=linear"]
    rows, weights = plain_pytorch(configs.load(path, overrides), 3)
    for found, trained in in_layouts(ranks, path, overrides, [(1, 2), (2, 2), (4, 2), (4, 1)]):
        assert [row["tokens"] for row in found] == [128, 256, 304]
        for key in ("loss", "grad_norm"):
            assert [row[key] for row in found] == pytest.approx([row[key] for row in rows], rel=5e-6)
        assert drive.largest_difference(trained, weights)[0] < 2e-6


def test_repeating_a_batch_changes_nothing(ranks: Ranks, config: Config, make_set: Callable[..., Path]) -> None:
    """Every window is the same, so that 1, 2, 4 or 8 micro-batches of it have one mean, one gradient, one update."""
    same = make_set("same", np.tile(np.arange(16) * 3 % 50, 80))
    path = config({"data.train": same, "batch.micro": 1})
    overrides = [*SGD, "optim.lr=1"]
    found = []
    for windows in (1, 2, 4, 8):
        found += ranks.run(drive.run, path, [*overrides, f"batch.tokens={16 * windows}", f"run.name=a{windows}"], 2, size=1)
    found += ranks.run(drive.run, path, [*overrides, "batch.tokens=128", "run.name=two"], 2, size=2)[:1]
    for rows, weights in found[1:]:
        for key in ("loss", "grad_norm"):
            assert [row[key] for row in rows] == pytest.approx([row[key] for row in found[0][0]], rel=1e-6)
        assert drive.largest_difference(weights, found[0][1])[0] < 1e-6


def test_ranks_stay_bit_identical_over_ten_accumulated_updates(ranks: Ranks, config: Config) -> None:
    path = config({"batch.micro": 1, "batch.tokens": 256, "train.max_steps": 10})
    one, four = in_layouts(ranks, path, ADAMW, [(1, 1), (4, 1)], count=10)
    assert_same_curve(four[0], one[0], rel=1e-5)
    assert drive.distance(four[1], one[1]) < 1e-5


def begin_after_seeding_by_rank(path: Path, overrides: list[str]) -> drive.Weights:
    torch.manual_seed(1000 + int(os.environ.get("RANK", 0)))
    job, _ = drive.begin(path, overrides)
    job.loader.close()
    return drive.weights(job)


def test_ranks_start_from_the_same_weights(ranks: Ranks, config: Config) -> None:
    (one,) = ranks.run(begin_after_seeding_by_rank, config(), ["run.name=one"], size=1)
    for weights in ranks.run(begin_after_seeding_by_rank, config(), ["run.name=four"]):
        assert drive.largest_difference(weights, one)[0] == 0


GOLDEN = {"loss": 3.929962, "grad_norm": 1.035745, "weights": 5.251046}


def test_golden_step(ranks: Ranks, config: Config) -> None:
    """A change of these numbers changes every result that was ever published with this code."""
    ((rows, weights),) = ranks.run(drive.run, config(), ["optim.lr=0.01"], 1, size=1)
    mark = sum(math.sqrt(float((w.astype(np.float64) ** 2).sum())) / (k + 1) for k, w in enumerate(weights.values()))
    found = {"loss": rows[0]["loss"], "grad_norm": rows[0]["grad_norm"], "weights": mark}
    assert found == pytest.approx(GOLDEN, rel=2e-6), (
        f"one update of the tiny model came out as {found}. If arithmetic, initialisation or data order changed by mistake, find it: "
        "git bisect this test. If it changed on purpose, say so in the commit, raise the version in pretrain/__init__.py, and put the new "
        "numbers into GOLDEN."
    )


def dtypes(path: Path, overrides: list[str]) -> tuple[set[torch.dtype], set[torch.dtype], set[torch.dtype], drive.Rows, drive.Weights]:
    job, progress = drive.begin(path, overrides)
    reduced: set[torch.dtype] = set()
    for p in job.strategy.module.parameters():
        p.register_post_accumulate_grad_hook(lambda p: reduced.add(p.grad.dtype))
    rows = drive.steps(job, progress, 3)
    job.loader.close()
    state = job.strategy.state()
    return {t.dtype for t in state["model"].values()}, {t.dtype for t in state["optimizer"].values()}, reduced, rows, drive.weights(job)


def test_bf16_keeps_weights_moments_and_gradients_in_fp32(ranks: Ranks, config: Config) -> None:
    (exact,) = ranks.run(drive.run, config(), ["run.name=exact"], size=1)
    for size in (1, 2):
        for *kinds, rows, weights in ranks.run(dtypes, config(), ["run.precision=bf16", f"run.name=half{size}"], size=size):
            assert kinds == [{torch.float32}] * 3
            losses = [row["loss"] for row in rows]
            assert losses != [row["loss"] for row in exact[0]], "autocast must be on"
            assert losses == pytest.approx([row["loss"] for row in exact[0]], rel=5e-3)
            assert drive.distance(weights, exact[1]) < 0.1


def test_bf16_does_not_swallow_small_updates(config: Config) -> None:
    """100 updates of 6e-4 on a weight of 1: bf16 weights would not move at all."""
    cfg = configs.load(config({"run.precision": "bf16", "optim.lr": 6e-4, "optim.weight_decay": 0.0, "optim.schedule": "constant"}))
    strategy = choose(cfg, configs.layout(cfg, 1, 100), "bf16")
    weight = fed_by_hand(strategy, cfg, [1.0], [[[1.0]]] * 100)
    assert float(weight[0]) == pytest.approx(1 - 100 * 6e-4, rel=1e-3)


class ByHand(torch.nn.Module):
    """A module whose gradient is what it is given."""

    def __init__(self, start: list[float]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(start))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def fed_by_hand(strategy: Any, cfg: configs.Config, start: list[float], updates: list[list[list[float]]],
                results: list[Any] | None = None, scale: float | None = None) -> torch.Tensor:  # fmt: skip
    """The weight after updates, each a list of micro-batches, each a gradient."""
    from pretrain.optim import make_recipe

    strategy.make_accelerator(cfg)
    module = ByHand(start)
    model, _ = strategy.prepare(module, make_recipe(dict(module.named_parameters()), cfg.optim))
    if scale is not None:
        strategy.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for micros in updates:
        for k, gradient in enumerate(micros):
            with strategy.accumulate(model, last=k == len(micros) - 1):
                strategy.backward(model(torch.tensor(gradient)))
        result = strategy.step(cfg.optim.grad_clip)
        if results is not None:
            results.append(result)
    return module.weight.detach()


def test_fp16_unscales_before_it_clips(config: Config) -> None:
    cfg = configs.load(config({"optim.name": "sgd", "optim.lr": 1.0, "optim.grad_clip": 1.0, "optim.weight_decay": 0.0}))
    results: list[Any] = []
    weight = fed_by_hand(choose(cfg, configs.layout(cfg, 1, 100), "fp16"), cfg, [0.0, 0.0], [[[3.0, 4.0]]], results, scale=65536.0)
    assert float(results[0].grad_norm) == pytest.approx(5.0)
    assert weight.tolist() == pytest.approx([-0.6, -0.8], rel=1e-5)


def test_clipping_sees_the_sum_of_the_micro_batches(config: Config) -> None:
    """Halves of 3 and −2 add up to 0.5: nothing to clip at 1."""
    cfg = configs.load(config({"optim.name": "sgd", "optim.lr": 1.0, "optim.grad_clip": 1.0, "optim.weight_decay": 0.0}))
    results: list[Any] = []
    weight = fed_by_hand(choose(cfg, configs.layout(cfg, 1, 100), "fp32"), cfg, [0.0], [[[1.5], [-1.0]]], results)
    assert [float(r.grad_norm) for r in results] == [0.5]
    assert weight.tolist() == [-0.5]


def poison(job: Job, rank: int, step: int) -> None:
    """The loss of one rank at one step becomes NaN."""
    if job.world.rank != rank:
        return
    forward, calls = job.strategy.module.forward, iter(range(10**9))

    def poisoned(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss_sum, tokens = forward(*args)
        at = 1 + next(calls) // job.layout.accumulation
        return loss_sum * (math.nan if at == step else 1.0), tokens

    job.strategy.module.forward = poisoned


def train_poisoned(path: Path, overrides: list[str], rank: int, step: int) -> tuple[str, drive.Weights, drive.Rows, list[str]]:
    """(what was raised, weights, metrics, checkpoints)."""
    job, progress = drive.begin(path, overrides)
    poison(job, rank, step)
    raised = ""
    try:
        train.train(job, progress)
    except NonFinite as error:
        raised = str(error)
    job.loader.close()
    folder = job.cfg.folder
    metrics = drive.lines(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    return raised, drive.weights(job), metrics, sorted(p.name for p in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("interval", ["train.log_every=4", "train.checkpoint_every=3"])
def test_nan_on_one_rank_stops_all_and_names_step_and_rank(ranks: Ranks, config: Config, interval: str) -> None:
    """Its update is not applied, nor saved, whether a log line or a checkpoint is what comes first."""
    path = config({"train.log_every": 100})
    ((_, sound),) = ranks.run(drive.run, path, ["run.name=sound"], 2, size=1)
    for raised, weights, metrics, checkpoints in ranks.run(train_poisoned, path, [interval], 1, 3, size=2):
        assert "step 3" in raised
        assert "rank 1 had a loss that is not finite" in raised
        assert all(np.isfinite(w).all() for w in weights.values())
        if "checkpoint" in interval:
            assert drive.distance(weights, sound) < 1e-5
        assert checkpoints == []
        assert metrics == []


def test_nan_can_be_skipped_and_is_counted(ranks: Ranks, config: Config) -> None:
    """The bad update changes nothing; the log has null for the loss and one skipped update."""
    for raised, weights, metrics, checkpoints in ranks.run(train_poisoned, config(), ["train.nonfinite=skip"], 1, 3, size=2):
        assert raised == ""
        assert all(np.isfinite(w).all() for w in weights.values())
        assert [row["skipped"] for row in metrics] == [0, 0, 1, 0, 0, 0]
        assert [row["loss"] is None for row in metrics] == [False, False, True, False, False, False]
        assert checkpoints == ["step_00000006"]


def start_high(job: Job) -> None:
    assert job.strategy.scaler is not None
    job.strategy.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    job.strategy.scaler.scale(torch.zeros(()))


def train_fp16(path: Path, overrides: list[str]) -> tuple[drive.Rows, drive.Weights, drive.Rows, float]:
    scales: list[Any] = []

    def tamper(job: Job) -> None:
        start_high(job)
        scales.append(job.strategy.scaler)

    rows, weights, _ = drive.whole(path, overrides, tamper=tamper)
    cfg = configs.load(path, overrides, OPTIONS)
    return rows, weights, drive.lines(cfg.folder / "ledger.jsonl"), scales[0].get_scale()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("size", [1, 2])
def test_fp16_retries_the_same_windows_at_a_lower_scale(ranks: Ranks, config: Config, size: int, optimizer: str) -> None:
    """An overflow costs time and nothing else: step, learning rate and data are those of fp32."""
    path = config({"optim.name": optimizer, "optim.lr": 1e-3})
    exact = ranks.run(drive.whole, path, ["run.name=exact"], size=1)[0]
    rows, weights, ledger, scale = ranks.run(train_fp16, path, ["run.precision=fp16", f"run.name=half{size}"], size=size)[0]
    assert scale < 2.0**40
    assert sum(entry["attempt"] > 0 for entry in ledger) == round(math.log2(2.0**40 / scale)) > 5
    by_step: dict[int, set[str]] = {}
    for entry in ledger:
        by_step.setdefault(entry["step"], set()).add(entry["windows"])
    assert [len(windows) for windows in by_step.values()] == [1] * 6, "a retry takes the same windows"
    assert [entry["attempt"] for entry in ledger if entry["step"] == 1] == list(range(sum(e["step"] == 1 for e in ledger)))
    for key in ("step", "tokens", "position", "lr", "skipped"):
        assert [row[key] for row in rows] == [row[key] for row in exact[0]]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in exact[0]], rel=5e-3)
    assert drive.distance(weights, exact[1]) < 0.02


def test_fp16_gives_up_when_no_scale_helps(config: Config) -> None:
    cfg = configs.load(config())
    strategy = choose(cfg, configs.layout(cfg, 1, 100), "fp16")
    results: list[Any] = []
    fed_by_hand(strategy, cfg, [1.0], [[[math.nan]]] * 40, results)
    assert not any(bool(r.applied) for r in results)
    with pytest.raises(FloatingPointError, match=r"overflows at every loss scale .* run\.precision=bf16"):
        strategy.must_retry(results[-1])


def chosen(path: Path, overrides: list[str], size: int) -> str:
    """The strategy's name, or why it was refused: before any process group exists."""
    cfg = configs.load(path, overrides, OPTIONS)
    try:
        return choose(cfg, configs.layout(cfg, size, 100), "fp32").name
    except configs.ConfigError as error:
        return str(error)


def test_what_was_asked_for_is_what_runs(config: Config) -> None:
    assert [chosen(config(), [], size) for size in (1, 2)] == ["single", "ddp"]
    assert "strategy.name=single runs in one process; 2 were started" in chosen(config(), ["strategy.name=single"], 2)
    assert "strategy.name=ddp needs at least 2 processes; 1 was started" in chosen(config(), ["strategy.name=ddp"], 1)


def test_accelerates_environment_has_no_say(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "7",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
    }.items():
        monkeypatch.setenv(name, value)
    cfg = configs.load(config())
    accelerator = choose(cfg, configs.layout(cfg, 1, 100), "fp32").make_accelerator(cfg)
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("no", 1)
    assert accelerator.state.dynamo_plugin.backend == "NO"


def wire_bytes(path: Path) -> tuple[int, int]:
    job, _ = drive.begin(path)
    job.loader.close()
    return job.strategy.wire(1), sum(p.numel() for p in job.model.parameters())


def test_bytes_on_the_wire_are_a_rings(ranks: Ranks, config: Config) -> None:
    for size, share in ((1, 0.0), (2, 1.0), (4, 1.5)):
        for wire, parameters in ranks.run(wire_bytes, config({"run.name": f"w{size}"}), size=size):
            assert wire == share * 4 * parameters


def test_every_strategy_is_a_config_key() -> None:
    assert set(OPTIONS) == set(STRATEGIES)
