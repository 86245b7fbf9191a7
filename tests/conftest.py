"""Shared fixtures: prepared sets and configs, both tiny and made in code. Nothing here needs a network."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from group import Ranks

from pretrain import shards

if TYPE_CHECKING:
    from forked import Forks

os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="offline", WANDB_SILENT="true", TOKENIZERS_PARALLELISM="false")

# Two blocks of width 32 on windows of 16 tokens, eight windows per update.
TINY: Mapping[str, Mapping[str, Any]] = {
    "run": {"seed": 1, "precision": "fp32", "device": "cpu"},
    "data": {"sequence_length": 16},
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 32},
    "batch": {"tokens": 128, "micro": 2},
    "optim": {"lr": 1e-2},
    "train": {"max_steps": 6, "log_every": 1, "eval_every": 0, "compile": "off", "hang_timeout": 0},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that launch come first: the longest ones, of which none should be left for one process at the end."""
    items.sort(key=lambda item: item.get_closest_marker("launch") is None)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 5 MB."""
    place = tmp_path / "small disk"
    place.mkdir()
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("needs root and mount, to make a small file system")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mount -t tmpfs: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four processes, for as long as the tests run."""
    started = Ranks(4)
    yield started
    started.close()


@pytest.fixture(scope="session")
def forks() -> "Iterator[Forks]":
    """Starts runs whose ranks are forks of a process that has imported everything."""
    from forked import Forks

    started = Forks()
    yield started
    started.close()


@pytest.fixture
def make_set(tmp_path: Path) -> Callable[..., Path]:
    """make_set(name, train, val=(), …): a prepared set under tmp_path, of these token ids, as `pretrain prepare` lays it out."""

    def make(name: str, train: Sequence[int] | np.ndarray, val: Sequence[int] | np.ndarray = (), *, vocab_size: int = 50,
             eos_id: int = 0, shard_tokens: int = 10**8, bytes_per_token: float = 2.0, tokenizer: str = "toy") -> Path:  # fmt: skip
        folder = tmp_path / name
        folder.mkdir()
        dtype = shards.token_dtype(vocab_size)
        files, splits = {}, {}
        for split, tokens in (("train", train), ("val", val)):
            writer = shards.ShardWriter(folder, split, dtype, shard_tokens)
            writer.append(np.asarray(tokens, dtype))
            files[split] = writer.close()
            splits[split] = {"documents": 1, "tokens": len(tokens), "bytes": int(len(tokens) * bytes_per_token)}
        shards.write_manifest(folder, {
            "format_version": shards.FORMAT_VERSION, "fingerprint": shards.fingerprint(files), "files": files, "splits": splits,
            "tokenizer": {"name": tokenizer, "sha256": f"sha256 of {tokenizer}"}, "vocab_size": vocab_size, "eos_id": eos_id,
            "documents": {"read": 1, "kept": 1, "skipped": {}},
        })  # fmt: skip
        return folder

    return make


@pytest.fixture
def toy_set(make_set: Callable[..., Path]) -> Path:
    """Noise that no window repeats: 128 windows of 16 tokens to train on, 8 to validate on."""
    draw = np.random.default_rng(0)
    return make_set("toy", draw.integers(0, 50, 128 * 16 + 1), draw.integers(0, 50, 8 * 16 + 1))


@pytest.fixture
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Path]:
    """config({"train.max_steps": 3}, name="a"): the file of the tiny run with these keys changed, on `toy_set` if no data is given."""

    def write(changes: Mapping[str, Any] | None = None, name: str = "tiny") -> Path:
        sections = {section: dict(keys) for section, keys in TINY.items()}
        sections["run"]["dir"] = str(tmp_path / "runs")
        for dotted, value in (changes or {}).items():
            section, key = dotted.split(".", 1)
            sections.setdefault(section, {})[key] = str(value) if isinstance(value, Path) else value
        if "train" not in sections["data"]:
            sections["data"]["train"] = str(request.getfixturevalue("toy_set"))
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps(sections, indent=1))  # JSON is YAML
        return path

    return write
