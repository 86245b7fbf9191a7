"""Training goes on while a checkpoint's copy is taken, and the copy is of what was there when it began."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import drive
import pytest
import torch
from group import Ranks

from pretrain import checkpoint
from pretrain.config import Train
from pretrain.job import Job
from pretrain.pieces import pieces
from pretrain.saver import Saver
from pretrain.snapshot import Snapshot

Files = dict[str, Any]


def test_only_what_a_forward_changes_is_copied_at_once() -> None:
    weight, moment, buffer = torch.ones(3), torch.ones(3), torch.ones(3)
    state = {"model": {"mean": buffer, "w": weight}, "optimizer": {"mean": moment}}
    snapshot = Snapshot()
    copies = {(copy.group, copy.name): copy.tensor for copy in snapshot.begin(pieces(state), {"mean"})}
    for tensor in (weight, moment, buffer):
        tensor.fill_(2)
    snapshot.complete()
    assert {key: copy.tolist() for key, copy in copies.items()} == {
        ("model", "mean"): [1, 1, 1], ("model", "w"): [2, 2, 2], ("optimizer", "mean"): [2, 2, 2],
    }  # fmt: skip
    weight.fill_(3)
    snapshot.complete()
    assert copies["model", "w"].tolist() == [2, 2, 2], "copied again, while it is being written"


def test_training_waits_for_the_copy_before_it_changes_anything(tmp_path: Path) -> None:
    saver, weight, busy = Saver(tmp_path, None, Train(), 9, print), torch.ones(3), threading.Event()
    saver._thread.submit(busy.wait)
    saver.start(1, {"model": {"w": weight}}, {}, {})
    copying = saver._copying
    assert copying is not None
    copied = copying.result
    copying.result = lambda timeout=None: (busy.set(), copied(timeout))[1]  # type: ignore[method-assign, func-returns-value]
    saver.settle()
    weight.fill_(2)
    busy.set()
    assert not saver.copying
    assert saver.wait() is None
    written = {"w": torch.zeros(3)}
    checkpoint.load(checkpoint.path_of(tmp_path, 1), {"model": written})
    assert written["w"].tolist() == [1, 1, 1]


def copy_as_late_as_allowed(job: Job) -> None:
    """When training asks for it: anything that changes too early is seen."""
    asked, snapshot, saver = threading.Event(), job.saver._snapshot, job.saver
    begin, complete, settle = snapshot.begin, snapshot.complete, saver.settle

    def begin_anew(*arguments: Any) -> Any:
        asked.clear()
        return begin(*arguments)

    def complete_late() -> None:
        asked.wait()
        complete()

    def ask() -> None:
        asked.set()
        settle()

    snapshot.begin = begin_anew  # type: ignore[method-assign, assignment]
    snapshot.complete, saver.settle = complete_late, ask  # type: ignore[method-assign]


def checkpoints(path: Path, each: Mapping[str, Sequence[str]]) -> dict[str, list[list[Files]]]:
    """Of each strategy, the files of every checkpoint with their checksums: of a run that copies late, and of one that waits for the disk."""
    found: dict[str, list[list[Files]]] = {}
    for name, overrides in each.items():
        found[name] = []
        for late in (True, False):
            more = [f"run.name={name}-{late}", f"train.async_checkpoint={late}"]
            drive.whole(path, [*overrides, *more], None, copy_as_late_as_allowed if late else None)
            folder = path.parent / "runs" / f"{name}-{late}" / "checkpoints"
            manifests = [json.loads((saved / "manifest.json").read_text()) for saved in sorted(folder.glob("step_*"))]
            found[name].append([{**manifest["files"], "state.json": None} for manifest in manifests])
            drive.leave()
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_a_late_copy_is_the_same_to_the_byte(ranks: Ranks, config: Callable[..., Path], size: int) -> None:
    """In every strategy, of weights, buffers that a forward changes, moments and extras."""
    path = config({"model.build": "custom_models:Drifting", "train.checkpoint_every": 2, "train.eval_every": 2, "train.keep_last": 9})
    each = drive.every_strategy(size)
    for name in ("local_sgd", "diloco") if size == 1 else ():
        each[name].append("strategy.simulate=2")
    for name, (late, waited) in ranks.run(checkpoints, path, each, size=size)[0].items():
        assert len(waited) == 3
        assert late == waited, name
