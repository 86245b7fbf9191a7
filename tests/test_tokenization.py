"""Tokenizers: the ids of three independent implementations agree, and what is saved is what encoded."""

import dataclasses
import errno
import json
import os
import random
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast

from pretrain import tokenization as subject
from pretrain.tokenization import GPT2_PATTERN, Tokenizer, TokenizerError, identify, load, load_tokenizer

U16, U32 = np.dtype("<u2"), np.dtype("<u4")
CORPUS = Path(subject.__file__).read_text("utf-8")
TEXTS = st.lists(
    st.sampled_from([" ", "\n", "\r\n", "\t", "\x0b\x1c\x85", "\u00a0", "'s", "'LL", "don't", "the fox", "12", "<|endoftext|>", "é"])
    | st.sampled_from(CORPUS.split())
    | st.text(max_size=8),
    max_size=30,
).map("".join)


def words(folder: Path, size: int) -> Path:
    """A word-level tokenizer w0 w1 … with `size` ids, the last of them end-of-text."""
    vocabulary = {f"w{n}": n for n in range(size - 1)} | {"<|endoftext|>": size - 1}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


def ids(tokenizer: Tokenizer, text: str, dtype: np.dtype[Any] = U32) -> list[int]:
    encoded = tokenizer.encoder(dtype)(text.encode())
    assert encoded.dtype == dtype
    return [int(token) for token in encoded]


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return load("gpt2")


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return load("train:400", [CORPUS])


@pytest.fixture(scope="module")
def encode(gpt2: Tokenizer, trained: Tokenizer) -> dict[str, subject.Encode]:
    made = {"gpt2": gpt2, "trained": trained, "byte": load("byte")}
    slow = {f"{name} by tokenizers": dataclasses.replace(made[name], kind="huggingface") for name in ("trained", "byte")}
    return {name: tokenizer.encoder(U32) for name, tokenizer in (made | slow).items()}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> tuple[tiktoken.Encoding, GPT2Tokenizer]:
    """GPT-2 as tiktoken and as transformers make it from OpenAI's files, without any code of ours."""
    folder = tmp_path_factory.mktemp("openai")
    for name, content in subject._gpt2_files().items():
        (folder / name).write_bytes(content)
    ranks = data_gym_to_mergeable_bpe_ranks(str(folder / "vocab.bpe"), str(folder / "encoder.json"))
    merges = [tuple(line.split()) for line in (folder / "vocab.bpe").read_text("utf-8").splitlines()[1:]]
    theirs = GPT2Tokenizer(vocab=json.loads((folder / "encoder.json").read_text("utf-8")), merges=merges)
    return tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={}), theirs


def test_gpt2_is_openais(gpt2: Tokenizer) -> None:
    assert ids(gpt2, "Hello world") == [15496, 995]
    assert (gpt2.eos_id, gpt2.vocab_size, gpt2.kind) == (50256, 50257, "bpe")


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, piece=st.sampled_from([1, 3, 1 << 20]))
def test_gpt2_ids_are_those_of_tiktoken_and_transformers(encode: Any, references: Any, text: str, piece: int) -> None:
    theirs, transformers = references
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "PIECE", piece)
        found = encode["gpt2"](text.encode()).tolist()
    assert found == theirs.encode_ordinary(text)
    # transformers takes a special token's text for the token; what lies between them it must encode alike.
    if "<|endoftext|>" not in text:
        assert found == transformers(text)["input_ids"]


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, piece=st.sampled_from([1, 3, 1 << 20]))
def test_a_trained_tokenizer_encodes_as_its_file_says(encode: Any, text: str, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "PIECE", piece)
        found = encode["trained"](text.encode()).tolist()
    assert found == encode["trained by tokenizers"](text.encode()).tolist()


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_byte_ids_are_the_bytes(encode: Any, text: str) -> None:
    assert encode["byte"](text.encode()).tolist() == list(text.encode())
    assert encode["byte by tokenizers"](text.encode()).tolist() == list(text.encode())


@pytest.mark.parametrize("name", ["gpt2", "byte", "train:300"])
def test_what_is_saved_loads_with_transformers(tmp_path: Path, name: str) -> None:
    tokenizer = load(name, [CORPUS])
    tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "config.json").write_text('{"model_type": "gpt2"}')  # as beside an exported model
    for found in (AutoTokenizer.from_pretrained(tmp_path / "tokenizer"), load_tokenizer(tmp_path)):
        assert (len(found), found.eos_token_id) == (tokenizer.vocab_size, tokenizer.eos_id)
        text = "Hello  world's\n\n café 12 \U0001f600"
        assert found(text)["input_ids"] == ids(tokenizer, text)
        assert found.decode(found(text)["input_ids"]) == text
        assert found("<|endoftext|>")["input_ids"] == [tokenizer.eos_id]


def test_a_tokenizer_is_saved_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, write = load("byte"), Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if path.name == "tokenizer_config.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            made.save(tmp_path / "tokenizer")
    assert not (tmp_path / "tokenizer").exists()
    made.save(tmp_path / "tokenizer")
    assert {path.name: path.read_bytes() for path in (tmp_path / "tokenizer").iterdir()} == made.files
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]


@pytest.mark.parametrize("name", ["gpt2", "byte", "train:300"])
def test_the_text_of_a_special_token_is_text(name: str) -> None:
    tokenizer = load(name, [CORPUS])
    assert tokenizer.eos_id not in ids(tokenizer, "a <|endoftext|> b")


def test_a_folder_with_added_tokens(tmp_path: Path) -> None:
    """256 bytes, end-of-text and <x>: 258 ids, where the usual `vocab_size` says 256."""
    backend = tokenizers.Tokenizer.from_str(load("byte").files["tokenizer.json"].decode())
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", additional_special_tokens=["<x>"])
    made.backend_tokenizer.enable_truncation(4)
    made.backend_tokenizer.enable_padding(pad_token="<|endoftext|>", pad_id=256, length=40)
    made.save_pretrained(tmp_path)
    tokenizer = load(str(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.kind) == (258, 256, "huggingface")
    assert ids(tokenizer, "<x> is not cut") == list(b"<x> is not cut")


def test_a_sets_tokenizer_is_the_same_in_another_set(trained: Tokenizer, tmp_path: Path) -> None:
    """Or two sets could never be mixed: its file is taken as it lies, not as transformers would write it."""
    trained.save(tmp_path / "tokenizer")
    again = load(str(tmp_path / "tokenizer"))
    assert again.identity()["sha256"] == trained.identity()["sha256"]
    assert (again.eos_id, again.vocab_size) == (trained.eos_id, trained.vocab_size)


def test_ids_above_16_bits_stay(tmp_path: Path) -> None:
    tokenizer = load(str(words(tmp_path, 70001)))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (70001, 70000)
    assert ids(tokenizer, "w65535 w65536 w69999 w1") == [65535, 65536, 69999, 1]
    with pytest.raises(OverflowError):
        ids(tokenizer, "w65536", U16)


def test_training_is_the_same_again_and_sees_no_special_token(trained: Tokenizer) -> None:
    assert load("train:400", [CORPUS]).identity() == trained.identity()
    assert load("train:400", [CORPUS[:5000]]).identity() != trained.identity()
    assert (trained.vocab_size, trained.eos_id, trained.kind) == (400, 399, "bpe")
    vocabulary = json.loads(trained.files["tokenizer.json"])["model"]["vocab"]
    assert set(range(399)) == set(vocabulary.values())


def test_tiktoken_is_trusted_only_where_each_merge_makes_a_new_token(gpt2: Tokenizer) -> None:
    assert subject._merges_by_id(tokenizers.Tokenizer.from_str(gpt2.files["tokenizer.json"].decode()))
    vocabulary = {token: number for number, token in enumerate(["a", "b", "c", "bc", "ab", "abc"])}
    in_order, twice = [("b", "c"), ("a", "b"), ("ab", "c")], [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]
    for merges, trusted in ((in_order, True), (in_order[::-1], False), (twice, False)):
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
        assert subject._merges_by_id(backend) == trusted


@pytest.mark.parametrize(
    "text", ["a" * 10**6, "^" * 10**6, "a" + " " * 10**6 + "b", "a" + "\n" * 10**6 + "b", "random"], ids=lambda t: t[:2]
)
def test_pathological_text(gpt2: Tokenizer, text: str) -> None:
    text = "".join(random.Random(0).choices(string.ascii_letters, k=10**6)) if text == "random" else text
    found = ids(gpt2, text)
    decoded = tokenizers.Tokenizer.from_str(gpt2.files["tokenizer.json"].decode()).decode(found)
    assert decoded == text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("train:x", "expected train:SIZE, SIZE at least 257"),
        ("train:256", "expected train:SIZE, SIZE at least 257"),
        ("train:5000", "write train:"),
        ("/nowhere/at/all", "no tokenizer /nowhere/at/all"),
    ],
)
def test_a_tokenizer_that_cannot_be(name: str, reason: str) -> None:
    with pytest.raises(TokenizerError, match=reason) as caught:
        load(name, [CORPUS])
    assert "\n" not in str(caught.value)


def test_the_size_that_is_advised_can_be_trained() -> None:
    with pytest.raises(TokenizerError) as caught:
        load("train:5000", [CORPUS])
    size = int(str(caught.value).rpartition(":")[2])
    assert load(f"train:{size}", [CORPUS]).vocab_size == size


def test_folders_that_are_no_tokenizer(tmp_path: Path) -> None:
    made = load("byte")
    made.save(tmp_path / "no_end")
    (tmp_path / "no_end" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2TokenizerFast"}')
    (tmp_path / "bare").mkdir()
    for name, reason in {
        "no_end": "has no end-of-text token",
        "hollow": "has no vocabulary",
        "bare": "no tokenizer",
    }.items():
        with pytest.raises(TokenizerError, match=reason):
            load(str(tmp_path / name))
    with pytest.raises(TokenizerError, match="no such folder"):
        load_tokenizer(tmp_path / "nowhere")


def test_gpt2_files_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(subject.GPT2_SHA256, "vocab.bpe", "0" * 64)
    with pytest.raises(TokenizerError, match=r"vocab\.bpe is missing or not OpenAI's"):
        load("gpt2")
    monkeypatch.setattr(subject, "find_spec", lambda name: None)
    with pytest.raises(TokenizerError, match=r"encoder\.json is missing"):
        load("gpt2")


def test_a_folder_is_identified_by_its_content(tmp_path: Path) -> None:
    load("byte").save(tmp_path / "mine")
    before = identify(str(tmp_path / "mine"))
    assert before.startswith("mine@")
    (tmp_path / "mine" / "weights.safetensors").write_bytes(b"x")
    (tmp_path / "mine" / "token_cache").mkdir()
    assert identify(str(tmp_path / "mine")) == before
    config = tmp_path / "mine" / "tokenizer_config.json"
    config.write_text(config.read_text().replace("endoftext", "endofText"))
    assert identify(str(tmp_path / "mine")) != before
    assert (identify("gpt2"), identify("train:300"), identify("org/name")) == ("gpt2", "train:300", "org/name")
