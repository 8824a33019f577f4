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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.losses.row_sums import NATS_A_BIT
from trainer.losses.tile_settings import TileSettings
from trainer.losses.tiled_rows import TiledRows
from trainer.losses.tiles import Columns, Side, Sides, Tile, filter_ceiling


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
    all_queries = further.all_queries
    own, columns, *others = sides_of([queries, passages, *([all_queries] if all_queries else [])], gradients, guide)
    assert guide is not None or not settings.needs_guide
    assert all_queries or not any(part.with_queries for part in settings.parts)
    every = Columns(range(len(passages[0])), range(len(all_queries[0]) if all_queries else 0))
    tiled = TiledRows(
        own,
        targets,
        settings,
        every,
        [every],
        excluded=excluded,
        hard=further.hard,
        weights=further.weights,
        dtype=dtype,
    )
    adds, found = any(each is not None for each in gradients), []
    for number in range(len(tiled)):
        rows, here = tiled.rows(number), targets[tiled.places(number)]
        positives = positives_of(columns, here, settings, dtype)
        tile = tiled.tile(
            number,
            0,
            Sides(rows, positives, columns, others[0] if others else None),
            ceiling=filter_ceiling(rows, columns, here, settings),
            sums=tiled.sums(number, 0),
        )
        if tiled.tiling.keeps_rows:
            _sweep_once(tile)
        else:
            _sweep_twice(tile, adds=adds)
        give_back(positives, columns, here)
        found.append(tile.sums.losses(tile.weights))
    return losses_of(found, settings, like=tiled.workspace)


def losses_of(
    found: Iterable[tuple[Tensor, Tensor]], settings: TileSettings, *, like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, InfoNCE and KL of each size, from the sums of rows (`RowSums.losses`), in the dtype of `like`."""
    num_sizes = len(settings.loss_weights)
    nce, divergence = like.new_zeros(2, num_sizes)
    for of_rows in found:
        nce += of_rows[0][:num_sizes]
        divergence += of_rows[1][:num_sizes]
    nce, divergence = (each * (NATS_A_BIT / settings.num_queries) for each in (nce, divergence))
    of_sizes = like.new_tensor([settings.loss_weights, settings.kl_weights])
    return (of_sizes[0] * nce + of_sizes[1] * divergence).sum(), nce, divergence


def _sweep_once(tile: Tile) -> None:
    """Compute the losses and gradients of a tile that keeps its exponentials in memory."""
    settings, blocks = tile.settings, range(len(tile.blocks))
    for block in blocks if settings.filters_apart else ():
        tile.filter_block(block)
    for size in settings.in_order:
        for block in blocks:
            tile.exponentials(size, block)
        tile.sums.sum_up(size)
        for block in blocks if size != settings.teacher else ():
            tile.add_gradients(size, block)
    for block in blocks:
        tile.add_gradients(settings.teacher, block)


def _sweep_twice(tile: Tile, *, adds: bool) -> None:
    """Compute the same for a tile that must compute its exponentials again for the gradients.

    adds: whether any gradient is wanted.
    """
    find_sums(tile)
    for size in tile.settings.in_order:
        tile.sums.sum_up(size)
    if adds:
        add_gradients(tile)


def find_sums(tile: Tile) -> None:
    """The first sweep: the rows' sums over each of the tile's blocks."""
    for block in range(len(tile.blocks)):
        if tile.settings.filters_apart:
            tile.filter_block(block)
        for size in tile.settings.in_order:
            tile.exponentials(size, block)


def add_gradients(tile: Tile) -> None:
    """The second sweep: the gradients of the tile's blocks, from sums over all of the rows' columns."""
    settings = tile.settings
    for block in range(len(tile.blocks)):
        if settings.filters_apart:
            tile.filter_block(block)
        for size in settings.in_order:
            tile.exponentials(size, block, again=True)
            if size != settings.teacher:
                tile.add_gradients(size, block)
        tile.add_gradients(settings.teacher, block)


def sides_of(
    vectors: Sequence[Sequence[Tensor]], gradients: Sequence[Tensor | None], guide: Sequence[Tensor] | None
) -> list[Side]:
    """Queries, passages and, if given, all queries, with the guide's vectors after those of the sizes."""
    num_sizes = len(vectors[0])
    sides = []
    for number, each in enumerate(vectors):
        own = gradients[number * num_sizes : (number + 1) * num_sizes]
        sides.append(Side(each, own) if guide is None else Side([*each, guide[number]], [*own, None]))
    return sides


def positives_of(passages: Side, targets: Tensor, settings: TileSettings, dtype: torch.dtype) -> Side | None:
    """Each query's positive as a row, and room for its gradients; None where no part has positives for rows."""
    if not any(part.of_positives for part in settings.parts):
        return None
    return Side(
        [each[targets].to(dtype) for each in passages.vectors],
        [None if each is None else each.new_zeros(len(targets), each.shape[1]) for each in passages.gradients],
    )


def give_back(positives: Side | None, passages: Side, targets: Tensor) -> None:
    """Add the gradients of the rows that `positives_of` made to those of their passages."""
    for gradient, into in zip(positives.gradients if positives else (), passages.gradients):
        if gradient is not None and into is not None:
            into.index_add_(0, targets, gradient)
