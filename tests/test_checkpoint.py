"""There is always a valid checkpoint: whole or absent, verified before it is trusted, and equal to the bit when it is read back."""

import errno
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from group import Ranks
from safetensors import safe_open
from torch import Tensor

from pretrain import checkpoint as subject
from pretrain.checkpoint import (
    GROUPS,
    MANIFEST,
    CheckpointError,
    clean,
    load,
    newest_valid,
    numbered,
    path_of,
    read_json,
    rotate,
    save,
    verify,
)
from pretrain.config import Train
from pretrain.saver import Saver

NUMBERS = {"progress": {"step": 3, "position": 2**40}}
MODEL = {"config": {"n_layer": 2}}


def some_tensors(seed: int = 0) -> dict[str, dict[str, Tensor]]:
    """Every kind that a strategy may hand over."""
    torch.manual_seed(seed)
    model = {f"w.{dtype}": torch.randn(3, 5).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
    model |= {"buffer": torch.arange(4) + seed, "long": torch.randn(1000)}
    optimizer = {"w.step": torch.tensor(7.0 + seed), "w.exp_avg": torch.randn(3, 5), "odd": torch.tensor([float("inf"), -0.0, 1e-45])}
    return {"model": model, "optimizer": optimizer, "extras": {"feedback": torch.randn(2)}}


def blank(tensors: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    return {group: {name: torch.full_like(t, 99) for name, t in named.items()} for group, named in tensors.items()}


def assert_same_bits(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    for group, named in expected.items():
        for name, tensor in named.items():
            assert found[group][name].dtype == tensor.dtype
            assert torch.equal(found[group][name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def save_one(folder: Path, step: int = 3, tensors: dict[str, dict[str, Tensor]] | None = None) -> Path:
    return save(folder, step, some_tensors() if tensors is None else tensors, NUMBERS, MODEL, None)


def test_every_dtype_and_shape_comes_back_to_the_bit(tmp_path: Path) -> None:
    path = save_one(tmp_path)
    assert path == tmp_path / "step_00000003"
    assert verify(path) is None
    found = blank(some_tensors())
    load(path, found)
    assert_same_bits(found, some_tensors())
    assert (read_json(path, "state.json"), read_json(path, "model.json")) == (NUMBERS, MODEL)


def test_files_are_json_and_safetensors_and_nothing_else(tmp_path: Path) -> None:
    """No pickle, and every file is vouched for; other programs read them without torch.distributed."""
    path = save_one(tmp_path)
    files = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    assert {Path(name).suffix for name in files} == {".json", ".safetensors"}
    assert {Path(name).parts[0] for name in files} == {*GROUPS, "state.json", "model.json", MANIFEST}
    assert set(json.loads((path / MANIFEST).read_text())["files"]) == files - {MANIFEST}
    (shard,) = (path / "model").glob("*.safetensors")
    with safe_open(shard, "pt") as opened:
        assert torch.equal(opened.get_tensor("long"), some_tensors()["model"]["long"])


def test_loading_writes_into_the_tensors_that_are_given(tmp_path: Path) -> None:
    """The optimiser holds the live parameters: none may be replaced."""
    path = save_one(tmp_path)
    found = blank(some_tensors())
    addresses = {name: t.data_ptr() for named in found.values() for name, t in named.items()}
    load(path, found)
    assert {name: t.data_ptr() for named in found.values() for name, t in named.items()} == addresses


def test_another_model_is_refused_by_the_tensors_name(tmp_path: Path) -> None:
    path = save_one(tmp_path)
    for change, message in (
        ({"buffer": torch.zeros(5)}, r"model does not fit this run: buffer is \(4,\) there and \(5,\) here"),
        ({"more": torch.zeros(5)}, r"more is None there and \(5,\) here"),
    ):
        tensors = blank(some_tensors())
        tensors["model"] |= change
        with pytest.raises(CheckpointError, match=message):
            load(path, tensors)
    fewer = blank(some_tensors())
    del fewer["model"]["buffer"]
    with pytest.raises(CheckpointError, match=r"buffer is \(4,\) there and None here"):
        load(path, fewer)


class Killed(BaseException):
    """Ends a save as a kill would: nothing of ours catches it."""


def raise_killed(*_: object) -> None:
    raise Killed


KILL_POINTS = ["write_safetensors", "HashedFile", "os.fsync", "synchronise", "_write_json", "Path.rename"]


@pytest.mark.parametrize("point", KILL_POINTS)
@pytest.mark.parametrize("call", [0, 1, 2])
def test_a_save_that_is_killed_leaves_the_old_checkpoint_and_nothing_like_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, call: int
) -> None:
    save_one(tmp_path, 3)
    calls = iter(range(10**6))
    owner, name = {"Path.rename": (Path, "rename"), "os.fsync": (os, "fsync")}.get(point, (subject, point))
    original = getattr(owner, name)

    def killing(*args: Any, **more: Any) -> Any:
        if next(calls) == call:
            raise Killed
        return original(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killing)
        try:
            save_one(tmp_path, 4)
        except Killed:
            assert [step for step, _ in numbered(tmp_path)] == [3]
        else:
            assert verify(path_of(tmp_path, 4)) is None  # there was no such call
            return
    skipped: list[str] = []
    assert newest_valid(tmp_path, skipped.append) == path_of(tmp_path, 3)
    clean(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000003"]
    assert verify(save_one(tmp_path, 4)) is None


def test_a_save_that_fails_says_so_and_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(subject, "_write_json", full)
    with pytest.raises(CheckpointError, match=r"cannot publish .*step_00000003: rank 0: .*No space left on device"):
        save_one(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("beside", [True, False])
def test_how_a_save_went_is_told_once(tmp_path: Path, beside: bool) -> None:
    """Also of one that training has waited for: the last of a run that fails must end it as failed."""
    said: list[str] = []
    (tmp_path / "checkpoints").write_text("no folder")
    saver = Saver(tmp_path / "checkpoints", None, Train(async_checkpoint=beside), 9, said.append)
    saver.start(5, {"model": {"w": torch.ones(2)}}, {}, {})
    assert "cannot write" in str(saver.wait())
    assert saver.wait() is None
    assert len(said) == 1
    assert saver.step == 0


def test_any_failure_of_a_save_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of ours, too: at the next save, with the other ranks waiting meanwhile, would be too late."""

    def slip(*_: object) -> None:
        raise KeyError("nothing")

    monkeypatch.setattr(subject, "write_safetensors", slip)
    said: list[str] = []
    saver = Saver(tmp_path, None, Train(), 9, said.append)
    saver.start(5, {"model": {"w": torch.ones(2)}}, {}, {})
    assert "KeyError: 'nothing'" in str(saver.wait())
    assert "step 5: no checkpoint was written" in said[0]


def test_what_training_waited_for_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To begin, and for the copy; a save that is not beside training: all of it."""
    clock, settled, write = iter(range(0, 10**6, 100)), threading.Event(), subject.write

    def write_later(*arguments: Any) -> Path:
        settled.wait()
        return write(*arguments)

    monkeypatch.setattr("pretrain.saver.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr(subject, "write", write_later)
    for beside, told in ((True, "in 400.0s, training waited 200.0s"), (False, "in 200.0s, training waited 200.0s")):
        said: list[str] = []
        saver = Saver(tmp_path / str(beside), None, Train(async_checkpoint=beside), 9, said.append)
        saver.start(5, {"model": {"w": torch.ones(2)}}, {}, {})
        saver.settle()
        settled.set()
        assert saver.wait() is None
        assert told in said[0]


def test_records_are_on_the_disk_before_the_checkpoint_that_counts_their_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text("{}\n")
    synchronised: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synchronised.append(os.fstat(file).st_ino))
    saver = Saver(tmp_path, None, Train(), 9, lambda line: None)
    saver.records = [ledger, tmp_path / "not yet"]
    saver.start(5, {"model": {"w": torch.ones(2)}}, {}, {})
    assert saver.wait() is None
    assert synchronised[0] == ledger.stat().st_ino
    assert len(synchronised) > 4


def test_a_deletion_that_is_cut_short_is_finished_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_one(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", raise_killed)
        with pytest.raises(Killed):
            subject.delete(path)
    assert numbered(tmp_path) == []
    clean(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_failed_save_could_not_remove_goes_with_the_next(tmp_path: Path) -> None:
    """On a folder that was read-only for a while."""
    left = tmp_path / "step_00000004.tmp"
    left.mkdir()
    saver = Saver(tmp_path, None, Train(), 9, lambda line: None)
    saver.start(5, {"model": {"w": torch.ones(2)}}, {}, {})
    assert saver.wait() is None
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000005"]


def test_a_full_disk_is_named_and_the_old_checkpoint_stands(small_disk: Path) -> None:
    old = save_one(small_disk, 1)
    with pytest.raises(CheckpointError, match=r"cannot write .*step_00000002\.tmp: rank 0: .*(No space left on device|os error 28)"):
        save_one(small_disk, 2, {"model": {"large": torch.randn(2 * 10**6)}})
    assert verify(old) is None
    assert [p.name for p in small_disk.iterdir()] == ["step_00000001"]


def largest(path: Path) -> Path:
    return max((path / "model").iterdir(), key=lambda p: p.stat().st_size)


def cut(path: Path) -> None:
    os.truncate(largest(path), largest(path).stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(largest(path).read_bytes())
    data[-7] ^= 1
    largest(path).write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (cut, r"model/shard\S+\.safetensors has [\d,]+ bytes instead of [\d,]+"),
    "one bit": (flip, r"model/shard\S+\.safetensors has changed since it was written"),
    "file gone": (lambda path: largest(path).unlink(), r"model/shard\S+\.safetensors is missing"),
    "optimizer gone": (lambda path: shutil.rmtree(path / "optimizer"), r"optimizer/shard\S+ is missing"),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), r"manifest\.json is missing"),
    "manifest cut": (lambda path: os.truncate(path / MANIFEST, 20), r"manifest\.json is damaged"),
    "state": (lambda path: (path / "state.json").write_text("{}"), r"state\.json has 2 bytes instead of"),
    "another step's": (lambda path: path.rename(path.with_name("step_00000099")), r"it is of step 10"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_skipped(tmp_path: Path, damage: str) -> None:
    save_one(tmp_path, 9)
    newest = save_one(tmp_path, 10)
    spoil, words = DAMAGES[damage]
    spoil(newest)
    said: list[str] = []
    assert newest_valid(tmp_path, said.append) == path_of(tmp_path, 9)
    (line,) = said
    assert line.startswith(f"skipping checkpoint {tmp_path}/step_000000")
    assert re.search(words, line), line


def test_newest_is_by_number(tmp_path: Path) -> None:
    """step_123456789 has a digit more than the others; a stray folder and half a save are no checkpoints."""
    for step in (9, 10, 99_999_999, 123_456_789):
        save_one(tmp_path, step)
    for name in ("step_7", "step_00000011.tmp", "best", "step_00000012x"):
        (tmp_path / name).mkdir()
    assert [step for step, _ in sorted(numbered(tmp_path))] == [9, 10, 99_999_999, 123_456_789]
    newest = newest_valid(tmp_path, pytest.fail)
    assert newest is not None
    assert newest.name == "step_123456789"
    assert newest_valid(tmp_path / "none", pytest.fail) is None


def steps_in(folder: Path) -> list[int]:
    return sorted(step for step, _ in numbered(folder))


def test_rotation_keeps_the_newest_and_the_milestones(tmp_path: Path) -> None:
    tensors = {"model": {"w": torch.zeros(2)}}
    for step in range(1, 13):
        save_one(tmp_path, step, tensors)
        rotate(tmp_path, step, keep_last=2, keep_every=5)
        kept = {step, step - 1} | {s for s in (5, 10) if s <= step}
        assert steps_in(tmp_path) == sorted(s for s in kept if s > 0)


def test_rotation_leaves_other_histories_alone_and_counts_only_what_is_whole(tmp_path: Path) -> None:
    """A later step is of a run that went further; a folder without a manifest is no checkpoint to rely on."""
    tensors = {"model": {"w": torch.zeros(2)}}
    for step in (1, 2, 3, 1000):
        save_one(tmp_path, step, tensors)
    (path_of(tmp_path, 3) / MANIFEST).unlink()
    save_one(tmp_path, 4, tensors)
    rotate(tmp_path, 4, keep_last=2, keep_every=0)
    assert steps_in(tmp_path) == [2, 3, 4, 1000]


def test_what_is_known_to_be_damaged_is_not_among_those_to_keep(tmp_path: Path) -> None:
    """B74: whole ones are counted; a damaged one goes when the whole ones before it would."""
    tensors = {"model": {"w": torch.zeros(2)}}
    for step in (1, 2, 3, 4):
        save_one(tmp_path, step, tensors)
    rotate(tmp_path, 4, keep_last=2, keep_every=0, damaged={path_of(tmp_path, 3)})
    assert steps_in(tmp_path) == [2, 3, 4]
    save_one(tmp_path, 5, tensors)
    rotate(tmp_path, 5, keep_last=2, keep_every=3, damaged={path_of(tmp_path, 3)})
    assert steps_in(tmp_path) == [4, 5]


def test_a_rotation_that_is_cut_short_leaves_nothing_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save_one(tmp_path, step)

    def killed(path: Path) -> None:
        raise Killed

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(Killed):
        rotate(tmp_path, 2, keep_last=1, keep_every=0)
    assert verify(path_of(tmp_path, 1)) == "manifest.json is missing"
    assert verify(path_of(tmp_path, 2)) is None


def test_the_same_step_again_replaces_what_was_there(tmp_path: Path) -> None:
    """After a damaged step was skipped, training comes by it again."""
    flip(save_one(tmp_path, 3))
    path = save_one(tmp_path, 3, some_tensors(seed=1))
    assert verify(path) is None
    found = blank(some_tensors())
    load(path, found)
    assert_same_bits(found, some_tensors(seed=1))


# In a group of processes.


def control_group() -> dist.ProcessGroup:
    Accelerator(cpu=True)
    group = dist.new_group(backend="gloo")
    assert group is not None
    return group


def save_in_group(folder: Path) -> int:
    group = control_group()
    return len(list(save(folder, 5, some_tensors(), NUMBERS, MODEL, group).rglob("*.safetensors")))


def load_in_group(folder: Path) -> bool:
    """Right after other ranks have saved: nobody reads what is not there yet."""
    group = control_group()
    original = os.fsync

    def slowly(fd: Any) -> None:
        time.sleep(0.05)
        original(fd)

    os.fsync = slowly
    try:
        path = save(folder, 6, some_tensors(2), NUMBERS, MODEL, group)
    finally:
        os.fsync = original
    found = blank(some_tensors())
    load(path, found)
    assert_same_bits(found, some_tensors(2))
    found = blank(some_tensors())
    load(path_of(folder, 5), found)
    assert_same_bits(found, some_tensors())
    return True


def test_four_ranks_save_what_any_number_reads(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_in_group, tmp_path)
    assert verify(path_of(tmp_path, 5)) is None
    found = blank(some_tensors())
    load(path_of(tmp_path, 5), found)
    assert_same_bits(found, some_tensors())
    assert ranks.run(load_in_group, tmp_path, size=2) == [True, True]
    assert ranks.run(load_in_group, tmp_path) == [True] * 4


def verify_in_group(folder: Path) -> tuple[str | None, int]:
    """(verdict, files that this rank has read)."""
    group, read = control_group(), 0
    original = subject._check

    def counting(path: Path, name: str, entry: Any) -> str | None:
        nonlocal read
        read += 1
        return original(path, name, entry)

    subject._check = counting
    try:
        return verify(path_of(folder, 5), group), read
    finally:
        subject._check = original


def test_every_rank_verifies_a_part_and_all_know_the_verdict(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_in_group, tmp_path)
    path = path_of(tmp_path, 5)
    files = len(json.loads((path / MANIFEST).read_text())["files"])
    verdicts, read = zip(*ranks.run(verify_in_group, tmp_path), strict=True)
    assert verdicts == (None,) * 4
    assert sum(read) == files
    assert max(read) - min(read) <= 1
    flip(path)
    verdicts, _ = zip(*ranks.run(verify_in_group, tmp_path), strict=True)
    assert len(set(verdicts)) == 1
    assert "has changed since it was written" in str(verdicts[0])


def fail_on_one(folder: Path, culprit: int, where: str) -> str:
    group = control_group()
    owner = os if where == "fsync" else subject
    original = getattr(owner, where)

    def full(*args: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if dist.get_rank() == culprit:
        setattr(owner, where, full)
    try:
        save(folder, 5, some_tensors(), NUMBERS, MODEL, group)
    except CheckpointError as error:
        return str(error)
    finally:
        setattr(owner, where, original)
    return "no error"


@pytest.mark.parametrize(("culprit", "where"), [(1, "fsync"), (2, "write_safetensors"), (0, "_write_json")])
def test_what_fails_on_one_rank_is_raised_on_all(ranks: Ranks, tmp_path: Path, culprit: int, where: str) -> None:
    """And nothing that looks like a checkpoint is left."""
    messages = ranks.run(fail_on_one, tmp_path, culprit, where)
    assert len(set(messages)) == 1
    assert f"rank {culprit}: " in messages[0]
    assert "No space left on device" in messages[0]
    assert list(tmp_path.iterdir()) == []
