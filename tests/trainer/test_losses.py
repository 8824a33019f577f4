"""The losses against a naive restatement in float64: full score matrices, torch's cross-entropy and KL, autograd."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.trainer.support import naive_contrastive_loss
from trainer import losses
from trainer.losses import coordinate_divergence, cosent, multi_size_contrastive

WIDTHS = (4, 7, 16)
QUERIES, PASSAGES = 9, 14
WEIGHTS = {"mean": (1 / 3,) * 3, "sum": (1.0,) * 3, "own": (0.2, 1.7, 0.6)}
KL_WEIGHTS = {"none": (0.0,) * 3, "ladder": (1 / 3, 1 / 3, 0.0), "two_d": (1.0, 0.0, 0.0)}


def vectors(seed: int = 0, *, scale: float = 1.0) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Prefixes of unrelated float64 vectors: K queries [n, d_k], K passages [m, d_k], targets at any column."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, width: int) -> Tensor:
        return (scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)).requires_grad_()

    queries = [draw(QUERIES, width) for width in WIDTHS]
    passages = [draw(PASSAGES, width) for width in WIDTHS]
    return queries, passages, torch.randint(PASSAGES, (QUERIES,), generator=generator)


def tile_memory(rows: int) -> float:
    """The score memory at which a tile holds so many rows."""
    return (rows + 0.5) * 5 * 8 * PASSAGES / 2**20


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(found, leaves)]


def objective(**values: object) -> SimpleNamespace:
    return SimpleNamespace(**({"loss": "infonce", "kl": "scores", "detach_teacher": True} | values))


def tiled(queries: list[Tensor], passages: list[Tensor], *, similarity: str, **arguments: object) -> Tensor:
    if similarity == "cosine":
        queries, passages = ([F.normalize(each, dim=1) for each in side] for side in (queries, passages))
    return multi_size_contrastive(queries, passages, **arguments)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 2, 3, QUERIES])
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("kl", KL_WEIGHTS)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("similarity", "temperature"), [("dot", 1.0), ("dot", 4.0), ("cosine", 0.05)])
def test_tiled_equals_naive(
    similarity: str, temperature: float, weights: str, kl: str, detach: bool, rows: int
) -> None:
    queries, passages, targets = vectors()
    leaves = queries + passages
    naive = naive_contrastive_loss(
        queries,
        passages,
        targets=targets,
        gold=None,
        weights=WEIGHTS[weights],
        kl_weights=KL_WEIGHTS[kl],
        objective=objective(similarity=similarity, temperature=temperature, detach_teacher=detach),
    )
    ours = tiled(
        queries,
        passages,
        similarity=similarity,
        targets=targets,
        loss_weights=WEIGHTS[weights],
        kl_weights=KL_WEIGHTS[kl],
        temperature=temperature,
        detach_teacher=detach,
        score_memory_mib=tile_memory(rows),
    )
    torch.testing.assert_close(ours, naive, rtol=1e-13, atol=1e-13)
    for got, want in zip(gradients(ours, leaves), gradients(naive, leaves)):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)


def test_tiles_are_as_small_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the equality above could compare one tile with itself."""
    queries, passages, targets = vectors()
    shapes = []
    original = losses._scores

    def watched(*args: object) -> Tensor:
        scores = original(*args)  # type: ignore[arg-type]
        shapes.append(tuple(scores.shape))
        return scores

    monkeypatch.setattr(losses, "_scores", watched)
    for rows, tiles in ((1, 9), (2, 5), (3, 3), (QUERIES, 1)):
        shapes.clear()
        multi_size_contrastive(
            queries,
            passages,
            targets=targets,
            loss_weights=(1.0,) * 3,
            kl_weights=(1.0, 1.0, 0.0),
            temperature=1.0,
            score_memory_mib=tile_memory(rows),
        )
        assert len(shapes) == 3 * tiles
        assert max(shape[0] for shape in shapes) == rows


def test_a_share_of_the_queries_counts_by_the_global_number() -> None:
    """Two ranks' shares of the queries against all passages add up to the whole loss and to its gradients."""
    queries, passages, targets = vectors()
    leaves = queries + passages
    arguments = {"loss_weights": (0.5, 1.0, 2.0), "kl_weights": (0.3, 0.2, 0.0), "temperature": 2.0}
    whole, nce, divergence = multi_size_contrastive(queries, passages, targets=targets, **arguments)
    parts = [
        multi_size_contrastive(
            [each[rows] for each in queries], passages, targets=targets[rows], num_queries=QUERIES, **arguments
        )
        for rows in (slice(0, 2), slice(2, QUERIES))
    ]
    torch.testing.assert_close(sum(part[0] for part in parts), whole)
    torch.testing.assert_close(sum(part[1] for part in parts), nce)
    torch.testing.assert_close(sum(part[2] for part in parts), divergence)
    summed = gradients(parts[0][0] + parts[1][0], leaves)
    for got, want in zip(summed, gradients(whole, leaves)):
        torch.testing.assert_close(got, want)
    # Negative control: shares that divide by their own number do not add up.
    own = sum(
        multi_size_contrastive([each[rows] for each in queries], passages, targets=targets[rows], **arguments)[0]
        for rows in (slice(0, 2), slice(2, QUERIES))
    )
    assert abs(float((own - whole).detach())) > 0.1


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("rows", [2, QUERIES])
def test_excluded_pairs_are_as_if_absent(rows: int, detach: bool) -> None:
    queries, passages, targets = vectors(seed=3)
    leaves = queries + passages
    excluded = torch.rand(QUERIES, PASSAGES, generator=torch.Generator().manual_seed(1)) < 0.4
    excluded[torch.arange(QUERIES), targets] = False
    weights, kl_weights = (0.5, 1.0, 2.0), (0.3, 0.2, 0.0)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(QUERIES):  # each query against the passages that are left to it
        kept = (~excluded[row]).nonzero()[:, 0]
        total = total + naive_contrastive_loss(
            [each[row : row + 1] for each in queries],
            [each[kept] for each in passages],
            targets=(kept == targets[row]).nonzero()[0],
            gold=None,
            weights=weights,
            kl_weights=kl_weights,
            objective=objective(similarity="dot", temperature=2.0, detach_teacher=detach),
        )
    naive = total / QUERIES
    arguments = {"targets": targets, "loss_weights": weights, "kl_weights": kl_weights, "temperature": 2.0}
    arguments |= {"score_memory_mib": tile_memory(rows), "detach_teacher": detach}
    ours, *_ = multi_size_contrastive(queries, passages, excluded=excluded, **arguments)
    torch.testing.assert_close(ours, naive, rtol=1e-12, atol=1e-12)
    for got, want in zip(gradients(ours, leaves), gradients(naive, leaves)):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)
    # Negative control: the mask changes the loss.
    assert abs(float((multi_size_contrastive(queries, passages, **arguments)[0] - ours).detach())) > 1e-2


def test_closed_form_values() -> None:
    """Equal scores: InfoNCE is log m and KL 0. One score ahead by log(m − 1): InfoNCE is log 2."""
    queries, passages = [torch.zeros(3, 4), torch.zeros(3, 8)], [torch.ones(5, 4), torch.ones(5, 8)]
    arguments = {"targets": torch.tensor([0, 3, 4]), "loss_weights": (1.0, 1.0), "kl_weights": (1.0, 0.0)}
    loss, nce, divergence = multi_size_contrastive(queries, passages, temperature=0.1, **arguments)
    torch.testing.assert_close(nce, torch.full((2,), math.log(5)))
    torch.testing.assert_close(divergence, torch.zeros(2))
    assert float(loss) == pytest.approx(2 * math.log(5), rel=1e-6)

    query, answers = torch.tensor([[1.0]]), torch.zeros(5, 1)
    answers[2, 0] = math.log(4) * 0.5
    _, nce, _ = multi_size_contrastive(
        [query], [answers], targets=torch.tensor([2]), loss_weights=(1.0,), kl_weights=(0.0,), temperature=0.5
    )
    assert float(nce) == pytest.approx(math.log(2), rel=1e-6)

    # Teacher (3/4, 1/4) against student (1/2, 1/2): KL = log 2 − H(1/4).
    teacher = torch.tensor([[math.log(3)], [0.0]])
    _, _, divergence = multi_size_contrastive(
        [query, query],
        [torch.zeros(2, 1), teacher],
        targets=torch.tensor([0]),
        loss_weights=(1.0, 1.0),
        kl_weights=(1.0, 0.0),
        temperature=1.0,
    )
    assert float(divergence[0]) == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-6)


def test_large_scores_stay_finite() -> None:
    queries, passages, targets = vectors(scale=100.0)
    loss, *_ = multi_size_contrastive(
        queries, passages, targets=targets, loss_weights=(1.0,) * 3, kl_weights=(1.0, 1.0, 0.0), temperature=0.05
    )
    assert bool(loss.isfinite())
    assert all(bool(grad.isfinite().all()) for grad in gradients(loss, queries + passages))


def test_a_wrong_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the comparison: a temperature that divides the scores but not the gradient."""
    queries, passages, targets = vectors()
    arguments = {"targets": targets, "loss_weights": (1.0,) * 3, "kl_weights": (0.0,) * 3}
    right = gradients(multi_size_contrastive(queries, passages, temperature=2.0, **arguments)[0], queries)
    original = losses._scores
    monkeypatch.setattr(losses, "_scores", lambda q, p, t, hidden: original(q, p, 2.0, hidden))
    wrong = gradients(multi_size_contrastive(queries, passages, temperature=1.0, **arguments)[0], queries)
    assert max(float((a - b).abs().max()) for a, b in zip(right, wrong)) > 1e-2


@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_cosent_equals_naive(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    similarities = (2 * torch.rand(12, generator=generator, dtype=torch.float64) - 1).requires_grad_()
    gold = torch.randint(5, (12,), generator=generator).double()  # with ties, which count for nothing
    terms = [
        torch.exp((similarities[j] - similarities[i]) / temperature)
        for i in range(12)
        for j in range(12)
        if gold[i] > gold[j]
    ]
    naive = torch.log(1 + torch.stack(terms).sum())
    ours = cosent(similarities, gold, temperature=temperature)
    torch.testing.assert_close(ours, naive, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(loss, similarities)[0] for loss in (ours, naive)))
    # Negative control: grades upside down are another loss.
    assert abs(float((cosent(similarities, -gold, temperature=temperature) - naive).detach())) > 1e-2


def test_cosent_closed_form_values() -> None:
    equal = torch.zeros(4)
    assert float(cosent(equal, torch.tensor([1.0, 1.0, 1.0, 1.0]), temperature=0.05)) == 0.0
    # Four pairs of unlike grade, all with equal similarities: log(1 + 4).
    assert float(cosent(equal, torch.tensor([0.0, 0.0, 5.0, 5.0]), temperature=0.05)) == pytest.approx(math.log(5))
    assert float(cosent(torch.tensor([0.1, 0.9]), torch.tensor([0.0, 1.0]), temperature=0.1)) == pytest.approx(
        math.log1p(math.exp(-8)), rel=1e-4
    )
    single = torch.zeros(1, requires_grad=True)
    (grad,) = torch.autograd.grad(cosent(single, torch.zeros(1), temperature=0.05), single)
    assert float(grad) == 0.0


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_coordinate_divergence_equals_naive(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(6, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(6, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    p = torch.softmax(teacher[:, :5] / temperature, dim=1)
    q = torch.softmax(student / temperature, dim=1)
    naive = temperature * (p * (p.log() - q.log())).sum()
    ours = coordinate_divergence(student, teacher, temperature=temperature)
    torch.testing.assert_close(ours, naive)
    for got, want in zip(gradients(ours, [student, teacher]), gradients(naive, [student, teacher])):
        torch.testing.assert_close(got, want)
    # Coordinates beyond the student's width are not the teacher's to give.
    assert float(gradients(ours, [teacher])[0][:, 5:].abs().max()) == 0.0


def test_coordinate_divergence_closed_form_values() -> None:
    same = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert float(coordinate_divergence(same, same, temperature=0.3)) == pytest.approx(0.0, abs=1e-6)
    teacher, student = torch.tensor([[math.log(3.0), 0.0, 9.0]]), torch.zeros(1, 2)
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert float(coordinate_divergence(student, teacher, temperature=1.0)) == pytest.approx(expected, rel=1e-5)
