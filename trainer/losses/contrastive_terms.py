"""What a contrastive loss of several sizes is made of, besides its tensors."""

from __future__ import annotations

from dataclasses import dataclass

FULL, GUIDE = "full", "guide"  # whose scores filter and teach


@dataclass(frozen=True)
class ContrastiveTerms:
    """What the loss of `multi_size_contrastive` is made of, besides its tensors.

    Sizes are 0 .. K−1; K stands for the guide.
    """

    loss_weights: tuple[float, ...]
    kl_weights: tuple[float, ...]
    temperature: float
    num_queries: int
    margin: float | None = None
    detach_teacher: bool = True
    score_memory_mib: float = 256.0
    filter_by: str = FULL
    taught_by: str = FULL
    guide_temperature: float = 1.0

    @property
    def needs_guide(self) -> bool:
        return self.taught_by == GUIDE or (self.margin is not None and self.filter_by == GUIDE)

    @property
    def teacher(self) -> int:
        return self._number(self.taught_by)

    @property
    def filter_size(self) -> int:
        """Whose similarities the margin filter looks at."""
        return self._number(self.filter_by)

    @property
    def students(self) -> range:
        return range(self.teacher)

    @property
    def teaches(self) -> tuple[float, ...]:
        """Each size's weight of the KL; the teacher's from itself is 0 whatever its weight."""
        return (*self.kl_weights[: self.teacher], 0.0)

    @property
    def moves_teacher(self) -> bool:
        return any(self.teaches) and not self.detach_teacher and self.taught_by == FULL

    @property
    def filters_apart(self) -> bool:
        """Whether the filter needs scores before the teacher's, which are computed first otherwise."""
        return self.margin is not None and self.filter_size != self.teacher

    @property
    def matrices(self) -> int:
        """Matrices of a tile's scores alive at once: exponentials of the teacher and of a student, gaps, penalties."""
        return 1 + (self.teacher > 0) + self.moves_teacher + (self.margin is not None)

    def temperature_of(self, size: int) -> float:
        return self.temperature if size < len(self.loss_weights) else self.guide_temperature

    def _number(self, of: str) -> int:
        return len(self.loss_weights) - (of == FULL)
