"""Vectors of length 1, in place, and the gradient through them."""

from __future__ import annotations

import torch
from torch import Tensor


def normalize_(vectors: Tensor) -> Tensor:
    """Scale the rows of [n, d] to unit length, in place; returns their lengths [n, 1], at least 1e-12."""
    lengths = torch.linalg.vector_norm(vectors, dim=1, keepdim=True).clamp_(min=1e-12)
    vectors /= lengths
    return lengths


def unnormalized_gradient_(gradient: Tensor, unit: Tensor, lengths: Tensor) -> None:
    """From the gradient by unit vectors u = x / |x| to that by x, in place: (g − u (u·g)) / |x|.  # [n, d]"""
    along = torch.linalg.vecdot(unit, gradient)[:, None]
    gradient.addcmul_(unit, along, value=-1).div_(lengths)
