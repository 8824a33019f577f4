"""Floating-point operations that a step's mathematics needs, from plain numbers.

They are counted as in PaLM (Chowdhery et al. 2022, appendix B): matrix products only, 2 operations for a multiply-add,
a backward pass as two forward passes, and nothing for recomputation (so activation checkpointing and gradient caching
lower the utilisation). In one thing not as there: of attention's products, those that a causal mask or a window hides
are not counted, while PaLM counts all pairs. Torch-free: `launch.plan` predicts with the same formulas with which
trainer/costs/flops.py reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from models.sizes import Size
from trainer.costs.shapes import Shape

__all__ = [
    "FORWARD_AND_BACKWARD",
    "Shape",
    "Texts",
    "encoder_flops",
    "masked_flops",
    "needed_passes",
    "passes_of",
    "sizes_flops",
]

FORWARD_AND_BACKWARD = 3


def needed_passes(*, trains_encoder: bool) -> int:
    """The encoder's part of a step in forward passes; nothing is sent back through an encoder that is only read."""
    return FORWARD_AND_BACKWARD if trains_encoder else 1


@dataclass(frozen=True)
class Texts:
    """The number of texts, their tokens together, and the sum of their squared lengths (attention's pairs).

    groups: how many texts have which length, each as (count, length), which windows of attention are counted by; empty:
    all texts have the mean length. special: how many of a text's tokens the tokenizer puts around it.
    """

    count: float
    tokens: float
    pairs: float
    groups: tuple[tuple[float, float], ...] = ()
    special: int = 2

    @classmethod
    def alike(cls, count: float, length: float, *, special: int = 2) -> Texts:
        """Texts of one length."""
        return cls(count, count * length, count * length**2, special=special)

    def __add__(self, other: Texts) -> Texts:
        groups = self._groups + other._groups
        sums = self.count + other.count, self.tokens + other.tokens, self.pairs + other.pairs
        return Texts(*sums, groups, other.special)

    def part(self, share: float) -> Texts:
        """A share of every length."""
        groups = tuple((count * share, length) for count, length in self.groups)
        return Texts(self.count * share, self.tokens * share, self.pairs * share, groups, self.special)

    @property
    def _groups(self) -> tuple[tuple[float, float], ...]:
        return self.groups or (((self.count, self.tokens / self.count),) if self.count else ())

    def attended(self, *, causal: bool = False, reach: int | None = None) -> float:
        """The pairs (token, token that it sees). reach: as in Shape.reaches."""
        if reach is not None:
            return sum(count * _pairs(length, causal, reach) for count, length in self._groups)
        return (self.pairs + self.tokens) / 2 if causal else self.pairs


def _pairs(length: float, causal: bool, reach: int) -> float:
    """The attended pairs of one text: the tokens from `reach` on see as many before them, the others all of those."""
    full = max(0.0, length - 1 - reach)
    rising = length - full
    before = rising * (rising + 1) / 2 + full * (reach + 1)  # the token itself counted
    return before if causal else 2 * before - length


def encoder_flops(shape: Shape, texts: Texts) -> float:
    """One forward pass, padding not counted.

    Attention's products are counted for the pairs that its mask lets through: half of them where it is causal, and
    those of a window. A kernel that computes the others, too, and throws them away does not use the GPU better for it.
    """
    linear = 2 * sum(each.weights for each in (*shape.attention, *shape.feed_forward))  # a token
    attention = 4 * shape.query_width  # a pair: its score, and its share of a value
    if shape.reaches:
        kinds = Counter(shape.reaches[: shape.layers])
        seen = sum(layers * texts.attended(causal=shape.causal, reach=reach) for reach, layers in kinds.items())
        total = shape.layers * texts.tokens * linear + attention * seen
    else:
        total = shape.layers * (texts.tokens * linear + attention * texts.attended(causal=shape.causal))
    return total + texts.tokens * 2 * shape.table_width * shape.hidden


def passes_of(shape: Shape, sizes: Sequence[Size]) -> list[Shape]:
    """What one forward pass computes of an encoder, for each pass that these sizes take: one for each fraction."""
    return [shape.narrowed(fraction) for fraction in dict.fromkeys(size.feed_forward for size in sizes)]


def sizes_flops(shape: Shape, texts: Texts, sizes: Sequence[Size]) -> float:
    """The forward passes that these sizes take, padding not counted."""
    return sum(encoder_flops(each, texts) for each in passes_of(shape, sizes))


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
