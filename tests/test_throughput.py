"""Time is split without remainder: what is apart is not training, and what a peak is measured against is said."""

import contextlib
from typing import Any

import pytest
import torch

from pretrain import throughput as subject
from pretrain.throughput import PEAKS, Clock, peak_flops, peak_memory_bytes

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


def test_no_peak_is_invented(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_flops(CPU, "bf16") is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Something 9999")
    assert peak_flops(torch.device("cuda"), "bf16") is None


@pytest.mark.parametrize(
    ("name", "precision", "said", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", "A100 bf16 312e12", 312e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", "A100 fp32 156e12", 156e12),
        ("NVIDIA H100 80GB HBM3", "bf16", "H100 bf16 989e12", 989.4e12),
        ("NVIDIA H100 PCIe", "bf16", "H100 PCIe bf16 756e12", 756e12),
        ("NVIDIA H200", "fp16", "H200 fp16 989e12", 989.4e12),
        ("NVIDIA L4", "bf16", "L4 bf16 121e12", 121e12),
        ("NVIDIA L40S", "bf16", "L40S bf16 362e12", 362e12),
    ],
)
def test_the_peak_names_its_device(monkeypatch: pytest.MonkeyPatch, name: str, precision: str, said: str, flops: float) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), precision) == (said, flops)


def test_no_name_hides_a_longer_one() -> None:
    """They are looked for in order, as parts of a name."""
    names = [name for name, *_ in PEAKS]
    for i, name in enumerate(names):
        assert not any(earlier in name for earlier in names[:i]), name


def test_memory_is_in_bytes() -> None:
    assert 10**7 < peak_memory_bytes(CPU) < 10**12
