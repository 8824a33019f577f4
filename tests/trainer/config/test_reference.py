"""What is made from the recipe's schema: the reference page, the JSON schema for editors, and --help."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests import ROOT
from trainer.config.kinds import KINDS
from trainer.config.reference import PAGE, SCHEMA, help_text, json_schema, keys, page
from trainer.config.schema import Recipe, flat


def test_the_files_are_fresh() -> None:
    hint = "run python -m trainer.config.reference"
    assert (ROOT / PAGE).read_text() == page(), hint
    assert (ROOT / SCHEMA).read_text() == json_schema(), hint


def test_every_key_is_explained_in_a_sentence() -> None:
    named = {f"{key.section}.{key.name}": key for key in keys()}
    assert named.keys() == flat(Recipe()).keys()
    for name, key in named.items():
        assert key.help.endswith(".") and len(key.help.split()) >= 2, name
        assert key.help in page().replace("\\|", "|"), name


def test_help_has_every_key_with_its_default() -> None:
    text = help_text()
    for key in keys():
        assert f"  {key.name} = {json.dumps(key.default)}" in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    return Draft202012Validator(json.loads((ROOT / SCHEMA).read_text()))


def test_the_json_schema_takes_every_shipped_recipe(validator: Draft202012Validator) -> None:
    recipes = {path.relative_to(ROOT / "launch"): path for path in (ROOT / "launch").rglob("recipes/*.toml")}
    assert {name.parts[0] for name in recipes} == {"recipes", "studies"}, "both kinds are found"
    for name, path in recipes.items():
        assert not list(validator.iter_errors(tomllib.loads(path.read_text()))), name


@pytest.mark.parametrize(
    "wrong",
    [
        {"optim": {"lr": 0}},
        {"optim": {"lrr": 1e-4}},
        {"optimizer": {"lr": 1e-4}},
        {"train": {"steps": "many"}},
        {"objective": {"kl": "score"}},
        {"model": {"ladder": [["two", 32]]}},
    ],
)
def test_the_json_schema_refuses_what_a_recipe_may_not_say(wrong: dict[str, Any], validator: Any) -> None:
    assert list(validator.iter_errors(wrong))


def test_the_json_schema_completes_every_objective_of_ours() -> None:
    schema = json.loads((ROOT / SCHEMA).read_text())
    named, _ = schema["$defs"]["ObjectiveConfig"]["properties"]["name"]["anyOf"]
    assert named["enum"] == ["", *KINDS]
