"""The report of one comparison, or of several made on different machines: index.html, report.md, results.csv, figures, appendix.tex."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.compare import bandwidth, tables
from pretrain.compare.appendix import appendix
from pretrain.compare.blocks import Block, Heading, Table, Text, as_html, as_markdown
from pretrain.compare.figures import compute_seconds, draw, sent_ring
from pretrain.compare.results import LAST, ROUNDS, SEEDS, Row, Summary, best_tried, loss_after, read_row, summaries
from pretrain.compare.verdict import verdict
from pretrain.config import ConfigError

PLAN = "comparison.json"
TITLE = "The same work under every strategy"


@dataclass(frozen=True)
class Comparison:
    folder: Path
    plan: Mapping[str, Any]
    rows: list[Row]


def read(folder: Path) -> Comparison:
    """Raises ConfigError for what is no folder of a comparison."""
    try:
        plan = json.loads((folder / PLAN).read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder}: no comparison (it has no {PLAN}); pretrain compare CONFIG makes one") from None
    except ValueError:
        raise ConfigError(f"{folder / PLAN}: damaged; the pretrain compare that made it writes it anew, and keeps what is done") from None
    shared = {key: plan[key] for key in ("kind", "machine", "config_file", "overrides")}
    rows = [read_row({**shared, **launch}, folder / "runs" / launch["run"], plan["skip_steps"]) for launch in plan["launches"]]
    return Comparison(folder, plan, rows)


def report(folders: Sequence[Path], output: Path) -> list[Path]:
    """Write it; returns the files. Raises ConfigError where comparisons of two kinds are to be one."""
    comparisons = [read(folder) for folder in dict.fromkeys(folders)]
    kinds = sorted({str(comparison.plan["kind"]) for comparison in comparisons})
    if len(kinds) > 1:
        raise ConfigError(f"comparisons of speed and of learning make two reports: {', '.join(map(str, folders))}")
    output.mkdir(parents=True, exist_ok=True)
    rows = list(_labelled(comparisons))
    if kinds == ["learning"]:
        _equal_time(rows)
    blocks = list(_blocks(comparisons, rows, output))
    files = {"index.html": as_html(TITLE, blocks), "report.md": as_markdown(blocks), "appendix.tex": appendix(summaries(rows))}
    for name, text in files.items():
        (output / name).write_text(text, "utf-8")
    _write_csv(rows, output / "results.csv")
    return [output / name for name in (*files, "results.csv")]


def _labelled(comparisons: Sequence[Comparison]) -> Iterator[Row]:
    """Each keeps its rows, and of one that several machines had a part in, each machine: `place` is within which rows may be compared."""
    names = [comparison.folder.name for comparison in comparisons]
    for comparison in comparisons:
        name = comparison.folder.name
        whose = f" ({name if names.count(name) == 1 else comparison.folder})" if len(comparisons) > 1 else ""
        several = len({row.given["machine"] for row in comparison.rows if row.run}) > 1
        for row in comparison.rows:
            label = whose + (f" ({row.given['machine']})" if several else "")
            row.member += label
            row.given |= {key: row.given[key] + label for key in ("group", "base")} | {"place": row.given["machine"] + whose}
            yield row


def _equal_time(rows: Sequence[Row]) -> None:
    """Fills in everybody's loss after the seconds that every run of its place trained at least."""
    for place in {row.given["place"] for row in rows}:
        timed = [row for row in rows if row.given["place"] == place and "train_seconds" in row.numbers]
        after = min((row.numbers["train_seconds"] for row in timed), default=0.0)
        for row in timed:
            if row.run and (loss := loss_after(row.run, after)) is not None:
                row.numbers |= {"loss_after_time": loss, "equal_time": after}


def _shown(every: Sequence[Summary], best: Mapping[str, tuple[str, int]]) -> list[Summary]:
    """Of what was tuned the best alone; where nothing came of any, the first."""
    chosen = {group: member for group, (member, _) in best.items()}
    for summary in every:
        if summary.given["tried"]:
            chosen.setdefault(summary.given["group"], summary.member)
    return [summary for summary in every if not summary.given["tried"] or chosen[summary.given["group"]] == summary.member]


def _blocks(comparisons: Sequence[Comparison], rows: Sequence[Row], output: Path) -> Iterator[Block]:
    kind = comparisons[0].plan["kind"]
    best = best_tried(rows)
    every = summaries(rows)
    shown = _shown(every, best)
    yield Heading(TITLE, 1)
    yield from _opening(comparisons, every)
    yield Heading("Verdict")
    yield from verdict(shown, kind)
    if kind == "speed":
        yield Heading("Speed")
        for note in dict.fromkeys(_speed_note(comparison.plan) for comparison in comparisons):
            yield Text(note)
        yield tables.speed(shown)
        yield Heading("Where the time of an update goes")
        yield Text("Medians over launches. " + "; ".join(_methods(rows)) + ".")
        yield tables.parts(shown)
    else:
        yield Heading("Learning")
        yield Text(
            f"Every member saw the same number of tokens; losses are means over seeds ± their standard deviation, training losses over the last {LAST:.0%} "
            f"of the tokens. Fewer than {SEEDS} seeds, or {ROUNDS} rounds of a local method, say nothing: such cells are left open."
        )
        yield tables.learning(shown)
    yield Heading("Memory, bytes, checkpoints")
    yield Text(
        "Memory is the largest of any rank: the allocator's peak on GPUs, the resident process on CPUs, Python and libraries included. Bytes are what a "
        "rank sends for an update: by the strategy's formula, as counted where the collectives are issued with what the backend really sends for each "
        "(gloo's reduce-scatter is an all-reduce), and with the same collectives as rings, as NCCL has them."
    )
    yield tables.footprint(shown)
    if len((composition := tables.memory(shown)).header) > 2:
        yield Heading("What the memory consists of")
        yield Text(
            "As pretrain plan has it: tensors alone, each part at its largest, and together at the worst moment. A resident process on a CPU is no "
            "measure of it."
        )
        yield composition
    if needed := _needed(shown):
        yield Heading("Bandwidth needed")
        yield Text(
            "Between the processes, for a share of the time that goes into computing; by the model of the figure, with this machine's computing."
        )
        yield needed
    if tuned := _tuned(best, every):
        yield Heading("Tuned")
        yield Text("Each member at the best of what it tried, by its first seed. Where that lies at an edge, a better one may lie beyond.")
        yield tuned
    if open_ := tables.missing(every):
        yield Heading("What has no numbers")
        yield open_
    yield Heading("Figures")
    yield from draw(shown, output)


def _opening(comparisons: Sequence[Comparison], every: Sequence[Summary]) -> Iterator[Block]:
    devices = {str(summary.facts.get("device", "")) for summary in every if summary.facts}
    if any(device.startswith("cpu") for device in devices):
        yield Text("Made on CPU: bytes, memory and loss carry over; speeds don't.", note=True)
    for comparison in comparisons:
        plan = comparison.plan
        here = [row.run.facts for row in comparison.rows if row.run]
        facts: Mapping[str, Any] = max(here, key=lambda found: bool(found.get("network")), default={})  # one process alone has none
        parameters = f", {facts['parameters'] / 1e6:.1f}M parameters" if facts.get("parameters") else ""
        done = sum(row.state == "finished" for row in comparison.rows)
        yield Text(
            f"{plan['config_file']} on {plan['machine']}{parameters}: {done} of {len(comparison.rows)} launches finished. {_network(plan, facts)}"
        )


def _network(plan: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    if not plan["network"]:
        return "The network between processes is the machine's own."
    asked, found = plan["network"], facts.get("network") or {}
    words = []
    for key, by, form in (("bandwidth_gbit", "bandwidth_by", "{:g} Gbit/s each way"), ("latency_ms", "latency_by", "{:g} ms one way")):
        if asked[key]:
            how = {"namespaces": " by network namespaces", "collective layer": " by holding collectives back"}.get(str(found.get(by)), "")
            words.append(form.format(asked[key]) + how)
    return f"The network between processes is emulated: {', '.join(words)}; reduce-scatter sends a ring's bytes."


def _speed_note(plan: Mapping[str, Any]) -> str:
    weak = " Weak scaling: the batch grows with the processes." if plan["scaling"] == "weak" else ""
    return (
        f"{_launches(plan['repetitions'])}; the first {plan['skip_steps']} are not counted, nor are those of PowerSGD before it begins. "
        f"Evaluations and checkpoints are not in these times.{weak}"
    )


def _launches(repetitions: int) -> str:
    several = f"Medians over {repetitions} launches of each member, which took turns, each the mean over its updates"
    return several if repetitions > 1 else "Means over the updates of one launch of each member"


def _methods(rows: Sequence[Row]) -> list[str]:
    found = dict.fromkeys(row.method for row in rows if row.method)
    return [f"exposed communication: {method}" for method in found] or ["exposed communication was not measured"]


def _needed(shown: Sequence[Summary]) -> Table | None:
    rows = []
    for summary in shown:
        compute, sent = compute_seconds(summary), sent_ring(summary)
        if compute and sent:
            wanted = [bandwidth.needed(compute, sent, level) / bandwidth.GBIT for level in bandwidth.LEVELS]
            rows.append([summary.member, *(f"{gbit:.3g} Gbit/s" for gbit in wanted)])
    return Table(["member", *(f"{level:.0%}" for level in bandwidth.LEVELS)], rows) if rows else None


def _tuned(best: Mapping[str, tuple[str, int]], every: Sequence[Summary]) -> Table | None:
    rows = []
    for group, (member, count) in best.items():
        tried = {summary.member: summary.given["tried"] for summary in every if summary.given["group"] == group}
        chosen, finished = tried[member], [s.given["tried"] for s in every if s.given["group"] == group and s.finished]
        edges = [key for key in chosen if _at_an_edge(chosen[key], [others[key] for others in finished])]
        counted = f"{count}" if count == len(tried) else f"{count} of {len(tried)}"
        rows.append([group, ", ".join(f"{key}={value}" for key, value in chosen.items()), counted, ", ".join(edges) or tables.ABSENT])
    return Table(["member", "best", "tried", "at an edge"], rows) if rows else None


def _at_an_edge(value: Any, tried: Sequence[Any]) -> bool:
    """Of numbers that were tried: then a better one may lie beyond."""
    numbers = sorted({number for number in tried if isinstance(number, int | float) and not isinstance(number, bool)})
    return len(numbers) > 1 and value in (numbers[0], numbers[-1])


def _write_csv(rows: Sequence[Row], path: Path) -> None:
    numbers = dict.fromkeys(key for row in rows for key in row.numbers)
    given = ("machine", "strategy", "processes", "precision", "batch_tokens", "micro", "seed", "repetition", "run")
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["member", *given, "state", "reason", *numbers])
        writer.writeheader()
        for row in rows:
            own = {key: row.given[key] for key in given}
            writer.writerow({"member": row.member, **own, "state": row.state, "reason": row.reason, **row.numbers})
