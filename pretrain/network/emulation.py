"""What a trainer does for `compare.network`, and what it says of it."""

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from pretrain import interception
from pretrain.config import ConfigError, Network
from pretrain.network.delay import Link
from pretrain.network.namespaces import Made, made_for_us
from pretrain.network.reduce_scatter import by_all_to_all


@dataclass(frozen=True)
class Emulation:
    facts: dict[str, Any] = field(default_factory=dict)  # for config.yaml: {"network": …}
    notes: list[str] = field(default_factory=list)


def emulate(network: Network | None, device_type: str, leave_out: Collection[dist.ProcessGroup | None]) -> Emulation:
    """From here on the collectives of this process go over slow links, to its end. `leave_out`: groups that the collective layer does not
    hold back. Raises ConfigError on GPUs, which do not send through this machine's network."""
    if network is None or not dist.is_initialized():
        return Emulation()
    if device_type != "cpu":
        raise ConfigError(
            f"compare.network slows the collectives of processes on CPUs, and these run on {device_type}; leave it out, or write run.device=cpu"
        )
    made = made_for_us()
    left = Network(None if made.interface else network.bandwidth_gbit, 0.0 if made.netem else network.latency_ms)
    interception.add(_layer(Link(left) if left != Network() else None, {group.group_name for group in leave_out if group}))
    return Emulation({"network": {**asdict(network), **_ways(network, made)}}, [_note(network, made)])


def _layer(link: Link | None, left_out: set[str]) -> interception.Layer:
    def slow(call: interception.Call, proceed: Callable[[], Any]) -> Any:
        if call.group.group_name in left_out or call.operator == "monitored_barrier_":
            return proceed()
        work = by_all_to_all(call) if call.kind == "reduce_scatter" else None
        if work is None:
            returned = proceed()
            work = dist.Work.unbox(returned[-1] if isinstance(returned, tuple | list) else returned)
        if link is not None:
            payload = sum(tensor.numel() * tensor.element_size() for tensor in call.carried)
            work = link.carry(work, call.kind, payload, call.group.size())
        return call.returning(work)

    return slow


def _ways(network: Network, made: Made) -> dict[str, str | None]:
    """What makes each of the two, and why namespaces don't, if they don't."""
    bandwidth = "namespaces" if made.interface else "collective layer"
    latency = "namespaces" if made.netem else "collective layer"
    return {
        "bandwidth_by": bandwidth if network.bandwidth_gbit else None,
        "latency_by": latency if network.latency_ms else None,
        "without_namespaces": made.why_not,
    }


def _note(network: Network, made: Made) -> str:
    parts = []
    for value, by_namespaces, tool in (
        (f"{network.bandwidth_gbit:g} Gbit/s" if network.bandwidth_gbit else "", bool(made.interface), "tbf"),
        (f"{network.latency_ms:g} ms one way" if network.latency_ms else "", made.netem, "netem"),
    ):
        if value:
            parts.append(f"{value} by {f'network namespaces ({tool})' if by_namespaces else 'holding collectives back'}")
    rest = "votes and checkpoints go over it as well" if made.interface else f"votes and checkpoints do not; {made.why_not}"
    return f"network: {', '.join(parts) or 'as it is'}; reduce-scatter as an all-to-all and a sum, with a ring's bytes; {rest}"
