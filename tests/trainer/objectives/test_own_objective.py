"""An objective of another package is one class and one line: everything else follows from what the class answers.

The class is tests/trainer/objectives/alignment.py; the line is the entry point that `package` writes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data.ground.errors import ConfigError
from launch.plan import main as plan
from models.encoder import load_encoder
from tests import ROOT
from tests.launcher import run_process
from tests.ranks import run_ranks
from tests.run_folder import steps_of
from tests.trainer.support import float32_ds_config, recipe_values
from trainer.config.kinds import ENTRY_POINTS, Kind, kind_named
from trainer.config.load import load_recipe
from trainer.export import main as export
from trainer.objectives.registry import maker_of

LINES = {
    "alignment": "tests.trainer.objectives.alignment:Alignment",
    "no-module": "tests.trainer.objectives.nowhere:Alignment",
    "no-kind": "tests.trainer.objectives.alignment:AlignmentObjective",
    "makes-nothing": "trainer.config.kinds:Kind",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an installed package that names objectives, on the path of this process and of those it starts."""
    about = tmp_path / "site" / "alignment-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: alignment\nVersion: 1.0\n")
    lines = "\n".join(f"{name} = {place}" for name, place in LINES.items())
    (about / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{lines}\n")
    monkeypatch.syspath_prepend(about.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(about.parent), str(ROOT)]))
    kind_named.cache_clear()
    return about.parent


def write(folder: Path, shards: Path | str = "shards", **objective: Any) -> Path:
    values = recipe_values(shards, objective={"name": "alignment", **objective}, train={"steps": 3})
    values["data"] = {"shards": [str(shards)], "query_max_length": 16, "passage_max_length": 32, "num_workers": 0}
    values["run"]["output"] = str(folder / "run")
    values["log"]["tensorboard"] = True
    values["engine"] = {"ds_config": str(float32_ds_config(folder, 1))}
    path = folder / "alignment.toml"
    path.write_text(tomli_w.dumps(values))
    return path


def test_its_name_is_known_like_one_of_ours(package: Path, tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, own={"weight": 2.0}))
    assert type(recipe.kind).__name__ == "Alignment" and recipe.kind.command == "finetune"
    assert maker_of(recipe) is recipe.kind
    with pytest.raises(ConfigError, match=r"'alignement' is unknown; choose one of masked.*alignment.*no-kind"):
        load_recipe(write(tmp_path, name="alignement"))


def test_what_it_reads_is_accepted_and_nothing_else(package: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"objective\.own\.weight = -1\.0 must be a number above 0"):
        load_recipe(write(tmp_path, own={"weight": -1.0}))
    with pytest.raises(ConfigError, match=r"objective\.temperature = 0\.1 is read by nothing"):
        load_recipe(write(tmp_path, temperature=0.1))
    with pytest.raises(ConfigError, match=r"objective\.own = .* is read by nothing"):
        load_recipe(write(tmp_path, name="contrastive", own={"weight": 2.0}))


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("no-module", "nowhere:Alignment, which cannot be imported (ModuleNotFoundError"),
        ("no-kind", "AlignmentObjective, which is no subclass of trainer.config.kinds.Kind"),
    ],
)
def test_a_line_that_names_no_objective_is_refused(name: str, sentence: str, package: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_recipe(write(tmp_path, name=name))
    assert sentence in str(refusal.value)


def test_a_class_that_makes_nothing_is_refused(package: Path, tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, name="makes-nothing"))
    assert type(recipe.kind) is Kind
    with pytest.raises(ConfigError, match="lacks the methods collator and objective"):
        maker_of(recipe)


@pytest.mark.launch
def test_it_trains_and_everything_around_it_works(
    launcher: None, package: Path, tmp_path: Path, tuple_shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plan, training on 2 ranks, charts, status and export, by the commands that users run."""
    recipe, run = write(tmp_path, tuple_shards, own={"weight": 2.0}), tmp_path / "run"
    assert plan([str(recipe), "--nodes=1", "--gpus-per-node=2", "--vocabulary=99"]) == 0
    assert "predicted, not measured" in capsys.readouterr().out

    run_ranks("trainer.finetune", "--config", str(recipe), ranks=2)
    steps = steps_of(run)
    assert [step["step"] for step in steps] == [1, 2, 3]
    sizes = ["1x16", "2x32", "3x48"]
    for step in steps:
        mean = sum(step[f"alignment/{size}"] for size in sizes) / len(sizes)
        assert step["loss"] == pytest.approx(2.0 * mean, rel=1e-5) and mean > 0
    assert steps[-1]["loss"] < steps[0]["loss"]

    (charts,) = (run / "tensorboard" / "1_1x16").glob("events*")
    read = EventAccumulator(str(charts))
    read.Reload()
    assert [event.value for event in read.Scalars("losses/alignment")] == pytest.approx(
        [step["alignment/1x16"] for step in steps]
    )

    # A new process, which finds the package by its path.
    status = run_process([sys.executable, "-m", "launch.status", str(run), "--json"])
    (told,) = json.loads(status.stdout)
    assert [size["losses"] for size in told["sizes"]] == [
        {"alignment": pytest.approx(steps[-1][f"alignment/{size}"])} for size in sizes
    ]

    export(["--model", str(run / "model"), "--output", str(tmp_path / "export")])
    exported = sorted(path.name for path in (tmp_path / "export").iterdir() if path.is_dir())
    assert exported == [*sizes, "encoder"]
    trained = load_encoder(str(tmp_path / "export" / "encoder"), pooling="cls")
    assert all(torch.isfinite(parameter).all() for parameter in trained.parameters())
