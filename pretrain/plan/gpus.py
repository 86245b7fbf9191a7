"""What GPUs have, by their makers' data sheets; peaks of arithmetic are `throughput.PEAKS`."""

import difflib
from dataclasses import dataclass

from pretrain.config import ConfigError
from pretrain.throughput import known_as

GB = 1e9


@dataclass(frozen=True)
class Gpu:
    """Bytes, and bytes a second each way. `network` is what the maker's own server gives each GPU between nodes."""

    known_as: str  # the row of PEAKS
    memory: float
    bandwidth: float  # of its memory
    link: float  # to the other GPUs of a node
    network: float  # to other nodes
    per_node: int
    attainable: float = 0.65  # of the peak, by large 16-bit matrix products; 0.65 where nobody told us
    bf16: bool = True


# Sources: the makers' data sheets of these names (memory, its bandwidth, NVLink, Infinity Fabric or PCIe, of which half goes each way) and
# of DGX B200, H200, H100, A100 and DGX-1, MI300X platforms (network). PCIe cards: 100 Gbit/s for a server of 8, or 10 for a desktop.
# `attainable` of A100 and H100 is what llm.c's published speeds come to, 60 % and 50 % MFU (karpathy/llm.c, discussions 481 and 677).
GPUS = {
    "b200-180gb": Gpu("B200", 180 * GB, 8000 * GB, 900 * GB, 50 * GB, 8),
    "h200-141gb": Gpu("H200", 141 * GB, 4800 * GB, 450 * GB, 50 * GB, 8, 0.62),
    "h100-80gb": Gpu("H100", 80 * GB, 3350 * GB, 450 * GB, 50 * GB, 8, 0.62),
    "h100-nvl-94gb": Gpu("H100 NVL", 94 * GB, 3900 * GB, 63 * GB, 1.6 * GB, 8),
    "h100-pcie-80gb": Gpu("H100 PCIe", 80 * GB, 2000 * GB, 63 * GB, 1.6 * GB, 8),
    "a100-80gb": Gpu("A100", 80 * GB, 2039 * GB, 300 * GB, 25 * GB, 8, 0.72),
    "a100-40gb": Gpu("A100", 40 * GB, 1555 * GB, 300 * GB, 25 * GB, 8, 0.72),
    "a100-pcie-80gb": Gpu("A100 PCIe", 80 * GB, 1935 * GB, 31.5 * GB, 1.6 * GB, 8, 0.72),
    "a100-pcie-40gb": Gpu("A100 PCIe", 40 * GB, 1555 * GB, 31.5 * GB, 1.6 * GB, 8, 0.72),
    "v100-32gb": Gpu("V100", 32 * GB, 900 * GB, 150 * GB, 6.25 * GB, 8, bf16=False),
    "v100-16gb": Gpu("V100", 16 * GB, 900 * GB, 150 * GB, 6.25 * GB, 8, bf16=False),
    "l40s-48gb": Gpu("L40S", 48 * GB, 864 * GB, 31.5 * GB, 1.6 * GB, 8),
    "l40-48gb": Gpu("L40", 48 * GB, 864 * GB, 31.5 * GB, 1.6 * GB, 8),
    "l4-24gb": Gpu("L4", 24 * GB, 300 * GB, 31.5 * GB, 1.6 * GB, 8),
    "rtx-4090-24gb": Gpu("RTX 4090", 24 * GB, 1008 * GB, 31.5 * GB, 1.25 * GB, 2),
    "rtx-3090-24gb": Gpu("RTX 3090", 24 * GB, 936 * GB, 31.5 * GB, 1.25 * GB, 2),
    "t4-16gb": Gpu("T4", 16 * GB, 320 * GB, 15.8 * GB, 1.6 * GB, 8, bf16=False),
    "mi300x-192gb": Gpu("MI300X", 192 * GB, 5300 * GB, 448 * GB, 50 * GB, 8),
}


def find(name: str) -> Gpu:
    """Raises ConfigError for one that is not here."""
    if name not in GPUS:
        close = difflib.get_close_matches(name, GPUS, n=1, cutoff=0.4)
        raise ConfigError(
            f"--gpu {name}: not in the table{f'; did you mean {close[0]}?' if close else ''} Known are {', '.join(GPUS)}; "
            "for another, measure here and give --measured FILE"
        )
    return GPUS[name]


def recognise(device_name: str, memory: float) -> Gpu | None:
    """By the name that CUDA reports, and of several with that name by the bytes."""
    known = known_as(device_name)
    return min((gpu for gpu in GPUS.values() if gpu.known_as == known), key=lambda gpu: abs(gpu.memory - memory), default=None)
