"""ESE's learn-to-compress as a term: narrow sizes learn the principal components of their body's whole vectors.

The mathematics is in trainer/losses/compression.py. The components are those of the global batch. Each body's are
computed by one rank, the ranks taking turns, and sent to the others, so that all ranks have the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from data.collate import PairBatch
from models.sizes import Body
from trainer.distributed import World, sum_over_ranks
from trainer.losses.compression import add_compression_gradients, principal_directions
from trainer.losses.gram import gram_matrix
from trainer.objectives.backward import Passes
from trainer.objectives.contrastive_terms import of_all_ranks
from trainer.objectives.size_schedules import SizePlan


@dataclass(frozen=True)
class Compression:
    """D(v_n[:k], PCA_k(v_n)) of ESE (arXiv:2402.14776v2) at every size that is narrower than the full one.

    D is taken over queries and passages together, and multiplied by the weight of the size's own loss. For each such
    size, the plan also has a size with the same body and the full width (`with_whole_vectors`).
    """

    weight: float
    temperature: float

    def losses_and_gradients(
        self, embeddings: list[Tensor], batch: PairBatch, plan: SizePlan, engine: Passes
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        gradients = [torch.zeros_like(each) for each in embeddings[plan.uncompared :]]
        full, device = plan.sizes[plan.full], embeddings[0].device
        whole = {size.body: each for size, each in zip(plan.sizes, embeddings) if size.dim == full.dim}
        narrow = [n for n, size in enumerate(plan.sizes) if size.dim < full.dim and plan.loss_weights[n]]
        widest: dict[Body, int] = {}
        for n in narrow:
            widest[plan.sizes[n].body] = max(plan.sizes[n].dim, widest.get(plan.sizes[n].body, 0))
        directions = _directions({body: whole[body] for body in widest}, widest, engine.world)
        num_texts = of_all_ranks(len(embeddings[0]), device)
        losses = {"loss": torch.zeros((), device=device)}
        for n in narrow:
            body, dim = plan.sizes[n].body, plan.sizes[n].dim
            value = add_compression_gradients(
                embeddings[n],
                whole[body],
                gradients[n - plan.uncompared],
                directions=directions[body][:, :dim],
                temperature=self.temperature,
                weight=self.weight * plan.loss_weights[n],
                num_texts=num_texts,
            )
            losses[f"compression/{plan.names[n]}"] = value
            losses["loss"] = losses["loss"] + value * plan.loss_weights[n] * self.weight
        return losses, gradients


def _directions(whole: dict[Body, Tensor], widest: dict[Body, int], world: World) -> dict[Body, Tensor]:
    """Each body's principal directions, [D, widest k], by bodies. whole: this rank's vectors [n, D]."""
    own: dict[Body, Tensor] = {}
    for turn, (body, vectors) in enumerate(whole.items()):
        gram = sum_over_ranks(gram_matrix(vectors), vectors.device)
        if turn % world.size == world.rank:
            own[body] = gram
    # After all sums, so that ranks decompose at the same time.
    found = {body: principal_directions(gram, widest[body]) for body, gram in own.items()}
    return {
        body: sum_over_ranks(
            found[body] if body in found else vectors.new_zeros(vectors.shape[1], widest[body]), vectors.device
        )
        for body, vectors in whole.items()
    }
