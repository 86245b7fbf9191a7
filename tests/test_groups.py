"""How process groups end: with their threads, and with whatever still holds them."""

import faulthandler
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import drive
from group import Ranks

from pretrain import groups


def end_before_the_reducer(path: Path) -> None:
    """As a run ends: the groups first, then the model. Threads that want the GIL get it only where Python gives it up."""
    interval = sys.getswitchinterval()
    faulthandler.dump_traceback_later(30, exit=True)
    job, progress = drive.begin(path)
    drive.steps(job, progress, 1)
    job.loader.close()
    try:
        sys.setswitchinterval(1000)
        job.strategy.reduce_sum(job.strategy.reduce_sum(next(job.strategy.module.parameters()).detach()))
        groups.end_all()
        del job
        gc.collect()
    finally:
        sys.setswitchinterval(interval)
        faulthandler.cancel_dump_traceback_later()


def test_a_reducer_outlives_its_group(ranks: Ranks, config: Callable[..., Path]) -> None:
    for _ in range(10):
        ranks.run(end_before_the_reducer, config(), size=2)
