"""Flat texts as padded batches, for restatements that read them as Hugging Face's models do."""

from __future__ import annotations

import torch
from torch import Tensor

from data.collate import Texts


def pad_flat(values: Tensor, offsets: Tensor, rows: Tensor, *, fill: float) -> Tensor:
    """Take `rows` (int64 [k]) of flat `values` [T] and pad them at the right with `fill`: [k, longest]."""
    starts = offsets[rows]  # [k]
    lengths = offsets[rows + 1] - starts
    longest = int(lengths.max()) if len(rows) else 0
    columns = torch.arange(longest, device=values.device)
    inside = columns < lengths[:, None]  # [k, longest]
    padded = torch.full((len(rows), longest), fill, dtype=values.dtype, device=values.device)
    padded[inside] = values[(starts[:, None] + columns)[inside]]
    return padded


def pad_texts(texts: Texts, rows: Tensor, *, pad_id: int) -> tuple[Tensor, Tensor]:
    """(input_ids, attention_mask) of the texts `rows`, both int64 [k, length of the longest]."""
    input_ids = pad_flat(texts.tokens, texts.offsets, rows, fill=pad_id).long()
    columns = torch.arange(input_ids.shape[1], device=input_ids.device)
    return input_ids, (columns < texts.lengths[rows][:, None]).long()
