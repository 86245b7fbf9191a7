"""A GPT-2 that fails on order, for `model.build=faulty:model`. The orders are in the environment:

FAULT=KIND:RANK:STEP   on that rank, at that step: raise | oom | nan | hang | kill; or build: raises when made; init: begins with another weight
     …:COLLECTIVE      raise | hang | kill not in the forward but as that rank issues the next such collective of floats: all_reduce, broadcast …
PACE=SECONDS           each training forward takes so much longer, so that a signal finds it under way
GATE_EVALUATION=FILE   each evaluation on rank 0 makes FILE.here, waits for FILE, and removes both
GATE_SAVE=FILE         so does each checkpoint, before its manifest is written
PATIENCE=SECONDS       so much longer than train.hang_timeout a rank waits in a collective
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from pretrain import checkpoint, job
from pretrain.collectives import CollectiveCounter
from pretrain.initial import Initial
from pretrain.model import PretrainGPT2

RANK = int(os.environ.get("RANK", "0"))


def wait_at(gate: str) -> None:
    here = Path(f"{gate}.here")
    here.touch()
    while not Path(gate).exists():
        time.sleep(0.01)
    here.unlink()
    Path(gate).unlink()


def fail(kind: str) -> None:
    if kind == "raise":
        raise RuntimeError("a fault made to order")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while kind == "hang":
        time.sleep(1)


class Trap(CollectiveCounter):
    """Fails as this process issues a collective, whichever thread does it; the others wait in theirs."""

    def __init__(self, kind: str, collective: str) -> None:
        super().__init__()
        self.kind, self.collective = kind, collective

    def _record(self, kind: str, tensors: list[torch.Tensor], group: Any) -> None:
        if kind == self.collective and tensors[0].is_floating_point():
            fail(self.kind)


class Faulty(PretrainGPT2):
    """A step is a training forward, as where nothing is accumulated; that of the warm-up comes first."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.step, self.evaluated = -1, -2
        kind, rank, at, *self.collective = (os.environ.get("FAULT") or "none:0:1").split(":")
        self.kind, self.at = kind if int(rank) == RANK else "none", int(at)
        if self.kind == "build":
            raise RuntimeError("a fault made to order")

    def initialise(self, initial: Initial) -> None:
        super().initialise(initial)
        if self.kind == "init":
            with torch.no_grad():
                self.transformer.wpe.weight[0, 0] += 1

    def forward(self, inputs_BT: Any, targets_BT: Any) -> Any:
        if not self.training:
            if RANK == 0 and self.evaluated != self.step and (gate := os.environ.get("GATE_EVALUATION")):
                self.evaluated = self.step
                wait_at(gate)
            return super().forward(inputs_BT, targets_BT)
        if not torch.is_grad_enabled():  # a look at the dtypes before step 1
            return super().forward(inputs_BT, targets_BT)
        self.step += 1
        time.sleep(float(os.environ.get("PACE", "0")))
        now = self.step == self.at
        if now and self.collective:
            Trap(self.kind, *self.collective).__enter__()
        elif now:
            fail(self.kind)
        if now and self.kind == "oom":
            torch.empty(1 << 50)
        loss_sum, tokens = super().forward(inputs_BT, targets_BT)
        return (loss_sum * float("nan") if now and self.kind == "nan" else loss_sum), tokens


model = Faulty

if patience := os.environ.get("PATIENCE"):
    job._AFTER_THE_WATCH = float(patience)

if gate := os.environ.get("GATE_SAVE"):
    write_json = checkpoint._write_json

    def gated_write(path: Path, content: Any, gate: str = gate) -> dict[str, Any]:
        if path.name == checkpoint.MANIFEST:
            wait_at(gate)
        return write_json(path, content)

    checkpoint._write_json = gated_write
