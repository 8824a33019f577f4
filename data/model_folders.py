"""The place of the transformer in a model folder: the root, or the folder that modules.json names.

sentence-transformers writes modules.json beside a model. It lists the modules in order, each with its class and its
folder. In most models the transformer's folder is the root (""); in the oldest it is 0_Transformer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pydantic

from data.ground.errors import DataError
from data.ground.files import first_line
from data.ground.records import Record, read_json

MODULES_FILE = "modules.json"
SETTINGS_FILE = "barista.json"
_HINT = "save the model again"


class Module(Record):
    """An entry of modules.json. `type` is the full name of a class; `path` is a folder inside the model folder."""

    type: str
    path: str


@dataclass(frozen=True)
class Modules:
    """The modules that modules.json lists."""

    folder: Path
    listed: tuple[Module, ...]

    def folder_of(self, module: Module) -> Path:
        return self.folder / module.path if module.path else self.folder


def read_modules(folder: Path) -> Modules | None:
    """The modules of a sentence-transformers folder; None without a modules.json, or with a barista.json.

    Raises:
        DataError: modules.json cannot be read, or names places outside of its folder.

    """
    path = folder / MODULES_FILE
    if not path.is_file() or os.path.lexists(folder / SETTINGS_FILE):
        return None
    values = read_json(path, what="list of modules", hint=_HINT)
    try:
        listed = tuple(Module.model_validate(each) for each in values) if isinstance(values, list) else ()
    except pydantic.ValidationError as error:
        raise DataError(f"list of modules {path} is damaged ({first_line(error)}); {_HINT}") from error
    if not listed:
        raise DataError(f"list of modules {path} lists no module; {_HINT}")
    for module in listed:
        inside = PurePosixPath(module.path)
        if inside.is_absolute() or ".." in inside.parts:
            raise DataError(f"list of modules {path} names {module.path!r}, outside of its folder; {_HINT}")
    return Modules(folder, listed)


def transformer_folder(folder: Path) -> Path:
    """The folder with a model's configuration, weights and tokenizer: `folder` itself, or its first module's folder."""
    modules = read_modules(folder)
    return folder if modules is None else modules.folder_of(modules.listed[0])
