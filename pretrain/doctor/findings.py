"""From what was seen to what is wrong with it. What is fine is not mentioned."""

from collections.abc import Callable, Iterator, Sequence

from pretrain.doctor import hardware, software, speeds
from pretrain.doctor.finding import Finding, Ranks, numbered
from pretrain.doctor.measurements import Measured
from pretrain.doctor.meeting import NotMet, Place


def find(ranks: Ranks, measured: Sequence[Measured], missing: Sequence[int], silent: Sequence[int], wait: float) -> list[Finding]:
    """Worst first. `missing` ranks did not come within `wait` seconds, `silent` ones came and did not report what they measured."""
    checks: tuple[Callable[[Ranks], Iterator[Finding]], ...] = (
        software.refusals, software.versions_differ, software.versions_out_of_range, software.versions_untested, software.environment,
        software.environment_differs, software.accelerate_file, software.compiler, software.caches,
        hardware.gpus_unseen, hardware.gpus_differ, hardware.gpus_shared, hardware.gpus_taken, hardware.emulated_bf16, hardware.limits,
        hardware.processors, hardware.processes_per_node, hardware.slurm_devices, hardware.slurm_processors, hardware.network_interfaces,
        speeds.run_folder,
    )  # fmt: skip
    found = [
        *absent(missing, silent, wait),
        *(finding for check in checks for finding in check(ranks)),
        *speeds.folders_differ(ranks, measured),
        *speeds.collectives(ranks, measured),
        *speeds.clocks(ranks, measured),
        *speeds.disks(ranks, measured),
    ]
    return sorted(found, key=lambda finding: finding.level != "problem")


def unreachable(place: Place, error: NotMet) -> Finding:
    return Finding(
        "problem",
        f"rank {place.world.rank} does not reach the other {place.world.size - 1} at {place.host}:{place.port}: {error}",
        "without a first rank that all others reach there is no process group",
        "start all ranks together; see that rank 0's host name resolves on every node, that nothing else has the port, and that no firewall is between",
    )


def absent(missing: Sequence[int], silent: Sequence[int], wait: float) -> Iterator[Finding]:
    if missing:
        yield Finding(
            "problem",
            f"{numbered(missing)} did not come within {wait:.0f} s",
            "a launch would wait for them until its own time-out, then fail",
            "look at their nodes' logs (srun --label), and at whether python starts there at all; --wait SECONDS allows for slow starts",
        )
    if silent:
        yield Finding(
            "problem",
            f"{numbered(silent)} came, and told nothing of the measurements",
            "they died or hang: in a collective, or on a disk",
            "look at those nodes' logs and at their file systems; a folder that hangs under ls hangs a run, too",
        )
