"""One process that has imported everything, for as long as the tests run: what is forked from it starts at once. Most of a start are imports."""

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

import pytest

PRELOAD = ["pytest", "pretrain.train", "deepspeed.runtime.zero.muon.muon_optimizer"]  # the last is most of what DeepSpeed imports


def forking() -> ForkServerContext:
    """Processes that are forked from it, with one thread each: threads that wait for each other on busy cores cost minutes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("DS_ACCELERATOR", "cpu")
        forkserver.ensure_running()
    return context
