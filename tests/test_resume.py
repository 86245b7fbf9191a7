"""Where a run starts, what it refuses to go on from, and: interrupted and resumed is uninterrupted."""

import dataclasses
import errno
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drive
import numpy as np
import pytest
import torch
from group import Ranks

from pretrain import checkpoint, resume
from pretrain import config as configs
from pretrain.config import ConfigError
from pretrain.inspection import check_ledger
from pretrain.job import Finished
from pretrain.order import shares
from pretrain.resume import check_data, check_settings, find_start
from pretrain.strategies import OPTIONS

Config = Callable[..., Path]
COMPARED = ("step", "tokens", "position", "epoch", "loss", "lr", "grad_norm", "skipped")


def same(rows: drive.Rows, keys: tuple[str, ...] = COMPARED) -> list[list[Any]]:
    return [[row[key] for key in keys] for row in rows]


def run_folder(path: Path, *overrides: str) -> Path:
    return configs.load(path, overrides, OPTIONS).folder


# Interrupted and resumed.


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (1, {"optim.name": "muon", "model.dropout": 0.1}),
        (1, {"optim.name": "sgd", "optim.momentum": 0.9, "data.shuffle": False}),
        (1, {"run.precision": "bf16", "train.max_steps": None, "train.epochs": 0.4}),
        (
            4,
            {"batch.micro": 1, "model.dropout": 0.1, "model.n_embd": 128, "strategy.name": "ddp", "strategy.options": {"bucket_cap_mb": 1}},
        ),
    ],
    ids=["muon", "sgd", "bf16, epochs", "four ranks"],
)
def test_stopped_twice_and_resumed_is_the_whole_run_to_the_bit(ranks: Ranks, config: Config, size: int, changes: dict[str, Any]) -> None:
    """Loss, learning rate, norm, tokens, position, the windows of each update, and the weights. Two ranks would hide a reordered
    sum, four with several buckets do not."""
    path = config(changes)
    whole, weights, reason = ranks.run(drive.whole, path, ["run.name=whole"], size=size)[0]
    assert reason is None
    parts: drive.Rows = []
    for stop_after in (2, 1, None):
        by_rank = ranks.run(drive.whole, path, ["run.name=parts"], stop_after, size=size)
        parts += by_rank[0][0]
        assert by_rank[0][2] == (None if stop_after is None else "SIGTERM")
    assert len(whole) == {"train.epochs": 7}.get(next((k for k in changes if k == "train.epochs"), ""), 6)
    assert same(parts) == same(whole)
    assert [row["restarts"] for row in parts] == [0, 0, 1, *[2] * (len(whole) - 3)]
    assert drive.largest_difference(by_rank[0][1], weights)[0] == 0
    ledgers = [drive.lines(run_folder(path, f"run.name={name}") / "ledger.jsonl") for name in ("whole", "parts")]
    assert same(ledgers[1], ("step", "position", "windows")) == same(ledgers[0], ("step", "position", "windows"))
    assert "join without gap or overlap" in check_ledger(run_folder(path, "run.name=parts") / "ledger.jsonl")[0]
    logged = drive.lines(run_folder(path, "run.name=parts") / "metrics.jsonl")
    assert [row["step"] for row in logged] == list(range(1, len(whole) + 1)), "no step twice, none missing"
    assert [row["train_seconds"] for row in logged] == sorted(row["train_seconds"] for row in logged)


@pytest.mark.parametrize("size", [1, 2])
def test_what_a_forward_changes_is_part_of_the_run(ranks: Ranks, config: Config, size: int) -> None:
    """Running statistics: not of the warm-up before step 1, and of two ranks those of the main process, which DDP hands round."""
    path = config({"model.build": "custom_models:Drifting", "strategy.name": "ddp" if size > 1 else "single"})
    whole, weights, _ = ranks.run(drive.whole, path, ["run.name=whole"], size=size)[0]
    parts: drive.Rows = []
    for stop_after in (2, 1, None):
        rows, trained, _ = ranks.run(drive.whole, path, ["run.name=parts"], stop_after, size=size)[0]
        parts += rows
    assert same(parts) == same(whole)
    assert drive.largest_difference(trained, weights)[0] == 0
    assert weights["transformer.h.0.forwards"] == 6 * 8 / 2 / size
    assert weights["transformer.h.0.mean"] > 1


def test_buffers_are_the_main_processs(ranks: Ranks, config: Config) -> None:
    """Where nobody hands them round, too."""
    path = config({"model.build": "custom_models:Drifting", "train.max_steps": 2})
    for name in ("fsdp1", "fsdp2", "zero1", "local_sgd", *(["deepspeed2", "deepspeed3"] if importlib.util.find_spec("deepspeed") else [])):
        every = ["strategy.options.sync_every=1"] if name == "local_sgd" else []
        (_, weights, _), _ = ranks.run(drive.whole, path, [f"strategy.name={name}", f"run.name={name}", *every], size=2)
        found = {buffer: torch.zeros(()) for buffer in weights if buffer.endswith((".forwards", ".mean"))}
        assert len(found) == 2
        stored = checkpoint.Stored(checkpoint.path_of(run_folder(path, f"run.name={name}") / "checkpoints", 2))
        stored.fill("model", found)
        assert {buffer: float(value) for buffer, value in found.items()} == {buffer: float(weights[buffer]) for buffer in found}, name


def test_resuming_on_other_layouts_is_the_same_run(ranks: Ranks, config: Config) -> None:
    """4 processes × 1, then 2 × 2, then 1 × 4: the same windows and learning rates to the end, the same losses to rounding."""
    path = config()
    whole, weights, _ = ranks.run(drive.whole, path, ["run.name=whole"], size=1)[0]
    parts: drive.Rows = []
    for size, stop_after in ((4, 2), (2, 2), (1, None)):
        rows, trained, _ = ranks.run(drive.whole, path, ["run.name=parts"], stop_after, size=size)[0]
        parts += rows
    exact = ("step", "tokens", "position", "lr")
    assert same(parts, exact) == same(whole, exact)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in parts] == pytest.approx([row[key] for row in whole], rel=1e-5)
    assert drive.distance(trained, weights) < 1e-5


def scale_after_load(path: Path, overrides: list[str]) -> tuple[float, int]:
    job, _ = drive.begin(path, overrides)
    job.loader.close()
    assert job.strategy.scaler is not None
    return job.strategy.scaler.get_scale(), job.strategy.scaler._get_growth_tracker()


def set_scaler(job: Any) -> None:
    job.strategy.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    job.strategy.scaler.load_state_dict({**job.strategy.scaler.state_dict(), "_growth_tracker": 7, "growth_interval": 1000})
    job.strategy.scaler.scale(torch.zeros(()))


def save_with_scale(path: Path, overrides: list[str]) -> None:
    drive.whole(path, overrides, tamper=set_scaler)


def test_the_loss_scale_comes_back(ranks: Ranks, config: Config) -> None:
    path = config({"run.precision": "fp16", "train.max_steps": 3})
    ranks.run(save_with_scale, path, [], size=1)
    longer = ["run.resume=must", "train.max_steps=9"]
    assert ranks.run(scale_after_load, path, longer, size=1) == [(256.0, 10)]
    ranks.run(drive.whole, path, ["run.precision=fp32", "run.name=fp32"], size=1)
    assert ranks.run(scale_after_load, path, [*longer, "run.name=fp32"], size=1)[0][0] == 65536, "without one it is found anew"


def test_moments_come_back_to_the_bit(ranks: Ranks, config: Config) -> None:
    path = config({"train.max_steps": 3})
    (saved,) = ranks.run(optimizer_state, path, [], True, size=1)
    (found,) = ranks.run(optimizer_state, path, ["run.resume=must", "train.max_steps=9"], False, size=1)
    assert saved.keys() == found.keys()
    assert any(name.endswith("exp_avg_sq") for name in saved)
    for name in saved:
        assert np.array_equal(saved[name], found[name]), name
    assert float(found["transformer.wte.weight.step"]) == 3


def optimizer_state(path: Path, overrides: list[str], train_first: bool) -> dict[str, Any]:
    from pretrain import train

    job, progress = drive.begin(path, overrides)
    if train_first:
        train.train(job, progress)
    job.loader.close()
    return {name: t.numpy().copy() for group in ("model", "optimizer") for name, t in job.strategy.state()[group].items()}


def test_new_settings_are_the_ones_used(ranks: Ranks, config: Config) -> None:
    """B23: the learning rate and the end of a longer run come from its config, not from the checkpoint."""
    path = config({"optim.schedule": "constant"})
    ranks.run(drive.whole, path, [], size=1)
    rows, _, _ = ranks.run(drive.whole, path, ["run.resume=must", "train.max_steps=8", "optim.lr=0.005"], size=1)[0]
    assert [(row["step"], row["lr"]) for row in rows] == [(7, 0.005), (8, 0.005)]


def test_training_past_a_damaged_checkpoint_writes_it_anew(ranks: Ranks, config: Config) -> None:
    """It was skipped; when the run comes by its step again there must be a valid one in its place."""
    path = config({"train.checkpoint_every": 3})
    ranks.run(drive.whole, path, [], size=1)
    folder = run_folder(path) / "checkpoints"
    damaged = checkpoint.path_of(folder, 6)
    os.truncate(next((damaged / "model").iterdir()), 100)
    ranks.run(drive.whole, path, [], size=1)
    assert checkpoint.verify(damaged) is None
    assert checkpoint.newest_valid(folder, pytest.fail) == damaged


def test_going_back_to_an_earlier_checkpoint_wants_the_later_ones_gone(ranks: Ranks, config: Config) -> None:
    """From step 2 with another learning rate: later steps of the history that is given up would pass for the newest."""
    path = config({"train.checkpoint_every": 2, "train.keep_last": 9})
    ranks.run(drive.whole, path, [], size=1)
    folder = run_folder(path) / "checkpoints"
    overrides = [f"run.resume={folder}/step_00000002", "optim.lr=0.001"]
    with pytest.raises(ConfigError, match="step_00000006 in the same folder is of a later step; delete what you give up"):
        find_start(configs.load(path, overrides, OPTIONS), quiet)
    for later in (4, 6):
        shutil.rmtree(folder / f"step_0000000{later}")
    _, weights, _ = ranks.run(drive.whole, path, overrides, size=1)[0]
    found = {name: torch.full(w.shape, 99.0) for name, w in weights.items()}
    stored = torch.zeros(64, 32)
    newest = checkpoint.newest_valid(folder, pytest.fail)
    assert newest is not None
    checkpoint.load(newest, {"model": {**found, "transformer.wte.weight": stored}})
    found["transformer.wte.weight"] = stored[:50]
    assert drive.largest_difference({name: t.numpy() for name, t in found.items()}, weights)[0] == 0


# What is allowed.


@pytest.fixture
def stopped(ranks: Ranks, config: Config) -> Path:
    """The config of a run that was stopped at step 3 of 6."""
    path = config()
    ranks.run(drive.whole, path, [], 3, size=1)
    return path


def quiet(line: str) -> None:
    pass


def test_run_resume(stopped: Path, tmp_path: Path) -> None:
    """auto, must, never and a path, with checkpoints and without."""
    load = lambda *overrides: configs.load(stopped, overrides, OPTIONS)  # noqa: E731
    at = run_folder(stopped) / "checkpoints" / "step_00000003"
    for value in ("auto", "must", str(at), f"{at}/", str(run_folder(stopped))):
        start = find_start(load(f"run.resume={value}"), quiet)
        assert start.checkpoint == at
        assert (start.progress.step, start.progress.position, start.progress.tokens, start.progress.restarts) == (3, 24, 384, 1)
    with pytest.raises(ConfigError, match=r"run\.resume=never, but .* holds step 3; choose another run\.name, or delete"):
        find_start(load("run.resume=never"), quiet)
    for value in ("auto", "never"):
        start = find_start(load("run.name=new", f"run.resume={value}"), quiet)
        assert (start.checkpoint, start.progress.step) == (None, 0)
    with pytest.raises(ConfigError, match=r"run\.resume=must, but there is no checkpoint in .*new/checkpoints; run\.resume=auto starts"):
        find_start(load("run.name=new", "run.resume=must"), quiet)
    with pytest.raises(ConfigError, match=r"run\.resume=latest: no such checkpoint; write auto, never, must, or the path"):
        find_start(load("run.resume=latest"), quiet)
    with pytest.raises(ConfigError, match=r"run\.resume=.*: manifest\.json is missing"):
        find_start(load(f"run.resume={tmp_path}"), quiet)


def test_a_path_into_another_run_starts_from_its_checkpoint(ranks: Ranks, stopped: Path) -> None:
    at = run_folder(stopped) / "checkpoints" / "step_00000003"
    rows, _, _ = ranks.run(drive.whole, stopped, ["run.name=branch", f"run.resume={at}"], 1, size=1)[0]
    assert [row["step"] for row in rows] == [4]
    ranks.run(drive.whole, stopped, ["run.name=branch"], size=1)
    said = check_ledger(run_folder(stopped, "run.name=branch") / "ledger.jsonl")
    assert "steps 4 to 6 join without gap or overlap: positions 24 to 48" in said[0]
    assert f"begun from {at}" in said[1]


def test_the_same_command_goes_on_whatever_becomes_of_the_path(ranks: Ranks, stopped: Path) -> None:
    """As Slurm repeats it, when the run has checkpoints of its own: the path may be moved, or rotated away where it is the run's own."""
    at = run_folder(stopped) / "checkpoints" / "step_00000003"
    for name, began in (("branch", at), ("tiny", at)):
        command = [f"run.name={name}", f"run.resume={began}", "train.keep_last=9"]
        ranks.run(drive.whole, stopped, command, 1, size=1)
        if name == "branch":
            elsewhere = began.parents[2] / "elsewhere"
            began.parents[1].rename(elsewhere)
        rows, _, _ = ranks.run(drive.whole, stopped, command, size=1)[0]
        assert [row["step"] for row in rows] == [5, 6], name
        if name == "branch":
            with pytest.raises(ConfigError, match="no such checkpoint"):  # of another command: may be a slip
                find_start(configs.load(stopped, [f"run.name={name}", f"run.resume={at}x"], OPTIONS), quiet)
            elsewhere.rename(began.parents[1])


def test_a_run_from_another_ones_end_says_what_to_write(ranks: Ranks, config: Config) -> None:
    path = config()
    ranks.run(drive.whole, path, [], size=1)
    command = ["run.name=longer", f"run.resume={run_folder(path)}"]
    (outcome,) = ranks.outcomes(drive.whole, path, command, size=1)
    assert "ConfigError" in outcome.error
    assert re.search(r"run\.resume=.*step_00000006 is of step 6, where this run would end; write train\.max_steps=MORE", outcome.error)
    rows, _, _ = ranks.run(drive.whole, path, [*command, "train.max_steps=8"], size=1)[0]
    assert [row["step"] for row in rows] == [7, 8]
    (outcome,) = ranks.outcomes(drive.whole, path, [*command, "train.max_steps=8"], size=1)
    assert Finished.__name__ in outcome.error


def test_another_runs_checkpoint_begins_a_new_record(ranks: Ranks, stopped: Path) -> None:
    """In a folder whose own run was given up before a checkpoint."""
    given_up = run_folder(stopped, "run.name=branch")
    given_up.mkdir()
    (given_up / "metrics.jsonl").write_text('{"step": 1, "lr": 9.0}\n{"step": 2, "lr": 9.0}\n')
    ranks.run(drive.whole, stopped, ["run.name=branch", f"run.resume={run_folder(stopped)}"], size=1)
    assert [row["step"] for row in drive.lines(given_up / "metrics.jsonl")] == [4, 5, 6]


def refuse_the_second(job: Any) -> None:
    step, steps = job.strategy.step, iter(range(1, 100))
    job.strategy.step = lambda clip: dataclasses.replace(step(clip), applied=torch.tensor(next(steps) != 2))


def test_updates_that_were_skipped_before_a_restart_count(ranks: Ranks, config: Config) -> None:
    path = config({"train.nonfinite": "skip", "train.log_every": 6})
    for name, stops in (("whole", [None]), ("parts", [3, 1, None])):
        for k, stop_after in enumerate(stops):
            rows, _, _ = ranks.run(drive.whole, path, [f"run.name={name}"], stop_after, refuse_the_second if k == 0 else None, size=1)[0]
        assert [(row["step"], row["skipped"]) for row in rows] == [(6, 1)], name


def test_starts_that_died_before_a_checkpoint_count(ranks: Ranks, config: Config) -> None:
    path = config({"train.checkpoint_every": 3, "train.keep_last": 9})
    checkpoints, ledger = run_folder(path) / "checkpoints", run_folder(path) / "ledger.jsonl"
    for stop_after, restarts in ((2, 0), (4, 1), (1, 2), (None, 3)):
        rows, _, _ = ranks.run(drive.whole, path, [], stop_after, size=1)[0]
        assert {row["restarts"] for row in rows} == {restarts}
        for step, found in checkpoint.numbered(checkpoints) if stop_after else ():  # that of the stop: as if it had been killed
            if step != 3:
                shutil.rmtree(found)
    assert "4 starts; 4 steps were taken again" in check_ledger(ledger)[1]


def test_only_damaged_checkpoints_is_not_step_0(stopped: Path) -> None:
    at = run_folder(stopped) / "checkpoints" / "step_00000003"
    (at / "state.json").unlink()
    said: list[str] = []
    for value in ("auto", "must"):
        with pytest.raises(ConfigError, match=r"none of the 1 checkpoints in .* is valid; choose another run\.name, or delete"):
            find_start(configs.load(stopped, [f"run.resume={value}"], OPTIONS), said.append)
    assert all("state.json is missing" in line for line in said)
    with pytest.raises(ConfigError, match=r"state\.json is missing"):
        find_start(configs.load(stopped, [f"run.resume={at}"], OPTIONS), quiet)


def test_changed_settings_are_listed_with_the_two_ways_on(stopped: Path) -> None:
    """Layout, logging and intervals may change; what is computed may not, unless it is meant."""
    free = [
        "batch.micro=4",
        "train.log_every=5",
        "train.checkpoint_every=1",
        "track.wandb=offline",
        "train.keep_last=9",
        "train.compile=block",
    ]
    cfg = configs.load(stopped, free, OPTIONS)
    assert check_settings(cfg, find_start(cfg, quiet), {}) == []
    changes = ["optim.lr=0.5", "train.max_steps=8", "model.dropout=0.1"]
    cfg = configs.load(stopped, changes, OPTIONS)
    with pytest.raises(ConfigError) as raised:
        check_settings(cfg, find_start(cfg, quiet), {})
    text = str(raised.value)
    for part in (
        "step 3",
        "optim.lr: 0.01 -> 0.5",
        "train.max_steps: 6 -> 8",
        "model.dropout: 0.0 -> 0.1",
        "run.name=NEW",
        "run.resume=must",
    ):
        assert part in text
    assert text.count(" -> ") == 3
    for value in ("must", str(run_folder(stopped))):
        cfg = configs.load(stopped, [*changes, f"run.resume={value}"], OPTIONS)
        assert len(check_settings(cfg, find_start(cfg, quiet), {})) == 3


def test_other_data_tokenizer_or_model_is_another_run(ranks: Ranks, stopped: Path, make_set: Callable[..., Path]) -> None:
    noise = np.random.default_rng(9).integers(0, 50, 2049)
    other = make_set("other", noise)
    for overrides, words in (
        ([f"data.train={other}"], "the training data is not what .*step_00000003 was trained on"),
        (["model.n_layer=1"], "the model is not the one in .* \\(n_layer 2 -> 1\\)"),
        (
            ["data.sequence_length=8", "batch.tokens=64"],
            r"data\.sequence_length .* was 16 for .*step_00000003, now 8: .* write data\.sequence_length=16, or .*run\.name=NEW",
        ),
        (["model.vocab_size=60"], "vocab_size 50 -> 60"),
    ):
        (outcome,) = ranks.outcomes(drive.whole, stopped, [*overrides, "run.resume=must"], size=1)
        assert re.search(words, outcome.error), outcome.error
        assert "ConfigError" in outcome.error
        assert "run.name=NEW" in outcome.error


def test_another_order_of_the_data_is_another_run(ranks: Ranks, stopped: Path) -> None:
    """A position in it would repeat some windows of the epoch and leave out others; `inspect --ledger` could not tell."""
    for override, was, now in (
        ("run.data_seed=7", "run.data_seed", 7),
        ("run.seed=7", "run.data_seed", 7),
        ("data.shuffle=false", "data.shuffle", False),
    ):
        before = True if was == "data.shuffle" else 1
        (outcome,) = ranks.outcomes(drive.whole, stopped, [override, "run.resume=must"], size=1)
        assert f"{was} decides which windows come next, and was {before} for" in outcome.error
        assert f"now {now}: some would come twice in an epoch, and others never; write {was}={before}" in outcome.error
    rows, _, _ = ranks.run(drive.whole, stopped, ["run.seed=7", "run.data_seed=1", "run.resume=must"], size=1)[0]
    assert [row["step"] for row in rows] == [4, 5, 6]


def test_another_tokenizer_is_named(stopped: Path) -> None:
    cfg = configs.load(stopped, [], OPTIONS)
    start = find_start(cfg, quiet)
    data = start.numbers["identity"]["data"]
    alone = shares([1.0])
    check_data(start, cfg, data, alone, {"sha256": "sha256 of toy"})
    with pytest.raises(ConfigError, match="the tokenizer is not what"):
        check_data(start, cfg, data, alone, {"sha256": "another"})


def test_a_finished_run_says_how_to_train_longer(ranks: Ranks, config: Config) -> None:
    for end, words in (
        ({"train.max_steps": 2}, "train.max_steps=MORE"),
        ({"train.max_steps": None, "train.max_tokens": 300}, "train.max_tokens=MORE"),
    ):
        path = config({**end, "run.name": words.split("=")[0].split(".")[1]})
        ranks.run(drive.whole, path, [], size=1)
        before = (run_folder(path) / "metrics.jsonl").read_bytes()
        (outcome,) = ranks.outcomes(drive.whole, path, [], size=1)
        assert Finished.__name__ in outcome.error
        assert f"run.resume=must {words}" in outcome.error
        assert (run_folder(path) / "metrics.jsonl").read_bytes() == before


def test_a_start_removes_what_killed_ones_left_even_if_there_is_nothing_to_train(ranks: Ranks, config: Config) -> None:
    """A save in its last step, a deletion after it, a status that was being replaced."""
    path = config({"train.max_steps": 2})
    ranks.run(drive.whole, path, [], size=1)
    folder = run_folder(path)
    left = [
        folder / "checkpoints" / "step_00000002.tmp",
        folder / "checkpoints" / "step_00000001.deleted.tmp",
        folder / "status.json.node.7.tmp",
    ]
    for one in left[:2]:
        (one / "model").mkdir(parents=True)
    left[2].touch()
    (outcome,) = ranks.outcomes(drive.whole, path, [], size=1)
    assert Finished.__name__ in outcome.error
    assert [one for one in left if one.exists()] == []


def claim_what_cannot_be_cleaned(path: Path) -> str:
    def busy(folder: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    clean, checkpoint.clean = checkpoint.clean, busy
    try:
        drive.begin(path)
    except Exception as error:
        return type(error).__name__
    finally:
        checkpoint.clean = clean
    return "nothing"


def test_what_cannot_be_removed_now_is_no_mistake_of_the_users(ranks: Ranks, config: Config) -> None:
    """A lost process may still have it open, on NFS: a job that is asked to may try again."""
    assert ranks.run(claim_what_cannot_be_cleaned, config(), size=1) == ["OSError"]


def test_the_end_is_saved_once_and_unlogged_steps_are_logged_at_the_end(ranks: Ranks, config: Config) -> None:
    """7 steps, a checkpoint every 5: one at 5 and one at 7; log lines every 4: 4 and 7."""
    path = config({"train.max_steps": 7, "train.checkpoint_every": 5, "train.log_every": 4, "train.keep_last": 9})
    rows, _, _ = ranks.run(drive.whole, path, [], size=2)[0]
    assert sorted(step for step, _ in checkpoint.numbered(run_folder(path) / "checkpoints")) == [5, 7]
    assert [row["step"] for row in rows] == [4, 7]


def test_a_short_last_update_has_the_speed_of_its_own_tokens(ranks: Ranks, config: Config) -> None:
    """Of 8 windows an update, the last has one."""
    rows, _, _ = ranks.run(drive.whole, config({"train.max_steps": None, "train.max_tokens": 144}), [], size=1)[0]
    assert [row["tokens_per_second"] * row["step_seconds"] for row in rows] == pytest.approx([128, 16])


def test_a_future_that_was_given_up_is_cut_from_the_log(ranks: Ranks, config: Config) -> None:
    """Killed after step 5 with the last checkpoint at 3: the log goes on from 4, no step twice."""
    path = config({"train.checkpoint_every": 3})
    whole = ranks.run(drive.whole, path, [], size=1)[0][0]
    shutil.rmtree(run_folder(path) / "checkpoints" / "step_00000006")
    rows, _, _ = ranks.run(drive.whole, path, [], size=1)[0]
    assert [row["step"] for row in drive.lines(run_folder(path) / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert same(rows) == same(whole[3:])
    said = check_ledger(run_folder(path) / "ledger.jsonl")
    assert "2 starts; 3 steps were taken again" in said[1]


def test_state_json_holds_numbers_and_what_the_run_was(stopped: Path) -> None:
    state = json.loads((run_folder(stopped) / "checkpoints" / "step_00000003" / "state.json").read_text())
    assert state["progress"] == {**state["progress"], "step": 3, "position": 24, "tokens": 384, "restarts": 0, "attempt": 0}
    assert set(resume.Progress.__dataclass_fields__) == set(state["progress"])
    assert state["seeds"] == {"run": 1, "init": 1, "data": 1}
    assert state["config_hash"] == configs.identity_hash(configs.load(stopped, [], OPTIONS))
