"""The contrastive loss as autograd's: production adds its gradients itself (trainer/losses/infonce.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.losses.infonce import Further, add_contrastive_gradients
from trainer.losses.tile_settings import FULL, PASSAGES_ALONE, MarginFilter, ScoreTeacher, TileSettings


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
    false_negative_margin: float | None = None,
    detach_teacher: bool = True,
    score_memory_mib: float = 256.0,
    guide: Sequence[Tensor] | None = None,
    filter_by: str = FULL,
    taught_by: str = FULL,
    guide_temperature: float = 1.0,
    negatives: Sequence[str] = PASSAGES_ALONE,
    all_queries: Sequence[Tensor] = (),
    hardness: float = 0.0,
    hard: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`add_contrastive_gradients`, in a graph. num_queries: the global batch's (default: these).

    Half precision is computed in float32.
    """
    settings = TileSettings(
        tuple(loss_weights),
        tuple(kl_weights),
        temperature,
        queries[0].shape[0] if num_queries is None else num_queries,
        None if false_negative_margin is None else MarginFilter(false_negative_margin, filter_by),
        ScoreTeacher(taught_by, detach_teacher),
        score_memory_mib,
        guide_temperature,
        tuple(negatives),
        hardness,
    )
    known = {"targets": targets, "excluded": excluded, "guide": guide}
    return _MultiSizeContrastive.apply(known, (hard, weights), settings, *queries, *passages, *all_queries)


class _MultiSizeContrastive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        known: dict[str, Any],
        further: tuple[Tensor | None, Tensor | None],
        settings: TileSettings,
        *vectors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        count = len(settings.loss_weights)
        sides = [vectors[start : start + count] for start in range(0, len(vectors), count)]
        half = vectors[0].dtype in (torch.float16, torch.bfloat16)
        dtype = torch.float32 if half else vectors[0].dtype
        gradients = [
            torch.zeros_like(each, dtype=dtype) if wanted else None
            for each, wanted in zip(vectors, ctx.needs_input_grad[3:])
        ]
        loss, nce, divergence = add_contrastive_gradients(
            *sides[:2],
            settings=settings,
            gradients=gradients,
            further=Further(sides[2] if sides[2:] else (), *further),
            dtype=dtype,
            **known,
        )
        ctx.gradients = [
            None if gradient is None else gradient.to(each.dtype) for gradient, each in zip(gradients, vectors)
        ]
        ctx.mark_non_differentiable(nce, divergence)
        return loss, nce, divergence

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        # Scaled where they lie and given away: a copy would double what the passages' gradients take.
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, None, *(None if each is None else each.mul_(grads[0]) for each in gradients)
