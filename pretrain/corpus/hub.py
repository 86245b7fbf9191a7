"""Datasets of Hugging Face: by name on the hub, of a local folder, or saved to disk. The only importer of `datasets`.

A dataset that is loaded has rows that can be counted, shared between parts and read from the middle; a streamed one is read from its
start. Its identity is what `datasets` takes for it: loaded, a fingerprint of the files and of all that was done to them; streamed, what
tells one state of a file from another without reading it, which is its time, its ETag, or the hub's commit.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pretrain.corpus.documents import Bad, Found, Reading
from pretrain.corpus.sources import DATASET, CorpusError, Source
from pretrain.corpus.tables import ROWS, rows_of


@dataclass(frozen=True)
class DatasetName:
    """What `datasets.load_dataset` is asked for."""

    path: str
    config: str | None = None
    split: str = "train"
    streaming: bool = False


def open_dataset(name: DatasetName) -> Source:
    """Raises CorpusError where there is no such dataset, configuration or split."""
    found = _load(name)
    size = 0 if name.streaming else max(1, found.data.nbytes)
    told = "/".join(part for part in (f"dataset:{name.path}", name.config, name.split) if part)
    identity = _state(name) if name.streaming else found._fingerprint
    return Source(told, json.dumps(asdict(name)), DATASET, "", size, 0, identity, 0 if name.streaming else len(found))


def read_dataset(source: Source, reading: Reading, start: int = 0, stop: int | None = None) -> Iterator[Found]:
    """Of the rows [start, stop), or all."""
    name = DatasetName(**json.loads(source.file))
    rows = _load(name)
    names = rows.column_names
    field = reading.text_field
    if names and field not in names:
        yield Bad("", f"no {field}", f"no column {field!r} (found: {', '.join(names)}); choose one with --text-field")
        return
    if stop is not None:
        rows = rows.select(range(start, stop))
    before = start
    with _told(name):  # a streamed dataset has its faults only now
        for batch in rows.select_columns([field]).iter(ROWS):
            yield from rows_of(batch[field], before, reading)
            before += len(batch[field])


@contextlib.contextmanager
def _told(name: DatasetName) -> Iterator[None]:
    """What `datasets` raises, as one line for the user."""
    try:
        yield
    except CorpusError:
        raise
    except Exception as error:  # of the hub, of the file system, of each format: a dozen classes, over several lines
        reason = " ".join(str(error).split())[:300]
        raise CorpusError(f"--dataset {name.path}: {reason}") from error


def _state(name: DatasetName) -> str:
    """Of a dataset that is streamed."""
    import datasets

    with _told(name):
        if _is_saved(name):
            return str(_load(replace(name, streaming=False))._fingerprint)
        builder = datasets.load_dataset_builder(name.path, name.config)
        files = (builder.config.data_files or {}).get(name.split, [])
        known = sorted(zip((Path(file).name for file in files), map(str, getattr(files, "origin_metadata", ())), strict=True))
        return str((asdict(name), builder.hash, known))


def _is_saved(name: DatasetName) -> bool:
    """By `save_to_disk`."""
    return any((Path(name.path) / file).exists() for file in ("state.json", "dataset_dict.json"))


@lru_cache(1)
def _load(name: DatasetName) -> Any:
    import datasets

    datasets.disable_progress_bars()
    with _told(name):
        if _is_saved(name):
            found: Any = datasets.load_from_disk(name.path)
            splits = found if isinstance(found, dict) else {str(found.split or "train"): found, "train": found}
            if name.split not in splits:
                raise CorpusError(f"--dataset {name.path}: no split {name.split!r}; it has {', '.join(splits)}: choose one with --split")
            found = splits[name.split]
            return found.to_iterable_dataset() if name.streaming else found
        return datasets.load_dataset(name.path, name.config, split=name.split, streaming=name.streaming)
