"""The closed form: ridge regression maps the pooled states of a depth into the teacher's space."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from trainer.resizing.closed_form import RIDGES, fit_heads


def states_and_targets(noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """States of which the targets are a linear map with an offset, up to noise."""
    torch.manual_seed(0)
    states = torch.randn(400, 12) * torch.rand(12) * 5 + torch.randn(12)
    targets = states @ torch.randn(12, 6) + 3 + noise * torch.randn(400, 6)
    return states, F.normalize(targets, dim=1)


def test_a_head_is_the_solution_of_its_normal_equations() -> None:
    """Of standardised states and an unshrunk offset, restated with a plain solver."""
    states, targets = states_and_targets(0.5)
    found = fit_heads({3: states}, targets, held_out=100)[3]
    fitted, wanted = states[:300].double(), targets[:300].double()
    scaled = (fitted - fitted.mean(0)) / fitted.std(0, correction=0)
    ones = torch.cat([scaled, torch.ones(300, 1, dtype=torch.float64)], dim=1)
    penalty = found.ridge * torch.eye(13, dtype=torch.float64)
    penalty[-1, -1] = 0.0
    solution = torch.linalg.solve(ones.T @ ones + penalty, ones.T @ wanted)
    others = (states[300:].double() - fitted.mean(0)) / fitted.std(0, correction=0)
    expected = others @ solution[:-1] + solution[-1]
    with torch.no_grad():
        torch.testing.assert_close(found.head(states[300:]).double(), expected, rtol=1e-4, atol=1e-5)
    cosine = float(F.cosine_similarity(expected, targets[300:].double()).mean())
    assert found.cosine == pytest.approx(cosine, abs=1e-9)


def test_the_ridge_is_the_best_of_those_tried_on_texts_held_out() -> None:
    states, targets = states_and_targets(4.0)
    few = fit_heads({1: states[:75]}, targets[:75], held_out=60)[1]
    assert few.ridge in RIDGES and few.ridge > RIDGES[0]  # fifteen texts for twelve columns: shrinking helps


def test_a_map_that_exists_is_found_and_noise_is_not() -> None:
    states, targets = states_and_targets(0.0)
    assert fit_heads({1: states}, targets, held_out=100)[1].cosine > 0.97
    control = fit_heads({1: states}, targets[torch.randperm(400)], held_out=100)[1]
    assert control.cosine < 0.97 - 0.05


def test_a_column_that_never_changes_does_no_harm() -> None:
    states, targets = states_and_targets(0.1)
    states[:, 0] = 7.0
    head = fit_heads({1: states}, targets, held_out=100)[1].head
    assert torch.isfinite(head.weight).all() and torch.isfinite(head.bias).all()
