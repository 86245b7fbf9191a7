"""Sampling: no id that is padding, the same text for the same seed, an end at end of text, and no trace in the caller's random state."""

from typing import Any

import pytest
import torch

from pretrain import model as models
from pretrain.config import Config, ConfigError, Model, replace
from pretrain.generation import generate

VOCAB, EOS = 12, 0


class Letters:
    """Ids 1 … 11 are a … k; 0 is end of text; a padded id would be shouted."""

    eos_token_id = EOS

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) - 96 for letter in text]}

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
        return "".join("!" if i >= VOCAB else chr(96 + i) for i in ids.tolist() if i or not skip_special_tokens)


@pytest.fixture
def model() -> models.PretrainGPT2:
    """Random weights, far from uniform, with padded rows that would win every draw."""
    made = models.build(replace(Config(model=Model(n_layer=2, n_head=2, n_embd=32)), "data.sequence_length", 16), VOCAB, EOS)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in made.parameters():
            p += 0.2 * torch.randn_like(p)
        made.transformer.ln_f.bias.fill_(1.0)
        made.transformer.wte.weight[VOCAB:] = 100.0
        made.transformer.wte.weight[EOS] = -100.0  # no end of text, unless a test wants one
    return made.eval()


def continued(model: models.PretrainGPT2, *prompts: str, **more: Any) -> list[str]:
    return generate(model.as_causal_lm(), Letters(), list(prompts), **({"vocab_size": VOCAB, "max_new_tokens": 8} | more))


def always(model: models.PretrainGPT2, token: int) -> None:
    with torch.no_grad():
        model.transformer.wte.weight[token] = 100.0


@pytest.mark.parametrize("more", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9}, {"temperature": 5.0, "top_k": 0}])
def test_padded_ids_are_never_sampled(model: models.PretrainGPT2, more: dict[str, Any]) -> None:
    for seed in range(3):
        (text,) = continued(model, "abc", seed=seed, **more)
        assert text.startswith("abc")
        assert len(text) == 11
        assert "!" not in text


def test_the_same_seed_the_same_text_whatever_was_drawn_before(model: models.PretrainGPT2) -> None:
    first = continued(model, "ab", "cd", seed=1, temperature=2.0)
    torch.rand(5)
    assert continued(model, "ab", "cd", seed=1, temperature=2.0) == first
    assert continued(model, "cd", seed=1, temperature=2.0) == first[1:], "a prompt alone is as in company"
    assert continued(model, "ab", "cd", seed=2, temperature=2.0) != first


def test_temperature_0_takes_the_likeliest(model: models.PretrainGPT2) -> None:
    """Whatever the seed, and equal to picking by hand."""
    assert len({continued(model, "abc", temperature=0.0, seed=seed)[0] for seed in range(3)}) == 1
    ids = [1, 2, 3]
    for _ in range(8):
        logits = model.as_causal_lm()(torch.tensor([ids])).logits[0, -1, :VOCAB]
        ids.append(int(logits.argmax()))
    assert continued(model, "abc", temperature=0.0) == [Letters().decode(torch.tensor(ids), True)]


def test_end_of_text_ends_and_is_not_shown(model: models.PretrainGPT2) -> None:
    always(model, EOS)
    assert continued(model, "abc", temperature=0.0) == ["abc"]


def test_an_empty_prompt_begins_a_document(model: models.PretrainGPT2) -> None:
    (text,) = continued(model, "", temperature=0.0)
    assert len(text) == 8


@pytest.mark.parametrize(("prompt", "new", "kept", "made"), [
    ("abcdefghijk" * 3, 4, 12, 4),  # its end stays, all the new tokens fit
    ("abcdefghijk" * 3, 100, 8, 8),  # at least half of the context is the prompt's
    ("ab", 100, 2, 14),
])  # fmt: skip
def test_what_does_not_fit_the_context_is_cut(model: models.PretrainGPT2, prompt: str, new: int, kept: int, made: int) -> None:
    always(model, 5)
    assert continued(model, prompt, max_new_tokens=new, temperature=0.0) == [prompt[-kept:] + "e" * made]


def test_nothing_to_generate_is_refused(model: models.PretrainGPT2) -> None:
    with pytest.raises(ConfigError, match="max_new_tokens=0: expected at least 1"):
        continued(model, "a", max_new_tokens=0)


def test_the_callers_random_numbers_and_gradients_go_on_as_before(model: models.PretrainGPT2) -> None:
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    continued(model, "abc", temperature=2.0)
    assert torch.equal(torch.rand(3), expected)
    assert torch.is_grad_enabled()
    assert all(p.grad is None for p in model.parameters())
