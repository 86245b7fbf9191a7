"""Every collective of this process passes through here, whoever issues it and in whichever thread; layers see it, replace it or hold it back."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# PyTorch's operator -> (kind, the argument whose bytes are the payload). The payload is the whole tensor that the group makes or shares;
# for gather and scatter, where only the root holds that, one rank's part; for all_to_all one rank's input.
_OPERATORS = {
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors"),
    "allgather_": ("all_gather", "output_tensors"),
    "_allgather_base_": ("all_gather", "output_tensor"),
    "allgather_coalesced_": ("all_gather", "output_lists"),
    "allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"),
    "gather_": ("gather", "input_tensors"),
    "scatter_": ("scatter", "output_tensors"),
    "alltoall_": ("all_to_all", "input_tensors"),
    "alltoall_base_": ("all_to_all", "input"),
    "send": ("send", "tensors"),
    "recv_": ("recv", "tensors"),
    "recv_any_source_": ("recv", "tensors"),
    "barrier": ("barrier", "tensor"),
    "monitored_barrier_": ("barrier", "tensor"),
}


@dataclass(frozen=True)
class Call:
    """One call of an operator of c10d."""

    operator: str
    kind: str  # as in torch.distributed: all_reduce, all_gather, …, send, recv, barrier
    given: dict[str, Any]  # arguments by name, as the operator takes them; the first are the outputs
    group: dist.ProcessGroup
    keys: torch._C.DispatchKeySet  # below this module

    @property
    def carried(self) -> list[Tensor]:
        """What makes up the payload."""
        return list(tensors_in(self.given[_OPERATORS[self.operator][1]]))

    @property
    def outputs(self) -> list[Tensor]:
        return list(tensors_in(next(iter(self.given.values()))))

    def issue(self, operator: str, *arguments: Any) -> Any:
        """An operator of c10d on these arguments, unseen by any layer: what it returns."""
        return getattr(torch.ops.c10d, operator).default.redispatch(self.keys, *arguments)

    def returning(self, work: dist.Work) -> Any:
        """What the operator returns where `work` is under way: outputs and work, the work alone, or nothing."""
        returns = len(getattr(torch.ops.c10d, self.operator).default._schema.returns)
        return (None, work.boxed(), (next(iter(self.given.values())), work.boxed()))[returns]


Layer = Callable[[Call, Callable[[], Any]], Any]  # (the call, what makes it below) -> what the operator returns
_layers: tuple[Layer, ...] = ()
_library: torch.library.Library | None = None
_changing = threading.Lock()


@contextmanager
def intercepted(layer: Layer) -> Iterator[None]:
    """Meanwhile every call passes through `layer`, before those that were here already."""
    add(layer)
    try:
        yield
    finally:
        remove(layer)


# Everything ends in PyTorch's c10d operators: calls of torch.distributed, DDP's reducer, communication hooks, ZeroRedundancyOptimizer,
# FSDP, DeepSpeed, functional collectives, compiled code. A TorchDispatchMode (as in CommDebugMode) is thread-local: it follows a backward
# into autograd's threads, but not a future's callbacks into gloo's threads, where PowerSGD issues its second all-reduce, and it keeps
# torch.compile out. So these operators get a kernel under BackendSelect, a key that every thread passes: it holds for the process,
# whichever thread issues the call.


def add(layer: Layer) -> None:
    global _layers, _library
    with _changing:
        _layers = (*_layers, layer)
        if _library is None:
            _library = torch.library.Library("c10d", "IMPL")
            for operator in _OPERATORS:
                _library.impl(operator, _kernel(operator), "BackendSelect", with_keyset=True)


def remove(layer: Layer) -> None:
    global _layers, _library
    with _changing:
        _layers = tuple(other for other in _layers if other != layer)
        if not _layers and _library is not None:
            _library._destroy()
            _library = None


def _kernel(name: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.c10d, name).default
    arguments = [argument.name for argument in operator._schema.arguments]
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def kernel(keys: torch._C.DispatchKeySet, *values: Any) -> Any:
        given = dict(zip(arguments, values, strict=False))  # defaults at the end may be missing
        call = Call(name, _OPERATORS[name][0], given, dist.ProcessGroup.unbox(given["process_group"]), keys & below)
        proceed = partial(operator.redispatch, keys & below, *values)
        # No function here may refer to itself: only a garbage collection would free its tensors, and none runs during an update.
        for layer in _layers:
            proceed = partial(layer, call, proceed)
        return proceed()

    return kernel


def tensors_in(nested: Any) -> Iterator[Tensor]:
    """Of a tensor, a list of tensors, or a list of lists."""
    if isinstance(nested, Tensor):
        yield nested
    else:
        for part in nested:
            yield from tensors_in(part)
