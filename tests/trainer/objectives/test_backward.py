"""Micro-batches: every text once, within the budget, with as little padding as cuts of sorted lengths allow."""

from __future__ import annotations

import itertools

import pytest
import torch

from trainer.objectives.backward import _START_COST, micro_batches


def lengths_of(seed: int, count: int, longest: int = 64) -> torch.Tensor:
    return torch.randint(1, longest + 1, (count,), generator=torch.Generator().manual_seed(seed))


def padded_tokens(lengths: torch.Tensor, chunks: list[torch.Tensor]) -> int:
    return sum(len(rows) * int(lengths[rows].max()) for rows in chunks)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("budget", [1, 64, 200, 10_000])
@pytest.mark.parametrize("count", [0, 1, 7, 150])
def test_every_text_once_within_the_budget(count, budget, packed):
    lengths = lengths_of(count, count)
    chunks = micro_batches(lengths, token_budget=budget, packed=packed)
    assert sorted(torch.cat([*chunks, torch.empty(0, dtype=torch.int64)]).tolist()) == list(range(count))
    longest_first = [int(lengths[rows].max()) for rows in chunks]
    assert longest_first == sorted(longest_first, reverse=True)
    for rows in chunks:
        tokens = int(lengths[rows].sum()) if packed else len(rows) * int(lengths[rows].max())
        assert tokens <= budget or len(rows) == 1


@pytest.mark.parametrize("seed", range(5))
def test_no_other_cuts_are_cheaper(seed):
    lengths = lengths_of(seed, 9)
    budget = 150
    ordered = lengths.sort(descending=True).values
    best = float("inf")
    for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, 9), k) for k in range(9)):
        parts = ordered.tensor_split(cuts)
        if all(len(part) * int(part[0]) <= budget for part in parts):
            cost = sum(len(part) * int(part[0]) for part in parts) + len(parts) * budget * _START_COST
            best = min(best, cost)
    chunks = micro_batches(lengths, token_budget=budget)
    assert padded_tokens(lengths, chunks) + len(chunks) * budget * _START_COST == pytest.approx(best)


def test_little_is_padding():
    lengths = lengths_of(0, 256, longest=512)
    chunks = micro_batches(lengths, token_budget=8 * 512)
    assert 1 - int(lengths.sum()) / padded_tokens(lengths, chunks) < 0.03
    in_turn = list(torch.arange(256).split(8))
    assert 1 - int(lengths.sum()) / padded_tokens(lengths, in_turn) > 0.3
