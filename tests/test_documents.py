"""Reading sources: what is a document, and that every fault of a file is told with its place."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pretrain.documents import CorpusError, find_sources, read


def texts(path: Path, text_field: str = "text") -> list[str]:
    return [text for _, text in read(path, text_field)]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_parquet(path: Path, column: Any, name: str = "text", **more: Any) -> Path:
    pq.write_table(pa.table({name: column} | more), path, row_group_size=2)
    return path


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".TXT"])
def test_a_text_file_is_one_document_with_lf(tmp_path: Path, suffix: str) -> None:
    content = b"\xef\xbb\xbfone\r\ntwo\r\n\r\nthree\rfour\n \xef\xbb\xbf "
    assert texts(write(tmp_path / f"a{suffix}", content)) == ["one\ntwo\n\nthree\nfour\n \ufeff "]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_json_lines(tmp_path: Path, suffix: str, end: str) -> None:
    rows = ['\ufeff{"text": "a"}', "", " \t", '{"id": 1, "text": "b\\r\\n"}', '{"text": "last, without an end"}']
    path = write(tmp_path / f"a{suffix}", end.join(rows))
    assert list(read(path, "text")) == [
        (f"{path}:1", "a"),
        (f"{path}:4", "b\r\n"),
        (f"{path}:5", "last, without an end"),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "a"} {"text": "b"}', "not one JSON object (Extra data, column 15)"),
        ('{"text": "a",}', "not one JSON object"),
        ('["a"]', "expected a JSON object with a field 'text', found a list"),
        ("7", "found a number"),
        ('{"text": "a', "not one JSON object (Unterminated string"),
        ('{"text": "a", "text": "b"}', "the key 'text' occurs twice"),
        ("[" * 100_000, "not one JSON object"),
        ('{"id": 1, "body": "a"}', "no field 'text' (found: id, body); choose one with --text-field"),
        ("{}", "no field 'text' (found: no field)"),
        ('{"text": null}', "the field 'text' is null, expected text"),
        ('{"text": 7}', "is a number"),
        ('{"text": ["x"]}', "is a list"),
        ('{"text": {"a": 1}}', "is an object"),
        ('{"text": true}', "is true or false"),
        (b'{"text": "caf\xe9"}', "not UTF-8 (byte 14 of the line is 0xe9)"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str | bytes, reason: str) -> None:
    data = line.encode() if isinstance(line, str) else line
    path = write(tmp_path / "a.jsonl", b'{"text": "good"}\n\n' + data + b'\n{"text": "good"}\n')
    with pytest.raises(CorpusError) as caught:
        texts(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_text_that_is_not_utf8_is_named(tmp_path: Path, bom: bytes) -> None:
    path = write(tmp_path / "a.txt", bom + b"one\ntwo\ncaf\xe9\n")
    with pytest.raises(CorpusError, match=r"a\.txt:3: not UTF-8 \(byte 4 of the line is 0xe9\)"):
        texts(path)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "no gzip"])
def test_a_damaged_gzip_is_named(tmp_path: Path, name: str, damage: str) -> None:
    whole = gzip.compress(b"".join(b'{"text": "%d"}\n' % n for n in range(1000)))
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
    (tmp_path / name).write_bytes({"cut": whole[:-20], "flipped": flipped, "no gzip": b"plain"}[damage])
    with pytest.raises(CorpusError, match=rf"{name}"):
        texts(tmp_path / name)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_parquet(tmp_path: Path, kind: Any) -> None:
    path = write_parquet(tmp_path / "a.parquet", pa.array(["a", "b", "a", "é\r\n", ""], kind), other=[1, 2, 3, 4, 5])
    assert list(read(path, "text")) == [(f"{path}, row {n}", t) for n, t in enumerate(["a", "b", "a", "é\r\n", ""], 1)]


def test_faults_of_parquet_are_named(tmp_path: Path) -> None:
    cases = {
        "null": (pa.array(["a", None, "c"]), "row 2: the column 'text' is null"),
        "all_null": (pa.array([None, None]), "the column 'text' is of type null, expected text"),
        "number": (pa.array([1, 2]), "the column 'text' is of type int64"),
        "latin1": (pa.array([b"ok", b"caf\xe9"], pa.binary()).view(pa.string()), "between rows 1 and 64: not UTF-8"),
    }
    for name, (column, reason) in cases.items():
        path = write_parquet(tmp_path / f"{name}.parquet", column)
        with pytest.raises(CorpusError) as caught:
            texts(path)
        assert str(path) in str(caught.value)
        assert reason in str(caught.value)
    with pytest.raises(CorpusError, match=r"no column 'text' \(found: body\); choose one with --text-field"):
        texts(write_parquet(tmp_path / "a.parquet", ["a"], "body"))
    assert texts(tmp_path / "a.parquet", "body") == ["a"]
    whole = (tmp_path / "a.parquet").read_bytes()
    for part in (b"", b"text", whole[:-30], whole[30:]):
        with pytest.raises(CorpusError, match=r"cut\.parquet: not a readable Parquet file"):
            texts(write(tmp_path / "cut.parquet", part), "body")


def test_parquet_without_rows_has_no_documents(tmp_path: Path) -> None:
    assert texts(write_parquet(tmp_path / "a.parquet", pa.array([], pa.string()))) == []


def test_sources_are_found_in_order_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("in/b.txt", "in/B.txt", "in/a/z.jsonl", "in/a/y.md", "in/.hidden/x.txt", "in/._a.jsonl", "other.txt"):
        write(tmp_path / name, "x")
    (tmp_path / "link.txt").symlink_to("other.txt")
    monkeypatch.chdir(tmp_path)
    in_folder = ["in/B.txt", "in/a/z.jsonl", "in/b.txt"]
    assert find_sources(["in"]) == ([Path(name) for name in in_folder], 1)
    assert find_sources(["other.txt", "in/", "link.txt", "./in/b.txt", "in"])[0] == [
        Path("other.txt"),
        *map(Path, in_folder),
    ]
    assert find_sources(["in/*.txt"])[0] == [Path("in/B.txt"), Path("in/b.txt")]
    assert find_sources(["in/**/*.jsonl"])[0] == [Path("in/a/z.jsonl")]
    assert find_sources(["in/*"])[0] == [Path("in/B.txt"), Path("in/a/z.jsonl"), Path("in/b.txt")]
    write(tmp_path / "odd[1].txt", "x")
    assert find_sources(["odd[1].txt"])[0] == [Path("odd[1].txt")]


@pytest.mark.parametrize("source", ["nowhere", "nowhere/*.txt", "only", "only/README.md", "*.csv", "empty", "a.parquet.gz"])
def test_nothing_to_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    write(tmp_path / "only/README.md", "x")
    write(tmp_path / "a.csv", "x")
    write(tmp_path / "a.parquet.gz", "x")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "good.txt", "x")
    with pytest.raises(CorpusError) as caught:
        find_sources(["good.txt", source])
    assert str(caught.value).startswith(f"{source}: ")


def test_a_field_by_another_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"body": "b", "text": "t"}) + "\n")
    assert texts(path, "body") == ["b"]
