"""`pretrain train`: check the config, start Accelerate's launcher, pass requests to stop on to it, return the trainer's own status."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from uuid import uuid4

import psutil
from omegaconf import OmegaConf

from pretrain import config
from pretrain.launch import check_not_side_by_side, gpu_files, usable_cores
from pretrain.network import namespaces
from pretrain.runfolder import Status, cannot_write, in_use, note_end, read_status

TRAINER = Path(__file__).with_name("train.py")
_SHUTDOWN_SECONDS = 120  # how long the launcher lets its workers save after a request to stop
_FIRST_RECORDS = 1 << 16  # bytes: what is written into a run folder before step 1, without the copy of the code
_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """In a new child, before it becomes its program: a request to stop when its parent is gone."""
    if _LIBC:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def check(config_file: str, overrides: Sequence[str]) -> config.Config:
    """Raises ConfigError for what the config alone shows; everything else is the trainer's to find."""
    cfg = config.load(config_file, overrides)
    _check_strategy(cfg, config_file, overrides)
    return cfg


def _check_strategy(cfg: config.Config, config_file: str, overrides: Sequence[str]) -> None:
    if cfg.strategy != config.Strategy():  # its names and options are the strategies' to know: some seconds of imports
        from pretrain.strategies import OPTIONS

        config.load(config_file, overrides, OPTIONS)


def train(config_file: str, overrides: Sequence[str], launcher_flags: Sequence[str]) -> int:
    """The trainer's own exit status. Raises ConfigError."""
    check_not_side_by_side()
    cfg = config.load(config_file, overrides)
    try:
        _check_strategy(cfg, config_file, overrides)
    except config.ConfigError as error:
        note_end(cfg.folder, 0, "refused", 2, str(error))
        raise
    logs = cfg.folder / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=logs) as probe:  # a trainer that finds the disk full has no room to record that
            probe.write(bytes(_FIRST_RECORDS))
        noise = open(logs / "launcher.log", "a", encoding="utf-8")  # noqa: SIM115 — closed below
    except OSError as error:
        raise cannot_write(cfg.folder, error) from None
    if owner := in_use(cfg.folder):
        raise config.ConfigError(owner)
    processes = _processes(launcher_flags)
    if processes == 1 and not launcher_flags:
        command = [sys.executable, str(TRAINER)]
    else:
        flags = list(launcher_flags)
        if "--config_file" not in flags:  # the personal default_config.yaml has no say here
            flags = ["--config_file", str(_launcher_config(logs, processes)), *flags]
        command = [sys.executable, "-m", "accelerate.commands.launch", *flags, str(TRAINER)]
    environment = _environment(processes)
    with noise, namespaces.made(cfg, processes, launcher_flags) as network:
        code, asked = _run([*command, config_file, *overrides], environment | network, noise.fileno())
    status = read_status(cfg.folder)
    if status is None or status.get("launch") != environment["PRETRAIN_LAUNCHED"]:
        if code == 0:  # we have finished, and the next launch has come
            return 0
        if in_use(cfg.folder):  # someone was faster; the trainer has said so
            return 2
        if asked:
            print("stopped on request before the trainer was up; the same command starts it again")
            return 75
        print(f"the trainer ended without a word (launcher status {code}); see {logs}/launcher.log", file=sys.stderr)
        return 1
    if status["state"] == "running":
        with suppress(OSError):
            Status(cfg.folder, 0).write("failed", step=status["step"], exit_status=1, reason="killed")
        print(
            f"the trainer was killed at step {status['step']:,}; the same command goes on from the last checkpoint",
            file=sys.stderr,
        )
        return 1
    return int(status["exit_status"])


def _run(command: list[str], environment: dict[str, str], stderr: int) -> tuple[int, bool]:
    """Run to the end, trainers that outlive their launcher included: its status, and whether a stop was asked for.

    A first signal asks, a second one ends everything at once.
    """
    if _LIBC:  # orphans become our children, so that they can be waited for
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    launcher = subprocess.Popen(command, env=environment, stderr=stderr, start_new_session=True, preexec_fn=end_with_parent)
    asked = False

    def forward(number: int, _: object) -> None:
        nonlocal asked
        if asked:
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):  # it has just ended
                    child.kill()
        asked = True
        launcher.send_signal(signal.SIGTERM)

    for number in _REQUESTS:
        signal.signal(number, forward)
    try:
        code = launcher.wait()
        for orphan in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if asked or code < 0:  # it may have been too young to notice that its launcher is gone
                    orphan.terminate()
                orphan.wait()
        return code, asked
    finally:
        for number in _REQUESTS:  # what it came to is settled: nobody's second request makes another status of it
            signal.signal(number, signal.SIG_IGN)


def _processes(flags: Sequence[str]) -> int:
    """As `--num_processes` says, else one per GPU, else one."""
    for i, flag in enumerate(flags):
        name, equals, value = flag.replace("-", "_").partition("=")
        if name == "__num_processes":
            count = value if equals else "".join(flags[i + 1 : i + 2])
            if not count.isdigit() or int(count) < 1:
                raise config.ConfigError(f"--num_processes: expected a whole number above 0, found {count!r}")
            return int(count)
    if not gpu_files() and "CUDA_VISIBLE_DEVICES" not in os.environ:
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def _launcher_config(logs: Path, processes: int) -> Path:
    """MULTI_GPU is how Accelerate's launcher is told to start several processes, on CPUs too."""
    path = logs / "launcher.yaml"
    OmegaConf.save({"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU" if processes > 1 else "NO", "num_processes": processes,
                    "num_machines": 1, "machine_rank": 0, "main_process_port": 0, "mixed_precision": "no", "use_cpu": False}, path)  # fmt: skip
    return path


def _environment(processes: int) -> dict[str, str]:
    """What helps and the launcher would not set: threads, time to save after a signal, SIGUSR1 (Slurm's) passed on."""
    ours = {"OMP_NUM_THREADS": str(max(1, usable_cores() // processes)), "PET_SHUTDOWN_TIMEOUT": str(_SHUTDOWN_SECONDS),
            "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGUSR1"}  # fmt: skip
    return {**ours, **os.environ, "PRETRAIN_LAUNCHED": uuid4().hex}
