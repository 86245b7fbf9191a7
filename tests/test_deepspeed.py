"""DeepSpeed's three stages do the work of one process, in every precision, and what they save fits every other strategy."""

import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import drive
import numpy as np
import pytest
import torch
from group import Ranks

from pretrain import config as configs
from pretrain.job import Job, warm_up
from pretrain.pieces import pieces
from pretrain.strategies import OPTIONS, choose
from pretrain.strategies.zero_deepspeed import EngineScale

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
Config = Callable[..., Path]
Found = list[tuple[drive.Rows, drive.Weights]]
STAGES = ("deepspeed1", "deepspeed2", "deepspeed3")
SGD = ["optim.name=sgd", "optim.lr=0.5", "optim.grad_clip=0"]
ADAMW = ["optim.lr=0.01", "optim.grad_clip=0.5"]
DIVIDED = ["strategy.options.stage3_param_persistence_threshold=0"]  # every weight of the tiny model is below the default


def options(name: str) -> list[str]:
    return [f"strategy.name={name}", *(DIVIDED if name == "deepspeed3" else [])]


def one_process(ranks: Ranks, path: Path, overrides: Sequence[str]) -> tuple[drive.Rows, drive.Weights]:
    found: tuple[drive.Rows, drive.Weights] = ranks.run(drive.run, path, [*overrides, "run.name=one"], size=1)[0]
    return found


def half(path: Path, each: Sequence[Sequence[str]]) -> list[tuple[drive.Weights, set[torch.dtype], set[torch.dtype], drive.Rows]]:
    """(weights before the first step, dtypes that are saved, dtypes that compute, rows)."""
    found = []
    for k, overrides in enumerate(each):
        job, progress = drive.begin(path, [*overrides, f"run.name=half{k}"])
        before = drive.weights(job)
        rows = drive.steps(job, progress, 3)
        job.loader.close()
        state = job.strategy.state()
        saved = {t.dtype for t in (*state["model"].values(), *state["optimizer"].values())}
        found.append((before, saved, {p.dtype for p in job.strategy.module.parameters()}, rows))
        drive.leave()
    return found


@needs_deepspeed
def test_half_precision_keeps_weights_and_moments_in_fp32(ranks: Ranks, config: Config) -> None:
    """Even the first of them: DeepSpeed makes them of weights that it has already cast."""
    path = config({"optim.lr": 1e-3})
    start = ranks.run(drive.run, path, ["run.name=start"], 0, size=1)[0][1]
    rows, _ = one_process(ranks, path, [])
    cases = [(name, precision) for name in STAGES for precision in ("bf16", "fp16")]
    found = ranks.run(half, path, [[*options(name), f"run.precision={precision}"] for name, precision in cases], size=2)[0]
    for (name, precision), (before, saved, computing, mine) in zip(cases, found, strict=True):
        assert drive.largest_difference(before, start)[0] == 0
        assert (saved, computing) == ({torch.float32}, {{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]})
        bound = {"bf16": 2e-3, "fp16": 2e-4}[precision]
        assert [row["loss"] for row in mine] == pytest.approx([row["loss"] for row in rows], abs=bound), (name, precision)
        assert [row["grad_norm"] for row in mine] == pytest.approx([row["grad_norm"] for row in rows], rel=10 * bound), (name, precision)


def without_and_with_nan(path: Path, each: Sequence[Sequence[str]]) -> list[tuple[bool, float, list[bool], drive.Rows, drive.Rows]]:
    """(does the state that NaN found differ afterwards, the loss scale then ÷ before, was it applied, rows with and without it)."""
    found = []
    for k, overrides in enumerate(each):
        sound = drive.run(path, [*overrides, f"run.name=sound{k}"], 2)[0]
        drive.leave()
        job, progress = drive.begin(path, [*overrides, f"run.name=nan{k}"])
        rows = drive.steps(job, progress, 1)
        strategy = job.strategy
        before = [piece.tensor.clone() for piece in pieces(strategy.state())]
        scale = strategy.scaler.get_scale() if strategy.scaler else 1.0
        warm_up(job)  # once more: leaves no trace, of the loss scale neither
        assert (strategy.scaler.get_scale() if strategy.scaler else 1.0) == scale
        tokens = torch.zeros(2, 16, dtype=torch.long)
        applied = []
        for last in (False, True):
            with strategy.accumulate(job.model, last=last):
                loss_sum, _ = job.model(tokens, tokens.clone())
                strategy.backward(loss_sum * (math.nan if job.world.rank == 1 and not last else 1e-3))
        applied.append(bool(strategy.step(0.5).applied))
        differ = any(not torch.equal(was, piece.tensor) for was, piece in zip(before, pieces(strategy.state()), strict=True))
        lower = strategy.scaler.get_scale() / scale if strategy.scaler else 1.0
        rows += drive.steps(job, progress, 1)
        job.loader.close()
        drive.leave()
        found.append((differ, lower, applied, rows, sound))
    return found


@needs_deepspeed
def test_nan_on_one_rank_is_refused_by_all_and_leaves_no_trace(ranks: Ranks, config: Config) -> None:
    """In every stage and precision, whichever of DeepSpeed's several checks that takes."""
    cases = [(name, precision) for name in STAGES for precision in ("fp32", "bf16", "fp16")]
    each = [[*options(name), f"run.precision={precision}"] for name, precision in cases]
    for found in ranks.run(without_and_with_nan, config(), each, size=2):
        for case, (differ, lower, applied, rows, sound) in zip(cases, found, strict=True):
            assert (differ, lower, applied) == (False, 0.5 if case[1] == "fp16" else 1.0, [False]), case
            assert case[1] == "fp16" or rows == sound, case


def start_high(job: Job) -> None:
    assert isinstance(job.strategy.scaler, EngineScale)
    job.strategy.scaler.load_state_dict({"scale": 2.0**40, "_growth_tracker": 0})


def train_fp16(path: Path, names: Sequence[str]) -> list[tuple[drive.Rows, drive.Rows]]:
    """(rows, ledger) of runs whose loss scale begins much too high."""
    found = []
    for name in names:
        overrides = [*options(name), "run.precision=fp16", f"run.name={name}"]
        rows, _, _ = drive.whole(path, overrides, tamper=start_high)
        found.append((rows, drive.lines(configs.load(path, overrides, OPTIONS).folder / "ledger.jsonl")))
        drive.leave()
    return found


@needs_deepspeed
def test_fp16_retries_the_same_windows_at_a_lower_scale(ranks: Ranks, config: Config) -> None:
    path = config({"optim.lr": 1e-3, "train.max_steps": 3})
    exact, _, _ = ranks.run(drive.whole, path, ["run.name=exact"], size=1)[0]
    for rows, ledger in ranks.run(train_fp16, path, STAGES, size=2)[0]:
        attempts = [entry["attempt"] for entry in ledger if entry["step"] == 1]
        assert attempts == list(range(len(attempts)))
        assert len(attempts) > 5
        assert len({entry["windows"] for entry in ledger}) == 3
        assert [row["step"] for row in rows] == [1, 2, 3]
        assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in exact], rel=1e-3)


def give_up(path: Path, overrides: list[str]) -> str:
    """What is raised when NaN comes at every scale."""
    job, _ = drive.begin(path, overrides)
    job.loader.close()
    strategy, tokens = job.strategy, torch.zeros(2, 16, dtype=torch.long)
    for _ in range(40):
        with strategy.accumulate(job.model, last=True):
            loss_sum, _ = job.model(tokens, tokens.clone())
            strategy.backward(loss_sum * math.nan)
        try:
            assert strategy.must_retry(strategy.step(1.0))
        except FloatingPointError as error:
            return str(error)
    return "went on"


@needs_deepspeed
def test_fp16_gives_up_when_no_scale_helps(ranks: Ranks, config: Config) -> None:
    for raised in ranks.run(give_up, config(), ["strategy.name=deepspeed2", "run.precision=fp16"], size=2):
        assert "overflows at every loss scale" in raised


def stop_and_go_on(path: Path, each: Sequence[Sequence[str]]) -> list[tuple[drive.Rows, drive.Rows, float]]:
    """(rows of a run, of the same stopped in its middle and started again, the largest difference of their weights)."""
    found = []
    for k, overrides in enumerate(each):
        rows, weights, _ = drive.whole(path, [*overrides, f"run.name=whole{k}"])
        drive.leave()
        first, _, _ = drive.whole(path, [*overrides, f"run.name=parts{k}"], stop_after=2)
        drive.leave()
        second, again, _ = drive.whole(path, [*overrides, f"run.name=parts{k}"])
        drive.leave()
        found.append((rows, [*first, *second], drive.largest_difference(weights, again)[0]))
    return found


@needs_deepspeed
def test_interrupted_is_uninterrupted_bit_for_bit(ranks: Ranks, config: Config) -> None:
    """On 4 ranks, with evaluations, also in half precision; 33 columns divide among 4 ranks of no parameter evenly."""
    each = [[*options(name), f"run.precision={precision}"] for name, precision in
            (("deepspeed1", "fp32"), ("deepspeed1", "bf16"), ("deepspeed2", "fp16"), ("deepspeed3", "bf16"))]  # fmt: skip
    path = config({"batch.micro": 1, "train.max_steps": 4, "train.eval_every": 2, "model.n_head": 3, "model.n_embd": 33})
    for rows, parts, difference in ranks.run(stop_and_go_on, path, each)[0]:
        assert difference == 0
        for key in ("step", "loss", "val_loss", "grad_norm", "lr", "tokens"):
            assert [row.get(key) for row in parts] == [row.get(key) for row in rows]


def refusal(path: Path, overrides: list[str]) -> str:
    cfg = configs.load(path, overrides, OPTIONS)
    with pytest.raises(configs.ConfigError) as raised:
        choose(cfg, configs.layout(cfg, 2, 100), "fp32")
    return str(raised.value)


def test_without_deepspeed_it_says_what_to_install(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal(config(), ["strategy.name=deepspeed2"]) == (
        "strategy.name=deepspeed2 needs DeepSpeed; pip install 'pretrain[deepspeed]'"
    )


def test_muon_is_refused_with_the_reason(config: Config) -> None:
    message = refusal(config(), ["strategy.name=deepspeed1", "optim.name=muon"])
    assert "optim.name=muon, which needs whole matrices" in message
    assert message.endswith("use adamw or sgd")


def test_the_loss_scale_is_saved_as_torchs() -> None:
    """Under the same names, with the same updates left until it grows."""
    scaler = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler").DynamicLossScaler(2.0**16, 4, 1, 1, False)
    for updates in range(9):
        state = EngineScale(scaler).state_dict()
        torch.amp.GradScaler("cpu").load_state_dict(state)
        other = type(scaler)(1.0, 4, 1, 1, False)
        EngineScale(other).load_state_dict(state)
        scaler.update_scale(False)
        other.update_scale(False)
        assert other.cur_scale == scaler.cur_scale == 2.0 ** (16 + updates // 4), updates
    assert np.isfinite(scaler.cur_scale)
