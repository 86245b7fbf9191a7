"""Proof that every strategy computes the same: a tiny GPT-2 on the same global batches under each of them, against one process in fp32.

`pretrain compare --parity` starts one launch per number of processes; inside it all strategies share one process group, one after another.
Two probes: plain SGD, held tensor by tensor, catches a wrong factor, which AdamW hides; AdamW with clipping, held over all weights
together, since it amplifies rounding where a gradient is zero.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from pretrain import config, launch, shards, train
from pretrain.collectives import CollectiveCounter
from pretrain.config import ConfigError
from pretrain.job import start
from pretrain.model import tensors_hash
from pretrain.stopping import StopRequests
from pretrain.strategies import OPTIONS, STRATEGIES, release

Arrays = Mapping[str, npt.NDArray[np.float32]]
WORLDS = (1, 2, 4)
_STEPS = 4
_WINDOWS, _T, _VOCABULARY = 8, 16, 64  # of an update; a multiple of 64 has no padded rows
_LAUNCH_SECONDS, _CELL_SECONDS = 120, 30  # after which a launch is held to hang
_SMALL = 1024  # bytes: norms and votes, which the formulas leave out
_LOCAL = ("local_sgd", "diloco")
_COMPRESSED = ("ddp_comm_fp16", "ddp_comm_bf16", "ddp_powersgd")
_PROBES = {
    "sgd": ["optim.name=sgd", "optim.lr=0.1", "optim.grad_clip=0"],
    "adamw": ["optim.name=adamw", "optim.lr=0.01", "optim.grad_clip=0.5"],
}
_OPTIONS = {
    "local_sgd": ["strategy.options.sync_every=2"],
    "diloco": ["strategy.options.sync_every=2"],
    "deepspeed3": ["strategy.options.stage3_param_persistence_threshold=0"],  # else a model as small as this is not sharded
    "ddp_powersgd": ["strategy.options.start_step=2", "strategy.options.rank=8"],
}


@dataclass(frozen=True)
class Cell:
    strategy: str
    world: int
    accumulation: int
    probe: str
    precision: str = "fp32"
    simulate: int | None = None  # the reference of a local method: so many replicas in one process

    @property
    def name(self) -> str:
        replicas = f"_simulate{self.simulate}" if self.simulate else ""
        return f"{self.strategy}{replicas}_{self.world}x{self.accumulation}_{self.probe}_{self.precision}"

    @property
    def reference(self) -> "Cell":
        """What it must equal: one process in fp32, or the simulation of the same algorithm with as many replicas."""
        if self.strategy in _LOCAL:
            return Cell(self.strategy, 1, self.world * self.accumulation, self.probe, self.precision, simulate=self.world)
        return Cell("single", 1, 1, self.probe)

    @property
    def bounds(self) -> dict[str, float]:
        """Largest relative differences of loss and norm, of one weight and of all together. Rounding for what is exact; for 16 bits and for
        compressed gradients what four updates of this model may come to: their own algorithms are held to rounding by the tests."""
        if self.strategy == "ddp_powersgd":
            return {"loss": 5e-3, "grad_norm": 0.5, "weights": 0.3}
        if self.precision != "fp32" or self.strategy in _COMPRESSED:
            half = "bf16" if "bf16" in (self.precision, self.strategy[-4:]) else "fp16"
            return {"loss": 5e-3, "grad_norm": 2e-2, "weights": {"bf16": 0.1, "fp16": 0.05}[half]}
        return {"loss": 5e-6, "grad_norm": 5e-6, **({"one_weight": 1e-6} if self.probe == "sgd" else {"weights": 1e-5})}


@dataclass
class Result:
    initial: str = ""  # hash of the whole weights before the first update
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    wire: int = 0  # bytes that one rank sends for the last update, by formula
    sent: int = 0  # the same by counting the collectives that ran, on a ring
    refused: str = ""  # why the cell cannot exist
    failed: str = ""


def cells(strategies: Sequence[str], worlds: Sequence[int]) -> Iterator[Cell]:
    for world in worlds:
        for strategy in strategies:
            fewest, most = STRATEGIES[strategy].processes
            if not fewest <= world <= most:
                yield Cell(strategy, world, 1, "sgd")  # to be refused
                continue
            for accumulation in (1, 2):
                for probe in _PROBES:
                    yield Cell(strategy, world, accumulation, probe)
            for precision in ("bf16", "fp16"):
                yield Cell(strategy, world, 1, "adamw", precision)


def run_cell(cell: Cell, folder: Path, stops: StopRequests) -> tuple[Result, Arrays]:
    """The product's own start and updates, as one rank. Raises what they raise."""
    overrides = [
        *_PROBES[cell.probe],
        *_OPTIONS.get(cell.strategy, []),
        f"strategy.name={cell.strategy}",
        f"batch.micro={_WINDOWS // (cell.world * cell.accumulation)}",
        f"run.precision={cell.precision}",
        f"run.name={cell.name}",
        *([f"strategy.simulate={cell.simulate}"] if cell.simulate else []),
    ]
    cfg = config.load(folder / "parity.yaml", overrides, OPTIONS)
    job, progress = start(cfg, folder / "parity.yaml", overrides, launch.read_world(), [], stops)
    result = Result(initial=tensors_hash(sorted(job.strategy.whole_weights())))
    while progress.step < _STEPS:
        with CollectiveCounter(leave_out=[job.control] if job.control else []) as counter:
            batch, loss_sum, update = train.update(job, progress.step + 1, progress.position)
        if job.strategy.must_retry(update):
            continue
        train.advance(job, progress, batch)
        loss, squares = job.strategy.reduce_sum(torch.stack([loss_sum.double(), update.grad_norm.double() ** 2])).tolist()
        result.losses.append(loss / batch.tokens)
        result.norms.append(math.sqrt(squares / job.world.size))
    job.loader.close()
    result.wire = job.strategy.wire(progress.step)
    result.sent = sum(c.sent("ring") for c in counter.collectives if c.payload > _SMALL)
    with job.strategy.evaluation_weights():
        weights = {name: tensor.detach().float().cpu().numpy().copy() for name, tensor in job.strategy.whole_weights()}
    return result, weights


def run_cells(wanted: Sequence[Cell], folder: Path, rank: int, stops: StopRequests) -> None:
    """All of them in this launch's one process group; rank 0 writes what came of each. Ends at the first that fails."""
    for cell in wanted:
        weights: Arrays = {}
        try:
            result, weights = run_cell(cell, folder, stops)
        except ConfigError as error:
            result = Result(refused=str(error))
        except Exception as error:
            result = Result(failed=f"rank {rank}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        release()
        if rank == 0:
            np.savez(folder / f"{cell.name}.npz", **weights)  # type: ignore[arg-type]
        if rank == 0 or result.failed:
            _write(cell, folder, result)
        if result.failed:
            raise RuntimeError(f"{cell.name}: {result.failed}")


def judge(cell: Cell, folder: Path) -> tuple[str, str]:
    """(`ok`, `n/a` or `FAILED`, the differences or the reason)."""
    found, weights = _read(cell, folder)
    if found.refused:
        return "n/a", found.refused.partition(";")[0].partition(": write")[0]
    if found.failed:
        return "FAILED", found.failed
    wanted, reference = _read(cell.reference, folder)
    if wanted.failed or wanted.refused:
        return "FAILED", f"its reference {cell.reference.name}: {wanted.failed or wanted.refused}"
    apart = {
        "loss": max(abs(a - b) / b for a, b in zip(found.losses, wanted.losses, strict=True)),
        "grad_norm": max(abs(a - b) / b for a, b in zip(found.norms, wanted.norms, strict=True)),
        "one_weight": max(float(np.abs(weights[name] - reference[name]).max()) for name in reference),
        "weights": _norm({name: weights[name] - reference[name] for name in reference}) / _norm(reference),
    }
    wrong = [f"{what} {apart[what]:.1e} > {bound:.0e}" for what, bound in cell.bounds.items() if not apart[what] <= bound]
    if abs(found.sent - found.wire) > 0.03 * found.wire:
        wrong.append(f"{found.sent:,} bytes sent, {found.wire:,} by formula")
    if found.initial != wanted.initial:
        wrong.append("other initial weights")
    return ("FAILED", ", ".join(wrong)) if wrong else ("ok", ", ".join(f"{what} {apart[what]:.0e}" for what in cell.bounds))


def prepare(folder: Path) -> None:
    """A set of noise and a config, both tiny."""
    data = folder / "data"
    data.mkdir(parents=True)
    draw, files = np.random.default_rng(0), {}
    for split, windows in (("train", 16 * _WINDOWS), ("val", _WINDOWS)):
        writer = shards.ShardWriter(data, split, shards.token_dtype(_VOCABULARY), 10**8)
        writer.append(draw.integers(0, _VOCABULARY, windows * _T + 1).astype(shards.token_dtype(_VOCABULARY)))
        files[split] = writer.close()
    manifest = {"format_version": shards.FORMAT_VERSION, "fingerprint": shards.fingerprint(files), "files": files, "splits": {},
                "tokenizer": {"name": "noise", "sha256": ""}, "vocab_size": _VOCABULARY, "eos_id": 0, "documents": {}}  # fmt: skip
    shards.write_manifest(data, manifest)
    sections = {
        "run": {"dir": str(folder / "runs"), "resume": "never", "tf32": False},
        "data": {"train": str(data), "sequence_length": _T},
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 32},
        "batch": {"tokens": _WINDOWS * _T},
        "train": {"max_steps": _STEPS, "eval_every": 0, "checkpoint_every": 0, "compile": "off"},
    }
    (folder / "parity.yaml").write_text(json.dumps(sections), "utf-8")  # JSON is YAML


def matrix(strategies: Sequence[str], worlds: Sequence[int]) -> int:
    """Print the table. Returns the number of cells that failed."""
    wanted, verdicts = list(cells(strategies, worlds)), []
    with tempfile.TemporaryDirectory(prefix="parity-") as temporary:
        folder = Path(temporary)
        prepare(folder)
        for world in sorted({1, *worlds}):
            _launch(with_references(wanted, world), folder, world)
        for cell in wanted:
            verdicts.append((cell, *judge(cell, folder)))
    print(table(verdicts))
    return sum(verdict == "FAILED" for _, verdict, _ in verdicts)


def with_references(wanted: Sequence[Cell], world: int) -> list[Cell]:
    """The cells that run on `world` processes, those that others are compared with included."""
    both = dict.fromkeys(cell for pair in ((c.reference, c) for c in wanted) for cell in pair)
    return [cell for cell in both if cell.world == world]


def table(verdicts: Sequence[tuple[Cell, str, str]]) -> str:
    """One row per strategy and number of processes; failures and reasons in full below."""
    columns = {"fp32": ("fp32", 1), "fp32, accumulation 2": ("fp32", 2), "bf16": ("bf16", 1), "fp16": ("fp16", 1)}
    rows: dict[tuple[str, int], dict[tuple[str, int], list[tuple[str, str]]]] = {}
    for cell, verdict, why in verdicts:
        row = rows.setdefault((cell.strategy, cell.world), {})
        row.setdefault((cell.precision, cell.accumulation), []).append((verdict, why))
    lines = ["| strategy | processes | " + " | ".join(columns) + " |", "|---|---|" + "---|" * len(columns)]
    for (strategy, world), row in rows.items():
        lines.append(f"| {strategy} | {world} | " + " | ".join(_together(row.get(key, [])) for key in columns.values()) + " |")
    notes = dict.fromkeys(
        f"- {c.strategy} on {c.world}, {c.probe}, {c.precision}: {why}" for c, verdict, why in verdicts if verdict != "ok"
    )
    counts = {kind: sum(verdict == kind for _, verdict, _ in verdicts) for kind in ("ok", "n/a", "FAILED")}
    return "\n".join([*lines, "", *notes, "", ", ".join(f"{n} {kind}" for kind, n in counts.items())])


def _together(verdicts: Sequence[tuple[str, str]]) -> str:
    """Both probes in one field: the worse verdict, and what each came to."""
    kinds = [kind for kind, _ in verdicts]
    if not kinds:
        return "n/a"
    worst = max(kinds, key=["ok", "n/a", "FAILED"].index)
    return f"ok: {'; '.join(why.rpartition(', ')[2] for _, why in verdicts)}" if worst == "ok" else worst


def _launch(wanted: Sequence[Cell], folder: Path, world: int) -> None:
    """Run them in `world` processes; where one fails, the rest again without it."""
    gpus = torch.cuda.device_count()
    if gpus and world > gpus:
        for cell in wanted:
            _write(cell, folder, Result(refused=f"{world} GPUs are not here, {gpus} are"))
        return
    while left := [cell for cell in wanted if not (folder / f"{cell.name}.json").exists()]:
        (folder / "cells.json").write_text(json.dumps([asdict(cell) for cell in left]), "utf-8")
        problem, hung = _attempt(folder, world, _LAUNCH_SECONDS + _CELL_SECONDS * len(left))
        missing = [cell for cell in left if not (folder / f"{cell.name}.json").exists()]
        if problem and missing and (hung or missing == left):
            _write(missing[0], folder, Result(failed=problem))


def _attempt(folder: Path, world: int, seconds: int) -> tuple[str, bool]:
    """(what went wrong with a launch of `cells.json`, whether it had to be ended)."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}", "-m", "pretrain.parity"]
    try:
        ran = subprocess.run(
            [*launcher, str(folder)], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:  # the workers end with their launcher
        return f"no end after {seconds} seconds", True
    last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
    return (f"ended with status {ran.returncode}: {last}" if ran.returncode else ""), False


def _read(cell: Cell, folder: Path) -> tuple[Result, Arrays]:
    result = Result(**json.loads((folder / f"{cell.name}.json").read_text("utf-8")))
    path = folder / f"{cell.name}.npz"
    return result, dict(np.load(path)) if path.exists() else {}


def _write(cell: Cell, folder: Path, result: Result) -> None:
    (folder / f"{cell.name}.json").write_text(json.dumps(asdict(result)), "utf-8")


def _norm(weights: Arrays) -> float:
    return math.sqrt(sum(float((w.astype(np.float64) ** 2).sum()) for w in weights.values()))


def _worker(folder: Path) -> None:
    wanted = [Cell(**cell) for cell in json.loads((folder / "cells.json").read_text("utf-8"))]
    torch.set_num_threads(1)
    try:
        run_cells(wanted, folder, launch.read_world().rank, StopRequests(follow_launcher=True))
    except RuntimeError:
        traceback.print_exc()
        os._exit(1)  # the others may be waiting in a collective: the launcher ends them


if __name__ == "__main__":
    _worker(Path(sys.argv[1]))
