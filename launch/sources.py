"""What is known of the model and the shards that a recipe names, before there are any. Torch-free.

The model is one of launch/known_models.py; or a folder that exists; or the folder that another recipe's run will leave,
`run.output` and `/model`, whose shape is that of the model which that recipe starts from.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from data.ground.errors import ConfigError
from launch.known_models import KNOWN
from trainer.config.load import load_recipe, read_json_object
from trainer.config.schema import Recipe

# One token before a text and one after it, of which manifest.json then has no entry (data/shards/format.py).
_USUAL_FRAME = 2


def config_of(name: str, option: str, recipes: Path | None = None) -> tuple[dict[str, Any], str]:
    """What is known of a model's config.json, and what an error calls it.

    option: the option that gives another model. recipes: the folder of the recipes that may make it.
    """
    return _config_of(name, option, recipes, ())


def _config_of(name: str, option: str, recipes: Path | None, passed: Collection[str]) -> tuple[dict[str, Any], str]:
    if name in KNOWN:
        return dict(KNOWN[name]), name
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.is_file():
        return read_json_object(path, "the model's", hint="give a model's config.json"), str(path)
    maker = _maker_of(name, option, recipes) if recipes is not None else None
    if maker is None:
        raise ConfigError(
            f"the shape of {name!r} is not known here, and no recipe beside this one makes it; give {option}, the path "
            f"of its config.json or one of {', '.join(KNOWN)}"
        )
    if name in passed:
        raise ConfigError(f"{name!r} is made from itself by the recipes {', '.join(passed)}; give {option}")
    recipe, said = load_recipe(maker), f"{name}, as {maker} makes it"
    if recipe.model.config:
        full = recipe.ladder.full
        values = {"hidden_size": full.dim, "num_hidden_layers": full.layers} | recipe.model.config
    else:
        values = _config_of(recipe.model.source, option, recipes, (*passed, name))[0]
    return values | _kept_layers(recipe, values), said


def _kept_layers(recipe: Recipe, values: dict[str, Any]) -> dict[str, Any]:
    """How many layers the recipe's run leaves: fewer than it starts from, if it trains one size on its own."""
    key = "n_layers" if "n_layers" in values else "num_hidden_layers"
    return {key: recipe.num_layers} if recipe.single_size is not None else {}


def _maker_of(name: str, option: str, recipes: Path) -> Path | None:
    """The recipe whose run leaves the model in the folder of that name."""
    found = [path for path in sorted(recipes.glob("*.toml")) if _model_of(path) == Path(name)]
    if len(found) > 1:
        raise ConfigError(f"{name!r} is made by {found[0]} and by {found[1]}; give {option}")
    return found[0] if found else None


def _model_of(path: Path) -> Path | None:
    """The model folder that a recipe's run leaves; None if the recipe does not write out its run.output itself."""
    try:
        output = tomllib.loads(path.read_text("utf-8"))["run"]["output"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Path(output) / "model" if isinstance(output, str) and output else None


def frame_length(shards: Sequence[str]) -> int:
    """How many tokens the shards' tokenizer puts around a text: two, unless a folder that is here says otherwise."""
    path = next((path for folder in shards if (path := Path(folder) / "manifest.json").is_file()), None)
    if path is None:
        return _USUAL_FRAME
    frame = read_json_object(path, "the shards'", hint="make the folder again with python -m data.prepare").get("frame")
    if frame is None:
        return _USUAL_FRAME
    try:
        return len(frame["before"]) + len(frame["after"])
    except (TypeError, KeyError):
        raise ConfigError(f"{path}: frame = {frame!r:.80} is none; make the folder again") from None
