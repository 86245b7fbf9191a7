"""How process groups end."""

import atexit

import torch.distributed as dist

_ended: list[dist.ProcessGroup] = []
atexit.register(_ended.clear)


def end_all() -> None:
    """End the process groups of this process; Python goes on holding them until it exits.

    A thread of gloo's lets go of a tensor, for which it may need the GIL, while it holds the lock that the destructor of its group waits
    for. Called by Python the destructor has given up the GIL. Called by DDP's reducer, which holds the group too and may outlive Python's
    hold on it, it has not, and both wait for ever.
    """
    if dist.is_initialized():
        _ended.extend(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
