"""Preparation in parts and after interruptions: whatever happened, the set is that of one undisturbed process."""

import contextlib
import gzip
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain import cli
from pretrain.corpus import (
    CorpusError,
    DatasetName,
    PartsMissing,
    Settings,
    assemble,
    formats,
    hub,
    merge,
    parts,
    preparation,
    prepare,
    sources,
    summary,
    tokenise,
)
from pretrain.corpus.documents import Document, Reading
from pretrain.shards import ShardError, open_split, read_manifest
from pretrain.tokenization import load, load_tokenizer

BYTES: dict[str, Any] = {"tokenizer": "byte", "val_fraction": 0.2}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few kilobytes are many units."""
    for module in (sources, parts, tokenise):
        monkeypatch.setattr(module, "BLOCK", 700)
    monkeypatch.setattr(parts, "BATCH", 300)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Every kind of unit: small files together, ranges of a large one, large ones that only read from their start."""
    draw = random.Random(0)
    words = ["naïve", "fox", "\n", "\U0001f600", "the", "  ", "of"]
    texts = [" ".join(draw.choices(words, k=draw.randrange(1, 60))) for _ in range(80)] + ["again", "", " ", "again"]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    made = tmp_path / "in"
    made.mkdir()
    (made / "a.jsonl").write_text("".join(lines))
    (made / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[::-1]).encode()))
    (made / "long.txt").write_text("\n".join(texts), "utf-8")
    for number in range(5):
        (made / f"small{number}.txt").write_text(f"again {number % 3}")
    return made


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small tokenizer of GPT-2's kind, which loads at once."""
    folder = tmp_path_factory.mktemp("bpe")
    load("train:400", ["the quick brown fox jumps over the lazy dog, again and again\n" * 50 + Path(__file__).read_text("utf-8")]).save(
        folder / "tokenizer"
    )
    return str(folder)


def make(*names: Path | str, output: Path, part: tuple[int, int] | None = None, workers: int = 1, **given: Any) -> Any:
    return prepare([str(name) for name in names], output, Settings(**BYTES | given), workers=workers, part=part)[0]


def content(folder: Path) -> dict[str, bytes]:
    assert not (folder / ".parts").exists()
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def texts(folder: Path, split: str = "train") -> list[str]:
    stream = open_split(folder, split)
    ids = stream.read(0, stream.tokens)
    assert ids[-1] == 256
    return [bytes(part.astype(np.uint8)).decode() for part in np.split(ids, np.flatnonzero(ids == 256) + 1)[:-1] for part in [part[:-1]]]


@pytest.mark.parametrize(
    ("count", "given"), [(1, {}), (2, {"tokenizer": "gpt2"}), (7, {}), (2, {"deduplicate": True}), (7, {"deduplicate": True})], ids=str
)
def test_parts_together_are_the_whole(folder: Path, tmp_path: Path, given: dict[str, Any], count: int) -> None:
    whole = make(folder, output=tmp_path / "whole", **given)
    for number in reversed(range(1, count + 1)):
        assert make(folder, output=tmp_path / "set", part=(number, count), **given) is None
        with pytest.raises(ShardError, match="unfinished"):
            open_split(tmp_path / "set", "train")
    assert merge(tmp_path / "set", workers=1) == whole
    assert content(tmp_path / "set") == content(tmp_path / "whole")


def test_each_part_has_its_share(folder: Path) -> None:
    found, _ = sources.find_sources([str(folder)])
    units = parts.units_of(found, Reading())
    assert {(bool(unit.stop), unit.stream) for unit in units} == {(False, False), (True, False), (False, True)}
    for count in (1, 2, 5, 40):
        shares = [list(parts.share(units, number, count)) for number in range(1, count + 1)]
        assert [unit for share in shares for unit in share] == list(range(len(units)))


@pytest.mark.parametrize("count", [1, 3])
def test_an_interrupted_part_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Stopped after every second task, again and again: no task is done twice, and the set is the same."""
    make(folder, output=tmp_path / "whole")
    done: list[tuple[int, int]] = []
    call = tokenise.Tokenise.__call__

    def counted(self: Any, task: Any) -> Any:
        if len(done) % 2 and done[-1] != (task.unit, task.number):
            done.append((-1, -1))
            raise KeyboardInterrupt
        done.append((task.unit, task.number))
        return call(self, task)

    monkeypatch.setattr(tokenise.Tokenise, "__call__", counted)
    for number in range(1, count + 1):
        for _ in range(100):
            with contextlib.suppress(KeyboardInterrupt):
                make(folder, output=tmp_path / "set", part=(number, count) if count > 1 else None)
                break
    if count > 1:
        merge(tmp_path / "set")
    taken = [task for task in done if task != (-1, -1)]
    assert len(taken) == len(set(taken)) > 10
    assert content(tmp_path / "set") == content(tmp_path / "whole")


def test_ctrl_c_says_that_it_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    command = ["prepare", str(folder), "--output", str(tmp_path / "set"), "--tokenizer", "byte", "--workers", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(parts.Part, "add", interrupted)
        assert cli.main(command) == 75
    assert capsys.readouterr().err == "interrupted; the same command goes on where it was\n"
    assert cli.main(command) == 0


def test_ctrl_c_in_a_merge_says_that_it_begins_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    prepare([str(folder)], tmp_path / "set", Settings(**BYTES), workers=1, part=(1, 2))
    prepare([str(folder)], tmp_path / "set", Settings(**BYTES), workers=1, part=(2, 2))
    with monkeypatch.context() as patch:
        patch.setattr("pretrain.corpus.merge", interrupted)
        assert cli.main(["merge", str(tmp_path / "set")]) == 75
    assert capsys.readouterr().err == "interrupted; the same command merges from the beginning\n"
    assert cli.main(["merge", str(tmp_path / "set")]) == 0


def test_a_scheduler_that_signals_every_process_loses_nothing(folder: Path, tmp_path: Path) -> None:
    """SIGTERM to the whole group, as Slurm sends it: the workers leave the answer to their parent."""
    for number in range(24):
        (folder / f"more{number}.txt").write_text("word " * 200_000)
    command = [sys.executable, "-m", "pretrain.cli", "prepare", str(folder), "--output", str(tmp_path / "set"), "--workers", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not list((tmp_path / "set").glob(".parts/*/journal.jsonl")):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.communicate()[1].splitlines()[-1] == "interrupted; the same command goes on where it was"
    assert process.returncode == 75
    (journal,) = (tmp_path / "set").glob(".parts/*/journal.jsonl")
    assert journal.read_bytes().endswith(b"\n")


def stop_in_the_middle(folder: Path, output: Path, monkeypatch: pytest.MonkeyPatch, after: int = 9) -> Path:
    """Leaves a part with `after` results in its journal; returns its folder."""
    add = parts.Part.add

    def adding(self: parts.Part, result: Any) -> None:
        add(self, result)
        if len(self.done) == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(parts.Part, "add", adding)
        with pytest.raises(KeyboardInterrupt):
            make(folder, output=output)
    (part,) = (output / ".parts").iterdir()
    return part


def cut_the_journal(part: Path) -> None:
    journal = part / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-20])


def lose_the_last_tokens(part: Path) -> None:
    (tokens,) = part.glob("*.tokens")
    tokens.write_bytes(tokens.read_bytes()[:-5])


def flip_a_token(part: Path) -> None:
    (tokens,) = part.glob("*.tokens")
    data = bytearray(tokens.read_bytes())
    data[100] ^= 1
    tokens.write_bytes(data)


def lose_all_tokens(part: Path) -> None:
    (tokens,) = part.glob("*.tokens")
    tokens.unlink()


@pytest.mark.parametrize("damage", [cut_the_journal, lose_the_last_tokens, flip_a_token, lose_all_tokens])
def test_what_a_crash_spoilt_is_made_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any) -> None:
    damage(stop_in_the_middle(folder, tmp_path / "set", monkeypatch))
    make(folder, output=tmp_path / "set")
    make(folder, output=tmp_path / "whole")
    assert content(tmp_path / "set") == content(tmp_path / "whole")


def cut_the_third_line(part: Path) -> None:
    """And all after it: what is added next must not become a part of it."""
    lines = (part / "journal.jsonl").read_bytes().splitlines(True)
    (part / "journal.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:-20])


def tear_the_third_line(part: Path) -> None:
    lines = (part / "journal.jsonl").read_bytes().splitlines(True)
    lines[2] = lines[2][:20] + b"\0" * 20 + b"\n"
    (part / "journal.jsonl").write_bytes(b"".join(lines))


@pytest.mark.parametrize("damage", [cut_the_third_line, tear_the_third_line, flip_a_token])
def test_a_source_read_from_its_start_is_whole_when_none_of_its_batches_is_missing(folder: Path, tmp_path: Path, damage: Any) -> None:
    make(folder / "b.jsonl.gz", output=tmp_path / "set", part=(1, 1))
    damage(tmp_path / "set/.parts/00001-of-00001")
    with pytest.raises(PartsMissing, match="part 1 is unfinished"):
        merge(tmp_path / "set")
    make(folder / "b.jsonl.gz", output=tmp_path / "set", part=(1, 1))
    merge(tmp_path / "set")
    make(folder / "b.jsonl.gz", output=tmp_path / "whole")
    assert content(tmp_path / "set") == content(tmp_path / "whole")


def change_a_letter(folder: Path) -> None:
    """Where the interrupted preparation has been already, leaving size and time as they were."""
    before = (folder / "a.jsonl").stat()
    data = (folder / "a.jsonl").read_bytes()
    (folder / "a.jsonl").write_bytes(data.replace(b"fox", b"foX", 1))
    os.utime(folder / "a.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns))


def add_a_file(folder: Path) -> None:
    (folder / "0.txt").write_text("first now")


@pytest.mark.parametrize("change", [change_a_letter, add_a_file])
def test_what_was_made_of_other_sources_is_not_used(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    stop_in_the_middle(folder, tmp_path / "set", monkeypatch)
    change(folder)
    make(folder, output=tmp_path / "set")
    make(folder, output=tmp_path / "whole")
    assert content(tmp_path / "set") == content(tmp_path / "whole")


def test_a_part_made_again_of_newer_bytes_is_merged_with_them(folder: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        make(folder, output=tmp_path / "set", part=(number, 2))
    change_a_letter(folder)
    for number in (1, 2):
        make(folder, output=tmp_path / "set", part=(number, 2))
    make(folder, output=tmp_path / "whole")
    assert merge(tmp_path / "set") == read_manifest(tmp_path / "whole")
    assert content(tmp_path / "set") == content(tmp_path / "whole")


def test_a_set_has_the_tokenizer_of_its_tokens(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of a preparation that was begun before, and not half of one."""
    stop_in_the_middle(folder, tmp_path / "set", monkeypatch)
    make(folder, output=tmp_path / "set", part=(1, 1), tokenizer="gpt2")
    saved = tmp_path / "set/.parts/00001-of-00001/tokenizer/tokenizer.json"
    saved.write_bytes(saved.read_bytes()[:-9])
    with pytest.raises(CorpusError, match="has lost its tokenizer; run --part 1/1 again"):
        merge(tmp_path / "set")
    make(folder, output=tmp_path / "set", part=(1, 1), tokenizer="gpt2")
    merge(tmp_path / "set")
    make(folder, output=tmp_path / "whole", tokenizer="gpt2")
    assert content(tmp_path / "set") == content(tmp_path / "whole")


def test_a_file_that_is_not_read_changes_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(folder, output=tmp_path / "set", part=(1, 2))
    (folder / "notes.md").touch()
    make(folder, output=tmp_path / "set", part=(2, 2))
    with monkeypatch.context() as patch:
        patch.setattr(tokenise.Tokenise, "__call__", None)  # nothing is tokenised again
        make(folder, output=tmp_path / "set", part=(1, 2))
    make(folder, output=tmp_path / "whole")
    assert merge(tmp_path / "set") == read_manifest(tmp_path / "whole")


def test_merging_does_not_need_the_sources(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "good"}\n' * 100 + "{\n")
    make(source, output=tmp_path / "set", part=(1, 1), on_bad="skip", val_fraction=0)
    source.unlink()
    assert merge(tmp_path / "set")["documents"]["examples"] == {"not JSON": [f"{source}, byte 1,700"]}


def test_a_finished_set_is_not_taken_for_the_parts_beside_it(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, merging = tmp_path / "set", ["merge", str(tmp_path / "set"), "--when-complete"]
    make(folder, output=output)
    prepare([str(folder / "a.jsonl")], output, Settings(**BYTES), workers=1, part=(1, 1), overwrite=True)
    assert cli.main(merging) == 2
    assert "holds a finished set beside the parts; add --overwrite" in capsys.readouterr().err
    assert cli.main([*merging, "--overwrite"]) == 0
    assert read_manifest(output) == make(folder / "a.jsonl", output=tmp_path / "whole")
    assert cli.main(merging) == 0
    assert "was merged already" in capsys.readouterr().out


def test_merging_says_what_is_missing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "set"

    def refusal() -> str:
        with pytest.raises(CorpusError) as caught:
            merge(output)
        return str(caught.value)

    assert "holds no parts" in refusal()
    make(folder, output=output, part=(1, 3))
    make(folder, output=output, part=(3, 3))
    assert "part 2 of 3 is missing; make it with --part 2/3" in refusal()
    make(folder, output=output, part=(2, 3), val_fraction=0.3)
    assert "part 2 was made with other settings than part 1" in refusal()
    make(folder, output=output, part=(2, 3))
    plan = output / ".parts/00001-of-00003/plan.json"
    ours = plan.read_text()
    plan.write_text(json.dumps({key: value for key, value in json.loads(ours).items() if key != "record_bytes"}))
    assert "the parts were made by another version of pretrain; make them again" in refusal()
    plan.write_text(ours)
    journal = output / ".parts/00002-of-00003/journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(b"".join(whole.splitlines(True)[:-1]))
    assert "part 2 is unfinished (1 units are missing); run --part 2/3 again" in refusal()
    journal.write_bytes(whole)
    make(folder, output=output, part=(1, 2))
    assert "parts of 2 and of 3" in refusal()
    with pytest.raises(CorpusError, match="holds 4 parts of an array job; pretrain merge"):
        make(folder, output=output)


@pytest.mark.parametrize(
    "names", [["small0.txt", "small1.txt", "small2.txt"], ["a.jsonl", "long.txt"]], ids=["nothing for part 2", "a share for each"]
)
def test_a_part_is_whole_when_its_process_says_so(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    """Other tasks of the array look while it is still at work; what is left to it may yet fail."""
    output, inputs = tmp_path / "set", [folder / name for name in names]
    make(*inputs, output=output, part=(1, 2))
    changed = sources.Source.changed
    asked: list[str] = []

    def in_the_meantime(*_: Any) -> Any:
        with pytest.raises(PartsMissing) as caught:
            merge(output)
        asked.append(str(caught.value))

    def changing(source: Any) -> bool:
        in_the_meantime()
        return changed(source)

    with monkeypatch.context() as patch:
        patch.setattr(sources.Source, "changed", changing)
        patch.setattr(preparation, "share", lambda *given: in_the_meantime() or parts.share(*given))
        make(*inputs, output=output, part=(2, 2))
    assert "part 2 is unfinished; run --part 2/2 again" in asked[-1]
    make(*inputs, output=tmp_path / "whole")
    assert merge(output) == read_manifest(tmp_path / "whole")
    assert content(output) == content(tmp_path / "whole")


def test_a_part_that_starts_again_while_the_others_merge(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        make(folder, output=tmp_path / "set", part=(number, 2))
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "refuse_foreign", lambda *given: merge(tmp_path / "set"))
        make(folder, output=tmp_path / "set", part=(1, 2))
    assert merge(tmp_path / "set") == read_manifest(tmp_path / "set")
    make(folder, output=tmp_path / "whole")
    assert content(tmp_path / "set") == content(tmp_path / "whole")


def test_a_part_survives_that_it_is_merged_before_its_process_has_ended(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(folder, output=tmp_path / "set", part=(2, 2))
    finish = parts.Part.finish
    with monkeypatch.context() as patch:
        patch.setattr(parts.Part, "finish", lambda part: (finish(part), merge(tmp_path / "set")))
        make(folder, output=tmp_path / "set", part=(1, 2))
    make(folder, output=tmp_path / "whole")
    assert content(tmp_path / "set") == content(tmp_path / "whole")


@pytest.mark.parametrize(
    ("part", "given", "reason"),
    [
        ((0, 3), {}, "--part 0/3: expected a part from 1/3 to 3/3"),
        ((4, 3), {}, "--part 4/3"),
        ((1, 3), {"val_split": "tail"}, "--val-split tail needs the whole text"),
        ((1, 3), {"tokenizer": "train:300"}, "would be trained by each part"),
        ((1, 1), {"encoding": "klingon"}, "--encoding klingon: no such encoding"),
        ((1, 1), {"documents": ""}, "--documents: the separator is empty"),
    ],
)
def test_what_a_part_cannot_be(folder: Path, tmp_path: Path, part: tuple[int, int], given: dict[str, Any], reason: str) -> None:
    with pytest.raises(CorpusError, match=reason):
        make(folder, output=tmp_path / "set", part=part, **given)


def test_duplicates_are_counted_always_and_dropped_on_request(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "AT_ONCE", 20)  # several passes
    counted = make(folder, output=tmp_path / "all")["documents"]
    dropped = make(folder, output=tmp_path / "once", deduplicate=True)
    every = [text for split in ("train", "val") for text in texts(tmp_path / "all", split)]
    assert counted["duplicates"] == len(every) - len(set(every)) > 80
    assert dropped["documents"]["skipped"]["duplicate"] == counted["duplicates"]
    for split in ("train", "val"):
        assert texts(tmp_path / "once", split) == list(dict.fromkeys(texts(tmp_path / "all", split)))
        row, stream = dropped["splits"][split], open_split(tmp_path / "once", split)
        assert (row["documents"], row["tokens"]) == (len(texts(tmp_path / "once", split)), stream.tokens)
        assert row["bytes"] == stream.tokens - row["documents"]


@pytest.mark.parametrize("count", [1, 3])
def test_a_duplicate_in_fragments_goes_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Wherever each copy was cut, and whatever it was read from."""
    monkeypatch.setattr("pretrain.corpus.lines.PIECE", 1000)
    text = "".join(f"line {n}\n" for n in range(230))
    (tmp_path / "lf.txt").write_text(text)
    (tmp_path / "crlf.txt").write_text(text, newline="\r\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (tmp_path / "other.txt").write_text(text.replace("line 9\n", "line 0\n"))
    names = [tmp_path / name for name in ("lf.txt", "crlf.txt", "rows.jsonl", "other.txt")]
    pieces = [len(list(formats.read(source, Reading(), True))) for source in sources.find_sources(map(str, names))[0]]
    assert pieces == [2, 3, 1, 2]
    given: dict[str, Any] = {"deduplicate": True, "val_fraction": 0}
    make(names[0], names[3], output=tmp_path / "once", **given)
    for number in range(1, count + 1):
        make(*names, output=tmp_path / "all", part=(number, count) if count > 1 else None, **given)
    told = (merge(tmp_path / "all") if count > 1 else read_manifest(tmp_path / "all"))["documents"]  # type: ignore[index]
    assert (told["kept"], told["skipped"]) == (2, {"duplicate": 2})
    assert texts(tmp_path / "all") == texts(tmp_path / "once") == [text, text.replace("line 9\n", "line 0\n")]


def test_a_duplicate_that_the_tail_begins_in_goes_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {n}\n" for n in range(230))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text(text)
    (tmp_path / "c.txt").write_text("the end")
    names = [tmp_path / f"{name}.txt" for name in "abc"]
    for piece in (1000, 1 << 20):
        monkeypatch.setattr("pretrain.corpus.lines.PIECE", piece)
        for fraction in (0.2, 0.7):  # the cut is in the second, or the first
            told = make(*names, output=tmp_path / f"{piece}-{fraction}", deduplicate=True, val_split="tail", val_fraction=fraction)
            assert (told["documents"]["kept"], told["documents"]["skipped"]) == (2, {"duplicate": 1})
            assert "".join(texts(tmp_path / f"{piece}-{fraction}") + texts(tmp_path / f"{piece}-{fraction}", "val")) == text + "the end"


@pytest.mark.parametrize("given", [{}, {"deduplicate": True}], ids=str)
def test_shards_cut_anywhere_hold_the_same_stream(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    for shard_tokens, span in ((10**6, 10**6), (333, 10**6), (100, 150)):
        monkeypatch.setattr(tokenise, "SPAN", span)  # after so many tokens a worker writes what it holds
        make(folder, output=tmp_path / str(shard_tokens), shard_tokens=shard_tokens, **given)
    streams = [open_split(tmp_path / name, "train") for name in ("1000000", "333", "100")]
    assert [len(stream.shards) for stream in streams] == [1, -(-streams[0].tokens // 333), -(-streams[0].tokens // 100)]
    first, *others = (stream.read(0, stream.tokens).tolist() for stream in streams)
    assert others == [first, first]


def test_what_is_bad_is_skipped_counted_and_told_with_its_line(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"good {n}"}) for n in range(200)]
    rows[150], rows[160], rows[170] = "{", '{"text": null}', '{"body": "x"}'
    rows += ["{"] * 9
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"text" * 500)[:-9])
    names = [tmp_path / name for name in ("a.jsonl", "b.txt", "c.txt.gz")]
    manifest = make(*names, output=tmp_path / "set", on_bad="skip")
    told = manifest["documents"]
    assert (told["read"], told["kept"]) == (211, 197)
    assert told["skipped"] == {"no text": 1, "not JSON": 10, "not utf-8": 1, "null": 1, "rest of a file, damaged archive": 1}
    assert told["examples"]["not JSON"] == [f"{tmp_path}/a.jsonl:{line}" for line in (151, 201, 202, 203, 204)]
    assert told["examples"]["not utf-8"] == [f"{tmp_path}/b.txt:1"]
    assert f"not JSON: {tmp_path}/a.jsonl:151, " in summary(manifest)
    with pytest.raises(CorpusError, match=r"a\.jsonl:151: not one JSON object"):
        make(*names, output=tmp_path / "other")
    with pytest.raises(CorpusError, match="hold no text: every document is empty or blank, or was skipped"):
        make(tmp_path / "b.txt", output=tmp_path / "none", on_bad="skip")


@pytest.mark.parametrize(("tokenizer", "split"), [("byte", "tail"), ("byte", "hash"), ("gpt2", "hash")])
def test_a_large_text_in_fragments_is_the_text_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str, split: str) -> None:
    """The cut of `tail` falls into a fragment, between two, and into another document."""
    text = "".join(f"line {n} — of many,\r\n\r\n" for n in range(600))
    (tmp_path / "a.txt").write_text(text, newline="")
    (tmp_path / "b.txt").write_text("the end " * 200)
    names = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for fraction in (0.05, 0.3, 0.5) if split == "tail" else (0.5,):
        given: dict[str, Any] = {"tokenizer": tokenizer, "val_split": split, "val_fraction": fraction}
        whole = make(*names, output=tmp_path / f"whole{fraction}", **given)
        with monkeypatch.context() as patch:
            patch.setattr("pretrain.corpus.lines.PIECE", 100)
            found, _ = sources.find_sources([str(tmp_path / "a.txt")])
            assert len(list(formats.read(found[0], Reading(), fragments=True))) > 50
            cut = make(*names, output=tmp_path / f"cut{fraction}", **given)
        assert (cut["splits"], cut["files"], cut["documents"]) == (whole["splits"], whole["files"], whole["documents"])


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"".join(b'{"text": "line %d"}\n' % n for n in range(300))
    (tmp_path / "a.jsonl").write_bytes(data)
    make(tmp_path / "a.jsonl", output=tmp_path / "file")
    for reused in (False, True):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        manifest, there = prepare(["-"], tmp_path / "set", Settings(**BYTES), workers=1, format=".jsonl")
        assert there == reused
        assert manifest is not None
        assert manifest["sources"][0]["path"] == "-"
    assert texts(tmp_path / "set") == texts(tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "file", "set"]


def test_standard_input_leaves_no_copy(tmp_path: Path) -> None:
    """Neither where the terminal is closed, nor, once the same set is made again, where the process was killed."""
    command = [sys.executable, "-m", "pretrain.cli", "prepare", "-", "--output", str(tmp_path / "set"), "--tokenizer", "byte",
               "--val-fraction", "0"]  # fmt: skip

    def begin() -> subprocess.Popen[bytes]:
        heard = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
        started = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=heard)
        assert started.stdin
        started.stdin.write(b"text\n" * 1000)
        while not list(tmp_path.glob(".set.stdin.*")):
            assert started.poll() is None
            time.sleep(0.05)
        return started

    with begin() as hung_up:
        hung_up.send_signal(signal.SIGHUP)
        assert hung_up.wait(60) == 75
    assert not list(tmp_path.iterdir())
    with begin() as killed:
        killed.kill()
    assert len(list(tmp_path.iterdir())) == 1
    assert subprocess.run(command, input=b"text\n" * 1000, capture_output=True).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


@pytest.mark.parametrize("same", [True, False])
def test_standard_input_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    """Where the same comes in again, which neither the name nor the time of its file tells."""
    data = b"text\n" + b"".join(b"line %d\n" % n for n in range(300))
    again = data if same else data.replace(b"line 1\n", b"LINE 1\n")
    done: list[int] = []
    call, add = tokenise.Tokenise.__call__, parts.Part.add

    def prepare_it(data: bytes, output: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        prepare(["-"], tmp_path / output, Settings(**BYTES), workers=1, format=".csv")

    def counting(self: tokenise.Tokenise, task: Any) -> Any:
        done.append(task.number)
        return call(self, task)

    def adding(self: parts.Part, result: Any) -> None:
        add(self, result)
        if len(self.done) == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(parts.Part, "add", adding)
        with pytest.raises(KeyboardInterrupt):
            prepare_it(data, "set")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        patch.setattr(tokenise.Tokenise, "__call__", counting)
        prepare_it(again, "set")
    assert done[0] == (4 if same else 0)
    prepare_it(again, "whole")
    assert content(tmp_path / "set") == content(tmp_path / "whole")


def test_a_text_that_grows_before_its_tail_is_cut_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "a.txt"
    source.write_text("a line\n" * 400)
    monkeypatch.setattr("pretrain.corpus.lines.PIECE", 100)
    cut = preparation._cut

    def growing(*given: Any) -> Any:
        made = cut(*given)
        source.write_text("a line\n" * 800)
        return made

    monkeypatch.setattr(preparation, "_cut", growing)
    with pytest.raises(CorpusError, match=r"a\.txt changed while it was being read; run the same command again"):
        make(source, output=tmp_path / "set", val_split="tail", val_fraction=0.1)


@pytest.mark.parametrize("kind", ["folder of files", "saved", "saved splits", "streamed"])
def test_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"id": n, "text": f"row {n} " * 9} for n in range(100)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make(tmp_path / "in", output=tmp_path / "plain")
    if kind.startswith("saved"):
        made = datasets.Dataset.from_list(rows)
        (made if kind == "saved" else datasets.DatasetDict(train=made)).save_to_disk(str(tmp_path / "saved"))
    path = str(tmp_path / ("saved" if kind.startswith("saved") else "in"))
    name = DatasetName(path, streaming=kind == "streamed")

    def prepare_it(output: str, part: tuple[int, int] | None = None, dataset: DatasetName = name) -> tuple[Any, bool]:
        return prepare([], tmp_path / output, Settings(**BYTES), workers=1, part=part, dataset=dataset)

    manifest, reused = prepare_it("set")
    assert not reused
    assert prepare_it("set")[1]
    assert texts(tmp_path / "set") == texts(tmp_path / "plain")
    assert manifest["sources"][0]["path"] == f"dataset:{path}/train"
    if kind == "streamed":
        with pytest.raises(CorpusError, match="leave out --streaming"):
            prepare_it("parts", (1, 2))
    else:
        for number in (1, 2, 3):
            prepare_it("parts", (number, 3))
        assert merge(tmp_path / "parts") == manifest
    with pytest.raises(CorpusError, match="--dataset"):
        prepare_it("other", None, DatasetName(path, split="nope"))
    with pytest.raises(CorpusError, match="no column 'body'"):
        prepare([], tmp_path / "body", Settings(**BYTES, text_field="body"), workers=1, dataset=name)


@pytest.mark.parametrize("saved", [True, False])
def test_a_streamed_dataset_that_has_changed_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool) -> None:
    """Neither the old set nor a half of its making is taken for it."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    add = parts.Part.add

    def fill(word: str) -> DatasetName:
        rows = [{"text": f"{word} {n}"} for n in range(300)]
        hub._load.cache_clear()
        if saved:
            path = tmp_path / word
            datasets.Dataset.from_list(rows).save_to_disk(str(path))
            shutil.rmtree(tmp_path / "in", ignore_errors=True)
            path.rename(tmp_path / "in")
        else:
            (tmp_path / "in").mkdir(exist_ok=True)
            (tmp_path / "in/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return DatasetName(str(tmp_path / "in"), streaming=True)

    def adding(self: parts.Part, result: Any) -> None:
        add(self, result)
        if len(self.done) == 4:
            raise KeyboardInterrupt

    def prepare_it(name: DatasetName, output: str) -> bool:
        return prepare([], tmp_path / output, Settings(**BYTES), workers=1, dataset=name)[1]

    old = fill("old")
    assert not prepare_it(old, "set")
    assert prepare_it(old, "set")
    with monkeypatch.context() as patch:
        patch.setattr(parts.Part, "add", adding)
        with pytest.raises(KeyboardInterrupt):
            prepare_it(old, "begun")
    new = fill("new")
    with pytest.raises(CorpusError, match=r"has changed.*--overwrite"):
        prepare_it(new, "set")
    prepare_it(new, "begun")
    assert {text.split()[0] for text in texts(tmp_path / "begun") + texts(tmp_path / "begun", "val")} == {"new"}


def test_what_datasets_has_computed_beside_a_saved_one_is_no_data(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"text": f"row {n}"} for n in range(50)]).save_to_disk(str(tmp_path / "in"))
    datasets.load_from_disk(str(tmp_path / "in")).map(lambda row: {"text": row["text"].upper()})
    assert list((tmp_path / "in").glob("cache-*.arrow"))
    assert make(tmp_path / "in", output=tmp_path / "set")["documents"]["read"] == 50


def test_a_broken_row_of_a_streamed_dataset_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/train.jsonl").write_text('{"text": "a"}\n' * 9 + '{"text": \n')
    command = ["prepare", "--dataset", str(tmp_path / "in"), "--streaming", "--output", str(tmp_path / "set"), "--tokenizer", "byte"]
    assert cli.main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"--dataset {tmp_path}/in: ")


@pytest.mark.parametrize("flag", [["--split", "train"], ["--config", "en"], ["--streaming"]])
def test_flags_of_a_dataset_ask_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: list[str]) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert cli.main(["prepare", str(tmp_path / "a.txt"), "--output", str(tmp_path / "set"), *flag]) == 2
    assert capsys.readouterr().err == f"{flag[0]} is of a --dataset, and none is named\n"
    assert cli.main(["prepare", "--dataset", "in", "--format", "jsonl", "--output", str(tmp_path / "set")]) == 2


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(st.text(max_size=60).filter(lambda text: bool(text.strip())), min_size=1, max_size=30),
    block=st.integers(5, 400),
    count=st.integers(1, 4),
)
def test_text_comes_back_from_bytes_by_documents_tokens_and_windows(
    tmp_path_factory: pytest.TempPathFactory, bpe: str, documents: list[str], block: int, count: int
) -> None:
    """Any Unicode, any cut into units and parts: the windows of the set, put together and decoded, are the documents."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        for module in (sources, parts, tokenise):
            patch.setattr(module, "BLOCK", block)
        for number in range(1, count + 1):
            make(folder / "a.jsonl", output=folder / "set", part=(number, count), tokenizer=bpe, val_fraction=0)
        merge(folder / "set")
    stream, T = open_split(folder / "set", "train"), 7
    ids = np.concatenate(
        [*(stream.read(w * T, T) for w in range(stream.windows(T))), stream.read(stream.windows(T) * T, stream.tokens % T or T)]
    )
    ids = np.concatenate([ids, stream.read(len(ids), stream.tokens - len(ids))])
    end = read_manifest(folder / "set")["eos_id"]  # type: ignore[index]
    apart = np.split(ids, np.flatnonzero(ids == end) + 1)
    assert len(apart.pop()) == 0
    decode = load_tokenizer(folder / "set").decode
    assert [decode(part[:-1]) for part in apart] == documents


def test_a_range_that_no_document_begins_in_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 5000}) + "\n" + json.dumps({"text": "y"}))
    make(tmp_path / "a.jsonl", output=tmp_path / "set", val_fraction=0)
    assert texts(tmp_path / "set") == ["x" * 5000, "y"]
    assert [
        type(found) for found in formats.read_range(sources.find_sources([str(tmp_path / "a.jsonl")])[0][0], Reading(), 700, 1400)
    ] == []
    assert Document(":1", "x") == Document(":1", "x", 0, True, b"")
