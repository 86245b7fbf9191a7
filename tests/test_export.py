"""What comes out is ordinary: it loads with transformers, and holds what was trained."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import drive
import pytest
import torch
from group import Ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from pretrain import checkpoint, evaluate_trained
from pretrain import config as configs
from pretrain import model as models
from pretrain.config import ConfigError
from pretrain.export import export, open_trained


def quiet(line: str) -> None:
    pass


@pytest.fixture
def trained(ranks: Ranks, config: Callable[..., Path], toy_set: Path) -> tuple[Path, drive.Weights]:
    """(run folder, weights at its end)."""
    words = Tokenizer(WordLevel({f"w{k}": k for k in range(50)}, unk_token="w1"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0").save_pretrained(toy_set / "tokenizer")
    path = config({"train.checkpoint_every": 3, "model.dropout": 0.1, "data.train": toy_set})
    ((_, weights, _),) = ranks.run(drive.whole, path, size=1)
    return configs.load(path).folder, weights


def numpy_of(model: models.PretrainGPT2) -> drive.Weights:
    return {name: tensor.numpy() for name, tensor in models.plain_state(model).items()}


def test_an_export_is_a_hugging_face_folder(trained: tuple[Path, drive.Weights], tmp_path: Path) -> None:
    run, weights = trained
    export(open_trained(run, pytest.fail), tmp_path / "out")
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert isinstance(model, GPT2LMHeadModel)
    assert not any(found[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.config.vocab_size == len(model.transformer.wte.weight) == 50, "no padded rows"
    assert (model.config.n_positions, model.config.eos_token_id) == (16, 0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert drive.largest_difference({name: p.detach().numpy() for name, p in model.named_parameters()}, weights)[0] == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w3 w4")["input_ids"] == [3, 4]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as opened:
        plain = GPT2LMHeadModel(GPT2Config.from_pretrained(tmp_path / "out"))
        assert set(opened.keys()) == {name for name, _ in plain.named_parameters()}


def test_runs_checkpoints_and_exports_open_alike(trained: tuple[Path, drive.Weights], tmp_path: Path) -> None:
    run, weights = trained
    export(open_trained(run, quiet), tmp_path / "out")
    for path in (run, run / "checkpoints" / "step_00000006", tmp_path / "out"):
        opened = open_trained(path, pytest.fail)
        assert drive.largest_difference(numpy_of(opened.model), weights)[0] == 0
        assert not opened.model.training
        assert opened.tokenizer.eos_token_id == 0
    older = open_trained(run / "checkpoints" / "step_00000003", quiet)
    assert drive.largest_difference(numpy_of(older.model), weights)[0] > 0
    losses = {evaluate_trained.evaluate(path, run.parents[1] / "toy", "val", micro, quiet).split(": ")[1].split("(")[0]
              for path in (run, tmp_path / "out") for micro in (1, 3)}  # fmt: skip
    assert len(losses) == 1


def test_a_damaged_checkpoint_is_passed_over_by_name(trained: tuple[Path, drive.Weights]) -> None:
    run, _ = trained
    newest = run / "checkpoints" / "step_00000006"
    os.truncate(next((newest / "model").iterdir()), 50)
    said: list[str] = []
    assert open_trained(run, said.append).source.name == "step_00000003"
    assert str(newest) in said[0]
    with pytest.raises(ConfigError, match=r"neither a run, nor a whole checkpoint, nor an exported folder: .*bytes instead of"):
        open_trained(newest, quiet)
    shutil.rmtree(run / "checkpoints" / "step_00000003")
    with pytest.raises(ConfigError, match="holds no valid checkpoint yet"):
        open_trained(run, quiet)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run, checkpoint or exported folder"):
        open_trained(tmp_path / "none", quiet)
    with pytest.raises(ConfigError, match=r"neither a run.*manifest\.json is missing"):
        open_trained(tmp_path, quiet)


def test_a_prepared_set_is_no_run(toy_set: Path) -> None:
    with pytest.raises(ConfigError, match="is a prepared set: name a run"):
        open_trained(toy_set, quiet)


def test_what_is_not_a_whole_gpt2_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """transformers would fill in what is missing with random numbers, and a loss of these would pass for one."""
    llama, cut, none = tmp_path / "llama", tmp_path / "cut", tmp_path / "none"
    LlamaForCausalLM(LlamaConfig(vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                                 max_position_embeddings=8)).save_pretrained(llama)  # fmt: skip
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=8, vocab_size=20)).save_pretrained(cut)
    weights = load_file(cut / "model.safetensors")
    save_file({name: w for name, w in weights.items() if ".h.1." not in name}, cut / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"cannot load {llama}: config.json says llama, not gpt2"):
        open_trained(llama, quiet)
    capfd.readouterr()
    with pytest.raises(
        ConfigError, match=rf"cannot load {cut}: 12 of its weights are missing or have another shape, transformer\.h\.1\.\S+ among them"
    ):
        open_trained(cut, quiet)
    assert "MISSING" not in "".join(capfd.readouterr()), "a table of them"
    shutil.copytree(cut, none)
    (none / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=f"cannot load {none}: .*no file named model.safetensors"):
        open_trained(none, quiet)
    (none / "config.json").write_text(
        (cut / "config.json").read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    )
    with pytest.raises(ConfigError, match="its head has weights of its own"):
        open_trained(none, quiet)
    save_file({**weights, "transformer.wpe.weight": torch.zeros(4, 16)}, cut / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=rf"cannot load {cut}: 1 of its weights are missing or have another shape, transformer\.wpe\.weight among them"
    ):
        open_trained(cut, quiet)


def test_a_checkpoint_knows_its_run_wherever_one_stands(trained: tuple[Path, drive.Weights], monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = trained
    monkeypatch.chdir(run / "checkpoints")
    assert open_trained(Path("step_00000006"), quiet).tokenizer is not None
    monkeypatch.chdir("step_00000006")
    assert "toy" in evaluate_trained.evaluate(Path("."), None, "train", 8, quiet)


def test_an_export_appears_whole_or_not_at_all(
    trained: tuple[Path, drive.Weights], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_trained(trained[0], quiet)
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="there exists; choose another --output or remove it"):
        export(opened, tmp_path / "there")

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(opened.tokenizer, "save_pretrained", killed)
        with pytest.raises(KeyboardInterrupt):
            export(opened, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export(opened, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("out")) == ["out"]


def test_a_model_of_ones_own_cannot_pretend_to_be_gpt2(ranks: Ranks, config: Callable[..., Path], tmp_path: Path) -> None:
    path = config({"model.build": "custom_models:swiglu", "train.max_steps": 1})
    ranks.run(drive.whole, path, size=1)
    opened = open_trained(configs.load(path).folder, quiet)
    with pytest.raises(ConfigError, match=r"was made by model\.build: .*its weights are safetensors in .*model"):
        export(opened, tmp_path / "out")


@pytest.mark.parametrize("activation", ["gelu_new", "relu"])
def test_other_peoples_gpt2_opens_as_itself(tmp_path: Path, activation: str) -> None:
    """Evaluated and exported with the function that it was trained with."""
    torch.manual_seed(3)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=8, vocab_size=20, activation_function=activation)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    model.save_pretrained(tmp_path / "theirs")
    opened = open_trained(tmp_path / "theirs", quiet)
    tokens = torch.arange(9)[None]
    loss_sum, count = opened.model(tokens[:, :-1], tokens[:, 1:])
    expected = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).logits[0], tokens[0, 1:])
    assert float(loss_sum.detach() / count) == pytest.approx(float(expected.detach()), rel=1e-5)
    export(opened, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(again(tokens[:, :-1]).logits, model(tokens[:, :-1]).logits, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_of_four_ranks_exports_from_one(ranks: Ranks, config: Callable[..., Path], tmp_path: Path) -> None:
    path = config({"train.max_steps": 2})
    _, weights, _ = ranks.run(drive.whole, path)[0]
    run = configs.load(path).folder
    assert checkpoint.verify(run / "checkpoints" / "step_00000002") is None
    export(open_trained(run, quiet), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert drive.largest_difference({name: p.detach().numpy() for name, p in model.named_parameters()}, weights)[0] == 0
