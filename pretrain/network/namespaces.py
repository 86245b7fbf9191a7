"""A network namespace for each local rank, joined by a bridge, whose links the kernel slows: `pretrain train` makes and removes them.

    trainer in pretrain-OWNER-K: slow0 (198.18.N.K+2) ── tbf ── OWNER.K, tbf, port of OWNER.b (198.18.N.1): the launcher and its store

OWNER says which process made them, so that a later start removes what a killed one left. 198.18.0.0/15 is for measuring networks (RFC 2544).
Everything that the trainers send to each other goes over these links. Outside of them they reach nothing.
"""

import ctypes
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from pretrain.config import Config, ConfigError, Network

_VARIABLE = "PRETRAIN_NETWORK"  # what was made, for the trainers
_FOLDER = Path("/run/netns")
_LINK = "slow0"  # the interface's name inside
_CLONE_NEWNET = 0x40000000  # sched.h
_BURST_SECONDS, LEAST_BURST = 1e-3, 16_384  # what a link lets through at once: more than a packet, little of a collective
_QUEUE_SECONDS, _LEAST_QUEUE = 0.4, 1_000_000
_MOST = 250  # of one /24
_PROBE_SECONDS = 5


@dataclass(frozen=True)
class Made:
    owner: str = ""
    address: str = ""  # of the bridge
    interface: str = ""  # inside each namespace; empty where there are none
    netem: bool = False  # whether they have the latency, too
    why_not: str | None = None


class _NotHereError(Exception):
    """Why there are no namespaces."""


@contextmanager
def made(cfg: Config, processes: int, launcher_flags: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """For the launch inside: the environment that lets its trainers enter them, or tells them why there are none."""
    network = cfg.compare.network
    if network is None or processes < 2:
        yield {}
        return
    owner = _owner()
    try:
        _check(cfg, processes, launcher_flags)
        _remove(lambda found: found == owner or not _alive(found))
        made = _make(owner, network, processes)
        _try(made)
    except (_NotHereError, OSError) as error:
        _remove(lambda found: found == owner)
        made = Made(why_not=f"no network namespaces: {error}")
    try:
        yield {_VARIABLE: json.dumps(asdict(made))}
    finally:
        if made.interface:
            _remove(lambda found: found == owner)


def made_for_us() -> Made:
    """In a trainer."""
    if _VARIABLE not in os.environ:
        return Made(why_not="no network namespaces: only `pretrain train` makes them")
    return Made(**json.loads(os.environ[_VARIABLE]))


def enter(local_rank: int) -> None:
    """In a trainer whose launch has them, before its first socket and thread: a thread's children are where it is. Raises ConfigError."""
    made = made_for_us()
    if not made.interface:
        return
    try:
        _enter(f"pretrain-{made.owner}-{local_rank}")
    except OSError as error:
        raise ConfigError(f"compare.network: local rank {local_rank} cannot enter its network namespace: {error}") from None
    os.environ.update(MASTER_ADDR=made.address, GLOO_SOCKET_IFNAME=made.interface)


def _enter(name: str) -> None:
    """As os.setns, which Python has from 3.12 on."""
    with open(_FOLDER / name) as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)


def _check(cfg: Config, processes: int, launcher_flags: Sequence[str]) -> None:
    names = [flag.partition("=")[0] for flag in launcher_flags]
    for wrong, why in (
        (sys.platform != "linux", f"they are Linux's, and this is {sys.platform}"),
        (sys.platform == "linux" and os.geteuid() != 0, "they need root"),
        (not shutil.which("ip") or not shutil.which("tc"), "they need the programs ip and tc (iproute2)"),
        (processes > _MOST, f"{processes} processes, and there is room for {_MOST}"),
        ("--config_file" in names or "--num_machines" in names, "the launcher's own flags say how many processes start here"),
        (cfg.track.wandb == "online", "track.wandb=online needs a way out"),
        (cfg.model.init_from is not None and not Path(cfg.model.init_from).exists(), "model.init_from may need a way out"),
    ):
        if wrong:
            raise _NotHereError(why)


def _make(owner: str, network: Network, processes: int) -> Made:
    subnet = _free_subnet()
    bridge, address = f"{owner}.b", f"{subnet}.1"
    _run("ip", "link", "add", bridge, "type", "bridge")
    _run("ip", "addr", "add", f"{address}/24", "dev", bridge)
    _run("ip", "link", "set", bridge, "up")
    for k in range(processes):
        inside, outside = f"pretrain-{owner}-{k}", f"{owner}.{k}"
        _run("ip", "netns", "add", inside)
        _run("ip", "link", "add", outside, "type", "veth", "peer", "name", _LINK, "netns", inside)
        _run("ip", "link", "set", outside, "master", bridge, "up")
        _run("ip", "-n", inside, "link", "set", "lo", "up")
        _run("ip", "-n", inside, "link", "set", "dev", _LINK, "addrgenmode", "none")  # gloo takes an interface's first address: no IPv6
        _run("ip", "-n", inside, "addr", "add", f"{subnet}.{k + 2}/24", "dev", _LINK)
        _run("ip", "-n", inside, "link", "set", "dev", _LINK, "up")
    netem = network.latency_ms > 0 and all(_delay(f"pretrain-{owner}-{k}", network.latency_ms) for k in range(processes))
    if network.bandwidth_gbit:
        for k in range(processes):
            _limit(("-n", f"pretrain-{owner}-{k}"), _LINK, network.bandwidth_gbit, parent=("parent", "1:1") if netem else ("root",))
            _limit((), f"{owner}.{k}", network.bandwidth_gbit, parent=("root",))
    elif not netem:
        raise _NotHereError("without a bandwidth they would only delay, and this kernel has no netem")
    return Made(owner, address, _LINK, netem)


def _limit(where: tuple[str, ...], interface: str, gbit: float, *, parent: tuple[str, ...]) -> None:
    """What leaves an interface; on both ends of a pair it is both ways. Bytes that find no place in the queue are sent again by TCP."""
    rate = gbit * 1e9 / 8
    burst, queue = max(LEAST_BURST, int(rate * _BURST_SECONDS)), max(_LEAST_QUEUE, int(rate * _QUEUE_SECONDS))
    _run("tc", *where, "qdisc", "add", "dev", interface, *parent, "tbf", "rate", f"{round(gbit * 1e9)}bit", "burst", str(burst),
         "limit", str(min(queue, 2**31)))  # fmt: skip


def _delay(inside: str, milliseconds: float) -> bool:
    """What leaves a namespace; False where the kernel has no netem."""
    try:
        _run(
            "tc",
            "-n",
            inside,
            "qdisc",
            "add",
            "dev",
            _LINK,
            "root",
            "handle",
            "1:",
            "netem",
            "delay",
            f"{milliseconds}ms",
            "limit",
            "1000000",
        )
    except OSError:
        return False
    return True


def _try(made: Made) -> None:
    """From one namespace to the other, and out to the bridge: a firewall may forbid either."""
    first, second = (f"pretrain-{made.owner}-{k}" for k in (0, 1))
    for where, address in ((first, made.address.removesuffix("1") + "2"), (None, made.address)):
        listening = _in(where, lambda address=address: socket.create_server((address, 0)))  # type: ignore[misc]
        with listening:
            reached = (address, listening.getsockname()[1])
            _in(second, lambda reached=reached: socket.create_connection(reached, timeout=_PROBE_SECONDS)).close()  # type: ignore[misc]


def _in(namespace: str | None, make: Callable[[], socket.socket]) -> socket.socket:
    """A socket stays where it was made, and a thread can enter a namespace by itself."""
    box: list[socket.socket] = []
    errors: list[OSError] = []

    def run() -> None:
        try:
            if namespace is not None:
                _enter(namespace)
            box.append(make())
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return box[0]


def _free_subnet() -> str:
    """First three numbers of a /24 that no interface here has."""
    taken = {address.address.rpartition(".")[0] for of_one in psutil.net_if_addrs().values() for address in of_one}
    start = os.getpid()  # so that two that start at once differ
    return next(subnet for k in range(512) if (subnet := f"198.{18 + (start + k) // 256 % 2}.{(start + k) % 256}") not in taken)


def _owner() -> str:
    """Of this process: pt, two digits for its PID namespace, and its number. An interface's name has 15 characters at most."""
    return f"pt{os.stat('/proc/self/ns/pid').st_ino & 0xFF:02x}{os.getpid():x}" if sys.platform == "linux" else ""


def _alive(owner: str) -> bool:
    """Of another PID namespace nobody can say."""
    if owner[:4] != _owner()[:4]:
        return True
    try:
        return any("python" in word or "pretrain" in word for word in psutil.Process(int(owner[4:], 16)).cmdline())
    except psutil.Error:
        return False


def _remove(wanted: Callable[[str], bool]) -> None:
    """Namespaces and interfaces of such owners. What is gone meanwhile is gone."""
    with suppress(OSError):
        for path in _FOLDER.glob("pretrain-pt*-*"):
            if wanted(path.name.split("-")[1]):
                with suppress(OSError):
                    _run("ip", "netns", "del", path.name)
    for _, interface in socket.if_nameindex():
        found = re.fullmatch(r"(pt[0-9a-f]{3,8})\.(?:b|\d+)", interface)
        if found and wanted(found[1]):
            with suppress(OSError):  # a pair goes with its namespace
                _run("ip", "link", "del", interface)


def _run(*command: str) -> None:
    """Raises OSError with what it says."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {' '.join((done.stderr or done.stdout).split())}")
