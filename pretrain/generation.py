"""Sampling, through transformers' `generate`."""

from typing import Any

import torch

from pretrain.config import ConfigError


def generate(model: Any, tokenizer: Any, prompts: list[str], *, vocab_size: int, max_new_tokens: int = 100, temperature: float = 1.0,
             top_k: int | None = None, top_p: float = 1.0, seed: int = 0) -> list[str]:  # fmt: skip
    """One continuation per prompt (prompt included), ending at end of text. `temperature=0` takes the likeliest token.

    model: a transformers causal LM whose embedding may be padded beyond `vocab_size`: padded ids are never sampled.
    An empty prompt starts a new document. What does not fit the context is cut: first new tokens, then, beyond half of it, the prompt's start.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens}: expected at least 1")
    context = model.config.n_positions
    device = next(model.parameters()).device
    texts = []
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.compiler.set_stance("force_eager"),
    ):
        for prompt in prompts:
            torch.manual_seed(seed)
            ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
            ids = ids[-max(context // 2, context - max_new_tokens) :]
            out = model.generate(
                torch.tensor([ids], device=device),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=device),
                max_new_tokens=min(max_new_tokens, context - len(ids)),
                do_sample=temperature > 0,
                **({"temperature": temperature, "top_k": top_k or 0, "top_p": top_p} if temperature > 0 else {}),
                suppress_tokens=list(range(vocab_size, model.config.vocab_size)) or None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.eos_token_id,
            )
            texts.append(tokenizer.decode(out[0], skip_special_tokens=True))
    return texts
