"""Which sizes a step trains (docs/objectives.md), learning rates, and what decays."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import get_args

import pytest
import torch
from torch import nn
from transformers import TrainingArguments, get_scheduler

from models.encoder import build_masked_lm
from models.masked_autoencoder import MaskedAutoencoder
from models.sizes import STARBUCKS_LADDER, Ladder, Size
from tests.trainer.support import MODEL
from trainer.config.schema import keys_of
from trainer.config.step_sizes import ALONE, DRAWN, EVERY_DEPTH, FIXED, SEVERAL, StepSizes
from trainer.objectives import size_schedules
from trainer.objectives.size_schedules import build_schedule, two_dimensional
from trainer.optim import adamw, hidden_matrices, learning_rate, parameter_groups

LADDER = Ladder.of([[2, 8], [4, 16], [6, 24]])


def schedule(kind: str, *, reduction: str = "mean", seed: int = 0, size: Size | None = None):
    return build_schedule(StepSizes(kind, LADDER, size), reduction=reduction, seed=seed)


@pytest.mark.parametrize(("reduction", "weight"), [("mean", 1 / 3), ("sum", 1.0)])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("ladder", [(2, 8), (4, 16), (6, 24)]),
        ("mrl", [(6, 8), (6, 16), (6, 24)]),
        ("adaptive_layers", [(2, 24), (4, 24), (6, 24)]),
    ],
)
def test_fixed_schedules(kind: str, sizes: list[tuple[int, int]], reduction: str, weight: float) -> None:
    """L_S and L_KL are 1/|S| Σ (or Σ) over the sizes; the teacher has no KL to itself."""
    plans = [schedule(kind, reduction=reduction)(step) for step in (0, 1, 500)]
    assert plans[0] == plans[1] == plans[2]
    plan = plans[0]
    assert plan.sizes == tuple(Size(*pair) for pair in sizes)
    assert plan.loss_weights == pytest.approx((weight,) * 3)
    assert plan.kl_weights == pytest.approx((weight, weight, 0.0))
    assert plan.sizes[plan.full] == LADDER.full
    assert len(set(plan.names)) == 3


@pytest.mark.parametrize(("kind", "size"), [("full", Size(6, 24)), ("one", Size(3, 10))])
def test_schedules_of_one_size(kind: str, size: Size) -> None:
    plan = schedule(kind, size=size)(3)
    assert (plan.sizes, plan.loss_weights, plan.kl_weights) == ((size,), (1.0,), (0.0,))


@pytest.mark.parametrize(("reduction", "weight"), [("mean", 1 / 3), ("sum", 1.0)])
@pytest.mark.parametrize("kind", ["ladder", "mrl", "adaptive_layers"])
def test_weights_a_size(kind: str, reduction: str, weight: float) -> None:
    """They multiply what the reduction gives, and are not normalised: factors of 1 change nothing."""
    sizes, common = StepSizes(kind, LADDER), {"reduction": reduction, "seed": 0}
    plain = build_schedule(sizes, **common)(0)
    plan = build_schedule(sizes, size_weights=[0.5, 2.0, 3.0], kl_size_weights=[4.0, 0.0], **common)(7)
    assert plan.loss_weights == pytest.approx((0.5 * weight, 2 * weight, 3 * weight))
    assert plan.kl_weights == pytest.approx((4 * weight, 0.0, 0.0))
    assert (plan.names, plan.sizes) == (plain.names, plain.sizes)
    assert build_schedule(sizes, size_weights=[1.0] * 3, kl_size_weights=[1.0] * 2, **common)(0) == plain
    only_kl = build_schedule(sizes, kl_size_weights=[4.0, 1.0], **common)(0)
    assert only_kl.loss_weights == plain.loss_weights
    assert only_kl.kl_weights == pytest.approx((4 * weight, weight, 0.0))


@pytest.mark.parametrize(("weighting", "of_two", "of_four"), [("log", 0.590616, 0.419060), ("linear", 0.5, 0.25)])
@pytest.mark.parametrize("kind", ["ladder", "adaptive_layers", "grid", "two_d", "two_d_all_widths"])
def test_losses_are_weighted_by_their_layers(kind: str, weighting: str, of_two: float, of_four: float) -> None:
    """ESE's 1 / (1 + ln n), or 1 / n, below the last layer. The KL keeps its weights; another teacher's KL follows."""
    sizes, common = StepSizes(kind, LADDER), {"reduction": "mean", "seed": 3}
    plain, plan = build_schedule(sizes, **common), build_schedule(sizes, layer_weighting=weighting, **common)
    steps = [step for step in range(40) if plain(step).sizes[0].layers in (2, 4)]
    assert steps
    for step in steps:
        factors = [{2: of_two, 4: of_four, 6: 1.0}[size.layers] for size in plain(step).sizes]
        expected = [weight * factor for weight, factor in zip(plain(step).loss_weights, factors)]
        assert plan(step).loss_weights == pytest.approx(expected, abs=1e-6)
        assert (plan(step).sizes, plan(step).kl_weights) == (plain(step).sizes, plain(step).kl_weights)
    assert build_schedule(sizes, layer_weighting="uniform", **common)(steps[0]) == plain(steps[0])
    outside = build_schedule(sizes, layer_weighting=weighting, teacher_outside=True, **common)(steps[0])
    assert outside.kl_weights == outside.loss_weights


def test_names_are_the_cups_of_a_ladder_of_six() -> None:
    plan = build_schedule(StepSizes("ladder", STARBUCKS_LADDER), reduction="mean", seed=0)(0)
    assert plan.names == ("demi", "short", "tall", "grande", "venti", "trenta")
    assert schedule("ladder")(0).names == ("2x8", "4x16", "6x24")


def test_two_dimensional_matryoshka() -> None:
    """Eq. 3: L_n^d + L_n^D + L_N^d + L_N^D, KL from (N, D) to (n, ·)."""
    for step in range(50):
        plan = schedule("two_d", reduction="mean")(step)
        n, d = plan.sizes[0].layers, plan.sizes[0].dim
        assert plan.sizes == (Size(n, d), Size(n, 24), Size(6, d), Size(6, 24))
        assert plan.loss_weights == (1.0,) * 4
        assert plan.kl_weights == (1.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize("kind", EVERY_DEPTH)
def test_every_depth(kind: str) -> None:
    """ESE: every layer, not the ladder's alone, at its smaller widths; 1/(N−1) · 1/(1 + ln n) below the last layer."""
    widths = (8, 16, 24) if kind == "espresso_full_width" else (8, 16)
    plan = build_schedule(StepSizes(kind, LADDER), reduction="mean", seed=0, layer_weighting="log")(5)
    below = [Size(n, d) for n in range(1, 6) for d in widths]
    assert plan.sizes == (*below, Size(6, 8), Size(6, 16), Size(6, 24))
    expected = [1 / 5 / (1 + math.log(size.layers)) for size in below] + [1.0] * 3
    assert plan.loss_weights == pytest.approx(expected)
    assert plan.kl_weights == pytest.approx([1 / 5] * len(below) + [1.0, 1.0, 0.0])
    assert plan.names == tuple(map(str, plan.sizes)) and not plan.uncompared


def test_depths_are_embedded_whole_where_a_loss_reads_them() -> None:
    """They come first, so that the full size stays the last, and without weight."""
    common = {"reduction": "mean", "seed": 0}
    plain = schedule("ladder")(0)
    plan = build_schedule(StepSizes("ladder", LADDER), whole_vectors=True, **common)(0)
    assert plan.sizes == (Size(2, 24), Size(4, 24), *plain.sizes)
    assert plan.uncompared == 2 and plan.loss_weights[:2] == plan.kl_weights[:2] == (0.0, 0.0)
    assert plan.compared == plain
    for kind in ("grid", "mrl", "two_d", "two_d_all_widths", "espresso_full_width"):  # which have all of them
        sizes = StepSizes(kind, LADDER)
        assert build_schedule(sizes, whole_vectors=True, **common)(7) == build_schedule(sizes, **common)(7)


def test_every_kind_that_a_recipe_can_name_is_of_one_sort() -> None:
    kinds = [*SEVERAL, *ALONE, *DRAWN, *EVERY_DEPTH]
    assert len(kinds) == len(set(kinds)) and set(kinds) == set(get_args(keys_of("objective")["sizes"].annotation))
    assert set(size_schedules._DRAWING) == set(DRAWN)


ONE = Size(3, 10)


def mean_sizes(kind: str, *, steps: int) -> list[tuple[float, float]]:
    """Mean layers and dimensions of each place in a schedule's plans."""
    plan = schedule(kind, size=ONE)
    places = list(zip(*(plan(step).sizes for step in range(steps)), strict=True))
    return [(fmean(size.layers for size in place), fmean(size.dim for size in place)) for place in places]


def planned(kind: str) -> list[tuple[int, int]]:
    return [(size.layers, size.dim) for size in StepSizes(kind, LADDER, ONE).planned]


@pytest.mark.parametrize("kind", [*FIXED, *EVERY_DEPTH])
def test_what_is_planned_and_shown_of_fixed_sizes_is_what_is_trained(kind: str) -> None:
    sizes, plan = StepSizes(kind, LADDER, ONE), schedule(kind, size=ONE)(0)
    assert plan.sizes == sizes.fixed == sizes.planned
    assert set(sizes.shown) == set(LADDER) | set(plan.sizes) and list(sizes.shown) == sorted(sizes.shown)
    # Negative control: no other kind of as many sizes would pass.
    others = [
        each for each in (*FIXED, *EVERY_DEPTH) if each != kind and StepSizes(each, LADDER, ONE).fixed == plan.sizes
    ]
    assert not others


@pytest.mark.parametrize("kind", DRAWN)
def test_what_is_planned_of_drawn_sizes_is_their_mean(kind: str) -> None:
    """To a layer's rounding, and to what 2,000 draws leave of chance: five standard deviations of 23 widths are 0.8."""
    drawn = mean_sizes(kind, steps=2000)
    assert near(planned(kind), drawn)
    # Negative control: what another kind draws is noticed.
    assert not any(near(planned(other), drawn) for other in DRAWN if other != kind)
    # Every chart's own line is a size that every step trains, or the ladder's.
    always = set.intersection(*(set(schedule(kind)(step).sizes) for step in range(200)))
    assert set(StepSizes(kind, LADDER).shown) == set(LADDER) | always


def near(sizes: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> bool:
    return len(sizes) == len(others) and all(
        abs(a[0] - b[0]) < 0.7 and abs(a[1] - b[1]) < 1.0 for a, b in zip(sizes, others)
    )


def test_two_dimensional_matryoshka_of_sentence_transformers() -> None:
    """L_N^d + L_n^d' / n with widths of the ladder, KL at (n, D) alone."""
    drawn = set()
    for step in range(400):
        plan = schedule("two_d_listed")(step)
        n, inner, outer = plan.sizes[0].layers, plan.sizes[0].dim, plan.sizes[2].dim
        assert plan.sizes == (Size(n, inner), Size(n, 24), Size(6, outer), Size(6, 24))
        assert plan.loss_weights == (1 / n, 0.0, 1.0, 0.0)
        assert plan.kl_weights == (0.0, 1.0, 0.0, 0.0)
        drawn.add((n, inner, outer))
    assert drawn == {(n, a, b) for n in range(1, 6) for a in (8, 16, 24) for b in (8, 16, 24)}


def test_two_dimensional_matryoshka_of_all_widths() -> None:
    """One of the ladder's layers below the last, all widths at it and at the last, KL to the full size."""
    drawn = Counter()
    for step in range(400):
        plan = schedule("two_d_all_widths")(step)
        n = plan.sizes[0].layers
        assert plan.sizes == tuple(Size(layers, dim) for layers in (n, 6) for dim in (8, 16, 24))
        assert plan.loss_weights == (1.0,) * 6
        assert plan.kl_weights == (1.0,) * 5 + (0.0,)
        drawn[n] += 1
    assert set(drawn) == {2, 4}
    assert abs(drawn[2] - 200) < 5 * 10  # five standard deviations


@pytest.mark.parametrize("kind", DRAWN)
def test_every_drawn_schedule_depends_on_seed_and_step_alone(kind: str) -> None:
    """So all ranks and both passes of gradient caching draw alike, whatever other generators did meanwhile."""
    one, again, other = schedule(kind, seed=1), schedule(kind, seed=1), schedule(kind, seed=2)
    first = [one(step) for step in range(30)]
    torch.rand(5)
    assert [again(step) for step in reversed(range(30))] == first[::-1]
    assert [other(step) for step in range(30)] != first
    assert len({plan.names for plan in first}) == 1  # metrics keep their names


def test_two_dimensional_draws_are_uniform() -> None:
    """n ~ U(1, N−1), d ~ U(1, D−1), independent: χ² within five standard deviations."""
    steps = 6000
    plan = two_dimensional(LADDER, seed=11)
    drawn = [plan(step).sizes[0] for step in range(steps)]
    for values, count in (
        ([size.layers for size in drawn], 5),
        ([size.dim for size in drawn], 23),
        ([(size.layers, size.dim) for size in drawn], 5 * 23),
    ):
        counts = Counter(values)
        assert len(counts) == count
        expected = steps / count
        chi_squared = sum((seen - expected) ** 2 / expected for seen in counts.values())
        assert abs(chi_squared - (count - 1)) < 5 * math.sqrt(2 * (count - 1))
    assert {size.layers for size in drawn} == set(range(1, 6))
    assert {size.dim for size in drawn} == set(range(1, 24))


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
def test_learning_rate_closed_form(kind: str) -> None:
    peak, total, warmup = 2e-3, 40, 10
    rates = [
        learning_rate(step, peak=peak, total_steps=total, warmup_ratio=warmup / total, schedule=kind)
        for step in range(total)
    ]
    assert rates[:warmup] == pytest.approx([peak * step / warmup for step in range(warmup)])
    assert rates[warmup] == pytest.approx(peak)
    share = [(step - warmup) / (total - warmup) for step in range(warmup, total)]
    after = {
        "linear": [peak * (1 - part) for part in share],
        "cosine": [peak * (1 + math.cos(math.pi * part)) / 2 for part in share],
        "constant": [peak] * len(share),
    }[kind]
    assert rates[warmup:] == pytest.approx(after)
    assert min(rates[1:]) > 0


@pytest.mark.parametrize(("total", "ratio"), [(40, 0.25), (37, 0.1), (10, 0.0), (1, 0.1), (3, 0.9)])
@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
def test_learning_rates_are_transformers_own(kind: str, total: int, ratio: float) -> None:
    """Every step's rate of the scheduler that transformers' trainer builds of the same numbers."""
    arguments = TrainingArguments(warmup_steps=ratio)
    name = "constant_with_warmup" if kind == "constant" else kind
    warmup_steps = arguments.get_warmup_steps(total)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2e-3)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup_steps, num_training_steps=total)
    theirs = []
    for _ in range(total):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()

    def ours(ahead: int) -> list[float]:
        steps = range(ahead, total + ahead)
        return [learning_rate(s, peak=2e-3, total_steps=total, warmup_ratio=ratio, schedule=kind) for s in steps]

    assert ours(0) == pytest.approx(theirs, rel=1e-12, abs=1e-18)
    # Negative control: a count that is one step ahead is noticed, but where all steps have the same rate.
    all_alike = kind == "constant" and not warmup_steps
    assert (ours(1) == pytest.approx(theirs, rel=1e-12, abs=1e-18)) == all_alike


def test_learning_rate_without_warmup_and_beyond_the_end() -> None:
    arguments = {"peak": 1.0, "total_steps": 4, "warmup_ratio": 0.0}
    assert [learning_rate(s, schedule="linear", **arguments) for s in range(6)] == pytest.approx(
        [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    )
    assert learning_rate(9, schedule="cosine", **arguments) == pytest.approx(0.0)


@pytest.fixture
def autoencoder() -> MaskedAutoencoder:
    torch.manual_seed(0)
    return MaskedAutoencoder(build_masked_lm(MODEL, vocab_size=300, pad_token_id=0), pooling="cls", with_decoder=True)


def test_parameter_groups(autoencoder: MaskedAutoencoder) -> None:
    """Matrices decay, biases and norms do not; the tied table is there once, and nothing is forgotten."""
    decayed, plain = parameter_groups(autoencoder.named_parameters(remove_duplicate=False), weight_decay=0.05)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.05, 0.0)
    names: dict[int, list[str]] = {}
    for name, parameter in autoencoder.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    grouped = [id(p) for group in (decayed, plain) for p in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(p) for p in autoencoder.parameters()}
    for parameter in decayed["params"]:
        assert not any(name.endswith("bias") or "norm" in name.lower() for name in names[id(parameter)])
    for parameter in plain["params"]:
        assert all(name.endswith("bias") or "norm" in name.lower() for name in names[id(parameter)])
    table = autoencoder.encoder.word_embeddings.weight
    assert len(names[id(table)]) == 2  # the tie is real
    assert sum(p is table for p in decayed["params"]) == 1


def test_hidden_matrices(autoencoder: MaskedAutoencoder) -> None:
    """Muon's are the matrices of layers, decoder and head; tables, vectors and matrices of one row are AdamW's."""
    autoencoder.extra = nn.Linear(48, 1)
    autoencoder.encoder.backbone.encoder.layer[0].requires_grad_(False)
    found = {id(parameter) for parameter in hidden_matrices(autoencoder)}
    names = {name for name, parameter in autoencoder.named_parameters() if id(parameter) in found}
    of_a_layer = ["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"]
    of_a_layer += ["intermediate.dense", "output.dense"]
    expected = {f"encoder.backbone.encoder.layer.{n}.{name}.weight" for n in (1, 2) for name in of_a_layer}
    of_decoder = ("query", "key", "value", "attention_output", "up", "down")
    assert names == expected | {f"decoder.{name}.weight" for name in of_decoder} | {"head.weight"}


def test_frozen_parameters_and_empty_groups_are_left_out(autoencoder: MaskedAutoencoder) -> None:
    autoencoder.encoder.word_embeddings.weight.requires_grad_(False)
    groups = parameter_groups(autoencoder.named_parameters(), weight_decay=0.05)
    assert not any(p is autoencoder.encoder.word_embeddings.weight for group in groups for p in group["params"])
    assert len(parameter_groups(nn.Linear(3, 2, bias=False).named_parameters(), weight_decay=0.1)) == 1


def test_adamw_decays_only_matrices() -> None:
    """With zero gradients a step shrinks matrices by lr · decay and leaves the rest as it was."""
    module = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = adamw(module, lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.5)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in module.named_parameters():
        factor = 0.95 if name == "0.weight" else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)
