"""The data order: a permutation that is computed, not stored.

`shuffled(index, n, seed, epoch)` is a bijection of [0, n) for every (seed, epoch), evaluated at any index in constant time, so
that a run resumes anywhere, on any number of processes, with nothing saved but its position. It is a balanced Feistel network
over the smallest even number of bits that holds n, with cycle-walking for the values above n (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", CT-RSA 2002); the round function is a 64-bit finaliser (splitmix64, Steele et al. 2014).
"""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
_ROUNDS = 8
_SHARE_BITS = 40  # shares are fixed-point
_LOW_BITS = 22  # of a position, so that its products with a share fit in 63 bits: positions up to 2^44
LEAST_SHARE = 1e-9  # of all weights: what is below is drawn at another rate than asked for, or never


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


def shares(weights: Sequence[float]) -> list[list[int]]:
    """What decides a mixture, as a checkpoint keeps it: [source, its share of what the sources before it leave over, in units of 2^-40].

    Heavier sources come first: the error of a share is carried to the sources behind it, and is smallest in this order.
    """
    exact = [Fraction(weight) for weight in weights]
    heaviest_first = sorted(range(len(weights)), key=lambda k: -exact[k])
    return [[k, round(exact[k] / sum(exact[j] for j in heaviest_first[i:]) * (1 << _SHARE_BITS))] for i, k in enumerate(heaviest_first)]


def mixed(position: Int64s, shares: Sequence[Sequence[int]]) -> tuple[Int64s, Int64s]:
    """Which source each position draws from, and how many draws that source has had before: (source, count), both exact.

    Each source takes its share of the positions that the sources before it left over, as evenly as whole numbers allow (a Beatty
    sequence: a draw happens where p·share, rounded, steps), so every prefix of the stream has the mixture asked for: within half a
    draw for two sources, one for three, two for up to seven.
    """
    source = np.full_like(position, shares[-1][0])
    rest = position.copy()
    active = np.ones(position.shape, bool)
    for k, share in shares[:-1]:
        before = _portion(rest, share)
        takes = _portion(rest + 1, share) > before
        here, on = active & takes, active & ~takes
        source[here] = k
        rest = np.where(here, before, np.where(on, rest - before, rest))
        active = on
    return source, rest


def drawn(position: int, shares: Sequence[Sequence[int]]) -> list[int]:
    """How many of the first `position` draws each source has had."""
    rest, counts = np.array([position]), [0] * len(shares)
    for k, share in shares:
        counts[k] = int(_portion(rest, share)[0]) if k != shares[-1][0] else int(rest[0])
        rest = rest - counts[k]
    return counts


def _portion(n: Int64s, share: int) -> Int64s:
    """n·share / 2^40, rounded half up: exact in 64 bits, by halves."""
    high = (n >> _LOW_BITS) * share  # of 2^22 each
    low = (n & ((1 << _LOW_BITS) - 1)) * share + (1 << (_SHARE_BITS - 1))
    below = _SHARE_BITS - _LOW_BITS
    return (high >> below) + ((((high & ((1 << below) - 1)) << _LOW_BITS) + low) >> _SHARE_BITS)
