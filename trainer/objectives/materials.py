"""What every objective is built from, besides its recipe."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.costs.flops import Shape
from trainer.objectives.guide import PairGuide
from trainer.objectives.size_schedules import Schedule
from trainer.objectives.teacher import Teaching


@dataclass(frozen=True)
class Materials:
    """What an objective is built from, besides its recipe.

    packed: whether the encoder's attention runs over texts without padding. static: whether the encoder is a table of
    token embeddings. guide, teaching: of the frozen models that the recipe names.
    """

    schedule: Schedule
    shape: Shape
    packed: bool
    static: bool = False
    guide: PairGuide | None = None
    teaching: Teaching | None = None
