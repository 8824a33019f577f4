"""A stream of batches whose state is a few global numbers.

The sample at position g of the stream is a pure function of (seed, weights, manifests): the mixture gives the source
and the index within it, and the source's epoch order gives the sample. Step s takes positions [s·B, (s+1)·B), each rank
a contiguous share, so the global batches are the same for every number of ranks and of loader workers. A batch may
contain the end of one epoch and the beginning of the next; each source counts its own epochs. A stream is endless, or
ends after `total_samples`; its last batch may then be short.

Every batch belongs to a substream. Mixed batches form one substream. If every batch is to come from one dataset, each
source is a substream of its own, and the mixture decides which substream gives the next batch. A substream is a
sequence of positions ("places"), cut into batches in that order. To keep duplicates out of batches, each window of
WINDOW_BATCHES batches of a substream is rearranged (data/duplicates.py). This needs the texts of that window only, so a
seek costs one window.

The state counts samples DELIVERED to the caller. Batches that workers had prefetched are made again after a resume,
which is quick, since the data need not be read from the beginning. Workers are a plain DataLoader: worker w of n makes
the steps s ≡ w (mod n), and DataLoader returns them in turn. Every random draw about a sample is keyed by (seed, epoch,
source, sample).
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from data.duplicates import separate
from data.ground.errors import DataError
from data.ground.parent_death import signal_at_parents_death
from data.keyed_random import check_seed
from data.order import EpochOrder, Mixture, integer_weights, rank_share, sample_rng, tempered_weights
from data.shards.reader import ShardFolder

__all__ = ["Sample", "Stream", "sample_rng"]

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")

PREFETCHED_STEPS_PER_WORKER = 4
# Number of batches that exchange samples so that no batch repeats a text. Up to 16 copies of a text can be separated;
# a seek must hash the texts of that many batches.
WINDOW_BATCHES = 16
# Samples hashed at once, so that a window of any size fits in memory.
HASHED_SAMPLES = 4096

Batches = Literal["mixed", "one_dataset"]
# The hashes of the texts that each sample brings to its batch: (int64 [t], offsets int64 [n + 1]).
TextHashes = Callable[[Sequence["Sample"]], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample as collators receive it; (epoch, source, index) keys every random draw about it."""

    source: int
    index: int  # within its source, in manifest order
    epoch: int  # epoch of its source
    position: int  # in the whole stream, over all ranks
    payload: Any  # ids of a document, or a data.shards.format.Tuple
    is_replacement: bool = False  # whether it replaces a sample of a skipped shard


class Stream(Iterator[Batch], Generic[Batch]):
    """This rank's share of every step's batch: `collate` turns its list of samples, which may be empty, into a batch.

    `weights` are proportions of samples. Without weights, a source's proportion is its size to the power of
    1 / `mixture_temperature`; at 1 the epochs of all sources end together, up to the rounding of
    `data.order.integer_weights`. With `batches` "one_dataset", all samples of a global batch come from one source. With
    `distinct_texts`, no two samples of a global batch share a text, as far as a window allows; `repeats` counts the
    samples that still do. The stream ends after `total_samples`; None: never.
    """

    def __init__(
        self,
        sources: Sequence[ShardFolder],
        *,
        collate: Callable[[list[Sample]], Batch],
        seed: int,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        weights: Sequence[float] | None = None,
        mixture_temperature: float = 1.0,
        batches: Batches = "mixed",
        distinct_texts: TextHashes | None = None,
        total_samples: int | None = None,
        num_workers: int = 0,
        shuffle: bool = True,
    ) -> None:
        if not sources:
            raise DataError("a stream needs at least one shard folder; name one")
        if weights is not None and len(weights) != len(sources):
            raise DataError(f"{len(weights)} weights are given for {len(sources)} shard folders; give one a folder")
        if weights is not None and mixture_temperature != 1:
            raise DataError(
                f"weights {list(weights)} and mixture_temperature {mixture_temperature} both say how to mix; give one"
            )
        if num_workers < 0:
            raise DataError(f"num_workers {num_workers} is negative; use 0 to read in the training process")
        if global_batch_size < 1 or (total_samples is not None and total_samples < 1):
            raise DataError(
                f"global_batch_size {global_batch_size} and total_samples {total_samples} must be at least 1"
            )
        for other in sources[1:]:
            for what, mine, theirs in (
                ("kind", sources[0].kind, other.kind),
                ("grading", sources[0].graded, other.graded),
                ("tokenizer", *(source.manifest.tokenizer["fingerprint"] for source in (sources[0], other))),
            ):
                if mine != theirs:
                    raise DataError(
                        f"shard folders {sources[0].path} and {other.path} differ in {what}; mix folders of one {what}"
                    )
        rank_share(0, batch_size=global_batch_size, rank=rank, world_size=world_size)
        self.samples_per_epoch = sum(source.num_samples for source in sources)
        self.global_batch_size = global_batch_size
        self.total_samples = total_samples
        # Both count since the start of this process.
        self.replacements = 0  # samples delivered to this rank that replace samples of skipped shards
        self.repeats = 0  # samples delivered, over all ranks, that share a text with another sample of their batch
        sizes = [source.num_samples for source in sources]
        self.weights = integer_weights(weights or tempered_weights(sizes, mixture_temperature))
        self._source = _Steps(
            sources=list(sources),
            orders=[
                EpochOrder(source.chunk_samples, check_seed(seed), source=number, shuffle=shuffle)
                for number, source in enumerate(sources)
            ],
            mixture=Mixture(self.weights),
            collate=collate,
            global_batch_size=global_batch_size,
            rank=rank,
            world_size=world_size,
            batches=batches,
            distinct_texts=distinct_texts,
            total_samples=total_samples,
        )
        self._seed = seed
        self._shuffle = shuffle
        self._num_workers = num_workers
        self._consumed = 0
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Batch:
        if self._consumed == self.total_samples:
            raise StopIteration
        if self._batches is None:
            self._batches = self._start()
        try:
            delivery = next(self._batches)
            if isinstance(delivery, _Failure):
                raise delivery.error
        except BaseException:
            # A generator or worker that raised has ended. A caller that continues starts again at this step.
            self.close()
            raise
        self._count_repeats(delivery)
        self.replacements += delivery.replacements
        self._consumed += delivery.batch_size
        return delivery.batch

    def _count_repeats(self, delivery: _Delivery) -> None:
        if delivery.repeats and not self.repeats and self._source.rank == 0:
            logger.warning(
                "%d of the %d samples of the batch at sample %d share a text with another of them: a window of %d "
                "batches holds too many copies to separate them (said once)",
                delivery.repeats,
                delivery.batch_size,
                self._consumed,
                WINDOW_BATCHES,
            )
        self.repeats += delivery.repeats

    @property
    def num_steps(self) -> int:
        """The number of batches from the first sample to the last; the last batch may be short."""
        assert self.total_samples is not None, "an endless stream has no number of steps"
        return -(-self.total_samples // self.global_batch_size)

    @property
    def samples(self) -> int:
        """Samples delivered so far, over all ranks."""
        return self._consumed

    @property
    def epoch(self) -> float:
        """Number of passes over the data: delivered samples over the samples of all sources together."""
        return self._consumed / self.samples_per_epoch

    def state_dict(self) -> dict[str, Any]:
        """The stream's position and settings, equal on all ranks; JSON values only."""
        return {
            "samples": self._consumed,
            "seed": self._seed,
            "global_batch_size": self.global_batch_size,
            "fingerprints": [source.fingerprint for source in self._source.sources],
            "weights": list(self.weights),
            "shuffle": self._shuffle,
            "batches": self._source.batches,
            "no_duplicates": self._source.distinct_texts is not None,
            "total_samples": self.total_samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position at which `state` was taken; the number of ranks and workers may differ."""
        mine = self.state_dict()
        hints = {
            "seed": "use the seed of the run that is resumed",
            "fingerprints": "resume with the same shard folders in the same order",
            "weights": "resume with the weights of the run",
            "shuffle": "resume with the shuffling of the run",
            "batches": "resume with the kind of batches of the run",
            "no_duplicates": "resume as the run was started",
            "total_samples": "resume with the length of the run",
        }
        if self._source.order_needs_batch_size:
            hints["global_batch_size"] = "where batches decide the order, resume with the batch size of the run"
        for key, hint in hints.items():
            if state.get(key) != mine[key]:
                raise DataError(f"the stream's {key} is {mine[key]}, but the saved state has {state.get(key)}; {hint}")
        if state.get("global_batch_size") != self.global_batch_size:
            logger.warning(
                "global_batch_size changes from %s to %s: every sample is still read once, in other batches",
                state.get("global_batch_size"),
                self.global_batch_size,
            )
        self.close()
        self._consumed = int(state["samples"])

    def close(self) -> None:
        """End the workers; the next batch starts new ones."""
        batches, self._batches = self._batches, None
        shutdown = getattr(batches, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()

    def _start(self) -> Iterator[Any]:
        self._source.first = self._consumed
        if not self._num_workers:
            return iter(self._source)
        loader = DataLoader(
            self._source,
            batch_size=None,
            num_workers=self._num_workers,
            prefetch_factor=PREFETCHED_STEPS_PER_WORKER,
            persistent_workers=True,
            collate_fn=_unchanged,
            worker_init_fn=_leave_signals_to_the_trainer,
            # Without this generator, DataLoader would draw a seed from torch's global generator.
            generator=torch.Generator().manual_seed(0),
        )
        return iter(loader)


class _Steps(IterableDataset):
    """The batches of one rank from position `first` on: all of them, or every n-th in one of n loader workers.

    Iteration yields one `_Delivery` for each step.
    """

    def __init__(
        self,
        *,
        sources: list[ShardFolder],
        orders: list[EpochOrder],
        mixture: Mixture,
        collate: Callable[[list[Sample]], Any],
        global_batch_size: int,
        rank: int,
        world_size: int,
        batches: Batches,
        distinct_texts: TextHashes | None,
        total_samples: int | None,
    ) -> None:
        self.sources = sources
        self.orders = orders
        self.mixture = mixture
        self.collate = collate
        self.global_batch_size = global_batch_size
        self.rank = rank
        self.world_size = world_size
        self.batches = batches
        self.distinct_texts = distinct_texts
        self.total_samples = total_samples
        self.first = 0
        # Substream -> its current window: the first place, the sample at each place, the repeats left in each batch.
        self._windows: dict[int, tuple[int, np.ndarray, np.ndarray]] = {}

    @property
    def order_needs_batch_size(self) -> bool:
        return self.batches == "one_dataset" or self.distinct_texts is not None

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:
            return self._batches(self.first, every=1)
        return _with_failures(self._batches(self.first + worker.id * self.global_batch_size, every=worker.num_workers))

    def _batches(self, first: int, *, every: int) -> Iterator[_Delivery]:
        while self.total_samples is None or first < self.total_samples:
            batch_size = self._size(first)
            positions = rank_share(first, batch_size=batch_size, rank=self.rank, world_size=self.world_size)
            substream, start = self._substream(first)
            places, repeats = positions - first + start, 0
            if self.distinct_texts is not None:
                places, repeats = self._rearranged(substream, places, start)
            samples = self._samples(substream, places, positions)
            replacements = sum(sample.is_replacement for sample in samples)
            yield _Delivery(self.collate(samples), batch_size, repeats, replacements)
            first += every * self.global_batch_size

    def _size(self, first: int) -> int:
        """Samples of the global batch that starts at position `first`."""
        if self.total_samples is None:
            return self.global_batch_size
        return min(self.global_batch_size, self.total_samples - first)

    def _substream(self, first: int) -> tuple[int, int]:
        """The substream of the global batch that starts at position `first`, and the batch's first place in it."""
        if self.batches == "mixed":
            return 0, first
        substream, batch = self.mixture.locate(np.asarray([first // self.global_batch_size]))
        return int(substream[0]), int(batch[0]) * self.global_batch_size

    def _substream_end(self, substream: int) -> int | None:
        """The number of places of a substream; None if it is endless.

        The last batch of the stream may be short; it is the last batch of its substream.
        """
        if self.total_samples is None or self.batches == "mixed":
            return self.total_samples
        num_steps = -(-self.total_samples // self.global_batch_size)
        last = (num_steps - 1) * self.global_batch_size
        missing = self.global_batch_size - self._size(last) if self._substream(last)[0] == substream else 0
        return int(self.mixture.taken(num_steps)[substream]) * self.global_batch_size - missing

    def _rearranged(self, substream: int, places: np.ndarray, start: int) -> tuple[np.ndarray, int]:
        """(the places [n] before the window's exchange, how many samples of the global batch still repeat a text).

        start: the first place of the global batch that `places` [n] belong to.
        """
        samples_per_window = WINDOW_BATCHES * self.global_batch_size
        window = start - start % samples_per_window
        if substream not in self._windows or self._windows[substream][0] != window:
            end = self._substream_end(substream)
            stop = window + samples_per_window if end is None else min(window + samples_per_window, end)
            self._windows[substream] = (window, *self._exchange(substream, window, stop))
        _, order, repeats = self._windows[substream]
        return window + order[places - window], int(repeats[(start - window) // self.global_batch_size])

    def _exchange(self, substream: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        assert self.distinct_texts is not None
        hashes, counts = [], []
        for first in range(start, stop, HASHED_SAMPLES):
            places = np.arange(first, min(first + HASHED_SAMPLES, stop))
            block, offsets = self.distinct_texts(self._samples(substream, places, places))
            hashes.append(block)
            counts.append(np.diff(offsets))
        offsets = np.concatenate(([0], np.cumsum(np.concatenate(counts))))
        return separate(np.concatenate(hashes), offsets, batch_size=self.global_batch_size)

    def _samples(self, substream: int, places: np.ndarray, positions: np.ndarray) -> list[Sample]:
        """The samples at `places` [n] of a substream, to be delivered at `positions` [n] of the stream."""
        samples: list[Sample | None] = [None] * len(places)
        if self.batches == "mixed":
            source_of, index_within = self.mixture.locate(places)
        else:
            source_of, index_within = np.full(len(places), substream), places
        for number, (source, order) in enumerate(zip(self.sources, self.orders)):
            chosen = np.flatnonzero(source_of == number)
            epochs, within = np.divmod(index_within[chosen], source.num_samples)
            indices = np.empty_like(within)
            for epoch in np.unique(epochs).tolist():
                indices[epochs == epoch] = order.locate(epoch, within[epochs == epoch])
            read = source.with_replacements(indices)
            moved = (read != indices).tolist()
            rows = zip(chosen.tolist(), read.tolist(), epochs.tolist(), source.samples(read), moved)
            for row, index, epoch, payload, is_replacement in rows:
                samples[row] = Sample(number, index, epoch, int(positions[row]), payload, is_replacement)
        return samples  # type: ignore[return-value]  # every place belongs to one source


@dataclass(frozen=True)
class _Delivery:
    """One rank's batch, with counts for the stream."""

    batch: Any
    batch_size: int  # samples, over all ranks
    repeats: int  # samples, over all ranks, that share a text with another one
    replacements: int  # samples of this rank that replace samples of skipped shards


@dataclass(frozen=True)
class _Failure:
    error: DataError


def _with_failures(batches: Iterator[Any]) -> Iterator[Any]:
    # DataLoader re-raises a worker's exception with its traceback as the message, but a user error is one sentence.
    try:
        yield from batches
    except DataError as error:
        yield _Failure(error)


def _unchanged(batch: Any) -> Any:
    return batch


def _leave_signals_to_the_trainer(_: int) -> None:
    """Ignore signals in a loader worker: schedulers signal whole process groups, but the trainer finishes its step.

    The worker is killed when the trainer dies, for whatever reason.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal_at_parents_death(signal.SIGKILL)
