"""Which windows each rank is given: every one once, in the same global order for any layout, at any position, at no cost."""

import json
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain import config as configs
from pretrain import loader as subject
from pretrain.config import ConfigError, Layout
from pretrain.loader import IGNORED, Loader, evaluation_batches, open_sets
from pretrain.order import shares
from pretrain.shards import TokenStream, open_split
from pretrain.token_files import HEADER, open_shard

T = 16
CPU = torch.device("cpu")
Loaders = Callable[..., Loader]


class NumberedStream:
    """Window k is k, T times; the window's target of its last token is k + 1."""

    def __init__(self, windows: int) -> None:
        self.tokens = windows * T + 1
        self.reads: list[tuple[int, int]] = []
        self.fingerprint, self.manifest, self.name = "numbered", None, "numbered"

    def windows(self, T: int) -> int:
        return (self.tokens - 1) // T

    def read(self, start: int, length: int) -> np.ndarray:
        self.reads.append((start, length))
        return np.arange(start, start + length) // T

    def where(self, token: int) -> str:
        return f"numbered, token {token}"


class LetteredStream(NumberedStream):
    """The same, and which of several streams it is: 1000 · letter + window."""

    def __init__(self, windows: int, letter: int) -> None:
        super().__init__(windows)
        self.letter = letter

    def read(self, start: int, length: int) -> np.ndarray:
        return super().read(start, length) + 1000 * self.letter


def layout(world: int = 1, micro: int = 2, accumulation: int = 2, last: int | None = None) -> Layout:
    return Layout(world, micro, accumulation, T, 10**9, last)


@pytest.fixture
def loaders() -> Any:
    """Makes loaders, and closes them."""
    made: list[Loader] = []

    def make(streams: Sequence[Any], L: Layout, rank: int = 0, seed: int = 7, shuffle: bool = True, vocab_size: int = 10**9,
             weights: Sequence[float] | None = None) -> Loader:  # fmt: skip
        made.append(
            Loader(
                streams,
                shares(weights or [1.0] * len(streams)),
                L,
                rank=rank,
                seed=seed,
                shuffle=shuffle,
                vocab_size=vocab_size,
                device=CPU,
            )
        )
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def served(loaders: Loaders, windows: int, L: Layout, updates: int, start: int = 0, **more: Any) -> list[list[int]]:
    """Per update, the windows that all ranks were given together, in the order (rank, micro-batch, row); −1 for a row of padding."""
    ranks = [loaders([NumberedStream(windows)], L, rank, **more) for rank in range(L.world_size)]
    found = []
    for _ in range(updates):
        batches = [loader.global_batch(start) for loader in ranks]
        assert len({batch.windows_hash for batch in batches}) == 1
        assert {(batch.start, batch.stop) for batch in batches} == {(start, batches[0].stop)}
        update = []
        for batch in batches:
            for a, micro in enumerate(batch.micros):
                assert micro.inputs.shape == micro.targets.shape == (L.micro, T)
                assert micro.last == (a == L.accumulation - 1)
                update += [int(x[0]) if y[0] != IGNORED else -1 for x, y in zip(micro.inputs, micro.targets, strict=True)]
        assert batches[0].tokens == T * sum(window >= 0 for window in update)
        found.append(update)
        start = batches[0].stop
    return found


def flat(updates: list[list[int]]) -> list[int]:
    return [window for update in updates for window in update]


@pytest.mark.parametrize("L", [layout(1, 8, 1), layout(1, 2, 4), layout(2, 2, 2), layout(2, 4, 1), layout(4, 1, 2), layout(4, 2, 1)])
def test_every_window_once_per_epoch_in_the_same_updates_for_any_layout(loaders: Loaders, L: Layout) -> None:
    """Nothing twice, nothing on two ranks, nothing left out; and update k holds the same windows, in the same order."""
    updates = served(loaders, 64, L, 8)
    assert sorted(flat(updates)) == list(range(64))
    assert updates == served(loaders, 64, layout(1, 1, 8), 8)


def test_another_order_in_every_epoch_and_the_same_ones_again(loaders: Loaders) -> None:
    L = layout(2, 4, 1)
    order = flat(served(loaders, 64, L, 24))
    epochs = [order[k * 64 : (k + 1) * 64] for k in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(64))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert list(range(64)) not in epochs
    assert flat(served(loaders, 64, L, 24)) == order
    assert flat(served(loaders, 64, L, 24, seed=8)) != order


def test_windows_of_all_files_are_mixed_and_file_order_is_file_order(loaders: Loaders) -> None:
    """Four files of 16 windows: the first 16 windows come from at least three of them; with shuffle off, from the first."""
    assert len({window // 16 for window in flat(served(loaders, 64, layout(), 4))}) >= 3
    assert flat(served(loaders, 64, layout(2, 2, 1), 48, shuffle=False)) == [*range(64), *range(64), *range(64)]


def test_a_batch_straddles_epochs(loaders: Loaders) -> None:
    """10 windows, 4 per update: the third update ends the first epoch and begins the second."""
    order = flat(served(loaders, 10, layout(2, 2, 1), 5))
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))


@pytest.mark.parametrize("L", [layout(1, 3, 2, last=10), layout(2, 3, 1, last=10), layout(3, 1, 2, last=10), layout(6, 1, 1, last=10)])
def test_the_last_update_may_be_short_and_repeats_nothing(loaders: Loaders, L: Layout) -> None:
    """10 windows in updates of 6: the second has 4, on every rank the same number of micro-batches, and its targets say so."""
    first, second = served(loaders, 10, L, 2)
    assert sorted(window for window in first + second if window >= 0) == list(range(10))
    assert second[4:] == [-1, -1]
    assert -1 not in first
    loader = loaders([NumberedStream(10)], L)
    assert loader.global_batch(6).tokens == 4 * T
    assert loader.global_batch(6).stop == 10


@pytest.mark.parametrize("position", [4, 36, 64, 100, 7 * 64 + 12])
@pytest.mark.parametrize("shuffle", [True, False])
def test_resuming_at_a_position_goes_on_as_if_never_stopped(loaders: Loaders, position: int, shuffle: bool) -> None:
    """In any epoch, on any layout; positions count windows, whatever the accumulation."""
    whole = served(loaders, 64, layout(1, 1, 4), 125, shuffle=shuffle)
    for L in (layout(1, 2, 2), layout(2, 2, 1), layout(4, 1, 1)):
        assert served(loaders, 64, L, 5, start=position, shuffle=shuffle) == whole[position // 4 : position // 4 + 5]


def test_only_the_windows_of_the_batch_and_of_the_next_are_read(loaders: Loaders) -> None:
    """Resuming deep inside a run reads nothing of what came before."""
    stream = NumberedStream(200_000)
    loader = loaders([stream], layout(1, 2, 2))
    batch = loader.global_batch(90_000)
    loader.close()
    assert 4 <= len(stream.reads) <= 8  # closing may come before the next batch was begun
    assert {length for _, length in stream.reads} == {T + 1}
    wanted = loader.window_ids(np.arange(90_000, 90_008))[1].tolist()
    assert [start // T for start, _ in stream.reads] == wanted[: len(stream.reads)]
    assert (batch.start, batch.stop) == (90_000, 90_004)


def test_a_rank_reads_its_own_windows_alone(loaders: Loaders) -> None:
    streams = [NumberedStream(64) for _ in range(4)]
    for rank, stream in enumerate(streams):
        loader = loaders([stream], layout(4, 2, 1), rank)
        loader.global_batch(0)
        loader.close()
    counts = Counter(start // T for stream in streams for start, _ in stream.reads)
    assert max(counts.values()) == 1
    assert set(loader.window_ids(np.arange(8))[1].tolist()) <= set(counts) <= set(loader.window_ids(np.arange(16))[1].tolist())


def test_the_next_batch_is_read_while_this_one_is_trained_on(loaders: Loaders) -> None:
    reading_next = threading.Event()

    class Announcing(NumberedStream):
        def read(self, start: int, length: int) -> np.ndarray:
            if len(self.reads) == 4:
                reading_next.set()
            return super().read(start, length)

    stream = Announcing(64)
    loader = loaders([stream], layout(1, 2, 2))
    loader.global_batch(0)
    assert reading_next.wait(30), "nobody asked for the second batch, and it is being read all the same"
    before = len(stream.reads)
    loader.global_batch(4)
    loader.close()
    assert len(stream.reads) <= 12
    assert before >= 4


def test_inputs_and_targets_are_one_token_apart(loaders: Loaders, make_set: Callable[..., Path]) -> None:
    """End of text inside a window is a target like any other, and windows run across documents and files."""
    tokens = np.array([5, 6, 0, 7] * 20 + [9])
    stream = open_split(make_set("documents", tokens, shard_tokens=13), "train")
    assert len(stream.shards) == 7
    loader = loaders([stream], layout(1, 5, 1), shuffle=False, vocab_size=50)
    batch = loader.global_batch(0)
    (micro,) = batch.micros
    assert micro.inputs.flatten().tolist() == tokens[:80].tolist()
    assert micro.targets.flatten().tolist() == tokens[1:81].tolist()
    assert batch.tokens == int((micro.targets != IGNORED).sum()) == 80
    assert (micro.targets == 0).sum() == 20
    assert micro.inputs.is_contiguous()
    assert micro.targets.is_contiguous()


def test_all_tokens_but_a_remainder_below_one_window_are_used(loaders: Loaders, make_set: Callable[..., Path]) -> None:
    """Two files of 100 tokens are one stream of 200: 12 windows of 16, 7 unused, none lost at the border."""
    stream = open_split(make_set("two", np.arange(200), vocab_size=256, shard_tokens=100), "train")
    assert stream.windows(T) == 12
    loader = loaders([stream], layout(4, 1, 1), vocab_size=256)
    starts = [rank.global_batch(position).micros[0].inputs[0, 0].item()
              for position in (0, 4, 8) for rank in [loaders([stream], layout(4, 1, 1), r, vocab_size=256) for r in range(4)]]  # fmt: skip
    assert sorted(starts) == list(range(0, 192, 16))
    loader.close()


@settings(max_examples=25, deadline=None)
@given(weights=st.lists(st.floats(0.1, 10), min_size=2, max_size=4), sizes=st.lists(st.integers(3, 40), min_size=4, max_size=4))
def test_a_mixture_holds_its_shares_and_each_source_its_epochs(weights: list[float], sizes: list[int]) -> None:
    streams: list[Any] = [NumberedStream(n) for n in sizes[: len(weights)]]
    loader = Loader(streams, shares(weights), layout(), rank=0, seed=3, shuffle=True, vocab_size=10**9, device=CPU)
    source, window = loader.window_ids(np.arange(600))
    loader.close()
    for k, stream in enumerate(streams):
        drawn = window[source == k].tolist()
        assert abs(len(drawn) - 600 * weights[k] / sum(weights)) < 2
        n = stream.windows(T)
        for epoch in range(len(drawn) // n):
            assert sorted(drawn[epoch * n : (epoch + 1) * n]) == list(range(n))


@settings(max_examples=15, deadline=None)
@given(weights=st.lists(st.floats(0.1, 10), min_size=2, max_size=4), start=st.integers(0, 200))
def test_a_mixture_is_the_same_for_any_layout(weights: list[float], start: int) -> None:
    """From any position on, each rank's windows: set by set, in the same order over (rank, micro-batch, row)."""
    found = []
    for L in (layout(1, 1, 8), layout(2, 2, 2), layout(4, 2, 1)):
        order: list[int] = []
        for rank in range(L.world_size):
            streams: list[Any] = [LetteredStream(5 + 3 * k, k) for k in range(len(weights))]
            loader = Loader(streams, shares(weights), L, rank=rank, seed=3, shuffle=True, vocab_size=10**9, device=CPU)
            order += [int(row[0]) for micro in loader.global_batch(start) for row in micro.inputs]
            loader.close()
        found.append(order)
    assert found[0] == found[1] == found[2]


def test_a_token_outside_the_vocabulary_is_named_with_its_file(loaders: Loaders, make_set: Callable[..., Path]) -> None:
    tokens = np.arange(49, -1, -1)
    tokens[30] = 52
    stream = open_split(make_set("wide", tokens, vocab_size=60, shard_tokens=20), "train")
    said = r"train_000001\.bin, token 10: token id 52 does not fit model\.vocab_size=50; write model\.vocab_size=53 or more"
    with pytest.raises(ConfigError, match=said):
        loaders([stream], layout(1, 3, 1), vocab_size=50).global_batch(0)
    with pytest.raises(ConfigError, match=said):
        list(evaluation_batches(stream, T, 1, stream.windows(T), 0, 1, 50, CPU))


def test_billions_of_tokens_in_sparse_files(loaders: Loaders, tmp_path: Path) -> None:
    """3 × 1.2e9 tokens: counts and offsets beyond 32 bits, and the last window of the last file."""
    for k in range(3):
        path = tmp_path / f"big_train_{k:06d}.bin"
        header = np.zeros(HEADER, "<i4")
        header[:3] = 20240520, 1, 1_200_000_000
        with open(path, "wb") as f:
            f.write(header.tobytes())
            f.truncate(4 * HEADER + 2_400_000_000)
            if k == 2:
                f.seek(-2 * (T + 1), 2)
                f.write(np.arange(100, 100 + T + 1, dtype="<u2").tobytes())
    stream = TokenStream([open_shard(p) for p in sorted(tmp_path.glob("*.bin"))], "sparse", None, "sparse")
    assert stream.tokens == 3_600_000_000
    tail = stream.read(3_600_000_000 - (T + 1), T + 1)
    assert tail.tolist() == list(range(100, 100 + T + 1))
    windows = stream.windows(T)
    assert windows == 224_999_999
    loader = loaders([stream], layout(1, 1, 1), shuffle=False, vocab_size=200)
    (micro,) = loader.global_batch(windows - 1).micros
    assert micro.targets[0, -1] == tail[1]  # the 15 tokens after it are less than a window
    assert micro.inputs[0, 0] == 0
    far = loaders([stream], layout(1, 1, 1), vocab_size=200).global_batch(1000 * windows + 12345)
    assert far.start == 1000 * windows + 12345


def test_memory_does_not_grow_with_what_has_been_read(loaders: Loaders) -> None:
    loader = loaders([NumberedStream(10**6)], layout(1, 2, 2))
    loader.streams[0].reads = type("Forgetful", (), {"append": lambda self, item: None})()  # type: ignore[attr-defined]
    position = 0
    for _ in range(50):
        position = loader.global_batch(position).stop
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(500):
        position = loader.global_batch(position).stop
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 20_000  # 500 batches of 4 × 17 int64 would be 272,000


def load(path: Path, *overrides: str) -> configs.Config:
    return configs.load(path, overrides)


def test_sets_that_do_not_fit_are_refused(make_set: Callable[..., Path], config: Callable[..., Path]) -> None:
    noise = np.random.default_rng(0).integers(0, 50, 401)
    good = make_set("good", noise, noise)
    short = make_set("short", noise[:17], noise[:16])
    other = make_set("other", noise, noise, tokenizer="another")
    base = config({"data.train": good})
    assert open_sets(load(base, "train.eval_every=1")).eval_windows == [25]
    assert open_sets(load(base)).val == []
    with pytest.raises(ConfigError, match=r"short \(val\) has 16 tokens, too few for one window of data.sequence_length=16 and its target"):
        open_sets(load(base, f"data.val={short}", "train.eval_every=1"))
    assert open_sets(load(base, f"data.train={short}")).windows_per_epoch == 1
    with pytest.raises(ConfigError, match="one model needs one tokenizer"):
        open_sets(load(base, f"data.val={other}", "train.eval_every=1"))
    with pytest.raises(ConfigError, match=r"model\.vocab_size=40 is smaller than the tokenizer's 50"):
        open_sets(load(base, "model.vocab_size=40"))
    with pytest.raises(ConfigError, match=r"train\.eval_tokens=8.*from 16"):
        open_sets(load(base, "train.eval_every=1", "train.eval_tokens=8"))


def mix(*sources: Any) -> str:
    listed = [{"path": str(path), "weight": weight} for path, weight in sources]
    return f"data.train={json.dumps(listed)}"


def test_mixtures_that_cannot_be_are_refused(make_set: Callable[..., Path], config: Callable[..., Path]) -> None:
    draw = np.random.default_rng(0)
    a, b = (make_set(name, draw.integers(0, 50, 401), draw.integers(0, 50, n)) for name, n in (("a", 401), ("b", 40)))
    base = config({"data.train": a})
    with pytest.raises(ConfigError, match=r"data\.train: .*a \(train\) and .*a \(train\) are the same data; list it once"):
        open_sets(load(base, mix((a, 1), (b, 1), (a, 3))))
    with pytest.raises(ConfigError, match=r"b \(train\) has weight 1e-10 of 1, less than one window in 1,000,000,000"):
        open_sets(load(base, mix((a, 1), (b, 1e-10))))


def test_sets_are_mixed_by_size_unless_told_and_named_by_what_tells_them_apart(
    make_set: Callable[..., Path], config: Callable[..., Path], tmp_path: Path
) -> None:
    """300 windows and 100; the validation splits have 25 and 5, of which a fifth is asked for."""
    draw = np.random.default_rng(0)
    a = make_set("a", draw.integers(0, 50, 300 * T + 1), draw.integers(0, 50, 25 * T + 1))
    b = make_set("b", draw.integers(0, 50, 100 * T + 9), draw.integers(0, 50, 5 * T + 1))
    base = config({"data.train": a})
    sets = open_sets(load(base, f"data.train=[{a},{b}]", "train.eval_every=1", f"train.eval_tokens={6 * T}"))
    assert sets.shares == shares([3, 1])
    assert (sets.windows_per_epoch, sets.eval_windows, sets.names) == (400, [5, 1], ["a", "b"])
    assert sets.mixture(400) == {"tokens/a": 300 * T, "tokens/b": 100 * T, "epoch/a": 1.0, "epoch/b": 1.0}
    assert open_sets(load(base, f"data.train=[{a},{b}]", "train.eval_every=1", f"train.eval_tokens={T}")).eval_windows == [1, 1]
    told = open_sets(load(base, mix((a, 1), (b, 1))))
    assert told.mixture(400) == {"tokens/a": 200 * T, "tokens/b": 200 * T, "epoch/a": 200 / 300, "epoch/b": 2.0}
    assert told.mixture(100, [[20, 40], [90, 110]])["tokens/a"] == (50 - 10 - 5) * T
    assert told.describe_mixture(400) == ["mixture by tokens: a 50.00% (0.67 epochs), b 50.00% (2.00 epochs)"]
    assert open_sets(load(base)).mixture(400) == {}
    (tmp_path / "more").mkdir()
    b.rename(tmp_path / "more/a")
    assert open_sets(load(base, f"data.train=[{a},{tmp_path}/more/a]")).names == [str(a), f"{tmp_path}/more/a"]


def test_training_files_cannot_validate(make_set: Callable[..., Path], config: Callable[..., Path]) -> None:
    folder = make_set("both", np.arange(400) % 50)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["val"] = manifest["files"]["train"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="would validate on files that are trained on"):
        open_sets(load(config({"data.train": folder}), "train.eval_every=1"))


@pytest.mark.parametrize("windows", [1, 3, 5, 8])
@pytest.mark.parametrize(("world", "micro"), [(1, 1), (1, 3), (2, 1), (2, 2), (4, 2)])
def test_evaluation_deals_fixed_windows_evenly(windows: int, world: int, micro: int) -> None:
    """The first windows in file order, each once over all ranks; the same number of batches on every rank."""
    stream: Any = NumberedStream(9)
    by_rank = [list(evaluation_batches(stream, T, micro, windows, rank, world, 50, CPU)) for rank in range(world)]
    assert {len(batches) for batches in by_rank} == {-(-windows // (micro * world))}
    seen = Counter(int(x[0]) for batches in by_rank for inputs, targets in batches
                   for x, y in zip(inputs, targets, strict=True) if y[0] != IGNORED)  # fmt: skip
    assert seen == Counter(range(windows))


def test_the_ledgers_hash_tells_windows_apart(loaders: Loaders) -> None:
    hashes = [loaders([NumberedStream(64)], layout()).global_batch(position).windows_hash for position in (0, 4, 0)]
    assert hashes[0] == hashes[2] != hashes[1]
    assert torch.nn.functional.cross_entropy.__defaults__[2] == subject.IGNORED  # type: ignore[index]
