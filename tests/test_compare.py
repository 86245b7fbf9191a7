"""`pretrain compare`: what is launched, what is read from it, and what the report says of that."""

import csv
import errno
import html
import json
import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from launching import BIN, START, launch, make_set, run, write_config
from matplotlib.figure import Figure

from pretrain import cli, runfolder
from pretrain.compare import __main__ as array
from pretrain.compare import bandwidth, compare, figures, reporting, running
from pretrain.compare.appendix import escape
from pretrain.compare.blocks import Block, Heading, Table, Text, as_html, as_markdown
from pretrain.compare.members import Launch, launches, members
from pretrain.compare.results import best_tried, loss_after, read_row, summaries
from pretrain.compare.running import owned
from pretrain.compare.running import run as run_one
from pretrain.compare.verdict import command
from pretrain.config import Config, ConfigError, load
from pretrain.runfolder import claim, read_status
from pretrain.strategies import OPTIONS


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    def write(**compare: Any) -> Path:
        compare = {"dir": str(tmp_path / "cmp"), "processes": 2, **compare}
        return write_config(tmp_path / "compare.yaml", tmp_path / "set", batch={"tokens": 512, "micro": 2}, compare=compare)

    return write


def loaded(path: Path) -> Config:
    return load(path, [], OPTIONS)


def names(path: Path) -> list[str]:
    return [member.name for member in members(loaded(path))]


def launched(path: Path, *seeds: int) -> list[Launch]:
    cfg = loaded(path)
    return launches(path, cfg, [], members(cfg), seeds or (1,))


def with_steps(path: Path, steps: int) -> Path:
    path.write_text(path.read_text().replace("max_steps: 6", f"max_steps: {steps}"))
    return path


# Members and launches.


def test_members_are_what_is_written_times_what_is_multiplied(config: Callable[..., Path]) -> None:
    path = config(
        members=[
            {"strategy.name": "ddp"},
            {"name": "lookahead", "strategy.name": "diloco", "grid": {"strategy.options.sync_every": [2, 4]}},
        ],
        precisions=["fp32", "bf16"],
    )
    assert names(path) == ["ddp fp32", "ddp bf16", "lookahead sync_every=2 fp32", "lookahead sync_every=2 bf16", "lookahead sync_every=4 fp32",
                           "lookahead sync_every=4 bf16"]  # fmt: skip
    found = members(loaded(path))
    assert found[3].values == {"strategy.name": "diloco", "strategy.options.sync_every": 2, "run.precision": "bf16"}
    assert found[3].processes == 2


def test_a_strategy_of_one_process_gets_one(config: Callable[..., Path]) -> None:
    path = config(members=[{"strategy.name": "single"}, {"strategy.name": "ddp"}, {"strategy.name": "hsdp", "processes": 4},
                           {"strategy.name": "diloco", "strategy.simulate": 2, "strategy.options.sync_every": 2}], processes=[2, 4])  # fmt: skip
    assert [(m.name, m.processes) for m in members(loaded(path))] == [
        ("single", 1),
        ("ddp × 2", 2),
        ("ddp × 4", 4),
        ("hsdp", 4),
        ("diloco", 1),
    ]


def test_weak_scaling_gives_every_process_as_much(config: Callable[..., Path]) -> None:
    path = config(members=[{"strategy.name": "ddp"}], processes=[2, 4], scaling="weak")
    assert [launch.cfg.batch.tokens for launch in launched(path)][:2] == [512, 1024]
    own = config(members=[{"strategy.name": "ddp", "processes": [2, 4]}], scaling="weak")
    assert [launch.cfg.batch.tokens for launch in launched(own)][:2] == [512, 1024]


def test_accumulation_sets_the_micro_batch(config: Callable[..., Path]) -> None:
    path = config(members=[{"strategy.name": "ddp"}], accumulation=[1, 4], repetitions=1)
    assert [launch.cfg.batch.micro for launch in launched(path)] == [16, 4]  # 512 tokens = 2 processes × 16 sequences of 16
    with pytest.raises(ConfigError, match="does not divide into 2 processes × 3 micro-batches"):
        launched(config(members=[{"strategy.name": "ddp"}], accumulation=[3]))


def test_baselines_of_a_local_method_see_the_same_tokens(config: Callable[..., Path]) -> None:
    path = with_steps(
        config(members=[{"strategy.name": "diloco", "strategy.options.sync_every": 2, "baselines": True}], kind="learning", processes=4), 8
    )
    found = {launch.member.name: launch.cfg for launch in launched(path)}
    assert list(found) == ["diloco", "diloco: same batch", "diloco: M × batch", "diloco: M × updates", "diloco: M = 1"]
    assert {name: (cfg.strategy.name, cfg.batch.tokens, cfg.train.max_steps) for name, cfg in found.items()} == {
        "diloco": ("diloco", 512, 8),
        "diloco: same batch": ("ddp", 512, 8),
        "diloco: M × batch": ("ddp", 2048, 2),
        "diloco: M × updates": ("ddp", 128, 32),
        "diloco: M = 1": ("diloco", 512, 8),
    }
    assert found["diloco: M = 1"].strategy.replicas == 1
    assert {name: cfg.batch.micro for name, cfg in found.items() if cfg.batch.micro != 2} == {}
    smaller = {launch.member.name: launch.cfg for launch in launched(with_steps(config(members=[
        {"strategy.name": "diloco", "strategy.options.sync_every": 2, "baselines": True, "batch.micro": 8}], kind="learning", processes=4), 8))}  # fmt: skip
    assert smaller["diloco: M × updates"].batch.micro == 2  # all that is left for a process
    for_all = with_steps(
        config(members=[{"strategy.name": "diloco", "strategy.options.sync_every": 2, "baselines": True}], kind="learning", processes=4), 8
    )
    sections = yaml.safe_load(for_all.read_text()) | {"strategy": {"replicas": 2}}
    for_all.write_text(yaml.safe_dump(sections))
    shared = {launch.member.name: launch.cfg for launch in launched(for_all)}
    assert shared["diloco: M × updates"].train.max_steps == 16
    assert shared["diloco: same batch"].strategy.replicas is None
    with pytest.raises(ConfigError, match=r"train\.max_steps=6 must be multiples of the 4 replicas"):
        launched(
            config(members=[{"strategy.name": "diloco", "strategy.options.sync_every": 2, "baselines": True}], kind="learning", processes=4)
        )
    with pytest.raises(ConfigError, match="baselines are for local_sgd and diloco"):
        launched(config(members=[{"strategy.name": "ddp", "baselines": True}]))


def test_every_mistake_is_told_with_its_place(config: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError) as caught:
        members(loaded(config(members=[{"strategy.name": "dpp"}, {"nane": "x"}, {"name": "y", "grid": {"optim.lr": 3}}, {"optim.lr": 1}])))
    first, second, third, fourth = str(caught.value).splitlines()
    assert first.startswith("compare.members[0]: strategy.name: expected one of single, ")
    assert second == "compare.members[1]: unknown key 'nane'; expected name, grid, processes, baselines, or section.key"
    assert third.startswith("compare.members[2] (y): grid: expected section.key: [values]")
    assert fourth == "compare.members[3]: give it a name, or strategy.name"
    with pytest.raises(ConfigError, match=r"compare.members\[0\]: optim.lrr: unknown key; did you mean optim.lr"):
        launched(config(members=[{"strategy.name": "ddp", "optim.lrr": 1}]))
    with pytest.raises(ConfigError, match=r"compare\.members: missing"):
        members(loaded(config()))
    ddp = [{"strategy.name": "ddp"}]
    for wrong, why in (
        ({"processes": 0}, "compare.processes: must be above 0, found 0"),
        ({"accumulation": [0]}, "compare.accumulation: must be above 0"),
        ({"repetitions": 0}, "compare.repetitions: must be above 0"),
        ({"best_of": {"optim.lr": 0.1}}, "compare.best_of.optim.lr: expected a list of values to try, found 0.1"),
        ({"best_of": {"optim.lr": []}}, "compare.best_of.optim.lr: expected a list"),
        ({"seeds": [1, 1, 2]}, "compare.seeds: 1, 1, 2: the same seed twice"),
    ):
        with pytest.raises(ConfigError, match=re.escape(why)):
            members(loaded(config(members=ddp, **wrong)))
    with pytest.raises(ConfigError, match=r"after equal tokens: few would see 1,024 .* and ddp 3,072"):
        launched(config(members=[*ddp, {"name": "few", "strategy.name": "ddp", "train.max_steps": 2}], kind="learning"))
    for own in ({"train.log_every": 10}, {"strategy.name": "diloco", "strategy.options.sync_every": 3}):
        with pytest.raises(ConfigError, match=r"and so no speed; write train\.log_every=1 and train\.max_steps="):
            launched(config(members=[{"strategy.name": "ddp", **own}], skip_steps=4))
    with pytest.raises(ConfigError, match="names are used twice \\(ddp\\)"):
        members(loaded(config(members=[{"strategy.name": "ddp"}, {"strategy.name": "ddp", "optim.lr": 1}])))


def test_what_is_done_keeps_its_name_when_something_is_added(config: Callable[..., Path]) -> None:
    before = {launch.cfg.run.name for launch in launched(config(members=[{"strategy.name": "ddp"}], kind="learning"), 1, 2)}
    more = config(members=[{"strategy.name": "fsdp2"}, {"strategy.name": "ddp"}], kind="learning")
    after = {launch.cfg.run.name for launch in launched(more, 1, 2, 3)}
    assert before < after
    other = config(members=[{"strategy.name": "ddp", "optim.lr": 0.5}], kind="learning")
    slow = config(members=[{"strategy.name": "ddp"}], kind="learning", network={"bandwidth_gbit": 1})
    own = config(members=[{"strategy.name": "ddp", "compare.network": {"bandwidth_gbit": 2}}], kind="learning")
    for path in (other, slow, own):
        path = config(**yaml.safe_load(path.read_text())["compare"])
        assert not before & {launch.cfg.run.name for launch in launched(path, 1, 2)}


def test_what_is_done_keeps_its_name_under_another(config: Callable[..., Path]) -> None:
    """Renamed, or named with a number of processes or a precision now that there are several."""
    before = {launch.folder for launch in launched(config(members=[{"strategy.name": "ddp"}], precisions=["fp32"]))}
    for more in ({"processes": [2, 4]}, {"members": [{"strategy.name": "ddp", "name": "baseline"}]}, {"precisions": ["fp32", "bf16"]}):
        assert before < {
            launch.folder for launch in launched(config(**{"members": [{"strategy.name": "ddp"}], "precisions": ["fp32"], **more}))
        } | {Path()}


def test_data_parallel_replicas_see_as_many_gpus_as_others_have_processes(
    config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    made = launched(config(members=[{"strategy.name": "dataparallel"}, {"strategy.name": "ddp"}], repetitions=1, processes=2))
    assert [running.environment(one)["CUDA_VISIBLE_DEVICES"] for one in made] == ["4,5", "4,5,6,7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert running.environment(made[0])["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_a_launch_that_still_runs_is_left_alone(config: Callable[..., Path]) -> None:
    """A task of an array is told to come back: a node that died leaves its lock for a while."""
    path = config(members=[{"strategy.name": "ddp"}], repetitions=1)
    (one,) = launched(path, loaded(path).run.seed)
    claim(one.folder)
    try:
        with pytest.raises(ConfigError, match="is in use by process"):
            run_one(one, "speed")
        assert array.main(["--launch", "1", "--processes", "2", str(path)]) == 75
        assert (one.folder / ".lock").exists()
    finally:
        lock = runfolder._owned.pop(one.folder)
        assert lock
        lock.close()


def test_a_folder_is_of_one_comparison_at_a_time(config: Callable[..., Path], tmp_path: Path) -> None:
    path = config(members=[{"strategy.name": "ddp"}])
    with (
        owned(tmp_path / "cmp"),
        pytest.raises(ConfigError, match=r"cmp is in use by process \d+ on .*; wait for it, or choose another compare.dir"),
    ):
        compare(path, [], print)
    with (
        patch("fcntl.flock", side_effect=OSError(errno.ENOLCK, "No locks available")),
        pytest.raises(ConfigError, match=r"or put compare\.dir elsewhere"),
    ):
        compare(path, [], print)
    plan(tmp_path / "cmp", "speed", {"member": "ddp"}, config_file="configs/other.yaml")
    with pytest.raises(ConfigError, match=r"holds the comparison of configs/other.yaml; write another compare.dir for .*compare.yaml"):
        compare(path, [], print)


def test_what_is_best_goes_on_and_what_failed_is_not_tried_twice(config: Callable[..., Path], tmp_path: Path) -> None:
    path = config(members=[{"strategy.name": "ddp"}], kind="learning", seeds=[1, 2, 3], best_of={"optim.lr": [0.1, 0.2, 0.3]})
    ran: list[tuple[str, int]] = []

    def instead(one: Launch, kind: str) -> str:
        ran.append((one.member.name, one.seed))
        entry = {**learned(one.member.name, one.seed, one.cfg.optim.lr), "processes": 2}
        write_status(one.folder, "failed", "diverged") if one.cfg.optim.lr == 0.3 else write_run(one.folder, entry)
        return "ended"

    with patch.object(running, "run", instead), patch.object(reporting, "draw", return_value=[]):
        assert compare(path, [], print) == 1  # a trial failed
    assert ran == [("ddp lr=0.1", 1), ("ddp lr=0.2", 1), ("ddp lr=0.3", 1), ("ddp lr=0.1", 2), ("ddp lr=0.1", 3)]
    assert cells(tmp_path / "cmp" / "report", "Learning")["ddp lr=0.1"]["seeds"] == "3"


def test_launches_take_turns(config: Callable[..., Path]) -> None:
    made = launched(config(members=[{"strategy.name": "ddp"}, {"strategy.name": "fsdp2"}], repetitions=2))
    assert [(launch.member.name, launch.repetition) for launch in made] == [("ddp", 0), ("fsdp2", 0), ("ddp", 1), ("fsdp2", 1)]
    assert len({launch.folder for launch in made}) == 4
    assert all(launch.cfg.train.step_parts and launch.cfg.train.eval_every == 0 for launch in made)


# Results.


def plan(folder: Path, kind: str, *made: dict[str, Any], **more: Any) -> Path:
    """A comparison as compare leaves it; each of `made` is (member, strategy, …) with what its run came to in `run`."""
    common = {"processes": 2, "precision": "fp32", "batch_tokens": 512, "micro": 2, "seed": 1, "repetition": 0, "tried": {}}
    planned = []
    for number, entry in enumerate(made):
        entry = {**common, "strategy": entry["member"].split()[0], "group": entry["member"], "base": entry["member"], **entry}
        run = folder / "runs" / f"{number}"
        if entry.pop("ran", True):
            write_run(run, entry)
        else:
            write_status(run, "refused", "optim.name=muon\nhas two lines")
        values = {"strategy.name": entry["strategy"], **entry.get("values", {})}
        planned.append({**{key: value for key, value in entry.items() if key not in _OF_THE_RUN}, "run": run.name, "values": values})
    given = {"kind": kind, "config_file": "configs/compare.yaml", "overrides": ["optim.lr=1"], "machine": "2 cores", "scaling": "strong",
             "network": None, "repetitions": 1, "skip_steps": 2, "launches": planned, **more}  # fmt: skip
    (folder / reporting.PLAN).write_text(json.dumps(given))
    return folder


_OF_THE_RUN = ("seconds", "losses", "memory", "parts", "every", "sent", "simulate", "ran_on")


def write_status(run: Path, state: str, reason: str = "") -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "status.json").write_text(json.dumps({"state": state, "reason": reason, "step": 10, "exit_status": 0, "rank": 0}))


def write_run(run: Path, entry: dict[str, Any]) -> None:
    """Ten updates of 512 tokens; the first two take ten seconds each, the others `seconds`."""
    write_status(run, "finished")
    options = {"sync_every": entry["every"]} if "every" in entry else {}
    facts = {"world_size": entry["processes"], "strategy_options": options, "device": "cpu AVX2", "threads": 1, "parameters": 1_000_000,
             "versions": {"torch": "2.13_0"}, "fingerprints": {"d": "1"}}  # fmt: skip
    sections = {
        "strategy": {"replicas": None, "simulate": entry.get("simulate")},
        "optim": {"lr": 1.0},
        "data": {},
        "model": {},
        "batch": {},
        "train": {},
    }
    (run / "config.yaml").write_text(yaml.safe_dump({**sections, "facts": facts}))
    seconds, sent = entry.get("seconds", 1.0), entry.get("sent", 1000)
    lines = [
        {"step": step, "tokens": 512 * step, "loss": loss, "train_seconds": 10.0 * min(step, 2) + seconds * max(0, step - 2),
         "step_seconds": 10.0 if step < 3 else seconds, "wire_bytes_total": sent * step, "peak_memory_bytes": entry.get("memory", 10**9)}
        for step, loss in enumerate(entry.get("losses") or [5.0 - step / 10 for step in range(10)], 1)
    ]  # fmt: skip
    lines.append({"step": 10, "val_loss": lines[-1]["loss"] + 0.1})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "measured.json").write_text(json.dumps({"checkpoint_bytes": 2**20, "machine": entry.get("ran_on", "2 cores")}))
    if parts := entry.get("parts"):
        found = {"seconds": dict(zip(("compute", "communication", "optimizer", "data", "host"), parts, strict=True)), "checkpoint_seconds": 0.5,
                 "sent": {"ring": sent, "gloo": 2 * sent}, "backend": "gloo", "whole_rounds": "every" not in entry, "method": "minus"}  # fmt: skip
        (run / "step_parts.json").write_text(json.dumps(found))


def cells(folder: Path, table: str) -> dict[str, dict[str, str]]:
    """Row -> column -> cell of a table of report.md, by its heading."""
    text = (folder / "report.md").read_text().split(f"## {table}\n")[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if line.startswith("|")]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}


def made_report(tmp_path: Path, kind: str, *made: dict[str, Any], figures: bool = False, **more: Any) -> Path:
    """Drawing takes seconds."""
    tmp_path.mkdir(exist_ok=True)
    drawing = nullcontext() if figures else patch.object(reporting, "draw", return_value=[])
    with drawing:
        reporting.report([plan(tmp_path, kind, *made, **more)], tmp_path / "report")
    return tmp_path / "report"


def test_speed_is_that_of_the_updates_that_count(tmp_path: Path) -> None:
    found = made_report(
        tmp_path, "speed",
        *({"member": "ddp", "seconds": seconds, "repetition": k, "parts": (0.5, 0.2, 0.1, 0.0, 0.01)} for k, seconds in enumerate((1.0, 2.0, 1.6))),
        *({"member": "ddp_comm_bf16", "seconds": 0.8, "repetition": k} for k in range(3)),
        {"member": "fsdp2", "ran": False},
    )  # fmt: skip
    speed = cells(found, "Speed")
    assert speed["ddp"]["tokens/s"] == "320"  # 512 tokens in 1.6 s, the median
    assert speed["ddp"]["lowest to highest"] == "256 to 512"
    assert (speed["ddp"]["× ddp"], speed["ddp"]["× ddp_comm_bf16"]) == ("1.00", "0.50")
    assert (speed["ddp_comm_bf16"]["× ddp"], speed["ddp_comm_bf16"]["× ddp_comm_bf16"]) == ("2.00", "1.00")
    assert (speed["ddp"]["launches"], speed["fsdp2"]["launches"], speed["fsdp2"]["tokens/s"]) == ("3", "0 of 1", "–")
    assert cells(found, "What has no numbers")["fsdp2"]["why not"] == "refused: optim.name=muon"
    assert cells(found, "Where the time of an update goes")["ddp"]["exposed communication"] == "25%"  # 0.2 of 0.81
    row = cells(found, "Memory, bytes, checkpoints")["ddp"]
    assert (row["counted"], row["as NCCL's rings"], row["checkpoint"], row["written in"]) == ("0.00 MB", "0.00 MB", "1.05 MB", "0.50 s")
    assert "loss" not in (found / "report.md").read_text().split("## Speed")[1].split("## Figures")[0]


def test_the_verdict_names_the_fastest_what_is_not_to_be_told_from_it_and_the_command(tmp_path: Path) -> None:
    found = made_report(
        tmp_path, "speed",
        {"member": "ddp", "seconds": 1.0}, {"member": "zero1", "seconds": 0.99, "memory": 8 * 10**8}, {"member": "fsdp2", "seconds": 2.0, "memory": 5 * 10**8},
    )  # fmt: skip
    text = (found / "report.md").read_text().split("## Verdict")[1]
    assert "zero1 is fastest with 517 tokens/s, 1.01 times ddp. Not to be told from it: ddp." in text
    assert "fsdp2 needs least memory, 0.50 GB per rank, at 0.50 of that speed." in text
    (line,) = [line for line in text.splitlines() if line.startswith("pretrain train")]
    assert shlex.split(line) == ["pretrain", "train", "configs/compare.yaml", "optim.lr=1", "strategy.name=zero1", "run.name=zero1", "--",
                                 "--num_processes", "2"]  # fmt: skip


def test_of_a_local_method_whole_rounds_are_counted(tmp_path: Path) -> None:
    """Ten updates, of which one in four sends: from the third to the tenth are two of these in eight, and not in seven."""
    found = made_report(tmp_path, "speed", {"member": "diloco", "every": 4, "sent": 10**6, "parts": (0.5, 0.1, 0.1, 0.0, 0.1)})
    run_lines = tmp_path / "runs" / "0" / "metrics.jsonl"
    lines = [json.loads(line) for line in run_lines.read_text().splitlines()]
    for line in lines[:-1]:
        line["wire_bytes_total"] = 8 * 10**6 * (line["step"] // 4)
    run_lines.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with patch.object(reporting, "draw", return_value=[]):
        reporting.report([tmp_path], found)
    assert cells(found, "Memory, bytes, checkpoints")["diloco"]["sent per update, by formula"] == "2.00 MB"


def test_what_a_slowed_network_carries_is_what_rings_do(tmp_path: Path) -> None:
    made = {"member": "fsdp2", "sent": 10**6, "parts": (0.5, 0.1, 0.1, 0.0, 0.1)}
    assert cells(made_report(tmp_path / "own", "speed", made), "Memory, bytes, checkpoints")["fsdp2"]["counted"] == "2.00 MB"
    plan((tmp_path / "own"), "speed", made)
    run_config = tmp_path / "own" / "runs" / "0" / "config.yaml"
    found = yaml.safe_load(run_config.read_text())
    found["facts"]["network"] = {"bandwidth_gbit": 1.0, "latency_ms": 0.0}
    run_config.write_text(yaml.safe_dump(found))
    with patch.object(reporting, "draw", return_value=[]):
        reporting.report([tmp_path / "own"], tmp_path / "own" / "report")
    assert cells(tmp_path / "own" / "report", "Memory, bytes, checkpoints")["fsdp2"]["counted"] == "1.00 MB"


def test_a_synchronisation_that_no_block_met_is_in_the_communication(tmp_path: Path) -> None:
    """Of a local method with long rounds: the updates of training have it, the blocks have not."""
    found = made_report(tmp_path, "speed", {"member": "diloco", "every": 100, "seconds": 1.0, "parts": (0.5, 0.05, 0.1, 0.0, 0.1)})
    assert cells(found, "Where the time of an update goes")["diloco"]["communication"] == "300.0 ms"


def learned(member: str, seed: int, offset: float, **more: Any) -> dict[str, Any]:
    return {"member": member, "seed": seed, "losses": [5.0 - step / 10 + offset for step in range(10)], **more}


def test_losses_are_means_over_seeds_and_too_few_say_nothing(tmp_path: Path) -> None:
    found = made_report(
        tmp_path, "learning",
        *(learned("ddp", seed, 0.01 * seed) for seed in (1, 2, 3)),
        *(learned("diloco", seed, -0.5, every=2) for seed in (1, 2, 3)),
        *(learned("zero1", seed, 0.0) for seed in (1, 2)),
    )  # fmt: skip
    table = cells(found, "Learning")
    assert table["ddp"]["validation loss"] == "4.2200 ± 0.0100"
    assert table["diloco"]["validation loss"] == "too short: 5 rounds"
    assert table["zero1"]["training loss"] == "too short: 2 seeds"
    assert (table["diloco"]["tokens per replica"], table["diloco"]["replicas"]) == ("2,560", "2")
    assert "ddp alone has a validation loss to tell, 4.2200 ± 0.0100." in (found / "report.md").read_text()
    assert "tokens/s" not in table["ddp"]


def test_the_loss_after_equal_time(tmp_path: Path) -> None:
    found = made_report(
        tmp_path, "learning",
        *(learned("ddp", seed, 0.0, seconds=1.0) for seed in (1, 2, 3)),
        *(learned("fsdp2", seed, 0.0, seconds=2.0) for seed in (1, 2, 3)),
        figures=True,
    )  # fmt: skip
    table = cells(found, "Learning")  # 28 s are ten updates of the first, six of the second
    assert table["ddp"]["training loss after 28 s"].startswith("4.1000")
    assert table["fsdp2"]["training loss after 28 s"].startswith("4.5000")
    assert {path.stem for path in found.glob("*.png")} == {"loss_tokens", "loss_seconds", "loss_bytes"}


def test_scaling_efficiency_is_against_the_fewest_processes(tmp_path: Path) -> None:
    found = made_report(
        tmp_path, "speed",
        {"member": "ddp × 2", "base": "ddp", "strategy": "ddp", "seconds": 1.0}, {"member": "ddp × 4", "base": "ddp", "strategy": "ddp", "processes": 4, "seconds": 0.625},
        {"member": "single", "processes": 1, "seconds": 1.0},
        figures=True,
    )  # fmt: skip
    speed = cells(found, "Speed")
    assert [speed[name]["scaling efficiency"] for name in ("ddp × 2", "ddp × 4", "single")] == ["100%", "80%", "–"]
    assert (found / "scaling.png").exists()
    assert speed["ddp × 4"]["× ddp"] == "1.00"  # against ddp on as many


def test_a_tuned_member_is_shown_at_its_best_with_the_trials_that_it_got(tmp_path: Path) -> None:
    tried = [{**learned(f"ddp lr={lr}", seed, offset), "strategy": "ddp", "group": "ddp", "tried": {"optim.lr": lr}}
             for lr, offset, seeds in ((0.1, 0.5, (1,)), (0.2, 0.0, (1, 2, 3)), (0.3, 0.2, (1,))) for seed in seeds]  # fmt: skip
    found = made_report(tmp_path, "learning", *tried)
    assert list(cells(found, "Learning")) == ["ddp lr=0.2"]
    assert cells(found, "Tuned")["ddp"] == {"member": "ddp", "best": "optim.lr=0.2", "tried": "3", "at an edge": "–"}
    assert best_tried(reporting.read(tmp_path).rows) == {"ddp": ("ddp lr=0.2", 3)}


def test_the_first_seed_alone_says_what_is_best(tmp_path: Path) -> None:
    """Else one that does worse with later seeds would be left for one that never had them, and the report would come to nothing."""
    tried = [{**learned(f"ddp lr={lr}", seed, offset), "strategy": "ddp", "group": "ddp", "tried": {"optim.lr": lr}}
             for lr, seed, offset in ((0.1, 1, 0.1), (0.2, 1, 0.0), (0.2, 2, 0.9), (0.2, 3, 0.9))]  # fmt: skip
    assert list(cells(made_report(tmp_path, "learning", *tried), "Learning")) == ["ddp lr=0.2"]


def test_a_best_at_the_edge_of_what_was_tried_is_said_to_be(tmp_path: Path) -> None:
    tried = [{**learned(f"ddp lr={lr} {decay}", 1, offset), "strategy": "ddp", "group": "ddp",
              "tried": {"optim.lr": lr, "optim.weight_decay": decay, "train.compile": "off"}}
             for lr, decay, offset in ((0.1, 0.1, 0.5), (0.2, 0.2, 0.0), (0.3, 0.1, 0.2))]  # fmt: skip
    assert cells(made_report(tmp_path, "learning", *tried), "Tuned")["ddp"]["at an edge"] == "optim.weight_decay"


def test_comparisons_of_two_machines_stay_apart(tmp_path: Path) -> None:
    for name, machine, seconds in (("a", "8 × H100", 1.0), ("b", "8 × A100", 2.0)):
        (tmp_path / name).mkdir()
        plan(tmp_path / name, "speed", {"member": "ddp", "seconds": seconds, "ran_on": machine},
             {"member": "fsdp2", "seconds": seconds * 2, "ran_on": machine}, machine=machine, config_file=f"configs/{name}.yaml")  # fmt: skip
    assert cli.main(["compare", "--merge", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "both")]) == 0
    speed = cells(tmp_path / "both", "Speed")
    assert {name: row["× ddp"] for name, row in speed.items()} == {
        "ddp (a)": "1.00",
        "fsdp2 (a)": "0.50",
        "ddp (b)": "1.00",
        "fsdp2 (b)": "0.50",
    }
    text = (tmp_path / "both" / "report.md").read_text()
    assert "On 8 × H100 (a): ddp (a) is fastest" in text
    assert "On 8 × A100 (b): ddp (b) is fastest" in text
    assert re.findall(r"pretrain train (\S+)", text) == ["configs/a.yaml", "configs/b.yaml"]
    plan(tmp_path / "b", "learning", {"member": "ddp"})
    with pytest.raises(ConfigError, match="make two reports"):
        reporting.report([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    with pytest.raises(ConfigError, match="no comparison"):
        reporting.report([tmp_path / "set"], tmp_path / "both")


def test_two_comparisons_of_one_name_and_machine_stay_apart(tmp_path: Path) -> None:
    """As of two networks, copied to one place."""
    folders = [tmp_path / where / "compare" for where in ("slow", "fast")]
    for folder, seconds in zip(folders, (4.0, 1.0), strict=True):
        folder.mkdir(parents=True)
        tried = {"group": "fsdp2", "tried": {"batch.micro": 2}}
        plan(folder, "speed", {"member": "ddp", "seconds": seconds}, {"member": "fsdp2", "seconds": seconds * 2, **tried},
             {"member": "zero1", "seconds": seconds, "processes": 4, "base": "ddp"})  # fmt: skip
    reporting.report([*folders, folders[0]], tmp_path / "both")
    speed = cells(tmp_path / "both", "Speed")
    assert {name: (row["× ddp"], row["scaling efficiency"]) for name, row in speed.items()} == {
        f"{name} ({folder})": found
        for folder in folders
        for name, found in {"ddp": ("1.00", "100%"), "fsdp2": ("0.50", "–"), "zero1": ("–", "50%")}.items()
    }
    assert "launches finished" in (tmp_path / "both" / "report.md").read_text()


def test_a_damaged_comparison_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / reporting.PLAN).write_text('{"kind": "sp')
    assert cli.main(["compare", "--merge", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path / reporting.PLAN}: damaged; ")


def test_a_full_disk_ends_a_report_in_one_line(tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(tmp_path, "speed", {"member": "ddp"})
    with suppress(OSError), open(small_disk / "ballast", "wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(1 << 16))
    assert cli.main(["compare", "--merge", str(tmp_path), "--output", str(small_disk / "report")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "No space left on device" in line


def test_a_ratio_is_to_the_same_work(tmp_path: Path) -> None:
    """The same model, and rather the same micro-batch and the strategy's defaults."""
    deep, options = {"model.n_layer": 24}, {"strategy.options.bucket_cap_mb": 1}
    found = made_report(
        tmp_path, "speed",
        {"member": "odd ddp", "strategy": "ddp", "seconds": 3.0, "values": options}, {"member": "ddp", "seconds": 1.0}, {"member": "fsdp2", "seconds": 2.0},
        {"member": "ddp deep", "seconds": 8.0, "values": deep}, {"member": "fsdp2 deep", "seconds": 16.0, "values": deep},
        {"member": "ddp 8", "seconds": 0.5, "micro": 8}, {"member": "fsdp2 8", "seconds": 0.4, "micro": 8}, {"member": "fsdp2 4", "seconds": 0.5, "micro": 4},
    )  # fmt: skip
    ratios = {name: row["× ddp"] for name, row in cells(found, "Speed").items()}
    assert ratios == {"odd ddp": "0.33", "ddp": "1.00", "fsdp2": "0.50", "ddp deep": "1.00", "fsdp2 deep": "0.50", "ddp 8": "1.00",
                      "fsdp2 8": "1.25", "fsdp2 4": "2.00"}  # fmt: skip
    text = (found / "report.md").read_text()
    assert "fsdp2 8 is fastest with 1,280 tokens/s, 1.25 times ddp 8." in text
    assert "do other work per second" in text


def test_a_launch_that_was_lost_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    diverged = {"member": "fsdp2", "seed": 4, "losses": [5.0] * 9 + [math.nan]}
    found = made_report(
        tmp_path, "learning", *(learned("ddp", seed, 0.1 + 0.01 * seed) for seed in (1, 2, 3)), *(learned("fsdp2", seed, 0.0) for seed in (1, 2, 3)),
        diverged, *(learned("zero1", seed, 0.2) for seed in (1, 2, 3)),
    )  # fmt: skip
    text = (found / "report.md").read_text()
    assert cells(found, "Learning")["fsdp2"]["validation loss"] == "4.2000 ± 0.0000 (1 of 4 lost)"
    assert "ddp has the lowest validation loss after equal tokens" in text
    assert "Not ranked, since a launch of it failed or diverged: fsdp2." in text


def test_a_tuned_member_of_which_nothing_came_is_a_row_with_its_reason(tmp_path: Path) -> None:
    tried = [{"member": f"{name} lr={lr}", "strategy": name, "group": name, "tried": {"optim.lr": lr}, "ran": (name, lr) in (("ddp", 0.1), ("ddp", 0.3))}
             for name in ("ddp", "fsdp2") for lr in (0.1, 0.2, 0.3)]  # fmt: skip
    found = made_report(tmp_path, "speed", *tried)
    assert list(cells(found, "Speed")) == ["ddp lr=0.1", "fsdp2 lr=0.1"]
    assert list(cells(found, "What has no numbers")) == ["ddp lr=0.2", "fsdp2 lr=0.1", "fsdp2 lr=0.2", "fsdp2 lr=0.3"]
    assert cells(found, "Tuned")["ddp"] == {"member": "ddp", "best": "optim.lr=0.1", "tried": "2 of 3", "at an edge": "optim.lr"}


def test_rows_are_those_of_the_machine_that_ran_them(tmp_path: Path) -> None:
    """And not of the one that asked last, such as a login node."""
    found = made_report(tmp_path / "one", "speed", {"member": "ddp", "ran_on": "8 × H100"}, machine="64 cores of a login node")
    assert "On 8 × H100: ddp is fastest" in (found / "report.md").read_text()
    both = [{"member": "ddp", "repetition": k, "ran_on": machine, "seconds": k + 1.0} for k, machine in enumerate(("8 × H100", "8 × A100"))]
    speed = cells(made_report(tmp_path / "two", "speed", *both), "Speed")
    assert {name: row["tokens/s"] for name, row in speed.items()} == {"ddp (8 × H100)": "512", "ddp (8 × A100)": "256"}


def test_replicas_that_take_turns_say_nothing_about_time_or_bytes(tmp_path: Path) -> None:
    made = [learned("diloco", seed, 0.0, every=1, simulate=8, sent=0) for seed in (1, 2, 3)] + [
        learned("ddp", seed, 0.5) for seed in (1, 2, 3)
    ]
    for entry in made:
        entry["losses"] = [loss - step / 1e3 for step, loss in enumerate(entry["losses"] * 3)]
    found = made_report(tmp_path, "learning", *made)
    row = cells(found, "Learning")["diloco"]
    assert (row["training time"], row["sent in all, per rank"], row["replicas"]) == ("–", "–", "8")
    assert "sent least" not in (found / "report.md").read_text()


def test_a_launch_that_left_no_status_has_failed(tmp_path: Path) -> None:
    plan(tmp_path, "speed", {"member": "ddp"})
    shutil.rmtree(tmp_path / "runs" / "0")
    assert reporting.read(tmp_path).rows[0].state == "not run"
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "0.txt").write_text("a line\nNo space left on device\n")
    (row,) = reporting.read(tmp_path).rows
    assert (row.state, row.reason) == ("failed", "no run: No space left on device")


def test_equal_time_is_that_of_a_place(tmp_path: Path) -> None:
    for name, seconds in (("a", 1.0), ("b", 4.0)):
        (tmp_path / name).mkdir()
        plan(tmp_path / name, "learning", *(learned("ddp", seed, 0.0, seconds=seconds) for seed in (1, 2, 3)))
    with patch.object(reporting, "draw", return_value=[]):
        reporting.report([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    assert {name: row["that time"] for name, row in cells(tmp_path / "both", "Learning").items()} == {"ddp (a)": "28 s", "ddp (b)": "52 s"}


def test_powersgd_is_timed_while_it_compresses(tmp_path: Path) -> None:
    found = made_report(tmp_path, "speed", {"member": "ddp_powersgd", "seconds": 1.0})
    run_config, metrics = tmp_path / "runs" / "0" / "config.yaml", tmp_path / "runs" / "0" / "metrics.jsonl"
    facts = yaml.safe_load(run_config.read_text())
    facts["facts"]["strategy_options"] = {"start_step": 6}
    run_config.write_text(yaml.safe_dump(facts))
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines[:-1]:
        line["wire_bytes_total"] = 10**6 * min(line["step"], 6)
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with patch.object(reporting, "draw", return_value=[]):
        reporting.report([tmp_path], found)
    assert cells(found, "Memory, bytes, checkpoints")["ddp_powersgd"]["sent per update, by formula"] == "0.00 MB"


def test_the_files_of_a_report(tmp_path: Path) -> None:
    found = made_report(
        tmp_path, "speed",
        *({"member": name, "parts": (0.5, 0.2, 0.1, 0.0, 0.01), "seconds": seconds} for name, seconds in (("ddp", 1.0), ("a_strategy <b>", 2.0))),
        {"member": "zero1", "ran": False},
        figures=True,
    )  # fmt: skip
    page = (found / "index.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', page), "index.html needs a file beside it"
    assert "a_strategy &lt;b&gt;" in page
    assert "<b>" not in page
    assert "Made on CPU: bytes, memory and loss carry over; speeds don&#x27;t." in page
    assert {path.name for path in found.iterdir()} == {"index.html", "report.md", "results.csv", "appendix.tex", "memory_speed.png", "memory_speed.pdf",
                                                       "update.png", "update.pdf", "utilisation.png", "utilisation.pdf"}  # fmt: skip
    with open(found / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["member"], row["state"]) for row in rows] == [("ddp", "finished"), ("a_strategy <b>", "finished"), ("zero1", "refused")]
    assert float(rows[0]["tokens_per_second"]) == 512
    tex = (found / "appendix.tex").read_text()
    assert r"a\_strategy \textless{}b\textgreater{}" in tex
    assert r"version of torch & 2.13\_0" in tex


def test_a_legend_has_room(tmp_path: Path) -> None:
    names = [f"diloco: a baseline, lr=0.00{k}" for k in range(10)]
    made = plan(tmp_path, "learning", *({"member": name, "strategy": "ddp", "sent": 100 * k} for k, name in enumerate(names)))
    canvas = Figure(figsize=(figures.COLUMN, figures.COLUMN))
    assert figures.FIGURES["loss_bytes"][1](canvas.add_subplot(), summaries(reporting.read(made).rows))
    (legend,) = canvas.legends
    assert len(legend.get_texts()) == 9, "one of them sends nothing"
    assert legend.get_window_extent().width <= canvas.bbox.width


def test_every_member_has_its_own_line() -> None:
    looks = [figures.style(k) for k in range(2 * len(OPTIONS))]
    assert len({(look["color"], str(look["linestyle"])) for look in looks}) == len(looks)


def test_the_report_says_how_a_network_was_emulated(tmp_path: Path) -> None:
    asked = {"bandwidth_gbit": 0.5, "latency_ms": 3.0}
    plan(tmp_path, "speed", {"member": "ddp"}, network=asked)
    run_config = tmp_path / "runs" / "0" / "config.yaml"
    found = yaml.safe_load(run_config.read_text())
    found["facts"]["network"] = {**asked, "bandwidth_by": "namespaces", "latency_by": "collective layer", "without_namespaces": None}
    run_config.write_text(yaml.safe_dump(found))
    with patch.object(reporting, "draw", return_value=[]):
        reporting.report([tmp_path], tmp_path / "report")
    assert (
        "The network between processes is emulated: 0.5 Gbit/s each way by network namespaces, 3 ms one way by holding collectives back;"
        in (tmp_path / "report/report.md").read_text()
    )


def test_a_launch_whose_numbers_were_not_taken_is_unfinished(tmp_path: Path) -> None:
    write_status(tmp_path / "run", "finished")
    row = read_row({"member": "ddp"}, tmp_path / "run", 2)
    assert (row.state, row.numbers) == ("unfinished", {})
    assert read_row({"member": "ddp"}, tmp_path / "nowhere", 2).state == "not run"


def test_what_each_letter_becomes_in_latex() -> None:
    assert escape(r"50 % of a_b & {c} \ $x$ ~^#") == (
        r"50 \% of a\_b \& \{c\} \textbackslash{} \$x\$ \textasciitilde{}\textasciicircum{}\#"
    )


def test_blocks_say_the_same_in_both_forms() -> None:
    blocks: list[Block] = [Heading("Title", 1), Text("a < b", note=True), Table(["m", "x|y"], [["one", "1"]])]
    assert as_markdown(blocks) == "# Title\n\n> a < b\n\n| m | x\\|y |\n| :-- | --: |\n| one | 1 |\n"
    page = as_html("Title", blocks)
    assert "<p class=note>a &lt; b</p>" in page
    assert [html.unescape(cell) for cell in re.findall(r"<t[hd]>(.*?)</t[hd]>", page)] == ["m", "x|y", "one", "1"]


@given(compute=st.floats(1e-4, 100), sent=st.floats(1, 1e12), level=st.floats(0.01, 0.99))
def test_the_bandwidth_needed_gives_the_utilisation_asked_for(compute: float, sent: float, level: float) -> None:
    assert bandwidth.utilisation(compute, sent, bandwidth.needed(compute, sent, level)) == pytest.approx(level)


def test_one_gigabit_and_one_second() -> None:
    assert bandwidth.utilisation(1.0, 125e6, 1e9) == 0.5  # 125 MB take a second


@given(st.lists(st.tuples(st.floats(1, 10), st.floats(1, 10)), min_size=1))
def test_the_front_is_what_nobody_beats(points: list[tuple[float, float]]) -> None:
    front = figures.pareto(points)
    for memory, speed in points:
        beaten = any(m <= memory and s >= speed and (m, s) != (memory, speed) for m, s in points)
        assert ((memory, speed) in front) == (not beaten)


def test_a_run_that_was_shorter_has_no_loss_at_that_time(tmp_path: Path) -> None:
    plan(tmp_path, "learning", learned("ddp", 1, 0.0))
    shorter = reporting.read(tmp_path).rows[0].run
    assert shorter is not None
    assert loss_after(shorter, 29.0) is None
    assert math.isclose(loss_after(shorter, 10.0) or 0.0, 5.0)


def test_the_command_can_be_pasted(tmp_path: Path) -> None:
    plan(tmp_path, "speed", {"member": "ddp"})
    (summary,) = summaries(reporting.read(tmp_path).rows)
    summary.given |= {"values": {"strategy.name": "diloco", "strategy.options.sync_every": 4, "optim.betas": [0.9, 0.99]},
                      "config_file": "my configs/c.yaml", "overrides": ["compare.seeds=3"]}  # fmt: skip
    words = shlex.split(command(summary))
    assert words[2:6] == ["my configs/c.yaml", "strategy.name=diloco", "strategy.options.sync_every=4", "optim.betas=[0.9, 0.99]"]


def test_tables_leave_out_what_nobody_has(tmp_path: Path) -> None:
    assert "scaling efficiency" not in cells(made_report(tmp_path, "speed", {"member": "ddp"}), "Speed")["ddp"]


# The real thing.


@pytest.mark.long
@pytest.mark.launch
def test_a_comparison_that_is_interrupted_goes_on(tmp_path: Path) -> None:
    """ddp, a local method, and a member that is refused."""
    make_set(tmp_path / "set")
    compare = {"dir": str(tmp_path / "cmp"), "processes": 2, "repetitions": 1, "skip_steps": 2,
               "members": [{"strategy.name": "ddp"}, {"strategy.name": "diloco", "strategy.options.sync_every": 2, "train.max_steps": 8},
                           {"name": "muon", "strategy.name": "fsdp2", "optim.name": "muon"}]}  # fmt: skip
    path = write_config(tmp_path / "compare.yaml", tmp_path / "set", compare=compare)
    command_ = [str(BIN / "pretrain"), "compare", str(path)]
    runs, report = tmp_path / "cmp" / "runs", tmp_path / "cmp" / "report"
    with launch(command_, cwd=tmp_path) as first:
        running = lambda: any((read_status(run) or {}).get("state") == "running" for run in runs.glob("diloco*"))  # noqa: E731
        first.wait_for("a running diloco", running, 2 * START)
        first.signal(signal.SIGINT)
        assert first.wait() == 75, first.story()
    assert "[1/3] ddp on 2 processes, repetition 1: finished" in first.out
    table = cells(report, "Speed")
    assert (table["ddp"]["launches"], table["diloco"]["launches"]) == ("1", "0 of 1")

    status, second = run(command_, cwd=tmp_path, seconds=2 * START)
    assert status == 0, second.story()
    assert "1 of 3 launches are done already" in second.out
    assert "muon on 2 processes, repetition 1: refused: strategy.name=fsdp2 does not work with optim.name=muon" in second.out
    speed = cells(report, "Speed")
    assert (speed["ddp"]["launches"], speed["diloco"]["launches"], speed["muon"]["launches"]) == ("1", "1", "0 of 1")
    parts = cells(report, "Where the time of an update goes")
    assert float(parts["ddp"]["compute"].removesuffix(" ms")) > 0
    sent = cells(report, "Memory, bytes, checkpoints")
    assert sent["ddp"]["counted"] == sent["ddp"]["as NCCL's rings"] == sent["ddp"]["sent per update, by formula"]
    with open(report / "results.csv", newline="") as file:
        rows = {row["member"]: row for row in csv.DictReader(file)}
    assert float(rows["diloco"]["sent_measured"]) == pytest.approx(float(rows["ddp"]["sent_measured"]) / 2, rel=0.01)  # every second update
    assert not list(runs.glob("*/checkpoints"))


ASKED_AGAIN = """
import os, signal, subprocess, sys, threading
from pretrain.compare.running import _wait
child = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
def ask():
    child.stdout.read(1)
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        pass
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=ask).start()
status = _wait(child)
os.kill(os.getpid(), signal.SIGTERM)
print(status)
"""


def test_a_request_after_the_launch_has_stopped_changes_no_status() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED_AGAIN], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "75\n"), done.stderr
