"""How long a restart takes, from its process's start to its first new step, beyond what importing torch, Accelerate and transformers takes
and reading the checkpoint at the speed of `dd iflag=direct`.

    python scripts/benchmark_restart.py [--processes N] [FOLDER]      (two processes by default; FOLDER: on the disk to measure)

GPT-2's 124 M parameters, 1.5 GB with the moments, and a million lines of metrics and ledger before it; nothing of the checkpoint is
in the page cache. Prints one line per round.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmark_strategies import prepare

from pretrain.checkpoint import newest_first

_IMPORTS = "import torch, accelerate, transformers; from transformers import GPT2LMHeadModel"
_LINES, _STEP, _ROUNDS = 1_000_000, 2, 2
_KEYS = ["model.n_layer=12", "model.n_head=12", "model.n_embd=768", "data.sequence_length=64", "batch.tokens=128", "batch.micro=1",
         "run.name=restart", f"train.checkpoint_every={_STEP}", "train.log_every=1"]  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    processes = int(arguments[1]) if arguments[:1] == ["--processes"] else 2
    rest = arguments[2:] if arguments[:1] == ["--processes"] else arguments
    with tempfile.TemporaryDirectory(dir=rest[0] if rest else None) as temporary:
        folder = Path(temporary)
        prepare(folder)
        train(folder, processes, _STEP)
        run = folder / "runs" / "restart"
        pad(run / "metrics.jsonl")
        pad(run / "ledger.jsonl")
        for _ in range(_ROUNDS):
            files = [*newest_first(run / "checkpoints")[0].rglob("*.safetensors")]
            importing = timed([sys.executable, "-c", _IMPORTS])
            reading = sum(read(path) for path in files)
            forget(files)
            ready, said = train(folder, processes, 1000)
            print(
                f"{ready:.1f}s: {importing:.1f} importing, {reading:.1f} reading, {ready - importing - reading:.1f} the rest; {said}",
                flush=True,
            )
    return 0


def train(folder: Path, processes: int, until: int) -> tuple[float, str]:
    """Until that step, or stopped at its first: (seconds from the launch to `ready for step`, that line)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "-m", "pretrain.train",
               str(folder / "benchmark.yaml"), *_KEYS, f"train.max_steps={until}"]  # fmt: skip
    if until > _STEP:
        command += ["run.resume=must"]
    began, ready, said = time.perf_counter(), 0.0, ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as started:
        assert started.stdout is not None
        for line in started.stdout:
            if line.startswith("ready for step"):
                ready, said = time.perf_counter() - began, line.strip()
                if until > _STEP:
                    started.terminate()
    return ready, said


def pad(path: Path) -> None:
    """With a million lines of earlier steps."""
    lines = path.read_text().splitlines()
    first = json.loads(lines[0])
    with open(path, "w") as file:
        file.writelines(f"{json.dumps({**first, 'step': 0})}\n" for _ in range(_LINES))
        file.writelines(f"{line}\n" for line in lines)


def timed(command: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def read(path: Path) -> float:
    return timed(["dd", f"if={path}", "of=/dev/null", "bs=4M", "iflag=direct"])


def forget(files: Sequence[Path]) -> None:
    """Out of the page cache."""
    for path in files:
        with open(path) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
