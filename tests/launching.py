"""Start a launch as a user would, wait for what it says or does, and leave nothing of it behind.

Nothing here sleeps to let something happen: every wait is for an event (a line, a metric, a state, an end) with a deadline.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import yaml

from pretrain import shards

T = TypeVar("T")
MARK = "PRETRAIN_TEST_LAUNCH"  # in the environment of everything that one launch started
BIN = Path(sys.executable).parent
TRAINER = Path(__file__).parents[1] / "pretrain" / "train.py"
START = 90.0  # seconds until a launch has imported everything, on busy cores
SEQUENCE = 16
TWO = ["--num_processes", "2"]
README = (TRAINER.parents[1] / "README.md").read_text("utf-8")


def commands() -> list[str]:
    """Those of the README: the lines of its fenced blocks without a language that start with a program."""
    programs = ("pretrain ", "accelerate ", "torchrun ", "python ")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [line for language, block in blocks if not language for line in block.splitlines() if line.startswith(programs)]


def launches() -> list[str]:
    """Those of them that launch the quickstart's run, each in another form."""
    found = [line for line in commands() if line.endswith("pretrain/train.py configs/quickstart.yaml")]
    assert len(found) == 4, "the README's forms of launching were not found"
    return found


def make_set(folder: Path, tokens: int = 20_000, val_tokens: int = 2_000, seed: int = 0) -> Path:
    """A prepared set of 257 ids that can be learned a little."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    files = {}
    for split, count in (("train", tokens), ("val", val_tokens)):
        writer = shards.ShardWriter(folder, split, shards.token_dtype(257), shard_tokens=8_000)
        writer.append((np.cumsum(rng.integers(0, 3, count)) % 257).astype("<u2"))
        files[split] = writer.close()
    manifest = {"format_version": 1, "fingerprint": shards.fingerprint(files), "tokenizer": {"name": "toy", "sha256": "of toy"}, "eos_id": 256,
                "vocab_size": 257, "splits": {"val": {"tokens": val_tokens, "bytes": val_tokens}}, "files": files}  # fmt: skip
    shards.write_manifest(folder, manifest)
    return folder


def write_config(path: Path, prepared: Path, /, **sections: Mapping[str, Any]) -> Path:
    """A 2-layer model of width 32 that logs every step; `sections` add to it or replace its keys."""
    config: dict[str, dict[str, Any]] = {
        "run": {"precision": "fp32", "dir": str(path.parent / "runs")},
        "data": {"train": str(prepared), "sequence_length": SEQUENCE},
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 32},
        "batch": {"tokens": 8 * SEQUENCE, "micro": 2},
        "optim": {"lr": 1e-3},
        "train": {"max_steps": 6, "log_every": 1, "eval_every": 0, "checkpoint_every": 0, "compile": "off"},
    }
    for section, keys in sections.items():
        config.setdefault(section, {}).update(keys)
    path.write_text(yaml.safe_dump(config))
    return path


def pretrain_train(config: Path | str, *overrides: str, flags: Sequence[str] = ()) -> list[str]:
    return [str(BIN / "pretrain"), "train", str(config), *overrides, *(["--", *flags] if flags else [])]


def accelerate(flags: Sequence[str], config: Path | str, *overrides: str) -> list[str]:
    return [str(BIN / "accelerate"), "launch", *flags, str(TRAINER), str(config), *overrides]


def torchrun(processes: int, config: Path | str, *overrides: str) -> list[str]:
    flags = ["--nnodes", "1", "--nproc_per_node", str(processes), "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    return [str(BIN / "torchrun"), *flags, str(TRAINER), str(config), *overrides]


def python(config: Path | str, *overrides: str) -> list[str]:
    return [sys.executable, str(TRAINER), str(config), *overrides]


def several(processes: int) -> list[str]:
    """What makes Accelerate's launcher start several processes on a machine without GPUs."""
    return ["--multi_gpu", "--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]  # fmt: skip


class Launch:
    """A launch under way. `folder` is its run folder."""

    def __init__(self, command: Sequence[str], folder: Path | None, cwd: Path, env: Mapping[str, str]) -> None:
        self.command, self.folder, self.mark = list(command), folder, uuid.uuid4().hex
        self.out_path = cwd / f"{self.mark}.out"
        self.err_path = cwd / f"{self.mark}.err"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_", "PET_", "TORCHELASTIC_"))}
        inherited.update(
            {
                "HF_HUB_OFFLINE": "1",
                "WANDB_SILENT": "true",
                "PYTHONPATH": f"{Path(__file__).parent}:{TRAINER.parents[1]}",
                "OMP_NUM_THREADS": "1",
            }
        )
        environment = {**inherited, **env, MARK: self.mark}
        with open(self.out_path, "w") as out, open(self.err_path, "w") as err:
            self.process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=out, stderr=err, start_new_session=True)

    @property
    def out(self) -> str:
        return self.out_path.read_text()

    @property
    def err(self) -> str:
        return self.err_path.read_text()

    def wait_for(self, what: str, look: Callable[[], T | None], seconds: float = START) -> T:
        """The first truthy value of `look`. Fails with all output when the launch ends or the time is up before."""
        end = time.monotonic() + seconds
        while True:
            over = time.monotonic() > end or (self.process.poll() is not None and not self.alive())
            if found := look():  # once more after the end
                return found
            assert not over, f"{what} did not happen in {seconds:.0f}s (status {self.process.poll()})\n{self.story()}"
            time.sleep(0.01)

    def wait_for_line(self, text: str, seconds: float = START) -> str:
        return self.wait_for(f"a line with {text!r}", lambda: next((line for line in self.out.splitlines() if text in line), None), seconds)

    def wait_for_step(self, step: int, seconds: float = START) -> int:
        return self.wait_for(f"step {step}", lambda: max((m["step"] for m in self.metrics() if m["step"] >= step), default=None), seconds)

    def wait_for_file(self, path: Path, seconds: float = START) -> Path:
        return self.wait_for(str(path), lambda: path if path.exists() else None, seconds)

    def wait(self, seconds: float = START) -> int:
        """The exit status, once every process that the launch started is gone."""
        end = time.monotonic() + seconds
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        while (left := self.alive()) and time.monotonic() < end:
            time.sleep(0.05)
        assert not left, f"after {seconds:.0f}s there are still {[' '.join(p.cmdline()) for p in left]}\n{self.story()}"
        return self.process.wait()

    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "metrics.jsonl") if self.folder else []

    def status(self) -> dict[str, Any]:
        assert self.folder is not None
        found: dict[str, Any] = json.loads((self.folder / "status.json").read_text())
        return found

    def alive(self) -> list[psutil.Process]:
        """Every process of the launch, orphans included: they carry its mark in their environment."""
        self.process.poll()
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def rank(self, rank: int) -> psutil.Process:
        """The trainer of that rank."""
        for process in self.alive():
            try:
                if process.environ().get("RANK", "0") == str(rank) and any(word.endswith("train.py") for word in process.cmdline()[1:3]):
                    return process
            except psutil.Error:
                continue
        raise AssertionError(f"no rank {rank}\n{self.story()}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def story(self) -> str:
        """Everything that it said, for a failing test's message."""
        files = [self.out_path, self.err_path, *(sorted((self.folder / "logs").glob("*.*")) if self.folder else [])]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in files if path.is_file())

    def kill(self) -> None:
        for _ in range(20):  # a process that is just starting another may need a second round
            left = self.alive()
            for process in left:
                try:
                    process.send_signal(signal.SIGKILL)
                except psutil.Error:
                    continue
            if not left:
                break
            psutil.wait_procs(left, timeout=1)
        self.process.wait()


@contextmanager
def launch(command: Sequence[str], folder: Path | None = None, *, cwd: Path, **env: str) -> Iterator[Launch]:
    """Start it; whatever happens, end it."""
    started = Launch(command, folder, cwd, env)
    try:
        yield started
    finally:
        started.kill()


def run(command: Sequence[str], folder: Path | None = None, *, cwd: Path, seconds: float = START, **env: str) -> tuple[int, Launch]:
    """Start it and wait for its end: (exit status, the launch)."""
    with launch(command, folder, cwd=cwd, **env) as started:
        return started.wait(seconds), started


def run_all(commands: Mapping[str, tuple[Sequence[str], Path | None]], *, cwd: Path, at_once: int = 2, **env: str) -> dict[str, tuple[int, Launch]]:  # fmt: skip
    """Run several launches, `at_once` at a time."""
    results: dict[str, tuple[int, Launch]] = {}
    waiting, under_way = list(commands.items()), dict[str, Launch]()
    try:
        while waiting or under_way:
            while waiting and len(under_way) < at_once:
                name, (command, folder) = waiting.pop(0)
                under_way[name] = Launch(command, folder, cwd, env)
            for name, started in list(under_way.items()):
                if started.process.poll() is not None:
                    results[name] = (started.wait(20), under_way.pop(name))
            time.sleep(0.01)
    finally:
        for started in under_way.values():
            started.kill()
    return results


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSON lines file; none where there is no file yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def training_metrics(folder: Path) -> list[dict[str, Any]]:
    """What must not depend on when or where it ran, one dict per training or evaluation line."""
    keys = ("step", "loss", "lr", "grad_norm", "tokens", "position", "val_loss", "skipped")
    return [{k: line[k] for k in keys if k in line} for line in read_lines(folder / "metrics.jsonl")]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line]


def checkpoints(folder: Path) -> list[int]:
    """The steps of those that stand; one that is being written does not yet."""
    return sorted(int(p.name.removeprefix("step_")) for p in (folder / "checkpoints").glob("step_*") if p.is_dir() and p.suffix != ".tmp")


def weights(folder: Path, step: int) -> dict[str, bytes]:
    """Every tensor of a checkpoint, weights and optimiser state, by name, whatever the number of files."""
    from safetensors import safe_open

    found = {}
    for group in ("model", "optimizer"):
        for path in sorted((folder / "checkpoints" / f"step_{step:08d}" / group).glob("*.safetensors")):
            with safe_open(path, "np") as file:
                for name in file.keys():  # noqa: SIM118 — not a dict
                    found[f"{group}.{name}"] = file.get_tensor(name).tobytes()
    return found
