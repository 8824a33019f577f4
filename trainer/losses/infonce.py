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

False negatives are left out. `false_negatives` finds the ones that are known from the texts. The margin filter
(GISTEmbed, arXiv:2402.16829; NV-Retriever, arXiv:2407.15831) finds the ones that a filter model's scores suggest.
The filter model is the full size or a guide, a frozen model whose vectors are given too. A guide can also be the KL's
teacher, and every size is then its student. A guide has no loss of its own and gets no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from trainer.losses.tile_settings import TileSettings
from trainer.losses.tiles import CPU_BLOCK_SCORES, GPU_BLOCK_SCORES, NATS_A_BIT, STATISTICS, Tile, Tiling, choose_tiling


def add_contrastive_gradients(
    queries: Sequence[Tensor],
    passages: Sequence[Tensor],
    *,
    settings: TileSettings,
    targets: Tensor,
    excluded: Tensor | None,
    gradients: Sequence[Tensor | None],
    guide: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_k w_k · InfoNCE_k + v_k · KL(teacher || k), means over `settings.num_queries` queries, and its gradients.

    queries: K of [n, d_k]; passages: K of [m, d_k]; the last is the full size. Scores are dot products of the vectors
    as given: normalise them first for cosine. targets: int64 [n], the column of each query's positive. excluded: int64
    [e, 2], (query, passage) pairs that are no negatives, in any order, never a target. gradients: 2K tensors shaped as
    the queries, then the passages, to which the gradients are added; None where a gradient is not wanted. guide:
    vectors [n, g] and [m, g] of another model, without gradient. settings: the weights w and v, the temperature, the
    filter, the teacher and the memory for scores (trainer/losses/tile_settings.py). dtype: of the scores.

    The filter leaves out, at every size, each query's passages whose similarity exceeds the positive's minus the
    margin; no gradient flows through this choice. Where a guide teaches, all K sizes learn from it.
    Returns (loss, InfoNCE of each size [K], KL of each size [K]); the latter two are unweighted.
    """
    num_queries, num_passages, num_sizes = queries[0].shape[0], passages[0].shape[0], len(queries)
    query_grads, passage_grads = gradients[:num_sizes], gradients[num_sizes:]
    assert guide is not None or not settings.needs_guide
    if guide is not None:
        queries, passages = [*queries, guide[0]], [*passages, guide[1]]
        query_grads, passage_grads = [*query_grads, None], [*passage_grads, None]
    tiling = choose_tiling(
        num_queries,
        num_passages,
        matrices=settings.matrices,
        statistics=STATISTICS * len(queries),
        scores_in_memory=int(settings.score_memory_mib * 2**20) // dtype.itemsize,
        block_scores=CPU_BLOCK_SCORES if targets.device.type == "cpu" else GPU_BLOCK_SCORES,
    )
    blocks = [
        slice(start, min(start + tiling.passages, num_passages)) for start in range(0, num_passages, tiling.passages)
    ]
    pairs = _pairs_by_block(excluded, tiling, len(blocks), num_queries)
    width = num_passages if tiling.keeps_rows else tiling.passages
    workspace = torch.empty(settings.matrices, tiling.queries * width, dtype=dtype, device=targets.device)
    scratch = torch.empty(tiling.queries * tiling.passages, dtype=dtype, device=targets.device)
    totals = torch.zeros(2, len(queries), dtype=dtype, device=targets.device)
    order = (settings.teacher, *settings.students)
    for number, start in enumerate(range(0, num_queries, tiling.queries)):
        part = slice(start, min(start + tiling.queries, num_queries))
        tile = Tile(
            [each[part].to(dtype) for each in queries],
            passages,
            [None if each is None else each[part] for each in query_grads],
            passage_grads,
            targets[part],
            blocks,
            pairs[number * len(blocks) : (number + 1) * len(blocks)],
            settings,
            workspace=workspace,
            scratch=scratch,
            keeps_rows=tiling.keeps_rows,
        )
        if tiling.keeps_rows:
            for block in range(len(blocks) if settings.filters_apart else 0):
                tile.filter_block(block)
            for size in order:
                for block in range(len(blocks)):
                    tile.exponentials(size, block)
                tile.sum_up(size)
                for block in range(len(blocks) if size != settings.teacher else 0):
                    tile.add_gradients(size, block)
            for block in range(len(blocks)):
                tile.add_gradients(settings.teacher, block)
        else:
            for block in range(len(blocks)):
                if settings.filters_apart:
                    tile.filter_block(block)
                for size in order:
                    tile.exponentials(size, block)
            for size in order:
                tile.sum_up(size)
            for block in range(len(blocks) if any(each is not None for each in gradients) else 0):
                if settings.filters_apart:
                    tile.filter_block(block)
                for size in order:
                    tile.exponentials(size, block, again=True)
                    if size != settings.teacher:
                        tile.add_gradients(size, block)
                tile.add_gradients(settings.teacher, block)
        totals[0] += tile.nce.sum(1)
        totals[1] += tile.divergence.sum(1)
    nce, divergence = totals[:, :num_sizes] * (NATS_A_BIT / settings.num_queries)
    weights = torch.tensor([settings.loss_weights, settings.kl_weights], dtype=nce.dtype, device=nce.device)
    return (weights[0] * nce + weights[1] * divergence).sum(), nce, divergence


def _pairs_by_block(
    excluded: Tensor | None, tiling: Tiling, num_blocks: int, num_queries: int
) -> list[tuple[Tensor, Tensor] | None]:
    """The excluded pairs of each (tile, block), as rows and columns inside it; None where there are none."""
    num_tiles = -(-num_queries // tiling.queries)
    if excluded is None or not len(excluded):
        return [None] * (num_tiles * num_blocks)
    place = excluded[:, 0] // tiling.queries * num_blocks + excluded[:, 1] // tiling.passages
    place, order = place.sort()
    rows, columns = excluded[order, 0] % tiling.queries, excluded[order, 1] % tiling.passages
    edges = torch.searchsorted(place, torch.arange(num_tiles * num_blocks + 1, device=place.device)).tolist()
    return [(rows[a:b], columns[a:b]) if a < b else None for a, b in pairwise(edges)]
