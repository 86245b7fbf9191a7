"""Text to a prepared set: documents -> training or validation -> batches -> tokens -> shards -> manifest.

Empty documents and those of white space alone are skipped and counted; half a surrogate pair becomes U+FFFD and is counted;
exactly one end-of-text token follows each document. Validation takes a document by the hash of its text (`hash`): duplicates stay
together, and neither order nor other documents matter. Or it takes the last part of the text by characters (`tail`), cut inside a
document if need be, as nanoGPT's `data/shakespeare/prepare.py` does; the document that is cut counts in both splits.
"""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import importlib.metadata
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from pretrain import __version__, shards
from pretrain.documents import CorpusError as CorpusError  # what `prepare` raises
from pretrain.documents import find_sources, format_of, read
from pretrain.shards import MANIFEST, ShardError, ShardWriter, Tokens, sha256
from pretrain.tokenization import Encode, Tokenizer, TokenizerError, identify, load
from pretrain.workers import WorkerDied, cores, in_order

SPLITS = ("train", "val")
SKIPPED, REPAIRED = ("empty", "blank"), ("lone surrogate",)
LOCK = ".lock"
PACKAGES = ("numpy", "pyarrow", "tiktoken", "tokenizers")
BATCH_BYTES, BATCH_DOCUMENTS = 1 << 20, 8192
_SURROGATE = re.compile("[\ud800-\udfff]")

Row = Mapping[str, Any]  # a source in the manifest: path, bytes, sha256


@dataclass(frozen=True)
class Settings:
    """What decides the bytes of a set besides its sources."""

    tokenizer: str  # its identity
    val_fraction: float
    val_split: str
    text_field: str
    shard_tokens: int


class Document(NamedTuple):
    origin: str  # file and line, for messages
    split: str
    utf8: bytes


@dataclass
class Batch:
    """What a worker gets at a time. All its documents are of one split: its tokens need no lengths beside them."""

    split: str
    documents: list[Document] = field(default_factory=list)
    bytes: int = 0


def prepare(
    sources: Sequence[str],
    output: Path,
    tokenizer: str = "gpt2",
    val_fraction: float = 0.01,
    val_split: Literal["hash", "tail"] = "hash",
    workers: int | None = None,
    text_field: str = "text",
    overwrite: bool = False,
    shard_tokens: int = 100_000_000,
) -> tuple[dict[str, Any], bool]:
    """Make the set `output`. Returns its manifest, and whether it was there already, made of the same.

    `workers` (default: one per core) tokenise; the bytes don't depend on their number. Raises CorpusError.
    """
    if not 0 <= val_fraction < 1:
        raise CorpusError(f"--val-fraction {val_fraction}: expected a number from 0 to below 1")
    if workers is not None and workers < 1:
        raise CorpusError(f"--workers {workers}: expected 1 or more")
    try:
        settings = Settings(identify(tokenizer), val_fraction, val_split, text_field, shard_tokens)
        paths, ignored = find_sources(sources)
        rows = [{"path": str(path), "bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths]
        if not overwrite and (manifest := _reusable(output, settings, rows)):
            return manifest, True
        _refuse_foreign(output)
        with _locked(output):
            if not overwrite and (manifest := _reusable(output, settings, rows)):  # made while we waited
                return manifest, True
            with _building(output) as folder:
                manifest = _build(folder, rows, settings, tokenizer, workers or cores()) | {"ignored_files": ignored}
                shards.write_manifest(folder, manifest)
                _publish(folder, output)
        return manifest, False
    except (TokenizerError, ShardError) as error:
        raise CorpusError(str(error)) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise CorpusError(f"{error.filename or output}: {error.strerror or error}") from error
        free = shutil.disk_usage(next(place for place in (output, *output.absolute().parents) if place.exists())).free
        reason = f"no space left ({free:,} bytes free, now that what was written is removed)"
        raise CorpusError(f"{output}: {reason}; free some, or choose an --output on another disk") from error


def summary(manifest: Mapping[str, Any]) -> str:
    """The closing table of `pretrain prepare`."""
    documents = manifest["documents"]
    counts = {"documents read": documents["read"], "  kept": documents["kept"]}
    counts |= {f"  {verb}, {reason}": n for verb in ("skipped", "repaired") for reason, n in documents[verb].items()}
    counts |= {"files of other formats": manifest["ignored_files"]} if manifest["ignored_files"] else {}
    lines = [f"{label:<30}{n:>10,}" for label, n in counts.items()]
    lines += ["", f"{'split':<8}{'documents':>16}{'text bytes':>18}{'tokens':>18}{'bytes per token':>18}{'files':>8}"]
    for split, row in manifest["splits"].items():
        ratio = f"{row['bytes'] / row['tokens']:.3f}" if row["tokens"] else "-"
        cells = f"{row['documents']:>16,}{row['bytes']:>18,}{row['tokens']:>18,}{ratio:>18}{len(manifest['files'][split]):>8}"
        lines.append(f"{split:<8}{cells}")
    lines += ["", f"tokenizer {manifest['tokenizer']['name']}: {manifest['vocab_size']:,} ids, {manifest['dtype']}"]
    return "\n".join(lines)


def _reusable(output: Path, settings: Settings, rows: Sequence[Row]) -> dict[str, Any] | None:
    """The manifest of a set made of the same; None where there is no set. Raises CorpusError that says what differs."""
    manifest = shards.read_manifest(output)
    if manifest is None:
        return None
    now, before = dataclasses.asdict(settings), manifest["settings"]
    differences = [f"{key} was {before.get(key)}, now {now[key]}" for key in now if before.get(key) != now[key]]
    if [_content(row) for row in manifest["sources"]] != [_content(row) for row in rows]:
        differences += _changed(manifest["sources"], rows)
    if differences:
        reason = f"holds a set made of something else ({'; '.join(differences)})"
        raise CorpusError(f"{output} {reason}; add --overwrite to replace it, or choose another --output")
    for split, files in manifest["files"].items():
        if files:
            shards.open_split(output, split)  # raises where a file is missing or cut short
    return manifest


def _content(row: Row) -> tuple[str, str]:
    """A source counts by what is in it and how it is read, wherever it lies."""
    return format_of(Path(row["path"])), row["sha256"]


def _changed(before: Sequence[Row], now: Sequence[Row]) -> list[str]:
    old, new = ({row["path"]: row["sha256"] for row in rows} for rows in (before, now))
    found = [f"source {path} has changed" for path in new if path in old and old[path] != new[path]]
    found += [f"source {path} is new" for path in new if path not in old]
    found += [f"source {path} is gone" for path in old if path not in new]
    return found[:3] + [f"and {len(found) - 3} more"] * (len(found) > 3) or ["the sources come in another order"]


def _refuse_foreign(output: Path) -> None:
    """Only a set, finished or begun, may be replaced. Looking in this order never refuses one that appears meanwhile."""
    if _holds_files(output) and not (output / LOCK).exists() and not (output / MANIFEST).exists():
        raise CorpusError(f"{output} holds files that are no prepared set; choose another --output")


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Be the only one to prepare `output`; wait for another. The system frees the lock of a process that died."""
    path = output / LOCK
    while True:
        output.mkdir(parents=True, exist_ok=True)
        with open(path, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another preparation of {output} to end", file=sys.stderr, flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists() or not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                continue  # the owner before us has removed its file: others would lock a new one
            try:
                yield
            finally:
                # Files without a manifest keep their lock: it marks them as unfinished.
                if (output / MANIFEST).exists() or not _holds_files(output):
                    path.unlink()
            return


def _holds_files(output: Path) -> bool:
    return output.is_dir() and any(not path.name.startswith(".") for path in output.iterdir())


@contextlib.contextmanager
def _building(output: Path) -> Iterator[Path]:
    """A hidden folder to write in: the set appears when it is complete, and an old one stays until then."""
    folder = output / ".building"
    shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, output: Path) -> None:
    """Put the files of `folder` in the place of the old ones. At no moment does a manifest stand beside files not its own."""
    (output / MANIFEST).unlink(missing_ok=True)
    for old in (old for split in SPLITS for old in output.glob(f"{split}_*.bin")):
        old.unlink()
    shutil.rmtree(output / "tokenizer", ignore_errors=True)
    for new in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST):
        new.rename(output / new.name)


def _build(folder: Path, rows: Sequence[Row], settings: Settings, name: str, workers: int) -> dict[str, Any]:
    """Write the tokenizer `name` and the shards into `folder`. Returns the manifest."""
    paths, counts = [Path(row["path"]) for row in rows], Counter[str]()
    cut = _cut(paths, settings)
    training = (d.utf8.decode() for d in _documents(paths, settings, cut, Counter()) if d.split == "train")
    tokenizer = load(name, training)
    tokenizer.save(folder / "tokenizer")
    dtype = shards.token_dtype(tokenizer.vocab_size)
    writers = {split: ShardWriter(folder, split, dtype, settings.shard_tokens) for split in SPLITS}
    splits = {split: {"documents": 0, "tokens": 0, "bytes": 0} for split in SPLITS}
    documents = _documents(paths, settings, cut, counts)
    with contextlib.closing(_encoded(documents, Encoder(tokenizer, dtype), workers)) as encoded:
        for batch, tokens in encoded:
            writers[batch.split].append(tokens)
            for key, n in (("documents", len(batch.documents)), ("tokens", len(tokens)), ("bytes", batch.bytes)):
                splits[batch.split][key] += n
    kept = counts["read"] - sum(counts[reason] for reason in SKIPPED)
    _refuse_empty(splits, kept, settings)
    for path, row in zip(paths, rows, strict=True):
        if sha256(path) != row["sha256"]:
            raise CorpusError(f"{path} changed while it was being read; run the same command again")
    files = {split: writer.close() for split, writer in writers.items()}
    skipped, repaired = ({key: counts[key] for key in keys if counts[key]} for keys in (SKIPPED, REPAIRED))
    return {
        "format_version": shards.FORMAT_VERSION,
        "fingerprint": shards.fingerprint(files),
        "tokenizer": tokenizer.identity(),
        "eos_id": tokenizer.eos_id,
        "vocab_size": tokenizer.vocab_size,
        "dtype": dtype.name,
        "settings": dataclasses.asdict(settings),
        "documents": {"read": counts["read"], "kept": kept, "skipped": skipped, "repaired": repaired},
        "splits": splits,
        "files": files,
        "sources": rows,
        "versions": {"pretrain": __version__} | {package: importlib.metadata.version(package) for package in PACKAGES},
    }


def _refuse_empty(splits: Mapping[str, Mapping[str, int]], kept: int, settings: Settings) -> None:
    if not kept:
        raise CorpusError("the sources hold no text: every document is empty or blank")
    cures = {"train": "a smaller --val-fraction", "val": "a larger --val-fraction, or --val-fraction 0 for none"}
    for split, cure in cures.items():
        if not splits[split]["documents"] and (split == "train" or settings.val_fraction):
            held = f"{kept:,} documents, --val-fraction {settings.val_fraction}, --val-split {settings.val_split}"
            raise CorpusError(f"the {split} split would be empty ({held}); write --val-split tail, {cure}")


def _documents(paths: Iterable[Path], settings: Settings, cut: int | None, counts: Counter[str]) -> Iterator[Document]:
    """Each document to train or validate on; with `cut`, the characters before it are for training."""
    before = 0
    for origin, utf8 in _kept(paths, settings.text_field, counts):
        if cut is None:
            drawn = int.from_bytes(hashlib.blake2b(utf8, digest_size=8).digest()) / 2**64
            yield Document(origin, "val" if drawn < settings.val_fraction else "train", utf8)
        else:
            text = utf8.decode()
            at = min(max(cut - before, 0), len(text))
            before += len(text)
            parts = zip(SPLITS, (text[:at], text[at:]), strict=True)
            yield from (Document(origin, split, part.encode()) for split, part in parts if part)


def _cut(paths: Iterable[Path], settings: Settings) -> int | None:
    """Where validation begins with `--val-split tail`, in characters, by nanoGPT's rule. Costs a pass over the text."""
    if settings.val_split == "hash" or not settings.val_fraction:
        return None
    characters = sum(len(utf8.decode()) for _, utf8 in _kept(paths, settings.text_field, Counter()))
    return int(characters * (1 - settings.val_fraction))


def _kept(paths: Iterable[Path], text_field: str, counts: Counter[str]) -> Iterator[tuple[str, bytes]]:
    for path in paths:
        for origin, text in read(path, text_field):
            counts["read"] += 1
            if not text or text.isspace():
                counts["blank" if text else "empty"] += 1
                continue
            try:
                utf8 = text.encode()
            except UnicodeEncodeError:
                counts["lone surrogate"] += 1
                utf8 = _SURROGATE.sub("\ufffd", text).encode()
            yield origin, utf8


def _batches(documents: Iterable[Document]) -> Iterator[Batch]:
    """About a megabyte each, or one document that is larger. Within a split the order stays."""
    filling: dict[str, Batch] = {}
    for document in documents:
        batch = filling.setdefault(document.split, Batch(document.split))
        batch.documents.append(document)
        batch.bytes += len(document.utf8)
        if batch.bytes >= BATCH_BYTES or len(batch.documents) == BATCH_DOCUMENTS:
            yield filling.pop(document.split)
    yield from filling.values()


@dataclass(frozen=True)
class Encoder:
    """Goes to the workers by pickle and makes its tokenizer there."""

    tokenizer: Tokenizer
    dtype: np.dtype[Any]

    @functools.cached_property
    def encode(self) -> Encode:
        return self.tokenizer.encoder(self.dtype)

    def __call__(self, batch: Batch) -> Tokens:
        end = np.array([self.tokenizer.eos_id], self.dtype)
        return np.concatenate([part for document in batch.documents for part in (self._tokens(document), end)])

    def _tokens(self, document: Document) -> Tokens:
        try:
            return self.encode(document.utf8)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in a tokenizer's Rust is no Exception
            reason = " ".join(str(error).split())[:200]
            raise CorpusError(f"{document.origin}: the tokenizer failed ({reason}); take this document out") from error


def _encoded(documents: Iterable[Document], encoder: Encoder, workers: int) -> Generator[tuple[Batch, Tokens]]:
    from tqdm import tqdm

    with tqdm(desc="text", unit="B", unit_scale=True, disable=None) as bar:  # None: only on a terminal
        try:
            for batch, tokens in in_order(encoder, _batches(documents), workers):
                yield batch, tokens
                bar.update(batch.bytes)
        except WorkerDied as error:
            first, last = error.item.documents[0].origin, error.item.documents[-1].origin
            raise CorpusError(f"{error} at {first} to {last}; if memory ran out, use fewer --workers") from None
