"""The plan in words and two tables, readable in a terminal of 160 columns and as Markdown. Pure functions."""

import shlex
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pretrain.plan.gpus import GB
from pretrain.plan.memory import PARTS
from pretrain.plan.prediction import Prediction
from pretrain.plan.rates import LINK_SHARE, MEMORY_SHARE, Machine
from pretrain.plan.task import Task
from pretrain.strategies import STRATEGIES

WIDTH = 160
_ALIKE = 0.1  # of the step: differences below are smaller than the model's error
MB = 1e6


@dataclass(frozen=True)
class Row:
    found: Prediction
    largest: int | None  # batch.micro that fits


@dataclass(frozen=True)
class Asked:
    """The command line."""

    config: str
    overrides: Sequence[str]
    nodes: int
    machine: Machine
    micro: int  # of the config

    @property
    def processes(self) -> int:
        return self.nodes * self.machine.per_node


def page(asked: Asked, task: Task, rows: Sequence[Row]) -> str:
    runs = [row for row in rows if not row.found.refused]
    lines = [*_head(asked, task), ""]
    if runs:
        kind = "GPU" if asked.machine.device == "cuda" else "process"
        unit, name = (GB, "GB") if max(row.found.peak_memory for row in runs) > GB else (MB, "MB")
        lines += [f"Memory of one process, in {name}: each part at its largest, and the most that is alive at once", ""]
        lines += [*_table(_MEMORY, [_memory(row, unit) for row in runs]), ""]
        lines += [
            f"One update, and the whole run; bytes in {name}",
            "",
            *_table([title.format(kind) for title in _SPEED], [_speed(row, unit) for row in runs]),
            "",
        ]
    if refused := [row.found for row in rows if row.found.refused]:
        lines += ["Refused", "", *(line for found in refused for line in _item(f"{found.strategy}: {found.refused}")), ""]
    lines += ["Assumed", "", *(line for text in _assumptions(asked, task, runs) for line in _item(text)), ""]
    lines += _verdict(asked, task, rows)
    return "\n".join(lines) + "\n"


def _head(asked: Asked, task: Task) -> Iterator[str]:
    cfg, machine = task.cfg, asked.machine
    size = cfg.model.preset or cfg.model.init_from or "×".join(map(str, cfg.shape))
    nodes = f"{asked.nodes} node{'s' * (asked.nodes > 1)} × {machine.per_node} × {machine.name}"
    yield (
        f"{asked.config}: {size}, {task.model.parameters / 1e6:,.1f}M parameters, {task.precision}, on {nodes} = {asked.processes} "
        f"process{'es' * (asked.processes > 1)}; {cfg.batch.tokens:,} tokens per update"
    )
    taken = "the context, NCCL and gaps" if machine.device == "cuda" else "the interpreter and others"
    share = f": 92 % of its memory less 0.5 GB, which {taken} take" if machine.measured.memory_bytes is None else ", as measured"
    yield from _item(f"a process may use {machine.memory / GB:.1f} GB{share}")
    for note in task.notes:
        yield from _item(note)


_MEMORY = ("strategy", "micro", *PARTS, "at once", "fits", "largest micro")
_SPEED = (
    "strategy",
    "micro",
    "sent",
    "step ms",
    "compute",
    "+ network",
    "+ optimiser",
    "MFU",
    "tokens/s",
    "days",
    "{}-hours",
    "checkpoint",
)


def _memory(row: Row, unit: float) -> list[str]:
    found = row.found
    parts = [_number(found.memory[part] / unit) for part in PARTS]
    largest = str(row.largest) if row.largest else "none"
    return [found.strategy, str(found.micro), *parts, _number(found.peak_memory / unit), "yes" if found.fits else "no", largest]


def _speed(row: Row, unit: float) -> list[str]:
    p = row.found
    start, end = [p.strategy, str(p.micro), _number(p.wire_bytes / unit)], _number(p.checkpoint_bytes / unit)
    if p.step_seconds is None or p.tokens_per_second is None:
        return [*start, *["?"] * 8, end]
    mfu = "?" if p.mfu is None else f"{p.mfu:.0%}"
    days, hours = ("?", "?") if p.run_seconds is None else (f"{p.run_seconds / 86400:,.3g}", _number(p.run_seconds / 3600 * p.processes))
    parts = (p.step_seconds, p.compute_seconds, p.network_seconds, p.optimiser_seconds)
    return [*start, *(_number((part or 0.0) * 1e3) for part in parts), mfu, f"{p.tokens_per_second:,.0f}", days, hours, end]


def _assumptions(asked: Asked, task: Task, runs: Sequence[Row]) -> Iterator[str]:
    machine, gpu, measured = asked.machine, asked.machine.gpu, asked.machine.measured
    if measured.flops_per_second is not None:
        yield f"computation at {measured.flops_per_second / 1e12:.3g} TFLOP/s, as measured"
    elif gpu is not None:
        kernels = "fused by a compiler" if task.compiled else "eager"
        yield (
            f"products at {gpu.attainable:.0%} of the peak of {gpu.known_as}; element-wise kernels ({kernels}) and the optimiser at "
            f"{MEMORY_SHARE:.0%} of {gpu.bandwidth / GB:,.0f} GB/s"
        )
    else:
        yield f"no rates are known of {machine.name}, so there are no times: measure some and give --measured FILE"
    if measured.bus_bandwidth is not None:
        yield f"all-reduces at a bus bandwidth of {measured.bus_bandwidth / GB:.3g} GB/s, as measured"
    elif gpu is not None and asked.processes > 1:
        between = f", {gpu.network * 8 / GB:,.0f} Gbit/s per GPU between nodes" if asked.nodes > 1 else ""
        yield f"rings at {LINK_SHARE:.0%} of {gpu.link / GB:,.0f} GB/s inside a node{between}; latencies of NCCL's own model"
    if asked.processes > 1:
        yield (
            "hidden under computation: DDP's all-reduce in the last micro-batch's backward, FSDP's and DeepSpeed 3's gathers and reductions in "
            "all of it; not hidden: the last bucket or unit, ZeRO-1's and DeepSpeed 1 and 2's gather of weights, PowerSGD, meetings of replicas"
        )
    for offloading in (row.found.strategy for row in runs if row.found.offloads):
        yield f"{offloading}'s options offload to host memory: how long the way there and an optimiser on the host take is not known"
    yield "bytes sent are a ring's, in the mean over the run; nothing waits for data; evaluations, checkpoints and compilation come on top"


def _verdict(asked: Asked, task: Task, rows: Sequence[Row]) -> list[str]:
    fitting = [row for row in rows if row.found.fits]
    if not fitting:
        tries = ["model.activation_checkpointing=true"] * (not task.cfg.model.activation_checkpointing) + ["a smaller model", "more GPUs"]
        if all(row.found.refused for row in rows):
            return ["Nothing can run: every strategy is refused, for the reasons above."]
        return _item(f"Nothing fits into {asked.machine.memory / GB:.1f} GB, with any batch.micro; try {' or '.join(tries)}.", "")
    exact = [row for row in fitting if row.found.exact] or fitting
    best = choose(exact)
    p = best.found
    speed = (
        ""
        if p.step_seconds is None
        else f", {p.tokens_per_second:,.0f} tokens/s" + (f", {_duration(p.run_seconds)}" if p.run_seconds else "")
    )
    text = f"Take {p.strategy} with batch.micro={p.micro}: {p.peak_memory / GB:.1f} of {asked.machine.memory / GB:.1f} GB{speed}."
    if p.step_seconds is None:
        text += " It sends least of those that compute what one process does; which is fastest is not known without rates."
    elif rest := [row.found.strategy for row in exact if row is not best and alike(row, best)]:
        text += f" Within 10 %, less than this model can tell apart: {', '.join(rest)}."
    inexact = [row for row in fitting if not row.found.exact and row.found.step_seconds is not None]
    if p.step_seconds is not None and inexact:
        other = min(inexact, key=lambda row: row.found.step_seconds or 0.0).found
        if (other.step_seconds or 0.0) < p.step_seconds * (1 - _ALIKE):
            text += (
                f" {other.strategy} would be {p.step_seconds / (other.step_seconds or 1.0):.2f} times as fast, and computes something else."
            )
    return [*textwrap.wrap(text, WIDTH, break_on_hyphens=False), "", f"    {command(asked, task, p)}"]


def choose(rows: Sequence[Row]) -> Row:
    """The fastest, or of those within 10 % of it the simplest: the first in the table. Where none has times the one that sends least."""
    timed = [row for row in rows if row.found.step_seconds is not None]
    if not timed:
        return min(rows, key=lambda row: row.found.wire_bytes)
    fastest = min(timed, key=lambda row: row.found.step_seconds or 0.0)
    return next(row for row in rows if alike(row, fastest))


def alike(row: Row, other: Row) -> bool:
    mine, theirs = row.found.step_seconds, other.found.step_seconds
    return mine is not None and theirs is not None and mine <= theirs / (1 - _ALIKE)


def command(asked: Asked, task: Task, p: Prediction) -> str:
    """To paste, in a shell where the config is. What the config says to another strategy is left out, or unsaid."""
    given, cls = task.cfg.strategy, STRATEGIES[p.strategy]
    foreign = [key for key in ("shard_size", "replicas", "simulate") if getattr(given, key) is not None and key not in cls.keys]
    unsaid = [f"strategy.{key}=null" for key in foreign]
    if given.options and p.strategy != given.name:
        foreign, unsaid = [*foreign, "options"], [*unsaid, "strategy.options={}"]
    replaced = ("strategy.name", "batch.micro", *(f"strategy.{key}" for key in foreign))
    kept = [o for o in asked.overrides if not o.partition("=")[0].startswith(replaced)]
    micro = [f"batch.micro={p.micro}"] if p.micro != asked.micro or any(o.startswith("batch.micro=") for o in asked.overrides) else []
    words = [asked.config, *kept, f"strategy.name={p.strategy}", *unsaid, *micro]
    if asked.nodes > 1:
        each = "gpus-per-node" if asked.machine.device == "cuda" else "ntasks-per-node"
        return shlex.join(["sbatch", f"--nodes={asked.nodes}", f"--{each}={asked.machine.per_node}", "slurm/train.sbatch", *words])
    return shlex.join(["pretrain", "train", *words, "--", "--num_processes", str(asked.processes)])


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    rows = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(titles, *rows, strict=True)]
    yield _line(titles, widths)
    yield "|" + "|".join(":" + "-" * (w + 1) if k == 0 else "-" * (w + 1) + ":" for k, w in enumerate(widths)) + "|"
    yield from (_line(row, widths) for row in rows)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "|" + "|".join(f" {c:<{w}} " if k == 0 else f" {c:>{w}} " for k, (c, w) in enumerate(zip(cells, widths, strict=True))) + "|"


def _item(text: str, bullet: str = "- ") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=bullet, subsequent_indent=" " * len(bullet), break_on_hyphens=False, break_long_words=False
    )


def _number(number: float) -> str:
    """Three digits, two of them at most behind the point."""
    digits = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:,.{digits}f}"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} seconds"
