"""A contrastive loss over the global batch: the sum of a recipe's terms, with gradients for this rank's embeddings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data.collate import PairBatch
from trainer.config.schema import Recipe
from trainer.costs.objective_costs import costs_of
from trainer.losses.tile_settings import PASSAGES_ALONE, MarginFilter, ScoreTeacher
from trainer.losses.unit_vectors import normalize_, unnormalized_gradient_
from trainer.objectives.backward import Passes
from trainer.objectives.compression import Compression
from trainer.objectives.contrastive_terms import (
    Compared,
    CoordinateKL,
    CoordinateTerm,
    CoSENT,
    GuideVectors,
    Margins,
    Taught,
    Term,
)
from trainer.objectives.guide import PairGuide
from trainer.objectives.infonce_terms import Asymmetric, InfoNCE, Negatives
from trainer.objectives.size_schedules import SizePlan
from trainer.objectives.spread import SpreadOut
from trainer.objectives.teacher import Teaching


@dataclass(frozen=True)
class ContrastiveLoss:
    """SRL and its relatives (Starbucks §3.1). The caller embeds the texts; the loss runs no pass of the engine.

    terms: losses of the vectors as they are compared (unit vectors where `cosine`), in the order in which they are
    added. taught: a loss of the same vectors; its gradients are added before the terms' and its value after theirs.
    coordinates: losses of the vectors as the model gives them. guide: the model whose scores the terms read; None where
    no term reads any.
    """

    cosine: bool
    terms: tuple[Term, ...]
    taught: Taught | None = None
    coordinates: tuple[CoordinateTerm, ...] = ()
    guide: PairGuide | None = None

    def loss_and_gradients(
        self, embeddings: list[Tensor], batch: PairBatch, plan: SizePlan, engine: Passes
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The global batch's loss (this rank's part) and its gradient with respect to this rank's embeddings.

        embeddings: one [queries + passages, d] for each size, queries first. They are normalised in place, because a
        large batch leaves memory for the embeddings and their gradients, but for no further copy.
        """
        before = [term.losses_and_gradients(embeddings, batch, plan, engine) for term in self.coordinates]
        vectors, read = embeddings[plan.uncompared :], embeddings[: plan.uncompared]
        lengths = [normalize_(each) for each in vectors] if self.cosine else []
        gradients = [torch.zeros_like(each) for each in vectors]
        given = Compared(vectors, gradients, batch, plan.compared, engine, self._guide_vectors(batch, engine))
        taught = {} if self.taught is None else self.taught.add_gradients(given)
        losses = [term.add_gradients(given) for term in self.terms]
        for gradient, unit, length in zip(gradients, vectors, lengths):
            unnormalized_gradient_(gradient, unit, length)
        for _, of_coordinates in before:
            for gradient, extra in zip(gradients, of_coordinates):
                gradient += extra
        nothing = [each.new_zeros(()).expand_as(each) for each in read]
        return _sum([*losses, *(found for found, _ in before), taught]), [*nothing, *gradients]

    def is_prefix_infonce(self, batch: PairBatch) -> bool:
        """Whether `prefix_infonce_` can compute the loss of sizes that are prefixes of one vector.

        All ranks answer alike: whether a batch has weights depends on the shards, and whether several positives count
        depends on the recipe.
        """
        (first, *others) = self.terms
        plain = batch.weights is None and batch.target_query is None
        alone = not others and self.taught is None and not self.coordinates and plain
        return alone and isinstance(first, InfoNCE) and first.is_nested

    def prefix_infonce_(self, vectors: Tensor, batch: PairBatch, plan: SizePlan, engine: Passes) -> dict[str, Tensor]:
        """The loss, where `is_prefix_infonce` (trainer/losses/prefix_infonce.py).

        Overwrites `vectors` [queries + passages, d] with their gradients.
        """
        (term,) = self.terms
        assert isinstance(term, InfoNCE)
        given = Compared([], [], batch, plan, engine, self._guide_vectors(batch, engine))
        return term.nested_gradients_(vectors, given, cosine=self.cosine)

    def _guide_vectors(self, batch: PairBatch, engine: Passes) -> GuideVectors | None:
        if self.guide is None:
            return None
        vectors = self.guide.pair_vectors(batch, device=engine.device, heartbeat=engine.heartbeat)
        return GuideVectors(*vectors, self.guide.temperature)


def _sum(found: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All terms' losses by name. Values of the same name ("loss") are added in this order."""
    losses: dict[str, Tensor] = {}
    for each in found:
        losses |= {name: losses[name] + value if name in losses else value for name, value in each.items()}
    return losses


def contrastive_loss(
    recipe: Recipe, *, guide: PairGuide | None = None, teaching: Teaching | None = None
) -> ContrastiveLoss:
    """The loss of a fine-tuning recipe."""
    chosen = recipe.objective
    kl = chosen.kl if chosen.kl_weight else "none"
    teacher = ScoreTeacher(chosen.kl_teacher, chosen.detach_teacher)
    terms: list[Term] = []
    if chosen.loss == "cosent":
        terms.append(CoSENT(chosen.temperature))
    elif kl == "scores":
        terms.append(replace(_infonce(recipe), kl_weight=chosen.kl_weight, teacher=teacher))
    else:
        terms.append(_infonce(recipe))
    if chosen.asymmetric_weight:
        plain = _infonce(recipe, parts=PASSAGES_ALONE)
        terms.append(Asymmetric(chosen.asymmetric_weight, plain, chosen.similarity == "cosine"))
    if kl == "margins":
        terms.append(Margins(chosen.kl_weight, chosen.temperature, teacher))
    terms += _spread_out(recipe)
    coordinates: list[CoordinateTerm] = []
    if kl == "coordinates":
        coordinates.append(CoordinateKL(chosen.kl_weight, chosen.kl_temperature, chosen.detach_teacher))
    if recipe.compresses:
        coordinates.append(Compression(chosen.compression_weight, chosen.compression_temperature))
    return ContrastiveLoss(
        chosen.similarity == "cosine",
        tuple(terms),
        None if teaching is None else Taught(teaching),
        tuple(coordinates),
        guide if recipe.guide_filters or (recipe.guide_teaches and kl != "none") else None,
    )


def pair_loss(recipe: Recipe, *, guide: PairGuide | None = None) -> ContrastiveLoss:
    """The contrastive loss that is added to masked losses: InfoNCE without a KL, and the spread-out term."""
    cosine = recipe.objective.similarity == "cosine"
    terms: list[Term] = [_infonce(recipe), *_spread_out(recipe)]
    return ContrastiveLoss(cosine, tuple(terms), guide=guide if recipe.guide_filters else None)


def _spread_out(recipe: Recipe) -> list[SpreadOut]:
    weight = recipe.objective.spread_weight
    return [SpreadOut(weight, unit=recipe.objective.similarity == "cosine")] if weight else []


def _infonce(recipe: Recipe, *, parts: tuple[str, ...] = ()) -> InfoNCE:
    """parts: in place of the recipe's own `objective.negatives`."""
    chosen = recipe.objective
    margin = MarginFilter(chosen.false_negative_margin, chosen.filter_by) if chosen.filter_false_negatives else None
    negatives = Negatives(chosen.mask_false_negatives, margin, parts or tuple(chosen.negatives))
    return InfoNCE(
        chosen.temperature,
        negatives,
        recipe.train.score_memory_mib,
        hardness=chosen.hardness,
        in_a_ring=costs_of(recipe).exchange == "ring",
    )
