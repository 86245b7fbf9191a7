"""The page that the doctor prints: what would be used, what was measured, what was found. Plain text, 100 columns wide."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pretrain.doctor.facts import Facts, Gpu
from pretrain.doctor.finding import Finding, cores_of, gpus_of_nodes
from pretrain.doctor.measurements import Measured
from pretrain.doctor.speeds import GPT2_PARAMETERS

_WIDTH, _LABEL, _VALUE = 100, 14, 40
_VERSIONS = ("python", "torch", "CUDA", "ROCm", "NCCL", "accelerate", "transformers", "numpy", "deepspeed", "driver", "pretrain's code")
_STARTED_BY = {"srun": "srun", "launcher": "a launcher"}


def page(ranks: Sequence[Facts], measured: Sequence[Measured], findings: Sequence[Finding]) -> str:
    lines = ["a launch here would use", *_used(ranks), ""]
    if numbers := _numbers(ranks, measured):
        lines += ["measured", *numbers, ""]
    if findings:
        lines += ["found", *(line for finding in findings for line in finding_lines(finding)), ""]
    problems = sum(finding.level == "problem" for finding in findings)
    lines.append(f"{_count(problems, 'problem')}, {_count(len(findings) - problems, 'warning')}")
    return "\n".join(lines) + "\n"


def _used(ranks: Sequence[Facts]) -> Iterable[str]:
    rank, plan = ranks[0], ranks[0].outlook
    nodes = list(dict.fromkeys(rank.node for rank in ranks))
    seen_by = f", seen by {_count(len(ranks), 'rank')} of {_STARTED_BY[rank.kind]}" if rank.kind in _STARTED_BY else ""
    yield from _row(
        "processes",
        f"{plan.processes} on {_count(len(nodes), 'node')} ({', '.join(nodes[:8])}{' …' * (len(nodes) > 8)}){seen_by}",
    )
    yield from _row("device", f"{plan.device}{', as configured' if plan.device_asked else ''}; {_hardware(ranks)}")
    yield from _row("precision", _with_reason(*plan.precision))
    yield from _row("compile", _with_reason(*plan.compile) + ("" if plan.config else " (without a config: of a long run)"))
    if plan.strategy:
        size = f", {plan.parameters / 1e6:.1f}M parameters" if plan.parameters else ""
        yield from _row("strategy", plan.strategy + size)
    gpus = plan.device == "cuda"
    yield from _row("backend", "none: one process" if plan.processes == 1 else "nccl, and gloo for control" if gpus else "gloo")
    yield from _row(
        "threads",
        f"{plan.threads}; {_count(cores_of([r for r in ranks if r.node == rank.node]), 'core')}"
        + (f", the time of {rank.cpu_quota:g}" if rank.cpu_quota else ""),
    )
    limit = f", limited to {_bytes(rank.memory_limit)}" if rank.memory_limit else ""
    shm = f"; /dev/shm {_bytes(rank.shm_free)} free" if rank.shm_free is not None else ""
    yield from _row("memory", f"{_bytes(rank.memory_bytes)}{limit}{shm}")
    yield from _row("limits", f"open files {_limit(rank.open_files)}; locked memory {_limit(rank.locked_memory, 'bytes')}; "
                              f"processes {_limit(rank.processes)}; core files {_limit(rank.core_bytes, 'bytes')}")  # fmt: skip
    yield from _row("compiler", rank.compiler or "none")
    yield from _row("versions", ", ".join(f"{name} {rank.versions[name]}" for name in _VERSIONS if rank.versions.get(name)))
    yield from _row("accelerate", f"reads {rank.accelerate_file or 'no default config file'} where no --config_file is given")
    yield from _row("environment", "  ".join(_environment(ranks)) or "nothing of Accelerate, NCCL or Slurm")


def _hardware(ranks: Sequence[Facts]) -> str:
    """Of the first rank's node."""
    rank, gpus = ranks[0], gpus_of_nodes(ranks)[ranks[0].node]
    if not gpus:
        return f"{rank.gpu_error or 'no GPU'}; CPU {'with' if rank.amx else 'without'} AMX"
    kinds: dict[Gpu, int] = {}
    for gpu in gpus:
        kind = replace(gpu, uuid="", free_bytes=None)
        kinds[kind] = kinds.get(kind, 0) + 1
    precisions = "fp32, fp16, bf16" if all(gpu.capability >= (8, 0) for gpu in kinds) else "fp32, fp16"
    listed = " + ".join(f"{count} × {gpu.name} ({_bytes(gpu.memory_bytes)})" for gpu, count in kinds.items())
    return f"{listed} per node, {precisions}, driver {rank.versions.get('driver', 'unknown')}"


def _environment(ranks: Sequence[Facts]) -> Iterable[str]:
    """Of the first rank; what other ranks have differently is marked."""
    for name, value in ranks[0].environment.items():
        differs = any(rank.environment.get(name) != value for rank in ranks)
        yield f"{name}={value[:_VALUE]}{'…' * (len(value) > _VALUE)}" + (" (differs)" if differs else "")


def _numbers(ranks: Sequence[Facts], measured: Sequence[Measured]) -> Iterable[str]:
    lines: list[str] = []
    if found := next((m.all_reduce for m in measured if m.all_reduce), None):
        parameters = ranks[0].outlook.parameters or GPT2_PARAMETERS
        lines += _row("all-reduce", f"{found.ranks} ranks, {found.backend}: {_seconds(found.latency)} for 4 bytes; {_bytes(found.bytes)} in {_seconds(found.seconds)}, "
                                    f"{_bytes(found.algorithm_bandwidth)}/s (on the bus {_bytes(found.bus_bandwidth)}/s); "
                                    f"fp32 gradients of {parameters / 1e6:.1f}M parameters in {_seconds(4 * parameters / found.algorithm_bandwidth)}")  # fmt: skip
    if offsets := [m.clock_offset for m in measured if m.clock_offset is not None]:
        resolution = max(m.clock_resolution or 0.0 for m in measured)
        lines += _row("clocks", f"at most {_seconds(max(offsets) - min(offsets))} apart, known to {_seconds(resolution)}")
    for folder in {folder.asked: folder for rank in reversed(ranks) for folder in rank.folders}.values():
        speeds = [m.disks[folder.asked] for m in measured if folder.asked in m.disks]
        parts = [
            f"{verb} {_bytes(min(numbers))}/s"
            for verb, numbers in (("writes", [s.write for s in speeds if s.write]), ("reads", [s.read for s in speeds if s.read]))
            if numbers
        ]
        slowest = f" (the slowest of {len(speeds)} nodes at once)" if len(speeds) > 1 and parts else ""
        room = f"{_bytes(folder.free_bytes)} free, {folder.filesystem}"
        lines += _row(f"{folder.role} folder", f"{folder.asked}: {', '.join([*parts, room])}{slowest}")
    return lines


def finding_lines(finding: Finding) -> Iterable[str]:
    yield from _wrapped(f"  {finding.level:<9}", finding.what)
    yield from _wrapped("    why    ", finding.why)
    yield from _wrapped("    do     ", finding.do)


def _row(label: str, text: str) -> list[str]:
    return _wrapped(f"  {label:<{_LABEL - 2}}", text)


def _wrapped(start: str, text: str) -> list[str]:
    """Long paths and commands stay whole, however long."""
    return textwrap.wrap(
        text, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_long_words=False, break_on_hyphens=False
    )


def _with_reason(choice: str, why: str) -> str:
    return f"{choice}: {why}" if choice else "not known: see the findings"


def _limit(value: int | None, unit: str = "") -> str:
    if value is None:
        return "unlimited"
    return _bytes(value) if unit == "bytes" and value else f"{value:,}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _bytes(number: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number < 1000 * size else f"{number / size:,.0f} {unit}"
    return f"{number:.0f} bytes"


def _seconds(number: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e-6:.3g} µs"
