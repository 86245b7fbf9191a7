"""What is wrong with the software: what a launch would refuse, versions, the environment, caches and compilers. Pure functions of facts."""

from collections.abc import Iterator

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from pretrain.doctor.finding import Finding, Ranks, first_of_nodes, listed, on

_MAY_DIFFER = {"driver"}


def refusals(ranks: Ranks) -> Iterator[Finding]:
    for text in dict.fromkeys(text for rank in ranks for text in rank.outlook.refused):
        there = on([rank for rank in ranks if text in rank.outlook.refused], ranks)
        yield Finding(
            "problem",
            f"a launch would be refused{there}: {text}",
            "it would end before step 1 with this line",
            "mend what it names, then look again",
        )
    for note in dict.fromkeys(note for rank in ranks for note in rank.outlook.notes):
        yield Finding("warning", note, "what the launcher says and the run's config does not has no effect here", "say it in the config")


def versions_differ(ranks: Ranks) -> Iterator[Finding]:
    for name in dict.fromkeys(name for rank in ranks for name in rank.versions):
        nodes: dict[str, list[str]] = {}
        for rank in ranks:
            nodes.setdefault(rank.versions.get(name) or "none", []).append(rank.node)
        if len(nodes) > 1:
            yield Finding(
                "warning" if name in _MAY_DIFFER else "problem",
                f"{name} differs: " + ", ".join(f"{version} on {listed(where)}" for version, where in nodes.items()),
                "ranks that run other code compute other numbers, or wait in collectives that never match",
                "start every node from one environment, on a shared disk or in one container image",
            )


def versions_out_of_range(ranks: Ranks) -> Iterator[Finding]:
    for name, wanted in dict.fromkeys((name, wanted) for rank in ranks for name, wanted in rank.required.items()):
        for version in dict.fromkeys(rank.versions.get(name, "") for rank in ranks):
            if not version:
                yield Finding("problem", f"{name} is not installed", "pretrain needs it", f"pip install '{name}{wanted}'")
            elif not SpecifierSet(wanted).contains(version, prereleases=True):
                yield Finding(
                    "problem",
                    f"{name} {version} is outside the range {wanted}",
                    "pretrain uses what other versions lack or do differently",
                    f"pip install '{name}{wanted}'",
                )


def versions_untested(ranks: Ranks) -> Iterator[Finding]:
    rank = ranks[0]
    pinned = {name: rank.tested[name] for name in rank.required if name in rank.tested and rank.versions.get(name)}
    others = [
        f"{name} {rank.versions[name]} (tested: {pin})" for name, pin in pinned.items() if not _same_release(rank.versions[name], pin)
    ]
    if others:
        yield Finding(
            "warning",
            "not the versions that the tests ran on: " + ", ".join(others),
            "they are in the range that should work; nobody has seen that they do",
            "run ./scripts/test.sh here, or install what was tested with ./scripts/setup.sh",
        )


def _same_release(version: str, pin: str) -> bool:
    """Whatever the build (`+cpu`)."""
    try:
        return Version(version).public == Version(pin).public
    except InvalidVersion:
        return version == pin


_DISABLED_PATH = "the ranks take a slower way, which the all-reduce above shows"
_UNSET = "unset it, unless you are looking for a fault"
# (variable, its value, why it matters)
_UNUSUAL = (
    ("NCCL_P2P_DISABLE", "1", f"GPUs of one node do not reach each other directly: {_DISABLED_PATH}"),
    ("NCCL_SHM_DISABLE", "1", f"ranks of one node talk over the network: {_DISABLED_PATH}"),
    ("NCCL_DEBUG", "INFO", "NCCL writes pages for every communicator and rank"),
    ("NCCL_DEBUG", "TRACE", "NCCL writes a line for every call"),
    ("CUDA_LAUNCH_BLOCKING", "1", "every kernel waits for the one before: nothing overlaps, and no speed means anything"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "every collective is checked on all ranks first"),
    ("NCCL_BLOCKING_WAIT", "1", "every collective holds up the process that called it"),
    ("TORCH_NCCL_BLOCKING_WAIT", "1", "every collective holds up the process that called it"),
)


def environment(ranks: Ranks) -> Iterator[Finding]:
    for variable, value, why in _UNUSUAL:
        if set_there := [rank for rank in ranks if rank.environment.get(variable, "").upper() == value]:
            yield Finding("warning", f"{variable}={value} is set{on(set_there, ranks)}", why, _UNSET)
    off = [rank for rank in ranks if rank.environment.get("NCCL_IB_DISABLE") == "1" and rank.infiniband]
    if off:
        yield Finding(
            "warning",
            f"NCCL_IB_DISABLE=1 beside InfiniBand ({listed(off[0].infiniband)}){on(off, ranks)}",
            "NCCL goes over TCP, ten times slower or more",
            _UNSET,
        )
    stray = dict.fromkeys(
        f"{name}={value}"
        for rank in ranks
        if not rank.launched
        for name, value in rank.environment.items()
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")) and value.lower() not in ("", "no", "none", "false")
    )
    if stray:
        yield Finding(
            "warning",
            f"set outside a launcher: {listed(stray, 6)}",
            "Accelerate's launcher sets these for its own processes; left over in a shell or a script they ask for a strategy or a precision that the config does not",
            f"unset {' '.join(name.partition('=')[0] for name in stray)}",
        )


def environment_differs(ranks: Ranks) -> Iterator[Finding]:
    """Of what every rank must agree on: SLURM_* and RANK are each rank's own, as are the names of network adapters."""
    own = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")
    for name in dict.fromkeys(name for rank in ranks for name in rank.environment):
        values = {rank.environment.get(name, "(unset)"): rank for rank in ranks}
        if len(values) > 1 and name.startswith(("NCCL_", "ACCELERATE_", "FSDP_", "OMP_", "TORCH_")) and name not in own:
            yield Finding(
                "warning",
                f"{name} differs: " + ", ".join(f"{value} on rank {rank.rank}" for value, rank in values.items()),
                "ranks that choose other ways to talk wait for each other for ever, and the slowest decides",
                "set it once, before srun or the launcher (srun --export=ALL)",
            )


def accelerate_file(ranks: Ranks) -> Iterator[Finding]:
    for rank in first_of_nodes(ranks):
        if rank.accelerate_file:
            settings = ", ".join(f"{key}: {value}" for key, value in rank.accelerate_settings.items())
            yield Finding(
                "warning",
                f"accelerate launch would read {rank.accelerate_file} on {rank.node} ({settings or 'none of the keys that matter'})",
                "it does so in silence where no --config_file is given, and decides how many processes start",
                "pass --config_file configs/accelerate/ddp.yaml, or start with pretrain train, which does not read it",
            )
            return


def compiler(ranks: Ranks) -> Iterator[Finding]:
    without = [rank for rank in ranks if rank.compiler is None]
    if without:
        yield Finding(
            "warning",
            f"no C++ compiler (g++, clang++) was found{on(without, ranks)}",
            "torch.compile needs one, and so does Triton on GPUs: auto leaves it off on CPUs, where bf16 is two times slower without",
            "install one (Debian: g++; Slurm: module load gcc), or write train.compile=off",
        )
    headers = [rank for rank in ranks if rank.compiler is not None and not rank.python_headers]
    if headers:
        yield Finding(
            "warning",
            f"Python.h is not there{on(headers, ranks)}",
            "what torch.compile and Triton build includes it: compiling fails at the first step",
            "install Python's headers (Debian: python3-dev), or write train.compile=off",
        )


def caches(ranks: Ranks) -> Iterator[Finding]:
    shut = [rank for rank in ranks if rank.unwritable_caches]
    if shut:
        yield Finding(
            "warning",
            f"cannot be written to: {listed(shut[0].unwritable_caches)}{on(shut, ranks)}",
            "torch.compile, Triton and the Hub keep there what they make and fetch: they fail, or do it again at every start",
            "set TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR and HF_HOME to a folder on a disk that every node has",
        )
