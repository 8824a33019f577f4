"""The terms of a contrastive loss over the global batch. Each adds its gradients and returns its losses.

This module says what a term is and has those that read a text's own scores; InfoNCE is in infonce_terms.py. Embeddings
and their gradients cross ranks in terms: texts are gathered, and their gradients are sent back to the texts' ranks. The
mathematics of the losses is in trainer/losses/.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from data.collate import PairBatch
from trainer.distributed import gather_counts, gather_rows, sum_over_ranks
from trainer.losses.graded_pairs import coordinate_divergence, cosent
from trainer.losses.tile_settings import GUIDE, ScoreTeacher
from trainer.objectives.backward import Passes
from trainer.objectives.size_schedules import SizePlan
from trainer.objectives.teacher import Teaching, TextGroup, role_groups, texts_of_all_ranks


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
        return {"loss": loss.detach() * share} | named("loss", plan.names, per_size.detach() * share)


@dataclass(frozen=True)
class Margins:
    """MarginMSE (Hofstätter et al. 2020, arXiv:2010.02666).

    The mean of ((s⁺ − s⁻) − (t⁺ − t⁻))² over the global batch's pairs of a query and one of its own negatives, where s
    and t are the student's and the teacher's scores; each pair has the weight of its query. Both texts of a pair are on
    one rank, so nothing is gathered.
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
        squares = (margins(own) - margins(taught)).square()  # [K, m]
        if batch.weights is not None:
            squares = squares * batch.weights.to(device)[owner]
        errors = squares.sum(1) / total
        loss = (errors * errors.new_tensor(plan.kl_weights)).sum() * self.weight
        loss.backward()
        assert own.grad is not None
        for each, gradient, flow in zip(vectors, given.gradients, own.grad[..., None] / self.temperature):
            gradient[:count].index_add_(0, owner, flow * each[count:])
            gradient[count:] += flow * each[:count][owner]
        return {"loss": loss.detach()} | named("margins", plan.names, errors.detach(), plan.kl_weights)


@dataclass(frozen=True)
class Taught:
    """All texts of the global batch learn a teacher's vectors (trainer/losses/distillation.py)."""

    teaching: Teaching

    def add_gradients(self, given: Compared) -> dict[str, Tensor]:
        engine = given.engine
        taught = self.teaching.teacher.vectors(given.batch, device=engine.device, heartbeat=engine.heartbeat)
        if self.teaching.weights.balance == "roles":
            groups = role_groups(given.batch, engine.device)
        else:
            groups = [TextGroup(texts_of_all_ranks(len(taught), engine.device))]
        return self.teaching.add_gradients(
            given.vectors, taught, given.gradients, given.plan, engine.world, groups=groups
        )


class CoordinateTerm(Protocol):
    """A part of a contrastive loss that reads vectors as the model gives them. All ranks call it together."""

    def losses_and_gradients(
        self, embeddings: list[Tensor], batch: PairBatch, plan: SizePlan, engine: Passes
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Losses like a term's, and the gradient of each size at which texts are compared.

        embeddings: one [n + m, d] for each size of the plan, not normalised.
        """
        ...


@dataclass(frozen=True)
class CoordinateKL:
    """KL from the full size's coordinates to every other size's, before they are normalised (graded_pairs.py)."""

    weight: float
    temperature: float
    detached: bool

    def losses_and_gradients(
        self, embeddings: list[Tensor], batch: PairBatch, plan: SizePlan, engine: Passes
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """A text's divergence has the weight of its query."""
        embeddings, plan = embeddings[plan.uncompared :], plan.compared
        weights = batch.weights
        if weights is not None:
            weights = torch.cat([weights, weights[batch.passage_query]]).to(embeddings[0].device)
        leaves = [each.clone().requires_grad_() for each in embeddings]
        teacher = leaves[plan.full].detach() if self.detached else leaves[plan.full]
        total = sum_over_ranks([float(teacher.shape[0])], teacher.device)[0].to(teacher.dtype)
        losses = {"loss": torch.zeros((), device=teacher.device)}
        for name, leaf, weight in zip(plan.names, leaves, plan.kl_weights):
            if weight:
                value = coordinate_divergence(leaf, teacher, temperature=self.temperature, weights=weights) / total
                (value * weight * self.weight).backward()
                losses[f"kl/{name}"] = value.detach()
                losses["loss"] = losses["loss"] + value.detach() * weight * self.weight
        return losses, [torch.zeros_like(each) if each.grad is None else each.grad for each in leaves]


def of_all_ranks(count: int, device: torch.device) -> int:
    return int(sum_over_ranks([float(count)], device)[0])


def named(kind: str, names: tuple[str, ...], values: Tensor, used: tuple[float, ...] = ()) -> dict[str, Tensor]:
    """Each size's value as "KIND/SIZE", without the sizes whose weight in `used` is 0."""
    return {
        f"{kind}/{name}": value for name, value, weight in zip(names, values, used or (1.0,) * len(names)) if weight
    }
