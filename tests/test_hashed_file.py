"""What is written is what was given, to the byte, whatever the sizes; the entry is what a reader of the file would find."""

import os
from pathlib import Path

import pytest
import xxhash

from pretrain.hashed_file import BLOCK, HashedFile

SIZES = [[], [0], [1], [4096], [4097, 1], [BLOCK - 1, 2], [BLOCK], [3, BLOCK, 2 * BLOCK + 5, 7]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("direct", [True, False])
def test_any_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int], direct: bool) -> None:
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    parts, path = [os.urandom(size) for size in sizes], tmp_path / "file"
    path.write_bytes(b"longer than what comes" * 1000)
    with HashedFile(path) as file:
        for part in parts:
            file.write(memoryview(part))
    content = b"".join(parts)
    assert path.read_bytes() == content
    assert file.entry == {"bytes": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()}


def test_without_direct_writes(small_disk: Path) -> None:
    """A file system that refuses them, if this is one, gets ordinary ones; a full one says so."""
    with HashedFile(small_disk / "file") as file:
        file.write(memoryview(b"x" * 5000))
    assert (small_disk / "file").read_bytes() == b"x" * 5000
    with pytest.raises(OSError, match="No space left on device"), HashedFile(small_disk / "large") as file:
        file.write(memoryview(bytes(2 * BLOCK)))
    assert file.entry == {}
