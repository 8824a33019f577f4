"""The sizes of a step with their weights.

trainer/config/step_sizes.py says which sizes a kind trains; a schedule adds draws, weights and names. A schedule maps
a step to a SizePlan; losses and models take the plan and do not know the schedule. Draws depend on (seed, step) alone,
so they are the same on all ranks and in both passes of gradient caching.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from data.keyed_random import step_generator
from models.sizes import Ladder, Size
from trainer.config.step_sizes import EVERY_DEPTH, StepSizes, around, at_two_depths


@dataclass(frozen=True)
class SizePlan:
    """The sizes of a step, each with the weight of its loss and of its KL to the teacher.

    The teacher is the last size, or a model outside the plan. A KL weight of 0 leaves a size out of the KL; a size that
    teaches has 0. `names` are what metrics call the sizes. The first `uncompared` sizes are embedded for losses that
    read a depth's whole vectors, and no texts are compared at them.
    """

    names: tuple[str, ...]
    sizes: tuple[Size, ...]
    loss_weights: tuple[float, ...]
    kl_weights: tuple[float, ...]
    uncompared: int = 0

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.sizes) == len(self.loss_weights) == len(self.kl_weights)

    @property
    def full(self) -> int:
        """The index of the largest size."""
        return len(self.sizes) - 1

    @property
    def compared(self) -> SizePlan:
        """The sizes at which texts are compared."""
        rest = slice(self.uncompared, None)
        return SizePlan(self.names[rest], self.sizes[rest], self.loss_weights[rest], self.kl_weights[rest])


Schedule = Callable[[int], SizePlan]


def of_fixed_sizes(sizes: StepSizes, *, reduction: str) -> Schedule:
    """The same sizes at every step; the reduction sets each weight to 1/|S| or to 1 (Starbucks §3.1, eq. 4, 5).

    The KL runs from the last size to the others; a size that is trained alone has no KL.
    """
    chosen = sizes.fixed
    weight = 1.0 / len(chosen) if reduction == "mean" else 1.0
    kl = tuple(weight if size != chosen[-1] else 0.0 for size in chosen)
    name = str if sizes.kind in _NAMED_BY_NUMBERS else sizes.ladder.name
    plan = SizePlan(tuple(map(name, chosen)), chosen, (weight,) * len(chosen), kl)
    return lambda step: plan


def of_every_depth(sizes: StepSizes) -> Schedule:
    """ESE's sizes and weights: L = Σ over the last layer's sizes + 1/(N−1) Σ over those below (arXiv:2402.14776v2).

    Its weights by layers are those of `weighted_by_layers`, "log". The KL, which ESE has not, runs from (N, D) to all
    other sizes.
    """
    chosen, full = sizes.fixed, sizes.ladder.full
    weights = tuple(1.0 if size.layers == full.layers else 1.0 / (full.layers - 1) for size in chosen)
    plan = SizePlan(tuple(map(str, chosen)), chosen, weights, (*weights[:-1], 0.0))
    return lambda step: plan


def two_dimensional(ladder: Ladder, *, seed: int) -> Schedule:
    """2DMSE: n ~ U(1, N−1), d ~ U(1, D−1) each step; L_n^d + L_n^D + L_N^d + L_N^D (Starbucks §3.1, eq. 3).

    The KL runs from (N, D) to both sizes of the drawn layer. Eq. 3 has no KL, and the paper names none for 2DMSE.
    """
    full = ladder.full

    def plan(step: int) -> SizePlan:
        rng = step_generator(seed, step)
        layers = int(rng.integers(1, max(2, full.layers)))
        dim = int(rng.integers(1, max(2, full.dim)))
        sizes = around(ladder, layers=layers, inner=dim, outer=dim)
        return SizePlan(_DRAWN, sizes, (1.0,) * 4, (1.0, 1.0, 0.0, 0.0))

    return plan


def two_dimensional_listed(ladder: Ladder, *, seed: int) -> Schedule:
    """2DMSE as the paper ran its STS baseline: Matryoshka2dLoss of the sentence-transformers 3.x of its time.

    Each step draws a layer n ~ U(1, N−1), a width d for the last layer and a width d' for layer n, both from all widths
    of the ladder: L = L_N^d + L_n^d' / n. The KL runs from (N, D) to (n, D) alone. (From 6.x on the weight 1/n is 1 and
    n may be 0.)
    """
    full, dims = ladder.full, [size.dim for size in ladder]

    def plan(step: int) -> SizePlan:
        rng = step_generator(seed, step)
        layers = int(rng.integers(1, max(2, full.layers)))
        inner, outer = (dims[int(rng.integers(len(dims)))] for _ in range(2))
        sizes = around(ladder, layers=layers, inner=inner, outer=outer)
        return SizePlan(_DRAWN, sizes, (1.0 / layers, 0.0, 1.0, 0.0), (0.0, 1.0, 0.0, 0.0))

    return plan


def two_dimensional_all_widths(ladder: Ladder, *, seed: int) -> Schedule:
    """2DMSE as in Starbucks' retrieval code (`sub_model_sampling`).

    Each step draws a layer of the ladder below the last one. It trains all widths of the ladder at the drawn layer and
    at the last layer, and sums their losses. The KL runs from (N, D) to all other sizes, including those of the last
    layer.
    """
    full, dims = ladder.full, [size.dim for size in ladder]
    below = [size.layers for size in ladder][:-1]
    names = (*(f"drawn_layers_x{dim}" for dim in dims), *(str(Size(full.layers, dim)) for dim in dims))

    def plan(step: int) -> SizePlan:
        layers = below[int(step_generator(seed, step).integers(len(below)))]
        sizes = at_two_depths(ladder, layers=layers)
        return SizePlan(names, sizes, (1.0,) * len(sizes), (*(1.0,) * (len(sizes) - 1), 0.0))

    return plan


_NAMED_BY_NUMBERS = ("mrl", "adaptive_layers")  # metrics call these sizes by numbers (12x32), even if named
_DRAWN = ("drawn_size", "drawn_layers", "drawn_dim", "full")  # what metrics call (n, d), (n, D), (N, d), (N, D)


_DRAWING = {
    "two_d": two_dimensional,
    "two_d_listed": two_dimensional_listed,
    "two_d_all_widths": two_dimensional_all_widths,
}


def reweighted(schedule: Schedule, *, size_weights: Sequence[float], kl_size_weights: Sequence[float]) -> Schedule:
    """A schedule of fixed sizes whose losses and KLs are multiplied by a factor each; an empty list changes nothing.

    The factors come on top of the reduction: with "mean" L is 1/|S| Σ w_k L_k, not divided by Σ w_k, so that factors
    of 1 change nothing. `kl_size_weights` has one factor for each student; the last size is no student if it teaches.
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


# What the loss of a size of n layers is multiplied by, below the last layer.
_LAYER_WEIGHTINGS: Mapping[str, Callable[[int], float]] = {
    "uniform": lambda layers: 1.0,
    "log": lambda layers: 1.0 / (1.0 + math.log(layers)),  # ESE, arXiv:2402.14776v2
    "linear": lambda layers: 1.0 / layers,
}


def weighted_by_layers(schedule: Schedule, weighting: str) -> Schedule:
    """A schedule in which the losses of sizes below the last layer are multiplied by a weight that falls with depth.

    The names are those of sentence-transformers' `layer_weighting`. It gives layer n the weight that n + 1 has here,
    because it counts the embeddings as a layer. The KL to the full size keeps its weights, as there.
    """
    if weighting == "uniform":
        return schedule
    weight_of = _LAYER_WEIGHTINGS[weighting]

    def plan(step: int) -> SizePlan:
        own = schedule(step)
        deepest = own.sizes[own.full].layers
        factors = [weight_of(size.layers) if size.layers < deepest else 1.0 for size in own.sizes]
        return dataclasses.replace(own, loss_weights=tuple(w * f for w, f in zip(own.loss_weights, factors)))

    return plan


def with_whole_vectors(schedule: Schedule) -> Schedule:
    """A schedule that embeds every body of its sizes at full width, too, without comparing texts at the added ones."""

    def plan(step: int) -> SizePlan:
        own = schedule(step)
        whole = [size.body.of_dim(own.sizes[own.full].dim) for size in own.sizes]
        added = tuple(size for size in dict.fromkeys(whole) if size not in own.sizes)
        nothing = (0.0,) * len(added)
        return SizePlan(
            (*map(str, added), *own.names),
            (*added, *own.sizes),
            (*nothing, *own.loss_weights),
            (*nothing, *own.kl_weights),
            uncompared=len(added),
        )

    return plan


def taught_from_outside(schedule: Schedule) -> Schedule:
    """A schedule in which another model teaches: every size is a student, and its KL has the weight of its loss."""

    def plan(step: int) -> SizePlan:
        own = schedule(step)
        return dataclasses.replace(own, kl_weights=own.loss_weights)

    return plan


def build_schedule(
    sizes: StepSizes,
    *,
    reduction: str,
    seed: int,
    layer_weighting: str = "uniform",
    size_weights: Sequence[float] = (),
    kl_size_weights: Sequence[float] = (),
    teacher_outside: bool = False,
    whole_vectors: bool = False,
) -> Schedule:
    """The schedule of these sizes (`Recipe.step_sizes`), with the recipe's factor for each size.

    whole_vectors: a loss reads the whole vectors of each depth.
    """
    if sizes.drawn:
        schedule = _DRAWING[sizes.kind](sizes.ladder, seed=seed)
    elif sizes.kind in EVERY_DEPTH:
        schedule = of_every_depth(sizes)
    else:
        schedule = of_fixed_sizes(sizes, reduction=reduction)
    schedule = weighted_by_layers(schedule, layer_weighting)
    if teacher_outside:
        schedule = taught_from_outside(schedule)
    if not sizes.drawn:
        schedule = reweighted(schedule, size_weights=size_weights, kl_size_weights=kl_size_weights)
    return with_whole_vectors(schedule) if whole_vectors else schedule
