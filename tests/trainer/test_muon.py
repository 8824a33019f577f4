"""DeepSpeed's Muon takes the steps of Muon as restated in tests/reference.py, on any ranks, at every stage it is let.

Two matrices of a tiny model are never of one size with a partition, so ranks share matrices, and every rank accumulates
several micro-batches. On a CPU with fp16 units, where DeepSpeed would orthogonalise in fp16, it is told to use float32.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from data.ground.errors import ConfigError
from tests import ROOT, reference
from tests.needs import Lazy, needed, own
from tests.ranks import run_ranks
from tests.reference import NaiveMuon, first_parameters, train_naively
from tests.run_folder import records, weights
from tests.trainer.support import float32_ds_config, recipe_of, recipe_values
from tests.trainer.test_checkpoint import SHAPES, Held
from trainer.build import build_model, open_shards
from trainer.checkpoint import Checkpointer
from trainer.distributed import Refused
from trainer.ds_config import checked_ds_config
from trainer.engine import MOMENTUM

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
    found: Results = {}
    folder, wanted = tmp_path_factory.mktemp("muon"), needed(request)
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


# One rank divides nothing: each stage is taken with one task.
ALONE = [("smae", 0, 1), ("srl", 1, 1), ("smae", 2, 1), ("srl", 3, 1)]


@pytest.mark.parametrize(("task", "stage", "ranks"), [*itertools.product(TASKS, STAGES, [2]), *ALONE])
@pytest.mark.needs("{task}-float32_zero{stage}-{ranks}")
def test_steps_are_muons(task: str, stage: int, ranks: int, runs: Results, expected: Results) -> None:
    got, want = runs[f"{task}-float32_zero{stage}-{ranks}"], expected[task]
    assert min(got[0]["micro_batches"]) > 1
    assert distance(got, want) < PARAMETER_TOLERANCE
    assert [step["loss"] for step in got] == pytest.approx([step["loss"] for step in want], rel=LOSS_TOLERANCE)
    if stage == 0:  # from stage 1 on DeepSpeed's norm is of other values (docs/metrics.md)
        assert got[0]["norm"] == pytest.approx(want[0]["norm"], rel=2e-5)


@pytest.mark.parametrize(("task", "ds_config"), [("smae", "zero0"), ("srl", "zero1"), ("smae", "zero3")])
@pytest.mark.needs("{task}-{ds_config}-2")
def test_bf16_stays_near(task: str, ds_config: str, recipes: dict[str, Any], runs: Results, expected: Results) -> None:
    """Less near than AdamW's: Newton-Schulz raises small singular values, and the rounding of bf16 with them."""
    start, got, want = first_parameters(recipes[task]), runs[f"{task}-{ds_config}-2"][0], expected[task][0]
    expected_move = torch.cat([(want["parameters"][key] - start[key]).flatten() for key in start])
    move = torch.cat([(got["parameters"][key] - start[key]).flatten() for key in start])
    assert float((move - expected_move).norm() / expected_move.norm()) < 0.2


# Run -> its engines: on two ranks until step 3, then on as many ranks until the end.
RESUMED = {"zero1": ("zero1", "zero1", 2), "bf16": ("bf16", "bf16", 2), "zero3": ("zero3", "zero3", 2)}
RESUMED |= {
    "moved_1_0": ("zero1", "zero0", 1),
    "moved_3_2": ("zero3", "zero2", 1),
    "moved_bf16_3": ("bf16", "zero3", 1),
}
FORGOTTEN = "moved_1_0_without_momentum"
RESUMED |= {FORGOTTEN: RESUMED["moved_1_0"]}
WHOLE = {"moved_1_0": "zero1", "moved_3_2": "zero3"}


@pytest.fixture(scope="module")
def resumed(
    request: pytest.FixtureRequest, launcher: None, tuple_shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The needed of the runs of RESUMED, and ENGINE-whole, which nothing interrupts."""
    wanted, folder = needed(request), tmp_path_factory.mktemp("resumed")
    going = {name: chosen for name, chosen in RESUMED.items() if name in wanted}
    engines = {f"zero{stage}": float32_ds_config(folder, stage) for stage in STAGES}
    engines["bf16"] = ROOT / "ds_configs/zero1.json"
    optim = {"name": "muon", "lr": 1e-3, "muon_lr": 5e-3, "eps": 1e-6, "schedule": "cosine", "warmup_ratio": 0.3}
    values = recipe_values(tuple_shards, train={"steps": 6, "micro_batch_size": 3}, checkpoint={"every_steps": 100})
    (folder / "recipe.toml").write_text(tomli_w.dumps(values | {"optim": optim}))

    def case(name: str, engine: str, *arguments: str) -> dict[str, Any]:
        chosen = ["--config", str(folder / "recipe.toml"), f"--run.output={folder / name}", *arguments]
        chosen.append(f"--engine.ds_config={engines[engine]}")
        control = "moments stay behind" if name == FORGOTTEN else ""
        return {"task": "contrastive", "arguments": chosen, "ids": str(folder / "ids"), "control": control}

    def run(cases: list[dict[str, Any]], ranks: int) -> None:
        (folder / "cases.json").write_text(json.dumps(sorted(cases, key=lambda each: "zero3" in each["arguments"][-1])))
        run_ranks("tests.trainer.elastic_worker", str(folder / "cases.json"), ranks=ranks)

    # One run for all that begin alike.
    begun = sorted({engine for engine, _, _ in going.values()})
    first = [case(f"{engine}-begun", engine, "--train.stop_at_step=3") for engine in begun]
    run([*first, *(case(name, name.removesuffix("-whole")) for name in wanted if name.endswith("-whole"))], 2)
    for name, (engine, _, _) in going.items():
        shutil.copytree(folder / f"{engine}-begun", folder / name)
    for ranks in RANKS:
        then = [case(name, to, "--resume=required") for name, (_, to, where) in going.items() if where == ranks]
        if then:
            run(then, ranks)
    return {name: folder / name for name in wanted}


@pytest.fixture
def gone_on(request: pytest.FixtureRequest, resumed: dict[str, Path]) -> dict[str, Path]:
    return own(request, resumed)


@pytest.mark.parametrize("name", [name for name, (_, _, ranks) in RESUMED.items() if ranks == 2])
@pytest.mark.needs("{name}", "{name}-whole")
def test_resumed_equals_uninterrupted(name: str, gone_on: dict[str, Path]) -> None:
    """To the last bit, with both rates of the schedule in the log."""
    run, whole = gone_on[name], gone_on[f"{name}-whole"]
    assert records(run) == records(whole) and len(records(whole)) == 6
    got, want = weights(run), weights(whole)
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert [line["muon_lr"] for line in records(run)] == pytest.approx([5 * line["lr"] for line in records(run)])
    assert (records(run)[0]["lr"], records(run)[2]["muon_lr"]) == (0.0, pytest.approx(5e-3))


@pytest.mark.parametrize(("name", "whole"), WHOLE.items())
@pytest.mark.needs("{name}", "{whole}-whole")
def test_other_ranks_at_other_stages_go_on(name: str, whole: str, gone_on: dict[str, Path]) -> None:
    got, want = records(gone_on[name]), records(gone_on[f"{whole}-whole"])
    assert [line["loss"] for line in got] == pytest.approx([line["loss"] for line in want], rel=0, abs=2e-5)


@pytest.mark.needs("moved_bf16_3", "zero1-whole")
def test_bf16_goes_on_in_float32(gone_on: dict[str, Path]) -> None:
    """From a checkpoint of two ranks in bf16 to one rank at stage 3. Masters and momentum are float32 in both."""
    got, want = records(gone_on["moved_bf16_3"]), records(gone_on["zero1-whole"])
    assert [line["loss"] for line in got] == pytest.approx([line["loss"] for line in want], rel=0, abs=2e-2)


@pytest.mark.needs(FORGOTTEN, "zero1-whole")
def test_without_the_momentum_the_losses_differ(gone_on: dict[str, Path]) -> None:
    """Negative control: what is compared above to 2e-5 depends on the optimizer's state."""
    got, want = records(gone_on[FORGOTTEN]), records(gone_on["zero1-whole"])
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(got, want, strict=True)) > 2e-4


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    """In one sentence, and not as damaged."""
    saved, wanted = Held(1.0), Held(2.0)
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep=1)
    assert checkpointer.save(saved, {"step": 1}) is not None
    wanted.kept_beside = lambda: dict.fromkeys(SHAPES, MOMENTUM)  # type: ignore[method-assign]
    with pytest.raises(Refused, match="was trained with another optimizer than this run's"):
        checkpointer.load_newest(wanted)
    assert checkpointer.load_newest(Held(2.0)) == {"step": 1}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"engine": {"ds_config": "ds_configs/zero2.json"}},
            "zero2.json, under which DeepSpeed keeps the momentum in bf16",
        ),
        ({"engine": {"ds_config": "ds_configs/zero3_offload.json"}}, "zero3_offload.json, which offloads"),
        ({"model": {"source": "some/encoder", "config": {}, "lora_rank": 4}}, "model.lora_rank = 4"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    values = recipe_values("shards", **changes)
    adamw = recipe_of(values)
    checked_ds_config(adamw)
    values["optim"]["name"] = "muon"
    with pytest.raises(ConfigError, match=re.escape(said)):
        checked_ds_config(recipe_of(values))


def test_a_static_encoder_is_refused(tuple_shards: Path) -> None:
    model = {"config": {"model_type": "static", "hidden_size": 8}, "pooling": "mean", "ladder": [[1, 4], [1, 8]]}
    recipe = recipe_of(recipe_values(tuple_shards, model=model, optim={"name": "muon"}))
    with pytest.raises(ConfigError, match="a static encoder is a table"):
        build_model(recipe, open_shards(recipe))


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
