"""Normalisation to unit vectors, in place, and the gradient through it."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.losses.gram import rows_at_once


def normalize_(vectors: Tensor) -> Tensor:
    """Scale the rows of [n, d] to unit length, in place; returns their lengths [n, 1], at least 1e-12."""
    lengths = torch.linalg.vector_norm(vectors, dim=1, keepdim=True).clamp_(min=1e-12)
    vectors /= lengths
    return lengths


def unnormalized_gradient_(gradient: Tensor, unit: Tensor, lengths: Tensor) -> None:
    """Turn the gradient g [n, d] for unit vectors u = x / |x| into that for x, in place: (g − u (u·g)) / |x|."""
    # vecdot makes all products before it adds them: of all rows at once, as much as the vectors themselves.
    for flow, own, length in zip(*map(rows_at_once, (gradient, unit, lengths))):
        along = torch.linalg.vecdot(own, flow)[:, None]
        flow.addcmul_(own, along, value=-1).div_(length)
