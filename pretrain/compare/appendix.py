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
        configs = [_flat(row.run.config) for summary in done for row in summary.finished if row.run]
        shared = {key: value for key, value in configs[0].items() if all(one.get(key) == value for one in configs)}
        yield from tabular("Hyper-parameters that all runs share", sorted(shared.items()))
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
    """Every value that occurs."""
    found: dict[str, dict[str, None]] = {}
    for facts, machine in ((summary.facts, summary.given["machine"]) for summary in summaries):
        told = {f"machine {machine}": f"{facts.get('device')}", f"threads per process, {machine}": facts.get("threads"),
                "parameters": f"{facts.get('parameters'):,}", "data fingerprints": facts.get("fingerprints"), "precision": facts.get("precision"),
                "emulated network": facts.get("network") or "none",
                **{f"version of {name}": version for name, version in (facts.get("versions") or {}).items()}}  # fmt: skip
        for name, value in told.items():
            found.setdefault(name, {})[str(value)] = None
    return {name: "; ".join(values) for name, values in found.items()}


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
