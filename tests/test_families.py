"""What every strategy must do through the unchanged loop: stop and go on bit for bit, move to another, evaluate, sample, refuse a NaN."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import drive
import numpy as np
import pytest
import torch
from group import Ranks
from omegaconf import OmegaConf
from torch.distributed.tensor import DTensor

from pretrain import config as configs
from pretrain import train
from pretrain.collectives import CollectiveCounter
from pretrain.job import Job
from pretrain.optim import local
from pretrain.strategies import OPTIONS, STRATEGIES, Strategy, base
from pretrain.watch import NonFinite, ReplicasDiffer

Config = Callable[..., Path]
FAMILIES = [name for name, cls in STRATEGIES.items() if cls.processes[1] > 1]
LOCAL = ("local_sgd", "diloco")
KEYS = ("step", "loss", "grad_norm", "lr", "tokens", "position", "val_loss")


def options(name: str) -> list[str]:
    every = {"local_sgd": ["strategy.options.sync_every=2"], "diloco": ["strategy.options.sync_every=2"]}
    return [f"strategy.name={name}", *every.get(name, []), *(["strategy.options.start_step=3"] if name == "ddp_powersgd" else [])]


def key_rows(rows: drive.Rows) -> list[list[Any]]:
    return [[row.get(key) for key in KEYS] for row in rows]


def whole_and_resumed(path: Path, names: Sequence[str]) -> dict[str, tuple[drive.Rows, drive.Rows, float, str | None]]:
    """Per strategy: (rows of a run, of the same run in two parts, the largest difference of their weights, why the first part ended).

    The second part goes on from the run's own checkpoint at step 4; with local methods from where a run of its own stopped on request."""
    found = {}
    for name in names:
        rows, weights, reason = drive.whole(path, [*options(name), f"run.name={name}"])
        drive.leave()
        at = configs.load(path, [f"run.name={name}"], OPTIONS).folder / "checkpoints" / "step_00000004"
        first, start = [row for row in rows if row["step"] <= 4], [f"run.resume={at}"]
        if name in LOCAL:
            first, _, reason = drive.whole(path, [*options(name), f"run.name={name}-parts"], stop_after=3)
            start = []
            drive.leave()
        second, again, _ = drive.whole(path, [*options(name), f"run.name={name}-parts", *start])
        drive.leave()
        found[name] = (rows, [*first, *second], drive.largest_difference(weights, again)[0], reason)
    return found


def test_interrupted_is_uninterrupted_bit_for_bit(ranks: Ranks, config: Config) -> None:
    """On 4 ranks, with an evaluation after each update and checkpoints after every other; local methods stop where they next meet.

    Exact strategies evaluate like one process, on a split that does not divide; local ones their average, off schedule too."""
    path = config({"train.eval_every": 1, "train.eval_tokens": 7 * 16, "train.checkpoint_every": 2, "batch.micro": 1, "optim.lr": 1e-3})
    ((alone, _, _),) = ranks.run(drive.whole, path, ["run.name=alone"], size=1)
    expected = val_losses(alone)[:2]
    for rank, found in enumerate(ranks.run(whole_and_resumed, path, FAMILIES)):
        for name, (rows, parts, difference, reason) in found.items():
            assert reason == ("SIGTERM" if name in LOCAL else None)
            assert difference == 0, name
            if rank == 0:
                assert key_rows(parts) == key_rows(rows), name
                rel = 1e-5 if STRATEGIES[name].exact else 0.02
                near: list[tuple[int, Any]] = [(step, pytest.approx(loss, rel=rel)) for step, loss in expected]
                assert val_losses(rows)[:2] == near, name


def val_losses(rows: drive.Rows) -> list[tuple[int, float]]:
    return [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]


def chain(path: Path, names: Sequence[str], moments: bool = False) -> tuple[list[tuple[str, float]], list[tuple[str, drive.Weights]]]:
    """One run that goes from strategy to strategy, two steps each: (losses, weights and perhaps moments as each of them begins and ends)."""
    losses, weights = [], []
    for k, name in enumerate(names):
        overrides = [*options(name), "run.resume=must" if k else "run.resume=auto", f"train.max_steps={2 * k + 2}"]
        job, progress = drive.begin(path, overrides)
        weights.append((f"{name} begins", held(job, moments)))
        train.train(job, progress)
        weights.append((f"{name} ends", held(job, moments)))
        job.loader.close()
        if job.is_main:
            assert job.tracker is not None
            job.tracker.finish()
            losses = [(name, row["loss"]) for row in drive.lines(job.cfg.folder / "metrics.jsonl") if "loss" in row]
        drive.leave()
    return losses, weights


def held(job: Job, moments: bool) -> drive.Weights:
    states = job.strategy.state()["optimizer"] if moments else {}
    whole = {name: state.full_tensor() if isinstance(state, DTensor) else state for name, state in states.items()}
    return {**drive.weights(job), **{name: state.numpy().copy() for name, state in whole.items()}}


EXACT = ["ddp", "fsdp2", "zero1", "fsdp1", "hsdp", "deepspeed2", "fsdp1_grad_op", "deepspeed3", "fsdp2_grad_op", "deepspeed1", "ddp"]


def test_a_run_moves_from_strategy_to_strategy(ranks: Ranks, config: Config) -> None:
    """Each takes over weights and moments exactly, and the curve is that of one strategy all along."""
    path = config({"optim.schedule": "constant", "optim.lr": 1e-3, "train.checkpoint_every": 2})
    losses, weights = ranks.run(chain, path, EXACT)[0]
    for (before, old), (after, new) in zip(weights[1::2], weights[2::2], strict=False):
        assert drive.largest_difference(old, new)[0] == 0, f"{before}, {after}"
    steps = [f"train.max_steps={2 * len(EXACT)}", "strategy.name=ddp", "run.name=alone"]
    alone, _, _ = ranks.run(drive.whole, path, steps)[0]
    assert [loss for _, loss in losses] == pytest.approx([row["loss"] for row in alone], rel=2e-5)


def test_local_methods_take_over_and_hand_on(ranks: Ranks, config: Config) -> None:
    """Weights and moments, bit for bit; what a local method hands on is the mean of its replicas, the same on every rank."""
    path = config({"optim.schedule": "constant", "optim.lr": 1e-3, "train.checkpoint_every": 2})
    (_, weights), *others = ranks.run(chain, path, ["ddp", "diloco", "fsdp2", "local_sgd", "ddp"], True)
    for (before, old), (after, new) in zip(weights[1::2], weights[2::2], strict=False):
        assert drive.largest_difference(old, new)[0] == 0, f"{before}, {after}"
    for _, theirs in others:
        for (name, mine), (_, other) in zip(weights, theirs, strict=True):
            assert drive.largest_difference(mine, other)[0] == 0, name


def test_replicas_meet_by_the_step_of_the_run(ranks: Ranks, config: Config) -> None:
    """Not by that of the start: with another interval from step 2 on, they meet at steps 3 and 6."""
    path = config({"train.checkpoint_every": 0})
    local = ["strategy.name=local_sgd", "run.resume=must"]
    ranks.run(drive.whole, path, [*local, "run.resume=auto", "strategy.options.sync_every=2", "train.max_steps=2"], size=2)
    rows, _, _ = ranks.run(drive.whole, path, [*local, "strategy.options.sync_every=3"], size=2)[0]
    drift = [row.get("replica_drift") for row in rows]
    assert [row["step"] for row in rows] == [3, 4, 5, 6]
    assert drift[0] == drift[2] != drift[3]


@pytest.mark.parametrize(("before", "after", "changed"), [
    (["strategy.name=ddp"], ["strategy.name=zero1"], ""),
    (["strategy.name=ddp"], ["strategy.name=ddp", "strategy.options.bucket_cap_mb=1"], ""),
    (["strategy.name=ddp"], ["strategy.name=ddp_comm_bf16"], "strategy.name: None -> ddp_comm_bf16"),
    (options("diloco"), [*options("diloco"), "strategy.options.outer_lr=0.5"], "strategy.options.outer_lr: 0.7 -> 0.5"),
    (options("diloco"), ["strategy.name=ddp"], "strategy.name: diloco -> None"),
])  # fmt: skip
def test_auto_goes_on_where_nothing_else_is_computed(
    ranks: Ranks, config: Config, before: list[str], after: list[str], changed: str
) -> None:
    path = config({"train.max_steps": 4, "train.checkpoint_every": 2})
    ranks.run(drive.whole, path, before, 2, size=2)
    (outcome, _) = ranks.outcomes(drive.whole, path, after, size=2)
    assert changed in outcome.error
    assert bool(changed) == bool(outcome.error)


def poisoned(path: Path, names: Sequence[str]) -> dict[str, tuple[str, bool, bool]]:
    """Rank 1's loss is NaN at step 3: (what was raised, whether the weights are finite, whether steps 1 and 2 had changed them)."""
    found = {}
    for name in names:
        job, progress = drive.begin(path, [*options(name), f"run.name={name}-nan"])
        start = drive.weights(job)
        make_nan(job, rank=1, step=3)
        raised = ""
        try:
            train.train(job, progress)
        except NonFinite as error:
            raised = str(error)
        job.loader.close()
        after = drive.weights(job)
        found[name] = (raised, all(np.isfinite(w).all() for w in after.values()), drive.distance(after, start) > 0)
        drive.leave()
    return found


def make_nan(job: Job, rank: int, step: int) -> None:
    if job.world.rank != rank:
        return
    module, calls = job.strategy.module, iter(range(10**9))

    def hook(_: Any, __: Any, output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        at = 1 + next(calls) // job.layout.accumulation
        return output[0] * (float("nan") if at == step else 1.0), output[1]

    module.register_forward_hook(hook)


def test_nan_on_one_rank_is_refused_by_all_and_named(ranks: Ranks, config: Config) -> None:
    path = config({"train.log_every": 4, "train.max_steps": 8})
    for found in ranks.run(poisoned, path, FAMILIES):
        for name, (raised, finite, moved) in found.items():
            assert "rank 1 had a loss that is not finite" in raised, name
            assert "step 3" in raised, name
            assert finite, name
            assert moved, name


VARIANTS = [
    ("ddp", ["static_graph=true", "gradient_as_bucket_view=false"]),
    ("zero1", ["parameters_as_bucket_view=true"]),
    ("fsdp1", ["sync_each_micro=false", "backward_prefetch=backward_post"]),
    ("fsdp2", ["blocks_per_unit=2"]),
    ("fsdp2", ["reshard_after_forward=2", "sync_each_micro=false"]),
    ("fsdp2_grad_op", ["sync_each_micro=false"]),
    ("hsdp", ["sync_each_micro=false"]),
    ("deepspeed2", ["offload_optimizer=true"]),
    ("deepspeed3", []),  # which keeps weights as small as these whole
]


def with_options(path: Path) -> list[tuple[drive.Rows, drive.Weights, int, int]]:
    """Of each variant: (rows, weights, bytes of the last update by formula, as counted)."""
    found = []
    for k, (name, given) in enumerate(VARIANTS):
        overrides = [f"strategy.name={name}", *(f"strategy.options.{option}" for option in given), f"run.name=variant{k}"]
        job, progress = drive.begin(path, overrides)
        rows = drive.steps(job, progress, 2)
        assert job.control is not None
        with CollectiveCounter(leave_out=[job.control]) as counter:
            rows += drive.steps(job, progress, 1)
        job.loader.close()
        counted = sum(c.sent("ring") for c in counter.collectives if c.payload >= 1024)
        found.append((rows, drive.weights(job), job.strategy.wire(3), counted))
        drive.leave()
    return found


def test_options_change_how_and_not_what(ranks: Ranks, config: Config) -> None:
    path = config({"optim.name": "sgd", "optim.lr": 0.1, "optim.grad_clip": 0, "batch.micro": 1})
    ((expected, weights),) = ranks.run(drive.run, path, ["run.name=alone"], size=1)
    for (name, given), (rows, found, predicted, counted) in zip(VARIANTS, ranks.run(with_options, path)[0], strict=True):
        for key in ("loss", "grad_norm"):
            assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], rel=5e-6), (name, given)
        assert drive.largest_difference(found, weights)[0] < 1e-6, (name, given)
        assert counted == pytest.approx(predicted, rel=0.03), (name, given)


def samples(path: Path, names: Sequence[str]) -> dict[str, drive.Weights]:
    """What a sample is drawn from, on the main process."""
    found: dict[str, drive.Weights] = {}
    for name in names:
        job, _ = drive.begin(path, [*options(name), f"run.name={name}-sample"])
        with train.whole_model(job) as module:
            if job.is_main:
                assert module is not None
                found[name] = {
                    key: tensor.detach().numpy().copy() for key, tensor in module.state_dict().items() if key != "lm_head.weight"
                }
        job.loader.close()
        drive.leave()
    return found


def test_samples_come_from_whole_weights(ranks: Ranks, config: Config) -> None:
    names = ["ddp", "fsdp1", "fsdp2", "hsdp", "deepspeed3", "diloco"]
    found = ranks.run(samples, config(), names)[0]
    for name in names[1:]:
        assert drive.largest_difference(found[name], found["ddp"])[0] == 0, name


def what_is_in_use(path: Path, cells: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    found = []
    for name, precision in cells:
        job, _ = drive.begin(path, [*options(name), f"run.precision={precision}", f"run.name={name}-{precision}"])
        job.loader.close()
        written: Any = OmegaConf.to_container(OmegaConf.load(job.cfg.folder / "config.yaml")) if job.is_main else None
        found.append(written["facts"]["in_use"] if job.is_main else {})
        drive.leave()
    return found


def test_config_yaml_holds_the_dtypes_really_in_use(ranks: Ranks, config: Config) -> None:
    cells = [(name, "bf16") for name in FAMILIES if name != "hsdp"] + [("fsdp2", "fp16"), ("ddp", "fp32")]
    kinds = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    for (name, precision), found in zip(cells, ranks.run(what_is_in_use, config(), cells, size=2)[0], strict=True):
        assert found == {"weights": "float32", "gradients": "float32", "activations": kinds[precision]}, name


def test_a_precision_that_does_not_take_effect_is_refused(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *_: lambda forward: forward)
    with pytest.raises(
        configs.ConfigError, match=r"run\.precision=bf16 under strategy\.name=single: activations are in float32, not in bfloat16"
    ):
        drive.begin(config(), ["run.precision=bf16"])


def train_with_a_flipped_bit(path: Path, names: Sequence[str]) -> dict[str, str]:
    """On rank 1 one bit of one weight changes after step 2."""
    found = {}
    for name in names:
        job, progress = drive.begin(path, [*options(name), f"run.name={name}-bit", "train.check_replicas_every=2"])
        advance, raised = train.advance, ""

        def flip(job: Job, progress: Any, batch: Any, advance: Any = advance) -> None:
            advance(job, progress, batch)
            if progress.step == 4 and job.world.rank == 1:
                weight = local(next(iter(job.strategy.named_parameters().values())).detach()).view(-1)
                weight.view(torch.int32)[0] ^= 1

        train.advance = flip
        try:
            train.train(job, progress)
        except ReplicasDiffer as error:
            raised = str(error)
        finally:
            train.advance = advance
        job.loader.close()
        found[name] = raised
        drive.leave()
    return found


def test_replicas_that_drift_apart_are_found(ranks: Ranks, config: Config) -> None:
    names = ["ddp", "zero1", "hsdp", "local_sgd", "deepspeed2", "fsdp2"]
    for found in ranks.run(train_with_a_flipped_bit, config(), names):
        assert found.pop("fsdp2") == "", "no two processes hold the same"
        assert found.pop("hsdp").startswith("after step 4 ranks 1 and 3 hold different weights")
        for name, raised in found.items():
            assert raised.startswith("after step 4 ranks 0 and 1 hold different weights"), name


@pytest.mark.parametrize(
    ("overrides", "world", "message"),
    [
        (["strategy.name=fsdp2", "optim.name=muon"], 2, "strategy.name=fsdp2 does not work with optim.name=muon, which wants whole matrices"),
        (["strategy.name=diloco", "optim.name=muon"], 2, "strategy.name=diloco does not work with optim.name=muon; use adamw or sgd"),
        (["strategy.name=local_sgd"], 1, "strategy.name=local_sgd needs at least 2 processes; 1 was started"),
        (["strategy.name=ddp", "strategy.shard_size=2"], 4, "strategy.shard_size=2 means nothing to strategy.name=ddp"),
        (["strategy.name=ddp", "strategy.simulate=2"], 2, "strategy.simulate=2 means nothing to strategy.name=ddp"),
        (["strategy.name=hsdp"], 2, "strategy.name=hsdp needs at least 4 processes; 2 were started"),
        (["strategy.name=hsdp", "strategy.shard_size=3"], 4, "strategy.shard_size=3: 4 processes are groups of 2"),
        (["strategy.name=fsdp2", "strategy.options.reshard_after_forward=3"], 4, "must divide the 4 shards; write true, false or 2"),
        (["strategy.name=fsdp2", "strategy.options.cpu_offload=true"], 4, "cpu_offload=true moves weights off a GPU, and this run is on a CPU"),
        (["strategy.name=local_sgd", "strategy.options.sync_every=4"], 2, "train.max_steps: 6 is no multiple of strategy.options.sync_every=4; write train.max_steps=8"),
        (["strategy.name=diloco", "strategy.options.sync_every=2", "train.checkpoint_every=5"], 2, "train.checkpoint_every: 5 is no multiple"),
        (["strategy.name=diloco", "strategy.options.sync_every=2", "strategy.replicas=3"], 4, "strategy.replicas=3 does not divide 4 processes"),
        (["strategy.name=diloco", "strategy.options.sync_every=2", "strategy.simulate=3"], 1, "4 micro-batches do not divide among so many replicas"),
        (["strategy.name=diloco", "strategy.options.sync_every=2", "strategy.simulate=2"], 2, "strategy.simulate runs all replicas in one process"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(config: Config, overrides: list[str], world: int, message: str) -> None:
    from pretrain.strategies import choose

    cfg = configs.load(config(), overrides, OPTIONS)
    with pytest.raises(configs.ConfigError) as raised:
        choose(cfg, configs.layout(cfg, world, 100), "fp32")
    assert message in str(raised.value)


class HostShard:
    """Stands in for a DTensor whose processes meet by NCCL."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def to(self, device: torch.device) -> "HostShard":
        return HostShard(self.tensor.to(device))

    def full_tensor(self) -> torch.Tensor:
        assert self.tensor.device.type != "cpu", "No backend type associated with device type cpu"
        return self.tensor


def test_offloaded_shards_are_gathered_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = Strategy("fsdp2", None, "fp32")
    strategy.accelerator = SimpleNamespace(device=torch.device("meta"))  # a GPU's stand-in
    monkeypatch.setattr(base, "DTensor", HostShard)
    monkeypatch.setattr(strategy, "model_state", lambda: {"sharded": HostShard(torch.ones(2)), "buffer": torch.ones(2)})
    assert {name: tensor.device.type for name, tensor in strategy.whole_weights()} == {"sharded": "meta", "buffer": "cpu"}


OFFLOADED = ["strategy.options.cpu_offload=true", "run.device=cuda"]


@pytest.mark.parametrize("name", ["fsdp1", "fsdp1_grad_op"])
def test_offloaded_flat_gradients_do_not_add_up_and_are_refused(config: Config, name: str) -> None:
    """torch keeps the last micro-batch's alone. In one micro-batch there is nothing to add up; whole gradients add up on the GPU."""
    from pretrain.strategies import choose

    def chosen(*more: str, precision: str = "fp32") -> str:
        cfg = configs.load(config(), [*OFFLOADED, f"strategy.name={name}", *more], OPTIONS)
        return choose(cfg, configs.layout(cfg, 2, 100), precision).name

    for precision, whole in (("fp32", "strategy.options.sync_each_micro=false, "), ("bf16", "")):
        with pytest.raises(configs.ConfigError) as raised:
            chosen(precision=precision)
        assert f"{name} would train on the last of 2 micro-batches alone; write {whole}batch.micro=4, or use fsdp2" in str(raised.value)
    assert chosen("batch.micro=4", precision="bf16") == chosen("strategy.options.sync_each_micro=false") == name


@pytest.mark.parametrize(
    ("overrides", "precision", "message"),
    [
        (["strategy.name=local_sgd", "strategy.options.sync_every=2"], "fp16", "run.precision=fp16, whose replicas would skip different updates; use fp32 or bf16"),
        (["strategy.name=fsdp1", "strategy.options.sync_each_micro=false"], "bf16", "fsdp1 would add up micro-batches in bf16; leave it true, or use fsdp2"),
        ([*OFFLOADED, "strategy.name=fsdp2"], "fp16", "strategy.options.cpu_offload=true: fsdp2 does not work with run.precision=fp16"),
    ],
)  # fmt: skip
def test_a_precision_that_a_strategy_cannot_keep_is_refused(config: Config, overrides: list[str], precision: str, message: str) -> None:
    from pretrain.strategies import choose

    cfg = configs.load(config(), overrides, OPTIONS)
    choose(cfg, configs.layout(cfg, 2, 100), "fp32")
    with pytest.raises(configs.ConfigError) as raised:
        choose(cfg, configs.layout(cfg, 2, 100), precision)
    assert message in str(raised.value)
