"""Pretrain GPT-2. Open this file first.

    accelerate launch --multi_gpu --num_processes 2 pretrain/train.py configs/quickstart.yaml [section.key=value …]

also runs under torchrun, as plain `python pretrain/train.py CONFIG` for one process, and through `pretrain train`, which returns
the true exit status: 0 done, 2 for what you can mend, 1 for a failure, 75 for "stopped on request, run me again".
"""

import gc
import hashlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain import config, evaluation, generation, groups, launch, runfolder, step_parts, tracking
from pretrain import model as models
from pretrain.checkpoint import CheckpointError
from pretrain.config import ConfigError
from pretrain.job import Finished, Job, start
from pretrain.launched import launched_strategy
from pretrain.loader import GlobalBatch, evaluation_batches
from pretrain.network import namespaces
from pretrain.optim import lr_at, set_lr
from pretrain.resume import Progress
from pretrain.rollback import go_back
from pretrain.shards import ShardError
from pretrain.stopping import StopRequests
from pretrain.strategies import OPTIONS, StepResult
from pretrain.watch import GoBack, NonFinite, ReplicasDiffer, Watch, compare_replicas

STOPPED, REFUSED, FAILED = 75, 2, 1
_MAIN_PROCESS_SECONDS = 20  # in which the main process has found what another rank found before there was a process group
_MOMENT = 2  # the same with one
_LONGEST = 500  # characters of a reason: torch puts whole tensors into some messages


def main(arguments: list[str]) -> int:
    try:
        world = launch.read_world()
        namespaces.enter(world.local_rank)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return REFUSED
    stops = StopRequests(follow_launcher=launch.has_launcher(), orphaned=launch.is_orphan(), repeated=launch.is_in_slurm_step(),
                         launch_time=launch.launch_time(), at_start=partial(stop_early, None, world))  # fmt: skip
    try:
        return run(arguments, world, stops)
    finally:
        stops.end()
        leave_output()


def run(arguments: list[str], world: launch.World, stops: StopRequests) -> int:
    folder: Path | None = None
    micro: int | None = None
    stops.at_start = lambda reason: stop_early(folder, world, reason)  # whichever it is by then
    try:
        if not arguments:
            raise ConfigError("usage: pretrain/train.py CONFIG.yaml [section.key=value …]")
        cfg = config.load(arguments[0], arguments[1:], OPTIONS)
        micro = config.smaller_micro(cfg, world.size)
        folder = cfg.folder
        launched = launched_strategy(world.size)
        notes = launch.check_launcher(world, launched)
        tracking.check(cfg)
        job, progress = start(cfg, Path(arguments[0]), arguments[1:], world, notes, stops, launched)
    except Finished as finished:
        return end(folder, world, str(finished), state="finished", status=0, step=finished.step)
    except (ConfigError, ShardError, CheckpointError) as error:
        return end(folder, world, str(error), state="refused", status=REFUSED)
    except Exception as error:
        return fail(folder, world, error, step=0, micro=micro)
    try:
        stops.at_once = lambda reason, **how: report_failure(folder, world.rank, reason, progress.step, **how)
        stops.begin()
        gc.collect()
        gc.freeze()
        gc.disable()  # collected on schedule, by all ranks in the same step
        return finish(job, progress, train(job, progress))
    except Exception as error:
        if isinstance(error, NonFinite | ReplicasDiffer):  # found by all ranks together: what they are writing stays worth having
            with suppress(Exception):
                job.saver.wait()
        return fail(folder, world, error, step=min(progress.step + 1, job.layout.steps), micro=micro)


def train(job: Job, progress: Progress) -> str | None:
    """Train to the end (None), or until all ranks agree to stop (the reason)."""
    watch = Watch(job, progress)
    if progress.step == 0 and (job.cfg.train.nonfinite == "rollback" or job.cfg.train.spike):
        job.saver.step = -1  # the start is something to go back to
        save(job, progress, watch, must=False)
    while True:
        try:
            reason = train_on(job, progress, watch)
        except GoBack as found:
            go_back(job, progress, watch, found)
            continue
        watch.tracer.end()
        if reason is None and job.cfg.train.step_parts:
            with job.clock.apart("step parts"):
                step_parts.measure(job, replace(progress), partial(update, job))
        return reason


def train_on(job: Job, progress: Progress, watch: Watch) -> str | None:
    every = job.cfg.train
    gone_back_to_the_end = progress.over(job.layout) and every.eval_every and progress.step % every.eval_every
    if progress.step == 0 or gone_back_to_the_end:
        evaluate(job, progress)
    while not progress.over(job.layout):
        if (reason := job.stops.agreed(job.control)) and job.strategy.may_save(progress.step):
            save(job, progress, watch, must=True)
            return reason
        if not take_step(job, progress, watch):
            continue
        step, last = progress.step, progress.over(job.layout)
        if every.check_replicas_every and step % every.check_replicas_every == 0:
            compare_replicas(job, step)
        if every.eval_every and (last or step % every.eval_every == 0):
            evaluate(job, progress)
        if every.sample_every and (last or step % every.sample_every == 0):
            sample(job)
        if last or (every.checkpoint_every and step % every.checkpoint_every == 0):
            save(job, progress, watch, must=last)
    return None


def take_step(job: Job, progress: Progress, watch: Watch) -> bool:
    """One update and its records. False where fp16 overflowed and the same windows are to be tried again."""
    step = progress.step + 1
    with watch.tracer.step(step), watch.hang:
        progress.position = progress.next_position
        batch, loss_sum, result = update(job, step, progress.position)
        record_windows(job, progress, batch)
        if job.strategy.must_retry(result):
            progress.attempt += 1
            return False
        watch.note(step, batch, loss_sum, result)
        advance(job, progress, batch)
        if step % job.cfg.train.log_every == 0 or progress.over(job.layout):  # waits for the device: where a hang shows on GPUs
            watch.log(progress, batch, loss_sum, result)
    return True


def update(job: Job, step: int, position: int) -> tuple[GlobalBatch, Tensor, StepResult]:
    """One optimiser update. Returns the batch, this rank's loss sum and the step's result, the last two still on the device."""
    strategy = job.strategy
    set_lr(strategy.optimizer, lr_at(step, job.cfg.optim, job.layout.steps))  # a pure function: no scheduler to save or mis-step
    with job.clock.part("data"):
        batch = job.loader.global_batch(position)  # knows the global number of targets before the first backward
    loss_total = torch.zeros((), device=job.clock.device)
    with job.clock.part("compute"):
        for micro in batch:
            seed_forward(job.cfg.run.seed, step, micro.index, job.clock.device)
            with strategy.accumulate(job.model, last=micro.last):
                loss_sum, _ = job.model(micro.inputs, micro.targets)
                strategy.backward(loss_sum / batch.tokens)
            loss_total += loss_sum.detach()
    if job.saver.copying:
        with job.clock.apart("checkpoint"):
            job.saver.settle()  # the checkpoint that is being written is of the weights as they still are
    with job.clock.part("optimizer"):
        return batch, loss_total, strategy.step(job.cfg.optim.grad_clip)


def seed_forward(seed: int, step: int, micro_index: int, device: torch.device) -> None:
    """Dropout depends on the place in the global batch, not on the rank: the same for any layout, and nothing to save."""
    digest = hashlib.blake2b(f"{seed}:{step}:{micro_index}".encode(), digest_size=7).digest()
    generators = torch.default_generator if device.type == "cpu" else torch  # the latter notes for GPUs in milliseconds who asked
    generators.manual_seed(int.from_bytes(digest))


def advance(job: Job, progress: Progress, batch: GlobalBatch) -> None:
    progress.step += 1
    progress.position = batch.stop
    progress.tokens += batch.tokens
    progress.wire_bytes_total += job.strategy.wire(progress.step)
    progress.attempt = 0


def record_windows(job: Job, progress: Progress, batch: GlobalBatch) -> None:
    """The ledger: who trained on what, over all restarts."""
    if job.ledger:
        line = {"step": progress.step + 1, "restart": progress.restarts, "attempt": progress.attempt,
                "position": [batch.start, batch.stop], "windows": batch.windows_hash}  # fmt: skip
        job.ledger.write(line)


def evaluate(job: Job, progress: Progress) -> None:
    if not job.cfg.train.eval_every:
        return
    with job.clock.apart("evaluation"), job.strategy.evaluation_weights() as module:
        same_graph = job.compile_mode != "off" and job.cfg.model.dropout == 0 and job.cfg.model.build is None and not job.strategy.sharded
        by_set = {}
        for name, stream, windows in zip(job.sets.val_names, job.sets.val, job.sets.eval_windows, strict=True):
            batches = evaluation_batches(stream, job.layout.sequence_length, job.layout.micro, windows,
                                         job.world.rank, job.world.size, job.loader.vocab_size, job.clock.device)  # fmt: skip
            by_set[name] = evaluation.evaluate(module, batches, job.strategy.reduce_sum, job.clock.device, same_graph)
    loss, tokens = evaluation.together(list(by_set.values()))
    metrics = {"step": progress.step, **evaluation.evaluation_metrics(loss, job.sets.bytes_per_token)}
    if len(by_set) > 1:
        metrics |= {f"val_loss/{name}": of_one for name, (of_one, _) in by_set.items()}
    if job.tracker:
        job.tracker.log(metrics)
    per_byte = metrics["val_bits_per_byte"]
    job.say(
        f"step {progress.step:,}/{job.layout.steps:,}  validation loss {loss:.4f}"
        + (f"  {per_byte:.3f} bits per byte" if per_byte else "")
        + (f"  {', '.join(f'{name} {of_one:.4f}' for name, (of_one, _) in by_set.items())}" if len(by_set) > 1 else "")
        + f"  ({tokens:,} tokens)"
    )


def sample(job: Job) -> None:
    with job.clock.apart("sample"), whole_model(job) as module:
        if job.is_main and job.tokenizer is not None and isinstance(module, models.PretrainGPT2):
            module.eval()
            try:
                text = generation.generate(module.as_causal_lm(), job.tokenizer, [job.cfg.train.sample_prompt], vocab_size=module.vocab_size,
                                           max_new_tokens=60, temperature=0.8, top_k=50, seed=job.cfg.run.seed)[0]  # fmt: skip
            finally:
                module.train()
            job.say("  | " + text.strip().replace("\n", "\n  | "))


@contextmanager
def whole_model(job: Job) -> Iterator[torch.nn.Module | None]:
    """A module that one process can run alone: the trained one, or where that is sharded a copy, on the main process."""
    if not job.strategy.sharded:
        with job.strategy.evaluation_weights() as module:
            yield module
        return
    copy = models.from_description(job.described).to(job.clock.device) if job.is_main else None
    for name, tensor in job.strategy.whole_weights():
        if copy is not None:
            models.named_tensors(copy)[name].copy_(tensor)
    yield copy


def save(job: Job, progress: Progress, watch: Watch, *, must: bool) -> None:
    """A checkpoint of the step just finished, unless there is one; it is written while training goes on. One that fails is reported and
    tried again at the next interval; where there is none (`must`) it ends the run as failed, since nothing would hold its last steps."""
    for records in (job.ledger, job.tracker):
        if records:
            records.flush()  # a run that is killed goes on from the checkpoint, and without what waits for room
    with job.clock.apart("checkpoint"):
        job.saver.wait()
        if progress.step != job.saver.step:
            watch.look(progress)
            numbers = checkpoint_numbers(job, progress)
            job.saver.start(progress.step, job.strategy.state(), numbers, job.described)
        if must and (error := job.saver.wait()):
            raise error


def checkpoint_numbers(job: Job, progress: Progress) -> dict[str, Any]:
    """state.json."""
    return {
        "progress": {**asdict(progress), "attempt": 0, "train_seconds": job.clock.train_seconds_now()},
        "identity": {
            "config": config.identity(job.cfg),
            "strategy": job.strategy.identity(),
            "data": job.sets.fingerprints,
            "mixture": job.sets.shares,
            "tokenizer": job.sets.tokenizer["sha256"],
        },
        "init_hash": job.init_hash,
        "seeds": {"run": job.cfg.run.seed, "init": job.cfg.init_seed, "data": job.cfg.data_seed},
        "config_hash": config.identity_hash(job.cfg),
        "extras": job.strategy.extras_kind(),
        "save_seconds": job.saver.seconds,
        **job.strategy.numbers(),
    }


def finish(job: Job, progress: Progress, reason: str | None) -> int:
    """Close everything; what the run came to, and what to do next."""
    job.loader.close()
    folder = job.cfg.folder
    if job.ledger:
        job.ledger.close()
    if job.tracker:
        job.tracker.finish()
        job.status.write(
            "stopped" if reason else "finished",
            step=progress.step,
            exit_status=STOPPED if reason else 0,
            reason=reason or "",
        )
    other = ", ".join(f"{what} {seconds:.0f}s" for what, seconds in job.clock.other.items())
    job.say(f"trained {progress.tokens:,} tokens in {progress.train_seconds:.0f}s ({other})")
    if hint := tracking.offline_hint(folder):
        job.say(f"upload the offline W&B run with: {hint}")
    if reason:
        job.say(f"stopped on request ({reason}) at step {progress.step:,}; the same command goes on from there")
    else:
        job.say(
            f"finished at step {progress.step:,}; next: pretrain report {folder}, pretrain generate {folder} --prompt '…', pretrain export {folder} --output DIR"
        )
    job.strategy.finish()
    return STOPPED if reason else 0


def end(folder: Path | None, world: launch.World, message: str, *, state: str, status: int, step: int | None = None) -> int:
    """For what ended before step 1: the main process says so, or this rank where the main process found nothing wrong."""
    met_alone = False
    if world.rank and status:  # if we went first, the launcher would end the main process before it has spoken
        seconds = _MOMENT if dist.is_initialized() else _MAIN_PROCESS_SECONDS
        told = runfolder.wait_for_end(folder, seconds)  # a launcher of its node may have ended us meanwhile
        met_alone = not dist.is_initialized() and not told
        message = f"rank {world.rank}: {message}"
    if world.rank == 0 or met_alone:
        aside = status != 0 and "PRETRAIN_LAUNCHED" not in os.environ  # `pretrain train` shows standard output alone
        with suppress(OSError):
            print(message, file=sys.stderr if aside else sys.stdout, flush=True)
        if folder is not None:
            runfolder.note_end(folder, world.rank, state, status, message, step)
    groups.end_all()
    return status


def stop_early(folder: Path | None, world: launch.World, reason: str) -> None:
    """Asked to stop before there was anything to save."""
    if world.rank:
        return
    if folder is not None and runfolder.is_ours(folder):
        with suppress(OSError):
            runfolder.Status(folder, 0).stop(reason, exit_status=STOPPED)
    elif "PRETRAIN_LAUNCHED" in os.environ:  # `pretrain train` says it
        return
    tell(f"stopped on request ({reason}) before training began; the same command starts it again")


def leave_output() -> None:
    """Python writes once more, as it ends, what could not be written; failing at it, it would end with a status of its own."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed before we came
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def fail(folder: Path | None, world: launch.World, error: Exception, step: int, micro: int | None) -> int:
    """One rank's failure ends all: the cause is printed by the rank that met it first, its traceback goes to logs/. Does not return."""
    status = REFUSED if isinstance(error, ConfigError) else FAILED
    rank = world.rank
    if isinstance(error, NonFinite):  # all ranks find it together, later than it happened
        step, rank = error.step, rank if error.rank is None else error.rank
    try:
        reason = explain(error, micro)
        if folder is None or not runfolder.is_ours(folder):
            with suppress(OSError):
                traceback.print_exception(error)
            if rank == 0 or not lost_contact(error):  # the others would all say so, and one of them has the cause
                report_failure(None, rank, reason, step, status)
        else:
            log = folder / "logs" / f"rank_{rank}.txt"
            if report_failure(folder, rank, reason, step, status, again=may_pass(error), log=log):
                with suppress(OSError), open(log, "a", encoding="utf-8") as file:
                    traceback.print_exception(error, file=file)
    finally:
        os._exit(status)  # an ordinary exit would wait in collectives for the others


def report_failure(folder: Path | None, rank: int, reason: str, step: int, status: int = FAILED, *, again: bool = False,
                   log: Path | str | None = None) -> bool:  # fmt: skip
    """Whether this was the first failure of the launch: only that one is told. `log`: the file that has, or is about to get, a traceback."""
    with suppress(OSError):  # rather told twice than not at all
        if folder is not None and not runfolder.Status(folder, rank).fail(reason, step=step, exit_status=status, again=again):
            return False
    where = f" (traceback in {log})" if log else ""
    tell(f"rank {rank} failed at step {step:,}: {reason}{where}")
    return True


def tell(line: str) -> None:
    """From any thread, whatever the others hold."""
    with suppress(OSError):
        os.write(1, f"{line}\n".encode())


def lost_contact(error: Exception) -> bool:
    return any(words in str(error) for words in ("Connection closed by peer", "Connection reset by peer", "remote process has exited"))


def may_pass(error: Exception) -> bool:
    """Whether another start may be spared it: a lost rank, the network, a device or a disk. A bug or a bad number would come again."""
    machine = (dist.DistError, torch.AcceleratorError, OSError)
    return lost_contact(error) or "imed out" in str(error) or (isinstance(error, machine) and not isinstance(error, torch.OutOfMemoryError))


def explain(error: Exception, micro: int | None = None) -> str:
    """One line. Out of memory says what to try (`micro`: the next smaller one), since it changes memory and not the result."""
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in text:
        smaller = f"write batch.micro={micro} (it trains exactly the same), or" if micro else "write"
        return f"out of memory: {smaller} model.activation_checkpointing=true; {text[:200]}"
    if lost_contact(error):
        return f"lost contact with another rank, which was killed or crashed ({text[:120]})"
    return text if isinstance(error, NonFinite | ConfigError | CheckpointError) else f"{type(error).__name__}: {text[:_LONGEST]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
