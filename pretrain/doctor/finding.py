"""What a finding is, and the phrases that findings are made of."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pretrain.doctor.facts import Facts, Gpu

Level = Literal["problem", "warning"]
Ranks = Sequence[Facts]

MB, GB = 10**6, 10**9


@dataclass(frozen=True)
class Finding:
    level: Level  # `problem`: a launch would fail or be wrong; `warning`: slower or risky
    what: str
    why: str
    do: str


def nodes_of(ranks: Ranks) -> list[str]:
    return list(dict.fromkeys(rank.node for rank in ranks))


def first_of_nodes(ranks: Ranks) -> list[Facts]:
    return list({rank.node: rank for rank in reversed(ranks)}.values())[::-1]


def cores_of(ranks: Ranks) -> int:
    """Of one node: those that any of its ranks may run on."""
    return len(frozenset().union(*(rank.cores for rank in ranks)))


def gpus_of_nodes(ranks: Ranks) -> dict[str, list[Gpu]]:
    """Each once, whatever number of ranks sees it."""
    return {node: list({gpu.uuid: gpu for rank in ranks if rank.node == node for gpu in rank.gpus}.values()) for node in nodes_of(ranks)}


def on(some: Ranks, ranks: Ranks) -> str:
    """Which nodes, where there are several."""
    all_nodes, nodes = nodes_of(ranks), nodes_of(some)
    if len(all_nodes) == 1:
        return ""
    return f" on all {len(nodes)} nodes" if len(nodes) == len(all_nodes) else f" on {listed(nodes)}"


def numbered(numbers: Sequence[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + listed(map(str, numbers), 8)


def listed(names: Iterable[str], most: int = 3) -> str:
    """Each once; of many the first."""
    once = list(dict.fromkeys(names))
    return ", ".join(once[:most]) + (f" and {len(once) - most} more" if len(once) > most else "")
