"""The scores of a tile of queries with a block of passages: their exponentials, the rows' sums, and the gradients.

This is the arithmetic of trainer/losses/infonce.py, within bounded memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isqrt, log

import torch
from torch import Tensor

from trainer.losses.tile_settings import TileSettings

# Finite, so that an excluded passage's score difference to the teacher's is 0 and not NaN.
EXCLUDED_SCORE = -1e30
# Scores are in bits inside the tiles, p = 2^(s − lse): on a CPU exp2 takes half of exp's time. Where the result is
# nearly 0, as for most passages at a low temperature, exp takes many times its usual time.
NATS_A_BIT = log(2)
# Scores in a block: on a CPU a few such blocks stay in the cache between passes; a GPU wants few, large launches.
CPU_BLOCK_SCORES, GPU_BLOCK_SCORES = 2**19, 2**25
# With fewer queries a tile spends more on reading passages and adding to their gradients than a second sweep costs.
LEAST_QUERIES = 128
MOST_QUERIES = 512
STATISTICS = 4  # numbers for each query, block and size


@dataclass(frozen=True)
class Tiling:
    """Queries of a tile, passages of a block, and whether a tile keeps its exponentials for all passages."""

    queries: int
    passages: int
    keeps_rows: bool


def choose_tiling(
    num_queries: int,
    num_passages: int,
    *,
    matrices: int,
    statistics: int,
    scores_in_memory: int,
    block_scores: int,
) -> Tiling:
    """One sweep where the scores of enough queries with all passages fit in memory, else two sweeps, block by block.

    matrices: how many a tile keeps, besides a block of scratch. statistics: numbers kept for each query and block.
    """
    block = min(block_scores, scores_in_memory // (matrices + 1))
    narrow = max(1, min(num_passages, block // MOST_QUERIES))
    fitting = (scores_in_memory - block) // (matrices * num_passages + statistics * ceil(num_passages / narrow))
    if fitting >= max(1, min(num_queries, LEAST_QUERIES)):
        queries = max(1, min(num_queries, MOST_QUERIES, fitting))
        return Tiling(queries, max(1, min(num_passages, block // queries)), keeps_rows=True)
    # Wide enough that the statistics take no more than the blocks.
    wide = min(num_passages, max(narrow, isqrt(statistics * num_passages // (matrices + 1))))
    fitting = scores_in_memory // ((matrices + 1) * wide + statistics * ceil(num_passages / wide))
    return Tiling(max(1, min(num_queries, MOST_QUERIES, fitting)), wide, keeps_rows=False)


class Tile:
    """One tile of queries against all passages: a block's exponentials, the rows' sums, then a block's gradients."""

    def __init__(
        self,
        queries: list[Tensor],
        passages: Sequence[Tensor],
        query_grads: list[Tensor | None],
        passage_grads: Sequence[Tensor | None],
        targets: Tensor,
        blocks: list[slice],
        pairs: list[tuple[Tensor, Tensor] | None],
        settings: TileSettings,
        *,
        workspace: Tensor,
        scratch: Tensor,
        keeps_rows: bool,
    ) -> None:
        self.queries, self.passages = queries, passages
        self.query_grads, self.passage_grads = query_grads, passage_grads
        self.targets, self.blocks, self.pairs, self.settings = targets, blocks, pairs, settings
        self.workspace, self.scratch, self.keeps_rows = workspace, scratch, keeps_rows
        rows, sizes = len(targets), len(queries)
        # For each size, block and row, in bits: m = max s, Σ 2^(s − m), Σ 2^(s_T − m_T) (s − m), and the logarithm of
        # 2^m / Z, the factor that turns the block's exponentials into shares of the row.
        self.peak, self.mass, self.cross, self.log_factor = workspace.new_zeros(STATISTICS, sizes, len(blocks), rows)
        self.positive, self.lse, self.nce, self.divergence = workspace.new_zeros(4, sizes, rows)
        if settings.filter is not None:
            filter_size = settings.filter_size
            positives = passages[filter_size][targets].to(workspace.dtype)
            similarity = (queries[filter_size] * positives).sum(1, keepdim=True)
            self.ceiling = (similarity - settings.filter.margin) / (settings.temperature_of(filter_size) * NATS_A_BIT)

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
            column, inside = self._targets_in(block)
            found = scores.gather(1, column[:, None])[:, 0]
            self.positive[size] = torch.where(inside, found, self.positive[size])
            torch.amax(scores, 1, out=self.peak[size, block])
        scores -= self.peak[size, block, :, None]
        slot = torch.exp2(scores, out=self._slot(size, block))
        if not again:
            torch.sum(slot, 1, out=self.mass[size, block])
            if any(settings.teaches) and (size == teacher or settings.teaches[size]):
                scores *= self._slot(teacher, block)
                torch.sum(scores, 1, out=self.cross[size, block])

    def sum_up(self, size: int) -> None:
        """Compute the rows' log-sum-exp and KL, in bits, from all blocks. The teacher's must be computed first."""
        # Take differences to the row's maximum first, because adding a log-sum-exp to large scores would round away
        # what tells shares apart.
        top = self.peak[size].amax(0)
        spread = ((self.peak[size] - top).exp2() * self.mass[size]).sum(0).log2()
        self.lse[size] = top + spread
        self.nce[size] = (top - self.positive[size]) + spread
        torch.sub(self.peak[size] - top, spread, out=self.log_factor[size])
        if self.settings.teaches[size]:
            self.divergence[size] = self._taught_mean(self.settings.teacher) - self._taught_mean(size)

    def _taught_mean(self, size: int) -> Tensor:
        """Σ_j p_T,j log p_j.  # [rows]"""
        teacher = self.settings.teacher
        blocks = self.cross[size] + self.log_factor[size] * self.mass[teacher]
        return (self.log_factor[teacher].exp2() * blocks).sum(0)

    def add_gradients(self, size: int, block: int) -> None:
        """Compute d loss / d s of a block in the size's slot, and add the gradients of its queries and passages."""
        query_grad, passage_grad = self.query_grads[size], self.passage_grads[size]
        if query_grad is None and passage_grad is None:
            return
        settings, teacher = self.settings, self.settings.teacher
        grad, factor = self._slot(size, block), self.log_factor[size, block, :, None].exp2()
        if size == teacher and settings.moves_teacher:
            gap = self._slot("gap", block)
            gap += self._teacher_offset()[:, None]
            grad *= factor
            grad *= gap
        else:
            weight = settings.loss_weights[size] + settings.teaches[size]
            grad *= weight * factor
            if settings.teaches[size]:
                share = settings.teaches[size] * self.log_factor[teacher, block, :, None].exp2()
                grad.addcmul_(self._slot(teacher, block), share, value=-1)
        column, inside = self._targets_in(block)
        grad.scatter_add_(1, column[:, None], (-settings.loss_weights[size] * inside.to(grad.dtype))[:, None])
        scale = 1.0 / (settings.temperature * settings.num_queries)
        if query_grad is not None:
            query_grad.addmm_(grad, self.passages[size][self.blocks[block]].to(grad.dtype), alpha=scale)
        if passage_grad is not None:
            passage_grad[self.blocks[block]].addmm_(grad.t(), self.queries[size], alpha=scale)

    def _teacher_offset(self) -> Tensor:
        """What each row adds to the gaps, which gives the teacher's gradient divided by p_T.  # [rows]"""
        offset = torch.full_like(self.lse[0], self.settings.loss_weights[self.settings.teacher])
        for size in self.settings.students:
            if weight := self.settings.teaches[size]:
                bits = self.lse[size] - self.lse[self.settings.teacher] - self.divergence[size]
                offset += NATS_A_BIT * weight * bits
        return offset

    def _scores(self, size: int, block: int) -> Tensor:
        scores, settings = self._products(size, block), self.settings
        if (pairs := self.pairs[block]) is not None:
            scores[pairs] = EXCLUDED_SCORE
        if settings.filter is not None:
            if size == settings.teacher and not settings.filters_apart:
                self._find_penalty(scores, block)
            # Adding is many times faster than masked_fill_.
            scores += self._slot("penalty", block)
        return scores

    def _products(self, size: int, block: int) -> Tensor:
        passages = self.passages[size][self.blocks[block]].to(self.workspace.dtype)
        scores = self.scratch[: len(self.targets) * len(passages)].view(len(self.targets), len(passages))
        scale = 1.0 / (self.settings.temperature_of(size) * NATS_A_BIT)
        return torch.addmm(scores, self.queries[size], passages.t(), beta=0, alpha=scale, out=scores)

    def _find_penalty(self, scores: Tensor, block: int) -> None:
        """Compute what a block's scores get added at every size: EXCLUDED_SCORE where the filter leaves one out."""
        penalty = self._slot("penalty", block)
        torch.gt(scores, self.ceiling, out=penalty)
        column, inside = self._targets_in(block)
        penalty.scatter_(1, column[:, None], penalty.gather(1, column[:, None]) * ~inside[:, None])
        penalty *= EXCLUDED_SCORE

    def _targets_in(self, block: int) -> tuple[Tensor, Tensor]:
        """Each query's target as a column of the block, and whether it is in the block (else the column is void)."""
        part = self.blocks[block]
        column = (self.targets - part.start).clamp(0, part.stop - part.start - 1)
        return column, column + part.start == self.targets

    def _slot(self, of: int | str, block: int) -> Tensor:
        """The contiguous part of the workspace buffer for a block's matrix: of a size, the gaps or the penalties."""
        settings, part = self.settings, self.blocks[block]
        if of == "gap":
            number = 2
        elif of == "penalty":
            number = settings.matrices - 1
        else:
            number = 0 if of == settings.teacher else 1
        rows, columns = len(self.targets), part.stop - part.start
        begin = rows * part.start if self.keeps_rows else 0
        return self.workspace[number, begin : begin + rows * columns].view(rows, columns)
