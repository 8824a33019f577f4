"""Batches without duplicates: nothing is lost, nothing new collides, and what can be parted is parted."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from data.duplicates import separate


def arranged(texts: list[list[int]], batch_size: int) -> tuple[list[int], list[int]]:
    """`separate` on samples given as lists of texts."""
    hashes = np.array([text for sample in texts for text in sample], dtype=np.int64)
    offsets = np.concatenate(([0], np.cumsum([len(sample) for sample in texts]))).astype(np.int64)
    order, left = separate(hashes, offsets, batch_size=batch_size)
    return order.tolist(), left.tolist()


def repeats(texts: list[list[int]], order: list[int], batch_size: int) -> list[int]:
    """For each batch, its samples that share a text with another of them."""
    found = []
    for start in range(0, len(order), batch_size):
        batch = [set(texts[sample]) for sample in order[start : start + batch_size]]
        counts = Counter(text for sample in batch for text in sample)
        found.append(sum(any(counts[text] > 1 for text in sample) for sample in batch))
    return found


def random_texts(seed: int, *, samples: int, distinct: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-distinct, distinct, size=rng.integers(1, 5)).tolist() for _ in range(samples)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("samples", "batch_size"), [(96, 6), (95, 6), (91, 6), (20, 32), (64, 16)])
@pytest.mark.parametrize("distinct", [5, 100, 2000])
def test_a_window_keeps_its_samples_and_counts_what_stays_repeated(samples, batch_size, distinct, seed):
    texts = random_texts(seed, samples=samples, distinct=distinct)
    order, left = arranged(texts, batch_size)
    assert sorted(order) == list(range(samples))
    assert left == repeats(texts, order, batch_size)
    plain = repeats(texts, list(range(samples)), batch_size)
    assert sum(left) <= sum(plain)
    moved = sum(place != sample for place, sample in enumerate(order))
    assert moved <= 2 * sum(plain), "only those that collide, and their partners, move"
    assert (order, left) == arranged(texts, batch_size)


def test_batches_of_real_proportions_are_parted_entirely():
    """A thousand samples a window whose texts come about three times each."""
    texts = [[int(text) for text in row] for row in np.random.default_rng(0).integers(0, 1000, size=(1024, 3))]
    order, left = arranged(texts, 64)
    assert sum(left) == sum(repeats(texts, order, 64)) == 0
    assert sum(repeats(texts, list(range(1024)), 64)) > 200, "the plain order must have what is fixed"


@pytest.mark.parametrize("start", [0, 1, 15])
def test_as_many_copies_as_batches_are_parted_and_one_more_is_not(start):
    batches, size = 16, 8
    texts = [[sample] for sample in range(1, batches * size + 1)]
    for copies, expected in ((batches, 0), (batches + 1, 2)):
        for place in range(copies):
            texts[(start * size + place) % len(texts)] = [-1]
        order, left = arranged(texts, size)
        assert sum(left) == expected
        assert left == repeats(texts, order, size)


def test_where_nothing_collides_nothing_moves():
    texts = [[sample, -sample - 1] for sample in range(50)]
    assert arranged(texts, 8) == (list(range(50)), [0] * 7)
    # A sample that holds one text twice collides with nobody.
    assert arranged([[3, 3], [4, 4]], 2) == ([0, 1], [0])
    # Negative control: a text of two samples of one batch does.
    assert arranged([[3], [3], [4], [5]], 2) == ([2, 1, 0, 3], [0, 0])


def test_one_batch_alone_cannot_be_parted():
    assert arranged([[1], [1], [2]], 4) == ([0, 1, 2], [2])
    assert arranged([], 4) == ([], [])
