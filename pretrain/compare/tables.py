"""The tables of a comparison. A column in which nobody has anything is left out; what is missing is a dash."""

from collections.abc import Callable, Sequence
from typing import Any

from pretrain.compare.blocks import Table
from pretrain.compare.results import PARTS, ROUNDS, SEEDS, Summary

ABSENT = "–"
BASES = ("ddp", "ddp_comm_bf16")  # 32-bit gradients flatter whatever compresses; the second base does not

Cell = Callable[[Summary], str]


def columns(summaries: Sequence[Summary], cells: dict[str, Cell]) -> Table:
    found = {title: [cell(summary) for summary in summaries] for title, cell in cells.items()}
    shown = {title: column for title, column in found.items() if set(column) != {ABSENT}}
    return Table(list(shown), list(zip(*shown.values(), strict=True)))


def speed(summaries: Sequence[Summary]) -> Table:
    cells: dict[str, Cell] = {"member": name, "processes": processes, "tokens/s": number("tokens_per_second", "{:,.0f}".format),
                              "lowest to highest": range_of("tokens_per_second", "{:,.0f}".format)}  # fmt: skip
    for base in BASES:
        cells[f"× {base}"] = ratio_to(base, summaries, "tokens_per_second")
    cells["scaling efficiency"] = scaling(summaries)
    cells["launches"] = lambda s: f"{len(s.finished)}" if len(s.finished) == len(s.rows) else f"{len(s.finished)} of {len(s.rows)}"
    return columns(summaries, cells)


def parts(summaries: Sequence[Summary]) -> Table:
    """Where the time of an update goes, milliseconds."""
    cells: dict[str, Cell] = {"member": name, "update": number("step_seconds", milliseconds)}
    cells |= {part: number(f"{part}_seconds", milliseconds) for part in PARTS}
    cells["exposed communication"] = exposed
    cells["update, predicted / measured"] = lambda s: _ratio(s, "step_seconds", "step_seconds")
    return columns(summaries, cells)


def footprint(summaries: Sequence[Summary]) -> Table:
    return columns(
        summaries,
        {
            "member": name,
            "peak memory per rank": number("peak_memory_bytes", megabytes),
            "sent per update, by formula": number("sent_predicted", megabytes),
            "counted": number("sent_measured", megabytes),
            "as NCCL's rings": number("sent_ring", megabytes),
            "formula / rings": _over("sent_predicted", "sent_ring"),
            "checkpoint": number("checkpoint_bytes", megabytes),
            "written in": number("checkpoint_seconds", "{:.2f} s".format),
        },
    )


def memory(summaries: Sequence[Summary]) -> Table:
    """What the planner says that it consists of, each part at its largest, and what was measured."""
    known = dict.fromkeys(part for s in summaries for part in (s.given.get("predicted") or {}).get("memory", {}))
    cells: dict[str, Cell] = {"member": name}
    cells |= {part: predicted("memory", part) for part in known}
    cells |= {"together, predicted": predicted("peak_memory"), "measured": number("peak_memory_bytes", megabytes)}
    cells["predicted / measured"] = lambda s: (
        ABSENT if str(s.facts.get("device")).startswith("cpu") else _ratio(s, "peak_memory", "peak_memory_bytes")
    )
    return columns(summaries, cells)


def predicted(key: str, part: str = "") -> Cell:
    def cell(summary: Summary) -> str:
        value = (summary.given.get("predicted") or {}).get(key)
        value = value.get(part) if part and value else value
        return ABSENT if value is None else megabytes(value)

    return cell


def _ratio(summary: Summary, key: str, measured: str) -> str:
    said, found = (summary.given.get("predicted") or {}).get(key), summary.middle(measured)
    return ABSENT if said is None or not found else f"{said / found:.2f}"


def learning(summaries: Sequence[Summary]) -> Table:
    cells: dict[str, Cell] = {
        "member": name,
        "tokens": number("tokens", "{:,.0f}".format),
        "validation loss": loss("val_loss"),
        "training loss": loss("loss"),
        "training time": number("train_seconds", "{:,.0f} s".format),
        "sent in all, per rank": number("wire_bytes_total", megabytes),
        "replicas": number("replicas", "{:.0f}".format),
        "tokens per replica": number("tokens_per_replica", "{:,.0f}".format),
        "rounds": number("rounds", "{:.0f}".format),
        "seeds": lambda s: f"{len(s.finished)}" if len(s.finished) == len(s.rows) else f"{len(s.finished)} of {len(s.rows)}",
    }
    times = {after for s in summaries if (after := s.middle("equal_time")) is not None}
    cells["training loss after equal time" if len(times) > 1 else f"training loss after {max(times, default=0):,.0f} s"] = loss(
        "loss_after_time"
    )
    if len(times) > 1:
        cells["that time"] = number("equal_time", "{:,.0f} s".format)
    return columns(summaries, cells)


def too_short(summary: Summary) -> str:
    """Why what it learnt is not told; empty where it is."""
    rounds = summary.middle("rounds")
    if rounds is not None and rounds < ROUNDS:
        return f"too short: {rounds:.0f} rounds"
    if summary.finished and len({row.given["seed"] for row in summary.finished}) < SEEDS:
        return f"too short: {len(summary.finished)} seed{'s' if len(summary.finished) > 1 else ''}"
    return ""


def missing(summaries: Sequence[Summary]) -> Table | None:
    rows = [(summary.member, summary.reason) for summary in summaries if len(summary.finished) < len(summary.rows)]
    return Table(["member", "why not"], rows) if rows else None


def name(summary: Summary) -> str:
    return summary.member


def processes(summary: Summary) -> str:
    return str(summary.given["processes"])


def number(key: str, form: Callable[[float], str]) -> Cell:
    return lambda summary: ABSENT if (value := summary.middle(key)) is None else form(value)


def _over(key: str, other: str) -> Cell:
    return lambda s: ABSENT if (value := s.middle(key)) is None or not (base := s.middle(other)) else f"{value / base:.2f}"


def range_of(key: str, form: Callable[[float], str]) -> Cell:
    return lambda s: f"{form(min(found))} to {form(max(found))}" if len(found := s.values(key)) > 1 else ABSENT


def loss(key: str) -> Cell:
    def cell(summary: Summary) -> str:
        if why := too_short(summary):
            return why
        value, spread = summary.average(key), summary.spread(key)
        lost = f" ({len(summary.lost)} of {len(summary.rows)} lost)" if summary.lost else ""
        return ABSENT if value is None else f"{value:.4f}" + (f" ± {spread:.4f}" if spread is not None else "") + lost

    return cell


def ratio_to(strategy: str, summaries: Sequence[Summary], key: str) -> Cell:
    def cell(summary: Summary) -> str:
        base, value = base_of(strategy, summary, summaries, key), summary.middle(key)
        return ABSENT if base is None or value is None else f"{value / (base.middle(key) or value):.2f}"

    return cell


def base_of(strategy: str, summary: Summary, summaries: Sequence[Summary], key: str) -> Summary | None:
    """The member of that strategy that does the same work, if there is one with numbers: rather in micro-batches of the same size, and rather
    the one with the strategy's defaults."""
    fitting = [one for one in summaries if one.given["strategy"] == strategy and work(one) == work(summary) and one.middle(key)]

    def distance(one: Summary) -> tuple[bool, int]:
        return one.given["micro"] != summary.given["micro"], sum(name.startswith("strategy.options") for name in one.given["values"])

    return min(fitting, key=distance, default=None)


def work(summary: Summary) -> tuple[Any, ...]:
    """Where it is equal, speeds compare strategies: place, processes, precision, batch, and whatever else an update consists of. What was
    tuned is the member's own affair."""
    given = summary.given
    own = {key: value for key, value in given["values"].items() if key not in given["tried"] and not key.startswith(_NO_WORK)}
    return given["place"], given["processes"], given["precision"], given["batch_tokens"], sorted(map(repr, own.items()))


# Of what a member may have of its own, what leaves an update's work as it is: how it is spread, and how many there are. A batch and a
# precision are compared as they came to be.
_NO_WORK = ("strategy.", "batch.", "run.", "train.max_", "train.epochs", "optim.lr", "optim.warmup_steps", "optim.schedule")


def scaling(summaries: Sequence[Summary]) -> Cell:
    """Tokens/s per process, against the same group's on the fewest that have any."""

    def cell(summary: Summary) -> str:
        timed = [s for s in summaries if s.given["base"] == summary.given["base"] and s.middle("tokens_per_second")]
        value = summary.middle("tokens_per_second")
        if len({s.given["processes"] for s in timed}) < 2 or value is None:
            return ABSENT
        least = min(timed, key=lambda s: int(s.given["processes"]))
        first = least.middle("tokens_per_second") or value
        return f"{value / summary.given['processes'] / (first / least.given['processes']):.0%}"

    return cell


def exposed(summary: Summary) -> str:
    """Of the parts together: they were measured apart from training, whose updates may have had more of the machine, or less."""
    found = {part: summary.middle(f"{part}_seconds") for part in PARTS}
    total = sum(seconds or 0.0 for seconds in found.values())
    return f"{(found['communication'] or 0.0) / total:.0%}" if total else ABSENT


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.2f} MB" if size < 1e9 else f"{size / 1e9:,.2f} GB"
