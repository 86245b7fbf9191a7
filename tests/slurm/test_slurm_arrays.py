"""slurm/prepare.sbatch and slurm/sweep.sbatch on a real controller."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import ROOT, Cluster, Job, missing
from launching import BIN, README, make_set, read_lines, write_config

from pretrain.runfolder import read_status

pytestmark = [pytest.mark.launch, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
ENVIRONMENT = {"PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}", "VIRTUAL_ENV": str(ROOT / ".venv"), "PYTHONPATH": str(ROOT / "tests")}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    started = Cluster(tmp_path_factory.mktemp("cluster"))
    yield started
    started.close()


def tasks(job: Job) -> dict[int, str]:
    """Task -> its last state; an array is over when no task of it waits or runs."""
    text = job.cluster.run("scontrol", "--oneliner", "show", "job", job.number)
    found = {int(task): state for task, state in re.findall(r"ArrayTaskId=(\d+) .*?JobState=(\w+)", text)}
    return found


def wait(job: Job, count: int) -> dict[int, str]:
    over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    job.until("the array over", lambda: len(tasks(job)) == count and all(state in over for state in tasks(job).values()))
    return tasks(job)


def same_bytes(ours: Path, theirs: Path) -> None:
    names = sorted(path.name for path in theirs.glob("*.bin"))
    assert names
    assert sorted(path.name for path in ours.glob("*.bin")) == names
    for name in names:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    left, right = (json.loads((folder / "manifest.json").read_text()) for folder in (ours, theirs))
    assert left["fingerprint"] == right["fingerprint"]


def test_a_set_made_in_parts_one_of_which_fails(cluster: Cluster, tmp_path: Path) -> None:
    """The failed part alone is run again, and the set is that of one process."""
    corpus = tmp_path / "my corpus"
    corpus.mkdir()
    for k in range(3):
        lines = [json.dumps({"text": f"Document {n} of file {k}, " + "word " * (n % 50)}) for n in range(20_000)]
        (corpus / f"{k}.jsonl").write_text("\n".join(lines) + "\n")
    subprocess.run([BIN / "pretrain", "prepare", str(corpus), "--output", str(tmp_path / "one"), "--tokenizer", "byte"], check=True, capture_output=True)  # fmt: skip
    command = [str(ROOT / "slurm" / "prepare.sbatch"), "my corpus", "--output", "three", "--tokenizer", "byte"]
    stub = tmp_path / "bin" / "pretrain"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/bash\n[[ $SLURM_ARRAY_TASK_ID != 2 ]] || exec false\nexec {BIN}/pretrain "$@"\n')
    stub.chmod(0o755)

    failing = {**ENVIRONMENT, "PATH": f"{stub.parent}:{ENVIRONMENT['PATH']}"}
    first = cluster.submit("--array=1-3", "--nodes=1", *command, cwd=tmp_path, **failing)
    assert wait(first, 3) == {1: "COMPLETED", 2: "FAILED", 3: "COMPLETED"}, first.out
    assert "part 2 failed; it alone again (all of them, where a source was changed): sbatch --array=2 " in first.out
    assert first.out.count("not merged yet: ") == 2
    assert not (tmp_path / "three" / "manifest.json").exists()

    again = cluster.submit("--array=2", "--nodes=1", *command, cwd=tmp_path, **ENVIRONMENT)
    assert list(wait(again, 1).values()) == ["COMPLETED"], again.out
    assert "part 2 of 3 " in again.out
    same_bytes(tmp_path / "three", tmp_path / "one")

    whole_again = cluster.submit("--array=1-3", "--nodes=1", *command, cwd=tmp_path, **ENVIRONMENT)
    assert set(wait(whole_again, 3).values()) == {"COMPLETED"}, whole_again.out
    assert whole_again.out.count("was prepared already") == 3

    (corpus / "0.jsonl").write_text('{"text": "something else"}\n')
    subprocess.run([BIN / "pretrain", "prepare", str(corpus), "--output", str(tmp_path / "one"), "--tokenizer", "byte", "--overwrite"], check=True, capture_output=True)  # fmt: skip
    replaced = cluster.submit("--array=1-3", "--nodes=1", *command, "--overwrite", cwd=tmp_path, **ENVIRONMENT)
    assert set(wait(replaced, 3).values()) == {"COMPLETED"}, replaced.out
    same_bytes(tmp_path / "three", tmp_path / "one")


def test_prepare_says_how_it_is_meant(cluster: Cluster, tmp_path: Path) -> None:
    for command, said in (
        (["x", "--output", "y"], "this is an array job: sbatch --array=1-8"),
        (["--array=0-1", "x", "--output", "y"], "task 0 is none of the parts 1 to 2"),
        (["--array=1", "x"], "--output is missing"),
    ):
        flags = [word for word in command if word.startswith("--array")]
        job = cluster.submit(*flags, "--nodes=1", str(ROOT / "slurm" / "prepare.sbatch"), *[w for w in command if w not in flags], cwd=tmp_path, **ENVIRONMENT)  # fmt: skip
        job.wait_for(said)


@pytest.mark.long
def test_a_sweep_with_a_member_that_fails(cluster: Cluster, tmp_path: Path) -> None:
    make_set(tmp_path / "set")
    write_config(tmp_path / "tiny.yaml", tmp_path / "set", run={"dir": "runs"}, train={"max_steps": 3, "eval_every": 3})
    (tmp_path / "rates.txt").write_text("optim.lr=1e-3  # the usual one\noptim.lr=-1\n\noptim.lr=3e-4 'run.name=the last one'\n")
    script = str(ROOT / "slurm" / "sweep.sbatch")
    asked = subprocess.run(["bash", script, "tiny.yaml", "rates.txt"], cwd=tmp_path, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)  # fmt: skip
    assert asked.returncode == 0, asked.stderr
    assert "sbatch --array=1-3 " in asked.stdout

    job = cluster.submit("--array=1-3", "--nodes=1", script, "tiny.yaml", "rates.txt", cwd=tmp_path, **ENVIRONMENT)
    assert wait(job, 3) == {1: "COMPLETED", 2: "FAILED", 3: "COMPLETED"}, job.out
    runs = tmp_path / "runs" / "rates"
    for name in ("tiny-lr=1e-3", "the last one"):
        assert (read_status(runs / name) or {})["state"] == "finished"
    table = (runs / "summary.md").read_text().splitlines()
    assert len(table) == 5
    assert re.match(r"\| tiny-lr=1e-3 \| finished \| 3 \| 5\.\d{4} \| 5\.\d{4} \| 5\.\d{4} \| \d+ \|  \|", table[2]), table
    assert "| refused |" in table[3]
    assert "optim.lr" in table[3]
    assert table[4].startswith("| the last one | finished | 3 |")

    before = (runs / "tiny-lr=1e-3" / "metrics.jsonl").read_bytes()
    again = cluster.submit("--array=1,3", "--nodes=1", script, "tiny.yaml", "rates.txt", cwd=tmp_path, **ENVIRONMENT)
    assert set(wait(again, 2).values()) == {"COMPLETED"}, again.out
    assert again.out.count("is finished: step 3") == 2
    assert (runs / "tiny-lr=1e-3" / "metrics.jsonl").read_bytes() == before


@pytest.mark.long
def test_the_commands_of_the_readme(cluster: Cluster, tmp_path: Path) -> None:
    """As they stand, on CPUs: a task for each GPU that they ask for."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    commands = [line for _, block in blocks for line in block.splitlines() if line.startswith(("sbatch ", "srun "))]
    assert len(commands) == 4
    for name in ("pretrain", "slurm"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "my_texts").mkdir()
    for k in range(40):
        (tmp_path / "my_texts" / f"{k}.txt").write_text(f"My fellow citizens, this is speech {k}. " * 20)
    (tmp_path / "rates.yaml").write_text("optim.lr: [1e-3, 3e-4]\n")
    write_config(tmp_path / "tiny.yaml", tmp_path / "data" / "cluster", run={"dir": "runs"}, train={"max_steps": 3})
    (tmp_path / "configs").mkdir()
    (tmp_path / "tiny.yaml").rename(tmp_path / "configs" / "quickstart.yaml")
    for command in commands:
        words = shlex.split(command.replace("--gpus-per-node", "--ntasks-per-node").replace("train.max_steps=200", "train.max_steps=2"))
        if words[0] == "srun":
            said = cluster.run(*words, cwd=tmp_path, env=ENVIRONMENT, check=False)
            assert re.search(r"\d+ problems?, \d+ warnings?", said), said
            continue
        job = cluster.submit(*words[1:], cwd=tmp_path, **ENVIRONMENT)
        array = re.search(r"--array=1-(\d)", command)
        states = set(wait(job, int(array[1])).values()) if array else {job.wait()}
        assert states == {"COMPLETED"}, job.out
    assert (read_status(tmp_path / "runs" / "cluster") or {})["state"] == "finished"
    assert len((tmp_path / "runs" / "rates" / "summary.md").read_text().splitlines()) == 4


@pytest.mark.long
def test_a_sweep_that_grows_does_not_move_who_has_started(cluster: Cluster, tmp_path: Path) -> None:
    """The K-th member is another one by the time that task K is requeued; what it began with is what it goes on with."""
    make_set(tmp_path / "set")
    write_config(tmp_path / "tiny.yaml", tmp_path / "set", run={"dir": "runs"}, model={"build": "faulty:model"}, train={"max_steps": 12})
    (tmp_path / "rates.txt").write_text("optim.lr=1e-3\n")
    job = cluster.submit("--array=1", "--nodes=1", str(ROOT / "slurm" / "sweep.sbatch"), "tiny.yaml", "rates.txt", cwd=tmp_path, PACE="0.1", **ENVIRONMENT)  # fmt: skip
    runs = tmp_path / "runs" / "rates"
    job.until("step 2", lambda: len(read_lines(runs / "tiny-lr=1e-3" / "metrics.jsonl")) >= 2)
    (tmp_path / "rates.txt").write_text("optim.lr=2e-3\noptim.lr=1e-3\n")
    cluster.run("scontrol", "requeue", f"{job.number}_1")
    job.until("finished", lambda: (read_status(runs / "tiny-lr=1e-3") or {}).get("state") == "finished")
    assert wait(job, 1) == {1: "COMPLETED"}, job.out
    assert job.out.count("start 2: ") == 1
    assert not (runs / "tiny-lr=2e-3").exists()


@pytest.mark.long
def test_a_comparison_as_an_array(cluster: Cluster, tmp_path: Path) -> None:
    """A member for more processes than the job has is told so; the last task writes the report; again, everything is done."""
    make_set(tmp_path / "set")
    compare = {"dir": "cmp", "repetitions": 1, "skip_steps": 2, "processes": 2,
               "members": [{"strategy.name": "ddp"}, {"strategy.name": "single"}]}  # fmt: skip
    write_config(tmp_path / "compare.yaml", tmp_path / "set", run={"dir": "runs"}, compare=compare)
    script = str(ROOT / "slurm" / "compare.sbatch")
    asked = subprocess.run(["bash", script, "compare.yaml"], cwd=tmp_path, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)  # fmt: skip
    assert asked.returncode == 0, asked.stderr
    assert "sbatch --array=1-2%1 " in asked.stdout

    job = cluster.submit("--array=1-2%1", "--nodes=2", "--ntasks-per-node=1", script, "compare.yaml", cwd=tmp_path, **ENVIRONMENT)
    assert wait(job, 2) == {1: "COMPLETED", 2: "FAILED"}, job.out
    assert "ddp on 2 processes, repetition 1: finished" in job.out
    assert "single is for 1 process, and the job has 2" in job.out
    assert "(this job fits --array=1)" in job.out
    assert not (tmp_path / "cmp" / "report").exists()

    rest = cluster.submit("--array=1-2%1", "--nodes=1", script, "compare.yaml", cwd=tmp_path, **ENVIRONMENT)
    assert wait(rest, 2) == {1: "FAILED", 2: "COMPLETED"}, rest.out
    assert "cmp/report/index.html" in rest.out
    assert len((tmp_path / "cmp" / "report" / "results.csv").read_text().splitlines()) == 3
