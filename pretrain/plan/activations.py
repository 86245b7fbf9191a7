"""What a forward keeps for its backward, by counting the tensors that each operation of a block saves (the count of Korthikanti et al. 2022,
arXiv 2205.05198, §4.1, for GPT-2 as it is here: no dropout masks unless asked for, attention that keeps no matrix of T × T).
"""

from dataclasses import dataclass

from pretrain.plan.task import Case, Model
from pretrain.strategies.fsdp import FSDP1, FSDP2
from pretrain.strategies.zero_deepspeed import DeepSpeed

_LEAST_CHUNK, _CHUNKS = 128, 16  # of the loss: model._chunks


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one rank."""

    blocks: float  # kept from the forward
    again: float  # of the block that the backward computes anew, with activation checkpointing
    rest: float  # of the last norm and the head
    logits: float
    loss: float  # in passing: the chunk of logits in fp32
    head: float  # in passing: the gradients of the head's product
    passing: float  # in a block's backward


def activations(case: Case) -> Activations:
    m, width = case.task.model, case.width
    tokens = case.layout.micro * case.layout.sequence_length
    cast = isinstance(case.strategy, DeepSpeed)  # the whole module is in 16 bits, and not only its products
    block = tokens * kept_per_token(m, width, cast, case.task.cfg.model.dropout)
    checkpointing = case.task.cfg.model.activation_checkpointing
    sixteen = cast or isinstance(case.strategy, FSDP1 | FSDP2)  # embeddings, and what flows between blocks, in the dtype of the arithmetic
    between = tokens * m.width * (width if sixteen else 4)
    residual = width if cast else 4
    chunk = max(_LEAST_CHUNK, -(-tokens // _CHUNKS))
    upcast = 8 if case.machine.device == "cpu" and width < 4 else 4  # a CPU's log-softmax makes a copy in fp32 first
    return Activations(
        blocks=m.layers * (between if checkpointing else block),
        again=block if checkpointing else 0,
        rest=tokens * (m.width * (residual + width) + 16),
        logits=tokens * m.vocabulary * width,
        loss=min(tokens, chunk) * m.vocabulary * upcast,
        head=(tokens * m.width + m.head) * width,
        passing=tokens
        * m.width
        * (4 * width + 4),  # gradients of the widest product, whose input is gone by then, and of the block's output
    )


def kept_per_token(m: Model, width: int, cast: bool, dropout: float) -> float:
    """Bytes of one block. Inputs of the four products (1 + 1 + 1 + 4 widths), Q, K and V (3) and what GELU takes (4) in the dtype of the
    arithmetic; inputs of the two norms in fp32 with mean and deviation, which autocast keeps so; attention's log-sum-exp per head."""
    norms = width if cast else 4
    masks = 2 * m.width if dropout else 0
    return 14 * m.width * width + 2 * norms * (m.width + 2) + 4 * m.heads + masks
