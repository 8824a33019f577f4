"""Passages in a ring of ranks: the loss and gradients of the gather, in less memory (trainer/ring.py)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.trainer.objectives.ring_worker import terms_of
from trainer.costs.exchange import RING_SHARE_HELD, ring_gradients_sent, ring_vectors_sent

CASES = list(terms_of(in_a_ring=True))


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, launcher: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ring_worker.py writes, on so many ranks, of which one of four has no texts."""
    output = tmp_path_factory.mktemp("ring") / "found.json"
    run_ranks("tests.trainer.objectives.ring_worker", str(output), ranks=request.param)
    return {"ranks": request.param, **json.loads(output.read_text())}


@pytest.mark.parametrize("case", CASES)
def test_the_ring_equals_the_gather(case: str, found: dict[str, Any]) -> None:
    """Losses and gradients in float64, with unequal numbers of passages."""
    assert found[case] < 1e-12


@pytest.mark.parametrize("lossy", ["first_round", "second_round"])
def test_a_chunk_that_is_left_out_is_noticed(lossy: str, found: dict[str, Any]) -> None:
    """Negative control."""
    assert found[f"without a chunk in the {lossy}"] > 1e-3


def test_what_a_rank_holds_and_sends(found: dict[str, Any]) -> None:
    """Beside its own vectors and gradients, in float64: the share of a rank that travels, against everyone's."""
    ranks, own = found["ranks"], 8 * 4 * 64 * (64 + 128)
    ring, gather = max(found["ring held"]), max(found["gather held"])
    assert gather > 2 * ranks * own
    assert own < ring < 2.2 * RING_SHARE_HELD * own
    assert ring / gather < (0.4 if ranks == 2 else 0.25)
    assert set(found["ring sent"]) == {own * (ring_vectors_sent(ranks) + ring_gradients_sent(ranks))}
    assert set(found["gather sent"]) == {own * 2 * (ranks - 1)}
