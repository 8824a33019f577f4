"""An endless stream of batches whose state is a few global numbers.

Position g of the stream is a pure function of (seed, weights, manifests): the mixture says which source and which index
within it, that source's epoch order says which sample. Step s takes positions [s·B, (s+1)·B), each rank a contiguous
share, so the global batches are the same for every number of ranks and of loader workers. Epochs flow into each other
(a batch may straddle the end); each source counts its own.

The state counts samples DELIVERED to the caller; what workers have prefetched is made again after a resume, at once,
since nothing is read forward. Workers are a plain DataLoader: worker w of n makes the steps s ≡ w (mod n), and
DataLoader hands them out in turn. Every random draw about a sample is keyed by (seed, epoch, source, sample).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from data.errors import DataError
from data.order import EpochOrder, Mixture, check_seed, integer_weights, rank_share, sample_rng
from data.shards import ShardFolder

__all__ = ["Sample", "Stream", "sample_rng"]

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")

PREFETCHED_STEPS_PER_WORKER = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample as a collator gets it; (epoch, source, index) keys every random draw about it."""

    source: int
    index: int  # within its source, in manifest order
    epoch: int  # of its source
    position: int  # in the whole stream, over all ranks
    payload: Any  # ids of a document, or a data.shards.Tuple


class Stream(Iterator[Batch], Generic[Batch]):
    """This rank's share of every step's batch, without end: `collate` turns its list of samples into a batch.

    `weights` are proportions of samples; without them every source counts by its size, so that all epochs keep pace.
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
        num_workers: int = 0,
        shuffle: bool = True,
    ) -> None:
        if not sources:
            raise DataError("a stream needs at least one shard folder; name one")
        if weights is not None and len(weights) != len(sources):
            raise DataError(f"{len(weights)} weights are given for {len(sources)} shard folders; give one a folder")
        if num_workers < 0:
            raise DataError(f"num_workers {num_workers} is negative; use 0 to read in the training process")
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
        rank_share(0, global_batch_size=global_batch_size, rank=rank, world_size=world_size)
        self.samples_per_epoch = sum(source.num_samples for source in sources)
        self.global_batch_size = global_batch_size
        self.weights = integer_weights(weights or [source.num_samples for source in sources])
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
        )
        self._seed = seed
        self._shuffle = shuffle
        self._num_workers = num_workers
        self._consumed = 0
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._start()
        try:
            batch = next(self._batches)
            if isinstance(batch, _Failure):
                raise batch.error
        except BaseException:
            # A generator or worker that raised has ended; whoever goes on regardless starts again at this step.
            self.close()
            raise
        self._consumed += self.global_batch_size
        return batch

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
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where `state` was taken, whatever the number of ranks and workers was and is."""
        mine = self.state_dict()
        mends = {
            "seed": "use the seed of the run that is resumed",
            "fingerprints": "resume with the very shard folders of the run, in their order",
            "weights": "resume with the weights of the run",
            "shuffle": "resume with the shuffling of the run",
        }
        for key, mend in mends.items():
            if state.get(key) != mine[key]:
                raise DataError(
                    f"the stream's {key} {mine[key]} is not that of the saved state, {state.get(key)}; {mend}"
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
            # Without one of its own, the loader would draw a seed from torch's global generator.
            generator=torch.Generator().manual_seed(0),
        )
        return iter(loader)


class _Steps(IterableDataset):
    """The batches of one rank from position `first` on: all of them, or every n-th in one of n loader workers."""

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
    ) -> None:
        self.sources = sources
        self.orders = orders
        self.mixture = mixture
        self.collate = collate
        self.global_batch_size = global_batch_size
        self.rank = rank
        self.world_size = world_size
        self.first = 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:
            return self._batches(self.first, every=1)
        return _with_failures(self._batches(self.first + worker.id * self.global_batch_size, every=worker.num_workers))

    def _batches(self, first: int, *, every: int) -> Iterator[Any]:
        while True:
            positions = rank_share(
                first, global_batch_size=self.global_batch_size, rank=self.rank, world_size=self.world_size
            )
            yield self.collate(self._samples(positions))
            first += every * self.global_batch_size

    def _samples(self, positions: np.ndarray) -> list[Sample]:
        samples: list[Sample | None] = [None] * len(positions)
        source_of, index_within = self.mixture.locate(positions)
        for number, (source, order) in enumerate(zip(self.sources, self.orders)):
            chosen = np.flatnonzero(source_of == number)
            epochs, within = np.divmod(index_within[chosen], source.num_samples)
            indices = np.empty_like(within)
            for epoch in np.unique(epochs).tolist():
                indices[epochs == epoch] = order.locate(epoch, within[epochs == epoch])
            rows = zip(chosen.tolist(), indices.tolist(), epochs.tolist(), source.samples(indices))
            for row, index, epoch, payload in rows:
                samples[row] = Sample(number, index, epoch, int(positions[row]), payload)
        return samples  # type: ignore[return-value]  # every position belongs to one source


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
