"""The order of epochs, mixtures and ranks, as mathematics."""

from __future__ import annotations

import numpy as np
import pytest

from data.ground.errors import DataError
from data.keyed_random import derive_seed
from data.order import EpochOrder, Mixture, integer_weights, interleave, rank_share, sample_rng, tempered_weights

# Shards of very different lengths, with short last chunks and one single sample.
CHUNKS = [[8, 8, 8, 3], [8], [1], [8] * 11 + [5], [2, 2], [8, 7]]
N = sum(map(sum, CHUNKS))


def whole_epoch(order: EpochOrder, epoch: int = 0) -> np.ndarray:
    return order.locate(epoch, np.arange(order.num_samples))


@pytest.mark.parametrize(("shuffle_shards", "shuffle_chunks"), [(16, 64), (2, 3), (1, 1), (3, 100)])
def test_every_epoch_is_a_permutation(shuffle_shards, shuffle_chunks):
    order = EpochOrder(CHUNKS, 5, shuffle_shards=shuffle_shards, shuffle_chunks=shuffle_chunks)
    for epoch in range(4):
        assert sorted(whole_epoch(order, epoch)) == list(range(N))


def test_order_depends_on_seed_epoch_and_source_and_on_nothing_else():
    first = whole_epoch(EpochOrder(CHUNKS, 5))
    assert (first == whole_epoch(EpochOrder(CHUNKS, 5))).all()
    for other in (
        whole_epoch(EpochOrder(CHUNKS, 6)),
        whole_epoch(EpochOrder(CHUNKS, 5), epoch=1),
        whole_epoch(EpochOrder(CHUNKS, 5, source=1)),
        np.arange(N),
    ):
        assert (first == other).mean() < 0.2


def test_any_positions_in_any_order_of_calls_give_the_same_answer():
    order = EpochOrder(CHUNKS, 5, shuffle_shards=2, shuffle_chunks=2)
    expected = {epoch: whole_epoch(order, epoch) for epoch in range(5)}
    rng = np.random.default_rng(0)
    for _ in range(50):
        epoch = int(rng.integers(5))
        positions = rng.integers(0, N, size=7)
        assert (order.locate(epoch, positions) == expected[epoch][positions]).all()


def test_without_shuffling_the_order_is_that_on_disk():
    assert (whole_epoch(EpochOrder(CHUNKS, 5, shuffle=False), epoch=3) == np.arange(N)).all()


def test_windows_bound_how_far_samples_travel():
    # 40 shards of 4 chunks of 8: a group is 2 shards = 64 samples, a window 2 chunks = 16 samples.
    order = EpochOrder([[8] * 4] * 40, 1, shuffle_shards=2, shuffle_chunks=2)
    epoch = whole_epoch(order)
    for start in range(0, len(epoch), 64):
        assert len(np.unique(epoch[start : start + 64] // 32)) == 2  # shards
    for start in range(0, len(epoch), 16):
        assert len(np.unique(epoch[start : start + 16] // 8)) == 2  # chunks
    # Negative control: wide windows mix more chunks.
    wide = whole_epoch(EpochOrder([[8] * 4] * 40, 1))
    assert len(np.unique(wide[:16] // 8)) > 2


def test_a_deep_position_needs_no_work_in_proportion_to_the_samples(monkeypatch):
    drawn: list[int] = []

    class Counted(np.random.Philox):
        def random_raw(self, count):
            drawn.append(count)
            return super().random_raw(count)

    monkeypatch.setattr(np.random, "Philox", Counted)
    order = EpochOrder([[1000] * 100] * 50, 9)  # 5 M samples, 5,000 chunks
    order.locate(3, np.arange(4_000_000, 4_000_256))
    assert 50 + 5_000 < sum(drawn) <= 50 + 5_000 + 2 * 64 * 1000


def test_permutations_are_uniform_enough():
    # Each sample's place over many epochs: the mean of N uniform places.
    order = EpochOrder([[4]] * 16, 2)
    places = np.array([np.argsort(whole_epoch(order, epoch)) for epoch in range(400)])  # [epochs, samples]
    assert np.abs(places.mean(axis=0) - 31.5).max() < 5 * 18.5 / 20


def test_the_streams_of_random_words_are_pinned():
    # Old checkpoints must find their place again with every version of numpy.
    assert sample_rng(1, 2, 3, 4).bit_generator.random_raw(2).tolist() == [13850428009028127771, 5307706367350363571]
    assert whole_epoch(EpochOrder(CHUNKS, 5))[:8].tolist() == [12, 118, 67, 143, 50, 46, 33, 38]


def test_seeds_made_of_keys_are_pinned():
    """A resumed run must draw the dropout masks that it would have drawn."""
    assert [derive_seed(7, 3, 1), derive_seed(0), derive_seed(-1)] == [
        6665335680343557524,
        7896617691693857887,
        6295558014972089990,
    ]
    assert derive_seed(1, 2) != derive_seed(2, 1)


def test_sample_draws_differ_by_every_key():
    keys = [(1, 2, 3, 4), (2, 2, 3, 4), (1, 3, 3, 4), (1, 2, 4, 4), (1, 2, 3, 5)]
    draws = {sample_rng(*key).integers(2**62) for key in keys}
    assert len(draws) == len(keys)
    assert sample_rng(*keys[0]).integers(2**62) in draws


def test_bad_orders_are_refused():
    with pytest.raises(DataError, match="no samples"):
        EpochOrder([[], [0]], 1)
    with pytest.raises(DataError, match="shuffle=False"):
        EpochOrder(CHUNKS, 1, shuffle_chunks=0)
    with pytest.raises(DataError, match="seed -1"):
        EpochOrder(CHUNKS, -1).locate(0, np.arange(1))


@pytest.mark.parametrize("weights", [[1], [3, 1], [1, 1, 8], [5, 7, 2, 1]])
def test_every_cycle_holds_exactly_the_weights_evenly_spread(weights):
    mixture = Mixture(weights)
    cycle = sum(weights)
    sources, _ = mixture.locate(np.arange(6 * cycle))
    for start in range(0, len(sources), cycle):
        assert np.bincount(sources[start : start + cycle], minlength=len(weights)).tolist() == weights
    for source, weight in enumerate(weights):
        taken = np.cumsum(sources == source)
        ideal = np.arange(1, len(sources) + 1) * weight / cycle
        assert np.abs(taken - ideal).max() <= len(weights) / 2 + 0.5


def test_each_source_of_a_mixture_is_read_in_sequence():
    mixture = Mixture([5, 2, 1])
    sources, indices = mixture.locate(np.arange(1000))
    for source in range(3):
        assert (indices[sources == source] == np.arange((sources == source).sum())).all()
    far, far_index = mixture.locate(np.arange(8 * 10**12, 8 * 10**12 + 8))
    assert (far == sources[:8]).all()
    assert far_index[far == 2].tolist() == [10**12]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([2, 4], [1, 2]),
        ([0.7, 0.3], [7, 3]),
        ([3.0, 1.0], [3, 1]),
        ([1 / 3, 2 / 3], [1, 2]),
        ([0.5], [1]),
        ([270_896, 314_315], [270_896, 314_315]),
        ([10**9, 1], [99_999, 1]),
    ],
)
def test_weights_become_the_integers_of_a_cycle(weights, expected):
    assert integer_weights(weights) == expected


def test_weights_that_fit_no_short_cycle_are_rounded():
    rounded = np.array(integer_weights([2**0.5, 1, 0.1]))
    exact = np.array([2**0.5, 1, 0.1]) / (2**0.5 + 1.1)
    assert np.abs(rounded / rounded.sum() - exact).max() < 1e-5
    for bad in ([0, 1], [-1, 2], [float("nan"), 1], [float("inf"), 1]):
        with pytest.raises(DataError, match="positive number"):
            integer_weights(bad)


def test_interleave_breaks_ties_by_source():
    assert interleave([1, 1, 1]).tolist() == [0, 1, 2]
    assert interleave([3, 1]).tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 6, 12, 17])
@pytest.mark.parametrize("batch_size", [1, 7, 12])
def test_ranks_share_a_batch_without_overlap(world_size, batch_size):
    shares = [rank_share(60, batch_size=batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert np.concatenate(shares).tolist() == list(range(60, 60 + batch_size))
    sizes = [len(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] == (batch_size % world_size > 0)


def test_a_rank_beyond_the_world_is_refused():
    with pytest.raises(DataError, match="rank 2"):
        rank_share(0, batch_size=12, rank=2, world_size=2)


@pytest.mark.parametrize("weights", [[1], [3, 1], [5, 7, 2, 1]])
def test_what_a_source_has_of_the_first_positions(weights):
    mixture = Mixture(weights)
    for positions in (0, 1, 5, 4 * sum(weights), 4 * sum(weights) + 2):
        sources, _ = mixture.locate(np.arange(positions))
        assert mixture.taken(positions).tolist() == np.bincount(sources, minlength=len(weights)).tolist()


def test_temperature_goes_from_sizes_to_equal_shares():
    sizes = [1000, 250, 10]
    assert integer_weights(tempered_weights(sizes, 1)) == [100, 25, 1]
    for temperature in (1.5, 2.0, 5.0):
        weights = np.array(tempered_weights(sizes, temperature))
        expected = np.array([size ** (1 / temperature) for size in sizes])
        np.testing.assert_allclose(weights / weights.sum(), expected / expected.sum())
    assert integer_weights(tempered_weights(sizes, 1e12)) == [1, 1, 1]
    assert integer_weights(tempered_weights([4, 1], 2.0)) == [2, 1]
    for bad in (0.5, 0.0, float("inf"), float("nan")):
        with pytest.raises(DataError, match="at least 1"):
            tempered_weights(sizes, bad)
