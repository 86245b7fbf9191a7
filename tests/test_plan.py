"""What `pretrain plan` foretells, held against what torch's allocator counts, against prepared strategies, and against published speeds."""

import gc
import json
import re
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import drive
import pytest
import torch
from group import Ranks
from torch.distributed.tensor import DTensor

from pretrain import config as configs
from pretrain import train
from pretrain.config import ConfigError
from pretrain.plan import from_table, here, plan, predict, with_measured
from pretrain.plan.gpus import GPUS, recognise
from pretrain.plan.memory import PARTS
from pretrain.plan.page import WIDTH
from pretrain.plan.prediction import Prediction, largest_micro, micros
from pretrain.plan.rates import Machine
from pretrain.plan.seconds import bus_bandwidth
from pretrain.plan.task import understand
from pretrain.strategies import OPTIONS, STRATEGIES
from pretrain.throughput import PEAKS

Config = Callable[..., Path]
ROOT = Path(__file__).parents[1]
CPU = Machine("this CPU", "cpu", 4, 1e9)
ALONE = ("single", "dataparallel")
# A vocabulary, a width and windows that make every part count: rounding up to a chunk, and what a run has beside tensors, do not.
MODEL = {"model.n_layer": 3, "model.n_head": 4, "model.n_embd": 64, "model.vocab_size": 512, "data.sequence_length": 64}
OF_ONE = {
    "local_sgd": ["strategy.options.sync_every=2"],
    "diloco": ["strategy.options.sync_every=2"],
    "ddp_powersgd": ["strategy.options.start_step=1"],
    **{f"deepspeed{stage}": ["strategy.options.reduce_bucket_size=200000"] for stage in (1, 2, 3)},
}


def overrides(name: str, more: Sequence[str] = ()) -> list[str]:
    return [f"strategy.name={name}", f"run.name={name}", "run.resume=never", *OF_ONE.get(name, []), *more]


def measured(path: Path, changes: Sequence[str]) -> tuple[dict[str, float], float]:
    """({parameters, gradients, optimiser, at once}, mean bytes sent) of a real update: bytes of tensors, the last by every allocation."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        found, sent = one_update(path, changes)
        drive.leave()
        gc.collect()
    there = {t.untyped_storage().data_ptr() for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.device.type == "cpu"}
    found["at once"] = most_allocated(profiler, there)
    return found, sent


def one_update(path: Path, changes: Sequence[str]) -> tuple[dict[str, float], float]:
    job, progress = drive.begin(path, changes)
    strategy, step = job.strategy, job.strategy.step
    found: dict[str, float] = {}

    def watched(clip: float) -> Any:
        found["gradients"] = stored([p.grad for p in strategy.named_parameters().values() if p.grad is not None])
        return step(clip)

    strategy.step = watched  # type: ignore[method-assign,assignment]
    gc.collect()
    with torch.profiler.record_function("the update"):
        train.update(job, 1, progress.position)
    found["parameters"] = stored(strategy.named_parameters().values())
    optimizer = getattr(strategy.optimizer, "optim", strategy.optimizer)
    found["optimiser"] = stored(t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))
    job.loader.close()
    sent = [strategy.wire(k) for k in range(1, job.layout.steps + 1)]
    return found, sum(sent) / len(sent)


def stored(tensors: Any) -> int:
    """Bytes of their storages, each once."""
    locals_ = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in locals_)}.values())


def most_allocated(profiler: torch.profiler.profile, there: set[int]) -> int:
    """Bytes that were allocated at once in the update. What a thread of gloo was the last to free is not seen as freed, and left out: buffers
    that travel, which are gone when most is alive. `there`: addresses of what really lives on (DeepSpeed keeps its engines)."""
    events = walk(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    update = next(event for event in events if event.name == "the update")
    allocations = [(e.start_time_ns, e.extra_fields.ptr, e.extra_fields.alloc_size) for e in events if e.name == "[memory]"]
    living: dict[int, tuple[int, int]] = {}
    changes = []
    for at, pointer, size in sorted(allocations):
        if size > 0:
            living[pointer] = at, size
        elif pointer in living:
            began, size = living.pop(pointer)
            changes += [(began, size), (at, -size)]
    changes += [(began, size) for pointer, (began, size) in living.items() if pointer in there]
    now = most = 0
    for at, size in sorted(changes):
        now += size
        if update.start_time_ns <= at <= update.end_time_ns:
            most = max(most, now)
    return most


def walk(events: Sequence[Any]) -> list[Any]:
    found, waiting = [], list(events)
    while waiting:
        event = waiting.pop()
        found.append(event)
        waiting += event.children
    return found


def measured_each(path: Path, cases: Sequence[Sequence[str]]) -> list[tuple[dict[str, float], float]]:
    return [measured(path, changes) for changes in cases]


@pytest.fixture
def small(config: Config, make_set: Callable[..., Path]) -> Path:
    """Two micro-batches of two windows on each of two processes, one on each of four."""
    data = make_set("small", [k * 7 % 500 for k in range(64 * 64 + 1)], vocab_size=512)
    return config(
        {**MODEL, "data.train": data, "batch.tokens": 8 * 64, "batch.micro": 2, "train.max_steps": 20, "train.checkpoint_every": 0}
    )


def foretold(path: Path, changes: Sequence[str], processes: int) -> Prediction:
    cfg = configs.load(path, changes, OPTIONS)
    found = predict(cfg, cfg.strategy.name, processes, CPU)
    assert not found.refused
    return found


def assert_foretold(ranks: Ranks, path: Path, cases: Sequence[Sequence[str]], processes: int) -> None:
    """To 10 %, on the rank that needs most."""
    by_rank = ranks.run(measured_each, path, cases, size=processes)
    for changes, *of_ranks in zip(cases, *by_rank, strict=True):
        real, sent = max(of_ranks, key=lambda found: found[0]["at once"])
        p = foretold(path, changes, processes)
        assert p.wire_bytes == pytest.approx(sent, rel=1e-3), changes
        assert p.peak_memory == pytest.approx(real["at once"], rel=0.1), (changes, p.memory, real)
        if "deepspeed" not in changes[0]:  # which has its own pieces of all three
            replicas = 2 if "strategy.simulate=2" in changes else 1  # of which one is looked at
            for part in ("parameters", "gradients", "optimiser"):
                assert p.memory[part] == pytest.approx(real[part] * replicas, rel=0.1), (changes, part)


def test_memory_and_bytes_of_every_strategy_are_what_a_real_update_takes(ranks: Ranks, small: Path) -> None:
    """In bf16, where there are copies of the weights beside them."""
    names = [name for name in STRATEGIES if name not in (*ALONE, "hsdp")]
    assert_foretold(ranks, small, [overrides(name, ["run.precision=bf16"]) for name in names], 2)


def test_memory_and_bytes_in_fp32_and_with_other_options(ranks: Ranks, small: Path) -> None:
    one_each = ["batch.micro=4", "run.name=one"]  # no micro-batch before the last
    cases = [
        overrides("ddp"),
        overrides("ddp", ["strategy.options.gradient_as_bucket_view=false", *one_each]),
        overrides("fsdp2", ["strategy.options.sync_each_micro=false"]),
        overrides("fsdp2", one_each),
        overrides("local_sgd", ["strategy.replicas=1"]),
        overrides("deepspeed2"),
        overrides("deepspeed3", ["strategy.options.stage3_param_persistence_threshold=1000"]),  # gathers, where small weights would be kept
    ]
    assert_foretold(ranks, small, cases, 2)


def test_hsdp_needs_four(ranks: Ranks, small: Path) -> None:
    assert_foretold(ranks, small, [overrides("hsdp", ["batch.tokens=1024"])], 4)


def test_memory_of_one_process_is_what_a_real_update_takes(ranks: Ranks, small: Path) -> None:
    cases = [
        [],
        ["run.precision=fp16", "batch.micro=8"],
        ["model.activation_checkpointing=true"],
        ["model.activation_checkpointing=true", "run.precision=bf16", "batch.micro=8"],
        ["optim.name=muon", "batch.micro=4"],
        ["optim.name=sgd", "optim.momentum=0.9"],
        ["optim.name=sgd", "run.precision=bf16", "model.n_embd=256", "batch.micro=1"],  # copies in 16 bits are a fifth of it
        ["model.vocab_size=20000"],
    ]
    simulated = overrides("diloco", ["strategy.simulate=2", "batch.micro=4"])
    assert_foretold(ranks, small, [*(overrides("single", [*more, f"run.name={k}"]) for k, more in enumerate(cases)), simulated], 1)


def plan_of(capsys: pytest.CaptureFixture[str], config: str | Path, changes: Sequence[str] = (), *, gpu: str | None = "h100-80gb", nodes: int = 1,
            per_node: int | None = None, measured: Path | None = None) -> str:  # fmt: skip
    assert plan(str(config), list(changes), gpu, nodes, per_node, measured) == 0
    return capsys.readouterr().out


def cells(page: str, strategy: str) -> list[list[str]]:
    """Of the rows of both tables."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith(f"| {strategy} ")]


@pytest.mark.parametrize("nodes", [1, 4, 128])
def test_the_page_is_narrow_quick_and_names_every_strategy(capsys: pytest.CaptureFixture[str], nodes: int) -> None:
    began = time.process_time()
    page = plan_of(capsys, ROOT / "configs/gpt2-1558m.yaml", [], nodes=nodes)
    assert time.process_time() - began < 6
    assert max(map(len, page.splitlines())) <= WIDTH
    for name in STRATEGIES:
        assert len(cells(page, name)) == 2 or f"- {name}: " in page, name
    assert "a vocabulary of 50,257 tokens is assumed" in page
    assert all(line.count("|") == len(PARTS) + 6 for line in page.splitlines() if line.startswith("| fsdp2 ") and "yes" in line)


def test_a_refusal_is_the_strategys_own(capsys: pytest.CaptureFixture[str]) -> None:
    page = plan_of(capsys, ROOT / "configs/gpt2-124m.yaml", ["optim.name=muon"])
    assert "- fsdp2: strategy.name=fsdp2 does not work with optim.name=muon, which wants whole matrices" in page
    assert "- single: strategy.name=single runs in one process; 8 were started" in page
    assert "train.max_steps: 18865 is no multiple of strategy.options.sync_every=8" not in page, "muon is refused first"
    assert len(cells(page, "ddp")) == 2


def test_without_the_data_epochs_say_what_cannot_be_known(capsys: pytest.CaptureFixture[str]) -> None:
    page = plan_of(capsys, ROOT / "configs/gpt2-124m.yaml", ["train.max_steps=null", "train.epochs=2"])
    assert "train.epochs=2 of data that is not here: updates, days and hours are not known" in " ".join(page.split())
    assert cells(page, "ddp")[1][-3:-1] == ["?", "?"]
    assert len(cells(page, "local_sgd")) == 2


def test_with_the_data_its_vocabulary_and_length_count(capsys: pytest.CaptureFixture[str], small: Path) -> None:
    page = plan_of(capsys, small, ["model.vocab_size=null", "train.max_steps=null", "train.epochs=2"], gpu="t4-16gb", per_node=2)
    assert "assumed" not in page
    assert "?" not in cells(page, "ddp")[1]


def test_a_model_of_ones_own_is_planned_by_its_real_size(capsys: pytest.CaptureFixture[str]) -> None:
    page = plan_of(capsys, ROOT / "configs/gpt2-124m.yaml", ["model.build=custom_models:swiglu"])
    assert "152.8M parameters" in page
    assert "model.build=custom_models:swiglu: what it keeps for the backward is taken to be what GPT-2" in page


def test_a_batch_that_does_not_divide_among_the_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch.tokens=524,288 does not divide into 1024 ranks × 1 sequences"):
        plan(str(ROOT / "configs/gpt2-124m.yaml"), [], "h100-80gb", 128, None, None)


def test_a_micro_batch_that_does_not_divide_is_made_to(capsys: pytest.CaptureFixture[str]) -> None:
    page = plan_of(capsys, ROOT / "configs/gpt2-124m.yaml", [], nodes=4)
    assert "batch.micro=64 does not divide 16 sequences per process: planned with 16" in page
    assert cells(page, "ddp")[0][1] == "16"
    assert f"sbatch --nodes=4 --gpus-per-node=8 slurm/train.sbatch {ROOT}/configs/gpt2-124m.yaml strategy.name=ddp batch.micro=16" in page


@pytest.mark.parametrize("nodes", [1, 4])
def test_the_command_is_one_that_a_launch_takes(capsys: pytest.CaptureFixture[str], nodes: int) -> None:
    """What the config tells its own strategy is nothing to the one that is recommended."""
    changes = ["strategy.name=hsdp", "strategy.shard_size=2", "strategy.options.blocks_per_unit=3"]
    page = plan_of(capsys, ROOT / "configs/gpt2-124m.yaml", changes, gpu="a100-80gb", nodes=nodes)
    words = shlex.split(page.splitlines()[-1])
    assert words[:2] == (["pretrain", "train"] if nodes == 1 else ["sbatch", "--nodes=4"])
    given = [word for word in words if re.match(r"[a-z_]+\.[a-z_.]+=", word)]
    cfg = configs.load(ROOT / "configs/gpt2-124m.yaml", given, OPTIONS)
    assert cfg.strategy.name != "hsdp"
    assert not predict(cfg, cfg.strategy.name, 8 * nodes, from_table("a100-80gb", 8)).refused


def test_what_does_not_fit_is_planned_with_what_does(capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-2 XL: 16 sequences under DDP are too many for 80 GB, 24 GB are too few for its states alone."""
    page = plan_of(capsys, ROOT / "configs/gpt2-1558m.yaml", ["batch.micro=16"])
    assert cells(page, "ddp")[0][1:2] + cells(page, "ddp")[0][-2:] == ["8", "yes", "8"]
    page = plan_of(capsys, ROOT / "configs/gpt2-1558m.yaml", gpu="rtx-4090-24gb", per_node=1)
    assert cells(page, "single")[0][-2:] == ["no", "none"]
    assert "Nothing fits" in page


@pytest.mark.parametrize("name", ["124m", "350m", "774m", "1558m"])
def test_what_the_configs_say_fits_eight_gpus_of_80_gb(name: str) -> None:
    cfg = configs.load(ROOT / f"configs/gpt2-{name}.yaml", [], OPTIONS)
    assert predict(cfg, "ddp", 8, from_table("h100-80gb", 8)).fits


@pytest.mark.parametrize(("strategy", "option"), [("fsdp2", "cpu_offload"), ("deepspeed2", "offload_optimizer")])
def test_what_offloads_has_no_times(capsys: pytest.CaptureFixture[str], strategy: str, option: str) -> None:
    """Its way over PCIe and an optimiser on the host are not modelled: it would be as fast as what stays on the GPU."""
    offloads = [f"strategy.name={strategy}", f"strategy.options.{option}=true"]
    page = plan_of(capsys, ROOT / "configs/gpt2-124m.yaml", offloads)
    assert set(cells(page, strategy)[1][3:11]) == {"?"}
    assert f"{strategy}'s options offload to host memory: how long" in page
    assert "?" not in cells(page, "ddp")[1]
    assert re.search(r"^Take ddp .* tokens/s", page, re.MULTILINE)
    assert "offload" not in plan_of(capsys, ROOT / "configs/gpt2-124m.yaml")


def test_zero1_shares_muons_products_out() -> None:
    """Twelve blocks of four matrices on eight ranks: a rank has an eighth of the products, or what whole matrices allow."""
    took = {}
    for strategy in ("ddp", "zero1"):
        for optimizer in ("muon", "adamw"):
            cfg = configs.load(ROOT / "configs/gpt2-124m.yaml", [f"optim.name={optimizer}"], OPTIONS)
            took[strategy, optimizer] = predict(cfg, strategy, 8, from_table("h100-80gb", 8)).optimiser_seconds or 0.0
    of_all, of_one = (took[strategy, "muon"] - took[strategy, "adamw"] for strategy in ("ddp", "zero1"))
    assert of_one < of_all / 4


def test_replicas_of_a_node_meet_over_a_share_of_its_network() -> None:
    """Each of a node's eight processes meets its peers in other nodes, all at once; of replicas of two, two rings share it."""
    machine = from_table("h100-80gb", 8)
    share = machine.gpu.network * 0.8  # type: ignore[union-attr]
    assert [bus_bandwidth(machine, 32, rings) for rings in (1, 2, 8, 16)] == pytest.approx([8 * share, 4 * share, share, share])
    assert bus_bandwidth(machine, 8, 8) == bus_bandwidth(machine, 8)
    cfg = configs.load(ROOT / "configs/gpt2-1558m.yaml", ["strategy.name=local_sgd", "strategy.replicas=4"], OPTIONS)
    found = predict(cfg, "local_sgd", 32, machine)
    meeting = 2 * 3 / 4 * 4 * understand(cfg, machine).model.total / 8  # bytes an update, by a ring of four
    assert found.network_seconds == pytest.approx(meeting / share, rel=0.1)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed3"])
def test_the_largest_micro_batch_is_the_largest(strategy: str) -> None:
    machine = from_table("a100-40gb", 8)
    cfg = configs.load(ROOT / "configs/gpt2-350m.yaml", [], OPTIONS)
    task, among = understand(cfg, machine), micros(cfg, 8)
    largest = largest_micro(task, strategy, 8, machine, among)
    assert largest is not None
    fits = {m: predict(configs.replace(cfg, "batch.micro", m), strategy, 8, machine).fits for m in among}
    assert [m for m in among if fits[m]] == [m for m in among if m <= largest]
    assert not all(fits.values()), "the case must have an end"


@pytest.mark.parametrize(
    ("name", "memory", "row"),
    [
        ("NVIDIA A100-SXM4-40GB", 42.3e9, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 85.1e9, "a100-80gb"),
        ("Tesla V100-SXM2-16GB", 16.9e9, "v100-16gb"),
        ("NVIDIA A100 80GB PCIe", 85.1e9, "a100-pcie-80gb"),
        ("NVIDIA L40", 47.6e9, "l40-48gb"),
        ("NVIDIA L4", 23.7e9, "l4-24gb"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 17.2e9, None),
    ],
)
def test_the_gpu_that_is_here_is_the_row_of_its_name_and_memory(name: str, memory: float, row: str | None) -> None:
    assert recognise(name, memory) == (row and GPUS[row])
    assert all(gpu.known_as in PEAKS for gpu in GPUS.values())


# (config, GPU, nodes, tokens a second that others published, source, by how much ours may differ)
PUBLISHED = [
    ("gpt2-124m", "a100-80gb", 1, 1.75e6, "llm.c, discussion 481: CUDA kernels of its own", 0.15),
    ("gpt2-124m", "h100-80gb", 1, 3.7e6, "modded-nanogpt's first record: llm.c's PyTorch trainer, 45 minutes for 10 B tokens", 0.15),
    ("gpt2-1558m", "h100-80gb", 1, 388e3, "llm.c, discussion 677: 24 hours for 33.6 B tokens", 0.15),
]


@pytest.mark.parametrize(("name", "gpu", "nodes", "published", "source", "within"), PUBLISHED)
def test_speeds_are_near_what_others_published(name: str, gpu: str, nodes: int, published: float, source: str, within: float) -> None:
    found = predict(configs.load(ROOT / f"configs/{name}.yaml", [], OPTIONS), "zero1", 8 * nodes, from_table(gpu, 8))
    assert found.tokens_per_second == pytest.approx(published, rel=within), source


def test_measured_rates_come_before_the_table(capsys: pytest.CaptureFixture[str], small: Path, tmp_path: Path) -> None:
    """Of a CPU nothing is known without them."""
    cfg = configs.load(small, ["run.device=cpu"], OPTIONS)
    assert predict(cfg, "ddp", 2, here(2)).step_seconds is None
    file = tmp_path / "rates.json"
    file.write_text(json.dumps({"flops_per_second": 1e9, "bus_bandwidth": 1e6, "memory_bytes": 5e6}))
    found = predict(cfg, "ddp", 2, with_measured(here(2), file))
    flops = understand(cfg, here(2)).model.flops_per_token * 512 / 2
    assert found.compute_seconds == pytest.approx(flops / 1e9)
    assert found.network_seconds == pytest.approx(found.wire_bytes / 1e6), "all gradients are one bucket, which nothing hides"
    assert not found.fits
    page = plan_of(capsys, small, [], gpu=None, per_node=2, measured=file)
    assert "computation at 0.001 TFLOP/s, as measured" in page


def test_without_rates_the_page_has_no_times(capsys: pytest.CaptureFixture[str], small: Path) -> None:
    page = plan_of(capsys, small, ["run.device=cpu"], gpu=None, per_node=2)
    assert set(cells(page, "ddp")[1][3:11]) == {"?"}
    assert "| process-hours |" in page
    assert "GPU" not in page
    assert "Take " in page
    assert re.search(r"^    pretrain train \S+ run.device=cpu strategy.name=\w+ -- --num_processes 2$", page, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("h100", 1, None, None), "--gpu h100: not in the table; did you mean h100-80gb"),
        (("t4-16gb", 1, None, None), "run.precision=bf16: t4-16gb has no bf16 arithmetic; write run.precision=fp16 or fp32"),
        (("h100-80gb", 0, None, None), "--nodes 0: must be 1 or more"),
        ((None, 1, 8, "nowhere.json"), "--measured nowhere.json: No such file"),
        ((None, 1, 8, {"flops": 1}), "expected an object of some of flops_per_second"),
        ((None, 1, 8, {"bus_bandwidth": -1}), "bus_bandwidth must be a number above 0, found -1"),
        ((None, 1, 8, "{"), "not JSON"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path: Path, arguments: tuple[Any, ...], message: str) -> None:
    gpu, nodes, per_node, measured = arguments
    if isinstance(measured, dict) or measured == "{":
        text, measured = measured if isinstance(measured, str) else json.dumps(measured), tmp_path / "rates.json"
        measured.write_text(text)
    with pytest.raises(ConfigError) as raised:
        plan(str(ROOT / "configs/gpt2-124m.yaml"), [], gpu, nodes, per_node, measured and Path(measured))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
