"""Losses by which several sizes learn a teacher's vectors: tensors in, gradients out.

S is a size's unit vectors [n, d], T the teacher's [n, D] with D ≥ d, and T_d the teacher's first d dimensions, scaled
to unit length again. N is the number of texts in the GLOBAL batch, of which n are this rank's. Four terms, each a mean:
    vector      1 − cos(S_i, T_d,i)                       so that a query of width d searches indexed prefixes
    similarity  KL( softmax_j(T_i·T_j / τ) || softmax_j(S_i·S_j / τ) ) over j ≠ i
    gram        (S_i·S_j − T_i·T_j)² over all i, j
    order       relu( (S_i·S_j − S_i·S_k) · sign(T_i·T_k − T_i·T_j) + m ) over all i, j, k
The first is LEAF's loss (arXiv:2509.12539), here for each prefix. The others are relational knowledge distillation; the
last two are from Jasper and Stella (arXiv:2412.19048), with the margin m of their released code.
All gradients are with respect to unit vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.losses.infonce import add_contrastive_gradients
from trainer.losses.tile_settings import GUIDE, ScoreTeacher, TileSettings
from trainer.losses.unit_vectors import normalize_

ORDER_MARGIN = 0.015


def prefix_of(teacher: Tensor, dim: int) -> Tensor:
    """The teacher's first `dim` dimensions, of unit length: [n, D] -> [n, dim]."""
    cut = teacher[:, :dim].clone()
    normalize_(cut)
    return cut


def add_vector_gradients(unit: Tensor, teacher: Tensor, gradient: Tensor, *, weight: float, num_texts: int) -> Tensor:
    """The mean of 1 − cos to the teacher's prefix over `num_texts`. Returns its value and adds its weighted gradient.

    unit: [n, d]; teacher: [n, D ≥ d], of unit length; gradient: [n, d], with respect to the unit vectors.
    """
    target = prefix_of(teacher, unit.shape[1])
    value = (1.0 - torch.linalg.vecdot(unit, target)).sum() / num_texts
    gradient.add_(target, alpha=-weight / num_texts)
    return value


def gram_products(unit: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """SᵀS [d, d], SᵀT [d, D] and TᵀT [D, D] of these rows, in float64. Their sums over ranks are the global batch's."""
    first, second = unit.double(), teacher.double()
    return first.T @ first, first.T @ second, second.T @ second


def add_gram_gradients(
    unit: Tensor,
    teacher: Tensor,
    gradient: Tensor,
    *,
    products: tuple[Tensor, Tensor, Tensor],
    weight: float,
    num_texts: int,
) -> Tensor:
    """The mean squared difference of the similarities over the global batch. Returns its value, equal on all ranks.

    ‖SSᵀ − TTᵀ‖² = ‖SᵀS‖² − 2‖SᵀT‖² + ‖TᵀT‖², so no matrix of all pairs is made. products: the results of
    `gram_products`, summed over ranks. The weighted gradient of these rows, 4 (S SᵀS − T TᵀS) / N², is added.
    """
    own, between, theirs = products
    value = (own.square().sum() - 2.0 * between.square().sum() + theirs.square().sum()) / num_texts**2
    flow = unit.double() @ own - teacher.double() @ between.T
    gradient.add_(flow.to(gradient.dtype), alpha=4.0 * weight / num_texts**2)
    return value.to(unit.dtype)


def add_similarity_gradients(
    own: Sequence[Tensor],
    everyone: Sequence[Tensor],
    teacher: tuple[Tensor, Tensor],
    gradients: Sequence[Tensor],
    *,
    weights: Sequence[float],
    temperature: float,
    places: Tensor,
    num_texts: int,
    score_memory_mib: float,
) -> Tensor:
    """KL of each text's similarities to all others, from the teacher's to each size's: [K], this rank's part.

    own: unit vectors of texts of this rank, K of [n, d_k]. everyone: all ranks' vectors in rank order, K of [N, d_k];
    places: int64 [n], the rows of own among them. teacher: its vectors of the same texts, [n, D] and [N, D]. gradients:
    2K tensors, for own and then for everyone, to which the weighted gradients are added. num_texts: divides the sum
    over the texts.
    """
    count, total = own[0].shape[0], everyone[0].shape[0]
    rows = torch.arange(count, device=own[0].device)
    if total < 2:
        return torch.zeros(len(own), dtype=own[0].dtype, device=own[0].device)
    settings = TileSettings(
        loss_weights=(0.0,) * len(own),
        kl_weights=tuple(weights),
        temperature=temperature,
        num_queries=num_texts,
        score_memory_mib=score_memory_mib,
        taught=ScoreTeacher(GUIDE),
        guide_temperature=temperature,
    )
    _, _, divergence = add_contrastive_gradients(
        own,
        everyone,
        settings=settings,
        # There is no positive, and its loss has the weight 0. Any other text will do; the text itself is excluded.
        targets=(places + 1) % total,
        excluded=torch.stack([rows, places], dim=1),
        gradients=gradients,
        guide=teacher,
        dtype=own[0].dtype,
    )
    return divergence


def add_order_gradients(
    own: Sequence[Tensor],
    everyone: Sequence[Tensor],
    teacher: tuple[Tensor, Tensor],
    gradients: Sequence[Tensor],
    *,
    weights: Sequence[float],
    num_texts: int,
    score_memory_mib: float,
) -> Tensor:
    """The loss of the similarities' order, by triples: [K], this rank's part of the mean over them.

    Arguments are those of `add_similarity_gradients`. The work for a text grows with N², so the term is for batches of
    a few hundred texts.
    """
    count, total = own[0].shape[0], everyone[0].shape[0]
    values = torch.zeros(len(own), dtype=own[0].dtype, device=own[0].device)
    slot = int(score_memory_mib * 2**20) // (own[0].element_size() * 4 * max(1, total) ** 2)
    for begin in range(0, count, max(1, slot)):
        part = slice(begin, min(count, begin + max(1, slot)))
        taught = teacher[0][part] @ teacher[1].T  # [r, N]
        signs = (taught[:, None, :] - taught[:, :, None]).sign_()  # [r, j, k]: sign(t_ik − t_ij)
        for size, (mine, all_of, weight) in enumerate(zip(own, everyone, weights)):
            scores = mine[part] @ all_of.T
            wrong = (scores[:, :, None] - scores[:, None, :]).mul_(signs).add_(ORDER_MARGIN).relu_()
            values[size] += wrong.sum() / (num_texts * total**2)
            # The triples (i, j, k) and (i, k, j) are equal, hence the factor 2.
            flow = (signs * (wrong > 0)).sum(2).mul_(2.0 * weight / (num_texts * total**2))  # [r, N]
            gradients[size][part] += flow @ all_of
            gradients[len(own) + size] += flow.T @ mine[part]
    return values
