"""Records of units: documents and tuples, checked, one at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from data.corpora.by_id import TextIndex, number_of
from data.corpora.rows import require_columns, rows_of, unit_lines
from data.corpora.units import (
    NEGATIVE_NAME,
    SCORE_NAMES,
    Document,
    DocumentLayout,
    IdLayout,
    TupleLayout,
    TupleRecord,
    Unit,
    join_title,
    place,
)
from data.ground.errors import DataError
from data.lines import Tally, decoded, too_long

# Lists within lists: as deep as a cell's texts may lie.
_DEEPEST_LIST = 8


def read_unit(unit: Unit, tally: Tally | None = None) -> Iterator[tuple[int, Document | TupleRecord]]:
    """(position, record) of every record of a unit; `place` turns a position into words."""
    tally = tally or Tally()
    records = _id_records(unit, tally) if isinstance(unit.layout, IdLayout) else _records(unit, tally)
    return itertools.islice(records, unit.skip, None if unit.limit is None else unit.skip + unit.limit)


def _records(unit: Unit, tally: Tally) -> Iterator[tuple[int, Document | TupleRecord]]:
    if unit.kind == "txt":
        yield from _text_documents(unit, tally)
        return
    skipped = frozenset(unit.skip_rows)
    number = -1
    for number, (position, row) in enumerate(rows_of(unit, tally)):
        if number in skipped:
            continue
        record = (
            _document(unit, position, row, unit.layout)
            if isinstance(unit.layout, DocumentLayout)
            else _tuple(unit, position, row, cast(TupleLayout, unit.layout))
        )
        if record is not None:
            yield position, record
    if skipped and max(skipped) > number:
        raise DataError(f"row {max(skipped)} is to be skipped, but {unit.path} has {number + 1} rows; fix --skip-rows")


def _document(unit: Unit, position: int, row: Mapping[str, Any], layout: DocumentLayout) -> Document | None:
    text = row.get(layout.text_column)
    if text is None and layout.text_column not in row:
        require_columns(place(unit, position), tuple(row), [layout.text_column])
    if isinstance(text, str) and text.strip():
        return {"text": text}
    if text is None or isinstance(text, str):
        _refuse_empty(unit, position, layout.text_column)
        return None
    raise DataError(f"{place(unit, position)}: column {layout.text_column!r} holds a {type(text).__name__}, not a text")


def _tuple(unit: Unit, position: int, row: Mapping[str, Any], layout: TupleLayout) -> TupleRecord | None:
    def texts_of(column: str) -> list[str]:
        return _texts(unit, position, column, row.get(column))

    for column in (layout.query, *layout.positives):
        if column not in row:
            require_columns(place(unit, position), tuple(row), [column])
    query = texts_of(layout.query)
    positives = [text for column in layout.positives for text in texts_of(column)]
    negative_columns = _negative_columns(unit, position, row, layout)
    negatives = [text for column in negative_columns for text in texts_of(column)]
    if len(query) != 1:
        raise DataError(f"{place(unit, position)}: column {layout.query!r} must hold one query, not {len(query)}")
    if not query[0].strip():
        _refuse_empty(unit, position, layout.query)
        return None
    if not positives or not all(text.strip() for text in positives):
        _refuse_empty(unit, position, ", ".join(layout.positives))
        positives = [text for text in positives if text.strip()]
        if not positives:
            return None
    if not all(text.strip() for text in negatives):
        _refuse_empty(unit, position, ", ".join(negative_columns))
        negatives = [text for text in negatives if text.strip()]
    score = _score(unit, position, row.get(layout.score)) if layout.score else None
    return {"query": query[0], "positives": positives, "negatives": negatives, "score": score}


def _negative_columns(
    unit: Unit, position: int, row: Mapping[str, Any], layout: TupleLayout
) -> tuple[str, ...] | list[str]:
    """A row's own, where rows may have columns that the first one lacks."""
    if not layout.by_row:
        return layout.negatives
    further = [name for name in row if name not in layout.negatives and NEGATIVE_NAME.fullmatch(name)]
    if layout.score and any(row[name] for name in further):
        raise DataError(
            f"{place(unit, position)} has negatives, and the first row a score; prepare graded pairs by themselves, or "
            "name the columns to read with --query-column and the like"
        )
    if not layout.score and not layout.negatives and any(row.get(name) is not None for name in SCORE_NAMES):
        raise DataError(
            f"{place(unit, position)} has a score, and the first row none; give every row one, or name the columns to "
            "read with --query-column and the like"
        )
    return [*layout.negatives, *further]


def _texts(unit: Unit, position: int, column: str, value: Any, *, depth: int = 0) -> list[str]:
    """The texts of one cell: a text, a passage {"title", "text"}, a list of either, or nothing."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping) and isinstance(value.get("text"), str):
        return [join_title(value.get("title"), value["text"])]
    if isinstance(value, list) and depth < _DEEPEST_LIST:
        return [text for item in value for text in _texts(unit, position, column, item, depth=depth + 1)]
    # Parquet's maps come as pairs.
    name = "map" if isinstance(value, tuple) else type(value).__name__
    raise DataError(f"{place(unit, position)}: column {column!r} holds a {name}, not a text")


def _score(unit: Unit, position: int, value: Any) -> float:
    score = number_of(value)
    if not math.isfinite(score):
        raise DataError(f"{place(unit, position)}: score {value!r} is not a finite number")
    return score


def _refuse_empty(unit: Unit, position: int, column: str) -> None:
    if not unit.skip_empty:
        raise DataError(f"{place(unit, position)}: {column} is empty; fill it, or drop such rows with --skip-empty")


def _text_documents(unit: Unit, tally: Tally) -> Iterator[tuple[int, Document]]:
    layout = cast(DocumentLayout, unit.layout)
    pieces: list[str] = []
    first = length = 0
    for position, line in unit_lines(unit, tally):
        text = decoded(line, partial(place, unit, position))
        blank = not text.strip()
        ends = layout.text_split == "lines" or (layout.text_split == "blank-lines" and blank)
        if not blank or (pieces and not ends):
            if not pieces:
                first, length = position, 0
            pieces.append(text)
            length += len(line)
            if length > unit.longest_line:
                raise DataError(too_long(place(unit, first), unit.longest_line))
        if ends and pieces:
            yield first, {"text": "".join(pieces).strip()}
            pieces = []
    if pieces:
        yield first, {"text": "".join(pieces).strip()}


def _id_records(unit: Unit, tally: Tally) -> Iterator[tuple[int, TupleRecord]]:
    layout = cast(IdLayout, unit.layout)
    index = TextIndex.load(Path(layout.index))

    def text_of(name: str) -> str:
        text = index.get(name)
        if text is None:
            raise DataError(f"passage {name!r}, which {layout.names} names, is not in {index.path}")
        if not text.strip() and not unit.skip_empty:
            raise DataError(f"passage {name!r} in {index.path} is empty; fill it, or drop it with --skip-empty")
        return text

    for position, row in rows_of(unit, tally):
        positives, negatives = ([text for text in map(text_of, row[side]) if text.strip()] for side in ("pos", "neg"))
        if not row["query"].strip() and not unit.skip_empty:
            raise DataError(f"a query that {layout.names} judges is empty; fill it, or drop it with --skip-empty")
        if positives and row["query"].strip():
            yield position, {"query": row["query"], "positives": positives, "negatives": negatives, "score": None}
