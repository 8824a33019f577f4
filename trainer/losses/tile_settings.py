"""The settings of the tiles of trainer/losses/infonce.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FULL, GUIDE = "full", "guide"  # whose scores filter and teach


@dataclass(frozen=True)
class Part:
    """A part of the columns of a query's row of scores: whose vector they are products of, and with whose vectors.

    of_positives: of the query's positive, else of the query. with_queries: with all queries, else with all passages.
    """

    of_positives: bool
    with_queries: bool


# The order of the parts in a row of scores. The first part holds the query's positive, and every loss has it.
PARTS = {
    "query_passage": Part(of_positives=False, with_queries=False),
    "query_query": Part(of_positives=False, with_queries=True),
    "passage_passage": Part(of_positives=True, with_queries=False),
    "passage_query": Part(of_positives=True, with_queries=True),
}
PASSAGES_ALONE = ("query_passage",)


@dataclass(frozen=True)
class MarginFilter:
    """Passages whose similarity exceeds the positive's minus `margin` are no negatives. by: FULL or GUIDE."""

    margin: float
    by: str = FULL


@dataclass(frozen=True)
class ScoreTeacher:
    """by: whose scores are learnt. detached: those scores get no gradient; a guide's never do."""

    by: str = FULL
    detached: bool = True


TAUGHT_BY_FULL = ScoreTeacher()


@dataclass(frozen=True)
class TileSettings:
    """The settings of the loss that `add_contrastive_gradients` computes.

    Sizes have the numbers 0 .. K−1; the guide has the number K. negatives: names of `PARTS`, whose columns share one
    softmax. hardness: α of the weights exp(α · similarity) of a query's own hard negatives.
    """

    loss_weights: tuple[float, ...]
    kl_weights: tuple[float, ...]
    temperature: float
    num_queries: int
    filter: MarginFilter | None = None
    taught: ScoreTeacher = TAUGHT_BY_FULL
    score_memory_mib: float = 256.0
    guide_temperature: float = 1.0
    negatives: tuple[str, ...] = PASSAGES_ALONE
    hardness: float = 0.0

    @property
    def parts(self) -> list[Part]:
        return parts_of(self.negatives)

    @property
    def needs_guide(self) -> bool:
        return self.taught.by == GUIDE or (self.filter is not None and self.filter.by == GUIDE)

    @property
    def teacher(self) -> int:
        return self._number(self.taught.by)

    @property
    def filter_size(self) -> int:
        """The number of the model whose similarities the margin filter reads."""
        return self._number(FULL if self.filter is None else self.filter.by)

    @property
    def students(self) -> range:
        return range(self.teacher)

    @property
    def in_order(self) -> tuple[int, ...]:
        """The teacher, then its students: the order in which a block's scores are computed."""
        return (self.teacher, *self.students)

    @property
    def teaches(self) -> tuple[float, ...]:
        """Each size's weight of the KL; the teacher's is 0, whatever `kl_weights` says."""
        return (*self.kl_weights[: self.teacher], 0.0)

    @property
    def moves_teacher(self) -> bool:
        return any(self.teaches) and not self.taught.detached and self.taught.by == FULL

    @property
    def filters_apart(self) -> bool:
        """Whether the filter reads other scores than the teacher's, which must then be computed before those."""
        return self.filter is not None and self.filter_size != self.teacher

    @property
    def matrices(self) -> int:
        """Matrices of a tile's scores alive at once: exponentials of the teacher and of a student, gaps, penalties."""
        return 1 + (self.teacher > 0) + self.moves_teacher + (self.filter is not None)

    def temperature_of(self, size: int) -> float:
        return self.temperature if size < len(self.loss_weights) else self.guide_temperature

    def _number(self, of: str) -> int:
        return len(self.loss_weights) - (of == FULL)


def parts_of(negatives: Sequence[str]) -> list[Part]:
    """The parts of these names, in the order of their columns."""
    return [part for name, part in PARTS.items() if name in negatives]
