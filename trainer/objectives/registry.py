"""Objectives: task × size schedule × inner loss × backward strategy.

An objective turns this rank's share of a global batch into gradients in the engine and says what it saw. All it returns
adds up over ranks: losses are parts of the global batch's means. The registry maps a recipe's `objective.name` to what
makes it (trainer/objectives/masked.py, contrastive.py, distillation.py); a new idea is one class and one line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from trainer.config.schema import Recipe
from trainer.objectives.backward import Passes, StepReport
from trainer.objectives.contrastive import contrastive
from trainer.objectives.distillation import distillation
from trainer.objectives.masked import masked


class Objective(Protocol):
    def forward_backward(self, engine: Passes, batch: Any, step: int) -> StepReport: ...


REGISTRY: dict[str, Callable[..., Objective]] = {
    "masked": masked,
    "contrastive": contrastive,
    "distill": distillation,
}


def wanted_layers(recipe: Recipe) -> int:
    """How many layers the encoder keeps: all, but for a size trained on its own."""
    return (recipe.single_size or recipe.ladder.full).layers
