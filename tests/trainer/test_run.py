"""A run's beginning and end: whose the folder is once it is held, and what is said of a run that ends early."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import unittest.mock
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.ground.errors import OtherFormat
from data.ground.records import read_record
from models.encoder import load_encoder
from tests.trainer.support import recipe_of, recipe_values
from trainer import run
from trainer.build import build_model, open_shards
from trainer.config.load import as_toml
from trainer.config.read_keys import as_read
from trainer.config.schema import Recipe
from trainer.distributed import Refused, World
from trainer.environment import FILE as ENVIRONMENT_FILE
from trainer.environment import Environment
from trainer.exporting.model_folder import embedding_settings, save_model
from trainer.resilience.run_lock import lock
from trainer.resilience.stopping import NotSaved

ALONE = World.alone()


@pytest.mark.parametrize("resume", ["never", "auto"])
@pytest.mark.parametrize("filled", [True, False])
def test_a_folder_that_was_filled_during_the_wait(
    resume: str, filled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another start held the folder, and its run was over before this start gave up waiting."""
    output = tmp_path / "run"
    recipe = recipe_of(recipe_values("shards", run={"output": str(output), "resume": resume}))
    other = recipe_of(recipe_values("shards", run={"output": str(output), "seed": 8}))

    @contextlib.contextmanager
    def wait(folder: Path) -> Iterator[None]:
        with lock(folder):
            if filled:
                (folder / "recipe.toml").write_text(as_toml(other))
            yield

    monkeypatch.setattr(run, "lock", wait)
    monkeypatch.setattr(run.dist, "barrier", lambda: None)
    with ExitStack() as stack:
        if not filled:
            run._claim(recipe, ALONE, stack)
            return
        with pytest.raises(Refused, match="another run" if resume == "never" else "run.seed = 8, not 7"):
            run._claim(recipe, ALONE, stack)
    assert (output / "recipe.toml").read_text() == as_toml(other)


def test_a_stop_without_its_checkpoint_is_an_error(tmp_path: Path) -> None:
    """A crash for a job, which starts again a few times at most, and no STOPPED, which says that it was saved."""
    for reason, named in (("SIGTERM", "SIGTERM"), (None, r"train\.stop_at_step")):
        with pytest.raises(NotSaved, match=rf"step 7 \({named}\), whose checkpoint could not be saved") as told:
            run._end_early(tmp_path, 7, reason, saved=False, world=ALONE)
        assert told.value.exit_code == 1
    run._end_early(tmp_path, 7, None, saved=True, world=ALONE)
    assert not list(tmp_path.iterdir())
    run._end_early(tmp_path, 7, "SIGTERM", saved=True, world=ALONE)
    assert json.loads((tmp_path / "STOPPED").read_text()) == {"step": 7, "reason": "SIGTERM"}


def test_a_stop_that_cannot_be_noted_is_a_crash(tmp_path: Path) -> None:
    """Nobody made a mistake, so the code is not 2. 75 without STOPPED would tell a job that nothing is left to do."""
    (tmp_path / "STOPPED.tmp").mkdir()  # a disk that takes no file of that name
    said = r"step 7 \(SIGTERM\) with a checkpoint, and .*STOPPED cannot be written \(Is a directory\)"
    with pytest.raises(NotSaved, match=said) as told:
        run._end_early(tmp_path, 7, "SIGTERM", saved=True, world=ALONE)
    assert told.value.exit_code == 1 and not (tmp_path / "STOPPED").exists()
    run._end_early(tmp_path, 7, None, saved=True, world=ALONE)  # train.stop_at_step writes none


@pytest.mark.parametrize("blocked", ["tmp-model/config.json", "DONE.tmp"])
def test_an_end_that_cannot_be_noted_is_a_crash(
    blocked: str, document_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for DONE and the model: the next attempt writes them from the last checkpoint."""
    output = tmp_path / "run"
    output.mkdir()
    recipe = recipe_of(recipe_values(document_shards, run={"output": str(output)}, objective={"name": "masked"}))
    sources = open_shards(recipe)
    parts, settings = build_model(recipe, sources), embedding_settings(recipe, sources)
    engine: Any = SimpleNamespace(world=ALONE, full_parameter=lambda parameter: parameter.detach())
    with monkeypatch.context() as full:
        if blocked == "DONE.tmp":
            (output / blocked).mkdir()
        else:
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), blocked)
            full.setattr(type(parts.saved), "save_pretrained", unittest.mock.Mock(side_effect=error))
        said = rf"model cannot be written \(.*{blocked.removesuffix('.tmp')}.*\); training is done and its last"
        with pytest.raises(NotSaved, match=said) as told:
            save_model(engine, parts, recipe, settings)
    assert told.value.exit_code == 1 and not (output / "DONE").exists()
    if blocked == "DONE.tmp":
        (output / blocked).rmdir()
    save_model(engine, parts, recipe, settings)
    assert (output / "DONE").is_file() and load_encoder(output / "model").num_layers == 3


@pytest.mark.parametrize(
    "unread",
    [
        {"sizes": "two_d_listed", "layer_weighting": "linear", "compression_weight": 1.0},
        {"sizes": "espresso", "size_weights": [1.0, 2.0], "kl_size_weights": [3.0]},
    ],
)
def test_what_a_run_inherits_and_does_not_read_trains_nothing(
    unread: dict[str, Any], tuple_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these once changed the training, or ended it in a traceback."""
    values = recipe_values(tuple_shards, run={"output": str(tmp_path / "run")})
    kept = {**values, "objective": {**values["objective"], "name": "contrastive", "sizes": unread["sizes"]}}
    want = recipe_of(kept)
    inherited = recipe_of({**kept, "objective": {**kept["objective"], **unread}})
    assert inherited != want
    seen = []

    def build(recipe: Recipe, *_: object, **__: object) -> None:
        seen.append(recipe)
        raise NotImplementedError

    monkeypatch.setattr(run, "build_model", build)
    for recipe in (want, inherited):
        with pytest.raises(NotImplementedError):
            run.execute(recipe)
    assert seen[0] == seen[1] == as_read(want)


@pytest.mark.parametrize(("steps", "warmup", "warned"), [(1, 0.1, True), (1, 0.0, False), (2, 0.9, False)])
def test_a_run_of_one_step_that_trains_nothing(
    steps: int, warmup: float, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = recipe_of(recipe_values("shards", optim={"warmup_ratio": warmup}))
    plan = run._plan(recipe, steps, evaluates=False)
    run._say_if_all_warm_up(plan)
    assert ("nothing is trained" in caplog.text) == warned
    assert warned == (not any(plan.learning_rate(step) for step in range(steps)))


@pytest.mark.processes  # git is asked for the commit
def test_what_a_run_says_of_itself(document_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read again as it was written. Files of versions before the format's number are read, too."""
    monkeypatch.setattr("sys.argv", ["trainer", "--data.shards=https://user:s3cr3t@host/a"])
    recipe = recipe_of(recipe_values(document_shards, run={"output": str(tmp_path)}, objective={"name": "masked"}))
    run.write_run_folder(recipe, {}, ALONE)
    path = tmp_path / ENVIRONMENT_FILE
    found = read_record(path, Environment)
    assert found == Environment.of(ALONE) and found.format == 1 and found.command[1].endswith("//***@host/a")
    assert found.versions.keys() >= {"torch", "deepspeed"} and "s3cr3t" not in path.read_text()
    earlier = json.loads(path.read_text())
    del earlier["format"]
    path.write_text(json.dumps(earlier))
    assert read_record(path, Environment) == found
    path.write_text(json.dumps(earlier | {"format": 2}))
    with pytest.raises(OtherFormat, match="of format 2"):
        read_record(path, Environment)
