"""(position, rank, world size) -> tensors. The position counts windows from the start of the run; nothing else is remembered."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from pretrain.config import Config, ConfigError, Layout, Source
from pretrain.order import LEAST_SHARE, Int64s, drawn, mixed, shares, shuffled
from pretrain.shards import TokenStream, open_split

IGNORED = -100  # torch's target that does not count
_LOOK_FOR_END = 2**21  # tokens, more than almost any document has
_GPT2 = {"name": "gpt2 (assumed: a bare set names no tokenizer)", "vocab_size": 50257, "eos_id": 50256, "sha256": None}


@dataclass(frozen=True)
class Sets:
    """The token streams of a run, and the tokenizer that they agree on."""

    train: Sequence[TokenStream]
    val: Sequence[TokenStream]  # empty where the run never evaluates
    names: Sequence[str]  # of the sets to train on, in the log
    val_names: Sequence[str]
    tokenizer: Mapping[str, Any]  # name, vocab_size, eos_id, sha256
    shares: Sequence[Sequence[int]]  # the mixture (order.shares)
    sequence_length: int
    eval_windows: Sequence[int]  # of each validation split, the first so many are evaluated

    @property
    def fingerprints(self) -> list[str]:
        return [stream.fingerprint for stream in self.train]

    @property
    def windows_per_epoch(self) -> int:
        """An epoch of several sets is as many windows as they have together, whatever their weights."""
        return sum(stream.windows(self.sequence_length) for stream in self.train)

    def mixture(self, position: int, passed_over: Sequence[Sequence[int]] = ()) -> dict[str, float]:
        """`tokens/NAME` trained on before this position, and `epoch/NAME` passes over the set's windows; nothing for one set alone."""
        if len(self.train) == 1:
            return {}
        before = drawn(position, self.shares)
        left_out = [0] * len(before)
        for begin, end in passed_over:
            first, last = (drawn(min(edge, position), self.shares) for edge in (begin, end))
            left_out = [n + there - here for n, here, there in zip(left_out, first, last, strict=True)]
        T = self.sequence_length
        tokens = {f"tokens/{name}": (n - out) * T for name, n, out in zip(self.names, before, left_out, strict=True)}
        epochs = {f"epoch/{name}": n / stream.windows(T) for name, n, stream in zip(self.names, before, self.train, strict=True)}
        return {**tokens, **epochs}

    def describe_mixture(self, position: int) -> list[str]:
        """One line on what the run draws before this position, its end; none for one set alone."""
        found = self.mixture(position)
        parts = [
            f"{name} {found[f'tokens/{name}'] / (position * self.sequence_length):.2%} ({found[f'epoch/{name}']:.2f} epochs)"
            for name in self.names
            if found
        ]
        return [f"mixture by tokens: {', '.join(parts)}"] if parts else []

    @property
    def bytes_per_token(self) -> float | None:
        """Of the validation text; None for sets that do not say."""
        splits = [(stream.manifest or {}).get("splits", {}).get("val", {}) for stream in self.val]
        if not splits or not all(split.get("bytes") for split in splits):
            return None
        return float(sum(split["bytes"] for split in splits) / sum(split["tokens"] for split in splits))


def open_sets(cfg: Config) -> Sets:
    """Raises ShardError or ConfigError where a set is missing, too short, or made with another tokenizer."""
    T = cfg.data.sequence_length
    train = [open_split(source.path, "train") for source in cfg.data.train]
    val_sources = (cfg.data.val or cfg.data.train) if cfg.train.eval_every else ()
    val = [open_split(source.path, "val") for source in val_sources]
    _check_different("data.train", train)
    _check_different("data.val", val)
    for stream in (*train, *val):
        if not stream.windows(T):
            raise ConfigError(
                f"{stream.name} has {stream.tokens:,} tokens, too few for one window of data.sequence_length={T:,} and its target"
            )
    if {shard.path.resolve() for stream in train for shard in stream.shards} & {
        shard.path.resolve() for stream in val for shard in stream.shards
    }:
        raise ConfigError(f"data.val: {val[0].name} would validate on files that are trained on; give another set, or train.eval_every=0")
    tokenizers = [_tokenizer(stream) for stream in (*train, *val)]
    for stream, tokenizer in zip((*train, *val), tokenizers, strict=True):
        if (tokenizer["sha256"], tokenizer["vocab_size"]) != (tokenizers[0]["sha256"], tokenizers[0]["vocab_size"]):
            raise ConfigError(
                f"{stream.name} was made with {tokenizer['name']}, {train[0].name} with {tokenizers[0]['name']}: one model needs one tokenizer"
            )
    if cfg.data.document_mask:
        _check_ends([*train, *val], tokenizers[0]["eos_id"])
    if cfg.model.vocab_size and train[0].manifest and cfg.model.vocab_size < tokenizers[0]["vocab_size"]:
        raise ConfigError(
            f"model.vocab_size={cfg.model.vocab_size:,} is smaller than the tokenizer's {tokenizers[0]['vocab_size']:,}; leave it out to take the tokenizer's"
        )
    available = sum(stream.windows(T) for stream in val)
    wanted = available if cfg.train.eval_tokens is None else cfg.train.eval_tokens // T
    if val and not 0 < wanted <= available:
        raise ConfigError(
            f"train.eval_tokens={cfg.train.eval_tokens:,}: the validation split has {available * T:,} tokens in windows of {T:,}; write a number from {T:,} to that, or leave it out to take all"
        )
    by_size = [[float(stream.windows(T)) for stream in streams] for streams in (train, val)]
    weights = [source.weight or size for source, size in zip(cfg.data.train, by_size[0], strict=True)]
    _check_shares(train, weights)
    eval_windows = [max(1, n) for n in drawn(wanted, shares(by_size[1]))] if val else []  # by size, and some of each
    return Sets(train, val, _names(cfg.data.train), _names(val_sources), tokenizers[0], shares(weights), T, eval_windows)


def _check_ends(streams: Sequence[TokenStream], eos_id: int | None) -> None:
    """A bare set is taken for GPT-2's: without its end-of-text token nothing would be masked, and nobody told."""
    for stream in streams:
        if eos_id is None or (stream.manifest or {}).get("eos_id", eos_id) != eos_id:
            raise ConfigError(f"data.document_mask=true: {stream.name} does not end documents with one known token; prepare it again")
        if stream.manifest is None and eos_id not in stream.read(0, min(stream.tokens, _LOOK_FOR_END)):
            raise ConfigError(
                f"data.document_mask=true: no end-of-text token (id {eos_id}, as a bare set is taken for GPT-2's) in the first {min(stream.tokens, _LOOK_FOR_END):,} tokens of {stream.name}; "
                "prepare it with pretrain prepare, or leave data.document_mask out"
            )


def _check_different(key: str, streams: Sequence[TokenStream]) -> None:
    seen: dict[str, str] = {}
    for stream in streams:
        if other := seen.get(stream.fingerprint):
            raise ConfigError(f"{key}: {other} and {stream.name} are the same data; list it once, with the weights of both together")
        seen[stream.fingerprint] = stream.name


def _check_shares(streams: Sequence[TokenStream], weights: Sequence[float]) -> None:
    least = min(weights)
    if least / sum(weights) < LEAST_SHARE:
        raise ConfigError(
            f"data.train: {streams[weights.index(least)].name} has weight {least:g} of {sum(weights):g}, less than one window in {1 / LEAST_SHARE:,.0f}; leave it out or give it more"
        )


def _names(sources: Sequence[Source]) -> list[str]:
    """The folders' names; the whole paths where these are alike."""
    short = [Path(source.path).resolve().name for source in sources]
    return short if len(set(short)) == len(short) else [source.path for source in sources]


def _tokenizer(stream: TokenStream) -> Mapping[str, Any]:
    if stream.manifest is None:
        return _GPT2
    return {
        "eos_id": stream.manifest["eos_id"],
        "vocab_size": stream.manifest["vocab_size"],
        **stream.manifest["tokenizer"],
    }


@dataclass(frozen=True)
class Micro:
    """One micro-batch of this rank."""

    inputs: Tensor  # (B, T)
    targets: Tensor  # (B, T)
    index: int  # of all micro-batches of the global batch: what random numbers are derived from
    last: bool


@dataclass(frozen=True)
class GlobalBatch:
    """The windows of one update, and this rank's share of them."""

    tokens: int  # targets that count, over all ranks
    start: int  # position of the first window
    stop: int
    windows_hash: str  # of (source, window) in order, over all ranks
    micros: Sequence[Micro]

    def __iter__(self) -> Iterator[Micro]:
        return iter(self.micros)


class Loader:
    """Serves the global batch at any position; reads the one that follows in the background."""

    def __init__(self, streams: Sequence[TokenStream], shares: Sequence[Sequence[int]], layout: Layout, *,
                 rank: int, seed: int, shuffle: bool, vocab_size: int, device: torch.device) -> None:  # fmt: skip
        self.streams, self.shares, self.layout = streams, shares, layout
        self.rank, self.seed, self.shuffle, self.vocab_size, self.device = rank, seed, shuffle, vocab_size, device
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._ahead: tuple[int, Future[tuple[GlobalBatch, Tensor]]] | None = None

    def global_batch(self, position: int) -> GlobalBatch:
        """The batch that starts at `position`. Raises ConfigError when a token id does not fit the vocabulary."""
        if self._ahead is None or self._ahead[0] != position:
            self._ahead = (position, self._reader.submit(self._read, position))
        batch, tokens_ABT = self._ahead[1].result()
        self._ahead = (batch.stop, self._reader.submit(self._read, batch.stop))
        return self._on_device(batch, tokens_ABT)

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)

    def window_ids(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """(source, window) of each position: every window of a source once per pass over it, in a new order each pass."""
        source, count = mixed(positions, self.shares)
        window = np.empty_like(count)
        for k, stream in enumerate(self.streams):
            here = source == k
            n = stream.windows(self.layout.sequence_length)
            epoch, index = np.divmod(count[here], n)
            window[here] = shuffled(index, n, self.seed + k, epoch) if self.shuffle else index
        return source, window

    def _read(self, position: int) -> tuple[GlobalBatch, Tensor]:
        L = self.layout
        stop = position + L.windows if L.last_position is None else min(position + L.windows, L.last_position)
        source, window = self.window_ids(np.arange(position, stop))
        digest = xxhash.xxh3_64(np.stack([source, window]).tobytes()).hexdigest()
        rows = np.full((L.accumulation, L.micro, L.sequence_length + 1), IGNORED, np.int64)
        for a in range(L.accumulation):
            first = (self.rank * L.accumulation + a) * L.micro  # a rank's windows follow each other, whatever the micro-batch
            for b in range(min(L.micro, max(0, stop - position - first))):
                rows[a, b] = _window(self.streams[source[first + b]], int(window[first + b]), L.sequence_length, self.vocab_size)
        tokens_ABT = torch.from_numpy(rows)
        if self.device.type == "cuda":
            tokens_ABT = tokens_ABT.pin_memory()
        return GlobalBatch((stop - position) * L.sequence_length, position, stop, digest, ()), tokens_ABT

    def _on_device(self, batch: GlobalBatch, tokens_ABT: Tensor) -> GlobalBatch:
        L = self.layout
        tokens_ABT = tokens_ABT.to(self.device, non_blocking=True)
        micros = [Micro(*_shift(rows), self.rank * L.accumulation + a, a == L.accumulation - 1) for a, rows in enumerate(tokens_ABT)]
        return GlobalBatch(batch.tokens, batch.start, batch.stop, batch.windows_hash, micros)


def _window(stream: TokenStream, window: int, T: int, vocab_size: int) -> Int64s:
    tokens = stream.read(window * T, T + 1)
    if tokens.max() >= vocab_size:
        at = int(tokens.argmax())
        raise ConfigError(
            f"{stream.where(window * T + at)}: token id {tokens[at]:,} does not fit model.vocab_size={vocab_size:,}; "
            f"write model.vocab_size={int(tokens[at]) + 1} or more, or prepare the set with the tokenizer that you mean"
        )
    return tokens


def _shift(tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T + 1) -> inputs and targets, both contiguous: a compiled model is compiled for one layout of its inputs."""
    return tokens_BT[:, :-1].clamp(min=0), tokens_BT[:, 1:].contiguous()


def evaluation_batches(stream: TokenStream, T: int, micro: int, windows: int, rank: int, world_size: int,
                       vocab_size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """The first `windows` windows of a stream in file order, dealt to the ranks; the same number of (inputs, targets) on each.

    Raises ConfigError when a token id does not fit the vocabulary.
    """
    for start in range(0, windows, micro * world_size):
        rows = np.full((micro, T + 1), IGNORED, np.int64)
        for b, w in enumerate(range(start + rank * micro, min(start + (rank + 1) * micro, windows))):
            rows[b] = _window(stream, w, T, vocab_size)
        tokens_BT = torch.from_numpy(rows).to(device)
        yield _shift(tokens_BT)
