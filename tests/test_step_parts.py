"""Where an update's time goes, and traces: measured behind the last update, changing nothing before it."""

import gzip
import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import drive
import pytest
import torch
import torch.distributed as dist
from group import Ranks
from hypothesis import given
from hypothesis import strategies as st

from pretrain import train
from pretrain.step_parts import blocks_of
from pretrain.strategies import STRATEGIES
from pretrain.tracing import merged, uncovered

Config = Callable[..., Path]
LATENCY = 0.2  # seconds: more than a busy machine adds to an update
SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair))))
PARTS = ("compute", "communication", "optimizer", "data", "host")


@given(of=SPANS, by=SPANS)
def test_uncovered_time_is_what_none_of_the_others_has(of: list[tuple[int, int]], by: list[tuple[int, int]]) -> None:
    moments = {m for start, end in of for m in range(start, end)} - {m for start, end in by for m in range(start, end)}
    assert uncovered(of, by) == len(moments)
    joined = merged(of)
    assert all(left[1] < right[0] for left, right in pairwise(joined))


def measured(path: Path, variants: Mapping[str, list[str]]) -> dict[str, tuple[drive.Rows, int]]:
    """Each as a whole run: (its metrics, bytes of an update by formula, on average over a round)."""
    found = {}
    for name, overrides in variants.items():
        job, progress = drive.begin(path, [*overrides, f"run.name={name}", "train.step_parts=true"])
        train.train(job, progress)
        if dist.is_initialized():
            total = torch.ones(3)
            dist.all_reduce(total)
            assert total.tolist() == [dist.get_world_size()] * 3
        round_ = job.strategy.save_interval
        predicted = sum(job.strategy.wire(step) for step in range(9, 9 + round_)) // round_
        job.loader.close()
        if job.tracker:
            job.tracker.finish()
        found[name] = (drive.lines(job.cfg.folder / "metrics.jsonl") if job.is_main else [], predicted)
        drive.leave()
    return found


@given(st.integers(1, 1000))
def test_blocks_are_whole_rounds_or_meet_no_synchronisation(round_: int) -> None:
    steps, pairs = blocks_of(round_)
    assert pairs >= 1
    assert steps % round_ == 0 or steps * (2 + 2 * pairs) < round_


@pytest.mark.long
def test_the_parts_of_every_strategy(ranks: Ranks, config: Config, tmp_path: Path) -> None:
    """They add up, their bytes are those of the formula, what was trained is what is trained without, and the collectives are back."""
    variants = {name: [f"strategy.name={name}"] for name, cls in STRATEGIES.items() if cls.processes[0] <= 2 <= cls.processes[1]}
    for name, own in {"local_sgd": ["strategy.options.sync_every=2"], "diloco": ["strategy.options.sync_every=20", "train.max_steps=20"],
                      "ddp_powersgd": ["strategy.options.start_step=2"]}.items():  # fmt: skip
        variants[name] += own
    path = config({"train.max_steps": 10, "train.checkpoint_every": 0})
    told, _ = ranks.run(measured, path, variants, size=2)
    (plain, _, _), _ = ranks.run(drive.whole, path, ["strategy.name=ddp", "run.name=plain"], size=2)
    assert [row.get("loss") for row in told["ddp"][0]] == [row.get("loss") for row in plain]
    for name in variants:
        found = json.loads((tmp_path / "runs" / name / "step_parts.json").read_text())
        assert set(found["seconds"]) == set(PARTS), name
        assert all(seconds >= 0 for part, seconds in found["seconds"].items() if part not in ("communication", "host")), (name, found)
        assert sum(found["seconds"].values()) == pytest.approx(sum(found["with_communication"].values())), name
        assert found["seconds"]["host"] < 0.5 * sum(found["with_communication"].values()), name  # what no other part has
        assert found["whole_rounds"] == (name != "diloco")
        if name != "diloco":  # whose blocks meet no synchronisation
            small = 200 if "powersgd" in name else 0
            assert found["sent"]["ring"] == pytest.approx(told[name][1], rel=0.03, abs=600 + small), name
        else:
            assert found["sent"]["ring"] < 600


def test_what_a_slow_network_takes_is_communication(ranks: Ranks, config: Config, tmp_path: Path) -> None:
    """An all-reduce of two processes crosses the link twice, and no computing is left to hide it."""
    slow = [f"compare.network.latency_ms={LATENCY * 1e3}", "strategy.name=ddp"]
    ranks.run(measured, config({"train.max_steps": 3, "train.checkpoint_every": 0}), {"slow": slow}, size=2)
    found = json.loads((tmp_path / "runs/slow/step_parts.json").read_text())
    assert sum(found["with_communication"].values()) >= 2 * LATENCY
    assert found["seconds"]["communication"] >= LATENCY


def traced(path: Path, overrides: list[str]) -> tuple[list[str], list[str], float]:
    """(names of the trace's spans, files of `logs/`, seconds of tracing that count apart from training)."""
    job, progress = drive.begin(path, overrides)
    train.train(job, progress)
    job.loader.close()
    if job.tracker:
        job.tracker.finish()
    logs = job.cfg.folder / "logs"
    trace: dict[str, Any] = json.loads(gzip.decompress((logs / f"trace_rank_{job.world.rank}.json.gz").read_bytes()))
    drive.leave()
    return [event.get("name", "") for event in trace["traceEvents"]], [file.name for file in logs.iterdir()], job.clock.other["traces"]


@pytest.mark.parametrize(("window", "steps"), [("1:2", 2), ("2:9", 2)], ids=["within", "to the end"])
def test_a_trace_has_the_updates_asked_for(ranks: Ranks, config: Config, window: str, steps: int) -> None:
    told = ranks.run(traced, config({"train.max_steps": 4}), ["strategy.name=ddp", f"train.profile='{window}'"], size=2)
    for names, files, apart in told:
        for part in ("data", "compute", "optimizer"):
            assert names.count(part) == steps, part
        assert any("allreduce" in name or "all_reduce" in name for name in names)
        assert {"trace_rank_0.json.gz", "trace_rank_1.json.gz"} <= set(files)
        assert apart > 0


def test_without_it_nothing_is_traced_or_timed(config: Config, tmp_path: Path) -> None:
    drive.whole(config({"train.max_steps": 2}))
    drive.leave()
    folder = tmp_path / "runs/tiny"
    assert not (folder / "step_parts.json").exists()
    assert not list((folder / "logs").glob("trace*"))
