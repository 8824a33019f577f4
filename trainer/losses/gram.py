"""Gram matrices of vectors: what different texts' vectors have in common, in a size that no batch changes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

ROWS_AT_ONCE = 4096


def rows_at_once(vectors: Tensor) -> Iterable[Tensor]:
    """The rows in parts, so that float64 copies of them do not grow with the batch."""
    return vectors.split(ROWS_AT_ONCE)


def gram_matrix(vectors: Tensor) -> Tensor:
    """XᵀX [d, d] of these vectors [n, d], in float64. Its sum over ranks is the global batch's."""
    gram = torch.zeros(2 * (vectors.shape[1],), dtype=torch.float64, device=vectors.device)
    for rows in rows_at_once(vectors):
        each = rows.double()
        gram.addmm_(each.T, each)
    return gram
