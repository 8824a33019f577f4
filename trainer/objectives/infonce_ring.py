"""InfoNCE over the global batch in a ring of ranks: passages visit all ranks' queries, and their gradients come home.

No rank ever holds all passages (trainer/ring.py). The mathematics is in trainer/losses/infonce_in_turn.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from trainer.losses.infonce_in_turn import InfoNCEInTurn
from trainer.losses.tile_settings import TileSettings
from trainer.losses.tiles import Columns, Side
from trainer.ring import Ring, Stop, Travelling, Visit


def contrast_in_a_ring(
    rows: Side,
    passages: Side,
    queries: Side | None,
    *,
    counts: tuple[Sequence[int], Sequence[int]],
    rank: int,
    targets: Tensor,
    settings: TileSettings,
    excluded: Tensor | None,
    hard: Tensor | None,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of this rank's rows against all ranks' passages, as `add_contrastive_gradients` returns it.

    rows, passages, queries: this rank's vectors of each size and their gradients, then a guide's vectors and None;
    queries where they are columns, else None. counts: every rank's number of passages, and of queries. targets: int64
    [r], each row's positive among this rank's passages. excluded, hard: pairs of a row and a column of the global
    batch. Gradients are added to those of this rank's rows, passages and queries.
    """
    of_passages, of_queries = counts
    sides = [(passages, of_passages), *([(queries, of_queries)] if queries is not None else [])]
    ring = Ring([each for side, number in sides for each in _travelling(side, number)], rank)
    of_queries = of_queries if queries is not None else [0] * len(of_passages)
    contrast = InfoNCEInTurn(
        rows,
        passages,
        targets,
        settings,
        Columns(range(sum(of_passages)), range(sum(of_queries))),
        [Columns(_places(stop, of_passages), _places(stop, of_queries)) for stop in ring.stops],
        before=sum(of_passages[:rank]),
        excluded=excluded,
        hard=hard,
        weights=weights,
        dtype=passages.vectors[0].dtype,
    )
    for visit in ring.first_round():
        contrast.add_sums(visit.stop.number, *_sides(visit, len(passages.vectors)))
    found = contrast.sum_up()
    for visit in ring.second_round():
        contrast.add_gradients(visit.stop.number, *_sides(visit, len(passages.vectors)))
    return found


def _travelling(side: Side, counts: Sequence[int]) -> list[Travelling]:
    """A guide's vectors travel in the dtype of the others."""
    dtype = side.vectors[0].dtype
    return [Travelling(each.to(dtype), gradient, counts) for each, gradient in zip(side.vectors, side.gradients)]


def _places(stop: Stop, counts: Sequence[int]) -> range:
    """Where a chunk's texts are in the global batch."""
    start, rows = [0, *accumulate(counts)][stop.owner], stop.rows(counts)
    return range(start + rows.start, start + rows.stop)


def _sides(visit: Visit, count: int) -> tuple[Side, Side | None]:
    """The passages that have come, and the queries, if any."""
    passages = Side(visit.vectors[:count], visit.gradients[:count])
    queries = Side(visit.vectors[count:], visit.gradients[count:])
    return passages, queries if queries.vectors else None
