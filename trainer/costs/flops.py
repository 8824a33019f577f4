"""Model FLOPs utilisation: the operations of trainer/costs/counts.py for a batch's tensors, and the device's peak."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from models.sizes import Size
from trainer.costs import counts
from trainer.costs.counts import FORWARD_AND_BACKWARD, Shape, needed_passes
from trainer.costs.gpus import listed_peak_flops

__all__ = [
    "FORWARD_AND_BACKWARD",
    "Shape",
    "bf16_slowdown",
    "encoder_flops",
    "masked_flops",
    "needed_passes",
    "peak_flops",
    "sizes_flops",
]

log = logging.getLogger(__name__)


def encoder_flops(shape: Shape, lengths: Tensor) -> float:
    """One forward pass over texts of these lengths (int64 [n]), padding not counted."""
    return counts.encoder_flops(shape, _texts(shape, lengths))


def sizes_flops(shape: Shape, lengths: Tensor, sizes: Sequence[Size]) -> float:
    """The forward passes that these sizes take over texts of these lengths (int64 [n]), padding not counted."""
    return counts.sizes_flops(shape, _texts(shape, lengths), sizes)


def masked_flops(
    shape: Shape,
    lengths: Tensor,
    *,
    encoder_rows: int,
    decoder_rows: int,
    sizes: Sequence[Size],
    enhanced: bool = False,
) -> float:
    """Forward of the pre-training loss over texts of these lengths (int64 [n])."""
    return counts.masked_flops(
        shape,
        _texts(shape, lengths),
        encoder_rows=encoder_rows,
        decoder_rows=decoder_rows,
        sizes=sizes,
        enhanced=enhanced,
    )


def _texts(shape: Shape, lengths: Tensor) -> counts.Texts:
    found = counts.Texts(len(lengths), float(lengths.sum()), float((lengths.double() ** 2).sum()))
    if not shape.reaches:
        return found
    # How much of a text a window lets see does not follow from sums.
    groups = zip(*(each.tolist() for each in lengths.unique(return_counts=True)))
    return dataclasses.replace(found, groups=tuple((count, length) for length, count in groups))


@functools.cache
def peak_flops(device: torch.device) -> float:
    """Operations a second: the maker's figure for a known GPU, else a large product measured now."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        listed = listed_peak_flops(name)
        if listed is not None:
            return listed
        log.info("no data sheet of %s is listed; mfu is relative to the speed of a large matrix product", name)
        return 2 * 4096**3 / _product_seconds(4096, torch.bfloat16, device)
    dtype = torch.float32 if bf16_slowdown(device) > 1 else torch.bfloat16
    return 2 * 1024**3 / _product_seconds(1024, dtype, device)


@functools.cache
def bf16_slowdown(device: torch.device) -> float:
    """How many times as long a bf16 product takes as a float32 one: up to a hundred on CPUs without bf16 units."""
    return _product_seconds(256, torch.bfloat16, device) / _product_seconds(256, torch.float32, device)


def _product_seconds(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """The shortest time of five products of square matrices."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        (a @ b).float().sum().item()
        best = min(best, time.perf_counter() - begin)
    return best
