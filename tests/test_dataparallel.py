"""torch.nn.DataParallel behind the interface: the same work as one process, with as many replicas as there are GPUs."""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import drive
import pytest
import torch
from torch import Tensor, nn

from pretrain import config as configs
from pretrain import model as models
from pretrain.config import ConfigError
from pretrain.job import Job, _device_notes
from pretrain.launch import World
from pretrain.loader import IGNORED
from pretrain.strategies import OPTIONS, choose
from pretrain.strategies.dataparallel import DataParallel, SummingDataParallel

Config = Callable[..., Path]


def assert_equal_to_single(path: Path, overrides: Sequence[str], rel: float) -> None:
    rows, weights = drive.run(path, [*overrides, "strategy.name=dataparallel", "run.name=dataparallel"])
    expected_rows, expected_weights = drive.run(path, [*overrides, "strategy.name=single", "run.name=single"])
    for row, expected in zip(rows, expected_rows, strict=True):
        assert row["windows"] == expected["windows"]
        assert [row["loss"], row["grad_norm"]] == pytest.approx([expected["loss"], expected["grad_norm"]], rel=rel)
    assert drive.distance(weights, expected_weights) <= rel


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_cpu_is_one_replica_and_equal_to_single(config: Config, precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_equal_to_single(config(), [f"run.precision={precision}"], rel=0)
    assert "dataparallel: one replica, since there is one cpu" in capsys.readouterr().out


@pytest.fixture
def gpus_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas as DataParallel makes them, but on the CPU, by a broadcast that copies."""

    def copy(tensors: Sequence[Tensor], devices: Sequence[Any], detach: bool = False) -> list[list[Tensor]]:
        return [[tensor.detach() if detach else tensor.clone() for tensor in tensors] for _ in devices]

    replicate, wrapper = (importlib.import_module(f"torch.nn.parallel.{name}") for name in ("replicate", "data_parallel"))
    monkeypatch.setattr(replicate, "_broadcast_coalesced_reshape", copy)
    monkeypatch.setattr(replicate, "_get_device_index", lambda device, optional: device)
    monkeypatch.setattr(wrapper, "_get_available_device_type", lambda: None)


def gradient(module: nn.Module) -> Tensor:
    """Of every weight, in one row."""
    every = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
    assert len(every) == len(list(module.parameters()))
    return torch.cat(every)


@pytest.mark.usefixtures("gpus_on_the_cpu")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_replicas_work_on_their_own_weights_and_are_summed(config: Config, dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    module: nn.Module = models.build(configs.load(config(), [], OPTIONS), 50, 0)
    if dtype is not None:
        module.forward = torch.autocast("cpu", dtype)(module.forward)  # as Strategy.prepare does
    inputs, targets = torch.randint(50, (3, 16)), torch.randint(50, (3, 16))
    targets[0, :5] = IGNORED  # unequal numbers of targets
    loss, count = module(inputs, targets)
    loss.backward()
    expected = gradient(module)
    module.zero_grad()

    parallel = SummingDataParallel(module, [], dtype)
    replicas = parallel.replicate(module, [torch.device("cpu")] * 2)
    with torch.no_grad():
        saved = [p.clone() for p in module.parameters()]
        for p in module.parameters():
            p.fill_(torch.nan)  # of no use to whoever still reads the module's own
    outputs = [replica(*halves) for replica, *halves in zip(replicas, inputs.split([2, 1]), targets.split([2, 1]), strict=True)]
    with torch.no_grad():
        for p, weights in zip(module.parameters(), saved, strict=True):
            p.copy_(weights)
    total, tokens = parallel.gather(outputs, torch.device("cpu"))
    total.backward()
    assert total.shape == tokens.shape == ()
    assert int(tokens) == int(count) == 43
    rel = 1e-5 if dtype is None else 2e-2
    assert total.item() == pytest.approx(loss.item(), rel=rel)
    found = gradient(module)
    assert torch.linalg.vector_norm(found - expected) <= rel * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.compile=auto", "write train.compile=off"),
        ("model.dropout=0.1", "write model.dropout=0, or"),
        ("batch.micro=1", "write batch.micro=2 or more"),
    ],
)
def test_what_replicas_cannot_do_is_refused(config: Config, monkeypatch: pytest.MonkeyPatch, override: str, problem: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cfg = configs.load(config(), ["strategy.name=dataparallel", "run.device=cuda", override], OPTIONS)
    with pytest.raises(ConfigError, match=problem):
        choose(cfg, configs.layout(cfg, 1, 100), "fp32")


def test_rates_are_of_one_gpu(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process that works on four."""

    def on_four(job: Job) -> None:
        job.peak = ("a GPU bf16 0e12", 1e9)
        monkeypatch.setattr(DataParallel, "devices", 4)

    rows, _, _ = drive.whole(config(), ["strategy.name=dataparallel"], tamper=on_four)
    module = models.build(configs.load(config(), [], OPTIONS), 50, 0)
    for row in rows:
        assert row["tokens_per_second_per_device"] == pytest.approx(row["tokens_per_second"] / 4)
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] / 4 * models.flops_per_token(module, 16) / 1e9)


def test_gpus_that_have_a_replica_are_in_use(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = configs.load(config(), [], OPTIONS)
    strategy = DataParallel("dataparallel", None, "fp32")
    strategy.model = SummingDataParallel(nn.Linear(1, 1), [], None)
    strategy.model.device_ids = [0, 1, 2, 3]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    alone, gpu = World(0, 0, 1, 1), torch.device("cuda")
    assert _device_notes(cfg, gpu, alone, strategy.devices, "") == []
    assert _device_notes(cfg, gpu, alone, 1, "") == ["1 of 4 GPUs in use"]


def test_several_processes_are_refused_with_the_way_to_start_one(config: Config) -> None:
    cfg = configs.load(config(), ["strategy.name=dataparallel"], OPTIONS)
    with pytest.raises(ConfigError, match="4 were started: write pretrain train CONFIG -- --num_processes 1, or"):
        choose(cfg, configs.layout(cfg, 4, 100), "fp32")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(("precision", "rel"), [("fp32", 1e-4), ("bf16", 2e-2), ("fp16", 2e-2)])
def test_real_replicas_are_equal_to_one_process(config: Config, precision: str, rel: float) -> None:
    micro = torch.cuda.device_count()
    overrides = ["run.device=cuda", f"run.precision={precision}", f"batch.micro={micro}", f"batch.tokens={micro * 16 * 2}"]
    assert_equal_to_single(config(), overrides, rel)
