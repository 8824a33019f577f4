"""Benchmark: what the newer contrastive terms cost beside SRL, and how exact they are; one thread, all in turn.

    python -m tests.benchmarks.contrastive_terms [--quick] [--queries N] [--json FILE]

A term is a recipe's settings, compared with the same recipe without it; for most that is SRL, InfoNCE and KL at six
(layers, width) sizes, cosine at τ = 0.05. Figures of each term:
  time/TERM           CPU time of a training step with the term ÷ without it: a BERT of 6 layers × 384, real NLI
                      triplets, gradient caching; a guide's and a teacher's vectors come from a store
  loss_time/TERM      the same of the loss and its gradients alone, of random vectors
  difference/TERM     largest relative difference, of the loss and of the gradients of each depth's vectors, between
                      the loss of training and its restatement in tests/reference.py, both in float64; in one tile and
                      in many. largest_difference: of all terms
  effect/TERM         relative difference that the term makes to the restated loss; without any, exactness says nothing
  memory_growth/TERM  peak memory of the loss and its gradients at 4,096 queries ÷ at 512, four passages each, in equal
                      tiles (MEMORY_TILE); largest_memory_growth: of the terms that are only tiled (TILED)
  memory_share/TERM   how many bytes that memory grows for each byte of the texts' vectors, over all sizes
Memory is what torch allocates beyond what the loss is given, the vectors of all sizes and those of a teacher, and
beyond the gradients that it hands out. Nothing else is taken off, so the numbers that a text has besides (lengths at
each size, hashes, places) and those of a query and a block of columns count, and they do grow with the batch. A growth
near 1 thus says that, of all that is quadratic in the batch, only a tile is held, and that vectors are copied a few
thousand rows at a time at most. Tiles are equal because `train.score_memory_mib` would give a small batch other ones.
The other terms copy vectors of the whole batch, and their share says how much: one size's queries and positives
("spread"), a second set of gradients ("compression"), a role's texts ("vectors"), all texts ("similarities", "gram"),
or a row of each positive ("positives"). "spread", "compression" and "gram" also compute in float64, the former two up
to 4,096 rows at a time, which between these two batches is growth, too.
--quick: the differences and effects are those of a full run; memory of the terms that are only tiled grows from 512 to
1,024 queries; steps are of 16 triplets and losses of 256 queries, timed once, which says little. Two minutes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from data.collate import PairBatch, Texts
from models.encoder import Encoder
from tests.benchmarks import srl_step
from tests.benchmarks.guide import build_guide, store_of, take_step
from tests.benchmarks.support import SHARED, Figures, peak_allocation, take_turns
from tests.reference import blocks_of_negatives, naive_owners, naive_terms, plan_of
from tests.trainer.objectives.given import Given
from trainer.build import ModelParts, build_objective
from trainer.config.load import as_tables, build_recipe
from trainer.config.schema import Recipe
from trainer.distributed import World
from trainer.losses import infonce, tiled_rows
from trainer.losses.tile_settings import PARTS
from trainer.losses.tiles import Tiling
from trainer.objectives import infonce_terms
from trainer.objectives.contrastive import ContrastiveObjective
from trainer.objectives.teacher import StoredTeacher

GUIDE = {"store": "given", "temperature": 0.05}
TEACHER = {"vectors": "stored", "store": "given", "vector_weight": 0.0}
ESPRESSO: dict[str, Any] = {"sizes": "espresso", "layer_weighting": "log", "kl": "none"}
ESPRESSO_LADDER = {"ladder": [[3, 128], [6, 384]]}
# What a recipe changes of SRL's, by section.
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "srl": {},
    "infonce": {"objective": {"kl": "none"}},
    "espresso": {"objective": ESPRESSO, "model": ESPRESSO_LADDER},
    "compression": {"objective": ESPRESSO | {"compression_weight": 1.0}, "model": ESPRESSO_LADDER},
    "spread": {"objective": {"spread_weight": 1.0}},
    "hardness": {"objective": {"hardness": 5.0}},
    "blocks": {"objective": {"negatives": list(PARTS)}},
    "guide_filter": {"objective": {"filter_false_negatives": True, "filter_by": "guide"}, "guide": GUIDE},
    "guide_kl": {"objective": {"kl_teacher": "guide"}, "guide": GUIDE},
    "vectors": {"teacher": TEACHER | {"vector_weight": 1.0, "balance": "roles"}},
    "similarities": {"teacher": TEACHER | {"similarity_weight": 1.0}},
    "gram": {"teacher": TEACHER | {"gram_weight": 1.0}},
    "weights": {},  # the batch has them
    "positives": {"data": {"num_positives": 2}},
}
TILED = ("kl", "hardness", "blocks", "guide_filter", "guide_kl", "weights")
# The settings with a term, and those without it.
TERMS = {"kl": ("srl", "infonce"), "compression": ("compression", "espresso")}
TERMS |= {name: (name, "srl") for name in SETTINGS if name not in {each for pair in TERMS.values() for each in pair}}
MEMORY_PASSAGES, MEMORY_TILE = 4, Tiling(queries=256, columns=4096, keeps_rows=False)
EXACT_QUERIES, EXACT_PASSAGES, EXACT_MIB = 24, 3, (256.0, 2.0**-8)


def recipe_of(setting: str, **train: Any) -> Recipe:
    tables = as_tables(srl_step.recipe())
    for section, changes in {**SETTINGS[setting], "train": train}.items():
        tables[section] |= changes
    return build_recipe(tables)


def objective_of(recipe: Recipe, encoder: Encoder, *, guide: Any, teacher: Any) -> ContrastiveObjective:
    """As training builds it. The guide and the teacher are for recipes that have one."""
    frozen = {"guide": guide if recipe.uses_guide else None, "teacher": teacher if recipe.is_taught else None}
    objective = build_objective(recipe, ModelParts(encoder, encoder, encoder.backbone, None, **frozen))
    assert isinstance(objective, ContrastiveObjective)
    return objective


def batch_for(setting: str, batch: PairBatch) -> PairBatch:
    """The same texts, but where weights are the term, with weights, or where positives are, with two a query."""
    count = len(batch.queries)
    if setting == "weights":
        return replace(batch, weights=torch.arange(count) % 4 / 2)
    if setting == "positives":
        targets = (batch.targets[:, None] + torch.arange(2)).flatten()
        owners, known, offsets = (
            batch.passage_query[targets],
            batch.passage_hashes[targets],
            torch.arange(count + 1) * 2,
        )
        return replace(batch, targets=targets, target_query=owners, known_hashes=known, known_offsets=offsets)
    return batch


def textless_batch(queries: int, per_query: int) -> PairBatch:
    """A batch without texts, of hashes of which some are equal. Each query's first passage is its positive."""
    count, targets = queries * per_query, torch.arange(queries) * per_query
    hashes = torch.randint(8 * count, (queries + count,), generator=torch.Generator().manual_seed(0))
    nothing = torch.zeros(0, dtype=torch.int32)
    return PairBatch(
        queries=Texts(nothing, torch.zeros(queries + 1, dtype=torch.int64)),
        passages=Texts(nothing, torch.zeros(count + 1, dtype=torch.int64)),
        targets=targets,
        passage_query=torch.arange(queries).repeat_interleave(per_query),
        scores=None,
        query_hashes=hashes[:queries],
        passage_hashes=hashes[queries:],
        known_hashes=hashes[queries:][targets],
        known_offsets=torch.arange(queries + 1),
        sample_ids=torch.arange(queries),
    )


class Loss:
    """A setting's loss of random vectors, as training builds it. Sizes of one depth are prefixes of its `states`."""

    def __init__(self, setting: str, encoder: Encoder, queries: int, per_query: int, mib: float = 256.0) -> None:
        self.recipe = recipe_of(setting, score_memory_mib=mib)
        self.batch = batch_for(setting, textless_batch(queries, per_query))
        generator, shape = torch.Generator().manual_seed(1), (queries * (1 + per_query), self.recipe.ladder.full.dim)
        self.given = Given(F.normalize(torch.randn(shape, generator=generator), dim=1))
        objective = objective_of(self.recipe, encoder, guide=self.given, teacher=self.given)
        self.loss, self.plan, alone = objective.loss, objective.schedule(0), World.alone()
        depths = sorted({size.layers for size in self.plan.sizes})
        self.states = {layers: torch.randn(shape, generator=generator) for layers in depths}
        self.engine: Any = SimpleNamespace(world=alone, device=alone.device, heartbeat=lambda phase: None)

    def embeddings(self) -> list[Tensor]:
        return [self.states[size.layers][:, : size.dim].detach().clone() for size in self.plan.sizes]

    def computed(self, embeddings: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        losses, gradients = self.loss.loss_and_gradients(embeddings, self.batch, self.plan, self.engine)
        return losses["loss"], gradients

    def restated(self) -> Tensor:
        """The loss of the states, in a graph."""
        recipe, batch, (sizes, *_), guided = self.recipe, self.batch, plan_of(self.recipe, 0), {}
        if recipe.uses_guide:
            queries, passages = self.given.pair_vectors(batch)
            scores = blocks_of_negatives(
                queries, passages, batch.targets, naive_owners([batch]), recipe.objective, lambda q, p: q @ p.T
            )
            guided = {"guide": scores, "guide_temperature": self.given.temperature}
        whole = [self.states[size.layers] for size in sizes]
        embeddings = [each[:, : size.dim] for each, size in zip(whole, sizes)]
        taught = self.given.both if recipe.is_taught else None
        return naive_terms([embeddings], [whole], [batch], recipe, 0, guided=guided, taught=taught)


@contextmanager
def in_float64() -> Iterator[None]:
    """Vectors that are made inside are float64, and so are the tiles' scores, which are float32 in training."""
    in_tiles = partial(infonce.add_contrastive_gradients, dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        with patch.object(infonce_terms, "add_contrastive_gradients", in_tiles):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def apart(got: Tensor, wanted: Tensor) -> float:
    """The largest difference of an entry over the largest entry."""
    return float((got - wanted).abs().max() / wanted.abs().max())


def exactness(setting: str, without: str, encoder: Encoder) -> tuple[float, float]:
    """The relative difference of computed and restated loss and gradients, and the term's effect on the loss."""
    found = []
    for mib in EXACT_MIB:
        loss = Loss(setting, encoder, EXACT_QUERIES, EXACT_PASSAGES, mib)
        states = [each.requires_grad_() for each in loss.states.values()]
        expected = loss.restated()
        wanted = torch.autograd.grad(expected, states)
        value, gradients = loss.computed(loss.embeddings())
        got = {layers: torch.zeros_like(each) for layers, each in loss.states.items()}
        for size, gradient in zip(loss.plan.sizes, gradients, strict=True):
            got[size.layers][:, : size.dim] += gradient
        found += [apart(value, expected.detach()), *map(apart, got.values(), wanted)]
    plain = Loss(without, encoder, EXACT_QUERIES, EXACT_PASSAGES).restated()
    return max(found), apart(expected.detach(), plain)


def memory_of(setting: str, encoder: Encoder, queries: int) -> tuple[float, float]:
    """MiB of a setting's loss at the peak, and of the vectors that it is given."""
    loss = Loss(setting, encoder, queries, MEMORY_PASSAGES)
    embeddings = loss.embeddings()
    with patch.object(tiled_rows, "choose_tiling", lambda *shape, **limits: MEMORY_TILE):
        peak, (_, gradients) = peak_allocation(partial(loss.computed, embeddings))
    handed_out = sum(each.untyped_storage().nbytes() for each in gradients)
    return peak - handed_out / 2**20, sum(each.nbytes for each in embeddings) / 2**20


def loss_seconds(encoder: Encoder, queries: int, *, repeats: int) -> dict[str, float]:
    """CPU seconds of each setting's loss and gradients."""
    losses = {setting: Loss(setting, encoder, queries, per_query=2) for setting in SETTINGS}
    actions = {setting: lambda loss=loss: loss.computed(loss.embeddings()) for setting, loss in losses.items()}
    return take_turns(actions, repeats=repeats)


def step_seconds(queries: int, *, repeats: int) -> dict[str, float]:
    """The CPU seconds of one training step with each setting."""
    ours, batch = srl_step.Ours(), srl_step.batch_of(srl_step.nli_rows(queries))
    steps, few = {}, srl_step.batch_of(srl_step.nli_rows(min(4, queries)))
    with tempfile.TemporaryDirectory() as scratch:
        stored = store_of(build_guide(), batch, Path(scratch) / "store")
        for setting in SETTINGS:
            teacher = StoredTeacher(stored.store)
            objective = objective_of(recipe_of(setting), ours.encoder, guide=stored, teacher=teacher)
            take_step(ours, objective, batch_for(setting, few))
            steps[setting] = partial(take_step, ours, objective, batch_for(setting, batch))
        return take_turns(steps, repeats=repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--queries", type=int, default=128, help="triplets of a step (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not SHARED.is_dir():
        raise SystemExit("this benchmark reads ../shared/data, which is absent")
    figures, encoder = Figures(), srl_step.build_encoder()
    with in_float64():
        for term, (setting, without) in TERMS.items():
            difference, effect = exactness(setting, without, encoder)
            figures.show(**{f"difference/{term}": difference, f"effect/{term}": effect})
    figures.show(largest_difference=max(figures.values[f"difference/{term}"] for term in TERMS))
    few, many = (512, 1024) if args.quick else (512, 4096)
    for term in TILED if args.quick else TERMS:
        setting, _ = TERMS[term]
        (small, given), (large, more) = (memory_of(setting, encoder, queries) for queries in (few, many))
        share = (large - small) / (more - given)
        figures.show(**{f"memory_growth/{term}": large / small, f"memory_share/{term}": share})
    figures.show(largest_memory_growth=max(figures.values[f"memory_growth/{term}"] for term in TILED))
    of_loss = loss_seconds(encoder, 256 if args.quick else 1024, repeats=1 if args.quick else 5)
    of_step = step_seconds(16 if args.quick else args.queries, repeats=1 if args.quick else 3)
    for term, (setting, without) in TERMS.items():
        time, loss_time = (seconds[setting] / seconds[without] for seconds in (of_step, of_loss))
        figures.show(**{f"time/{term}": time, f"loss_time/{term}": loss_time})
    figures.show(step_seconds=of_step["srl"], loss_seconds=of_loss["srl"])
    figures.write(args.json)


if __name__ == "__main__":
    main()
