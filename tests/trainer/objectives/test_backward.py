"""Micro-batches: every text once, within the budget, with as little padding as cuts of sorted lengths allow.

And gradient caching, which gives the same gradient however many graphs it keeps.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data.keyed_random import derive_seed
from trainer.distributed import World
from trainer.objectives.backward import _START_COST, grad_cache, micro_batches


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


ROWS, WIDTH, CHUNKS = 24, 16, 6
# What the module below keeps of a chunk, in float64: input, states before and after tanh, and what the dropout masks.
CHUNK_BYTES = ROWS // CHUNKS * WIDTH * 8


class Counting:
    """Stands for the engine: counts passes, and backward passes that send something back."""

    def __init__(self, drops: float = 0.0) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(drops), nn.Linear(WIDTH, WIDTH)]
        self.module = nn.Sequential(*layers).double()
        self.world, self.device = World.alone(torch.device("cpu")), torch.device("cpu")
        self.heartbeat: Callable[[str], None] = lambda phase: None
        self.with_graph = self.without = self.backwards = 0

    def __call__(self, rows: Tensor) -> tuple[Tensor, ...]:
        self.with_graph += torch.is_grad_enabled()
        self.without += not torch.is_grad_enabled()
        vectors = self.module(inputs()[rows])
        return vectors, vectors[:, : WIDTH // 2]

    def accumulation(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.backwards += 1
        loss.backward()


def inputs() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def alike() -> list[Tensor]:
    """All rows in chunks of one size."""
    return list(torch.randperm(ROWS, generator=torch.Generator().manual_seed(2)).tensor_split(CHUNKS))


def compared(embeddings: list[Tensor]) -> Tensor:
    """A loss that compares all texts, at both widths."""
    return torch.stack([torch.logsumexp((each @ each.T).tanh(), 1).sum() for each in embeddings]).sum()


def gradient_of(
    graph_bytes: float, *, drops: float = 0.0, seed: int = 7, chunks: list[Tensor] | None = None
) -> tuple[Tensor, Counting]:
    engine: Any = Counting(drops)

    def loss_and_gradients(embeddings: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        leaves = [each.double().requires_grad_() for each in embeddings]
        loss = compared(leaves)
        return {"loss": loss.detach()}, list(torch.autograd.grad(loss, leaves))

    chunks = chunks or alike()
    arguments: dict[str, Any] = dict(embed=engine, loss_and_gradients=loss_and_gradients, seed=seed)
    grad_cache(engine, chunks, **arguments, graph_bytes=graph_bytes)
    return torch.cat([each.grad.flatten() for each in engine.module.parameters()]), engine


def naive_gradient(*, drops: float) -> Tensor:
    """All chunks in one graph, each with its own dropout."""
    engine = Counting(drops)
    parts = []
    for index, rows in enumerate(alike()):
        torch.manual_seed(derive_seed(7, index))
        parts.append(engine(rows))
    compared([torch.cat(each) for each in zip(*parts)]).backward()
    return torch.cat([each.grad.flatten() for each in engine.module.parameters() if each.grad is not None])


@pytest.mark.parametrize("drops", [0.0, 0.3])
@pytest.mark.parametrize("kept", [0, 1, 3, CHUNKS, math.inf])
def test_however_many_graphs_are_kept_the_gradient_is_the_same(kept: float, drops: float) -> None:
    each = CHUNK_BYTES * (2 if not drops else 4)
    found, engine = gradient_of(kept * each, drops=drops)
    # The loss reads float32 embeddings, as training does.
    torch.testing.assert_close(found, naive_gradient(drops=drops), rtol=2e-6, atol=2e-6)
    again = CHUNKS - min(CHUNKS, int(min(kept, CHUNKS)))
    assert engine.backwards == again + (kept > 0)
    assert engine.with_graph == CHUNKS and engine.without == again


def test_another_dropout_is_noticed() -> None:
    found, _ = gradient_of(3 * 4 * CHUNK_BYTES, drops=0.3, seed=8)
    assert float((found - naive_gradient(drops=0.3)).abs().max()) > 1e-3


def test_memory_for_less_than_a_graph_keeps_none() -> None:
    found, engine = gradient_of(CHUNK_BYTES)
    torch.testing.assert_close(found, naive_gradient(drops=0.0), rtol=2e-6, atol=2e-6)
    assert engine.with_graph == CHUNKS + 1 and engine.without == CHUNKS - 1  # the first was tried
    assert engine.backwards == CHUNKS


def test_a_graph_larger_than_those_before_it_is_given_up() -> None:
    larger = torch.arange(ROWS).split([2, 6, 4, 4, 4, 4])
    found, engine = gradient_of(2 * CHUNK_BYTES * 1.6, chunks=list(larger))
    torch.testing.assert_close(found, naive_gradient(drops=0.0), rtol=2e-6, atol=2e-6)
    assert engine.with_graph == 1 + 1 + 5  # the first is kept, the second is tried
    assert engine.backwards == 1 + 5
