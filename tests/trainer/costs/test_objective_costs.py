"""An objective's own share of a step's costs; tests/launch/test_plan.py compares counts with what the trainer does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from data.ground.errors import ConfigError
from tests.trainer.support import recipe_of, recipe_values
from trainer.costs import flops
from trainer.costs.counts import Shape, Texts, encoder_flops
from trainer.costs.objective_costs import (
    ContrastiveCosts,
    DistillationCosts,
    MaskedCosts,
    ObjectiveCosts,
    costs_of,
    with_kept_graphs,
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


@pytest.mark.parametrize("sections", [{}, {"train": {"activation_checkpointing": True}}])
def test_each_fraction_of_the_feed_forwards_is_a_pass_of_its_own(sections: dict[str, Any]) -> None:
    """The costs of a ladder with fractions are the sum of those of models with such feed-forwards."""

    def costs_at(ladder: list[list[float]]) -> ObjectiveCosts:
        model = {"ladder": ladder, "pooling": "mean"}
        return costs_of(recipe_of(recipe_values("shards", model=model, **sections)))

    nested = costs_at([[2, 16, 0.25], [3, 32, 0.5], [3, 48]])
    shapes = [replace(SHAPE, inner=inner) for inner in (24, 48, 96)]
    alone = costs_at([[3, 48]])
    assert nested.passes(SHAPE) == shapes and alone.passes(SHAPE) == [SHAPE]
    assert nested.model_flops(SHAPE, TEXTS) == sum(alone.model_flops(shape, TEXTS) for shape in shapes)
    assert nested.moved_bytes(SHAPE, TEXTS) == pytest.approx(sum(alone.moved_bytes(shape, TEXTS) for shape in shapes))
    kept, apart = (each.activation_bytes for each in (nested, alone))
    if not sections:
        assert kept(SHAPE, TEXTS) == pytest.approx(sum(apart(shape, TEXTS) for shape in shapes))
    assert apart(SHAPE, TEXTS) < kept(SHAPE, TEXTS) <= sum(apart(shape, TEXTS) for shape in shapes)
    assert flops.sizes_flops(SHAPE, torch.tensor([20] * 10), nested.sizes) == nested.model_flops(SHAPE, TEXTS) / 3


@pytest.mark.parametrize("objective", [{}, {"loss": "cosent", "kl": "none"}])
def test_texts_are_spread_out_through_gram_matrices(objective: dict[str, Any]) -> None:
    """Two products with a d × d matrix a text of either side, and two float64 matrices a size for the network."""
    plain, spread = (
        costs_of(recipe_of(recipe_values("shards", objective={**objective, "spread_weight": weight})))
        for weight in (0.0, 1.0)
    )
    squares = 16**2 + 32**2 + 48**2
    queries = TEXTS.count / (2 if objective else 5)
    added = spread.computed_flops(SHAPE, TEXTS, vectors=VECTORS) - plain.computed_flops(SHAPE, TEXTS, vectors=VECTORS)
    assert added == pytest.approx(2 * 2 * (2 * queries * squares))
    assert (plain.summed_bytes(), spread.summed_bytes()) == (0, 2 * 8 * squares)
    assert spread.gathered_bytes(VECTORS) == plain.gathered_bytes(VECTORS)


def test_components_cost_what_they_are_made_of() -> None:
    """A Gram matrix of whole vectors for each of two layers below the last, and the targets of every narrow size."""
    objective = {"compression_weight": 1.0, "kl": "none"}
    plain, compressed = (
        costs_of(recipe_of(recipe_values("shards", objective=each))) for each in ({"kl": "none"}, objective)
    )
    added = compressed.computed_flops(SHAPE, TEXTS, vectors=VECTORS) - plain.computed_flops(
        SHAPE, TEXTS, vectors=VECTORS
    )
    assert added == pytest.approx(2 * TEXTS.count * 48 * (2 * 48 + 16 + 32))
    summed = 8 * 48 * ((48 + 16) + (48 + 32))
    assert (plain.summed_bytes(), compressed.summed_bytes()) == (0, summed)
    more = compressed.loss_bytes(TEXTS, vectors=VECTORS) - plain.loss_bytes(TEXTS, vectors=VECTORS)
    assert more == pytest.approx(4 * TEXTS.count * 48 * 2 + summed)


def test_distillation_without_relational_terms_compares_nothing() -> None:
    alone = {"model": TEACHER["model"], "teacher": {"model": "t"}}
    costs = costs_of(recipe_of(recipe_values("shards", objective={"name": "distill"}, **alone)))
    assert costs.vectors(TEXTS) == 0 and costs.gathered_bytes(costs.vectors(TEXTS)) == 0
    assert costs.cuts and not costs.caches
    # Negative control.
    costs = costs_of(recipe_of(recipe_values("shards", objective={"name": "distill"}, **TEACHER)))
    assert costs.vectors(TEXTS) == TEXTS.count and costs.caches


def test_kept_graphs_spare_their_second_pass() -> None:
    """With memory for two graphs of four, half of the texts are embedded twice."""
    micro, width = TEXTS.part(0.25), 4.0
    plain = costs_of(recipe_of(recipe_values("shards")))
    graph = plain.activation_bytes(SHAPE, micro, width=width)
    room = {"train": {"activation_memory_mib": 2.5 * graph / 2**20}}
    costs = costs_of(recipe_of(recipe_values("shards", **room)))
    kept = with_kept_graphs(costs, SHAPE, micro=micro, micro_batches=4, width=width)
    assert (plain.encoder_passes, kept.encoder_passes) == (4, 3.5)
    assert with_kept_graphs(costs, SHAPE, micro=micro, micro_batches=1, width=width).encoder_passes == 3
    assert with_kept_graphs(plain, SHAPE, micro=micro, micro_batches=4, width=width) is plain


PAIRS: dict[str, tuple[dict[str, Any], float, float, float]] = {
    # [objective] and [data] -> of ten texts: queries, passages, and vectors that a rank holds of its own
    "spans": ({"objective": {"pairs": "spans"}}, 5, 5, 10),
    "symmetric spans": ({"objective": {"pairs": "spans", "symmetric_spans": True}}, 10, 10, 20),
    "tuples": ({"objective": {"pairs": "tuples"}, "data": {"num_negatives": 3}}, 2, 8, 10),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_pairs_add_to_masked_losses(name: str) -> None:
    """One more forward pass of the encoder, scores, and all ranks' vectors; the masked losses' costs stay."""
    sections, queries, passages, own = PAIRS[name]
    sections = sections | {"objective": {"name": "masked", **sections["objective"]}}
    common = {"train": {"score_memory_mib": 1.0, "logits_memory_mib": 1.0}, "model": TEACHER["model"]}
    paired = costs_of(recipe_of(recipe_values("shards", **common, **sections)))
    alone = costs_of(recipe_of(recipe_values("shards", **common, objective={"name": "masked"})))
    assert paired.caches and paired.cuts and paired.encoder_passes == alone.encoder_passes + 1
    assert paired.vectors(TEXTS) == passages and alone.vectors(TEXTS) == 0
    width = 16 + 32 + 48
    assert paired.gathered_bytes(VECTORS) == 4 * VECTORS * width
    last = 4 * SHAPE.hidden * SHAPE.inner * (TEXTS.tokens - paired.rows_read(TEXTS))
    embedding = encoder_flops(SHAPE, TEXTS) - last
    added = [each.computed_flops(SHAPE, TEXTS, vectors=VECTORS) for each in (paired, alone)]
    assert added[0] - added[1] == pytest.approx(embedding + 3 * 2 * queries * VECTORS * width)
    # Either the term's vectors with their gradients, before any logits, or beside logits the rank's own gradients.
    assert alone.loss_bytes(TEXTS, vectors=VECTORS) == 3 * 2**20
    assert paired.loss_bytes(TEXTS, vectors=VECTORS) == 3 * 2**20 + 4 * width * TEXTS.count
    many = 1e5
    assert paired.loss_bytes(TEXTS, vectors=many) == 8 * width * (own + many) + 2**20


@pytest.mark.parametrize(
    ("negatives", "gathered", "columns"),
    [
        # Ten texts are two queries with four passages each; of the gathered vectors a part reads passages or queries.
        (["query_passage"], 8, 8),
        (["query_passage", "passage_passage"], 8, 16),
        (["query_passage", "query_query"], 10, 10),
        (["query_passage", "passage_query", "query_query", "passage_passage"], 10, 20),
    ],
)
def test_what_further_negatives_cost(negatives: list[str], gathered: int, columns: int) -> None:
    values = {"objective": {"name": "contrastive", "negatives": negatives}, "data": {"num_negatives": 3}}
    recipe = recipe_of(recipe_values("shards", train={"score_memory_mib": 1.0}, **values))
    costs, width = costs_of(recipe), 16 + 32 + 48
    vectors = costs.vectors(TEXTS)
    assert vectors == gathered and costs.gathered_bytes(vectors) == 4 * gathered * width
    alone = ObjectiveCosts(recipe).computed_flops(SHAPE, TEXTS, vectors=vectors)
    added = costs.computed_flops(SHAPE, TEXTS, vectors=vectors) - alone
    assert added == pytest.approx(3 * 2 * 2 * columns * width)
    assert costs.loss_bytes(TEXTS, vectors=vectors) == 8 * width * (TEXTS.count + gathered) + 2**20


def test_a_ring_holds_a_share_and_scores_twice() -> None:
    """Of forty passages the rank's own eight, and a fourth of these more; four products in place of three."""
    ring, gather = (
        costs_of(recipe_of(recipe_values("shards", train={"negatives_exchange": way, "score_memory_mib": 1.0})))
        for way in ("ring", "gather")
    )
    width = 16 + 32 + 48
    assert ring.vectors(TEXTS) == 8 and ring.vectors_held(TEXTS, VECTORS) == 10
    spared = gather.loss_bytes(TEXTS, vectors=VECTORS) - ring.loss_bytes(TEXTS, vectors=VECTORS)
    assert spared == 8 * width * (VECTORS - 10)
    added = ring.computed_flops(SHAPE, TEXTS, vectors=VECTORS) - gather.computed_flops(SHAPE, TEXTS, vectors=VECTORS)
    assert added == pytest.approx(2 * 2 * VECTORS * width)
    assert ring.loss_bytes(TEXTS, vectors=8) == gather.loss_bytes(TEXTS, vectors=8), "one rank has its own alone"


@pytest.mark.parametrize(
    ("sections", "queries", "exchange"),
    [
        # Passages times 96 floats and as many of their gradients: 2 GiB are 2.8 million of them, of four a query.
        ({}, 699_050, "gather"),
        ({}, 699_051, "ring"),
        ({"objective": {"loss": "cosent", "kl": "none"}}, 10**7, "gather"),
        (
            {"teacher": {"model": "t", "similarity_weight": 1.0}, "model": {"source": "x", "config": {}}},
            10**7,
            "gather",
        ),
    ],
)
def test_auto_is_a_ring_where_the_gather_takes_more_than_its_bound(
    sections: dict[str, Any], queries: int, exchange: str
) -> None:
    recipe = recipe_of(recipe_values("shards", train={"global_batch_size": queries}, **sections))
    assert costs_of(recipe).exchange == exchange


def test_a_ring_beside_a_term_that_gathers_is_refused() -> None:
    taught = {"teacher": {"model": "t", "similarity_weight": 1.0}, "model": {"source": "x", "config": {}}}
    with pytest.raises(ConfigError, match="keeps all texts' vectors from being gathered"):
        recipe_of(recipe_values("shards", train={"negatives_exchange": "ring"}, **taught))


def test_what_several_positives_cost() -> None:
    """Ten texts are two queries with two positives and two negatives each: four rows, eight columns, two copies."""
    values = {"objective": {"name": "contrastive"}, "data": {"num_negatives": 2, "num_positives": 2}}
    recipe = recipe_of(recipe_values("shards", train={"score_memory_mib": 1.0}, **values))
    costs, width = costs_of(recipe), 16 + 32 + 48
    vectors = costs.vectors(TEXTS)
    assert vectors == 8
    alone = ObjectiveCosts(recipe).computed_flops(SHAPE, TEXTS, vectors=vectors)
    added = costs.computed_flops(SHAPE, TEXTS, vectors=vectors) - alone
    assert added == pytest.approx(3 * 2 * 4 * 8 * width)
    assert costs.loss_bytes(TEXTS, vectors=vectors) == 8 * width * (10 + 8 + 4) + 2**20
