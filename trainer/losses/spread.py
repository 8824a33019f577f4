"""The spread-out loss of vectors: the mean squared similarity of different texts. Tensors in, gradients out.

    S = 1/(B(B−1)) Σ_{i≠j} (x_i·x_j)²

over the unit vectors x of B texts: EmbeddingGemma's L_S of one side (arXiv:2509.20354). It is the second moment of
Zhang et al.'s global orthogonal regularisation (arXiv:1708.06320) without the threshold of 1/d, below which theirs
counts nothing. The sum over all pairs is ‖XᵀX‖² − Σ‖x_i‖⁴, so no matrix of all pairs is made, and what ranks share is
a d × d matrix, not vectors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.losses.gram import rows_at_once


def add_spread_gradients(vectors: Tensor, gradient: Tensor, *, gram: Tensor, weight: float, num_texts: int) -> Tensor:
    """These vectors' part of S over `num_texts` texts; its weighted gradient is added.

    vectors, gradient: [n, d]. gram: XᵀX of all texts (trainer/losses/gram.py). The parts of all vectors add up to S,
    and the gradient 4 (X XᵀX − ‖x‖² x) / (B(B−1)) is that of S. A single text has no other, so its S is 0.
    """
    pairs = max(1, num_texts * (num_texts - 1))
    value = torch.zeros((), dtype=torch.float64, device=vectors.device)
    for rows, flow in zip(rows_at_once(vectors), rows_at_once(gradient)):
        each = rows.double()
        others = each @ gram - each * each.square().sum(1, keepdim=True)  # Σ_{j≠i} (x_i·x_j) x_j
        value += (others * each).sum()
        flow.add_(others.to(flow.dtype), alpha=4.0 * weight / pairs)
    return (value / pairs).to(vectors.dtype)
