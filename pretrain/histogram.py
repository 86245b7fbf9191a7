"""Lengths of documents as a histogram in bins that double: in the terminal, and as a PNG."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

WIDTH = 80


def bins(lengths: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """(shortest, longest, documents) of each power of two from the shortest document to the longest; 0 has a bin of its own."""
    counts = Counter[int]()
    for length, documents in lengths.items():
        counts[length.bit_length()] += documents
    return [(1 << k >> 1, (1 << k) - 1, counts[k]) for k in range(min(counts), max(counts) + 1)] if counts else []


def lines(lengths: Mapping[int, int]) -> Iterator[str]:
    """A line for each bin, at most WIDTH columns wide."""
    found = bins(lengths)
    labels = [f"{low:,}" if low == high else f"{low:,}–{high:,}" for low, high, _ in found]
    left = max(map(len, labels), default=0)
    right = max((len(f"{n:,}") for *_, n in found), default=0)
    room = WIDTH - left - right - 5
    most = max((n for *_, n in found), default=1)
    for label, (*_, n) in zip(labels, found, strict=True):
        yield f"{label:>{left + 1}}  {n:>{right},}  {'█' * -(-n * room // most)}".rstrip()


def draw(lengths: Mapping[str, Mapping[int, int]], title: str, path: Path) -> None:
    """Of all splits that have documents, as shares of their documents."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for (split, counted), style in zip(lengths.items(), ("-", "--", ":"), strict=False):
        found = bins(counted)
        total = sum(n for *_, n in found)
        edges = [max(low, 0.5) for low, *_ in found] + [found[-1][1] + 1]
        axes.stairs([n / total for *_, n in found], edges, linestyle=style, linewidth=1.5, label=f"{split}: {total:,} documents")
    axes.set(xscale="log", xlabel="tokens of a document, end of text included", ylabel="share of the documents", title=title)
    axes.legend()
    figure.savefig(path, dpi=150)
