"""InfoNCE over the global batch as terms of a contrastive loss, and which passages are no negatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.collate import PairBatch
from trainer.distributed import gather_counts, gather_rows, scatter_gradients
from trainer.losses.false_negatives import columns_left_out, equal_pairs, false_negative_queries, false_negatives
from trainer.losses.infonce import Further, add_contrastive_gradients
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
from trainer.losses.tiles import Side
from trainer.losses.unit_vectors import normalize_, unnormalized_gradient_
from trainer.objectives.contrastive_terms import Compared, GuideVectors, named, of_all_ranks
from trainer.objectives.infonce_ring import contrast_in_a_ring


@dataclass(frozen=True)
class Rows:
    """The rows of a rank's scores: one for each of its queries, or one for each of their positives where several count.

    owners: int64 [r], each row's query, rising. targets: int64 [r], each row's positive among the rank's passages.
    """

    owners: Tensor
    targets: Tensor
    several: bool

    @classmethod
    def of(cls, batch: PairBatch, device: torch.device) -> Rows:
        several = batch.target_query is not None
        owners = torch.arange(len(batch.queries)) if batch.target_query is None else batch.target_query
        return cls(owners.to(device), batch.targets.to(device), several)

    def spread(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Each row's query, from vectors of the queries. Where no query has several rows, they are the given ones."""
        return [each[self.owners] for each in vectors] if self.several else list(vectors)

    def gather_(self, gradients: Sequence[Tensor], of_rows: Sequence[Tensor]) -> None:
        """Add the gradients of `spread` vectors to those of the queries."""
        if self.several:
            for gradient, row in zip(gradients, of_rows):
                gradient.index_add_(0, self.owners, row)

    def weights(self, of_queries: Tensor | None) -> Tensor | None:
        """Of the rows' losses, float32 [r]: the positives of a query share its weight. None where all are 1."""
        if not self.several:
            return None if of_queries is None else of_queries.to(self.owners.device)
        shares = self.owners.bincount()[self.owners].float().reciprocal()
        return shares if of_queries is None else shares * of_queries.to(self.owners.device)[self.owners]

    def siblings(self) -> Tensor:
        """Pairs of a row and a row of another positive of the same query, int64 [s, 2]."""
        if not self.several:
            return self.owners.new_zeros(0, 2)
        pairs = torch.stack(equal_pairs(self.owners, self.owners), dim=1)
        return pairs[pairs[:, 0] != pairs[:, 1]]


@dataclass(frozen=True)
class Places:
    """Where a rank's texts are in the global batch.

    passages, queries: every rank's number of them; the latter is read only where queries are columns.
    """

    rank: int
    passages: list[int]
    queries: list[int]

    def targets(self, rows: Rows) -> Tensor:
        return rows.targets + sum(self.passages[: self.rank])

    def own(self, rows: Rows) -> Tensor:
        """The places of the rows' queries."""
        return rows.owners + sum(self.queries[: self.rank])

    def hard_pairs(self, batch: PairBatch, rows: Rows) -> Tensor:
        """Pairs of a row and the place of one of its query's own hard negatives, int64 [h, 2]."""
        place = batch.hard_negatives
        row, found = equal_pairs(rows.owners, batch.passage_query[place].to(rows.owners.device))
        place = place.to(rows.owners.device)
        return torch.stack([row, place[found] + sum(self.passages[: self.rank])], dim=1)


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

    def left_out(self, batch: PairBatch, places: Places, rows: Rows) -> Tensor | None:
        """Pairs of a row and a column that is no negative of it, int64 [e, 2].

        Known ones are found by their text. A query's other positives are left out, too.
        """
        plain, device = self.parts == PASSAGES_ALONE, rows.owners.device
        if plain and not self.masks_known and not rows.several:
            return None
        targets, own = places.targets(rows), places.own(rows)
        passages = queries = targets.new_zeros(0, 2)
        if self.masks_known:
            owners = batch.query_hashes.repeat_interleave(batch.known_offsets.diff())
            known = torch.stack([owners, batch.known_hashes], dim=1).to(device)
            known = gather_rows(known, gather_counts(len(known), device)).T.contiguous()  # [2, t]
            passage_hashes = gather_rows(batch.passage_hashes.to(device), places.passages)
            query_hashes = batch.query_hashes.to(device)[rows.owners]
            passages = false_negatives(query_hashes, targets, passage_hashes, known[0], known[1])
            if self.read_queries:
                all_hashes = gather_rows(batch.query_hashes.to(device), places.queries)
                positives = passage_hashes[targets]
                queries = false_negative_queries(query_hashes, positives, own, all_hashes, known[0], known[1])
        if rows.several:
            row, sibling = rows.siblings().T
            passages = torch.cat([passages, torch.stack([row, targets[sibling]], dim=1)])
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

    def __init__(self, own: Side, counts: list[int]) -> None:
        self.vectors, self.gradients = list(own.vectors), list(own.gradients)
        self._own, self._counts = [each for each in own.gradients if each is not None], counts
        self._widths = [each.shape[1] for each in own.vectors]
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

    Both are one term because they share the same tiles of scores (trainer/losses/infonce.py). Where several positives
    of a query count, each has a row of its own without the others as columns, and the rows share the query's weight.
    hardness: α of the weights of a query's own hard negatives. in_a_ring: whether passages visit all ranks in turn
    (trainer/ring.py) and are not gathered.
    """

    temperature: float
    negatives: Negatives
    score_memory_mib: float
    kl_weight: float = 0.0
    teacher: ScoreTeacher = TAUGHT_BY_FULL
    hardness: float = 0.0
    in_a_ring: bool = False

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
        places, rows = self._places(given, device), Rows.of(given.batch, device)
        of_rows = rows.spread(queries)
        row_gradients = [torch.zeros_like(each) for each in of_rows] if rows.several else gradients[0]
        settings = TileSettings(
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
        )
        exchange = _in_a_ring if self.in_a_ring and len(places.passages) > 1 else _gathered
        found = exchange(
            Side(of_rows, row_gradients),
            Side(passages, gradients[1]),
            Side(queries, gradients[0]) if self.negatives.read_queries else None,
            Asked(
                settings,
                places,
                rows,
                self._guide(given),
                excluded=self.negatives.left_out(given.batch, places, rows),
                hard=places.hard_pairs(given.batch, rows) if self.hardness else None,
                weights=rows.weights(given.batch.weights),
            ),
        )
        rows.gather_(gradients[0], row_gradients)
        return found

    @property
    def is_nested(self) -> bool:
        """Whether sizes that are prefixes of one vector can share products, if each query has one row, unweighted.

        No size teaches or filters, no negative has a weight, queries are compared with passages alone, and these are
        gathered.
        """
        filters = self.negatives.filter is not None and self.negatives.filter.by != GUIDE
        plain = self.negatives.parts == PASSAGES_ALONE and not self.in_a_ring
        return not self.kl_weight and not filters and not self.hardness and plain

    def nested_gradients_(self, vectors: Tensor, given: Compared, *, cosine: bool) -> dict[str, Tensor]:
        """The same loss, where `is_nested`. Overwrites `vectors` [n + m, d], not normalised, with their gradients."""
        plan, count, device = given.plan, len(given.batch.queries), vectors.device
        places, rows, guide = self._places(given, device), Rows.of(given.batch, device), self._guide(given)
        counts = places.passages
        passages = vectors[count:] if len(counts) == 1 else gather_rows(vectors[count:], counts)
        gradient = torch.zeros_like(passages)
        loss, nce = prefix_contrastive_(
            vectors[:count],
            passages,
            gradient,
            targets=places.targets(rows),
            excluded=self.negatives.left_out(given.batch, places, rows),
            guide=None if guide is None else (guide.queries, gather_rows(guide.passages, counts)),
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

    def _guide(self, given: Compared) -> GuideVectors | None:
        assert given.guide is not None or self.negatives.filter is None or self.negatives.filter.by != GUIDE
        return given.guide


@dataclass(frozen=True)
class Asked:
    """What is asked of an InfoNCE besides vectors: its settings, and what is known of this rank's rows.

    excluded, hard: pairs of a row and a column of the global batch. weights: of the rows' losses.
    """

    settings: TileSettings
    places: Places
    rows: Rows
    guide: GuideVectors | None
    excluded: Tensor | None
    hard: Tensor | None
    weights: Tensor | None


def _gathered(of_rows: Side, passages: Side, queries: Side | None, asked: Asked) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of this rank's rows, with all ranks' passages, and queries if they are columns, on every rank."""
    places, rows, guide = asked.places, asked.rows, asked.guide
    columns = Everyone(passages, places.passages)
    queried = None if queries is None else Everyone(queries, places.queries)
    vectors = None
    if guide is not None:
        vectors = [*rows.spread([guide.queries]), gather_rows(guide.passages, places.passages)]
        vectors += [] if queries is None else [gather_rows(guide.queries, places.queries)]
    found = add_contrastive_gradients(
        of_rows.vectors,
        columns.vectors,
        gradients=[*of_rows.gradients, *columns.gradients, *([] if queried is None else queried.gradients)],
        settings=asked.settings,
        targets=places.targets(rows),
        excluded=asked.excluded,
        guide=vectors,
        further=Further([] if queried is None else queried.vectors, asked.hard, asked.weights),
    )
    columns.send_back()
    if queried is not None:
        queried.send_back()
    return found


def _in_a_ring(of_rows: Side, passages: Side, queries: Side | None, asked: Asked) -> tuple[Tensor, Tensor, Tensor]:
    """The same, with passages and queries that visit all ranks."""
    places, rows, guide = asked.places, asked.rows, asked.guide
    if guide is not None:
        of_rows = _with(of_rows, *rows.spread([guide.queries]))
        passages = _with(passages, guide.passages)
        queries = None if queries is None else _with(queries, guide.queries)
    return contrast_in_a_ring(
        of_rows,
        passages,
        queries,
        counts=(places.passages, places.queries),
        rank=places.rank,
        targets=rows.targets,
        settings=asked.settings,
        excluded=asked.excluded,
        hard=asked.hard,
        weights=asked.weights,
    )


def _with(side: Side, guide: Tensor) -> Side:
    """With a guide's vectors after those of the sizes."""
    return Side([*side.vectors, guide], [*side.gradients, None])


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
