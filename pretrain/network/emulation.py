"""What a trainer does for `compare.network`, and what it says of it."""

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

from pretrain import interception
from pretrain.config import ConfigError, Network
from pretrain.network.delay import Link, Outputs
from pretrain.network.namespaces import Made, made_for_us
from pretrain.network.reduce_scatter import by_all_to_all


@dataclass(frozen=True)
class Emulation:
    facts: dict[str, Any] = field(default_factory=dict)  # for config.yaml: {"network": …}
    notes: list[str] = field(default_factory=list)


def emulate(network: Network | None, device_type: str, leave_out: Collection[dist.ProcessGroup | None]) -> Emulation:
    """From here on the collectives of this process go over slow links, to its end. `leave_out`: groups that the collective layer does not
    hold back. Raises ConfigError on GPUs, which do not send through this machine's network."""
    if network is None:
        return Emulation()
    if not dist.is_initialized():
        return Emulation(notes=["network: as it is, since one process sends nothing"])
    if device_type != "cpu":
        raise ConfigError(
            f"compare.network slows the collectives of processes on CPUs, and these run on {device_type}; leave it out, or write run.device=cpu"
        )
    made = made_for_us()
    left = Network(None if made.interface else network.bandwidth_gbit, 0.0 if made.netem else network.latency_ms)
    interception.add(slow(Link(left) if left != Network() else None, leave_out))
    return Emulation({"network": {**asdict(network), **_ways(network, made)}}, [_note(network, made)])


def slow(link: Link | None, leave_out: Collection[dist.ProcessGroup | None] = ()) -> interception.Layer:
    """Collectives that send no more than a ring does and end when `link`, if there is one, lets them.

    To wait for a Work that is made of a future does not raise what went wrong. So it is raised here: at once where the caller waits anyway,
    else by the next call, on whatever group: no update is made of what did not arrive, and nothing of it is saved.
    """
    left_out, failures = {group.group_name for group in leave_out if group}, list[Exception]()

    def noting_failure(done: Outputs) -> list[Tensor]:
        try:
            return done.value()
        except Exception as error:
            failures.append(error)
            raise

    def over_link(call: interception.Call, proceed: Callable[[], Any]) -> Any:
        if failures:
            raise failures[0]
        scattering = call.kind == "reduce_scatter"
        if call.group.group_name in left_out or call.operator == "monitored_barrier_" or not (scattering or link):
            return proceed()
        if call.kind in ("send", "recv"):
            raise NotImplementedError(f"compare.network holds collectives back, and {call.kind} is none; leave compare.network out")
        outputs = by_all_to_all(call) if scattering else _future(proceed())
        if link:
            outputs = link.carry(outputs, call.kind, sum(tensor.nbytes for tensor in call.carried), call.group.size())
        outputs = outputs.then(noting_failure)
        if not call.given.get("async_op", True):
            outputs.wait()
        return call.returning(_create_work_from_future(outputs))

    return over_link


def _future(returned: Any) -> Outputs:
    """Of what an operator returned."""
    work = dist.Work.unbox(returned[-1] if isinstance(returned, tuple | list) else returned)
    return work.get_future()


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
