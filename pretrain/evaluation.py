"""Validation loss: token-weighted, over fixed windows, by all ranks, changing nothing of the training."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn


def evaluate(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]],
             reduce_sum: Callable[[Tensor], Tensor], device: torch.device, same_graph: bool = False) -> tuple[float, int]:  # fmt: skip
    """(loss in nats per token, number of targets) over all ranks' batches; every rank needs the same number of them.

    same_graph: leave training mode and autograd as they are, so that a compiled model is not compiled a second time. Only for models
    that compute the same in both modes.
    """
    total = torch.zeros(2, dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)
    was_training = model.training
    model.train(same_graph and was_training)
    try:
        with torch.set_grad_enabled(same_graph):
            for inputs_BT, targets_BT in batches:
                loss_sum, tokens = model(inputs_BT, targets_BT)
                total += torch.stack([loss_sum.detach().to(total.dtype), tokens.to(total.dtype)])
    finally:
        model.train(was_training)
    loss_sum, tokens = reduce_sum(total).tolist()
    return loss_sum / tokens, int(tokens)


def together(found: Sequence[tuple[float, int]]) -> tuple[float, int]:
    """Of several sets' (loss, number of targets): every target weighs the same."""
    tokens = sum(n for _, n in found)
    return sum(loss * n for loss, n in found) / tokens, tokens


def evaluation_metrics(loss: float, bytes_per_token: float | None) -> dict[str, float | None]:
    """bits per byte = bits per token ÷ bytes per token of the split; None where the set does not say how many bytes it was."""
    return {
        "val_loss": loss,
        "val_perplexity": math.exp(min(loss, 700.0)),
        "val_bits_per_byte": loss / math.log(2) / bytes_per_token if bytes_per_token else None,
    }
