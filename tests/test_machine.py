"""Which device a run takes, and what it says of one that it cannot."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pretrain import machine
from pretrain.config import Config, ConfigError, load


@pytest.fixture
def cfg(config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Config]:
    """cfg(device): a run's, on a machine of whose GPUs torch can use none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda device: load(config({"run.device": device}))


def test_gpus_that_slurm_allotted_are_not_passed_over(cfg: Callable[[str], Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "0")
    assert machine.device_type(cfg("auto")) == "cpu"
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    with pytest.raises(ConfigError, match=r"Slurm allotted GPUs on .* \(2\), and torch .* can use none of them.*run\.device=cpu"):
        machine.device_type(cfg("auto"))
    assert machine.device_type(cfg("cpu")) == "cpu"


def test_gpus_that_are_there_and_unused_are_told(cfg: Callable[[str], Config], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "4 GPUs are there, and torch " in machine.unused_gpus(cfg("auto"), 4)[0]
    assert machine.unused_gpus(cfg("auto"), 0) == []
    assert machine.unused_gpus(cfg("cpu"), 4) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.unused_gpus(cfg("auto"), 4) == []
