"""What the tiles of trainer/losses/infonce.py compute with, besides tensors."""

from __future__ import annotations

from dataclasses import dataclass

FULL, GUIDE = "full", "guide"  # whose scores filter and teach


@dataclass(frozen=True)
class MarginFilter:
    """Passages whose similarity exceeds the positive's minus `margin` are no negatives. by: whose similarity."""

    margin: float
    by: str = FULL


@dataclass(frozen=True)
class ScoreTeacher:
    """by: whose scores are learnt. detached: whether they stay where they are, as a guide's do anyway."""

    by: str = FULL
    detached: bool = True


TAUGHT_BY_FULL = ScoreTeacher()


@dataclass(frozen=True)
class TileSettings:
    """What the loss of `add_contrastive_gradients` is made of, besides its tensors.

    Sizes are 0 .. K−1; K stands for the guide.
    """

    loss_weights: tuple[float, ...]
    kl_weights: tuple[float, ...]
    temperature: float
    num_queries: int
    filter: MarginFilter | None = None
    taught: ScoreTeacher = TAUGHT_BY_FULL
    score_memory_mib: float = 256.0
    guide_temperature: float = 1.0

    @property
    def needs_guide(self) -> bool:
        return self.taught.by == GUIDE or (self.filter is not None and self.filter.by == GUIDE)

    @property
    def teacher(self) -> int:
        return self._number(self.taught.by)

    @property
    def filter_size(self) -> int:
        """Whose similarities the margin filter looks at."""
        return self._number(FULL if self.filter is None else self.filter.by)

    @property
    def students(self) -> range:
        return range(self.teacher)

    @property
    def teaches(self) -> tuple[float, ...]:
        """Each size's weight of the KL; the teacher's from itself is 0 whatever its weight."""
        return (*self.kl_weights[: self.teacher], 0.0)

    @property
    def moves_teacher(self) -> bool:
        return any(self.teaches) and not self.taught.detached and self.taught.by == FULL

    @property
    def filters_apart(self) -> bool:
        """Whether the filter needs scores before the teacher's, which are computed first otherwise."""
        return self.filter is not None and self.filter_size != self.teacher

    @property
    def matrices(self) -> int:
        """Matrices of a tile's scores alive at once: exponentials of the teacher and of a student, gaps, penalties."""
        return 1 + (self.teacher > 0) + self.moves_teacher + (self.filter is not None)

    def temperature_of(self, size: int) -> float:
        return self.temperature if size < len(self.loss_weights) else self.guide_temperature

    def _number(self, of: str) -> int:
        return len(self.loss_weights) - (of == FULL)
