"""The distillation objective: from texts alone, every size learns a frozen teacher's vectors.

A text's vector at (l, d) is pulled to the first d dimensions of the teacher's vector, so that queries embedded at a
small size can search documents indexed at a larger one. Where no term compares texts, the loss is a sum over texts:
each micro-batch is embedded once, and no rank waits for another's vectors. Relational terms need all vectors of the
batch before their gradient: by gradient caching or, where one pass fits in memory, directly
(trainer/objectives/backward.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from data.collate import TextBatch
from data.keyed_random import derive_seed
from trainer.config.schema import Recipe
from trainer.costs.flops import Shape, needed_passes, sizes_flops
from trainer.losses.unit_vectors import normalize_, unnormalized_gradient_
from trainer.objectives.backward import (
    Passes,
    StepReport,
    accumulate,
    cached_micro_batches,
    embed_texts,
    grad_cache,
    hand_over,
    padded_tokens,
)
from trainer.objectives.materials import Materials
from trainer.objectives.size_schedules import Schedule
from trainer.objectives.teacher import Teaching, TextGroup, texts_of_all_ranks


@dataclass(frozen=True)
class DistillationObjective:
    """Every size learns the teacher's vectors.

    graph_bytes: as in `grad_cache`, where terms compare texts. trains_encoder: false where heads alone train.
    """

    schedule: Schedule
    shape: Shape
    teaching: Teaching
    token_budget: int
    packed: bool
    graph_bytes: float
    seed: int
    trains_encoder: bool = True

    def forward_backward(self, engine: Passes, batch: TextBatch, step: int) -> StepReport:
        plan, texts = self.schedule(step), batch.texts
        lengths = texts.lengths
        compares = self.teaching.weights.compares_texts
        chunks = cached_micro_batches(
            lengths,
            token_budget=self.token_budget,
            packed=self.packed,
            graph_bytes=self.graph_bytes if compares else 0.0,
        )
        taught = self.teaching.teacher.vectors(batch, device=engine.device, heartbeat=engine.heartbeat)
        everything = [TextGroup(texts_of_all_ranks(len(texts), engine.device))]

        def embed(rows: Tensor) -> tuple[Tensor, ...]:
            return embed_texts(engine, texts, rows, sizes=plan.sizes)

        def learn(vectors: list[Tensor], rows: Tensor | None = None) -> tuple[dict[str, Tensor], list[Tensor]]:
            target = taught if rows is None else taught[rows.to(engine.device)]
            lengths_of = [normalize_(each) for each in vectors]
            gradients = [torch.zeros_like(each) for each in vectors]
            losses = self.teaching.add_gradients(vectors, target, gradients, plan, engine.world, groups=everything)
            for gradient, unit, length in zip(gradients, vectors, lengths_of):
                unnormalized_gradient_(gradient, unit, length)
            return losses, gradients

        if compares:
            losses = grad_cache(
                engine,
                chunks,
                embed=embed,
                loss_and_gradients=learn,
                seed=derive_seed(self.seed, step, engine.world.rank),
                graph_bytes=self.graph_bytes,
            )
        else:
            losses = {}

            def loss_of(rows: Tensor) -> Tensor:
                outputs = embed(rows)
                if not len(rows):
                    return torch.stack([output.float().sum() * 0.0 for output in outputs]).sum()
                found, gradients = learn([output.detach().float().clone() for output in outputs], rows)
                for name, value in found.items():
                    losses[name] = losses.get(name, torch.zeros_like(value)) + value
                flows = [hand_over(output, grad.to(output.dtype)) for output, grad in zip(outputs, gradients)]
                return torch.stack([flow.float() for flow in flows]).sum()

            accumulate(engine, chunks, loss_of=loss_of)
            if not losses:  # this rank has no texts
                zero = torch.zeros((), device=engine.device)
                losses = {"loss": zero} | {f"distill/{name}": zero for name in plan.names}
        flops = needed_passes(trains_encoder=self.trains_encoder) * sizes_flops(self.shape, lengths, plan.sizes)
        return StepReport(losses, batch.num_tokens, padded_tokens(lengths, chunks, packed=self.packed), flops)


def distillation(recipe: Recipe, materials: Materials) -> DistillationObjective:
    assert materials.teaching is not None  # every recipe of this kind has a teacher
    return DistillationObjective(
        materials.schedule,
        materials.shape,
        materials.teaching,
        token_budget=recipe.token_budget,
        packed=materials.packed,
        graph_bytes=recipe.graph_bytes,
        seed=recipe.run.seed,
        trains_encoder=not recipe.trains_heads_alone,
    )
