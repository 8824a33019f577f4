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

    KL runs from (N, D) to both sizes of the drawn layer (SPEC, baselines).
    """
    full = ladder.full

    def plan(step: int) -> SizePlan:
        rng = np.random.Generator(np.random.Philox(key=np.array([seed, step], dtype=np.uint64)))
        layers = int(rng.integers(1, max(2, full.layers)))
        dim = int(rng.integers(1, max(2, full.dim)))
        sizes = (Size(layers, dim), Size(layers, full.dim), Size(full.layers, dim), full)
        names = ("drawn_size", "drawn_layers", "drawn_dim", "full")
        return SizePlan(names, sizes, (1.0,) * 4, (1.0, 1.0, 0.0, 0.0))

    return plan


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
    if kind == "two_d":
        return teach(two_dimensional(ladder, seed=seed))
    fixed = teach(_fixed(kind, ladder, reduction=reduction, size=size))
    return reweighted(fixed, size_weights=size_weights, kl_size_weights=kl_size_weights)


def _fixed(kind: str, ladder: Ladder, *, reduction: str, size: Size | None) -> Schedule:
    if kind == "ladder":
        return every_size(ladder, reduction=reduction)
    if kind == "full":
        return one_size(ladder.full, ladder.name(ladder.full))
    if kind == "one":
        assert size is not None
        return one_size(size, ladder.name(size))
    if kind == "mrl":
        return matryoshka(ladder, reduction=reduction)
    assert kind == "adaptive_layers", kind
    return adaptive_layers(ladder, reduction=reduction)
