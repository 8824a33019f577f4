"""How a step's gradient is made from micro-batches.

`micro_batches` cuts a rank's texts by length and a token budget, so that little is computed on padding. `accumulate` is
for losses that add up over micro-batches. `grad_cache` is for losses that compare all texts with all others (GradCache,
Gao et al. 2021): it embeds everything without a graph, takes the loss's gradient with respect to the embeddings once,
then embeds again micro-batch by micro-batch and sends that gradient through. Both are exact at any ZeRO stage, because
every backward pass directly follows its own engine forward pass, and gradients are summed, never averaged, over
micro-batches.

Ranks may have different numbers of micro-batches, and a rank may have no text at all. A rank with fewer than the others
runs EMPTY micro-batches, a filler text without weight, because ZeRO's collectives must match on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from data.collate import Texts
from data.keyed_random import derive_seed
from models.sizes import Size
from trainer.distributed import World, max_over_ranks

Embed = Callable[[Tensor], tuple[Tensor, ...]]
LossAndGradients = Callable[[list[Tensor]], tuple[dict[str, Tensor], list[Tensor]]]


@dataclass(frozen=True)
class StepReport:
    """What one rank did in a step. `losses` add up over ranks to the global batch's values (0-d tensors)."""

    losses: dict[str, Tensor]
    tokens: int  # without padding
    padded_tokens: int  # padding included
    flops: float


class Passes(Protocol):
    """What objectives need of the engine (trainer/engine.py): forward passes, each followed by its backward pass."""

    world: World
    device: torch.device
    heartbeat: Callable[[str], None]  # reports progress: the name of a phase

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def accumulation(self) -> AbstractContextManager[None]: ...
    def backward(self, loss: Tensor) -> None: ...


EMPTY = torch.empty(0, dtype=torch.int64)
# The cost of starting a micro-batch, as a share of the token budget. With a lower cost, small micro-batches would leave
# much of the device idle.
_START_COST = 1 / 64


def micro_batches(lengths: Tensor, *, token_budget: int, packed: bool = False) -> list[Tensor]:
    """Micro-batches of texts of similar length, each within `token_budget` tokens, padding counted, as row numbers.

    lengths: int64 [n]. For any lengths, the cuts minimise padding plus a cost for every micro-batch (a shortest path
    over the sorted lengths); packed texts have no padding and fill the budget. A text longer than the budget is alone
    in its micro-batch. The longest come first, because a micro-batch that does not fit in memory should fail at once.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    ordered = lengths[order].numpy()
    count = len(ordered)
    if not count:
        return []
    if packed:
        cuts, tokens = [0], 0
        for row, length in enumerate(ordered.tolist()):
            if tokens + length > token_budget and row > cuts[-1]:
                cuts.append(row)
                tokens = 0
            tokens += length
        return list(order.tensor_split(cuts[1:]))
    cost = np.full(count + 1, np.inf)  # [k]: of the best cuts of the first k texts
    cost[0] = 0.0
    begin = np.zeros(count + 1, dtype=np.int64)  # [k]: where the last micro-batch of those begins
    for start, longest in enumerate(ordered.tolist()):
        most = max(1, token_budget // max(1, longest))
        ends = np.arange(start + 1, min(count, start + most) + 1)
        through = cost[start] + token_budget * _START_COST + longest * (ends - start)
        better = through < cost[ends]
        cost[ends[better]] = through[better]
        begin[ends[better]] = start
    cuts = [count]
    while cuts[-1]:
        cuts.append(int(begin[cuts[-1]]))
    return list(order.tensor_split(cuts[-2:0:-1]))


def in_one(lengths: Tensor) -> list[Tensor]:
    """All texts as one micro-batch, longest first; an empty list where there is no text. lengths: int64 [n]."""
    return [lengths.argsort(descending=True, stable=True)] if len(lengths) else []


def padded_tokens(lengths: Tensor, chunks: Sequence[Tensor], *, packed: bool) -> int:
    """Tokens that these micro-batches compute, padding included."""
    return int(lengths.sum() if packed else sum(len(rows) * int(lengths[rows].max()) for rows in chunks))


# A text of one token, without weight. A rank that has no texts runs its passes on it.
FILLER = Texts(torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1]))


def embed_texts(engine: Passes, texts: Texts, rows: Tensor, *, sizes: Sequence[Size]) -> tuple[Tensor, ...]:
    """One forward pass of the texts in `rows`, K of [len(rows), d_k], or of the filler where `rows` is empty."""
    read = texts.take(rows) if len(rows) else FILLER
    tokens, offsets, prompts = (each.to(engine.device) for each in (read.tokens, read.offsets, read.left_out))
    return engine(tokens, None, sizes=sizes, offsets=offsets, prompt_lengths=prompts)


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        # The gradient is scaled in place and given away, because a copy would double its memory.
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(grads[0]), None


def hand_over(output: Tensor, gradient: Tensor) -> Tensor:
    """A zero whose backward pass sends `gradient` through `output`, once.

    `gradient` has the shape of `output`, and the caller must not use it again.
    """
    return _HandOver.apply(output, gradient)


def accumulate(engine: Passes, chunks: Sequence[Tensor], *, loss_of: Callable[[Tensor], Tensor]) -> None:
    """Run each micro-batch forward and backward. `loss_of(EMPTY)` must be a zero that went through the engine."""
    count = max_over_ranks(len(chunks), engine.device)
    with engine.accumulation():
        for index in range(count):
            engine.backward(loss_of(chunks[index] if index < len(chunks) else EMPTY))


def embed_all(engine: Passes, chunks: Sequence[Tensor], *, embed: Embed) -> list[Tensor]:
    """All texts' embeddings without a graph, in the texts' order: K of float32 [n, d_k]. `embed` as in `grad_cache`."""
    count = max_over_ranks(len(chunks), engine.device)
    with torch.no_grad():
        return _collect(chunks, (embed(chunks[index] if index < len(chunks) else EMPTY) for index in range(count)))


def _collect(chunks: Sequence[Tensor], outputs: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    """The chunks' outputs in the texts' order, K of float32 [n, d_k]. EMPTY chunks come last and are dropped."""
    num_rows = sum(len(rows) for rows in chunks)
    embeddings: list[Tensor] = []
    for index, parts in enumerate(outputs):
        if not embeddings:
            embeddings = [torch.empty(num_rows, part.shape[1], device=part.device) for part in parts]
        if index < len(chunks):
            for whole, part in zip(embeddings, parts):
                whole[chunks[index]] = part.detach().float()
    return embeddings


def grad_cache(
    engine: Passes,
    chunks: Sequence[Tensor],
    *,
    embed: Embed,
    loss_and_gradients: LossAndGradients,
    seed: int,
    cached: bool = True,
) -> dict[str, Tensor]:
    """Gradient of a loss over all texts of all ranks, a chunk at a time.

    chunks: int64 row numbers; together they hold each of 0..n-1 once. embed(rows): an engine forward pass, K of
    [len(rows), d_k]; `embed(EMPTY)` must go through the engine too.
    loss_and_gradients(K of float32 [n, d_k]) -> (metrics, K of d GLOBAL loss / d these rows [n, d_k]).
    Dropout is the same in both passes, because each chunk's forward pass is seeded by (seed, chunk).
    `cached` False: there is one chunk and one pass, whose graph is kept while the loss is computed.
    """
    assert cached or len(chunks) <= 1, "without caching there is one chunk"
    count = max_over_ranks(len(chunks), engine.device)

    def forward(index: int) -> tuple[Tensor, ...]:
        torch.manual_seed(derive_seed(seed, index))
        return embed(chunks[index] if index < len(chunks) else EMPTY)

    outputs: tuple[Tensor, ...] = ()
    if cached:
        with torch.no_grad():
            embeddings = _collect(chunks, map(forward, range(count)))
    else:
        outputs = forward(0)
        embeddings = _collect(chunks, [outputs])
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
