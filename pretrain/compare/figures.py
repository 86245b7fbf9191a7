"""The figures of a comparison: PNG and PDF at the width of a column, told apart by dash and marker as well as by colour."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.compare import bandwidth
from pretrain.compare.blocks import Figure
from pretrain.compare.results import PARTS, Summary
from pretrain.compare.tables import too_short
from pretrain.report import STYLES

COLUMN = 3.4  # inches: of a two-column paper
_MARKERS = "os^DvP<>Xhp*d8H1234"
_HATCHES = {"compute": "", "communication": "////", "optimizer": "....", "data": "xxxx", "host": "----"}
_GREYS = {"compute": "0.25", "communication": "1.0", "optimizer": "0.6", "data": "0.85", "host": "0.75"}


def draw(summaries: Sequence[Summary], folder: Path) -> list[Figure]:
    """Those that there are numbers for."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    done = [summary for summary in summaries if summary.finished]
    drawn = []
    for stem, (caption, plot) in FIGURES.items():
        figure = Canvas(figsize=(COLUMN, COLUMN * 0.8), layout="constrained")
        axes = figure.add_subplot()
        with rc_context({"font.size": 7, "axes.linewidth": 0.6, "pdf.fonttype": 42}):  # publishers refuse Type 3 fonts
            paths = [folder / f"{stem}.{kind}" for kind in ("png", "pdf")]
            if not plot(axes, done):
                for path in paths:  # of an earlier report
                    path.unlink(missing_ok=True)
                continue
            axes.tick_params(labelsize=7)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color="0.93", linewidth=0.6)
            axes.set_axisbelow(True)
            for path in paths:
                figure.savefig(path, dpi=220)
        drawn.append(Figure(paths[0], caption))
    return drawn


def style(index: int) -> dict[str, Any]:
    """Another pair of colour and dash for each of the first len(STYLES)² members."""
    return {
        "color": STYLES[index % len(STYLES)]["color"],
        "linestyle": STYLES[(index + index // len(STYLES)) % len(STYLES)]["linestyle"],
        "marker": _MARKERS[index % len(_MARKERS)],
        "markersize": 3.5,
        "linewidth": 1,
    }


def losses_over(x: str, label: str, unit: float, scale: str = "linear") -> Callable[[Any, Sequence[Summary]], bool]:
    """Training loss of every member, the mean over its seeds; the first twentieth, which would flatten the rest, is left out."""

    def plot(axes: Any, summaries: Sequence[Summary]) -> bool:
        told = [summary.given["kind"] == "learning" and summary.middle(x) is not None for summary in summaries]
        for k, summary in ((k, summary) for k, summary in enumerate(summaries) if told[k]):
            curves = [row.run.series("loss", x) for row in summary.finished if row.run]
            name = f"{summary.member} ({why})" if (why := too_short(summary)) else summary.member
            length = min(len(values) for _, values in curves)
            over = np.mean([positions[:length] for positions, _ in curves], axis=0) / unit
            if length < 2 or not over.any():  # one process has sent nothing
                continue
            values = np.array([values[:length] for _, values in curves])
            first = length // 20
            look = style(k)
            axes.plot(over[first:], values.mean(axis=0)[first:], markevery=max(1, length // 6), label=name, **look)
            if len(values) > 1:
                low, high = (edge(values, axis=0)[first:] for edge in (np.min, np.max))
                axes.fill_between(over[first:], low, high, color=look["color"], alpha=0.15, linewidth=0)
        if not axes.lines:
            return False
        axes.set_xscale(scale)
        _labels(axes, label, "training loss (nats per token)")
        return True

    return plot


def memory_against_speed(axes: Any, summaries: Sequence[Summary]) -> bool:
    """Of launches that took turns: others may have had the machine at better or worse times."""
    timed = [(k, s) for k, s in enumerate(summaries) if s.given["kind"] == "speed"]
    points = [(k, s, s.middle("peak_memory_bytes"), s.middle("tokens_per_second")) for k, s in timed]
    found = [(k, s, memory / 1e9, speed) for k, s, memory, speed in points if memory is not None and speed is not None]
    if len(found) < 2:
        return False
    for place in dict.fromkeys(s.given["place"] for _, s, *_ in found):
        front = pareto([(memory, speed) for _, s, memory, speed in found if s.given["place"] == place])
        axes.plot(*zip(*front, strict=True), color="0.6", linewidth=1, linestyle="--", drawstyle="steps-post", zorder=0)
    for k, summary, memory, speed in found:
        axes.plot(memory, speed, label=summary.member, **{**style(k), "linestyle": "none"})
    _labels(axes, "peak memory per rank (GB)", "tokens per second")
    return True


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other beats in both: (memory, speed), from the least memory on."""
    front: list[tuple[float, float]] = []
    for memory, speed in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or speed > front[-1][1]:
            front.append((memory, speed))
    return front


def scaling(axes: Any, summaries: Sequence[Summary]) -> bool:
    families: dict[str, list[Summary]] = {}
    for summary in summaries:
        families.setdefault(summary.given["base"], []).append(summary)
    for k, (base, family) in enumerate(families.items()):
        points = sorted((s.given["processes"], speed) for s in family if (speed := s.middle("tokens_per_second")) is not None)
        if len({count for count, _ in points}) < 2:
            continue
        counts, speeds = zip(*points, strict=True)
        axes.plot(counts, speeds, label=base, **style(k))
        axes.plot(counts, [speeds[0] * count / counts[0] for count in counts], color="0.8", linewidth=0.8, zorder=0)
    if not axes.lines:
        return False
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    _labels(axes, "processes", "tokens per second; grey: in proportion")
    return True


def utilisation(axes: Any, summaries: Sequence[Summary]) -> bool:
    gbits = np.logspace(-1, 2, 61)
    for k, summary in enumerate(summaries):
        compute, sent = compute_seconds(summary), sent_ring(summary)
        if compute is None or sent is None or not sent:
            continue
        over = [bandwidth.utilisation(compute, sent, gbit * bandwidth.GBIT) for gbit in gbits]
        axes.plot(gbits, over, label=summary.member, markevery=(k % 10, 15), **style(k))
    if not axes.lines:
        return False
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    _labels(axes, "bandwidth of each process (Gbit/s)", "compute utilisation")
    return True


def compute_seconds(summary: Summary) -> float | None:
    """An update without its communication."""
    found = [summary.middle(f"{part}_seconds") for part in PARTS if part != "communication"]
    return sum(value for value in found if value is not None) if any(value is not None for value in found) else None


def sent_ring(summary: Summary) -> float | None:
    counted = summary.middle("sent_ring")
    return counted if counted is not None else summary.middle("sent_predicted")


def time_of_an_update(axes: Any, summaries: Sequence[Summary]) -> bool:
    shown = [summary for summary in summaries if summary.middle("compute_seconds") is not None][::-1]
    if not shown:
        return False
    left = np.zeros(len(shown))
    for part in PARTS:
        width = np.array([max(0.0, summary.middle(f"{part}_seconds") or 0.0) * 1e3 for summary in shown])
        axes.barh(
            range(len(shown)), width, left=left, label=part, color=_GREYS[part], hatch=_HATCHES[part], edgecolor="black", linewidth=0.4
        )
        left += width
    axes.set_yticks(range(len(shown)), [summary.member for summary in shown], fontsize=6)
    _labels(axes, "milliseconds per update", "")
    return True


def _labels(axes: Any, x: str, y: str) -> None:
    """And the legend below, in as many columns as there is room for."""
    axes.set_xlabel(x, fontsize=7)
    axes.set_ylabel(y, fontsize=7)
    size = 5 if len(axes.get_legend_handles_labels()[1]) > 9 else 6
    for columns in (3, 2, 1):
        legend = axes.figure.legend(loc="outside lower center", ncols=columns, fontsize=size, frameon=False, handlelength=2.4)
        if columns == 1 or legend.get_window_extent().width <= axes.figure.bbox.width:
            return
        legend.remove()


FIGURES: dict[str, tuple[str, Callable[[Any, Sequence[Summary]], bool]]] = {
    "loss_tokens": ("Training loss after equal tokens; the band is the range over seeds.", losses_over("tokens", "million tokens", 1e6)),
    "loss_seconds": ("Training loss after equal training time.", losses_over("train_seconds", "seconds of training", 1)),
    "loss_bytes": ("Training loss against what each rank has sent.", losses_over("wire_bytes_total", "MB sent by each rank", 1e6, "log")),
    "memory_speed": ("Memory against speed; the dashed line joins those that no other beats in both.", memory_against_speed),
    "update": ("Where the time of an update goes; communication is what computing does not hide.", time_of_an_update),
    "scaling": ("Speed over the number of processes.", scaling),
    "utilisation": (
        "Share of the time that goes into computing, over the bandwidth between processes: by a model, from the computing measured and the bytes "
        "counted here, with nothing hidden.",
        utilisation,
    ),
}
