"""A term of quantised vectors: the contrastive loss of what int8 or binary embeddings store, at every size.

The mathematics is in trainer/losses/quantised.py. The ranges of int8 are those of the global batch: two numbers a
dimension cross ranks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from trainer.distributed import largest_over_ranks
from trainer.losses.quantised import extremes, sign_slopes, to_signs, to_steps
from trainer.losses.unit_vectors import normalize_, unnormalized_gradient_
from trainer.objectives.contrastive_terms import Compared, Term

Precision = Literal["int8", "binary"]


@dataclass(frozen=True)
class Quantised:
    """Another term's loss of quantised vectors, with gradients straight through the quantiser (arXiv:2602.11151).

    Queries and passages are quantised alike, as both sentences of a pair are; an int8 search rounds documents alone,
    which changes scores less. The vectors that are compared must be unit vectors. weight: times the weight of the
    size's own loss.
    """

    precision: Precision
    weight: float
    term: Term

    def add_gradients(self, given: Compared) -> dict[str, Tensor]:
        quantised = self._quantised(given.vectors)
        lengths = [normalize_(each) for each in quantised]
        flows = [torch.zeros_like(each) for each in quantised]
        weights = tuple(self.weight * weight for weight in given.plan.loss_weights)
        plan = replace(given.plan, loss_weights=weights)
        losses = self.term.add_gradients(replace(given, vectors=quantised, gradients=flows, plan=plan))
        for flow, own, length, unit, gradient in zip(flows, quantised, lengths, given.vectors, given.gradients):
            unnormalized_gradient_(flow, own, length)
            gradient += flow if self.precision == "int8" else flow.mul_(sign_slopes(unit))
        return {name.replace("loss/", f"{self.precision}/"): value for name, value in losses.items()}

    def _quantised(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        if self.precision == "binary":
            return [to_signs(each) for each in vectors]
        own = [extremes(each) for each in vectors]
        of_all = largest_over_ranks(torch.cat(own, dim=1)).split([each.shape[1] for each in own], dim=1)
        return [to_steps(each, found) for each, found in zip(vectors, of_all)]
