"""Floating-point operations that a step's mathematics needs, and what the device could do: model FLOPs utilisation.

Counted as in PaLM (Chowdhery et al. 2022, appendix B): matrix products only, 2 a multiply-add, backward twice the
forward, nothing for recomputation (so activation checkpointing and gradient caching lower the utilisation).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.sizes import Size

FORWARD_AND_BACKWARD = 3

# Dense bf16 peak, operations a second, from the makers' data sheets.
_PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "A10G": 70e12, "RTX 4090": 165e12}


@dataclass(frozen=True)
class Shape:
    """What of an encoder its operation count depends on."""

    hidden: int
    inner: int
    layers: int
    vocabulary: int

    @classmethod
    def of(cls, config: object) -> Shape:
        inner = getattr(config, "intermediate_size", None) or getattr(config, "hidden_dim", None)
        names = ("hidden_size", "num_hidden_layers", "vocab_size")
        hidden, layers, vocabulary = (int(getattr(config, name)) for name in names)
        return cls(hidden, int(inner or 4 * hidden), layers, vocabulary)


def encoder_flops(shape: Shape, lengths: Tensor) -> float:
    """One forward pass over texts of these lengths (int64 [n]), padding not counted."""
    tokens, pairs = float(lengths.sum()), float((lengths.double() ** 2).sum())
    linear = 8 * shape.hidden**2 + 4 * shape.hidden * shape.inner  # a token: q, k, v, out; up, down
    return shape.layers * (tokens * linear + 4 * shape.hidden * pairs)


def masked_flops(
    shape: Shape, lengths: Tensor, *, encoder_rows: int, decoder_rows: int, sizes: Sequence[Size]
) -> float:
    """Forward of the pre-training loss: heads of all sizes on masked rows, and the decoder once for all of them."""
    hidden, texts = shape.hidden, len(lengths)
    transform = sum(2 * size.dim * hidden for size in sizes)
    total = encoder_flops(shape, lengths) + encoder_rows * (transform + len(sizes) * 2 * hidden * shape.vocabulary)
    if decoder_rows:
        tokens, mean_length = float(lengths.sum()), float(lengths.double().mean())
        total += texts * (transform + len(sizes) * 4 * hidden**2)  # CLS rows, their keys and values
        total += tokens * 4 * hidden**2 + decoder_rows * (2 * hidden**2 + 4 * hidden * mean_length)
        per_row = 2 * hidden**2 + 4 * hidden * shape.inner + 2 * hidden**2 + 2 * hidden * shape.vocabulary
        total += decoder_rows * len(sizes) * per_row
    return total


@functools.cache
def peak_flops(device: torch.device) -> float:
    """Operations a second: the maker's figure for a known GPU, else a large product measured now."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for key, value in _PEAKS.items():
            if key in name:
                return value
        return 2 * 4096**3 / _product_seconds(4096, torch.bfloat16, device)
    dtype = torch.float32 if bf16_slowdown(device) > 1 else torch.bfloat16
    return 2 * 1024**3 / _product_seconds(1024, dtype, device)


@functools.cache
def bf16_slowdown(device: torch.device) -> float:
    """How many times as long a bf16 product takes as a float32 one: up to a hundred on CPUs without bf16 units."""
    return _product_seconds(256, torch.bfloat16, device) / _product_seconds(256, torch.float32, device)


def _product_seconds(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """The shortest of five square products."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        (a @ b).float().sum().item()
        best = min(best, time.perf_counter() - begin)
    return best
