"""A teacher: a frozen model whose vectors every size learns, and what that adds to a step's gradient.

The vectors come from a forward pass at each step (`live`: the teacher reads the batch's token ids, so it must have the
shards' tokenizer), or from a store (`stored`: the teacher may have any tokenizer and width,
trainer/objectives/vector_store.py). The teacher does not train, and no checkpoint holds any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from data.collate import PairBatch, TextBatch
from data.shards.reader import ShardFolder
from trainer.config.schema import Recipe
from trainer.config.sections import TeacherConfig
from trainer.distributed import World, gather_counts, gather_rows, scatter_gradients, sum_over_ranks
from trainer.losses.distillation import (
    add_gram_gradients,
    add_order_gradients,
    add_similarity_gradients,
    add_vector_gradients,
    gram_products,
)
from trainer.losses.unit_vectors import normalize_
from trainer.objectives.guide import Guide, StoredGuide, cut, load_frozen
from trainer.objectives.size_schedules import SizePlan
from trainer.objectives.stored_texts import open_store
from trainer.objectives.vector_store import VectorStore


class Teacher(Protocol):
    """A source of the vectors that every size learns."""

    @property
    def width(self) -> int: ...
    def vectors(
        self, batch: TextBatch | PairBatch, *, device: torch.device, heartbeat: Callable[[str], None]
    ) -> Tensor:
        """Unit vectors of a batch's texts, float32 [n, D]. For pairs, the queries' rows come first."""
        ...


@dataclass(frozen=True)
class LiveTeacher:
    """Computes the vectors by a forward pass of the frozen model at each step."""

    frozen: Guide

    @property
    def width(self) -> int:
        return self.frozen.size.dim

    def vectors(
        self, batch: TextBatch | PairBatch, *, device: torch.device, heartbeat: Callable[[str], None]
    ) -> Tensor:
        if isinstance(batch, PairBatch):
            vectors = torch.cat(self.frozen.vectors(batch.queries, batch.passages, device=device, heartbeat=heartbeat))
        else:
            texts = cut(batch.texts, self.frozen.passage_max_length, closing=self.frozen.closing)
            vectors = self.frozen.embed(texts, device=device, heartbeat=heartbeat)
        if self.frozen.similarity != "cosine":
            normalize_(vectors)
        return vectors


@dataclass(frozen=True)
class StoredTeacher:
    """Looks up vectors that were computed once, by the hash of each text."""

    store: VectorStore

    @property
    def width(self) -> int:
        return self.store.width

    def vectors(
        self, batch: TextBatch | PairBatch, *, device: torch.device, heartbeat: Callable[[str], None]
    ) -> Tensor:
        if isinstance(batch, PairBatch):
            vectors = torch.cat(self.store.find_pairs(batch)).to(device)
        else:
            vectors = self.store.find(batch.hashes).to(device)
        normalize_(vectors)
        return vectors


def load_teacher(
    recipe: Recipe, sources: Sequence[ShardFolder], *, guide: Guide | StoredGuide | None = None
) -> Teacher | None:
    """The recipe's teacher, or None. Raises ConfigError for whatever is wrong with it.

    guide: the recipe's. A store that it has opened is not opened again, so its keys are held once.
    """
    chosen = recipe.teacher
    if not recipe.is_taught:
        return None
    if chosen.vectors == "stored":
        if isinstance(guide, StoredGuide) and guide.store.folder.resolve() == Path(chosen.store).resolve():
            return StoredTeacher(guide.store)
        return StoredTeacher(open_store(recipe, sources, section="teacher"))
    source = chosen.model or recipe.model.source
    return LiveTeacher(
        load_frozen(recipe, sources, section="teacher", source=source, pooling=chosen.pooling or None, temperature=1.0)
    )


@dataclass(frozen=True)
class TextGroup:
    """Texts with the same weight in a mean over the global batch, 1 / num_texts. rows: of this rank's; None: all."""

    num_texts: int
    rows: Tensor | None = None


def role_groups(batch: PairBatch, device: torch.device) -> list[TextGroup]:
    """The queries, the positives and the hard negatives, each role with an equal share of a mean.

    A role that the global batch lacks has no share. All ranks call it together.
    """
    count = len(batch.queries)
    roles = [torch.arange(count), batch.targets + count, batch.hard_negatives + count]
    counts = [int(each) for each in sum_over_ranks([float(len(rows)) for rows in roles], device)]
    present = sum(map(bool, counts))
    return [TextGroup(number * present, rows.to(device)) for number, rows in zip(counts, roles) if number]


@dataclass(frozen=True)
class Teaching:
    """The terms of trainer/losses/distillation.py over the texts of all ranks, the global batch."""

    teacher: Teacher
    weights: TeacherConfig
    score_memory_mib: float

    def add_gradients(
        self,
        units: Sequence[Tensor],
        taught: Tensor,
        gradients: Sequence[Tensor],
        plan: SizePlan,
        world: World,
        *,
        groups: Sequence[TextGroup],
    ) -> dict[str, Tensor]:
        """This rank's part of the losses. Adds their gradients with respect to the unit vectors to `gradients`.

        units: each size's unit vectors [n, d_k]. taught: the teacher's unit vectors [n, D]. groups: which texts weigh
        how much. All ranks call it together where terms compare texts. In the result, "loss" is the weighted sum, and
        "distill/SIZE" a size's part of it without the size's weight. Several terms are also reported as "TERM/SIZE".
        """
        weights, device = self.weights.terms, taught.device
        by_size = torch.zeros(len(units), device=device)
        found: dict[str, Tensor] = {}

        def add(name: str, values: Tensor) -> None:
            nonlocal by_size
            by_size = by_size + weights[name] * values
            found.update({f"{name}/{size}": value for size, value in zip(plan.names, values)})

        if weights["vector"]:
            shares = [weights["vector"] * share for share in plan.loss_weights]

            def match(own: Sequence[Tensor], target: Tensor, flows: Sequence[Tensor], group: TextGroup) -> Tensor:
                values = [
                    add_vector_gradients(unit, target, flow, weight=share, num_texts=group.num_texts)
                    for unit, flow, share in zip(own, flows, shares)
                ]
                return torch.stack(values)

            add("vector", _over_groups(groups, units, taught, gradients, match))
        if weights["gram"]:
            add("gram", self._compare_grams(units, taught, gradients, plan, groups) / world.size)
        if self.weights.gathers:
            self._add_compared(units, taught, gradients, plan, world, groups, add)
        total = (by_size * by_size.new_tensor(plan.loss_weights)).sum()
        losses = {"loss": total} | {f"distill/{size}": value for size, value in zip(plan.names, by_size)}
        return losses | found if sum(map(bool, weights.values())) > 1 else losses

    def _compare_grams(
        self,
        units: Sequence[Tensor],
        taught: Tensor,
        gradients: Sequence[Tensor],
        plan: SizePlan,
        groups: Sequence[TextGroup],
    ) -> Tensor:
        """The whole value of the Gram term, equal on all ranks: [K].

        A pair of texts weighs the product of its texts' weights, which vectors scaled by the roots of those weights
        have in their products.
        """
        device, num_texts, roots = taught.device, groups[0].num_texts if groups else 1, None
        if any(group.rows is not None for group in groups):
            num_texts, roots = 1, taught.new_zeros(len(taught), 1)
            for group in groups:
                roots[group.rows] = group.num_texts**-0.5
            taught = taught * roots
        values = []
        for unit, gradient, share in zip(units, gradients, plan.loss_weights):
            scaled, flow = (unit, gradient) if roots is None else (unit * roots, torch.zeros_like(gradient))
            products = gram_products(scaled, taught)
            own, between, theirs = (sum_over_ranks(each, device) for each in products)
            weight = self.weights.gram_weight * share
            values.append(
                add_gram_gradients(
                    scaled, taught, flow, products=(own, between, theirs), weight=weight, num_texts=num_texts
                )
            )
            if roots is not None:
                gradient += flow * roots
        return torch.stack(values)

    def _add_compared(
        self,
        units: Sequence[Tensor],
        taught: Tensor,
        gradients: Sequence[Tensor],
        plan: SizePlan,
        world: World,
        groups: Sequence[TextGroup],
        add: Callable[[str, Tensor], None],
    ) -> None:
        """The terms that need all texts' vectors on this rank.

        One gather brings all widths side by side, and one reduce-scatter returns their gradients.
        """
        device = taught.device
        counts = gather_counts(len(taught), device)
        widths = [unit.shape[1] for unit in units]
        rows = gather_rows(torch.cat([*units, taught], dim=1), counts)  # [N, sum of widths + D]
        *everyone, all_taught = rows.split([*widths, taught.shape[1]], dim=1)
        everyone = [each.contiguous() for each in everyone]
        home = [torch.zeros_like(each) for each in everyone]
        all_taught, start = all_taught.contiguous(), sum(counts[: world.rank])
        weights, memory = self.weights.terms, self.score_memory_mib

        def similarity(own: Sequence[Tensor], target: Tensor, flows: Sequence[Tensor], group: TextGroup) -> Tensor:
            return add_similarity_gradients(
                own,
                everyone,
                (target, all_taught),
                [*flows, *home],
                weights=[weights["similarity"] * share for share in plan.loss_weights],
                temperature=self.weights.temperature,
                places=start + (torch.arange(len(target), device=device) if group.rows is None else group.rows),
                num_texts=group.num_texts,
                score_memory_mib=memory,
            )

        def order(own: Sequence[Tensor], target: Tensor, flows: Sequence[Tensor], group: TextGroup) -> Tensor:
            return add_order_gradients(
                own,
                everyone,
                (target, all_taught),
                [*flows, *home],
                weights=[weights["order"] * share for share in plan.loss_weights],
                num_texts=group.num_texts,
                score_memory_mib=memory,
            )

        for name, term in (("similarity", similarity), ("order", order)):
            if weights[name]:
                add(name, _over_groups(groups, units, taught, gradients, term))
        returned = scatter_gradients(torch.cat(home, dim=1), counts)
        for gradient, part in zip(gradients, returned.split(widths, dim=1)):
            gradient += part


_Term = Callable[[Sequence[Tensor], Tensor, Sequence[Tensor], TextGroup], Tensor]


def _over_groups(
    groups: Sequence[TextGroup], units: Sequence[Tensor], taught: Tensor, gradients: Sequence[Tensor], term: _Term
) -> Tensor:
    """A term of each group's texts, summed: [K]. term(unit vectors, teacher's, gradients, group) -> values."""
    total = torch.zeros(len(units), dtype=units[0].dtype, device=taught.device)
    for group in groups:
        rows = group.rows
        if rows is None:
            total = total + term(units, taught, gradients, group)
            continue
        own = [unit[rows] for unit in units]
        flows = [torch.zeros_like(each) for each in own]
        total = total + term(own, taught[rows], flows, group)
        for gradient, flow in zip(gradients, flows):
            gradient[rows] += flow
    return total


def texts_of_all_ranks(count: int, device: torch.device) -> int:
    """How many texts the ranks have together, or 1 where they have none. count: the number that this rank has."""
    return max(1, int(sum_over_ranks([float(count)], device)[0]))
