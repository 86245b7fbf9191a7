"""Time is split without remainder: what is apart is not training, and what a peak is measured against is said."""

import contextlib
from typing import Any

import pytest
import torch

from pretrain import throughput as subject
from pretrain.throughput import Clock, known_as, peak_flops, peak_memory_bytes

CPU = torch.device("cpu")


class FakeTime:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(subject, "time", fake)
    return fake


def test_evaluations_and_saves_are_not_training_time(at: FakeTime) -> None:
    clock = Clock(CPU, 100.0)
    at.now += 50  # set-up
    with clock.apart("warm-up"):
        at.now += 7
    clock.begin()
    at.now += 2
    with clock.apart("evaluation"):
        at.now += 5
    at.now += 1
    with clock.part("data"):
        at.now += 0.5
    with clock.apart("checkpoint"):
        at.now += 30
    assert clock.interval() == (3.5, 0.5)
    assert clock.train_seconds == 103.5
    at.now += 2
    with clock.apart("evaluation"):
        at.now += 6
    assert clock.interval() == (2.0, 0.0)
    assert clock.train_seconds == 105.5
    assert clock.other == {"warm-up": 7.0, "evaluation": 11.0, "checkpoint": 30.0}


def test_a_save_writes_down_no_time_of_its_own(at: FakeTime) -> None:
    """Nor the wait for the checkpoint before it: it would be added up at every resume."""
    clock = Clock(CPU, 100.0)
    clock.begin()
    at.now += 2
    with clock.apart("checkpoint"):
        at.now += 30
        assert clock.train_seconds_now() == 102.0
    at.now += 1
    assert clock.train_seconds_now() == 103.0


def test_the_parts_of_an_update_are_timed_where_that_is_asked_for(at: FakeTime) -> None:
    clock = Clock(CPU, 0.0)

    def update() -> None:
        for name, seconds in (("data", 0.5), ("compute", 4.0), ("optimizer", 1.0)):
            with clock.part(name):
                at.now += seconds

    update()
    assert clock.parts is None
    clock.parts = {}
    update()
    update()
    assert clock.parts == {"data": 1.0, "compute": 8.0, "optimizer": 2.0}
    assert clock.data_seconds == 1.5


def test_time_apart_counts_when_it_ends_badly(at: FakeTime) -> None:
    clock = Clock(CPU, 0.0)
    clock.begin()
    with contextlib.suppress(OSError), clock.apart("evaluation"):
        at.now += 4
        raise OSError
    at.now += 1
    assert clock.interval() == (1.0, 0.0)


def test_the_device_has_finished_before_time_is_set_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", calls.append)
    device = torch.device("cuda", 0)
    with Clock(device, 0.0).apart("evaluation"):
        calls.append("evaluating")
    assert calls == [device, "evaluating", device]


def test_a_cpu_has_no_peak() -> None:
    assert peak_flops(CPU, "bf16", True) is None


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "found"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", True, ("A100 bf16 312e12", 312e12)),
        ("NVIDIA A100-SXM4-80GB", "fp32", True, ("A100 fp32 156e12", 156e12)),
        ("NVIDIA A100-SXM4-80GB", "fp32", False, None),
        ("NVIDIA H100 80GB HBM3", "bf16", False, ("H100 bf16 989e12", 989.4e12)),
        ("NVIDIA H200", "fp16", True, ("H200 fp16 989e12", 989.4e12)),
        ("NVIDIA Something 9999", "bf16", True, None),
    ],
)
def test_the_peak_names_its_device(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str, tf32: bool, found: tuple[str, float] | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), precision, tf32) == found


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", None),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H20", None),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("A100-PCIE-40GB", "A100 PCIe"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe"),
        ("NVIDIA A10", None),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-PCIE-16GB", "V100 PCIe"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L20", None),
        ("Tesla T4", "T4"),
        ("NVIDIA T400 4GB", None),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA RTX A6000", None),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_gpu_has_its_own_row_or_none(name: str, row: str | None) -> None:
    assert known_as(name) == row


def test_memory_is_in_bytes() -> None:
    assert 10**7 < peak_memory_bytes(CPU) < 10**12
