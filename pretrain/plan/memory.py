"""Bytes of one rank at the moments of an update when most is alive; held against what torch's allocator counts by tests/test_plan.py.

Every family holds parameters, gradients and optimiser states as its file in strategies/ has them (Rajbhandari et al. 2020, arXiv
1910.02054, §3, for who keeps which share), and buckets or gathered layers beside them.
"""

from dataclasses import dataclass, field

from pretrain.optim import make_recipe, parameter_groups
from pretrain.plan.activations import activations
from pretrain.plan.task import Case
from pretrain.strategies.compressed import DDPHalf, DDPPowerSGD, PowerSGD
from pretrain.strategies.ddp import DDP
from pretrain.strategies.fsdp import FSDP1, FSDP2
from pretrain.strategies.local import DiLoCo, LocalSGD
from pretrain.strategies.zero1 import Zero1
from pretrain.strategies.zero_deepspeed import DeepSpeed

PARTS = ("parameters", "gradients", "optimiser", "activations", "logits", "buckets", "extras")
# Of the last micro-batch: its loss; the backward of the head, of the last block, and its end; then the update.
LOSS, HEAD, BLOCK, END, UPDATE = MOMENTS = range(5)
_MUON_BATCH = 1 << 24  # elements: optim._BATCH


@dataclass
class Held:
    """Bytes of what a strategy keeps, beside activations."""

    parameters: float
    optimiser: float
    gradients: tuple[float, float]  # before the last micro-batch's backward, and after
    buckets: list[float]  # at the five moments: DDP's, layers gathered for use, and copies in 16 bits
    extras: float = 0.0  # always there
    passing: list[float] = field(default_factory=lambda: [0.0] * len(MOMENTS))  # beside them, at the five moments


@dataclass(frozen=True)
class Memory:
    parts: dict[str, float]  # each at its largest: they need not be so at once
    peak: float


def memory(case: Case) -> Memory:
    held, a = _held(case), activations(case)
    alive = {  # activations, logits, in passing
        LOSS: (a.blocks + a.rest, a.logits, a.loss),
        HEAD: (a.blocks + a.rest, a.logits, a.head),
        BLOCK: (a.blocks + a.again, 0.0, a.passing),
        END: (0.0, 0.0, a.passing),
        UPDATE: (0.0, 0.0, 0.0),
    }
    moments = [
        {
            "parameters": held.parameters, "gradients": held.gradients[moment >= END], "optimiser": held.optimiser,
            "activations": alive[moment][0], "logits": alive[moment][1], "buckets": held.buckets[moment],
            "extras": held.extras + held.passing[moment] + alive[moment][2],
        }
        for moment in MOMENTS
    ]  # fmt: skip
    return Memory({part: max(moment[part] for moment in moments) for part in PARTS}, max(sum(parts.values()) for parts in moments))


def _held(case: Case) -> Held:
    s = case.strategy
    if isinstance(s, DeepSpeed):
        return _deepspeed(case, s)
    if isinstance(s, FSDP1 | FSDP2):
        return _sharded(case, s)
    if isinstance(s, LocalSGD):
        return _local(case, s)
    if isinstance(s, DDP):
        return _ddp(case, s)
    return _whole(case)


def _whole(case: Case) -> Held:
    """One process: everything once. The head's gradient waits for the embedding's, which has the same tensor: both, beside what earlier
    micro-batches left."""
    m, many = case.task.model, case.layout.accumulation > 1
    P, head = 4.0 * m.total, 4.0 * m.head
    held = Held(P, optimiser_bytes(case), (P if many else 0.0, P), _copies(case), passing=[0, 0, head, head * (1 + many), 0])
    if case.task.cfg.optim.name == "muon":
        held.passing[UPDATE] = 24.0 * min(_MUON_BATCH, sum(m.sizes[name] for name in m.hidden))  # stacked, some in 16 bits
    return held


def _ddp(case: Case, s: DDP) -> Held:
    """Buckets of all gradients are always there, and gradients are views of them once reduced: those that micro-batches before the last
    leave are tensors of their own."""
    m, many = case.task.model, case.layout.accumulation > 1
    P, held = 4.0 * m.total, _whole(case)
    _add_buckets(held, P, many, s.options.gradient_as_bucket_view)
    held.passing[END] = 4.0 * m.head * 3
    if isinstance(s, DDPHalf):
        held.passing[END] += P / 2  # every bucket in 16 bits, if the network is slower than the backward
    if isinstance(s, DDPPowerSGD):
        compressed = _powersgd(case, s)
        errors = 4.0 * sum(m.sizes[name] for name in compressed.ranks)
        found = errors + 4.0 * max(m.sizes[name] for name in compressed.ranks)
        held.extras = errors * s.options.use_error_feedback
        held.passing[END] += found
        held.passing[UPDATE] += found
    if isinstance(s, Zero1):
        held.optimiser = optimiser_bytes(case) * largest_share(case)
    return held


def _add_buckets(held: Held, P: float, many: bool, views: bool) -> None:
    held.gradients = (P, P)
    for moment in (LOSS, HEAD, BLOCK):
        held.buckets[moment] += P if many or not views else 0.0
    for moment in (END, UPDATE):
        held.buckets[moment] += 0.0 if views else P


def _sharded(case: Case, s: FSDP1 | FSDP2) -> Held:
    """Shares of everything, and the units in use whole: the one outside the blocks from forward to backward, and blocks one by one, with the
    next one ahead; gradients of a unit in the dtype of the arithmetic, and in fp32 to be reduced."""
    m, shards, width, many = case.task.model, s.shard_size, case.width, case.layout.accumulation > 1
    share, whole, root, unit = 4.0 * m.total / shards, width * m.total, width * m.root, width * m.block * _blocks_per_unit(s)
    reshard = s.options.reshard_after_forward if isinstance(s, FSDP2) else s.sharding.name == "FULL_SHARD"
    kept = root if reshard is True else whole if reshard is False else root + (whole - root) / reshard
    unreduced = 4.0 * m.total if many and not s.options.sync_each_micro else 0.0  # whole gradients of the micro-batches before
    grown = 1 + 4 / width
    held = Held(
        share, optimiser_bytes(case) / shards, (share if many and s.options.sync_each_micro else 0.0, share),
        [kept + unreduced, kept + unit + unreduced, kept + 2 * unit + unreduced, root + unit + unreduced, 0.0],
        passing=[0.0, 0.0, unit + width * m.head, root * grown + width * m.head, 0.0],
    )  # fmt: skip
    if s.options.cpu_offload:
        held.parameters, held.optimiser, held.gradients = 0.0, 0.0, (0.0, 0.0)
    return held


def _local(case: Case, s: LocalSGD) -> Held:
    """The anchor, and DiLoCo's momentum, beside one or more replicas; where they meet, means and differences of all weights."""
    m, many = case.task.model, case.layout.accumulation > 1
    P, held, replicas = 4.0 * m.total, _whole(case), s.simulated
    held.parameters, held.optimiser = P * replicas, held.optimiser * replicas
    held.gradients = (P * replicas if many or replicas > 1 else 0.0, P * replicas)
    if s.group_size > replicas:  # a DDP of its own
        _add_buckets(held, P, many, views=True)
        held.passing[END] = 4.0 * m.head * 3
    outer = isinstance(s, DiLoCo) and s.options.outer_momentum > 0
    held.extras = P * (1 + outer)
    held.passing[UPDATE] = max(0.0, 2 * P - (P * replicas if s.group_size == 1 else 0.0))  # most gradients are gone by then
    return held


def _deepspeed(case: Case, s: DeepSpeed) -> Held:
    """Working weights in the dtype of the arithmetic, fp32 ones and moments in pieces. Stage 1 adds gradients up whole, stages 2 and 3 in
    pieces. Buckets are as large as they are told to be, whatever the model's size."""
    m, width, world, o = case.task.model, case.width, case.layout.world_size, s.options
    P, piece, working = 4.0 * m.total, 4.0 * m.total / world, float(width * m.total)
    many, bucket = case.layout.accumulation > 1, o.reduce_bucket_size * (2 if o.overlap_comm and s.stage < 3 else 1)
    pieces = 0.0 if o.offload_optimizer else piece
    held = Held(
        working + pieces, 0.0 if o.offload_optimizer else optimiser_bytes(case) / world, (piece * many, piece), [0.0] * len(MOMENTS)
    )
    held.passing[BLOCK] = held.passing[END] = width * m.head
    held.passing[UPDATE] = piece
    if s.stage == 3:
        persistent = sum(n for n in m.sizes.values() if n < o.stage3_param_persistence_threshold)
        gathered = width * min(m.total - persistent, o.stage3_max_live_parameters)
        held.parameters = width * (persistent + m.total / world) + pieces
        held.gradients = (piece, piece)
        held.buckets = [gathered + 4.0 * bucket] * 4 + [4.0 * bucket]
    elif s.stage == 2:
        held.buckets = [0.0, *[float(width * bucket)] * 3, 0.0]
        held.passing[END] += 4.0 * min(m.total, o.reduce_bucket_size) * (width < 4)  # the bucket in fp32, to be reduced
    elif case.task.precision == "bf16":  # DeepSpeed's BF16_Optimizer: gradients in 16 bits, and their sums in fp32; no buckets
        held.gradients = (P + working, P + working)
    else:
        held.gradients = (P, P)
        held.buckets = [4.0 * bucket] * 4 + [0.0]
    return held


def optimiser_bytes(case: Case) -> float:
    """States of all weights, in fp32: AdamW's two moments, a momentum of SGD or Muon."""
    o, m, total = case.task.cfg.optim, case.task.model, case.task.model.total
    if o.name == "sgd":
        return 4.0 * total if o.momentum else 0.0
    hidden = sum(m.sizes[name] for name in m.hidden)
    return 8.0 * total - (4.0 * hidden if o.name == "muon" else 0.0)


def largest_share(case: Case) -> float:
    """Of the weights, on the rank of ZeRO-1 that owns most."""
    m = case.task.model
    return max(sum(m.sizes[name] for name in names) for names in owned(case)) / m.total


def owned(case: Case) -> list[list[str]]:
    """By each of ZeRO-1's ranks: ZeroRedundancyOptimizer gives whole tensors, the largest of a group first, to whoever has least."""
    parameters = dict(case.task.model.module.named_parameters())
    names = {id(p): name for name, p in parameters.items()}
    loads = [0] * case.layout.world_size
    ranks: list[list[str]] = [[] for _ in loads]
    for group in parameter_groups(make_recipe(parameters, case.task.cfg.optim), parameters):
        for p in sorted(group["params"], key=lambda p: -p.numel()):
            least = loads.index(min(loads))
            loads[least] += p.numel()
            ranks[least].append(names[id(p)])
    return ranks


def checkpoint_bytes(case: Case) -> float:
    """Weights and moments in fp32, and what each replica or rank keeps for itself."""
    m, s = case.task.model, case.strategy
    P, states = 4.0 * m.total, optimiser_bytes(case)
    if isinstance(s, LocalSGD):
        return P + states * (1 + s.replica_count) + P * (isinstance(s, DiLoCo) and s.options.outer_momentum > 0)
    if isinstance(s, DDPPowerSGD) and s.options.use_error_feedback:
        return P + states + case.layout.world_size * 4.0 * sum(m.sizes[name] for name in _powersgd(case, s).ranks)
    return P + states


def _copies(case: Case) -> list[float]:
    """Autocast's: the weights of matrix products in 16 bits, which the backward needs too. With checkpointing it makes them anew."""
    m = case.task.model
    copies = float(case.width * m.products) if case.width < 4 else 0.0
    later = float(case.width * m.block) if case.task.cfg.model.activation_checkpointing and copies else copies
    return [copies, later, later, 0.0, 0.0]


def _powersgd(case: Case, s: DDPPowerSGD) -> PowerSGD:
    return PowerSGD(s.options, s.start, dict(case.task.model.module.named_parameters()))


def _blocks_per_unit(s: FSDP1 | FSDP2) -> int:
    return s.options.blocks_per_unit if isinstance(s, FSDP2) else 1
