"""The ordered map: order, bound, errors, and the death of either side."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from pretrain.corpus.workers import WorkerDied, in_order


def square(n: int) -> int:
    time.sleep(0.03 if n % 3 == 0 else 0)  # so that results come back out of order
    return n * n


def fail_at_five(n: int) -> int:
    if n == 5:
        raise ValueError("five")
    return n


def die_at_five(n: int) -> int:
    if n == 5:
        os._exit(7)
    return n


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_in_order_and_little_is_held(workers: int) -> None:
    pulled = 0

    def items() -> Iterator[int]:
        nonlocal pulled
        for n in range(40):
            pulled = n + 1
            yield n

    for given, (item, result) in enumerate(in_order(square, items(), workers)):
        assert (item, result) == (given, given**2)
        assert pulled - given <= 2 * workers
    assert given == 39


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_comes_back(workers: int) -> None:
    with pytest.raises(ValueError, match="five"):
        list(in_order(fail_at_five, iter(range(20)), workers))


def test_a_death_names_the_item() -> None:
    with pytest.raises(WorkerDied, match="exit status 7") as caught:
        list(in_order(die_at_five, iter(range(20)), 3))
    assert caught.value.item == 5


def test_workers_end_with_a_killed_parent() -> None:
    code = (
        "import os, sys; from pretrain.corpus.workers import in_order\n"
        "if __name__ == '__main__':\n"
        "    for _ in in_order(abs, iter(range(10**9)), 2): print(flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        for _ in range(4):
            parent.stdout.readline()
        children = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
    assert len(children) >= 2
    assert not psutil.wait_procs(children, timeout=20)[1]
