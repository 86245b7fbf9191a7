"""For `model.build` in tests: GPT-2 with a SwiGLU MLP, and one that fails."""

import torch
from torch import Tensor, nn

from pretrain.model import PretrainGPT2


class SwiGLU(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.c_proj(nn.functional.silu(self.gate(hidden)) * self.up(hidden))


def swiglu(config: object) -> PretrainGPT2:
    model = PretrainGPT2(config)
    for block in model.transformer.h:
        block.mlp = SwiGLU(model.config.n_embd)
    return model


def failing(config: object) -> torch.nn.Module:
    raise RuntimeError("no such thing")


def frozen(config: object) -> PretrainGPT2:
    model = PretrainGPT2(config)
    model.transformer.wpe.weight.requires_grad_(False)
    return model


def with_a_spare(config: object) -> PretrainGPT2:
    """One weight takes no part in the loss."""
    model = PretrainGPT2(config)
    model.spare = nn.Parameter(torch.zeros(4))
    return model


class Scaled(PretrainGPT2):
    """All token losses times a number that is learnt: a parameter without dimensions."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        loss_sum, tokens = super().forward(inputs_BT, targets_BT)
        return loss_sum * self.gain, tokens


class Drifting(PretrainGPT2):
    """Keeps running statistics, as a router that balances its experts does; the loss depends on them."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.transformer.h[0].register_buffer("forwards", torch.zeros(()))
        self.transformer.h[0].register_buffer("mean", torch.zeros(()))

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.transformer.h[0].forwards.add_(1)
            self.transformer.h[0].mean.lerp_(inputs_BT.float().mean(), 0.1)
        loss_sum, tokens = super().forward(inputs_BT, targets_BT)
        return loss_sum * (1 + self.transformer.h[0].mean / 100), tokens


class Unsavable(PretrainGPT2):
    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.register_buffer("angles", torch.zeros(2, dtype=torch.complex128))
