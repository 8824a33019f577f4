"""Command: the recipe's reference page and its JSON schema for editors, both made from trainer/config/sections.py.

    python -m trainer.config.reference          writes docs/recipe.md and launch/recipes/recipe.schema.json

An editor that knows JSON schemas completes and checks a TOML recipe whose first line is
`#:schema recipe.schema.json` (Even Better TOML and Taplo read that line). Torch-free.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic

from data.ground.command import run_command
from data.ground.files import write_atomically
from trainer.config.read_keys import READ_WHEN
from trainer.config.schema import SECTIONS, Recipe, bounds_of, keys_of

ROOT = Path(__file__).resolve().parents[2]
PAGE, SCHEMA = "docs/recipe.md", "launch/recipes/recipe.schema.json"
_KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a recipe, as the schema defines it."""

    section: str
    name: str
    default: Any
    values: str  # its type, or its choices
    bounds: str
    help: str
    read_when: tuple[str, ...]


def keys() -> Iterator[Key]:
    """Every key of a recipe, in the schema's order."""
    for section, defaults in dataclasses.asdict(Recipe()).items():
        for name, key in keys_of(section).items():
            yield Key(
                section,
                name,
                defaults[name],
                _values(key.annotation),
                _bounds(bounds_of(key)),
                key.description or "",
                tuple(condition.words for condition in READ_WHEN[f"{section}.{name}"]),
            )


def help_text() -> str:
    """The keys as `--help` shows them: name, default and what each does, by section."""
    lines = ["settings (sections of the recipe, or --section.key=value on the command line):"]
    for section, of_section in itertools.groupby(keys(), lambda key: key.section):
        lines += ["", f"[{section}]"]
        for key in of_section:
            lines.append(f"  {key.name} = {json.dumps(key.default)}")
            lines += textwrap.wrap(key.help, width=100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def page() -> str:
    """The reference page, as Markdown."""
    parts = [
        "# Recipe keys",
        "Made from `trainer/config/sections.py` by `python -m trainer.config.reference`; edit that file, not this "
        "page. A recipe is a TOML file with these sections. On the command line a key is set by "
        "`--section.key=value`. A key that is written out where nothing reads it is refused; the last column says "
        "when it is read, where that is not always.",
        f"Editors complete and check recipes by the JSON schema in `{SCHEMA}`, with `#:schema recipe.schema.json` as "
        "the recipe's first line.",
    ]
    for section, of_section in itertools.groupby(keys(), lambda key: key.section):
        rows = ["| key | default | values | what it does | read with |", "| --- | --- | --- | --- | --- |"]
        for key in of_section:
            values = ", ".join(filter(None, (key.values, key.bounds)))
            cells = (
                f"`{key.name}`",
                f"`{json.dumps(key.default)}`",
                values,
                key.help,
                "; ".join(key.read_when),
            )
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts += [f"## [{section}]", (SECTIONS[section].__doc__ or "").strip(), "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def json_schema() -> str:
    """The JSON schema of a recipe file: the sections, and `base`."""
    schema = pydantic.TypeAdapter(Recipe).json_schema()
    schema["title"] = "A recipe of barista"
    schema["properties"]["base"] = {"type": "string", "description": "Another recipe, beside this one, to start from."}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    for name, content in {PAGE: page(), SCHEMA: json_schema()}.items():
        write_atomically(ROOT / name, content)


def _values(hint: Any) -> str:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f'`"{each}"`' for each in arguments)
    if typing.get_origin(hint) is list:
        inner = arguments[0]
        if typing.get_origin(inner) is typing.Literal:
            return f"list of {_values(inner)}"
        return "list of lists of numbers" if typing.get_origin(inner) is list else f"list of {_KINDS[inner]}s"
    return _KINDS.get(hint, "table")


def _bounds(bounds: dict[str, float]) -> str:
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    # Upper bounds of 1e6 and more only keep numbers from overflowing, so they are not shown.
    told = {name: value for name, value in bounds.items() if name != "le" or value < 1e6}
    return ", ".join(f"{words[name]} {value:g}" for name, value in told.items())


if __name__ == "__main__":
    run_command(main)
