"""Numbers that are none, and losses that jump: skipped on all ranks together, named, counted, and looked at again.

Whole runs on two ranks, one start for those that end by themselves. What a skipped step must equal is a run that was
told to skip the same step, all its numbers being fine.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tomli_w
import torch

from tests import ROOT
from tests.needs import needed, own
from tests.ranks import run_ranks
from tests.run_folder import lines_of, records, weights
from tests.trainer.support import float32_ds_config, recipe_values, with_dropout
from trainer.distributed import World
from trainer.loop import Hooks, Plan, TrainState, train
from trainer.resilience.anomalies import GaveUp, Health

STEPS, BATCH = 4, 12  # a step after the fault shows in its draws and moments, and in the last weights
NAN = {"kind": "nan", "step": 3, "rank": 1}
NAN_GRADIENT = {"kind": "nan gradient", "step": 3, "rank": 0}
SKIP = {"kind": "skip", "step": 3}  # told to, on all ranks
# Muon keeps a momentum in addition to AdamW's moments. With these engines every rank has all of it (stage 0), or a part
# of it, beside bf16 weights (stage 1) or beside a part of the weights (stage 3).
BY_MUON = ("muon_zero0", "muon_bf16", "muon_zero3")
# bf16 is stage 1. Stage 3 comes last: it changes its process.
ENGINES = ("zero0", "bf16", "zero2", *BY_MUON[:-1], "zero3", BY_MUON[-1])


@pytest.fixture(scope="module")
def folder(document_shards: Path, tuple_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipes."""
    folder = tmp_path_factory.mktemp("faults")
    common: dict[str, Any] = {
        "optim": {"lr": 1e-3, "eps": 1e-8, "schedule": "constant", "warmup_ratio": 0.0},
        "train": {"steps": STEPS, "micro_batch_size": 3},
        "checkpoint": {"every_steps": 2, "keep": 9},
    }
    tables = {
        "contrastive": with_dropout(recipe_values(tuple_shards, **common)),
        "masked": with_dropout(recipe_values(document_shards, objective={"name": "masked"}, **common)),
    }
    for task, values in tables.items():
        (folder / f"{task}.toml").write_text(tomli_w.dumps(values))
    return folder


@pytest.fixture(scope="module")
def launched(request: pytest.FixtureRequest, launcher: None, folder: Path) -> dict[str, Path]:
    """The runs that are needed, one after another; their replays, "<name>-replayed", are in the runs' own folders."""
    wanted = needed(request)
    engines = {f"zero{stage}": str(float32_ds_config(folder, stage)) for stage in range(4)}
    engines["bf16"] = str(ROOT / "ds_configs/zero1.json")

    def case(name: str, engine: str, fault: dict[str, Any] | None, *more: str, task: str = "contrastive") -> dict:
        ds_config = engines[engine.removeprefix("muon_")]
        chosen = [f"--run.output={folder / name}", f"--engine.ds_config={ds_config}", *more]
        chosen += ["--optim.name=muon", "--optim.muon_lr=5e-3"] if engine in BY_MUON else []
        return {"task": task, "arguments": ["--config", str(folder / f"{task}.toml"), *chosen], "fault": fault}

    cases = {name: case(name, "zero0", None) for name in ("zero0-fine", "zero0-again")}
    for engine in ENGINES:
        task = "masked" if engine == "zero2" else "contrastive"
        for kind, fault in (("skip", SKIP), ("nan", NAN), ("gradient", NAN_GRADIENT)):
            cases[f"{engine}-{kind}"] = case(f"{engine}-{kind}", engine, fault, task=task)
    for name, fault in (("nan", NAN), ("gradient", NAN_GRADIENT), ("fine", None)):
        again = ("--debug.replay=3", "--resume=auto")
        cases[f"zero0-{name}-replayed"] = case(f"zero0-{name}", "zero0", fault, *again)
    assert wanted <= cases.keys()
    (folder / "cases.json").write_text(json.dumps([case for name, case in cases.items() if name in wanted]))
    run_ranks("tests.trainer.fault_worker", str(folder / "cases.json"), ranks=2)
    return {name: folder / name.removesuffix("-replayed") for name in wanted}


@pytest.fixture
def runs(request: pytest.FixtureRequest, launched: dict[str, Path]) -> dict[str, Path]:
    return own(request, launched)


def by_step(run: Path) -> dict[int, dict[str, Any]]:
    """Records, with the count of steps skipped so far left blank."""
    return {record["step"]: {**record, "skipped_steps": None} for record in records(run)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fault", ["nan", "gradient"])
@pytest.mark.needs("{engine}-{fault}", "{engine}-skip")
def test_a_step_without_numbers_is_skipped_on_all_ranks(engine: str, fault: str, runs: dict[str, Path]) -> None:
    """Weights, moments and draws of every later step are those of a run that left the step out for another reason."""
    broken, told = runs[f"{engine}-{fault}"], runs[f"{engine}-skip"]
    got, want = by_step(broken), by_step(told)
    assert all(got[step] == want[step] for step in range(1, STEPS + 1) if step != 3)
    assert all(torch.equal(value, weights(told)[name]) for name, value in weights(broken).items())
    assert [line["skipped_steps"] for line in lines_of(broken) if "skipped_steps" in line][-1] == 1


@pytest.mark.needs("zero0-skip", "zero0-fine")
def test_a_skipped_step_makes_a_difference(runs: dict[str, Path]) -> None:
    """Negative control: the step that is left out would have moved the weights."""
    skipped, fine = by_step(runs["zero0-skip"]), by_step(runs["zero0-fine"])
    assert all(skipped[step] == fine[step] for step in (1, 2))
    assert skipped[4]["loss"] != fine[4]["loss"]


@pytest.mark.needs("zero2-nan", "bf16-gradient", "zero0-fine")
def test_the_fault_is_named(runs: dict[str, Path]) -> None:
    # Masked losses are each rank's own; contrastive ones are of all ranks' passages, so there a replay tells the rank.
    (fault,) = [line for line in lines_of(runs["zero2-nan"]) if "fault" in line]
    assert (fault["step"], fault["fault"], fault["fault/loss"]) == (3, "non-finite loss", "nan")
    assert math.isfinite(float(fault["by_rank"][0])) and fault["by_rank"][1] == "nan"
    assert len({tuple(sample) for sample in fault["samples"]}) == BATCH
    (fault,) = [line for line in lines_of(runs["bf16-gradient"]) if "fault" in line]
    assert fault["fault"] == "non-finite gradient" and all(math.isfinite(float(value)) for value in fault["by_rank"])
    assert not [line for line in lines_of(runs["zero0-fine"]) if "fault" in line]


@pytest.mark.needs("zero0-again", "zero0-fine")
def test_the_same_recipe_gives_the_same_curve(runs: dict[str, Path]) -> None:
    """To the last bit; test_resume.py has a control with another seed, and compares runs of different processes."""
    assert by_step(runs["zero0-again"]) == by_step(runs["zero0-fine"])
    again = weights(runs["zero0-again"])
    assert all(torch.equal(value, again[name]) for name, value in weights(runs["zero0-fine"]).items())


@pytest.mark.needs("zero0-nan", "zero0-nan-replayed", "zero0-gradient", "zero0-gradient-replayed")
def test_a_replay_finds_where_it_began(runs: dict[str, Path]) -> None:
    report = json.loads((runs["zero0-nan"] / "replay_step_3.json").read_text())
    (fault,) = [line for line in lines_of(runs["zero0-nan"]) if "fault" in line]
    assert (report["step"], report["weights_of_step"], report["losses"]["loss"]) == (3, 2, "nan")
    first, second = report["ranks"]
    assert first["first_non_finite_output"] is None
    assert second["first_non_finite_output"] == "backbone.encoder.layer.1"
    assert sorted(first["samples"] + second["samples"]) == sorted(fault["samples"])

    report = json.loads((runs["zero0-gradient"] / "replay_step_3.json").read_text())
    first, second = report["ranks"]
    assert "BrokenBackward" in first["anomaly"] and second["anomaly"] is None
    assert math.isfinite(float(report["losses"]["loss"])) and not math.isfinite(float(report["grad_norm"]))


@pytest.mark.needs("zero0-fine", "zero0-fine-replayed")
def test_a_replay_of_a_good_step_is_that_step(runs: dict[str, Path]) -> None:
    report, record = json.loads((runs["zero0-fine"] / "replay_step_3.json").read_text()), by_step(runs["zero0-fine"])
    assert report["weights_of_step"] == 2
    for name, value in report["losses"].items():
        assert float(value) == pytest.approx(record[3][name], rel=1e-6), name
    assert float(report["grad_norm"]) == pytest.approx(record[3]["grad_norm"], rel=1e-5)
    assert float(report["grad_norm"]) != pytest.approx(record[2]["grad_norm"], rel=1e-3)  # control: another step's
    assert (runs["zero0-fine"] / "DONE").is_file(), "a replay changes nothing of the run"


@pytest.mark.launcher
def test_a_run_gives_up_after_so_many_in_a_row(folder: Path) -> None:
    run = folder / "gives-up"
    values = ["--config", str(folder / "contrastive.toml"), f"--run.output={run}", "--train.max_skipped_steps=1"]
    engine = f"--engine.ds_config={float32_ds_config(folder, 1)}"
    case = {"task": "contrastive", "arguments": [*values, engine], "fault": NAN}
    (folder / "gives-up.json").write_text(json.dumps([case]))
    ended = run_ranks("tests.trainer.fault_worker", str(folder / "gives-up.json"), ranks=2, expect=3)
    (sentence,) = [line for line in ended.stderr.splitlines() if line.startswith("error: step")]
    assert "--debug.replay=3" in sentence and "Traceback" not in ended.stderr
    assert [path.name for path in (run / "checkpoints").glob("step_*")] == ["step_00000002"]
    assert not (run / "DONE").exists() and not (run / "STOPPED").exists()


def test_counts_in_a_row() -> None:
    health = Health()
    for loss, norm in ((1.0, 1.0), (math.nan, 1.0), (1.0, math.inf)):
        health.observe(loss, grad_norm=norm, spike_deviations=6.0)
    assert (health.skipped_steps, health.skipped_in_a_row) == (2, 2)
    health.observe(1.0, grad_norm=1.0, spike_deviations=6.0)
    assert (health.skipped_steps, health.skipped_in_a_row) == (2, 0)


def test_spikes_are_flagged() -> None:
    draws = torch.Generator().manual_seed(0)
    losses = (2.0 + 0.1 * torch.randn(200, generator=draws)).tolist()
    losses[10] = losses[120] = 4.0  # the first one before there is a mean to compare with
    health = Health()
    faults = [health.observe(loss, grad_norm=1.0, spike_deviations=6.0) for loss in losses]
    assert [step for step, fault in enumerate(faults) if fault] == [120]
    assert health.loss_mean == pytest.approx(2.0, abs=0.1)
    assert not any(Health().observe(loss, grad_norm=1.0, spike_deviations=0.0) for loss in losses)


def test_a_lasting_change_is_flagged_for_a_while_only() -> None:
    health = Health()
    losses = [2.0 + 0.1 * (step % 2) for step in range(100)] + [4.0 + 0.1 * (step % 2) for step in range(400)]
    faults = [health.observe(loss, grad_norm=1.0, spike_deviations=6.0) for loss in losses]
    assert faults[100] == "spike" and not any(faults[-100:])


class Alone:
    """An engine, an objective, a stream, metrics and saves in one, whose steps have the losses given."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = iter(losses)
        self.world, self.device = World(0, 0, 1, torch.device("cpu")), torch.device("cpu")
        self.epoch, self.samples, self.written, self.saved = 0.0, 0, False, 0

    def train(self) -> None:
        pass

    def __next__(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def forward_backward(self, *_: Any) -> Any:
        return SimpleNamespace(losses={"loss": torch.tensor(next(self.losses))})

    def step(self, lr: float, *, skip: bool) -> float:
        return 1.0

    def learning_rates(self, lr: float) -> dict[str, float]:
        return {"lr": lr}

    def update(self, *_: Any, **__: Any) -> None:
        pass

    def fault(self, *_: Any, **__: Any) -> None:
        pass

    def begin(self) -> None:
        self.saved += 1

    def finish(self) -> None:
        pass


def train_alone(losses: list[float], *, stop_at_step: int | None = None) -> Alone:
    alone, total = Alone(losses), len(losses)
    plan = Plan(7, total, stop_at_step or total, lambda step: 1.0, 100, 0, 5, 0.0)
    hooks = Hooks(alone, dict, lambda: None, lambda *_, **__: None)
    train(cast(Any, alone), cast(Any, alone), alone, TrainState(), plan=plan, metrics=cast(Any, alone), hooks=hooks)
    return alone


def test_a_run_of_nothing_but_skipped_steps_is_not_done() -> None:
    """Fewer than would make it give up before; with one good step among them it ends well, and so does a part of it."""
    with pytest.raises(GaveUp, match=r"all 3 steps had a loss or gradient that is not finite.*--debug\.replay=1"):
        train_alone([math.nan] * 3)
    assert GaveUp.exit_code == 3
    assert train_alone([math.nan, 1.0, math.nan]).saved == 1
    assert train_alone([math.nan] * 3, stop_at_step=2).saved == 1
