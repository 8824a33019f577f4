"""Contrastive losses of several sizes: tensors in, tensors out.

InfoNCE and the KL to the full size (Starbucks §3.1, eq. 4 and 5) are computed in tiles of queries by blocks of
passages, with gradients in closed form, so that memory does not grow with the batch. With s = q·p/τ, p = softmax(s), T
the full size:
    d InfoNCE / d s = p − onehot(target)
    KL(p_T || p) = Σ_j p_T,j (s_T,j − s_j) − lse_T + lse
    d KL / d s = p − p_T;    d KL / d s_T = p_T (s_T − s − lse_T + lse − KL)   where the teacher is not detached.
Each block keeps the exponentials of s minus the block's maximum, that maximum, and the sum of the exponentials. The
row's log-sum-exp follows from the blocks' sums, and with it the factor that turns a block's exponentials into p. Where
a tile's exponentials fit in memory for all passages, each score is computed once; otherwise a second sweep computes
the scores again.

A query's row may have more columns than the passages (GTE's improved loss, arXiv:2308.03281; Qwen3-Embedding,
arXiv:2506.05176): all queries, and all passages or queries compared with the query's positive. All of them share one
softmax, so everything above holds for them too, filter and KL included.

A query's own hard negatives may weigh more, the nearer they are (EmbeddingGemma, arXiv:2509.20354): their exponentials
are multiplied by exp(α · similarity), in which no gradient flows. α · similarity is then a part of s, with
d s / d similarity still 1/τ, so everything above holds again; a KL compares weighted softmaxes.

False negatives are left out. `false_negatives` finds the ones that are known from the texts. The margin filter
(GISTEmbed, arXiv:2402.16829; NV-Retriever, arXiv:2407.15831) finds the ones that a filter model's scores suggest.
The filter model is the full size or a guide, a frozen model whose vectors are given too. A guide can also be the KL's
teacher, and every size is then its student. A guide has no loss of its own and gets no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from trainer.losses.tile_settings import TileSettings
from trainer.losses.tiles import (
    CPU_BLOCK_SCORES,
    GPU_BLOCK_SCORES,
    NATS_A_BIT,
    STATISTICS,
    Block,
    Pairs,
    Side,
    Sides,
    Tile,
    Tiling,
    blocks_of,
    choose_tiling,
)


@dataclass(frozen=True)
class Further:
    """What only some losses read of a batch.

    all_queries: where `TileSettings.negatives` has parts with queries as columns, those, K of [N, d_k]; they may be the
    tensors of the queries themselves. hard: int64 [h, 2], pairs of a query and one of its own hard negatives, for
    `TileSettings.hardness` above 0. weights: [n], what each query's losses are multiplied by; means still divide by the
    number of queries.
    """

    all_queries: Sequence[Tensor] = ()
    hard: Tensor | None = None
    weights: Tensor | None = None


NOTHING_FURTHER = Further()


def add_contrastive_gradients(
    queries: Sequence[Tensor],
    passages: Sequence[Tensor],
    *,
    settings: TileSettings,
    targets: Tensor,
    excluded: Tensor | None,
    gradients: Sequence[Tensor | None],
    guide: Sequence[Tensor] | None = None,
    further: Further = NOTHING_FURTHER,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_k w_k · InfoNCE_k + v_k · KL(teacher || k), means over `settings.num_queries` queries, and its gradients.

    queries: K of [n, d_k]; passages: K of [m, d_k]; the last is the full size. Scores are dot products of the vectors
    as given: normalise them first for cosine. targets: int64 [n], the column of each query's positive. excluded: int64
    [e, 2], (query, column) pairs that are no negatives, in any order, never a target. gradients: 2K tensors shaped as
    the queries, then the passages, to which the gradients are added; None where a gradient is not wanted. guide:
    vectors [n, g] and [m, g] of another model, without gradient. settings: the weights w and v, the temperature, the
    filter, the teacher and the memory for scores (trainer/losses/tile_settings.py). dtype: of the scores.

    Where queries are columns (`further.all_queries`), their K gradients follow in `gradients`, and a guide's vectors
    [N, g] of them in `guide`. Columns are numbered through all parts (tile_settings.PARTS); the query itself and the
    positive itself are to be among the excluded ones.

    The filter leaves out, at every size, each query's columns whose similarity exceeds the positive's minus the
    margin; no gradient flows through this choice. Where a guide teaches, all K sizes learn from it.
    Returns (loss, InfoNCE of each size [K], KL of each size [K]); the latter two without w and v.
    """
    num_queries, num_passages, num_sizes = queries[0].shape[0], passages[0].shape[0], len(queries)
    all_queries, weights = further.all_queries, further.weights
    sides = _sides([queries, passages, *([all_queries] if all_queries else [])], gradients, guide)
    assert guide is not None or not settings.needs_guide
    parts = settings.parts
    assert all_queries or not any(part.with_queries for part in parts)
    num_others = all_queries[0].shape[0] if all_queries else 0
    num_columns = sum(num_others if part.with_queries else num_passages for part in parts)
    tiling = choose_tiling(
        num_queries,
        num_columns,
        matrices=settings.matrices,
        statistics=STATISTICS * len(sides[0].vectors),
        scores_in_memory=int(settings.score_memory_mib * 2**20) // dtype.itemsize,
        block_scores=CPU_BLOCK_SCORES if targets.device.type == "cpu" else GPU_BLOCK_SCORES,
        parts=len(parts),
    )
    blocks = blocks_of(parts, num_passages=num_passages, num_queries=num_others, width=tiling.columns)
    left_out = _pairs_by_block(excluded, tiling, blocks, num_queries)
    near = _pairs_by_block(further.hard if settings.hardness else None, tiling, blocks, num_queries)
    pairs = [Pairs(*each) for each in zip(left_out, near)]
    width = num_columns if tiling.keeps_rows else tiling.columns
    workspace = torch.empty(settings.matrices, tiling.queries * width, dtype=dtype, device=targets.device)
    scratch = torch.empty(tiling.queries * tiling.columns, dtype=dtype, device=targets.device)
    totals = torch.zeros(2, len(sides[0].vectors), dtype=dtype, device=targets.device)
    order = (settings.teacher, *settings.students)
    for number, start in enumerate(range(0, num_queries, tiling.queries)):
        part = slice(start, min(start + tiling.queries, num_queries))
        positives = _rows_of(sides[1], targets[part], dtype) if any(each.of_positives for each in parts) else None
        rows = Side(
            [each[part].to(dtype) for each in sides[0].vectors],
            [None if each is None else each[part] for each in sides[0].gradients],
        )
        tile = Tile(
            Sides(rows, positives, sides[1], sides[2] if all_queries else None),
            targets[part],
            blocks,
            pairs[number * len(blocks) : (number + 1) * len(blocks)],
            settings,
            weights=None if weights is None else weights[part].to(dtype),
            workspace=workspace,
            scratch=scratch,
            keeps_rows=tiling.keeps_rows,
        )
        if tiling.keeps_rows:
            _sweep_once(tile, order)
        else:
            _sweep_twice(tile, order, adds=any(each is not None for each in gradients))
        if positives is not None:
            _give_back(positives, sides[1], targets[part])
        for total, found in zip(totals, tile.losses()):
            total += found
    nce, divergence = totals[:, :num_sizes] * (NATS_A_BIT / settings.num_queries)
    of_sizes = torch.tensor([settings.loss_weights, settings.kl_weights], dtype=nce.dtype, device=nce.device)
    return (of_sizes[0] * nce + of_sizes[1] * divergence).sum(), nce, divergence


def _sweep_once(tile: Tile, order: Sequence[int]) -> None:
    """Losses and gradients of a tile that keeps its exponentials. order: the teacher, then its students."""
    settings, blocks = tile.settings, range(len(tile.blocks))
    for block in blocks if settings.filters_apart else ():
        tile.filter_block(block)
    for size in order:
        for block in blocks:
            tile.exponentials(size, block)
        tile.sum_up(size)
        for block in blocks if size != settings.teacher else ():
            tile.add_gradients(size, block)
    for block in blocks:
        tile.add_gradients(settings.teacher, block)


def _sweep_twice(tile: Tile, order: Sequence[int], *, adds: bool) -> None:
    """The same, where exponentials are computed again for the gradients. adds: whether any gradient is wanted."""
    settings, blocks = tile.settings, range(len(tile.blocks))
    for block in blocks:
        if settings.filters_apart:
            tile.filter_block(block)
        for size in order:
            tile.exponentials(size, block)
    for size in order:
        tile.sum_up(size)
    for block in blocks if adds else ():
        if settings.filters_apart:
            tile.filter_block(block)
        for size in order:
            tile.exponentials(size, block, again=True)
            if size != settings.teacher:
                tile.add_gradients(size, block)
        tile.add_gradients(settings.teacher, block)


def _sides(
    vectors: Sequence[Sequence[Tensor]], gradients: Sequence[Tensor | None], guide: Sequence[Tensor] | None
) -> list[Side]:
    """Queries, passages and, if given, all queries, with the guide's vectors after those of the sizes."""
    num_sizes = len(vectors[0])
    sides = []
    for number, each in enumerate(vectors):
        own = gradients[number * num_sizes : (number + 1) * num_sizes]
        sides.append(Side(each, own) if guide is None else Side([*each, guide[number]], [*own, None]))
    return sides


def _rows_of(passages: Side, targets: Tensor, dtype: torch.dtype) -> Side:
    """Each query's positive as a row, and room for its gradients."""
    return Side(
        [each[targets].to(dtype) for each in passages.vectors],
        [None if each is None else each.new_zeros(len(targets), each.shape[1]) for each in passages.gradients],
    )


def _give_back(positives: Side, passages: Side, targets: Tensor) -> None:
    """Add the gradients of the rows that `_rows_of` took to those of their passages."""
    for gradient, into in zip(positives.gradients, passages.gradients):
        if gradient is not None and into is not None:
            into.index_add_(0, targets, gradient)


def _pairs_by_block(
    pairs: Tensor | None, tiling: Tiling, blocks: Sequence[Block], num_queries: int
) -> list[tuple[Tensor, Tensor] | None]:
    """The (query, column) pairs of each (tile, block), as rows and columns inside it; None where there are none."""
    num_tiles, num_blocks = -(-num_queries // tiling.queries), len(blocks)
    if pairs is None or not len(pairs):
        return [None] * (num_tiles * num_blocks)
    starts = torch.tensor([block.start for block in blocks], device=pairs.device)
    block = torch.bucketize(pairs[:, 1].contiguous(), starts, right=True) - 1
    place = pairs[:, 0] // tiling.queries * num_blocks + block
    place, order = place.sort()
    rows, columns = pairs[order, 0] % tiling.queries, (pairs[:, 1] - starts[block])[order]
    edges = torch.searchsorted(place, torch.arange(num_tiles * num_blocks + 1, device=place.device)).tolist()
    return [(rows[a:b], columns[a:b]) if a < b else None for a, b in pairwise(edges)]
