"""Recipes: what overrides what, what is read back, and how small a batch may be."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tomllib
import typing
from pathlib import Path

import pytest

from models.sizes import STARBUCKS_LADDER, Size
from tests.trainer.support import ROOT, recipe_of, recipe_values
from trainer.config import ConfigError, Recipe, as_toml, build_recipe, check, check_world, load_recipe, read_toml

MINIMAL = """
[objective]
name = "contrastive"
[model]
source = "some/encoder"
[data]
shards = ["shards"]
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_defaults_then_base_then_recipe_then_command_line(tmp_path: Path) -> None:
    write(tmp_path, "common/root.toml", MINIMAL + "[optim]\nlr = 1.0\neps = 1.0\nbeta1 = 0.5\n[train]\nsteps = 1")
    write(tmp_path, "common/middle.toml", 'base = "root.toml"\n[optim]\neps = 2.0\nbeta1 = 0.6')
    recipe = write(tmp_path, "recipe.toml", 'base = "common/middle.toml"\n[optim]\nbeta1 = 0.7')
    loaded = load_recipe(recipe, ["optim.beta2=0.8", "train.steps=3"])
    assert (loaded.optim.lr, loaded.optim.eps, loaded.optim.beta1, loaded.optim.beta2) == (1.0, 2.0, 0.7, 0.8)
    assert loaded.train.steps == 3
    assert loaded.data.shards == ["shards"]
    assert loaded.optim.weight_decay == Recipe().optim.weight_decay


def test_a_table_in_a_section_replaces_the_bases(tmp_path: Path) -> None:
    """A base's [model.config] and a recipe's own are two models, not one mixed of both."""
    base = MINIMAL.replace('source = "some/encoder"', 'config = { model_type = "bert", hidden_size = 48 }')
    write(tmp_path, "base.toml", base)
    recipe = write(tmp_path, "recipe.toml", 'base = "base.toml"\n[model.config]\nmodel_type = "roberta"')
    assert load_recipe(recipe).model.config == {"model_type": "roberta"}


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.steps=7", "train.steps", 7),
        ("optim.lr=3", "optim.lr", 3.0),
        ("optim.lr=3e-5", "optim.lr", 3e-5),
        ("data.shuffle=false", "data.shuffle", False),
        ("run.output=runs/a=b", "run.output", "runs/a=b"),
        ("run.output=7", "run.output", "7"),
        ("data.shards=a,b", "data.shards", ["a", "b"]),
        ('data.shards=["a", "b"]', "data.shards", ["a", "b"]),
        ("data.shards=one", "data.shards", ["one"]),
        ("model.ladder=[[1, 8], [2, 16]]", "model.ladder", [[1, 8], [2, 16]]),
        ("evaluation.sts=[]", "evaluation.sts", []),
        ("data.mixture_temperature=2", "data.mixture_temperature", 2.0),
        ("data.query_prompts=query: ", "data.query_prompts", ["query: "]),
        ('data.passage_prompts=["text, or so: "]', "data.passage_prompts", ["text, or so: "]),
    ],
)
def test_command_line_values(override: str, key: str, value: object, tmp_path: Path) -> None:
    loaded = load_recipe(write(tmp_path, "recipe.toml", MINIMAL), [override])
    section, _, name = key.partition(".")
    assert getattr(getattr(loaded, section), name) == value


def test_tables_on_the_command_line(tmp_path: Path) -> None:
    recipe = write(tmp_path, "recipe.toml", MINIMAL.replace('source = "some/encoder"', ""))
    for text in ('{model_type = "bert", hidden_size = 8}', '{"model_type": "bert", "hidden_size": 8}'):
        loaded = load_recipe(recipe, [f"model.config={text}"])
        assert loaded.model.config == {"model_type": "bert", "hidden_size": 8}


def test_a_resolved_recipe_reads_back_equal(tmp_path: Path) -> None:
    recipe = recipe_of(recipe_values("shards", optim={"lr": 3e-5}, evaluation={"sts": ["a.tsv"]}))
    path = write(tmp_path, "recipe.toml", as_toml(recipe))
    assert load_recipe(path) == recipe
    assert build_recipe(read_toml(path)) == recipe
    # Every key is written out, so that a later version's defaults change nothing.
    written = tomllib.loads(as_toml(recipe))
    assert {s: set(table) for s, table in written.items()} == {
        s: set(table) for s, table in dataclasses.asdict(recipe).items()
    }


def test_every_number_refuses_the_wrong_type() -> None:
    for section, kind in typing.get_type_hints(Recipe).items():
        for name, hint in typing.get_type_hints(kind).items():
            wrong = "text" if hint is not str else 3
            with pytest.raises(ConfigError, match=rf"{section}\.{name}"):
                build_recipe({section: {name: wrong}})
            if hint is int:
                for value in (True, 1.5):
                    with pytest.raises(ConfigError, match=f"{section}.{name}.*whole number"):
                        build_recipe({section: {name: value}})


def test_the_default_ladder_is_starbucks() -> None:
    assert Recipe().ladder == STARBUCKS_LADDER
    assert Recipe().ladder.full == Size(12, 768)


@pytest.mark.parametrize(("total", "world", "right"), [(128, 1, True), (128, 3, True), (8, 8, True), (7, 8, False)])
def test_every_rank_gets_a_sample(total: int, world: int, right: bool) -> None:
    recipe = build_recipe(recipe_values("shards", train={"global_batch_size": total, "micro_batch_size": 48}))
    check(recipe)
    if right:
        check_world(recipe, world)
    else:
        with pytest.raises(ConfigError, match="without a sample; use 8 or more"):
            check_world(recipe, world)


@pytest.mark.parametrize(("given", "right"), [([], True), (["a: "], True), (["a: ", ""], True), (["a: "] * 3, False)])
def test_prompts_are_none_one_or_one_a_folder(given: list[str], right: bool) -> None:
    for name in ("query_prompts", "passage_prompts"):
        recipe = build_recipe(recipe_values("one", data={"shards": ["one", "two"], name: given}))
        if right:
            check(recipe)
        else:
            with pytest.raises(ConfigError, match=f"data.{name} has 3 entries for 2 folders"):
                check(recipe)


def test_reading_a_recipe_needs_no_torch() -> None:
    code = "import sys, trainer.config; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
