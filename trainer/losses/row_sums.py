"""What the rows of a tile need to know of all their columns: maxima, sums, and the losses that follow from them."""

from __future__ import annotations

import copy
from math import log

import torch
from torch import Tensor

from trainer.losses.tile_settings import TileSettings

# Finite, so that an excluded passage's score difference to the teacher's is 0 and not NaN.
EXCLUDED_SCORE = -1e30
# Scores are in bits inside the tiles, p = 2^(s − lse): on a CPU exp2 takes half of exp's time. Where the result is
# nearly 0, as for most passages at a low temperature, exp takes many times its usual time.
NATS_A_BIT = log(2)
STATISTICS = 4  # numbers for each query, block and size


class RowSums:
    """The sums of rows over their columns at each size, block by block; `sum_up` takes the blocks together.

    For each size, block and row, in bits: m = max s, Σ 2^(s − m), Σ 2^(s_T − m_T) (s − m), and the logarithm of
    2^m / Z, the factor that turns the block's exponentials into shares of the row. For each size and row: the
    positive's score, and the log-sum-exp, InfoNCE and KL that `sum_up` computes.
    """

    def __init__(self, settings: TileSettings, *, sizes: int, blocks: int, rows: int, like: Tensor) -> None:
        self.settings = settings
        self.peak, self.mass, self.cross, self.log_factor = like.new_zeros(STATISTICS, sizes, blocks, rows)
        self.positive, self.lse, self.nce, self.divergence = like.new_zeros(4, sizes, rows)

    @classmethod
    def of_no_columns(cls, settings: TileSettings, *, sizes: int, rows: int, like: Tensor) -> RowSums:
        """Sums in one block, to which `include` adds columns."""
        sums = cls(settings, sizes=sizes, blocks=1, rows=rows, like=like)
        sums.peak.fill_(EXCLUDED_SCORE)
        return sums

    def include(self, other: RowSums) -> None:
        """Add the blocks of `other`, which are further columns of the same rows, to these sums of one block."""
        peaks = torch.cat([self.peak, other.peak], dim=1)  # [sizes, blocks, rows]
        masses = torch.cat([self.mass, other.mass], dim=1)
        crosses = torch.cat([self.cross, other.cross], dim=1)
        teacher, top = self.settings.teacher, peaks.amax(1, keepdim=True)
        lower = peaks - top
        shares = lower.exp2()
        self.peak = top
        self.mass = (shares * masses).sum(1, keepdim=True)
        self.cross = (shares[teacher] * (crosses + lower * masses[teacher])).sum(1, keepdim=True)
        self.positive += other.positive  # 0 where the positive is not among these columns

    def shared_by(self, blocks: int) -> RowSums:
        """These sums of one block for each of so many blocks, which have the row's maximum then for their own."""
        shared = copy.copy(self)
        shared.peak, shared.log_factor = (each.expand(-1, blocks, -1) for each in (self.peak, self.log_factor))
        return shared

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

    def losses(self, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sums of the rows' InfoNCE and KL at each size, in bits. weights: [rows]; None where all are 1."""
        if weights is None:
            return self.nce.sum(1), self.divergence.sum(1)
        return (self.nce * weights).sum(1), (self.divergence * weights).sum(1)
