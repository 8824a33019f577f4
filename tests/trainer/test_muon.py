"""DeepSpeed's Muon takes the steps of Muon as restated in tests/reference.py, on any ranks, at every stage it is let.

Two matrices of a tiny model are never of one size with a partition, so ranks share matrices, and every rank accumulates
several micro-batches. On a CPU with fp16 units, where DeepSpeed would orthogonalise in fp16, it is told to use float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ROOT, reference
from tests.needs import Lazy, needed, own
from tests.ranks import run_ranks
from tests.reference import NaiveMuon, first_parameters, train_naively
from tests.trainer.support import float32_ds_config, recipe_values

STAGES, RANKS, STEPS = (0, 1, 2, 3), (1, 2), 3
TASKS = ("smae", "srl")
SHIPPED = ("zero0", "zero1", "zero3")  # in bf16; zero2 is refused
LOSS_TOLERANCE = 1e-5  # relative, of the third step
PARAMETER_TOLERANCE = 3e-5  # absolute, after steps that move parameters by up to 0.3

Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def recipes(document_shards: Path, tuple_shards: Path) -> dict[str, dict[str, Any]]:
    cases = {
        "smae": recipe_values(document_shards, objective={"name": "masked"}, train={"micro_batch_size": 3}),
        "srl": recipe_values(tuple_shards, train={"micro_batch_size": 3}),
    }
    for values in cases.values():
        values["optim"] |= {"name": "muon", "muon_lr": 0.1, "muon_momentum": 0.9}
        values["optim"].pop("max_grad_norm")
    return cases


@pytest.fixture(scope="module")
def launched(
    request: pytest.FixtureRequest, launcher: None, recipes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Results:
    """The steps of the needed of TASK-DS_CONFIG-RANKS."""
    folder, found, wanted = tmp_path_factory.mktemp("muon"), {}, needed(request)
    # Stage 3 comes last: it changes F.linear for its process.
    configs = [float32_ds_config(folder, stage) for stage in STAGES[:3]]
    configs += [ROOT / f"ds_configs/{name}.json" for name in SHIPPED[:2]]
    configs += [float32_ds_config(folder, 3), ROOT / "ds_configs/zero3.json"]
    for ranks in RANKS:
        cases = [
            {"name": name, "values": recipes[task] | {"engine": {"ds_config": str(path)}}, "steps": STEPS}
            for path in configs
            for task in TASKS
            if (name := f"{task}-{path.stem}-{ranks}") in wanted
        ]
        if cases:
            (folder / "cases.json").write_text(json.dumps(cases))
            run_ranks("tests.trainer.worker", "steps", str(folder / "cases.json"), str(folder), ranks=ranks)
            found |= {case["name"]: torch.load(folder / f"{case['name']}.pt") for case in cases}
    return found


@pytest.fixture
def runs(request: pytest.FixtureRequest, launched: Results) -> Results:
    return own(request, launched)


@pytest.fixture(scope="module")
def expected(recipes: dict[str, Any]) -> Results:
    return Lazy(lambda task: train_naively(recipes[task], steps=STEPS))


def distance(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> float:
    """The largest distance of any parameter after any step."""
    return max(
        float((ours["parameters"][name] - value).abs().max())
        for ours, theirs in zip(got, want, strict=True)
        for name, value in theirs["parameters"].items()
    )


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.needs("{task}-float32_zero{stage}-{ranks}")
def test_steps_are_muons(task: str, stage: int, ranks: int, runs: Results, expected: Results) -> None:
    got, want = runs[f"{task}-float32_zero{stage}-{ranks}"], expected[task]
    assert min(got[0]["micro_batches"]) > 1
    assert distance(got, want) < PARAMETER_TOLERANCE
    assert [step["loss"] for step in got] == pytest.approx([step["loss"] for step in want], rel=LOSS_TOLERANCE)
    if stage == 0:  # from stage 1 on DeepSpeed's norm is of other values (docs/metrics.md)
        assert got[0]["norm"] == pytest.approx(want[0]["norm"], rel=2e-5)


@pytest.mark.parametrize("ds_config", SHIPPED)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.needs("{task}-{ds_config}-2")
def test_bf16_stays_near(task: str, ds_config: str, recipes: dict[str, Any], runs: Results, expected: Results) -> None:
    start, got, want = first_parameters(recipes[task]), runs[f"{task}-{ds_config}-2"][0], expected[task][0]
    expected_move = torch.cat([(want["parameters"][key] - start[key]).flatten() for key in start])
    move = torch.cat([(got["parameters"][key] - start[key]).flatten() for key in start])
    assert float((move - expected_move).norm() / expected_move.norm()) < 0.1


@pytest.mark.full
@pytest.mark.parametrize("wrong", ["scale", "orthogonal", "momentum", "adamw"])
def test_another_step_is_noticed(
    wrong: str, recipes: dict[str, Any], expected: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: Moonlight's scale, no Newton-Schulz, another momentum, and AdamW on the matrices."""
    values = json.loads(json.dumps(recipes["srl"]))
    if wrong == "scale":
        monkeypatch.setattr(NaiveMuon, "scale", lambda self, rows, columns: 0.2 * max(rows, columns) ** 0.5)
    elif wrong == "orthogonal":
        monkeypatch.setattr(NaiveMuon, "orthogonal", lambda self, matrix: matrix / matrix.norm())
    elif wrong == "momentum":
        values["optim"]["muon_momentum"] = 0.95
    else:
        monkeypatch.setattr(
            reference,
            "_naive_optimizers",
            lambda module, r: [reference._naive_adamw(dict(module.named_parameters()), r)],
        )
    assert distance(train_naively(values, steps=STEPS), expected["srl"]) > 100 * PARAMETER_TOLERANCE
