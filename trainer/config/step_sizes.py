"""Which sizes a step trains, by the kind that `objective.sizes` names: fixed, or drawn at each step.

The trainer's schedules (trainer/objectives/size_schedules.py) add the draws, weights and names; checks, charts and the
planner ask here, too. Torch-free and numpy-free, like trainer/config/schema.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from models.sizes import Ladder, Size

SEVERAL = ("ladder", "grid", "mrl", "adaptive_layers")  # kinds of several fixed sizes
ALONE = ("full", "one")  # kinds of one fixed size
FIXED = (*SEVERAL, *ALONE)
DRAWN = ("two_d", "two_d_listed", "two_d_all_widths")  # kinds that draw sizes at each step
EVERY_DEPTH = ("espresso", "espresso_full_width")  # kinds of every layer, not of the ladder's alone
# Kinds with sizes of fewer layers than the encoder's, whose losses may be weighted by their layers. "two_d_listed" has
# its own weights.
WEIGHTED_BY_LAYERS = ("ladder", "grid", "adaptive_layers", "two_d", "two_d_all_widths", *EVERY_DEPTH)
# Kinds that train, at every step, sizes that are narrower than the encoder. "two_d_listed" may draw none.
NARROWED = ("ladder", "grid", "mrl", "two_d", "two_d_all_widths", *EVERY_DEPTH)
# Kinds that train a ladder's sizes with narrower feed-forwards; "full" trains none of the smaller sizes.
WITH_BODIES = ("ladder", "grid", "adaptive_layers", "full")


def at_full_depth(ladder: Ladder) -> tuple[Size, ...]:
    """All widths of the ladder at the last layer (1-D Matryoshka)."""
    return tuple(Size(ladder.full.layers, size.dim) for size in ladder)


def at_full_width(ladder: Ladder) -> tuple[Size, ...]:
    """All depths of the ladder, with the feed-forwards of their sizes, at full width."""
    return tuple(size.body.of_dim(ladder.full.dim) for size in ladder)


def around(ladder: Ladder, *, layers: int, inner: int, outer: int) -> tuple[Size, ...]:
    """2DMSE's four sizes of a drawn depth n: (n, inner), (n, D), (N, outer) and (N, D) (Starbucks §3.1, eq. 3)."""
    full = ladder.full
    return Size(layers, inner), Size(layers, full.dim), Size(full.layers, outer), full


def at_two_depths(ladder: Ladder, *, layers: int) -> tuple[Size, ...]:
    """All widths of the ladder at a drawn depth, and all of them at the last layer."""
    return (*(Size(layers, size.dim) for size in ladder), *at_full_depth(ladder))


def at_every_depth(ladder: Ladder, *, full_width: bool) -> tuple[Size, ...]:
    """ESE's sizes: each layer, not the ladder's alone, with each width of the ladder below the full one; and (N, D).

    full_width: each layer with the full width, too.
    """
    full = ladder.full
    narrow = [size.dim for size in ladder if size.dim < full.dim]
    below = [Size(n, dim) for n in range(1, full.layers) for dim in (*narrow, *([full.dim] if full_width else []))]
    return (*below, *(Size(full.layers, dim) for dim in narrow), full)


_FIXED: Mapping[str, Callable[[Ladder], Iterable[Size]]] = {
    "ladder": lambda ladder: ladder,  # Starbucks §3.1, eq. 4
    "grid": lambda ladder: ladder.grid,  # every body with every width
    "full": lambda ladder: (ladder.full,),
    "mrl": at_full_depth,
    "adaptive_layers": at_full_width,
    "espresso": lambda ladder: at_every_depth(ladder, full_width=False),
    "espresso_full_width": lambda ladder: at_every_depth(ladder, full_width=True),
}


@dataclass(frozen=True)
class StepSizes:
    """The sizes of a step. `one`: the size that is trained on its own, for the kind "one"."""

    kind: str
    ladder: Ladder
    one: Size | None = None

    @property
    def drawn(self) -> bool:
        """Whether each step draws its sizes; `fixed` must then not be read."""
        return self.kind in DRAWN

    @property
    def fixed(self) -> tuple[Size, ...]:
        """The sizes of every step, the largest last. With a ladder of one layer, a size may occur twice."""
        assert not self.drawn, self.kind
        if self.kind == "one":
            assert self.one is not None
            return (self.one,)
        return tuple(_FIXED[self.kind](self.ladder))

    @property
    def planned(self) -> tuple[Size, ...]:
        """The sizes to plan a step with: the fixed ones, or those of the mean draw."""
        ladder, full = self.ladder, self.ladder.full
        if not self.drawn:
            return self.fixed
        if self.kind == "two_d_all_widths":
            below = [size.layers for size in ladder][:-1] or [full.layers]  # one size alone is refused elsewhere
            return at_two_depths(ladder, layers=round(sum(below) / len(below)))
        dim = max(1, full.dim // 2)
        if self.kind == "two_d_listed":
            dim = round(sum(size.dim for size in ladder) / len(ladder))
        return around(ladder, layers=max(1, full.layers // 2), inner=dim, outer=dim)

    @property
    def has_several(self) -> bool:
        """Whether a step trains more than one size. The same size may count twice."""
        return len(self.planned) > 1

    @property
    def has_smaller(self) -> bool:
        """Whether a step trains sizes below its last one."""
        return any(size != self.planned[-1] for size in self.planned)

    @property
    def has_shallower(self) -> bool:
        """Whether a step trains sizes of fewer layers than its last one."""
        return any(size.layers < self.planned[-1].layers for size in self.planned)

    @property
    def has_narrower(self) -> bool:
        """Whether a step trains sizes of fewer dimensions than its last one."""
        return any(size.dim < self.planned[-1].dim for size in self.planned)

    @property
    def shown(self) -> tuple[Size, ...]:
        """The sizes with a line of their own in charts, smallest first: the ladder's, and those of every step."""
        if self.kind == "two_d_all_widths":
            of_every_step = at_full_depth(self.ladder)
        else:
            of_every_step = () if self.drawn else self.fixed
        return tuple(sorted({*self.ladder, *of_every_step}))
