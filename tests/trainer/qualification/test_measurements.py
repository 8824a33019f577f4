"""Each comparison of a qualification passes on a sound trainer, and fails on a broken one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.shards.reader import ShardFolder
from models.sizes import Ladder
from trainer.config.schema import Recipe
from trainer.distributed import World
from trainer.qualification import attention, cross_entropy, made_up, precision, ranks, resume, settings, steps
from trainer.qualification.lines import Outcome
from trainer.qualification.passes import Plain, Subject, largest_angle, relative_error
from trainer.qualification.settings import SHIPPED, TASKS, TINY, Setting, recipe_of, recipe_values


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setattr(settings, "QUICK_ON_CPU", TINY)
    return Setting(tmp_path, quick=True, cuda=False)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up.write(tmp_path_factory.mktemp("made_up"), TINY)


def recipe_for(task: str, shards: Path, ds_config: str = "zero0_float32.json", **sections: Any) -> Recipe:
    values = recipe_values(task, TINY, shards, ds_config=SHIPPED / ds_config, output=shards / "run")
    for section, table in sections.items():
        values[section] |= table
    return recipe_of(values)


def verdicts(asked: list[Any], part: str) -> list[str]:
    return [each.measure().verdict for each in asked if part in each.question]


# --- attention ---------------------------------------------------------------------------------------------------


def test_packed_attention_is_padded_attention(setting: Setting) -> None:
    assert verdicts(attention.asked(setting), "packed = padded") == ["passed"] * 4
    assert verdicts(attention.asked(setting), "fused kernel") == ["not answered"]


@pytest.mark.parametrize("dtype", attention.TOLERANCES)
@pytest.mark.parametrize("family", ["BERT", "decoder"])
def test_a_wrong_mask_of_packed_texts_is_noticed(setting: Setting, family: str, dtype: torch.dtype) -> None:
    """One text reads a token of the next one."""
    encoder, texts = attention.encoder_of(setting, family).to(dtype), attention.texts_of(setting)
    sizes = Ladder.of(TINY.ladder)
    padded = attention.vectors_and_gradient(encoder, texts, "sdpa", sizes)
    moved = texts.offsets.clone()
    moved[1] += 1
    packed = attention.vectors_and_gradient(encoder, replace(texts, offsets=moved), "packed", sizes)
    assert attention.compared(packed, padded, attention.TOLERANCES[dtype]).verdict == "failed"


def test_kernels_are_known_by_their_names() -> None:
    seen = {"aten::addmm", "aten::_flash_attention_forward", "flash_fwd_kernel<Flash_fwd_kernel_traits>"}
    outcome = attention.judged_kernels(seen)
    assert outcome.verdict == "passed" and "flash_fwd_kernel" in outcome.figure
    assert attention.judged_kernels({"aten::addmm", "fmha_cutlassF_bf16_aligned"}).verdict == "failed"
    assert attention.judged_kernels({"aten::addmm"}).verdict == "failed"


# --- precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", precision.WAYS)
def test_bf16_is_float32_within_its_rounding(setting: Setting, way: str) -> None:
    assert verdicts(precision.asked(setting), way) == ["passed"] * len(TASKS)


def test_a_perturbed_weight_is_more_than_rounding(shards: Path) -> None:
    subject = Subject(recipe_for("SRL", shards))
    engine = Plain(subject.parts.module, torch.device("cpu"))
    wanted = precision._results(subject, engine)
    assert precision.compared(wanted, wanted, "SRL").verdict == "passed"
    with torch.no_grad():
        subject.parts.encoder.word_embeddings.weight[5:205] *= 1.2
    assert precision.compared(precision._results(subject, engine), wanted, "SRL").verdict == "failed"


def test_errors_are_of_all_numbers_and_angles_of_the_worst_text() -> None:
    wanted = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    found = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    assert relative_error(found, wanted) == pytest.approx((2 / 26) ** 0.5)
    assert largest_angle([wanted, found], [wanted, wanted]) == pytest.approx(1.0)


# --- cross-entropy -----------------------------------------------------------------------------------------------


def test_the_fused_cross_entropy_is_the_naive_one(setting: Setting) -> None:
    asked = cross_entropy.asked(setting)
    assert verdicts(asked, "fused = naive") == ["passed"] * 4
    assert verdicts(asked, "peak memory") == ["not answered"]


@pytest.mark.parametrize("dtype", cross_entropy.TOLERANCES)
@pytest.mark.parametrize("wrong", ["no bias", "rows alike", "a row left out"])
def test_a_wrong_cross_entropy_is_noticed(setting: Setting, wrong: str, dtype: torch.dtype) -> None:
    def form(given: cross_entropy.Given) -> Tensor:
        if wrong == "no bias":
            assert given.bias is not None
            logits = F.linear(given.rows, given.table) + 0.0 * given.bias
        else:
            logits = F.linear(given.rows, given.table, given.bias)
        losses = F.cross_entropy(logits.float(), given.targets, reduction="none")
        weights = given.row_weights.mean().expand(len(losses)) if wrong == "rows alike" else given.row_weights
        return (losses * weights)[int(wrong == "a row left out") * 8 :].sum()

    assert cross_entropy.equality(form, lambda: cross_entropy.given_for(setting), dtype).verdict == "failed"


def test_a_form_that_holds_all_logits_is_noticed() -> None:
    assert cross_entropy.judged_memory(300e6, 1000e6, 0.5).verdict == "passed"
    assert cross_entropy.judged_memory(900e6, 1000e6, 0.5).verdict == "failed"


# --- ranks and resume --------------------------------------------------------------------------------------------


@pytest.mark.launch  # it trains six times
@pytest.mark.parametrize("task", TASKS)
def test_another_seed_and_a_perturbed_weight_are_not_one_process(setting: Setting, shards: Path, task: str) -> None:
    def trained(seed: int) -> ranks.Trained:
        recipe = recipe_for(task, shards, run={"seed": seed}, train={"steps": 2})
        saved: Any = ranks._train_alone(recipe, setting)
        return ranks.Trained(saved["losses"], saved["parameters"])

    wanted = trained(7)
    assert ranks.compared(trained(7), wanted).verdict == "passed"
    assert ranks.compared(trained(8), wanted).verdict == "failed"
    assert ranks.compared(trained(8), wanted, in_bf16=True).verdict == "failed"
    name = next(iter(wanted.parameters))
    moved = wanted.parameters[name].clone()
    moved.view(-1)[0] += 1e-4
    assert ranks.compared(replace(wanted, parameters={**wanted.parameters, name: moved}), wanted).verdict == "failed"
    slightly = [loss * (1 + 2e-5) for loss in wanted.losses]
    assert ranks.compared(replace(wanted, losses=slightly), wanted).verdict == "failed"


def test_one_bit_is_noticed_after_a_resume() -> None:
    wanted = {"a": torch.arange(6.0), "b": torch.ones(2, 2)}
    same = {name: value.clone() for name, value in wanted.items()}
    assert resume.compared(same, wanted, repeated=same, since="killed").verdict == "passed"
    other = {**same, "b": torch.nextafter(wanted["b"], torch.tensor(2.0))}
    outcome = resume.compared(other, wanted, repeated=same, since="killed")
    assert outcome.verdict == "failed" and outcome.values == {"numbers that differ": 4}
    assert resume.compared({"a": same["a"]}, wanted, repeated=same, since="killed").verdict == "failed"
    # Where a repeated run differs as well, a resumed one cannot be judged.
    assert resume.compared(other, wanted, repeated=other, since="killed").verdict == "not answered"


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    assert resume.saved_step(tmp_path / "none") is None
    for name in ("step_00000003", "tmp-step_00000009", "latest"):
        (tmp_path / name).mkdir()
    assert resume.saved_step(tmp_path) == 3


# --- whole steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_a_step_is_that_of_the_direct_way(setting: Setting, shards: Path, task: str) -> None:
    assert steps.equality(recipe_for(task, shards), task, setting).verdict == "passed"


def at_another_temperature(module: Any, batch: Any, recipe: Recipe) -> float:
    return steps.direct.train_contrastive(module, batch, recipe_for_temperature(recipe, 0.06))


def recipe_for_temperature(recipe: Recipe, temperature: float) -> Recipe:
    return replace(recipe, objective=replace(recipe.objective, temperature=temperature))


def of_another_size(module: Any, batch: Any, recipe: Recipe) -> float:
    ladder = [[1, 8], *recipe.model.ladder[1:]]
    return steps.direct.train_masked(module, batch, replace(recipe, model=replace(recipe.model, ladder=ladder)))


@pytest.mark.parametrize(("task", "other"), [("SRL", at_another_temperature), ("SMAE", of_another_size)])
def test_another_loss_is_noticed(
    setting: Setting, shards: Path, monkeypatch: pytest.MonkeyPatch, task: str, other: Callable[..., float]
) -> None:
    monkeypatch.setitem(steps._TRAIN, task, other)
    assert steps.equality(recipe_for(task, shards), task, setting).verdict == "failed"


def test_a_slower_or_larger_step_is_noticed() -> None:
    ours, others = {"seconds": 1.0, "added_bytes": 2e9}, {"seconds": 3.0, "added_bytes": 5e9}
    verdicts: dict[bool, Callable[..., Outcome]] = {True: steps.speed, False: steps.memory}
    for judge in verdicts.values():
        assert judge(ours, others).verdict == "passed"
        assert judge(others, ours).verdict == "failed"


# --- the data ----------------------------------------------------------------------------------------------------


def test_the_made_up_data_is_the_same_every_time(shards: Path, tmp_path: Path) -> None:
    again = made_up.write(tmp_path, TINY)
    for name in ("documents", "tuples"):
        first, second = (ShardFolder(folder / name) for folder in (shards, again))
        assert first.manifest == second.manifest


def test_a_plain_engine_is_one_rank() -> None:
    engine = Plain(torch.nn.Linear(2, 2), torch.device("cpu"))
    assert engine.world == World.alone("cpu")
    engine.backward(engine(torch.ones(1, 2)).sum())
    assert engine.module.weight.grad is not None
