"""Documents of one window are as if each were alone: loss, gradients, positions; and where it is not asked for nothing changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import drive
import numpy as np
import pytest
import torch
from group import Ranks
from test_model import T, eager_compiler, shaken, tiny, tokens  # noqa: F401  a fixture
from torch import nn
from torch.nn.attention import flex_attention as torch_flex

from pretrain import checkpoint, document_mask, evaluate_trained
from pretrain import config as configs
from pretrain.config import ConfigError, replace
from pretrain.evaluation import evaluate
from pretrain.export import export, open_trained
from pretrain.loader import IGNORED, open_sets
from pretrain.model import PretrainGPT2, build, compile_model, describe, from_description, load_plain, named_tensors, plain_state
from pretrain.strategies import OPTIONS

EOS = 7


def make(masked: bool = True, **changes: Any) -> PretrainGPT2:
    model = build(replace(tiny(**changes), "data.document_mask", masked), 50, EOS)
    return shaken(model)


def packed() -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """(one row of T + 1 tokens: documents of 4, 4 and, cut short, 8 tokens, and a target; the documents alone as (inputs, targets))."""
    row = tokens(1, seed=4)
    row[row == EOS] = 1
    row[0, [4, 8]] = EOS
    return row, [(row[:, a:b], row[:, a + 1 : b + 1]) for a, b in ((0, 4), (4, 8), (8, 16))]


def loss_and_gradients(model: PretrainGPT2, *batches: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    losses = [model(inputs, targets)[0] for inputs, targets in batches]
    sum(losses).backward()
    return float(sum(losses).detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(one: tuple[float, dict[str, torch.Tensor]], other: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    assert one[1].keys() == other[1].keys()
    for name, grad in one[1].items():
        torch.testing.assert_close(grad, other[1][name], rtol=1e-5, atol=2e-6 * float(grad.abs().max()), msg=name)


def test_documents_and_positions_are_found_from_the_end_of_text_alone() -> None:
    """A row that begins inside a document, one with an empty document, one that ends with an end and one without any."""
    rows = torch.tensor([[1, 2, EOS, 3, 4], [1, EOS, EOS, 5, 6], [EOS, 1, 2, 3, EOS], [1, 2, 3, 4, 5]])
    document, position = document_mask.find(rows, EOS)
    assert document.tolist() == [[0, 0, 1, 1, 1], [0, 1, 2, 2, 2], [1, 1, 1, 1, 2], [0, 0, 0, 0, 0]]
    assert position.tolist() == [[0, 1, 0, 1, 2], [0, 0, 0, 1, 2], [0, 1, 2, 3, 0], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_three_documents_in_a_window_are_three_documents_apart(checkpointing: bool) -> None:
    model = make(activation_checkpointing=checkpointing)
    row, alone = packed()
    together = loss_and_gradients(model, (row[:, :-1], row[:, 1:]))
    same(together, loss_and_gradients(model, *alone))
    plain = loss_and_gradients(make(masked=False), (row[:, :-1], row[:, 1:]))
    assert abs(plain[0] - together[0]) > 0.01 * plain[0], "the documents must see each other without the mask"


def test_what_another_document_says_changes_nothing() -> None:
    """To the bit. The end of a document is its own target, and sees the change; what begins with it does not."""
    row, _ = packed()
    other = row.clone()
    other[0, :4] = (other[0, :4] + 1) % EOS
    for masked, first, equal in ((True, 4, True), (True, 3, False), (False, 4, False)):
        targets = row[:, 1:].clone()
        targets[0, :first] = IGNORED
        assert torch.equal(*(make(masked)(changed[:, :-1], targets)[0] for changed in (row, other))) == equal


def test_one_document_in_a_window_is_an_unmasked_window() -> None:
    rows = tokens()
    rows[rows == EOS] = 1
    batch = (rows[:, :-1], rows[:, 1:])
    same(loss_and_gradients(make(), batch), loss_and_gradients(make(masked=False), batch))


def test_off_is_gpt2_to_the_bit() -> None:
    """No trace in what is saved, and the same kernel."""
    model = make(masked=False)
    assert "document" not in str(describe(model, None))
    assert model.config._attn_implementation == "sdpa"
    assert document_mask.arguments(model, tokens()) == {}


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """FlexAttention's own arithmetic without its kernel, which has no backward on a CPU. What it was called with, for proof."""
    calls: list[str] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(type(kwargs["block_mask"]).__name__)
        return torch_flex.flex_attention(*args, **kwargs)

    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(document_mask, "kernel", lambda *_: "flex")
    monkeypatch.setattr(document_mask, "_compiled_flex", lambda: counted)
    monkeypatch.setattr(document_mask, "create_block_mask", lambda *args, _compile, **kwargs: torch_flex.create_block_mask(*args, **kwargs))
    return calls


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_flex_attention_masks_alike(flex_on_cpu: list[str], checkpointing: bool) -> None:
    model = make(activation_checkpointing=checkpointing)
    row, alone = packed()
    found = loss_and_gradients(model, (row[:, :-1], row[:, 1:]))
    assert flex_on_cpu == ["BlockMask"] * (4 if checkpointing else 2)
    same(found, loss_and_gradients(model, *alone))


def test_flex_is_for_what_it_can_do() -> None:
    cuda = torch.device("cuda")
    assert document_mask.kernel(make(), cuda) == "flex"
    for model, device in ((make(), torch.device("cpu")), (make(dropout=0.1), cuda), (make(n_head=4), cuda)):
        assert document_mask.kernel(model, device) == "dense"


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("kernel", ["dense", "flex"])
@pytest.mark.parametrize("mode", ["block", "whole"])
def test_compiled_it_masks_alike_and_is_compiled_once(
    eager_compiler: Callable[[], int],  # noqa: F811
    request: pytest.FixtureRequest,
    mode: str,
    kernel: str,
) -> None:
    if kernel == "flex":
        request.getfixturevalue("flex_on_cpu")
    plain, model = make(), make()
    compile_model(model, mode)
    row, _ = packed()
    batches = [(row[:, :-1].contiguous(), row[:, 1:].contiguous())]
    expected, graphs = loss_and_gradients(plain, *batches), []
    for _ in range(3):
        same(loss_and_gradients(model, *batches), expected)
        rows = tokens(1).fill_(3)
        evaluate(model, [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())], lambda total: total, torch.device("cpu"), same_graph=True)
        graphs.append(eager_compiler())
    assert graphs == [graphs[0]] * 3
    assert graphs[0] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype: torch.dtype) -> None:
    row, _ = packed()
    exact, _ = make()(row[:, :-1], row[:, 1:])
    with torch.autocast("cpu", dtype):
        loss_sum, _ = make()(row[:, :-1], row[:, 1:])
    assert float(loss_sum) == pytest.approx(float(exact), rel=0.02)
    loss_sum.backward()


def test_samples_come_from_the_same_weights_without_a_mask() -> None:
    masked, plain = make().eval(), make(masked=False).eval()
    prompt = torch.tensor([[1, 2, 3]])
    arguments = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(*(model.as_causal_lm().generate(prompt, **arguments) for model in (masked, plain)))


def test_it_stays_with_the_weights(tmp_path: Path) -> None:
    """In a checkpoint, and in an export, which evaluates as it was trained; transformers itself reads it as any GPT-2."""
    model = make()
    again = from_description(describe(model, None))
    load_plain(again, plain_state(model))
    row, alone = packed()
    batch = (row[:, :-1], row[:, 1:])
    expected = loss_and_gradients(model, *alone)
    same(loss_and_gradients(again, batch), expected)
    path = checkpoint.save(tmp_path / "checkpoints", 1, {"model": named_tensors(model)}, {}, describe(model, None), None)
    export(open_trained(path, pytest.fail), tmp_path / "out")
    same(loss_and_gradients(open_trained(tmp_path / "out", pytest.fail).model, batch), expected)
    started = build(replace(tiny(init_from=str(tmp_path / "out"), n_layer=None, n_head=None, n_embd=None), "run.seed", 1), 50, EOS)
    assert document_mask.asked(started.config) is None


class Other(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))


def test_a_model_of_ones_own_must_say_that_it_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{__name__}:Other"
    with pytest.raises(ConfigError, match=f"data.document_mask=true: what model.build={path} made does not say"):
        build(replace(tiny(build=path), "data.document_mask", True), 50, EOS)
    monkeypatch.setattr(Other, "masks_documents", True, raising=False)
    assert build(replace(tiny(build=path), "data.document_mask", True), 50, EOS).config.document_eos_id == EOS
    assert document_mask.asked(build(replace(tiny(build="custom_models:swiglu"), "data.document_mask", True), 50, EOS).config) == EOS


def test_sets_without_a_known_end_of_text_are_refused(make_set: Callable[..., Path], config: Callable[..., Path], tmp_path: Path) -> None:
    def opened(folder: Path) -> Any:
        return open_sets(configs.load(config({"data.train": folder, "data.document_mask": True})))

    nameless = make_set("nameless", np.arange(400) % 50, eos_id=None)
    with pytest.raises(ConfigError, match=r"nameless \(train\) does not end documents with one known token"):
        opened(nameless)
    bare = tmp_path / "bare"
    bare.mkdir()
    letters = (np.arange(400) % 65).astype("<u2")
    letters.tofile(bare / "train.bin")
    with pytest.raises(ConfigError, match=r"no end-of-text token \(id 50256, .* in the first 400 tokens of .*bare"):
        opened(bare)
    letters[::40] = 50256
    letters.tofile(bare / "train.bin")
    assert opened(bare).tokenizer["eos_id"] == 50256


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_any_layout_and_a_restart_train_alike(
    ranks: Ranks, config: Callable[..., Path], make_set: Callable[..., Path], strategy: str
) -> None:
    """Documents of 9 tokens or so, on two processes, stopped half-way; then evaluated from its checkpoint as while it trained."""
    draw = np.random.default_rng(5)
    folder = make_set("short", *(np.where(draw.random(n) < 0.1, EOS, draw.integers(8, 50, n)) for n in (2049, 129)), eos_id=EOS)
    path = config({"data.train": folder, "data.document_mask": True, "train.eval_every": 3})
    ((rows, weights, _),) = ranks.run(drive.whole, path, ["run.name=one"], size=1)
    two = ["run.name=two", f"strategy.name={strategy}"]
    ranks.run(drive.whole, path, two, 3, size=2)
    (outcome,) = ranks.outcomes(drive.whole, path, ["run.name=two", "data.document_mask=false"], size=1)
    assert "data.document_mask: True -> False" in outcome.error
    again, other, _ = ranks.run(drive.whole, path, two, size=2)[0]
    assert [row["loss"] for row in again if "loss" in row] == pytest.approx([row["loss"] for row in rows if "loss" in row][3:], rel=1e-5)
    assert drive.distance(weights, other) < 1e-5
    ((unmasked, _, _),) = ranks.run(drive.whole, path, ["run.name=unmasked", "data.document_mask=false"], size=1)
    assert [row["loss"] for row in unmasked if "loss" in row] != pytest.approx([row["loss"] for row in rows if "loss" in row], rel=1e-5)
    said = evaluate_trained.evaluate(configs.load(path, two, OPTIONS).folder, None, "val", 2, print)
    last = [row["val_loss"] for row in again if "val_loss" in row][-1]
    assert float(said.split("loss ")[1].split()[0]) == pytest.approx(last, rel=1e-5)
