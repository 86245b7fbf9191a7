"""Writers of other people's token files, from their sources' descriptions and by struct alone: what the tests read."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

Documents = Sequence[Sequence[int]]
MEGATRON_CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "u2": 8}


def flat(documents: Documents) -> list[int]:
    return [token for document in documents for token in document]


def llm_c(path: Path, documents: Documents, wide: bool = False) -> None:
    tokens = flat(documents)
    magic, version, letter = (20240801, 7, "I") if wide else (20240520, 1, "H")
    path.write_bytes(struct.pack("<256i", magic, version, len(tokens), *[0] * 253) + struct.pack(f"<{len(tokens)}{letter}", *tokens))


def nanogpt(path: Path, documents: Documents) -> None:
    tokens = flat(documents)
    path.write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))


def npy(path: Path, documents: Documents, dtype: str = "<u2") -> None:
    np.save(path, np.array(flat(documents), dtype))


def megatron(path: Path, documents: Documents, dtype: str = "u2", sequences: int = 1) -> None:
    """`path` is X.bin; each document is cut into so many sequences, as with --split-sentences."""
    cut = [part.tolist() for document in documents for part in np.array_split(np.array(document, int), sequences)]
    path.write_bytes(np.array(flat(documents), f"<{dtype}").tobytes())
    lengths = [len(part) for part in cut]
    pointers = [sum(lengths[:k]) * np.dtype(dtype).itemsize for k in range(len(lengths))]
    ends = [k * sequences for k in range(len(documents) + 1)]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, MEGATRON_CODES[dtype], len(lengths), len(ends))
    body = struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(pointers)}q{len(ends)}q", *pointers, *ends)
    path.with_suffix(".idx").write_bytes(head + body)


def datatrove(
    path: Path, documents: Documents, width: int = 2, tokenizer: str | None = "gpt2", index: bool = True, old: bool = False
) -> None:
    """`path` is X.ds; old: metadata that does not tell the width."""
    tokens = flat(documents)
    path.write_bytes(struct.pack(f"<{len(tokens)}{'H' if width == 2 else 'I'}", *tokens))
    ends = np.cumsum([len(document) for document in documents])
    if index:
        Path(f"{path}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    if tokenizer:
        Path(f"{path}.metadata").write_text("\n".join([tokenizer if old else f"{tokenizer}|{width}", str(len(tokens)), f"{len(tokens)} T"]))
