"""Losses of pairs with gold scores: CoSENT, and the released code's divergence of coordinates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cosent(similarities: Tensor, gold: Tensor, *, temperature: float) -> Tensor:
    """CoSENT: log(1 + Σ_{gold_i > gold_j} exp((sim_j − sim_i) / τ)), for graded pairs (CoSENT, Su 2022).

    similarities, gold: float [n], one entry for each pair of the GLOBAL batch. Returns a scalar. For each i, the sum
    over j runs over a prefix of the pairs sorted by grade, so no [n, n] matrix is needed.
    """
    gold, order = gold.sort()
    # float64, because one running sum passes through all n; for n numbers it costs next to nothing.
    scaled = similarities[order].double() / temperature
    prefixes = torch.cat([scaled.new_full((1,), -torch.inf), scaled.logcumsumexp(0)])
    lower = torch.searchsorted(gold, gold)  # how many pairs have a lower grade
    violations = prefixes[lower] - scaled
    return torch.logsumexp(torch.cat([violations.new_zeros(1), violations]), dim=0).to(similarities.dtype)


def coordinate_divergence(
    student: Tensor, teacher: Tensor, *, temperature: float, weights: Tensor | None = None
) -> Tensor:
    """τ · Σ_i w_i KL(softmax(t_i / τ) || softmax(s_i / τ)) over embedding coordinates, summed over texts.

    student: [n, d]; teacher: [n, D]. Only the teacher's first d coordinates count (the paper's code, folder sts/).
    weights: w [n]; None means 1 each.
    """
    reference = F.log_softmax(teacher[:, : student.shape[1]] / temperature, dim=1)
    log_student = F.log_softmax(student / temperature, dim=1)
    if weights is None:
        return temperature * F.kl_div(log_student, reference, reduction="sum", log_target=True)
    terms = F.kl_div(log_student, reference, reduction="none", log_target=True)
    return temperature * (weights * terms.sum(1)).sum()
