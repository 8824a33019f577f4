"""The engine's configuration: one reading a run, of the file as it is then, which nothing changes afterwards."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from data.ground.errors import ConfigError
from launch.scaling import stages_for
from tests.trainer.support import recipe_of, recipe_values
from trainer.config.schema import Recipe
from trainer.ds_config import checked_ds_config, full_ds_config, zero_stage


def test_each_run_reads_the_file_as_it_is_then(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    recipe = recipe_of(recipe_values("shards", engine={"ds_config": str(path)}))
    for stage in (1, 2):  # two runs of one recipe in one process
        path.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
        assert zero_stage(checked_ds_config(recipe)) == stage


def test_stage_3_is_refused_for_narrower_feed_forwards() -> None:
    """Nor does the planner offer it."""

    def recipe(stage: int) -> Recipe:
        model = {"ladder": [[3, 16, 0.25], [3, 48]]}
        return recipe_of(recipe_values("shards", model=model, engine={"ds_config": f"ds_configs/zero{stage}.json"}))

    for stage in (0, 1, 2):
        checked_ds_config(recipe(stage))
    with pytest.raises(ConfigError, match="use a stage from 0 to 2, or sizes of two numbers"):
        checked_ds_config(recipe(3))
    assert stages_for(recipe(1)) == (0, 1, 2)


def test_what_deepspeed_gets_shares_nothing_with_what_was_read() -> None:
    recipe = recipe_of(recipe_values("shards"))
    read = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}
    before = copy.deepcopy(read)
    given = full_ds_config(recipe, read)
    assert given["zero_optimization"] == before["zero_optimization"] and given["bf16"]["enabled"]
    given["zero_optimization"]["offload_optimizer"]["device"] = "nvme"
    given["bf16"]["enabled"] = False
    assert read == before
