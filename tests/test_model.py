"""The model: transformers' GPT-2 to the digit, with padding that nobody sees and weights that depend on nothing but seed and name."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from custom_models import SwiGLU
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from pretrain import config as configs
from pretrain.config import Config, ConfigError, Model, replace
from pretrain.export import export, open_trained
from pretrain.loader import IGNORED
from pretrain.model import (
    PretrainGPT2,
    _TokenLoss,
    build,
    compile_model,
    describe,
    flops_per_token,
    from_description,
    initialise,
    load_plain,
    named_tensors,
    parameter_count,
    plain_state,
    weights_hash,
)
from pretrain.pieces import unsavable

T = 16


def tiny(**changes: Any) -> Config:
    cfg = Config(model=Model(**({"n_layer": 2, "n_head": 2, "n_embd": 32} | changes)))
    return replace(replace(cfg, "data.sequence_length", T), "run.seed", 1)


def make(vocab_size: int = 50, **changes: Any) -> PretrainGPT2:
    return build(tiny(**changes), vocab_size, 0)


def tokens(rows: int = 3, vocab_size: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, vocab_size, (rows, T + 1), generator=torch.Generator().manual_seed(seed))


def reference(model: PretrainGPT2) -> GPT2LMHeadModel:
    """transformers' own, of the real rows alone."""
    plain = GPT2LMHeadModel(
        GPT2Config.from_dict({**model.config.to_dict(), "vocab_size": model.vocab_size, "activation_function": "gelu_new"})
    )
    for name, tensor in plain_state(model).items():
        plain.get_parameter(name).data.copy_(tensor)
    return plain.train()


def shaken(model: PretrainGPT2, scale: float = 0.3) -> PretrainGPT2:
    """Away from initialisation, padded rows included: there a wrong column or a missing bias shows."""
    torch.manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p += scale * torch.randn_like(p)
    return model


def test_gpt2_has_124_439_808_parameters() -> None:
    with torch.device("meta"):
        model = PretrainGPT2(GPT2Config(vocab_size=50304))
    model.vocab_size = 50257
    assert parameter_count(model) == 124_439_808
    assert flops_per_token(model, 1024) == 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024


def test_flops_of_a_tiny_model_by_hand() -> None:
    """Per block 12·D² + 13·D, the final norm 2·D, the embedding V·D counted once, as the head."""
    D, L, V = 32, 2, 50
    matmuls = L * (12 * D * D + 13 * D) + 2 * D + V * D
    assert flops_per_token(make(), T) == 6 * matmuls + 12 * L * D * T
    assert parameter_count(make()) == matmuls + T * D


def test_initialisation_is_gpt2s() -> None:
    """Radford et al. 2019: N(0, 0.02), residual projections smaller by √(2·layers), biases 0, gains 1."""
    model = build(replace(Config(model=Model(n_layer=6, n_head=4, n_embd=256)), "data.sequence_length", 128), 1000, 0)
    for name, p in model.named_parameters():
        p = model.real(name, p)
        if name.endswith("bias"):
            assert not p.any(), name
        elif "ln_" in name:
            assert (p == 1).all(), name
        else:
            expected = 0.02 / math.sqrt(12) if name.endswith("c_proj.weight") else 0.02
            assert float(p.detach().std()) == pytest.approx(expected, rel=0.03), name
            assert abs(float(p.detach().mean())) < 0.02 * expected * 5, name


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    """Not on the padding, the generator's state, the vocabulary of others, or the order of construction."""
    torch.manual_seed(123)
    first = plain_state(make(vocab_size=50))
    torch.manual_seed(456)
    wide = make(vocab_size=60)
    for name, tensor in plain_state(wide).items():
        assert torch.equal(tensor[: len(first[name])], first[name]), name
    assert not wide.transformer.wte.weight[60:].any()
    assert wide.transformer.wte.weight.shape[0] == 64
    initialise("transformer.wpe.weight", alone := torch.empty(T, 32), 2, 1)
    assert torch.equal(alone, first["transformer.wpe.weight"])
    other = plain_state(build(replace(tiny(), "run.init_seed", 2), 50, 0))
    assert not any(torch.equal(other[name], first[name]) for name in first if first[name].ndim == 2)


def test_initial_weights_are_independent_of_each_other() -> None:
    matrices = [w.flatten()[:1000] for w in plain_state(make()).values() if w.ndim == 2]
    correlation = np.corrcoef(torch.stack([m[: min(len(m), 512)] for m in matrices]).numpy())
    np.fill_diagonal(correlation, 0)
    assert np.abs(correlation).max() < 0.25  # 5.7 standard deviations for 512 numbers


def test_weights_hash_is_of_the_real_rows() -> None:
    model = make()
    before = weights_hash(model)
    assert before == weights_hash(make())
    with torch.no_grad():
        model.transformer.wte.weight[50:] = 7
    assert weights_hash(model) == before
    with torch.no_grad():
        model.transformer.wte.weight[49, 0] += 1e-6
    assert weights_hash(model) != before


@pytest.mark.parametrize("ignored", [0, 13])
def test_loss_logits_and_gradients_are_transformers_own(ignored: int) -> None:
    """On the real rows, with targets that do not count and rows of padding that are far from zero."""
    model = shaken(make())
    plain = reference(model)
    rows = tokens()
    inputs, targets = rows[:, :-1], rows[:, 1:].clone()
    targets.view(-1)[:ignored] = IGNORED
    loss_sum, count = model(inputs, targets)
    assert (loss_sum.dtype, loss_sum.ndim, int(count)) == (torch.float32, 0, targets.numel() - ignored)
    (loss_sum / count).backward()

    logits = plain(inputs).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    expected.backward()
    assert float(loss_sum.detach() / count) == pytest.approx(float(expected), rel=1e-6)
    ours = model.as_causal_lm()(inputs).logits
    torch.testing.assert_close(ours[..., :50], logits, rtol=1e-5, atol=1e-5)
    for name, p in plain.named_parameters():
        grad = model.get_parameter(name).grad
        assert grad is not None
        assert p.grad is not None
        torch.testing.assert_close(grad[: len(p)], p.grad, rtol=2e-5, atol=2e-6 * float(p.grad.abs().max()), msg=name)


def test_the_first_loss_is_not_shifted_twice() -> None:
    """transformers shifts labels itself; our targets are shifted by the loader: both must mean the same."""
    model = shaken(make())
    rows = tokens(2)
    loss_sum, count = model(rows[:, :-1], rows[:, 1:])
    logits = reference(model)(rows[:, :-1]).logits
    assert float(loss_sum.detach() / count) == pytest.approx(
        float(nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())), rel=1e-5
    )


def test_padded_rows_get_no_probability_and_no_gradient() -> None:
    """Rows of 100: a softmax that saw them would give them everything."""
    model = make()
    expected, _ = model(tokens()[:, :-1], tokens()[:, 1:])
    with torch.no_grad():
        model.transformer.wte.weight[50:] = 100.0
    loss_sum, _ = model(tokens()[:, :-1], tokens()[:, 1:])
    assert float(loss_sum) == float(expected)
    loss_sum.backward()
    grad = model.transformer.wte.weight.grad
    assert grad is not None
    assert not grad[50:].any()
    assert grad[:50].any()


@pytest.mark.parametrize("rows", [1, 511, 512, 513, 1700, 20000])
def test_any_number_of_chunks_is_one_sum(rows: int) -> None:
    torch.manual_seed(rows)
    logits = torch.randn(rows, 12, requires_grad=True)
    targets = torch.randint(0, 10, (rows,))
    targets[::7] = IGNORED
    (_TokenLoss.apply(logits.clone(), targets, 10) * 3).backward()  # a copy, since it is consumed
    plain = logits.detach().clone().requires_grad_()
    expected = nn.functional.cross_entropy(plain[:, :10], targets, ignore_index=IGNORED, reduction="sum")
    (expected * 3).backward()
    assert float(_TokenLoss.apply(logits.detach().clone(), targets, 10)) == pytest.approx(float(expected), rel=1e-5)
    assert plain.grad is not None
    torch.testing.assert_close(logits.grad, plain.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_the_gradient_is_as_long_as_in_fp32(dtype: torch.dtype) -> None:
    """1 / 491,520 rounded to bf16 would lengthen all of it by 0.3 %, and other numbers of tokens by other shares. Where probabilities are
    spread, rounding each product goes both ways."""
    torch.manual_seed(0)
    logits, targets = (torch.randn(400, 512) * 2).to(dtype), torch.randint(0, 500, (400,))
    scale = 1 / 491_520 * (65_536 if dtype == torch.float16 else 1)
    gradients = []
    for leaf in (logits.clone().requires_grad_(), logits.float().requires_grad_()):
        (_TokenLoss.apply(leaf.clone(), targets, 500) * scale).backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad.float())
    assert float(gradients[0].norm() / gradients[1].norm()) == pytest.approx(1, abs=1e-3 if dtype == torch.bfloat16 else 2e-4)


def test_a_second_backward_of_consumed_logits_is_refused() -> None:
    loss_sum, _ = make()(tokens()[:, :-1], tokens()[:, 1:])
    loss_sum.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_sum.backward()


def test_all_targets_ignored_is_zero_and_finite() -> None:
    model = make()
    loss_sum, count = model(tokens()[:, :-1], torch.full((3, T), IGNORED))
    assert (float(loss_sum), int(count)) == (0.0, 0)
    loss_sum.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_sum_is_fp32(dtype: torch.dtype) -> None:
    """A sum of 1,600 losses in bf16 would come in steps of 8, and one above 65,504 would be infinite in fp16."""
    model = make()
    rows = tokens(100)
    exact, _ = model(rows[:, :-1], rows[:, 1:])
    with torch.autocast("cpu", dtype):
        loss_sum, _ = model(rows[:, :-1], rows[:, 1:])
    assert loss_sum.dtype == torch.float32
    assert float(loss_sum) == pytest.approx(float(exact), rel=1e-3)
    logits = torch.zeros(20000, 12, dtype=dtype)
    total = _TokenLoss.apply(logits, torch.zeros(20000, dtype=torch.long), 12)
    assert float(total) == pytest.approx(20000 * math.log(12), rel=1e-5)
    loss_sum.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_head_and_embedding_are_one_tensor() -> None:
    for model in (make(), from_description(describe(make(), None))):
        assert model.lm_head.weight is model.transformer.wte.weight
        assert "lm_head.weight" not in named_tensors(model)
        assert set(plain_state(model)) == {name for name, _ in model.named_parameters()}


def test_a_description_makes_the_same_model() -> None:
    model = shaken(make(dropout=0.1))
    again = from_description(describe(model, None))
    load_plain(again, plain_state(model))
    assert weights_hash(again) == weights_hash(model)
    assert (again.vocab_size, again.config.resid_pdrop, again.config.n_positions) == (50, 0.1, T)


def test_abc_is_learnt_and_continued() -> None:
    """Labels shifted twice would learn to skip a letter: loss falls all the same, and the text is nonsense."""
    model = make(vocab_size=4)
    rows = torch.tensor([[(start + k) % 3 + 1 for k in range(T + 1)] for start in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss_sum, count = model(rows[:, :-1], rows[:, 1:])
        (loss_sum / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(loss_sum / count) < 0.1
    out = (
        model.eval()
        .as_causal_lm()
        .generate(torch.tensor([[1, 2]]), max_new_tokens=7, do_sample=False, pad_token_id=0, suppress_tokens=[*range(4, 64)])
    )
    assert out[0].tolist() == [1, 2, 3, 1, 2, 3, 1, 2, 3]


def save_gpt2(folder: Path, **changes: Any) -> GPT2LMHeadModel:
    torch.manual_seed(9)
    given = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 24, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**(given | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} | changes)))
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("activation", ["gelu_new", "relu"])
def test_init_from_has_the_loss_of_what_it_came_from(tmp_path: Path, activation: str) -> None:
    plain = save_gpt2(tmp_path / "saved", activation_function=activation)
    model = build(tiny(init_from=str(tmp_path / "saved"), n_layer=None, n_head=None, n_embd=None), 50, 0)
    rows = tokens()
    loss_sum, count = model(rows[:, :-1], rows[:, 1:])
    expected = plain(rows, labels=rows).loss
    assert float(loss_sum.detach() / count) == pytest.approx(float(expected), rel=1e-5)
    assert model.training
    assert model.config.vocab_size == 64


def test_init_from_another_shape_is_one_clear_line(tmp_path: Path) -> None:
    save_gpt2(tmp_path / "saved", n_positions=8)
    source = str(tmp_path / "saved")
    with pytest.raises(ConfigError) as raised:
        build(tiny(init_from=source, n_layer=3), 60, 0)
    text = str(raised.value)
    assert "\n" not in text
    for part in (
        source,
        "vocab_size 50, the config asks for 60",
        "n_layer 2, the config asks for 3",
        "8 positions, data.sequence_length is 16",
    ):
        assert part in text
    with pytest.raises(ConfigError, match=r"model\.init_from: cannot load .*nowhere"):
        build(tiny(init_from=str(tmp_path / "nowhere")), 50, 0)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_init_from_what_is_not_a_whole_gpt2_is_one_clear_line(tmp_path: Path, file: str) -> None:
    """transformers would fill in what is missing with random numbers."""
    save_gpt2(tmp_path)
    weights = {name: w for name, w in load_file(tmp_path / "model.safetensors").items() if ".h.1." not in name}
    (tmp_path / "model.safetensors").unlink()
    (torch.save if file.endswith("bin") else save_file)(weights, tmp_path / file)
    with pytest.raises(ConfigError, match=r"model\.init_from: cannot load .*transformer\.h\.1"):
        build(tiny(init_from=str(tmp_path), n_layer=None, n_head=None, n_embd=None), 50, 0)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"model_type": "gpt2"', '"model_type": "llama"'))
    with pytest.raises(ConfigError, match=r"model\.init_from: cannot load .*: config\.json says llama, not gpt2"):
        build(tiny(init_from=str(tmp_path), n_layer=None, n_head=None, n_embd=None), 50, 0)


def test_a_state_that_no_checkpoint_can_hold_is_refused_before_step_1() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.build=custom_models:Unsavable: no checkpoint .* angles is of complex128, which safetensors"
    ):
        make(build="custom_models:Unsavable")
    assert unsavable({"module._extra_state": {}}) == "module._extra_state is dict and no tensor"


def test_another_block_by_model_build(tmp_path: Path) -> None:
    """Twenty lines of SwiGLU: built, trained for a step, described, restored."""
    model = make(build="custom_models:swiglu")
    assert isinstance(model.transformer.h[0].mlp, SwiGLU)
    rows = tokens()
    loss_sum, count = model(rows[:, :-1], rows[:, 1:])
    assert float(loss_sum.detach() / count) == pytest.approx(math.log(50), rel=0.02)
    loss_sum.backward()
    assert all(p.grad is not None for p in model.parameters())
    again = from_description(describe(model, "custom_models:swiglu"))
    load_plain(again, plain_state(model))
    assert torch.equal(again(rows[:, :-1], rows[:, 1:])[0], loss_sum)
    assert weights_hash(make(build="custom_models:swiglu")) == weights_hash(model)
    for path in ("custom_models:nothing", "no_such_module:f", "custom_models", ""):
        if path:
            with pytest.raises(ConfigError, match=r"model\.build: cannot take .* expected module:function"):
                make(build=path)


def norm_of_a_backward(model: PretrainGPT2, dropout_seed: int = 3) -> tuple[float, list[torch.Tensor]]:
    rows = tokens()
    torch.manual_seed(dropout_seed)
    loss_sum, _ = model(rows[:, :-1], rows[:, 1:])
    loss_sum.backward()
    return float(loss_sum), [p.grad for p in model.parameters() if p.grad is not None]


def test_activation_checkpointing_is_exact_with_dropout() -> None:
    loss, grads = norm_of_a_backward(make(dropout=0.2))
    again, regrads = norm_of_a_backward(make(dropout=0.2, activation_checkpointing=True))
    assert loss == again
    for a, b in zip(grads, regrads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    assert loss != norm_of_a_backward(make())[0], "dropout must be on"


def test_activation_checkpointing_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {False: 0, True: 0}
    for on in calls:
        model = make(activation_checkpointing=on)
        model.transformer.h[0].attn.register_forward_hook(lambda *_, on=on: calls.__setitem__(on, calls[on] + 1))
        norm_of_a_backward(model)
    assert calls == {False: 1, True: 2}


@pytest.fixture
def eager_compiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch.compile without code generation: what is captured is the same, in a fraction of the time. Gives the graph counter."""
    original = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **kwargs: original(self, backend="eager", **kwargs))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["block", "whole"])
def test_compiling_changes_no_name_and_no_number(eager_compiler: Callable[[], int], mode: str) -> None:
    plain, model = make(), make()
    names = [name for name, _ in model.named_parameters()]
    compile_model(model, mode)
    assert [name for name, _ in model.named_parameters()] == names
    assert set(model.state_dict()) == set(plain.state_dict())
    loss, grads = norm_of_a_backward(plain)
    compiled, regrads = norm_of_a_backward(model)
    assert eager_compiler() > 0, "nothing was compiled"
    assert compiled == pytest.approx(loss, rel=1e-6)
    for a, b in zip(grads, regrads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["block", "whole"])
def test_evaluating_in_between_compiles_nothing_again(eager_compiler: Callable[[], int], mode: str) -> None:
    """Four cycles of training and evaluation, the last batch short in tokens but not in shape."""
    from pretrain.evaluation import evaluate

    model = make()
    compile_model(model, mode)
    rows = tokens()
    short = rows.clone()
    short[1:] = 0
    graphs = []
    for _ in range(4):
        norm_of_a_backward(model)
        batches = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()), (short[:, :-1].contiguous(), short[:, 1:].contiguous())]
        evaluate(model, batches, lambda total: total, torch.device("cpu"), same_graph=True)
        graphs.append(eager_compiler())
    assert graphs == [graphs[0]] * 4


def test_ours_and_transformers_agree_after_export(tmp_path: Path) -> None:
    """What is exported is what was trained: logits and gradients."""
    from pretrain import checkpoint

    model = shaken(make())
    path = checkpoint.save(tmp_path / "checkpoints", 1, {"model": named_tensors(model)}, {}, describe(model, None), None)
    export(open_trained(path, pytest.fail), tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    rows = tokens()[:, :-1]
    loss_sum, count = model(rows[:, :-1], rows[:, 1:])
    (loss_sum / count).backward()
    loss = plain(rows, labels=rows).loss
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(loss_sum.detach() / count), rel=1e-5)
    for name, p in plain.named_parameters():
        grad = model.get_parameter(name).grad
        assert grad is not None
        torch.testing.assert_close(grad[: len(p)], p.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_the_vocabulary_may_be_wider_than_the_tokenizers() -> None:
    cfg = tiny(vocab_size=70)
    model = build(cfg, 50, 0)
    assert (model.vocab_size, model.config.vocab_size) == (70, 128)
    assert configs.Config is Config
