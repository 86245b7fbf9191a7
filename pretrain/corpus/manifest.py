"""The manifest of a set: what it was made of, what became of each document, and whether a set is made of the same."""

import codecs
import contextlib
import dataclasses
import difflib
import importlib.metadata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pretrain import shards
from pretrain.corpus import formats
from pretrain.corpus.assemble import Assembled
from pretrain.corpus.documents import Reading
from pretrain.corpus.sources import CorpusError, Source, block_hashes, joined
from pretrain.corpus.tokenise import EXAMPLES

REPAIRED = "lone surrogate"
PACKAGES = ("numpy", "pyarrow", "tiktoken", "tokenizers")

Row = Mapping[str, Any]  # a source in the manifest: path, bytes, hash, format


@dataclass(frozen=True)
class Settings:
    """What decides the bytes of a set besides its sources."""

    tokenizer: str = "gpt2"  # at last its identity
    val_fraction: float = 0.01
    val_split: Literal["hash", "tail"] = "hash"
    text_field: str = "text"
    shard_tokens: int = 100_000_000
    encoding: str = "utf-8"
    documents: str = "file"
    on_bad: Literal["stop", "skip"] = "stop"
    deduplicate: bool = False

    def __post_init__(self) -> None:
        with contextlib.suppress(LookupError):  # `check` says it
            object.__setattr__(self, "encoding", codecs.lookup(self.encoding).name)  # one name, whether it was written utf8 or UTF-8

    @property
    def reading(self) -> Reading:
        return Reading(self.text_field, self.encoding, self.documents)

    def check(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise CorpusError(f"--val-fraction {self.val_fraction}: expected a number from 0 to below 1")
        try:
            "a".encode(self.encoding)
        except (LookupError, UnicodeError):
            raise CorpusError(f"--encoding {self.encoding}: no such encoding; for example utf-8, latin-1, cp1252, utf-16") from None
        modes = ("file", "line", "blank-line")
        if self.documents not in modes and (near := difflib.get_close_matches(self.documents.lower(), modes, 1, 0.8)):
            raise CorpusError(f"--documents {self.documents}: did you mean {near[0]}?")
        try:
            if self.documents not in modes and not self.reading.separator:
                raise CorpusError(
                    "--documents: the separator is empty; write file, line, blank-line, or a text that stands between documents"
                )
        except UnicodeError:
            raise CorpusError(f"--documents {self.documents!r}: not a separator in {self.encoding}") from None


def summary(manifest: Mapping[str, Any]) -> str:
    """The closing table of `pretrain prepare`."""
    documents = manifest["documents"]
    counts = {"documents read": documents["read"], "  kept": documents["kept"]}
    counts |= {f"  {verb}, {reason}": n for verb in ("skipped", "repaired") for reason, n in documents[verb].items()}
    counts |= {"duplicates among them": documents["duplicates"]} if documents["duplicates"] else {}
    counts |= {"files of other formats": manifest["ignored_files"]} if manifest["ignored_files"] else {}
    lines = [f"{label:<30}{n:>10,}" for label, n in counts.items()]
    lines += ["", f"{'split':<8}{'documents':>16}{'text bytes':>18}{'tokens':>18}{'bytes per token':>18}{'files':>8}"]
    for split, row in manifest["splits"].items():
        ratio = f"{row['bytes'] / row['tokens']:.3f}" if row["tokens"] else "-"
        cells = f"{row['documents']:>16,}{row['bytes']:>18,}{row['tokens']:>18,}{ratio:>18}{len(manifest['files'][split]):>8}"
        lines.append(f"{split:<8}{cells}")
    examples = {reason: places for reason, places in documents["examples"].items() if reason not in ("empty", "blank")}
    lines += [""] * bool(examples) + [f"{reason}: {', '.join(places)}" for reason, places in examples.items()]
    lines += ["", f"tokenizer {manifest['tokenizer']['name']}: {manifest['vocab_size']:,} ids, {manifest['dtype']}"]
    return "\n".join(lines)


def reusable(output: Path, settings: Settings, sources: Sequence[Source]) -> dict[str, Any] | None:
    """The manifest of a set made of the same; None where there is no set. Raises CorpusError that says what differs."""
    manifest = shards.read_manifest(output)
    if manifest is None:
        return None
    now, before = dataclasses.asdict(settings), manifest["settings"]
    differences = [f"{key} was {before.get(key)}, now {now[key]}" for key in now if before.get(key) != now[key]]
    rows = [_row(source, list(block_hashes(source))) for source in sources]
    if [_content(row) for row in manifest["sources"]] != [_content(row) for row in rows]:
        differences += _changed(manifest["sources"], rows)
    if differences:
        reason = f"holds a set made of something else ({'; '.join(differences)})"
        raise CorpusError(f"{output} {reason}; add --overwrite to replace it, or choose another --output")
    for split, files in manifest["files"].items():
        if files:
            shards.open_split(output, split)  # raises where a file is missing or cut short
    return manifest


def _row(source: Source, hashes: Sequence[str]) -> Row:
    return {"path": source.path, "bytes": source.bytes, "hash": joined(hashes), "format": source.format + source.compression}


def _content(row: Row) -> tuple[Any, ...]:
    """A source counts by what is in it and how it is read, wherever it lies."""
    return row.get("format"), row.get("hash")


def _changed(before: Sequence[Row], now: Sequence[Row]) -> list[str]:
    old, new = ({row["path"]: _content(row) for row in rows} for rows in (before, now))
    found = [f"source {path} has changed" for path in new if path in old and old[path] != new[path]]
    found += [f"source {path} is new" for path in new if path not in old]
    found += [f"source {path} is gone" for path in old if path not in new]
    return found[:3] + [f"and {len(found) - 3} more"] * (len(found) > 3) or ["the sources come in another order"]


def manifest_of(plan: Mapping[str, Any], results: Sequence[Mapping[str, Any]], assembled: Assembled) -> dict[str, Any]:
    """From what the workers tell in `results`. Raises CorpusError where a split would be empty."""
    settings, sources = Settings(**plan["settings"]), sources_of(plan)
    counts: Counter[str] = sum((Counter(result["counts"]) for result in results), Counter())
    read, repaired = counts.pop("read", 0), counts.pop(REPAIRED, 0)
    skipped = dict(sorted(counts.items())) | ({"duplicate": assembled.duplicates} if settings.deduplicate and assembled.duplicates else {})
    kept = read - sum(skipped.values())
    _refuse_empty(assembled.splits, kept, settings)
    return {
        "format_version": shards.FORMAT_VERSION,
        "fingerprint": shards.fingerprint(assembled.files),
        "tokenizer": plan["tokenizer"],
        "eos_id": plan["eos_id"],
        "vocab_size": plan["vocab_size"],
        "dtype": shards.token_dtype(plan["vocab_size"]).name,
        "settings": plan["settings"],
        "documents": {
            "read": read,
            "kept": kept,
            "skipped": skipped,
            "repaired": {REPAIRED: repaired} if repaired else {},
            "duplicates": 0 if settings.deduplicate else assembled.duplicates,
            "examples": _examples(results, sources),
        },
        "splits": assembled.splits,
        "files": assembled.files,
        "sources": _rows(results, sources),
        "ignored_files": plan["ignored_files"],
        "versions": {"pretrain": plan["version"]} | {package: importlib.metadata.version(package) for package in PACKAGES},
    }


def sources_of(plan: Mapping[str, Any]) -> list[Source]:
    return [Source(**source) for source in plan["sources"]]


def _examples(results: Sequence[Mapping[str, Any]], sources: Sequence[Source]) -> dict[str, list[str]]:
    """The first places of each reason."""
    first: dict[str, list[str]] = {}
    for result in results:
        for reason, places in result["examples"].items():
            known = first.setdefault(reason, [])
            known += [formats.locate(sources[source], place) for source, place in places[: EXAMPLES - len(known)]]
    return dict(sorted(first.items()))


def _rows(results: Sequence[Mapping[str, Any]], sources: Sequence[Source]) -> list[Row]:
    """The sources for the manifest, by the hashes of what was read."""
    found: list[dict[int, list[str]]] = [{} for _ in sources]  # first block -> hashes
    for result in results:
        for source, block, hashes in result["blocks"]:
            found[source][block] = hashes
    return [_row(source, [h for block in sorted(blocks) for h in blocks[block]]) for source, blocks in zip(sources, found, strict=True)]


def _refuse_empty(splits: Mapping[str, Mapping[str, int]], kept: int, settings: Settings) -> None:
    if not kept:
        raise CorpusError("the sources hold no text: every document is empty or blank, or was skipped")
    cures = {"train": "a smaller --val-fraction", "val": "a larger --val-fraction, or --val-fraction 0 for none"}
    for split, cure in cures.items():
        if not splits[split]["documents"] and (split == "train" or settings.val_fraction):
            held = f"{kept:,} documents, --val-fraction {settings.val_fraction}, --val-split {settings.val_split}"
            raise CorpusError(f"the {split} split would be empty ({held}); write --val-split tail, {cure}")
