"""Linear layer and cross-entropy in one step: the logits of all rows never exist together.

Rows are processed in chunks. Each chunk's logits give its losses and at once its gradients, so memory holds the logits
of one chunk only. The result equals `cross_entropy(rows @ weight.T + bias)` with a weight for each row (SMAE's losses
of all sizes share one tied vocabulary). Computing the gradients in the forward pass costs no extra product: the two
backward products run here instead of later, and the backward pass only scales their results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rows_per_chunk(vocab_size: int, *, memory_mib: float, dtype: torch.dtype) -> int:
    """The number of rows whose logits and softmax, both of `dtype`, fit in the budget.

    At least 16, so that a tiny budget still makes progress.
    """
    return max(16, int(memory_mib * 2**20 / (2 * dtype.itemsize * vocab_size)))


def product_dtype(rows: Tensor) -> torch.dtype:
    """The dtype of matrix products of `rows`: the autocast dtype if autocast is on, else the dtype of `rows`."""
    device = rows.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype


def fused_linear_cross_entropy(
    rows: Tensor, weight: Tensor, *, bias: Tensor | None, targets: Tensor, row_weights: Tensor, chunk_rows: int
) -> tuple[Tensor, Tensor]:
    """The weighted sum of cross-entropies, and the cross-entropy of each row.

    rows: [R, D]; weight: [V, D]; bias: [V] or None; targets: int64 [R] in 0..V-1; row_weights: float32 [R].
    Returns (sum over rows of row_weight · CE, float32 scalar, differentiable in rows, weight and bias;
    CE of each row in nats, float32 [R], detached).
    Products run in the dtype of `rows`, or the autocast dtype; each softmax is computed in float32 and stored in that
    dtype, and sums over chunks are float32. In bf16 a row's loss is exact to 2^-8 nats (rounding, without bias).
    """
    if rows.shape[0] == 0:
        # Texts may be too short to have a masked token. The zero keeps every parameter in this rank's graph.
        anchor = (rows.sum() + weight.sum() + (bias.sum() if bias is not None else 0.0)).float() * 0.0
        return anchor, rows.new_zeros(0, dtype=torch.float32)
    dtype = product_dtype(rows)
    loss, losses = _Chunked.apply(rows, weight, bias, targets, row_weights, chunk_rows, dtype, torch.is_grad_enabled())
    return loss, losses


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        row_weights: Tensor,
        chunk_rows: int,
        dtype: torch.dtype,
        wants_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        needs_rows, needs_weight, needs_bias = (wants_grad and need for need in ctx.needs_input_grad[:3])
        count = rows.shape[0]
        losses = torch.empty(count, dtype=torch.float32, device=rows.device)
        grad_rows = torch.empty_like(rows) if needs_rows else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias and bias is not None else None
        with torch.autocast(rows.device.type, enabled=False):
            table = weight.to(dtype)  # [V, D]
            offset = None if bias is None else bias.to(dtype)
            for start in range(0, count, chunk_rows):
                part = slice(start, min(start + chunk_rows, count))
                chunk = rows[part].to(dtype)  # [r, D]
                target = targets[part, None]
                logits = torch.nn.functional.linear(chunk, table, offset)  # [r, V]
                # One pass over the logits: computed in float32, stored in the dtype that the products need.
                errors = torch.softmax(logits, dim=1)
                likelihood = errors.gather(1, target).squeeze(1).float()
                losses[part] = -likelihood.log()
                if not likelihood.all():
                    # The probability underflowed (a loss above 87 nats): compute these rows by logsumexp.
                    rare = (likelihood == 0).nonzero().squeeze(1)
                    exact = logits[rare].float()
                    losses[start + rare] = exact.logsumexp(1) - exact.gather(1, target[rare]).squeeze(1)
                if not (needs_rows or needs_weight or needs_bias):
                    continue
                # d CE / d logits = softmax − one-hot. The row's weight is applied to D numbers below, not to V logits.
                # scatter_add_ would copy the whole matrix in bf16 on the CPU.
                errors[torch.arange(len(chunk), device=rows.device), target[:, 0]] = (likelihood - 1).to(dtype)
                scale = row_weights[part, None]
                if grad_rows is not None:
                    grad_rows[part] = ((errors @ table).float() * scale).to(grad_rows.dtype)
                if grad_weight is not None:
                    scaled = (chunk.float() * scale).to(dtype)
                    if dtype == torch.float32:
                        grad_weight.addmm_(errors.t(), scaled)
                    else:
                        grad_weight += errors.t() @ scaled
                if grad_bias is not None:
                    grad_bias += torch.mv(errors.t(), row_weights[part].to(dtype))
        ctx.save_for_backward(grad_rows, grad_weight, grad_bias)
        ctx.dtypes = (rows.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.mark_non_differentiable(losses)
        return torch.dot(losses, row_weights), losses

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        # In place, because the table's gradient is the step's largest tensor; autograd refuses a second backward pass.
        scaled = [
            None if saved is None else saved.mul_(grads[0]).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes)
        ]
        return (*scaled, None, None, None, None, None)
