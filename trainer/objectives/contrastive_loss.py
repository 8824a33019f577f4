"""A contrastive loss over the global batch: the sum of a recipe's terms, with gradients for this rank's embeddings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data.collate import PairBatch
from trainer.config.read_keys import is_read
from trainer.config.schema import Recipe
from trainer.losses.tile_settings import MarginFilter, ScoreTeacher
from trainer.losses.unit_vectors import normalize_, unnormalized_gradient_
from trainer.objectives.backward import Passes
from trainer.objectives.contrastive_terms import Compared, CoordinateKL, CoSENT, GuideVectors, Margins, Taught, Term
from trainer.objectives.guide import PairGuide
from trainer.objectives.infonce_terms import Asymmetric, InfoNCE, Negatives
from trainer.objectives.size_schedules import SizePlan
from trainer.objectives.teacher import Teaching


@dataclass(frozen=True)
class ContrastiveLoss:
    """SRL and its relatives (Starbucks §3.1). The caller embeds the texts; the loss runs no pass of the engine.

    terms: losses of the vectors as they are compared (unit vectors where `cosine`), in the order in which they are
    added. taught: a loss of the same vectors; its gradients are added before the terms' and its value after theirs.
    coordinates: a loss of the vectors as the model gives them. guide: the model whose scores the terms read; None where
    no term reads any.
    """

    cosine: bool
    terms: tuple[Term, ...]
    taught: Taught | None = None
    coordinates: CoordinateKL | None = None
    guide: PairGuide | None = None

    def loss_and_gradients(
        self, embeddings: list[Tensor], batch: PairBatch, plan: SizePlan, engine: Passes
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The global batch's loss (this rank's part) and its gradient with respect to this rank's embeddings.

        embeddings: one [queries + passages, d] for each size, queries first. They are normalised in place, because a
        large batch leaves memory for the embeddings and their gradients, but for no further copy.
        """
        divergence: dict[str, Tensor] = {}
        before: list[Tensor] = []  # gradients for the vectors as the model gave them
        if self.coordinates is not None:
            divergence, before = self.coordinates.losses_and_gradients(embeddings, plan)
        lengths = [normalize_(each) for each in embeddings] if self.cosine else []
        gradients = [torch.zeros_like(each) for each in embeddings]
        given = Compared(embeddings, gradients, batch, plan, engine, self._guide_vectors(batch, engine))
        taught = {} if self.taught is None else self.taught.add_gradients(given)
        losses = [term.add_gradients(given) for term in self.terms]
        for gradient, unit, length in zip(gradients, embeddings, lengths):
            unnormalized_gradient_(gradient, unit, length)
        for gradient, extra in zip(gradients, before):
            gradient += extra
        return _sum([*losses, divergence, taught]), gradients

    @property
    def is_prefix_infonce(self) -> bool:
        """Whether `prefix_infonce_` can compute the loss of sizes that are prefixes of one vector."""
        (first, *others) = self.terms
        alone = not others and self.taught is None and self.coordinates is None
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
    if is_read(recipe, "objective.asymmetric_weight") and chosen.asymmetric_weight:
        terms.append(Asymmetric(chosen.asymmetric_weight, _infonce(recipe), chosen.similarity == "cosine"))
    if kl == "margins":
        terms.append(Margins(chosen.kl_weight, chosen.temperature, teacher))
    return ContrastiveLoss(
        chosen.similarity == "cosine",
        tuple(terms),
        None if teaching is None else Taught(teaching),
        CoordinateKL(chosen.kl_weight, chosen.kl_temperature, chosen.detach_teacher) if kl == "coordinates" else None,
        guide if recipe.guide_filters or (recipe.guide_teaches and kl != "none") else None,
    )


def pair_loss(recipe: Recipe, *, guide: PairGuide | None = None) -> ContrastiveLoss:
    """The contrastive loss that is added to masked losses: InfoNCE without a KL."""
    cosine = recipe.objective.similarity == "cosine"
    return ContrastiveLoss(cosine, (_infonce(recipe),), guide=guide if recipe.guide_filters else None)


def _infonce(recipe: Recipe) -> InfoNCE:
    chosen = recipe.objective
    filters = chosen.filter_false_negatives and is_read(recipe, "objective.filter_false_negatives")
    margin = MarginFilter(chosen.false_negative_margin, chosen.filter_by) if filters else None
    return InfoNCE(chosen.temperature, Negatives(chosen.mask_false_negatives, margin), recipe.train.score_memory_mib)
