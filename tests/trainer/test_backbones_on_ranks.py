"""The table of families, its column of ranks: two ranks take the steps of one plain process.

Each family is a tiny random model of its real class (tests/models/test_backbones.py) that contrastive recipes start
from, as they would from a folder of the hub. What is expected is the restatement in `reference`. At stage 3 only rank 0
reads the folder, so these steps also show that every rank gets every weight and buffer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.test_backbones import CELLS, SIZES, Cell
from tests.needs import Lazy, needed, own
from tests.reference import first_parameters, train_naively
from tests.trainer.support import float32_ds_config, recipe_values
from tests.trainer.test_exactness import LOSS_TOLERANCE, PARAMETER_TOLERANCE, Results, differences, run_cases

pytestmark = pytest.mark.long

STAGES = (0, 1, 2, 3)
# Encoders, decoders in the direction in which they are pre-trained, and EmbeddingGemma.
FAMILIES = {str(cell): cell for cell in CELLS if cell.direction != "bidirectional" or cell.family == "gemma3_text"}
LORA = "qwen3-causal-lora"
NAMES = (*FAMILIES, LORA)
# An adapter's A has no gradient in the first step, while B is 0.
STEPS = {**dict.fromkeys(FAMILIES, 1), LORA: 2}
# Stages 0 to 2 differ in what they divide between steps, when every rank has the whole model, whatever its family.
EVERY_STAGE = ("qwen3-causal", LORA)
# In `make test`, one a stage.
LAUNCHED = [("modernbert", 0), ("qwen3-causal", 1), (LORA, 2), ("qwen3-causal", 3)]
CONTROL = "no world size factor"


@pytest.fixture(scope="module")
def recipes(tuple_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, Any]]]:
    """Recipes by name, made when they are asked for."""

    def recipe(name: str) -> dict[str, dict[str, Any]]:
        cell: Cell = FAMILIES[name.removesuffix("-lora")]
        folder = tmp_path_factory.mktemp(name)
        cell.build().save_pretrained(folder)
        model: dict[str, Any] = {"source": str(folder), "config": {}, "pooling": cell.pooling, "dropout": 0.0}
        model |= {"ladder": [[size.layers, size.dim] for size in SIZES]}
        if cell.direction is not None:
            model["direction"] = cell.direction
        if name == LORA:
            model |= {"lora_rank": 2, "lora_alpha": 6.0}
        return recipe_values(tuple_shards, model=model, optim={"lr": 0.02, "max_grad_norm": 0.0})

    return Lazy(recipe)


@pytest.fixture(scope="module")
def launched(
    request: pytest.FixtureRequest,
    launcher: None,
    recipes: dict[str, dict[str, dict[str, Any]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Results:
    """By "NAME-STAGE", and the control; stage 3 comes last, because it changes F.linear for its process."""
    folder, wanted = tmp_path_factory.mktemp("ds_configs"), needed(request)
    ds_configs = {stage: str(float32_ds_config(folder, stage)) for stage in STAGES}
    cases = []
    for stage in STAGES:
        for name in NAMES:
            if (label := f"{name}-{stage}") in wanted:
                values = recipes[name] | {"engine": {"ds_config": ds_configs[stage]}}
                cases.append({"name": label, "values": values, "steps": STEPS[name]})
    if CONTROL in wanted:
        values = recipes["qwen3-causal"] | {"engine": {"ds_config": ds_configs[1]}}
        cases.insert(0, {"name": CONTROL, "values": values, "steps": 1, "control": CONTROL})
    return run_cases(cases, wanted, tmp_path_factory.mktemp("two") / "run", ranks=2)


@pytest.fixture
def two_ranks(request: pytest.FixtureRequest, launched: Results) -> Results:
    return own(request, launched)


@pytest.fixture(scope="module")
def expected(recipes: dict[str, dict[str, dict[str, Any]]]) -> Results:
    return Lazy(lambda name: train_naively(recipes[name], steps=STEPS[name]))


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(name, stage, id=f"{name}-{stage}", marks=pytest.mark.launch if (name, stage) in LAUNCHED else ())
        for number, name in enumerate(NAMES)
        for stage in (STAGES if name in EVERY_STAGE else ((number - 1) % 3, 3))
    ],
)
@pytest.mark.needs("{name}-{stage}")
def test_two_ranks_equal_one_plain_process(
    name: str, stage: int, two_ranks: Results, expected: Results, recipes: dict[str, Any]
) -> None:
    got, want = two_ranks[f"{name}-{stage}"], expected[name]
    loss, norm, parameter = differences(got, want)
    assert loss < 10 * LOSS_TOLERANCE
    assert norm < 1e-4
    assert parameter < PARAMETER_TOLERANCE
    # The steps are long, and with adapters nothing else has moved.
    before, moved = first_parameters(recipes[name]), set()
    for key, value in got[-1]["parameters"].items():
        if not torch.equal(value, before[key]):
            moved.add(key)
    assert max(float((got[-1]["parameters"][key] - before[key]).abs().max()) for key in moved) > 1e-2
    assert name != LORA or all(".lora_" in key for key in moved)


@pytest.mark.launch
@pytest.mark.needs(CONTROL)
def test_a_broken_trainer_is_noticed(two_ranks: Results, expected: Results) -> None:
    _, _, parameter = differences(two_ranks[CONTROL], expected["qwen3-causal"])
    assert parameter > 100 * PARAMETER_TOLERANCE
