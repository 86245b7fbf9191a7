"""Gradients that travel compressed, against the same arithmetic in one process; what they send; what a resumed or refused update keeps."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drive
import numpy as np
import pytest
import torch
from group import Ranks
from torch import Tensor

from pretrain import config as configs
from pretrain import train
from pretrain.collectives import CollectiveCounter
from pretrain.job import Job
from pretrain.optim import lr_at, make_recipe, set_lr
from pretrain.strategies import OPTIONS, choose
from pretrain.strategies.compressed import DDPPowerSGD, PowerSGD, PowerSGDOptions

Config = Callable[..., Path]
Gradients = list[dict[str, Tensor]]  # by rank and name
HALF = {"ddp_comm_fp16": torch.float16, "ddp_comm_bf16": torch.bfloat16}
NAMES = [*HALF, "ddp_powersgd"]
BASE: dict[str, Any] = {
    "model.n_embd": 128,  # wide enough for two buckets of 1 MB
    "optim.name": "sgd",
    "optim.lr": 0.5,
    "optim.grad_clip": 0,
    "optim.weight_decay": 0.0,
    "strategy.options": {"bucket_cap_mb": 1},
}
LAYOUTS = [(2, 1), (2, 2), (4, 1), (4, 2)]  # (processes, accumulation)


def overrides_for(name: str, size: int, accumulation: int, **options: Any) -> list[str]:
    return [f"strategy.name={name}", f"batch.micro={8 // size // accumulation}", f"run.name={name}{size}{accumulation}",
            *(f"strategy.options.{key}={value}" for key, value in options.items())]  # fmt: skip


class Mean:
    """What arrives of the ranks' gradients, and how far rounding may have moved it."""

    error = 0.0

    def __call__(self, step: int, by_rank: Gradients) -> dict[str, Tensor]:
        return {name: torch.stack([gradients[name] for gradients in by_rank]).mean(0) for name in by_rank[0]}


class InHalf(Mean):
    """A sum of halves, from the rank `first` down. Of two it is the same in any order. Of more each further addition rounds by at most half a
    unit in the last place of what the halves add up to without signs."""

    def __init__(self, dtype: torch.dtype, first: int = 0) -> None:
        self.dtype, self.first = dtype, first

    def __call__(self, step: int, by_rank: Gradients) -> dict[str, Tensor]:
        size, arrived = len(by_rank), {}
        for name in by_rank[0]:
            halves = [(gradients[name] / size).to(self.dtype) for gradients in by_rank]
            total = torch.zeros_like(halves[0])
            for rank in range(size):
                total += halves[(self.first - rank) % size]
            arrived[name] = total.float()
            largest = float(torch.stack(halves).float().abs().sum(0).max())
            self.error = max(self.error, (size - 2) * torch.finfo(self.dtype).eps / 2 * largest)
        return arrived


class PaperPowerSGD(Mean):
    """Algorithms 1 and 2 of Vogels et al. 2019, matrix by matrix, with Gram and Schmidt's orthogonalisation, and Q used as it came."""

    def __init__(self, rank: int, start: int) -> None:
        self.rank, self.start = rank, start
        self.errors: dict[str, list[Tensor]] = {}

    def __call__(self, step: int, by_rank: Gradients) -> dict[str, Tensor]:
        if step == 1:
            self.qs = PowerSGD(PowerSGDOptions(rank=self.rank), self.start, by_rank[0]).qs
        arrived = super().__call__(step, by_rank)
        if step > self.start:
            arrived |= {name: self.compress(name, [gradients[name] for gradients in by_rank]) for name in self.qs}
        return arrived

    def compress(self, name: str, gradients: list[Tensor]) -> Tensor:
        errors = self.errors.get(name, [torch.zeros(())] * len(gradients))
        matrices = [g + e for g, e in zip(gradients, errors, strict=True)]
        p = torch.stack([m @ self.qs[name] for m in matrices]).mean(0)
        for column in range(p.shape[1]):
            p[:, column] -= p[:, :column] @ (p[:, :column].T @ p[:, column])
            p[:, column] /= p[:, column].norm()
        self.qs[name] = torch.stack([m.T @ p for m in matrices]).mean(0)
        arrived = p @ self.qs[name].T
        self.errors[name] = [m - arrived for m in matrices]
        return arrived


def simulate(path: Path, overrides: list[str], size: int, count: int, *reduces: Mean) -> list[tuple[drive.Weights, float]]:
    """Of each, (weights of one process that does what `size` do together, the largest that one update's rounding may be)."""
    trained = []
    for k, reduce in enumerate(reduces):
        job, progress = drive.begin(path, [*overrides, "strategy.name=single", "strategy.options={}", f"run.name=one{k}"])
        named = job.strategy.named_parameters()
        for step in range(1, count + 1):
            set_lr(job.strategy.optimizer, lr_at(step, job.cfg.optim, job.layout.steps))
            batch = job.loader.global_batch(progress.position)
            by_rank: Gradients = [{name: torch.zeros_like(p) for name, p in named.items()} for _ in range(size)]
            for micro in batch:
                loss_sum, _ = job.model(micro.inputs, micro.targets)
                found = torch.autograd.grad(loss_sum / batch.tokens * size, list(named.values()))
                for name, gradient in zip(named, found, strict=True):
                    by_rank[micro.index * size // len(batch.micros)][name] += gradient
            for name, gradient in reduce(step, by_rank).items():
                named[name].grad = gradient
            job.strategy.step(0.0)
            progress.position = batch.stop
        job.loader.close()
        trained.append((drive.weights(job), reduce.error))
    return trained


def in_ranks(ranks: Ranks, path: Path, overrides: list[str], size: int, count: int) -> drive.Weights:
    """After checking that they agree to the bit."""
    by_rank = ranks.run(drive.run, path, overrides, count, size=size)
    first_rows, first_weights = by_rank[0]
    for rows, weights in by_rank[1:]:
        assert rows == first_rows
        assert drive.largest_difference(weights, first_weights)[0] == 0
    return first_weights


@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize(("size", "accumulation"), LAYOUTS)
def test_half_is_a_sum_of_halves(ranks: Ranks, config: Config, name: str, size: int, accumulation: int) -> None:
    """With two ranks to the bit; with four within what three roundings of each of four updates can do to weights at this learning rate."""
    path, overrides = config(BASE), overrides_for(name, size, accumulation)
    found = in_ranks(ranks, path, overrides, size, 4)
    ((expected, bound), (exact, _)) = ranks.run(simulate, path, overrides[1:2], size, 4, InHalf(HALF[name]), Mean(), size=1)[0]
    assert drive.largest_difference(found, expected)[0] <= 4 * BASE["optim.lr"] * bound
    assert drive.largest_difference(found, exact)[0] > 1e-5, "must be rounded"


@pytest.mark.parametrize("name", HALF)
def test_half_on_four_ranks_is_a_ring_of_roundings(ranks: Ranks, config: Config, name: str) -> None:
    """After one update every weight is that of a sum that began at one of the ranks: to the bit, though not the same rank for all."""
    path, overrides = config(BASE), overrides_for(name, 4, 2)
    found = in_ranks(ranks, path, overrides, 4, 1)
    orders = [InHalf(HALF[name], first) for first in range(4)]
    simulated = [weights for weights, _ in ranks.run(simulate, path, overrides[1:2], 4, 1, *orders, size=1)[0]]
    for key, weight in found.items():
        assert np.any([weight == weights[key] for weights in simulated], axis=0).all(), key
    assert drive.largest_difference(simulated[0], simulated[1])[0] > 0


@pytest.mark.parametrize(("size", "accumulation", "rank"), [(2, 1, 1), (2, 2, 2), (4, 1, 2), (4, 2, 1)])
def test_powersgd_is_the_papers(ranks: Ranks, config: Config, size: int, accumulation: int, rank: int) -> None:
    path, overrides = config(BASE), overrides_for("ddp_powersgd", size, accumulation, rank=rank, start_step=2)
    found = in_ranks(ranks, path, overrides, size, 6)
    ((expected, _), (exact, _)) = ranks.run(simulate, path, overrides[1:2], size, 6, PaperPowerSGD(rank, 2), Mean(), size=1)[0]
    assert drive.largest_difference(found, expected)[0] < 1e-6
    assert drive.largest_difference(found, exact)[0] > 1e-3, "must be compressed"


def traffic(path: Path, overrides: list[str]) -> list[tuple[list[torch.dtype], int, int, int]]:
    """Of each of four updates: (dtypes of its collectives, their payload, bytes sent by a ring's formula, bytes by the strategy's)."""
    job, progress = drive.begin(path, overrides)
    found = []
    for _ in range(4):
        with CollectiveCounter() as counter:
            batch, _, _ = train.update(job, progress.step + 1, progress.position)
        train.advance(job, progress, batch)
        carried = [c for c in counter.collectives if c.dtype.is_floating_point]  # not the once rebuilt buckets' sizes
        found.append((
            [c.dtype for c in carried], sum(c.payload for c in carried), sum(c.sent("ring") for c in carried), job.strategy.wire(progress.step)
        ))  # fmt: skip
    job.loader.close()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_compressed_once_per_update(ranks: Ranks, config: Config, name: str) -> None:
    """Whatever the accumulation: half of DDP's bytes in as many all-reduces; PowerSGD's two all-reduces carry less than a tenth."""
    path, start = config(BASE), {"start_step": 2} if name == "ddp_powersgd" else {}
    (plain, *_), *_ = ranks.run(traffic, path, overrides_for("ddp", 2, 2), size=2)
    for accumulation in (1, 2):
        for updates in ranks.run(traffic, path, overrides_for(name, 2, accumulation, **start), size=2):
            if start:
                assert updates[:2] == [plain] * 2, "as DDP"
                assert all(dtypes == [torch.float32] * 2 and payload < plain[1] / 10 for dtypes, payload, _, _ in updates[2:])
            else:
                assert len(plain[0]) > 1, "several buckets"
                assert all(dtypes == [HALF[name]] * len(plain[0]) and payload == plain[1] // 2 for dtypes, payload, _, _ in updates)
            assert all(abs(sent - formula) <= len(dtypes) for dtypes, _, sent, formula in updates)


@pytest.mark.parametrize("options", [{"warm_start": False, "rank": 2}])
def test_powersgd_resumed_is_the_whole_run_to_the_bit(ranks: Ranks, config: Config, options: dict[str, Any]) -> None:
    """Stopped before the start at step 3, and after it."""
    path = config({**BASE, "optim.name": "adamw", "optim.lr": 0.01, "optim.grad_clip": 0.5, "train.max_steps": 7})
    overrides = overrides_for("ddp_powersgd", 4, 1, start_step=3, **options)
    whole, weights, _ = ranks.run(drive.whole, path, [*overrides, "run.name=whole"])[0]
    parts: drive.Rows = []
    for stop_after in (2, 3, None):
        by_rank = ranks.run(drive.whole, path, [*overrides, "run.name=parts"], stop_after)
        parts += by_rank[0][0]
    assert [(row["loss"], row["grad_norm"], row["wire_bytes_total"]) for row in parts] == [
        (row["loss"], row["grad_norm"], row["wire_bytes_total"]) for row in whole
    ]
    for _, trained, _ in by_rank:
        assert drive.largest_difference(trained, weights)[0] == 0


def test_powersgd_goes_on_from_another_strategy_and_on_other_ranks(ranks: Ranks, config: Config) -> None:
    """With no error to remember: that of the ranks before is not of these."""
    path, rows = config({**BASE, "run.name": "moved", "batch.micro": 1}), []
    powersgd = ["strategy.name=ddp_powersgd", "strategy.options.start_step=1"]
    for overrides, size, stop_after in ((["strategy.name=ddp"], 2, 2), ([*powersgd, "run.resume=must"], 4, 2), (powersgd, 2, None)):
        by_rank = ranks.run(drive.whole, path, overrides, stop_after, size=size)
        rows += by_rank[0][0]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["wire_bytes"] < rows[0]["wire_bytes"] / 5 for row in rows[2:])


def extras_around(path: Path, overrides: list[str], poisoned: int) -> tuple[list[bool], list[bool], drive.Weights]:
    """Six updates, one of them with a NaN on rank 1: (were they applied, did they leave the extras as they were, weights)."""
    job, progress = drive.begin(path, overrides)
    applied, same = [], []
    forward = job.strategy.module.forward
    for step in range(1, 7):
        factor = math.nan if step == poisoned and job.world.rank == 1 else 1.0
        job.strategy.module.forward = lambda *args, factor=factor: (forward(*args)[0] * factor, None)
        before = {name: tensor.clone() for name, tensor in job.strategy.state()["extras"].items()}
        batch, _, result = train.update(job, step, progress.position)
        train.advance(job, progress, batch)
        applied.append(bool(result.applied))
        same.append(all(torch.equal(tensor, before[name]) for name, tensor in job.strategy.state()["extras"].items()))
    job.loader.close()
    return applied, same, drive.weights(job)


@pytest.mark.parametrize("name", ["ddp_powersgd"])
def test_nan_on_one_rank_is_refused_by_all(ranks: Ranks, config: Config, name: str) -> None:
    """And neither weights nor what PowerSGD remembers take it in."""
    start = {"start_step": 2} if name == "ddp_powersgd" else {}
    by_rank = ranks.run(extras_around, config(BASE), overrides_for(name, 2, 1, **start), 4, size=2)
    for applied, same, weights in by_rank:
        assert applied == [True, True, True, False, True, True]
        assert same == ([True, True, False, True, False, False] if start else [True] * 6)
        assert all(np.isfinite(w).all() for w in weights.values())
        assert drive.largest_difference(weights, by_rank[0][2])[0] == 0


class ByHand(torch.nn.Module):
    """Its gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def one_update(path: Path, overrides: list[str], gradients: list[float]) -> tuple[bool, float]:
    """(whether it was applied, the norm) of the ranks' gradients."""
    cfg = configs.load(path, overrides, OPTIONS)
    strategy = choose(cfg, configs.layout(cfg, 2, 100), "fp32")
    rank = strategy.make_accelerator(cfg).process_index
    module = ByHand()
    model, _ = strategy.prepare(module, make_recipe(dict(module.named_parameters()), cfg.optim))
    strategy.backward(model(torch.tensor([gradients[rank], 0.0])) / 2)
    result = strategy.step(0.0)
    return bool(result.applied), float(result.grad_norm)


def test_fp16_overflows_in_the_sum_alone_and_then_the_update_is_refused(ranks: Ranks, config: Config) -> None:
    """65,504 is the largest; a cast before the division would overflow at half of it on two ranks. bf16 reaches as far as fp32."""
    for gradients, applied in (([1e5, 0.0], True), ([1e5, 1e5], False), ([0.0, 3e5], False)):
        for found in ranks.run(one_update, config(BASE), overrides_for("ddp_comm_fp16", 2, 1), gradients, size=2):
            assert found[0] == applied
            assert found[1] == (pytest.approx(sum(gradients) / 2, rel=1e-3) if applied else math.inf)
    assert all(applied for applied, _ in ranks.run(one_update, config(BASE), overrides_for("ddp_comm_bf16", 2, 1), [1e5, 1e6], size=2))


def train_fp16(path: Path, overrides: list[str]) -> tuple[drive.Weights, int, Any]:
    """From a loss scale at which nothing fits: (weights, how often it was lowered, PowerSGD's count of updates)."""
    strategies = []

    def start_high(job: Job) -> None:
        strategies.append(job.strategy)
        job.strategy.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        job.strategy.scaler.scale(torch.zeros(()))

    _, weights, _ = drive.whole(path, overrides, tamper=start_high)
    folder = configs.load(path, overrides, OPTIONS).folder
    powersgd = getattr(strategies[0], "powersgd", None)
    return weights, sum(entry["attempt"] > 0 for entry in drive.lines(folder / "ledger.jsonl")), powersgd and powersgd.updates


@pytest.mark.parametrize("name", ["ddp_comm_fp16", "ddp_powersgd"])
def test_fp16_tries_again_as_if_nothing_had_been(ranks: Ranks, config: Config, name: str) -> None:
    """Overflows while PowerSGD compresses leave no error behind, and do not count as updates."""
    start = {"start_step": 0} if name == "ddp_powersgd" else {}
    path, overrides = config(BASE), overrides_for(name, 2, 1, **start)
    exact = in_ranks(ranks, path, [*overrides, "run.name=exact"], 2, 6)
    (weights, retries, updates), _ = ranks.run(train_fp16, path, [*overrides, "run.precision=fp16"], size=2)
    assert retries > 3
    assert updates == (6 if start else None)
    assert drive.distance(weights, exact) < 0.01


def refusal(path: Path, overrides: list[str]) -> str:
    cfg = configs.load(path, overrides, OPTIONS)
    with pytest.raises(configs.ConfigError) as caught:
        choose(cfg, configs.layout(cfg, 2, 100), "fp32")
    return str(caught.value)


def test_what_would_never_compress_is_refused(config: Config) -> None:
    path, name = config(BASE), "strategy.name=ddp_powersgd"
    assert "compresses after 6 updates" in refusal(path, [name, "optim.warmup_steps=6"])
    assert "the run ends at 6; write strategy.options.start_step=0" in refusal(path, [name, "strategy.options.start_step=6"])
    with pytest.raises(configs.ConfigError, match=r"rank=9: no matrix of this model would travel smaller"):
        PowerSGD(PowerSGDOptions(rank=9), 2, {"weight": torch.zeros(32, 32)})


@pytest.mark.parametrize(("steps", "warmup", "start"), [(6, 0, 2), (600, 0, 60), (600, 100, 100)])
def test_powersgd_starts_after_the_warm_up(config: Config, steps: int, warmup: int, start: int) -> None:
    cfg = configs.load(
        config({**BASE, "train.max_steps": steps, "optim.warmup_steps": warmup, "strategy.name": "ddp_powersgd"}), [], OPTIONS
    )
    strategy = choose(cfg, configs.layout(cfg, 2, 100), "fp32")
    assert isinstance(strategy, DDPPowerSGD)
    assert strategy.start == start
