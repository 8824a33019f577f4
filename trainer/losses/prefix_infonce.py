"""InfoNCE at several widths of the same vectors, for about the price of the largest width alone.

Widths are prefixes (Matryoshka, Kusupati et al. 2022), so their dot products are partial sums of one another: with
S_k = Q[:, :d_k] P[:, :d_k]ᵀ, S_{k+1} is S_k plus the product of the columns between d_k and d_{k+1}. The gradients nest
as well: those columns receive gradients from all larger widths, whose score gradients are added before one product. So
the matrix products cost as much as the last width's instead of all widths' (1,024 columns instead of 2,016 for
32 … 1,024). Cosine scales the rows and columns of S_k, so no normalised copy is made: with a = 1/|q|, b = 1/|p|,
c = a S b and R = d loss / d c of a width,
    d loss / d q = a (R b p) − a² (Σ_j R c) q,    d loss / d p = b (Rᵀ a q) − b² (Σ_i R c) p.
A tile of queries is scored with all passages at once; its workspace buffer holds a matrix for each width and takes the
same memory for any batch. Where a guide filters negatives (trainer/losses/infonce.py), its scores take one more product
and one more matrix in each tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from trainer.losses.tiles import EXCLUDED_SCORE

# Scores in one matrix of a tile, and its queries; with fewer of them, a tile's products would mostly read passages.
TILE_SCORES, LEAST_QUERIES, MOST_QUERIES = 2**20, 64, 512


@dataclass(frozen=True)
class PrefixSettings:
    """dims: increasing; loss_weights: one a width; num_queries: the GLOBAL batch's; temperature: divides the scores."""

    dims: tuple[int, ...]
    loss_weights: tuple[float, ...]
    cosine: bool
    temperature: float
    num_queries: int
    score_memory_mib: float = 256.0
    guide_margin: float = 0.0  # leaves out passages that the guide scores above the positive minus this


def prefix_contrastive_(
    queries: Tensor,
    passages: Tensor,
    passage_gradient: Tensor,
    *,
    targets: Tensor,
    excluded: Tensor | None,
    settings: PrefixSettings,
    guide: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ_k loss_weights[k] · InfoNCE_k. OVERWRITES `queries` with their gradient; adds to `passage_gradient`.

    queries: float32 [n, D] as they come from the model, not normalised; passages, passage_gradient: [m, D]. Columns
    beyond the last width take no part. targets: int64 [n], each query's positive. excluded: int64 [e, 2], sorted by
    query: (query, passage) pairs that are no negatives. guide: vectors [n, g] and [m, g] whose scores leave out further
    passages by `settings.guide_margin`. Returns (loss, InfoNCE of each width [K]).
    """
    segments = [slice(a, b) for a, b in pairwise((0, *settings.dims))]
    widths, (num_queries, num_passages) = len(segments), (len(queries), len(passages))
    a, b = _inverse_lengths(queries, segments, settings.cosine), _inverse_lengths(passages, segments, settings.cosine)
    along = passages.new_zeros(widths, num_passages)  # Σ_i R c of each width and passage
    nce = passages.new_zeros(widths)
    matrices = widths + 2 + (guide is not None)
    rows = _tile_rows(num_queries, num_passages, matrices=matrices, score_memory_mib=settings.score_memory_mib)
    workspace = passages.new_empty(matrices, rows, num_passages)
    gradient_room = queries.new_zeros(rows, queries.shape[1])
    starts = range(0, num_queries, rows)
    edges = [] if excluded is None else _edges(excluded[:, 0].contiguous(), [*starts, num_queries])
    for number, start in enumerate(starts):
        part = slice(start, min(start + rows, num_queries))
        tile, target = queries[part], targets[part, None]
        here = part.stop - part.start
        gradient = gradient_room[:here]
        scores, scaled, *shares = workspace[:, :here].unbind()
        penalty = None
        if guide is not None:
            penalty = shares.pop()
            _find_penalty(guide[0][part], guide[1], target, margin=settings.guide_margin, out=penalty)
        pairs = None
        if excluded is not None:
            inside = excluded[edges[number] : edges[number + 1]]
            pairs = (inside[:, 0] - start, inside[:, 1])
        own = []  # Σ_j R c of each width and query of the tile
        for k, segment in enumerate(segments):
            torch.addmm(scores, tile[:, segment], passages[:, segment].T, beta=0 if k == 0 else 1, out=scores)
            torch.mul(scores, b[k], out=scaled)
            scaled *= a[k, part, None] / settings.temperature
            if pairs is not None:
                scaled[pairs] = EXCLUDED_SCORE
            if penalty is not None:
                scaled += penalty
            positive = scaled.gather(1, target)
            torch.softmax(scaled, 1, out=shares[k])
            # The logarithm is of the largest share, because the positive's own may be too small for one. The difference
            # of scores is taken first, because adding a log-sum-exp to large scores would round a small loss away.
            nce[k] += ((scaled.amax(1) - positive[:, 0]) - shares[k].amax(1).log()).sum()
            weight = settings.loss_weights[k] / settings.num_queries
            if settings.cosine:
                scaled *= shares[k]
                own.append(weight * (scaled.sum(1, keepdim=True) - positive))
                along[k] += weight * scaled.sum(0)
                along[k].index_add_(0, target[:, 0], -weight * positive[:, 0])
            shares[k].scatter_add_(1, target, torch.full_like(positive, -1.0))
            shares[k] *= a[k, part, None] * (weight / settings.temperature)
        flow, projected = scaled, 0.0  # a segment's gradients: the sum over the widths that contain it
        for k, segment in reversed(list(enumerate(segments))):
            if k == widths - 1:
                torch.mul(shares[k], b[k], out=flow)
            else:
                flow.addcmul_(shares[k], b[k])
            torch.mm(flow, passages[:, segment], out=gradient[:, segment])
            passage_gradient[:, segment].addmm_(flow.T, tile[:, segment])
            if settings.cosine:
                projected = projected + own[k] * a[k, part, None] ** 2
                gradient[:, segment].addcmul_(tile[:, segment], projected, value=-1)
        tile.copy_(gradient)
    if settings.cosine:
        factors = (along * b**2).flip(0).cumsum(0).flip(0)  # summed over all widths that contain a segment
        for segment, factor in zip(segments, factors):
            passage_gradient[:, segment].addcmul_(passages[:, segment], factor[:, None], value=-1)
    nce /= settings.num_queries
    return (nce * nce.new_tensor(settings.loss_weights)).sum(), nce


def _find_penalty(queries: Tensor, passages: Tensor, target: Tensor, *, margin: float, out: Tensor) -> None:
    """Set `out` [t, m] to EXCLUDED_SCORE where a passage scores above the positive minus the margin, else to 0."""
    torch.mm(queries, passages.T, out=out)
    ceiling = out.gather(1, target) - margin
    out.gt_(ceiling).scatter_(1, target, 0.0)
    out *= EXCLUDED_SCORE


def _tile_rows(num_queries: int, num_passages: int, *, matrices: int, score_memory_mib: float) -> int:
    """Queries of a tile: few enough for the caches and for `score_memory_mib`."""
    wanted = max(LEAST_QUERIES, min(MOST_QUERIES, TILE_SCORES // max(1, num_passages)))
    fitting = int(score_memory_mib * 2**18) // (matrices * max(1, num_passages))
    return max(1, min(num_queries, wanted, fitting))


def _edges(ordered: Tensor, bounds: Sequence[int]) -> list[int]:
    """The places in the sorted query numbers where the tiles begin, and where the last one ends."""
    return torch.searchsorted(ordered, torch.tensor(bounds, device=ordered.device)).tolist()


def _inverse_lengths(vectors: Tensor, segments: Sequence[slice], cosine: bool) -> Tensor:
    """1 / |x[:d]| of each width and row, [K, n]; 0 for a row of zeros, which has no direction. Ones without cosine."""
    if not cosine:
        return vectors.new_ones(len(segments), len(vectors))
    squares = torch.stack([torch.linalg.vecdot(part, part) for part in (vectors[:, s] for s in segments)]).cumsum(0)
    return torch.where(squares > 1e-24, squares.rsqrt(), 0.0)
