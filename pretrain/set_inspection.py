"""`pretrain inspect` of a set of tokens, prepared or bare: what is in it, and whether it is whole. Changes no file of the set."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain import histogram, shards, token_bytes
from pretrain.set_contents import Contents, Documents, Found, check_ids, find, scan
from pretrain.shards import TokenStream
from pretrain.token_bytes import TokenBytes
from pretrain.token_files import Int64s, ShardError, datatrove_tokenizer

_COLUMNS = histogram.WIDTH - 4
_SAMPLE_LINES = 5
_RULE = "  ├─ a document ends here "
_GPT2 = (50256, 50257)  # end of text, vocabulary


@dataclass(frozen=True)
class TokenSet:
    """An opened set and what is known of its ids."""

    path: Path
    streams: Mapping[str, TokenStream]
    manifest: Mapping[str, Any] | None
    table: TokenBytes | None  # None where there is no tokenizer
    tokenizer: str  # a line on it
    eos_id: int | None
    vocab_size: int | None  # None: not known, or assumed

    def documents(self, split: str) -> Documents:
        return Documents(self.streams[split], self.eos_id)


def open_set(path: Path, tokenizer: str | None) -> TokenSet:
    """`tokenizer` is for sets that do not bring their own. Raises ShardError or TokenizerError."""
    manifest = shards.read_manifest(path)
    names = shards.splits(path)
    if not names:
        raise ShardError(f"{path} holds no tokens: no {shards.MANIFEST}, and no .bin, .npy or .ds")
    streams = {split: shards.open_split(path, split) for split in names}
    if tokenizer is not None:
        table = token_bytes.load(tokenizer)
        return TokenSet(path, streams, manifest, table, f"{tokenizer}, as asked", table.eos_id, table.vocab_size)
    if manifest is not None:
        found, name = token_bytes.of_set(path, manifest), manifest["tokenizer"]["name"]
        line = name if found else f"{name}, whose folder {path / 'tokenizer'} is gone: ids instead of text"
        return TokenSet(path, streams, manifest, found, line, manifest["eos_id"], manifest["vocab_size"])
    first = streams[names[0]].shards[0]
    named = datatrove_tokenizer(first)
    if named not in (None, "gpt2", "openai-community/gpt2"):
        return TokenSet(path, streams, None, None, f"{named}; for text instead of ids name it with --tokenizer", None, None)
    if first.format == "nanoGPT" and (meta := first.path.with_name("meta.pkl")).exists():
        return TokenSet(path, streams, None, None, f"a vocabulary of its own in {meta}, which is not unpickled", None, None)
    table = token_bytes.load("gpt2")
    if named:
        return TokenSet(path, streams, None, table, "gpt2", *_GPT2)
    return TokenSet(path, streams, None, table, "gpt2 (assumed: a bare set names none, and its ids fit)", table.eos_id, None)


def overview(path: Path, tokenizer: str | None, T: int, limit: int | None, verify: bool, plot: Path | None) -> Iterator[str]:
    """The splits, their documents and tokens, and samples. `limit`: how many tokens of a split to look at (None: all).

    Raises ShardError where `verify` finds a file that has changed, or an id is outside the vocabulary.
    """
    if plot is not None and plot.suffix != ".png":
        raise ShardError(f"--plot {plot}: expected a name that ends in .png")
    found = open_set(path, tokenizer)
    contents = {split: scan(s, found.documents(split), found.vocab_size, limit or s.tokens) for split, s in found.streams.items()}
    found, contents = _without_wrong_guess(found, contents)
    yield from _facts(found)
    yield from _table(found, contents)
    if verify:
        yield from _verified(found)
    for split, inside in contents.items():
        if inside.tokens < found.streams[split].tokens:
            yield f"({split}: the first {inside.tokens:,} of {found.streams[split].tokens:,} tokens; --limit 0 for all)"
    for split, inside in contents.items():
        yield from _lengths(found, split, inside)
    split = next(iter(contents))
    yield from _frequent(found, split, contents[split])
    for n in _windows_to_show(found, split, T):
        yield from _sample(found, split, n, T)
    if plot is not None:
        drawn = {split: inside.lengths for split, inside in contents.items() if inside.documents}
        if not drawn:
            raise ShardError(f"{path}: nothing marks its documents, so there are no lengths to draw")
        plot.parent.mkdir(parents=True, exist_ok=True)
        histogram.draw(drawn, str(path), plot)
        yield from ("", str(plot))


def window(path: Path, tokenizer: str | None, split: str | None, n: int, T: int) -> Iterator[str]:
    """Window `n` of a split, whole. Raises ShardError where there is no such window."""
    found = open_set(path, tokenizer)
    split = _chosen(found, split)[0]
    windows = found.streams[split].windows(T)
    if not 0 <= n < windows:
        raise ShardError(f"{found.streams[split].name} has {windows:,} windows of {T:,} tokens, numbered from 0; there is no {n:,}")
    yield _heading(split, n, T)
    yield from _text(found, split, n * T, (n + 1) * T)


def occurrences(path: Path, tokenizer: str | None, split: str | None, text: str, T: int, limit: int | None) -> Iterator[str]:
    """Where `text` is. Raises ShardError where the set has no tokenizer."""
    found = open_set(path, tokenizer)
    if found.table is None:
        raise ShardError(f"{path}: no text without a tokenizer; name one with --tokenizer (gpt2, byte, a folder, or a Hub name)")
    if not text:
        raise ShardError("--find: expected some text")
    for name in _chosen(found, split):
        stream = found.streams[name]
        looked_at = min(limit or stream.tokens, stream.tokens)
        hits = find(stream, found.table, text.encode(), looked_at)
        part = "" if looked_at == stream.tokens else f" in the first {looked_at:,} of {stream.tokens:,} tokens (--limit 0 for all)"
        yield f"{name}: {hits.count:,} × {text!r}{part}" + (f", the first {len(hits.first)}:" if hits.count > len(hits.first) else "")
        yield from _hits(found, name, hits, text, T)


def _chosen(found: TokenSet, split: str | None) -> list[str]:
    if split is None or list(found.streams) == ["all"]:
        return list(found.streams)
    if split not in found.streams:
        raise ShardError(f"{found.path} has no {split} split; it has {', '.join(found.streams)}")
    return [split]


def _without_wrong_guess(found: TokenSet, contents: dict[str, Contents]) -> tuple[TokenSet, dict[str, Contents]]:
    """GPT-2's tokenizer is not assumed where an id is not of it."""
    largest = max((len(inside.counts) - 1 for inside in contents.values()), default=0)
    if found.manifest is not None or found.vocab_size is not None or found.table is None or largest < found.table.vocab_size:
        return found, contents
    line = f"unknown: ids go up to {largest:,}, above gpt2's; name it with --tokenizer"
    for split, inside in contents.items():
        if not found.documents(split).index:
            inside.lengths.clear()
    return TokenSet(found.path, found.streams, None, None, line, None, None), contents


def _facts(found: TokenSet) -> Iterator[str]:
    manifest = found.manifest
    formats = ", ".join(sorted({stream.format for stream in found.streams.values()}))
    yield f"{found.path}: {f'bare files in the format of {formats}' if manifest is None else 'a prepared set'}"
    ids = f", {found.vocab_size:,} ids, end of text {found.eos_id}" if found.vocab_size else ""
    yield f"tokenizer   {found.tokenizer}{ids}"
    if manifest is not None:
        documents = manifest["documents"]
        skipped = ", ".join(f"{n:,} {reason}" for reason, n in documents["skipped"].items()) or "none"
        yield f"documents   {documents['read']:,} read, {documents['kept']:,} kept, skipped: {skipped}"
        yield f"fingerprint {manifest['fingerprint']}"


def _table(found: TokenSet, contents: Mapping[str, Contents]) -> Iterator[str]:
    yield ""
    yield f"{'split':<8}{'tokens':>16}{'files':>8}{'type':>9}{'documents':>14}{'bytes per token':>18}"
    for split, stream in found.streams.items():
        inside, ratio = contents[split], "–"
        if found.table is not None and inside.tokens:
            ratio = f"{int(found.table.lengths[: len(inside.counts)] @ inside.counts) / inside.tokens:.3f}"
        documents = f"{inside.documents:,}" if inside.documents and inside.tokens == stream.tokens else "–"
        kind = stream.shards[0].dtype.name
        yield f"{split:<8}{stream.tokens:>16,}{len(stream.shards):>8,}{kind:>9}{documents:>14}{ratio:>18}"
    if "val" not in found.streams and "all" not in found.streams:
        yield "val     none"


def _verified(found: TokenSet) -> Iterator[str]:
    if found.manifest is None:
        yield "verified: sizes agree with the files' own headers; no manifest holds hashes"
        return
    for split in found.streams:
        for file in found.manifest["files"][split]:
            if shards.sha256(found.path / file["name"]) != file["sha256"]:
                raise ShardError(f"{found.path / file['name']} has changed since it was prepared; copy it again or prepare the set again")
    yield "verified: every byte as prepared"


def _lengths(found: TokenSet, split: str, inside: Contents) -> Iterator[str]:
    """The end of text counts as a token of its document."""
    yield ""
    documents = found.documents(split)
    if not documents.marked:
        yield f"{split}: nothing marks the ends of documents"
        return
    if not documents.index and not inside.counts[documents.eos_id :][:1].any():
        yield f"{split}: no end of text ({documents.eos_id}): one document, or another tokenizer's tokens"
        return
    if not inside.documents:
        yield f"{split}: no document ends in what was looked at"
        return
    shortest, median, longest = (inside.length_at(share) for share in (0.0, 0.5, 1.0))
    mean = sum(length * n for length, n in inside.lengths.items()) / inside.documents
    yield f"{split}: documents of {shortest:,} to {longest:,} tokens, median {median:,}, mean {mean:,.1f}"
    yield from histogram.lines(inside.lengths)


def _frequent(found: TokenSet, split: str, inside: Contents) -> Iterator[str]:
    used = int(np.count_nonzero(inside.counts))
    yield ""
    of = f" of {found.vocab_size:,}" if found.vocab_size else ""
    yield f"{split}: {used:,}{of} ids occur, most often"
    top = np.argsort(-inside.counts, kind="stable")[: min(12, used)]
    cells = [f"{id_:>7}  {_named(found, int(id_)):<11}{inside.counts[id_] / inside.tokens:>6.2%}" for id_ in top]
    for row in range(0, len(cells), 3):
        yield " ".join(cells[row : row + 3])


def _named(found: TokenSet, id_: int) -> str:
    if id_ == found.eos_id:
        return "(end)"
    text = "" if found.table is None else repr(found.table.pieces[id_].decode("utf-8", "backslashreplace"))
    return text if len(text) <= 10 else f"{text[:8]}…{text[-1]}"


def _heading(split: str, n: int, T: int) -> str:
    return f"{split}, window {n:,} of {T:,} tokens: {n * T:,} to {(n + 1) * T - 1:,}"


def _windows_to_show(found: TokenSet, split: str, T: int) -> list[int]:
    """The first, and one from the middle on in which a document ends, if there is one not far."""
    windows = found.streams[split].windows(T)
    if not windows:
        return []
    middle = windows // 2
    ends = found.documents(split).ends(middle * T, min((middle + 1000) * T, windows * T))
    return sorted({0, int(ends[0] - 1) // T if len(ends) else middle})


def _sample(found: TokenSet, split: str, n: int, T: int) -> Iterator[str]:
    """A few lines of a window, with the end of a document if it has one."""
    yield ""
    yield _heading(split, n, T)
    lines = list(_text(found, split, n * T, (n + 1) * T))
    rule = next((at for at, line in enumerate(lines) if line.startswith(_RULE)), 0)
    first = min(max(0, rule - 2), max(0, len(lines) - _SAMPLE_LINES))
    if first:
        yield "  …"
    yield from lines[first : first + _SAMPLE_LINES]
    if len(lines) > _SAMPLE_LINES:
        options = (f" --split {split}" if split != "all" else "") + (f" --sequence-length {T}" if T != 1024 else "")
        yield f"  … whole: pretrain inspect {found.path}{options} --window {n}"


def _text(found: TokenSet, split: str, start: int, stop: int) -> Iterator[str]:
    """Tokens [start, stop) in lines of the terminal's width, with a rule where one document ends and the next begins."""
    for k, part in enumerate(_parts(found, split, start, stop)):
        if k:
            yield f"{_RULE:─<{_COLUMNS + 4}}"
        for line in part.split("\n"):
            yield from (f"  │ {row}" for row in textwrap.wrap(line, _COLUMNS, drop_whitespace=False) or [""])


def _parts(found: TokenSet, split: str, start: int, stop: int) -> list[str]:
    """The text of tokens [start, stop), cut where documents end."""
    stream = found.streams[split]
    tokens = stream.read(start, stop - start)
    if found.table is not None and len(tokens):
        check_ids(stream, start, tokens, found.table.vocab_size)
    borders = sorted({int(end) - start for end in found.documents(split).ends(start, stop)} - {0})
    return [_readable(found.table, part) for part in np.split(tokens, borders)]


def _readable(table: TokenBytes | None, tokens: Int64s) -> str:
    """The text of tokens, or their ids; what a terminal would obey is written out."""
    if table is None:
        return " ".join(map(str, tokens.tolist()))
    text = table.decode(tokens).decode("utf-8", "replace").expandtabs(4)
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def _hits(found: TokenSet, split: str, hits: Found, text: str, T: int) -> Iterator[str]:
    stream, documents = found.streams[split], found.documents(split)
    numbers = documents.numbers(hits.first)
    for token, number in zip(hits.first, numbers, strict=True):
        document = f"  document {number:,}" if documents.marked else ""
        place = f"window {token // T:,}" if token < stream.windows(T) * T else "after the last window"
        yield f"  token {token:,}{document}  {place}"
        before, after = (
            " ‖ ".join(_parts(found, split, max(0, token - 8), token)),
            _parts(found, split, token, min(stream.tokens, token + 32))[0],
        )
        yield f"  │ {before[-24:]}{after}".replace("\n", "⏎")[: _COLUMNS + 4]
