"""The terms of a contrastive loss over the global batch. Each adds its gradients and returns its losses.

Embeddings and their gradients cross ranks here, and in trainer/objectives/teacher.py: passages are gathered, and their
gradients are sent back to the passages' ranks. The mathematics of the losses is in trainer/losses/.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from data.collate import PairBatch
from trainer.distributed import gather_counts, gather_rows, scatter_gradients, sum_over_ranks
from trainer.losses.false_negatives import false_negatives
from trainer.losses.graded_pairs import coordinate_divergence, cosent
from trainer.losses.infonce import add_contrastive_gradients
from trainer.losses.prefix_infonce import PrefixSettings, prefix_contrastive_
from trainer.losses.tile_settings import GUIDE, TAUGHT_BY_FULL, MarginFilter, ScoreTeacher, TileSettings
from trainer.losses.unit_vectors import normalize_, unnormalized_gradient_
from trainer.objectives.backward import Passes
from trainer.objectives.size_schedules import SizePlan
from trainer.objectives.teacher import Teaching, texts_of_all_ranks


@dataclass(frozen=True)
class GuideVectors:
    """A guide's vectors of this rank's queries [n, g] and passages [m, g]. temperature divides their scores."""

    queries: Tensor
    passages: Tensor
    temperature: float


@dataclass(frozen=True)
class Compared:
    """What the terms of a step read, and the gradients to which they add.

    vectors, gradients: one float32 [n + m, d] for each size, the queries' rows first. vectors are unit vectors for
    cosine.
    """

    vectors: list[Tensor]
    gradients: list[Tensor]
    batch: PairBatch
    plan: SizePlan
    engine: Passes
    guide: GuideVectors | None


class Term(Protocol):
    """A part of a contrastive loss. All ranks call it together, since it may hold collectives."""

    def add_gradients(self, given: Compared) -> dict[str, Tensor]:
        """This rank's part of the losses, by name; "loss" is what the term adds to the global batch's loss."""
        ...


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
        losses = {"loss": loss} | _named("loss", plan.names, nce)
        return losses | (_named("kl", plan.names, divergence, plan.kl_weights) if self.kl_weight else {})

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
                _of_all_ranks(count, device),
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
                _of_all_ranks(count, device),
                self.score_memory_mib,
                0.0 if self.negatives.filter is None else self.negatives.filter.margin,
            ),
        )
        vectors[count:] = gradient if len(counts) == 1 else scatter_gradients(gradient, counts)
        return {"loss": loss} | _named("loss", plan.names, nce)

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
        return {"loss": loss} | _named("asymmetric", plan.names[: plan.full], nce)


@dataclass(frozen=True)
class CoSENT:
    """CoSENT of graded pairs at every size (trainer/losses/graded_pairs.py)."""

    temperature: float

    def add_gradients(self, given: Compared) -> dict[str, Tensor]:
        batch, plan, vectors = given.batch, given.plan, given.vectors
        assert batch.scores is not None
        device, count = vectors[0].device, len(batch.queries)
        partner = batch.targets.to(device) + count
        local = torch.stack([torch.linalg.vecdot(each[:count], each[partner]) for each in vectors], dim=1)  # [n, K]
        counts = gather_counts(count, device)
        start = sum(counts[: given.engine.world.rank])
        similarities = gather_rows(local, counts).requires_grad_()
        gold = gather_rows(batch.scores.to(device), counts)
        per_size = torch.stack([cosent(each, gold, temperature=self.temperature) for each in similarities.unbind(1)])
        loss = (per_size * per_size.new_tensor(plan.loss_weights)).sum()
        loss.backward()
        assert similarities.grad is not None
        # Every rank computes the whole loss, so the gradient of its own rows is complete. Each rank reports an equal
        # share of the value.
        own = similarities.grad[start : start + count, :, None]  # [n, K, 1]
        for size, (each, gradient) in enumerate(zip(vectors, given.gradients)):
            gradient[:count] += own[:, size] * each[partner]
            gradient.index_add_(0, partner, own[:, size] * each[:count])
        share = 1.0 / len(counts)
        return {"loss": loss.detach() * share} | _named("loss", plan.names, per_size.detach() * share)


@dataclass(frozen=True)
class Margins:
    """MarginMSE (Hofstätter et al. 2020, arXiv:2010.02666).

    The mean of ((s⁺ − s⁻) − (t⁺ − t⁻))² over the global batch's pairs of a query and one of its own negatives, where s
    and t are the student's and the teacher's scores. Both texts of a pair are on one rank, so nothing is gathered.
    """

    weight: float
    temperature: float
    teacher: ScoreTeacher

    def add_gradients(self, given: Compared) -> dict[str, Tensor]:
        batch, plan, vectors = given.batch, given.plan, given.vectors
        device, count = vectors[0].device, len(batch.queries)
        owner, targets = batch.passage_query.to(device), batch.targets.to(device)

        def scores_of(queries: Tensor, passages: Tensor) -> Tensor:
            return torch.linalg.vecdot(queries[owner], passages)

        def margins(scores: Tensor) -> Tensor:  # [..., m]; 0 for the positive itself
            return scores[..., targets][..., owner] - scores

        own = torch.stack([scores_of(each[:count], each[count:]) for each in vectors]) / self.temperature  # [K, m]
        own.requires_grad_()
        if self.teacher.by == GUIDE:
            assert given.guide is not None
            taught = scores_of(given.guide.queries, given.guide.passages) / given.guide.temperature
        else:
            taught = own[plan.full].detach() if self.teacher.detached else own[plan.full]
        total = sum_over_ranks([float(len(batch.passages) - count)], device).clamp(min=1)[0].to(own.dtype)
        errors = (margins(own) - margins(taught)).square().sum(1) / total
        loss = (errors * errors.new_tensor(plan.kl_weights)).sum() * self.weight
        loss.backward()
        assert own.grad is not None
        for each, gradient, flow in zip(vectors, given.gradients, own.grad[..., None] / self.temperature):
            gradient[:count].index_add_(0, owner, flow * each[count:])
            gradient[count:] += flow * each[:count][owner]
        return {"loss": loss.detach()} | _named("margins", plan.names, errors.detach(), plan.kl_weights)


@dataclass(frozen=True)
class Taught:
    """All texts of the global batch learn a teacher's vectors (trainer/losses/distillation.py)."""

    teaching: Teaching

    def add_gradients(self, given: Compared) -> dict[str, Tensor]:
        engine = given.engine
        taught = self.teaching.teacher.vectors(given.batch, device=engine.device, heartbeat=engine.heartbeat)
        num_texts = texts_of_all_ranks(len(taught), engine.device)
        return self.teaching.add_gradients(
            given.vectors, taught, given.gradients, given.plan, engine.world, num_texts=num_texts
        )


@dataclass(frozen=True)
class CoordinateKL:
    """KL from the full size's coordinates to every other size's, before they are normalised (graded_pairs.py)."""

    weight: float
    temperature: float
    detached: bool

    def losses_and_gradients(self, embeddings: list[Tensor], plan: SizePlan) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Losses like a term's, and each size's gradient. embeddings: one [n + m, d] a size, as the model gave them."""
        leaves = [each.clone().requires_grad_() for each in embeddings]
        teacher = leaves[plan.full].detach() if self.detached else leaves[plan.full]
        total = sum_over_ranks([float(teacher.shape[0])], teacher.device)[0].to(teacher.dtype)
        losses = {"loss": torch.zeros((), device=teacher.device)}
        for name, leaf, weight in zip(plan.names, leaves, plan.kl_weights):
            if weight:
                value = coordinate_divergence(leaf, teacher, temperature=self.temperature) / total
                (value * weight * self.weight).backward()
                losses[f"kl/{name}"] = value.detach()
                losses["loss"] = losses["loss"] + value.detach() * weight * self.weight
        return losses, [torch.zeros_like(each) if each.grad is None else each.grad for each in leaves]


def _of_all_ranks(count: int, device: torch.device) -> int:
    return int(sum_over_ranks([float(count)], device)[0])


def _named(kind: str, names: tuple[str, ...], values: Tensor, used: tuple[float, ...] = ()) -> dict[str, Tensor]:
    """Each size's value as "KIND/SIZE", without the sizes whose weight in `used` is 0."""
    return {
        f"{kind}/{name}": value for name, value, weight in zip(names, values, used or (1.0,) * len(names)) if weight
    }
