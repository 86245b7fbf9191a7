"""Attention that stays inside documents, and positions that begin anew in each (`data.document_mask`).

An end-of-text token begins a document here, as it begins the text of an empty prompt: each predicts its first token from it alone, and
the next one, last, from its own text. So every target stays inside its document, and all of GPT-2's targets stay. What a window begins
in the middle of counts as a document: its positions begin at 0.

On CUDA by FlexAttention (Dong et al. 2024), which skips the blocks between documents; elsewhere, and where that kernel does not go (dropout,
heads narrower than 16, replicas by thread), by a mask of T × T for scaled_dot_product_attention.

Shape suffixes: B sequences, H heads, T tokens, D width of a head.
"""

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, GPT2LMHeadModel, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "inside_documents"  # among transformers' attention functions; without one for masks, so that it makes none of its own


def ask(config: PreTrainedConfig, eos_id: int | None) -> None:
    """Note in a model's config which token ends a document, or that (None) there is nothing to keep apart."""
    vars(config).pop("document_eos_id", None)
    if eos_id is not None:
        config.document_eos_id = eos_id  # travels in model.json and config.json: evaluated as trained


def asked(config: PreTrainedConfig) -> int | None:
    return getattr(config, "document_eos_id", None)


def arguments(model: GPT2LMHeadModel, inputs_BT: Tensor) -> dict[str, Any]:
    """What transformers' GPT-2 is given besides its inputs; nothing where it is not asked for."""
    eos_id = asked(model.config)
    if eos_id is None:
        return {}
    document_BT, position_BT = find(inputs_BT, eos_id)
    mask = block_mask(document_BT) if kernel(model, inputs_BT.device) == "flex" else dense_mask(document_BT)
    return {"position_ids": position_BT, "document_mask": mask}


def find(inputs_BT: Tensor, eos_id: int) -> tuple[Tensor, Tensor]:
    """(which document of its window each token belongs to, its position in there)."""
    begins_BT = inputs_BT == eos_id
    index_T = torch.arange(inputs_BT.shape[1], device=inputs_BT.device)
    begin_BT = torch.where(begins_BT, index_T, 0).cummax(dim=1).values
    return begins_BT.cumsum(dim=1), index_T - begin_BT


def kernel(model: GPT2LMHeadModel, device: torch.device) -> str:
    """`flex` or `dense`."""
    config = model.config
    fits = config.attn_pdrop == 0 and config.n_embd // config.n_head >= 16 and not getattr(model, "_is_replica", False)
    return "flex" if device.type == "cuda" and fits else "dense"


def note(model: GPT2LMHeadModel, device: torch.device) -> list[str]:
    """For a run's opening lines."""
    eos_id, by = asked(model.config), {"flex": "FlexAttention", "dense": "a dense mask"}[kernel(model, device)]
    return [] if eos_id is None else [f"attention stays inside documents, which end with token {eos_id}: {by}"]


def dense_mask(document_BT: Tensor) -> Tensor:
    """(B, 1, T, T): True where a query may look at a key."""
    same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    return same_BTT.tril()[:, None]


def block_mask(document_BT: Tensor) -> BlockMask:
    def inside(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document_BT[b, query] == document_BT[b, key])

    B, T = document_BT.shape
    return create_block_mask(inside, B, None, T, T, device=document_BT.device, _compile=not torch.compiler.is_compiling())


@functools.cache
def _compiled_flex() -> Any:
    """Made when it is called for: asking for a compiled function loads the compiler, seconds of every start."""
    return torch.compile(flex_attention, dynamic=False)


def attend(module: nn.Module, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, attention_mask: Tensor | None, *, scaling: float,
           dropout: float = 0.0, document_mask: Tensor | BlockMask | None = None, **_: Any) -> tuple[Tensor, None]:  # fmt: skip
    """One of transformers' attention functions: (B, T, H, D). Without a document mask (`generate`: one document) it is causal."""
    if isinstance(document_mask, BlockMask):
        flex = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
        out_BHTD = flex(query_BHTD, key_BHTD, value_BHTD, block_mask=document_mask, scale=scaling)
        return out_BHTD.transpose(1, 2).contiguous(), None
    mask = attention_mask if document_mask is None else document_mask
    return cast(
        tuple[Tensor, None], sdpa_attention_forward(module, query_BHTD, key_BHTD, value_BHTD, mask, dropout=dropout, scaling=scaling)
    )


AttentionInterface.register(NAME, attend)
