"""Embeddings and token tables in fewer bits, in the formats of sentence-transformers.

- int8 embeddings: 256 equal steps between each dimension's smallest and largest value in calibration vectors. The codes
  equal those of `quantize_embeddings(precision="int8", ranges=…)`; a code stands for the middle of its step.
- binary embeddings: one bit for each dimension, set if the value is above 0. As vectors of ±1, their dot product is
  d − 2 · Hamming distance, so the ordinary exact search ranks by Hamming distance.
- an int8 token table: codes −127..127 and one scale for each row, in the layout of model2vec's vocabulary-quantised
  files; StaticEmbedding multiplies codes and scales when it loads them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_STEPS = 255


def int8_ranges(vectors: np.ndarray) -> np.ndarray:
    """The smallest and largest value of each dimension: vectors [n, d] -> float32 [2, d]."""
    return np.stack([vectors.min(0), vectors.max(0)]).astype(np.float32)


def to_int8(vectors: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """The codes of vectors, int8 [n, d]; values outside the ranges get the outermost codes."""
    start, step = _start_and_step(ranges)
    step = np.where(step == 0, np.float32(1), step)  # a dimension of one value
    return (np.clip(np.floor((vectors - start) / step), 0, _STEPS) - 128).astype(np.int8)


def from_int8(codes: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """The values that codes stand for, float32 [n, d]; the error within the ranges is at most half a step."""
    start, step = _start_and_step(ranges)
    return (start + (codes.astype(np.float32) + 128.5) * step).astype(np.float32)


def _start_and_step(ranges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return ranges[0], (ranges[1] - ranges[0]) / _STEPS


def to_signs(vectors: np.ndarray) -> np.ndarray:
    """The bits of binary embeddings as ±1, float32 [n, d]."""
    return np.where(vectors > 0, np.float32(1), np.float32(-1))


def int8_table(table: Tensor) -> tuple[Tensor, Tensor]:
    """A token table [V, d] as codes int8 [V, d] and scales float32 [V]; the error is at most half a scale."""
    table = table.detach().float()
    scales = table.abs().amax(1) / 127
    codes = (table / torch.where(scales > 0, scales, 1.0)[:, None]).round().to(torch.int8)
    return codes, scales
