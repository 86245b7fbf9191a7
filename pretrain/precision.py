"""What a run really computes in, found out before its first step: what was asked for, or the run ends."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pretrain.config import ConfigError
from pretrain.strategies import Strategy

_ASKED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_in_use(strategy: Strategy, inputs_BT: Tensor, targets_BT: Tensor) -> dict[str, str]:
    """The dtypes of weights as the optimiser holds them, of gradients as it gets them, and of what matrix products return.

    Call it after the strategy's warm-up; all ranks do. Raises ConfigError where weights or gradients are not in fp32, or where products
    are not in the precision that was asked for.
    """
    found = {**strategy.in_use, "activations": product_dtypes(strategy, inputs_BT, targets_BT)}
    wanted = {"weights": torch.float32, "gradients": torch.float32, "activations": _ASKED[strategy.precision]}
    for what, dtypes in found.items():
        if dtypes - {wanted[what]}:
            raise ConfigError(
                f"run.precision={strategy.precision} under strategy.name={strategy.name}: {what} are in {_names(dtypes)}, "
                f"not in {_names({wanted[what]})}; use another precision or strategy, and report this"
            )
    return {what: _names(dtypes) for what, dtypes in found.items()}


def product_dtypes(strategy: Strategy, inputs_BT: Tensor, targets_BT: Tensor) -> set[torch.dtype]:
    """By one forward that is not compiled, since a compiled module would be compiled again for the hooks, and again without them."""
    seen: set[torch.dtype] = set()
    with strategy.evaluation_weights() as module, torch.no_grad(), torch.compiler.set_stance("force_eager"):
        hooks = [
            layer.register_forward_hook(lambda _layer, _inputs, output: seen.add(output.dtype))
            for layer in module.modules()
            if isinstance(layer, nn.Linear | Conv1D)
        ]
        module(inputs_BT[:1], targets_BT[:1])
        for hook in hooks:
            hook.remove()
    return seen


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
