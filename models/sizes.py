"""Sizes and ladders: the (layers, dimensions) at which one model is trained and used.

A size is a pair (n, d): the first n encoder layers, the first d hidden dimensions (Starbucks §3.1, eq. 1). It may have
a third part, the first fraction of every feed-forward's neurons (MatFormer, arXiv:2310.07707); without one,
feed-forwards are whole. The layers and the fraction together are a size's body, which is what must run: sizes of one
body are prefixes of the same vectors.
A ladder is a strictly increasing list of sizes whose last member is the whole encoder (eq. 4). The ladder of a model
with one layer, a static embedding, increases in dimensions only.
This module does not import torch, so that a login node without a GPU stack can check a recipe.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from data.ground.errors import UserError

CUP_NAMES = ("demi", "short", "tall", "grande", "venti", "trenta")


class ModelError(UserError):
    """A user error about a model: one sentence that names the thing and says what to do."""


class Body(NamedTuple):
    """What a size runs: the first `layers` layers, with the first `feed_forward` fraction of every feed-forward."""

    layers: int
    feed_forward: float = 1.0

    def __str__(self) -> str:
        return f"{self.layers}" if self.feed_forward == 1 else f"{self.layers}x{self.feed_forward!r}"

    @property
    def described(self) -> str:
        """Such as "6 layers", or "6 layers with 0.25 of their feed-forwards"."""
        layers = f"{self.layers} layer{'s' * (self.layers > 1)}"
        if self.feed_forward == 1:
            return layers
        return (
            f"{layers} with {self.feed_forward!r} of {'their feed-forwards' if self.layers > 1 else 'its feed-forward'}"
        )

    def of_dim(self, dim: int) -> Size:
        return Size(self.layers, dim, self.feed_forward)

    @classmethod
    def parse(cls, text: str) -> Body:
        """Read "6" or "6x0.25"."""
        layers, _, fraction = text.partition("x")
        return Size.parse(f"{layers}x1x{fraction}" if fraction else f"{layers}x1").body


@dataclass(frozen=True, order=True)
class Size:
    """The first `layers` layers and `dim` hidden dimensions, and the first fraction of each feed-forward's neurons."""

    layers: int
    dim: int
    feed_forward: float = 1.0

    def __post_init__(self) -> None:
        if self.layers < 1 or self.dim < 1:
            raise ModelError(f"size {self} has a count below 1; layers and dimensions start at 1")
        if not 0 < self.feed_forward <= 1:
            raise ModelError(f"size {self} has no fraction of the feed-forwards above 0 and up to 1; give one, or none")
        object.__setattr__(self, "feed_forward", float(self.feed_forward))

    def __str__(self) -> str:
        return "x".join(map(repr, self.numbers))

    @property
    def numbers(self) -> tuple[int, int] | tuple[int, int, float]:
        """How files write it: layers and dimensions, and the fraction unless feed-forwards are whole."""
        if self.has_whole_feed_forwards:
            return self.layers, self.dim
        return self.layers, self.dim, self.feed_forward

    @property
    def body(self) -> Body:
        return Body(self.layers, self.feed_forward)

    @property
    def has_whole_feed_forwards(self) -> bool:
        """Whether its feed-forwards are whole."""
        return self.feed_forward == 1

    def fits_in(self, other: Size) -> bool:
        """Whether a model of the other size contains this size."""
        return self.layers <= other.layers and self.dim <= other.dim and self.feed_forward <= other.feed_forward

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Size:
        """Build from [2, 32] or [6, 384, 0.25]."""
        if len(numbers) not in (2, 3):
            raise ModelError(f"ladder entry {list(numbers)} is not a [layers, dim] pair")
        layers, dim = numbers[:2]
        if not all(isinstance(each, int) or (isinstance(each, float) and each.is_integer()) for each in (layers, dim)):
            raise ModelError(f"ladder entry {list(numbers)} has layers or dimensions that are no whole numbers")
        return cls(int(layers), int(dim), *map(float, numbers[2:]))

    @classmethod
    def parse(cls, text: str) -> Size:
        """Read "2x32" or "6x384x0.25"."""
        match = re.fullmatch(r"(\d{1,9})[x×](\d{1,9})(?:[x×](\d*\.?\d+(?:e-\d+)?))?", text.strip())
        if not match:
            raise ModelError(f"size {text!r} is not of the form LAYERSxDIM, such as 2x32")
        return cls(int(match[1]), int(match[2]), float(match[3] or 1))


@dataclass(frozen=True)
class Ladder:
    """Strictly increasing sizes; the last is the full encoder (N, D)."""

    sizes: tuple[Size, ...]

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ModelError("the ladder is empty; give at least one [layers, dim] pair")
        one_layer = all(size.layers == 1 for size in self.sizes)
        for small, large in zip(self.sizes, self.sizes[1:]):
            if not ((small.body != large.body or one_layer) and small.dim < large.dim and small.fits_in(large)):
                narrower = any(not size.has_whole_feed_forwards for size in self.sizes)
                raise ModelError(
                    f"the ladder does not increase: {small} is followed by {large}; "
                    + (
                        "from one size to the next dimensions must grow, and layers or feed-forwards, and none may "
                        "shrink"
                        if narrower
                        else "both layers and dimensions must grow from one size to the next"
                    )
                )
        if not self.full.has_whole_feed_forwards:
            raise ModelError(
                f"the ladder's last size {self.full} has narrower feed-forwards, and the last is the whole encoder; "
                f"end the ladder with [{self.full.layers}, {self.full.dim}]"
            )

    @classmethod
    def of(cls, entries: Iterable[Sequence[float]]) -> Ladder:
        """Build from [[2, 32], [4, 64], ...], or from entries with a third number, as [6, 64, 0.25]."""
        return cls(tuple(map(Size.of, entries)))

    def __iter__(self) -> Iterator[Size]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def full(self) -> Size:
        return self.sizes[-1]

    @property
    def bodies(self) -> tuple[Body, ...]:
        """The bodies of its sizes, each once, from the smallest on."""
        return tuple(dict.fromkeys(size.body for size in self))

    @property
    def has_whole_feed_forwards(self) -> bool:
        """Whether all sizes have whole feed-forwards."""
        return all(size.has_whole_feed_forwards for size in self)

    @property
    def grid(self) -> tuple[Size, ...]:
        """All pairs of the ladder's bodies and dimensions, each once, ordered by bodies.

        The sizes of a one-layer ladder all have the same layer count.
        """
        return tuple(dict.fromkeys(body.of_dim(size.dim) for body in self.bodies for size in self))

    @property
    def names(self) -> dict[Size, str]:
        """The cup names (demi, short, …) for a ladder of six sizes, "2x32" and the like for any other."""
        if len(self.sizes) == len(CUP_NAMES):
            return dict(zip(self.sizes, CUP_NAMES))
        return {size: str(size) for size in self.sizes}

    def name(self, size: Size) -> str:
        """The name of a size of the ladder; LAYERSxDIM, or with a fraction LAYERSxDIMxFRACTION, for any other size."""
        return self.names.get(size, str(size))

    def find(self, name: str) -> Size:
        """A size by its name in this ladder, or any size as LAYERSxDIM."""
        by_name = {text: size for size, text in self.names.items()}
        return by_name[name] if name in by_name else Size.parse(name)

    def check_against(self, *, num_layers: int, hidden_size: int) -> None:
        """Refuse a ladder whose last size is larger or smaller than the encoder."""
        if self.full != Size(num_layers, hidden_size):
            verb = "stops short of" if self.full.fits_in(Size(num_layers, hidden_size)) else "outgrows"
            raise ModelError(
                f"the ladder's last size {self.full} {verb} the encoder, which has {num_layers} layers of "
                f"{hidden_size} dimensions; end the ladder with [{num_layers}, {hidden_size}]"
            )


STARBUCKS_LADDER = Ladder.of([(2, 32), (4, 64), (6, 128), (8, 256), (10, 512), (12, 768)])
