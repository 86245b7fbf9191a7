"""Trained weights, wherever they lie: a run folder, one of its checkpoints, or an exported Hugging Face folder."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from pretrain import checkpoint
from pretrain import model as models
from pretrain.config import ConfigError
from pretrain.tokenization import load_tokenizer


@dataclass(frozen=True)
class Trained:
    model: models.PretrainGPT2  # on the CPU, in evaluation mode
    tokenizer: Any  # None where neither run nor folder has one
    tokenizer_folder: Path
    source: Path
    custom: bool  # made by model.build: transformers has no class for it


def open_trained(path: Path, say: Callable[[str], None]) -> Trained:
    """Raises ConfigError where there are no weights, or none that are whole."""
    if (path / "config.json").exists():
        return _open_exported(path)
    if (path / "checkpoints").is_dir():
        found = checkpoint.newest_valid(path / "checkpoints", say)
        if found is None:
            raise ConfigError(f"{path / 'checkpoints'} holds no valid checkpoint yet")
        path = found
    elif not path.is_dir():
        raise ConfigError(f"{path}: no such run, checkpoint or exported folder")
    elif _is_prepared(path):
        raise ConfigError(
            f"{path} is a prepared set: name a run, a checkpoint or an exported folder (evaluate takes a set as --data {path})"
        )
    elif problem := checkpoint.verify(path):
        raise ConfigError(f"{path} is neither a run, nor a whole checkpoint, nor an exported folder: {problem}")
    described = checkpoint.read_json(path, "model.json")
    model = models.from_description(described)
    checkpoint.load(path, {"model": models.named_tensors(model)})
    return _trained(model, path.resolve().parent.parent / "tokenizer", path, custom=described["build"] is not None)


def _is_prepared(path: Path) -> bool:
    try:
        return "splits" in json.loads((path / checkpoint.MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        return False


def _open_exported(path: Path) -> Trained:
    with models.naming(f"cannot load {path}"):
        config = models.pretrained_config(str(path))
        state = models.pretrained_state(str(path))
    model = models.from_description({"config": config.to_dict(), "vocab_size": config.vocab_size, "build": None})
    models.load_plain(model, state)
    return _trained(model, path, path, custom=False)


def _trained(model: models.PretrainGPT2, tokenizer_folder: Path, source: Path, *, custom: bool) -> Trained:
    has_one = any((tokenizer_folder / name).exists() for name in ("tokenizer.json", "vocab.json"))
    tokenizer = load_tokenizer(tokenizer_folder) if has_one else None
    return Trained(model.eval(), tokenizer, tokenizer_folder, source, custom)


def export(trained: Trained, output: Path) -> None:
    """An ordinary Hugging Face folder: fp32 weights without padded rows, and the tokenizer. Appears complete or not at all."""
    if trained.custom:
        raise ConfigError(
            f"{trained.source} was made by model.build: transformers has no class that would load it; its weights are safetensors in {trained.source}/model"
        )
    if output.exists():
        raise ConfigError(f"{output} exists; choose another --output or remove it")
    described = models.describe(trained.model, None)
    ordinary = {**described["config"], "vocab_size": described["vocab_size"]}
    if ordinary["activation_function"] == "gelu_pytorch_tanh":
        ordinary["activation_function"] = "gelu_new"  # the same function, under the name that GPT-2 has in every version
    plain = GPT2LMHeadModel(GPT2Config.from_dict(ordinary))
    with torch.no_grad():
        for name, tensor in models.plain_state(trained.model).items():
            plain.get_parameter(name).copy_(tensor)
    temporary = output.with_name(f"{output.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    plain.save_pretrained(temporary)
    if trained.tokenizer is not None:
        trained.tokenizer.save_pretrained(temporary)
    temporary.rename(output)
