"""Handling of losses and gradients that are not finite, and of losses that jump.

A step whose global loss or gradient is not finite is skipped on all ranks together: weights and moments stay as they
were, and its samples count as read. After `max_skipped_steps` skipped steps in a row the run gives up and leaves the
last checkpoint as it was. A loss is called a spike when it lies more than `spike_deviations` standard deviations above
the running mean of the last steps; spikes are flagged, not skipped. Every decision here depends on global numbers
alone, so all ranks decide alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from data.ground.errors import CommandEnd

Fault = Literal["non-finite loss", "non-finite gradient", "spike"]

# At each step, the mean and the variance of losses keep this share of what they were: they look back about 50 steps.
_KEPT = 0.98
# With fewer losses than this, a mean says nothing.
_FIRST_LOSSES = 20


class GaveUp(CommandEnd):
    """Too many steps in a row were skipped for training to make sense; the message is one sentence."""

    exit_code = 3


@dataclass
class Health:
    """The state that is kept from step to step; it is saved with checkpoints, and equal on all ranks."""

    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    losses: int = 0  # the number of losses in the mean and the variance
    loss_mean: float = 0.0
    loss_variance: float = 0.0

    def observe(self, loss: float, *, grad_norm: float, spike_deviations: float) -> Fault | None:
        """Take in a step's global loss and gradient norm. Returns what is wrong with them, or None.

        spike_deviations: 0 means that no loss is a spike. In the mean, a spike has the value of the line it crossed.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.skipped_steps += 1
            self.skipped_in_a_row += 1
            return "non-finite loss" if not math.isfinite(loss) else "non-finite gradient"
        self.skipped_in_a_row = 0
        line = self.loss_mean + spike_deviations * math.sqrt(self.loss_variance)
        spiked = bool(spike_deviations) and self.losses >= _FIRST_LOSSES and loss > line
        counted = min(loss, line) if spiked else loss
        self.losses += 1
        # With few losses this is a plain mean, so that the first loss has no larger weight than the others.
        rate = max(1.0 - _KEPT, 1.0 / self.losses)
        change = counted - self.loss_mean
        self.loss_mean += rate * change
        self.loss_variance = (1.0 - rate) * (self.loss_variance + rate * change * change)
        return "spike" if spiked else None
