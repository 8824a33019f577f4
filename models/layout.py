"""Where the tokens of flat texts stand in a padded batch, and the way there and back.

A batch reaches a model flat: the ids of all texts one after another, and the offset at which each text begins. The
model lays the texts out once, packed or padded, as its attention needs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """B flat texts of T tokens as a batch [B, L], padded at the right.

    offsets: int64 [B + 1], where each text begins, on the device of the tokens. came_with: the mask [B, L] of texts
    that came padded, on either side; the batch then has their L. None means the length of the longest text. Everything
    else is computed when it is first read, because some of it waits for the device, and a token table needs none of it.
    """

    offsets: Tensor
    came_with: Tensor | None = None

    @classmethod
    def of_mask(cls, attention_mask: Tensor) -> Layout:
        """Of texts that are padded already. attention_mask: [B, L], 1 for tokens, 0 for padding, on either side."""
        return cls(F.pad(attention_mask.sum(1).cumsum(0), (1, 0)), attention_mask)

    @property
    def batch(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each text, int64 [B]."""
        return self.offsets.diff()

    @cached_property
    def longest(self) -> int:
        return int(self.lengths.max())

    @property
    def length(self) -> int:
        """L."""
        return self.longest if self.came_with is None else self.came_with.shape[1]

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token within its text, int64 [T]."""
        count = int(self.offsets[-1])
        return torch.arange(count, device=self.offsets.device) - self._of_each_token(self.offsets[:-1], count)

    @cached_property
    def places(self) -> Tensor:
        """The index of each token in the flattened batch, int64 [T]."""
        starts = torch.arange(self.batch, device=self.offsets.device) * self.length
        return self._of_each_token(starts, len(self.positions)) + self.positions

    def _of_each_token(self, of_texts: Tensor, count: int) -> Tensor:
        return of_texts.repeat_interleave(self.lengths, output_size=count)

    @cached_property
    def mask(self) -> Tensor:
        """int64 [B, L], 1 for tokens, 0 for padding."""
        return (torch.arange(self.length, device=self.offsets.device) < self.lengths[:, None]).long()

    @cached_property
    def first(self) -> Tensor:
        """bool [T], the first token of each text."""
        return self.positions == 0

    @cached_property
    def last(self) -> Tensor:
        """bool [T], the last token of each text."""
        return self.first.roll(-1)

    def after(self, counts: Tensor) -> Tensor:
        """bool [T], the tokens of each text after its first ones, and its last token in any case.

        counts: int64 [B], how many first tokens of each text are left out.
        """
        counts = torch.minimum(counts, self.lengths - 1)
        return self.positions >= self._of_each_token(counts, len(self.positions))

    def pack(self, values: Tensor) -> Tensor:
        """Values that are padded as the texts came, [B, L, ...] -> [T, ...]."""
        assert self.came_with is not None, "these texts came flat"
        return values[self.came_with.bool()]

    def pad(self, values: Tensor, fill: float = 0) -> Tensor:
        """[T, ...] -> [B, L, ...], `fill` at padding."""
        padded = values.new_full((self.batch * self.length, *values.shape[1:]), fill)
        return padded.index_copy(0, self.places, values).unflatten(0, (self.batch, self.length))
