"""How a step's gradient is made from micro-batches.

`micro_batches` cuts a rank's texts by length and a token budget, so that little is computed on padding. `accumulate` is
for losses that add up over micro-batches. `grad_cache` is for losses that compare all texts with all others (GradCache,
Gao et al. 2021): it embeds everything without a graph, takes the loss's gradient with respect to the embeddings once,
then embeds again micro-batch by micro-batch and sends that gradient through. Where there is memory for them, graphs of
the first pass are kept, and their micro-batches are not embedded again. Both functions are exact at any ZeRO stage:
gradients are summed, never averaged, over micro-batches.

Ranks may have different numbers of micro-batches, and a rank may have no text at all. A rank with fewer than the others
runs EMPTY micro-batches, a filler text without weight, because ZeRO's collectives must match on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from data.collate import Texts
from data.keyed_random import derive_seed
from models.sizes import Size
from trainer.distributed import World, max_over_ranks, seed_torch

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


def cached_micro_batches(lengths: Tensor, *, token_budget: int, packed: bool, graph_bytes: float) -> list[Tensor]:
    """All texts at once where every graph is kept (`graph_bytes` infinite), else `micro_batches`."""
    if graph_bytes == math.inf:
        return in_one(lengths)
    return micro_batches(lengths, token_budget=token_budget, packed=packed)


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
    graph_bytes: float = 0.0,
) -> dict[str, Tensor]:
    """Gradient of a loss over all texts of all ranks, a chunk at a time.

    chunks: int64 row numbers; together they hold each of 0..n-1 once. embed(rows): an engine forward pass, K of
    [len(rows), d_k]; `embed(EMPTY)` must go through the engine too.
    loss_and_gradients(K of float32 [n, d_k]) -> (metrics, K of d GLOBAL loss / d these rows [n, d_k]).
    graph_bytes: how many bytes of the first pass's graphs each rank may keep; math.inf for all of them. Chunks whose
    graphs are kept are embedded once and share one backward pass; all others are embedded again. A graph's size is
    known only when it has been built, so for a moment a rank can hold one graph more than that.
    Dropout is the same in both passes, because each chunk's forward pass is seeded by (seed, chunk).
    """
    count = max_over_ranks(len(chunks), engine.device)
    kept: list[tuple[Tensor, ...]] = []

    def forward(index: int) -> tuple[Tensor, ...]:
        seed_torch(derive_seed(seed, index))
        return embed(chunks[index] if index < len(chunks) else EMPTY)

    def first_pass() -> Iterator[tuple[Tensor, ...]]:
        room, largest = graph_bytes, 0
        for index in range(count):
            if len(kept) < index or room <= 0 or room < largest:
                with torch.no_grad():
                    yield forward(index)
                continue
            counting: AbstractContextManager[dict[int, int]] = counting_saved() if room < math.inf else nullcontext({})
            with counting as saved:
                outputs = forward(index)
            used = sum(saved.values())
            room, largest = room - used, max(largest, used)
            if room >= 0:
                kept.append(outputs)
            yield outputs

    def sent_back(index: int, outputs: Sequence[Tensor]) -> Tensor:
        if index >= len(chunks):
            return torch.stack([out.float().sum() * 0.0 for out in outputs]).sum()
        pairs = zip(outputs, gradients)
        return torch.stack([(out.float() * grad[chunks[index]]).sum() for out, grad in pairs]).sum()

    embeddings = _collect(chunks, first_pass())
    if 0 < graph_bytes < math.inf:
        # Every rank keeps as many, because ZeRO's collectives must match.
        del kept[-max_over_ranks(-len(kept), engine.device) :]
    metrics, gradients = loss_and_gradients(embeddings)
    with engine.accumulation():
        first = len(kept)
        if kept:
            whole = torch.stack([sent_back(index, outputs) for index, outputs in enumerate(kept)]).sum()
            kept.clear()
            engine.backward(whole)
        for index in range(first, count):
            engine.backward(sent_back(index, forward(index)))
    return metrics


@contextmanager
def counting_saved() -> Iterator[dict[int, int]]:
    """Counts the bytes that the graphs built inside keep for backward: address -> bytes of a storage, weights left out.

    What checkpointed layers keep is not seen.
    """
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        owner = tensor if tensor._base is None else tensor._base
        if owner.is_leaf and owner.requires_grad:
            return tensor
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output that is kept by its own graph would never be freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found
