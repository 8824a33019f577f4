"""The masked objective: SMAE, its ablations, MLM and RetroMAE, and the contrastive term of a second stage.

A rank's texts are cut into micro-batches, each a forward and its backward; losses are divided by the global batch's
counts of predicted tokens before, so that they add up over micro-batches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from data.collate import MaskedBatch, PairBatch, concatenate, pad_flat
from models.masked_autoencoder import IGNORED
from models.visibility import visible_positions
from trainer.config.schema import Recipe
from trainer.costs.flops import FORWARD_AND_BACKWARD, Shape, masked_flops
from trainer.distributed import derive_seed, sum_over_ranks
from trainer.objectives.backward import Passes, StepReport, accumulate, embed_all, micro_batches
from trainer.objectives.contrastive import ContrastiveObjective, contrastive
from trainer.objectives.guide import Guide
from trainer.objectives.size_schedules import Schedule


@dataclass(frozen=True)
class MaskedObjective:
    """SMAE, its ablations and plain MLM (Starbucks §3.2), and RetroMAE (SentMAE §2.1).

    visible_share: what each position sees of the others in enhanced decoding; unused in basic decoding.
    pairs: the second stage's contrastive term over the batch's pairs (SentMAE §2.2, eq. 9), times `pair_weight`. Its
    gradient with respect to the embeddings is made once from a forward without a graph, as in `grad_cache`, and goes
    back with the masked losses through the forward they need anyway. `symmetric`: in that term each text is a query.
    """

    schedule: Schedule
    shape: Shape
    token_budget: int
    packed: bool
    pad_id: int
    loss_scale: float
    visible_share: float
    pairs: ContrastiveObjective | None
    pair_weight: float
    symmetric: bool
    seed: int

    def forward_backward(self, engine: Passes, batch: MaskedBatch, step: int) -> StepReport:
        plan = self.schedule(step)
        device = engine.device
        lengths = batch.offsets.diff()
        sides = [batch.encoder_labels] + ([] if batch.decoder_labels is None else [batch.decoder_labels])
        local_counts = [int((labels != IGNORED).sum()) for labels in sides]
        counts = sum_over_ranks([float(count) for count in local_counts], device).clamp(min=1).tolist()
        scales = [self.loss_scale / count for count in counts]
        names = [f"encoder/{name}" for name in plan.names]
        if batch.decoder_labels is not None:
            names += [f"decoder/{name}" for name in plan.names]
        totals = torch.zeros(1 + len(names), device=device)
        padded = 0
        chunks = micro_batches(lengths, token_budget=self.token_budget, packed=self.packed)

        def pad(rows: Tensor, values: Tensor, fill: int) -> Tensor:
            if not len(rows):
                return torch.full((1, 1), fill, device=device)
            return pad_flat(values, batch.offsets, rows, fill=fill).long().to(device)

        def attention_of(rows: Tensor) -> Tensor:
            return pad(rows, torch.ones_like(batch.encoder_input_ids), 0 if len(rows) else 1)

        def seed_forward(rows: Tensor) -> None:
            """The same dropout in both forwards of these texts."""
            torch.manual_seed(derive_seed(self.seed, step, engine.world.rank, int(rows[0]) if len(rows) else 0))

        def embed(rows: Tensor) -> tuple[Tensor, ...]:
            seed_forward(rows)
            return engine(
                pad(rows, batch.encoder_input_ids, self.pad_id),
                attention_of(rows),
                sizes=plan.sizes,
                labels=pad(rows, batch.encoder_labels, IGNORED),
                embeddings="only",
            )

        pair_losses: dict[str, Tensor] = {}
        pair_gradients: list[Tensor] = []
        if self.pairs is not None and batch.pairs is not None:
            vectors, pairs = embed_all(engine, chunks, embed=embed), batch.pairs
            if self.symmetric:
                vectors, pairs = [torch.cat([each, each]) for each in vectors], both_ways(pairs)
            pair_losses, pair_gradients = self.pairs.loss_and_gradients(vectors, pairs, plan, engine)
            if self.symmetric:
                pair_gradients = [torch.add(*each.chunk(2)) for each in pair_gradients]

        def loss_of(rows: Tensor) -> Tensor:
            nonlocal totals, padded
            cut = partial(pad, rows)
            attention_mask = attention_of(rows)
            padded += int(lengths[rows].sum()) if self.packed else attention_mask.numel()
            decoder: dict[str, Any] = {}
            if batch.decoder_input_ids is not None and batch.decoder_labels is not None:
                decoder = {
                    "decoder_input_ids": cut(batch.decoder_input_ids, self.pad_id),
                    "decoder_labels": cut(batch.decoder_labels, IGNORED),
                    "decoder_scale": scales[1],
                }
            if batch.visibility_keys is not None:
                keys = batch.visibility_keys[rows] if len(rows) else torch.zeros(1, dtype=torch.int64)
                decoder["decoder_visible"] = visible_positions(
                    keys.to(device), attention_mask, share=self.visible_share
                )
            if pair_gradients:
                seed_forward(rows)
            loss, encoder_losses, decoder_losses, *vectors = engine(
                cut(batch.encoder_input_ids, self.pad_id),
                attention_mask,
                sizes=plan.sizes,
                labels=cut(batch.encoder_labels, IGNORED),
                size_weights=plan.loss_weights,
                encoder_scale=scales[0],
                embeddings="also" if pair_gradients else "no",
                **decoder,
            )
            per_size = torch.cat([encoder_losses, decoder_losses])[: len(names)]
            totals = totals + torch.cat([loss.detach().view(1), per_size])
            for vector, gradient in zip(vectors, pair_gradients):
                loss = loss + self.pair_weight * (vector.float() * gradient[rows]).sum()
            return loss

        accumulate(engine, chunks, loss_of=loss_of)
        decoder_rows = local_counts[1] if len(local_counts) > 1 else 0
        flops = masked_flops(
            self.shape,
            lengths,
            encoder_rows=local_counts[0],
            decoder_rows=decoder_rows,
            sizes=plan.sizes,
            enhanced=batch.visibility_keys is not None,
        )
        losses = dict(zip(["loss", *names], totals.unbind()))
        if pair_losses:
            losses["loss"] = losses["loss"] + self.pair_weight * pair_losses.pop("loss")
            losses |= {f"pairs/{name.rpartition('/')[2]}": value for name, value in pair_losses.items()}
        return StepReport(losses, batch.num_tokens, padded, FORWARD_AND_BACKWARD * flops)


def both_ways(pairs: PairBatch) -> PairBatch:
    """Every text as a query, and as a passage: coCondenser's loss (arXiv:2108.05540) of n pairs, 2n terms.

    A text is no negative of itself because equal texts are none (`false_negatives`).
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


def masked(
    recipe: Recipe, schedule: Schedule, *, shape: Shape, pad_id: int, packed: bool, guide: Guide | None = None
) -> MaskedObjective:
    chosen, longest = recipe.objective, recipe.data.max_length
    pairs: ContrastiveObjective | None = None
    if chosen.pairs != "none":
        pairs = contrastive(recipe, schedule, shape=shape, pad_id=pad_id, packed=packed, guide=guide)
        pairs = replace(pairs, loss="infonce", kl="none")
    if chosen.pairs == "tuples":
        longest = max(recipe.data.query_max_length, recipe.data.passage_max_length)
    return MaskedObjective(
        schedule,
        shape,
        token_budget=recipe.train.micro_batch_size * longest,
        packed=packed,
        pad_id=pad_id,
        loss_scale=chosen.loss_scale,
        visible_share=1.0 - chosen.decoder_mask_ratio,
        pairs=pairs,
        pair_weight=chosen.pair_weight,
        symmetric=chosen.pairs == "spans" and chosen.symmetric_spans,
        seed=recipe.run.seed,
    )
