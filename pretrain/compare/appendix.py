"""`appendix.tex`: what a referee asks for. Plain tabulars, to be \\input into an appendix."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pretrain.compare.results import Summary

_SPECIAL = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
            "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "×": r"$\times$", "–": "--", "<": r"\textless{}", ">": r"\textgreater{}"}  # fmt: skip


def appendix(summaries: Sequence[Summary]) -> str:
    return "\n".join(_lines(summaries)) + "\n"


def _lines(summaries: Sequence[Summary]) -> Iterator[str]:
    done = [summary for summary in summaries if summary.finished]
    yield "% Made by pretrain compare."
    if done:
        runs = [row.run for row in done[0].finished if row.run]
        shared = _flat(runs[0].config)
        yield from tabular("Hyper-parameters that all members share unless said otherwise below", sorted(shared.items()))
        members = [(s.member, ", ".join(f"{key}={value}" for key, value in s.given["values"].items())) for s in summaries]
        yield from tabular("What is each member's own", members)
        options = [(s.member, ", ".join(f"{k}={v}" for k, v in (s.facts.get("strategy_options") or {}).items()) or "none") for s in done]
        yield from tabular("Options of the strategies, defaults included", options)
        yield from tabular("Hardware and versions", sorted(_machines(done).items()))


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of what all members have alike: what one run was given, without where it lies and what its strategy is."""
    return {
        f"{section}.{key}": value
        for section in ("data", "model", "batch", "optim", "train")
        for key, value in (config.get(section) or {}).items()
        if value not in (None, "", [], {})
    }


def _machines(summaries: Sequence[Summary]) -> dict[str, str]:
    found: dict[str, str] = {}
    for summary in summaries:
        facts = summary.facts
        found[f"machine {summary.given['machine']}"] = f"{facts.get('device')}, {facts.get('threads')} threads per process"
        found |= {f"version of {name}": str(version) for name, version in (facts.get("versions") or {}).items()}
        found["parameters"] = f"{facts.get('parameters'):,}"
        found["data fingerprints"] = str(facts.get("fingerprints"))
    return found


def tabular(caption: str, rows: Sequence[tuple[object, object]]) -> Iterator[str]:
    yield from (
        "",
        r"\begin{table}[p]",
        rf"\caption{{{escape(caption)}}}",
        r"\footnotesize",
        r"\begin{tabular}{lp{0.6\linewidth}}",
        r"\hline",
    )
    yield from (rf"{escape(left)} & {escape(right)} \\" for left, right in rows)
    yield from (r"\hline", r"\end{tabular}", r"\end{table}")


def escape(text: object) -> str:
    return "".join(_SPECIAL.get(letter, letter) for letter in str(text))
