"""Rows of scores cut into tiles, and their columns into blocks: what each tile needs besides vectors.

The columns may be there together, or one stretch after the other (trainer/losses/infonce_in_turn.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from trainer.losses.row_sums import STATISTICS, RowSums
from trainer.losses.tile_settings import TileSettings
from trainer.losses.tiles import (
    CPU_BLOCK_SCORES,
    GPU_BLOCK_SCORES,
    Block,
    Columns,
    Pairs,
    Side,
    Sides,
    Tile,
    Tiling,
    blocks_of,
    choose_tiling,
)


class TiledRows:
    """The rows of all queries, in tiles. All tiles share one workspace buffer, so they are used one after the other.

    queries: vectors and gradients of the rows. targets: int64 [n], each row's positive as a column. every: all columns.
    stretches: the columns that are there together. excluded, hard: pairs of a row and a column, int64 [e, 2], or None.
    weights: [n], of each row's losses, or None. dtype: of the scores.
    """

    def __init__(
        self,
        queries: Side,
        targets: Tensor,
        settings: TileSettings,
        every: Columns,
        stretches: Sequence[Columns],
        *,
        excluded: Tensor | None,
        hard: Tensor | None,
        weights: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self._queries, self._targets, self._settings = queries, targets, settings
        self._weights, self._dtype = weights, dtype
        parts, sizes, cpu = settings.parts, len(queries.vectors), targets.device.type == "cpu"
        widest = max(sum(len(stretch[part.with_queries]) for part in parts) for stretch in stretches)
        self.tiling = choose_tiling(
            len(targets),
            widest,
            matrices=settings.matrices,
            statistics=STATISTICS * sizes,
            scores_in_memory=int(settings.score_memory_mib * 2**20) // dtype.itemsize,
            block_scores=CPU_BLOCK_SCORES if cpu else GPU_BLOCK_SCORES,
            parts=len(parts),
        )
        if len(stretches) > 1:  # exponentials are gone before the next columns are there
            self.tiling = Tiling(self.tiling.queries, self.tiling.columns, keeps_rows=False)
        self._blocks = [blocks_of(parts, every, self.tiling.columns, here=stretch) for stretch in stretches]
        self._pairs = self._pairs_of_blocks(excluded, hard if settings.hardness else None)
        width = widest if self.tiling.keeps_rows else self.tiling.columns
        self.workspace = torch.empty(settings.matrices, self.tiling.queries * width, dtype=dtype, device=targets.device)
        self._scratch = torch.empty(self.tiling.queries * self.tiling.columns, dtype=dtype, device=targets.device)

    def __len__(self) -> int:
        return -(-len(self._targets) // self.tiling.queries)

    def num_blocks(self, stretch: int) -> int:
        return len(self._blocks[stretch])

    def places(self, number: int) -> slice:
        """Which rows a tile has."""
        start = number * self.tiling.queries
        return slice(start, min(start + self.tiling.queries, len(self._targets)))

    def rows(self, number: int) -> Side:
        """A tile's rows, in the scores' dtype, and their gradients."""
        part = self.places(number)
        return Side(
            [each[part].to(self._dtype) for each in self._queries.vectors],
            [None if each is None else each[part] for each in self._queries.gradients],
        )

    def weights(self, number: int) -> Tensor | None:
        return None if self._weights is None else self._weights[self.places(number)].to(self._dtype)

    def sums(self, number: int, stretch: int) -> RowSums:
        """Room for the sums of a tile's rows over the blocks of a stretch."""
        return RowSums(
            self._settings,
            sizes=len(self._queries.vectors),
            blocks=self.num_blocks(stretch),
            rows=len(self._targets[self.places(number)]),
            like=self.workspace,
        )

    def tile(self, number: int, stretch: int, sides: Sides, *, ceiling: Tensor | None, sums: RowSums) -> Tile:
        """A tile with a stretch of columns. sides: of the tile's rows, and of the stretch's vectors."""
        return Tile(
            sides,
            self._targets[self.places(number)],
            self._blocks[stretch],
            self._pairs[number][stretch],
            self._settings,
            sums=sums,
            ceiling=ceiling,
            weights=self.weights(number),
            workspace=self.workspace,
            scratch=self._scratch,
            keeps_rows=self.tiling.keeps_rows,
        )

    def _pairs_of_blocks(self, excluded: Tensor | None, hard: Tensor | None) -> list[list[list[Pairs]]]:
        """The pairs of each tile, stretch and block."""
        blocks = [block for stretch in self._blocks for block in stretch]
        order = sorted(range(len(blocks)), key=lambda number: blocks[number].start)
        ordered = [blocks[number] for number in order]
        kinds = [_pairs_by_block(each, self.tiling, ordered, len(self._targets)) for each in (excluded, hard)]
        found: list[list[list[Pairs]]] = []
        for number in range(len(self)):
            of_tile = [Pairs(None, None)] * len(blocks)
            for rank, block in enumerate(order):
                of_tile[block] = Pairs(*(kind[number * len(blocks) + rank] for kind in kinds))
            rest = iter(of_tile)
            found.append([[next(rest) for _ in stretch] for stretch in self._blocks])
        return found


def _pairs_by_block(
    pairs: Tensor | None, tiling: Tiling, blocks: Sequence[Block], num_queries: int
) -> list[tuple[Tensor, Tensor] | None]:
    """The (query, column) pairs of each (tile, block), as rows and columns inside it; None where there are none.

    blocks: in the order of their columns.
    """
    num_tiles, num_blocks = -(-num_queries // tiling.queries), len(blocks)
    if pairs is None or not len(pairs):
        return [None] * (num_tiles * num_blocks)
    starts = torch.tensor([block.start for block in blocks], device=pairs.device)
    block = torch.bucketize(pairs[:, 1].contiguous(), starts, right=True) - 1
    place = pairs[:, 0] // tiling.queries * num_blocks + block
    place, order = place.sort()
    rows, columns = pairs[order, 0] % tiling.queries, (pairs[:, 1] - starts[block])[order]
    edges = torch.searchsorted(place, torch.arange(num_tiles * num_blocks + 1, device=place.device)).tolist()
    return [(rows[a:b], columns[a:b]) if a < b else None for a, b in pairwise(edges)]
