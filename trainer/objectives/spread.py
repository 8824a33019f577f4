"""The spread-out term: different queries, and different positives, of the global batch point in different directions.

The mathematics is in trainer/losses/spread.py. Of all texts only a d × d matrix a side crosses ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.distributed import sum_over_ranks
from trainer.losses.gram import gram_matrix
from trainer.losses.spread import add_spread_gradients
from trainer.losses.unit_vectors import normalize_, unnormalized_gradient_
from trainer.objectives.contrastive_terms import Compared, named, of_all_ranks


@dataclass(frozen=True)
class SpreadOut:
    """EmbeddingGemma's L_S (arXiv:2509.20354): the spread-out loss of the queries plus that of their positives.

    At every size, times the weight of the size's own loss. unit: whether the vectors that are compared are unit vectors
    already; else their directions are spread.
    """

    weight: float
    unit: bool

    def add_gradients(self, given: Compared) -> dict[str, Tensor]:
        plan, count, device = given.plan, len(given.batch.queries), given.vectors[0].device
        positives = given.batch.targets.to(device) + count
        num_texts = [of_all_ranks(len(each), device) for each in (given.batch.queries, positives)]
        values = []
        for vectors, gradients, share in zip(given.vectors, given.gradients, plan.loss_weights):
            # Copies: positives need not be neighbours, and vectors that are not unit vectors stay as they are.
            sides = [vectors[:count] if self.unit else vectors[:count].clone(), vectors[positives]]
            lengths = [None if self.unit else normalize_(side) for side in sides]
            grams = sum_over_ranks(torch.stack([gram_matrix(side) for side in sides]), device)
            flows = [torch.zeros_like(side) for side in sides]
            spread = [
                add_spread_gradients(side, flow, gram=gram, weight=self.weight * share, num_texts=total)
                for side, flow, gram, total in zip(sides, flows, grams, num_texts)
            ]
            for side, flow, length in zip(sides, flows, lengths):
                if length is not None:
                    unnormalized_gradient_(flow, side, length)
            gradients[:count] += flows[0]
            gradients.index_add_(0, positives, flows[1])
            values.append(spread[0] + spread[1])
        by_size = torch.stack(values)
        loss = (by_size * by_size.new_tensor(plan.loss_weights)).sum() * self.weight
        return {"loss": loss} | named("spread", plan.names, by_size)
