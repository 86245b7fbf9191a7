"""The data order: each window once for each epoch, another order for each epoch and seed, exact mixtures."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.order import LEAST_SHARE, _portion, drawn, mixed, shares, shuffled

GOLDEN = [
    [1, 0, 3, 13, 5, 6, 9, 10, 7, 2, 4, 11, 14, 8, 15, 12],
    [5, 10, 6, 7, 9, 1, 15, 13, 0, 3, 2, 14, 4, 12, 8, 11],
]
SEEDS = st.integers(-(2**63), 2**64 - 1)


def epoch_of(n: int, seed: int, epoch: int) -> list[int]:
    return shuffled(np.arange(n), n, seed, epoch).tolist()


@pytest.mark.parametrize("n", [*range(1, 70), 127, 128, 129, 255, 256, 257, 1000, 4095, 4096, 4097, 65537])
def test_every_window_once(n: int) -> None:
    for seed, epoch in ((0, 0), (1337, 1), (2**64 - 1, 2**40)):
        assert sorted(epoch_of(n, seed, epoch)) == list(range(n))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 2**40))
def test_every_window_once_for_any_seed(n: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_of(n, seed, epoch)) == list(range(n))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 2**40), seed=SEEDS, epoch=st.integers(0, 2**30), data=st.data())
def test_any_index_alone_is_as_in_company(n: int, seed: int, epoch: int, data: st.DataObject) -> None:
    """Resuming anywhere, on any number of processes: the value depends on nothing but index, seed and epoch."""
    indices = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=10, unique=True))
    together = shuffled(np.array(indices), n, seed, np.full(len(indices), epoch))
    assert together.dtype == np.int64
    assert ((together >= 0) & (together < n)).all()
    assert len(set(together.tolist())) == len(indices)
    assert [int(shuffled(np.array([index]), n, seed, epoch)[0]) for index in indices] == together.tolist()


def test_a_batch_may_straddle_epochs() -> None:
    n = 10
    positions = np.arange(7, 23)
    found = shuffled(positions % n, n, 1, positions // n).tolist()
    assert found == epoch_of(n, 1, 0)[7:] + epoch_of(n, 1, 1) + epoch_of(n, 1, 2)[:3]


def test_epochs_and_seeds_differ() -> None:
    n = 64
    orders = {(seed, epoch): tuple(epoch_of(n, seed, epoch)) for seed in range(20) for epoch in range(20)}
    assert len(set(orders.values())) == 400
    assert tuple(range(n)) not in orders.values()
    # Two orders that have nothing to do with each other agree in one place, on average.
    agreement = [sum(x == y for x, y in zip(orders[s, e], orders[s, e + 1], strict=True)) for s in range(20) for e in range(19)]
    assert 0.5 < sum(agreement) / len(agreement) < 1.5
    across = [sum(x == y for x, y in zip(orders[s, e], orders[s + 1, e], strict=True)) for s in range(19) for e in range(20)]
    assert 0.5 < sum(across) / len(across) < 1.5


def test_the_order_never_changes() -> None:
    """Runs of old must resume: these numbers are for ever."""
    assert epoch_of(16, 1337, 0) == GOLDEN[0]
    assert epoch_of(16, 1337, 1) == GOLDEN[1]


@pytest.mark.parametrize("seed", range(10))
def test_windows_of_all_files_are_mixed(seed: int) -> None:
    """Four files of one letter each, 16 windows in each: the first 16 windows come from at least three."""
    assert len(set(np.array(epoch_of(64, seed, 0)[:16]) // 16)) >= 3


def test_the_order_is_uniform() -> None:
    """Chi-squared of where each of 16 windows comes first, over 3,200 epochs: 15 degrees of freedom, 37.7 at one in a thousand."""
    first = Counter(int(shuffled(np.array([0]), 16, 7, epoch)[0]) for epoch in range(3200))
    assert sum((first[window] - 200) ** 2 / 200 for window in range(16)) < 37.7


WEIGHTS = st.lists(st.floats(0.001, 1000), min_size=1, max_size=7)


@settings(max_examples=100, deadline=None)
@given(weights=WEIGHTS, start=st.integers(0, 10_000), length=st.integers(1, 300))
def test_counts_are_those_of_the_whole_prefix(weights: list[float], start: int, length: int) -> None:
    """`count` says how often the source came before, from any position on."""
    mixture = shares(weights)
    source, count = mixed(np.arange(start + length), mixture)
    seen = [0] * len(weights)
    for k, n in zip(source.tolist(), count.tolist(), strict=True):
        assert n == seen[k]
        seen[k] += 1
    alone = mixed(np.arange(start, start + length), mixture)
    assert [part.tolist() for part in alone] == [source[start:].tolist(), count[start:].tolist()]
    assert drawn(start + length, mixture) == seen
    assert drawn(start, mixture) == np.bincount(source[:start], minlength=len(weights)).tolist()


@settings(max_examples=100, deadline=None)
@given(weights=WEIGHTS, length=st.integers(1, 5000))
def test_every_prefix_has_the_mixture_asked_for(weights: list[float], length: int) -> None:
    source, _ = mixed(np.arange(length), shares(weights))
    for k, weight in enumerate(weights):
        asked = np.arange(1, length + 1) * (weight / sum(weights))
        assert np.abs(np.cumsum(source == k) - asked).max() <= {1: 0, 2: 0.5, 3: 1}.get(len(weights), 2) + 1e-6


@settings(max_examples=100, deadline=None)
@given(weights=WEIGHTS, position=st.integers(0, 2**43))
def test_far_prefixes_have_it_too(weights: list[float], position: int) -> None:
    """Shares of 40 bits are off by half a draw in 2^40."""
    counts = drawn(position, shares(weights))
    assert sum(counts) == position
    total = sum(map(Fraction, weights))
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - position * Fraction(weight) / total) <= 2 + len(weights) * position / 2**41


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 10**8), min_size=1, max_size=7), epochs=st.integers(1, 100))
def test_mixed_by_size_all_sources_end_together(sizes: list[int], epochs: int) -> None:
    assert drawn(epochs * sum(sizes), shares([float(n) for n in sizes])) == [epochs * n for n in sizes]


def test_the_lightest_source_is_drawn_when_its_turn_comes() -> None:
    """A share of 20 bits made it nothing, and the others everything."""
    mixture = shares([LEAST_SHARE, 1, 1])
    first = round(0.5 * 2 / LEAST_SHARE)
    source, _ = mixed(np.arange(first - 10**6, first + 10**6), mixture)
    assert Counter(source.tolist())[0] == 1
    assert drawn(10 * first, mixture)[0] == pytest.approx(5, abs=1)


@settings(max_examples=100, deadline=None)
@given(n=st.integers(0, 2**44), share=st.integers(0, 2**40))
def test_portions_are_exact_in_64_bits(n: int, share: int) -> None:
    assert int(_portion(np.array([n]), share)[0]) == (n * share + 2**39) >> 40


def test_simple_mixtures() -> None:
    source, count = mixed(np.arange(8), shares([1, 1]))
    assert sorted(source[:2].tolist()) == [0, 1]
    assert Counter(source.tolist()) == {0: 4, 1: 4}
    source, count = mixed(np.arange(400), shares([3, 1]))
    assert Counter(source.tolist()) == {0: 300, 1: 100}
    assert mixed(np.arange(5), shares([2.0]))[1].tolist() == [0, 1, 2, 3, 4]
    assert count.max() == 299


def test_positions_beyond_32_bits_are_exact() -> None:
    """With 1:1, source 0 has had exactly half of the positions before an even one."""
    position = np.array([2**42, 2**42 + 1])
    source, count = mixed(position, shares([1, 1]))
    assert sorted(source.tolist()) == [0, 1]
    assert count.tolist() == [2**41, 2**41]


def test_the_mixture_never_changes() -> None:
    """Runs of old must resume: these numbers are for ever."""
    assert shares([1, 3.5, 0.25]) == [[1, 810166462572], [0, 879609302221], [2, 1099511627776]]
    assert mixed(np.arange(20), shares([1, 3.5, 0.25]))[0].tolist() == [1, 0, 1, 1, 1, 0, 1, 1, 1, 2, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1]
