"""A copy in host memory of what a rank writes, taken while the next update computes its gradient, which changes no weight and no moment.
(torchtitan's `async_with_pinned_mem` stages alike, and waits for it before the optimiser's step.)"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pretrain.pieces import Key, Piece


class Snapshot:
    """Its memory is kept: pages that are new cost more than the copy."""

    def __init__(self) -> None:
        self._copies: dict[Key, Tensor] = {}
        self._left: list[tuple[Tensor, Tensor]] = []  # (copy, what it is of): held until it is copied
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def begin(self, pieces: Sequence[Piece], changing: Collection[str]) -> list[Piece]:
        """The copies, which `complete` makes. At once only those of `changing`, weights by name that a forward changes: buffers."""
        copies = [replace(piece, tensor=self._room_for(piece)) for piece in pieces]
        for copy, piece in zip(copies, pieces, strict=True):
            if piece.tensor.device.type not in ("cpu", "cuda") or (piece.group == "model" and piece.name in changing):
                copy.tensor.copy_(piece.tensor)
            else:
                self._left.append((copy.tensor, piece.tensor))
        if any(tensor.is_cuda for _, tensor in self._left):
            self._copy_on_a_stream()
        return copies

    def complete(self) -> None:
        """In any thread: on return all is copied, and training may change it."""
        for copy, tensor in self._left:
            if not tensor.is_cuda:
                copy.copy_(tensor)
        if self._copied is not None:
            self._copied.synchronize()
        self._left = []

    def _room_for(self, piece: Piece) -> Tensor:
        if piece.key not in self._copies:
            self._copies[piece.key] = torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype, pin_memory=piece.tensor.is_cuda)
        return self._copies[piece.key]

    def _copy_on_a_stream(self) -> None:
        """Of its own, behind what has been computed so far and beside what comes: the copy engines are idle in a forward and backward."""
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for copy, tensor in self._left:
                if tensor.is_cuda:
                    copy.copy_(tensor, non_blocking=True)
        self._copied = self._stream.record_event(self._copied)
