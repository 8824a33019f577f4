"""What all evaluation tasks are checked for: their names, and their text files, which are read line by line.

Every error message about a file names the file and the line.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data.ground.errors import ConfigError, DataError
from data.ground.files import first_line, is_unicode, one_file_name, reading

_HINT = "fix or remove it"
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")


def check_task_names(names: Sequence[str]) -> None:
    """Refuse two tasks with the same name, or with names that give their results the same file name."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two of the tasks are named {name!r}; rename one of the files or folders")
    if (two := one_file_name(names)) is not None:
        raise ConfigError(
            f"the results of the tasks {two[0]!r} and {two[1]!r} would be files of the same name; rename one of the "
            "files or folders of the tasks"
        )


def text_lines(path: Path, what: str) -> Iterator[tuple[int, str]]:
    """Line numbers, from 1, and lines with their line ends; a file whose name ends in .gz is read through gzip.

    Lines end only at "\\n", because texts may contain Unicode's other line breaks.
    """
    with (
        reading(path, what=what),
        gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file,
    ):
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path} line {number} is not UTF-8 (its byte {error.start}); convert the file"
                ) from error
            yield number, text


def json_lines(path: Path, what: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A row's place, as error messages name it, and the row; empty lines are left out."""
    for number, line in text_lines(path, what):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            row = json.loads(line)
        except RecursionError as error:
            raise DataError(f"{where} is nested too deep; {_HINT}") from error
        except ValueError as error:
            raise DataError(f"{where} is not JSON ({first_line(error)}); {_HINT}") from error
        if not isinstance(row, dict):
            raise DataError(f"{where} is no JSON object; {_HINT}")
        yield where, row


def text_of(row: dict[str, Any], key: str, where: str, *, optional: bool = False) -> str:
    """A row's text. With `optional`, a text that is absent or null is empty."""
    value = row.get(key)
    if value is None and optional:
        return ""
    if key not in row:
        known = ", ".join(map(repr, list(row)[:6]))
        raise DataError(f"{where} has no {key!r} but {known}; rename the column, or add it")
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} holds {_kind(value)}, not a text; {_HINT}")
    return whole_text(value, where)


def id_of(row: dict[str, Any], key: str, where: str) -> str:
    """A row's id: a non-empty text, or a whole number, which equals the text of its digits."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"{where} has no {key} that is a text or a whole number; {_HINT}")
    return whole_text(str(value), where)


def whole_text(text: str, where: str) -> str:
    """Refuse lone surrogates: JSON can write them, but no text encoding can."""
    if not text.isascii() and not is_unicode(text):
        raise DataError(f"{where} holds half of a surrogate pair, which is no character; {_HINT}")
    return text


def whole_number(text: str, *, most: int) -> int | None:
    """A whole number of ASCII digits between -most and most; None for anything else."""
    return int(text) if _WHOLE_NUMBER.fullmatch(text) and abs(int(text)) <= most else None


def _kind(value: object) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "null" if value is None else kinds.get(type(value), type(value).__name__)
