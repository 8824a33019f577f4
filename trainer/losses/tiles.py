"""The scores of a tile of queries with a block of columns: their exponentials, the rows' sums, and the gradients.

This is the arithmetic of trainer/losses/infonce.py, within bounded memory. A row's columns are those of its parts, one
part after the other (tile_settings.PARTS); a block lies in one part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.losses.row_sums import EXCLUDED_SCORE, NATS_A_BIT, RowSums
from trainer.losses.tile_settings import Part, TileSettings

# Scores in a block: on a CPU a few such blocks stay in the cache between passes; a GPU wants few, large launches.
CPU_BLOCK_SCORES, GPU_BLOCK_SCORES = 2**19, 2**25
# With fewer queries a tile spends more on reading passages and adding to their gradients than a second sweep costs.
LEAST_QUERIES = 128
MOST_QUERIES = 512


@dataclass(frozen=True)
class Tiling:
    """Queries of a tile, columns of a block, and whether a tile keeps its exponentials of all columns."""

    queries: int
    columns: int
    keeps_rows: bool


def choose_tiling(
    num_queries: int,
    num_columns: int,
    *,
    matrices: int,
    statistics: int,
    scores_in_memory: int,
    block_scores: int,
    parts: int = 1,
) -> Tiling:
    """One sweep where the scores of enough queries with all columns fit in memory, else two sweeps, block by block.

    num_columns: of a query's row. parts: how many parts they are of (tile_settings.PARTS). matrices: how many a tile
    keeps, besides a block of scratch. statistics: numbers kept for each query and block.
    """

    def numbers(width: int) -> int:
        """Statistics of a query, with blocks of so many columns, of which each part may end in a shorter one."""
        return statistics * (ceil(num_columns / width) + parts - 1)

    block = min(block_scores, scores_in_memory // (matrices + 1))
    narrow = max(1, min(num_columns, block // MOST_QUERIES))
    fitting = (scores_in_memory - block) // (matrices * num_columns + numbers(narrow))
    if fitting >= max(1, min(num_queries, LEAST_QUERIES)):
        queries = max(1, min(num_queries, MOST_QUERIES, fitting))
        return Tiling(queries, max(1, min(num_columns, block // queries)), keeps_rows=True)
    # Wide enough that the statistics take no more than the blocks.
    wide = min(num_columns, max(narrow, isqrt(statistics * num_columns // (matrices + 1))))
    fitting = scores_in_memory // ((matrices + 1) * wide + numbers(wide))
    return Tiling(max(1, min(num_queries, MOST_QUERIES, fitting)), wide, keeps_rows=False)


class Side(NamedTuple):
    """Vectors of texts and the gradients to which the tiles add, one a size, then the guide's; None: not wanted."""

    vectors: Sequence[Tensor]
    gradients: Sequence[Tensor | None]


class Sides(NamedTuple):
    """What a tile multiplies: its queries, and their positives row by row, with all passages and all queries.

    Positives and all queries are None where no part reads them.
    """

    queries: Side
    positives: Side | None
    passages: Side
    all_queries: Side | None

    def of(self, part: Part) -> tuple[Side, Side]:
        """The part's rows and columns."""
        rows = self.positives if part.of_positives else self.queries
        columns = self.all_queries if part.with_queries else self.passages
        assert rows is not None and columns is not None
        return rows, columns


@dataclass(frozen=True)
class Block:
    """Columns of one part. start: where they are among a row's columns. inside: which vectors of the part they are."""

    part: Part
    start: int
    inside: slice

    @property
    def width(self) -> int:
        return int(self.inside.stop - self.inside.start)

    @property
    def may_hold_targets(self) -> bool:
        return not self.part.of_positives and not self.part.with_queries


class Columns(NamedTuple):
    """Places of passages and of queries among those of the global batch; queries are read only by parts with them."""

    passages: range
    queries: range


def blocks_of(parts: Sequence[Part], every: Columns, width: int, *, here: Columns | None = None) -> list[Block]:
    """Columns of a row, cut into blocks of at most `width`: those that are `here`, by default every one."""
    blocks: list[Block] = []
    begin = 0
    for part in parts:
        all_places, places = every[part.with_queries], (here or every)[part.with_queries]
        for start in range(0, len(places), width):
            inside = slice(start, min(start + width, len(places)))
            blocks.append(Block(part, begin + places.start + start, inside))
        begin += len(all_places)
    return blocks


@dataclass(frozen=True)
class Pairs:
    """What is known of pairs of a tile's rows and a block's columns, as (rows, columns) inside them; None: no pairs.

    excluded: no negatives. hard: a query and one of its own hard negatives.
    """

    excluded: tuple[Tensor, Tensor] | None
    hard: tuple[Tensor, Tensor] | None


def filter_ceiling(queries: Side, passages: Side, targets: Tensor, settings: TileSettings) -> Tensor | None:
    """The scores, in bits, above which the filter leaves out a row's columns, [rows, 1]; None without a filter.

    targets: int64 [rows], each query's positive among the passages.
    """
    if settings.filter is None:
        return None
    size = settings.filter_size
    nearest = passages.vectors[size][targets].to(queries.vectors[size].dtype)
    similarity = (queries.vectors[size] * nearest).sum(1, keepdim=True)
    return (similarity - settings.filter.margin) / (settings.temperature_of(size) * NATS_A_BIT)


class Tile:
    """One tile of queries against all columns: a block's exponentials, the rows' sums, then a block's gradients.

    targets: int64 [rows], each query's positive as a column. pairs: one a block. sums: of the tile's rows; one for each
    block, unless the tile only adds gradients. ceiling: what `filter_ceiling` returns. weights: [rows], of each query's
    losses; None where all are 1.
    """

    def __init__(
        self,
        sides: Sides,
        targets: Tensor,
        blocks: list[Block],
        pairs: list[Pairs],
        settings: TileSettings,
        *,
        sums: RowSums,
        ceiling: Tensor | None,
        weights: Tensor | None,
        workspace: Tensor,
        scratch: Tensor,
        keeps_rows: bool,
    ) -> None:
        self.sides = sides
        self.targets, self.blocks, self.pairs, self.settings = targets, blocks, pairs, settings
        self.sums, self.ceiling, self.weights = sums, ceiling, weights
        self.workspace, self.scratch, self.keeps_rows = workspace, scratch, keeps_rows

    def filter_block(self, block: int) -> None:
        """Find what the filter leaves out of a block, before any size's scores are computed."""
        self._find_penalty(self._products(self.settings.filter_size, block), block)

    def exponentials(self, size: int, block: int, *, again: bool = False) -> None:
        """Write 2^(s − maximum) of a block into the size's slot. `again`: its maximum and sums are already known."""
        settings, teacher = self.settings, self.settings.teacher
        scores = self._scores(size, block)
        if settings.moves_teacher and (size == teacher or settings.teaches[size]):
            gap = self._slot("gap", block)  # Σ_k kl_weights[k] (s_T − s_k), in nats
            if size == teacher:
                torch.mul(scores, NATS_A_BIT * sum(settings.teaches), out=gap)
            else:
                gap.sub_(scores, alpha=NATS_A_BIT * settings.teaches[size])
        if not again:
            if self.blocks[block].may_hold_targets:
                column, inside = self._targets_in(block)
                found = scores.gather(1, column[:, None])[:, 0]
                self.sums.positive[size] = torch.where(inside, found, self.sums.positive[size])
            torch.amax(scores, 1, out=self.sums.peak[size, block])
        scores -= self.sums.peak[size, block, :, None]
        slot = torch.exp2(scores, out=self._slot(size, block))
        if not again:
            torch.sum(slot, 1, out=self.sums.mass[size, block])
            if any(settings.teaches) and (size == teacher or settings.teaches[size]):
                scores *= self._slot(teacher, block)
                torch.sum(scores, 1, out=self.sums.cross[size, block])

    def add_gradients(self, size: int, block: int) -> None:
        """Compute d loss / d s of a block in the size's slot, and add the gradients of its rows and columns."""
        (rows, columns), inside = self.sides.of(self.blocks[block].part), self.blocks[block].inside
        row_grad, column_grad = rows.gradients[size], columns.gradients[size]
        if row_grad is None and column_grad is None:
            return
        settings, teacher = self.settings, self.settings.teacher
        grad, factor = self._slot(size, block), self._weighted(self.sums.log_factor[size, block].exp2())[:, None]
        if size == teacher and settings.moves_teacher:
            gap = self._slot("gap", block)
            gap += self._teacher_offset()[:, None]
            grad *= factor
            grad *= gap
        else:
            weight = settings.loss_weights[size] + settings.teaches[size]
            grad *= weight * factor
            if settings.teaches[size]:
                share = settings.teaches[size] * self._weighted(self.sums.log_factor[teacher, block].exp2())
                grad.addcmul_(self._slot(teacher, block), share[:, None], value=-1)
        if self.blocks[block].may_hold_targets:
            column, here = self._targets_in(block)
            pull = self._weighted(-settings.loss_weights[size] * here.to(grad.dtype))
            grad.scatter_add_(1, column[:, None], pull[:, None])
        scale = 1.0 / (settings.temperature * settings.num_queries)
        if row_grad is not None:
            row_grad.addmm_(grad, columns.vectors[size][inside].to(grad.dtype), alpha=scale)
        if column_grad is not None:
            column_grad[inside].addmm_(grad.t(), rows.vectors[size], alpha=scale)

    def _weighted(self, values: Tensor) -> Tensor:
        """A number a row, times the row's weight."""
        return values if self.weights is None else values * self.weights

    def _teacher_offset(self) -> Tensor:
        """What each row adds to the gaps, which gives the teacher's gradient divided by p_T.  # [rows]"""
        offset = torch.full_like(self.sums.lse[0], self.settings.loss_weights[self.settings.teacher])
        for size in self.settings.students:
            if weight := self.settings.teaches[size]:
                bits = self.sums.lse[size] - self.sums.lse[self.settings.teacher] - self.sums.divergence[size]
                offset += NATS_A_BIT * weight * bits
        return offset

    def _scores(self, size: int, block: int) -> Tensor:
        scores, settings = self._products(size, block), self.settings
        if (excluded := self.pairs[block].excluded) is not None:
            scores[excluded] = EXCLUDED_SCORE
        if settings.filter is not None and size == settings.teacher and not settings.filters_apart:
            self._find_penalty(scores, block)
        if (hard := self.pairs[block].hard) is not None:
            # The logarithm of the weight, exp(hardness · similarity), in bits. It is a constant, so that the gradient
            # stays that of the similarity divided by the temperature.
            factor = 1.0 + settings.hardness * settings.temperature_of(size)
            scores[hard] = (scores[hard] * factor).clamp_(min=EXCLUDED_SCORE)
        if settings.filter is not None:
            # Adding is many times faster than masked_fill_.
            scores += self._slot("penalty", block)
        return scores

    def _products(self, size: int, block: int) -> Tensor:
        rows, columns = self.sides.of(self.blocks[block].part)
        vectors = columns.vectors[size][self.blocks[block].inside].to(self.workspace.dtype)
        scores = self.scratch[: len(self.targets) * len(vectors)].view(len(self.targets), len(vectors))
        scale = 1.0 / (self.settings.temperature_of(size) * NATS_A_BIT)
        return torch.addmm(scores, rows.vectors[size], vectors.t(), beta=0, alpha=scale, out=scores)

    def _find_penalty(self, scores: Tensor, block: int) -> None:
        """Compute what a block's scores get added at every size: EXCLUDED_SCORE where the filter leaves one out."""
        assert self.ceiling is not None
        penalty = self._slot("penalty", block)
        torch.gt(scores, self.ceiling, out=penalty)
        if self.blocks[block].may_hold_targets:
            column, inside = self._targets_in(block)
            penalty.scatter_(1, column[:, None], penalty.gather(1, column[:, None]) * ~inside[:, None])
        penalty *= EXCLUDED_SCORE

    def _targets_in(self, block: int) -> tuple[Tensor, Tensor]:
        """Each query's target as a column of the block, and whether it is in the block (else the column is void)."""
        start, width = self.blocks[block].start, self.blocks[block].width
        column = (self.targets - start).clamp(0, width - 1)
        return column, column + start == self.targets

    def _slot(self, of: int | str, block: int) -> Tensor:
        """The contiguous part of the workspace buffer for a block's matrix: of a size, the gaps or the penalties."""
        settings, start = self.settings, self.blocks[block].start
        if of == "gap":
            number = 2
        elif of == "penalty":
            number = settings.matrices - 1
        else:
            number = 0 if of == settings.teacher else 1
        rows, columns = len(self.targets), self.blocks[block].width
        begin = rows * start if self.keeps_rows else 0
        return self.workspace[number, begin : begin + rows * columns].view(rows, columns)
