"""The spread-out loss against its formula in float64, whole and in the shares of several ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.trainer.losses.largest import Largest
from trainer.losses import gram as gram_module
from trainer.losses.gram import ROWS_AT_ONCE, gram_matrix
from trainer.losses.spread import add_spread_gradients

COUNT, WEIGHT = 13, 2.5
SHARES = [(0, 13)], [(0, 4), (4, 4), (4, 13)], [(0, 12), (12, 13)]  # of the texts, rank by rank


def vectors(count: int = COUNT, dim: int = 6) -> Tensor:
    torch.manual_seed(0)
    return F.normalize(torch.randn(count, dim, dtype=torch.float64), dim=1)


def naive(x: Tensor) -> Tensor:
    terms = [(x[i] @ x[j]) ** 2 for i in range(len(x)) for j in range(len(x)) if i != j]
    return torch.stack(terms).sum() / (len(x) * (len(x) - 1))


def computed(x: Tensor, shares: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """The value and the weighted gradient, put together from the shares as the ranks do."""
    gram, gradient = torch.stack([gram_matrix(x[a:b]) for a, b in shares]).sum(0), torch.zeros_like(x)
    values = [
        add_spread_gradients(x[a:b], gradient[a:b], gram=gram, weight=WEIGHT, num_texts=len(x)) for a, b in shares
    ]
    return torch.stack(values).sum(), gradient


@pytest.mark.parametrize("at_once", [3, 4096])
@pytest.mark.parametrize("shares", SHARES, ids=["one rank", "three, one without texts", "two, one text"])
def test_it_is_its_formula(shares: list[tuple[int, int]], at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram_module, "ROWS_AT_ONCE", at_once)
    x = vectors().requires_grad_()
    expected = naive(x)
    (wanted,) = torch.autograd.grad(WEIGHT * expected, x)
    value, gradient = computed(x.detach(), shares)
    assert float(value) == pytest.approx(float(expected.detach()), rel=1e-12)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-14)


def test_a_text_is_not_compared_with_itself() -> None:
    """Negative control: the mean over all pairs is another number. Orthogonal texts are spread, a single one too."""
    x = vectors()
    value, _ = computed(x, SHARES[0])
    assert float(value) != pytest.approx(float((x @ x.T).square().mean()), rel=1e-2)
    for spread_out in (torch.eye(4, dtype=torch.float64), vectors(1)):
        value, gradient = computed(spread_out, [(0, len(spread_out))])
        assert float(value) == pytest.approx(0.0, abs=1e-15) and float(gradient.abs().max()) < 1e-15
    value, _ = computed(x[:1].expand(5, -1).contiguous(), [(0, 5)])
    assert float(value) == pytest.approx(1.0)


def test_memory_does_not_grow_with_the_batch() -> None:
    """Beside the vectors and their gradient: d × d, and float64 copies of so many rows. No matrix of all pairs."""
    counted = []
    for count in (2 * ROWS_AT_ONCE, 8 * ROWS_AT_ONCE):
        x = vectors(count, dim=4).float()
        gradient = torch.zeros_like(x)
        with Largest() as largest:
            add_spread_gradients(x, gradient, gram=gram_matrix(x), weight=1.0, num_texts=count)
        counted.append(largest.elements)
    assert counted == [4 * ROWS_AT_ONCE] * 2
