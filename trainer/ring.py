"""A ring of ranks: the rows of each rank visit all ranks, a chunk at a time, and come home with what was added to them.

In the first round, vectors alone travel, and a rank begins with its own. In the second round, gradients travel with
them, the other way round, and a rank's own chunks are the last: the gradients that others have added arrive while the
rank computes its own part. The second round begins with the vectors that the first has left, and no vectors travel to
their own rank. So each rank of W sends 2 W − 3 times its vectors' bytes, and W − 1 times those of their gradients.

While a chunk is used, the one before it is sent on and another is received. A rank's rows are RING_CHUNKS chunks. Of
the chunks that travel, a rank holds RING_CHUNKS − 1 that have come, one that goes and one that comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from trainer.costs.exchange import RING_CHUNKS


@dataclass(frozen=True)
class Travelling:
    """Rows that visit all ranks. vectors: [n, d], this rank's. counts: every rank's n.

    gradient: [n, d], to which all ranks' parts are added; None where none is wanted.
    """

    vectors: Tensor
    gradient: Tensor | None
    counts: Sequence[int]


class Stop(NamedTuple):
    """A chunk of a rank's rows."""

    owner: int
    chunk: int

    @property
    def number(self) -> int:
        """Its place among all chunks of all ranks."""
        return self.owner * RING_CHUNKS + self.chunk

    def rows(self, counts: Sequence[int]) -> range:
        """Which of the owner's rows they are. counts: every rank's number of rows."""
        count = counts[self.owner]
        return range(count * self.chunk // RING_CHUNKS, count * (self.chunk + 1) // RING_CHUNKS)


class Visit(NamedTuple):
    """A chunk that is here: each Travelling's vectors, and the gradients to add to, None where none is wanted."""

    stop: Stop
    vectors: list[Tensor]
    gradients: list[Tensor | None]


class Ring:
    """What travels between all ranks. They all go through `first_round` together, and then through `second_round`."""

    def __init__(self, travelling: Sequence[Travelling], rank: int) -> None:
        self._travelling, self._rank, self._ranks = list(travelling), rank, len(travelling[0].counts)
        wanted = [each for each in travelling if each.gradient is not None]
        self._vectors, self._gradients = _Buffers(self._travelling, self.stops), _Buffers(wanted, self.stops)

    @property
    def stops(self) -> list[Stop]:
        """The chunks of all ranks, by their numbers."""
        return [Stop(owner, chunk) for owner in range(self._ranks) for chunk in range(RING_CHUNKS)]

    def first_round(self) -> Iterator[Visit]:
        """All chunks, without gradients: a rank's own, then those of the rank before it, and so on."""
        order = self._order(first=self._rank, direction=-1)
        for place, stop in enumerate(order):
            moves = [_Move(self._vectors, *ends) for ends in _moving(order, place)]
            work = self._start(moves, onwards=1)
            yield Visit(stop, self._vectors_at(stop), [None] * len(self._travelling))
            self._finish(moves, work)

    def second_round(self) -> Iterator[Visit]:
        """All chunks, with gradients: those of the next rank, then of the one after it, and a rank's own in the end."""
        order = self._order(first=self._rank + 1, direction=1)
        for place, stop in enumerate(order):
            moves = []
            for leaving, coming in _moving(order, place):
                moves += [_Move(self._vectors, leaving, coming)] if coming.owner != self._rank else []
                moves.append(_Move(self._gradients, leaving, coming))
            work = self._start(moves, onwards=-1)
            yield Visit(stop, self._vectors_at(stop), self._gradients_at(stop))
            self._finish(moves, work)
        self._vectors.held.clear()

    def _order(self, *, first: int, direction: int) -> list[Stop]:
        """All chunks, owner by owner. What a rank uses at one place, its neighbour uses RING_CHUNKS places later."""
        owners = [(first + direction * turn) % self._ranks for turn in range(self._ranks)]
        return [Stop(owner, chunk) for owner in owners for chunk in range(RING_CHUNKS)]

    def _vectors_at(self, stop: Stop) -> list[Tensor]:
        if stop.owner != self._rank:
            return self._vectors.views(stop)
        return [_rows_of(each.vectors, each, stop) for each in self._travelling]

    def _gradients_at(self, stop: Stop) -> list[Tensor | None]:
        if stop.owner == self._rank:
            return [None if e.gradient is None else _rows_of(e.gradient, e, stop) for e in self._travelling]
        if stop not in self._gradients.held:  # this rank is the first that adds to them
            self._gradients.take(stop).zero_()
        views = iter(self._gradients.views(stop))
        return [None if each.gradient is None else next(views) for each in self._travelling]

    def _start(self, moves: Sequence[_Move], *, onwards: int) -> list[dist.Work]:
        """Begin to send what leaves to the neighbour `onwards`, and to receive what comes from the other neighbour."""
        to, source = (self._rank + onwards) % self._ranks, (self._rank - onwards) % self._ranks
        operations = []
        for buffers, leaving, coming in moves:
            if leaving not in buffers.held:  # a rank's own vectors
                buffers.take(leaving)
                for room, own in zip(buffers.views(leaving), self._vectors_at(leaving)):
                    room.copy_(own)
            buffers.take(coming)
            for operation, stop, peer in ((dist.isend, leaving, to), (dist.irecv, coming, source)):
                if len(message := buffers.message(stop)):
                    operations.append(dist.P2POp(operation, message, peer))
        return dist.batch_isend_irecv(operations) if operations else []

    def _finish(self, moves: Sequence[_Move], work: Sequence[dist.Work]) -> None:
        for each in work:
            each.wait()
        for buffers, leaving, coming in moves:
            buffers.free(leaving)
            if coming.owner == self._rank:  # what the other ranks have added to this rank's gradients
                own = [each for each in self._gradients_at(coming) if each is not None]
                for gradient, others in zip(own, buffers.views(coming)):
                    gradient += others
                buffers.free(coming)


class _Move(NamedTuple):
    """A chunk that leaves, and another that comes meanwhile."""

    buffers: _Buffers
    leaving: Stop
    coming: Stop


def _moving(order: Sequence[Stop], place: int) -> list[tuple[Stop, Stop]]:
    """The chunk that leaves while that at `place` is used, and the one that comes; none at a round's two ends."""
    coming = place - 1 + RING_CHUNKS
    return [(order[place - 1], order[coming])] if place and coming < len(order) else []


def _rows_of(whole: Tensor, each: Travelling, stop: Stop) -> Tensor:
    rows = stop.rows(each.counts)
    return whole[rows.start : rows.stop]


class _Buffers:
    """Room for chunks: one flat buffer each, which holds the rows of one Travelling after the other."""

    def __init__(self, travelling: Sequence[Travelling], stops: Sequence[Stop]) -> None:
        self.held: dict[Stop, Tensor] = {}
        self._travelling, self._spare = list(travelling), list[Tensor]()
        self._largest = max(sum(self._sizes(stop)) for stop in stops)

    def take(self, stop: Stop) -> Tensor:
        """Room for a chunk, as it was left by another."""
        like = self._travelling[0].vectors
        self.held[stop] = self._spare.pop() if self._spare else like.new_empty(self._largest)
        return self.held[stop]

    def free(self, stop: Stop) -> None:
        self._spare.append(self.held.pop(stop))

    def message(self, stop: Stop) -> Tensor:
        """The part of the chunk's buffer that is in use."""
        return self.held[stop][: sum(self._sizes(stop))]

    def views(self, stop: Stop) -> list[Tensor]:
        """The chunk's rows of each Travelling, [n, d]."""
        parts = self.message(stop).split(self._sizes(stop))
        return [part.view(-1, each.vectors.shape[1]) for part, each in zip(parts, self._travelling)]

    def _sizes(self, stop: Stop) -> list[int]:
        return [len(stop.rows(each.counts)) * each.vectors.shape[1] for each in self._travelling]
