"""The data order: a permutation that is computed, not stored.

`shuffled(index, n, seed, epoch)` is a bijection of [0, n) for every (seed, epoch), evaluated at any index in constant time, so
that a run resumes anywhere, on any number of processes, with nothing saved but its position. It is a balanced Feistel network
over the smallest even number of bits that holds n, with cycle-walking for the values above n (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", CT-RSA 2002); the round function is a 64-bit finaliser (splitmix64, Steele et al. 2014).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
_ROUNDS = 8
_WEIGHT_BITS = 20  # weights are fixed-point; positions up to 2^43 windows stay exact in 64 bits


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffled(index: Int64s, n: int, seed: int, epoch: Int64s | int) -> Int64s:
    """index: any shape, values in [0, n); epoch: the same shape or a number. Returns values in [0, n)."""
    half = np.uint64(max(1, (max(n - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    with np.errstate(over="ignore"):
        start = np.asarray([seed & 0xFFFFFFFFFFFFFFFF], np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        keys = _mix(_mix(start) ^ np.asarray(epoch, np.int64).astype(np.uint64))
        keys = np.broadcast_to(keys, np.shape(index)).copy()
        value = np.asarray(index).astype(np.uint64)
        walking = np.ones(value.shape, bool)
        while walking.any():
            x, k = value[walking], keys[walking]
            left, right = x >> half, x & mask
            for r in range(_ROUNDS):
                left, right = (
                    right,
                    left ^ (_mix(right + k + np.uint64(r * 0x632BE59BD9B4E019 & 0xFFFFFFFFFFFFFFFF)) & mask),
                )
            value[walking] = (left << half) | right
            walking[walking] = value[walking] >= np.uint64(n)
    return value.astype(np.int64)


def mixed(position: Int64s, weights: Sequence[float]) -> tuple[Int64s, Int64s]:
    """Which source each position draws from, and how many draws that source has had before: (source, count), both exact.

    Source k takes its share of the positions that the sources before it left over, as evenly as whole numbers allow
    (a Beatty sequence: draw j happens where floor(p·w) steps), so every prefix of the stream has the mixture asked for.
    """
    source = np.zeros_like(position)
    rest = position.copy()
    active = np.ones(position.shape, bool)
    for k in range(len(weights) - 1):
        share = round(weights[k] / sum(weights[k:]) * (1 << _WEIGHT_BITS))
        before = rest * share >> _WEIGHT_BITS
        takes = ((rest + 1) * share >> _WEIGHT_BITS) > before
        here, on = active & takes, active & ~takes
        source[here] = k
        rest = np.where(here, before, np.where(on, rest - before, rest))
        active = on
    source[active] = len(weights) - 1
    return source, rest
