"""What each token id stands for, in bytes: whole arrays of ids are decoded at numpy's speed, and a text is found across tokens."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain import tokenization


class TokenBytes:
    """The bytes of every id of one tokenizer. A token that stands for no text (end of text, holes in the vocabulary) has none."""

    def __init__(self, name: str, eos_id: int, pieces: Sequence[bytes]) -> None:
        self.name, self.eos_id, self.pieces = name, eos_id, pieces
        self.lengths = np.array([len(piece) for piece in pieces], np.int64)
        self._starts = np.cumsum(self.lengths) - self.lengths
        self._content = np.frombuffer(b"".join(pieces), np.uint8)

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def decode(self, tokens: npt.NDArray[Any]) -> bytes:
        lengths = self.lengths[tokens]
        before = np.cumsum(lengths) - lengths
        at = np.arange(lengths.sum()) + np.repeat(self._starts[tokens] - before, lengths)
        decoded: bytes = self._content[at].tobytes()
        return decoded

    def touches(self, text: bytes) -> npt.NDArray[np.bool_]:
        """(vocabulary,): whether an occurrence of `text` can have a part of this token, or lie inside it."""
        beginnings, endings = ({cut(text, n) for n in range(1, len(text))} for cut in (lambda t, n: t[:n], lambda t, n: t[-n:]))

        def touch(piece: bytes) -> bool:
            if not piece:
                return False
            ends_in_it = any(piece[:n] in endings for n in range(1, len(piece) + 1))
            return ends_in_it or piece in text or text in piece or any(piece[-n:] in beginnings for n in range(1, len(piece) + 1))

        return np.array([touch(piece) for piece in self.pieces])


def load(name: str) -> TokenBytes:
    """Of `gpt2`, `byte`, a folder or a name on the Hugging Face Hub. Raises TokenizerError."""
    found = tokenization.load(name)
    return _from_json(name, found.files["tokenizer.json"], found.eos_id, found.vocab_size)


def of_set(folder: Path, manifest: Mapping[str, Any]) -> TokenBytes | None:
    """Of a prepared set; None where its tokenizer/ is gone."""
    path = folder / "tokenizer" / "tokenizer.json"
    if not path.exists():
        return None
    return _from_json(manifest["tokenizer"]["name"], path.read_bytes(), manifest["eos_id"], manifest["vocab_size"])


def _from_json(name: str, tokenizer_json: bytes, eos_id: int, vocab_size: int) -> TokenBytes:
    """`tokenizer_json` is the file of that name that the tokenizers library writes."""
    spec = json.loads(tokenizer_json)
    if (spec.get("decoder") or {}).get("type") == "ByteLevel":
        pieces = _byte_level(spec, vocab_size)
    else:
        pieces = _by_decoding(tokenizer_json, vocab_size)
    pieces[eos_id] = b""
    return TokenBytes(name, eos_id, pieces)


def _byte_level(spec: Mapping[str, Any], vocab_size: int) -> list[bytes]:
    byte = json.loads(tokenization.load("byte").files["tokenizer.json"])["model"]["vocab"]  # character -> the byte that it stands for
    pieces = [b""] * vocab_size
    for token, id_ in spec["model"]["vocab"].items():
        pieces[id_] = bytes(byte[char] for char in token) if all(char in byte for char in token) else token.encode()
    for added in spec["added_tokens"]:
        pieces[added["id"]] = added["content"].encode()
    return pieces


def _by_decoding(tokenizer_json: bytes, vocab_size: int) -> list[bytes]:
    """What a token adds to a text that has begun, as many decoders leave out a leading space. Bytes that are no character by
    themselves come as U+FFFD."""
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    anchor = backend.encode("a", add_special_tokens=False).ids[-1:]
    begun = len(backend.decode(anchor, skip_special_tokens=False))
    texts = backend.decode_batch([[*anchor, id_] for id_ in range(vocab_size)], skip_special_tokens=False)
    return [text[begun:].encode() for text in texts]
