"""What only a GPU can show. On one: precisions, compilation, pinned copies. On several: every strategy over NCCL."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import drive
import pytest
import torch

Config = Callable[..., Path]
GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device")]
MORE = "needs 2 CUDA devices"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("compiled", ["off", "block", "whole"])
def test_a_gpu_trains_like_the_cpu(config: Config, precision: str, compiled: str) -> None:
    expected, _ = drive.run(config(), ["run.name=cpu"])
    drive.leave()
    overrides = ["run.device=cuda", "run.tf32=false", f"run.precision={precision}", f"train.compile={compiled}", "run.name=gpu"]
    rows, _ = drive.run(config(), overrides)
    drive.leave()
    bound = 1e-5 if precision == "fp32" else 5e-3
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=bound)


@pytest.mark.parametrize("compiled", ["off", "block", "whole"])
@pytest.mark.parametrize("more", [[], ["model.activation_checkpointing=true"], ["run.precision=bf16"], ["model.n_head=4"]])
def test_documents_are_kept_apart_as_on_the_cpu(config: Config, compiled: str, more: list[str]) -> None:
    """By FlexAttention, or where heads are too narrow for it by a dense mask."""
    path = config({"data.document_mask": True})
    expected, _ = drive.run(path, ["run.name=cpu", *(more if more == ["model.n_head=4"] else [])])
    drive.leave()
    rows, _ = drive.run(path, ["run.device=cuda", "run.tf32=false", f"train.compile={compiled}", "run.name=gpu", *more])
    drive.leave()
    bound = 5e-3 if "run.precision=bf16" in more else 1e-5
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=bound)


def test_deterministic_runs_are_equal_to_the_bit(config: Config) -> None:
    found = []
    for name in ("a", "b"):
        found.append(drive.run(config(), ["run.device=cuda", "run.deterministic=true", f"run.name={name}"]))
        drive.leave()
    assert found[0][0] == found[1][0]
    assert drive.largest_difference(found[0][1], found[1][1])[0] == 0


@pytest.mark.skipif(GPUS < 2, reason=MORE)
def test_every_strategy_computes_the_same_over_nccl() -> None:
    worlds = ",".join(str(n) for n in (1, 2, 4) if n <= GPUS)
    command = [sys.executable, "-m", "pretrain.cli", "compare", "--parity", "--processes", worlds]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(r"\d+ ok, \d+ n/a, 0 FAILED", done.stdout)
