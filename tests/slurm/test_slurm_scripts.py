"""The scripts of slurm/ without Slurm: its commands, and ours, are stubs beside the real scripts."""

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster import ROOT

# What Slurm would answer. Of the jobs it knows 77, which runs.
SCONTROL = """echo "$*" >> "$RECORD/scontrol"
case $* in
  "show hostnames"*) echo localhost ;;
  "show job"*" 77" | "show job"*" 1_1") echo "JobId=77 JobState=RUNNING" ;;
  "show job"*) exit 1 ;;
esac"""
SRUN = """echo "${@//$'\\n'/ }" >> "$RECORD/srun"
env > "$RECORD/environment"
"""
PRETRAIN = "[[ $1 != train ]] || echo runs/x"
SAYS = """cat > runs/x/status.json <<< '{"launch": "'"$PRETRAIN_LAUNCHED"'", "state": "%s", "again": false, "step": %d, "reason": ""}'\n"""
FINISHED = SAYS % ("finished", 9)
PART = {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "1"}


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


class Site:
    """Where a job runs: stubs for its commands, and what they were asked."""

    def __init__(self, place: Path) -> None:
        self.place, self.stubs, self.runs = place / "work", place / "stubs", place / "work" / "runs"
        for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("pretrain", PRETRAIN), ("sleep", "")):
            program(self.stubs / name, text)
        program(self.stubs / "python", f'exec {sys.executable} "$@"')
        (self.runs / "x" / "logs").mkdir(parents=True)
        (self.place / "my config.yaml").touch()
        path = f"{self.stubs}:{os.environ['PATH']}"
        self.env = {"PATH": path, "PYTHONPATH": str(ROOT), "RECORD": str(self.place), "SLURM_JOB_ID": "77", "https_proxy": "http://none"}

    def run(self, *words: str, script: str = "train", srun: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        program(self.stubs / "srun", SRUN + srun)
        return subprocess.run(["bash", str(ROOT / "slurm" / f"{script}.sbatch"), *(words or ["my config.yaml"])], cwd=self.place, env=self.env | env,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)  # fmt: skip

    def asked(self, name: str) -> list[str]:
        record = self.place / name
        return record.read_text().splitlines() if record.exists() else []

    def requeues(self) -> int:
        return sum(line.startswith("requeue ") for line in self.asked("scontrol"))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_job_that_is_stopped_before_every_new_step_gives_up(site: Site) -> None:
    """As where --time is no longer than what --signal leaves for the end. A new step is a new beginning."""
    starts: list[tuple[int, str]] = []
    for start, step in enumerate((0, 0, 0, 5, 5, 5, 5, 5)):
        ran = site.run(srun=SAYS % ("stopped", step) + "exit 75", SLURM_RESTART_COUNT=str(start))
        starts.append((ran.returncode, ran.stdout))
    assert [status for status, _ in starts] == [0, 0, 0, 0, 0, 0, 0, 1], starts[-1]
    assert "stopped 4 times without a new step; ask for more --time, or a smaller --signal=USR1@SECONDS" in starts[-1][1]
    assert site.requeues() == 7


def test_a_job_that_is_stopped_before_anything_has_begun_gives_up(site: Site) -> None:
    statuses = [site.run(srun="exit 75", SLURM_RESTART_COUNT=str(start)).returncode for start in range(4)]
    assert statuses == [0, 0, 0, 1]
    assert site.requeues() == 3


def test_a_part_that_is_stopped_before_anything_new_is_done_gives_up(site: Site) -> None:
    journal = site.place / "set" / ".parts" / "00001-of-00001" / "journal.jsonl"
    work = {True: f"mkdir -p {journal.parent}; echo >> {journal}; exit 75", False: "exit 75"}
    statuses = []
    for new in (False, False, True, False, False, False, False):
        program(site.stubs / "pretrain", work[new])
        ran = site.run("texts", "--output", "set", script="prepare", **PART)
        statuses.append(ran.returncode)
    assert statuses == [0, 0, 0, 0, 0, 0, 1], ran.stdout
    assert "stopped 4 times with nothing new done; ask for more --time, or a smaller --signal=B:TERM@SECONDS" in ran.stdout
    assert site.requeues() == 6


def test_a_second_job_leaves_the_first_ones_run_alone(site: Site) -> None:
    folder = site.runs / "x"
    (folder / "logs" / "launcher.yaml").write_text("of the first\n")
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 1 on n1")
        lock.flush()
        ran = site.run()
    assert ran.returncode == 2, ran.stdout
    assert "runs/x is in use by process 1 on n1; wait for it" in ran.stdout
    assert "crashed" not in ran.stdout
    assert len(site.asked("srun")) == 1
    assert (folder / "logs" / "launcher.yaml").read_text() == "of the first\n"
    assert not list((site.runs / ".slurm").glob("*"))


def test_a_lock_that_outlives_its_owner_is_waited_for(site: Site) -> None:
    """As that of a node that died, on a network disk."""
    program(site.stubs / "sleep", "rm runs/x/.lock")
    with open(site.runs / "x" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ran = site.run(srun=f"[[ -e runs/x/.lock ]] || {FINISHED}")
    assert ran.returncode == 0, ran.stdout
    assert "crashed" not in ran.stdout
    assert len(site.asked("srun")) == 2


def test_the_number_of_an_earlier_job_brings_back_nothing_of_it(site: Site) -> None:
    """Numbers begin anew with a controller's database, and two clusters may share a disk."""
    site.run("my config.yaml", "optim.lr=1", srun="exit 75", SLURM_CLUSTER_NAME="north")
    site.run("my config.yaml", "optim.lr=2", srun="exit 75", SLURM_CLUSTER_NAME="south")
    assert sorted(path.name for path in (site.runs / ".slurm").iterdir()) == ["north-77", "south-77"]
    ran = site.run("my config.yaml", "optim.lr=3", srun="exit 75", SLURM_CLUSTER_NAME="north")
    site.run("my config.yaml", "optim.lr=4", srun="exit 75", SLURM_CLUSTER_NAME="south", SLURM_RESTART_COUNT="1")
    assert [line.split()[-1] for line in site.asked("srun")] == ["optim.lr=1", "optim.lr=2", "optim.lr=3", "optim.lr=2"], ran.stdout


def test_only_snapshots_of_jobs_that_are_gone_are_cleared_away(site: Site) -> None:
    foreign, waiting, gone = site.place / "thesis", site.runs / ".slurm" / "77", site.runs / ".slurm" / "76"
    for folder in (foreign, waiting, gone):
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - 40 * 86400,) * 2)
    ran = site.run(srun=FINISHED, PRETRAIN_SNAPSHOTS=str(site.place), SLURM_JOB_ID="78")
    assert ran.returncode == 0, ran.stdout
    assert [folder.exists() for folder in (foreign, waiting, gone)] == [True, True, False]


@pytest.mark.parametrize("script", ["train", "prepare", "sweep", "compare"])
def test_the_environment_beside_the_checkout_serves_where_the_active_one_has_no_pretrain(site: Site, script: str) -> None:
    """As conda's base, which is active in many a login shell."""
    checkout = site.place / "checkout"
    shutil.copytree(ROOT / "slurm", checkout / "slurm")
    for name in ("accelerate", "pretrain"):
        program(checkout / ".venv" / "bin" / name, PRETRAIN)
    program(
        checkout / ".venv" / "bin" / "python",
        f'[[ $1 != -m ]] || {{ echo 3; exit; }}\nexec {sys.executable} "$@"',
    )
    for name in ("pretrain", "python"):
        (site.stubs / name).unlink()
    where = {"PATH": f"{site.stubs}:/usr/bin:/bin", "CONDA_PREFIX": "/opt/conda", "PRETRAIN_ROOT": str(checkout)}
    if script == "prepare":
        ran = site.run("texts", "--output", "set", script=script, **PART, **where)
    elif script == "train":
        ran = site.run(srun=FINISHED, **where)
    else:
        ran = site.run("my config.yaml", "members", script=script, SLURM_JOB_ID="", **where)
    assert ran.returncode == 0, ran.stdout


def test_the_step_asks_for_nothing_that_the_job_was_asked_for_per_task(site: Site) -> None:
    """And takes this shell's environment, whatever sbatch was told of its own."""
    inherited = {"SLURM_TRES_PER_TASK": "cpu=8,gres/gpu=1", "SRUN_CPUS_PER_TASK": "8", "SLURM_CPUS_PER_TASK": "8", "SLURM_GPU_BIND": "single:1",
                 "SLURM_GPUS_PER_TASK": "1", "SLURM_EXPORT_ENV": "NONE", "PRETRAIN_SRUN": "--container-image=x.sqsh"}  # fmt: skip
    ran = site.run(srun=FINISHED, **inherited)
    assert ran.returncode == 0, ran.stdout
    names = {line.split("=")[0] for line in site.asked("environment")}
    assert not names & (inherited.keys() - {"SLURM_EXPORT_ENV", "PRETRAIN_SRUN"})
    assert {"--export=ALL", "--container-image=x.sqsh"} <= set(site.asked("srun")[0].split())


@pytest.mark.parametrize("script", ["train", "prepare"])
def test_a_mirror_of_the_hub_is_asked_where_one_is_set(site: Site, script: str) -> None:
    where = {"https_proxy": "", "WANDB_BASE_URL": "http://127.0.0.1:1", **PART}
    words = ["texts", "--output", "set"] if script == "prepare" else ["my config.yaml"]
    program(site.stubs / "pretrain", f'env > "$RECORD/environment"\n{PRETRAIN}')
    with socket.create_server(("127.0.0.1", 0)) as mirror:
        for port, offline in ((mirror.getsockname()[1], False), (1, True)):
            ran = site.run(*words, script=script, srun=FINISHED, HF_ENDPOINT=f"http://127.0.0.1:{port}/hf", **where)
            assert ran.returncode == 0, ran.stdout
            assert ("HF_HUB_OFFLINE=1" in site.asked("environment")) == offline
            assert script == "prepare" or "WANDB_MODE=offline" in site.asked("environment")
