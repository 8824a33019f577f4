"""A schema for each JSON file format, and one reader for all of them.

A format that the project writes as JSON is a subclass of `Record` (pydantic): its fields, their types and bounds. A
file that does not fit is refused in one sentence that names the file, the key, its value and what would be right. A
record with a field `format` is versioned: an unknown number raises OtherFormat, because such a file is not damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import pydantic

from data.ground.errors import DataError, OtherFormat
from data.ground.files import first_line, read_bytes

_REMAKE = "restore it or make it again"


class Record(pydantic.BaseModel):
    """The content of a file, or a part of it. Types are exact: "1" is no number, and 1.0 is no whole number.

    Unknown keys are ignored, because later versions may add some. A schema that must know all keys sets
    `extra="forbid"`.
    """

    model_config = pydantic.ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


Schema = TypeVar("Schema", bound=Record)


def read_record(path: Path, schema: type[Schema], *, what: str = "file", hint: str = _REMAKE) -> Schema:
    """Read a JSON file and check it against its schema.

    Raises:
        OtherFormat: another version wrote it.
        DataError: it cannot be read, is no JSON, or does not fit the schema.

    """
    content = read_bytes(path, what=what, hint=hint)
    return parse_record(content, schema, where=f"{what} {path}", hint=hint)


def parse_record(content: bytes | str, schema: type[Schema], *, where: str, hint: str = _REMAKE) -> Schema:
    """Check JSON text against a schema. Errors begin with `where`; their classes are those of `read_record`."""
    with contextlib.suppress(pydantic.ValidationError):
        return schema.model_validate_json(content)
    # Parse the content again to find the first problem for the message.
    values = parse_json(content, where=where, hint=hint)
    if not isinstance(values, dict):
        raise DataError(f"{where} is damaged (it holds no JSON object); {hint}")
    return check_record(values, schema, where=where, hint=hint)


def check_record(values: dict[str, Any], schema: type[Schema], *, where: str, hint: str = _REMAKE) -> Schema:
    """Check parsed JSON against a schema, as `parse_record` checks text."""
    known = schema.model_fields.get("format")
    if known is not None and isinstance(values.get("format"), int):
        formats = get_args(known.annotation) or (known.default,)
        if values["format"] not in formats:
            reads = " and ".join(map(str, formats))
            raise OtherFormat(
                f"{where} is of format {values['format']}, and this version reads format {reads}; "
                "use the version that wrote it"
            )
    try:
        # Validate JSON text rather than Python objects: strict mode accepts a JSON list as a tuple.
        return schema.model_validate_json(json.dumps(values))
    except (pydantic.ValidationError, ValueError) as error:
        raise DataError(f"{where} is damaged ({_first_problem(error)}); {hint}") from error


def read_json(path: Path, *, what: str = "file", hint: str = _REMAKE) -> Any:
    """Read a JSON file of any shape."""
    content = read_bytes(path, what=what, hint=hint)
    return parse_json(content, where=f"{what} {path}", hint=hint)


def parse_json(content: bytes | str, *, where: str, hint: str = _REMAKE) -> Any:
    """Parse JSON text of any shape. Errors begin with `where`."""
    try:
        return json.loads(content)
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 (byte {error.start}); {hint}") from error
    except RecursionError as error:
        raise DataError(f"{where} is nested too deep; {hint}") from error
    except ValueError as error:
        raise DataError(f"{where} is no JSON ({first_line(error)}); {hint}") from error


def json_of(content: Any, *, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """JSON text on one line, or indented. What is not defined (NaN) or infinite becomes null: JSON has neither."""
    return json.dumps(defined(content), indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)


def defined(value: Any) -> Any:
    """JSON values with None in place of every number that is not finite."""
    if isinstance(value, Mapping):
        return {key: defined(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [defined(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _first_problem(error: ValueError) -> str:
    """The first problem of a validation: the key, its value and what would be right."""
    if not isinstance(error, pydantic.ValidationError):
        return first_line(error)
    first = error.errors(include_url=False)[0]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    message = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == "missing":
        return f"it has no {key}"
    if not key:  # of the whole record; the message says which part it is about
        return message
    shown = repr(first["input"])
    return f"{key} = {shown if len(shown) <= 80 else f'{shown[:80]} …'}: {message}"


def digest_of(content: object) -> str:
    """The sha256 of JSON values, independent of the order of their keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
