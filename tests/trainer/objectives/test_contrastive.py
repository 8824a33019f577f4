"""What the contrastive loss makes of a recipe, against the published losses restated in float64.

`loss_and_gradients` is what training calls; embeddings stand for what the encoder gave of each text and size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.collate import PairBatch, Texts
from models.sizes import Size
from tests import ROOT
from trainer.config.load import load_recipe
from trainer.config.schema import Recipe
from trainer.costs.counts import Shape
from trainer.distributed import World
from trainer.objectives.contrastive import ContrastiveObjective, contrastive
from trainer.objectives.contrastive_loss import ContrastiveLoss
from trainer.objectives.masked import PairGradients
from trainer.objectives.materials import Materials
from trainer.objectives.size_schedules import SizePlan, build_schedule

RECIPES = ROOT / "launch" / "recipes"
QUERIES, NEGATIVES = 5, 1
ALONE: Any = SimpleNamespace(world=World(0, 0, 1, torch.device("cpu")), device=torch.device("cpu"))


def objective_of(recipe: Recipe, **changed: Any) -> ContrastiveObjective:
    """As a recipe with other settings in [objective] makes it."""
    recipe = replace(recipe, objective=replace(recipe.objective, **changed))
    schedule = build_schedule(
        recipe.step_sizes,
        reduction=recipe.objective.reduction,
        seed=recipe.run.seed,
        layer_weighting=recipe.objective.layer_weighting,
        whole_vectors=recipe.compresses,
    )
    objective = contrastive(recipe, Materials(schedule, Shape(768, 3072, 12, 100), packed=False))
    assert isinstance(objective, ContrastiveObjective)
    return objective


def batch_of() -> PairBatch:
    """Five queries with a positive and a negative each. Passages 0, 4 and 5 are one text, queries 0 and 2 another."""
    count = QUERIES * (1 + NEGATIVES)
    passages = torch.arange(100, 100 + count)
    passages[[4, 5]] = 100
    queries = torch.arange(QUERIES)
    queries[2] = 0
    targets = torch.arange(0, count, 1 + NEGATIVES)
    return PairBatch(
        queries=Texts(torch.zeros(QUERIES, dtype=torch.int32), torch.arange(QUERIES + 1)),
        passages=Texts(torch.zeros(count, dtype=torch.int32), torch.arange(count + 1)),
        targets=targets,
        passage_query=torch.arange(QUERIES).repeat_interleave(1 + NEGATIVES),
        scores=None,
        query_hashes=queries,
        passage_hashes=passages,
        known_hashes=passages[targets],
        known_offsets=torch.arange(QUERIES + 1),
        sample_ids=torch.arange(QUERIES),
    )


def states_of(sizes: Sequence[Size]) -> dict[int, Tensor]:
    """layer -> vectors [queries + passages, D] that stand for its output."""
    generator = torch.Generator().manual_seed(0)
    count, width = QUERIES * (2 + NEGATIVES), sizes[-1].dim
    layers = sorted({size.layers for size in sizes})
    return {n: torch.randn(count, width, generator=generator, dtype=torch.float64) / 8 for n in layers}


Loss = Callable[[dict[int, Tensor]], Tensor]


def compare(loss: ContrastiveLoss, plan: SizePlan, naive: Loss, batch: PairBatch | None = None) -> tuple[float, float]:
    """Relative differences of the loss and, over the largest entry, of the gradient of every layer's vectors."""
    states = {layer: each.requires_grad_() for layer, each in states_of(plan.sizes).items()}
    expected = naive(states)
    wanted = torch.autograd.grad(expected, list(states.values()), allow_unused=True)
    embeddings = [states[size.layers][:, : size.dim].detach().float().clone() for size in plan.sizes]
    losses, gradients = loss.loss_and_gradients(embeddings, batch or batch_of(), plan, ALONE)
    got = {layer: torch.zeros_like(each) for layer, each in states.items()}
    for size, gradient in zip(plan.sizes, gradients, strict=True):
        got[size.layers][:, : size.dim] += gradient.double()
    worst = 0.0
    for mine, own in zip(got.values(), wanted):
        own = torch.zeros_like(mine) if own is None else own
        worst = max(worst, float((mine - own).abs().max() / own.abs().max().clamp(min=1e-9)))
    return abs(float(losses["loss"]) - float(expected.detach())) / float(expected.detach()), worst


def infonce(states: Tensor, dim: int, *, cosine: bool, temperature: float) -> Tensor:
    """Every passage of the batch is a candidate, equal texts too, as in Tevatron and MultipleNegativesRankingLoss."""
    cut = F.normalize(states[:, :dim], dim=1) if cosine else states[:, :dim]
    scores = cut[:QUERIES] @ cut[QUERIES:].T / temperature
    return F.cross_entropy(scores, torch.arange(0, QUERIES * (1 + NEGATIVES), 1 + NEGATIVES))


def score_kl(states: Tensor, dim: int, full: Tensor, *, cosine: bool, temperature: float) -> Tensor:
    def scores(each: Tensor) -> Tensor:
        each = F.normalize(each, dim=1) if cosine else each
        return each[:QUERIES] @ each[QUERIES:].T / temperature

    teacher = scores(full).softmax(1).detach()
    return F.kl_div(scores(states[:, :dim]).log_softmax(1), teacher, reduction="batchmean")


def assert_equal_but_for(recipe: Recipe, controls: Sequence[dict[str, Any]], plan: SizePlan, naive: Loss) -> None:
    """Equal as it is; each control, a changed setting, is noticed in the loss and in the gradient."""
    loss_error, gradient_error = compare(objective_of(recipe).loss, plan, naive)
    assert loss_error < 1e-6
    assert gradient_error < 1e-5
    for changed in controls:
        loss_error, gradient_error = compare(objective_of(recipe, **changed).loss, plan, naive)
        assert loss_error > 1e-4, changed
        assert gradient_error > 1e-3, changed


def test_several_positives_share_their_querys_loss() -> None:
    """1/n Σ_i w_i / |P_i| Σ_{p ∈ P_i} −log e^{s_ip} / (e^{s_ip} + Σ_{j ∉ P_i} e^{s_ij}), equal texts or not."""
    recipe = load_recipe(RECIPES / "srl_without_kl_msmarco.toml")
    plan = objective_of(recipe).schedule(0)
    assert not recipe.objective.mask_false_negatives
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0])
    own = {0: [0, 1], 1: [2], 2: [4, 5], 3: [6], 4: [8, 9]}  # of each query's two passages, the positives
    owners = torch.tensor([query for query, columns in own.items() for _ in columns])
    targets = torch.tensor([column for columns in own.values() for column in columns])
    batch = replace(batch_of(), targets=targets, target_query=owners, weights=weights)

    def naive(states: dict[int, Tensor], *, among: bool = False) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for size, size_weight in zip(plan.sizes, plan.loss_weights):
            cut = states[size.layers][:, : size.dim]
            scores = cut[:QUERIES] @ cut[QUERIES:].T / recipe.objective.temperature
            for query, columns in own.items():
                for positive in columns:
                    others = [j for j in range(scores.shape[1]) if j not in columns or j == positive or among]
                    term = torch.logsumexp(scores[query, others], 0) - scores[query, positive]
                    total = total + size_weight * weights[query] / len(columns) * term / QUERIES
        return total

    loss_error, gradient_error = compare(objective_of(recipe).loss, plan, naive, batch)
    assert loss_error < 1e-6
    assert gradient_error < 1e-5
    # Negative controls: the other positives in the denominator, one row a query, and no weights.
    wrong = [compare(objective_of(recipe).loss, plan, lambda states: naive(states, among=True), batch)]
    first = torch.tensor([columns[0] for columns in own.values()])
    for changed in ({"targets": first, "target_query": None}, {"weights": None}):
        wrong.append(compare(objective_of(recipe).loss, plan, naive, replace(batch, **changed)))
    for loss_error, gradient_error in wrong:
        assert loss_error > 1e-3
        assert gradient_error > 1e-3


def test_the_released_sts_loss() -> None:
    """Σ over sizes of MNRL, and of 0.3 · kl_div(log_softmax(p[:, :d]), softmax(q[:, :d]), "batchmean"), q trains too.

    sts/starbucks_loss.py in ielab/Starbucks: its kl_temperature is a factor, and divides nothing.
    """
    recipe = load_recipe(RECIPES / "srl_nli_released_code.toml")
    plan = objective_of(recipe).schedule(0)

    def divergence(states: dict[int, Tensor]) -> Tensor:
        p, q = [states[size.layers][:, : size.dim] for size in plan.sizes], states[12]
        terms = [
            0.3 * F.kl_div(F.log_softmax(each, dim=-1), F.softmax(q[:, : each.shape[1]], dim=-1), reduction="batchmean")
            for each in p[:-1]
        ]
        return torch.stack(terms).sum()

    def naive(states: dict[int, Tensor]) -> Tensor:
        own = [infonce(states[size.layers], size.dim, cosine=True, temperature=1 / 20) for size in plan.sizes]
        return torch.stack(own).sum() + divergence(states)

    former = {"kl_weight": 1.0, "kl_temperature": 0.3}  # which divides the coordinates: AdaptiveLayerLoss
    others: list[dict[str, Any]] = [{"kl_weight": 1.0}, {"mask_false_negatives": True}]
    assert_equal_but_for(recipe, [former, *others], plan, naive)
    detached = compare(objective_of(recipe, detach_teacher=True).loss, plan, naive)
    assert detached[1] > 1e-3  # the loss is the same number
    # The KL term alone: what the loss loses with it.
    states = states_of(plan.sizes)

    def loss_of(chosen: ContrastiveLoss) -> float:
        embeddings = [states[size.layers][:, : size.dim].float().clone() for size in plan.sizes]
        return float(chosen.loss_and_gradients(embeddings, batch_of(), plan, ALONE)[0]["loss"])

    term = loss_of(objective_of(recipe).loss) - loss_of(objective_of(recipe, kl="none").loss)
    assert term == pytest.approx(float(divergence(states)), rel=1e-4)
    term = loss_of(objective_of(recipe, **former).loss) - loss_of(objective_of(recipe, kl="none").loss)
    assert term != pytest.approx(float(divergence(states)), rel=1e-1)


def test_the_released_sts_loss_as_the_authors_code_computes_it() -> None:
    """Numbers from sts/starbucks_loss.py itself, for nine texts of one token with these hidden states.

    On 2026-11-24, StarbucksLoss of ielab/Starbucks (commit 2a3b24f; sentence-transformers 6.2.0) ran unchanged in
    float64 over MultipleNegativesRankingLoss, on a model of a module that returns these states and of mean pooling,
    with layers 2 to 12 and widths 32 to 768. `without_kl` is its loss with kl_temperature = 0; the norms are those of
    its gradients with respect to the states of each layer.
    """
    texts, queries = 9, 3  # t = 1, 2, 3 are the queries, 4, 5, 6 their positives, and 7, 8, 9 their negatives
    loss_of_theirs, without_kl = 18.163413251504675, 17.923609894301997
    norms = {2: 7.120903793, 4: 4.299475414, 6: 3.109386166, 8: 2.290034176, 10: 1.790476046, 12: 1.254898981}
    recipe = load_recipe(RECIPES / "srl_nli_released_code.toml")
    plan = objective_of(recipe).schedule(0)
    t = torch.arange(1, texts + 1, dtype=torch.float64)[:, None]
    j = torch.arange(1, 769, dtype=torch.float64)
    order = [0, 1, 2, *(3, 6), *(4, 7), *(5, 8)]  # our passages: each query's positive, then its negative
    states = {n: (torch.sin(0.7 * t * j + 0.3 * n * t) / 2 + torch.cos(n + j) / 4)[order].float() for n in norms}
    batch = PairBatch(
        queries=Texts(torch.zeros(queries, dtype=torch.int32), torch.arange(queries + 1)),
        passages=Texts(torch.zeros(6, dtype=torch.int32), torch.arange(7)),
        targets=torch.tensor([0, 2, 4]),
        passage_query=torch.arange(queries).repeat_interleave(2),
        scores=None,
        query_hashes=torch.arange(queries),
        passage_hashes=torch.arange(100, 106),
        known_hashes=torch.tensor([100, 102, 104]),
        known_offsets=torch.arange(queries + 1),
        sample_ids=torch.arange(queries),
    )

    def run(**changed: Any) -> tuple[float, dict[int, float]]:
        embeddings = [states[size.layers][:, : size.dim].clone() for size in plan.sizes]
        losses, gradients = objective_of(recipe, **changed).loss.loss_and_gradients(embeddings, batch, plan, ALONE)
        return float(losses["loss"]), {size.layers: float(g.norm()) for size, g in zip(plan.sizes, gradients)}

    loss, ours = run()
    assert loss == pytest.approx(loss_of_theirs, rel=1e-6)
    assert ours == pytest.approx(norms, rel=1e-5)
    assert run(kl="none")[0] == pytest.approx(without_kl, rel=1e-6)
    # Negative controls: the setting before version 0.2.0, which divides the coordinates by 0.3, and a fixed teacher.
    assert run(kl_weight=1.0, kl_temperature=0.3)[0] != pytest.approx(loss_of_theirs, rel=1e-3)
    assert run(detach_teacher=True)[1] != pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "factor", "mean"),
    [("srl_nli", 0.3, True), ("srl_msmarco", 1.0, True), ("srl_msmarco_released_code", 1.0, False)],
)
def test_srl_with_scores(name: str, factor: float, mean: bool) -> None:
    """Eq. 4 and 5 with table 5's and table 6's kl_temperature as the factor that it is in the code."""
    recipe = load_recipe(RECIPES / f"{name}.toml")
    plan = objective_of(recipe).schedule(0)
    options: dict[str, Any] = {"cosine": "nli" in name, "temperature": 0.05 if "nli" in name else 1.0}

    def naive(states: dict[int, Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for size in plan.sizes:
            total = total + infonce(states[size.layers], size.dim, **options)
            if size != plan.sizes[-1]:
                total = total + factor * score_kl(states[size.layers], size.dim, states[12], **options)
        return total / len(plan.sizes) if mean else total

    assert_equal_but_for(recipe, [{"kl_weight": 2.0}, {"mask_false_negatives": True}], plan, naive)


def drawn(recipe: Recipe, wanted: Callable[[SizePlan], bool]) -> SizePlan:
    return next(plan for plan in map(objective_of(recipe).schedule, range(1000)) if wanted(plan))


WIDTHS = (32, 64, 128, 256, 512, 768)


@pytest.mark.parametrize(("inner", "outer"), [(64, 256), (768, 32), (128, 768), (768, 768)])
def test_the_papers_sts_baseline(inner: int, outer: int) -> None:
    """Matryoshka2dLoss(model, MNRL, [768, 512, 256, 128, 64, 32]) of sentence-transformers 3.x, as sts/ runs it.

    The last layer at one width, a drawn layer n at another, weighted 1/n, and 0.3 · KL(softmax(t/0.3) ||
    softmax(s/0.3)) over all coordinates of the two, through the teacher too.
    """
    recipe = load_recipe(RECIPES / "two_d_nli_released_code.toml")
    plan = drawn(recipe, lambda plan: (plan.sizes[0].dim, plan.sizes[2].dim) == (inner, outer))
    n = plan.sizes[0].layers
    assert 1 <= n <= 11 and {inner, outer} <= set(WIDTHS)

    def naive(states: dict[int, Tensor]) -> Tensor:
        options: dict[str, Any] = {"cosine": True, "temperature": 1 / 20}
        last, layer = infonce(states[12], outer, **options), infonce(states[n], inner, **options)
        final = F.softmax(states[12] / 0.3, dim=-1)
        return last + layer / n + 0.3 * F.kl_div(F.log_softmax(states[n] / 0.3, dim=-1), final, reduction="batchmean")

    assert_equal_but_for(recipe, [{"kl_temperature": 1.0}, {"mask_false_negatives": True}], plan, naive)
    # Negative control: eq. 3's four losses at the same draw are another loss.
    eq_3 = replace(plan, loss_weights=(1.0,) * 4, kl_weights=(1.0, 1.0, 0.0, 0.0))
    loss_error, gradient_error = compare(objective_of(recipe).loss, eq_3, naive)
    assert loss_error > 1e-3 and gradient_error > 1e-2


def test_the_papers_retrieval_baseline() -> None:
    """retrieval/modeling.py with `sub_model_sampling`: a drawn layer and the last at all widths, all terms summed."""
    recipe = load_recipe(RECIPES / "two_d_msmarco_released_code.toml")
    plan = objective_of(recipe).schedule(3)
    n = plan.sizes[0].layers
    assert n in (2, 4, 6, 8, 10)

    def naive(states: dict[int, Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for layer in (n, 12):
            for dim in WIDTHS:
                total = total + infonce(states[layer], dim, cosine=False, temperature=1.0)
                if (layer, dim) != (12, 768):
                    divergence = score_kl(states[layer], dim, states[12], cosine=False, temperature=1.0)
                    total = total + divergence
        return total

    assert_equal_but_for(recipe, [{"kl": "none"}, {"mask_false_negatives": True}], plan, naive)
    without = replace(plan, kl_weights=tuple(float(size.layers == n) for size in plan.sizes))
    loss_error, gradient_error = compare(objective_of(recipe).loss, without, naive)  # no KL to the last layer's widths
    assert loss_error > 1e-3 and gradient_error > 1e-2


def test_the_papers_equation_3() -> None:
    """`two_d`: L_n^d + L_n^D + L_N^d + L_N^D at a drawn size, KL of the scores to (n, d) and (n, D)."""
    recipe = load_recipe(RECIPES / "two_d_nli.toml")
    plan = objective_of(recipe).schedule(5)
    n, d = plan.sizes[0].layers, plan.sizes[0].dim
    options: dict[str, Any] = {"cosine": True, "temperature": 0.05}

    def naive(states: dict[int, Tensor]) -> Tensor:
        own = [infonce(states[layer], dim, **options) for layer in (n, 12) for dim in (d, 768)]
        learnt = [score_kl(states[n], dim, states[12], **options) for dim in (d, 768)]
        return torch.stack(own).sum() + 0.3 * torch.stack(learnt).sum()

    assert_equal_but_for(recipe, [{"kl_weight": 1.0}, {"temperature": 0.1}], plan, naive)


@pytest.mark.parametrize("full_width", [False, True])
def test_ese(full_width: bool) -> None:
    """ESE's L for 5 layers, k = 8 and D = 24, from its formula; and with ℓ(v_n) of every layer, as the replication.

    AnglE's (10 · IBN + 1 · CLN) / 2 beside a compression of weight 1 is here one InfoNCE beside 2 / 11 of it.
    """
    recipe = load_recipe(RECIPES / "espresso_nli.toml", ["model.ladder=[[2, 8], [5, 24]]"])
    if full_width:
        recipe = replace(recipe, objective=replace(recipe.objective, sizes="espresso_full_width"))
    plan = objective_of(recipe).schedule(0)
    options: dict[str, Any] = {"cosine": True, "temperature": 0.05}

    def distance(m: Tensor) -> Tensor:
        u, s, _ = torch.linalg.svd((m.T @ m / 24**0.5).softmax(-1).detach())
        target = m.detach() @ u[:, :8] @ s[:8].diag()
        target = target * (target * m.detach()[:, :8]).sum(0).sign()
        divergence = F.kl_div(m[:, :8].log_softmax(1), target.softmax(1), reduction="batchmean")
        return F.mse_loss(m[:, :8], target) + divergence

    def naive(states: dict[int, Tensor]) -> Tensor:
        total = infonce(states[5], 24, **options) + infonce(states[5], 8, **options) + 0.1818 * distance(states[5])
        for n in range(1, 5):
            learnt = infonce(states[n], 8, **options) + 0.1818 * distance(states[n])
            if full_width:
                learnt = learnt + infonce(states[n], 24, **options)
            total = total + learnt / (1 + math.log(n)) / 4
        return total

    assert_equal_but_for(recipe, [{"compression_weight": 5.0}, {"temperature": 0.1}], plan, naive)
    # Negative controls: layers that weigh alike, and divergences at another temperature. At the recipe's weight that
    # temperature changes gradients by 1e-3, a hundred times what the equality allows.
    for changed in ({"layer_weighting": "uniform"}, {"layer_weighting": "linear"}, {"compression_temperature": 0.01}):
        other = objective_of(recipe, **changed)
        loss_error, gradient_error = compare(other.loss, other.schedule(0), naive)
        assert loss_error > 1e-4 and gradient_error > 5e-4, changed


def test_spread_out_is_of_queries_and_of_positives() -> None:
    """EmbeddingGemma's L_S at every size: hard negatives are not spread, and each size has the weight of its loss."""
    recipe = load_recipe(RECIPES / "srl_spread_nli.toml", ["objective.kl=none"])
    plan = objective_of(recipe).schedule(0)
    options: dict[str, Any] = {"cosine": True, "temperature": 0.05}

    def spread(x: Tensor) -> Tensor:
        x = F.normalize(x, dim=1)
        terms = [(x[i] @ x[j]) ** 2 for i in range(len(x)) for j in range(len(x)) if i != j]
        return torch.stack(terms).mean()

    def naive(states: dict[int, Tensor]) -> Tensor:
        own = []
        for size in plan.sizes:
            cut = states[size.layers][:, : size.dim]
            own.append(infonce(cut, size.dim, **options) + spread(cut[:QUERIES]))
            own[-1] = own[-1] + spread(cut[QUERIES :: 1 + NEGATIVES])
        return torch.stack(own).mean()

    assert_equal_but_for(recipe, [{"spread_weight": 0.0}, {"spread_weight": 3.0}], plan, naive)


def test_a_pair_term_of_several_losses_reports_each_by_its_name() -> None:
    """Beside masked losses: InfoNCE as "pairs", the spread-out term as itself; the weight is in the sum alone."""
    found = {"loss": torch.tensor(2.0), "loss/1x16": torch.tensor(1.5), "spread/1x16": torch.tensor(0.5)}
    reported = PairGradients(found, [], 0.5, lambda rows: None).reported_with({"loss": torch.tensor(3.0)})
    assert {name: float(value) for name, value in reported.items()} == {
        "loss": 4.0,
        "pairs/1x16": 1.5,
        "spread/1x16": 0.5,
    }
