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
                 "SLURM_TRES_BIND": "gres/gpu:per_task:1",
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


def test_a_merge_that_is_stopped_is_requeued(site: Site) -> None:
    """It is told of the time limit as the part before it was: it would otherwise be killed, and no task be left to build the set."""
    stops = """trap 'exit 75' TERM; kill -TERM $PPID; read -rt 20 <> <(:); exit 1"""
    program(site.stubs / "pretrain", f'echo "$*" >> "$RECORD/pretrain"; [[ $1 != merge ]] || {{ {stops}; }}')
    ran = site.run("texts", "--output", "set", "--overwrite", script="prepare", **PART)
    assert ran.returncode == 0, ran.stdout
    assert [line.split()[0] for line in site.asked("pretrain")] == ["prepare", "merge"]
    assert "interrupted; requeued" in ran.stdout
    assert site.requeues() == 1


@pytest.mark.parametrize("done", [True, False])
def test_a_part_that_was_done_or_had_not_begun_as_the_signal_came_goes_on_at_its_next_start(site: Site, done: bool) -> None:
    program(site.stubs / "pretrain", f'echo "$*" >> "$RECORD/pretrain"; {"trap : TERM; " * done}kill -TERM $PPID')
    ran = site.run("texts", "--output", "set", script="prepare", **PART)
    assert ran.returncode == 0, ran.stdout
    assert [line.split()[0] for line in site.asked("pretrain")] == ["prepare"]
    assert site.requeues() == 1


SECOND = {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "2"}  # a task that Slurm would not requeue


def test_a_member_that_has_begun_needs_the_list_no_more(site: Site) -> None:
    members = site.place / "rates.txt"
    members.write_text("optim.lr=1e-3\noptim.lr=2e-3\n")
    first = site.run("my config.yaml", "rates.txt", script="sweep", srun=SAYS % ("stopped", 3) + "exit 75", **SECOND)
    assert first.returncode == 75, first.stdout
    members.write_text("optim.lr=1e-3\n")
    other = site.run("my config.yaml", "rates.txt", script="sweep", srun=FINISHED, **SECOND | {"SLURM_JOB_ID": "78"})
    assert other.returncode == 2, other.stdout
    again = site.run("my config.yaml", "rates.txt", script="sweep", srun=FINISHED, SLURM_RESTART_COUNT="1", **SECOND)
    assert again.returncode == 0, again.stdout
    assert "optim.lr=2e-3" in site.asked("srun")[-1]


def test_a_table_that_cannot_be_written_hides_nothing(site: Site) -> None:
    (site.place / "rates.txt").write_text("optim.lr=1e-3\noptim.lr=2e-3\n")
    (site.place / "my config.yaml").write_text(
        "data: {train: texts}\nmodel: {preset: tiny}\nbatch: {tokens: 1024}\ntrain: {max_steps: 9}\n"
    )
    (site.runs / "rates" / "summary.md" / "in the way").mkdir(parents=True)
    for state, status in (("stopped", 75), ("finished", 0)):
        ran = site.run("my config.yaml", "rates.txt", script="sweep", srun=SAYS % (state, 3) + f"exit {status}", **SECOND)
        assert ran.returncode == status, ran.stdout


def test_a_launch_of_a_comparison_waits_for_the_lock_of_a_node_that_died(site: Site) -> None:
    answers = '[[ $3 == --launch ]] || exec %s "$@"\n[[ -e free ]] && echo "my config.yaml" || { echo in use >&2; exit 75; }'
    program(site.stubs / "python", f'[[ $2 == pretrain.compare ]] || exec {sys.executable} "$@"\n{answers % "true"}')
    for frees, status in (("", 2), ("touch free", 0)):
        program(site.stubs / "sleep", frees)
        ran = site.run("my config.yaml", script="compare", srun=FINISHED, SLURM_JOB_NUM_NODES="1", **SECOND)
        assert ran.returncode == status, ran.stdout
        assert ran.stdout.count("another look in two minutes") == 1


def test_what_was_noted_of_a_launch_is_noted_or_the_task_fails(site: Site) -> None:
    program(
        site.stubs / "python",
        f'case "$2 $3" in "pretrain.compare --launch") echo "my config.yaml" ;; pretrain.compare*) exit 1 ;; *) exec {sys.executable} "$@" ;; esac',
    )
    for state, trained, status in (("stopped", 75, 75), ("finished", 0, 1)):
        ran = site.run("my config.yaml", script="compare", srun=SAYS % (state, 3) + f"exit {trained}", SLURM_JOB_NUM_NODES="1", **SECOND)
        assert ran.returncode == status, ran.stdout


@pytest.mark.parametrize(("name", "beside"), [("plain", True), ("with space", False)])
def test_kernels_are_kept_where_a_compiler_can_write(site: Site, name: str, beside: bool) -> None:
    """inductor names its folder to the compiler without quotes. The threads of each process are what the job has for it, said where it was asked otherwise."""
    program(site.stubs / "pretrain", f'[[ $1 != train ]] || echo "runs/{name}"')
    program(site.stubs / "accelerate", 'env > "$RECORD/launched"')
    here = 'while [[ $1 != bash ]]; do shift; done; SLURM_NODEID=0 SLURM_CPUS_ON_NODE=6 "$@"; exit 75'
    site.run(srun=here, SLURM_TASKS_PER_NODE="2", OMP_NUM_THREADS="1", TMPDIR="/tmp")
    launched = dict(line.split("=", 1) for line in site.asked("launched") if "=" in line)
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert launched[variable].startswith(str(site.runs / name) if beside else "/tmp/pretrain-77"), launched[variable]
        assert " " not in launched[variable]
    assert launched["OMP_NUM_THREADS"] == "3"
