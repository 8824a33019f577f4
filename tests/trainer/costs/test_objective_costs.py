"""An objective's own share of a step's costs; tests/launch/test_plan.py compares counts with what the trainer does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.support import recipe_of, recipe_values
from trainer.costs.counts import Shape, Texts, encoder_flops
from trainer.costs.objective_costs import (
    ContrastiveCosts,
    DistillationCosts,
    MaskedCosts,
    ObjectiveCosts,
    costs_of,
)

SHAPE, TEXTS, VECTORS = Shape(48, 96, 3, 2000), Texts(10, 200, 4000), 40.0
TEACHER = {"model": {"source": "x", "config": {}}, "teacher": {"model": "t", "similarity_weight": 1.0}}
OBJECTIVES: dict[str, tuple[type[ObjectiveCosts], dict[str, Any]]] = {
    "masked": (MaskedCosts, {}),
    "contrastive": (ContrastiveCosts, {}),
    "distill": (DistillationCosts, TEACHER),
}


def figures(costs: ObjectiveCosts) -> dict[str, float]:
    """What an objective with nothing of its own leaves at nothing, or at the encoder's."""
    encoder = costs.encoder_passes * encoder_flops(SHAPE, TEXTS)
    last = costs.encoder_passes * 4 * SHAPE.hidden * SHAPE.inner * (TEXTS.tokens - costs.rows_read(TEXTS))
    return {
        "parameters": sum(costs.own_parameters(SHAPE)),
        "operations": costs.computed_flops(SHAPE, TEXTS, vectors=VECTORS) - (encoder - last),
        "table": costs.table_gradient_bytes(SHAPE),
        "loss": costs.loss_bytes(TEXTS, vectors=VECTORS),
        "vectors": costs.vectors(TEXTS),
        "gathered": costs.gathered_bytes(VECTORS),
    }


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_each_objective_adds_to_one_that_only_embeds(name: str) -> None:
    kind, sections = OBJECTIVES[name]
    recipe = recipe_of(recipe_values("shards", objective={"name": name}, **sections))
    costs = costs_of(recipe)
    assert type(costs) is kind
    assert set(figures(ObjectiveCosts(recipe)).values()) == {0}
    added = {figure for figure, value in figures(costs).items() if value > 0}
    expected = {"parameters", "table"} if name == "masked" else {"vectors", "gathered"}
    assert added == {"operations", "loss"} | expected
    assert costs.pretrains is (name == "masked")


def test_distillation_without_relational_terms_compares_nothing() -> None:
    alone = {"model": TEACHER["model"], "teacher": {"model": "t"}}
    costs = costs_of(recipe_of(recipe_values("shards", objective={"name": "distill"}, **alone)))
    assert costs.vectors(TEXTS) == 0 and costs.gathered_bytes(costs.vectors(TEXTS)) == 0
    assert costs.cuts and not costs.caches
    # Negative control.
    costs = costs_of(recipe_of(recipe_values("shards", objective={"name": "distill"}, **TEACHER)))
    assert costs.vectors(TEXTS) == TEXTS.count and costs.caches
