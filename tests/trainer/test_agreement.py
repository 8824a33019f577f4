"""Ranks that differ are refused with who differs in what; what may differ between machines is not compared."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tomli_w
import torch
from torch import nn

from tests import ROOT
from tests.ranks import run_ranks
from tests.trainer.support import recipe_of, recipe_values
from trainer.agreement import FREE_KEYS, disagreement, facts_of, fingerprint, frozen_fingerprint
from trainer.build import open_shards
from trainer.config.load import build_recipe
from trainer.config.schema import Recipe
from trainer.ds_config import read_ds_config

NO_PARTS = cast(Any, SimpleNamespace(guide=None, teacher=None))


def test_ranks_that_are_alike() -> None:
    assert disagreement([{"a": "1"}]) is None
    assert disagreement([{"a": "1", "b": "2"}] * 3) is None


def test_who_differs_in_what() -> None:
    facts = [{"run.seed": seed, "optim.lr": "0.1"} for seed in ("7", "8", "7", "9")]
    sentence = disagreement(facts)
    assert sentence is not None
    assert "run.seed is 7 on ranks 0, 2, 8 on rank 1 and 9 on rank 3;" in sentence and "optim.lr" not in sentence
    many = [{str(key): str(rank) for key in range(9)} for rank in range(2)]
    sentence = disagreement(many)
    assert sentence is not None and "and 6 more" in sentence and "3 is" not in sentence
    sentence = disagreement([{"guide.model": "x"}, {}])
    assert sentence is not None and "guide.model is x on rank 0 and absent on rank 1" in sentence
    sentence = disagreement([{"a": "x" * 1000}, {"a": "y"}])
    assert sentence is not None and len(sentence) < 300


@pytest.fixture
def recipe(tuple_shards: Path) -> Recipe:
    return recipe_of(recipe_values(tuple_shards, engine={"ds_config": str(ROOT / "ds_configs/zero1.json")}))


def test_every_other_key_of_a_recipe_is_compared(recipe: Recipe) -> None:
    """A change of any key is noticed, but of those that are said to be free."""
    sources = open_shards(recipe)
    ds_config = read_ds_config(recipe.engine.ds_config)
    mine = facts_of(recipe, ds_config, sources, NO_PARTS)
    tables = dataclasses.asdict(recipe)
    keys = [f"{section}.{key}" for section, table in tables.items() for key in table]
    assert set(keys) > FREE_KEYS
    for name in keys:
        section, _, key = name.partition(".")
        before = tables[section][key]
        other = {
            bool: lambda before: not before,
            int: lambda before: before + 1,
            float: lambda before: math.nextafter(before, 10),
            str: lambda before: f"{before}x",
            list: lambda before: [*before, "x"],
            dict: lambda before: {**before, "x": 1},
        }[type(before)](before)
        if name == "engine.ds_config" or name == "model.source":
            continue  # read; below
        # Set from behind: not every such value is one that a recipe may have.
        table, changed = copy.copy(getattr(recipe, section)), copy.copy(recipe)
        object.__setattr__(table, key, other)
        object.__setattr__(changed, section, table)
        theirs = facts_of(changed, ds_config, sources, NO_PARTS)
        assert (disagreement([mine, theirs]) is None) == (name in FREE_KEYS), name


def test_files_are_compared_by_content(
    recipe: Recipe, tuple_shards: Path, crowded_shards: Path, tmp_path: Path
) -> None:
    (tmp_path / "shards").symlink_to(tuple_shards)
    (tmp_path / "same.json").write_text((ROOT / "ds_configs/zero1.json").read_text())
    (tmp_path / "other.json").write_text((ROOT / "ds_configs/zero2.json").read_text())

    def facts(shards: Path, engine: Path) -> dict[str, str]:
        values = recipe_values(shards, engine={"ds_config": str(engine)})
        here = recipe_of(values)
        return facts_of(here, read_ds_config(engine), open_shards(here), NO_PARTS)

    mine = facts_of(recipe, read_ds_config(recipe.engine.ds_config), open_shards(recipe), NO_PARTS)
    assert disagreement([mine, facts(tmp_path / "shards", tmp_path / "same.json")]) is None
    sentence = disagreement([mine, facts(crowded_shards, tmp_path / "same.json")])
    assert sentence is not None and "data.shards[0] is manifest " in sentence
    sentence = disagreement([mine, facts(tuple_shards, tmp_path / "other.json")])
    assert sentence is not None and "engine.ds_config is " in sentence


def test_weights_are_compared_but_for_drawn_adapters(recipe: Recipe) -> None:
    values = recipe_values(recipe.data.shards[0], model={"source": "x", "config": {}})
    values["engine"] = {"ds_config": recipe.engine.ds_config}
    with_source, sources = build_recipe(values), open_shards(recipe)
    ds_config = read_ds_config(recipe.engine.ds_config)

    def facts(weight: float, adapter: float, guide: float) -> dict[str, str]:
        modules = []
        for value in (weight, guide):
            modules.append(nn.ModuleDict({"layer": nn.Linear(2, 2), "lora_A": nn.Linear(2, 2)}))
            nn.init.constant_(modules[-1]["layer"].weight, value)
            nn.init.zeros_(modules[-1]["layer"].bias)
            for parameter in modules[-1]["lora_A"].parameters():
                nn.init.constant_(parameter, adapter)
        guide = SimpleNamespace(encoder=modules[1])
        parts = SimpleNamespace(encoder=modules[0], guide=guide, teacher=None)
        return facts_of(with_source, ds_config, sources, cast(Any, parts))

    mine = facts(1.0, 2.0, 3.0)
    assert disagreement([mine, facts(1.0, 9.0, 3.0)]) is None
    for other, name in ((facts(1.5, 2.0, 3.0), "model.source"), (facts(1.0, 2.0, 3.5), "guide.model")):
        sentence = disagreement([mine, other])
        assert sentence is not None and f"{name} is weights " in sentence


def test_a_fingerprint_is_of_names_types_shapes_and_every_bit() -> None:
    one = torch.arange(6.0).view(2, 3)
    same = fingerprint([("b", one), ("a", one)])
    assert same == fingerprint([("a", one.clone()), ("b", one.T.contiguous().T)])
    flipped = one.clone()
    flipped[0, 0] = -0.0
    others = [[("a", one), ("c", one)], [("a", one), ("b", one.view(3, 2))], [("a", one), ("b", flipped)]]
    others += [[("a", one), ("b", one.bfloat16())], [("a", one)]]
    assert same not in {fingerprint(each) for each in others}


def test_what_is_frozen_has_a_fingerprint() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert frozen_fingerprint(module) == ""
    module[0].requires_grad_(False)
    before = frozen_fingerprint(module)
    nn.init.zeros_(module[1].weight)  # trains
    assert frozen_fingerprint(module) == before != ""
    nn.init.zeros_(module[0].weight)
    assert frozen_fingerprint(module) != before


@pytest.mark.launcher
def test_two_ranks_that_differ_end_together_with_2(tuple_shards: Path, tmp_path: Path) -> None:
    """Rank 1 reads another recipe, as on a second machine."""
    run = tmp_path / "run"
    for rank in range(2):
        values = recipe_values(tuple_shards, run={"output": str(run), "seed": 7 + rank}, train={"steps": 4 - rank})
        values["engine"] = {"ds_config": str(ROOT / "ds_configs/zero1.json")}
        (tmp_path / f"{rank}.toml").write_text(tomli_w.dumps(values))
    arguments = ["--config", str(tmp_path / "RANK.toml")]
    case = {"task": "contrastive", "arguments": arguments, "fault": None}
    (tmp_path / "cases.json").write_text(json.dumps([case]))
    ended = run_ranks("tests.trainer.fault_worker", str(tmp_path / "cases.json"), ranks=2, expect=2)
    said = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "run.seed is 7 on rank 0 and 8 on rank 1" in said[0] and "train.steps" in said[0]
    assert "Traceback" not in ended.stderr and not run.exists()
