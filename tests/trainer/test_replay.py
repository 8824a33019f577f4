"""Which steps can be replayed without a checkpoint, and which are refused. Whole replays are in test_anomalies.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.ground.errors import ConfigError
from tests.trainer.support import recipe_of, recipe_values
from trainer.build import build_model, build_objective, open_shards, open_stream
from trainer.config.load import as_toml
from trainer.config.schema import Recipe
from trainer.distributed import Refused, World, seed_step
from trainer.replay import PlainEngine, check_replay, replay
from trainer.run_folder import check_output_folder


def recipe_at(step: int, shards: Path | str, output: Path) -> Recipe:
    return recipe_of(
        recipe_values(
            shards,
            run={"seed": 7, "output": str(output), "resume": "required"},
            debug={"replay": step},
            checkpoint={"every_steps": 2},
        )
    )


def test_up_to_the_first_save_a_step_has_the_first_weights(tuple_shards: Path, tmp_path: Path) -> None:
    """A run that fails in its first steps has no checkpoint, and it is the one that is looked at most."""
    recipe = recipe_at(2, tuple_shards, tmp_path)
    sources = open_shards(recipe)
    parts = build_model(recipe, sources, {})
    stream = open_stream(recipe, sources, rank=0, world_size=1)
    phases: list[str] = []
    report = replay(recipe, parts, stream, World.alone(), heartbeat=phases.append)
    assert (report["step"], report["weights_of_step"]) == (2, 0)
    assert {"forward", "backward"} <= set(phases), "a long replay is no hang"

    fresh = build_model(recipe, sources, {})
    batches, losses = open_stream(recipe, sources, rank=0, world_size=1), []
    for step in range(2):
        seed_step(recipe.run.seed, step, 0)
        own = build_objective(recipe, fresh).forward_backward(
            PlainEngine(fresh.module, World.alone()), next(batches), step
        )
        losses.append(float(own.losses["loss"]))
    assert float(report["losses"]["loss"]) == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] != pytest.approx(losses[1], rel=1e-3), "control: another step's"


def test_a_later_step_needs_a_checkpoint(tuple_shards: Path, tmp_path: Path) -> None:
    recipe = recipe_at(3, tuple_shards, tmp_path)
    sources = open_shards(recipe)
    stream = open_stream(recipe, sources, rank=0, world_size=1)
    with pytest.raises(Refused, match=r"debug\.replay = 3 needs a whole checkpoint before that step"):
        replay(recipe, build_model(recipe, sources, {}), stream, World.alone(), heartbeat=lambda phase: None)


def test_a_step_beyond_the_last(tmp_path: Path) -> None:
    check_replay(recipe_at(6, "shards", tmp_path), 6)
    with pytest.raises(ConfigError, match=r"debug\.replay = 7 is beyond the run's 6 steps"):
        check_replay(recipe_at(7, "shards", tmp_path), 6)


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    output = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"debug\.replay = 2 is a step of a run, and .* holds none"):
        check_output_folder(recipe_at(2, "shards", output))
    output.mkdir()
    (output / "recipe.toml").write_text(as_toml(recipe_at(0, "shards", output)))
    check_output_folder(recipe_at(2, "shards", output))
    for step in (0, 3):
        with pytest.raises(ConfigError, match="holds no whole checkpoint to resume"):
            check_output_folder(recipe_at(step, "shards", output))
