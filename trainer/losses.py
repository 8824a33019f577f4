"""Contrastive losses of several sizes: tensors in, tensors out.

InfoNCE and the KL to the full size (Starbucks §3.1, eq. 4 and 5; SPEC "SRL fine-tuning") are computed in tiles of
queries, with gradients in closed form, so that no [queries, passages] matrix outlives its tile and no size's scores
outlive their turn. With s = q·p/τ, p = softmax(s):
    d InfoNCE / d s = p − onehot(target)
    KL(p_T || p) = Σ_j p_T,j (s_T,j − s_j) − lse_T + lse
    d KL / d s = p − p_T;    d KL / d s_T = p_T (s_T − s − lse_T + lse − KL)   where the teacher is not detached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Finite, so that an excluded passage's score difference to the teacher's is 0 and not NaN.
EXCLUDED_SCORE = -1e30


def multi_size_contrastive(
    queries: Sequence[Tensor],
    passages: Sequence[Tensor],
    *,
    targets: Tensor,
    loss_weights: Sequence[float],
    kl_weights: Sequence[float],
    temperature: float,
    num_queries: int | None = None,
    excluded: Tensor | None = None,
    detach_teacher: bool = True,
    score_memory_mib: float = 256.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_k loss_weights[k] · InfoNCE_k + kl_weights[k] · KL(last || k), means over `num_queries` queries.

    queries: K of [n, d_k]; passages: K of [m, d_k]; the last is the KL's teacher. Dot products are taken as they come:
    normalise before for cosine. targets: int64 [n], the column of each query's positive. excluded: bool [n, m], pairs
    that are no negatives (never a target). num_queries: the GLOBAL batch's number of queries where `queries` are one
    rank's share (default n). temperature divides the scores.
    Returns (loss, InfoNCE of each size [K], KL of each size [K]); the latter two are detached and unweighted.
    """
    count = queries[0].shape[0] if num_queries is None else num_queries
    return _TiledContrastive.apply(
        targets,
        excluded,
        tuple(loss_weights),
        tuple(kl_weights),
        temperature,
        count,
        detach_teacher,
        score_memory_mib,
        len(queries),
        *queries,
        *passages,
    )


class _TiledContrastive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        targets: Tensor,
        excluded: Tensor | None,
        loss_weights: tuple[float, ...],
        kl_weights: tuple[float, ...],
        temperature: float,
        count: int,
        detach_teacher: bool,
        score_memory_mib: float,
        num_sizes: int,
        *vectors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        queries, passages = vectors[:num_sizes], vectors[num_sizes:]
        rows, columns = queries[0].shape[0], passages[0].shape[0]
        wanted = ctx.needs_input_grad[9:]
        query_grads = [torch.zeros_like(q) for q in queries]
        passage_grads = [torch.zeros_like(p) for p in passages]
        nce = queries[0].new_zeros(num_sizes)
        divergence = queries[0].new_zeros(num_sizes)
        teacher = num_sizes - 1
        uses_kl = any(kl_weights)
        # About five matrices of a tile are alive at once: two sizes' scores, two softmaxes, one gradient.
        tile = max(1, int(score_memory_mib * 2**20 / (5 * queries[0].element_size() * max(1, columns))))
        for start in range(0, rows, tile):
            part = slice(start, min(start + tile, rows))
            target = targets[part, None]
            hidden = None if excluded is None else excluded[part]
            teacher_scores = _scores(queries[teacher][part], passages[teacher], temperature, hidden)  # [t, m]
            teacher_lse = teacher_scores.logsumexp(1, keepdim=True)
            teacher_share = (teacher_scores - teacher_lse).exp()
            teacher_grad = torch.zeros_like(teacher_scores) if uses_kl and not detach_teacher else None
            for k in range(num_sizes):
                if k == teacher:
                    scores, lse, share = teacher_scores, teacher_lse, teacher_share
                else:
                    scores = _scores(queries[k][part], passages[k], temperature, hidden)
                    lse = scores.logsumexp(1, keepdim=True)
                    share = (scores - lse).exp()
                nce[k] += (lse - scores.gather(1, target)).sum()
                grad = share * (loss_weights[k] + (kl_weights[k] if k != teacher else 0.0))
                grad.scatter_add_(1, target, torch.full_like(target, 1, dtype=grad.dtype).mul_(-loss_weights[k]))
                if k != teacher and kl_weights[k]:
                    gap = teacher_scores - scores  # [t, m]
                    kl = (teacher_share * gap).sum(1, keepdim=True) - teacher_lse + lse
                    divergence[k] += kl.sum()
                    grad.sub_(teacher_share, alpha=kl_weights[k])
                    if teacher_grad is not None:
                        teacher_grad += kl_weights[k] * teacher_share * (gap - teacher_lse + lse - kl)
                if k == teacher and teacher_grad is not None:
                    grad += teacher_grad
                grad *= 1.0 / (temperature * count)
                if wanted[k]:
                    query_grads[k][part] = grad @ passages[k]
                if wanted[num_sizes + k]:
                    passage_grads[k].addmm_(grad.t(), queries[k][part])
        ctx.save_for_backward(*query_grads, *passage_grads)
        nce, divergence = nce / count, divergence / count
        ctx.mark_non_differentiable(nce, divergence)
        weights = torch.tensor([loss_weights, kl_weights], dtype=nce.dtype, device=nce.device)
        return (weights[0] * nce + weights[1] * divergence).sum(), nce, divergence

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return (None,) * 9 + tuple(saved * grads[0] for saved in ctx.saved_tensors)


def _scores(queries: Tensor, passages: Tensor, temperature: float, hidden: Tensor | None) -> Tensor:
    scores = queries @ passages.t()
    scores *= 1.0 / temperature
    return scores if hidden is None else scores.masked_fill_(hidden, EXCLUDED_SCORE)


def cosent(similarities: Tensor, gold: Tensor, *, temperature: float) -> Tensor:
    """CoSENT: log(1 + Σ_{gold_i > gold_j} exp((sim_j − sim_i) / τ)), for graded pairs (SPEC, inner losses).

    similarities, gold: float [n], one entry a pair of the GLOBAL batch. Returns a scalar.
    """
    scaled = similarities / temperature
    differences = scaled[None, :] - scaled[:, None]  # [i, j] = sim_j − sim_i
    ordered = gold[:, None] > gold[None, :]
    violations = differences.masked_fill(~ordered, -torch.inf).flatten()
    return torch.logsumexp(torch.cat([violations.new_zeros(1), violations]), dim=0)


def coordinate_divergence(student: Tensor, teacher: Tensor, *, temperature: float) -> Tensor:
    """τ · Σ_i KL(softmax(t_i / τ) || softmax(s_i / τ)) over embedding coordinates, summed over texts.

    student: [n, d]; teacher: [n, D], of which the first d coordinates count (SPEC, released STS code).
    """
    reference = F.log_softmax(teacher[:, : student.shape[1]] / temperature, dim=1)
    log_student = F.log_softmax(student / temperature, dim=1)
    return temperature * F.kl_div(log_student, reference, reduction="sum", log_target=True)
