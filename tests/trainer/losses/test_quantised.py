"""What is trained are the quantisers of the evaluation, and the gradient through them is autograd's of the formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.quantisation import from_int8, int8_ranges, to_int8
from models.quantisation import to_signs as evaluated_signs
from trainer.losses.quantised import STEPS, extremes, sign_slopes, to_signs, to_steps
from trainer.losses.unit_vectors import normalize_, unnormalized_gradient_

COUNT, DIM = 40, 12


def unit_vectors(count: int = COUNT, dim: int = DIM, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """With a dimension that is far from 0 in every text, as encoders have."""
    made = torch.randn(count, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    made[:, 3] -= 4.0
    return F.normalize(made, dim=1).to(dtype)


def test_signs_are_those_of_an_evaluation() -> None:
    vectors = unit_vectors(dtype=torch.float32)
    vectors[0, 0] = 0.0
    assert to_signs(vectors).numpy().tolist() == evaluated_signs(vectors.numpy()).tolist()


def test_steps_are_those_of_an_evaluation() -> None:
    """But for the largest value of a dimension, which may stand half a step below itself or half a step above."""
    vectors = unit_vectors(dtype=torch.float32)
    ranges = int8_ranges(vectors.numpy())
    expected = torch.from_numpy(from_int8(to_int8(vectors.numpy(), ranges), ranges))
    largest = vectors == vectors.amax(0)
    found = to_steps(vectors, extremes(vectors))
    assert int(largest.sum()) == DIM
    torch.testing.assert_close(found[~largest], expected[~largest], rtol=0, atol=1e-6)
    step = torch.from_numpy((ranges[1] - ranges[0]) / STEPS)
    torch.testing.assert_close(found.amax(0), vectors.amax(0) - step / 2, rtol=0, atol=1e-6)
    # Negative control: with the ranges of half of the vectors, many stand elsewhere.
    others = to_steps(vectors, extremes(vectors[::2]))
    assert (others - expected).abs().amax() > step.amin() / 2


def test_ranges_of_ranks_together_are_those_of_all_vectors() -> None:
    vectors = unit_vectors()
    parts = [extremes(vectors[a:b]) for a, b in ((0, 7), (7, 7), (7, COUNT))]
    assert torch.equal(torch.stack(parts).amax(0), extremes(vectors))
    assert torch.equal(to_steps(vectors[:1], extremes(vectors[:1])), vectors[:1])  # a single text is its own range


def naive(vectors: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """hard(u) and soft(u)."""
    if precision == "binary":
        return torch.where(vectors > 0, 1.0, -1.0).double(), torch.tanh(vectors.shape[1] ** 0.5 * vectors)
    low, high = vectors.detach().amin(0), vectors.detach().amax(0)
    step = (high - low) / 255
    return low + (((vectors.detach() - low) / step).floor().clamp(max=254) + 0.5) * step, vectors


def score(y: Tensor) -> Tensor:
    """Any loss of cosines."""
    y = F.normalize(y, dim=1)
    return F.cross_entropy(y[:8] @ y[8:].T / 0.1, torch.arange(8))


def straight_through(hard: Tensor, soft: Tensor, vectors: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(score(hard + soft - soft.detach()), vectors)
    return gradient


@pytest.mark.parametrize("precision", ["int8", "binary"])
def test_the_gradient_is_that_of_the_formula(precision: str) -> None:
    """As a term computes it: of the quantised unit vectors, through their lengths, times the slopes of soft."""
    vectors = unit_vectors().requires_grad_()
    wanted = straight_through(*naive(vectors, precision), vectors)
    unit = vectors.detach()
    quantised = to_signs(unit) if precision == "binary" else to_steps(unit, extremes(unit))
    torch.testing.assert_close(quantised, naive(vectors, precision)[0].detach(), rtol=0, atol=1e-12)
    lengths = normalize_(quantised)
    leaf = quantised.clone().requires_grad_()
    (flow,) = torch.autograd.grad(score(leaf), leaf)
    unnormalized_gradient_(flow, quantised, lengths)
    slopes = sign_slopes(unit) if precision == "binary" else torch.ones_like(unit)
    torch.testing.assert_close(flow * slopes, wanted, rtol=1e-10, atol=1e-12)
    # Negative controls: the float vectors' own gradient, and another slope.
    (plain,) = torch.autograd.grad(score(vectors), vectors)
    worst = wanted.abs().max()
    assert (plain - wanted).abs().max() > 1e-3 * worst
    assert (flow * sign_slopes(unit / 2) - wanted).abs().max() > 1e-2 * worst


def test_entries_of_unit_vectors_are_told_apart_by_their_slopes() -> None:
    """At any number of dimensions, as sech² of the entry over the root mean square; a plain tanh is a straight line."""
    for dim in (32, 384):
        unit = unit_vectors(200, dim)
        relative = sign_slopes(unit) / dim**0.5
        for times, slope in ((0.0, 1.0), (1.0, 0.42), (2.0, 0.0707)):
            near = (unit.abs() * dim**0.5 - times).abs() < 0.02
            assert near.any()
            assert relative[near].mean() == pytest.approx(slope, abs=0.02)
    plain = 1 - torch.tanh(unit[:, 4:]).square()  # negative control, at 384 dimensions
    assert plain.min() > 0.9
