"""The gradient through the normalisation, against autograd's in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.trainer.losses.largest import Largest
from trainer.losses import gram as gram_module
from trainer.losses.gram import ROWS_AT_ONCE
from trainer.losses.unit_vectors import normalize_, unnormalized_gradient_


@pytest.mark.parametrize("at_once", [3, 4096])
def test_the_gradient_is_autograds(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram_module, "ROWS_AT_ONCE", at_once)
    torch.manual_seed(0)
    vectors, given = torch.randn(2, 13, 6, dtype=torch.float64)
    vectors.requires_grad_()
    (wanted,) = torch.autograd.grad(F.normalize(vectors, dim=1), vectors, given)
    unit, gradient = vectors.detach().clone(), given.clone()
    lengths = normalize_(unit)
    unnormalized_gradient_(gradient, unit, lengths)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-14)
    # Negative control: without what a longer vector would change, it is another gradient.
    assert float((given / lengths - wanted).abs().max()) > 1e-2


def test_memory_does_not_grow_with_the_batch() -> None:
    """No products of all rows: vecdot makes those of so many rows, and then adds them."""
    made = []
    for count in (2 * ROWS_AT_ONCE, 8 * ROWS_AT_ONCE):
        unit, gradient = torch.randn(2, count, 4)
        lengths = torch.ones(count, 1)
        with Largest() as largest:
            unnormalized_gradient_(gradient, unit, lengths)
        made.append(largest.elements)
    assert made == [4 * ROWS_AT_ONCE] * 2
