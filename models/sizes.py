"""Sizes and ladders: the (layers, dimensions) at which one model is trained and used.

A size is a pair (n, d): the first n encoder layers, the first d hidden dimensions (Starbucks §3.1, eq. 1).
A ladder is a strictly increasing list of sizes whose last member is the whole encoder (eq. 4). The ladder of a model
with one layer, a static embedding, increases in dimensions only.
This module does not import torch, so that a login node without a GPU stack can check a recipe.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from data.ground.errors import UserError

CUP_NAMES = ("demi", "short", "tall", "grande", "venti", "trenta")


class ModelError(UserError):
    """A user error about a model: one sentence that names the thing and says what to do."""


@dataclass(frozen=True, order=True)
class Size:
    """The first `layers` encoder layers and the first `dim` hidden dimensions."""

    layers: int
    dim: int

    def __post_init__(self) -> None:
        if self.layers < 1 or self.dim < 1:
            raise ModelError(f"size {self} has a count below 1; layers and dimensions start at 1")

    def __str__(self) -> str:
        return f"{self.layers}x{self.dim}"

    def fits_in(self, other: Size) -> bool:
        """Whether a model of the other size contains this size."""
        return self.layers <= other.layers and self.dim <= other.dim

    @classmethod
    def parse(cls, text: str) -> Size:
        """Read "2x32"."""
        match = re.fullmatch(r"(\d+)[x×](\d+)", text.strip())
        if not match:
            raise ModelError(f"size {text!r} is not of the form LAYERSxDIM, such as 2x32")
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class Ladder:
    """Strictly increasing sizes; the last is the full encoder (N, D)."""

    sizes: tuple[Size, ...]

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ModelError("the ladder is empty; give at least one [layers, dim] pair")
        one_layer = all(size.layers == 1 for size in self.sizes)
        for small, large in zip(self.sizes, self.sizes[1:]):
            if not ((small.layers < large.layers or one_layer) and small.dim < large.dim):
                raise ModelError(
                    f"the ladder does not increase: {small} is followed by {large}; "
                    "both layers and dimensions must grow from one size to the next"
                )

    @classmethod
    def of(cls, pairs: Iterable[Sequence[int]]) -> Ladder:
        """Build from [[2, 32], [4, 64], ...]."""
        sizes = []
        for pair in pairs:
            if len(pair) != 2:
                raise ModelError(f"ladder entry {list(pair)} is not a [layers, dim] pair")
            sizes.append(Size(int(pair[0]), int(pair[1])))
        return cls(tuple(sizes))

    def __iter__(self) -> Iterator[Size]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def full(self) -> Size:
        return self.sizes[-1]

    @property
    def grid(self) -> tuple[Size, ...]:
        """All pairs of the ladder's layer counts and dimensions, each once, ordered by layers.

        The sizes of a one-layer ladder all have the same layer count.
        """
        return tuple(dict.fromkeys(Size(a.layers, b.dim) for a in self for b in self))

    @property
    def names(self) -> dict[Size, str]:
        """The cup names (demi, short, …) for a ladder of six sizes, "2x32" and the like for any other."""
        if len(self.sizes) == len(CUP_NAMES):
            return dict(zip(self.sizes, CUP_NAMES))
        return {size: str(size) for size in self.sizes}

    def name(self, size: Size) -> str:
        """The name of a size of the ladder; LAYERSxDIM for any other size."""
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
