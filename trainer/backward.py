"""How a step's gradient is made from micro-batches.

`accumulate`: losses that add up over micro-batches. `grad_cache`: losses that compare all texts with all others
(GradCache, Gao et al. 2021): embed everything without a graph, take the loss's gradient with respect to the embeddings
once, then embed again micro-batch by micro-batch and send that gradient through. Exact at any ZeRO stage because every
backward has its own engine forward just before it, and gradients are summed, never averaged, over micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from trainer.distributed import derive_seed, max_over_ranks
from trainer.engine import Engine

Embed = Callable[[Tensor], tuple[Tensor, ...]]
LossAndGradients = Callable[[list[Tensor]], tuple[dict[str, Tensor], list[Tensor]]]


def accumulate(engine: Engine, chunks: Iterable[Tensor], *, loss_of: Callable[[Tensor], Tensor]) -> None:
    """Run each micro-batch's loss and send it back. Every rank must bring the same number of chunks."""
    with engine.accumulation():
        for rows in chunks:
            engine.backward(loss_of(rows))


def length_sorted_chunks(lengths: Tensor, chunk_size: int) -> list[Tensor]:
    """Row numbers cut into chunks of texts of like length, longest first, so that little is padding.

    Longest first, because a micro-batch that does not fit should fail at once.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    return list(order.split(chunk_size))


def grad_cache(
    engine: Engine,
    chunks: Sequence[Tensor],
    *,
    embed: Embed,
    loss_and_gradients: LossAndGradients,
    seed: int,
    cached: bool = True,
) -> dict[str, Tensor]:
    """Gradient of a loss over all texts of all ranks, a chunk at a time.

    chunks: int64 row numbers, together each of 0..n-1 once. embed(rows): engine forward, K of [len(rows), d_k].
    loss_and_gradients(K of float32 [n, d_k]) -> (metrics, K of d GLOBAL loss / d these rows [n, d_k]).
    Dropout is the same in both passes: each chunk's forward is seeded by (seed, chunk).
    `cached` False: one chunk, one pass; the graph is kept through the loss.
    """
    assert cached or len(chunks) == 1, "without caching there is one chunk"
    count = max_over_ranks(len(chunks), engine.device)
    num_rows = sum(len(rows) for rows in chunks)

    def forward(index: int) -> tuple[Tensor, ...]:
        torch.manual_seed(derive_seed(seed, index))
        # Ranks with fewer chunks repeat one text with no weight: ZeRO's collectives must match.
        return embed(chunks[index] if index < len(chunks) else chunks[0][:1])

    outputs: tuple[Tensor, ...] = ()
    embeddings: list[Tensor] = []
    for index in range(count):
        with torch.set_grad_enabled(not cached):
            outputs = forward(index)
        if not embeddings:
            embeddings = [torch.empty(num_rows, out.shape[1], device=out.device) for out in outputs]
        if index < len(chunks):
            for whole, out in zip(embeddings, outputs):
                whole[chunks[index]] = out.detach().float()
    metrics, gradients = loss_and_gradients(embeddings)
    with engine.accumulation():
        for index in range(count):
            if cached:
                outputs = forward(index)
            if index < len(chunks):
                parts = [(out.float() * grad[chunks[index]]).sum() for out, grad in zip(outputs, gradients)]
            else:
                parts = [out.float().sum() * 0.0 for out in outputs]
            engine.backward(torch.stack(parts).sum())
    return metrics
