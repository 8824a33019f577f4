"""The losses of trainer/losses/infonce.py where the columns come a stretch at a time and are never there together.

Every stretch comes twice: first for the rows' sums over all columns, then for the gradients, which are computed from
those sums. In between, a row keeps a few numbers for each size, whatever the number of columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.losses.infonce import add_gradients, find_sums, give_back, losses_of, positives_of
from trainer.losses.row_sums import RowSums
from trainer.losses.tile_settings import TileSettings
from trainer.losses.tiled_rows import TiledRows
from trainer.losses.tiles import Columns, Side, Sides, filter_ceiling


class InfoNCEInTurn:
    """The loss of a rank's queries and its gradients. Call `add_sums` for every stretch, then `sum_up`, then
    `add_gradients` for every stretch; the order of the stretches is free both times.

    queries: vectors and gradients of the rows. passages: those of the rank's own passages, among which its positives
    are. targets: int64 [n], each row's positive among these. before: how many passages of other ranks precede the
    rank's own. every: all columns. stretches: what comes together. excluded, hard, weights, dtype: as in TiledRows.
    """

    def __init__(
        self,
        queries: Side,
        passages: Side,
        targets: Tensor,
        settings: TileSettings,
        every: Columns,
        stretches: Sequence[Columns],
        *,
        before: int,
        excluded: Tensor | None,
        hard: Tensor | None,
        weights: Tensor | None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._passages, self._targets, self._settings, self._dtype = passages, targets, settings, dtype
        self._tiled = TiledRows(
            queries,
            targets + before,
            settings,
            every,
            stretches,
            excluded=excluded,
            hard=hard,
            weights=weights,
            dtype=dtype,
        )
        self._sums, self._ceilings = [], []
        for number in range(len(self._tiled)):
            rows, here = self._tiled.rows(number), targets[self._tiled.places(number)]
            self._ceilings.append(filter_ceiling(rows, passages, here, settings))
            self._sums.append(
                RowSums.of_no_columns(settings, sizes=len(rows.vectors), rows=len(here), like=self._tiled.workspace)
            )

    def add_sums(self, stretch: int, passages: Side, all_queries: Side | None) -> None:
        """Take in the columns of a stretch."""
        for number, sums in enumerate(self._sums):
            of_blocks = self._tiled.sums(number, stretch)
            self._visit(number, stretch, passages, all_queries, of_blocks, adds=False)
            sums.include(of_blocks)

    def sum_up(self) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, InfoNCE and KL of each size, from the sums over all stretches."""
        for sums in self._sums:
            for size in self._settings.in_order:
                sums.sum_up(size)
        found = [sums.losses(self._tiled.weights(number)) for number, sums in enumerate(self._sums)]
        return losses_of(found, self._settings, like=self._tiled.workspace)

    def add_gradients(self, stretch: int, passages: Side, all_queries: Side | None) -> None:
        """Add the gradients of a stretch's scores to those of the rows and of the stretch's vectors."""
        for number, sums in enumerate(self._sums):
            shared = sums.shared_by(self._tiled.num_blocks(stretch))
            self._visit(number, stretch, passages, all_queries, shared, adds=True)

    def _visit(
        self, number: int, stretch: int, passages: Side, all_queries: Side | None, sums: RowSums, *, adds: bool
    ) -> None:
        here = self._targets[self._tiled.places(number)]
        positives = positives_of(self._passages, here, self._settings, self._dtype)
        sides = Sides(self._tiled.rows(number), positives, passages, all_queries)
        tile = self._tiled.tile(number, stretch, sides, ceiling=self._ceilings[number], sums=sums)
        if adds:
            add_gradients(tile)
            give_back(positives, self._passages, here)
        else:
            find_sums(tile)
