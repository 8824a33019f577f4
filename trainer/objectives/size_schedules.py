"""Which sizes a step trains, with what weights.

A schedule maps a step to a SizePlan; losses and models take the plan and know nothing of where it came from. Draws
depend on (seed, step) alone, so they are the same on all ranks and in both passes of gradient caching.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from models.sizes import Ladder, Size


@dataclass(frozen=True)
class SizePlan:
    """Sizes with the weight of each one's loss and of its KL to the teacher, which is the last size or none of them.

    A KL weight of 0 leaves a size out of the KL; a size that teaches has 0. `names` are what metrics call the sizes.
    """

    names: tuple[str, ...]
    sizes: tuple[Size, ...]
    loss_weights: tuple[float, ...]
    kl_weights: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.sizes) == len(self.loss_weights) == len(self.kl_weights)

    @property
    def full(self) -> int:
        """The index of the largest size."""
        return len(self.sizes) - 1


Schedule = Callable[[int], SizePlan]


def _weighted(sizes: list[Size], names: list[str], *, reduction: str) -> SizePlan:
    weight = 1.0 / len(sizes) if reduction == "mean" else 1.0
    kl = tuple(weight if size != sizes[-1] else 0.0 for size in sizes)
    return SizePlan(tuple(names), tuple(sizes), (weight,) * len(sizes), kl)


def every_size(ladder: Ladder, *, reduction: str) -> Schedule:
    """Starbucks: all pairs of the ladder, each step (§3.1, eq. 4 and 5)."""
    plan = _weighted(list(ladder), [ladder.name(size) for size in ladder], reduction=reduction)
    return lambda step: plan


def whole_grid(ladder: Ladder, *, reduction: str) -> Schedule:
    """Every depth of the ladder with every one of its widths, each step."""
    plan = _weighted(list(ladder.grid), [ladder.name(size) for size in ladder.grid], reduction=reduction)
    return lambda step: plan


def one_size(size: Size, name: str) -> Schedule:
    """Full-only training, or one separately trained size."""
    plan = SizePlan((name,), (size,), (1.0,), (0.0,))
    return lambda step: plan


def matryoshka(ladder: Ladder, *, reduction: str) -> Schedule:
    """1-D MRL: all widths of the ladder at the last layer."""
    sizes = [Size(ladder.full.layers, size.dim) for size in ladder]
    plan = _weighted(sizes, [str(size) for size in sizes], reduction=reduction)
    return lambda step: plan


def adaptive_layers(ladder: Ladder, *, reduction: str) -> Schedule:
    """All depths of the ladder at full width."""
    sizes = [Size(size.layers, ladder.full.dim) for size in ladder]
    plan = _weighted(sizes, [str(size) for size in sizes], reduction=reduction)
    return lambda step: plan


def two_dimensional(ladder: Ladder, *, seed: int) -> Schedule:
    """2DMSE: n ~ U(1, N−1), d ~ U(1, D−1) each step; L_n^d + L_n^D + L_N^d + L_N^D (Starbucks §3.1, eq. 3).

    KL runs from (N, D) to both sizes of the drawn layer; eq. 3 has none, and the paper names none for 2DMSE.
    """
    full = ladder.full

    def plan(step: int) -> SizePlan:
        rng = _generator(seed, step)
        layers = int(rng.integers(1, max(2, full.layers)))
        dim = int(rng.integers(1, max(2, full.dim)))
        sizes = (Size(layers, dim), Size(layers, full.dim), Size(full.layers, dim), full)
        return SizePlan(_DRAWN, sizes, (1.0,) * 4, (1.0, 1.0, 0.0, 0.0))

    return plan


def two_dimensional_listed(ladder: Ladder, *, seed: int) -> Schedule:
    """2DMSE as the paper's STS baseline was run: sentence-transformers' Matryoshka2dLoss, in the 3.x of its time.

    A layer n ~ U(1, N−1), and a width of the ladder for it and another for the last layer, each of all widths:
    L = L_N^d + L_n^d' / n. KL runs from (N, D) to (n, D) alone. (From 6.x on the weight 1/n is 1 and n may be 0.)
    """
    full, dims = ladder.full, [size.dim for size in ladder]

    def plan(step: int) -> SizePlan:
        rng = _generator(seed, step)
        layers = int(rng.integers(1, max(2, full.layers)))
        inner, outer = (dims[int(rng.integers(len(dims)))] for _ in range(2))
        sizes = (Size(layers, inner), Size(layers, full.dim), Size(full.layers, outer), full)
        return SizePlan(_DRAWN, sizes, (1.0 / layers, 0.0, 1.0, 0.0), (0.0, 1.0, 0.0, 0.0))

    return plan


def two_dimensional_all_widths(ladder: Ladder, *, seed: int) -> Schedule:
    """2DMSE as in Starbucks' retrieval code (`sub_model_sampling`): a layer of the ladder below the last is drawn.

    All widths of the ladder are trained at it and at the last layer, their losses summed; KL runs from (N, D) to all
    the others, those of the last layer too.
    """
    full, dims = ladder.full, [size.dim for size in ladder]
    below = [size.layers for size in ladder][:-1]
    names = (*(f"drawn_layers_x{dim}" for dim in dims), *(str(Size(full.layers, dim)) for dim in dims))

    def plan(step: int) -> SizePlan:
        layers = below[int(_generator(seed, step).integers(len(below)))]
        sizes = tuple(Size(depth, dim) for depth in (layers, full.layers) for dim in dims)
        return SizePlan(names, sizes, (1.0,) * len(sizes), (*(1.0,) * (len(sizes) - 1), 0.0))

    return plan


_DRAWN = ("drawn_size", "drawn_layers", "drawn_dim", "full")  # what metrics call (n, d), (n, D), (N, d), (N, D)


def _generator(seed: int, step: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, step], dtype=np.uint64)))


_DRAWING = {
    "two_d": two_dimensional,
    "two_d_listed": two_dimensional_listed,
    "two_d_all_widths": two_dimensional_all_widths,
}


def reweighted(schedule: Schedule, *, size_weights: Sequence[float], kl_size_weights: Sequence[float]) -> Schedule:
    """A schedule of fixed sizes with each one's loss and KL multiplied by a factor; none given: as it was.

    The factors come on top of the reduction: with "mean" L is 1/|S| Σ w_k L_k, not divided by Σ w_k, so that factors
    of 1 change nothing. `kl_size_weights`: one a student, which the last size is not where it teaches.
    """
    plan = schedule(0)
    loss_factors = size_weights or (1.0,) * len(plan.sizes)
    kl_factors = (*kl_size_weights, 1.0)[: len(plan.sizes)] if kl_size_weights else (1.0,) * len(plan.sizes)
    changed = dataclasses.replace(
        plan,
        loss_weights=tuple(w * f for w, f in zip(plan.loss_weights, loss_factors, strict=True)),
        kl_weights=tuple(w * f for w, f in zip(plan.kl_weights, kl_factors, strict=True)),
    )
    return lambda step: changed


def taught_from_outside(schedule: Schedule) -> Schedule:
    """A schedule in which another model teaches: every size is a student, with the weight of its loss."""

    def plan(step: int) -> SizePlan:
        own = schedule(step)
        return dataclasses.replace(own, kl_weights=own.loss_weights)

    return plan


def build_schedule(
    kind: str,
    ladder: Ladder,
    *,
    reduction: str,
    seed: int,
    size: Size | None = None,
    size_weights: Sequence[float] = (),
    kl_size_weights: Sequence[float] = (),
    teacher_outside: bool = False,
) -> Schedule:
    """The schedule a recipe names in `objective.sizes`, with its factors a size."""
    teach = taught_from_outside if teacher_outside else (lambda schedule: schedule)
    if kind in _DRAWING:
        return teach(_DRAWING[kind](ladder, seed=seed))
    fixed = teach(_fixed(kind, ladder, reduction=reduction, size=size))
    return reweighted(fixed, size_weights=size_weights, kl_size_weights=kl_size_weights)


def _fixed(kind: str, ladder: Ladder, *, reduction: str, size: Size | None) -> Schedule:
    if kind == "ladder":
        return every_size(ladder, reduction=reduction)
    if kind == "grid":
        return whole_grid(ladder, reduction=reduction)
    if kind == "full":
        return one_size(ladder.full, ladder.name(ladder.full))
    if kind == "one":
        assert size is not None
        return one_size(size, ladder.name(size))
    if kind == "mrl":
        return matryoshka(ladder, reduction=reduction)
    assert kind == "adaptive_layers", kind
    return adaptive_layers(ladder, reduction=reduction)
