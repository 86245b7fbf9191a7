"""A launch that names a plugin constrains the strategy: it is what runs, or one line says why not (promise 5)."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands import launch as launcher
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from launching import TRAINER, TWO, accelerate, losses, make_set, run, several, write_config

from pretrain import config, launch, machine
from pretrain.config import ConfigError
from pretrain.launch import World, check_launcher
from pretrain.launched import Launched, forget_plugins, launched_strategy
from pretrain.strategies import OPTIONS, choose

CONFIGS = {path.stem: path for path in sorted((TRAINER.parents[1] / "configs" / "accelerate").glob("*.yaml"))}
NO_PLUGIN = ("single", "ddp")
FSDP = {"ACCELERATE_USE_FSDP": "true"}
FSDP2 = {**FSDP, "FSDP_VERSION": "2"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
FELL_BACK = "asked for 2 processes and started 1.*--multi_gpu --num_processes 2"
MESH = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}


def mesh(copies: int, shards: int, **others: int) -> dict[str, str]:
    sizes = {"DP_REPLICATE": copies, "DP_SHARD": shards, **others}
    return {**MESH, **{f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in sizes.items()}}


def export(patch: pytest.MonkeyPatch, variables: Mapping[str, str], size: int = 4) -> None:
    """As in a process that a launcher started with nothing but this; `patch` puts back what `forget_plugins` drops, too."""
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")):
            patch.delenv(name)
    for name, value in {**variables, "WORLD_SIZE": str(size)}.items():
        patch.setenv(name, value)


@pytest.mark.parametrize(("variables", "strategy", "shard_size"), [
    ({}, None, None),
    ({"ACCELERATE_USE_FSDP": "false"}, None, None),
    (mesh(1, 1), None, None),
    (FSDP, "fsdp1", None),
    ({**FSDP, "FSDP_SHARDING_STRATEGY": "FULL_SHARD"}, "fsdp1", None),
    ({**FSDP, "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, "fsdp1_grad_op", None),
    ({**FSDP, "FSDP_SHARDING_STRATEGY": "2"}, "fsdp1_grad_op", None),
    ({**FSDP, "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_RESHARD_AFTER_FORWARD": "shard_grad_op"}, "fsdp1_grad_op", None),  # as `accelerate config` writes it
    (FSDP2, "fsdp2", None),
    ({**FSDP2, "FSDP_RESHARD_AFTER_FORWARD": "true"}, "fsdp2", None),
    ({**FSDP2, "FSDP_RESHARD_AFTER_FORWARD": "false"}, "fsdp2_grad_op", None),
    ({**FSDP2, **mesh(1, 1)}, "fsdp2", None),
    ({**FSDP2, **mesh(1, 4)}, "fsdp2", None),
    ({**FSDP2, **mesh(2, 2)}, "hsdp", 2),
    (DEEPSPEED, "deepspeed2", None),  # Accelerate's default
    *(({**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(n)}, f"deepspeed{n}", None) for n in (1, 2, 3)),
])  # fmt: skip
def test_a_plugin_is_its_strategy(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], strategy: str | None, shard_size: int | None) -> None:  # fmt: skip
    export(monkeypatch, variables)
    assert launched_strategy(4) == (Launched(strategy, shard_size) if strategy else None)


@pytest.mark.parametrize(("variables", "words"), [
    ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM, which is not here"),
    ({**FSDP, **DEEPSPEED}, "both FSDP and DeepSpeed"),
    ({**FSDP, "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, r"FSDP1's HYBRID_SHARD, .* hsdp \(configs/accelerate/hsdp\.yaml\)"),
    ({**FSDP, "FSDP_SHARDING_STRATEGY": "5"}, "FSDP1's HYBRID_SHARD_ZERO2, .* hsdp"),
    ({**FSDP, "FSDP_SHARDING_STRATEGY": "NO_SHARD"}, "FSDP1's NO_SHARD, .* use strategy ddp"),
    ({**FSDP, "FSDP_SHARDING_STRATEGY": "HALF"}, "FSDP1's HALF, .* use strategy fsdp1"),
    ({**FSDP, **mesh(2, 2)}, "mesh of 2 copies × 2 shards needs FSDP2"),
    (mesh(2, 2), "mesh of 2 copies × 2 shards needs FSDP2"),
    ({**DEEPSPEED, **mesh(2, 2)}, "needs FSDP2"),
    ({**FSDP2, **mesh(4, 1)}, r"no shards, which is DDP; use configs/accelerate/ddp\.yaml"),
    ({**FSDP2, **mesh(2, 4)}, "2 copies × 4 shards and 4 processes were started; change --parallelism_config_dp_replicate_size"),
    ({**FSDP2, **mesh(1, 2)}, "1 copies × 2 shards and 4 processes"),
    ({**FSDP2, **mesh(1, 0)}, "parallelism_config_dp_shard_size is 0; write a whole number"),
    *(({**FSDP2, **mesh(1, 2, **{name: 2})}, f"{what} parallelism .parallelism_config_{name.lower()}_size=2.* not here")
      for name, what in (("TP", "tensor"), ("CP", "context"), ("SP", "sequence"))),
    *(({**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": stage}, f"DeepSpeed's stage {stage}; 1, 2 and 3 are here") for stage in ("0", "4")),
])  # fmt: skip
def test_a_plugin_without_a_strategy_is_refused(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str) -> None:
    export(monkeypatch, variables)
    with pytest.raises(ConfigError, match=words) as error:
        check_launcher(World(0, 0, 4, 4), launched_strategy(4))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("content", "stage", "found"), [
    ({"zero_optimization": {"stage": 3}}, None, Launched("deepspeed3")),
    ({"zero_optimization": {"stage": 1}}, "1", Launched("deepspeed1")),
    ({"zero_optimization": {"stage": "auto"}}, "3", Launched("deepspeed3")),
    ({"zero_optimization": {"stage": 3}}, "2", r"stage 2 and .*zero\.json for 3; drop one"),
    ({"train_batch_size": 8}, None, "stage 0; 1, 2 and 3 are here"),
    ({"zero_optimization": {"stage": 0}}, None, "stage 0"),
    ([1], None, "is not DeepSpeed's; write zero_optimization.stage"),
    (None, None, "cannot be read as JSON"),
])  # fmt: skip
def test_deepspeeds_own_file_says_the_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: Any, stage: str | None, found: Launched | str) -> None:  # fmt: skip
    path = tmp_path / "zero.json"
    if content is not None:
        path.write_text(json.dumps(content))
    told = {"ACCELERATE_DEEPSPEED_ZERO_STAGE": stage} if stage else {}
    export(monkeypatch, {**DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path), **told})
    if isinstance(found, Launched):
        assert launched_strategy(4) == found
    else:
        with pytest.raises(ConfigError, match=found):
            launched_strategy(4)


@pytest.mark.parametrize(("variables", "noted"), [
    ({**FSDP2, "FSDP_OFFLOAD_PARAMS": "true"}, "strategy.options.cpu_offload decides"),
    ({**FSDP2, "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, "transformer blocks are the units"),
    ({**FSDP2, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "model.activation_checkpointing decides"),
    ({**FSDP2, "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, "in FSDP2 fsdp_reshard_after_forward decides"),
    ({**FSDP2, **mesh(2, 2), "FSDP_RESHARD_AFTER_FORWARD": "false"}, "strategy.options.reshard_after_forward decides"),
    ({**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "false"}, "in FSDP1 fsdp_sharding_strategy decides"),
    ({**FSDP, "FSDP_BACKWARD_PREFETCH": "BACKWARD_POST"}, "strategy.options.backward_prefetch decides"),
    ({**FSDP, "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}, "checkpoints have one form"),
    ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, "strategy.options.offload_optimizer decides"),
    ({**DEEPSPEED, "ACCELERATE_GRADIENT_CLIPPING": "1.0"}, "optim.grad_clip decides"),
    ({**DEEPSPEED, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "batch.tokens and batch.micro decide"),
    ({"FSDP_OFFLOAD_PARAMS": "true"}, None),  # nobody reads it without the plugin
])  # fmt: skip
def test_settings_without_effect_are_noted(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], noted: str | None) -> None:
    neutral = {"FSDP_OFFLOAD_PARAMS": "false", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "GPT2Block",
               "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
               "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}  # fmt: skip
    export(monkeypatch, {**neutral, **variables})
    notes = check_launcher(World(0, 0, 4, 4), launched_strategy(4))
    assert len(notes) == (noted is not None), notes
    if noted:
        assert f"set by the launcher, has no effect: {noted}" in notes[0]


def test_the_rest_of_deepspeeds_own_file_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    neutral = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": False}, "gradient_accumulation_steps": 1, "gradient_clipping": "auto"}
    zero = {"stage": 2, "offload_optimizer": {"device": "none"}, "overlap_comm": True}
    path.write_text(json.dumps({**neutral, "train_batch_size": 8, "zero_optimization": zero}))
    export(monkeypatch, {**DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)})
    (note,) = check_launcher(World(0, 0, 4, 4), launched_strategy(4))
    assert note.startswith(f"train_batch_size, zero_optimization.overlap_comm in {path}, named by the launcher, without effect")


@pytest.fixture
def cfg(tmp_path: Path) -> config.Config:
    return config.load(write_config(tmp_path / "tiny.yaml", make_set(tmp_path / "set"), batch={"micro": 1}), [], OPTIONS)


def chosen(cfg: config.Config, launched: Launched | None, size: int = 4, **strategy: Any) -> Any:
    cfg = replace(cfg, strategy=replace(cfg.strategy, **strategy))
    return choose(cfg, config.layout(cfg, size, 100), "fp32", launched)


def test_the_launch_constrains_the_strategy(cfg: config.Config) -> None:
    for name in ("ddp", "fsdp2"):
        assert chosen(cfg, None, name=name).name == name  # no opinion
    assert chosen(cfg, Launched("fsdp2")).name == chosen(cfg, Launched("fsdp2"), name="fsdp2").name == "fsdp2"
    with pytest.raises(ConfigError, match=r"the launch asks for fsdp2 and strategy\.name for ddp; drop one"):
        chosen(cfg, Launched("fsdp2"), name="ddp")


def test_a_mesh_is_the_launchs(cfg: config.Config) -> None:
    assert [chosen(cfg, Launched("hsdp", n), 8).shard_size for n in (2, 4)] == [2, 4]
    assert chosen(cfg, Launched("hsdp", 2), 8, name="hsdp", shard_size=2).replicate == 4
    with pytest.raises(ConfigError, match=r"the launch's mesh shards among 2 processes and strategy\.shard_size says 4; drop one"):
        chosen(cfg, Launched("hsdp", 2), 8, name="hsdp", shard_size=4)


@pytest.mark.parametrize("variables", [{**FSDP, **mesh(1, 1)}, {**FSDP2, **mesh(2, 2)}, {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}])  # fmt: skip
def test_the_environment_has_no_say_in_the_accelerator(cfg: config.Config, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:  # fmt: skip
    def built(plugin: Any) -> None:
        raise AssertionError(f"Accelerate built a {type(plugin).__name__} of its own")

    for plugin in (DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig):
        monkeypatch.setattr(plugin, "__post_init__", built)
    export(monkeypatch, variables, size=1)
    forget_plugins()
    AcceleratorState._reset_state(True)  # another test's
    assert chosen(cfg, None, 1).make_accelerator(cfg).distributed_type == DistributedType.NO
    assert not [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_USE_", "ACCELERATE_DEEPSPEED_", "PARALLELISM_"))]


def exported(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> tuple[dict[str, str], int]:
    """(what `accelerate launch` would export, how many processes it would start), by its own way from the arguments to the launcher."""
    found: list[tuple[dict[str, str], int]] = []

    def take(prepare: Callable[[Any], dict[str, str]], several: bool, args: Any) -> None:
        found.append((prepare(args), int(args.num_processes) if several else 1))

    for name, prepare in (
        ("multi_gpu_launcher", prepare_multi_gpu_env),
        ("deepspeed_launcher", lambda args: prepare_deepspeed_cmd_env(args)[1]),
        ("simple_launcher", lambda args: prepare_simple_launcher_cmd_env(args)[1]),
    ):
        monkeypatch.setattr(launcher, name, partial(take, prepare, name != "simple_launcher"))
    monkeypatch.setattr(launcher, "default_config_file", "none of the person's who runs this test")
    launcher.launch_command(launcher.launch_command_parser().parse_args([*arguments, "train.py"]))
    return found[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_file_launches_its_strategy(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    file = load_config_from_file(str(CONFIGS[name]))
    variables, processes = exported(monkeypatch, ["--config_file", str(CONFIGS[name])])
    assert processes == file.num_processes
    export(monkeypatch, variables, processes)
    launched = launched_strategy(processes)
    assert (launched.strategy if launched else None) == (None if name in NO_PLUGIN else name)
    assert check_launcher(World(0, 0, processes, processes), launched) == []


def test_flags_launch_their_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    six = ["--parallelism_config_dp_shard_size", "3", "--num_processes", "6"]
    forms: dict[str, tuple[list[str], Launched]] = {
        "--use_fsdp": (["--use_fsdp", "--num_processes", "2"], Launched("fsdp1")),
        "--fsdp_version 2": (["--use_fsdp", "--fsdp_version", "2", "--fsdp_reshard_after_forward", "false", "--num_processes", "2"], Launched("fsdp2_grad_op")),
        "hsdp.yaml, 6": (["--config_file", str(CONFIGS["hsdp"]), *six], Launched("hsdp", 3)),
    }  # fmt: skip
    for name, (arguments, wanted) in forms.items():
        with monkeypatch.context() as patch:
            variables, processes = exported(patch, arguments)
            export(patch, variables, processes)
            assert launched_strategy(processes) == wanted, name


MULTI_CPU = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_CPU", "num_machines": 1, "num_processes": 2,
             "machine_rank": 0, "main_process_port": 0, "mixed_precision": "no", "use_cpu": True}  # fmt: skip


@pytest.mark.parametrize(("arguments", "processes", "words"), [
    (["--cpu", *TWO], 1, FELL_BACK), (["--config_file", "MULTI_CPU"], 1, FELL_BACK), (TWO, 1, FELL_BACK),
    (["--config_file", str(CONFIGS["fsdp2"]), *TWO, "--multi_gpu"], 2, r"fsdp2\.yaml asks for FSDP, which another of the launcher's flags"),
    ([*several(2), "--mixed_precision", "bf16"], 2, "asks for bf16 and run.precision for fp32.*drop one"),
])  # fmt: skip
def test_a_launch_that_does_something_else_than_it_is_asked_for_is_refused(
    cfg: config.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], processes: int, words: str
) -> None:
    """B95: Accelerate starts one process for each of the first three, and says nothing."""
    file = tmp_path / "multi_cpu.yaml"
    file.write_text(yaml.safe_dump(MULTI_CPU))
    arguments = [str(file) if argument == "MULTI_CPU" else argument for argument in arguments]
    variables, started = exported(monkeypatch, arguments)
    assert started == processes
    export(monkeypatch, variables, started)
    monkeypatch.setattr(launch, "_launcher_command", lambda: [*arguments, "train.py"])
    checks = (
        lambda: check_launcher(World(0, 0, started, started), launched_strategy(started)),
        lambda: machine.choose_precision(cfg, torch.device("cpu")),
    )
    with pytest.raises(ConfigError, match=words) as refused:
        [check() for check in checks]
    assert "\n" not in str(refused.value)


@pytest.mark.launch
def test_a_launch_with_a_plugin(tmp_path: Path) -> None:
    """A config file's strategy is what trains."""
    path = write_config(tmp_path / "tiny.yaml", make_set(tmp_path / "set"), train={"max_steps": 2})
    command = accelerate(["--config_file", str(CONFIGS["fsdp2"]), *TWO], path, "run.name=fsdp2")
    status, started = run(command, tmp_path / "runs" / "fsdp2", cwd=tmp_path, HF_HOME=str(tmp_path / "none"))
    assert status == 0, started.story()
    facts = yaml.safe_load((tmp_path / "runs" / "fsdp2" / "config.yaml").read_text())["facts"]
    assert (facts["strategy"], facts["world_size"], len(losses(tmp_path / "runs" / "fsdp2"))) == ("fsdp2", 2, 2)
    assert "fsdp2 × 2 (gloo)" in started.out.splitlines()[0]
    assert "set by the launcher" not in started.out
