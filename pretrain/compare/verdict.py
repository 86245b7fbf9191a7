"""What a comparison says, in words, and the command that follows from it."""

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from pretrain.compare.blocks import Block, Command, Text
from pretrain.compare.results import Summary
from pretrain.compare.tables import BASES, base_of, too_short, work

_CLOSE = 0.03  # speeds nearer to each other than this share are one to a reader


def verdict(summaries: Sequence[Summary], kind: str) -> Iterator[Block]:
    """Comparisons apart, since speeds of two machines are none."""
    for place in dict.fromkeys(summary.given["place"] for summary in summaries):
        here = [summary for summary in summaries if summary.given["place"] == place and summary.finished]
        chosen = _fastest(here) if kind == "speed" else _best(here)
        if chosen is None:
            yield Text(f"On {place}: nothing can be said; no member has finished with numbers to compare.")
            continue
        summary, words = chosen
        yield Text(f"On {place}: {words}")
        yield Command(command(summary))


def _fastest(summaries: Sequence[Summary]) -> tuple[Summary, str] | None:
    timed = [(speed, summary) for summary in summaries if (speed := summary.middle("tokens_per_second")) is not None]
    if not timed:
        return None
    speed, first = max(timed, key=lambda pair: pair[0])
    words = f"{first.member} is fastest with {speed:,.0f} tokens/s"
    for base in BASES:
        other = base_of(base, first, summaries, "tokens_per_second")
        if other and first.given["strategy"] != base:
            words += f", {speed / (other.middle('tokens_per_second') or speed):.2f} times {other.member}"
    close = [summary.member for found, summary in timed if summary is not first and _within(found, summary, speed, first)]
    words += f". Not to be told from it: {', '.join(close)}." if close else "."
    least = min(summaries, key=lambda s: s.middle("peak_memory_bytes") or float("inf"))
    memory = least.middle("peak_memory_bytes")
    if memory is not None and least is not first:
        slower = (least.middle("tokens_per_second") or 0.0) / speed
        words += f" {least.member} needs least memory, {memory / 1e9:.2f} GB per rank, at {slower:.2f} of that speed."
    if all(len(summary.finished) == 1 for _, summary in timed):
        words += " There is one launch of each: what lies between two of them may be chance."
    if any(work(summary) != work(first) for _, summary in timed):
        words += (
            " Members with other numbers of processes, precisions, batches or models do other work per second: read them by their own row."
        )
    return first, words


def _within(speed: float, summary: Summary, best: float, first: Summary) -> bool:
    """Nearer than what launches of one member differ by, or than anybody cares for."""
    ranges = [(min(found), max(found)) for one in (summary, first) if (found := one.values("tokens_per_second"))]
    return best - speed <= _CLOSE * best or ranges[0][1] >= ranges[1][0]


def _best(summaries: Sequence[Summary]) -> tuple[Summary, str] | None:
    ready = [summary for summary in summaries if not too_short(summary) and not summary.lost]
    key = "val_loss" if any(summary.values("val_loss") for summary in ready) else "loss"
    ranked = sorted((value, k, summary) for k, summary in enumerate(ready) if (value := summary.average(key)) is not None)
    if not ranked:
        return None
    value, _, first = ranked[0]
    what = "validation" if key == "val_loss" else "training"
    words = f"{first.member} has the lowest {what} loss after equal tokens, {value:.4f} ± {first.spread(key) or 0:.4f}"
    close = [s.member for found, _, s in ranked[1:] if found - value <= _noise(key, first, s)]
    if len(ranked) == 1:
        words = f"{first.member} alone has a {what} loss to tell, {value:.4f} ± {first.spread(key) or 0:.4f}."
    else:
        words += f". Within two standard errors of it: {', '.join(close)}." if close else ", by more than two standard errors."
    if lost := [summary.member for summary in summaries if summary.lost]:
        words += f" Not ranked, since a launch of it failed or diverged: {', '.join(lost)}."
    sent = [(total, k, summary) for _, k, summary in ranked if (total := summary.middle("wire_bytes_total"))]
    if len(sent) > 1 and min(sent)[2] is not first:
        total, _, frugal = min(sent)
        loss = frugal.average(key) or 0.0
        words += f" {frugal.member} sent least, {total / 1e6:,.1f} MB per rank in all, for a loss {loss - value:+.4f} from that."
    return first, words


def _noise(key: str, one: Summary, other: Summary) -> float:
    """Two standard errors of the difference of two means over seeds."""
    return 2 * math.sqrt(sum((s.spread(key) or 0.0) ** 2 / max(1, len(s.values(key))) for s in (one, other)))


def command(summary: Summary) -> str:
    values: dict[str, Any] = summary.given["values"]
    own = [
        *summary.given["overrides"],
        *(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()),
    ]
    own = [override for override in own if not override.startswith("compare.")]
    name = f"run.name={summary.given['strategy']}"
    words = ["pretrain", "train", summary.given["config_file"], *own, name, "--", "--num_processes", str(summary.given["processes"])]
    return " ".join(shlex.quote(word) for word in words)
