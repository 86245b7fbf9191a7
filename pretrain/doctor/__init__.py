"""`pretrain doctor`: what a launch here would use, and what would go wrong. Alone it looks at this machine; as the ranks of `srun` or of a
launcher it looks at all of them, and the first says what they found."""

import os
import sys
from collections.abc import Sequence

from pretrain.doctor.facts import gather
from pretrain.doctor.findings import find, unreachable
from pretrain.doctor.measurements import measure
from pretrain.doctor.meeting import Meeting, NotMet, find_place
from pretrain.doctor.page import finding_lines, page

MENDABLE = 2


def doctor(config_file: str | None, overrides: Sequence[str], wait: float) -> int:
    """Prints the page, on the first rank alone. Returns 0, or 2 with a problem among the findings. Ranks that are not there within `wait`
    seconds are a finding. Raises ConfigError where the environment names no ranks that could meet."""
    place = find_place()
    facts = gather(config_file, overrides, place)
    try:
        meeting = Meeting(place, wait)
        everyone = meeting.facts(facts)
        mine = measure(meeting, facts)
        results = meeting.results(mine, everyone)
    except NotMet as error:
        finding = unreachable(place, error)
        _print(page([facts], [], [finding]) if place.world.rank == 0 else "\n".join(finding_lines(finding)) + "\n")
        return MENDABLE
    status = 0
    if place.world.rank == 0:
        there = [rank for rank in everyone if rank is not None]
        missing = [rank for rank, of_rank in enumerate(everyone) if of_rank is None]
        silent = [rank.rank for rank, result in zip(there, results, strict=True) if result is None]
        measured = [result for result in results if result is not None]
        found = find(there, measured, missing, silent, wait)
        _print(page(there, measured, found))
        status = MENDABLE if any(finding.level == "problem" for finding in found) else 0
    if mine.stuck:  # in a collective that nobody can call off, and that the interpreter's end would wait for
        os._exit(status)
    return status


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
