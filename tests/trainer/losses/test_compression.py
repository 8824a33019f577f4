"""ESE's distance to the principal components against its formula in float64, whole and in the shares of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.trainer.losses.largest import Largest
from trainer.losses import gram as gram_module
from trainer.losses.compression import add_compression_gradients, principal_directions
from trainer.losses.gram import ROWS_AT_ONCE, gram_matrix

COUNT, WIDTH, DIM, WEIGHT = 40, 9, 4, 2.5
SHARES = [(0, 40)], [(0, 4), (4, 4), (4, 40)], [(0, 39), (39, 40)]  # of the texts, rank by rank


def vectors(count: int = COUNT, *, seed: int = 0) -> Tensor:
    """Whole vectors of one layer, with two outlying dimensions, as encoders' have."""
    torch.manual_seed(seed)
    made = torch.randn(count, WIDTH, dtype=torch.float64) / 2
    return made + torch.tensor([0.0, 1.5, 0, 0, 0, 0, -2.0, 0, 0])


def targets(whole: Tensor, dim: int) -> Tensor:
    """PCA_k by the singular values of softmax(mᵀm/√d); signs as targets agree more with the coordinates."""
    u, s, _ = torch.linalg.svd((whole.T @ whole / whole.shape[1] ** 0.5).softmax(-1))
    found = whole @ (u[:, :dim] @ torch.diag(s[:dim]))
    return found * (found * whole[:, :dim]).sum(0).sign()


def naive(x: Tensor, whole: Tensor, temperature: float) -> Tensor:
    taught = targets(whole, x.shape[1])
    divergence = F.kl_div((x / temperature).log_softmax(1), (taught / temperature).softmax(1), reduction="batchmean")
    return F.mse_loss(x, taught) + temperature * divergence


def computed(whole: Tensor, shares: list[tuple[int, int]], temperature: float, dim: int = DIM) -> tuple[Tensor, Tensor]:
    """The value and the weighted gradient, put together from the shares as the ranks do."""
    directions = principal_directions(torch.stack([gram_matrix(whole[a:b]) for a, b in shares]).sum(0), dim)
    gradient = whole.new_zeros(len(whole), dim)
    values = [
        add_compression_gradients(
            whole[a:b, :dim],
            whole[a:b],
            gradient[a:b],
            directions=directions,
            temperature=temperature,
            weight=WEIGHT,
            num_texts=len(whole),
        )
        for a, b in shares
    ]
    return torch.stack(values).sum(), gradient


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("at_once", [3, 4096])
@pytest.mark.parametrize("shares", SHARES, ids=["one rank", "three, one without texts", "two, one text"])
def test_it_is_its_formula(
    shares: list[tuple[int, int]], at_once: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gram_module, "ROWS_AT_ONCE", at_once)
    whole = vectors()
    x = whole[:, :DIM].clone().requires_grad_()
    expected = naive(x, whole, temperature)
    (wanted,) = torch.autograd.grad(WEIGHT * expected, x)
    value, gradient = computed(whole, shares, temperature)
    assert float(value) == pytest.approx(float(expected.detach()), rel=1e-10)
    torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)


def test_other_components_are_noticed() -> None:
    """Negative controls: each half's own components, covariances in place of their softmax, another T."""
    whole = vectors()
    value, _ = computed(whole, SHARES[0], 1.0)
    halves = [computed(whole[part], [(0, COUNT // 2)], 1.0)[0] for part in (slice(0, 20), slice(20, 40))]
    assert float(value) != pytest.approx(float(torch.stack(halves).mean()), rel=1e-3)
    u, s, _ = torch.linalg.svd(whole.T @ whole)
    plain = F.mse_loss(whole[:, :DIM], whole @ (u[:, :DIM] * s[:DIM]))
    assert float(value) != pytest.approx(float(plain), rel=1e-2)
    assert float(value) != pytest.approx(float(naive(whole[:, :DIM], whole, 2.0)), rel=1e-2)


def test_signs_are_the_nearer_ones_and_the_same_for_any_order_of_texts() -> None:
    whole = vectors()
    directions = principal_directions(gram_matrix(whole), DIM)
    assert ((whole @ directions) * whole[:, :DIM]).sum(0).min() >= 0
    other = principal_directions(gram_matrix(whole[torch.randperm(COUNT)]), DIM)
    torch.testing.assert_close(directions, other, rtol=1e-9, atol=1e-11)
    # Fewer directions are the first ones, so that one decomposition serves all widths.
    torch.testing.assert_close(directions[:, :2], principal_directions(gram_matrix(whole), 2))


def test_memory_does_not_grow_with_the_batch() -> None:
    """Beside the vectors and their gradient: D × D, and float64 copies of so many rows."""
    counted = []
    for count in (2 * ROWS_AT_ONCE, 8 * ROWS_AT_ONCE):
        whole = vectors(count).float()
        gradient, narrow = torch.zeros(count, DIM), whole[:, :DIM]
        with Largest() as largest:
            directions = principal_directions(gram_matrix(whole), DIM)
            add_compression_gradients(
                narrow, whole, gradient, directions=directions, temperature=1.0, weight=1.0, num_texts=count
            )
        counted.append(largest.elements)
    assert counted == [WIDTH * ROWS_AT_ONCE] * 2
