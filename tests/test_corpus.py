"""Preparing a set: the very tokens, the splits, reuse, and that nothing half-made looks whole."""

import errno
import fcntl
import gzip
import hashlib
import json
import os
import random
import shutil
import string
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from pretrain import tokenization
from pretrain.corpus import CorpusError, Settings, folder, formats, parts, preparation, prepare, sources, summary, tokenise
from pretrain.shards import ShardError, open_split, read_manifest
from pretrain.tokenization import load, load_tokenizer

EOS = 256
# A preparation in a process of its own: its arguments are prepare's, as JSON; it prints whether the set was there already.
PREPARE = (
    "import json, sys; from pathlib import Path; from pretrain.corpus import Settings, prepare\n"
    "if __name__ == '__main__':\n"
    "    sources, output, workers, settings = json.loads(sys.argv[1])\n"
    "    print(prepare(sources, Path(output), Settings(**settings), workers=workers)[1])"
)


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_lines(path: Path, texts: list[str], text_field: str = "text") -> Path:
    return write(path, "".join(json.dumps({text_field: text}) + "\n" for text in texts))


def make(*sources: Path, output: Path | None = None, **given: Any) -> dict[str, Any]:
    """The manifest of a new set, by default of bytes, without validation, in this process."""
    manifest, reused = again(*sources, output=output, **given)
    assert not reused
    return manifest


def again(*sources: Path, output: Path | None = None, workers: int = 1, overwrite: bool = False, **given: Any) -> tuple[Any, bool]:
    values: dict[str, Any] = {"tokenizer": "byte", "val_fraction": 0, **given}
    names = [str(source) for source in sources]
    return prepare(names, output or sources[0].parent / "set", Settings(**values), workers=workers, overwrite=overwrite)


def tokens(folder: Path, split: str = "train") -> list[int]:
    stream = open_split(folder, split)
    return stream.read(0, stream.tokens).tolist()


def documents(folder: Path, split: str = "train") -> list[bytes]:
    """What a set of bytes holds."""
    found = [b""]
    for token in tokens(folder, split):
        if token == EOS:
            found.append(b"")
        else:
            found[-1] += bytes([token])
    assert found.pop() == b""
    return found


def content(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def launch(source: Path, output: Path, workers: int, **settings: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PREPARE, json.dumps([[str(source)], str(output), workers, settings])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """60 documents of random words, of all lengths to 80 kB: 2.4 MB."""
    draw = random.Random(0)
    known = ["".join(draw.choices(string.ascii_lowercase, k=draw.randrange(1, 9))) for _ in range(500)]
    texts = [" ".join(draw.choices([*known, "\n"], k=draw.randrange(1, 15_000))) for _ in range(60)]
    return write_lines(tmp_path / "words.jsonl", texts)


def test_one_end_of_text_after_each_document(tmp_path: Path) -> None:
    write_lines(tmp_path / "in/a.jsonl", ["ab", "c", "", "d", " \n"])
    write(tmp_path / "in/b.txt", "e")
    write(tmp_path / "in/empty.txt", "")
    write(tmp_path / "in/empty.jsonl", "\n\n")
    pq.write_table(pa.table({"text": ["f"]}), write(tmp_path / "in/c.parquet", ""))
    write(tmp_path / "in/notes.md", "not read")
    manifest = make(tmp_path / "in", output=tmp_path / "set")
    assert tokens(tmp_path / "set") == [97, 98, EOS, 99, EOS, 100, EOS, 101, EOS, 102, EOS]
    told = manifest["documents"]
    assert told["examples"] == {
        "blank": [f"{tmp_path}/in/a.jsonl:5"],
        "empty": [f"{tmp_path}/in/a.jsonl:3", f"{tmp_path}/in/empty.txt"],
    }
    assert told == {
        "read": 8,
        "kept": 5,
        "skipped": {"blank": 1, "empty": 2},
        "repaired": {},
        "duplicates": 0,
        "examples": told["examples"],
    }
    assert manifest["splits"]["train"] == {"documents": 5, "tokens": 11, "bytes": 6}
    assert (manifest["eos_id"], manifest["vocab_size"], manifest["dtype"], manifest["ignored_files"]) == (
        EOS,
        257,
        "uint16",
        1,
    )
    assert [source["path"] for source in manifest["sources"]] == sorted(str(p) for p in (tmp_path / "in").iterdir() if p.suffix != ".md")
    assert read_manifest(tmp_path / "set") == manifest


def test_the_summary_states_the_counts(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", ["abc", "", " ", "\ud83d"] + [f"number {n}" for n in range(1234)])
    table = summary(make(source, val_fraction=0.2))
    rows = {line[:30].strip(): line[30:].strip() for line in table.splitlines()}
    assert (rows["documents read"], rows["kept"], rows["skipped, empty"]) == ("1,238", "1,236", "1")
    assert (rows["skipped, blank"], rows["repaired, lone surrogate"]) == ("1", "1")
    train, val = (
        [int(cell.replace(",", "")) for cell in line.split()[1:4]] for line in table.splitlines() if line.startswith(("train", "val"))
    )
    assert train[0] + val[0] == 1236
    assert train[2] + val[2] == train[1] + val[1] + 1236


@pytest.mark.parametrize("escape", [r"x \ud83d y", r"x \ude00 y"])
def test_half_a_surrogate_pair(tmp_path: Path, escape: str) -> None:
    source = write(tmp_path / "a.jsonl", f'{{"text": "{escape}"}}\n{{"text": "x \\ud83d\\ude00 y"}}\n')
    manifest = make(source)
    assert documents(tmp_path / "set") == ["x \ufffd y".encode(), "x \U0001f600 y".encode()]
    assert manifest["documents"]["repaired"] == {"lone surrogate": 1}


def test_line_ends(tmp_path: Path) -> None:
    sources = [write(tmp_path / "crlf.txt", "one\r\ntwo\r\n\r\nthree"), write(tmp_path / "cr.txt", "one\rtwo\rthree")]
    sources += [write(tmp_path / "in.jsonl", '{"text": "a\\r\\nb"}\r\n')]
    make(*sources)
    assert documents(tmp_path / "set") == [b"one\ntwo\n\nthree", b"one\ntwo\nthree", b"a\r\nb"]


@pytest.mark.parametrize(("name", "rows"), [("a.csv", "text\nab\n"), ("a.json", '[{"text": "ab"}]'), ("a.txt", "ab")])
def test_an_encoding_by_another_name_is_the_same(tmp_path: Path, name: str, rows: str) -> None:
    source = write(tmp_path / name, "\ufeff" + rows)
    made = [make(source, output=tmp_path / encoding, encoding=encoding) for encoding in ("utf-8", "UTF-8", "utf8")]
    assert made == [made[0]] * 3
    assert documents(tmp_path / "UTF-8") == [b"ab"]


@pytest.mark.parametrize("name", ["byte", "gpt2"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    write(tmp_path / "without/a.txt", "hello")
    write(tmp_path / "with/a.txt", "\ufeffhello")
    write(tmp_path / "with/b.txt", "\ufeff \n")
    write(tmp_path / "with/c.txt", "\ufeff")
    make(tmp_path / "without", output=tmp_path / "1", tokenizer=name)
    told = make(tmp_path / "with", output=tmp_path / "2", tokenizer=name)["documents"]
    assert tokens(tmp_path / "1") == tokens(tmp_path / "2")
    assert told["skipped"] == {"blank": 1, "empty": 1}


def test_many_small_documents_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,500 documents of 7 tokens and an end: 312 windows of 64, for 312·64 + 1 of the 20,000 tokens are needed; 31 are not used."""
    texts = [f"{n:07d}" for n in range(2500)]
    source = write_lines(tmp_path / "a.jsonl", texts)
    for workers, block in ((1, 4 << 20), (1, 1000), (2, 7777)):
        for module in (sources, parts, tokenise):
            monkeypatch.setattr(module, "BLOCK", block)
        make(source, output=tmp_path / f"{workers}-{block}", workers=workers)
        assert documents(tmp_path / f"{workers}-{block}") == [text.encode() for text in texts]
        assert open_split(tmp_path / f"{workers}-{block}", "train").windows(64) == 312


@pytest.mark.parametrize(("name", "val_split"), [("gpt2", "hash"), ("byte", "tail"), ("train:500", "tail")])
def test_the_bytes_do_not_depend_on_the_workers(words: Path, tmp_path: Path, name: str, val_split: str) -> None:
    for workers in (1, 3):
        given = {"tokenizer": name, "val_fraction": 0.1, "val_split": val_split, "shard_tokens": 200_000}
        make(words, output=tmp_path / str(workers), workers=workers, **given)
    assert content(tmp_path / "1") == content(tmp_path / "3")
    assert len(list((tmp_path / "1").glob("train_*.bin"))) > 1


def test_gpt2_documents_decode_to_the_text(tmp_path: Path) -> None:
    texts = ["Hello world", "naïve café — <|endoftext|> \U0001f600\n\n  x", "5,000 " * 5000]
    make(write_lines(tmp_path / "a.jsonl", texts), tokenizer="gpt2")
    tokenizer = load_tokenizer(tmp_path / "set")
    stream = tokens(tmp_path / "set")
    assert stream[:3] == [15496, 995, 50256]
    assert stream.count(50256) == 3
    assert tokenizer.decode(stream) == "".join(text + "<|endoftext|>" for text in texts)


def test_ids_above_16_bits(tmp_path: Path) -> None:
    vocabulary = {f"w{n}": n for n in range(70_000)} | {"<|endoftext|>": 70_000}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(tmp_path / "words")
    manifest = make(write(tmp_path / "a.txt", "w65535 w65536 w69999 w1"), tokenizer=str(tmp_path / "words"))
    assert (manifest["dtype"], manifest["vocab_size"], manifest["eos_id"]) == ("uint32", 70_001, 70_000)
    assert tokens(tmp_path / "set") == [65535, 65536, 69999, 1, 70_000]
    # The tokenizer of a set is named by the set.
    make(tmp_path / "a.txt", output=tmp_path / "again", tokenizer=str(tmp_path / "set"))
    assert tokens(tmp_path / "again") == tokens(tmp_path / "set")


def test_training_a_tokenizer_does_not_see_validation(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "the cat sat on the mat " * 200 + "zyxzyxzyx" * 200)
    make(tmp_path / "a.txt", tokenizer="train:268", val_fraction=0.3, val_split="tail")
    vocabulary = load_tokenizer(tmp_path / "set").get_vocab()
    assert len(vocabulary) == 268
    assert not [token for token in vocabulary if "zy" in token]


def test_hash_split_keeps_duplicates_together_whatever_their_order(tmp_path: Path) -> None:
    texts = [f"document {n} of a hundred" for n in range(100)]
    make(write_lines(tmp_path / "a.jsonl", texts + texts), output=tmp_path / "1", val_fraction=0.2)
    make(write_lines(tmp_path / "b.jsonl", [*texts[::-1], "another"]), output=tmp_path / "2", val_fraction=0.2, workers=2)
    first, second = ([set(documents(tmp_path / name, split)) for split in ("train", "val")] for name in ("1", "2"))
    assert not first[0] & first[1]
    assert first[0] | first[1] == {text.encode() for text in texts}
    assert first[1] - {b"another"} == second[1] - {b"another"}
    assert 8 <= len(first[1]) <= 35
    # A larger fraction only adds to validation.
    make(tmp_path / "a.jsonl", output=tmp_path / "3", val_fraction=0.5)
    assert first[1] < set(documents(tmp_path / "3", "val"))


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.01])
def test_tail_split_of_one_file_is_nanogpts(tmp_path: Path, fraction: float) -> None:
    data = "First Citizen:\r\nBefore we proceed — any \U0001f600 further, hear me speak.\n\n" * 77
    manifest = make(write(tmp_path / "input.txt", data), val_fraction=fraction, val_split="tail", workers=2)
    data = (tmp_path / "input.txt").read_text("utf-8")  # with universal newlines, as nanoGPT reads
    n = len(data)
    assert documents(tmp_path / "set") == [data[: int(n * (1 - fraction))].encode()]
    assert documents(tmp_path / "set", "val") == [data[int(n * (1 - fraction)) :].encode()]
    assert manifest["documents"]["kept"] == 1


def test_tail_split_over_documents(tmp_path: Path) -> None:
    write_lines(tmp_path / "in/a.jsonl", ["éaaa", "", " \n " * 9, "bbbb"])
    write(tmp_path / "in/b.txt", "éééééééé")
    make(tmp_path / "in", output=tmp_path / "set", val_fraction=0.4, val_split="tail")
    assert documents(tmp_path / "set") == ["éaaa".encode(), b"bbbb", "é".encode()]
    assert documents(tmp_path / "set", "val") == ["ééééééé".encode()]
    source = write(tmp_path / "c.jsonl", '{"text": "\\ud83d ab"}\n{"text": "cd"}\n')
    make(source, output=tmp_path / "cut", val_fraction=0.5, val_split="tail")
    assert (documents(tmp_path / "cut"), documents(tmp_path / "cut", "val")) == (["\ufffd a".encode()], [b"b", b"cd"])


@pytest.mark.parametrize(
    ("texts", "given", "reason"),
    [
        (
            ["one"],
            {"val_fraction": 0.01},
            "the val split would be empty .* write --val-split tail, a larger --val-fraction",
        ),
        (
            ["one"],
            {"val_fraction": 0.9999},
            "the train split would be empty .* write --val-split tail, a smaller --val-fraction",
        ),
        (["one"], {"val_fraction": 0.9, "val_split": "tail"}, "the train split would be empty"),
        (["", " ", "\n"], {}, "every document is empty or blank"),
        (["one"], {"val_fraction": 1.0}, "--val-fraction 1.0: expected"),
        (["one"], {"val_fraction": -0.1}, "--val-fraction -0.1: expected"),
        (["one"], {"workers": 0}, "--workers 0: expected"),
        (["one"], {"tokenizer": "train:7"}, "train:7: expected train:SIZE"),
        (["one"], {"text_field": "body"}, r"a\.jsonl:1: no field 'body'"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_leaves_nothing(
    tmp_path: Path, texts: list[str], given: dict[str, Any], reason: str
) -> None:
    source = write_lines(tmp_path / "a.jsonl", texts)
    with pytest.raises(CorpusError, match=reason) as caught:
        make(source, **given)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "set").exists() or not list((tmp_path / "set").iterdir())


def test_no_validation_on_purpose(tmp_path: Path) -> None:
    manifest = make(write(tmp_path / "a.txt", "a"), val_fraction=0, val_split="tail")
    assert (manifest["files"]["val"], manifest["splits"]["val"]["tokens"]) == ([], 0)
    with pytest.raises(ShardError, match="no val split; prepare it with --val-fraction"):
        open_split(tmp_path / "set", "val")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_huge_document(tmp_path: Path, workers: int) -> None:
    source = write(tmp_path / "a.jsonl", '{"text": "' + "abc" * 10_000_000 + '"}\n{"text": "small"}\n')
    assert make(source, workers=workers)["splits"]["train"]["tokens"] == 30_000_000 + 1 + 5 + 1


# Reuse.


def test_the_same_again_is_reused_at_once(tmp_path: Path) -> None:
    load("byte").save(tmp_path / "tokenizer")
    source = write_lines(tmp_path / "a.jsonl", ["a", "b"])
    given: dict[str, Any] = {"tokenizer": str(tmp_path / "tokenizer"), "val_fraction": 0}
    first = make(source, **given)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")}
    os.utime(source)
    source.rename(write(tmp_path / "moved/a.jsonl", ""))
    start = time.perf_counter()
    reused = again(tmp_path / "moved", output=tmp_path / "set", **given)
    assert time.perf_counter() - start < 1
    assert reused == (first, True)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")} == before


def change_one_letter(folder: Path) -> None:
    before = (folder / "a.txt").stat()
    write(folder / "a.txt", "text ONE")
    os.utime(folder / "a.txt", ns=(before.st_atime_ns, before.st_mtime_ns))


def swap_the_tokenizer(folder: Path) -> None:
    shutil.rmtree(folder / "tokenizer")
    load("train:300", [Path(tokenization.__file__).read_text()]).save(folder / "tokenizer")


@pytest.mark.parametrize(
    ("change", "given", "reason"),
    [
        (change_one_letter, {}, r"source \S+/a\.txt has changed"),
        (lambda folder: write(folder / "c.txt", "3"), {}, r"source \S+/c\.txt is new"),
        (lambda folder: (folder / "b.txt").unlink(), {}, r"source \S+/b\.txt is gone"),
        (swap_the_tokenizer, {}, "tokenizer was tokenizer@.*, now tokenizer@"),
        (lambda folder: None, {"tokenizer": "byte"}, "tokenizer was tokenizer@.*, now byte"),
        (lambda folder: None, {"val_fraction": 0.4}, r"val_fraction was 0\.5, now 0\.4"),
        (lambda folder: None, {"val_split": "hash"}, "val_split was tail, now hash"),
        (lambda folder: None, {"text_field": "body"}, "text_field was text, now body"),
        (lambda folder: None, {"shard_tokens": 7}, "shard_tokens was 100000000, now 7"),
    ],
)
def test_what_differs_is_said_and_overwrite_mends_it(tmp_path: Path, change: Any, given: dict[str, Any], reason: str) -> None:
    folder = tmp_path / "in"
    write(folder / "a.txt", "text one")
    write(folder / "b.txt", "text two")
    load("byte").save(folder / "tokenizer")
    given = {"tokenizer": str(folder / "tokenizer"), "val_fraction": 0.5, "val_split": "tail"} | given
    make(folder, output=tmp_path / "set", tokenizer=str(folder / "tokenizer"), val_fraction=0.5, val_split="tail")
    before = content(tmp_path / "set")
    change(folder)
    with pytest.raises(CorpusError, match=reason) as caught:
        make(folder, output=tmp_path / "set", **given)
    assert "--overwrite" in str(caught.value)
    assert content(tmp_path / "set") == before
    make(folder, output=tmp_path / "set", overwrite=True, **given)
    make(folder, output=tmp_path / "fresh", **given)
    assert content(tmp_path / "set") == content(tmp_path / "fresh") != before


def test_the_same_bytes_read_in_another_way_are_another_set(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", ["a"])
    make(source)
    source.rename(tmp_path / "a.txt")
    with pytest.raises(CorpusError, match=r"source \S+/a\.txt is new"):
        make(tmp_path / "a.txt")


def test_another_order_of_sources_is_another_set(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.txt", "a"), write(tmp_path / "b.txt", "b")
    make(a, b)
    with pytest.raises(CorpusError, match="the sources come in another order"):
        make(b, a)


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: os.truncate(path, 1025)])
def test_a_damaged_set_is_not_reused(tmp_path: Path, damage: Any) -> None:
    source = write(tmp_path / "a.txt", "text")
    make(source)
    damage(tmp_path / "set" / "train_000000.bin")
    with pytest.raises(CorpusError, match=r"train_000000\.bin"):
        make(source)
    make(source, overwrite=True)
    assert documents(tmp_path / "set") == [b"text"]


def test_overwriting_with_something_impossible_keeps_the_old_set(tmp_path: Path) -> None:
    make(write(tmp_path / "a.txt", "text"))
    before = content(tmp_path / "set")
    with pytest.raises(CorpusError, match="not one JSON object"):
        make(write(tmp_path / "bad.jsonl", '{"text": "a"}\n{\n'), overwrite=True)
    assert content(tmp_path / "set") == before


def test_files_of_others_are_never_touched(tmp_path: Path) -> None:
    write(tmp_path / "set/train_000000.bin", b"not ours")
    before = content(tmp_path / "set")
    for overwrite in (False, True):
        with pytest.raises(CorpusError, match="files that are no prepared set; choose another --output"):
            make(write(tmp_path / "a.txt", "text"), overwrite=overwrite)
    assert content(tmp_path / "set") == before


@pytest.mark.parametrize("manifest", [{"manifest_version": 3}, {"format_version": 1, "step": 7, "files": {}}, ["a"]], ids=str)
def test_a_manifest_of_others_is_none(tmp_path: Path, manifest: Any) -> None:
    """A checkpoint of ours has one, too."""
    write(tmp_path / "set/manifest.json", json.dumps(manifest))
    write(tmp_path / "set/tokenizer/mine.json", "keep")
    before = content(tmp_path / "set")
    with pytest.raises(CorpusError, match="files that are no prepared set; choose another --output"):
        make(write(tmp_path / "a.txt", "text"), overwrite=True)
    assert content(tmp_path / "set") == before


def test_a_set_that_is_finished_just_now_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock goes when its manifest stands."""
    source, exists = write(tmp_path / "a.txt", "text"), Path.exists
    make(source)
    manifest, later = tmp_path / "set/manifest.json", tmp_path / "later"
    manifest.rename(later)

    def finishing(path: Path, **given: Any) -> bool:
        found = exists(path, **given)
        if path.name == ".lock" and exists(later):
            later.rename(manifest)
        return found

    monkeypatch.setattr(Path, "exists", finishing)
    folder.refuse_foreign(tmp_path / "set", None)


def test_replacing_a_set_leaves_what_is_beside_it(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "text")
    make(source)
    write(tmp_path / "set/train_notes.bin", "mine")
    make(source, overwrite=True)
    assert (tmp_path / "set/train_notes.bin").read_text() == "mine"


@pytest.mark.parametrize("left", [".building", ".parts/00001-of-00001"])
def test_what_a_kill_after_the_end_leaves_goes_at_the_next_start(tmp_path: Path, left: str) -> None:
    source = write(tmp_path / "a.txt", "text")
    make(source)
    before = content(tmp_path / "set")
    write(tmp_path / "set" / left / "train_000000.bin", "once more")
    write(tmp_path / "set/.lock", "")
    assert again(source)[1]
    assert content(tmp_path / "set") == before
    assert not [path.name for path in (tmp_path / "set").iterdir() if path.name.startswith(".")]


def test_a_name_that_pyarrow_cannot_open_is_told(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"a\xff.parquet")
    path.write_bytes(b"PAR1")
    with pytest.raises(CorpusError, match=r"a\\xff\.parquet: pyarrow opens no file whose name is not UTF-8"):
        make(path, output=tmp_path / "set")


# Interruption and company.


def test_killed_in_the_middle_and_run_again(words: Path, tmp_path: Path) -> None:
    output, source = tmp_path / "set", tmp_path / "in"
    for number in range(4):
        write(source / f"{number}.jsonl", words.read_bytes())
    process = launch(source, output, 2, tokenizer="gpt2", val_fraction=0.1)
    while not list(output.glob(".parts/*/journal.jsonl")):
        assert process.poll() is None
        time.sleep(0.001)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert children
    assert not psutil.wait_procs(children, timeout=20)[1], "a worker outlives its parent"
    with pytest.raises(ShardError, match="unfinished"):
        open_split(output, "train")
    make(source, output=output, tokenizer="gpt2", val_fraction=0.1)
    make(source, output=tmp_path / "fresh", tokenizer="gpt2", val_fraction=0.1)
    assert content(output) == content(tmp_path / "fresh")


def test_killed_before_the_manifest_and_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = write(tmp_path / "a.txt", "text"), tmp_path / "set"
    make(source)
    (output / "manifest.json").unlink()
    write(output / ".lock", "")
    write(output / "train_000001.bin", b"of the killed one")
    with pytest.raises(ShardError, match="unfinished"):
        open_split(output, "train")
    make(source)
    make(source, output=tmp_path / "fresh")
    assert content(output) == content(tmp_path / "fresh")


@pytest.mark.parametrize("name", ["tokenizer", "train_000000.bin", "manifest.json"])
def test_an_interruption_while_replacing_a_set_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    source, rename = write(tmp_path / "a.txt", "text"), Path.rename
    make(source)

    def stop(path: Path, target: Path) -> Path:
        if path.name == name:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(KeyboardInterrupt):
        make(source, overwrite=True)
    monkeypatch.undo()
    with pytest.raises(ShardError, match=r"unfinished|has no train split"):
        open_split(tmp_path / "set", "train")
    make(source)
    make(source, output=tmp_path / "fresh")
    assert content(tmp_path / "set") == content(tmp_path / "fresh")


def test_several_at_once_do_the_work_once(words: Path, tmp_path: Path) -> None:
    processes = [launch(words, tmp_path / "set", 1, tokenizer="byte", val_fraction=0.1) for _ in range(3)]
    assert sorted(process.communicate()[0] for process in processes) == ["False\n", "True\n", "True\n"]
    make(words, output=tmp_path / "alone", val_fraction=0.1)
    assert content(tmp_path / "set") == content(tmp_path / "alone")


@pytest.mark.parametrize("finished", [True, False])
def test_the_second_waits_for_the_first(tmp_path: Path, finished: bool) -> None:
    """The first is played by this process: it holds the lock, leaves a set (or fails), removes its lock file and lets go."""
    source, output = write(tmp_path / "a.txt", "text"), tmp_path / "set"
    make(source, output=tmp_path / "elsewhere")
    output.mkdir()
    with open(output / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = launch(source, output, 1, tokenizer="byte", val_fraction=0)
        assert second.stderr is not None
        assert second.stderr.readline() == f"waiting for another preparation of {output} to end\n"
        if finished:
            shutil.copytree(tmp_path / "elsewhere", output, dirs_exist_ok=True)
        (output / ".lock").unlink()
    assert second.communicate()[0] == f"{finished}\n"
    assert content(output) == content(tmp_path / "elsewhere")


def test_a_lock_file_that_was_removed_protects_nobody(tmp_path: Path) -> None:
    """Whoever gets the lock of a removed file must not take it for his own: the next would lock another file."""
    output = tmp_path / "set"
    with folder.locked(output):
        (output / ".lock").unlink()  # as its former owner does, between our open and our lock
        with folder.locked(output):
            assert (output / ".lock").exists()
        write(output / ".lock", "")


def test_a_source_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, read = write(tmp_path / "a.txt", "text"), formats.read

    def changing(*arguments: Any) -> Any:
        yield from read(*arguments)
        write(source, "TEXT")

    monkeypatch.setattr(formats, "read", changing)
    with pytest.raises(CorpusError, match=r"a\.txt changed while it was being read"):
        make(source)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def full(_: int) -> None:
        raise OSError(number, os.strerror(number))

    source = write(tmp_path / "a.txt", "text")
    with monkeypatch.context() as patch:
        patch.setattr("pretrain.shards.os.fsync", full)
        with pytest.raises(CorpusError, match=r"set: no space left \([0-9,]+ bytes free\); what was tokenised is kept") as caught:
            make(source)
    assert str(tmp_path) in str(caught.value)
    assert [path.name for path in (tmp_path / "set").iterdir()] == [".parts"]
    with monkeypatch.context() as patch:
        patch.setattr(tokenise.Tokenise, "__call__", None)  # nothing is tokenised again
        make(source)
    make(source, output=tmp_path / "fresh")
    assert content(tmp_path / "set") == content(tmp_path / "fresh")


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    write(tmp_path / "file", "in the way")
    with pytest.raises(CorpusError, match="file/set: Not a directory"):
        make(write(tmp_path / "a.txt", "text"), output=tmp_path / "file" / "set")


class Panic(BaseException):
    """As pyo3's PanicException: no Exception."""


class Fragile(tokenization.Tokenizer):
    """Fails at one text, by whatever means the text says."""

    def encoder(self, dtype: np.dtype[Any]) -> tokenization.Encode:
        def encode(text: bytes) -> Any:
            if text == b"panic":
                raise Panic("index out of range\nin Rust")
            if text == b"memory":
                raise MemoryError
            if text == b"die":
                os._exit(9)
            return np.frombuffer(text, np.uint8).astype(dtype)

        return encode


@pytest.mark.parametrize(
    ("text", "workers", "reason"),
    [
        ("panic", 1, r"a\.jsonl\.gz:78: the tokenizer failed \(index out of range in Rust\)"),
        ("panic", 2, r"a\.jsonl\.gz:78: the tokenizer failed \(index out of range in Rust\)"),
        ("memory", 1, "memory ran out; use fewer --workers"),
        ("memory", 2, "memory ran out; use fewer --workers"),
        ("die", 2, r"a worker process died \(exit status 9\) at \S+a\.jsonl\.gz:71 to \S+a\.jsonl\.gz:80;"),
    ],
)
def test_a_failing_tokenizer_is_reported_with_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, workers: int, reason: str
) -> None:
    byte = load("byte")
    monkeypatch.setattr(preparation, "load", lambda *_: Fragile(byte.name, byte.kind, byte.files, byte.eos_id, byte.vocab_size))
    monkeypatch.setattr(parts, "BATCH_DOCUMENTS", 10)
    monkeypatch.setattr(parts, "BLOCK", 10)
    source = tmp_path / "a.jsonl.gz"
    source.write_bytes(gzip.compress(b"".join(b'{"text": "%b"}\n' % t.encode() for t in ["good"] * 77 + [text] + ["good"] * 100)))
    with pytest.raises(CorpusError, match=reason):
        make(source, workers=workers)
    assert (tmp_path / "set/.parts").exists() == (text != "panic")  # what was tokenised before goes on with fewer workers
