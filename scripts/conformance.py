"""Is an interrupted run the uninterrupted one, bit for bit? Faults at random, for as long as you like, and a table of what came of them.

    scripts/conformance.sh --minutes 30
    scripts/conformance.sh --seed 7 --only 12                trial 12 of seed 7 once more, with the same faults
    .venv/bin/python scripts/conformance.py --check RUN REFERENCE     compare two finished runs of one config

A trial is a run of 40 small updates that is struck (a rank, its launcher, `pretrain train` or all of them killed, asked to stop, its newest
checkpoint damaged, its disk full, …) and started again by the same command, until it has finished. After every fault a valid checkpoint must
be there, nothing may be left running, and status.json must be true; at the end every number in metrics.jsonl, every window, tensor and
exported weight must be those of a run that nothing happened to. The same seed draws the same faults; where in a step a kill falls is chance.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import conformance_check as check
import conformance_faults as faults
from conformance_launch import Disk, import_all
from conformance_trial import Outcome, Setting, Struck, prepare, serve

from pretrain.strategies import STRATEGIES

_START_UP = 2.5  # seconds in which a kill may fall before the first step


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.check:
        return compare(*options.check)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    place = Path(tempfile.mkdtemp(prefix="conformance-"))
    strategies, left_out = choose(options.strategies, options.processes)
    with_disk = may_mount()
    kinds = [*faults.ENDING, *faults.PASSING, *faults.BETWEEN, *(faults.DISK if with_disk else ())]
    if not with_disk:
        left_out.append(f"{' and '.join(faults.DISK)} (only root can make disks)")
    print(f"seed {seed}: {', '.join(strategies)} on {options.processes} processes, {options.at_once} trials at a time", flush=True)
    for what in left_out:
        print(f"left out: {what}", flush=True)

    import_all(strategies)
    prepare(place, options.processes)
    setting = Setting(place, options.processes, options.keep)

    def plans() -> Iterator[faults.Plan]:
        numbers = iter([options.only]) if options.only is not None else iter(range(options.trials or 10**9))
        for number in numbers:
            fast = not options.real or number % options.real != options.real - 1
            count, start_up = (options.faults, _START_UP) if fast else (min(3, options.faults), 4 * _START_UP)
            yield faults.draw_plan(seed, number, strategies, kinds, fast=fast, faults=count, start_up=start_up)

    began = time.monotonic()
    outcomes = run(setting, plans(), options.at_once, with_disk, began + 60 * options.minutes)
    minutes = (time.monotonic() - began) / 60
    print("\n" + table(outcomes, minutes, left_out), flush=True)
    lost = any(outcome.problems for outcome in outcomes)
    if lost:
        again = f"--seed {seed} --processes {options.processes} --strategies {','.join(strategies)} --only TRIAL"
        print(f"\nagain: scripts/conformance.sh {again}")
    if lost or options.keep:
        print(f"run folders: {place}")
        for slot in place.glob("slot-*"):
            shutil.rmtree(slot, ignore_errors=True)
    else:
        shutil.rmtree(place, ignore_errors=True)
    return 1 if lost or not outcomes else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], epilog="example: scripts/conformance.sh --minutes 30")
    cores = os.cpu_count() or 1
    parser.add_argument("--minutes", type=float, default=30, help="begin no trial after so many (default: %(default)s)")
    parser.add_argument("--trials", type=int, help="at most so many trials")
    parser.add_argument("--seed", type=int, help="draws the faults (default: a new one, printed)")
    parser.add_argument("--only", type=int, metavar="TRIAL", help="one trial of the seed, by its number")
    parser.add_argument("--strategies", help="some of: " + ", ".join(STRATEGIES) + " (default: all)")
    parser.add_argument("--processes", type=int, default=4, help="per run, where a strategy takes several (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=max(2, cores // 4), help="trials side by side (default: %(default)s here)")
    parser.add_argument("--faults", type=int, default=8, help="planned for a trial; it may end before (default: %(default)s)")
    parser.add_argument("--real", type=int, default=20, metavar="N", help="start every Nth trial the ordinary way, not by forking (default: %(default)s; 0: none)")  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="leave all run folders, not only of trials that lost something")
    parser.add_argument("--check", nargs=2, type=Path, metavar=("RUN", "REFERENCE"), help="compare two finished runs, and do nothing else")
    options = parser.parse_args(arguments)
    if options.processes < 2:
        parser.error("--processes: 2 or more; strategies for one process always get one")
    return options


def compare(folder: Path, reference: Path) -> int:
    problems = check.whole(folder, check.read_reference(reference))
    for problem in problems:
        print(f"{folder}: {problem}")
    if not problems:
        print(f"{folder} is {reference}, bit for bit")
    return 1 if problems else 0


def choose(asked: str | None, processes: int) -> tuple[list[str], list[str]]:
    """(strategies, what is left out and why)."""
    unknown = [name for name in (asked or "").split(",") if name and name not in STRATEGIES]
    if unknown:
        sys.exit(f"--strategies: {unknown[0]} is none of {', '.join(STRATEGIES)}")
    strategies, left_out = [], []
    for name in asked.split(",") if asked else STRATEGIES:
        fewest = STRATEGIES[name].processes[0]
        if fewest > max(processes, 1):
            left_out.append(f"{name} (needs {fewest} processes)")
        elif name.startswith("deepspeed") and find_spec("deepspeed") is None:
            left_out.append(f"{name} (DeepSpeed is not installed)")
        else:
            strategies.append(name)
    if not strategies:
        sys.exit("no strategy is left: " + ", ".join(left_out))
    return strategies, left_out


def may_mount() -> bool:
    """Tried in a process that ends at once, and its mounts with it."""
    if (pid := os.fork()) == 0:
        try:
            with tempfile.TemporaryDirectory() as folder:
                Disk(Path(folder) / "disk", 1).unmount()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def run(setting: Setting, plans: Iterator[faults.Plan], at_once: int, with_disk: bool, until: float) -> list[Outcome]:
    """Trials side by side, each line as it comes."""
    fork = multiprocessing.get_context("fork")
    pipes: dict[Connection, Any] = {}
    outcomes: list[Outcome] = []
    for slot in range(at_once):
        ours, theirs = fork.Pipe()
        process = fork.Process(target=serve, args=(setting, slot, with_disk, theirs))
        process.start()
        theirs.close()
        pipes[ours] = process
    try:
        busy = {pipe for pipe in pipes if give(pipe, plans, until)}
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                outcomes.append(pipe.recv())
                tell(outcomes[-1])
                if not give(pipe, plans, until):
                    busy.remove(pipe)
    except KeyboardInterrupt:
        print("ended early")
    finally:
        for process in pipes.values():
            process.terminate()
        for process in pipes.values():
            process.join()
    return outcomes


def give(pipe: Connection, plans: Iterator[faults.Plan], until: float) -> bool:
    plan = next(plans, None) if time.monotonic() < until else None
    pipe.send(plan)
    return plan is not None


def tell(outcome: Outcome) -> None:
    plan = outcome.plan
    how = "" if plan.fast else ", launched the ordinary way"
    repeated = sum(struck.repeated for struck in outcome.struck)
    came_to = f"{len(outcome.struck)} faults, {repeated} steps again, {outcome.seconds:.0f}s"
    print(f"trial {plan.number} {plan.strategy}: {came_to}{how}", flush=True)
    if outcome.problems:
        for line in outcome.story:
            print(f"    {line}")
        for line in outcome.problems:
            print(f"  LOST: {line}")
        print(f"  kept in {outcome.kept}", flush=True)


def table(outcomes: Sequence[Outcome], minutes: float, left_out: Sequence[str]) -> str:
    """Markdown: faults by kind, by what they hit and by strategy."""
    struck = [(outcome, fault) for outcome in outcomes for fault in outcome.struck]
    parts = [
        _rows("fault", struck, lambda _, fault: fault.kind),
        _rows("hit", struck, lambda _, fault: fault.where),
        _rows("strategy", struck, lambda outcome, _: outcome.plan.strategy),
    ]
    lost = [f"trial {o.plan.number} ({o.plan.strategy}): {o.problems[0]}" for o in outcomes if o.problems]
    total = Counter(fault.survived for _, fault in struck)
    parts.append(
        f"{total.total()} faults in {len(outcomes)} trials and {minutes:.1f} minutes ({total.total() / max(minutes, 1e-9):.0f} a minute), "
        f"{total[True]} survived, {sum(fault.repeated for _, fault in struck)} steps repeated. "
        + (f"Lost something: {len(lost)} trials." if lost else "Nothing was lost.")
    )
    parts += [f"- {line}" for line in lost] + [f"Left out: {what}." for what in left_out]
    return "\n\n".join(parts[:3]) + "\n\n" + "\n".join(parts[3:])


def _rows(title: str, struck: Sequence[tuple[Outcome, Struck]], key: Callable[[Outcome, Struck], str]) -> str:
    lines = [f"| {title} | injected | survived | steps repeated | lost |", "|---|---:|---:|---:|---:|"]
    for name in sorted({key(*pair) for pair in struck}):
        here = [fault for outcome, fault in struck if key(outcome, fault) == name]
        survived = sum(fault.survived for fault in here)
        lines.append(f"| {name} | {len(here)} | {survived} | {sum(fault.repeated for fault in here)} | {len(here) - survived or ''} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
