"""The engine's configuration: one reading a run, of the file as it is then, which nothing changes afterwards."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest

from data.ground.errors import ConfigError
from launch.scaling import STAGES, stages_for
from tests.trainer.support import recipe_of, recipe_values
from trainer.config.schema import Recipe
from trainer.ds_config import checked_ds_config, full_ds_config, zero_stage


def test_each_run_reads_the_file_as_it_is_then(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    recipe = recipe_of(recipe_values("shards", engine={"ds_config": str(path)}))
    for stage in (1, 2):  # two runs of one recipe in one process
        path.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
        assert zero_stage(checked_ds_config(recipe)) == stage


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, {}),
        ({"model": {"ladder": [[3, 16, 0.25], [3, 48]]}}, {3: "use a stage from 0 to 2, or sizes of two numbers"}),
        ({"train": {"compile": True}}, {3: "use a stage up to 2, or train.compile = false"}),
        ({"optim": {"name": "muon"}}, {2: "use ds_configs/zero1.json or zero3.json"}),
    ],
    ids=["plain", "narrower feed-forwards", "compiled", "muon"],
)
def test_the_planner_offers_the_stages_that_are_not_refused(
    changes: dict[str, dict[str, Any]], refused: dict[int, str]
) -> None:
    def recipe(stage: int) -> Recipe:
        return recipe_of(recipe_values("shards", **changes, engine={"ds_config": f"ds_configs/zero{stage}.json"}))

    for stage in STAGES:
        says = pytest.raises(ConfigError, match=refused[stage]) if stage in refused else contextlib.nullcontext()
        with says:
            checked_ds_config(recipe(stage))
    assert stages_for(recipe(1)) == tuple(stage for stage in STAGES if stage not in refused)


def test_what_deepspeed_gets_shares_nothing_with_what_was_read() -> None:
    recipe = recipe_of(recipe_values("shards"))
    read = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}
    before = copy.deepcopy(read)
    given = full_ds_config(recipe, read)
    assert given["zero_optimization"] == before["zero_optimization"] and given["bf16"]["enabled"]
    given["zero_optimization"]["offload_optimizer"]["device"] = "nvme"
    given["bf16"]["enabled"] = False
    assert read == before
