"""(position, rank, world size) -> tensors. The position counts windows from the start of the run; nothing else is remembered."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from pretrain.config import ConfigError, Layout
from pretrain.order import Int64s, mixed, shuffled
from pretrain.shards import TokenStream

IGNORED = -100  # torch's target that does not count


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

    def __init__(self, streams: Sequence[TokenStream], weights: Sequence[float], layout: Layout, *,
                 rank: int, seed: int, shuffle: bool, vocab_size: int, device: torch.device) -> None:  # fmt: skip
        self.streams, self.weights, self.layout = streams, weights, layout
        self.rank, self.seed, self.shuffle, self.vocab_size, self.device = rank, seed, shuffle, vocab_size, device
        self.windows_per_epoch = sum(s.windows(layout.sequence_length) for s in streams)
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
        source, count = mixed(positions, self.weights)
        window = np.empty_like(count)
        for k, stream in enumerate(self.streams):
            here = source == k
            n = stream.windows(self.layout.sequence_length)
            epoch, index = np.divmod(count[here], n)
            window[here] = shuffled(index, n, self.seed + k, epoch) if self.shuffle else index
        return source, window

    def _read(self, position: int) -> tuple[GlobalBatch, Tensor]:
        L = self.layout
        stop = min(position + L.windows, L.last_position)
        source, window = self.window_ids(np.arange(position, stop))
        digest = xxhash.xxh3_64(np.stack([source, window]).tobytes()).hexdigest()
        rows = np.full((L.accumulation, L.micro, L.sequence_length + 1), IGNORED, np.int64)
        for a in range(L.accumulation):
            first = (a * L.world_size + self.rank) * L.micro
            for b in range(min(L.micro, max(0, stop - position - first))):
                rows[a, b] = self._window(int(source[first + b]), int(window[first + b]))
        tokens_ABT = torch.from_numpy(rows)
        if self.device.type == "cuda":
            tokens_ABT = tokens_ABT.pin_memory()
        return GlobalBatch((stop - position) * L.sequence_length, position, stop, digest, ()), tokens_ABT

    def _window(self, source: int, window: int) -> Int64s:
        stream, T = self.streams[source], self.layout.sequence_length
        tokens = stream.read(window * T, T + 1)
        if tokens.max() >= self.vocab_size:
            at = int(tokens.argmax())
            raise ConfigError(
                f"{stream.where(window * T + at)}: token id {tokens[at]:,} does not fit model.vocab_size={self.vocab_size:,}; "
                f"write model.vocab_size={int(tokens[at]) + 1} or more, or prepare the set with the tokenizer that you mean"
            )
        return tokens

    def _on_device(self, batch: GlobalBatch, tokens_ABT: Tensor) -> GlobalBatch:
        L = self.layout
        tokens_ABT = tokens_ABT.to(self.device, non_blocking=True)
        micros = [
            Micro(rows[:, :-1].clamp(min=0), rows[:, 1:], a * L.world_size + self.rank, a == L.accumulation - 1)
            for a, rows in enumerate(tokens_ABT)
        ]
        return GlobalBatch(batch.tokens, batch.start, batch.stop, batch.windows_hash, micros)


def evaluation_batches(streams: Sequence[TokenStream], T: int, micro: int, windows: int, rank: int, world_size: int,
                       device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """The first `windows` windows of the streams in file order, dealt to the ranks; the same number of (inputs, targets) on each."""
    ids = [(stream, w) for stream in streams for w in range(min(windows, stream.windows(T)))][:windows]
    per_round = micro * world_size
    for start in range(0, len(ids), per_round):
        rows = np.full((micro, T + 1), IGNORED, np.int64)
        for b, (stream, w) in enumerate(ids[start + rank * micro : min(start + (rank + 1) * micro, len(ids))]):
            rows[b] = stream.read(w * T, T + 1)
        tokens_BT = torch.from_numpy(rows).to(device)
        yield tokens_BT[:, :-1].clamp(min=0), tokens_BT[:, 1:]
