"""Going back to the last checkpoint after an update that was not finite or a loss that jumped, and on past the windows that caused it."""

from pretrain import checkpoint
from pretrain.job import Job, load
from pretrain.ranks import broadcast
from pretrain.resume import Progress, open_first_valid
from pretrain.watch import GoBack, NonFinite, Watch


def go_back(job: Job, progress: Progress, watch: Watch, found: GoBack) -> None:
    """All ranks call it. Raises NonFinite where it has been done too often, or where there is nothing to go back to."""
    job.saver.wait()
    most = job.cfg.train.rollbacks
    if len(progress.passed_over) >= most:
        raise NonFinite(f"{found}; the run has gone back {most} times already (train.rollbacks)", found.step, found.rank)
    earlier = [path for path in checkpoint.newest_first(job.saver.folder) if checkpoint.step_of(path) < found.step]
    start, _ = open_first_valid(broadcast(job.control, earlier), job.control)
    if start is None:
        raise NonFinite(f"{found}; there is no valid checkpoint from before it to go back to", found.step, found.rank)
    load(start, job.cfg, job.strategy)
    then = start.progress
    progress.step, progress.position, progress.tokens, progress.attempt = then.step, then.position, then.tokens, 0
    progress.wire_bytes_total = then.wire_bytes_total
    progress.losses, progress.skipped = then.losses, then.skipped
    progress.passed_over.append(list(found.windows))
    if job.is_main:
        _rewrite_history(job, progress, found)
    job.saver.step = progress.step
    watch.begin(progress)
    job.say(f"step {found.step:,}: {found}; back to step {progress.step:,}, and past windows {found.windows[0]:,} to {found.windows[1]:,} "
            f"({len(progress.passed_over)} of {most} times)")  # fmt: skip


def _rewrite_history(job: Job, progress: Progress, found: GoBack) -> None:
    """What came after the checkpoint has not happened: a restart must not go on from it."""
    if job.ledger:
        job.ledger.write({"step": found.step, "restart": progress.restarts, "back_to": progress.step, "passed_over": list(found.windows)})
    for step, path in checkpoint.numbered(job.saver.folder):
        if progress.step < step <= job.layout.steps:
            checkpoint.delete(path)
    if job.tracker:
        job.tracker.cut_back(progress.step)
