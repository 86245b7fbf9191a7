"""GPT-2 as transformers has it, with the loss inside the forward, padded embedding rows, and initial weights by name.

Shape suffixes: B sequences, T tokens, D width, V rows of the embedding, N = B·T.
"""

import hashlib
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import SAFE_WEIGHTS_NAME, cached_file, logging

from pretrain import document_mask
from pretrain.config import Config, ConfigError
from pretrain.initial import Initial, fill, on_meta
from pretrain.loader import IGNORED
from pretrain.pieces import unsavable

_PAD_ROWS_TO = 64  # matrix products want the vocabulary a multiple of this


class _TokenLoss(torch.autograd.Function):
    """Sum of the cross-entropies of (N, V) logits in fp32, never holding more than one chunk of them in fp32.

    Columns from `vocab_size` on are padding: they get no probability (logit −∞) and no gradient. The backward overwrites the logits with
    their own gradient: nothing else may read them, and nothing of their size is kept beside them. Its product with the factor from outside
    is what is rounded: 1 / tokens in 16 bits would make all gradients longer or shorter by one ratio, up to 0.4 %.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, vocab_size: int) -> Tensor:
        total = logits_NV.new_zeros((), dtype=torch.float32)
        for logits, targets in _chunks(logits_NV, targets_N):
            logits[:, vocab_size:] = -torch.inf
            log_p = logits.log_softmax(dim=-1, dtype=torch.float32)
            total += nn.functional.nll_loss(log_p, targets, reduction="sum", ignore_index=IGNORED)
        ctx.save_for_backward(logits_NV, targets_N)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, targets_N = ctx.saved_tensors
        factor_N = torch.where(targets_N == IGNORED, 0.0, grads[0])
        for logits, targets, factor in _chunks(logits_NV, targets_N, factor_N):
            p = logits.softmax(dim=-1, dtype=torch.float32)
            real = targets.clamp(min=0)[:, None]
            logits.copy_(p.scatter_add_(1, real, p.new_full((), -1.0).expand(real.shape)).mul_(factor[:, None]))
        return logits_NV, None, None


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    size = max(128, -(-len(tensors[0]) // 16))  # few enough that a compiler can unroll them
    return zip(*(t.split(size) for t in tensors), strict=True)


class PretrainGPT2(GPT2LMHeadModel):  # type: ignore[misc]
    """transformers' GPT-2 whose forward returns the loss sum; `config.vocab_size` counts the padded rows."""

    vocab_size: int  # rows that stand for tokens
    masks_documents = True  # does what `config.document_eos_id` asks for

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """(sum of token losses in fp32, number of targets), both 0-d; targets equal to IGNORED do not count."""
        hidden_BTD = self.transformer(inputs_BT, use_cache=False, **document_mask.arguments(self, inputs_BT)).last_hidden_state
        logits_NV = self.lm_head(hidden_BTD).flatten(0, 1)
        targets_N = targets_BT.flatten()
        return _TokenLoss.apply(logits_NV, targets_N, self.vocab_size), (targets_N != IGNORED).sum()

    @torch.no_grad()
    def initialise(self, initial: Initial) -> None:
        for name, parameter in self.named_parameters():
            parameter.copy_(initial(name))

    def initial(self, seed: int) -> Initial:
        """Each weight from its own CPU generator, seeded by (seed, name): the same values however they are laid out. Padded rows are 0."""
        n_layer = self.config.n_layer
        return self.padded(lambda name, real: initialise(name, real, n_layer, seed))

    def padded(self, fill: Callable[[str, Tensor], object]) -> Initial:
        """Weights whose real rows `fill` writes, one at a time."""
        shapes = {name: parameter.shape for name, parameter in self.named_parameters()}

        def initial(name: str) -> Tensor:
            whole = torch.zeros(shapes[name])
            fill(name, self.real(name, whole))
            return whole

        return initial

    def real(self, name: str, tensor: Tensor) -> Tensor:
        """Of a whole weight, without padded rows."""
        return tensor[: self.vocab_size] if name == "transformer.wte.weight" else tensor

    def as_causal_lm(self) -> GPT2LMHeadModel:
        """The same modules behind transformers' own forward, for `generate`. Padded ids must be suppressed there."""
        with torch.device("meta"):
            plain = GPT2LMHeadModel(self.config)
        plain.transformer, plain.lm_head = self.transformer, self.lm_head
        return plain.eval() if not self.training else plain


def initialise(name: str, weight: Tensor, n_layer: int, seed: int) -> None:
    """GPT-2's initialisation: N(0, 0.02), residual projections divided by √(2·layers) (Radford et al. 2019, §2.3), biases 0, gains 1."""
    if weight.ndim <= 1:
        weight.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8]) >> 1)
    weight.normal_(0.0, 0.02 / math.sqrt(2 * n_layer) if name.endswith("c_proj.weight") else 0.02, generator=generator)


def build(cfg: Config, vocab_size: int, eos_id: int | None) -> PretrainGPT2:
    """Whole, on the CPU in fp32, with its initial weights. Raises ConfigError where `init_from` or `build` does not fit."""
    model, initial = outline(cfg, vocab_size, eos_id)
    if initial is not None:
        fill(model, initial, torch.device("cpu"))
    return model


def outline(cfg: Config, vocab_size: int, eos_id: int | None) -> tuple[PretrainGPT2, Initial | None]:
    """(the model on the meta device, its initial weights); one of `model.build`, which may compute what it likes as it is made, whole, and
    None. Raises ConfigError where `init_from` or `build` does not fit."""
    vocab_size = cfg.model.vocab_size or vocab_size
    if cfg.model.init_from:
        config = _config_of(cfg, vocab_size)
    else:
        n_layer, n_head, n_embd = cfg.shape
        config = GPT2Config(
            n_layer=n_layer, n_head=n_head, n_embd=n_embd, n_positions=cfg.data.sequence_length, bos_token_id=eos_id, eos_token_id=eos_id
        )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = cfg.model.dropout
    document_mask.ask(config, eos_id if cfg.data.document_mask else None)
    torch.manual_seed(cfg.init_seed)
    model = _make(config, vocab_size, cfg.model.build)
    initial: Initial | None = None
    if isinstance(model, PretrainGPT2):  # any other module has initialised itself
        initial = model.padded(Pretrained(cfg.model.init_from)) if cfg.model.init_from else model.initial(cfg.init_seed)
    if initial is not None and not on_meta(model):
        model.initialise(initial)
        initial = None
    if cfg.model.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, initial


def describe(model: PretrainGPT2, build: str | None) -> dict[str, Any]:
    """JSON from which `from_description` makes the same module."""
    return {"config": model.config.to_dict(), "vocab_size": model.vocab_size, "build": build}


def from_description(described: Mapping[str, Any]) -> PretrainGPT2:
    """The module, whole on the CPU, with weights still to be loaded."""
    model = _make(GPT2Config.from_dict(dict(described["config"])), described["vocab_size"], described["build"])
    if on_meta(model):
        fill(model, model.padded(lambda name, real: None), torch.device("cpu"))
    return model


def _make(config: GPT2Config, vocab_size: int, build: str | None) -> PretrainGPT2:
    """In training mode, with `config` (padded rows counted) and `vocab_size` attached; ours on the meta device.

    What `build` names may be any module with our forward; it is typed as ours for the attributes that it gets here.
    """
    config.vocab_size = -(-vocab_size // _PAD_ROWS_TO) * _PAD_ROWS_TO
    config._attn_implementation = "sdpa" if document_mask.asked(config) is None else document_mask.NAME
    if config.activation_function == "gelu_new":
        config.activation_function = "gelu_pytorch_tanh"  # the same function in one kernel: a fifth of the step on a CPU
    if build:
        model: PretrainGPT2 = _custom(build)(
            config
        )  # as its author builds it: buffers computed in a constructor don't survive the meta device
        model.config = config
        if problem := unsavable(model.state_dict()):
            raise ConfigError(
                f"model.build={build}: no checkpoint could hold its state: {problem}; register it with persistent=False where it is computed anew, or keep it as another type"
            )
    else:
        with torch.device("meta"):
            model = PretrainGPT2(config)
    if document_mask.asked(config) is not None and not getattr(model, "masks_documents", False):
        raise ConfigError(
            f"data.document_mask=true: what model.build={build} made does not say that it keeps documents apart (masks_documents = True on its class, by config.document_eos_id)"
        )
    model.vocab_size = vocab_size
    model.train()
    return model


def _custom(path: str) -> Any:
    module, _, function = path.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"model.build: cannot take {function!r} from {module!r}: {error}; expected module:function on the Python path"
        ) from None


def _config_of(cfg: Config, vocab_size: int) -> GPT2Config:
    """Of the model that `init_from` names."""
    source = cast(str, cfg.model.init_from)
    with _loading(source):
        c = pretrained_config(source)
    wanted = {
        "vocab_size": vocab_size,
        **({} if cfg.shape == (0, 0, 0) else dict(zip(("n_layer", "n_head", "n_embd"), cfg.shape, strict=True))),
    }
    differ = [f"{name} {getattr(c, name)}, the config asks for {value}" for name, value in wanted.items() if getattr(c, name) != value]
    if c.n_positions < cfg.data.sequence_length:
        differ.append(f"{c.n_positions} positions, data.sequence_length is {cfg.data.sequence_length}")
    if differ:
        raise ConfigError(f"model.init_from: {source} has " + "; ".join(differ))
    return c


class Pretrained:
    """The weights of a Hugging Face model, read when first asked for: one by one from a file of safetensors, else whole."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._stored: Callable[[str], Tensor] | None = None

    def __call__(self, name: str, real: Tensor) -> None:
        with _loading(self._source):
            if self._stored is None:
                self._stored = self._open()
            real.copy_(self._stored(name))

    def _open(self) -> Callable[[str], Tensor]:
        file = cached_file(self._source, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
        if file is None:
            return pretrained_state(self._source).__getitem__
        stored = safe_open(file, "pt")
        short = "transformer.wte.weight" not in stored.keys()  # noqa: SIM118  it is no mapping
        return lambda name: stored.get_tensor(name.removeprefix("transformer.") if short else name)


def pretrained_config(source: str) -> GPT2Config:
    """Of a Hugging Face model. Raises ConfigError where it is no GPT-2, or one whose head has weights of its own."""
    kind = GPT2Config.get_config_dict(source)[0].get("model_type")
    if kind != "gpt2":
        raise ConfigError(f"config.json says {kind}, not gpt2")
    config: GPT2Config = GPT2Config.from_pretrained(source)
    if not config.tie_word_embeddings:
        raise ConfigError("config.json says tie_word_embeddings=false: its head has weights of its own, ours has none")
    return config


def pretrained_state(source: str) -> dict[str, Tensor]:
    """All weights of a Hugging Face model, in fp32. Raises ConfigError where some are not there: transformers would make them up."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it has a table for what we say in a line
    try:
        plain, found = GPT2LMHeadModel.from_pretrained(source, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True)
    finally:
        logging.set_verbosity(verbosity)
    lacking = sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])} - {"lm_head.weight"})
    if lacking:
        raise ConfigError(f"{len(lacking)} of its weights are missing or have another shape, {lacking[0]} among them")
    return plain.state_dict()  # type: ignore[no-any-return]


@contextmanager
def naming(what: str) -> Iterator[None]:
    """What cannot be loaded is said in one line that begins so."""
    try:
        yield
    except Exception as error:  # transformers raises OSError, ValueError, or what the hub's client raised
        raise ConfigError(f"{what}: {str(error).splitlines()[0]}") from None


def _loading(source: str) -> AbstractContextManager[None]:
    return naming(f"model.init_from: cannot load {source!r}")


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent buffer under its plain name, tied ones once."""
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """`named_tensors` without padded rows: what exports and hashes hold."""
    real = model.real if isinstance(model, PretrainGPT2) else lambda _, tensor: tensor
    return {name: real(name, tensor) for name, tensor in named_tensors(model).items()}


@torch.no_grad()
def load_plain(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """The inverse of `plain_state`: every name must be there with its shape; padded rows stay as they are."""
    for name, tensor in plain_state(model).items():
        tensor.copy_(state[name])


def weights_hash(model: PretrainGPT2, initial: Initial | None = None) -> str:
    """Of the real rows of all weights; of those that `initial` gives where the model has none yet."""
    return tensors_hash(
        (name, tensor if initial is None else model.real(name, initial(name))) for name, tensor in plain_state(model).items()
    )


def tensors_hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Of names and bits, in this order."""
    digest = xxhash.xxh3_128()
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)  # a 0-d tensor has no bytes to view
    return digest.hexdigest()


def parameter_count(model: nn.Module) -> int:
    """Real rows only, tied embeddings once: 124,439,808 for `gpt2`."""
    return sum(t.numel() for t in plain_state(model).values())


def flops_per_token(model: nn.Module, sequence_length: int) -> float:
    """Forward and backward: 6·N + 12·layers·width·T (Chowdhery et al. 2022, appendix B), N without position embeddings."""
    matmuls = sum(t.numel() for name, t in plain_state(model).items() if "wpe" not in name)
    config = getattr(model, "config", None)
    attention = 12 * config.n_layer * config.n_embd * sequence_length if config is not None else 0
    return 6 * matmuls + attention


def compile_model(model: nn.Module, mode: str) -> None:
    """In place, so that no saved name changes: each block, or the whole forward."""
    blocks: Iterable[nn.Module] = model.transformer.h if mode == "block" and isinstance(model, PretrainGPT2) else [model]
    for block in blocks:
        block.compile()
