"""InfoNCE over the global batch as terms of a contrastive loss, and which passages are no negatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.collate import PairBatch
from trainer.distributed import gather_counts, gather_rows, scatter_gradients
from trainer.losses.false_negatives import false_negatives
from trainer.losses.infonce import add_contrastive_gradients
from trainer.losses.prefix_infonce import PrefixSettings, prefix_contrastive_
from trainer.losses.tile_settings import GUIDE, TAUGHT_BY_FULL, MarginFilter, ScoreTeacher, TileSettings
from trainer.losses.unit_vectors import normalize_, unnormalized_gradient_
from trainer.objectives.contrastive_terms import Compared, named, of_all_ranks


@dataclass(frozen=True)
class Negatives:
    """Which passages are left out as false negatives: known ones, if `masks_known`, and those that a filter finds."""

    masks_known: bool = True
    filter: MarginFilter | None = None

    def known(self, batch: PairBatch, targets: Tensor, counts: list[int]) -> Tensor | None:
        """Pairs of a query of this rank and a passage of the global batch that is no negative of it, by text hashes.

        targets: the positives' places in the global batch. counts: every rank's number of passages.
        """
        if not self.masks_known:
            return None
        device = targets.device
        queries = batch.query_hashes.repeat_interleave(batch.known_offsets.diff())
        known = torch.stack([queries, batch.known_hashes], dim=1).to(device)
        known = gather_rows(known, gather_counts(len(known), device)).T.contiguous()  # [2, t]
        passage_hashes = gather_rows(batch.passage_hashes.to(device), counts)
        return false_negatives(batch.query_hashes.to(device), targets, passage_hashes, known[0], known[1])


@dataclass(frozen=True)
class InfoNCE:
    """InfoNCE at every size and, with a `kl_weight`, KL(teacher || size) of the scores (Starbucks §3.1, eq. 4 and 5).

    Both are one term because they share the same tiles of scores (trainer/losses/infonce.py).
    """

    temperature: float
    negatives: Negatives
    score_memory_mib: float
    kl_weight: float = 0.0
    teacher: ScoreTeacher = TAUGHT_BY_FULL

    def add_gradients(self, given: Compared) -> dict[str, Tensor]:
        plan, count = given.plan, len(given.batch.queries)
        loss, nce, divergence = self.contrast(
            given,
            [each[:count] for each in given.vectors],
            [each[count:] for each in given.vectors],
            gradients=([each[:count] for each in given.gradients], [each[count:] for each in given.gradients]),
            weights=plan.loss_weights,
            kl_weights=tuple(weight * self.kl_weight for weight in plan.kl_weights),
        )
        losses = {"loss": loss} | named("loss", plan.names, nce)
        return losses | (named("kl", plan.names, divergence, plan.kl_weights) if self.kl_weight else {})

    def contrast(
        self,
        given: Compared,
        queries: list[Tensor],
        passages: list[Tensor],
        *,
        gradients: tuple[list[Tensor], list[Tensor]],
        weights: tuple[float, ...],
        kl_weights: tuple[float, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of this rank's queries against all ranks' passages, as `add_contrastive_gradients` returns it.

        queries, passages: K of [n, d_k] and [m, d_k], of this rank. gradients: those to which the gradients of the
        queries and of the passages are added; the latter are sums over all ranks' queries.
        """
        count, device = len(given.batch.queries), queries[0].device
        widths = [each.shape[1] for each in passages]
        counts = gather_counts(len(given.batch.passages), device)
        query_gradients, own_gradients = gradients
        passage_gradients, alone = own_gradients, len(counts) == 1
        if not alone:
            # One gather of all widths side by side: every rank's passages, [M, sum of widths].
            everyone = gather_rows(torch.cat(passages, dim=1), counts)
            returned = torch.zeros_like(everyone)
            passages, passage_gradients = list(everyone.split(widths, dim=1)), list(returned.split(widths, dim=1))
        found = add_contrastive_gradients(
            queries,
            passages,
            gradients=[*query_gradients, *passage_gradients],
            settings=TileSettings(
                weights,
                kl_weights,
                self.temperature,
                of_all_ranks(count, device),
                self.negatives.filter,
                self.teacher,
                self.score_memory_mib,
                1.0 if given.guide is None else given.guide.temperature,
            ),
            **self._of_the_global_batch(given, counts, device),
        )
        if not alone:
            # Each passage's gradient, summed over all ranks' queries, goes back to the passage's rank.
            for gradient, part in zip(own_gradients, scatter_gradients(returned, counts).split(widths, dim=1)):
                gradient += part
        return found

    @property
    def is_nested(self) -> bool:
        """Whether sizes that are prefixes of one vector can share their products: no size teaches or filters."""
        return not self.kl_weight and (self.negatives.filter is None or self.negatives.filter.by == GUIDE)

    def nested_gradients_(self, vectors: Tensor, given: Compared, *, cosine: bool) -> dict[str, Tensor]:
        """The same loss, where `is_nested`. Overwrites `vectors` [n + m, d], not normalised, with their gradients."""
        plan, count, device = given.plan, len(given.batch.queries), vectors.device
        counts = gather_counts(len(given.batch.passages), device)
        passages = vectors[count:] if len(counts) == 1 else gather_rows(vectors[count:], counts)
        gradient = torch.zeros_like(passages)
        loss, nce = prefix_contrastive_(
            vectors[:count],
            passages,
            gradient,
            **self._of_the_global_batch(given, counts, device),
            settings=PrefixSettings(
                tuple(size.dim for size in plan.sizes),
                plan.loss_weights,
                cosine,
                self.temperature,
                of_all_ranks(count, device),
                self.score_memory_mib,
                0.0 if self.negatives.filter is None else self.negatives.filter.margin,
            ),
        )
        vectors[count:] = gradient if len(counts) == 1 else scatter_gradients(gradient, counts)
        return {"loss": loss} | named("loss", plan.names, nce)

    def _of_the_global_batch(self, given: Compared, counts: list[int], device: torch.device) -> dict[str, Any]:
        """The arguments about all ranks' passages, for both ways. counts: every rank's number of passages."""
        targets = given.batch.targets.to(device) + sum(counts[: given.engine.world.rank])
        excluded, guide = self.negatives.known(given.batch, targets, counts), given.guide
        assert guide is not None or self.negatives.filter is None or self.negatives.filter.by != GUIDE
        vectors = None if guide is None else (guide.queries, gather_rows(guide.passages, counts))
        return {"targets": targets, "excluded": excluded, "guide": vectors}


@dataclass(frozen=True)
class Asymmetric:
    """InfoNCE of every smaller size's queries against the full size's passages, cut to the size's dimensions.

    It trains for searches in which a small model embeds the queries and the full one has embedded the documents. Both
    sides get gradients. weight: times the weight of the size's own loss. infonce: without a KL and without a filter.
    """

    weight: float
    infonce: InfoNCE
    cosine: bool

    def add_gradients(self, given: Compared) -> dict[str, Tensor]:
        plan, count = given.plan, len(given.batch.queries)
        smaller = range(plan.full)
        if not smaller:
            return {}
        full, full_gradient = given.vectors[plan.full][count:], given.gradients[plan.full][count:]
        prefixes = [full[:, : given.vectors[size].shape[1]].clone() for size in smaller]
        lengths = [normalize_(each) for each in prefixes] if self.cosine else []
        gradients = [torch.zeros_like(each) for each in prefixes]
        loss, nce, _ = self.infonce.contrast(
            given,
            [given.vectors[size][:count] for size in smaller],
            prefixes,
            gradients=([given.gradients[size][:count] for size in smaller], gradients),
            weights=tuple(plan.loss_weights[size] * self.weight for size in smaller),
            kl_weights=(0.0,) * len(smaller),
        )
        for gradient, unit, length in zip(gradients, prefixes, lengths):
            unnormalized_gradient_(gradient, unit, length)
        for gradient in gradients:
            full_gradient[:, : gradient.shape[1]] += gradient
        return {"loss": loss} | named("asymmetric", plan.names[: plan.full], nce)
