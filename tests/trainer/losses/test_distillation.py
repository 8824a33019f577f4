"""A teacher's terms, each against its formula in float64, whole and in the shares of several ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.losses.distillation import (
    ORDER_MARGIN,
    add_gram_gradients,
    add_order_gradients,
    add_similarity_gradients,
    add_vector_gradients,
    gram_products,
    prefix_of,
)

DIMS, WIDTH, COUNT, TEMPERATURE = (3, 5, 8), 10, 13, 0.2
SHARES = [(0, 13)], [(0, 4), (4, 4), (4, 13)], [(0, 12), (12, 13)]  # of the texts, rank by rank


def vectors() -> tuple[list[Tensor], Tensor]:
    """Unit vectors of three sizes and a teacher's, float64."""
    torch.manual_seed(0)
    units = [F.normalize(torch.randn(COUNT, dim, dtype=torch.float64), dim=1) for dim in DIMS]
    return units, F.normalize(torch.randn(COUNT, WIDTH, dtype=torch.float64), dim=1)


def naive(term: str, unit: Tensor, teacher: Tensor) -> Tensor:
    scores, taught = unit @ unit.T, teacher @ teacher.T
    if term == "vector":
        return (1 - (unit * F.normalize(teacher[:, : unit.shape[1]], dim=1)).sum(1)).mean()
    if term == "gram":
        return (scores - taught).square().mean()
    if term == "order":
        differences = scores[:, :, None] - scores[:, None, :]
        signs = (taught[:, None, :] - taught[:, :, None]).sign()
        return F.relu(differences * signs + ORDER_MARGIN).mean()
    others = ~torch.eye(len(unit), dtype=torch.bool)
    target, logits = ((each / TEMPERATURE)[others].view(len(unit), -1).log_softmax(1) for each in (taught, scores))
    return (target.exp() * (target - logits)).sum(1).mean()


def computed(
    term: str, units: list[Tensor], teacher: Tensor, weights: list[float], shares: list[tuple[int, int]], mib: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Each size's value and its weighted gradient, put together from the shares as the ranks do."""
    gradients = [torch.zeros_like(unit) for unit in units]
    values = [torch.zeros((), dtype=unit.dtype) for unit in units]
    parts = [gram_products(unit, teacher) for unit in units]
    for start, stop in shares:
        own, taught = [unit[start:stop] for unit in units], teacher[start:stop]
        here = [gradient[start:stop] for gradient in gradients]
        if term == "vector":
            for k, (unit, gradient, weight) in enumerate(zip(own, here, weights)):
                values[k] += add_vector_gradients(unit, taught, gradient, weight=weight, num_texts=COUNT)
        elif term == "gram":
            for k, (unit, gradient, weight) in enumerate(zip(own, here, weights)):
                products = parts[k]
                value = add_gram_gradients(unit, taught, gradient, products=products, weight=weight, num_texts=COUNT)
                values[k] += value / len(shares)
        else:
            arguments = (own, units, (taught, teacher), [*here, *gradients])
            if term == "order":
                found = add_order_gradients(*arguments, weights=weights, num_texts=COUNT, score_memory_mib=mib)
            else:
                found = add_similarity_gradients(
                    *arguments,
                    weights=weights,
                    temperature=TEMPERATURE,
                    places=torch.arange(start, stop),
                    num_texts=COUNT,
                    score_memory_mib=mib,
                )
            values = [value + each for value, each in zip(values, found)]
    return values, gradients


@pytest.mark.parametrize("mib", [1e-3, 64.0])
@pytest.mark.parametrize("shares", SHARES, ids=["one rank", "three, one without texts", "two, one text"])
@pytest.mark.parametrize("term", ["vector", "similarity", "gram", "order"])
def test_terms_are_their_formulas(term: str, shares: list[tuple[int, int]], mib: float) -> None:
    units, teacher = vectors()
    weights = [0.5, 2.0, 1.0]
    values, gradients = computed(term, units, teacher, weights, shares, mib)
    leaves = [unit.clone().requires_grad_() for unit in units]
    expected = [naive(term, leaf, teacher) for leaf in leaves]
    sum(weight * value for weight, value in zip(weights, expected)).backward()
    for size in range(len(units)):
        torch.testing.assert_close(values[size], expected[size].detach(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(gradients[size], leaves[size].grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("term", ["vector", "similarity", "gram", "order"])
def test_another_teacher_teaches_otherwise(term: str) -> None:
    """Negative control."""
    units, teacher = vectors()
    values, _ = computed(term, units, teacher.flip(0), [1.0] * 3, SHARES[0], 64.0)
    assert all(abs(float(value - naive(term, unit, teacher))) > 1e-4 for value, unit in zip(values, units))


@pytest.mark.parametrize("term", ["vector", "gram", "similarity"])
def test_a_student_that_is_the_teacher_has_nothing_to_learn(term: str) -> None:
    _, teacher = vectors()
    (value,), (gradient,) = computed(term, [teacher], teacher, [1.0], SHARES[0], 64.0)
    assert abs(float(value)) < 1e-12
    along = (gradient * teacher).sum(1, keepdim=True) * teacher
    assert float((gradient - along).abs().max()) < 1e-12  # what is left only lengthens a unit vector


def test_a_text_alone_is_compared_with_nothing() -> None:
    unit = F.normalize(torch.randn(1, 4), dim=1)
    gradients = [torch.zeros_like(unit), torch.zeros_like(unit)]
    places = torch.zeros(1, dtype=torch.int64)
    arguments = ([unit], [unit], (unit, unit), gradients)
    values = add_similarity_gradients(
        *arguments, weights=[1.0], temperature=0.1, places=places, num_texts=1, score_memory_mib=1.0
    )
    assert float(values) == 0.0 and not gradients[0].any() and not gradients[1].any()


def test_a_prefix_of_the_teacher_has_unit_length_and_leaves_it_alone() -> None:
    _, teacher = vectors()
    before = teacher.clone()
    cut = prefix_of(teacher, 4)
    torch.testing.assert_close(cut.norm(dim=1), torch.ones(COUNT, dtype=torch.float64))
    assert torch.equal(teacher, before)
