"""The positions that each position may read in enhanced decoding: a random sample for every row, drawn on the device.

Row i sees position 0 and each other position with the given probability, never itself and never padding (RetroMAE's
position-specific attention mask; SentMAE eq. 7). The draws are a hash of (the text's key, row, column), so they are the
same in any batch, micro-batch or rank and on any device. The loader sends only one key for each text, and a few
operations on whole tensors make the draws. The hash is SplitMix64 in two steps: the text's stream gives each row's key,
and every 64-bit word of a row's stream serves four columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WRAP = 1 << 64
_GAMMA = 0x9E3779B97F4A7C15 - _WRAP  # int64 arithmetic wraps modulo 2^64, as the hash requires
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - _WRAP
_MULTIPLIER_2 = 0x94D049BB133111EB - _WRAP
_COLUMNS_A_WORD = 4  # 16 bits each


@torch.no_grad()
def visible_positions(keys: Tensor, attention_mask: Tensor, *, share: float) -> Tensor:
    """The visibility mask, bool [B, L (row), L (column)].

    keys: int64 [B], one for each text; attention_mask: [B, L], 1 for tokens. share: the probability with which a row
    sees another position, in steps of 2^-16. The draws do not depend on L, and so not on the padding.
    """
    length = attention_mask.shape[1]
    steps = torch.arange(1, length + 1, device=keys.device) * _GAMMA
    rows = _mix64(keys[:, None] + steps)  # [B, L]
    words = _mix64(rows[..., None] + steps[: -(-length // _COLUMNS_A_WORD)])  # [B, L, L / 4]
    draws = words.view(torch.int16)[..., :length]
    visible = draws < min(round(share * 2**16), 2**16 - 1) - 2**15
    visible &= attention_mask.to(torch.bool)[:, None, :]
    visible[:, :, 0] = True
    visible.diagonal(dim1=1, dim2=2).fill_(False)
    return visible


def _mix64(values: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place: every input bit reaches every output bit."""
    values ^= _shift_right(values, 30)
    values *= _MULTIPLIER_1
    values ^= _shift_right(values, 27)
    values *= _MULTIPLIER_2
    values ^= _shift_right(values, 31)
    return values


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; the shift of int64 would copy the sign bit."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)
