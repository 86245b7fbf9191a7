"""Copies on a node's disk: made once however many want them, whole or not there, and the same run as from the originals."""

import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import drive
import foreign
import numpy as np
import pytest
from forked import Forks
from group import Ranks
from imported import forking

from pretrain import config as configs
from pretrain import staging
from pretrain.config import ConfigError
from pretrain.hashed_file import HashedFile
from pretrain.loader import Sets, open_sets
from pretrain.shards import ShardError, TokenStream
from pretrain.staging import stage
from pretrain.stopping import StopRequests

MakeSet = Callable[..., Path]
Config = Callable[..., Path]
PATIENCE = 60.0  # seconds, on busy cores
T = 16


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture
def corpus(make_set: MakeSet) -> Path:
    """Three files to train on, one to validate on."""
    draw = np.random.default_rng(0)
    return make_set("corpus", draw.integers(0, 50, 128 * T + 1), draw.integers(0, 50, 8 * T + 1), shard_tokens=800)


def opened(path: Path, *overrides: str) -> Sets:
    return open_sets(configs.load(path, ["train.eval_every=1", *overrides]))


def staged(path: Path, scratch: Path, *overrides: str) -> tuple[Sets, list[str]]:
    """The sets, and what was said of them."""
    said: list[str] = []
    return stage(opened(path, *overrides), str(scratch), said.append), said


def copies(scratch: Path) -> list[str]:
    """Everything in it but its lock."""
    return sorted(str(file.relative_to(scratch)) for file in scratch.rglob("*") if file.is_file() and file.name != ".lock")


def identities(scratch: Path) -> dict[str, tuple[int, int]]:
    """A file that is written again has another."""
    return {name: ((stat := (scratch / name).stat()).st_ino, stat.st_mtime_ns) for name in copies(scratch)}


def content(stream: TokenStream) -> list[int]:
    return stream.read(0, stream.tokens).tolist()


def flip(path: Path) -> None:
    """One bit of the last token."""
    with open(path, "r+b") as file:
        file.seek(-2, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-2, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def wait_for(what: str, happened: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < end, f"not in {PATIENCE:.0f}s: {what}"
        time.sleep(0.01)


def test_the_same_sets_are_read_from_the_copies(corpus: Path, config: Config, scratch: Path) -> None:
    path = config({"data.train": corpus})
    originals = opened(path)
    sets, said = staged(path, scratch)
    key = originals.fingerprints[0][:16]
    assert copies(scratch) == [
        f"corpus-{key}/{name}" for name in ("train_000000.bin", "train_000001.bin", "train_000002.bin", "val_000000.bin")
    ]
    assert [line.rsplit(" in ", 1)[0] for line in said] == [
        f"staging {corpus} (train), {corpus} (val) (0.01 MB) to {scratch}",
        f"staged {corpus} (train), {corpus} (val) (0.01 MB) to {scratch}",
    ]
    for stream, original in zip((*sets.train, *sets.val), (*originals.train, *originals.val), strict=True):
        assert {shard.path.parent for shard in stream.shards} == {scratch / f"corpus-{key}"}
        assert content(stream) == content(original)
        assert (stream.name, stream.fingerprint, stream.manifest) == (original.name, original.fingerprint, original.manifest)
    assert (sets.names, sets.val_names, sets.tokenizer, sets.shares) == (originals.names, originals.val_names, originals.tokenizer, originals.shares)  # fmt: skip

    before = identities(scratch)
    assert staged(path, scratch)[1] == [f"found {corpus} (train), {corpus} (val) staged in {scratch}"]
    assert identities(scratch) == before


def test_only_what_a_run_reads_is_copied(corpus: Path, make_set: MakeSet, config: Config, scratch: Path) -> None:
    """A validation set of its own, and a run that never evaluates."""
    other = make_set("other", [1] * 40, [2] * 40)
    path = config({"data.train": corpus})
    staged(path, scratch, "train.eval_every=0")
    before = identities(scratch)
    assert [name.split("/")[1][:5] for name in before] == ["train"] * 3
    sets, said = staged(path, scratch, f"data.val={other}")
    assert content(sets.val[0]) == [2] * 40
    assert [name.split("-")[0] for name in copies(scratch) if name not in before] == ["other"]
    assert before.items() <= identities(scratch).items(), "what is there stays"
    assert said[0] == f"found {corpus} (train) staged in {scratch}"
    assert said[1].startswith(f"staging {other} (val)")


def test_sets_whose_folders_have_the_same_name_do_not_meet(make_set: MakeSet, config: Config, scratch: Path, tmp_path: Path) -> None:
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
    one, two = make_set("one/corpus", [1] * 100, [3] * 40), make_set("two/corpus", [2] * 100, [4] * 40)
    mixture = json.dumps([{"path": str(one), "weight": 1}, {"path": str(two), "weight": 3}])
    sets, _ = staged(config({"data.train": one}), scratch, f"data.train={mixture}")
    assert [set(content(stream)) for stream in (*sets.train, *sets.val)] == [{1}, {2}, {3}, {4}]
    assert sets.names == [str(one), str(two)]
    assert len(list(scratch.glob("corpus-*"))) == 2


@pytest.mark.parametrize("kind", ["nanoGPT", "Megatron"])
def test_bare_sets_are_copied_anew_when_they_have_changed(config: Config, scratch: Path, tmp_path: Path, kind: str) -> None:
    """Even in the middle, which their fingerprints do not see."""
    folder = tmp_path / "bare"
    folder.mkdir()
    write = foreign.nanogpt if kind == "nanoGPT" else foreign.megatron
    tokens = np.random.default_rng(0).integers(0, 50, 200_000).tolist()
    for split in ("train", "val"):
        write(folder / f"{split}.bin", [tokens])
    path = config({"data.train": folder})
    sets, _ = staged(path, scratch)
    assert sets.train[0].format == kind
    assert content(sets.train[0]) == tokens
    assert len(copies(scratch)) == 2
    tokens[100_000] = 49 - tokens[100_000]
    write(folder / "train.bin", [tokens])
    sets, said = staged(path, scratch)
    assert content(sets.train[0]) == tokens
    assert said[0] == f"found {folder} (val) staged in {scratch}"
    assert len(copies(scratch)) == 3


# What is damaged.


def test_a_damaged_original_is_named_and_not_copied(corpus: Path, config: Config, scratch: Path) -> None:
    flip(corpus / "train_000001.bin")
    with pytest.raises(ShardError, match=rf"{corpus}/train_000001\.bin is damaged: manifest\.json has another SHA-256; copy it again"):
        staged(config({"data.train": corpus}), scratch)
    assert [Path(name).name for name in copies(scratch)] == ["train_000000.bin"]


def test_a_bare_original_that_grows_meanwhile_is_not_copied(config: Config, scratch: Path, tmp_path: Path) -> None:
    foreign.nanogpt(tmp_path / "train.bin", [[1] * 100])
    sets = opened(config({"data.train": tmp_path / "train.bin"}), "train.eval_every=0")
    foreign.nanogpt(tmp_path / "train.bin", [[1] * 101])
    with pytest.raises(ShardError, match=r"train\.bin has changed since it was opened: 202 bytes, not 200"):
        stage(sets, str(scratch), print)
    assert copies(scratch) == []


def test_a_disk_that_does_not_keep_what_is_written_is_found_out(
    corpus: Path, config: Config, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rotten(HashedFile):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self.path = path

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            flip(self.path)

    monkeypatch.setattr(staging, "HashedFile", Rotten)
    with pytest.raises(ConfigError, match=r"train_000000\.bin\.tmp does not read as it was written: that disk is faulty"):
        staged(config({"data.train": corpus}), scratch)
    assert copies(scratch) == []


def test_a_copy_that_was_cut_short_is_made_again_and_a_flipped_bit_goes_unseen(corpus: Path, config: Config, scratch: Path) -> None:
    """As with the originals, whose bytes no start reads again."""
    path = config({"data.train": corpus})
    sets, _ = staged(path, scratch)
    cut, flipped, *_ = (shard.path for shard in sets.train[0].shards)
    os.truncate(cut, cut.stat().st_size - 2)
    flip(flipped)
    before = identities(scratch)
    sets, _ = staged(path, scratch)
    originals = opened(path)
    assert sets.train[0].read(0, 800).tolist() == originals.train[0].read(0, 800).tolist()
    assert sets.train[0].read(800, 800).tolist() != originals.train[0].read(800, 800).tolist()
    assert dict(identities(scratch).items() - before.items()).keys() == {str(cut.relative_to(scratch))}
    shutil.rmtree(cut.parent)
    sets, _ = staged(path, scratch)
    assert content(sets.train[0]) == content(originals.train[0])


# Where there is no room.


def test_too_little_room_is_known_before_anything_is_copied(make_set: MakeSet, config: Config, small_disk: Path) -> None:
    path = config({"data.train": make_set("large", np.ones(3 * 10**6, "<u2"), [1] * 40, shard_tokens=10**6)})
    with pytest.raises(
        ConfigError, match=rf"data\.stage_to={small_disk} on \S+: 6,004,176 bytes to copy, [45],\d\d\d,\d\d\d are free; free some, or name"
    ):
        staged(path, small_disk)
    assert [file.name for file in small_disk.iterdir()] == [".lock"]


def test_what_is_useless_makes_room_first(make_set: MakeSet, config: Config, small_disk: Path) -> None:
    path = config({"data.train": make_set("large", np.ones(2 * 10**6, "<u2"), [1] * 40)})
    (copy,) = staged(path, small_disk)[0].train[0].shards
    os.truncate(copy.path, 3_000_000)
    staged(path, small_disk)
    copy.path.rename(f"{copy.path}.tmp")  # as if a process had been killed
    staged(path, small_disk)
    assert [Path(name).name for name in copies(small_disk)] == ["train_000000.bin", "val_000000.bin"]


def test_a_disk_that_fills_up_meanwhile_is_left_as_it_was(
    make_set: MakeSet, config: Config, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config({"data.train": make_set("large", np.ones(3 * 10**6, "<u2"), [1] * 40, shard_tokens=10**6)})
    kept, free = small_disk / "not ours", shutil.disk_usage(small_disk).free
    kept.touch()
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=10**9))  # as where there is a quota
    with pytest.raises(
        ConfigError,
        match=rf"data\.stage_to={small_disk} on \S+ cannot be written: No space left on device \(6,004,176 bytes to copy, 1,000,000,000 are free\)",
    ):
        staged(path, small_disk)
    monkeypatch.undo()
    assert sorted(file.name for file in small_disk.iterdir()) == [".lock", "not ours"]
    assert shutil.disk_usage(small_disk).free == free


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("nowhere", "no such folder; name another"),
        ("a file", "no such folder; name another"),
        ("/sys", r"cannot be written: .+; name another"),
    ],
)
def test_folders_that_take_nothing(corpus: Path, config: Config, tmp_path: Path, place: str, why: str) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(ConfigError, match=rf"^data\.stage_to={tmp_path / place} on \S+:? {why}"):
        staged(config({"data.train": corpus}), tmp_path / place)


# Several processes.


class Told(NamedTuple):
    """What one process has done."""

    files: int  # written
    tokens: list[int]


def stage_and_count(path: Path, scratch: Path) -> Told:
    """Says on the disk what it is told."""
    written = []

    class Counted(HashedFile):
        def __init__(self, path: Path) -> None:
            written.append(path)
            super().__init__(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "HashedFile", Counted)
        sets = stage(opened(path), str(scratch), lambda line: (path.parent / f"{line.split()[0]} {os.getpid()}").touch())
    return Told(len(written), content(sets.train[0]))


def test_of_four_processes_one_copies(corpus: Path, config: Config, scratch: Path, ranks: Ranks, tmp_path: Path) -> None:
    """All have found nothing before the first may begin."""
    path = config({"data.train": corpus})
    with ThreadPoolExecutor(1) as pool, open(scratch / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        running = pool.submit(ranks.run, stage_and_count, path, scratch)
        wait_for("four that wait", lambda: running.done() or len(list(tmp_path.glob("staging *"))) == 4)
        assert not running.done(), "they have to wait for the lock"
        assert copies(scratch) == []
        fcntl.flock(lock, fcntl.LOCK_UN)
        told = running.result()
    assert sorted(one.files for one in told) == [0, 0, 0, 4]
    assert [one.tokens for one in told] == [content(opened(path).train[0])] * 4


def stage_as_nobody(folder: Path) -> None:
    os.chdir(folder)  # from where no folder above has to be passed
    sets = opened(Path("tiny.yaml"))
    os.setgid(65534)
    os.setuid(65534)
    stage(sets, "scratch", lambda line: None)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_another_users_lock_is_no_obstacle(corpus: Path, config: Config, scratch: Path, tmp_path: Path) -> None:
    """In a folder like /tmp, where all may write and nobody into what others have made."""
    config({"data.train": "corpus"})
    scratch.chmod(0o1777)
    before = os.umask(0o077)
    try:
        with suppress(ConfigError):  # the first user finds no room, say
            staging._make([staging.Copy(corpus / "train_000000.bin", scratch / "one" / "a.bin", 1 << 60, None)], scratch)
    finally:
        os.umask(before)
    tmp_path.chmod(0o755)
    process = forking().Process(target=stage_as_nobody, args=(tmp_path,))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 0
    assert len(copies(scratch)) == 4


def stage_until(path: Path, scratch: Path, file: str, here: Path) -> None:
    """Copies until it has begun this file, says so, and goes no further; stops as a trainer does before step 1."""
    blocks = staging._blocks

    def some(path: Path, *, from_disk: bool = False) -> Iterator[memoryview]:
        for block in blocks(path, from_disk=from_disk):
            yield block
            if path.name == file:
                here.touch()
                while True:
                    time.sleep(0.01)

    StopRequests(follow_launcher=False)
    staging._blocks = some
    stage(opened(path), str(scratch), lambda line: None)


@contextmanager
def held(*arguments: object) -> Iterator[BaseProcess]:
    """A process in the middle of its work, until it is killed."""
    process = forking().Process(target=stage_until, args=arguments, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize(("file", "left"), [("train_000001.bin", "train_000001.bin.tmp"), ("train_000001.bin.tmp", "train_000001.bin.tmp")],
                         ids=["copying", "reading back"])  # fmt: skip
def test_a_killed_copier_leaves_half_a_file_to_the_next(
    corpus: Path, config: Config, scratch: Path, ranks: Ranks, tmp_path: Path, file: str, left: str
) -> None:
    """The next is already waiting, and keeps what is whole."""
    path, here = config({"data.train": corpus}), tmp_path / "here"
    with ThreadPoolExecutor(1) as pool, held(path, scratch, file, here) as copier:
        wait_for("the second file", here.exists)
        running = pool.submit(ranks.run, stage_and_count, path, scratch, size=1)
        wait_for("one that waits", lambda: running.done() or list(tmp_path.glob("staging *")))
        assert [Path(name).name for name in copies(scratch)] == ["train_000000.bin", left]
        before = identities(scratch)
        copier.kill()
        (told,) = running.result()
    assert told == Told(3, content(opened(path).train[0]))
    after = identities(scratch)
    assert [Path(name).name for name in after] == ["train_000000.bin", "train_000001.bin", "train_000002.bin", "val_000000.bin"]
    (first, *_) = after
    assert after[first] == before[first]


def test_a_request_to_stop_ends_a_copier_at_once(corpus: Path, config: Config, scratch: Path, tmp_path: Path) -> None:
    path, here = config({"data.train": corpus}), tmp_path / "here"
    with held(path, scratch, "train_000000.bin", here) as copier:
        wait_for("the first file", here.exists)
        copier.terminate()
        copier.join(PATIENCE)
        assert copier.exitcode == 75
    assert [Path(name).name for name in copies(scratch)] == ["train_000000.bin.tmp"]
    sets, _ = staged(path, scratch)
    assert content(sets.train[0]) == content(opened(path).train[0])


# Whole runs.


def test_a_run_goes_on_with_copies_and_without(corpus: Path, config: Config, scratch: Path, ranks: Ranks) -> None:
    """The same to the bit as one that never had any."""
    path = config({"data.train": corpus})
    whole, weights, _ = ranks.run(drive.whole, path, ["run.name=whole"], size=1)[0]
    parts: drive.Rows = []
    for stop_after, stage_to in ((2, scratch), (2, ""), (None, scratch)):
        rows, last, _ = ranks.run(drive.whole, path, ["run.name=parts", f"data.stage_to={stage_to}"], stop_after, size=1)[0]
        parts += rows
    keys = ("step", "tokens", "position", "epoch", "loss", "lr", "grad_norm", "skipped")
    assert [[row[key] for key in keys] for row in parts] == [[row[key] for key in keys] for row in whole]
    assert len(whole) == 6
    assert drive.largest_difference(last, weights)[0] == 0


def test_a_launch_says_once_what_it_copies_and_trains_on_that(
    corpus: Path, config: Config, scratch: Path, forks: Forks, tmp_path: Path
) -> None:
    path = config({"data.train": corpus, "data.stage_to": scratch, "train.max_steps": 1})
    first = forks.start(path, "run.name=first", size=2, out=tmp_path / "first.out")
    assert first.wait() == [0, 0], first.story(tmp_path / "runs" / "first")
    assert first.said.count("staged ") == first.said.count(f"staged {corpus} (train) (") == 1
    flip_all(scratch)
    second = forks.start(path, "run.name=second", size=2, out=tmp_path / "second.out")
    assert second.wait() == [0, 0], second.story(tmp_path / "runs" / "second")
    assert second.said.count(f"found {corpus} (train) staged in {scratch}") == 1
    losses = [drive.lines(tmp_path / "runs" / name / "metrics.jsonl")[0]["loss"] for name in ("first", "second")]
    assert losses[0] != losses[1], "the copies are what is trained on"
    assert not list((tmp_path / "runs").rglob("*.bin"))


def flip_all(scratch: Path) -> None:
    """Every token is another one: what is read shows from where."""
    for name in copies(scratch):
        tokens = np.memmap(scratch / name, "<u2", "r+", 1024)
        tokens[:] = 49 - tokens


def test_a_damaged_original_refuses_the_launch(corpus: Path, config: Config, scratch: Path, forks: Forks, tmp_path: Path) -> None:
    flip(corpus / "train_000002.bin")
    path = config({"data.train": corpus, "data.stage_to": scratch})
    run = forks.start(path, size=2, out=tmp_path / "out")
    assert run.wait() == [2, 2], run.story(tmp_path / "runs" / "tiny")
    assert run.said.count("train_000002.bin is damaged") == 1
    status = json.loads((tmp_path / "runs" / "tiny" / "status.json").read_text())
    assert (status["state"], status["exit_status"]) == ("refused", 2)


def begin_on_its_own_node(path: Path, scratch: Path) -> list[int]:
    """The tokens that this rank would train on."""
    job, _ = drive.begin(path, [f"data.stage_to={scratch / os.environ['RANK']}"])
    job.loader.close()
    assert job.sets.train[0].shards[0].path.is_relative_to(scratch / os.environ["RANK"])
    return content(job.sets.train[0])


def test_nodes_may_have_their_disks_elsewhere_and_what_one_lacks_ends_all(
    corpus: Path, config: Config, scratch: Path, ranks: Ranks
) -> None:
    path = config({"data.train": corpus})
    (scratch / "0").mkdir()
    outcomes = ranks.outcomes(begin_on_its_own_node, path, scratch, size=2)
    assert [outcome.error.partition(" on ")[0] for outcome in outcomes] == [f"pretrain.config.ConfigError: data.stage_to={scratch}/1"] * 2
    (scratch / "1").mkdir()
    tokens = content(opened(path).train[0])
    assert ranks.run(begin_on_its_own_node, path, scratch, size=2) == [tokens, tokens]
    assert len(copies(scratch)) == 6


def test_a_launch_that_waits_for_another_stops_when_it_is_asked(
    corpus: Path, config: Config, scratch: Path, forks: Forks, tmp_path: Path
) -> None:
    path = config({"data.train": corpus, "data.stage_to": scratch})
    with open(scratch / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = forks.start(path, size=1, out=tmp_path / "out")
        run.wait_for_line("staging ")
        os.kill(run.ranks[0].pid or 0, signal.SIGTERM)
        assert run.wait(10) == [75]
    status = json.loads((tmp_path / "runs" / "tiny" / "status.json").read_text())
    assert (status["state"], status["exit_status"], status["reason"]) == ("stopped", 75, "SIGTERM")
    assert copies(scratch) == []
