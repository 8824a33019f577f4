"""Seeding: what dropout draws follows from the seed alone, on the CPU and on a GPU. Ranks without a GPU are refused."""

from __future__ import annotations

import pytest
import torch

from data.ground.errors import UserError
from data.keyed_random import derive_seed
from trainer.distributed import _take_gpu, seed_torch


def test_seeds_are_torchs_own() -> None:
    seed = derive_seed(1, 2, 3)
    torch.manual_seed(seed)
    expected = torch.rand(8)
    seed_torch(seed)
    assert torch.equal(torch.rand(8), expected)
    seed_torch(seed + 1)
    assert not torch.equal(torch.rand(8), expected)


def test_a_gpu_is_seeded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    seed_torch(5)
    assert seeds == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seed_torch(5)
    assert seeds == [5]


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would say "invalid device ordinal", with a traceback."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    _take_gpu(1)
    assert taken == [1]
    with pytest.raises(UserError, match=r"LOCAL_RANK is 2.*GPUs that this rank sees is 2"):
        _take_gpu(2)
    assert taken == [1]
