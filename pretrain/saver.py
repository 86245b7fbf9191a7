"""Checkpoints are written while training goes on: an optimiser's step waits for its rank's share to be copied, a checkpoint for the one
before it."""

import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pretrain import checkpoint
from pretrain.checkpoint import CheckpointError
from pretrain.config import Train
from pretrain.pieces import Key, Piece, pieces, share
from pretrain.ranks import gather, rank_in
from pretrain.snapshot import Snapshot


class Saver:
    """Every rank has one and calls it alike. `group` is its own: two threads that used one would meet each other's collectives."""

    def __init__(self, folder: Path, group: dist.ProcessGroup | None, train: Train, steps: int, say: Callable[[str], None]) -> None:
        self.folder, self.group, self.train, self.say = folder, group, train, say
        self.steps = steps  # of the run
        self.step = 0  # of the newest checkpoint, or of the start at step 0, where there is nothing to save; read it after `wait`
        self.damaged: set[Path] = set()  # checkpoints that this run has passed over, and not yet written anew
        self.seconds = 0.0  # the longest that one took, copying included
        self.of_main: Collection[str] = ()  # buffers, of which each rank may have another: the main process's, as DDP hands them round
        self.records: Sequence[Path] = ()  # of the steps that a checkpoint counts: on disk before it
        self._snapshot = Snapshot()
        self._held: list[Key] = []  # what this rank holds, and what of it it writes
        self._written: set[Key] = set()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[CheckpointError | None] | None = None
        self._copying: Future[None] | None = None
        self._waited = 0.0  # seconds that training has, for the checkpoint that is being written

    def start(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], numbers: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        """Call `wait` before, and `settle` before the tensors change. Where nothing may be written beside training it returns once all is
        written, which takes no memory."""
        assert self._pending is None
        began = time.perf_counter()
        mine = self._share(pieces(tensors))
        if self.train.async_checkpoint:
            mine = self._snapshot.begin(mine, self.of_main)
            self._copying = self._thread.submit(self._snapshot.complete)
        self._waited = time.perf_counter() - began
        self._pending = self._thread.submit(self._write, step, mine, numbers, model, began)
        if not self.train.async_checkpoint:
            self._pending.exception()  # until it is written; `wait` tells how it went

    @property
    def copying(self) -> bool:
        """Whether `settle` has something to wait for."""
        return self._copying is not None

    def settle(self) -> None:
        """Until training may change the tensors that `start` was given."""
        copying, self._copying = self._copying, None
        if copying:
            began = time.perf_counter()
            copying.result()
            self._waited += time.perf_counter() - began

    def wait(self) -> CheckpointError | None:
        """Until nothing is being written; why the last checkpoint failed, if it did."""
        self.settle()
        pending, self._pending = self._pending, None
        return pending.result() if pending else None

    def _share(self, held: list[Piece]) -> list[Piece]:
        if rank_in(self.group):
            held = [piece for piece in held if piece.group != "model" or piece.name not in self.of_main]
        if not self._held:
            self._held = [piece.key for piece in held]
            self._written = {piece.key for piece in share(held, self.group)}
        assert [piece.key for piece in held] == self._held, "a strategy's state has other tensors than at the last checkpoint"
        return [piece for piece in held if piece.key in self._written]

    def _write(self, step: int, mine: Sequence[Piece], numbers: Mapping[str, Any], model: Mapping[str, Any],
               began: float) -> CheckpointError | None:  # fmt: skip
        """In the thread: says how it went, at once."""
        needed = sum(gather(self.group, sum(piece.tensor.nbytes for piece in mine)))
        for path in self.records:
            with suppress(OSError):  # what is wrong with the disk, the checkpoint will say
                checkpoint.synchronise(path)
        try:
            path = checkpoint.write(self.folder, step, mine, numbers, model, self.group)
        except CheckpointError as error:
            free = shutil.disk_usage(self.folder.parent).free if self.folder.parent.exists() else 0
            self.say(f"step {step:,}: no checkpoint was written: {error}; it needs {needed / 1e6:,.1f} MB and {free / 1e6:,.1f} MB are free; "
                     "earlier checkpoints stand, the next interval tries again")  # fmt: skip
            return error
        self.step = step
        self.damaged.discard(path)
        if rank_in(self.group) == 0:
            self._rotate(step)
        seconds = time.perf_counter() - began
        self.seconds = max(self.seconds, seconds)
        self.say(
            f"step {step:,}/{self.steps:,}  checkpoint {path}  "
            f"({needed / 1e6:,.1f} MB in {seconds:.1f}s, training waited {self._waited if self.train.async_checkpoint else seconds:.1f}s)"
        )
        return None

    def _rotate(self, step: int) -> None:
        try:
            checkpoint.clean(self.folder)  # a save that failed may have been unable to remove what it had made
            checkpoint.rotate(self.folder, step, self.train.keep_last, self.train.keep_every, self.damaged)
        except OSError as error:
            self.say(f"step {step:,}: an old checkpoint could not be deleted: {error}; delete it by hand")
