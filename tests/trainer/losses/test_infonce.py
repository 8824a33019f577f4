"""The losses against a naive restatement in float64: full score matrices, torch's cross-entropy and KL, autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.lanes import crossed
from tests.reference import naive_contrastive_loss
from tests.trainer.losses.autograd import multi_size_contrastive
from trainer.losses import tiled_rows, tiles
from trainer.losses.false_negatives import false_negatives
from trainer.losses.graded_pairs import coordinate_divergence, cosent
from trainer.losses.row_sums import RowSums
from trainer.losses.tile_settings import TileSettings
from trainer.losses.tiles import Tiling, choose_tiling

WIDTHS = (4, 7, 16)
QUERIES, PASSAGES = 9, 14
WEIGHTS = {"own": (0.2, 1.7, 0.6), "mean": (1 / 3,) * 3, "sum": (1.0,) * 3}
KL_WEIGHTS = {"ladder": (1 / 3, 1 / 3, 0.0), "two_d": (1.0, 0.0, 0.0), "none": (0.0,) * 3}
TILINGS = [
    Tiling(queries, passages, keeps_rows)
    for queries, passages in ((2, 5), (4, 3), (9, 1), (QUERIES, PASSAGES))
    for keeps_rows in (True, False)
]
# For options that have no part in how a matrix is cut: uneven tiles, and the whole matrix.
FEW_TILINGS = [*TILINGS[:2], TILINGS[3], TILINGS[-2]]


def vectors(seed: int = 0, *, scale: float = 1.0) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Prefixes of unrelated float64 vectors: K queries [n, d_k], K passages [m, d_k], targets at any column."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, width: int) -> Tensor:
        return (scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)).requires_grad_()

    queries = [draw(QUERIES, width) for width in WIDTHS]
    passages = [draw(PASSAGES, width) for width in WIDTHS]
    return queries, passages, torch.randint(PASSAGES, (QUERIES,), generator=generator)


def force(monkeypatch: pytest.MonkeyPatch, tiling: Tiling) -> None:
    monkeypatch.setattr(tiled_rows, "choose_tiling", lambda *_, **__: tiling)


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(found, leaves)]


def objective(**values: object) -> SimpleNamespace:
    return SimpleNamespace(**({"loss": "infonce", "kl": "scores", "detach_teacher": True} | values))


def tiled(queries: list[Tensor], passages: list[Tensor], *, similarity: str, **arguments: object) -> Tensor:
    if similarity == "cosine":
        queries, passages = ([F.normalize(each, dim=1) for each in side] for side in (queries, passages))
    return multi_size_contrastive(queries, passages, **arguments)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    *crossed(
        tiling=TILINGS,
        detach=[False, True],
        kl=list(KL_WEIGHTS),
        weights=list(WEIGHTS),
        scored=[("cosine", 0.05), ("dot", 1.0), ("dot", 4.0)],
    )
)
def test_tiled_equals_naive(
    scored: tuple[str, float],
    weights: str,
    kl: str,
    detach: bool,
    tiling: Tiling,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    force(monkeypatch, tiling)
    assert_naive(*scored, weights=weights, kl=kl, detach=detach)


@pytest.mark.parametrize(*crossed(keeps_rows=[True, False], detach=[False, True], kl=list(KL_WEIGHTS)))
def test_tiles_may_have_one_element(kl: str, detach: bool, keeps_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, Tiling(1, 1, keeps_rows))
    assert_naive("cosine", 0.05, weights="own", kl=kl, detach=detach)


def assert_naive(similarity: str, temperature: float, *, weights: str, kl: str, detach: bool) -> None:
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
    )
    torch.testing.assert_close(ours, naive, rtol=1e-13, atol=1e-13)
    for got, want in zip(gradients(ours, leaves), gradients(naive, leaves)):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)


class Products(TorchFunctionMode):
    """Writes down every matrix of scores that is computed within it: its queries, its passages, the vectors' width."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, int, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Gradients are added in place, by Tensor.addmm_.
        if func is torch.addmm:
            _, left, right = args
            self.made.append((left.shape[0], right.shape[1], left.shape[1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_tiles_are_as_small_as_asked(tiling: Tiling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the equality above could compare one tile with itself. Kept rows: every score once, else twice."""
    force(monkeypatch, tiling)
    queries, passages, targets = vectors()
    arguments = {"loss_weights": (1.0,) * 3, "kl_weights": (1.0, 1.0, 0.0), "temperature": 1.0}
    with Products() as products:
        multi_size_contrastive(queries, passages, targets=targets, **arguments)
    blocks = math.ceil(QUERIES / tiling.queries) * math.ceil(PASSAGES / tiling.columns)
    assert len(products.made) == 3 * blocks * (1 if tiling.keeps_rows else 2)
    assert max(products.made)[:2] == (tiling.queries, tiling.columns)


@pytest.mark.parametrize("num_queries", [1, 100, 1024, 65536])
@pytest.mark.parametrize("num_passages", [1, 1000, 16384, 131072, 10_000_000])
@pytest.mark.parametrize("mib", [1, 16, 256, 2048])
@pytest.mark.parametrize("matrices", [1, 2, 4])
def test_the_score_memory_bounds_a_tile(matrices: int, mib: int, num_passages: int, num_queries: int) -> None:
    numbers = mib * 2**20 // 4
    tiling = choose_tiling(
        num_queries, num_passages, matrices=matrices, statistics=24, scores_in_memory=numbers, block_scores=2**19
    )
    columns = num_passages if tiling.keeps_rows else tiling.columns
    kept = matrices * columns + tiling.columns + 24 * math.ceil(num_passages / tiling.columns)
    assert 1 <= tiling.queries <= num_queries
    assert 1 <= tiling.columns <= num_passages
    assert tiling.queries * kept <= numbers or tiling.queries == 1
    # The usual sizes need no second sweep.
    if mib >= 256 and num_passages <= 131072 and matrices <= 2:
        assert tiling.keeps_rows
    # A tile that is narrow for want of memory is one of both ways.
    if tiling.queries < min(num_queries, tiles.LEAST_QUERIES):
        assert not tiling.keeps_rows


def test_memory_asked_for_reaches_the_tiles() -> None:
    queries, passages, targets = vectors()
    arguments = {"targets": targets, "loss_weights": (1.0,) * 3, "kl_weights": (0.0,) * 3, "temperature": 1.0}
    with Products() as products:
        whole, *_ = multi_size_contrastive(queries, passages, **arguments)
    assert sorted(products.made) == [(QUERIES, PASSAGES, width) for width in WIDTHS]
    with Products() as products:
        tight, *_ = multi_size_contrastive(queries, passages, score_memory_mib=400 * 8 / 2**20, **arguments)
    assert max(rows * columns for rows, columns, _ in products.made) < QUERIES * PASSAGES
    torch.testing.assert_close(tight, whole, rtol=1e-13, atol=1e-13)


def break_maxima(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks' sums added up as if they had one maximum."""
    original = RowSums.sum_up

    def wrong(sums: RowSums, size: int) -> None:
        sums.peak[size] = sums.peak[size].amax(0)
        original(sums, size)

    monkeypatch.setattr(RowSums, "sum_up", wrong)


def forget_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    original = RowSums.sum_up

    def wrong(sums: RowSums, size: int) -> None:
        sums.mass[size, -1] = 0
        original(sums, size)

    monkeypatch.setattr(RowSums, "sum_up", wrong)


@pytest.mark.parametrize("broken", [break_maxima, forget_a_block])
@pytest.mark.parametrize("keeps_rows", [True, False])
def test_a_wrong_merge_of_blocks_is_noticed(
    keeps_rows: bool, broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: what the equality with the naive form would see."""
    queries, passages, targets = vectors()
    arguments = {"targets": targets, "loss_weights": (1.0,) * 3, "kl_weights": (0.5, 0.5, 0.0), "temperature": 1.0}
    force(monkeypatch, Tiling(4, 5, keeps_rows))
    right, *_ = multi_size_contrastive(queries, passages, **arguments)
    right_gradients = gradients(right, queries)
    broken(monkeypatch)
    wrong, *_ = multi_size_contrastive(queries, passages, **arguments)
    assert abs(float((wrong - right).detach())) > 1e-2
    assert max(float((a - b).abs().max()) for a, b in zip(gradients(wrong, queries), right_gradients)) > 1e-3


@pytest.mark.parametrize("kl", ["none", "ladder"])
def test_only_wanted_gradients_are_computed(kl: str) -> None:
    queries, passages, targets = vectors()
    arguments = {"loss_weights": (1.0,) * 3, "kl_weights": KL_WEIGHTS[kl], "temperature": 1.0, "detach_teacher": False}
    want = gradients(multi_size_contrastive(queries, passages, targets=targets, **arguments)[0], queries + passages)
    for mixed in (
        [True, True, False, False, True, True],
        [False, False, True, False, False, False],
        [True] + [False] * 5,
    ):
        leaves = [each.detach().requires_grad_(wanted) for each, wanted in zip(queries + passages, mixed)]
        loss, *_ = multi_size_contrastive(leaves[:3], leaves[3:], targets=targets, **arguments)
        loss.backward()
        for leaf, wanted, expected in zip(leaves, mixed, want):
            assert (leaf.grad is not None) == wanted
            if wanted:
                torch.testing.assert_close(leaf.grad, expected)
    loss, *_ = multi_size_contrastive(
        *[[each.detach() for each in side] for side in (queries, passages)], targets=targets, **arguments
    )
    assert not loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    queries, passages, targets = vectors()
    low = [each.detach().to(dtype).requires_grad_() for each in queries + passages]
    full = [each.detach().float().requires_grad_() for each in low]
    arguments = {"targets": targets, "loss_weights": (1.0,) * 3, "kl_weights": (0.3, 0.3, 0.0), "temperature": 0.1}
    ours, *_ = multi_size_contrastive(low[:3], low[3:], **arguments)
    want, *_ = multi_size_contrastive(full[:3], full[3:], **arguments)
    assert torch.equal(ours, want)
    for got, expected in zip(gradients(ours, low), gradients(want, full)):
        assert torch.equal(got, expected.to(dtype))


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


def kept_passages_loss(
    queries: list[Tensor], passages: list[Tensor], targets: Tensor, hidden: Tensor, *, detach: bool
) -> Tensor:
    """The naive loss of each query against the passages that `hidden` [n, m] leaves to it."""
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(targets)):
        kept = (~hidden[row]).nonzero()[:, 0]
        total = total + naive_contrastive_loss(
            [each[row : row + 1] for each in queries],
            [each[kept] for each in passages],
            targets=(kept == targets[row]).nonzero()[0],
            gold=None,
            weights=(0.5, 1.0, 2.0),
            kl_weights=(0.3, 0.2, 0.0),
            objective=objective(similarity="dot", temperature=2.0, detach_teacher=detach),
        )
    return total / len(targets)


def kept_passages_arguments(targets: Tensor, *, detach: bool) -> dict[str, object]:
    weights = {"loss_weights": (0.5, 1.0, 2.0), "kl_weights": (0.3, 0.2, 0.0)}
    return {"targets": targets, "temperature": 2.0, "detach_teacher": detach, **weights}


def hide_some(targets: Tensor) -> Tensor:
    """bool [n, m], never a target; two queries keep nothing but their target, one everything."""
    hidden = torch.rand(QUERIES, PASSAGES, generator=torch.Generator().manual_seed(1)) < 0.4
    hidden[:2], hidden[2] = True, False
    hidden[torch.arange(QUERIES), targets] = False
    return hidden


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_excluded_pairs_are_as_if_absent(tiling: Tiling, detach: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, tiling)
    queries, passages, targets = vectors(seed=3)
    leaves = queries + passages
    hidden = hide_some(targets)
    naive = kept_passages_loss(queries, passages, targets, hidden, detach=detach)
    arguments = kept_passages_arguments(targets, detach=detach)
    ours, *_ = multi_size_contrastive(queries, passages, excluded=hidden.nonzero(), **arguments)
    torch.testing.assert_close(ours, naive, rtol=1e-12, atol=1e-12)
    for got, want in zip(gradients(ours, leaves), gradients(naive, leaves)):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-13)
    # Negative controls: without the pairs, and with one of them forgotten, the loss is another.
    assert abs(float((multi_size_contrastive(queries, passages, **arguments)[0] - ours).detach())) > 1e-2
    forgotten, *_ = multi_size_contrastive(queries, passages, excluded=hidden.nonzero()[1:], **arguments)
    assert abs(float((forgotten - ours).detach())) > 1e-6


@pytest.mark.parametrize(*crossed(tiling=FEW_TILINGS, margin=[2.0, 0.0, -1.0], detach=[False, True]))
def test_the_margin_hides_what_scores_like_the_positive(
    tiling: Tiling, margin: float, detach: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, tiling)
    queries, passages, targets = vectors(seed=3)
    leaves = queries + passages
    similarity = (queries[-1] @ passages[-1].T).detach()
    alike = similarity > similarity.gather(1, targets[:, None]) - margin
    alike[torch.arange(QUERIES), targets] = False
    assert 0.1 < float(alike.double().mean()) < 0.9
    known = hide_some(targets)
    arguments = kept_passages_arguments(targets, detach=detach)
    for hidden, excluded in ((alike, None), (alike | known, known.nonzero())):
        naive = kept_passages_loss(queries, passages, targets, hidden, detach=detach)
        ours, *_ = multi_size_contrastive(
            queries, passages, excluded=excluded, false_negative_margin=margin, **arguments
        )
        torch.testing.assert_close(ours, naive, rtol=1e-12, atol=1e-12)
        for got, want in zip(gradients(ours, leaves), gradients(naive, leaves)):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-13)
    # Negative control: the same margin after the temperature is another.
    other, *_ = multi_size_contrastive(
        queries, passages, excluded=known.nonzero(), false_negative_margin=2 * margin + 0.5, **arguments
    )
    assert abs(float((other - ours).detach())) > 1e-6


def guide_vectors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    return tuple(  # type: ignore[return-value]
        F.normalize(torch.randn(rows, 5, generator=generator, dtype=torch.float64)) for rows in (QUERIES, PASSAGES)
    )


@pytest.mark.parametrize(
    *crossed(
        tiling=FEW_TILINGS,
        filtered=[("guide", 0.1), ("guide", -0.3), ("full", 0.5), ("full", None)],
        taught_by=["guide", "full"],
        known=[True, False],
    )
)
def test_a_guide_filters_and_teaches(
    tiling: Tiling, filtered: tuple[str, float | None], taught_by: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, tiling)
    filter_by, margin = filtered
    queries, passages, targets = vectors(seed=3)
    leaves, guide = queries + passages, guide_vectors()
    hidden = hide_some(targets) if known else None
    filters = margin is not None
    weights = {"weights": (0.5, 1.0, 2.0), "kl_weights": (0.3, 0.2, 0.4 if taught_by == "guide" else 0.0)}
    chosen = objective(
        similarity="dot",
        temperature=2.0,
        filter_false_negatives=filters,
        filter_by=filter_by,
        false_negative_margin=margin,
        kl_teacher=taught_by,
        detach_teacher=False,
    )
    restated = {"targets": targets, "gold": None, "excluded": hidden, "objective": chosen, **weights}
    similarity = guide[0] @ guide[1].T
    naive = naive_contrastive_loss(queries, passages, guide=similarity, guide_temperature=0.3, **restated)
    arguments = {
        "targets": targets,
        "temperature": 2.0,
        "detach_teacher": False,
        "loss_weights": weights["weights"],
        "kl_weights": weights["kl_weights"],
        "excluded": None if hidden is None else hidden.nonzero(),
        "false_negative_margin": margin,
        "filter_by": filter_by,
        "taught_by": taught_by,
        "guide_temperature": 0.3,
    }
    ours, nce, divergence = multi_size_contrastive(queries, passages, guide=guide, **arguments)
    assert nce.shape == divergence.shape == (3,)
    torch.testing.assert_close(ours, naive, rtol=1e-12, atol=1e-12)
    for got, want in zip(gradients(ours, leaves), gradients(naive, leaves)):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-13)
    # Negative controls: another guide, and another temperature of it, are another loss where it is asked at all.
    other, *_ = multi_size_contrastive(queries, passages, guide=(guide[0].flip(0), guide[1]), **arguments)
    assert (abs(float((other - ours).detach())) > 1e-3) == (taught_by == "guide" or (filters and filter_by == "guide"))
    other, *_ = multi_size_contrastive(queries, passages, guide=guide, **(arguments | {"guide_temperature": 0.5}))
    assert (abs(float((other - ours).detach())) > 1e-3) == (taught_by == "guide")


def test_a_guide_that_sees_only_negatives_filters_nothing() -> None:
    """And one to which all passages are alike filters all where the margin is above 0: the loss is then 0."""
    queries, passages, targets = vectors(seed=3)
    arguments = {"targets": targets, "loss_weights": (1.0,) * 3, "kl_weights": (0.0,) * 3, "temperature": 2.0}
    plain, *_ = multi_size_contrastive(queries, passages, **arguments)
    places = torch.eye(PASSAGES, dtype=torch.float64)
    filtering = {**arguments, "filter_by": "guide"}
    sure, *_ = multi_size_contrastive(
        queries, passages, guide=(places[targets], places), false_negative_margin=0.5, **filtering
    )
    assert torch.equal(sure, plain)
    alike = torch.ones(QUERIES, 1, dtype=torch.float64), torch.ones(PASSAGES, 1, dtype=torch.float64)
    nothing, *_ = multi_size_contrastive(queries, passages, guide=alike, false_negative_margin=0.5, **filtering)
    assert float(nothing.detach()) == 0.0
    assert float(plain.detach()) > 1.0


@pytest.mark.parametrize("taught_by", ["full", "guide"])
def test_a_guide_keeps_within_the_score_memory(taught_by: str) -> None:
    """No matrix of queries by passages: the same loss, where the memory holds a few rows of scores."""
    queries, passages, targets = vectors()
    arguments = {"targets": targets, "loss_weights": (1.0,) * 3, "kl_weights": (0.5,) * 3, "temperature": 1.0}
    arguments |= {"guide": guide_vectors(), "filter_by": "guide", "taught_by": taught_by, "false_negative_margin": 0.1}
    whole, *_ = multi_size_contrastive(queries, passages, **arguments)
    with Products() as products:
        tight, *_ = multi_size_contrastive(queries, passages, score_memory_mib=400 * 8 / 2**20, **arguments)
    guide_width = arguments["guide"][0].shape[1]
    assert {width for *_, width in products.made} == {*WIDTHS, guide_width}
    assert max(rows * columns for rows, columns, _ in products.made) < QUERIES * PASSAGES
    torch.testing.assert_close(tight, whole, rtol=1e-13, atol=1e-13)


def looked_up(
    query: list[int], targets: list[int], passage: list[int], known: list[tuple[int, int]]
) -> list[list[int]]:
    """What `false_negatives` must find, pair by pair."""
    return [
        [i, j]
        for i in range(len(query))
        for j in range(len(passage))
        if j != targets[i]
        and (passage[j] in (query[i], passage[targets[i]]) or any(pair == (query[i], passage[j]) for pair in known))
    ]


@pytest.mark.parametrize(("num_texts", "num_known"), [(3, 15), (12, 15), (60, 300)])
@pytest.mark.parametrize("seed", range(5))
def test_false_negatives_equal_a_look_at_every_pair(seed: int, num_texts: int, num_known: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    texts = torch.randint(-(2**62), 2**62, (num_texts,), generator=generator)  # hashes have all 64 bits

    def draw(count: int) -> Tensor:
        return texts[torch.randint(num_texts, (count,), generator=generator)]

    query, passage, known_query, known = draw(8), draw(20), draw(num_known), draw(num_known)
    targets = torch.randint(20, (8,), generator=generator)
    found = false_negatives(query, targets, passage, known_query, known)
    pairs = list(zip(known_query.tolist(), known.tolist()))
    assert found.dtype == torch.int64
    assert found.tolist() == looked_up(query.tolist(), targets.tolist(), passage.tolist(), pairs)
    alone = false_negatives(query, targets, passage, known_query[:0], known[:0])
    assert alone.tolist() == looked_up(query.tolist(), targets.tolist(), passage.tolist(), [])
    assert len(alone) < len(found)  # negative control: known positives matter


def test_false_negatives_by_name() -> None:
    """Queries a, b; passages: a's positive, another of a's, a itself, b's positive, a's positive again."""
    query, targets, passage = torch.tensor([1, 2]), torch.tensor([0, 3]), torch.tensor([10, 11, 1, 20, 10])
    found = false_negatives(query, targets, passage, torch.tensor([1, 1, 2]), torch.tensor([10, 11, 20]))
    assert found.tolist() == [[0, 1], [0, 2], [0, 4]]
    none = torch.zeros(0, dtype=torch.int64)
    assert false_negatives(none, none, passage, none, none).shape == (0, 2)
    assert false_negatives(query, torch.tensor([0, 1]), torch.tensor([5, 6]), none, none).shape == (0, 2)


def test_false_negatives_of_a_large_batch_need_no_matrix() -> None:
    """65,536 × 131,072 pairs would be 8 GiB of bytes; two passages of every query are one text."""
    query = torch.arange(65536)
    passage = torch.cat([query + 10**9, query + 10**9])
    found = false_negatives(query, query, passage, query, query + 10**9)
    assert torch.equal(found, torch.stack([query, query + 65536], dim=1))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_large_scores_stay_finite(tiling: Tiling, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores up to 1e6: all but one passage's share underflows, whole blocks' at once."""
    force(monkeypatch, tiling)
    queries, passages, targets = vectors(scale=100.0)
    leaves = [each.detach().to(dtype).requires_grad_() for each in queries + passages]
    arguments = {"targets": targets, "loss_weights": (1.0,) * 3, "kl_weights": (1.0, 1.0, 0.0), "temperature": 0.05}
    loss, *_ = multi_size_contrastive(leaves[:3], leaves[3:], **arguments)
    naive = naive_contrastive_loss(
        queries,
        passages,
        targets=targets,
        gold=None,
        weights=(1.0,) * 3,
        kl_weights=(1.0, 1.0, 0.0),
        objective=objective(similarity="dot", temperature=0.05),
    )
    torch.testing.assert_close(loss.double(), naive, rtol=1e-5 if dtype == torch.float32 else 1e-13, atol=0.0)
    assert all(bool(grad.isfinite().all()) for grad in gradients(loss, leaves))
    hidden = hide_some(targets).nonzero()
    loss, *_ = multi_size_contrastive(leaves[:3], leaves[3:], excluded=hidden, false_negative_margin=10.0, **arguments)
    assert bool(loss.isfinite())
    assert all(bool(grad.isfinite().all()) for grad in gradients(loss, leaves))


def test_a_wrong_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the comparison: a temperature that divides the scores but not the gradient."""
    queries, passages, targets = vectors()
    arguments = {"targets": targets, "loss_weights": (1.0,) * 3, "kl_weights": (0.0,) * 3}
    right = gradients(multi_size_contrastive(queries, passages, temperature=2.0, **arguments)[0], queries)
    monkeypatch.setattr(TileSettings, "temperature_of", lambda terms, size: 2.0)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cosent_of_many_pairs_equals_the_whole_matrix(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    similarities = (2 * torch.rand(1500, generator=generator, dtype=dtype) - 1).requires_grad_()
    gold = torch.randint(40, (1500,), generator=generator) / 8.0
    scaled = similarities.double() / 0.05
    terms = (scaled[None, :] - scaled[:, None])[gold[:, None] > gold[None, :]]
    naive = torch.logsumexp(torch.cat([terms.new_zeros(1), terms]), dim=0)
    ours = cosent(similarities, gold, temperature=0.05)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, naive.to(dtype), rtol=1e-6 if dtype == torch.float32 else 1e-12, atol=0.0)
    got, want = (torch.autograd.grad(loss, similarities)[0] for loss in (ours, naive))
    torch.testing.assert_close(got, want, rtol=1e-5 if dtype == torch.float32 else 1e-9, atol=1e-12)


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
