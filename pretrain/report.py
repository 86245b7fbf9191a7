"""Table, CSV and figures of runs, finished or running, from their folders alone; and the same runs for Weights & Biases.

`metrics.jsonl` is the truth, `config.yaml` says what ran, `status.json` how it stands. A null in the metrics is a number that was
not finite; here it is NaN and stays visible: `nan` in the table and the CSV, a gap in the curve.

An expected curve is `configs/expected/NAME.json`, for runs of `configs/NAME.yaml`: `title`, `source` and `points`, each with
`step`, `tokens`, `val_loss`, and the band `low` to `high` that a normal run stays in. Times are not in it: machines differ.
"""

import csv
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from omegaconf import OmegaConf

from pretrain.config import ConfigError

LAST = 5  # logged losses that "last train loss" averages: one alone is noisy
NEAR = 0.02  # an evaluation is held against an expected point if their steps differ by at most this share
EARLY = 0.05  # share of a run that a linear loss axis may cut off at the top: the first fall would flatten the rest
ABSENT = "–"

# Told apart without colour, by dash and marker; the colours are Okabe and Ito's, which the colour-blind can tell apart too.
STYLES: list[dict[str, Any]] = [
    {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    {"color": "#D55E00", "linestyle": "--", "marker": "s"},
    {"color": "#000000", "linestyle": ":", "marker": "^"},
    {"color": "#009E73", "linestyle": "-.", "marker": "D"},
    {"color": "#CC79A7", "linestyle": (0, (6, 1, 1, 1, 1, 1)), "marker": "v"},
    {"color": "#E69F00", "linestyle": (0, (8, 3)), "marker": "P"},
]

Row = dict[str, Any]
Curves = Mapping[str, Row]  # run name -> its expected curve
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    name: str
    rows: list[Row]  # the lines of metrics.jsonl, in order
    config: Row
    status: Row  # empty where there is no status.json

    @property
    def facts(self) -> Row:
        return self.config.get("facts") or {}

    def series(self, key: str, x: str = "step") -> tuple[Floats, Floats]:
        """`key` over `step`, or over a cumulative number (`tokens`, `train_seconds`), which lies on a straight line between logs."""
        steps, values = self._logged(key)
        if x == "step":
            return steps, values
        logged_steps, logged = self._logged(x)
        return np.interp(steps, np.append(0.0, logged_steps), np.append(0.0, logged)), values

    def _logged(self, key: str) -> tuple[Floats, Floats]:
        pairs = [(row["step"], row[key]) for row in self.rows if key in row]
        return np.array([step for step, _ in pairs], float), np.array([value for _, value in pairs], float)


def report(runs: Sequence[Path], output: Path, expected: Path | None) -> list[Path]:
    """Write report.md, metrics.csv and the figures into `output`; returns the files. `expected`: the folder of expected curves.

    Raises ConfigError for a folder that is no run, has logged nothing, or has a damaged line that is not its last.
    """
    read = [read_run(folder, name) for folder, name in zip(runs, _names(runs), strict=True)]
    curves = {run.name: curve for run in read if expected is not None and (curve := _read_expected(expected, run))}
    output.mkdir(parents=True, exist_ok=True)
    figures = list(_draw_figures(read, curves, output))
    table, text = output / "metrics.csv", output / "report.md"
    _write_csv(read, table)
    text.write_text("\n".join(_markdown(read, curves, [f for f in figures if f.suffix == ".png"])) + "\n", "utf-8")
    return [text, table, *figures]


def read_run(folder: Path, name: str = "") -> Run:
    """`name`: by default the folder's. Raises ConfigError as `report` does."""
    try:
        config: Any = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{folder}: not a run folder (it has no config.yaml)") from None
    path = folder / "status.json"
    status = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return Run(name or folder.resolve().name, _read_metrics(folder / "metrics.jsonl"), config, status)


def _read_metrics(path: Path) -> list[Row]:
    """A last line without its line break was cut short by a kill, or is being written: it counts only if it is whole."""
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.append({"step": int(row["step"])} | {k: math.nan if v is None else v for k, v in row.items()})
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                found = line[:60].decode("utf-8", "replace")
                raise ConfigError(f"{path}, line {number}: expected a JSON object with a step, found {found}") from None
    if not rows:
        raise ConfigError(f"{path}: no metrics yet; a run writes them at its first evaluation or logged step")
    return rows


def expected_from(runs: Sequence[Path]) -> Row:
    """An expected curve from finished runs of one config that differ in their seed: the mean, and a band of 3 standard deviations.

    Few seeds know their own spread badly: with 5, such a band holds a sixth run in 95 of 100 cases; with 3, a fourth in 88
    (Student's t). Raises ConfigError for fewer than 3 runs, or runs of several configs.
    """
    read = [read_run(folder) for folder in runs]
    names = sorted({str(run.facts["config_file"]) for run in read})
    if len(read) < 3 or len(names) > 1:
        found = f"{len(read)} of {', '.join(names) or 'none'}"
        raise ConfigError(f"an expected curve needs 3 runs or more of one config; found {found}")
    losses = [dict(zip(*run.series("val_loss"), strict=True)) for run in read]
    tokens = dict(zip(losses[0], read[0].series("val_loss", "tokens")[0], strict=True))
    points = []
    for step in sorted(set.intersection(*(set(one) for one in losses))):
        mean, spread = np.mean(values := [one[step] for one in losses]), 3 * np.std(values, ddof=1)
        band = {"val_loss": mean, "low": mean - spread, "high": mean + spread}
        band = {key: round(float(value), 4) for key, value in band.items()}
        points.append({"step": int(step), "tokens": round(tokens[step]), **band})
    seeds = ", ".join(str(run.config["run"]["seed"]) for run in read)
    source = f"our own runs of configs/{names[0]}.yaml with seeds {seeds}; the band is the mean ± 3 standard deviations"
    return {"title": f"{names[0]}, {len(read)} seeds", "source": source, "points": points}


def to_wandb(run: Path, project: str) -> None:
    """Rebuild the W&B run, line by line. WANDB_MODE decides, as always, whether it is sent or kept in the run's `logs/`."""
    import wandb

    read = read_run(run)
    # What W&B notes by itself would be about this process and machine, not about those that trained.
    settings = wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True, save_code=False)
    (run / "logs").mkdir(exist_ok=True)
    with wandb.init(project=project, name=read.name, dir=run / "logs", config=read.config, settings=settings) as live:
        live.define_metric("*", step_metric="step")
        for row in read.rows:
            live.log(row)


def _names(runs: Sequence[Path]) -> list[str]:
    """Folder names, or paths where two folders share a name."""
    names = [folder.resolve().name for folder in runs]
    return [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, runs, strict=True)]


def _read_expected(folder: Path, run: Run) -> Row | None:
    path = folder / f"{run.facts.get('config_file')}.json"
    curve: Row | None = json.loads(path.read_text("utf-8")) if path.exists() else None
    return curve


def _write_csv(runs: Sequence[Run], path: Path) -> None:
    """One row for each logged line. A number that was not finite is `nan`; a key that the line has not is empty."""
    keys = dict.fromkeys(key for run in runs for row in run.rows for key in row)
    with open(path, "w", encoding="utf-8", newline="") as f:
        writer = csv.DictWriter(f, ["run", *keys])
        writer.writeheader()
        writer.writerows({"run": run.name, **row} for run in runs for row in run.rows)


def _markdown(runs: Sequence[Run], curves: Curves, figures: Sequence[Path]) -> Iterator[str]:
    yield from ("# Training report", "", *_table(runs), "")
    yield (
        f"Losses are in nats per token, over the whole global batch; the last train loss is the mean of the last {LAST} logged. "
        "Speeds and MFU are medians over all logged lines; memory is the largest of any rank; time is training alone, without "
        "evaluation, checkpoints and compilation, over all restarts. A linear loss axis leaves out the fall of the first "
        f"{EARLY:.0%} of a run. Every number: [metrics.csv](metrics.csv)."
    )
    for figure in figures:
        yield from ("", f"## {FIGURES[figure.stem][0]}", "", f"![{figure.stem}]({figure.name})")
    if curves:
        yield from ("", "## Is my loss normal?")
    for run in runs:
        if run.name in curves:
            yield from ("", _verdict(run, curves[run.name]))


def _table(runs: Sequence[Run]) -> Iterator[str]:
    """One row for each run; a column in which no run has anything is left out."""
    cells = {title: [cell(run) for run in runs] for title, cell in COLUMNS.items()}
    shown = {title: column for title, column in cells.items() if set(column) != {ABSENT}}
    for row in (list(shown), ["---"] * len(shown), *zip(*shown.values(), strict=True)):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def _short(number: float) -> str:
    size, unit = next(((s, u) for s, u in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if abs(number) >= s), (1.0, ""))
    return f"{number / size:.4g}{unit}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _number(key: str, fold: Callable[[Floats], float], form: Callable[[float], str]) -> Callable[[Run], str]:
    return lambda run: form(fold(values)) if len(values := run.series(key)[1]) else ABSENT


def _last(values: Floats) -> float:
    return float(values[-1])


def _fact(key: str, form: Callable[[Any], str] = str) -> Callable[[Run], str]:
    return lambda run: ABSENT if run.facts.get(key) is None else form(run.facts[key])


def _state(run: Run) -> str:
    state, reason = run.status.get("state", "unknown: no status.json"), run.status.get("reason")
    return f"{state}: {reason}" if reason and state != "finished" else state


def _val_loss(run: Run, *, best: bool) -> str:
    steps, losses = run.series("val_loss")
    if best:
        steps, losses = steps[np.isfinite(losses)], losses[np.isfinite(losses)]
    at = int(losses.argmin()) if best and len(losses) else -1
    return f"{losses[at]:.4f} ({steps[at]:,.0f})" if len(losses) else ABSENT


COLUMNS: dict[str, Callable[[Run], str]] = {
    "run": lambda run: run.name,
    "parameters": _fact("parameters", _short),
    "strategy × processes": lambda run: f"{_fact('strategy')(run)} × {_fact('world_size')(run)}",
    "precision": _fact("precision"),
    "tokens": _number("tokens", _last, _short),
    "steps": _number("step", _last, "{:,.0f}".format),
    "last train loss": _number("loss", lambda losses: float(losses[-LAST:].mean()), "{:.4f}".format),
    "final val loss (step)": partial(_val_loss, best=False),
    "best val loss (step)": partial(_val_loss, best=True),
    "bits per byte": _number("val_bits_per_byte", _last, "{:.4f}".format),
    "tokens/s": _number("tokens_per_second", np.median, "{:,.0f}".format),
    "tokens/s per device": _number("tokens_per_second_per_device", np.median, "{:,.0f}".format),
    "MFU": _number("mfu", np.median, "{:.1%}".format),
    "peak memory": _number("peak_memory_bytes", np.max, lambda size: f"{size / 2**30:.2f} GiB"),
    "training time": _number("train_seconds", _last, _clock),
    "restarts": _number("restarts", _last, "{:.0f}".format),
    "state": _state,
}


def _verdict(run: Run, curve: Row) -> str:
    """Holds the latest evaluation that lies near an expected point against that point, in words."""
    points, reference = curve["points"], f"Expected is {curve['title']}: {curve['source']}."
    near = [
        (step, -abs(step - point["step"]), loss, point)
        for step, loss in zip(*run.series("val_loss"), strict=True)
        for point in points
        if abs(step - point["step"]) <= NEAR * point["step"]
    ]
    if not near:
        steps = " to ".join(f"{step:,}" for step in sorted({points[0]["step"], points[-1]["step"]}))
        return f"**{run.name}** cannot be compared yet: it has no evaluation near step {steps}. {reference}"
    step, _, loss, point = max(near, key=lambda pair: pair[:2])
    low, high = point["low"], point["high"]
    if math.isnan(loss):
        verdict = "the run has diverged"
    elif loss > high:
        verdict = f"above by {loss - high:.4f}, worse than expected"
    elif loss < low:
        verdict = f"below by {low - loss:.4f}, better than expected: check that data and evaluated tokens are the same"
    else:
        verdict = "inside, so normal"
    found = f"validation loss {loss:.4f} at step {step:,.0f}"
    text = f"**{run.name}** has {found}; expected is {low:.3f} to {high:.3f} at step {point['step']:,}: {verdict}."
    if overrides := run.facts.get("overrides"):
        text += f" It was started with {', '.join(f'`{override}`' for override in overrides)}:"
        text += " a change of seed, layout or logging leaves the comparison fair, another may not."
    return f"{text} {reference}"


def _draw_figures(runs: Sequence[Run], curves: Curves, folder: Path) -> Iterator[Path]:
    """PNG and PDF of each figure that some run has numbers for. Without pyplot: no display, no state shared with the caller."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    for name, (_, draw) in FIGURES.items():
        figure = Figure(figsize=(6.4, 4), layout="constrained")
        axes = figure.add_subplot()
        draw(axes, runs, curves)
        if not any(np.size(line.get_xdata()) for line in axes.lines):
            continue
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.93", linewidth=0.8)
        axes.set_axisbelow(True)
        for path in (folder / f"{name}.png", folder / f"{name}.pdf"):
            with rc_context({"pdf.fonttype": 42}):  # publishers refuse Type 3 fonts, matplotlib's default
                figure.savefig(path, dpi=150)
            yield path


def _draw_loss(axes: Any, runs: Sequence[Run], curves: Curves, x: str, label: str, unit: int = 1, log: bool = False) -> None:
    """Training loss thin, validation loss with markers, expected curves in grey behind."""
    drawn = {curve["title"]: curve for curve in curves.values()}.values()
    shown = [_draw_expected(axes, curve, x) for curve in drawn if x != "train_seconds"]
    for run, style in zip(runs, itertools.cycle(STYLES), strict=False):
        for key in ("loss", "val_loss"):
            at, loss = run.series(key, x)
            at, loss = (at[at > 0], loss[at > 0]) if log else (at, loss)  # step 0 has no place on a logarithmic axis
            shown.append(loss[np.isfinite(loss) & (at >= EARLY * at.max(initial=0))])
            if key == "loss":
                axes.plot(at / unit, loss, color=style["color"], linewidth=0.6, alpha=0.5)
            else:
                _draw_line(axes, at / unit, loss, style, run.name)
    axes.set(xlabel=label, ylabel="loss (nats per token)")
    axes.legend(frameon=False, fontsize=9, title="validation (thin: training)", title_fontsize=9, loc="upper right")
    _format(axes.xaxis, log=log)
    values = np.concatenate(shown)
    if not log and len(values):
        margin = 0.05 * np.ptp(values) or 0.1
        axes.set_ylim(values.min() - margin, values.max() + margin)


def _draw_seconds(axes: Any, runs: Sequence[Run], curves: Curves) -> None:
    longest = max(run.series("train_seconds")[1].max(initial=0) for run in runs)
    unit, word = (3600, "hours") if longest >= 7200 else (60, "minutes")
    _draw_loss(axes, runs, curves, "train_seconds", f"training time ({word})", unit)


def _draw_expected(axes: Any, curve: Row, x: str) -> Floats:
    """A band with its mean, or one point with its error bar. Returns the losses that the axes should show."""
    points = [point for point in curve["points"] if point["step"]]
    at, mean, low, high = (np.array([point[key] for point in points], float) for key in (x, "val_loss", "low", "high"))
    if len(at) == 1:
        axes.errorbar(at, mean, [mean - low, high - mean], fmt="x", color="0.5", capsize=4, label=curve["title"])
    else:
        axes.fill_between(at, low, high, color="0.85", linewidth=0, label=curve["title"])
        axes.plot(at, mean, color="0.6", linewidth=1)
    late = at >= EARLY * at.max(initial=0)
    return np.concatenate([low[late], high[late]])


def _draw_series(axes: Any, runs: Sequence[Run], _: Curves, key: str, label: str, log: bool = False) -> None:
    for run, style in zip(runs, itertools.cycle(STYLES), strict=False):
        _draw_line(axes, *run.series(key), style, run.name)
    axes.set(xlabel="step", ylabel=label)
    axes.legend(frameon=False, fontsize=9)
    _format(axes.xaxis, log=False)
    _format(axes.yaxis, log=log)
    if not log and 0 < axes.dataLim.y1 < math.inf:
        axes.set_ylim(0, 1.08 * axes.dataLim.y1)


def _draw_line(axes: Any, at: Floats, values: Floats, style: Row, label: str) -> None:
    sparse = max(1, len(at) // 20)
    axes.plot(at, values, **style, linewidth=1.2, markersize=4, markevery=sparse, label=label)


def _format(axis: Any, *, log: bool) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    if log:
        (axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale)("log")
        axis.set_major_locator(LogLocator(subs=(1, 3)))
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: _short(value))


FIGURES: dict[str, tuple[str, Callable[[Any, Sequence[Run], Curves], None]]] = {
    "loss_steps": ("Loss by step", partial(_draw_loss, x="step", label="step")),
    "loss_tokens": ("Loss by tokens", partial(_draw_loss, x="tokens", label="tokens", log=True)),
    "loss_seconds": ("Loss by training time", _draw_seconds),
    "throughput": ("Throughput", partial(_draw_series, key="tokens_per_second", label="tokens per second")),
    "learning_rate": ("Learning rate", partial(_draw_series, key="lr", label="learning rate")),
    "grad_norm": (
        "Gradient norm",
        partial(_draw_series, key="grad_norm", label="gradient norm before clipping", log=True),
    ),
}
