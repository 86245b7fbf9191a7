"""A process that keeps a part of the model never holds all of it, not even before step 1."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import drive
import torch
from group import Ranks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretrain import checkpoint
from pretrain import job as jobs
from pretrain import model as models
from pretrain.boxes import Stretch

Config = Callable[..., Path]
STAGES = ["deepspeed1", "deepspeed2", "deepspeed3"] if importlib.util.find_spec("deepspeed") else []
SHARDED = ["fsdp1", "fsdp2", *STAGES[2:]]
SMALL = ["reduce_bucket_size=1000", "stage3_prefetch_bucket_size=1000", "stage3_param_persistence_threshold=0"]


def storages(tensors: Any) -> list[torch.UntypedStorage]:
    """Those in memory."""
    leaves = (leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor | Stretch))
    return [leaf.untyped_storage() for leaf in leaves if not leaf.is_meta]


class Allocations(TorchDispatchMode):
    """The most bytes that tensors have held at once, of those that were made under it and are not on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again as what it does to its local part
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages((args, kwargs))}  # of which there may be views
        self._live |= {storage._cdata: storage for storage in storages(out) if storage._cdata not in given}
        self.most = max(self.most, sum(storage.nbytes() for storage in self._live.values()))
        return out


def overrides(name: str) -> list[str]:
    options = [f"strategy.options.{option}" for option in SMALL] if name == "deepspeed3" else []
    return [f"strategy.name={name}", f"run.name={name}", *options]


def held_at_most(path: Path, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """(the most bytes before the warm-up, those of the whole model)."""
    found, warm_up = {}, jobs.warm_up
    jobs.warm_up = lambda job: {}
    for name in names:
        with Allocations() as allocations:
            job, _ = drive.begin(path, overrides(name))
        job.loader.close()
        found[name] = allocations.most, 4 * models.parameter_count(models.outline(job.cfg, 64, 0)[0])
        drive.leave()
    jobs.warm_up = warm_up
    return found


def test_no_process_makes_the_whole_model(ranks: Ranks, config: Config) -> None:
    """Of 6 equal blocks on 4 processes each makes its quarter and some of a block at a time; DeepSpeed keeps three quarters: what computes,
    what is updated, and gradients. (The optimiser has no state.)"""
    path = config({"model.n_layer": 6, "model.n_embd": 64, "optim.name": "sgd"})
    for found in ranks.run(held_at_most, path, ["ddp", *SHARDED]):
        most, whole = found.pop("ddp")
        assert most >= whole, "nothing was counted"
        for name, (most, whole) in found.items():
            assert most < 0.9 * whole, name


def needed_to_save_and_load(path: Path, names: Sequence[str]) -> dict[str, tuple[int, int, int]]:
    """(bytes that a save makes, that a load makes, those of the largest weight)."""
    found = {}
    for name in names:
        job, progress = drive.begin(path, overrides(name))
        drive.steps(job, progress, 1)
        with Allocations() as saving:
            saved = checkpoint.save(job.saver.folder, 1, job.strategy.state(), {}, job.described, job.control)
        with Allocations() as loading:
            job.strategy.restore(checkpoint.Stored(saved), moments=True, extras=True)
        largest = max(4 * p.numel() for p in models.outline(job.cfg, 64, 0)[0].parameters())
        found[name] = saving.most, loading.most, largest
        job.loader.close()
        drive.leave()
    return found


def test_nothing_is_gathered_to_save_or_load(ranks: Ranks, config: Config) -> None:
    path = config({"model.n_embd": 256})
    for by_rank in ranks.run(needed_to_save_and_load, path, ["fsdp1", "fsdp1_grad_op", "fsdp2", "hsdp", *STAGES], size=4):
        for name, (saving, loading, largest) in by_rank.items():
            assert saving < largest / 4, name
            assert loading <= largest, name
