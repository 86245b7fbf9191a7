"""A real Slurm controller and two nodes, all on this machine, in a folder of their own.

Every daemon runs in the foreground as our child, with a munge key, sockets and ports that nobody else has. Whatever was started through it
carries a mark in its environment, by which `close` finds what is left, whoever its parent is by then.
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

MARK = "PRETRAIN_TEST_CLUSTER"  # in the environment of everything that is started through it
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "scancel", "squeue")
INSTALL = "apt-get install slurmctld slurmd slurm-client munge"
ROOT = Path(__file__).parents[2]
PATIENCE = 300.0  # seconds, on busy cores
_CPUS = 4  # of each node, as it says; there are fewer


def missing() -> str | None:
    """What keeps a cluster from being started here, and how to mend it; None where nothing does."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if absent:
        return f"needs Slurm ({', '.join(absent)} not found): {INSTALL}"
    return None if os.geteuid() == 0 else "needs root, as slurmctld and slurmd do"


class Cluster:
    """`submit`, `wait_for`, … as a user would, from one login node that is also every compute node."""

    def __init__(self, place: Path, nodes: Sequence[str] = ("n1", "n2"), **settings: str) -> None:
        self.place, self.nodes, self.mark = place, list(nodes), uuid.uuid4().hex
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._munge()
        self._write_config(settings)
        self.env = {**os.environ, "SLURM_CONF": str(place / "slurm.conf"), MARK: self.mark}
        self.env = {
            key: value for key, value in self.env.items() if not key.startswith(("ACCELERATE_", "PET_", "TORCHELASTIC_", "PRETRAIN_T_"))
        }
        self.start("slurmctld", "-D", "-c")
        for node in self.nodes:
            self.start_node(node)
        self.until("all nodes idle", lambda: self.states() == ["idle"] * len(self.nodes))

    def _munge(self) -> None:
        folder = self.place / "munge"
        folder.mkdir(mode=0o755)
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.socket = folder / "socket"
        self.env = dict(os.environ)
        self.start("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.socket}", f"--pid-file={folder}/pid",
                   f"--log-file={folder}/log", f"--seed-file={folder}/seed")  # fmt: skip
        _until("munge's socket", self.socket.exists)

    def _write_config(self, settings: Mapping[str, str]) -> None:
        controller, *ports = _free_ports(1 + len(self.nodes))
        for folder in ("state", *(f"spool-{node}" for node in self.nodes)):
            (self.place / folder).mkdir()
        values = {
            "ClusterName": "test", "SlurmctldHost": "localhost", "SlurmUser": "root", "AuthType": "auth/munge",
            "AuthInfo": f"socket={self.socket},cred_expire=5", "CryptoType": "crypto/munge",
            "SlurmctldPort": str(controller), "StateSaveLocation": str(self.place / "state"), "SlurmdSpoolDir": f"{self.place}/spool-%n",
            "SlurmctldPidFile": f"{self.place}/slurmctld.pid", "SlurmdPidFile": f"{self.place}/slurmd-%n.pid",
            "SlurmctldLogFile": f"{self.place}/slurmctld.log", "SlurmdLogFile": f"{self.place}/slurmd-%n.log",
            "ProctrackType": "proctrack/linuxproc", "TaskPlugin": "task/none", "MpiDefault": "none", "SwitchType": "switch/none",
            "SelectType": "select/cons_tres", "SelectTypeParameters": "CR_CPU", "ReturnToService": "2", "GresTypes": "gpu", "PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE", "JobRequeue": "1", "SlurmdParameters": "config_overrides",
            "KillWait": "20", "SlurmdTimeout": "10", "MinJobAge": "3600", "MessageTimeout": "20", "SchedulerParameters": "batch_sched_delay=1,sched_interval=2",
            **settings,
        }  # fmt: skip
        lines = [f"{key}={value}" for key, value in values.items()]
        gpus = (f"NodeName={node} Name=gpu File={device}\n" for node in self.nodes for device in ("/dev/null", "/dev/zero"))
        (self.place / "gres.conf").write_text("".join(gpus))
        for node, port in zip(self.nodes, ports, strict=True):
            lines.append(f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={_CPUS} RealMemory=8000 Gres=gpu:2")
        lines.append(
            f"PartitionName=all Nodes={','.join(self.nodes)} Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=60"
        )
        lines.append(f"PartitionName=urgent Nodes={','.join(self.nodes)} MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF")
        (self.place / "slurm.conf").write_text("\n".join(lines) + "\n")

    def start(self, name: str, *arguments: str, node: str = "") -> None:
        program = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
        assert program
        with open(self.place / f"{node or name}.out", "ab") as log:
            self._daemons[node or name] = subprocess.Popen([program, *arguments], env=self.env, cwd=self.place,
                                                           stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_die_with_us)  # fmt: skip

    def start_node(self, node: str) -> None:
        self.start("slurmd", "-D", "-N", node, node=node)

    def kill_node(self, node: str) -> None:
        """As a machine that goes down: its daemon, and everything that ran on it."""
        for process in self.marked():
            with suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == node or self._has_open(process, f"slurmd-{node}.log"):
                    process.kill()
        self._daemons.pop(node).wait()

    def states(self) -> list[str]:
        return self.run("sinfo", "-h", "-N", "-p", "all", "-o", "%T").split()

    def run(self, *command: str, cwd: Path | None = None, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        ran = subprocess.run(
            command, env={**self.env, **(env or {})}, cwd=cwd or self.place, capture_output=True, text=True, timeout=PATIENCE
        )
        assert not check or ran.returncode == 0, f"{' '.join(command)}: {ran.stdout}{ran.stderr}\n{self.story()}"
        return ran.stdout

    def submit(self, *command: str, cwd: Path, **env: str) -> "Job":
        number = self.run("sbatch", "--parsable", *command, cwd=cwd, env=env).strip().split(";")[0]
        return Job(self, number, cwd)

    def until(self, what: str, happened: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        return _until(what, happened, seconds, self.story)

    def marked(self) -> Iterator[psutil.Process]:
        """Every process that was started through this cluster, its daemons among them: those of Slurm write over their environment."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark or self._has_open(process, ""):
                    yield process

    def _has_open(self, process: psutil.Process, name: str) -> bool:
        """Whether a Slurm daemon writes that log of ours, or any."""
        daemon = process.name().startswith(("slurm", "munge"))
        return daemon and any(file.path.startswith(f"{self.place}/{name}") for file in process.open_files())

    def story(self) -> str:
        """Everything that was said, for a failing test's message."""
        texts = []
        for path in (self.place / "slurmctld.log", *self.place.glob("slurmd-*.log"), *self.place.glob("*.out")):
            if path.is_file():
                texts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}")
        return "\n".join(texts)

    def close(self) -> None:
        with suppress(Exception):
            self.run("scancel", "--quiet", *self.run("squeue", "-h", "-o", "%A").split(), check=False)
        for _ in range(100):
            left = list(self.marked())
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            for daemon in self._daemons.values():
                daemon.kill()
                daemon.wait()
            if not left:
                break
            psutil.wait_procs(left, timeout=1)


OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


class Job:
    """One that was submitted. Requeued, it stays the same."""

    def __init__(self, cluster: Cluster, number: str, cwd: Path) -> None:
        self.cluster, self.number, self.cwd = cluster, number, cwd

    def facts(self, number: str | None = None) -> dict[str, str]:
        text = self.cluster.run("scontrol", "--oneliner", "show", "job", number or self.number).splitlines()[0]
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    @property
    def state(self) -> str:
        return self.facts()["JobState"]

    @property
    def out(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.cwd.glob(f"*{self.number}*.out")))

    def wait(self, seconds: float = PATIENCE) -> str:
        """Its last state, once it is over and nothing of it runs any more."""
        return str(self.until("the job over", lambda: self.state if self.state in OVER else None, seconds))

    def wait_for(self, text: str, times: int = 1, seconds: float = PATIENCE) -> None:
        over = False

        def said() -> bool:
            nonlocal over
            assert not over or self.out.count(text) >= times, f"it is over without {times} × {text!r}\n{self.out}"
            over = self.state in OVER
            return self.out.count(text) >= times

        self.until(f"{times} × {text!r}", said, seconds)

    def until(self, what: str, happened: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        return _until(what, happened, seconds, lambda: f"{self.facts()}\n{self.out}\n{self.cluster.story()}")


def _until(what: str, happened: Callable[[], Any], seconds: float = PATIENCE, story: Callable[[], str] = lambda: "") -> Any:
    end = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < end, f"not in {seconds:.0f}s: {what}\n{story()}"
        time.sleep(0.05)
    return found


def _die_with_us() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


if __name__ == "__main__":  # a cluster to try things on: python tests/slurm/cluster.py FOLDER, until Ctrl-C
    place = Path(sys.argv[1]).resolve()
    place.mkdir(parents=True)
    cluster = Cluster(place)
    print(f"export SLURM_CONF={place}/slurm.conf {MARK}={cluster.mark}", flush=True)
    try:
        while True:
            time.sleep(3600)
    finally:
        cluster.close()
