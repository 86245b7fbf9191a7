"""Other people's token files: each format read token for token, known for what it is, and damage told with its numbers."""

import contextlib
import io
import os
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drive
import foreign
import numpy as np
import pytest
from group import Ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.shards import ShardError, open_split, splits
from pretrain.token_files import datatrove_tokenizer, document_ends, open_shard

DOCUMENTS = [[5, 6, 7, 50256], [50256], [1, 2, 3, 4, 8, 9, 10, 11, 50256], [12]]
ENDS = [4, 5, 14, 15]
Write = Callable[..., None]
FORMATS: dict[str, tuple[str, str, Write, dict[str, Any]]] = {
    "llm.c": ("fineweb_train_000001.bin", "llm.c", foreign.llm_c, {}),
    "llm.c, wide": ("x_train.bin", "llm.c", foreign.llm_c, {"wide": True}),
    "nanoGPT": ("train.bin", "nanoGPT", foreign.nanogpt, {}),
    "build-nanogpt": ("edufineweb_train_000001.npy", "npy", foreign.npy, {}),
    **{f"npy of {t}": ("train.npy", "npy", foreign.npy, {"dtype": t}) for t in ("<u4", "<i4", "<i8", ">u2")},
    "Megatron": ("train_text_document.bin", "Megatron", foreign.megatron, {}),
    **{f"Megatron of {t}": ("train.bin", "Megatron", foreign.megatron, {"dtype": t, "sequences": 3}) for t in ("i4", "i8")},
    "datatrove": ("train_00000_shuffled.ds", "datatrove", foreign.datatrove, {}),
    "datatrove, wide": ("train.ds", "datatrove", foreign.datatrove, {"width": 4}),
    "datatrove, old": ("train.ds", "datatrove", foreign.datatrove, {"old": True, "width": 2}),
    "datatrove, index alone": ("train.ds", "datatrove", foreign.datatrove, {"tokenizer": None, "width": 4}),
    "datatrove, metadata alone": ("train.ds", "datatrove", foreign.datatrove, {"index": False, "old": True, "width": 4}),
}


@pytest.mark.parametrize("case", FORMATS)
def test_each_format_reads_as_one_stream(tmp_path: Path, case: str) -> None:
    name, kind, write, options = FORMATS[case]
    write(tmp_path / name, DOCUMENTS, **options)
    for path in (tmp_path, tmp_path / name):
        stream = open_split(path, "train")
        assert (stream.format, stream.tokens) == (kind, 15)
        assert stream.read(0, 15).tolist() == foreign.flat(DOCUMENTS)
        assert stream.read(3, 7).tolist() == foreign.flat(DOCUMENTS)[3:10]
        assert stream.where(14) == f"{tmp_path / name}, token 14"
    ends = document_ends(stream.shards[0])
    assert (ends is not None) == (kind in ("Megatron", "datatrove") and "metadata alone" not in case)
    if ends is not None:
        assert ends.documents == 4
        assert [ends.at(i, j).tolist() for i, j in ((0, 4), (0, 1), (1, 3), (3, 4))] == [ENDS, [4], [5, 14], [15]]
        assert [ends.before(token) for token in (0, 3, 4, 5, 13, 14, 15)] == [0, 0, 1, 2, 2, 3, 4]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 60000), max_size=6), min_size=1, max_size=8), st.integers(1, 3), st.data())
def test_documents_end_where_their_index_says(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], sequences: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("set")
    foreign.megatron(folder / "a.bin", documents, "i4", sequences)
    foreign.datatrove(folder / "a.ds", documents, 4)
    expected = np.cumsum([len(document) for document in documents]).tolist()
    i = data.draw(st.integers(0, len(documents) - 1))
    j = data.draw(st.integers(i + 1, len(documents)))
    token = data.draw(st.integers(0, expected[-1]))
    for name in ("a.bin", "a.ds"):
        ends = document_ends(open_shard(folder / name))
        assert ends is not None
        assert ends.at(i, j).tolist() == expected[i:j]
        assert ends.before(token) == sum(end <= token for end in expected)


def damaged(path: Path, at: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(content)


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "fineweb_train_000001.bin", "train_000000.bin"])
@pytest.mark.parametrize("word", [0, 20240521, 20240520 ^ (1 << 30), 123456789, -1])
def test_a_damaged_header_is_not_taken_for_nanogpts_tokens(tmp_path: Path, name: str, word: int) -> None:
    foreign.llm_c(tmp_path / name, [list(range(1000, 3000))])
    damaged(tmp_path / name, 0, struct.pack("<i", word))
    with pytest.raises(ShardError, match=rf"starts with {word}, not with llm\.c's 20240520 or 20240801"):
        open_split(tmp_path / name, "train")
    damaged(tmp_path / name, 500, b"\7")  # where the zeros are not what they were, the size tells
    with pytest.raises(ShardError, match=rf"starts with {word}, not"):
        open_split(tmp_path / name, "train")
    damaged(tmp_path / name, 500, b"\0")  # and where the size is not, the zeros
    with open(tmp_path / name, "ab") as file:
        file.write(b"\1\2")
    with pytest.raises(ShardError, match=rf"starts with {word}, not"):
        open_split(tmp_path / name, "train")


def test_an_empty_file_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "tokens.bin").touch()
    with pytest.raises(ShardError, match=r"tokens\.bin is in none of the formats that are read: it is empty"):
        open_split(tmp_path / "tokens.bin", "train")


def test_a_headerless_file_is_read_under_nanogpts_names_alone(tmp_path: Path) -> None:
    foreign.nanogpt(tmp_path / "tokens.bin", [list(range(1, 2000))])
    with pytest.raises(ShardError, match=r"tokens\.bin is in none of the formats that are read: it starts with 131073"):
        open_split(tmp_path / "tokens.bin", "train")
    (tmp_path / "tokens.bin").rename(tmp_path / "val.bin")
    command = f"touch {tmp_path}/unpickled".encode()
    (tmp_path / "meta.pkl").write_bytes(b"cos\nsystem\n(S'" + command + b"'\ntR.")
    assert open_split(tmp_path, "val").tokens == 1999
    assert not (tmp_path / "unpickled").exists()


def test_llm_cs_evaluation_files_are_no_tokens(tmp_path: Path) -> None:
    (tmp_path / "hellaswag_val.bin").write_bytes(struct.pack("<256i", 20240522, 1, 5, *[0] * 253) + bytes(100))
    with pytest.raises(ShardError, match="starts with 20240522"):
        open_split(tmp_path, "val")


def test_npy_files_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "train.npy"
    foreign.npy(path, DOCUMENTS)
    whole = path.read_bytes()
    for content, words in (
        (whole[:-2], "says 15 tokens in its header but holds 14"),
        (whole + b"\0", r"says 15 tokens in its header but holds 15\.5"),
        (whole[:5], "has no header of numpy's"),
        (b"\0" + whole[1:], "has no header of numpy's"),
    ):
        path.write_bytes(content)
        with pytest.raises(ShardError, match=words):
            open_split(path, "train")
    for array, words in (
        (np.zeros((3, 4), np.uint16), r"shape \(3, 4\) of uint16"),
        (np.zeros(3), r"shape \(3,\) of float64"),
        (np.array([{"a": 1}]), r"shape \(1,\) of object"),
    ):
        np.save(path, array)
        with pytest.raises(ShardError, match=f"is an array of {words}; expected one row of integers"):
            open_split(path, "train")


def test_megatrons_pair_is_checked(tmp_path: Path) -> None:
    path, index = tmp_path / "train.bin", tmp_path / "train.idx"
    foreign.megatron(path, DOCUMENTS, "u2")
    tokens, head = path.read_bytes(), index.read_bytes()

    def refuses(words: str, at: int, content: bytes) -> None:
        index.write_bytes(head)
        damaged(index, at, content)
        with pytest.raises(ShardError, match=words):
            open_split(path, "train")

    refuses("starts with b'TNTIDX", 0, b"TNTIDX")
    refuses("has version 2 and tokens of type 8", 9, b"\2")
    refuses("has version 1 and tokens of type 7; expected version 1 and one of the types 1, 2, 3, 4, 5, 8", 17, b"\7")
    refuses(r"has 122 bytes; 5 sequences and 5 document ends make 134", 18, b"\5")
    refuses("has its sequences at bytes 4 to 30, train.bin has 30 bytes", 34 + 16, b"\4")
    refuses("has its sequences at bytes 0 to 32, train.bin has 30 bytes", 34 + 12, b"\2")
    refuses("has 4 sequences, its documents are 0 to 3", 34 + 48 + 32, b"\3")
    index.write_bytes(head[:20])
    with pytest.raises(ShardError, match="expected Megatron's"):
        open_split(path, "train")
    index.write_bytes(head)
    path.write_bytes(tokens + b"\1\0")
    with pytest.raises(ShardError, match=r"at bytes 0 to 30, train\.bin has 32 bytes"):
        open_split(path, "train")
    path.write_bytes(tokens[:-2])
    with pytest.raises(ShardError, match=r"at bytes 0 to 30, train\.bin has 28 bytes"):
        open_split(path, "train")
    path.unlink()
    with pytest.raises(ShardError, match=r"train\.bin is missing beside train\.idx"):
        open_split(index, "train")


def test_a_megatron_index_that_contradicts_itself_inside_is_told_where_it_is_read(tmp_path: Path) -> None:
    path, index = tmp_path / "train.bin", tmp_path / "train.idx"
    foreign.megatron(path, DOCUMENTS)
    head = index.read_bytes()
    damaged(index, 34 + 4, b"\2")  # the second document's one token are two
    ends = document_ends(open_shard(path))
    assert ends is not None
    with pytest.raises(ShardError, match="sequence 1 of 2 tokens does not end where the next begins"):
        ends.at(0, 4)
    index.write_bytes(head)
    damaged(index, 34 + 48 + 8, b"\3")  # document ends 0 3 2 3 4
    ends = document_ends(open_shard(path))
    assert ends is not None
    with pytest.raises(ShardError, match="among documents 0 to 4 one ends before it begins"):
        ends.at(0, 4)


def test_megatrons_pair_opens_by_its_common_name(tmp_path: Path) -> None:
    foreign.megatron(tmp_path / "corpus_v1.5_text_document.bin", DOCUMENTS)
    for name in ("", ".bin", ".idx"):
        assert open_split(f"{tmp_path}/corpus_v1.5_text_document{name}", "train").tokens == 15


def test_datatroves_files_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "train.ds"
    foreign.datatrove(path, DOCUMENTS)
    content = path.read_bytes()

    def refuses(words: str) -> None:
        with pytest.raises(ShardError, match=words):
            open_split(tmp_path, "train")

    path.write_bytes(content[:-2])
    refuses(r"train\.ds has 28 bytes, train\.ds\.index says 15 tokens, train\.ds\.metadata says 15 tokens of 2 bytes: cut short")
    path.write_bytes(content)
    (tmp_path / "train.ds.metadata").write_text("gpt2|4\n15\n15 T")
    refuses("has 30 bytes, .* of 4 bytes")
    (tmp_path / "train.ds.metadata").write_text("gpt2|2\n14\n14 T")
    refuses(r"index says 15 tokens, train\.ds\.metadata says 14 tokens of 2 bytes")
    (tmp_path / "train.ds.metadata").write_text("gpt2|2")
    refuses("metadata, line 2: expected the number of tokens, found ''")
    (tmp_path / "train.ds.metadata").unlink()
    damaged(tmp_path / "train.ds.index", 8, b"\1")  # ends 4 1 14 15
    ends = document_ends(open_shard(path))
    assert ends is not None
    with pytest.raises(ShardError, match="one ends before it begins"):
        ends.at(1, 2)
    (tmp_path / "train.ds.index").unlink()
    refuses(r"has neither train\.ds\.index nor train\.ds\.metadata beside it, which tell 2 bytes per token from 4")
    foreign.datatrove(path, DOCUMENTS)
    (tmp_path / "train.ds.loss").write_bytes(bytes(15))
    refuses("masks tokens out of the loss, which is not supported")


def test_datatroves_tokenizer_is_named(tmp_path: Path) -> None:
    for name, options, expected in (
        ("a", {}, "gpt2"),
        ("b", {"old": True, "tokenizer": "some/name"}, "some/name"),
        ("c", {"tokenizer": "Unknown Tokenizer|2"}, None),
        ("d", {"tokenizer": None}, None),
    ):
        foreign.datatrove(tmp_path / f"{name}.ds", DOCUMENTS, **options)
        assert datatrove_tokenizer(open_shard(tmp_path / f"{name}.ds")) == expected


def test_tasks_that_found_no_document_leave_files_without_tokens(tmp_path: Path) -> None:
    for number, documents in enumerate(([], DOCUMENTS, [], DOCUMENTS)):
        foreign.datatrove(tmp_path / f"{number:05d}.ds", documents, 4, tokenizer=None)
    stream = open_split(tmp_path, "train")
    assert stream.read(0, 30).tolist() == foreign.flat(DOCUMENTS) * 2


def test_a_folder_opens_by_the_splits_in_the_names_of_its_files(tmp_path: Path) -> None:
    for name, token in (("pretrain_val_0", 1), ("evaluation_train_0", 2), ("EDU_Train_1", 3), ("x-validation-0", 4), ("other", 5)):
        foreign.npy(tmp_path / f"{name}.npy", [[token]])
    assert splits(tmp_path) == ["train", "val"]
    assert open_split(tmp_path, "train").read(0, 2).tolist() == [3, 2]
    assert open_split(tmp_path, "val").read(0, 2).tolist() == [1, 4]
    foreign.npy(tmp_path / "train_and_val.npy", [[1]])
    with pytest.raises(ShardError, match=r"train_and_val\.npy names both splits"):
        open_split(tmp_path, "train")


def test_a_folder_whose_files_name_no_split_is_one(tmp_path: Path) -> None:
    for number in range(3):
        foreign.datatrove(tmp_path / f"{number:05d}_00000_shuffled.ds", [[number]])
    assert splits(tmp_path) == ["all"]
    for split in ("train", "val", "all"):
        assert open_split(tmp_path, split).read(0, 3).tolist() == [0, 1, 2]
    assert splits(tmp_path / "00000_00000_shuffled.ds") == ["all"]


def test_formats_and_types_are_not_mixed(tmp_path: Path) -> None:
    foreign.npy(tmp_path / "train_0.npy", [[1]])
    foreign.npy(tmp_path / "train_1.npy", [[1]], "<i8")
    with pytest.raises(ShardError, match="its train files mix int64 and uint16 tokens"):
        open_split(tmp_path, "train")
    foreign.llm_c(tmp_path / "train_1.bin", [[1]])
    with pytest.raises(ShardError, match=r"its train files mix llm\.c and npy formats"):
        open_split(tmp_path, "train")


def test_a_negative_id_is_refused_with_its_place(tmp_path: Path) -> None:
    foreign.megatron(tmp_path / "train.bin", [[1, 2], [3, -100, 4]], "i4")
    with pytest.raises(ShardError, match=r"train\.bin, token 3: token id -100: tokens are not negative"):
        open_split(tmp_path, "train").read(1, 3)


def test_more_files_than_a_process_may_hold_open(tmp_path: Path) -> None:
    for number in range(300):
        foreign.npy(tmp_path / f"train_{number:05d}.npy", [[number, number]])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 200, hard))
    try:
        stream = open_split(tmp_path, "train")
        assert stream.read(0, 600).tolist() == [number // 2 for number in range(600)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def sparse(path: Path, head: bytes, size: int, tail: bytes) -> None:
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(size)
        file.seek(size - len(tail))
        file.write(tail)


def test_billions_of_tokens_open_at_once_in_every_format(tmp_path: Path) -> None:
    """Beyond 2^32 tokens and bytes, in sparse files: opening reads neither tokens nor index."""
    tokens, documents = 5_000_000_000, 20_000_000
    tail = np.arange(1, 1026, dtype="<u2").tobytes()
    sparse(tmp_path / "train.bin", b"\7" * 1024, 2 * tokens, tail)
    sparse(tmp_path / "d.ds", b"", 2 * tokens, tail)
    sparse(tmp_path / "d.ds.index", b"", 8 * documents, struct.pack("<Q", tokens))
    sparse(tmp_path / "m.bin", b"", 2 * tokens, tail)
    ends = 34 + 12 * documents
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, documents, documents + 1)
    sparse(tmp_path / "m.idx", head, ends + 8 * (documents + 1), struct.pack("<q", documents))
    damaged(tmp_path / "m.idx", ends - 8, struct.pack("<q", 2 * tokens - 20))
    damaged(tmp_path / "m.idx", 34 + 4 * (documents - 1), struct.pack("<i", 10))
    np.lib.format.open_memmap(tmp_path / "n.npy", "w+", np.uint16, (tokens,))[-1025:] = np.arange(1, 1026)
    began = time.perf_counter()
    for name, kind in (("train.bin", "nanoGPT"), ("d.ds", "datatrove"), ("m.bin", "Megatron"), ("n.npy", "npy")):
        stream = open_split(tmp_path / name, "train")
        assert (stream.format, stream.tokens, stream.windows(1024)) == (kind, tokens, 4_882_812)
        assert stream.read(tokens - 1025, 1025).tolist() == list(range(1, 1026))
    assert time.perf_counter() - began < 2


def trained(path: Path) -> tuple[drive.Rows, str]:
    """(rows of the first updates, what the start said)."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        rows, _ = drive.run(path, [], 2)
    return rows, said.getvalue()


def test_a_run_trains_on_other_peoples_files_as_on_its_own(
    tmp_path: Path, config: Callable[..., Path], make_set: Callable[..., Path], ranks: Ranks
) -> None:
    tokens = np.random.default_rng(0).integers(0, 50, 128 * 16 + 1).tolist()
    sets = {"ours": make_set("ours", tokens), "Megatron": tmp_path / "m.idx", "datatrove": tmp_path / "d.ds"}
    for write, name in ((foreign.megatron, "m.bin"), (foreign.datatrove, "d.ds")):
        write(tmp_path / name, [tokens[:900], tokens[900:]])
    paths = {kind: config({"model.vocab_size": 50, "data.train": path, "run.name": kind}, kind) for kind, path in sets.items()}
    found = {kind: ranks.run(trained, path, size=1)[0] for kind, path in paths.items()}
    for kind in ("Megatron", "datatrove"):
        assert found[kind][0] == found["ours"][0]
        assert f"{sets[kind]} (train): bare files in the format of {kind}" in found[kind][1]
