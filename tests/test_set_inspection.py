"""What `pretrain inspect` says of a set: counted again by hand, on every format, in chunks of a few tokens."""

import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import foreign
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain import cli, histogram, set_contents, shards, token_bytes, tokenization
from pretrain.set_contents import Documents, find, scan
from pretrain.shards import ShardError, TokenStream, open_split
from pretrain.token_bytes import TokenBytes

EOS, VOCABULARY = 9, 12
TEXTS = ["My fellow citizens, good morning.", "Grüße\n\tan alle\x1b[31m", "fellow cit", "izens of the fellow citizens"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that everything crosses a border of chunks."""
    monkeypatch.setattr(set_contents, "CHUNK", 5)


def write(folder: Path, kind: str, documents: list[list[int]]) -> TokenStream:
    """Cut into two files: between documents where the format indexes them, else anywhere."""
    cut = len(documents) // 2
    if kind == "Megatron":
        for number, half in enumerate((documents[:cut], documents[cut:])):
            foreign.megatron(folder / f"{number}.bin", half, "i4", 2)
    elif kind == "datatrove":
        for number, half in enumerate((documents[:cut], documents[cut:])):
            foreign.datatrove(folder / f"{number}.ds", half, 4)
    else:
        first = [[EOS, *document] for document in documents] if kind == "begun" else [[*document, EOS] for document in documents]
        tokens = foreign.flat(first)
        for number, piece in enumerate((tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :])):
            foreign.npy(folder / f"{number}.npy", [piece])
    return open_split(folder, "all")


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(["Megatron", "datatrove", "begun", "ended"]),
    st.lists(st.lists(st.integers(0, EOS - 1), min_size=1, max_size=9), min_size=1, max_size=8),
    st.data(),
)
def test_a_scan_counts_what_is_there(
    tmp_path_factory: pytest.TempPathFactory, kind: str, documents: list[list[int]], data: st.DataObject
) -> None:
    stream = write(tmp_path_factory.mktemp("set"), kind, documents)
    marked = kind in ("begun", "ended")
    ends = np.cumsum([len(document) + marked for document in documents]).tolist()
    tokens = stream.read(0, stream.tokens).tolist()
    found = Documents(stream, EOS if marked else None)
    contents = scan(stream, found, VOCABULARY, 10**9)
    assert contents.tokens == stream.tokens == ends[-1]
    assert contents.lengths == Counter(b - a for a, b in pairwise([0, *ends]))
    assert {id_: n for id_, n in enumerate(contents.counts.tolist()) if n} == Counter(tokens)
    at = sorted(data.draw(st.lists(st.integers(0, stream.tokens - 1), max_size=5)))
    assert found.numbers(at) == [sum(end <= token for end in ends) for token in at]
    start, stop = sorted(data.draw(st.tuples(st.integers(0, stream.tokens), st.integers(0, stream.tokens))))
    inside = [end for end in ends if start < end <= stop]
    if kind == "begun":  # the end of the last document is the end of the stream, which no token marks
        inside = [end for end in inside if end < stream.tokens]
    assert found.ends(start, stop).tolist() == inside
    some = scan(stream, found, VOCABULARY, limit := data.draw(st.integers(1, stream.tokens)))
    assert some.tokens == limit == some.counts.sum()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, EOS), min_size=2, max_size=40),
    st.lists(st.text("ab c", min_size=1, max_size=3), min_size=EOS, max_size=EOS),
    st.data(),
)
def test_a_text_is_found_across_tokens_chunks_and_files(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[int], pieces: list[str], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("set")
    for number, part in enumerate(np.array_split(tokens, 2)):
        foreign.npy(folder / f"{number}.npy", [part.tolist()])
    table = TokenBytes("toy", EOS, [*(piece.encode() for piece in pieces), b""])
    spelled = [(pieces[token] if token != EOS else "|") for token in tokens]
    whole = "".join(spelled)
    start = data.draw(st.integers(0, len(whole) - 1))
    there = whole[start : start + data.draw(st.integers(1, 7))]
    hole = data.draw(st.integers(0, len(there)))
    text = there[:hole] + there[hole + data.draw(st.integers(0, 2)) :] or "a"  # there, or nearly
    if "|" in text:
        text = text.replace("|", "") or "a"
    token_of = [n for n, piece in enumerate(spelled) for _ in piece]
    expected = [token_of[match.start()] for match in re.finditer(re.escape(text), whole)]
    found = find(open_split(folder, "all"), table, text.encode(), 10**9)
    assert (found.count, list(found.first)) == (len(expected), expected[:10])


def test_a_token_between_parts_them_across_chunks(tmp_path: Path) -> None:
    foreign.npy(tmp_path / "train.npy", [[2, 2, 2, 2, 0, 2, 1, 0, 1]])
    table = TokenBytes("toy", 3, [b"a", b"b", b"c", b""])
    assert find(open_split(tmp_path, "train"), table, b"ab", 10**9) == set_contents.Found(1, [7])


def test_ids_outside_the_vocabulary_are_refused_with_their_place(tmp_path: Path) -> None:
    stream = write(tmp_path, "Megatron", [[1, 2, 3, 4], [5, 6, 12, 7], [5]])
    for vocabulary, words in ((12, r"1\.bin, token 2: token id 12 is outside a vocabulary of 12"), (13, None)):
        if words is None:
            scan(stream, Documents(stream, None), vocabulary, 10**9)
        else:
            with pytest.raises(ShardError, match=words):
                scan(stream, Documents(stream, None), vocabulary, 10**9)
    foreign.npy(tmp_path / "train.npy", [[1, 2**40]], "<i8")
    stream = open_split(tmp_path / "train.npy", "all")
    with pytest.raises(ShardError, match="token id 1,099,511,627,776 is outside any vocabulary"):
        scan(stream, Documents(stream, None), None, 10**9)
    foreign.npy(tmp_path / "train.npy", [[1, -2]], "<i8")
    stream = open_split(tmp_path / "train.npy", "all")
    with pytest.raises(ShardError, match="token id -2 is outside any"):
        scan(stream, Documents(stream, None), None, 10**9)


@pytest.mark.parametrize("name", ["byte", "gpt2", "train:300"])
def test_the_bytes_of_tokens_are_the_text(name: str) -> None:
    tokenizer = tokenization.load(name, TEXTS * 20) if name.startswith("train") else tokenization.load(name)
    table = token_bytes._from_json(name, tokenizer.files["tokenizer.json"], tokenizer.eos_id, tokenizer.vocab_size)
    assert (table.vocab_size, table.pieces[table.eos_id]) == (tokenizer.vocab_size, b"")
    for text in TEXTS:
        tokens = tokenizer.encoder(np.dtype("<u4"))(text.encode())
        assert table.decode(np.append(tokens, tokenizer.eos_id)) == text.encode()


def test_the_bytes_of_a_tokenizer_that_is_not_byte_level() -> None:
    import tokenizers

    vocabulary = {"▁the": 0, "▁citizen": 1, "s": 2, "a": 3, "▁": 4, "<unk>": 5}
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram([(token, -1.0) for token in vocabulary], 5, False))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    table = token_bytes._from_json("unigram", backend.to_str().encode(), 5, 6)
    assert table.decode(np.array([0, 1, 2, 5, 0])) == b" the citizens the"


@pytest.fixture
def speeches(make_set: Callable[..., Path]) -> Path:
    """A set of byte tokens with its tokenizer, as `prepare` makes one."""
    tokenizer = tokenization.load("byte")
    tokens = [token for text in TEXTS for token in (*text.encode(), tokenizer.eos_id)]
    folder = make_set("speeches", tokens * 3, tokens, vocab_size=257, eos_id=tokenizer.eos_id, tokenizer="byte", shard_tokens=100)
    tokenizer.save(folder / "tokenizer")
    return folder


def inspect(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert cli.main(["inspect", *map(str, arguments)]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines() if "/" not in line), out  # paths are as long as they are
    return out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert cli.main(["inspect", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_a_prepared_set_is_shown_and_left_alone(speeches: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def state() -> dict[str, str]:
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in speeches.rglob("*") if path.is_file()}

    before = state()
    out = inspect(capsys, speeches, "--sequence-length", "64", "--verify", "--plot", tmp_path / "new" / "lengths.png")
    assert state() == before
    assert (tmp_path / "new" / "lengths.png").read_bytes().startswith(b"\x89PNG")
    texts = "".join(TEXTS).encode()
    for words in (
        f"{speeches}: a prepared set",
        "tokenizer   byte, 257 ids, end of text 256",
        f"fingerprint {json.loads((speeches / 'manifest.json').read_text())['fingerprint']}",
        f"train {3 * (len(texts) + 4):>18,}       3   uint16            12             {len(texts) / (len(texts) + 4):.3f}",
        f"val   {len(texts) + 4:>18,}       1   uint16             4 ",
        "verified: every byte as prepared",
        "train: documents of 11 to 34 tokens, median 22, mean 24.0",
        " 8–15  3  ███",
        "16–31  6  ████",
        "'i' ",
        "(end)",
        "train, window 0 of 64 tokens: 0 to 63",
        "  │ My fellow citizens, good morning.",
        "  ├─ a document ends here ───",
        "  │ Grüße",
    ):
        assert words in out, f"{words}\n{out}"
    assert "\x1b" not in out
    assert r"\x1b[31m" in out


def test_a_file_that_changed_is_told(speeches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(speeches / "train_000001.bin", "r+b") as file:
        file.seek(1024)
        file.write(b"\1\0")
    assert "train_000001.bin has changed since it was prepared" in refusal(capsys, speeches, "--verify")
    with open(speeches / "train_000001.bin", "r+b") as file:
        file.seek(1024)
        file.write(b"\1\1")
    assert "train_000001.bin, token 0: token id 257 is outside a vocabulary of 257" in refusal(capsys, speeches)


def test_a_window_is_shown_whole(speeches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = inspect(capsys, speeches, "--window", "1", "--sequence-length", "20")
    assert out.splitlines() == [
        "train, window 1 of 20 tokens: 20 to 39",
        "  │ good morning.",
        "  ├─ a document ends here ".ljust(80, "─"),
        "  │ Grüß",
    ]
    assert "window 3" in inspect(capsys, speeches, "--window", "3", "--sequence-length", "20", "--split", "val")
    assert "has 4 windows of 20 tokens, numbered from 0; there is no 4" in refusal(
        capsys, speeches, "--window", "4", "--sequence-length", "20", "--split", "val"
    )


def test_a_text_is_found_with_its_document_and_window(speeches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = inspect(capsys, speeches, "--find", "fellow citizens", "--sequence-length", "50", "--split", "train")
    tokens = open_split(speeches, "train").read(0, 288)
    second = bytes(np.where(tokens < 256, tokens, 0).astype(np.uint8)).find(b"fellow citizens", 10)
    assert out.splitlines()[0] == "train: 6 × 'fellow citizens'"
    assert out.splitlines()[1:5] == [
        "  token 3  document 0  window 0",
        "  │ My fellow citizens, good morning.",
        f"  token {second}  document 3  window {second // 50}",
        "  │  of the fellow citizens",
    ]
    assert "  token 0  document 0  " in inspect(capsys, speeches, "--find", "My fellow")
    both = inspect(capsys, speeches, "--find", "an alle")
    assert "train: 3 × 'an alle'" in both
    assert "val: 1 × 'an alle'" in both
    assert "rüße⏎    an alle" in both
    assert "val: 0 × 'zebra'" in inspect(capsys, speeches, "--find", "zebra")
    assert "expected some text" in refusal(capsys, speeches, "--find", "")
    assert "train: 0 × 'izens of' in the first 30 of 288 tokens" in inspect(capsys, speeches, "--find", "izens of", "--limit", "30")


def test_what_was_not_looked_at_is_said(speeches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = inspect(capsys, speeches, "--limit", "70")
    assert re.search(r"\(train: the first 70 of 288 tokens; --limit 0 for all\)", out)
    assert " of 70" not in inspect(capsys, speeches, "--limit", "0")


def gpt2(text: str) -> list[int]:
    return tokenization.load("gpt2").encoder(np.dtype("<u2"))(text.encode()).tolist()


def test_bare_sets_are_taken_for_gpt2s_where_they_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = [[50256, *gpt2(text)] for text in TEXTS]
    foreign.npy(tmp_path / "edufineweb_train_000001.npy", documents)
    out = inspect(capsys, tmp_path, "--sequence-length", "8")
    for words in (
        "bare files in the format of npy",
        "tokenizer   gpt2 (assumed: a bare set names none, and its ids fit)",
        "val     none",
        "  │ My fellow citizens, good",
    ):
        assert words in out
    assert re.search(rf"train +{len(foreign.flat(documents))} +1 +uint16 +4 ", out)
    assert "verified: sizes agree" in inspect(capsys, tmp_path, "--verify")
    foreign.npy(tmp_path / "edufineweb_train_000001.npy", [[*foreign.flat(documents), 50257]])
    out = inspect(capsys, tmp_path, "--sequence-length", "8")
    assert "tokenizer   unknown: ids go up to 50,257, above gpt2's; name it with --tokenizer" in out
    assert "train: nothing marks the ends of documents" in out
    assert "  │ 50256 3666 5891" in out
    assert "token id 50,257 is outside a vocabulary of 50,257" in refusal(capsys, tmp_path, "--find", "fellow")
    assert "is outside a vocabulary of 257" in refusal(capsys, tmp_path, "--tokenizer", "byte")


def test_a_set_without_end_of_text_is_suspicious(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign.nanogpt(tmp_path / "train.bin", [gpt2(TEXTS[0]) * 9])
    assert "train: no end of text (50256): one document, or another tokenizer's tokens" in inspect(capsys, tmp_path)


def test_nanogpts_characters_stay_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign.nanogpt(tmp_path / "train.bin", [[1, 2, 3] * 30])
    (tmp_path / "meta.pkl").write_bytes(b"not a pickle")
    out = inspect(capsys, tmp_path, "--sequence-length", "16")
    assert "meta.pkl, which is not unpickled" in re.sub(r"\s+", " ", out)
    assert "  │ 1 2 3 1 2 3" in out
    assert "no text without a tokenizer; name one with --tokenizer" in refusal(capsys, tmp_path, "--find", "x")


def test_documents_come_from_the_index_of_megatron_and_datatrove(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = [gpt2(text) for text in TEXTS]  # no end of text at all
    foreign.megatron(tmp_path / "x_text_document.bin", documents, "i4")
    foreign.datatrove(tmp_path / "00000.ds", documents)
    for name, kind in (("x_text_document", "Megatron"), ("00000.ds", "datatrove")):
        out = inspect(capsys, tmp_path / name, "--sequence-length", "8")
        assert f"bare files in the format of {kind}" in out
        assert re.search(rf"all +{len(foreign.flat(documents))} +1 +u?int\d\d +4 ", out)
        assert "  ├─ a document ends here ───" in out
        assert "document 3  " in inspect(capsys, tmp_path / name, "--find", "of the fellow")
    assert "tokenizer   gpt2, 50,257 ids, end of text 50256" in out
    foreign.datatrove(tmp_path / "00000.ds", documents, tokenizer="some/model")
    assert "tokenizer   some/model; for text instead of ids name it with --tokenizer" in inspect(capsys, tmp_path / "00000.ds")


def test_a_set_whose_tokenizer_is_gone_shows_ids(make_set: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_set("toy", [1, 2, 3, 0] * 20)
    out = inspect(capsys, folder, "--sequence-length", "8")
    assert "tokenizer   toy, whose folder" in out
    assert "  │ 1 2 3 0\n" in out


def test_what_cannot_be_shown_is_said_in_a_line(speeches: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such set" in refusal(capsys, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds no tokens: no manifest.json, and no .bin, .npy or .ds" in refusal(capsys, tmp_path / "empty")
    assert "expected a name that ends in .png" in refusal(capsys, speeches, "--plot", tmp_path / "x.jpg")
    for option, text in (("--sequence-length", "0"), ("--window", "-1"), ("--limit", "x")):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["inspect", str(speeches), option, text])
        assert stopped.value.code == 2


def test_histograms_fit_the_terminal() -> None:
    lengths = {0: 2, 1: 5, 3: 1, 1000: 10**9, 10**6: 1}
    assert histogram.bins(lengths)[:3] == [(0, 0, 2), (1, 1, 5), (2, 3, 1)]
    assert sum(n for *_, n in histogram.bins(lengths)) == sum(lengths.values())
    drawn = list(histogram.lines(lengths))
    assert max(map(len, drawn)) == 80
    assert all("█" in line for line in drawn if " 0" not in line[-3:])
    assert histogram.bins({}) == []


def test_a_look_imports_nothing_heavy(speeches: Path) -> None:
    code = f"import sys; from pretrain import cli; assert cli.main(['inspect', {str(speeches)!r}]) == 0; "
    code += "heavy = {'torch', 'matplotlib', 'transformers', 'datasets'} & sys.modules.keys(); assert not heavy, heavy"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_set_of_a_shard_each_has_its_splits(make_set: Callable[..., Path]) -> None:
    assert shards.splits(make_set("both", [1, 2], [3])) == ["train", "val"]
    assert shards.splits(make_set("one", [1, 2])) == ["train"]
