"""How many bytes the collectives of this process really move: every call is seen where it is issued, then a model of the network is applied."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
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
}
# Kind -> how often a rank passes on its (W−1)/W of the payload, W being the size of the group.
_RING = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "broadcast": 1,
    "reduce": 1,
    "gather": 1,
    "scatter": 1,
    "all_to_all": 1,
}
# gloo's reduce_scatter is its all_reduce. Its reduce is left out: 1 + 1/W up to 1 MB, and more by no rule we know for larger payloads.
_PASSES = {"ring": _RING, "gloo": {kind: passes for kind, passes in _RING.items() if kind != "reduce"} | {"reduce_scatter": 2}}


def bytes_sent(network: str, kind: str, payload: int, size: int) -> int:
    """Bytes that one of `size` ranks sends for one collective: the mean over the ranks, which differ where there is a root.

    "ring": rings as in NCCL; Patarasuk and Yuan 2009 (J. Parallel Distrib. Comput. 69) show 2·(W−1)/W of the payload for an all-reduce, and
    half of it for its two halves, reduce-scatter and all-gather, and that no algorithm sends less. NCCL's trees send as much in the mean;
    reductions inside a switch (NVLS, SHARP) send less. "gloo": what gloo sends, as its interface counted in tests/test_collectives.py.
    """
    if kind in ("send", "recv"):
        return payload if kind == "send" else 0
    if kind not in _PASSES[network]:
        raise ValueError(f"how many bytes {network} sends for {kind} is not known")
    return _PASSES[network][kind] * (size - 1) * payload // size


@dataclass(frozen=True)
class Collective:
    kind: str  # as in torch.distributed: all_reduce, all_gather, …, send, recv
    payload: int  # bytes, as above
    dtype: torch.dtype
    group: str  # ProcessGroup.group_name
    size: int  # ranks of that group

    def sent(self, network: str) -> int:
        return bytes_sent(network, self.kind, self.payload, self.size)


class CollectiveCounter:
    """`with CollectiveCounter() as counter: …` records what this process issues meanwhile; barriers carry nothing and are not recorded.

    Leave out the groups that carry votes and Python objects. One counter at a time in a process.
    """

    # Everything ends in PyTorch's c10d operators: calls of torch.distributed, DDP's reducer, communication hooks, ZeroRedundancyOptimizer,
    # FSDP, DeepSpeed, functional collectives, compiled code. A TorchDispatchMode (as in CommDebugMode) is thread-local: it follows a
    # backward into autograd's threads, but not a future's callbacks into gloo's threads, where PowerSGD issues its second all-reduce, and
    # it keeps torch.compile out. So these operators get a kernel under BackendSelect, a key that every thread passes: it holds for the
    # process, whichever thread issues the call.

    _counting = False  # in this process: the kernels of a second counter would replace those of the first

    def __init__(self, leave_out: Collection[dist.ProcessGroup] = ()) -> None:
        self.collectives: list[Collective] = []
        self._left_out = {group.group_name for group in leave_out}
        self._library: torch.library.Library

    def __enter__(self) -> "CollectiveCounter":
        if CollectiveCounter._counting:
            raise RuntimeError("another CollectiveCounter is counting in this process")
        CollectiveCounter._counting = True
        self._library = torch.library.Library("c10d", "IMPL")
        for name in _OPERATORS:
            self._library.impl(name, self._recording(name), "BackendSelect", with_keyset=True)
        return self

    def __exit__(self, *raised: object) -> None:
        self._library._destroy()
        CollectiveCounter._counting = False

    def sent(self, network: str) -> int:
        """Bytes that this rank sends on a "ring" or on "gloo" for all that was recorded; in the mean where a collective has a root."""
        return sum(collective.sent(network) for collective in self.collectives)

    def _recording(self, name: str) -> Callable[..., Any]:
        operator = getattr(torch.ops.c10d, name).default
        arguments = [argument.name for argument in operator._schema.arguments]
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        kind, carrier = _OPERATORS[name]

        def kernel(keys: torch._C.DispatchKeySet, *values: Any) -> Any:
            given = dict(zip(arguments, values, strict=False))  # defaults at the end may be missing
            self._record(kind, list(tensors_in(given[carrier])), dist.ProcessGroup.unbox(given["process_group"]))
            return operator.redispatch(keys & below, *values)

        return kernel

    def _record(self, kind: str, tensors: list[Tensor], group: dist.ProcessGroup) -> None:
        if group.group_name not in self._left_out:
            payload = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.collectives.append(Collective(kind, payload, tensors[0].dtype, group.group_name, group.size()))


def tensors_in(nested: Any) -> Iterator[Tensor]:
    """Of a tensor, a list of tensors, or a list of lists."""
    if isinstance(nested, Tensor):
        yield nested
    else:
        for part in nested:
            yield from tensors_in(part)
