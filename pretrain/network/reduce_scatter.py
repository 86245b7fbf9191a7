"""A reduce-scatter with a ring's bytes. gloo's is an all-reduce, which sends twice as much: no strategy that shards could be judged by it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

from pretrain.interception import Call

_KINDS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


def by_all_to_all(call: Call) -> dist.Work | None:
    """The call's work as an all-to-all of the chunks, after which each rank adds up those that it received: every rank sends (W − 1)/W of the
    payload, as in a ring. Sums are in the tensors' dtype, and halves round once instead of once per rank.

    None for reductions other than a sum or a mean.
    """
    kind = dist.ReduceOp.RedOpType(call.given["reduce_op"].op())
    if kind not in _KINDS:
        return None
    outputs, inputs = list(call.given.values())[:2]
    if isinstance(outputs, Tensor):
        outputs, inputs = [outputs], [inputs]
    all_parts = [_exchange(call, output, chunks, mean=kind == dist.ReduceOp.AVG) for output, chunks in zip(outputs, inputs, strict=True)]
    done = torch.futures.collect_all(all_parts).then(lambda parts: [part.value() for part in parts.value()])
    return _create_work_from_future(done)  # type: ignore[no-any-return]


def _exchange(call: Call, output: Tensor, chunks: Any, *, mean: bool) -> torch.futures.Future[Tensor]:
    """`chunks`: one for each rank, as a list or as one tensor."""
    mine = chunks if isinstance(chunks, Tensor) else torch.cat([chunk.reshape(-1) for chunk in chunks])
    theirs = torch.empty_like(mine)
    timeout = call.given.get("timeout", -1)
    work = dist.Work.unbox(call.issue("alltoall_base_", theirs, mine, call.given["process_group"], [], [], True, timeout))

    def add_up(done: torch.futures.Future[Any]) -> Tensor:
        done.value()  # raises what went wrong
        total = theirs.view(call.group.size(), *output.shape).sum(0)
        return output.data.copy_(total.div_(call.group.size()) if mean else total)

    future: torch.futures.Future[Tensor] = work.get_future().then(add_up)
    return future
