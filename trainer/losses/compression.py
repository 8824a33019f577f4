"""ESE's learn-to-compress: a vector's first coordinates learn its principal components (arXiv:2402.14776v2).

With X [B, D] the whole vectors of one depth, G = XᵀX, and A = softmax(G / √D) by rows, whose singular vectors and
values are U and s, the first k coordinates x of a vector learn its targets t, the first k columns of X U diag(s):

    D(x, t) = MSE(x, t) + T · KL( softmax(t/T) || softmax(x/T) )

as in the authors' code, each a mean over the B texts, and no gradient flows through t. G is a sum over texts, so ranks
share a D × D matrix, not vectors. A singular vector's sign is nobody's choice; here each is the one with which the
targets agree more with the coordinates that shall learn them, (G U)_jj ≥ 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.losses.gram import rows_at_once


def principal_directions(gram: Tensor, dim: int) -> Tensor:
    """The first `dim` columns of U diag(s), [D, dim] in float64. gram: G [D, D] of the global batch, in float64.

    A is decomposed exactly, by the eigenvectors of A Aᵀ. (The authors' svd_lowrank is a randomised approximation.)
    """
    attention = (gram / gram.shape[0] ** 0.5).softmax(dim=1)
    squares, vectors = torch.linalg.eigh(attention @ attention.T)  # in ascending order
    vectors, lengths = vectors.flip(1)[:, :dim], squares.flip(0)[:dim].clamp(min=0).sqrt()
    agreement = (gram[:dim] * vectors.T).sum(1)  # (G U)_jj
    return vectors * lengths * torch.where(agreement < 0, -1.0, 1.0)


def add_compression_gradients(
    narrow: Tensor,
    whole: Tensor,
    gradient: Tensor,
    *,
    directions: Tensor,
    temperature: float,
    weight: float,
    num_texts: int,
) -> Tensor:
    """These texts' part of D over `num_texts` texts; its weighted gradient is added.

    narrow, gradient: [n, k], the first coordinates of `whole` [n, D]. directions: `principal_directions`, [D, k].
    """
    dim = narrow.shape[1]
    value = torch.zeros((), dtype=torch.float64, device=narrow.device)
    for own, all_of, flow in zip(*map(rows_at_once, (narrow, whole, gradient))):
        student, teacher = own.double(), all_of.double() @ directions
        guess, target = ((each / temperature).log_softmax(dim=1) for each in (student, teacher))
        value += (student - teacher).square().sum() / dim + temperature * (target.exp() * (target - guess)).sum()
        step = (student - teacher) * (2.0 / dim) + (guess.exp() - target.exp())
        flow.add_(step.to(flow.dtype), alpha=weight / num_texts)
    return (value / num_texts).to(narrow.dtype)
