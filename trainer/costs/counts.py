"""Floating-point operations that a step's mathematics needs, from plain numbers.

They are counted as in PaLM (Chowdhery et al. 2022, appendix B): matrix products only, 2 operations for a multiply-add,
a backward pass as two forward passes, and nothing for recomputation (so activation checkpointing and gradient caching
lower the utilisation). Torch-free: `launch.plan` predicts with the same formulas with which trainer/costs/flops.py
reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models.sizes import Size

FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True)
class Shape:
    """The dimensions of an encoder on which its operation count depends."""

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


@dataclass(frozen=True)
class Texts:
    """The number of texts, their tokens together, and the sum of their squared lengths (attention's pairs)."""

    count: float
    tokens: float
    pairs: float

    def __add__(self, other: Texts) -> Texts:
        return Texts(self.count + other.count, self.tokens + other.tokens, self.pairs + other.pairs)


def encoder_flops(shape: Shape, texts: Texts) -> float:
    """One forward pass, padding not counted."""
    linear = 8 * shape.hidden**2 + 4 * shape.hidden * shape.inner  # a token: q, k, v, out; up, down
    return shape.layers * (texts.tokens * linear + 4 * shape.hidden * texts.pairs)


def masked_flops(
    shape: Shape,
    texts: Texts,
    *,
    encoder_rows: float,
    decoder_rows: float,
    sizes: Sequence[Size],
    enhanced: bool = False,
) -> float:
    """Forward of the pre-training loss: heads of all sizes on masked rows, and the decoder once for all of them.

    In enhanced decoding a query is made for each text, not each row, and every size attends on its own.
    """
    hidden = shape.hidden
    transform = sum(2 * size.dim * hidden for size in sizes)
    total = encoder_flops(shape, texts) + encoder_rows * (transform + len(sizes) * 2 * hidden * shape.vocabulary)
    if decoder_rows:
        total += texts.count * (transform + len(sizes) * 4 * hidden**2)  # CLS rows, their keys and values
        mean_length = texts.tokens / texts.count
        attention = 4 * hidden * mean_length
        total += texts.tokens * 4 * hidden**2
        if enhanced:
            total += len(sizes) * (texts.count * 2 * hidden**2 + decoder_rows * attention)
        else:
            total += decoder_rows * (2 * hidden**2 + attention)
        per_row = 2 * hidden**2 + 4 * hidden * shape.inner + 2 * hidden**2 + 2 * hidden * shape.vocabulary
        total += decoder_rows * len(sizes) * per_row
    return total
