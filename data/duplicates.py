"""Batches without duplicates: samples are rearranged within a window of batches so that no batch holds a text twice.

In-batch negatives are wrong if two samples of a batch share a text: the positive of one query also appears under
another query, where it is treated as a negative although it answers the query. `separate` moves such samples into
another batch of the same window by swapping two samples, so batches keep their sizes and every sample of the window
still comes exactly once. It is greedy and draws no random numbers: the same window gives the same batches on every rank
and in every loader process. Texts are compared by hash, queries and passages together. Repeats within one sample are
allowed.
"""

from __future__ import annotations

from collections import Counter

import numpy as np


def separate(hashes: np.ndarray, offsets: np.ndarray, *, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Rearrange n samples, cut into batches of `batch_size` (the last may be short), so that no batch repeats a text.

    hashes: int64 [t], the texts of each sample; offsets: int64 [n + 1].
    Returns (int64 [n]: the sample at each place, int64 [batches]: how many samples of each batch still share a text
    with another). Some must if a text has more copies than there are batches.
    """
    num_samples = len(offsets) - 1
    num_batches = -(-num_samples // batch_size)
    texts_of = _shared_texts(hashes, offsets)
    order = list(range(num_samples))
    held = [Counter[int]() for _ in range(num_batches)]  # how many samples of a batch hold a text
    for sample, texts in enumerate(texts_of):
        held[sample // batch_size].update(texts)

    def partner(place: int) -> int | None:
        """A place of another batch whose sample can be swapped with the sample at `place`."""
        batch, within = divmod(place, batch_size)
        for other in ((batch + step) % num_batches for step in range(1, num_batches)):
            if any(held[other][text] for text in texts_of[order[place]]):
                continue
            start = other * batch_size
            size = min(batch_size, num_samples - start)
            for candidate in (start + (within + step) % size for step in range(size)):
                if not any(held[batch][text] for text in texts_of[order[candidate]]):
                    return candidate
        return None

    for place in range(num_samples):
        texts = texts_of[order[place]]
        if all(held[place // batch_size][text] == 1 for text in texts):
            continue
        found = partner(place)
        if found is None:
            continue
        here, there = held[place // batch_size], held[found // batch_size]
        for text in texts:
            here[text] -= 1
            there[text] += 1
        for text in texts_of[order[found]]:
            there[text] -= 1
            here[text] += 1
        order[place], order[found] = order[found], order[place]

    left = np.zeros(num_batches, dtype=np.int64)
    for place, sample in enumerate(order):
        batch = place // batch_size
        left[batch] += any(held[batch][text] > 1 for text in texts_of[sample])
    return np.asarray(order, dtype=np.int64), left


def _shared_texts(hashes: np.ndarray, offsets: np.ndarray) -> list[list[int]]:
    """For each sample, its texts that another sample of the window also holds; most samples have none."""
    num_samples = len(offsets) - 1
    samples = np.repeat(np.arange(num_samples), np.diff(offsets))
    texts = np.unique(hashes, return_inverse=True)[1]
    pairs = np.unique(texts * num_samples + samples)  # each text once a sample
    texts, samples = np.divmod(pairs, max(num_samples, 1))
    shared = np.bincount(texts)[texts] > 1 if len(texts) else np.zeros(0, dtype=bool)
    texts_of: list[list[int]] = [[] for _ in range(num_samples)]
    for sample, text in zip(samples[shared].tolist(), texts[shared].tolist()):
        texts_of[sample].append(text)
    return texts_of
