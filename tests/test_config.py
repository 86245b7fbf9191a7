"""The config: strict, complete in what it says is wrong, and never guessing."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from pretrain.config import (
    PRESETS,
    Compare,
    Config,
    ConfigError,
    Layout,
    Network,
    Source,
    as_run,
    build_options,
    duration,
    everything_hash,
    identity,
    identity_hash,
    layout,
    load,
    profile_window,
    replace,
    smaller_micro,
    to_dict,
)
from pretrain.strategies import OPTIONS

CONFIGS = Path(__file__).parents[1] / "configs"
SHIPPED = [p for p in sorted(CONFIGS.rglob("*.yaml")) if p.relative_to(CONFIGS).parts[0] not in ("expected", "accelerate")]
GOOD = {
    "data": {"train": "data/x", "sequence_length": 16},
    "model": {"preset": "tiny"},
    "batch": {"tokens": 128, "micro": 2},
    "train": {"max_steps": 10},
}
YAML = "data: {train: d}\nmodel: {preset: tiny}\ntrain: {max_steps: 1}\n"
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write("text") or write({"optim.lr": 1}): a config file; the latter is GOOD with these keys changed."""

    def to_file(content: str | dict[str, Any]) -> Path:
        if isinstance(content, dict):
            sections = json.loads(json.dumps(GOOD))
            for dotted, value in content.items():
                section, key = dotted.split(".", 1)
                sections.setdefault(section, {})[key] = value
            content = json.dumps(sections)
        path = tmp_path / "case.yaml"
        path.write_text(content, encoding="utf-8")
        return path

    return to_file


def complaints(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load(path, overrides, OPTIONS)
    return str(raised.value).splitlines()


def test_the_good_one(write: Write) -> None:
    cfg = load(write({}), (), OPTIONS)
    assert (cfg.run.name, cfg.folder, cfg.shape) == ("case", Path("runs/case"), (4, 4, 128))
    assert cfg.data.train == (Source("data/x"),)
    assert (cfg.init_seed, cfg.data_seed) == (1337, 1337)
    assert dataclasses.astuple(load(write({}), ["run.seed=5", "run.data_seed=6"]))[0][2:5] == (5, None, 6)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.run.seed = 1  # type: ignore[misc]


def test_every_mistake_is_listed_at_once(write: Write) -> None:
    """Path, what was found, what would be right; from the file and the command line alike."""
    path = write(
        "dta: {train: x}\n"
        "data: {train: data/x, sequence_lenght: 16}\n"
        "model: {preset: gpt3}\n"
        "optim: {lr: fast, betas: [0.9], warmup_steps: 1.5, name: adam}\n"
        "run: {deterministic: maybe}\n"
        "train: 7\n"
    )
    found = complaints(path, "train.max_step=3", "batch.micro=-1", "--train.log_every=5", "max_steps=3", "optim.schedule=cosin")
    expected = [
        r"^train: expected a section of keys, found 7",
        r"^--train\.log_every=5: write it without --: train\.log_every=5",
        r"^max_steps=3: expected section\.key=value",
        r"^run\.deterministic: expected true or false, found 'maybe'",
        r"^optim\.lr: expected a number, found 'fast'",
        r"^optim\.betas: expected 2 values, found \[0\.9\]",
        r"^optim\.warmup_steps: expected a whole number, found 1\.5",
        r"^optim\.name: expected one of adamw, muon, sgd; found 'adam'; did you mean adamw\?",
        r"^optim\.schedule: .*found 'cosin'; did you mean cosine\?",
        r"^dta\.train: unknown key; did you mean data\.train\?",
        r"^data\.sequence_lenght: unknown key; did you mean data\.sequence_length\?",
        r"^train\.max_step: unknown key; did you mean train\.max_steps\?",
        r"^model\.preset: unknown size 'gpt3'; did you mean gpt2\?",
        r"^batch\.micro: must be above 0, found -1",
        r"^train: give exactly one of max_steps, max_tokens and epochs",
    ]
    for pattern in expected:
        assert sum(bool(re.search(pattern, line)) for line in found) == 1, (pattern, found)
    assert len(found) == len(expected)


def test_the_right_key_in_the_wrong_section_is_recognised(write: Write) -> None:
    assert complaints(write({"train.lr": 1e-3})) == ["train.lr: unknown key; did you mean optim.lr?"]
    assert complaints(write({}), "xyz.qqq=1") == ["xyz.qqq: unknown key"]


@pytest.mark.parametrize("prefix", ["train.max_s=3", "tr.max_steps=3", "optim.l=3", "train.log=3"])
def test_no_prefix_is_completed(write: Write, prefix: str) -> None:
    (line,) = complaints(write({}), prefix)
    assert line.startswith(f"{prefix.split('=')[0]}: unknown key")


@pytest.mark.parametrize("flag", ["--train.max_steps=3", "--train.max_steps 3", "-train.max_steps=3"])
def test_dashes_get_the_answer(write: Write, flag: str) -> None:
    assert complaints(write({}), flag) == [f"{flag}: write it without --: train.max_steps=3"]


BOOLEANS = ["run.deterministic", "data.shuffle", "model.activation_checkpointing", "track.tensorboard", "run.tf32"]


@pytest.mark.parametrize("name", BOOLEANS)
def test_booleans_say_what_they_mean(write: Write, name: str) -> None:
    section, key = name.split(".")
    for text, value in {"False": False, "false": False, "0": False, "no": False, "off": False, "FALSE": False, "True": True,
                        "true": True, "1": True, "yes": True, "on": True}.items():  # fmt: skip
        assert getattr(getattr(load(write({}), [f"{name}={text}"]), section), key) is value, text
        written = write(
            YAML + f"{section}: {{{key}: {text}}}\n"
            if section not in YAML
            else YAML.replace(f"{section}: {{", f"{section}: {{{key}: {text}, ")
        )
        assert getattr(getattr(load(written), section), key) is value
    for text in ("maybe", "", "2", "null", "[]", "1.5", "[true]"):
        assert re.match(rf"{name}: expected true or false, found ", complaints(write({}), f"{name}={text}")[0]), text


def test_a_float_that_looks_like_a_boolean_is_not_turned_around(write: Write) -> None:
    """1.0 is true or refused, never false."""
    with contextlib.suppress(ConfigError):
        assert load(write({"run.deterministic": 1.0})).run.deterministic is True


@pytest.mark.parametrize("word", ["off", "Off", "OFF", "'off'", "no", "false"])
def test_off_is_off_though_yaml_reads_it_as_a_boolean(write: Write, word: str) -> None:
    text = f"data: {{train: data/x}}\nmodel: {{preset: tiny}}\ntrain: {{max_steps: 1, compile: {word}}}\ntrack: {{wandb: {word}}}\n"
    cfg = load(write(text))
    assert (cfg.train.compile, cfg.track.wandb) == ("off", "off")
    assert load(write({}), [f"track.wandb={word}"]).track.wandb == "off"


@pytest.mark.parametrize("name", ["off", "007", "1e3", "2024", "yes"])
def test_a_name_is_taken_as_it_is_written(write: Write, name: str) -> None:
    """YAML would read another value, and with it another run folder."""
    assert load(write({}), [f"run.name={name}"]).run.name == name


def test_on_is_no_mode(write: Write) -> None:
    assert re.match(r"track\.wandb: expected one of off, offline, online; found True", complaints(write({}), "track.wandb=on")[0])


def test_a_key_given_twice_is_refused(write: Write) -> None:
    (line,) = complaints(write("data: {train: a}\ntrain: {max_steps: 3}\ntrain: {max_steps: 4}\n"))
    assert "not valid YAML" in line
    assert "duplicate key train" in line
    (line,) = complaints(write("data: {train: a}\ntrain:\n  max_steps: 3\n  max_steps: 4\n"))
    assert "duplicate key max_steps" in line


@pytest.mark.parametrize(
    ("text", "value"), [("1e9", 10**9), ("1_000_000", 10**6), ("2.5e3", 2500), ("1000000000", 10**9), ("9007199254740993", 2**53 + 1)]
)
def test_whole_numbers_may_be_written_short(write: Write, text: str, value: int) -> None:
    found = load(write({"train.max_steps": None}), [f"train.max_tokens={text}"]).train.max_tokens
    assert found == value
    assert type(found) is int


def test_numbers_are_numbers(write: Write) -> None:
    cfg = load(write("data: {train: d}\nmodel: {preset: tiny}\ntrain: {max_steps: 1}\noptim: {lr: 6e-4, weight_decay: 0, grad_clip: 1}\n"))
    assert (cfg.optim.lr, type(cfg.optim.weight_decay), type(cfg.optim.grad_clip)) == (6e-4, float, float)
    for bad in ("optim.lr=true", "batch.micro=true", "batch.micro='8'", "batch.micro=1.5", "optim.lr='1'", "batch.micro=null"):
        name = bad.split("=")[0]
        assert re.match(rf"{re.escape(name)}: expected a (whole )?number, found ", complaints(write({}), bad)[0]), bad


@pytest.mark.parametrize("bad", ["optim.lr=.nan", "optim.grad_clip=.nan", "model.dropout=.nan", "train.hang_timeout=.nan", "optim.lr=-1",
                                 "model.dropout=1.5", "optim.min_lr_ratio=-0.1", "train.log_every=0", "train.keep_last=0"])  # fmt: skip
def test_impossible_values_are_refused(write: Write, bad: str) -> None:
    assert complaints(write({}), bad)[0].startswith(bad.split("=")[0])


@pytest.mark.parametrize("bad", [".nan", ".inf", "0", "-1"])
def test_impossible_epochs_are_refused(write: Write, bad: str) -> None:
    assert complaints(write({"train.max_steps": None}), f"train.epochs={bad}")[0].startswith("train.epochs")


def test_a_network_is_given_as_a_mapping_or_by_its_keys(write: Write) -> None:
    network = Network(bandwidth_gbit=0.5, latency_ms=10.0)
    assert load(write({"compare.network": {"bandwidth_gbit": 0.5, "latency_ms": 10}})).compare.network == network
    assert load(write({}), ["compare.network.bandwidth_gbit=0.5", "compare.network.latency_ms=10"]).compare.network == network
    assert load(write({"compare.network": {"bandwidth_gbit": 2}}), ["compare.network.bandwidth_gbit=0.5"]).compare.network == Network(0.5)
    assert load(write({})).compare.network is None
    for bad in ("bandwidth_gbit=0", "latency_ms=-1", "speed=3", "bandwidth_gbit=fast"):
        (line,) = complaints(write({}), f"compare.network.{bad}")
        assert line.startswith("compare.network: expected a "), line


def test_of_a_comparison_a_run_keeps_the_network_alone(write: Write) -> None:
    assert "compare" not in as_run(load(write({"compare.members": [{"name": "ddp"}]})))
    assert as_run(load(write({"compare.seeds": 3, "compare.network": {"bandwidth_gbit": 2}})))["compare"] == {
        "network": {"bandwidth_gbit": 2.0, "latency_ms": 0.0}
    }


def test_what_is_profiled_is_a_start_and_a_number_of_updates(write: Write) -> None:
    assert profile_window("20:3") == range(21, 24)
    assert load(write({}), ["train.profile=20:3"]).train.profile == "20:3"  # and not a number to the base of sixty
    for bad in ("20", "20:0", "-1:3", "a:b"):
        assert complaints(write({}), f"train.profile='{bad}'")[0].startswith("train.profile: expected START:STEPS")


def test_contradictions_name_their_keys(write: Write) -> None:
    for changes, words in (
        ({"model.n_layer": 2}, "either a preset or n_layer"),
        ({"model.preset": None, "model.n_layer": 2}, "all of n_layer, n_head and n_embd"),
        (
            {"model.preset": None, "model.n_layer": 2, "model.n_head": 3, "model.n_embd": 32},
            "model.n_embd: 32 is not divisible by n_head=3",
        ),
        ({"data.train": []}, "data.train: missing"),
        ({"train.epochs": 1}, "exactly one of"),
        ({"train.max_steps": None}, "exactly one of"),
        ({"data.train": [{"weight": 1}]}, "a list of paths or of {path, weight}"),
        ({"data.train": [{"path": "a", "weight": 0}]}, "the weight of a must be above 0"),
        ({"data.train": [{"path": "a", "weight": -1}]}, "the weight of a must be above 0"),
        ({"data.train": [{"path": "a", "weight": 1}, "b"]}, "some sets have weights and others have not"),
        ({"data.val": [{"path": "a", "weight": 1}]}, "data.val: every set is evaluated by itself"),
        ({"run.name": "a/b"}, "run.name: must be one folder name"),
        ({"run.name": ".."}, "run.name: must be one folder name"),
    ):
        found = complaints(write(changes))
        assert words in found[0]
        assert len(found) <= 2, found


def test_a_mixture_keeps_its_weights(write: Write) -> None:
    cfg = load(write({"data.train": [{"path": "a", "weight": 3}, {"path": "b", "weight": 0.5}]}))
    assert cfg.data.train == (Source("a", 3.0), Source("b", 0.5))
    assert load(write({}), ["data.train=[a, b]"]).data.train == (Source("a"), Source("b"))
    assert load(write({"data.train": to_dict(cfg)["data"]["train"]})) == cfg
    by_size = replace(cfg, "data.train", (Source("a"), Source("b")))
    assert load(write({"data.train": to_dict(by_size)["data"]["train"]})) == by_size


def test_options_are_checked_against_the_strategys_own(write: Write) -> None:
    cfg = load(write({"strategy.name": "ddp"}), ["strategy.options.bucket_cap_mb=50"], OPTIONS)
    assert build_options(OPTIONS["ddp"], cfg.strategy.options).bucket_cap_mb == 50
    assert complaints(write({"strategy.name": "ddp", "strategy.options": {"bucket_cap": 5, "static_graph": "maybe"}})) == [
        "strategy.options.bucket_cap: unknown key; did you mean bucket_cap_mb?",
        "strategy.options.static_graph: expected true or false, found 'maybe'",
    ]
    assert complaints(write({"strategy.name": "single", "strategy.options": {"bucket_cap_mb": 5}})) == [
        "strategy.options.bucket_cap_mb: unknown key"
    ]
    assert complaints(write({"strategy.options": {"bucket_cap_mb": 5}})) == ["strategy.options: name the strategy that they are for"]
    assert complaints(write({"strategy.name": "dpp"})) == ["strategy.name: unknown strategy 'dpp'; did you mean ddp?"]


def test_options_that_are_no_mapping_are_a_mistake_like_others(write: Write) -> None:
    found = complaints(write({"strategy.name": "ddp", "strategy.options": 3}), "strategy.options.bucket_cap_mb=50")
    assert any(line.startswith("strategy.options") for line in found)


def test_files_that_are_no_config(tmp_path: Path, write: Write) -> None:
    assert complaints(tmp_path / "none.yaml") == [f"{tmp_path}/none.yaml: no such config file"]
    assert complaints(tmp_path) == [f"{tmp_path}: a folder, not a config file"]
    assert "expected sections such as `data:` and `train:`" in complaints(write("- a\n- b\n"))[0]
    (line,) = complaints(write("train: {max_steps: 3\n"))
    assert line.startswith(f"{tmp_path}/case.yaml: not valid YAML")
    assert len(complaints(write(""))) >= 2  # an empty file lacks everything, and is told so


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: str(p.relative_to(CONFIGS)))
def test_shipped_configs_load(path: Path) -> None:
    cfg = load(path, (), OPTIONS)
    written: Any = OmegaConf.load(path)
    assert cfg.run.name == path.stem or "name" in written.get("run", {})
    for world_size in {"quickstart": (1, 2), "shakespeare": (1,), "compare": (1, 2, 4), "compare-learning": (1, 2, 4)}.get(
        path.stem, (1, 2, 4, 8)
    ):
        assert layout(cfg, world_size, 10**6).world_size == world_size


def test_configs_are_shipped() -> None:
    assert {"quickstart.yaml", "gpt2-124m.yaml"} <= {p.name for p in SHIPPED}


def test_the_effective_config_loads_as_the_same(write: Write) -> None:
    cfg = load(
        write({"strategy.name": "ddp", "strategy.options": {"bucket_cap_mb": 5}, "track.tags": ["a", "b"], "optim.betas": [0.8, 0.9]})
    )
    written = OmegaConf.to_yaml(OmegaConf.create(to_dict(cfg)))
    again = load(write(written))
    assert again == cfg


# The numbers of a batch.


@settings(max_examples=150)
@given(T=st.integers(1, 300), micro=st.integers(1, 40), world=st.integers(1, 20), tokens=st.integers(1, 10**6))
def test_a_batch_that_does_not_divide_gets_values_that_do(T: int, micro: int, world: int, tokens: int) -> None:
    """Each `key=value` of the message, pasted alone, is a layout."""
    cfg = Config()
    for name, value in (("data.sequence_length", T), ("batch.micro", micro), ("batch.tokens", tokens), ("train.max_steps", 10)):
        cfg = replace(cfg, name, value)
    try:
        found = layout(cfg, world, 1000)
    except ConfigError as error:
        assert tokens % (T * micro * world)
        cures = re.findall(r"batch\.(tokens|micro)=(\d+)", str(error).split("; write ", 1)[1])
        assert cures
        for name, value in cures:
            cured = replace(cfg, f"batch.{name}", int(value))
            L = layout(cured, world, 1000)
            assert L.windows * T == cured.batch.tokens > 0
        if tokens % (T * world) == 0:
            assert "micro" in {name for name, _ in cures}
    else:
        assert found.windows * T == tokens
        assert found.accumulation * world * micro == found.windows


def shaped(world: int, accumulation: int, **train: Any) -> Layout:
    cfg = Config()
    changes = {"data.sequence_length": 16, "batch.micro": 2, "batch.tokens": 16 * 2 * world * accumulation}
    for name, value in {**changes, **{f"train.{k}": v for k, v in train.items()}}.items():
        cfg = replace(cfg, name, value)
    return layout(cfg, world, 40)


def test_the_horizon_is_the_number_of_updates_really_made() -> None:
    """40 windows, two sequences at a time: by epochs, by tokens and by steps."""
    for (world, accumulation), steps in {(1, 1): 40, (2, 1): 20, (1, 4): 10, (2, 2): 10}.items():
        L = shaped(world, accumulation, epochs=2.0)
        assert (L.steps, L.last_position) == (steps, 80)
        made = position = 0
        while not L.finished(made, position):
            made, position = made + 1, min(position + L.windows, L.last_position or 10**9)
        assert made == steps
        assert (shaped(world, accumulation, max_steps=7).steps, shaped(world, accumulation, max_steps=7).last_position) == (7, None)
    assert (shaped(1, 3, epochs=1.0).steps, shaped(1, 3, epochs=1.0).last_position) == (7, 40)  # 6 × 6 windows and 4
    assert (shaped(1, 1, max_tokens=16 * 7).steps, shaped(1, 1, max_tokens=16 * 7).last_position) == (4, 7)
    assert shaped(4, 8, epochs=0.1).steps == 1  # 4 windows: one short update, never none


def test_a_warm_up_longer_than_the_run_is_refused_with_one_that_fits() -> None:
    cfg = replace(replace(replace(Config(), "train.max_steps", 50), "optim.warmup_steps", 51), "batch.micro", 8)
    with pytest.raises(ConfigError, match=r"optim\.warmup_steps=51 is longer than the run \(50 updates\); write optim\.warmup_steps=5"):
        layout(cfg, 1, 10)
    assert layout(replace(cfg, "optim.warmup_steps", 50), 1, 10).steps == 50


# What may change between two starts.


FREE = {
    "run": {"dir", "resume", "device"},
    "data": {"stage_to"},
    "batch": {"micro"},
    "train": {"log_every", "eval_every", "eval_tokens", "checkpoint_every", "keep_last", "keep_every", "sample_every", "sample_prompt",
              "compile", "nonfinite", "hang_timeout", "check_replicas_every", "async_checkpoint", "time_limit", "spike", "rollbacks",
              "profile", "step_parts"},
    "model": {"activation_checkpointing"},
    "strategy": {"name", "options", "shard_size", "replicas", "simulate"},
    "track": {"wandb", "tensorboard", "project", "tags"},
    "compare": {key.name for key in dataclasses.fields(Compare)},
}  # fmt: skip


def test_layout_logging_and_intervals_are_no_part_of_what_is_computed() -> None:
    """Everything else is: a key that is added must be sorted here."""
    every = {f"{s.name}.{k.name}" for s in dataclasses.fields(Config) for k in dataclasses.fields(s.default_factory())}  # type: ignore[operator]
    free = {f"{section}.{key}" for section, keys in FREE.items() for key in keys}
    assert free <= every
    assert set(identity(Config())) == every - free - {"run.name", "data.train", "data.val"}


def test_the_identity_sees_every_key_that_counts() -> None:
    other = {"optim.betas": (0.9, 0.99), "optim.lr": 1.0, "batch.tokens": 1024, "run.precision": "bf16", "data.shuffle": False}
    hashes = {identity_hash(replace(Config(), name, value)) for name, value in other.items()}
    assert len(hashes | {identity_hash(Config())}) == len(other) + 1
    assert identity_hash(replace(Config(), "batch.micro", 4)) == identity_hash(Config())


def test_ranks_must_agree_on_all_but_where_things_lie() -> None:
    here = replace(Config(), "data.train", (Source("a"),))
    value: Any
    for name, value in (("run.dir", "/elsewhere"), ("data.train", (Source("b"),)), ("data.stage_to", "/scratch")):
        assert everything_hash(replace(here, name, value)) == everything_hash(here)
    for name, value in (("batch.micro", 4), ("strategy.options", {"bucket_cap_mb": 1}), ("data.train", (Source("a", 2.0),))):
        assert everything_hash(replace(here, name, value)) != everything_hash(here)


def test_every_key_is_documented() -> None:
    for section in dataclasses.fields(Config):
        for k in dataclasses.fields(section.default_factory()):  # type: ignore[operator]
            assert len(k.metadata["doc"]) >= 5, k.name


def test_presets_are_gpt2s() -> None:
    """Radford et al. 2019, table 2."""
    assert [PRESETS[name] for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")] == [
        (12, 12, 768), (24, 16, 1024), (36, 20, 1280), (48, 25, 1600)]  # fmt: skip
    assert all(width % heads == 0 for _, heads, width in PRESETS.values())


def test_a_smaller_micro_batch_divides_the_same_batch() -> None:
    cfg = replace(replace(Config(), "batch.tokens", 24 * 1024), "batch.micro", 8)
    assert [smaller_micro(cfg, world) for world in (1, 2, 4)] == [6, 6, 6]
    assert smaller_micro(replace(cfg, "batch.micro", 1), 1) is None


def test_durations() -> None:
    found = {text: duration(text) for text in ("3h50m", "90s", "1d12h", "45m", "2h", "", "h", "3:50", "90", "-1h", "1h 2m")}
    assert found == {"3h50m": 13800, "90s": 90, "1d12h": 129600, "45m": 2700, "2h": 7200, "": None, "h": None, "3:50": None, "90": None,
                     "-1h": None, "1h 2m": None}  # fmt: skip
