"""Reading a recipe: what a run is, in one place, checked before any device work.

A recipe is a TOML file with the sections of trainer/config/sections.py. Values come from these places, of which the
later ones win: the defaults there, what `objective.preset` stands for (trainer/config/presets.py), the recipe's `base`
(a file beside it), the recipe, and the command line (`--section.key=value`). Unknown keys, wrong types, impossible
combinations, and keys that are written out but not read (trainer/config/read_keys.py) are refused with one sentence
that names the key, its value and what would be right. Torch-free, because login nodes check and submit recipes without
a GPU stack.

A resolved recipe, as runs write it, has every key, also those that nothing in the run reads. Its first line, a comment,
lists the values of such keys that are no defaults. A reader accepts exactly these, so an edit of such a key is refused.
A version of barista with other defaults or conditions would misjudge this list, so it accepts all keys of the file.
Files without a list, which the first versions wrote, are accepted in the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pydantic
import tomli_w
from pydantic.fields import FieldInfo

from data.ground.errors import ConfigError
from data.ground.files import is_unicode, reading
from data.ground.records import digest_of
from data.ground.secrets import without_secrets
from trainer.config.checks import check
from trainer.config.kinds import kind_named
from trainer.config.presets import preset_settings
from trainer.config.read_keys import READ_WHEN, is_read, says_nothing, why_unread
from trainer.config.schema import SECTIONS, Recipe, bounds_of, by_key, flat, keys_of

_MOST_BASES = 32
# Lists of sentences: on the command line a comma does not end an entry.
_SENTENCES = ("data.query_prompts", "data.passage_prompts")
# Keys of folders and files, which may be addresses with secrets. A recipe that is shown differs in these values alone.
_PLACES = (
    "run.output",
    "model.source",
    "guide.model",
    "guide.store",
    "teacher.model",
    "teacher.store",
    "data.shards",
    "data.cache_dir",
    "engine.ds_config",
    "evaluation.sts",
    "evaluation.beir",
)
_RESOLVED = "# Every key of a run, schema {}. Nothing in it reads these values, which it inherited: "


class _Layer(NamedTuple):
    """What one recipe file, or the command line, writes."""

    values: Mapping[str, Any]  # by section
    inherited: Mapping[str, Any] | None = None  # in a resolved recipe: the values that nothing reads, by key


def load_recipe(path: str | Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of the defaults, then the file and its bases, then `section.key=value` strings; checked.

    Raises ConfigError for whatever is not right.
    """
    layers = _layers(Path(path)) if path is not None else []
    given: dict[str, dict[str, Any]] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not is_unicode(override):
            raise ConfigError(f"{ascii(key)[1:-1]} {text!a} is not UTF-8; use a name that is")
        section, dot, name = key.partition(".")
        if not (equals and dot and name):
            raise ConfigError(f"{key!r} is not of the form --section.key=value")
        value = _parse(key, text, _key(section, name).annotation)
        if _holds_null(value):
            raise ConfigError(f"--{key} holds null, which a recipe cannot; leave that setting out")
        given.setdefault(section, {})[name] = value
    layers.append(_Layer(given))
    recipe = build_recipe(_merged(layers))
    check(recipe)
    _refuse_unread(layers, recipe)
    return recipe


def parse_toml(path: Path, what: str, *, hint: str) -> dict[str, Any]:
    """A TOML file's values. For errors: `what` names the kind of file, and `hint` says where such files are."""
    return _parsed_toml(_text_of(path, what, hint=hint), path, what)


def _parsed_toml(text: str, path: Path, what: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{what} {path} is nested too deep; write it flatter") from None
    except ValueError as error:  # also for more digits than Python converts
        raise ConfigError(f"{what} {path} is not valid TOML ({error}); fix that line") from None


def read_json_object(path: Path, what: str, *, hint: str) -> dict[str, Any]:
    """A JSON file's object. For errors: `what` names the kind of file, and `hint` says how to get a right one."""
    text = _text_of(path, what, hint=hint)
    try:
        values = json.loads(text)
    except RecursionError:
        raise ConfigError(f"{what} {path} is nested too deep; {hint}") from None
    except ValueError as error:
        raise ConfigError(f"{what} {path} is not valid JSON ({error}); {hint}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{what} {path} holds no JSON object; {hint}")
    return values


def _text_of(path: Path, what: str, *, hint: str) -> str:
    with reading(path, what=what, hint=hint):
        if not path.is_file():
            raise ConfigError(f"{what} {path} does not exist; {hint}")
        return path.read_text(encoding="utf-8")


def read_toml(path: Path) -> dict[str, dict[str, Any]]:
    """A recipe file merged over its `base`, which is named relative to it."""
    return _merged(_layers(path))


def _layers(path: Path, _seen: tuple[Path, ...] = ()) -> list[_Layer]:
    """What a recipe file and its bases write, the outermost base first."""
    text = _text_of(path, "recipe", hint="shipped recipes are in launch/recipes")
    values = _parsed_toml(text, path, "recipe")
    if path.resolve() in _seen:
        raise ConfigError(f"recipe {path} is its own base; remove the circle")
    if len(_seen) == _MOST_BASES:
        raise ConfigError(f"recipe {path} is the base of {_MOST_BASES} others, one upon another; write them flatter")
    base = values.pop("base", None)
    layer = _Layer(values, _inherited(text))
    if base is None:
        return [layer]
    if not isinstance(base, str):
        raise ConfigError(f"recipe {path}: base = {base!r} must be the name of one recipe file")
    return [*_layers(path.parent / base, (*_seen, path.resolve())), layer]


def _inherited(text: str) -> Mapping[str, Any] | None:
    """The unread values that a resolved recipe of this schema lists in a comment; None for any other recipe."""
    begin = _RESOLVED.format(_schema())
    line = next((line for line in text.split("\n") if line.startswith(begin)), None)
    if line is None:
        return None
    with contextlib.suppress(ValueError, RecursionError):
        values = json.loads(line.removeprefix(begin))
        if isinstance(values, dict):
            return values
    return {}  # edited by hand: nothing is excused


@functools.cache
def _schema() -> str:
    """A digest of what decides whether a key is unread: the defaults of all keys, and the words of their conditions."""
    conditions = {key: [each.words for each in needed] for key, needed in READ_WHEN.items()}
    return digest_of([flat(Recipe()), conditions])[:8]


def _merged(layers: Sequence[_Layer]) -> dict[str, Any]:
    """Later layers win, key by key."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for section, table in layer.values.items():
            before = merged.get(section)
            if isinstance(table, dict) and isinstance(before, dict):
                merged[section] = {**before, **table}
            else:
                merged[section] = table
    return merged


def _refuse_unread(layers: Sequence[_Layer], recipe: Recipe) -> None:
    """Raises ConfigError for a key that is written out where nothing reads it.

    Each key is judged in the layer that wrote it last. It passes if the whole recipe reads it, or if that layer and its
    bases alone would read it, because a child may switch off what makes its base's keys read.
    """
    defaults = flat(Recipe())
    above: set[str] = set()
    for number in reversed(range(len(layers))):
        written = by_key(layers[number].values)
        own = {key: value for key, value in written.items() if key not in above}
        above |= set(written)
        unread = [key for key in _judged(own, layers[number], defaults) if not is_read(recipe, key)]
        if unread and number + 1 < len(layers):
            # A base may leave the name to its children.
            name = _Layer({"objective": {"name": recipe.objective.name}})
            before = build_recipe(_merged([name, *layers[: number + 1]]))
            unread = [key for key in unread if not is_read(before, key)]
        if unread:
            first, *others = unread
            more = f"; nothing reads {', '.join(others)}, either" if others else ""
            raise ConfigError(f"{why_unread(recipe, first, own[first])}{more}")


def _judged(own: Mapping[str, Any], layer: _Layer, defaults: Mapping[str, Any]) -> list[str]:
    """Which of a layer's keys must be read: those that say something, and that a resolved recipe did not inherit."""
    said = [key for key, value in own.items() if not says_nothing(value, defaults[key])]
    if layer.inherited is not None:
        inherited = {**defaults, **layer.inherited}
        return [key for key in said if own[key] != inherited[key]]
    size = sum(len(table) for table in layer.values.values())
    if 2 * size >= len(defaults):
        return []  # a resolved recipe of another version
    return said


def build_recipe(values: Mapping[str, Any]) -> Recipe:
    """A Recipe from nested tables; strict about names, types, bounds. A preset fills in what the tables leave out."""
    sections: dict[str, dict[str, Any]] = {}
    for section, table in values.items():
        if section not in SECTIONS:
            raise ConfigError(f"unknown section [{section}]; the sections are {', '.join(SECTIONS)}")
        if not isinstance(table, Mapping):
            raise ConfigError(f"{section} = {table!r} must be a section [{section}] with keys")
        sections[section] = dict(table)
    chosen = _section("objective", sections.get("objective", {}))
    kind_named(chosen.name)  # refuses an unknown name
    for key, value in preset_settings(chosen.name, chosen.preset, chosen.preset_for).items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {}).setdefault(name, value)
    return Recipe(**{section: _section(section, table) for section, table in sections.items()})


def _section(section: str, table: Mapping[str, Any]) -> Any:
    """One section of a recipe. Raises ConfigError for the first key that is unknown or has a wrong value."""
    for name in table:
        _key(section, name)
    try:
        return SECTIONS[section](**table)
    except pydantic.ValidationError as error:
        raise ConfigError(_sentence(section, error.errors(include_url=False)[0])) from None


def _sentence(section: str, problem: Mapping[str, Any]) -> str:
    """The sentence about a value that pydantic refused: the key, the value, and what would be right."""
    name, *inside = problem["loc"]
    key, value, what = keys_of(section)[name], problem["input"], problem["type"]
    hint: Any = key.annotation
    whole_for_number = hint is float and isinstance(value, int) and not isinstance(value, bool)
    if whole_for_number:
        with contextlib.suppress(OverflowError):
            value = float(value)
    given = f"{section}.{name} = {_shown(value)}"
    if what == "literal_error":
        choices = typing.get_args(typing.get_args(hint)[0] if inside else hint)  # an entry of a list, or the value
        return f"{given} is unknown; choose one of {', '.join(filter(None, choices))}"
    if what in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        return f"{given} {_out_of_bounds(what, bounds_of(key))}"
    if what == "finite_number":
        return f"{given} must be a finite number"
    if whole_for_number:
        return f"{given} is too large"
    while inside and typing.get_origin(hint) is list:  # its entries; the choices of a union are no list's
        (hint,) = typing.get_args(hint)
        inside.pop(0)
    return f"{given} must be {_describe(hint)}"


def _out_of_bounds(what: str, bounds: Mapping[str, float]) -> str:
    """The end of the sentence about a number that is out of bounds. what: the type of pydantic's error."""
    if {"gt", "lt"} <= bounds.keys():
        return f"must lie between {bounds['gt']} and {bounds['lt']}"
    if {"ge", "lt"} <= bounds.keys():
        return f"must be at least {bounds['ge']} and below {bounds['lt']}"
    if what == "greater_than":
        return f"must be above {bounds['gt']}"
    if what == "greater_than_equal":
        return f"is too small; it must be at least {bounds['ge']}"
    return f"is too large; it must be at most {_number(bounds['le'])}"


def _shown(value: Any) -> str:
    """A value as error messages show it. Python refuses to write numbers of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if not isinstance(value, int | float) or len(text) <= 40 else f"{text[:40]}…"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def as_tables(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Every key with its value, by section. Secrets in addresses are hidden, so that anybody may see the result."""
    tables = dataclasses.asdict(recipe)
    for key in _PLACES:
        section, _, name = key.partition(".")
        value = tables[section][name]
        shown = list(map(without_secrets, value)) if isinstance(value, list) else without_secrets(value)
        tables[section][name] = shown
    return tables


def as_toml(recipe: Recipe) -> str:
    """The resolved recipe with every key written out and the secrets in its addresses hidden.

    It is a recipe file that `load_recipe` reads. Its first line lists the inherited values that nothing reads.
    """
    tables = as_tables(recipe)
    defaults = flat(Recipe())
    unread = {
        key: value for key, value in by_key(tables).items() if value != defaults[key] and not is_read(recipe, key)
    }
    return f"{_RESOLVED.format(_schema())}{json.dumps(unread)}\n{tomli_w.dumps(tables)}"


def _key(section: str, name: str) -> FieldInfo:
    if section not in SECTIONS:
        raise ConfigError(f"unknown section {section!r} in {section}.{name}; the sections are {', '.join(SECTIONS)}")
    keys = keys_of(section)
    if name not in keys:
        raise ConfigError(f"unknown key {section}.{name}; the keys of [{section}] are {', '.join(keys)}")
    return keys[name]


def _parse(key: str, text: str, hint: Any) -> Any:
    """A command-line value. Strings are taken as typed; other values are read as TOML, or as JSON for tables."""
    if hint is str or typing.get_origin(hint) is Literal:
        return text
    for parse in (lambda: tomllib.loads(f"value = {text}")["value"], lambda: json.loads(text)):
        # RecursionError: nested too deep. ValueError: not valid TOML or JSON, or more digits than Python converts.
        with contextlib.suppress(ValueError, RecursionError):
            return parse()
    inner = typing.get_args(hint)[0] if typing.get_origin(hint) is list else None
    if key in _SENTENCES and text:
        return [text]
    if inner is str or typing.get_origin(inner) is Literal:
        return [part for part in text.split(",") if part]
    shown = text if len(text) <= 200 else f"{text[:200]}…"
    raise ConfigError(f"--{key}={shown} is not {_describe(hint)}")


def _holds_null(value: Any) -> bool:
    """Whether a value from JSON is null, or is a table or a list with a null at any depth."""
    left = [value]
    while left:
        value = left.pop()
        if value is None:
            return True
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return False


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "a text"
    names = {int: "a whole number", float: "a number", int | float: "a number", str: "a text", bool: "true or false"}
    if typing.get_origin(hint) is list:
        return f"a list, each entry {_describe(typing.get_args(hint)[0])}"
    return names.get(hint, "a table")
