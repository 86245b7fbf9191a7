"""Reading sources: what is a document, and that every fault of a file is told with its place."""

import gzip
import io
import json
import os
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.corpus import json_array, lines, sources, tables
from pretrain.corpus.documents import Bad, Document, Found, Reading, WholeHash
from pretrain.corpus.formats import has_ranges, locate, read, read_range
from pretrain.corpus.sources import CorpusError, Source, find_sources


def source(path: Path, format: str = "") -> Source:
    return find_sources([str(path)], format=format)[0][0]


def found(path: Path, **how: str) -> list[Found]:
    return list(read(source(path), Reading(**how)))


def texts(path: Path, **how: str) -> list[str]:
    """Of a source without faults."""
    documents = found(path, **how)
    assert not [bad for bad in documents if isinstance(bad, Bad)]
    return [document.text for document in documents if isinstance(document, Document)]


def fault(path: Path, **how: str) -> str:
    """The only fault of a source, as the user reads it."""
    (bad,) = (found for found in found(path, **how) if isinstance(found, Bad))
    return f"{locate(source(path), bad.place)}: {bad.message}"


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes({".gz": gzip.compress, ".zst": zstd}.get(path.suffix, bytes)(data))
    return path


def write_parquet(path: Path, column: Any, name: str = "text", **more: Any) -> Path:
    pq.write_table(pa.table({name: column} | more), path, row_group_size=2)
    return path


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".txt.zst", ".TXT"])
def test_a_text_file_is_one_document_with_lf(tmp_path: Path, suffix: str) -> None:
    content = b"\xef\xbb\xbfone\r\ntwo\r\n\r\nthree\rfour\n \xef\xbb\xbf "
    path = write(tmp_path / f"a{suffix}", content)
    assert texts(path) == ["one\ntwo\n\nthree\nfour\n \ufeff "]
    assert list(read(source(path), Reading(), fragments=True)) == found(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".ndjson.zst"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_json_lines(tmp_path: Path, suffix: str, end: str) -> None:
    rows = ['\ufeff{"text": "a"}', "", " \t", '{"id": 1, "text": "b\\r\\n"}', '{"text": "last, without an end"}']
    path = write(tmp_path / f"a{suffix}", end.join(rows))
    assert found(path) == [Document(":1", "a"), Document(":4", "b\r\n"), Document(":5", "last, without an end")]


@pytest.mark.parametrize(
    ("documents", "content", "expected"),
    [
        ("line", "one\r\n\ntwo\rthree\n four", ["one", "", "two", "three", " four"]),
        ("blank-line", "\n\none\ntwo\r\n \r\n\n\nthree\n\n", ["one\ntwo", "three"]),
        ("blank-line", "one", ["one"]),
        ("<|endoftext|>", "one\n<|endoftext|>\ntwo<|endoftext|><|endoftext|>three\n", ["one", "two", "", "three"]),
        ("<|endoftext|>", "one<|endoftext|>", ["one"]),
        ("\\n---\\n", "a---b\n---\nc", ["a---b", "c"]),
        ("\n---\n", "a---b\n---\nc", ["a---b", "c"]),
        ("\\n---\\n", "a\r\n---\r\nb\r\n---\nc", ["a", "b", "c"]),
        ("§", "é§à", ["é", "à"]),
    ],
)
@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_documents_inside_a_text_file(tmp_path: Path, suffix: str, documents: str, content: str, expected: list[str]) -> None:
    assert texts(write(tmp_path / f"a{suffix}", "\ufeff" + content), documents=documents) == expected


PIECES = st.lists(
    st.sampled_from(["a", "bé", "\n", "\n\n", "\r\n", "\r", " ", "<|e|>", "---", "-", "<", '{"text": "x"}\n', "\ufeff"]), max_size=40
)


@settings(max_examples=400, deadline=None)
@given(data=PIECES.map("".join), how=st.sampled_from(["line", "blank-line", "<|e|>", "json"]), step=st.integers(1, 60))
def test_ranges_together_are_the_whole(tmp_path_factory: pytest.TempPathFactory, data: str, how: str, step: int) -> None:
    """Whatever the ranges: each document once, in order, and at the line where it is."""
    path = tmp_path_factory.getbasetemp() / ("ranges.jsonl" if how == "json" else "ranges.txt")
    path.write_bytes(data.encode())
    reading, opened = Reading(documents="file" if how == "json" else how), source(path)
    assert has_ranges(opened, reading)
    apart = [found for a in range(0, opened.bytes, step) for found in read_range(opened, reading, a, min(a + step, opened.bytes))]
    whole = list(read(opened, reading)) if data else []
    assert [located(opened, found) for found in apart] == [located(opened, found) for found in whole]


class Counted(io.BytesIO):
    """How many bytes are read of it."""

    count = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.count += len(data)
        return data

    def readline(self, size: int | None = -1) -> bytes:
        line = super().readline(size)
        self.count += len(line)
        return line


@pytest.mark.parametrize(("name", "how"), [("a.jsonl", "file"), ("a.txt", "line"), ("a.txt", "blank-line"), ("a.txt", "<|e|>")])
def test_a_range_inside_a_large_document_reads_no_more_than_it_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    """Else a file of one large line would be read once for each range of it."""
    monkeypatch.setattr(lines, "PIECE", 1000)
    monkeypatch.setattr(lines, "BLOCK", 1000)
    opened = source(write(tmp_path / name, ""))
    file = Counted(b"x" * 100_000)
    assert list(lines.documents_in(file, opened, Reading(documents=how), 5000, 6000)) == []
    assert file.count < 4000


def located(opened: Source, found: Found) -> tuple[str, str]:
    return locate(opened, found.place), found.text if isinstance(found, Document) else found.message


@pytest.mark.parametrize(
    ("name", "documents", "encoding"),
    [
        ("a.txt", "file", "utf-8"),  # one document
        ("a.txt", "---", "utf-8"),  # of four dashes, which three are the separator?
        ("a.txt", "line", "utf-16"),  # a line break is two bytes
        ("a.jsonl.gz", "file", "utf-8"),
        ("a.csv", "file", "utf-8"),  # a line break may be inside quotation marks
    ],
)
def test_what_reads_only_from_its_start(tmp_path: Path, name: str, documents: str, encoding: str) -> None:
    assert not has_ranges(source(write(tmp_path / name, "")), Reading(documents=documents, encoding=encoding))


SPACES = [f"{chr(code)}\n" for code in range(0x3001) if chr(code).isspace()]  # the last is the ideographic one, U+3000


@settings(max_examples=300, deadline=None)
@given(
    words=st.lists(st.sampled_from(["word", "é", " ", "\n", "\r\n", "\r", "\n\n", "\t\n", "x\n", "\ufeff", "。\n", *SPACES]), max_size=120),
    piece=st.integers(1, 40),
)
def test_fragments_together_are_the_document(tmp_path_factory: pytest.TempPathFactory, words: list[str], piece: int) -> None:
    path = tmp_path_factory.getbasetemp() / "fragments.txt"
    path.write_bytes("".join(words).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "PIECE", piece)
        parts = [part for part in read(source(path), Reading(), fragments=True) if isinstance(part, Document)]
    (whole,) = texts(path)
    if not whole.strip():
        assert [part.text.strip() for part in parts] == [""]
        return
    assert "".join(part.text for part in parts) == whole
    for one, other in pairwise(parts):
        assert not one.text[-1].isspace()
        assert other.text[0] == "\n"
    assert [part.fragment for part in parts] == list(range(len(parts)))
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {part.whole for part in parts} == ({WholeHash(whole.encode()).digest()} if len(parts) > 1 else {b""})


def test_lines_that_end_in_any_script_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is never cut is held whole."""
    monkeypatch.setattr(lines, "PIECE", 100)
    for line, encoding in (
        ("今天天气很好。\n", "utf-8"),
        ("今天天气很好。\n", "utf-16"),
        ("Добрый день.\n", "cp1251"),
        ("été\r\n", "utf-8"),
    ):
        path = write(tmp_path / "a.txt", (line * 100).encode(encoding))
        parts = [part for part in read(source(path), Reading(encoding=encoding), fragments=True) if isinstance(part, Document)]
        assert max(len(part.text.encode()) for part in parts) < 200


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
        ("\0" * 40, "not one JSON object"),
        (b'{"text": "caf\xe9"}', "not UTF-8 (byte 14 of the line is 0xe9)"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_a_bad_line_is_named_and_the_rest_is_read(tmp_path: Path, suffix: str, line: str | bytes, reason: str) -> None:
    data = line.encode() if isinstance(line, str) else line
    path = write(tmp_path / f"a{suffix}", b'{"text": "good"}\n\n' + data + b'\n{"text": "good"}\n')
    said = fault(path)
    assert said.startswith(f"{path}:3: ")
    assert reason in said
    assert "\n" not in said
    assert [document.text for document in found(path) if isinstance(document, Document)] == ["good", "good"]
    if has_ranges(opened := source(path), Reading()):
        (bad,) = (found for found in read_range(opened, Reading(), 5, opened.bytes) if isinstance(found, Bad))
        assert f"{locate(opened, bad.place)}: {bad.message}" == said


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("how", ["file", "blank-line", "§§"])
def test_text_that_is_not_utf8_is_named(tmp_path: Path, bom: bytes, how: str) -> None:
    path = write(tmp_path / "a.txt", bom + b"one\ntwo\ncaf\xe9\n")
    assert fault(path, documents=how).startswith(f"{path}:3: not UTF-8 (byte 4 of the line is 0xe9)")
    assert texts(write(tmp_path / "b.txt", b"caf\xe9"), encoding="latin-1") == ["café"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-be", "shift_jis", "cp1252", "koi8-r"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.txt.gz"])
def test_other_encodings(tmp_path: Path, encoding: str, name: str) -> None:
    word = {"shift_jis": "表計", "cp1252": "“déjà”", "koi8-r": "мир"}.get(encoding, "表 é \U0001f600")
    kind = name.split(".")[1]
    rows = {"txt": word, "csv": f'text\n"{word}"\n'}.get(kind, json.dumps({"text": word}, ensure_ascii=False) + "\n")
    path = write(tmp_path / name, rows.encode(encoding))
    assert texts(path, encoding=encoding) == [word]
    assert not encoding.startswith("utf") or isinstance(found(path)[0], Bad)


def test_nul_bytes_are_no_text(tmp_path: Path) -> None:
    for name, content in {"a.txt": "a\0b", "b.txt": "text\n" + "\0" * 5000, "a.csv": "text\na\0b\n"}.items():
        assert "holds NUL bytes" in fault(write(tmp_path / name, content))
    assert "--encoding utf-16" in fault(write(tmp_path / "c.txt", "text".encode("utf-16-le")))
    without_mark = fault(write(tmp_path / "d.txt", "one\ntwo".encode("utf-16-le")), encoding="utf-16", documents="line")
    assert "does not start with BOM" in without_mark
    half_a_character = write(tmp_path / "e.txt", "one\ntwo".encode("utf-16") + b"x")
    assert "not utf-16 (truncated data)" in fault(half_a_character, encoding="utf-16", documents="line")
    # A JSON escape is the writer's own word.
    assert texts(write(tmp_path / "a.jsonl", '{"text": "a\\u0000b"}')) == ["a\0b"]


@pytest.mark.parametrize(
    ("name", "damage"),  # Arrow writes zstd without a checksum: a flipped byte may decompress
    [(name, damage) for name in ("a.txt.gz", "a.jsonl.gz", "a.csv.gz") for damage in ("cut", "flipped", "none", "empty")]
    + [(name, damage) for name in ("a.jsonl.zst", "a.json.zst") for damage in ("cut", "none")],
)
def test_a_damaged_archive_is_named_and_what_came_before_is_read(tmp_path: Path, name: str, damage: str) -> None:
    draw = random.Random(0)  # numbers that don't compress to nothing
    rows = [{"text": str(draw.random())} for _ in range(20_000)]
    plain = {"json": json.dumps(rows), "csv": "text\n" + "".join(row["text"] + "\n" for row in rows)}
    data = plain.get(name.split(".")[1], "".join(json.dumps(row) + "\n" for row in rows))
    whole = write(tmp_path / name, data).read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
    (tmp_path / name).write_bytes({"cut": whole[:-20], "flipped": flipped, "none": b"plain", "empty": b""}[damage])
    *_, last = (bad for bad in found(tmp_path / name) if isinstance(bad, Bad))  # a flipped byte spoils lines, too
    assert last.message.startswith("cut short")
    assert "copy it again" in last.message
    if damage == "cut" and "jsonl" in name:
        assert len(found(tmp_path / name)) > 10_000


def test_an_archive_of_a_large_window_is_not_damaged(tmp_path: Path) -> None:
    """As of `zstd --long=31`: a frame for a window of 2 GiB, with one block as it is."""
    path = write(tmp_path / "a.jsonl.zst", "")
    path.write_bytes(b"\x28\xb5\x2f\xfd\x00" + bytes([31 - 10 << 3]) + (14 << 3 | 1).to_bytes(3, "little") + b'{"text": "ab"}')
    assert fault(path).endswith(f"zstd -d --long=31 -c {path} | pretrain prepare - --format jsonl")


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_an_array_of_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(json_array, "BLOCK", size)
    rows: list[dict[str, Any]] = [
        {"text": t, "n": [1, {"x": None}]} for t in ["a", "", "b\n]", 'quo"te\\', "\U0001f600" * 500, "é" * 70_000]
    ]
    path = write(tmp_path / "a.json", "\ufeff " + json.dumps(rows, indent=1) + "\n ")
    assert found(path) == [Document(f", item {n}", row["text"]) for n, row in enumerate(rows, 1)]
    assert texts(write(tmp_path / "b.json", "[]")) == []
    assert texts(write(tmp_path / "c.json", "")) == []
    assert texts(write(tmp_path / "d.json", json.dumps(rows[0]) + "\n" + json.dumps(rows[1]))) == ["a", ""]  # lines by another name


@pytest.mark.parametrize(
    ("content", "reason", "before"),
    [
        ('[{"text": "a"},]', "item 2: not a JSON value", 1),
        ('[{"text": "a"} {"text": "b"}]', "item 2: expected a comma or the end of the array", 1),
        ('[{"text": "a"}', "item 2: the array has no end: the file is cut short", 1),
        ('[{"text": "a"}, {"text": "b', "item 2: not a JSON value (Unterminated string", 1),
        ('[{"text": "a"}] {"text": "b"}', "item 2: there is text after the end", 1),
        ('[{"text": "a"}, 12, {"text": "b"}]', "item 2: expected a JSON object with a field 'text', found a number", 2),
        ('{"data": [{"text": "a"}]}', "item 1: no field 'text' (found: data)", 0),
    ],
)
@pytest.mark.parametrize("size", [1, 1 << 16])
def test_an_array_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, reason: str, before: int, size: int) -> None:
    monkeypatch.setattr(json_array, "BLOCK", size)
    path = write(tmp_path / "a.json", content)
    assert reason in fault(path)
    assert len(found(path)) == before + 1


def test_csv(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", '\ufeffid,text\n1,"a ""b""\r\nc"\n\n2,é\n3,\n4,d,e\n5\n6,f')
    assert found(path) == [
        Document(":2", 'a "b"\r\nc'),
        Document(":5", "é"),
        Document(":6", ""),
        Bad(":7", "not CSV", "3 columns, the first row has 2; mend it"),
        Bad(":8", "not CSV", "1 columns, the first row has 2; mend it"),
        Document(":9", "f"),
    ]
    assert fault(path, text_field="body").startswith(f"{path}: no column 'body' (found: id, text)")
    assert "two columns 'text'" in fault(write(tmp_path / "b.csv", "text,text\na,b\n"))
    assert "a.csv:3: not CSV" in fault(write(tmp_path / "a.csv", 'text\na\n"b" c\n')).replace(str(tmp_path) + "/", "")
    latin = found(write(tmp_path / "c.csv", b"text\ncaf\xe9\ngood\n"))
    assert [type(row) for row in latin] == [Bad, Document]
    assert texts(write(tmp_path / "d.csv", "")) == []
    assert fault(write(tmp_path / "f.csv", "id;text\n1;a\n")).endswith("--text-field; columns are separated by commas alone")
    assert len(texts(write(tmp_path / "e.csv", "text\n" + "x" * 300_000))[0]) == 300_000


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str)
@pytest.mark.parametrize("format", ["parquet", "arrow file", "arrow stream"])
def test_tables(tmp_path: Path, kind: Any, format: str) -> None:
    column = pa.array(["a", "b", "a", "é\r\n", ""], kind)
    if format == "parquet":
        path = write_parquet(tmp_path / "a.parquet", column, other=[1, 2, 3, 4, 5])
    else:
        path, table = tmp_path / "a.arrow", pa.table({"other": [1, 2, 3, 4, 5], "text": column})
        with (pa.ipc.new_file if format == "arrow file" else pa.ipc.new_stream)(path, table.schema) as sink:
            sink.write_table(table, max_chunksize=2)
    expected = [Document(f", row {n}", t) for n, t in enumerate(["a", "b", "a", "é\r\n", ""], 1)]
    assert found(path) == expected
    opened = source(path)
    if has_ranges(opened, Reading()):
        step = opened.bytes // 7 + 1
        assert [f for a in range(0, opened.bytes, step) for f in read_range(opened, Reading(), a, min(a + step, opened.bytes))] == expected


def test_faults_of_parquet_are_named(tmp_path: Path) -> None:
    cases = {
        "null": (pa.array(["a", None, "c"]), "row 2: the column 'text' is null"),
        "all_null": (pa.array([None, None]), "the column 'text' is of type null, expected text"),
        "number": (pa.array([1, 2]), "the column 'text' is of type int64"),
        "latin1": (pa.array([b"ok", b"caf\xe9"], pa.binary()).view(pa.string()), "row 2: the column 'text' is not UTF-8"),
    }
    for name, (column, reason) in cases.items():
        path = write_parquet(tmp_path / f"{name}.parquet", column)
        assert str(path) in fault(path)
        assert reason in fault(path)
    assert "no column 'text' (found: body); choose one with --text-field" in fault(write_parquet(tmp_path / "a.parquet", ["a"], "body"))
    assert texts(tmp_path / "a.parquet", text_field="body") == ["a"]
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    assert "two columns 'text'" in fault(tmp_path / "twice.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    for part in (b"", b"text", whole[:-30], whole[30:]):
        for name in ("cut.parquet", "cut.arrow"):
            assert f"{name}: not a readable" in fault(write(tmp_path / name, part), text_field="body")
    opened = source(tmp_path / "cut.parquet")
    assert list(read_range(opened, Reading(), 1, opened.bytes)) == []  # told once, by whoever reads the start


def test_large_rows_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 documents of 8 MB together overflow 32-bit offsets, and memory."""
    monkeypatch.setattr(tables, "BYTES", 3000)
    column = pa.array([str(n) * 1000 for n in range(8)] + ["x"] * 400)
    pq.write_table(
        pa.table({"nested": [{"a": 1, "b": 2}] * 408, "text": column}), tmp_path / "a.parquet", row_group_size=8, use_dictionary=False
    )
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    assert tables.rows_at_once(metadata, [0], "text") in (1, 2)
    assert tables.rows_at_once(metadata, [5], "text") == tables.ROWS
    assert tables.rows_at_once(metadata, [0, 5], "text") in (1, 2)
    assert texts(tmp_path / "a.parquet") == column.to_pylist()


def test_parquet_without_rows_has_no_documents(tmp_path: Path) -> None:
    assert texts(write_parquet(tmp_path / "a.parquet", pa.array([], pa.string()))) == []


def paths(names: list[str]) -> list[str]:
    return [source.path for source in find_sources(names)[0]]


def test_sources_are_found_in_order_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("in/b.txt", "in/B.txt", "in/a/z.jsonl", "in/a/y.md", "in/.hidden/x.txt", "in/._a.jsonl", "other.txt", "in/config.json"):
        write(tmp_path / name, "x")
    (tmp_path / "link.txt").symlink_to("other.txt")
    monkeypatch.chdir(tmp_path)
    in_folder = ["in/B.txt", "in/a/z.jsonl", "in/b.txt"]
    assert paths(["in"]) == in_folder
    assert find_sources(["in"])[1] == 2
    assert paths(["other.txt", "in/", "link.txt", "./in/b.txt", "in"]) == ["other.txt", *in_folder]
    assert paths(["in/*.txt"]) == ["in/B.txt", "in/b.txt"]
    assert paths(["in/**/*.jsonl"]) == ["in/a/z.jsonl"]
    assert paths(["in/*"]) == ["in/B.txt", "in/a/z.jsonl", "in/b.txt"]
    write(tmp_path / "odd[1].txt", "x")
    assert paths(["odd[1].txt"]) == ["odd[1].txt"]
    write(tmp_path / "list", "in/b.txt\n\nin/a\n")
    assert paths(["@list", "other.txt"]) == ["in/b.txt", "in/a/z.jsonl", "other.txt"]
    assert find_sources(["in/a/y.md"], format=".txt")[0][0].format == ".txt"


def test_a_format_is_that_of_the_files_named_or_matched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("g1.txt", "g2.log", "vocab.json", "below/a.txt"):
        write(tmp_path / name, "{}")
    monkeypatch.chdir(tmp_path)
    by_hand, matched = (find_sources(names, format=".jsonl") for names in (["below", "g1.txt", "g2.log", "vocab.json"], ["*"]))
    assert by_hand == matched
    assert [source.format for source in matched[0]] == [".txt", ".jsonl", ".jsonl", ".jsonl"]
    with pytest.raises(CorpusError, match=r"--format jsonl: .* below/\*"):
        find_sources(["below"], format=".jsonl")


def test_standard_input_is_named_on_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="-: standard input"):
        find_sources([f"@{write(tmp_path / 'list', '-')}"])


def test_links_to_folders_are_followed_and_may_loop(tmp_path: Path) -> None:
    write(tmp_path / "in/sub/a.txt", "x")
    write(tmp_path / "elsewhere/名前 with spaces.txt", "x")
    (tmp_path / "in/sub/back").symlink_to(tmp_path / "in")
    (tmp_path / "in/other").symlink_to(tmp_path / "elsewhere")
    assert [Path(path).name for path in paths([str(tmp_path / "in")])] == ["名前 with spaces.txt", "a.txt"]
    (tmp_path / "in/dangling.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CorpusError, match=r"dangling\.txt: a link to a file that is not there"):
        paths([str(tmp_path / "in")])


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "in/a.txt", "x")
    write(tmp_path / "in/closed/b.txt", "x")
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)  # root may read everything
    with pytest.raises(CorpusError, match="in/closed: Permission denied"):
        paths([str(tmp_path / "in")])


def test_a_name_of_any_bytes_is_told_in_utf8(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/b\xff.txt"
    with open(path, "wb") as file:
        file.write(b"x")
    (found,), _ = find_sources([str(tmp_path)])
    assert found.path == f"{tmp_path}/b\\xff.txt"
    assert not found.changed()


@pytest.mark.parametrize("name", ["nowhere", "nowhere/*.txt", "only", "only/README.md", "*.xml", "empty", "a.parquet.gz", "@nowhere"])
def test_nothing_to_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write(tmp_path / "only/README.md", "x")
    write(tmp_path / "a.xml", "x")
    write(tmp_path / "a.parquet.gz", "x")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "good.txt", "x")
    with pytest.raises(CorpusError) as caught:
        find_sources(["good.txt", name])
    assert str(caught.value).startswith(f"{name}: ")


def test_a_source_that_has_changed_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "x")
    opened = source(path)
    assert not opened.changed()
    path.write_text("xy")
    assert opened.changed()
    path.unlink()
    assert opened.changed()


def test_the_hash_of_a_source_is_that_of_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK", 10)
    opened = source(write(tmp_path / "a.txt", "0123456789" * 3 + "x"))
    whole = list(sources.block_hashes(opened))
    assert len(whole) == 4
    assert whole[2:] == list(sources.block_hashes(opened, 20))
    assert whole[0] == whole[1] != whole[3]


def test_a_field_by_another_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"body": "b", "text": "t"}) + "\n")
    assert texts(path, text_field="body") == ["b"]
