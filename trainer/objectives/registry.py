"""For each value of `objective.name`: the objective that trains, and the collator that makes its batches.

An objective turns this rank's share of a global batch into gradients in the engine and returns a StepReport. All of the
report adds up over ranks: losses are parts of the global batch's means. An objective's kind (trainer/config/kinds.py)
answers all other questions of the program, without torch. An objective of another package is one class: a kind with the
two methods of `Maker` (docs/objectives.md shows one).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from data.ground.errors import ConfigError
from data.shards.reader import ShardFolder
from trainer.config.schema import Recipe
from trainer.objectives.backward import Passes, StepReport
from trainer.objectives.collators import masked_collator, pair_collator, text_collator
from trainer.objectives.contrastive import contrastive
from trainer.objectives.distillation import distillation
from trainer.objectives.masked import masked
from trainer.objectives.materials import Materials


class Objective(Protocol):
    def forward_backward(self, engine: Passes, batch: Any, step: int) -> StepReport: ...


@runtime_checkable
class Maker(Protocol):
    """Makes an objective, and the collator of its batches."""

    def collator(self, recipe: Recipe, sources: Sequence[ShardFolder]) -> Any: ...

    def objective(self, recipe: Recipe, materials: Materials) -> Objective: ...


@dataclass(frozen=True)
class _Made:
    collator: Callable[[Recipe, Sequence[ShardFolder]], Any]
    objective: Callable[[Recipe, Materials], Objective]


MAKERS: Mapping[str, Maker] = {
    "masked": _Made(masked_collator, masked),
    "contrastive": _Made(pair_collator, contrastive),
    "distill": _Made(text_collator, distillation),
}


def maker_of(recipe: Recipe) -> Maker:
    """The maker of the recipe's objective. Raises ConfigError where another package's kind is no Maker."""
    if recipe.objective.name in MAKERS:
        return MAKERS[recipe.objective.name]
    kind = recipe.kind
    if not isinstance(kind, Maker):
        raise ConfigError(
            f"objective.name = {recipe.objective.name!r} is {type(kind).__qualname__}, which lacks the methods "
            "collator and objective; add them (docs/objectives.md)"
        )
    return kind
