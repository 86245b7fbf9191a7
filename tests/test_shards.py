"""The token format: llm.c's bytes, one stream over many files, and damage told with its numbers."""

import hashlib
import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.shards import (
    MAX_TOKENS,
    ShardError,
    ShardWriter,
    TokenStream,
    fingerprint,
    open_split,
    read_manifest,
    token_dtype,
    write_manifest,
)
from pretrain.token_files import open_shard

U16, U32 = np.dtype("<u2"), np.dtype("<u4")


def llm_c(tokens: list[int], magic: int, version: int, letter: str) -> bytes:
    """A file as `write_datafile` in karpathy/llm.c's dev/data/data_common.py makes it, by struct alone."""
    return struct.pack("<256i", magic, version, len(tokens), *[0] * 253) + struct.pack(f"<{len(tokens)}{letter}", *tokens)


def write_set(folder: Path, tokens: list[int], dtype: np.dtype[Any] = U16, shard_tokens: int = 100, chunk: int = 7) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    writer = ShardWriter(folder, "train", dtype, shard_tokens)
    for start in range(0, len(tokens), chunk):
        writer.append(np.array(tokens[start : start + chunk], dtype))
    files = writer.close()
    write_manifest(folder, {"format_version": 1, "fingerprint": fingerprint({"train": files}), "files": {"train": files}})
    return files


@pytest.mark.parametrize(
    ("dtype", "magic", "version", "letter", "tokens"),
    [(U16, 20240520, 1, "H", [0, 1, 65535, 50256]), (U32, 20240801, 7, "I", [0, 65536, 4294967295, 128255])],
)
def test_the_bytes_are_llm_cs(tmp_path: Path, dtype: np.dtype[Any], magic: int, version: int, letter: str, tokens: list[int]) -> None:
    (file,) = write_set(tmp_path, tokens, dtype, chunk=3)
    data = (tmp_path / "train_000000.bin").read_bytes()
    assert data == llm_c(tokens, magic, version, letter)
    assert file == {"name": "train_000000.bin", "tokens": 4, "sha256": hashlib.sha256(data).hexdigest()}
    shard = open_shard(tmp_path / "train_000000.bin")
    assert (shard.dtype, shard.tokens, shard.offset) == (dtype, 4, 1024)
    assert open_split(tmp_path, "train").read(0, 4).tolist() == tokens


def test_the_dtype_holds_the_vocabulary() -> None:
    assert [token_dtype(size) for size in (257, 65536, 65537, 70001)] == [U16, U16, U32, U32]


def test_tokens_of_another_width_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="int64 tokens for a uint16 shard"):
        ShardWriter(tmp_path, "train", U16).append(np.array([70000]))


@settings(max_examples=60, deadline=None)
@given(length=st.integers(1, 60), shard_tokens=st.integers(1, 20), chunk=st.integers(1, 50), data=st.data())
def test_many_files_read_as_one_stream(
    tmp_path_factory: pytest.TempPathFactory, length: int, shard_tokens: int, chunk: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("set")
    files = write_set(folder, list(range(length)), U16, shard_tokens, chunk)
    assert [file["tokens"] for file in files[:-1]] == [shard_tokens] * (len(files) - 1)
    stream = open_split(folder, "train")
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    assert stream.read(start, stop - start).tolist() == list(range(start, stop))
    assert not list(folder.glob("*.tmp"))
    if start < length:
        assert stream.where(start) == f"{folder}/train_{start // shard_tokens:06d}.bin, token {start % shard_tokens}"


@pytest.mark.parametrize(
    ("tokens", "T", "windows"),
    [
        (2500 * 8, 64, 312),  # 2,500 documents of 7 tokens, an end of text each; 31 tokens are no one's target
        (2500 * 7, 64, 273),  # without: 27
        (1005 * 8, 64, 125),
        (1005 * 7, 64, 109),
        (20, 64, 0),
        (64, 64, 0),  # a window needs the token after it, as a target
        (65, 64, 1),
        (1, 64, 0),
        (5001, 64, 78),
    ],
)
def test_windows(tmp_path: Path, tokens: int, T: int, windows: int) -> None:
    write_set(tmp_path, [n % 65536 for n in range(tokens)], shard_tokens=1000, chunk=999)
    stream = open_split(tmp_path, "train")
    assert stream.windows(T) == windows
    assert 0 <= tokens - 1 - windows * T < T  # at most T tokens are unused, over all files
    for index in range(windows):
        assert stream.read(index * T, T + 1)[[0, -1]].tolist() == [index * T, index * T + T]


def test_two_thousand_million_tokens_and_more(tmp_path: Path) -> None:
    """Three sparse files of 1.2e9 tokens: totals, offsets and the last window, beyond 2^31 tokens and bytes."""
    size = 1_200_000_000
    for number in range(3):
        with open(tmp_path / f"train_{number}.bin", "wb") as file:
            file.write(llm_c([], 20240520, 1, "H")[:8] + struct.pack("<i", size))
            file.truncate(1024 + 2 * size)
            if number == 2:
                file.seek(-4096, 2)
                file.write(np.arange(1, 2049, dtype="<u2").tobytes())
    start = time.perf_counter()
    stream = open_split(tmp_path, "train")
    T = 1024
    last = stream.windows(T) - 1
    window = stream.read(last * T, T + 1)
    assert time.perf_counter() - start < 5
    assert (stream.tokens, last) == (3_600_000_000, 3_515_623)
    assert window.tolist() == [n + 1 - (3_600_000_000 - 2048) for n in range(last * T, last * T + T + 1)]
    assert stream.read(3_600_000_000 - 1, 1).tolist() == [2048]
    assert stream.where(3_600_000_000 - 1) == f"{tmp_path}/train_2.bin, token 1,199,999,999"


def test_reading_past_the_end_is_a_fault_of_ours(tmp_path: Path) -> None:
    write_set(tmp_path, list(range(10)))
    stream = open_split(tmp_path, "train")
    for start, length in ((8, 3), (-1, 2)):
        with pytest.raises(AssertionError, match="of 10"):
            stream.read(start, length)


@pytest.mark.parametrize(("cut", "held"), [(2, "2"), (3, "1.5"), (6, "0")])
def test_a_file_cut_short_is_refused_with_the_numbers(tmp_path: Path, cut: int, held: str) -> None:
    data = llm_c([1, 2, 3], 20240520, 1, "H")
    (tmp_path / "train.bin").write_bytes(data[:-cut])
    with pytest.raises(ShardError, match=rf"train\.bin says 3 tokens in its header but holds {held}: cut short or damaged"):
        open_split(tmp_path, "train")
    (tmp_path / "train.bin").write_bytes(data + b"\0\0")
    with pytest.raises(ShardError, match="says 3 tokens in its header but holds 4"):
        open_split(tmp_path, "train")


@pytest.mark.parametrize(("magic", "version"), [(20240520, 7), (20240801, 1)])
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, magic: int, version: int) -> None:
    (tmp_path / "train.bin").write_bytes(llm_c([1, 2], magic, version, "H"))
    with pytest.raises(ShardError, match=f"has version {version} in its header"):
        open_split(tmp_path, "train")


def test_nanogpts_files_have_no_header(tmp_path: Path) -> None:
    tokens = np.arange(2000, dtype=np.uint16)
    tokens.tofile(tmp_path / "train.bin")
    assert open_split(tmp_path, "train").read(0, 2000).tolist() == tokens.tolist()
    assert open_split(tmp_path / "train.bin", "train").tokens == 2000
    (tmp_path / "val.bin").write_bytes(b"\1\2\3")
    with pytest.raises(ShardError, match=r"val\.bin has 3 bytes and no shard header"):
        open_split(tmp_path, "val")
    (tmp_path / "val.bin").write_bytes(b"")
    with pytest.raises(ShardError, match=r"val\.bin has 0 bytes"):
        open_split(tmp_path, "val")


def test_bare_files_of_llm_c_open_in_order(tmp_path: Path) -> None:
    for number in (2, 1):
        (tmp_path / f"fineweb_train_{number:06d}.bin").write_bytes(llm_c([number] * 3, 20240520, 1, "H"))
    (tmp_path / "fineweb_val_000000.bin").write_bytes(llm_c([9], 20240520, 1, "H"))
    stream = open_split(tmp_path, "train")
    assert stream.read(0, 6).tolist() == [1, 1, 1, 2, 2, 2]
    assert open_split(tmp_path, "val").read(0, 1).tolist() == [9]
    assert stream.manifest is None
    (tmp_path / "fineweb_train_000002.bin").write_bytes(llm_c([2, 2, 3], 20240520, 1, "H"))
    assert open_split(tmp_path, "train").fingerprint != stream.fingerprint
    (tmp_path / "fineweb_train_000003.bin").write_bytes(llm_c([1], 20240801, 7, "I"))
    with pytest.raises(ShardError, match="mix uint16 and uint32"):
        open_split(tmp_path, "train")


def test_what_is_missing_or_unfinished_is_said(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"no such set; make it with: pretrain prepare SOURCE --output \S+nowhere"):
        open_split(tmp_path / "nowhere", "train")
    with pytest.raises(ShardError, match="has no train split"):
        open_split(tmp_path, "train")
    write_set(tmp_path, list(range(250)))
    with pytest.raises(ShardError, match="has no val split; prepare it with --val-fraction"):
        open_split(tmp_path, "val")
    (tmp_path / "train_000001.bin").rename(tmp_path / "away")
    with pytest.raises(ShardError, match=r"train_000001\.bin is listed in manifest\.json but missing"):
        open_split(tmp_path, "train")
    (tmp_path / "train_000001.bin").write_bytes(llm_c([1, 2], 20240520, 1, "H"))
    with pytest.raises(ShardError, match=r"holds 2 tokens, manifest\.json says 100"):
        open_split(tmp_path, "train")
    for mark in (".lock", "train_000003.bin.tmp"):
        (tmp_path / "manifest.json").unlink(missing_ok=True)
        (tmp_path / mark).touch()
        with pytest.raises(ShardError, match="unfinished"):
            open_split(tmp_path, "train")
        (tmp_path / mark).unlink()


def test_a_writer_that_was_not_closed_leaves_no_whole_file(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", U16, 100)
    writer.append(np.zeros(150, np.uint16))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train_000000.bin", "train_000001.bin.tmp"]
    assert writer.tokens == 150
    assert [file["tokens"] for file in writer.close()] == [100, 50]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train_000000.bin", "train_000001.bin"]


def test_the_manifest_is_checked(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    for text, reason in {
        "{": "is not valid JSON",
        '{"format_version": 2}': "has format_version 2; this pretrain reads 1",
    }.items():
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ShardError, match=reason):
            read_manifest(tmp_path)
    write_manifest(tmp_path, {"format_version": 1, "name": "é"})
    assert json.loads((tmp_path / "manifest.json").read_text("utf-8")) == {"format_version": 1, "name": "é"}


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    files = {name: write_set(tmp_path / name, tokens) for name, tokens in {"a": [1, 2], "b": [1, 2], "c": [2, 1]}.items()}
    a, b, c = (fingerprint({"train": files[name]}) for name in "abc")
    assert a == b != c
    assert fingerprint({"val": files["a"]}) != a
    assert len(a) == 32
    assert open_split(tmp_path / "a", "train").fingerprint == a


def test_a_file_holds_no_more_than_its_header_can_say(tmp_path: Path) -> None:
    ShardWriter(tmp_path, "train", U16, MAX_TOKENS)
    with pytest.raises(AssertionError):
        ShardWriter(tmp_path, "train", U16, MAX_TOKENS + 1)


def test_reading_leaves_the_files_alone_and_gives_signed_numbers(tmp_path: Path) -> None:
    write_set(tmp_path, [65535, 0])
    stream: TokenStream = open_split(tmp_path, "train")
    read = stream.read(0, 2)
    assert read.dtype == np.int64
    read[:] = 7
    assert stream.read(0, 2).tolist() == [65535, 0]
