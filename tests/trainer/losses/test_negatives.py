"""Further blocks of negatives, hardness weights and queries' own weights: tiles against whole matrices in float64.

The restatement is `naive_contrastive_loss`; two tests state the published sums query by query besides.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.lanes import crossed
from tests.reference import naive_contrastive_loss
from tests.trainer.losses.autograd import multi_size_contrastive
from tests.trainer.losses.test_infonce import Products, force, gradients, objective
from trainer.losses import tiles
from trainer.losses.false_negatives import columns_left_out, false_negative_queries, false_negatives
from trainer.losses.tile_settings import PARTS, PASSAGES_ALONE, parts_of
from trainer.losses.tiles import Columns, Tiling

WIDTHS = (4, 7, 16)
OWNERS = torch.tensor([0, 1, 1, 1, 2, 3, 3, 4, 5, 5, 6, 6])  # whose positive, then hard negatives, a passage is
TARGETS = torch.tensor([0, 1, 4, 5, 7, 8, 10])
QUERIES, PASSAGES = len(TARGETS), len(OWNERS)
ALL = tuple(PARTS)
CHOICES = [ALL, PASSAGES_ALONE] + [("query_passage", name) for name in ALL[1:]]
TILINGS = [Tiling(*each) for each in ((3, 5, True), (3, 5, False), (7, 38, True), (2, 7, True))]
WEIGHTS = torch.tensor([1.0, 0.0, 2.5, 0.3, 1.0, 7.0, 0.1], dtype=torch.float64)


def vectors(seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """K queries [n, d_k] and K passages [m, d_k] of unit length, float64."""
    generator = torch.Generator().manual_seed(seed)
    queries, passages = (
        [F.normalize(torch.randn(rows, d, generator=generator, dtype=torch.float64), dim=1) for d in WIDTHS]
        for rows in (QUERIES, PASSAGES)
    )
    return [each.requires_grad_() for each in queries], [each.requires_grad_() for each in passages]


def hidden_texts() -> tuple[Tensor, Tensor]:
    """bool [n, m] and [n, n]: what hashes would leave out; never a query's target, nor itself."""
    generator = torch.Generator().manual_seed(1)
    passages = torch.rand(QUERIES, PASSAGES, generator=generator) < 0.2
    queries = torch.rand(QUERIES, QUERIES, generator=generator) < 0.2
    return passages.scatter(1, TARGETS[:, None], False), queries & ~torch.eye(QUERIES, dtype=torch.bool)


def hard_pairs() -> Tensor:
    columns = torch.tensor([column for column in range(PASSAGES) if column not in TARGETS.tolist()])
    return torch.stack([OWNERS[columns], columns], dim=1)


def left_out(negatives: tuple[str, ...], passages: Tensor, queries: Tensor, rows: slice = slice(None)) -> Tensor:
    """The excluded pairs for these queries, as the trainer makes them."""
    return columns_left_out(
        parts_of(negatives),
        targets=TARGETS[rows],
        own=torch.arange(QUERIES)[rows],
        num_passages=PASSAGES,
        num_queries=QUERIES,
        passages=passages[rows].nonzero(),
        queries=queries[rows].nonzero(),
    )


def guide_vectors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    first, second = (torch.randn(rows, 5, generator=generator, dtype=torch.float64) for rows in (QUERIES, PASSAGES))
    return F.normalize(first, dim=1), F.normalize(second, dim=1)


class Case:
    """One setting, computed both ways. filtered: (by whom, margin) or None."""

    def __init__(
        self,
        negatives: tuple[str, ...] = ALL,
        *,
        hardness: float = 0.0,
        detach: bool = True,
        filtered: tuple[str, float] | None = None,
        taught_by: str = "full",
        weighted: bool = False,
    ) -> None:
        self.queries, self.passages = vectors()
        self.negatives, self.hardness, self.taught_by = negatives, hardness, taught_by
        self.filtered, self.detach = filtered, detach
        self.weights = WEIGHTS if weighted else None
        self.kl_weights = (0.3, 0.2, 0.4 if taught_by == "guide" else 0.0)

    @property
    def leaves(self) -> list[Tensor]:
        return self.queries + self.passages

    def naive(self) -> Tensor:
        first, second = guide_vectors()
        further = {"query_query": first @ first.T}
        further |= {"passage_passage": second[TARGETS] @ second.T, "passage_query": second[TARGETS] @ first.T}
        guide = torch.cat([first @ second.T, *(v for name, v in further.items() if name in self.negatives)], dim=1)
        filter_by, margin = self.filtered or ("full", 0.0)
        passages, queries = hidden_texts()
        return naive_contrastive_loss(
            self.queries,
            self.passages,
            targets=TARGETS,
            gold=None,
            weights=(0.5, 1.0, 2.0),
            kl_weights=self.kl_weights,
            objective=objective(
                similarity="dot",
                temperature=0.2,
                negatives=self.negatives,
                hardness=self.hardness,
                detach_teacher=self.detach,
                kl_teacher=self.taught_by,
                filter_false_negatives=self.filtered is not None,
                filter_by=filter_by,
                false_negative_margin=margin,
            ),
            excluded=passages,
            excluded_queries=queries,
            guide=guide,
            guide_temperature=0.3,
            passage_query=OWNERS,
            query_weights=self.weights,
        )

    def arguments(self, rows: slice = slice(None)) -> dict[str, Any]:
        first, second = guide_vectors()
        reads = any(part.with_queries for part in parts_of(self.negatives))
        filter_by, margin = self.filtered or ("full", None)
        hard = hard_pairs()
        begin, end, _ = rows.indices(QUERIES)
        hard = hard[(hard[:, 0] >= begin) & (hard[:, 0] < end)] - torch.tensor([begin, 0])
        return {
            "targets": TARGETS[rows],
            "loss_weights": (0.5, 1.0, 2.0),
            "kl_weights": self.kl_weights,
            "temperature": 0.2,
            "num_queries": QUERIES,
            "excluded": left_out(self.negatives, *hidden_texts(), rows),
            "false_negative_margin": margin,
            "filter_by": filter_by,
            "taught_by": self.taught_by,
            "detach_teacher": self.detach,
            "guide": [first[rows], second, *([first] if reads else [])],
            "guide_temperature": 0.3,
            "negatives": self.negatives,
            "all_queries": self.queries if reads else [],
            "hardness": self.hardness,
            "hard": hard,
            "weights": None if self.weights is None else self.weights[rows],
        }

    def tiled(self, **changed: Any) -> Tensor:
        return multi_size_contrastive(self.queries, self.passages, **(self.arguments() | changed))[0]

    def assert_equal(self, ours: Tensor) -> None:
        naive = self.naive()
        torch.testing.assert_close(ours, naive, rtol=1e-12, atol=1e-13)
        for got, want in zip(gradients(ours, self.leaves), gradients(naive, self.leaves)):
            scale = float(want.abs().max())
            torch.testing.assert_close(got, want, rtol=0.0, atol=1e-12 * max(1.0, scale))


@pytest.mark.parametrize(
    *crossed(
        tiling=TILINGS,
        negatives=CHOICES,
        hardness=[5.0, 0.0],
        detach=[False, True],
        filtered=[("full", 0.1), None, ("guide", -0.1)],
        weighted=[True, False],
    )
)
def test_tiled_equals_naive(
    tiling: Tiling,
    negatives: tuple[str, ...],
    hardness: float,
    detach: bool,
    filtered: tuple[str, float] | None,
    weighted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    force(monkeypatch, tiling)
    case = Case(negatives, hardness=hardness, detach=detach, filtered=filtered, weighted=weighted)
    case.assert_equal(case.tiled())


@pytest.mark.parametrize("negatives", CHOICES)
def test_tiles_may_have_one_element(negatives: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, Tiling(1, 1, False))
    case = Case(negatives, hardness=5.0, detach=False, filtered=("full", 0.1), weighted=True)
    case.assert_equal(case.tiled())


@pytest.mark.parametrize("tiling", TILINGS[:2], ids=str)
@pytest.mark.parametrize("filtered", [("guide", 0.1), ("full", 0.0), None])
def test_a_guide_teaches_all_columns(
    filtered: tuple[str, float] | None, tiling: Tiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, tiling)
    case = Case(hardness=3.0, filtered=filtered, taught_by="guide", weighted=True)
    case.assert_equal(case.tiled())


def test_memory_asked_for_reaches_the_tiles() -> None:
    """No matrix of queries by columns where the memory holds a few rows of scores, and the loss is the same."""
    case = Case(hardness=5.0, filtered=("full", 0.1), weighted=True, detach=False)
    with Products() as products:
        tight = case.tiled(score_memory_mib=400 * 8 / 2**20)
    assert {width for *_, width in products.made} == set(WIDTHS)
    assert max(rows * columns for rows, columns, _ in products.made) < QUERIES * PASSAGES
    case.assert_equal(tight)


@pytest.mark.parametrize("mib", [1, 16, 256])
@pytest.mark.parametrize("num_columns", [4000, 65536, 1_000_000])
def test_the_score_memory_bounds_a_tile_of_several_parts(num_columns: int, mib: int) -> None:
    numbers = mib * 2**20 // 4
    tiling = tiles.choose_tiling(
        1024, num_columns, matrices=4, statistics=24, scores_in_memory=numbers, block_scores=2**19, parts=4
    )
    share = num_columns // 4
    blocks = tiles.blocks_of(parts_of(ALL), Columns(range(share), range(share)), tiling.columns)
    assert sum(block.width for block in blocks) == num_columns and max(b.width for b in blocks) <= tiling.columns
    kept = 4 * (num_columns if tiling.keeps_rows else tiling.columns) + tiling.columns + 24 * len(blocks)
    assert tiling.queries * kept <= numbers or tiling.queries == 1


def test_two_ranks_shares_add_up() -> None:
    """Each rank has a share of the rows and compares it with everyone's queries and passages."""
    case = Case(hardness=5.0, filtered=("full", 0.1), weighted=True, detach=False)
    shares = (slice(0, 2), slice(2, QUERIES))
    parts = [
        multi_size_contrastive([each[rows] for each in case.queries], case.passages, **case.arguments(rows))[0]
        for rows in shares
    ]
    case.assert_equal(parts[0] + parts[1])
    # Negative control: a rank that compares with its own queries alone.
    alone = 0.0
    for rows in shares:
        own = {"all_queries": [each[rows] for each in case.queries], "excluded": None}
        mine = [each[rows] for each in case.queries]
        alone += float(multi_size_contrastive(mine, case.passages, **(case.arguments(rows) | own))[0].detach())
    assert abs(alone - float(case.naive().detach())) > 1e-3


def test_each_choice_is_another_loss() -> None:
    """Negative controls: every block, the hardness, the weights and the excluded pairs act."""
    case = Case(hardness=5.0, weighted=True)
    right = float(case.tiled().detach())
    for name in ALL[1:]:
        fewer = tuple(each for each in ALL if each != name)
        other = Case(fewer, hardness=5.0, weighted=True).tiled()
        assert abs(float(other.detach()) - right) > 1e-3, name
    for changed in ({"hardness": 0.0}, {"hardness": 2.0}, {"weights": None}, {"excluded": None}, {"hard": None}):
        assert abs(float(case.tiled(**changed).detach()) - right) > 1e-3, changed
    with_itself = case.arguments()["excluded"][:-1]  # the last positive, of little weight, meets its query again
    assert abs(float(case.tiled(excluded=with_itself).detach()) - right) > 1e-4


def test_no_gradient_flows_through_the_hardness() -> None:
    """exp(α · s) with a gradient would be a temperature of its own for hard negatives: another gradient."""
    case = Case(PASSAGES_ALONE, hardness=5.0)
    case.kl_weights = (0.0, 0.0, 0.0)
    hard = torch.zeros(QUERIES, PASSAGES, dtype=torch.bool)
    hard[tuple(hard_pairs().T)] = True
    passages, _ = hidden_texts()
    total = torch.zeros((), dtype=torch.float64)
    for q, p, weight in zip(case.queries, case.passages, (0.5, 1.0, 2.0)):
        similarity = q @ p.T
        scores = similarity / 0.2 + 5.0 * hard * similarity  # no stop-gradient
        total = total + weight * F.cross_entropy(scores.masked_fill(passages, -1e9), TARGETS)
    ours = case.tiled()
    torch.testing.assert_close(ours, total, rtol=1e-12, atol=0.0)  # the value is the same
    apart = [float((a - b).abs().max()) for a, b in zip(gradients(ours, case.leaves), gradients(total, case.leaves))]
    assert max(apart) > 1e-3


TEXTS = {"queries": [1, 2, 3, 1, 5, 6, 7], "passages": [10, 11, 12, 10, 13, 14, 15, 16, 11, 17, 2, 18]}


def test_qwen3s_sum_query_by_query() -> None:
    """Z_i of Qwen3-Embedding (arXiv:2506.05176), and GTE's fourth sum, in one denominator, masked by margin and texts.

    m_ij = 0 where s_ij > s(q_i, d_i) + 0.1 or d_j = d_i; here also where q_j = q_i, or a text is another known positive
    of q_i (none here), or the texts of q_i and d_i meet each other's columns.
    """
    queries, passages = vectors(seed=2)
    (q,), (d,) = queries[-1:], passages[-1:]
    query_texts, passage_texts = TEXTS["queries"], TEXTS["passages"]
    positives = [passage_texts[t] for t in TARGETS.tolist()]
    losses = []
    for i in range(QUERIES):
        target = int(TARGETS[i])
        bound = (q[i] @ d[target]).detach() + 0.1
        same_query = {b for a, b in zip(query_texts, positives) if a == query_texts[i]} | {query_texts[i]}

        def term(score: Tensor, *, same: bool, bound: Tensor = bound) -> Tensor:
            return torch.zeros((), dtype=torch.float64) if same or score > bound else torch.exp(score / 0.2)

        z = torch.exp((q[i] @ d[target]) / 0.2)
        for j in range(PASSAGES):
            same = passage_texts[j] in same_query
            z = z + term(q[i] @ d[j], same=same or j == target) + term(d[target] @ d[j], same=same or j == target)
        for j in range(QUERIES):
            same = query_texts[j] in same_query or positives[j] == positives[i]
            z = z + term(q[i] @ q[j], same=same or i == j) + term(d[target] @ q[j], same=same or i == j)
        losses.append(torch.log(z) - (q[i] @ d[target]) / 0.2)
    naive = torch.stack(losses).mean()
    hashes, of_passages = torch.tensor(query_texts), torch.tensor(passage_texts)
    known = hashes, of_passages[TARGETS]
    excluded = columns_left_out(
        parts_of(ALL),
        targets=TARGETS,
        own=torch.arange(QUERIES),
        num_passages=PASSAGES,
        num_queries=QUERIES,
        passages=false_negatives(hashes, TARGETS, of_passages, *known),
        queries=false_negative_queries(hashes, of_passages[TARGETS], torch.arange(QUERIES), hashes, *known),
    )
    arguments = {"targets": TARGETS, "loss_weights": (1.0,), "kl_weights": (0.0,), "temperature": 0.2}
    arguments |= {"negatives": ALL, "all_queries": [q], "excluded": excluded}
    ours, *_ = multi_size_contrastive([q], [d], false_negative_margin=-0.1, **arguments)
    torch.testing.assert_close(ours, naive, rtol=1e-12, atol=0.0)
    for got, want in zip(gradients(ours, [q, d]), gradients(naive, [q, d])):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)
    # Negative controls: another margin, and none.
    for margin in (0.1, None):
        other, *_ = multi_size_contrastive([q], [d], false_negative_margin=margin, **arguments)
        assert abs(float((other - ours).detach())) > 1e-3


def test_embeddinggemmas_sum_query_by_query() -> None:
    """−log e^{s/τ} / (Σ_hard w e^{s⁻/τ} + Σ_j e^{s_ij/τ}), w = exp(α · sg(s⁻)) (arXiv:2509.20354)."""
    queries, passages = vectors(seed=3)
    (q,), (d,) = queries[-1:], passages[-1:]
    losses = []
    for i in range(QUERIES):
        z = torch.zeros((), dtype=torch.float64)
        for j in range(PASSAGES):
            similarity = q[i] @ d[j]
            weight = 1.0
            if OWNERS[j] == i and j != TARGETS[i]:
                weight = math.exp(5.0 * float(similarity.detach()))
            z = z + weight * torch.exp(similarity / 0.2)
        losses.append(torch.log(z) - (q[i] @ d[int(TARGETS[i])]) / 0.2)
    naive = torch.stack(losses).mean()
    arguments = {"targets": TARGETS, "loss_weights": (1.0,), "kl_weights": (0.0,), "temperature": 0.2}
    ours, *_ = multi_size_contrastive([q], [d], hardness=5.0, hard=hard_pairs(), **arguments)
    torch.testing.assert_close(ours, naive, rtol=1e-12, atol=0.0)
    for got, want in zip(gradients(ours, [q, d]), gradients(naive, [q, d])):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


def test_weights_that_do_nothing_change_nothing() -> None:
    """Weights of 1, and no hard pairs, give the very bits; a query of weight 0 has no loss, yet is compared with."""
    case = Case(hardness=5.0)
    plain = case.tiled()
    ones = case.tiled(weights=torch.ones(QUERIES, dtype=torch.float64))
    assert torch.equal(plain, ones)
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain, case.leaves), gradients(ones, case.leaves)))
    assert torch.equal(case.tiled(hard=None), case.tiled(hardness=0.0))
    nothing = torch.zeros(QUERIES, dtype=torch.float64)
    assert float(case.tiled(weights=nothing).detach()) == 0.0
    assert not any(bool(grad.any()) for grad in gradients(case.tiled(weights=nothing), case.leaves))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("num_texts", "num_known"), [(4, 15), (12, 15), (60, 300)])
def test_false_negative_queries_equal_a_look_at_every_pair(num_texts: int, num_known: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    texts = torch.randint(-(2**62), 2**62, (num_texts,), generator=generator)

    def draw(count: int) -> Tensor:
        return texts[torch.randint(num_texts, (count,), generator=generator)]

    everyone, positive, known_query, known = draw(20), draw(8), draw(num_known), draw(num_known)
    own = torch.arange(8) + 5
    query = everyone[own]
    found = false_negative_queries(query, positive, own, everyone, known_query, known)
    pairs = set(zip(known_query.tolist(), known.tolist()))
    looked_up = [
        [i, j]
        for i, (text, answer) in enumerate(zip(query.tolist(), positive.tolist()))
        for j, other in enumerate(everyone.tolist())
        if j != i + 5 and (other in (text, answer) or (text, other) in pairs or (other, answer) in pairs)
    ]
    assert found.dtype == torch.int64 and found.tolist() == looked_up
    alone = false_negative_queries(query, positive, own, everyone, known_query[:0], known[:0])
    assert len(alone) < len(found)  # negative control: known positives matter
