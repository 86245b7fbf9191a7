"""A link in time: the collectives of this process end when a model of its link to the next one says so, and never before they have really ended."""

import threading
import time
from queue import SimpleQueue

import torch
from torch import Tensor

from pretrain.config import Network

Outputs = torch.futures.Future[list[Tensor]]


def seconds(network: Network, kind: str, payload: int, size: int) -> float:
    """The α-β model (Hockney 1994, Parallel Computing 20) of a collective of `size` ranks: steps × latency + bytes over the busiest link ÷
    bandwidth. `payload` in bytes as CollectiveCounter counts it: the whole tensor; one part for gather and scatter.

    Rings, in which the last message has passed W − 1 links; an all-reduce is two of them. A root sends or receives everything itself.
    """
    shares = {"all_reduce": 2 * (size - 1) / size, "broadcast": 1, "reduce": 1, "gather": size - 1, "scatter": size - 1, "barrier": 0}
    steps = (size - 1) * (2 if kind in ("all_reduce", "barrier") else 1)
    sent = payload * shares.get(kind, (size - 1) / size) if size > 1 else 0
    return steps * network.latency_ms / 1e3 + (sent * 8 / (network.bandwidth_gbit * 1e9) if network.bandwidth_gbit else 0)


class Link:
    """What one process sends over, one collective after the other, while it computes.

    A collective begins when all its ranks have come, which the real one shows by ending, and the link is free: so it takes the real one's
    time and then the link's. The former is small beside the latter, unless a faster link was asked for than this machine can show.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._free_at = 0.0  # time.monotonic()
        self._lock = threading.Lock()
        self._under_way: SimpleQueue[tuple[float, torch.futures.Future[None]]] = SimpleQueue()  # by the time at which they end
        threading.Thread(target=self._deliver, name="emulated link", daemon=True).start()

    def carry(self, real: Outputs, kind: str, payload: int, size: int) -> Outputs:
        """The same outputs, or what went wrong, later."""
        takes = seconds(self._network, kind, payload, size)
        ended: torch.futures.Future[None] = torch.futures.Future()

        def hold(real: Outputs) -> None:  # in gloo's thread
            with self._lock:
                self._free_at = max(self._free_at, time.monotonic()) + takes
                self._under_way.put((self._free_at, ended))

        real.add_done_callback(hold)
        return ended.then(lambda _: real.value())

    def _deliver(self) -> None:
        while True:
            ends, ended = self._under_way.get()
            while (left := ends - time.monotonic()) > 0:
                time.sleep(left)
            ended.set_result(None)
