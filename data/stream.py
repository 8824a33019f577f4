"""A stream of batches whose state is a few global numbers.

Position g of the stream is a pure function of (seed, weights, manifests): the mixture says which source and which index
within it, that source's epoch order says which sample. Step s takes positions [s·B, (s+1)·B), each rank a contiguous
share, so the global batches are the same for every number of ranks and of loader workers. Epochs flow into each other
(a batch may straddle the end); each source counts its own. A stream is endless, or ends after `total_samples` with a
batch of what remains.

Batches fall into lanes: one lane of everything, or, where every batch is to come from one dataset, a lane a source, to
which the mixture gives whole batches in turn. A lane is a sequence of places, cut into batches in that order. Where
batches are to hold no duplicates, each window of WINDOW_BATCHES batches of a lane is rearranged (data/duplicates.py),
which needs the texts of that window and nothing before it: a seek costs one window.

The state counts samples DELIVERED to the caller; what workers have prefetched is made again after a resume, at once,
since nothing is read forward. Workers are a plain DataLoader: worker w of n makes the steps s ≡ w (mod n), and
DataLoader hands them out in turn. Every random draw about a sample is keyed by (seed, epoch, source, sample).
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
from data.order import EpochOrder, Mixture, check_seed, integer_weights, rank_share, sample_rng, tempered_weights
from data.shards.reader import ShardFolder

__all__ = ["Sample", "Stream", "sample_rng"]

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")

PREFETCHED_STEPS_PER_WORKER = 4
# Batches that exchange samples so that none repeats a text: room for a text's 16 copies, and what a seek must hash.
WINDOW_BATCHES = 16
# Samples hashed at once, so that a window of any size fits in memory.
HASHED_SAMPLES = 4096

Batches = Literal["mixed", "one_dataset"]
# The hashes of the texts that each sample brings to its batch: (int64 [t], offsets int64 [n + 1]).
TextHashes = Callable[[Sequence["Sample"]], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample as a collator gets it; (epoch, source, index) keys every random draw about it."""

    source: int
    index: int  # within its source, in manifest order
    epoch: int  # of its source
    position: int  # in the whole stream, over all ranks
    payload: Any  # ids of a document, or a data.shards.format.Tuple
    stands_in: bool = False  # for one of a skipped shard


class Stream(Iterator[Batch], Generic[Batch]):
    """This rank's share of every step's batch: `collate` turns its list of samples, which may be empty, into a batch.

    `weights` are proportions of samples; without them every source counts by its size to the power of
    1 / `mixture_temperature`, so that at 1 all epochs keep pace. `batches` "one_dataset": all samples of a global batch
    are of one source. With `distinct_texts`, no two samples of a global batch share a text, as far as a window allows;
    `repeats` counts the rest. `total_samples`: where the stream ends; None: never.
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
        self.stand_ins = 0  # replacement samples, of skipped shards' ones, delivered since the last checkpoint
        self.repeats = 0  # samples delivered since the start of this process that share a text with another of theirs
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
            # A generator or worker that raised has ended; whoever goes on regardless starts again at this step.
            self.close()
            raise
        self._count_repeats(delivery)
        self.stand_ins += delivery.stand_ins
        self._consumed += delivery.batch_size
        return delivery.batch

    def _count_repeats(self, delivery: _Delivery) -> None:
        if delivery.repeats and not self.repeats and self._source.rank == 0:
            logger.warning(
                "%d of the %d samples of the batch at sample %d share a text with another of them: %d batches hold too "
                "many copies to part them (said once)",
                delivery.repeats,
                delivery.batch_size,
                self._consumed,
                WINDOW_BATCHES,
            )
        self.repeats += delivery.repeats

    @property
    def pad_id(self) -> int:
        return self._source.sources[0].vocabulary.pad_id

    @property
    def num_steps(self) -> int:
        """Batches from the first sample to the last, a short one included."""
        assert self.total_samples is not None, "an endless stream has no number of steps"
        return -(-self.total_samples // self.global_batch_size)

    @property
    def samples(self) -> int:
        """Samples delivered so far, over all ranks."""
        return self._consumed

    @property
    def epoch(self) -> float:
        """Passes over the data, counted over all sources together."""
        return self._consumed / self.samples_per_epoch

    def state_dict(self) -> dict[str, Any]:
        """The stream's place, equal on all ranks; JSON values only."""
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
        """Stand where `state` was taken, whatever the number of ranks and workers was and is."""
        mine = self.state_dict()
        hints = {
            "seed": "use the seed of the run that is resumed",
            "fingerprints": "resume with the very shard folders of the run, in their order",
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
                raise DataError(
                    f"the stream's {key} {mine[key]} is not that of the saved state, {state.get(key)}; {hint}"
                )
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
            # Without one of its own, the loader would draw a seed from torch's global generator.
            generator=torch.Generator().manual_seed(0),
        )
        return iter(loader)


class _Steps(IterableDataset):
    """The batches of one rank from position `first` on: all of them, or every n-th in one of n loader workers.

    Iterating yields a `_Delivery` a step.
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
        # Lane -> the window it stands in: its first place, the place of each of its samples, and what it left repeated.
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
            lane, start = self._lane(first)
            places, repeats = positions - first + start, 0
            if self.distinct_texts is not None:
                places, repeats = self._rearranged(lane, places, start)
            samples = self._samples(lane, places, positions)
            stand_ins = sum(sample.stands_in for sample in samples)
            yield _Delivery(self.collate(samples), batch_size, repeats, stand_ins)
            first += every * self.global_batch_size

    def _size(self, first: int) -> int:
        """Samples of the global batch that starts at position `first`."""
        if self.total_samples is None:
            return self.global_batch_size
        return min(self.global_batch_size, self.total_samples - first)

    def _lane(self, first: int) -> tuple[int, int]:
        """The lane of the global batch that starts at position `first`, and the batch's first place in it."""
        if self.batches == "mixed":
            return 0, first
        lane, batch = self.mixture.locate(np.asarray([first // self.global_batch_size]))
        return int(lane[0]), int(batch[0]) * self.global_batch_size

    def _lane_end(self, lane: int) -> int | None:
        """The places of a lane; the stream's last batch, which may be short, is the last of its lane."""
        if self.total_samples is None or self.batches == "mixed":
            return self.total_samples
        num_steps = -(-self.total_samples // self.global_batch_size)
        last = (num_steps - 1) * self.global_batch_size
        missing = self.global_batch_size - self._size(last) if self._lane(last)[0] == lane else 0
        return int(self.mixture.taken(num_steps)[lane]) * self.global_batch_size - missing

    def _rearranged(self, lane: int, places: np.ndarray, start: int) -> tuple[np.ndarray, int]:
        """(Where the samples for `places` stand before the window's exchange, samples that stay repeated.)

        start: the first place of the global batch that `places` are of.
        """
        samples_per_window = WINDOW_BATCHES * self.global_batch_size
        window = start - start % samples_per_window
        if lane not in self._windows or self._windows[lane][0] != window:
            end = self._lane_end(lane)
            stop = window + samples_per_window if end is None else min(window + samples_per_window, end)
            self._windows[lane] = (window, *self._exchange(lane, window, stop))
        _, order, repeats = self._windows[lane]
        return window + order[places - window], int(repeats[(start - window) // self.global_batch_size])

    def _exchange(self, lane: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        assert self.distinct_texts is not None
        hashes, counts = [], []
        for first in range(start, stop, HASHED_SAMPLES):
            places = np.arange(first, min(first + HASHED_SAMPLES, stop))
            block, offsets = self.distinct_texts(self._samples(lane, places, places))
            hashes.append(block)
            counts.append(np.diff(offsets))
        offsets = np.concatenate(([0], np.cumsum(np.concatenate(counts))))
        return separate(np.concatenate(hashes), offsets, batch_size=self.global_batch_size)

    def _samples(self, lane: int, places: np.ndarray, positions: np.ndarray) -> list[Sample]:
        """The samples at `places` [n] of a lane, which are delivered at `positions` [n] of the stream."""
        samples: list[Sample | None] = [None] * len(places)
        if self.batches == "mixed":
            source_of, index_within = self.mixture.locate(places)
        else:
            source_of, index_within = np.full(len(places), lane), places
        for number, (source, order) in enumerate(zip(self.sources, self.orders)):
            chosen = np.flatnonzero(source_of == number)
            epochs, within = np.divmod(index_within[chosen], source.num_samples)
            indices = np.empty_like(within)
            for epoch in np.unique(epochs).tolist():
                indices[epochs == epoch] = order.locate(epoch, within[epochs == epoch])
            read = source.standing_in(indices)
            moved = (read != indices).tolist()
            rows = zip(chosen.tolist(), read.tolist(), epochs.tolist(), source.samples(read), moved)
            for row, index, epoch, payload, stands_in in rows:
                samples[row] = Sample(number, index, epoch, int(positions[row]), payload, stands_in)
        return samples  # type: ignore[return-value]  # every place belongs to one source


@dataclass(frozen=True)
class _Delivery:
    """One rank's batch, and what else the stream counts."""

    batch: Any
    batch_size: int  # samples, over all ranks
    repeats: int  # samples, over all ranks, that share a text with another one
    stand_ins: int  # samples of this rank's that replace those of skipped shards


@dataclass(frozen=True)
class _Failure:
    error: DataError


def _with_failures(batches: Iterator[Any]) -> Iterator[Any]:
    # DataLoader re-raises a worker's exception with its traceback as the message; a user's mistake is one sentence.
    try:
        yield from batches
    except DataError as error:
        yield _Failure(error)


def _unchanged(batch: Any) -> Any:
    return batch


def _leave_signals_to_the_trainer(_: int) -> None:
    """Schedulers signal whole groups of processes: a loader works on until the trainer has finished its step.

    It ends when the trainer does, by whatever end.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal_at_parents_death(signal.SIGKILL)
