"""One run folder, one owner; its records are whole lines, and the first failure is the one that stands."""

import errno
import fcntl
import json
import math
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from pretrain import runfolder as subject
from pretrain.config import ConfigError
from pretrain.runfolder import (
    Lines,
    Status,
    changed_keys,
    claim,
    copy_whole,
    cut_back,
    in_use,
    is_ours,
    join,
    note_end,
    read_status,
    record_code,
    record_config,
    remove_leftovers,
    wait_for_end,
    write_atomic,
)


@pytest.fixture(autouse=True)
def _as_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    owned: dict[Path, Any] = {}
    monkeypatch.setattr(subject, "_owned", owned)
    yield
    for lock in owned.values():
        if lock:
            lock.close()


def own(folder: Path, pipe: Any) -> None:
    claim(folder)
    pipe.send("mine")
    pipe.recv()
    os._exit(9)  # as if killed: nothing is cleaned up


def test_a_folder_has_one_owner_and_a_killed_owner_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=own, args=(folder, theirs), daemon=True)
    owner.start()
    assert ours.recv() == "mine"
    expected = rf"run is in use by process {owner.pid} on \S+ since \d{{4}}-.*; wait for it, stop it \(touch .*/stop\), or choose another run\.name"
    with pytest.raises(ConfigError, match=expected):
        claim(folder)
    assert re.search(expected, in_use(folder) or "")
    assert not is_ours(folder)
    Status(folder, 0).write("running", step=5)
    note_end(folder, 0, "refused", 2, "somebody else's")
    status = read_status(folder)
    assert status is not None
    assert (status["state"], status["step"]) == ("running", 5), "a second launch leaves the owner's status alone"
    ours.send("die")
    owner.join()
    claim(folder)
    assert is_ours(folder)
    assert f"process {os.getpid()} " in (folder / ".lock").read_text()


def test_looking_takes_no_lock(tmp_path: Path) -> None:
    assert in_use(tmp_path / "none") is None
    claim(tmp_path)
    assert in_use(tmp_path) is not None
    join(tmp_path / "other")
    assert is_ours(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write the run folder .*: Not a directory; choose another with run\.dir or run\.name"):
        claim(tmp_path / "file" / "run")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """And nobody is waited for."""

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    said = f"{tmp_path}'s file system keeps no locks ({os.strerror(number)}): mount it with flock, or put run.dir elsewhere"
    with pytest.raises(ConfigError) as caught:
        claim(tmp_path)
    assert str(caught.value) == in_use(tmp_path) == said
    assert not is_ours(tmp_path)


def test_a_folder_on_a_full_disk_is_nobodys(small_disk: Path) -> None:
    """A second try, by the same process, meets no lock of the first one's."""
    (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    kept = []  # and with them what their frames hold
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"cannot write the run folder .*: No space left on device; choose another") as caught:
            claim(small_disk)
        kept.append(caught)
    assert not is_ours(small_disk)
    assert in_use(small_disk) is None
    with pytest.raises(OSError, match="No space left on device"):
        Status(small_disk, 0).write("running")


def test_the_first_failure_stands(tmp_path: Path) -> None:
    Status(tmp_path, 0).write("running", step=7)
    assert Status(tmp_path, 2).fail("out of memory", step=8)
    assert not Status(tmp_path, 0).fail("connection closed by rank 2", step=8)
    status = read_status(tmp_path)
    assert status is not None
    assert {k: status[k] for k in ("state", "exit_status", "step", "reason", "rank", "pid")} == {
        "state": "failed", "exit_status": 1, "step": 8, "reason": "out of memory", "rank": 2, "pid": os.getpid()}  # fmt: skip


def test_failures_at_the_same_moment_leave_one(tmp_path: Path) -> None:
    Status(tmp_path, 0).write("running", step=1)
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda rank: Status(tmp_path, rank).fail(f"reason of {rank}", step=1), range(16)))
    assert sum(won) == 1
    status = read_status(tmp_path)
    assert status is not None
    assert status["rank"] == won.index(True)


def test_an_end_before_step_1_keeps_the_step_of_the_last_start(tmp_path: Path) -> None:
    Status(tmp_path, 0).write("stopped", step=40, exit_status=75)
    note_end(tmp_path, 1, "refused", 2, "another optimiser")
    status = read_status(tmp_path)
    assert status is not None
    assert (status["state"], status["exit_status"], status["step"], status["reason"], status["rank"]) == (
        "refused",
        2,
        40,
        "another optimiser",
        1,
    )


def test_readers_never_see_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    write_atomic(path, "old")
    monkeypatch.setattr(Path, "rename", lambda self, target: pytest.fail("not yet") if target.read_text() != "old" else None)
    write_atomic(path, "new")
    assert path.read_text() == "old"


def test_nodes_with_the_same_process_number_do_not_share_what_replaces_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda _: used.extend(path.name for path in tmp_path.glob("*.tmp")))
    for host in ("n1.cluster", "n2.cluster"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        write_atomic(tmp_path / "summary.md", host)
    first, second = used
    assert first != second


def test_what_a_killed_process_left_of_replacing_a_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any file, on any node; nothing else is."""
    for name in ("step_00000005.tmp", "code.tmp", "a.tmp", "status.json", "metrics.jsonl"):
        (tmp_path / name).touch()
    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: None)
        for host in ("n1", "n2.cluster.example"):
            patch.setattr(socket, "gethostname", lambda host=host: host)
            for name in ("status.json", "config.yaml", "summary.md"):
                write_atomic(tmp_path / name, "new")
    assert len(list(tmp_path.iterdir())) == len(before) + 6
    remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_what_replaces_a_file_is_on_the_disk_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a loss of power would leave a file of zeros. How far a run is, noted at every log line, is not worth the wait."""
    synced: list[str] = []

    def fsync(_: int) -> None:
        (new,) = tmp_path.glob("*.tmp")
        synced.append(new.read_text())

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomic(tmp_path / "config.yaml", "new")
    assert synced == ["new"]
    Status(tmp_path, 0).write("running")
    Status(tmp_path, 0).reached(5)
    assert synced == ["new"]
    Status(tmp_path, 0).write("finished", step=6, exit_status=0)
    assert '"finished"' in synced[-1]


def test_a_copy_is_whole_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "set" / "tokenizer", tmp_path / "tokenizer"
    source.mkdir(parents=True)
    (source / "tokenizer.json").write_text("{}")

    def cut_short(_: Path, where: Path, **__: object) -> None:
        where.mkdir()
        (where / "half").touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", cut_short)
        with pytest.raises(OSError, match="No space left"):
            copy_whole(source, target)
    assert not target.exists()
    copy_whole(source, target)
    assert [(path.name, path.read_text()) for path in target.iterdir()] == [("tokenizer.json", "{}")]


def test_half_a_status_is_none(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    (tmp_path / "status.json").write_text('{"state": "run')
    assert read_status(tmp_path) is None


def test_records_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    """Later steps, and a last line that a kill cut short; lines that stay keep every byte."""
    path = tmp_path / "metrics.jsonl"
    lines = [
        '{"step": 0, "val_loss": 1.50}',
        '{"step": 5, "x": null}',
        '{"step": 10}',
        '{"step": 10, "val_loss": 2}',
        '{"step": 11}',
        '{"step": 1',
    ]
    path.write_text("\n".join(lines))
    cut_back(path, 10)
    assert path.read_text() == "".join(line + "\n" for line in lines[:4])
    cut_back(path, -1)
    assert path.read_text() == ""
    cut_back(tmp_path / "none.jsonl", 3)
    assert not (tmp_path / "none.jsonl").exists()


def test_config_yaml_and_what_changed_since_the_last_start(tmp_path: Path) -> None:
    facts = {"threads": 2, "versions": {"torch": "2.13.0"}, "overrides": ["a"], "init_hash": "ab"}
    assert record_config(tmp_path, {"run": {"seed": 1}}, facts) == []
    assert OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml")) == {"run": {"seed": 1}, "facts": facts}
    assert record_config(tmp_path, {"run": {"seed": 1}}, facts) == []
    changed = record_config(tmp_path, {}, {**facts, "threads": 4, "overrides": ["b"], "versions": {"torch": "2.14.0"}, "new": 1})
    assert changed == ["threads: 2 -> 4", "versions: {'torch': '2.13.0'} -> {'torch': '2.14.0'}"]


@pytest.mark.parametrize("left", ["", "\0" * 100, "facts:\n  threads: 2\n  vers", "facts: {", "- 1", "facts:"])
def test_a_config_yaml_that_a_loss_of_power_left_is_replaced(tmp_path: Path, left: str) -> None:
    (tmp_path / "config.yaml").write_text(left)
    record_config(tmp_path, {}, {"versions": "new"})
    assert OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml")) == {"facts": {"versions": "new"}}


def test_the_code_that_ran_is_kept_and_later_changes_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "checkout" / "pretrain"
    (package / "strategies").mkdir(parents=True)
    (package / "a.py").write_text("a = 1\n")
    (package / "strategies" / "b.py").write_text("b = 1\n")
    git = ["git", "-C", str(package.parent), "-c", "user.name=t", "-c", "user.email=t@t"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    (package / "a.py").write_text("a = 2\n")
    monkeypatch.setattr(subject, "PACKAGE", package)
    assert record_code(tmp_path) == []
    code = tmp_path / "code"
    assert (code / "pretrain" / "a.py").read_text() == "a = 2\n"
    assert len((code / "commit.txt").read_text().strip()) == 40
    assert "+a = 2" in (code / "diff.patch").read_text()
    assert record_code(tmp_path) == []
    (package / "strategies" / "b.py").write_text("b = 2\n")
    (package / "c.py").write_text("")
    (package / "a.py").unlink()
    assert record_code(tmp_path) == ["a.py", "c.py", "strategies/b.py"]


def test_code_is_kept_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert record_code(tmp_path) == []
    assert (tmp_path / "code" / "commit.txt").read_text() == "git is not available\n"
    assert (tmp_path / "code" / "pretrain" / "train.py").exists()


def test_changed_keys_in_order() -> None:
    assert changed_keys({"b": 1, "a": 2, "same": 0}, {"b": 2, "same": 0, "c": None}) == ["a: 2 -> None", "b: 1 -> 2"]
    assert changed_keys({"a": json.loads("[0.9, 0.95]")}, {"a": [0.9, 0.95]}) == []


def test_lines_outlive_a_full_disk(small_disk: Path) -> None:
    """What could not be written comes with the next line, none torn, none twice; it is said once."""
    said: list[str] = []
    lines, ballast = Lines(small_disk / "lines.jsonl", said.append), small_disk / "ballast"
    lines.write({"step": 0, "text": "x" * 4000})
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free))
    for step in (1, 2, 3):
        lines.write({"step": step, "text": "x" * 4000})
    (line,) = said
    assert "No space left on device; its lines are kept in memory" in line
    assert lines.path.read_text().count("\n") == 1
    ballast.unlink()
    lines.write({"step": 4})
    assert [json.loads(line)["step"] for line in lines.path.read_text().splitlines()] == [0, 1, 2, 3, 4]


@pytest.fixture
def full(tmp_path: Path) -> Callable[[Lines], Any]:
    """`with full(lines):` nothing can be written."""

    @contextmanager
    def disk(lines: Lines) -> Iterator[None]:
        path, lines.path = lines.path, Path("/dev/full")
        yield
        lines.path = path

    return disk


def test_lines_that_wait_are_cut_back_too(tmp_path: Path, full: Callable[[Lines], Any]) -> None:
    """A rollback while the disk is full: the steps that it gives up come again, and once."""
    lines = Lines(tmp_path / "lines.jsonl", lambda line: None)
    lines.write({"step": 1})
    with full(lines):
        for step in (2, 3):
            lines.write({"step": step})
    lines.cut_back(2)
    lines.write({"step": 3})
    assert lines.path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_lines_that_wait_are_written_without_another(tmp_path: Path, full: Callable[[Lines], Any]) -> None:
    said: list[str] = []
    lines = Lines(tmp_path / "lines.jsonl", said.append)
    with full(lines):
        for step in (1, 2):
            lines.write({"step": step})
        lines.flush()
        lines.close()
    assert len(said) == 2, "when it begins, and at the end"
    assert said[1] == "2 lines of /dev/full were never written: No space left on device"
    lines.close()
    assert lines.path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert len(said) == 2


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for content, kept in (
        ('{"step": 1}\n{"step": 2}\n', 2),
        ('{"step": 1}\n{"step"', 1),
        ('{"step": 1}\n\0\0\0', 1),
        ('{"step"', 0),
        ("", 0),
    ):
        path.write_text(content)
        cut_back(path, math.inf)
        assert len(path.read_text().splitlines()) == kept


def test_a_cut_reads_the_end_alone_wherever_blocks_fall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "x": "é" * (step % 5)}).encode() + b"\n" for step in range(30)]
    for block in range(1, 70):
        monkeypatch.setattr(subject, "_BLOCK", block)
        for step in (-1, 0, 17, 28, 99):
            path.write_bytes(b"".join(lines) + b'{"step": 3')
            cut_back(path, step)
            assert path.read_bytes() == b"".join(lines[: step + 1])
    path.write_bytes(b"no record\n" * 9 + b"".join(lines))
    monkeypatch.setattr(json, "loads", lambda line, loads=json.loads: loads(line) if line in lines[-3:] else pytest.fail("read on"))
    cut_back(path, 27)


def test_how_far_a_run_is_does_not_hide_that_it_failed(tmp_path: Path) -> None:
    """A main process that is slow to say so writes after another rank has failed."""
    main, other = Status(tmp_path, 0), Status(tmp_path, 1)
    main.write("running", step=0)
    main.reached(5)
    assert (read_status(tmp_path) or {})["step"] == 5
    assert other.fail("why", step=6)
    main.reached(6)
    assert not main.fail("lost contact", step=6)
    found = read_status(tmp_path) or {}
    assert (found["state"], found["rank"], found["reason"], found["step"]) == ("failed", 1, "why", 6)


def test_who_misses_a_rank_that_stopped_as_asked_has_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before step 1 ranks go one by one; one that has still to hear of it loses contact. A stop of an earlier launch says nothing."""
    monkeypatch.setenv("PRETRAIN_LAUNCHED", "this launch")
    Status(tmp_path, 0).write("running")
    Status(tmp_path, 0).stop("SIGTERM", exit_status=75)
    assert not Status(tmp_path, 1).fail("lost contact", step=0)
    assert (read_status(tmp_path) or {})["state"] == "stopped"
    monkeypatch.setenv("PRETRAIN_LAUNCHED", "the next one")
    assert Status(tmp_path, 1).fail("lost contact", step=0)


def test_the_end_that_the_main_process_records_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another node no launcher ends us. An end of an earlier launch, or no name for ours, tells nothing."""
    Status(tmp_path, 0).write("refused", exit_status=2)
    assert not wait_for_end(tmp_path, 0.05)
    monkeypatch.setenv("PRETRAIN_LAUNCHED", "this launch")
    assert not wait_for_end(tmp_path, 0.05)
    Status(tmp_path, 0).write("running")
    assert not wait_for_end(tmp_path, 0.05)
    Status(tmp_path, 0).write("refused", exit_status=2)
    assert wait_for_end(tmp_path, 60)
