"""The order of samples: of an epoch, of a mixture, and each rank's share, as pure functions of a few integers.

Position p of an epoch maps to a sample by arithmetic on the chunk tables alone, so a stream can start at any position
at once. Shards are permuted by (seed, source, epoch); chunks are permuted within groups of `shuffle_shards` permuted
shards; samples are permuted exactly within windows of `shuffle_chunks` consecutive chunks. Neighbours in the corpus are
thus spread over thousands of positions, while reading touches a few shards at a time. The result is a permutation:
every sample comes exactly once an epoch, also with shards of different sizes. Ranks and workers do not enter.

Mixtures repeat one cycle of sum(weights) positions in which source k occurs exactly weights[k] times, spaced as evenly
as possible (occurrences are sorted by (j + 1/2) / weights[k]). A position is one sample, or a whole batch if every
batch is to come from one source.

Random numbers are raw Philox words under a key of (seed, domain) and a counter of (source, epoch, item). numpy
guarantees that these words never change, which it does not for Generator methods (NEP 19), and old checkpoints must
find their position again. Permutations are stable argsorts of such words.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd

import numpy as np

from data.ground.errors import DataError
from data.keyed_random import philox

SHUFFLE_SHARDS = 16
SHUFFLE_CHUNKS = 64
# Cycles longer than this are approximated; the table of one cycle costs 10 bytes a position.
MAX_EXACT_CYCLE = 2**20
MAX_DECIMAL_CYCLE = 1_000
APPROXIMATE_CYCLE = 100_000

_SAMPLE, _SHARDS, _CHUNKS, _WINDOW = range(4)
_CACHED_EPOCHS = 2
_CACHED_WINDOWS = 4


def sample_rng(seed: int, epoch: int, source: int, sample: int) -> np.random.Generator:
    """The generator for every draw about one sample in one epoch, on whichever rank or worker."""
    return np.random.Generator(philox(_SAMPLE, seed, source=source, epoch=epoch, item=sample))


class EpochOrder:
    """The order of one source in every epoch; `chunk_samples` holds the samples of each chunk of each shard."""

    def __init__(
        self,
        chunk_samples: Sequence[Sequence[int]],
        seed: int,
        *,
        source: int = 0,
        shuffle: bool = True,
        shuffle_shards: int = SHUFFLE_SHARDS,
        shuffle_chunks: int = SHUFFLE_CHUNKS,
    ) -> None:
        if shuffle_shards < 1 or shuffle_chunks < 1:
            raise DataError(
                f"shuffle_shards={shuffle_shards} and shuffle_chunks={shuffle_chunks} must be at least 1; "
                "use shuffle=False for the order on disk"
            )
        self.seed = seed
        self.source = source
        self.shuffle = shuffle
        self.shuffle_shards = shuffle_shards
        self.shuffle_chunks = shuffle_chunks
        self._chunks_of_shard = np.asarray([len(chunks) for chunks in chunk_samples], dtype=np.int64)  # [shards]
        counts = [samples for chunks in chunk_samples for samples in chunks]
        self._chunk_samples = np.asarray(counts, dtype=np.int64)  # [chunks]
        self._chunk_starts = _starts(self._chunk_samples)  # [chunks + 1]
        self.num_samples = int(self._chunk_starts[-1])
        if not self.num_samples:
            raise DataError("the shards hold no samples, so there is nothing to order; give shards that hold samples")
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()
        self._windows: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()

    def locate(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Global sample indices, int64 [n], of positions int64 [n] within an epoch."""
        positions = np.asarray(positions, dtype=np.int64)
        assert epoch >= 0 and (not len(positions) or (positions.min() >= 0 and positions.max() < self.num_samples))
        if not self.shuffle:
            return positions.copy()
        plan = self._epoch(epoch)
        windows = np.searchsorted(plan.window_starts, positions, side="right") - 1
        # The position of each sample before the shuffle within its window.
        unshuffled = np.empty_like(positions)
        for window in np.unique(windows).tolist():
            chosen = windows == window
            start = int(plan.window_starts[window])
            unshuffled[chosen] = start + self._window(epoch, window, plan)[positions[chosen] - start]
        places = np.searchsorted(plan.starts, unshuffled, side="right") - 1
        return self._chunk_starts[plan.chunks[places]] + unshuffled - plan.starts[places]

    def _epoch(self, epoch: int) -> _Epoch:
        plan = self._epochs.get(epoch)
        if plan is None:
            plan = self._make_epoch(epoch)
            _remember(self._epochs, epoch, plan, limit=_CACHED_EPOCHS)
        return plan

    def _make_epoch(self, epoch: int) -> _Epoch:
        num_shards, num_chunks = len(self._chunks_of_shard), len(self._chunk_samples)
        shards = np.argsort(self._words(_SHARDS, epoch, 0, num_shards), kind="stable")
        group_of_shard = np.empty(num_shards, dtype=np.int64)
        group_of_shard[shards] = np.arange(num_shards) // self.shuffle_shards
        group_of_chunk = np.repeat(group_of_shard, self._chunks_of_shard)
        chunks = np.lexsort((self._words(_CHUNKS, epoch, 0, num_chunks), group_of_chunk))
        starts = _starts(self._chunk_samples[chunks])
        return _Epoch(chunks, starts[:-1], np.append(starts[: -1 : self.shuffle_chunks], starts[-1]))

    def _window(self, epoch: int, window: int, plan: _Epoch) -> np.ndarray:
        permutation = self._windows.get((epoch, window))
        if permutation is None:
            length = int(plan.window_starts[window + 1] - plan.window_starts[window])
            permutation = np.argsort(self._words(_WINDOW, epoch, window, length), kind="stable")
            _remember(self._windows, (epoch, window), permutation, limit=_CACHED_WINDOWS)
        return permutation

    def _words(self, domain: int, epoch: int, item: int, count: int) -> np.ndarray:
        return philox(domain, self.seed, source=self.source, epoch=epoch, item=item).random_raw(count)


@dataclass(frozen=True)
class _Epoch:
    chunks: np.ndarray  # [chunks]; the chunk at each place of this epoch
    starts: np.ndarray  # [chunks]; the position at which each place starts
    window_starts: np.ndarray  # [windows + 1]


class Mixture:
    """For each position of an endless mixture: its source, and how many positions of that source came before."""

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = tuple(int(weight) for weight in weights)
        self.pattern = interleave(self.weights)  # [cycle]
        counts = np.asarray(self.weights, dtype=np.int64)
        # For each position of the cycle: how many earlier positions of the cycle have the same source.
        self._before = np.empty(len(self.pattern), dtype=np.int64)
        for source, count in enumerate(self.weights):
            self._before[self.pattern == source] = np.arange(count)
        self._counts = counts

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source [n], index within that source's own endless sequence [n]) of positions [n] of the mixture."""
        cycles, places = np.divmod(np.asarray(positions, dtype=np.int64), len(self.pattern))
        sources = self.pattern[places]
        return sources, cycles * self._counts[sources] + self._before[places]

    def taken(self, positions: int) -> np.ndarray:
        """How many of the first `positions` positions belong to each source: int64 [sources]."""
        cycles, rest = divmod(positions, len(self.pattern))
        return cycles * self._counts + np.bincount(self.pattern[:rest], minlength=len(self.weights))


def interleave(weights: Sequence[int]) -> np.ndarray:
    """The source at each position of one cycle, int16 [sum(weights)]; source k occurs weights[k] times, evenly."""
    times = np.concatenate([(np.arange(weight) + 0.5) / weight for weight in weights])
    sources = np.repeat(np.arange(len(weights), dtype=np.int16), weights)
    return sources[np.lexsort((sources, times))]


def integer_weights(weights: Sequence[float]) -> list[int]:
    """Mixture weights as the integers of one cycle.

    Whole numbers are kept, divided by their greatest common divisor. Fractions become the shortest cycle of at most
    1,000 positions that meets every proportion to 1e-9 ([0.7, 0.3] -> [7, 3]). All other weights, and whole numbers
    whose sum is above 2^20, are rounded to a cycle of 100,000 by largest remainders, with each source at least once.
    """
    for weight in weights:
        if not 0 < weight < float("inf"):
            raise DataError(f"mixture weight {weight} is not a positive number; give one above zero or drop the source")
    fractions = [Fraction(weight) for weight in weights]
    total = sum(fractions)
    if all(fraction.denominator == 1 for fraction in fractions):
        whole = [int(fraction) for fraction in fractions]
        divisor = gcd(*whole)
        if sum(whole) // divisor <= MAX_EXACT_CYCLE:
            return [weight // divisor for weight in whole]
    shares = np.asarray([float(fraction / total) for fraction in fractions])
    for cycle in range(len(shares), MAX_DECIMAL_CYCLE + 1):
        counts = np.rint(shares * cycle)
        if counts.min() >= 1 and counts.sum() == cycle and np.abs(counts / cycle - shares).max() < 1e-9:
            return [int(count) for count in counts]
    wanted = shares * APPROXIMATE_CYCLE
    counts = np.maximum(np.floor(wanted), 1)
    spare = APPROXIMATE_CYCLE - int(counts.sum())
    if spare > 0:
        counts[np.argsort(counts - wanted, kind="stable")[:spare]] += 1
    divisor = gcd(*(int(count) for count in counts))
    return [int(count) // divisor for count in counts]


def tempered_weights(sizes: Sequence[int], temperature: float) -> list[float]:
    """Mixture weights proportional to size^(1 / temperature): the sizes at 1, equal weights towards infinity."""
    if not 1 <= temperature < float("inf"):
        raise DataError(f"mixture temperature {temperature} must be a number of at least 1")
    if temperature == 1:
        return list(sizes)
    return [(size / max(sizes)) ** (1 / temperature) for size in sizes]


def rank_share(first: int, *, batch_size: int, rank: int, world_size: int) -> np.ndarray:
    """A rank's positions, int64 [n], of the global batch of `batch_size` samples that starts at `first`.

    The shares are contiguous: joined in the order of the ranks, they are the same global batch for every world size.
    If the batch does not divide evenly, the first ranks take one sample more. A rank may get none of a short batch.
    """
    if not 0 <= rank < world_size:
        raise DataError(f"rank {rank} is not below world_size {world_size}; check the launcher's environment")
    share, spare = divmod(batch_size, world_size)
    start = first + rank * share + min(rank, spare)
    return np.arange(start, start + share + (rank < spare), dtype=np.int64)


def _starts(lengths: np.ndarray) -> np.ndarray:
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _remember(cache: OrderedDict, key: object, value: object, *, limit: int) -> None:
    cache[key] = value
    if len(cache) > limit:
        cache.popitem(last=False)
