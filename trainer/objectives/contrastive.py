"""The contrastive objective: a global batch's queries against all its passages, at the sizes of the step's plan.

The loss is in trainer/objectives/contrastive_loss.py. This module embeds the texts and sends the loss's gradient back
through the embeddings: through an encoder in micro-batches or at once, and through a token table in its own way.
"""

from __future__ import annotations

from dataclasses import dataclass

from data.collate import PairBatch, concatenate
from data.keyed_random import derive_seed
from trainer.config.schema import Recipe
from trainer.costs.flops import FORWARD_AND_BACKWARD, Shape, needed_passes, sizes_flops
from trainer.objectives.backward import (
    FILLER,
    Passes,
    StepReport,
    cached_micro_batches,
    embed_texts,
    grad_cache,
    hand_over,
    padded_tokens,
)
from trainer.objectives.contrastive_loss import ContrastiveLoss, contrastive_loss
from trainer.objectives.materials import Materials
from trainer.objectives.size_schedules import Schedule


@dataclass(frozen=True)
class ContrastiveObjective:
    """Trains an encoder: by gradient caching, or in one micro-batch where all graphs are kept.

    graph_bytes: as in `grad_cache`. trains_encoder: false where heads alone train.
    """

    schedule: Schedule
    shape: Shape
    token_budget: int
    packed: bool
    graph_bytes: float
    seed: int
    loss: ContrastiveLoss
    trains_encoder: bool = True

    def forward_backward(self, engine: Passes, batch: PairBatch, step: int) -> StepReport:
        plan = self.schedule(step)
        texts = concatenate(batch.queries, batch.passages)
        lengths = texts.lengths
        chunks = cached_micro_batches(
            lengths, token_budget=self.token_budget, packed=self.packed, graph_bytes=self.graph_bytes
        )
        losses = grad_cache(
            engine,
            chunks,
            embed=lambda rows: embed_texts(engine, texts, rows, sizes=plan.sizes),
            loss_and_gradients=lambda embeddings: self.loss.loss_and_gradients(embeddings, batch, plan, engine),
            seed=derive_seed(self.seed, step, engine.world.rank),
            graph_bytes=self.graph_bytes,
        )
        flops = needed_passes(trains_encoder=self.trains_encoder) * sizes_flops(self.shape, lengths, plan.sizes)
        return StepReport(losses, batch.num_tokens, padded_tokens(lengths, chunks, packed=self.packed), flops)


@dataclass(frozen=True)
class TableObjective:
    """Trains a token table: all texts in one pass and one graph, which keeps only their token ids.

    Caching would only look everything up twice, and each micro-batch's backward pass would write a gradient of the
    whole table. The memory that grows with the batch is one copy of the vectors, and half as much for the passages'
    gradient.
    """

    schedule: Schedule
    shape: Shape
    loss: ContrastiveLoss

    def forward_backward(self, engine: Passes, batch: PairBatch, step: int) -> StepReport:
        plan = self.schedule(step)
        texts = concatenate(batch.queries, batch.passages)
        read = texts if len(texts) else FILLER
        tokens, offsets = read.tokens.to(engine.device), read.offsets.to(engine.device)
        (output,) = engine(tokens, None, sizes=(plan.sizes[plan.full],), offsets=offsets)
        vectors = output.detach().float()  # shares a float32 output's memory: nothing reads it again
        own = vectors[: len(texts)]  # overwritten by their gradients
        if self.loss.is_prefix_infonce(batch):
            losses = self.loss.prefix_infonce_(own, batch, plan, engine)
        else:
            embeddings = [own[:, : size.dim].clone() for size in plan.sizes]
            losses, gradients = self.loss.loss_and_gradients(embeddings, batch, plan, engine)
            own.zero_()
            for size, gradient in zip(plan.sizes, gradients):
                own[:, : size.dim] += gradient
        if not len(texts):
            vectors.zero_()
        with engine.accumulation():
            engine.backward(hand_over(output, vectors.to(output.dtype)))
        count = batch.num_tokens
        return StepReport(losses, count, count, FORWARD_AND_BACKWARD * float(count * self.shape.hidden))


def contrastive(recipe: Recipe, materials: Materials) -> ContrastiveObjective | TableObjective:
    loss = contrastive_loss(recipe, guide=materials.guide, teaching=materials.teaching)
    if materials.static:
        return TableObjective(materials.schedule, materials.shape, loss)
    return ContrastiveObjective(
        materials.schedule,
        materials.shape,
        token_budget=recipe.token_budget,
        packed=materials.packed,
        graph_bytes=recipe.graph_bytes,
        seed=recipe.run.seed,
        loss=loss,
        trains_encoder=not recipe.trains_heads_alone,
    )
