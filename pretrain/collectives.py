"""How many bytes the collectives of this process really move, by a model of the network; and how a step goes without them."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

from pretrain.interception import Call, add, intercepted, remove

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

    Leave out the groups that carry votes and Python objects. Inside `without_collectives` it records what would have been sent; the other
    way round it records what is still sent.
    """

    def __init__(self, leave_out: Collection[dist.ProcessGroup] = ()) -> None:
        self.collectives: list[Collective] = []
        self._left_out = {group.group_name for group in leave_out}

    def __enter__(self) -> "CollectiveCounter":
        add(self._see)
        return self

    def __exit__(self, *raised: object) -> None:
        remove(self._see)

    def sent(self, network: str) -> int:
        """Bytes that this rank sends on a "ring" or on "gloo" for all that was recorded; in the mean where a collective has a root."""
        return sum(collective.sent(network) for collective in self.collectives)

    def _see(self, call: Call, proceed: Callable[[], Any]) -> Any:
        if call.kind != "barrier":
            self._record(call.kind, call.carried, call.group)
        return proceed()

    def _record(self, kind: str, tensors: list[Tensor], group: dist.ProcessGroup) -> None:
        if group.group_name not in self._left_out:
            payload = sum(tensor.nbytes for tensor in tensors)
            self.collectives.append(Collective(kind, payload, tensors[0].dtype, group.group_name, group.size()))


@contextmanager
def without_collectives(leave_out: Collection[dist.ProcessGroup] = ()) -> Iterator[None]:
    """Collectives on other groups than these are done at once and without the network, so that a step can be timed without them.

    A rank sees its own part wherever there would be another's, and its own sum: the numbers are finite, and of no other use. Replicas part
    and sharded weights are spoilt: nothing should be trained or saved afterwards. Enter it while no collective is under way.
    """
    left_out = {group.group_name for group in leave_out}

    def alone(call: Call, proceed: Callable[[], Any]) -> Any:
        if call.group.group_name in left_out:
            return proceed()
        for target, own in _own_parts(call):
            _copy(target, own)
        return call.returning(_finished(call.outputs))

    with intercepted(alone):
        yield


# torch's fake process group would do for timing, but its futures hold no tensors, which DDP and its communication hooks take from there.
def _finished(outputs: list[Tensor]) -> dist.Work:
    """A collective that has ended; on GPUs, once what was issued before it has run."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=list({t.device for t in outputs if t.is_cuda}))
    future.set_result(outputs)
    return _create_work_from_future(future)  # type: ignore[no-any-return]


def _own_parts(call: Call) -> Iterator[tuple[Tensor, Tensor]]:
    """(output, what of this rank's own input goes there). Sums, broadcasts and messages are left as they are."""
    outputs, inputs, *_ = call.given.values()
    size, rank = call.group.size(), call.group.rank()
    match call.operator:
        case "allgather_" | "gather_":  # the latter without outputs where nothing is gathered
            for slots, own in zip(outputs, inputs, strict=False):
                yield from ((slot, own) for slot in slots)
        case "allgather_coalesced_":
            for slots in outputs:
                yield from zip(slots, inputs, strict=True)
        case "_allgather_base_" | "allgather_into_tensor_coalesced_":
            for output, own in zip(_listed(outputs), _listed(inputs), strict=True):
                yield from ((slot, own) for slot in output.view(size, -1))
        case "reduce_scatter_" | "scatter_":  # the latter without inputs away from the root, where the output may be any memory
            if not inputs:
                yield from ((output, torch.zeros_like(output)) for output in outputs)
            yield from ((output, parts[rank]) for output, parts in zip(outputs, inputs, strict=False))
        case "_reduce_scatter_base_" | "reduce_scatter_tensor_coalesced_":
            for output, whole in zip(_listed(outputs), _listed(inputs), strict=True):
                yield output, whole.view(size, -1)[rank]
        case "alltoall_" | "alltoall_base_":
            yield from zip(_listed(outputs), _listed(inputs), strict=True)


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _copy(target: Tensor, own: Tensor) -> None:
    """As far as it goes. Past autograd, as a collective writes: FSDP gathers into memory that a backward still looks at."""
    if target.numel() == own.numel():
        target.data.copy_(own.data.reshape(target.shape))
    else:  # all_to_all with unequal splits
        count = min(target.numel(), own.numel())
        target.data.zero_().view(-1)[:count] = own.data.reshape(-1)[:count]
