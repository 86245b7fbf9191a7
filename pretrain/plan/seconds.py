"""How long an update takes: products at a share of the peak, everything else as bytes through memory, and what of the network is not hidden."""

import math
from dataclasses import dataclass

from pretrain.plan.activations import kept_per_token
from pretrain.plan.memory import largest_share, optimiser_bytes, owned
from pretrain.plan.rates import LINK_SHARE, MEMORY_SHARE, Machine
from pretrain.plan.task import Case
from pretrain.plan.wires import under_the_backward
from pretrain.strategies.compressed import DDPPowerSGD
from pretrain.strategies.ddp import DDP
from pretrain.strategies.fsdp import FSDP1, FSDP2
from pretrain.strategies.local import LocalSGD
from pretrain.strategies.zero1 import Zero1
from pretrain.strategies.zero_deepspeed import DeepSpeed
from pretrain.throughput import peak_of

# How often a byte that a block keeps goes through memory: written and read by the forward, read and its gradient written and read by the
# backward. Kernels that a compiler fused leave out about half of the passes between.
_PASSES, _PASSES_FUSED = 8, 4
_PASSES_LOGITS = 5  # written, read and overwritten by the loss, read by both products of the head's backward
_PER_MICRO = 24  # bytes per weight and micro-batch: 16-bit copies of weights and gradients made, gradients added up
_NORM_AND_CLIP = 12  # bytes per weight of this rank
# Seconds for a step of a ring inside a node and between nodes, and of a tree between nodes: NCCL's own model, LL128 (nccl/src/graph/tuning.cc).
_HOP, _HOP_BETWEEN, _BRANCH, _BRANCH_BETWEEN = 1.9e-6, 4.0e-6, 1.2e-6, 8.5e-6
_BUCKET = 25 * 2**20
_BACKWARD = 2 / 3  # of forward and backward


@dataclass(frozen=True)
class Seconds:
    """Of an update on one rank."""

    compute: float
    network: float  # what the computation does not hide
    optimiser: float

    @property
    def total(self) -> float:
        return self.compute + self.network + self.optimiser


def seconds(case: Case, wire: float) -> Seconds | None:
    """None where a rate that it needs is not known: of an optimiser on the host, and of the way there, none is."""
    compute = None if case.offloads else _compute(case)
    if compute is None:
        return None
    network = 0.0 if case.layout.world_size == 1 else _network(case, wire, compute)
    return None if network is None else Seconds(compute, network, _optimiser(case))


def flops(case: Case) -> float:
    """Of an update on one rank, as MFU counts them."""
    return case.task.model.flops_per_token * case.task.cfg.batch.tokens / case.layout.world_size


def peak_flops(case: Case) -> float | None:
    """By the data sheet; None for a CPU and other GPUs, and for fp32 without TF32."""
    return None if case.machine.gpu is None else peak_of(case.machine.gpu.known_as, case.task.precision, case.task.cfg.run.tf32)


def _compute(case: Case) -> float | None:
    m, micros = case.task.model, case.layout.accumulation
    tokens = case.layout.micro * case.layout.sequence_length * micros
    again = 0.0
    if case.task.cfg.model.activation_checkpointing:  # the blocks' forward, once more
        head = 6 * m.head
        again = tokens * (m.flops_per_token - head) / 3
    if case.machine.measured.flops_per_second is not None:
        return (flops(case) + again) / case.machine.measured.flops_per_second
    of_peak, memory_bandwidth = peak_flops(case), bandwidth(case.machine)
    if of_peak is None or memory_bandwidth is None or case.machine.gpu is None:
        return None
    cast = isinstance(case.strategy, DeepSpeed)
    kept = m.layers * kept_per_token(m, case.width, cast, case.task.cfg.model.dropout)
    passes = _PASSES_FUSED if case.task.compiled else _PASSES
    through_memory = tokens * (kept * passes * (4 / 3 if again else 1) + m.vocabulary * case.width * _PASSES_LOGITS)
    through_memory += micros * m.total * _PER_MICRO
    return (flops(case) + again) / (of_peak * case.machine.gpu.attainable) + through_memory / memory_bandwidth


def bandwidth(machine: Machine) -> float | None:
    """Of the memory, in bytes a second."""
    if machine.measured.memory_bandwidth is not None:
        return machine.measured.memory_bandwidth
    return None if machine.gpu is None else machine.gpu.bandwidth * MEMORY_SHARE


def _optimiser(case: Case) -> float:
    """The norm and the clipping read and write gradients, the update weights, gradients and states; Muon's products besides."""
    m, s = case.task.model, case.strategy
    rate = bandwidth(case.machine)
    if rate is None:
        return 0.0
    update = 4.0 * m.total * 3 + 2 * optimiser_bytes(case)  # weights read and written, gradients read, states read and written
    sharded = isinstance(s, FSDP1 | FSDP2 | DeepSpeed)
    parts = (s.shard_size if isinstance(s, FSDP1 | FSDP2) else case.layout.world_size) if sharded else 1
    share = largest_share(case) if isinstance(s, Zero1) else 1 / parts
    took = (update * share + _NORM_AND_CLIP * m.total / parts) / rate
    if case.task.cfg.optim.name == "muon" and (of_peak := peak_flops(case)) and case.machine.gpu:
        took += _muon_flops(case) / (of_peak * case.machine.gpu.attainable)
    return took


def _muon_flops(case: Case) -> float:
    """Five Newton-Schulz iterations, each of X·Xᵀ, its square, and a product with X (optim.orthogonal), of all matrices; under ZeRO-1 of
    those that a rank owns."""
    hidden = case.task.model.hidden
    flops = {name: sum(5 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in shapes) for name, shapes in hidden.items()}
    ranks = owned(case) if isinstance(case.strategy, Zero1) else [list(flops)]
    return max(sum(flops.get(name, 0) for name in names) for names in ranks)


def _network(case: Case, wire: float, compute: float) -> float | None:
    """What the computation leaves to wait for, by family.

    DDP: all-reduces run under the last micro-batch's backward, but for the last bucket. ZeRO-1 and DeepSpeed 1 and 2 then gather weights,
    which nothing hides; DeepSpeed's reductions are hidden with overlap_comm alone. FSDP and DeepSpeed 3 gather and reduce unit by unit under
    all of the computation, but for the first gather and the last reduction. PowerSGD and local methods wait for all of it.
    """
    s, m = case.strategy, case.task.model
    bus = bus_bandwidth(case.machine, case.layout.world_size)
    if bus is None:
        return None
    backward = compute / case.layout.accumulation * _BACKWARD
    if isinstance(s, FSDP1 | FSDP2):
        return _units(case, s, wire, compute, bus)
    if isinstance(s, DeepSpeed):
        if s.stage == 3:
            return _hidden(_seconds_of(case, wire, bus, m.layers * 2 * case.layout.accumulation), compute, wire / bus / m.layers)
        gather = (case.layout.world_size - 1) / case.layout.world_size * case.width * m.total / bus
        reduce = _seconds_of(case, wire, bus, case.layout.accumulation) - gather
        return gather + (_hidden(reduce, backward, 0.0) if s.options.overlap_comm else reduce)
    under, size = under_the_backward(case), case.layout.world_size
    if isinstance(s, LocalSGD):
        mates = bus_bandwidth(case.machine, s.group_size)
        inside = (
            0.0
            if s.group_size == 1 or mates is None
            else _hidden(_seconds_of(case, under, mates, _buckets(case), s.group_size), backward, _tail(case, mates))
        )
        peers = bus_bandwidth(case.machine, size, s.group_size) or bus
        return inside + _seconds_of(case, wire - under, peers, _buckets(case) / s.save_interval, size)
    hidden = _hidden(_seconds_of(case, under, bus, _buckets(case)), backward, _tail(case, bus))
    many = len(m.sizes) if isinstance(s, Zero1) else 2 if isinstance(s, DDPPowerSGD) else 0
    return (hidden if isinstance(s, DDP) and under else 0.0) + _seconds_of(case, wire - under, bus, many)


def _units(case: Case, s: FSDP1 | FSDP2, wire: float, compute: float, bus: float) -> float:
    """HSDP's shards are those of a node, and between nodes every process has its own share of the network for its copies."""
    m, micros = case.task.model, case.layout.accumulation
    reductions = micros if s.options.sync_each_micro else 1
    between = 0.0
    if s.replicate > 1:
        copies = reductions * 2 * (s.replicate - 1) / s.replicate * 4 * m.total / s.shard_size
        wire -= copies
        between = copies / (bus_bandwidth(case.machine, case.layout.world_size, s.shard_size) or bus)
        bus = bus_bandwidth(case.machine, s.shard_size) or bus
    collectives = (m.layers + 1) * (2 * micros + reductions)
    took = _seconds_of(case, wire, bus, collectives, s.shard_size) + between
    return _hidden(took, compute, micros * 2 * took / collectives)


def _hidden(took: float, under: float, tail: float) -> float:
    """What is left of communication under so many seconds of computation, of which the last part, `tail`, is never hidden."""
    return max(took - under, min(tail, took))


def _seconds_of(case: Case, sent: float, bus: float, collectives: float, size: int | None = None) -> float:
    """Bytes sent by a rank at the bus bandwidth, and the latency of so many collectives."""
    size = size or case.layout.world_size
    if case.machine.measured.latency is not None:
        return sent / bus + collectives * case.machine.measured.latency
    if case.machine.gpu is None:
        return sent / bus
    nodes = max(1, size // case.machine.per_node)
    ring = (size - nodes) * _HOP + (nodes - 1) * _HOP_BETWEEN
    tree = (size // nodes - 1) * _BRANCH + math.log2(nodes) * _BRANCH_BETWEEN
    halves = 1 if isinstance(case.strategy, FSDP1 | FSDP2 | DeepSpeed) else 2  # gathers and reduce-scatters are rings; all-reduces choose
    return sent / bus + collectives * (ring if halves == 1 else 2 * min(ring, tree))


def bus_bandwidth(machine: Machine, size: int, rings: int = 1) -> float | None:
    """What each of `size` ranks sends in a second: in one node by its link; between nodes a ring leaves a node by all its adapters together,
    or by the share of them that is left by other rings, which join the other processes of a node; or by the link where that is slower."""
    if machine.measured.bus_bandwidth is not None:
        return machine.measured.bus_bandwidth
    if machine.gpu is None:
        return None
    if size <= machine.per_node:
        return machine.gpu.link * LINK_SHARE
    return min(machine.gpu.link, machine.gpu.network * machine.per_node / min(rings, machine.per_node)) * LINK_SHARE


def _buckets(case: Case) -> float:
    return max(1.0, 4 * case.task.model.total / _BUCKET)


def _tail(case: Case, bus: float) -> float:
    """The last bucket's all-reduce."""
    return 2 * min(_BUCKET, 4 * case.task.model.total) / bus
