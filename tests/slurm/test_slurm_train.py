"""slurm/train.sbatch on a real controller: what was submitted is trained, whatever happens to its nodes, its time and its processes."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from cluster import ROOT, Cluster, Job, missing
from forked import Forks
from launching import make_set, read_lines, training_metrics, write_config
from safetensors.numpy import load_file

from pretrain import checkpoint
from pretrain.inspection import check_ledger
from pretrain.runfolder import read_status

pytestmark = [pytest.mark.launch, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
SCRIPT = str(ROOT / "slurm" / "train.sbatch")
STEPS = 60
ONE_EACH = ["--nodes=2", "--ntasks-per-node=1"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    started = Cluster(tmp_path_factory.mktemp("cluster"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the user works; there is a space in its name."""
    place = tmp_path_factory.mktemp("a user")
    make_set(place / "set")
    write_config(place / "my config.yaml", place / "set", run={"dir": str(place / "runs")}, model={"build": "faulty:model"},
                 batch={"tokens": 128, "micro": 2}, train={"max_steps": STEPS, "checkpoint_every": 10, "keep_last": 2, "eval_every": 20})  # fmt: skip
    return place


@pytest.fixture(scope="module")
def whole(place: Path, forks: Forks) -> Callable[[int, str], Path]:
    """whole(processes, strategy): the run that nothing happened to, without Slurm."""
    made: dict[tuple[int, str], Path] = {}

    def run(size: int, strategy: str = "ddp") -> Path:
        if (size, strategy) not in made:
            name = f"whole-{strategy}-{size}"
            done = forks.start(
                place / "my config.yaml", f"run.name={name}", f"strategy.name={strategy}", size=size, out=place / f"{name}.txt"
            )
            assert done.wait(120) == [0] * size, done.story(place / "runs" / name)
            made[size, strategy] = place / "runs" / name
        return made[size, strategy]

    return run


def submit(cluster: Cluster, place: Path, name: str, *overrides: str, flags: list[str] = ONE_EACH, config: str = "my config.yaml", **env: str) -> Job:  # fmt: skip
    environment = {
        "PYTHONPATH": str(ROOT / "tests"),
        "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(ROOT / ".venv"),
        **env,
    }
    return cluster.submit(*flags, SCRIPT, config, f"run.name={name}", *overrides, cwd=place, **environment)


def wait_for_step(job: Job, folder: Path, step: int) -> None:
    job.until(f"step {step}", lambda: max((m["step"] for m in read_lines(folder / "metrics.jsonl")), default=0) >= step)


def running(job: Job, rank: int | None = None) -> list[psutil.Process]:
    """Its processes, or the trainer of that rank."""
    found = []
    for process in job.cluster.marked():
        with suppress(psutil.Error):
            environment = process.environ()
            trainer = "train.py" in " ".join(process.cmdline()[1:3]) and environment.get("RANK") == str(rank)
            if environment.get("SLURM_JOB_ID") == job.number and (rank is None or trainer):
                found.append(process)
    return found


def tensors(folder: Path, step: int = STEPS) -> dict[str, Any]:
    files = sorted(checkpoint.path_of(folder / "checkpoints", step).rglob("*.safetensors"))
    assert files
    return {f"{name}": value for file in files for name, value in load_file(file).items()}


def check_same(folder: Path, reference: Path) -> None:
    """Every number, window and tensor, bit for bit."""
    different = [pair for pair in zip(training_metrics(folder), training_metrics(reference), strict=True) if pair[0] != pair[1]]
    assert different[:1] == []
    ours, theirs = tensors(folder), tensors(reference)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not np.array_equal(ours[name], theirs[name])] == []
    assert any(f"steps 1 to {STEPS} join without gap or overlap" in line for line in check_ledger(folder / "ledger.jsonl"))


def test_what_cannot_be_said_ends_no_job() -> None:
    """Its output may lie on a full disk, and what comes next is the requeue."""
    (say,) = (line for line in Path(SCRIPT).read_text().splitlines() if line.startswith("say() "))
    with open("/dev/full", "w") as full:
        ran = subprocess.run(["bash", "-euo", "pipefail", "-c", f"{say}\nsay something\nexit 75"], stdout=full, stderr=subprocess.DEVNULL)
    assert ran.returncode == 75


@pytest.mark.parametrize("strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.long) for name in ("fsdp2", "hsdp"))])
def test_two_nodes_are_four_processes(cluster: Cluster, place: Path, whole: Callable[..., Path], strategy: str) -> None:
    job = submit(cluster, place, f"two nodes {strategy}", f"strategy.name={strategy}", flags=["--nodes=2", "--ntasks-per-node=2"])
    assert job.wait() == "COMPLETED", job.out
    folder = place / "runs" / f"two nodes {strategy}"
    assert " on 2 nodes (n1 n2) × 2 processes" in job.out
    assert "= 4 ranks × " in job.out
    check_same(folder, whole(4, strategy))
    assert not list((place / "runs" / ".slurm").glob("*"))


@pytest.mark.long
def test_the_time_limit(cluster: Cluster, place: Path, whole: Callable[..., Path]) -> None:
    """Slurm's own signal, a minute sooner than asked for or less, so 15 to 75 s from the start (the run takes 84); and on, with the code and the config of the first start."""
    folder, checkout = place / "runs" / "limited", place / "checkout"
    shutil.copytree(ROOT / "pretrain", checkout / "pretrain")
    config = place / "changing.yaml"
    shutil.copy(place / "my config.yaml", config)
    job = submit(cluster, place, "limited", flags=[*ONE_EACH, "--time=2", "--signal=USR1@45"], config=config.name, PACE="0.7",
                 PYTHONPATH=f"{checkout}:{ROOT / 'tests'}")  # fmt: skip
    job.wait_for("ready for step 1")
    (checkout / "pretrain" / "train.py").write_text("raise SystemExit('another version')\n")
    config.write_text("nothing of it: is left\n")
    job.wait_for("requeued, to go on from there")
    assert "stopped (SIGUSR1) at step " in job.out
    stopped = (read_status(folder) or {})["step"]
    assert 0 < stopped < STEPS
    job.wait_for(f"at step {stopped:,}")
    job.wait_for("ready for step", times=2)
    assert job.wait() == "COMPLETED", job.out
    check_same(folder, whole(2))


@pytest.mark.long
def test_preempted(cluster: Cluster, place: Path, whole: Callable[..., Path]) -> None:
    """A job of another partition wants the nodes: this one has a minute's grace, and goes when it has saved. Slurm takes a job that ends by
    itself then for a finished one."""
    folder = place / "runs" / "preempted"
    job = submit(cluster, place, "preempted", PACE="0.2")
    wait_for_step(job, folder, 5)
    urgent = cluster.submit("--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true", cwd=place)
    job.wait_for("stopped (SIGTERM) at step")
    assert urgent.wait() == "COMPLETED"
    assert job.wait() == "COMPLETED", job.out
    assert job.out.count("requeued, to go on from there") == 1
    check_same(folder, whole(2))


@pytest.mark.long
def test_a_process_for_each_gpu(cluster: Cluster, place: Path) -> None:
    """Whatever else was asked for. (These GPUs are numbers in Slurm's books.)"""
    for flags in (["--nodes=2", "--gpus-per-node=2"], ["--nodes=1", "--ntasks=2", "--gpus-per-task=1"]):
        job = submit(cluster, place, f"gpus {len(flags)}", "train.max_steps=2", "run.device=cpu", flags=flags)
        assert job.wait() == "COMPLETED", job.out
        assert f" on {flags[0][-1]} nodes (" in job.out
        assert " × 2 processes" in job.out


@pytest.mark.long
def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_cpus(cluster: Cluster, place: Path) -> None:
    job = submit(cluster, place, "no use", "train.max_steps=2", flags=["--nodes=2", "--gpus-per-node=2"])
    assert job.wait() == "FAILED", job.out
    assert job.facts()["ExitCode"] == "2:0"
    assert "Slurm allotted GPUs on " in job.out


@pytest.mark.long
def test_requeued_in_mid_step(cluster: Cluster, place: Path, whole: Callable[..., Path]) -> None:
    """Every process of the step gets SIGTERM, some of them more than once: one request."""
    folder = place / "runs" / "requeued"
    job = submit(cluster, place, "requeued", PACE="0.2")
    wait_for_step(job, folder, 13)
    cluster.run("scontrol", "requeue", job.number)
    job.wait_for("stopped on request (SIGTERM) at step ")
    job.wait_for("ready for step", times=2)
    assert job.wait() == "COMPLETED", job.out
    check_same(folder, whole(2))


@pytest.mark.long
def test_asked_before_there_is_anything_to_save(cluster: Cluster, place: Path, whole: Callable[..., Path]) -> None:
    """While everything is still being imported."""
    job = submit(cluster, place, "early")
    job.until("a trainer", lambda: running(job, 0))
    cluster.run("scancel", "--signal=USR1", job.number)
    job.wait_for("requeued, to go on from there")
    assert job.wait() == "COMPLETED", job.out
    check_same(place / "runs" / "early", whole(2))


@pytest.mark.long
def test_a_node_that_dies(cluster: Cluster, place: Path, whole: Callable[..., Path]) -> None:
    """Slurm requeues the job; what is left is the last checkpoint."""
    folder = place / "runs" / "node"
    job = submit(cluster, place, "node", PACE="0.2")
    wait_for_step(job, folder, 12)
    cluster.kill_node("n2")
    job.until("requeued", lambda: int(job.facts()["Restarts"]) == 1)
    cluster.start_node("n2")
    assert job.wait() == "COMPLETED", job.out
    check_same(folder, whole(2))


@pytest.mark.long
def test_cancelled(cluster: Cluster, place: Path) -> None:
    folder = place / "runs" / "cancelled"
    job = submit(cluster, place, "cancelled", PACE="0.2")
    wait_for_step(job, folder, 3)
    cluster.run("scancel", job.number)
    assert job.wait() == "CANCELLED"
    job.until("nothing of it running", lambda: not running(job))
    status = read_status(folder) or {}
    assert (status["state"], status["reason"]) == ("stopped", "SIGTERM")
    assert checkpoint.verify(checkpoint.path_of(folder / "checkpoints", status["step"])) is None
    assert int(job.facts()["Restarts"]) == 0
    assert "requeued" not in job.out


@pytest.mark.long
def test_a_stop_file_is_the_users_word(cluster: Cluster, place: Path) -> None:
    folder = place / "runs" / "stopped"
    job = submit(cluster, place, "stopped", PACE="0.2", flags=["--nodes=1"])
    wait_for_step(job, folder, 2)
    (folder / "stop").touch()
    assert job.wait() == "FAILED"  # 75 is not 0
    assert job.facts()["ExitCode"] == "75:0"
    assert "stopped as asked at step" in job.out


def test_a_rank_that_is_killed(cluster: Cluster, place: Path, whole: Callable[..., Path]) -> None:
    """Once: started again in the same job. (A fault to order comes at every start: a second one is beyond the first's step.)"""
    folder = place / "runs" / "killed"
    job = submit(cluster, place, "killed", PACE="0.1")
    wait_for_step(job, folder, 15)
    (victim,) = running(job, 1)
    victim.kill()
    assert job.wait() == "COMPLETED", job.out
    assert job.out.count("starting again, 1 of 3") == 1
    check_same(folder, whole(2))


@pytest.mark.long
def test_a_rank_that_is_killed_every_time(cluster: Cluster, place: Path) -> None:
    job = submit(cluster, place, "hopeless", FAULT="kill:1:4", PRETRAIN_CRASHES="1")
    assert job.wait() == "FAILED"
    assert job.facts()["ExitCode"] == "1:0"
    assert job.out.count("starting again, 1 of 1") == 1
    assert "crashed 2 times without a new step; giving up" in job.out


@pytest.mark.long
def test_what_would_fail_again_is_not_tried_again(cluster: Cluster, place: Path) -> None:
    job = submit(cluster, place, "nan", FAULT="nan:1:4")
    assert job.wait() == "FAILED"
    assert job.out.count("failed at step 2: the gradient of step 2 was not finite") == 1  # its second forward
    assert "starting again" not in job.out
    assert "requeued" not in job.out


@pytest.mark.parametrize(("override", "said"), [("optim.lrr=1", "optim.lrr"), ("data.train=no/such/set", "no/such/set")])
def test_a_wrong_config_ends_with_one_line(cluster: Cluster, place: Path, override: str, said: str) -> None:
    """The first is seen by the batch script, the second by the trainers, before they have begun."""
    job = submit(cluster, place, "wrong", override)
    assert job.wait() == "FAILED"
    assert job.facts()["ExitCode"] == "2:0"
    lines = [line for line in job.out.splitlines() if not line.startswith(("[slurm", "srun: cluster configuration"))]
    assert len(lines) == 1, job.out
    assert said in lines[0]
    assert int(job.facts()["Restarts"]) == 0


@pytest.mark.long
def test_two_jobs_on_one_node(cluster: Cluster, place: Path, whole: Callable[..., Path]) -> None:
    """They don't meet: each has its ports."""
    flags = ["--nodes=1", "--nodelist=n1", "--ntasks=2"]
    first, second = (submit(cluster, place, f"side {n}", flags=flags) for n in (1, 2))
    first.until("both running", lambda: (first.state, second.state) == ("RUNNING", "RUNNING"))
    assert (first.wait(), second.wait()) == ("COMPLETED", "COMPLETED")
    for n in (1, 2):
        check_same(place / "runs" / f"side {n}", whole(2))


@pytest.mark.long
def test_tasks_of_an_array_have_runs_of_their_own(cluster: Cluster, place: Path) -> None:
    """With no environment active, and from another folder: the one beside the script's original is found."""
    environment = {"PYTHONPATH": str(ROOT / "tests"), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "VIRTUAL_ENV": "", "CONDA_PREFIX": ""}
    job = cluster.submit("--array=3-4", "--nodes=1", SCRIPT, "my config.yaml", "train.max_steps=2", cwd=place, **environment)
    for task in (3, 4):
        folder = place / "runs" / f"my config-{task}"

        def finished(folder: Path = folder) -> bool:
            return (read_status(folder) or {}).get("state") == "finished"

        job.until(f"task {task} finished", finished)


STUB = """#!/bin/bash
case $(basename "$0") in
  scontrol)
    printf '%s\\n' 127.0.0.1 127.0.0.1
    [[ $* != *--details* ]] || printf ' Nodes=n%s CPU_IDs=0 GRES=gpu:%s(IDX:0)\\n' 1 7 2 tesla:8
    ;;
  srun)
    while [[ $1 == -* ]]; do shift; done
    for rank in 0 1; do
      SLURM_NODEID=$rank SLURM_PROCID=$rank "$@" &
    done
    wait
    ;;
esac
"""


def test_every_node_has_its_own_rank_and_the_same_address(place: Path, tmp_path: Path) -> None:
    """B92, B93, without Slurm: the rank is read in the step, and the number of processes is the whole."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name in ("scontrol", "srun"):
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(0o755)
    accelerate = stubs / "accelerate"
    accelerate.write_text('#!/bin/bash\nprintf "%s\\n" "$*" >> "$RECORD"\nexec "$REAL" "$@"\n')
    accelerate.chmod(0o755)
    (place / "over here").mkdir()
    environment = {**os.environ, "PATH": f"{stubs}:{ROOT}/.venv/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "tests"), "VIRTUAL_ENV": "x",
                   "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "here[1-2]", "SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_ON_NODE": "2",
                   "RECORD": str(tmp_path / "record"), "REAL": f"{ROOT}/.venv/bin/accelerate"}  # fmt: skip
    ran = subprocess.run(["bash", SCRIPT, "../my config.yaml", "run.name=with stubs", "train.max_steps=3"], cwd=place / "over here",
                         env=environment, capture_output=True, text=True, timeout=120)  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "ddp × 4 (gloo)" in ran.stdout
    recorded = (tmp_path / "record").read_text().splitlines()
    assert len(recorded) == 2
    words = [line.split() for line in recorded]
    options = [{w[i]: w[i + 1] for i in range(len(w) - 1) if w[i].startswith("--")} for w in words]
    assert sorted(o["--machine_rank"] for o in options) == ["0", "1"]
    assert {(o["--num_processes"], o["--num_machines"], o["--main_process_ip"]) for o in options} == {("4", "2", "127.0.0.1")}
    assert len({o["--main_process_port"] for o in options}) == 1
    assert json.loads((place / "runs" / "with stubs" / "status.json").read_text())["launch"] == "slurm-77-0-0"
    uneven = subprocess.run(["bash", SCRIPT, "../my config.yaml"], cwd=place / "over here", env={**environment, "SLURM_GPUS_ON_NODE": "7"},
                            capture_output=True, text=True, timeout=60)  # fmt: skip
    assert uneven.returncode == 2
    assert "the nodes have different numbers of GPUs (7, 8); ask for the same on each (--gpus-per-node)" in uneven.stdout
