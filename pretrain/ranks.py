"""How ranks come to know what the others know. Groups are CPU groups of all ranks; None is one process, which knows it all."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from pretrain.config import ConfigError

T = TypeVar("T")


def rank_in(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if group else 0


def gather(group: dist.ProcessGroup | None, value: T) -> list[T]:
    """Every rank's value, on every rank."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast(group: dist.ProcessGroup | None, value: T) -> T:
    """The main process's value, on every rank."""
    if group is None:
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]  # type: ignore[no-any-return]


def together(group: dist.ProcessGroup | None, act: Callable[[], T]) -> T:
    """Run `act`, which may not use the group, on every rank; what the user has to mend on one, every rank raises as ConfigError."""
    result, problem = None, None
    try:
        result = act()
    except ValueError as error:
        problem = str(error)
    for found in gather(group, problem):
        if found:
            raise ConfigError(found)
    return result  # type: ignore[return-value]


def agree(group: dist.ProcessGroup | None, facts: dict[str, Any]) -> None:
    """Raises ConfigError, on every rank, when one rank's facts (name -> value) differ from the main process's."""
    everyone = gather(group, facts)
    for rank, theirs in enumerate(everyone):
        for what, value in theirs.items():
            if value != everyone[0][what]:
                raise ConfigError(
                    f"rank {rank} has another {what} than rank 0 ({value}, not {everyone[0][what]}); start every rank from the same files"
                )


def set_timeout(seconds: float, *, leave_out: dist.ProcessGroup | None) -> None:
    """After so long in a collective of any other group, a rank gives up."""
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not leave_out:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
