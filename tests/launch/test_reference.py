"""The pages of the reference that are made from the code."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from data.ground.records import Record
from launch.barista import COMMANDS
from launch.reference import FORMATS, STARTED_BY_OTHERS, as_markdown, ends, pages, parser_of, value_in_words
from tests import ROOT
from trainer.config.kinds import KINDS
from trainer.config.schema import Recipe
from trainer.monitoring.names import FAMILIES, loss_of


def test_the_pages_are_fresh() -> None:
    for name, content in pages().items():
        assert (ROOT / name).read_text("utf-8") == content, f"{name}: run python -m launch.reference"


@pytest.mark.parametrize("module", [*(command.module for command in COMMANDS.values()), *STARTED_BY_OTHERS])
def test_every_option_is_on_the_page_of_commands(module: str) -> None:
    page = (ROOT / "docs" / "commands.md").read_text("utf-8")
    parse = argparse.ArgumentParser.parse_known_args
    parser = parser_of(module)
    assert argparse.ArgumentParser.parse_known_args is parse, "argparse is left as it was"
    assert parser.prog == f"python -m {module}"
    for option in options(parser):
        assert f"`{option}" in page or f", {option}" in page, option


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from options(inner)
        elif action.help != argparse.SUPPRESS:
            yield from (each for each in action.option_strings if each not in ("-h", "--help"))


def test_every_versioned_file_has_a_section() -> None:
    """Files with a number of their format are those that other versions read. A schema may be a part of another's."""
    parts = {("trainer.exporting.model_card", "_Results")}
    for module in {each.module for each in FORMATS}:
        importlib.import_module(module)
    versioned = {(each.__module__, each.__name__) for each in below(Record) if "format" in each.model_fields}
    versioned = {each for each in versioned if each[0].partition(".")[0] in ("data", "models", "trainer", "launch")}
    assert versioned >= {("data.shards.format", "_ManifestFile"), ("trainer.checkpoint", "_Manifest")}
    # barista.json's schema is made of a dataclass.
    named = {module for module, _ in parts} | {each.module for each in FORMATS}
    assert {module for module, _ in versioned} <= named
    assert {each for each in versioned if each[0] != "models.settings"} - parts <= {
        (each.module, each.schema) for each in FORMATS
    }


def below(schema: type[Record]) -> Iterator[type[Record]]:
    for each in schema.__subclasses__():
        yield each
        yield from below(each)


def test_every_chart_of_losses_is_of_a_family_on_the_page() -> None:
    names = (loss_of(f"{family}/demi") for family in FAMILIES)
    tags = {name.tag for name in names if name}
    weights = ("asymmetric_weight", "spread_weight", "compression_weight")
    with_all_terms = replace(Recipe(), objective=replace(Recipe().objective, **dict.fromkeys(weights, 1.0)))
    charts = [
        pattern
        for kind in KINDS.values()
        for recipe in (Recipe(), with_all_terms)
        for patterns in kind.charts(recipe)[1].values()
        for pattern in patterns
    ]
    assert len(charts) > 3 and {"^losses/spread", "^losses/compression"} <= set(charts)
    for pattern in charts:
        assert pattern.removeprefix("^") in tags, pattern


def test_every_end_of_a_command_has_its_code_on_the_page() -> None:
    importlib.import_module("trainer.run")  # `ends` finds the exceptions of modules that are imported
    page = (ROOT / "docs" / "exit_codes.md").read_text("utf-8")
    assert {end.exit_code for end in ends()} >= {2, 3, 75}
    for end in ends():
        assert f"| {end.exit_code} | `{end.__name__}` |" in page


def test_docstrings_become_markdown() -> None:
    text = """What it does with <angles> and `<code>`.

        python -m command

    A paragraph:
    - one;
    - two.
    """
    blocks = ["What it does with &lt;angles> and `<code>`.", "```text\npython -m command\n```", "A paragraph:"]
    assert as_markdown(text) == "\n\n".join([*blocks, "- one;\n- two."])


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "whole number"),
        (str | None, "text or null"),
        (list[str | None], "list of (text or null)"),
        (dict[str, list[float]], "object of (list of number)"),
        (tuple[int, int], "list of 2: whole number, whole number"),
        (tuple[int, ...], "list of whole number"),
    ],
)
def test_types_in_words(hint: object, words: str) -> None:
    assert value_in_words(hint) == words
