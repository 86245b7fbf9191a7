"""What is wrong with the machines: GPUs, limits, processors, network adapters. Pure functions of facts."""

from collections.abc import Iterator

from pretrain.doctor.facts import Facts
from pretrain.doctor.finding import GB, MB, Finding, Ranks, cores_of, gpus_of_nodes, listed, nodes_of, numbered, on

_OPEN_FILES, _SHM = 4096, GB
_FREE_GPU = 0.9  # of its memory


def gpus_unseen(ranks: Ranks) -> Iterator[Finding]:
    hidden = [
        rank for rank in ranks if rank.gpu_devices and not rank.gpus and not (rank.outlook.device == "cpu" and rank.outlook.device_asked)
    ]
    if not hidden:
        return
    rank, why = hidden[0], "the run would train on the CPU, a hundred times slower"
    what = f"{rank.gpu_devices} GPUs are there and torch sees none{on(hidden, ranks)}"
    if rank.environment.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1", "NoDevFiles"):
        yield Finding(
            "warning", f"{what}: CUDA_VISIBLE_DEVICES hides them", why, "unset CUDA_VISIBLE_DEVICES; under Slurm ask for --gpus-per-node"
        )
    elif "CUDA" not in rank.versions and "ROCm" not in rank.versions:
        installed = rank.versions.get("torch", "")
        yield Finding(
            "problem",
            f"{what}: torch {installed} is a build for CPUs",
            why,
            "install torch's CUDA build (pip install torch, from its own index)",
        )
    elif "SLURM_STEP_ID" in rank.environment and "SLURM_GPUS_ON_NODE" not in rank.environment:
        yield Finding("warning", f"{what}: this step asked for none (--gpus-per-node)", why, "srun --gpus-per-node=N, as the launch will")
    else:
        yield Finding(
            "problem",
            f"{what}: {rank.gpu_error or 'no reason given'}",
            why,
            f"see that nvidia-smi works and that the driver ({rank.versions.get('driver', 'unknown')}) is new enough for torch's CUDA {rank.versions.get('CUDA', '')}",
        )


def gpus_differ(ranks: Ranks) -> Iterator[Finding]:
    kinds: dict[tuple[str, int], list[str]] = {}
    for node, gpus in gpus_of_nodes(ranks).items():
        for gpu in gpus:
            kinds.setdefault((gpu.name, round(gpu.memory_bytes / GB)), []).append(node)
    if len(kinds) > 1:
        yield Finding(
            "warning",
            "GPUs differ: " + ", ".join(f"{name} ({memory} GB) on {listed(nodes)}" for (name, memory), nodes in kinds.items()),
            "every update waits for the slowest, and batch.micro must fit into the smallest",
            "ask for one kind (Slurm: --constraint or --gpus=TYPE:N)",
        )
    counts = {node: len(gpus) for node, gpus in gpus_of_nodes(ranks).items()}
    if len(set(counts.values())) > 1:
        yield Finding(
            "problem" if 0 in counts.values() else "warning",
            "numbers of GPUs differ: " + ", ".join(f"{count} on {node}" for node, count in counts.items()),
            "a launcher is told one number of processes for all nodes, and ranks with and without GPUs cannot form one group",
            "look at nvidia-smi on those that have fewer; leave them out (Slurm: --exclude)",
        )


def gpus_shared(ranks: Ranks) -> Iterator[Finding]:
    users: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        if rank.gpus and rank.outlook.device == "cuda":
            gpu = rank.gpus[rank.local_rank] if rank.local_rank < len(rank.gpus) else rank.gpus[0]
            users.setdefault((rank.node, gpu.uuid), []).append(rank.rank)
    if several := [f"{numbered(found)} on {node}" for (node, _), found in users.items() if len(found) > 1]:
        yield Finding(
            "problem",
            f"several ranks on one GPU: {', '.join(several)}",
            "NCCL refuses two ranks on one GPU",
            "start as many processes per node as it has GPUs (--num_processes, --nproc_per_node, Slurm's --gpus-per-node)",
        )


def gpus_taken(ranks: Ranks) -> Iterator[Finding]:
    full = {
        (rank.node, gpu.uuid): f"{gpu.free_bytes / GB:.1f} of {gpu.memory_bytes / GB:.1f} GB free on {rank.node}"
        for rank in ranks
        for gpu in rank.gpus
        if gpu.free_bytes is not None and gpu.free_bytes < _FREE_GPU * gpu.memory_bytes
    }
    if full:
        yield Finding(
            "warning",
            f"GPU memory is in use: {listed(full.values())}",
            "another process is there: the run gets less memory, and shares the arithmetic units",
            "nvidia-smi names it; end it, or choose other GPUs with CUDA_VISIBLE_DEVICES",
        )


def emulated_bf16(ranks: Ranks) -> Iterator[Finding]:
    slow = [rank for rank in ranks if rank.outlook.precision[0] == "bf16" and rank.outlook.device == "cpu" and not rank.amx]
    if slow:
        yield Finding(
            "warning",
            f"bf16 on a CPU without AMX{on(slow, ranks)}",
            "it is slower than fp32 there: 0.7 of its speed with AVX512_BF16, 0.02 with AVX2",
            "write run.precision=auto or fp32",
        )


def limits(ranks: Ranks) -> Iterator[Finding]:
    few = [rank for rank in ranks if rank.open_files is not None and rank.open_files < _OPEN_FILES]
    if few:
        yield Finding(
            "warning",
            f"only {min(rank.open_files or 0 for rank in few):,} files may be open{on(few, ranks)}",
            "shards, sockets to the other ranks and checkpoint files count together: 'Too many open files' comes in mid-run",
            f"ulimit -n {_OPEN_FILES} or more before the launch; for all users in /etc/security/limits.conf",
        )
    locked = [rank for rank in ranks if rank.infiniband and rank.locked_memory is not None]
    if locked:
        yield Finding(
            "problem" if len(nodes_of(ranks)) > 1 else "warning",
            f"locked memory is limited to {(locked[0].locked_memory or 0) / MB:,.1f} MB beside InfiniBand ({listed(locked[0].infiniband)}){on(locked, ranks)}",
            "NCCL registers its buffers with the adapter, and fails or falls back to TCP where it may not",
            "ulimit -l unlimited; Slurm: PropagateResourceLimitsExcept=MEMLOCK, and LimitMEMLOCK=infinity for slurmd",
        )
    several = [rank for rank in ranks if rank.gpus and rank.outlook.per_node > 1]
    why = "NCCL's ranks of one node talk through it: "
    if none := [rank for rank in several if rank.shm_free is None]:
        yield Finding(
            "problem",
            f"there is no /dev/shm for the {none[0].outlook.per_node} ranks of a node{on(none, ranks)}",
            f"{why}the first collective fails",
            "mount -t tmpfs tmpfs /dev/shm, or let the container have one",
        )
    if small := [rank for rank in several if rank.shm_free is not None and rank.shm_free < _SHM]:
        yield Finding(
            "warning",
            f"/dev/shm has {(small[0].shm_free or 0) / MB:,.0f} MB free for {small[0].outlook.per_node} ranks{on(small, ranks)}",
            f"{why}'No space left on device' as the first collective runs",
            "docker run --shm-size=8g (or --ipc=host); on a machine: remove what others left there, or mount -o remount,size=8G /dev/shm",
        )


def _threads(rank: Facts, cores: int, or_else: str = "") -> str:
    """How to have one for each of so many cores of a node."""
    each = max(1, cores // rank.outlook.per_node)
    export = f"export OMP_NUM_THREADS={each}{or_else}"
    if "SLURM_JOB_ID" not in rank.environment:
        return export
    return (
        f"sbatch --cpus-per-task, for {each} cores a process: slurm/train.sbatch sets OMP_NUM_THREADS to that, whatever it was; "
        f"in a launch of another kind {export}"
    )


def processors(ranks: Ranks) -> Iterator[Finding]:
    for node in nodes_of(ranks):
        here = [rank for rank in ranks if rank.node == node]
        rank, cores = here[0], cores_of(here)
        threads = rank.environment.get("OMP_NUM_THREADS", "")
        if threads.isdigit() and int(threads) * rank.outlook.per_node > cores:
            yield Finding(
                "warning",
                f"OMP_NUM_THREADS={threads} × {rank.outlook.per_node} ranks are more threads than the {cores} cores of {node}",
                "threads that wait for each other on busy cores are many times slower",
                _threads(rank, cores, ", or leave it unset"),
            )
            return
        if rank.cpu_quota is not None and rank.cpu_quota < 0.9 * cores:
            yield Finding(
                "warning",
                f"the container on {node} shows {cores} cores and gets the time of {rank.cpu_quota:g}",
                "as many threads as cores are started, and all stand still whenever the quota is used up",
                _threads(rank, int(rank.cpu_quota), ", or pin it (docker run --cpuset-cpus)"),
            )
            return


def processes_per_node(ranks: Ranks) -> Iterator[Finding]:
    counts = {node: sum(rank.node == node for rank in ranks) for node in nodes_of(ranks)}
    if len(set(counts.values())) > 1:
        yield Finding(
            "warning",
            "numbers of processes differ: " + ", ".join(f"{count} on {node}" for node, count in counts.items()),
            "hsdp's shards would cross nodes, and launchers start one number on each",
            "Slurm: --ntasks-per-node instead of --ntasks",
        )


def slurm_devices(ranks: Ranks) -> Iterator[Finding]:
    for node, gpus in gpus_of_nodes(ranks).items():
        allotted = next(rank for rank in ranks if rank.node == node).environment.get("SLURM_GPUS_ON_NODE", "")
        if allotted.isdigit() and len(gpus) < int(allotted):
            yield Finding(
                "warning",
                f"Slurm allotted {allotted} GPUs on {node} and torch sees {len(gpus)}",
                "the others stand idle, and are paid for",
                "see CUDA_VISIBLE_DEVICES, and --gpu-bind and --gpus-per-task of srun",
            )
            return


def slurm_processors(ranks: Ranks) -> Iterator[Finding]:
    for node in nodes_of(ranks):
        here = [rank for rank in ranks if rank.node == node]
        allotted, cores = here[0].environment.get("SLURM_CPUS_ON_NODE", ""), cores_of(here)
        if allotted.isdigit() and cores < int(allotted):
            tasks = len(here) if here[0].kind == "srun" else 1  # a launcher is one
            yield Finding(
                "warning",
                f"Slurm allotted {allotted} CPUs on {node}, and the step may run on {cores}",
                "since Slurm 22.05 srun does not take over --cpus-per-task from sbatch: loader, compiler and checkpoints share few cores",
                f"srun --cpus-per-task={max(1, int(allotted) // tasks)}; slurm/train.sbatch needs nothing, it takes all cores itself",
            )
            return
        if allotted.isdigit() and int(allotted) < cores and "OMP_NUM_THREADS" not in here[0].environment:
            yield Finding(
                "warning",
                f"Slurm allotted {allotted} CPUs on {node}, and the step may run on {cores}",
                "nothing binds it: as many threads are started as the node has cores, beside other jobs",
                _threads(here[0], int(allotted)),
            )
            return


def network_interfaces(ranks: Ranks) -> Iterator[Finding]:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for rank in ranks:
            wanted = rank.environment.get(variable, "")
            if not wanted or wanted[0] in "^=":
                continue
            whole = variable.startswith("GLOO")
            if not any(there == name if whole else there.startswith(name) for name in wanted.split(",") for there in rank.interfaces):
                yield Finding(
                    "problem",
                    f"{variable}={wanted}, and {rank.node} has no such network interface: {listed(rank.interfaces, 8)}",
                    f"{'gloo' if whole else 'NCCL'} finds no way to the other ranks",
                    f"export {variable}=NAME of one that every node has (ip -br address), or unset it",
                )
                break
