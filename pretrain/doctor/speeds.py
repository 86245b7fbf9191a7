"""What is wrong with what the ranks share, and what they measured: folders, disks, all-reduce, clocks. Pure functions."""

from collections.abc import Iterator, Sequence

from pretrain.doctor.facts import Facts
from pretrain.doctor.finding import GB, MB, Finding, Ranks, first_of_nodes, listed, nodes_of, numbered, on
from pretrain.doctor.measurements import Measured

GPT2_PARAMETERS = 124_439_808  # what times are told for where no config says better
_BYTES_PER_PARAMETER = 12  # of a checkpoint: weights and two moments in fp32
_CLOCKS = 1.0  # seconds
_SLOW_RUN, _SLOW_DATA = 50 * MB, 10 * MB  # a second
_SLOW_SAVE = 5.0  # seconds


def run_folder(ranks: Ranks) -> Iterator[Finding]:
    runs = [(rank, folder) for rank in first_of_nodes(ranks) for folder in rank.folders if folder.role == "run"]
    if shut := [rank for rank, folder in runs if not folder.writable]:
        yield Finding(
            "problem",
            f"the folder of runs {runs[0][1].asked} cannot be written to{on(shut, ranks)}",
            "every rank writes its log there, the first its checkpoints and metrics",
            "choose another with run.dir, on a disk that all nodes share",
        )
    for rank, folder in [(rank, folder) for rank, folder in runs if folder.obstacle][:1]:
        yield Finding(
            "problem",
            f"the folder of runs {folder.asked} cannot be made: {folder.obstacle} is no folder{on([rank], ranks)}",
            "a launch would end before step 1",
            "move that away, or choose another run.dir",
        )
    rank, folder = min(runs, key=lambda run: run[1].free_bytes)
    one = (rank.outlook.parameters or GPT2_PARAMETERS) * _BYTES_PER_PARAMETER
    if folder.free_bytes < 3 * one:
        yield Finding(
            "problem" if folder.free_bytes < one else "warning",
            f"{folder.asked} has {folder.free_bytes / GB:.2f} GB free on {rank.node}; a checkpoint of {_model(rank)} takes {one / GB:.2f} GB",
            "the newest two are kept while the next is written: without room for three, saving fails in mid-run",
            "make room, choose another run.dir, or keep fewer with train.keep_last=1",
        )


def folders_differ(ranks: Ranks, measured: Sequence[Measured]) -> Iterator[Finding]:
    """Where nobody could look for a file of the first rank: a folder that all nodes share has one inode number, unless its file system is in
    user space and makes them up."""
    sees = {m.rank: m.sees_runs for m in measured}
    (first, here), *others = [(rank, folder) for rank in first_of_nodes(ranks) for folder in rank.folders if folder.role == "run"]
    for rank, there in others:
        same = sees.get(rank.rank)
        if same is None:
            same = (there.place, there.inode) == (here.place, here.inode) or "fuse" in here.filesystem
        if not same:
            yield Finding(
                "problem",
                f"the folder of runs {here.asked} on {rank.node} ({there.place}, {there.filesystem}) is not the one on {first.node} ({here.place}, {here.filesystem})",
                "every rank writes its share of a checkpoint into the run folder of the first: on another disk it would be lost",
                "choose a run.dir on a disk that all nodes share, and make it before the launch",
            )
            return


def collectives(ranks: Ranks, measured: Sequence[Measured]) -> Iterator[Finding]:
    failed = {m.rank: m.error for m in measured if m.error}
    loopback = [rank for rank in ranks if rank.address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in rank.environment]
    if failed:
        errors = dict.fromkeys(failed.values())
        hint = (
            f"; {loopback[0].node}'s name resolves to {loopback[0].address} there: export GLOO_SOCKET_IFNAME"
            if loopback and len(nodes_of(ranks)) > 1
            else ""
        )
        yield Finding(
            "problem",
            f"an all-reduce failed on {numbered(list(failed))}: {listed(errors)}",
            "a run's first collective would fail the same way",
            f"name the network with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, see that no firewall is between the nodes, and look with NCCL_DEBUG=INFO{hint}",
        )
    found = next((m.all_reduce for m in measured if m.all_reduce), None)
    if found is None or found.backend != "nccl":
        return
    least = GB if len(nodes_of(ranks)) > 1 else 5 * GB
    if found.bus_bandwidth < least:
        step = GPT2_PARAMETERS * 4 / found.algorithm_bandwidth
        yield Finding(
            "warning",
            f"the all-reduce between {found.ranks} GPUs has {found.bus_bandwidth / GB:.2f} GB/s on the bus",
            f"the gradients of GPT-2 124M take {step:.1f} s an update",
            "NCCL_DEBUG=INFO says which way NCCL takes (NET/IB, NET/Socket, P2P, SHM); NCCL_SOCKET_IFNAME chooses the network; "
            "strategy.name=diloco or ddp_powersgd sends less",
        )


def clocks(ranks: Ranks, measured: Sequence[Measured]) -> Iterator[Finding]:
    offsets = {m.rank: m.clock_offset for m in measured if m.clock_offset is not None}
    if not offsets:
        return
    first, last = min(offsets, key=lambda r: offsets[r]), max(offsets, key=lambda r: offsets[r])
    apart = offsets[last] - offsets[first]
    if apart > _CLOCKS:
        node = {rank.rank: rank.node for rank in ranks}
        yield Finding(
            "warning",
            f"clocks are {apart:.1f} s apart: {node.get(last)} is ahead of {node.get(first)}",
            "times in logs and metrics do not compare between nodes, and a time limit ends at another moment than Slurm's",
            "run chrony or ntpd on every node (timedatectl says whether one does)",
        )


def disks(ranks: Ranks, measured: Sequence[Measured]) -> Iterator[Finding]:
    node = {rank.rank: rank.node for rank in ranks}
    roles = {folder.asked: folder.role for rank in ranks for folder in rank.folders}
    one = (ranks[0].outlook.parameters or GPT2_PARAMETERS) * _BYTES_PER_PARAMETER
    for asked, role in roles.items():
        speeds = [(m.rank, m.disks[asked]) for m in measured if asked in m.disks]
        for error in dict.fromkeys(speed.error for _, speed in speeds if speed.error):
            there = [rank for rank in ranks if any(rank.rank == r and speed.error == error for r, speed in speeds)]
            yield Finding(
                "problem",
                f"{asked}{on(there, ranks)}: {error}",
                "the run would meet the same error",
                "mend or mount the disk, or choose another folder (run.dir, data.train)",
            )
        write, writer = min(((s.write, r) for r, s in speeds if s.write is not None), default=(None, 0))
        if write is not None and write < _SLOW_RUN and one / write > _SLOW_SAVE:
            yield Finding(
                "warning",
                f"{asked} is written to at {write / MB:.1f} MB/s on {node.get(writer)}",
                f"a checkpoint of {_model(ranks[0])} ({one / GB:.2f} GB) takes {one / write:.0f} s",
                "choose a run.dir on a faster disk, or a larger train.checkpoint_every; time limits allow for what saving takes",
            )
        read, reader = min(((s.read, r) for r, s in speeds if s.read is not None), default=(None, 0))
        if role == "data" and read is not None and read < _SLOW_DATA:
            yield Finding(
                "warning",
                f"{asked} is read at {read / MB:.1f} MB/s on {node.get(reader)}",
                "windows are read in a new order every epoch, from all over the files: slower still",
                "copy the set to a disk of the node with data.stage_to",
            )


def _model(rank: Facts) -> str:
    return f"these {rank.outlook.parameters / 1e6:.1f}M parameters" if rank.outlook.parameters else "GPT-2 124M"
