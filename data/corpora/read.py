"""The records of input splits, documents and training examples: checked, one at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from data.corpora.by_id import TextIndex, number_of
from data.corpora.rows import require_columns, rows_of, split_lines
from data.corpora.splits import (
    NEGATIVE_NAME,
    POSITIVE_NAMES,
    QUERY_NAMES,
    SCORE_NAMES,
    WEIGHT_NAME,
    Document,
    DocumentLayout,
    IdLayout,
    InputSplit,
    TupleLayout,
    TupleRecord,
    join_title,
    place,
)
from data.ground.errors import DataError
from data.lines import ByteCounter, decoded, too_long

# The deepest nesting of lists in a cell.
_DEEPEST_LIST = 8


def read_split(
    input_split: InputSplit, counter: ByteCounter | None = None
) -> Iterator[tuple[int, Document | TupleRecord]]:
    """(position, record) of every record of an input split; `place` turns a position into words."""
    counter = counter or ByteCounter()
    records = (
        _id_records(input_split, counter)
        if isinstance(input_split.layout, IdLayout)
        else _records(input_split, counter)
    )
    return itertools.islice(
        records, input_split.skip, None if input_split.limit is None else input_split.skip + input_split.limit
    )


def _records(input_split: InputSplit, counter: ByteCounter) -> Iterator[tuple[int, Document | TupleRecord]]:
    if input_split.kind == "txt":
        yield from _text_documents(input_split, counter)
        return
    skipped = frozenset(input_split.skip_rows)
    number = -1
    for number, (position, row) in enumerate(rows_of(input_split, counter)):
        if number in skipped:
            continue
        record = (
            _document(input_split, position, row, input_split.layout)
            if isinstance(input_split.layout, DocumentLayout)
            else _tuple(input_split, position, row, cast(TupleLayout, input_split.layout))
        )
        if record is not None:
            yield position, record
    if skipped and max(skipped) > number:
        raise DataError(
            f"row {max(skipped)} is to be skipped, but {input_split.path} has {number + 1} rows; fix --skip-rows"
        )


def _document(
    input_split: InputSplit, position: int, row: Mapping[str, Any], layout: DocumentLayout
) -> Document | None:
    text = row.get(layout.text_column)
    if text is None and layout.text_column not in row:
        require_columns(place(input_split, position), tuple(row), [layout.text_column])
    if isinstance(text, str) and text.strip():
        return {"text": text}
    if text is None or isinstance(text, str):
        _refuse_empty(input_split, position, layout.text_column)
        return None
    raise DataError(
        f"{place(input_split, position)}: column {layout.text_column!r} holds a {type(text).__name__}, not a text"
    )


def _tuple(input_split: InputSplit, position: int, row: Mapping[str, Any], layout: TupleLayout) -> TupleRecord | None:
    def texts_of(column: str) -> list[str]:
        return _texts(input_split, position, column, row.get(column))

    for column in (layout.query, *layout.positives):
        if column not in row:
            require_columns(place(input_split, position), tuple(row), [column])
    if layout.by_row:
        _refuse_further_columns(input_split, position, row, layout)
    query = texts_of(layout.query)
    positives = [text for column in layout.positives for text in texts_of(column)]
    negative_columns = _negative_columns(row, layout)
    negatives = [text for column in negative_columns for text in texts_of(column)]
    if len(query) != 1:
        raise DataError(
            f"{place(input_split, position)}: column {layout.query!r} must hold one query, not {len(query)}"
        )
    if not query[0].strip():
        _refuse_empty(input_split, position, layout.query)
        return None
    if not positives or not all(text.strip() for text in positives):
        _refuse_empty(input_split, position, ", ".join(layout.positives))
        positives = [text for text in positives if text.strip()]
        if not positives:
            return None
    if not all(text.strip() for text in negatives):
        _refuse_empty(input_split, position, ", ".join(negative_columns))
        negatives = [text for text in negatives if text.strip()]
    score = _score(input_split, position, row.get(layout.score)) if layout.score else None
    record: TupleRecord = {"query": query[0], "positives": positives, "negatives": negatives, "score": score}
    if layout.weight:
        record["weight"] = _weight(input_split, position, row.get(layout.weight))
    return record


def _refuse_further_columns(
    input_split: InputSplit, position: int, row: Mapping[str, Any], layout: TupleLayout
) -> None:
    """Refuse what a row has under a usual name, the first row lacks, and nothing would read.

    What the first row has and is not read was named in a warning (`layout.unread`).
    """
    if layout.score and any(row[name] for name in row if NEGATIVE_NAME.fullmatch(name)):
        raise DataError(
            f"{place(input_split, position)} has negatives, and the first row a score; prepare graded pairs by "
            "themselves, or name the columns to read with --query-column and the like"
        )
    read_or_said = (layout.query, *layout.positives, layout.score, layout.weight, *layout.unread)
    if any(row.get(name) is not None for name in SCORE_NAMES if name not in read_or_said):
        raise DataError(
            f"{place(input_split, position)} has a score, and the first row none; give every row one, or name the "
            "columns to read with --query-column and the like"
        )
    if WEIGHT_NAME not in read_or_said and row.get(WEIGHT_NAME) is not None:
        raise DataError(
            f"{place(input_split, position)} has a weight, and the first row none; give the first row one, or name "
            "the columns to read with --query-column and the like"
        )
    for name in (*QUERY_NAMES, *POSITIVE_NAMES):
        if name not in read_or_said and row.get(name):
            side, read = ("queries", layout.query) if name in QUERY_NAMES else ("positives", *layout.positives)
            raise DataError(
                f"{place(input_split, position)} has a column {name!r}, and the {side} of the first row stand in "
                f"{read!r}; put all of them there, or name the columns to read with --query-column and the like"
            )


def _negative_columns(row: Mapping[str, Any], layout: TupleLayout) -> tuple[str, ...]:
    """The columns of a row's negatives: where rows may differ, also those that the first row lacks."""
    if not layout.by_row:
        return layout.negatives
    return (
        *layout.negatives,
        *(name for name in row if name not in layout.negatives and NEGATIVE_NAME.fullmatch(name)),
    )


def _texts(input_split: InputSplit, position: int, column: str, value: Any, *, depth: int = 0) -> list[str]:
    """The texts of one cell: a text, a passage {"title", "text"}, a list of either, or nothing."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping) and isinstance(value.get("text"), str):
        return [join_title(value.get("title"), value["text"])]
    if isinstance(value, list) and depth < _DEEPEST_LIST:
        return [text for item in value for text in _texts(input_split, position, column, item, depth=depth + 1)]
    # pyarrow gives the entries of a map as tuples.
    name = "map" if isinstance(value, tuple) else type(value).__name__
    raise DataError(f"{place(input_split, position)}: column {column!r} holds a {name}, not a text")


def _score(input_split: InputSplit, position: int, value: Any) -> float:
    score = number_of(value)
    if not math.isfinite(score):
        raise DataError(f"{place(input_split, position)}: score {value!r} is not a finite number")
    return score


def _weight(input_split: InputSplit, position: int, value: Any) -> float:
    """A row's weight; one without has the weight 1."""
    if value is None or value == "":
        return 1.0
    weight = number_of(value)
    if not (math.isfinite(weight) and weight >= 0):
        raise DataError(f"{place(input_split, position)}: weight {value!r} is not a finite number of at least 0")
    return weight


def _refuse_empty(input_split: InputSplit, position: int, column: str) -> None:
    if not input_split.skip_empty:
        raise DataError(
            f"{place(input_split, position)}: {column} is empty; fill it, or drop such rows with --skip-empty"
        )


def _text_documents(input_split: InputSplit, counter: ByteCounter) -> Iterator[tuple[int, Document]]:
    layout = cast(DocumentLayout, input_split.layout)
    texts: list[str] = []
    first = length = 0
    for position, line in split_lines(input_split, counter):
        text = decoded(line, partial(place, input_split, position))
        blank = not text.strip()
        ends = layout.text_split == "lines" or (layout.text_split == "blank-lines" and blank)
        if not blank or (texts and not ends):
            if not texts:
                first, length = position, 0
            texts.append(text)
            length += len(line)
            if length > input_split.longest_line:
                raise DataError(too_long(place(input_split, first), input_split.longest_line))
        if ends and texts:
            yield first, {"text": "".join(texts).strip()}
            texts = []
    if texts:
        yield first, {"text": "".join(texts).strip()}


def _id_records(input_split: InputSplit, counter: ByteCounter) -> Iterator[tuple[int, TupleRecord]]:
    layout = cast(IdLayout, input_split.layout)
    index = TextIndex.load(Path(layout.index))

    def text_of(name: str) -> str:
        text = index.get(name)
        if text is None:
            raise DataError(f"passage {name!r}, which {layout.names} names, is not in {index.path}")
        if not text.strip() and not input_split.skip_empty:
            raise DataError(f"passage {name!r} in {index.path} is empty; fill it, or drop it with --skip-empty")
        return text

    for position, row in rows_of(input_split, counter):
        positives, negatives = ([text for text in map(text_of, row[side]) if text.strip()] for side in ("pos", "neg"))
        if not row["query"].strip() and not input_split.skip_empty:
            raise DataError(f"a query that {layout.names} judges is empty; fill it, or drop it with --skip-empty")
        if positives and row["query"].strip():
            yield position, {"query": row["query"], "positives": positives, "negatives": negatives, "score": None}
