"""The recipe, the gated step and the learning rate: against torch's own optimisers, to the bit where it can be."""

import copy
import dataclasses
import itertools
import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from pretrain.config import Optim
from pretrain.optim import every_parameter, gated_step, lr_at, make_optimizer, make_recipe, orthogonal, set_lr

SCHEDULES = ["cosine", "linear", "constant", "wsd"]
KINDS = [Optim(name="adamw"), Optim(name="sgd", lr=0.1), Optim(name="sgd", lr=0.1, momentum=0.9), Optim(name="muon")]
KIND_NAMES = ["adamw", "sgd", "sgd+momentum", "muon"]
any_kind = pytest.mark.parametrize("optim", KINDS, ids=KIND_NAMES)


def gpt2(layers: int = 1, width: int = 8) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=layers, n_head=2, n_embd=width, n_positions=4, vocab_size=12))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape))
    return model


def optimizer_of(model: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    return make_optimizer(make_recipe(named, optim), named)


def give_gradients(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn_like(p)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights, and all that the optimiser remembers, under names."""
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{name}.{key}": value.clone() for key, value in optimizer.state.get(p, {}).items() if isinstance(value, Tensor)}
    return found


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_matrices_decay_and_vectors_do_not() -> None:
    """transformers' names: ln_1, ln_2, ln_f. Every parameter in exactly one group; the tied head counts once, as the embedding."""
    model = gpt2()
    decayed, rest = optimizer_of(model, Optim(name="adamw", weight_decay=0.1)).param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in rest["params"]} == {1}
    grouped = [id(p) for p in (*decayed["params"], *rest["params"])]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    assert model.lm_head.weight is model.transformer.wte.weight


@any_kind
def test_a_zero_gradient_leaves_decay_alone(optim: Optim) -> None:
    model = gpt2()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optimizer_of(model, dataclasses.replace(optim, lr=0.1, weight_decay=0.1))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    gated_step(optimizer, torch.zeros(()))
    for name, p in model.named_parameters():
        expected = before[name] * 0.99 if p.ndim == 2 else before[name]
        torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=0, msg=name)


def test_wrapped_one_dimensional_parameters_keep_their_groups() -> None:
    """FSDP1 flattens: the recipe goes by name, and was made before."""
    model = gpt2()
    named = dict(model.named_parameters())
    recipe = make_recipe(named, Optim())
    flat = {name: nn.Parameter(p.detach().flatten()) for name, p in named.items()}
    decayed, rest = make_optimizer(recipe, flat).param_groups
    assert {id(p) for p in decayed["params"]} == {id(flat[name]) for name, p in named.items() if p.ndim == 2}
    assert len(decayed["params"]) + len(rest["params"]) == len(flat)


@any_kind
def test_a_refused_step_leaves_no_trace(optim: Optim) -> None:
    """NaN gradients, refused on the device: weights, moments and counters stay to the bit, and the next good step is the one that
    a run without the bad one would have taken."""
    model, twin = gpt2(), gpt2()
    optimizer, other = optimizer_of(model, optim), optimizer_of(twin, optim)
    for seed in (1, 2):
        for m, o in ((model, optimizer), (twin, other)):
            give_gradients(m, seed)
            gated_step(o, torch.zeros(()))
    before = everything(model, optimizer)
    give_gradients(model, 3)
    for p in model.parameters():
        assert p.grad is not None
        p.grad.view(-1)[0] = math.nan
    gated_step(optimizer, torch.ones(()))
    assert_equal(everything(model, optimizer), before)
    for m, o in ((model, optimizer), (twin, other)):
        o.zero_grad(set_to_none=True)
        give_gradients(m, 4)
        gated_step(o, torch.zeros(()))
    assert_equal(everything(model, optimizer), everything(twin, other))


@any_kind
def test_state_is_there_at_once_and_blank(optim: Optim) -> None:
    """Memory runs out before step 1 or not at all, and a checkpoint finds what to load into."""
    model = gpt2()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optimizer_of(model, optim)
    at_first = everything(model, optimizer)
    for name, p in before.items():
        assert torch.equal(at_first[name], p)
    assert all(p.grad is None for p in (*model.parameters(), *every_parameter(optimizer)))
    assert all(not value.any() for name, value in at_first.items() if name not in before)
    give_gradients(model, 1)
    gated_step(optimizer, torch.zeros(()))
    assert everything(model, optimizer).keys() == at_first.keys()


@any_kind
def test_a_rank_may_own_nothing(optim: Optim) -> None:
    """One of ZeRO-1's, where there are more than weights."""
    optimizer = make_optimizer(make_recipe(dict(gpt2().named_parameters()), optim), {})
    gated_step(optimizer, torch.zeros(()))
    assert not optimizer.state


@pytest.mark.parametrize("optim", KINDS[:3], ids=KIND_NAMES[:3])
def test_three_steps_are_torchs_own(optim: Optim) -> None:
    model, twin = gpt2(), gpt2()
    ours = optimizer_of(model, optim)
    matrices, vectors = ([p for p in twin.parameters() if (p.ndim == 2) == two] for two in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    plain: torch.optim.Optimizer = (
        torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)
        if optim.name == "adamw"
        else torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum or 0.0)
    )
    for seed in (1, 2, 3):
        give_gradients(model, seed)
        give_gradients(twin, seed)
        gated_step(ours, torch.zeros(()))
        plain.step()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=name)


def test_muon_takes_q_k_and_v_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As three of torch's Muon on three matrices would, if that were in fp32 as ours is on a CPU; AdamW for all that is not in a block."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    model, twin = gpt2(layers=2), gpt2(layers=2)
    optim = Optim(name="muon", lr=0.02, weight_decay=0.1)
    ours = optimizer_of(model, optim)
    parts: dict[str, list[nn.Parameter]] = {}
    for name, p in twin.named_parameters():
        if ".h." in name and p.ndim == 2:
            pieces = p.detach().chunk(3, dim=1) if "c_attn" in name else [p.detach()]
            parts[name] = [nn.Parameter(piece.clone()) for piece in pieces]
    assert len(parts) == 8
    muons = {name: [torch.optim.Muon([q], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw") for q in pieces]
             for name, pieces in parts.items()}  # fmt: skip
    rest = {name: p for name, p in twin.named_parameters() if name not in parts}
    adamw = torch.optim.AdamW([{"params": [p for p in rest.values() if p.ndim == 2], "weight_decay": 0.1},
                               {"params": [p for p in rest.values() if p.ndim == 1], "weight_decay": 0.0}], lr=0.02, betas=optim.betas)  # fmt: skip
    for seed in (1, 2, 3):
        give_gradients(model, seed)
        give_gradients(twin, seed)
        for name, p in twin.named_parameters():
            for k, piece in enumerate(parts.get(name, ())):
                assert p.grad is not None
                piece.grad = p.grad.chunk(len(parts[name]), dim=1)[k]
                muons[name][k].step()
        adamw.step()
        set_lr(ours, 0.02)
        gated_step(ours, torch.zeros(()))
    expected = {
        name: torch.cat([q.detach() for q in parts[name]], dim=1) if name in parts else p.detach() for name, p in twin.named_parameters()
    }
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_orthogonal() -> None:
    """Tall and wide matrices, many at once as one at a time: singular vectors stay, singular values come near 1."""
    torch.manual_seed(0)
    for shape in ((5, 24, 64), (3, 16, 40), (3, 40, 16)):
        given = torch.randn(shape)
        found = orthogonal(given)
        u, _, vt = torch.linalg.svd(given, full_matrices=False)
        values = torch.diagonal(u.mT @ found @ vt.mT, dim1=1, dim2=2)
        assert ((values > 0.6) & (values < 1.3)).all()
        torch.testing.assert_close(u @ torch.diag_embed(values) @ vt, found, rtol=0, atol=1e-4)
        torch.testing.assert_close(torch.cat([orthogonal(one[None]) for one in given]), found, rtol=0, atol=1e-5)
    assert torch.equal(orthogonal(torch.zeros(1, 4, 4)), torch.zeros(1, 4, 4))


def test_muon_shows_all_gradients_to_a_loss_scaler() -> None:
    """A scaler unscales, and looks for overflow in, what it finds through the parameter groups."""
    model = gpt2()
    optimizer = optimizer_of(model, Optim(name="muon"))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    for p in model.parameters():
        p.grad = torch.full_like(p, 1024.0)
    scaler.unscale_(optimizer)
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert torch.equal(p.grad, torch.ones_like(p)), name


def test_muons_momentum_is_the_parameters_own() -> None:
    """What a checkpoint saves and loads in place is what the next step reads."""
    model, twin = gpt2(), gpt2()
    ours, other = (optimizer_of(m, Optim(name="muon")) for m in (model, twin))
    give_gradients(model, 1)
    gated_step(ours, torch.zeros(()))
    with torch.no_grad():
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.copy_(p)
            for key, value in ours.state[p].items():
                other.state[q][key].copy_(value)
    for m, o in ((model, ours), (twin, other)):
        give_gradients(m, 2)
        gated_step(o, torch.zeros(()))
    assert_equal(everything(twin, other), everything(model, ours))


def test_the_new_learning_rate_is_the_one_used() -> None:
    """B23: nothing about it comes out of a state."""
    for optim in KINDS:
        model = gpt2()
        optimizer = optimizer_of(model, optim)
        set_lr(optimizer, 0.0)
        before = copy.deepcopy(dict(model.named_parameters()))
        give_gradients(model, 1)
        gated_step(optimizer, torch.zeros(()))
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name]), (optim.name, name)


def rates(optim: Optim, steps: int) -> list[float]:
    return [lr_at(step, optim, steps) for step in range(1, steps + 1)]


def test_warm_up_then_cosine_by_hand() -> None:
    optim = Optim(lr=1.0, warmup_steps=4, min_lr_ratio=0.1)
    expected = [0.25, 0.5, 0.75, 1.0] + [0.1 + 0.45 * (1 + math.cos(math.pi * k / 8)) for k in range(1, 9)]
    assert rates(optim, 12) == pytest.approx(expected, rel=1e-12)


def test_linear_constant_and_wsd_by_hand() -> None:
    assert rates(Optim(lr=1.0, schedule="linear", warmup_steps=2, min_lr_ratio=0.0), 6) == pytest.approx([0.5, 1, 0.75, 0.5, 0.25, 0])
    assert rates(Optim(lr=1.0, schedule="constant", warmup_steps=2), 5) == [0.5, 1, 1, 1, 1]
    wsd = Optim(lr=1.0, schedule="wsd", warmup_steps=2, decay_fraction=0.4, min_lr_ratio=0.2)
    assert rates(wsd, 10) == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


@given(
    schedule=st.sampled_from(SCHEDULES),
    steps=st.integers(1, 400),
    data=st.data(),
    ratio=st.floats(0, 1),
    decay=st.floats(0, 1),
)
def test_rises_in_the_warm_up_and_never_after_it(schedule: str, steps: int, data: st.DataObject, ratio: float, decay: float) -> None:
    warmup = data.draw(st.integers(0, steps))
    optim = Optim(lr=0.3, schedule=schedule, warmup_steps=warmup, min_lr_ratio=ratio, decay_fraction=decay)  # type: ignore[arg-type]
    lrs = rates(optim, steps)
    assert all(0 <= lr <= 0.3 * (1 + 1e-12) for lr in lrs)
    assert lrs[:warmup] == sorted(lrs[:warmup])
    if warmup:
        assert lrs[warmup - 1] == pytest.approx(0.3)
    after = lrs[max(0, warmup - 1) :]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))
    falls = {"constant": False, "wsd": round(decay * steps) >= 1}.get(schedule, True)
    if steps > warmup:
        assert lrs[-1] == pytest.approx(0.3 * ratio if falls else 0.3, abs=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_warm_up_begins_with_the_peak_or_just_below(schedule: str) -> None:
    first = lr_at(1, Optim(lr=1.0, schedule=schedule, warmup_steps=0), 1000)  # type: ignore[arg-type]
    assert 0.99 < first <= 1.0
