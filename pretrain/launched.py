"""What the launcher's plugin asks for: which strategy it means, and which of its settings have no say here."""

import json
import os
from dataclasses import dataclass
from typing import Any

from pretrain.config import ConfigError

# Launcher settings that would change the arithmetic if Accelerate read them; ours come from the config alone.
_IGNORED = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("1", "batch.tokens and batch.micro decide the accumulation"),
    "ACCELERATE_DYNAMO_BACKEND": ("NO", "train.compile decides"),
    "ACCELERATE_GRADIENT_CLIPPING": ("none", "optim.grad_clip decides"),
}

_IGNORED_OF_FSDP = {
    "FSDP_OFFLOAD_PARAMS": ("false", "strategy.options.cpu_offload decides"),
    "FSDP_AUTO_WRAP_POLICY": ("TRANSFORMER_BASED_WRAP", "transformer blocks are the units"),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": ("GPT2Block", "transformer blocks are the units"),
    "FSDP_BACKWARD_PREFETCH": ("BACKWARD_PRE", "strategy.options.backward_prefetch decides, in FSDP1 alone"),
    "FSDP_FORWARD_PREFETCH": ("false", "strategy.options decides"),
    "FSDP_USE_ORIG_PARAMS": ("true", "the optimiser needs the parameters' names"),
    "FSDP_STATE_DICT_TYPE": ("SHARDED_STATE_DICT", "checkpoints have one form"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("false", "model.activation_checkpointing decides"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("false", "model.activation_checkpointing decides"),
    "FSDP_IGNORED_MODULES": ("none", "all weights are sharded"),
}

_IGNORED_OF_DEEPSPEED = {
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ("none", "strategy.options.offload_optimizer decides"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("none", "strategy.options decides"),
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": ("false", "checkpoints have one form"),
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": ("none", "GPT-2 has no experts"),
}

# What the launcher exports of its plugins, by the start of the name.
_PLUGIN_VARIABLES = (
    "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG",
    "ACCELERATE_DEEPSPEED_", "ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_GRADIENT_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_",
)  # fmt: skip

_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # FSDP1's, which count from 1


@dataclass(frozen=True)
class Launched:
    """What the launcher's plugin asks for."""

    strategy: str
    shard_size: int | None = None  # of a mesh


def launched_strategy(world_size: int) -> Launched | None:
    """The strategy that the launcher's plugin is; None where it names none. Raises ConfigError for a plugin that no strategy here is."""
    if _is_on("ACCELERATE_USE_MEGATRON_LM"):
        raise ConfigError("the launcher asks for Megatron-LM, which is not here; use one of configs/accelerate/*.yaml")
    if _is_on("ACCELERATE_USE_FSDP") and _is_on("ACCELERATE_USE_DEEPSPEED"):
        raise ConfigError("the launcher asks for both FSDP and DeepSpeed (ACCELERATE_USE_FSDP, ACCELERATE_USE_DEEPSPEED); drop one")
    copies, shards = _mesh()
    if _is_on("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION", "1") == "2":
        return _launched_fsdp2(copies, shards, world_size)
    if (copies, shards) != (1, 1):
        raise ConfigError(f"the launcher's mesh of {copies} copies × {shards} shards needs FSDP2; use configs/accelerate/hsdp.yaml")
    if _is_on("ACCELERATE_USE_FSDP"):
        return _launched_fsdp1()
    return Launched(f"deepspeed{_zero_stage()}") if _is_on("ACCELERATE_USE_DEEPSPEED") else None


def forget_plugins() -> None:
    """Drop what the launcher exported of its plugins, once `launched_strategy` has read it, and what Accelerate itself has set since.
    It builds a plugin from these variables wherever it is given none (DDP under a launch with FSDP would be wrapped by FSDP), completes
    ours from them where we leave a field out, and transformers loads weights differently when it sees them."""
    for name in [name for name in os.environ if name.startswith(_PLUGIN_VARIABLES)]:
        del os.environ[name]


def settings_without_effect(launched: Launched | None) -> list[str]:
    """A note for each of the launcher's settings that nothing here takes over."""
    notes = []
    for name, (neutral, why) in _ignored(launched).items():
        value = os.environ.get(name, neutral)
        if value.lower() != neutral.lower():
            notes.append(f"{name}={value}, set by the launcher, has no effect: {why}")
    if _is_on("ACCELERATE_USE_DEEPSPEED") and (keys := _settings(_deepspeed_file())):
        path = os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"]
        notes.append(f"{', '.join(keys)} in {path}, named by the launcher, without effect: the config and strategy.options decide")
    return notes


def _is_on(name: str) -> bool:
    return _is_true(os.environ.get(name, "false"))


def _is_true(value: str) -> bool:
    return value.lower() in ("1", "true", "yes", "y", "t", "on")  # as Accelerate reads them


def _mesh() -> tuple[int, int]:
    """(copies, shards of each) that the launcher's ParallelismConfig names; (1, 1) without one."""
    if not _is_on("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return 1, 1
    sizes = {}
    for name in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP"):
        value = os.environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1")
        if not value.isdigit() or int(value) < 1:
            raise ConfigError(f"the launcher's parallelism_config_{name.lower()}_size is {value}; write a whole number above 0")
        sizes[name] = int(value)
    for name, what in (("TP", "tensor"), ("CP", "context"), ("SP", "sequence")):
        if sizes[name] > 1:
            raise ConfigError(
                f"the launcher asks for {what} parallelism (parallelism_config_{name.lower()}_size={sizes[name]}), which is not here: every "
                "strategy is data-parallel; leave it out"
            )
    return sizes["DP_REPLICATE"], sizes["DP_SHARD"]


def _launched_fsdp1() -> Launched:
    sharding = _sharding()
    if sharding not in ("FULL_SHARD", "SHARD_GRAD_OP"):
        instead = {"NO_SHARD": "ddp", "HYBRID_SHARD": "hsdp", "HYBRID_SHARD_ZERO2": "hsdp"}.get(sharding, "fsdp1")
        raise ConfigError(
            f"the launcher asks for FSDP1's {sharding}, which is not here; use strategy {instead} (configs/accelerate/{instead}.yaml)"
        )
    return Launched("fsdp1" if sharding == "FULL_SHARD" else "fsdp1_grad_op")


def _sharding() -> str:
    """FSDP1's. `accelerate config` writes it as fsdp_reshard_after_forward, which Accelerate itself then overlooks."""
    value = os.environ.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD").upper()
    also = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").upper()
    if value in ("FULL_SHARD", "1") and also not in ("TRUE", "FALSE"):
        value = also
    return _SHARDING[int(value) - 1] if value in ("1", "2", "3", "4", "5") else value


def _launched_fsdp2(copies: int, shards: int, world: int) -> Launched:
    if copies > 1 and shards == 1:
        raise ConfigError(f"the launcher's mesh has {copies} copies and no shards, which is DDP; use configs/accelerate/ddp.yaml")
    if copies * shards not in ((1, world) if copies == 1 else (world,)):
        raise ConfigError(
            f"the launcher's mesh is {copies} copies × {shards} shards and {world} processes were started; change "
            "--parallelism_config_dp_replicate_size, --parallelism_config_dp_shard_size or --num_processes"
        )
    if copies > 1:
        return Launched("hsdp", shards)
    return Launched("fsdp2" if _is_true(os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true")) else "fsdp2_grad_op")


def _zero_stage() -> int:
    """By DeepSpeed's own file, else by the launcher, else what Accelerate takes."""
    told = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    stage = told or "2"
    if file := _deepspeed_file():
        in_file = str(file.get("zero_optimization", {}).get("stage", 0))
        stage = stage if in_file == "auto" else in_file
        if told not in (None, stage):
            path = os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"]
            raise ConfigError(f"the launcher asks for DeepSpeed's stage {told} and {path} for {stage}; drop one")
    if stage not in ("1", "2", "3"):
        raise ConfigError(f"the launcher asks for DeepSpeed's stage {stage}; 1, 2 and 3 are here (without sharding: strategy.name=ddp)")
    return int(stage)


def _deepspeed_file() -> dict[str, Any]:
    """DeepSpeed's own config file, if the launcher names one."""
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if path == "none":
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}, which the launcher names as DeepSpeed's config file, cannot be read as JSON ({error})") from None
    if not isinstance(found, dict) or not isinstance(found.get("zero_optimization", {}), dict):
        raise ConfigError(f"{path}, which the launcher names as DeepSpeed's config file, is not DeepSpeed's; write zero_optimization.stage")
    return found


def _settings(deepspeed: dict[str, Any]) -> list[str]:
    """The keys of DeepSpeed's config file that say more than the stage."""

    def says(value: Any) -> bool:
        return any(map(says, value.values())) if isinstance(value, dict) else value not in ("auto", "none", None, False)

    flat = {key: value for key, value in deepspeed.items() if key != "zero_optimization"}
    flat |= {f"zero_optimization.{key}": value for key, value in deepspeed.get("zero_optimization", {}).items() if key != "stage"}
    return [key for key, value in flat.items() if says(value) and (key, value) != ("gradient_accumulation_steps", 1)]


def _ignored(launched: Launched | None) -> dict[str, tuple[str, str]]:
    """Settings of the launcher that nothing here takes over: (what is no opinion, what decides instead)."""
    ignored = dict(_IGNORED)
    if _is_on("ACCELERATE_USE_DEEPSPEED"):
        ignored |= _IGNORED_OF_DEEPSPEED
    if launched is None or not _is_on("ACCELERATE_USE_FSDP"):
        return ignored
    ignored |= _IGNORED_OF_FSDP
    if launched.strategy == "hsdp":
        ignored["FSDP_RESHARD_AFTER_FORWARD"] = ("true", "strategy.options.reshard_after_forward decides")
    if not launched.strategy.startswith("fsdp1"):
        ignored["FSDP_SHARDING_STRATEGY"] = ("FULL_SHARD", "in FSDP2 fsdp_reshard_after_forward decides")
    elif os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "false":
        ignored["FSDP_RESHARD_AFTER_FORWARD"] = ("true", "in FSDP1 fsdp_sharding_strategy decides")
    return ignored
