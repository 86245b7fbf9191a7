"""`pretrain evaluate`: the exact loss of trained weights over a whole split."""

from collections.abc import Callable
from pathlib import Path

import torch
from omegaconf import OmegaConf

from pretrain import evaluation
from pretrain.config import ConfigError
from pretrain.export import Trained, open_trained
from pretrain.loader import evaluation_batches
from pretrain.shards import TokenStream, open_split


def evaluate(run: Path, data: Path | None, split: str, micro: int, say: Callable[[str], None]) -> str:
    """A line for each set; windows are as long as the model's context. Raises ConfigError where there is no data or it does not fit the model."""
    trained = open_trained(run, say)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trained.model.to(device)
    sets = [data] if data else _trained_on(trained.source)
    return "\n".join(_evaluate(trained, open_split(path, split), split, micro, device) for path in sets)


def _evaluate(trained: Trained, stream: TokenStream, split: str, micro: int, device: torch.device) -> str:
    T = trained.model.config.n_positions
    if not stream.windows(T):
        raise ConfigError(f"{stream.name} has {stream.tokens:,} tokens, too few for one window of {T:,} and its target")
    vocab_size = (stream.manifest or {}).get("vocab_size", trained.model.vocab_size)
    if vocab_size > trained.model.vocab_size:
        raise ConfigError(
            f"{stream.name} has ids up to {vocab_size:,}, the model {trained.model.vocab_size:,}: prepare it with the model's tokenizer"
        )
    batches = evaluation_batches(stream, T, micro, stream.windows(T), rank=0, world_size=1,
                                 vocab_size=trained.model.vocab_size, device=device)  # fmt: skip
    loss, tokens = evaluation.evaluate(trained.model, batches, lambda total: total, device)
    split_facts = (stream.manifest or {}).get("splits", {}).get(split, {})
    per_token = split_facts["bytes"] / split_facts["tokens"] if split_facts.get("bytes") else None
    metrics = evaluation.evaluation_metrics(loss, per_token)
    per_byte = f"  {metrics['val_bits_per_byte']:.4f} bits per byte" if per_token else ""
    return f"{stream.name}: loss {loss:.6f}  perplexity {metrics['val_perplexity']:.3f}{per_byte}  ({tokens:,} tokens, {trained.source})"


def _trained_on(checkpoint: Path) -> list[Path]:
    try:
        cfg = OmegaConf.load(checkpoint.resolve().parent.parent / "config.yaml")
    except FileNotFoundError:
        raise ConfigError(f"{checkpoint} does not say what it was trained on; name a set with --data") from None
    return [Path(source.path) for source in cfg.data.val or cfg.data.train]
