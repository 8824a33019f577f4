"""InfoNCE over the global batch as terms of a contrastive loss, and which passages are no negatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.collate import PairBatch
from trainer.distributed import gather_counts, gather_rows, scatter_gradients
from trainer.losses.false_negatives import columns_left_out, false_negative_queries, false_negatives
from trainer.losses.infonce import add_contrastive_gradients
from trainer.losses.prefix_infonce import PrefixSettings, prefix_contrastive_
from trainer.losses.tile_settings import (
    GUIDE,
    PASSAGES_ALONE,
    TAUGHT_BY_FULL,
    MarginFilter,
    ScoreTeacher,
    TileSettings,
    parts_of,
)
from trainer.losses.unit_vectors import normalize_, unnormalized_gradient_
from trainer.objectives.contrastive_terms import Compared, named, of_all_ranks


@dataclass(frozen=True)
class Places:
    """Where a rank's texts are in the global batch.

    passages, queries: every rank's number of them; the latter is read only where queries are columns.
    """

    rank: int
    passages: list[int]
    queries: list[int]

    def targets(self, batch: PairBatch, device: torch.device) -> Tensor:
        return batch.targets.to(device) + sum(self.passages[: self.rank])

    def own(self, batch: PairBatch, device: torch.device) -> Tensor:
        """The places of this rank's queries."""
        return torch.arange(len(batch.queries), device=device) + sum(self.queries[: self.rank])

    def hard_pairs(self, batch: PairBatch, device: torch.device) -> Tensor:
        """Pairs of a query of this rank and the place of one of its own hard negatives, int64 [h, 2]."""
        negative = torch.ones(len(batch.passages), dtype=torch.bool)
        negative[batch.targets] = False
        row = negative.nonzero()[:, 0]
        pairs = torch.stack([batch.passage_query[row], row + sum(self.passages[: self.rank])], dim=1)
        return pairs.to(device)


@dataclass(frozen=True)
class Negatives:
    """What a query's positive is compared with, and what of it is left out as false negatives.

    parts: names of `tile_settings.PARTS`. Known false negatives are left out if `masks_known`, and those that `filter`
    finds.
    """

    masks_known: bool = True
    filter: MarginFilter | None = None
    parts: tuple[str, ...] = PASSAGES_ALONE

    @property
    def read_queries(self) -> bool:
        """Whether queries are columns, so that all ranks' queries are gathered."""
        return any(part.with_queries for part in parts_of(self.parts))

    def left_out(self, batch: PairBatch, places: Places, device: torch.device) -> Tensor | None:
        """Pairs of a query of this rank and a column that is no negative of it, by text hashes: int64 [e, 2]."""
        plain = self.parts == PASSAGES_ALONE
        if plain and not self.masks_known:
            return None
        targets, own = places.targets(batch, device), places.own(batch, device)
        passages = queries = targets.new_zeros(0, 2)
        if self.masks_known:
            owners = batch.query_hashes.repeat_interleave(batch.known_offsets.diff())
            known = torch.stack([owners, batch.known_hashes], dim=1).to(device)
            known = gather_rows(known, gather_counts(len(known), device)).T.contiguous()  # [2, t]
            passage_hashes = gather_rows(batch.passage_hashes.to(device), places.passages)
            query_hashes = batch.query_hashes.to(device)
            passages = false_negatives(query_hashes, targets, passage_hashes, known[0], known[1])
            if self.read_queries:
                all_hashes = gather_rows(query_hashes, places.queries)
                positives = passage_hashes[targets]
                queries = false_negative_queries(query_hashes, positives, own, all_hashes, known[0], known[1])
        if plain:
            return passages
        return columns_left_out(
            parts_of(self.parts),
            targets=targets,
            own=own,
            num_passages=sum(places.passages),
            num_queries=sum(places.queries),
            passages=passages,
            queries=queries,
        )


class Everyone:
    """All ranks' vectors, K of [N, d_k], with gradients to add to; `send_back` gives each rank the sums for its own.

    One gather for all widths side by side. On one rank the vectors and gradients are the given ones themselves.
    """

    def __init__(self, vectors: Sequence[Tensor], gradients: Sequence[Tensor], counts: list[int]) -> None:
        self.vectors, self.gradients = list(vectors), list(gradients)
        self._own, self._counts = list(gradients), counts
        self._widths = [each.shape[1] for each in vectors]
        self._returned: Tensor | None = None
        if len(counts) > 1:
            everyone = gather_rows(torch.cat(self.vectors, dim=1), counts)  # [N, sum of widths]
            self._returned = torch.zeros_like(everyone)
            self.vectors = list(everyone.split(self._widths, dim=1))
            self.gradients = list(self._returned.split(self._widths, dim=1))

    def send_back(self) -> None:
        if self._returned is not None:
            parts = scatter_gradients(self._returned, self._counts).split(self._widths, dim=1)
            for gradient, part in zip(self._own, parts):
                gradient += part


@dataclass(frozen=True)
class InfoNCE:
    """InfoNCE at every size and, with a `kl_weight`, KL(teacher || size) of the scores (Starbucks §3.1, eq. 4 and 5).

    Both are one term because they share the same tiles of scores (trainer/losses/infonce.py). hardness: α of the
    weights of a query's own hard negatives.
    """

    temperature: float
    negatives: Negatives
    score_memory_mib: float
    kl_weight: float = 0.0
    teacher: ScoreTeacher = TAUGHT_BY_FULL
    hardness: float = 0.0

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
        places = self._places(given, device)
        columns = Everyone(passages, gradients[1], places.passages)
        queried = Everyone(queries, gradients[0], places.queries) if self.negatives.read_queries else None
        found = add_contrastive_gradients(
            queries,
            columns.vectors,
            all_queries=[] if queried is None else queried.vectors,
            gradients=[*gradients[0], *columns.gradients, *([] if queried is None else queried.gradients)],
            settings=TileSettings(
                weights,
                kl_weights,
                self.temperature,
                of_all_ranks(count, device),
                self.negatives.filter,
                self.teacher,
                self.score_memory_mib,
                1.0 if given.guide is None else given.guide.temperature,
                self.negatives.parts,
                self.hardness,
            ),
            hard=places.hard_pairs(given.batch, device) if self.hardness else None,
            weights=None if given.batch.weights is None else given.batch.weights.to(device),
            **self._of_the_global_batch(given, places, device),
        )
        columns.send_back()
        if queried is not None:
            queried.send_back()
        return found

    @property
    def is_nested(self) -> bool:
        """Whether sizes that are prefixes of one vector can share their products, if no query has a weight of its own.

        No size teaches or filters, no negative has a weight, and queries are compared with passages alone.
        """
        filters = self.negatives.filter is not None and self.negatives.filter.by != GUIDE
        return not self.kl_weight and not filters and not self.hardness and self.negatives.parts == PASSAGES_ALONE

    def nested_gradients_(self, vectors: Tensor, given: Compared, *, cosine: bool) -> dict[str, Tensor]:
        """The same loss, where `is_nested`. Overwrites `vectors` [n + m, d], not normalised, with their gradients."""
        plan, count, device = given.plan, len(given.batch.queries), vectors.device
        places = self._places(given, device)
        counts = places.passages
        passages = vectors[count:] if len(counts) == 1 else gather_rows(vectors[count:], counts)
        gradient = torch.zeros_like(passages)
        loss, nce = prefix_contrastive_(
            vectors[:count],
            passages,
            gradient,
            **self._of_the_global_batch(given, places, device),
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

    def _places(self, given: Compared, device: torch.device) -> Places:
        passages = gather_counts(len(given.batch.passages), device)
        queries = gather_counts(len(given.batch.queries), device) if self.negatives.read_queries else []
        return Places(given.engine.world.rank, passages, queries)

    def _of_the_global_batch(self, given: Compared, places: Places, device: torch.device) -> dict[str, Any]:
        """The arguments about all ranks' texts, for both ways."""
        excluded, guide = self.negatives.left_out(given.batch, places, device), given.guide
        assert guide is not None or self.negatives.filter is None or self.negatives.filter.by != GUIDE
        vectors = None
        if guide is not None:
            vectors = [guide.queries, gather_rows(guide.passages, places.passages)]
            vectors += [gather_rows(guide.queries, places.queries)] if self.negatives.read_queries else []
        return {"targets": places.targets(given.batch, device), "excluded": excluded, "guide": vectors}


@dataclass(frozen=True)
class Asymmetric:
    """InfoNCE of every smaller size's queries against the full size's passages, cut to the size's dimensions.

    It trains for searches in which a small model embeds the queries and the full one has embedded the documents. Both
    sides get gradients. weight: times the weight of the size's own loss. infonce: without a KL and without a filter,
    of queries against passages.
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
