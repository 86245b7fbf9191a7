"""What a comparison says, in words, and the command that follows from it."""

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from pretrain.compare.blocks import Block, Command, Text
from pretrain.compare.results import Summary
from pretrain.compare.tables import BASES, too_short

_CLOSE = 0.03  # speeds nearer to each other than this share are one to a reader


def verdict(summaries: Sequence[Summary], kind: str, config_file: str, overrides: Sequence[str]) -> Iterator[Block]:
    """Comparisons apart, since speeds of two machines are none."""
    for place in dict.fromkeys(summary.given["place"] for summary in summaries):
        here = [summary for summary in summaries if summary.given["place"] == place and summary.finished]
        chosen = _fastest(here) if kind == "speed" else _best(here)
        if chosen is None:
            yield Text(f"On {place}: nothing can be said; no member has finished with numbers to compare.")
            continue
        summary, words = chosen
        yield Text(f"On {place}: {words}")
        yield Command(command(summary, config_file, overrides))


def _fastest(summaries: Sequence[Summary]) -> tuple[Summary, str] | None:
    timed = [(speed, summary) for summary in summaries if (speed := summary.middle("tokens_per_second")) is not None]
    if not timed:
        return None
    speed, first = max(timed, key=lambda pair: pair[0])
    words = f"{first.member} is fastest with {speed:,.0f} tokens/s"
    for base in BASES:
        others = [found for found, summary in timed if summary.given["strategy"] == base and _alike(summary, first)]
        if others and first.given["strategy"] != base:
            words += f", {speed / others[0]:.2f} times {base}"
    close = [summary.member for found, summary in timed if summary is not first and _within(found, summary, speed, first)]
    words += f". Not to be told from it: {', '.join(close)}." if close else "."
    least = min(summaries, key=lambda s: s.middle("peak_memory_bytes") or float("inf"))
    memory = least.middle("peak_memory_bytes")
    if memory is not None and least is not first:
        slower = (least.middle("tokens_per_second") or 0.0) / speed
        words += f" {least.member} needs least memory, {memory / 1e9:.2f} GB per rank, at {slower:.2f} of that speed."
    if any(not _alike(summary, first) for _, summary in timed):
        words += " Members with other numbers of processes, precisions or batches do other work per second: read them by their own row."
    return first, words


def _within(speed: float, summary: Summary, best: float, first: Summary) -> bool:
    """Nearer than what launches of one member differ by, or than anybody cares for."""
    ranges = [(min(found), max(found)) for one in (summary, first) if (found := one.values("tokens_per_second"))]
    return best - speed <= _CLOSE * best or ranges[0][1] >= ranges[1][0]


def _alike(one: Summary, other: Summary) -> bool:
    return all(one.given[key] == other.given[key] for key in ("processes", "precision", "batch_tokens"))


def _best(summaries: Sequence[Summary]) -> tuple[Summary, str] | None:
    ready = [summary for summary in summaries if not too_short(summary)]
    key = "val_loss" if any(summary.values("val_loss") for summary in ready) else "loss"
    ranked = sorted((value, k, summary) for k, summary in enumerate(ready) if (value := summary.average(key)) is not None)
    if not ranked:
        return None
    value, _, first = ranked[0]
    what = "validation" if key == "val_loss" else "training"
    words = f"{first.member} has the lowest {what} loss after equal tokens, {value:.4f} ± {first.spread(key) or 0:.4f}"
    close = [s.member for found, _, s in ranked[1:] if found - value <= _noise(key, first, s)]
    words += f". Within two standard errors of it: {', '.join(close)}." if close else ", by more than two standard errors."
    sent = [(total, k, summary) for _, k, summary in ranked if (total := summary.middle("wire_bytes_total")) is not None]
    if sent and min(sent)[2] is not first:
        total, _, frugal = min(sent)
        loss = frugal.average(key) or 0.0
        words += f" {frugal.member} sent least, {total / 1e6:,.1f} MB per rank in all, for a loss {loss - value:+.4f} from that."
    return first, words


def _noise(key: str, one: Summary, other: Summary) -> float:
    """Two standard errors of the difference of two means over seeds."""
    return 2 * math.sqrt(sum((s.spread(key) or 0.0) ** 2 / max(1, len(s.values(key))) for s in (one, other)))


def command(summary: Summary, config_file: str, overrides: Sequence[str]) -> str:
    values: dict[str, Any] = summary.given["values"]
    own = [*overrides, *(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items())]
    own = [override for override in own if not override.startswith("compare.")]
    name = f"run.name={summary.given['strategy']}"
    words = ["pretrain", "train", config_file, *own, name, "--", "--num_processes", str(summary.given["processes"])]
    return " ".join(shlex.quote(word) for word in words)
