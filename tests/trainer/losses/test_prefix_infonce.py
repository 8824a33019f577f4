"""Nested widths: the loss and gradients of separate normalised copies, full score matrices and autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.losses import prefix_infonce
from trainer.losses.prefix_infonce import PrefixSettings, prefix_contrastive_

DIMS, WEIGHTS = (4, 8, 20), (1.0, 0.5, 0.3)


def naive(
    queries: Tensor, passages: Tensor, targets: Tensor, excluded: Tensor | None, *, cosine: bool
) -> tuple[Tensor, Tensor, Tensor]:
    queries, passages = queries.clone().requires_grad_(), passages.clone().requires_grad_()
    loss = queries.new_zeros(())
    for dim, weight in zip(DIMS, WEIGHTS):
        q, p = queries[:, :dim], passages[:, :dim]
        if cosine:
            q, p = F.normalize(q, dim=1), F.normalize(p, dim=1)
        scores = q @ p.T / 0.2
        if excluded is not None:
            scores = scores.index_put((excluded[:, 0], excluded[:, 1]), scores.new_tensor(-1e30))
        loss = loss + weight * F.cross_entropy(scores, targets, reduction="sum") / 50
    loss.backward()
    assert queries.grad is not None and passages.grad is not None
    return loss.detach(), queries.grad, passages.grad


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("cosine", [True, False])
def test_loss_and_gradients(cosine: bool, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_infonce, "MOST_QUERIES", 10)  # several tiles, the last one short
    monkeypatch.setattr(prefix_infonce, "LEAST_QUERIES", 5)
    torch.manual_seed(0)
    queries, passages = torch.randn(37, 24, dtype=torch.float64), torch.randn(61, 24, dtype=torch.float64)
    targets = torch.randperm(61)[:37]
    pairs = [[i, j] for i in range(37) for j in range(61) if (i * j) % 7 == 3 and j != targets[i]]
    excluded = torch.tensor(pairs) if masked else None
    loss, query_gradient, passage_gradient = naive(queries, passages, targets, excluded, cosine=cosine)
    before, got = torch.randn_like(passages), queries.clone()
    got_passages = before.clone()  # gradients are added to what is there
    settings = PrefixSettings(DIMS, WEIGHTS, cosine, 0.2, 50)
    got_loss, nce = prefix_contrastive_(
        got, passages, got_passages, targets=targets, excluded=excluded, settings=settings
    )
    torch.testing.assert_close(got_loss, loss)
    torch.testing.assert_close((nce * torch.tensor(WEIGHTS)).sum(), loss)
    torch.testing.assert_close(got, query_gradient)
    torch.testing.assert_close(got_passages - before, passage_gradient)
    # Negative controls: the pairs masked or not, and the part of the gradient that cosine takes away, matter.
    other = None if masked else torch.tensor(pairs)
    assert (naive(queries, passages, targets, other, cosine=cosine)[0] - loss).abs() > 1e-2
    assert (naive(queries, passages, targets, excluded, cosine=not cosine)[1] - query_gradient).abs().max() > 1e-3


@pytest.mark.parametrize("margin", [-0.2, 0.1])
def test_a_guide_leaves_passages_out(margin: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_infonce, "MOST_QUERIES", 10)
    monkeypatch.setattr(prefix_infonce, "LEAST_QUERIES", 5)
    torch.manual_seed(0)
    queries, passages = torch.randn(37, 24, dtype=torch.float64), torch.randn(61, 24, dtype=torch.float64)
    guide = tuple(F.normalize(torch.randn(rows, 6, dtype=torch.float64)) for rows in (37, 61))
    targets = torch.randperm(61)[:37]
    similarity = guide[0] @ guide[1].T
    hidden = similarity > similarity.gather(1, targets[:, None]) - margin
    hidden[torch.arange(37), targets] = False
    assert 0.1 < float(hidden.double().mean()) < 0.9
    known = torch.tensor([[i, j] for i in range(37) for j in range(61) if (i * j) % 7 == 3 and j != targets[i]])
    for excluded in (None, known):
        wanted = hidden.clone()
        if excluded is not None:
            wanted[excluded[:, 0], excluded[:, 1]] = True
        loss, query_gradient, passage_gradient = naive(queries, passages, targets, wanted.nonzero(), cosine=True)
        got, gradient = queries.clone(), torch.zeros_like(passages)
        settings = PrefixSettings(DIMS, WEIGHTS, True, 0.2, 50, guide_margin=margin)
        found, _ = prefix_contrastive_(
            got, passages, gradient, targets=targets, excluded=excluded, settings=settings, guide=(guide[0], guide[1])
        )
        torch.testing.assert_close(found, loss)
        torch.testing.assert_close(got, query_gradient)
        torch.testing.assert_close(gradient, passage_gradient)
    # Negative control: without the guide it is another loss.
    assert (naive(queries, passages, targets, known, cosine=True)[0] - loss).abs() > 1e-2


def test_a_text_without_tokens_has_no_direction() -> None:
    """Its vector is zero: its scores are 0, and nothing is divided by its length."""
    queries, passages = torch.randn(3, 20), torch.randn(4, 20)
    queries[1], passages[2] = 0.0, 0.0
    gradient = torch.zeros_like(passages)
    settings = PrefixSettings(DIMS, WEIGHTS, True, 0.05, 3)
    loss, _ = prefix_contrastive_(
        queries, passages, gradient, targets=torch.arange(3), excluded=None, settings=settings
    )
    assert loss.isfinite() and queries.isfinite().all() and gradient.isfinite().all()
    assert not queries[1].any() and not gradient[2].any()
