"""The masked objective: SMAE, its ablations, MLM and RetroMAE, and the contrastive term of a second stage.

A rank's texts are cut into micro-batches, and each runs one forward and one backward pass. Losses are first divided by
the global batch's counts of predicted tokens, so that they add up over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.collate import MaskedBatch, PairBatch, concatenate, offsets_of, take
from data.keyed_random import derive_seed
from models.masked_autoencoder import IGNORED, DecoderInputs
from trainer.config.schema import Recipe
from trainer.costs.flops import FORWARD_AND_BACKWARD, Shape, masked_flops
from trainer.distributed import seed_torch, sum_over_ranks
from trainer.objectives.backward import (
    FILLER,
    Embed,
    Passes,
    StepReport,
    accumulate,
    embed_all,
    micro_batches,
    padded_tokens,
)
from trainer.objectives.contrastive_loss import ContrastiveLoss, pair_loss
from trainer.objectives.materials import Materials
from trainer.objectives.size_schedules import Schedule, SizePlan


@dataclass(frozen=True)
class MaskedObjective:
    """SMAE, its ablations and plain MLM (Starbucks §3.2), and RetroMAE (SentMAE §2.1), with a pair term or without."""

    schedule: Schedule
    shape: Shape
    token_budget: int
    packed: bool
    loss_scale: float
    visible_share: float  # of the other positions, for each one in enhanced decoding; unused in basic decoding
    pairs: PairTerm | None

    def forward_backward(self, engine: Passes, batch: MaskedBatch, step: int) -> StepReport:
        plan, lengths = self.schedule(step), batch.offsets.diff()
        chunks = micro_batches(lengths, token_budget=self.token_budget, packed=self.packed)
        tokens = TokenPrediction(self, engine, batch, plan)
        pairs: PairGradients | None = None
        if self.pairs is not None and batch.pairs is not None:
            pairs = self.pairs.first_pass(engine, chunks, batch.pairs, plan, embed=tokens.embed, step=step)

        def loss_of(rows: Tensor) -> Tensor:
            if pairs is None:
                return tokens.loss(rows)[0]
            pairs.seed_forward(rows)
            loss, vectors = tokens.loss(rows, embeddings="also")
            return pairs.added_to(loss, vectors, rows)

        accumulate(engine, chunks, loss_of=loss_of)
        losses = tokens.losses if pairs is None else pairs.reported_with(tokens.losses)
        flops = masked_flops(
            self.shape,
            lengths,
            encoder_rows=tokens.predicted[0],
            decoder_rows=sum(tokens.predicted[1:]),
            sizes=plan.sizes,
            enhanced=batch.visibility_keys is not None,
        )
        padded = padded_tokens(lengths, chunks, packed=self.packed)
        return StepReport(losses, batch.num_tokens, padded, FORWARD_AND_BACKWARD * flops)


class TokenPrediction:
    """The prediction of a step's masked tokens: the loss of each micro-batch, and the step's totals."""

    def __init__(self, objective: MaskedObjective, engine: Passes, batch: MaskedBatch, plan: SizePlan) -> None:
        self.objective, self.engine, self.batch, self.plan = objective, engine, batch, plan
        sides = {"encoder": batch.encoder_labels}
        if batch.decoder_labels is not None:
            sides["decoder"] = batch.decoder_labels
        self.predicted = [int((labels != IGNORED).sum()) for labels in sides.values()]  # tokens, on this rank
        counts = sum_over_ranks([float(count) for count in self.predicted], engine.device).clamp(min=1).tolist()
        self.scales = [objective.loss_scale / count for count in counts]
        self.names = ["loss", *(f"{side}/{name}" for side in sides for name in plan.names)]
        self.totals = torch.zeros(len(self.names), device=engine.device)
        self.prompt_lengths: Tensor | None = None  # of the pairs' texts; other texts are not pooled
        if batch.pairs is not None:
            self.prompt_lengths = torch.cat([batch.pairs.queries.left_out, batch.pairs.passages.left_out])

    def embed(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Each size's embeddings of these masked texts, and nothing else."""
        return self.engine(**self._inputs(rows, decodes=False), sizes=self.plan.sizes, embeddings="only")

    def loss(self, rows: Tensor, *, embeddings: str = "no") -> tuple[Tensor, list[Tensor]]:
        """The loss of these texts and, with `embeddings` "also", each size's embeddings [len(rows), d]."""
        loss, encoder_losses, decoder_losses, *vectors = self.engine(
            **self._inputs(rows, decodes=True),
            sizes=self.plan.sizes,
            size_weights=self.plan.loss_weights,
            encoder_scale=self.scales[0],
            embeddings=embeddings,
        )
        per_size = torch.cat([encoder_losses, decoder_losses])
        self.totals += torch.cat([loss.detach().view(1), per_size])[: len(self.totals)]
        return loss, vectors

    @property
    def losses(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.totals.unbind()))

    def _inputs(self, rows: Tensor, *, decodes: bool) -> dict[str, Any]:
        """The model's inputs for these texts, flat, or for the filler where there are no texts."""
        batch, prompts, device = self.batch, self.prompt_lengths, self.engine.device
        if not len(rows):
            batch, rows = _filler_for(batch), torch.tensor([0])
            prompts = None if prompts is None else FILLER.left_out

        def of_rows(values: Tensor) -> Tensor:
            return take(values, batch.offsets, rows).to(device)

        inputs: dict[str, Any] = {
            "input_ids": of_rows(batch.encoder_input_ids),
            "labels": of_rows(batch.encoder_labels),
            "offsets": offsets_of(batch.offsets.diff()[rows]).to(device),
            "prompt_lengths": None if prompts is None else prompts[rows].to(device),
        }
        if decodes and batch.decoder_input_ids is not None and batch.decoder_labels is not None:
            inputs["decoder"] = DecoderInputs(
                of_rows(batch.decoder_input_ids),
                of_rows(batch.decoder_labels),
                scale=self.scales[-1],
                visibility_keys=None if batch.visibility_keys is None else batch.visibility_keys[rows].to(device),
                visible_share=self.objective.visible_share,
            )
        return inputs


def _filler_for(batch: MaskedBatch) -> MaskedBatch:
    """The filler as a batch of the sides that `batch` has; nothing of it is predicted."""
    nothing, ignored = torch.zeros(1, dtype=torch.int64), torch.full_like(FILLER.tokens, IGNORED)
    decodes, draws = batch.decoder_labels is not None, batch.visibility_keys is not None
    return MaskedBatch(
        FILLER.offsets,
        FILLER.tokens,
        ignored,
        decoder_input_ids=FILLER.tokens if decodes else None,
        decoder_labels=ignored if decodes else None,
        sample_ids=nothing,
        visibility_keys=nothing if draws else None,
    )


@dataclass(frozen=True)
class PairTerm:
    """The second stage's contrastive term over the batch's pairs (SentMAE §2.2, eq. 9), times `weight`.

    Its gradient with respect to the embeddings is computed once, from a forward pass without a graph, as in
    `grad_cache`. The gradient then goes back together with the masked losses, through the forward pass that they need
    anyway. `symmetric`: every text is also a query.
    """

    loss: ContrastiveLoss
    weight: float
    symmetric: bool
    seed: int

    def first_pass(
        self, engine: Passes, chunks: Sequence[Tensor], pairs: PairBatch, plan: SizePlan, *, embed: Embed, step: int
    ) -> PairGradients:
        """Embed all texts and compute the loss's gradient for their embeddings. `embed` as in `grad_cache`."""

        def seed_forward(rows: Tensor) -> None:
            seed_torch(derive_seed(self.seed, step, engine.world.rank, int(rows[0]) if len(rows) else 0))

        def seeded(rows: Tensor) -> tuple[Tensor, ...]:
            seed_forward(rows)
            return embed(rows)

        vectors = embed_all(engine, chunks, embed=seeded)
        if self.symmetric:
            vectors, pairs = [torch.cat([each, each]) for each in vectors], both_ways(pairs)
        losses, gradients = self.loss.loss_and_gradients(vectors, pairs, plan, engine)
        if self.symmetric:
            gradients = [torch.add(*each.chunk(2)) for each in gradients]
        return PairGradients(losses, gradients, self.weight, seed_forward)


@dataclass(frozen=True)
class PairGradients:
    """A step's pair losses, and their gradients [texts, d] with respect to each size's embeddings."""

    losses: dict[str, Tensor]
    gradients: list[Tensor]
    weight: float
    seed_forward: Callable[[Tensor], None]  # gives both forward passes of these texts the same dropout

    def added_to(self, loss: Tensor, vectors: Sequence[Tensor], rows: Tensor) -> Tensor:
        """A micro-batch's loss, plus a term that sends these gradients through its embeddings, [rows, d] a size."""
        for vector, gradient in zip(vectors, self.gradients):
            loss = loss + self.weight * (vector.float() * gradient[rows]).sum()
        return loss

    def reported_with(self, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        """All of a step's losses: the sum, and each by its name."""
        own = {
            "pairs/" + name.removeprefix("loss/") if name.startswith("loss/") else name: value
            for name, value in self.losses.items()
            if name != "loss"
        }
        return losses | {"loss": losses["loss"] + self.weight * self.losses["loss"]} | own


def both_ways(pairs: PairBatch) -> PairBatch:
    """Every text as a query and as a passage: coCondenser's loss (arXiv:2108.05540), with 2n terms for n pairs.

    A text is never its own negative, because equal texts are left out (`false_negatives`).
    """
    texts, count = concatenate(pairs.queries, pairs.passages), len(pairs.queries)
    hashes = torch.cat([pairs.query_hashes, pairs.passage_hashes])
    partners = torch.cat([pairs.targets + count, torch.arange(count)])
    return PairBatch(
        queries=texts,
        passages=texts,
        targets=partners,
        passage_query=partners,
        scores=None,
        query_hashes=hashes,
        passage_hashes=hashes,
        known_hashes=hashes[partners],
        known_offsets=torch.arange(2 * count + 1),
        sample_ids=pairs.sample_ids,
    )


def masked(recipe: Recipe, materials: Materials) -> MaskedObjective:
    chosen = recipe.objective
    pairs: PairTerm | None = None
    if chosen.pairs != "none":
        symmetric = chosen.pairs == "spans" and chosen.symmetric_spans
        pairs = PairTerm(pair_loss(recipe, guide=materials.guide), chosen.pair_weight, symmetric, recipe.run.seed)
    return MaskedObjective(
        materials.schedule,
        materials.shape,
        token_budget=recipe.token_budget,
        packed=materials.packed,
        loss_scale=chosen.loss_scale,
        visible_share=1.0 - chosen.decoder_mask_ratio,
        pairs=pairs,
    )
