"""Readers of what users hold: text and query/passage files -> records.

What is decided here:
- A record is {"text"} or {"query", "positives", "negatives", "score"}; every reader is lazy.
- Inputs are cut into `Unit`s: a byte range of a jsonl or TSV file, row groups of a parquet file, a whole compressed
  file, a shard of a hub data set. A unit is small enough to pickle, and one process reads it from start to end.
  Byte ranges need no scan of the file: a line belongs to the unit in which its first byte lies.
- Whatever is wrong with the user's data is a DataError that names file and line. Line numbers are counted when an
  error needs them, not while reading.
- Passages named by id (MS MARCO, BEIR) are fetched through an index of byte offsets, so that no process holds the
  collection in memory.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
import logging
import math
import mmap
import re
import socket
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, cast
from urllib.parse import urlsplit

import numpy as np

from data.errors import DataError
from data.files import first_line, open_regular, read_text, reading
from data.inputs import FileKind, check_name, find_inputs, kind_of
from data.lines import LONGEST_LINE, Tally, is_compressed, lines, too_long

logger = logging.getLogger(__name__)

SMALLEST_UNIT_BYTES = 4 * 2**20
LARGEST_UNIT_BYTES = 256 * 2**20
MOST_NEGATIVES = 2**16
UNITS_WANTED = 16
TEXT_SPLITS = ("blank-lines", "lines", "file")
TUPLE_FORMATS = ("auto", "columns", "nli", "sts", "msmarco", "beir")

_QUERY_NAMES = ("query", "anchor", "question", "sentence1")
_POSITIVE_NAMES = ("positive", "positives", "pos", "positive_passages", "answer", "entailed", "sentence2")
_NEGATIVE_NAME = re.compile(r"(hard_?)?neg(ative)?s?(_passages)?(_?\d+)?|contradicted")
_SCORE_NAMES = ("score",)
# Headers of NLI triplets: a file without one would lose its first triplet to it.
_NLI_NAMES = (
    re.compile(r"anchor|premise|query|sent(ence)?_?[01]|text_?[01]"),
    re.compile(r"entail(ed|ment)|positive|pos|hypothesis|sent(ence)?_?[12]|text_?[12]"),
    re.compile(r"contradict(ed|ion)|(hard_?)?neg(ative)?|sent(ence)?_?[23]|text_?[23]"),
)
# Lists within lists: as deep as a cell's texts may lie.
_DEEPEST_LIST = 8


class Document(TypedDict):
    text: str


class TupleRecord(TypedDict):
    query: str
    positives: list[str]
    negatives: list[str]
    score: float | None


@dataclass(frozen=True)
class DocumentLayout:
    """Where a row's text is, and how a plain text file falls into documents."""

    text_column: str = "text"
    text_split: str = "blank-lines"


@dataclass(frozen=True)
class TupleLayout:
    """Which columns of a row are what; a column may hold one text, a list, or {"title", "text"} passages."""

    query: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...] = ()
    score: str | None = None
    by_row: bool = False  # found by name in a format whose rows may differ: a row may have negatives that others lack


@dataclass(frozen=True)
class IdLayout:
    """Rows name passages by id; `index` is the folder of a saved TextIndex."""

    index: str
    names: str  # what the ids come from, for error messages


@dataclass(frozen=True)
class Unit:
    """A piece of the input that one process reads from start to end."""

    source: str  # what people call it
    path: str  # of the file, or the hub data set's name
    kind: FileKind
    layout: DocumentLayout | TupleLayout | IdLayout
    size: int  # bytes to read, 0 if unknown: for progress only
    start: int = 0  # plain lines: byte; compressed: lines to skip; parquet: row group; hub: shard
    stop: int | None = None  # exclusive; hub: number of shards
    columns: tuple[str, ...] = ()  # of a TSV file
    skip_rows: tuple[int, ...] = ()  # 0-based data rows, whole-file units only
    skip_empty: bool = False
    skip: int = 0  # records left out at the start
    limit: int | None = None  # records after them
    subset: str | None = None  # hub
    split: str = "train"  # hub
    longest_line: int = LONGEST_LINE  # bytes

    @property
    def graded(self) -> bool:
        return isinstance(self.layout, TupleLayout) and self.layout.score is not None


# ------------------------------------------------------------------------------------------------------------ planning


def plan_documents(
    inputs: Sequence[str],
    *,
    text_column: str = "text",
    text_split: str = "blank-lines",
    skip_empty: bool = False,
    subset: str | None = None,
    split: str = "train",
    skip: int = 0,
    limit: int | None = None,
    longest_line: int = LONGEST_LINE,
    output: Path | None = None,
) -> list[Unit]:
    """Cut files, globs, folders and hub data sets into units of documents.

    The first `skip` records of the first unit are left out, for evaluation, say; then `limit` are taken at most. Lines
    of more than `longest_line` bytes are refused; what lies in the folder `output` is no input.
    """
    if text_split not in TEXT_SPLITS:
        raise DataError(f"text split {text_split!r} is unknown; use one of {', '.join(TEXT_SPLITS)}")
    layout = DocumentLayout(text_column, text_split)
    units: list[Unit] = []
    paths = find_inputs(inputs, output=output)
    unit_bytes = _unit_bytes(paths)
    for path in paths:
        if isinstance(path, str):
            units += _hub_units(path, layout, subset=subset, split=split)
        elif (kind := kind_of(path)) == "tsv":
            columns, header_size = _header(path, longest_line)
            _require_columns(path, columns, [text_column])
            units += _line_units(path, kind, layout, start=header_size, columns=columns, unit_bytes=unit_bytes)
        elif kind == "parquet":
            _require_columns(path, _parquet_columns(path), [text_column])
            units += _parquet_units(path, layout, unit_bytes=unit_bytes)
        else:
            whole = kind == "txt" and text_split != "lines"
            units += _line_units(path, kind, layout, unit_bytes=None if whole else unit_bytes)
    units = [replace(unit, skip_empty=skip_empty, longest_line=longest_line) for unit in units]
    if units and skip:
        units[0] = replace(units[0], skip=skip)
    return _limited(units, limit)


def plan_tuples(
    inputs: Sequence[str],
    *,
    scratch: Path | None = None,
    format: str = "auto",
    query_column: str | None = None,
    positive_columns: Sequence[str] = (),
    negative_columns: Sequence[str] = (),
    score_column: str | None = None,
    columns: Sequence[str] = (),
    negatives_file: str | None = None,
    max_negatives: int = 50,
    skip_rows: str | None = None,
    skip_empty: bool = False,
    subset: str | None = None,
    split: str = "train",
    limit: int | None = None,
    longest_line: int = LONGEST_LINE,
    output: Path | None = None,
) -> list[Unit]:
    """Cut pairs, triplets, n-tuples and graded pairs into units.

    Formats: "columns" reads jsonl, TSV and parquet by column name (`columns` names those of a TSV file without a
    header); "nli" a TSV with a header whose columns are anchor, entailed, contradicted; "sts" a TSV without a header of
    score, sentence1, sentence2; "msmarco" and "beir" folders. "auto" tells these folders from the rest by their files.
    `scratch` is an empty folder where MS MARCO and BEIR keep an index until the units have been read. `longest_line`
    and `output` as in `plan_documents`.
    """
    if format not in TUPLE_FORMATS:
        raise DataError(f"format {format!r} is unknown; use one of {', '.join(TUPLE_FORMATS)}")
    if len(set(columns)) < len(columns) or not all(columns):
        raise DataError(f"the columns {', '.join(columns)} are not distinct names; name each column once")
    if not 0 <= max_negatives <= MOST_NEGATIVES:
        raise DataError(f"{max_negatives} negatives a query cannot be kept; give between 0 and {MOST_NEGATIVES}")
    wanted = TupleLayout(query_column or "", tuple(positive_columns), tuple(negative_columns), score_column)
    skipped = _read_row_numbers(skip_rows) if skip_rows else ()
    if skipped and len(inputs) > 1:
        raise DataError("rows to skip are counted within one file; prepare one input at a time")
    units: list[Unit] = []
    files: list[str] = []
    folders: set[Path] = set()
    for number, name in enumerate(inputs):
        check_name(name, "input")
        found = format if format != "auto" else _folder_format(Path(name))
        if found not in ("msmarco", "beir"):
            files.append(name)
            continue
        if Path(name).resolve() in folders:
            raise DataError(f"folder {name} is given twice; name it once")
        folders.add(Path(name).resolve())
        if scratch is None:
            raise DataError(f"folder {name} names passages by id, which takes a scratch folder for their index")
        target = scratch / f"{number:03d}"
        target.mkdir(parents=True)
        units += _id_units(Path(name), target, found, split=split, negatives=negatives_file, most=max_negatives)
    if negatives_file and files:
        raise DataError(f"{files[0]} is no MS MARCO or BEIR folder, so the hard negatives file does not apply to it")
    paths = find_inputs(files, output=output)
    unit_bytes = None if skipped else _unit_bytes(paths)
    if skipped and len(paths) > 1:
        raise DataError("rows to skip are counted within one file; prepare one input at a time")
    said: set[tuple[str, ...]] = set()
    for path in paths:
        if isinstance(path, str):
            # Rows to skip are counted over the whole data set, so one process reads it.
            units += _hub_units(path, wanted, subset=subset, split=split, whole=bool(skipped))
            continue
        kind = kind_of(path)
        names, start, asked = _columns_of(path, kind, wanted, format=format, given=tuple(columns), longest=longest_line)
        layout = _tuple_layout(path, names, asked, by_row=kind == "jsonl")
        _say_unread(path, names, layout, said)
        if kind == "parquet":
            units += _parquet_units(path, layout, unit_bytes=unit_bytes)
        else:
            in_order = names if kind == "tsv" else ()  # the rows of other formats name their columns
            units += _line_units(path, kind, layout, start=start, columns=in_order, unit_bytes=unit_bytes)
    if len({unit.graded for unit in units}) > 1:
        raise DataError("some inputs have scores and others have none; prepare graded pairs into a folder of their own")
    units = [replace(unit, skip_empty=skip_empty, skip_rows=skipped, longest_line=longest_line) for unit in units]
    return _limited(units, limit)


def _columns_of(
    path: Path, kind: FileKind, wanted: TupleLayout, *, format: str, given: tuple[str, ...], longest: int
) -> tuple[tuple[str, ...], int, TupleLayout]:
    """(column names, bytes of the header line, the columns asked for) of a file of tuples.

    given: the names of --columns, for a TSV file without a header.
    """
    if format in ("nli", "sts") and kind != "tsv":
        raise DataError(f"{path} is not a .tsv file, which format {format} needs; use --format columns")
    if kind == "parquet":
        return _parquet_columns(path), 0, wanted
    if kind == "jsonl":
        return _first_keys(path, longest), 0, wanted
    if kind != "tsv":
        raise DataError(f"{path} is plain text, which has no queries; give jsonl, TSV or parquet")
    if format == "sts":
        return ("score", "sentence1", "sentence2"), 0, wanted
    if format == "nli":
        return _nli_header(path, longest)
    if given:
        _refuse_header(path, given, longest)
        return given, 0, wanted
    return *_header(path, longest), wanted


def _unit_bytes(paths: Sequence[Path | str]) -> int:
    """A size that depends on the inputs alone, never on the number of processes: it decides what is written."""
    total = sum(path.stat().st_size for path in paths if isinstance(path, Path))
    return min(max(total // UNITS_WANTED, SMALLEST_UNIT_BYTES), LARGEST_UNIT_BYTES)


def _line_units(
    path: Path,
    kind: FileKind,
    layout: DocumentLayout | TupleLayout | IdLayout,
    *,
    start: int = 0,
    columns: tuple[str, ...] = (),
    unit_bytes: int | None,
    source: str | None = None,
) -> list[Unit]:
    size = path.stat().st_size
    unit = Unit(source or str(path), str(path), kind, layout, size=size, columns=columns)
    if size <= start:
        raise DataError(f"{path} is empty; leave it out or fill it")
    if is_compressed(path):
        return [replace(unit, start=1 if start else 0)]
    if unit_bytes is None:
        return [replace(unit, start=start)]
    pieces = max(1, round((size - start) / unit_bytes))
    cuts = [start + (size - start) * piece // pieces for piece in range(pieces + 1)]
    return [
        replace(unit, source=f"{unit.source}[{low}:{high}]", start=low, stop=high, size=high - low)
        for low, high in itertools.pairwise(cuts)
    ]


def _parquet_units(path: Path, layout: DocumentLayout | TupleLayout, *, unit_bytes: int | None) -> list[Unit]:
    metadata = _parquet(path).metadata
    if not metadata.num_rows:
        raise DataError(f"{path} has no rows; leave it out or fill it")
    sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    units = []
    first = gathered = 0
    for group, size in enumerate(sizes):
        gathered += size
        if group + 1 == len(sizes) or (unit_bytes is not None and gathered >= unit_bytes):
            source = f"{path}[{first}:{group + 1}]"
            units.append(Unit(source, str(path), "parquet", layout, size=gathered, start=first, stop=group + 1))
            first, gathered = group + 1, 0
    return units


def _hub_units(
    name: str, layout: DocumentLayout | TupleLayout, *, subset: str | None, split: str, whole: bool = False
) -> list[Unit]:
    dataset = _hub_dataset(name, subset=subset, split=split)
    source = f"hub:{name}" + (f"/{subset}" if subset else "") + f"/{split}"
    try:
        first = next(iter(dataset), None)
    except OSError as error:
        raise DataError(f"hub data set {name!r} cannot be read ({first_line(error)}); check the network") from error
    if first is None:
        raise DataError(f"{source} has no rows; choose another --split or --subset")
    if isinstance(layout, DocumentLayout):
        _require_columns(source, tuple(first), [layout.text_column])
    else:
        layout = _tuple_layout(source, tuple(first), layout, by_row=True)
    shards = 1 if whole else max(1, int(dataset.num_shards))
    unit = Unit(source, name, "hub", layout, size=0, stop=shards, subset=subset, split=split)
    return [replace(unit, source=f"{source}[{shard}/{shards}]", start=shard) for shard in range(shards)]


def _hub_dataset(name: str, *, subset: str | None, split: str) -> Any:
    """A streaming data set of the hub."""
    mend = (
        f"{name!r} is neither a file or folder here nor a data set that can be reached on the Hugging Face hub; "
        "check the spelling and the network, or download the files and give their paths"
    )
    _require_hub(mend)
    import datasets

    try:
        return datasets.load_dataset(name, subset, split=split, streaming=True)
    except ValueError as error:
        raise DataError(
            f"hub data set {name!r} does not load: {first_line(error)}; check --subset and --split"
        ) from error
    except (OSError, RuntimeError) as error:
        raise DataError(mend) from error


def _require_hub(mend: str) -> None:
    """Fail at once where the hub's name does not resolve: the hub's own client retries for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise DataError(mend)
    host = urlsplit(constants.ENDPOINT).hostname
    if host and not urllib.request.getproxies():
        try:
            socket.getaddrinfo(host, 443)
        except OSError as error:
            raise DataError(mend) from error


def _limited(units: list[Unit], limit: int | None) -> list[Unit]:
    """Keep the first `limit` records; costs one reading of just those."""
    if limit is None:
        return units
    if limit < 1:
        raise DataError(f"the limit is {limit}; give 1 or more records")
    limit = min(limit, sys.maxsize)
    kept: list[Unit] = []
    left = limit
    for unit in units:
        tally = Tally()
        records = sum(1 for _ in itertools.islice(read_unit(unit, tally), left))
        left -= records
        if not left:
            return [*kept, replace(unit, limit=records, size=min(unit.size, tally.bytes_read))]
        kept.append(unit)
    return kept


def _read_row_numbers(name: str) -> tuple[int, ...]:
    text = read_text(Path(name), what="file of rows to skip", mend="write it again")
    try:
        numbers = sorted({int(line) for line in text.split()})
    except ValueError as error:
        raise DataError(f"file {name} of rows to skip must hold 0-based row numbers, one a line") from error
    if numbers and numbers[0] < 0:
        raise DataError(f"file {name} of rows to skip holds {numbers[0]}; rows are counted from 0")
    return tuple(numbers)


# ------------------------------------------------------------------------------------------------------------- columns


def _header(path: Path, longest: int) -> tuple[tuple[str, ...], int]:
    """(column names, bytes of the header line) of a TSV file."""
    names, size = _first_cells(path, longest)
    if not size or len(set(names)) < len(names):
        raise DataError(f"{path}:1 is no header of distinct column names; name the columns with --columns")
    return names, size


def _first_cells(path: Path, longest: int) -> tuple[tuple[str, ...], int]:
    line = next((line for _, line in lines(path, longest=longest)), b"")
    return tuple(_decode(line, f"{path}:1").removeprefix("\ufeff").rstrip("\r\n").split("\t")), len(line)


def _nli_header(path: Path, longest: int) -> tuple[tuple[str, ...], int, TupleLayout]:
    names, size = _header(path, longest)
    if len(names) < 3:
        raise DataError(f"{path} has {len(names)} columns, but NLI triplets are anchor, entailed, contradicted")
    if not all(known.fullmatch(name.strip().lower()) for known, name in zip(_NLI_NAMES, names)):
        raise DataError(
            f"{path}:1 is no header of NLI triplets (anchor, entailed, contradicted, or as they are customary), but "
            f"{', '.join(map(repr, names[:3]))}; put one before the triplets, or name the columns with --columns"
        )
    return names, size, TupleLayout(names[0], (names[1],), (names[2],))


def _refuse_header(path: Path, names: tuple[str, ...], longest: int) -> None:
    """--columns names those of files without a header: where there is one, it would be read as a row."""
    if _first_cells(path, longest)[0] == names:
        raise DataError(f"{path}:1 is a header of the columns that --columns names; leave --columns out")


def _first_keys(path: Path, longest: int) -> tuple[str, ...]:
    unit = Unit(str(path), str(path), "jsonl", DocumentLayout(), size=0, longest_line=longest)
    row = next((row for _, row in _rows(unit, Tally())), None)
    if row is None:
        raise DataError(f"{path} is empty; leave it out or fill it")
    return tuple(row)


def _parquet(path: Path) -> Any:
    import pyarrow.parquet

    with reading(path, what="parquet file", mend="fetch it again"):
        return pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)


def _parquet_columns(path: Path) -> tuple[str, ...]:
    names = tuple(_parquet(path).schema_arrow.names)
    twins = [name for name, count in Counter(names).items() if count > 1]
    if twins:
        raise DataError(f"{path} has several columns {twins[0]!r}; rename all but one")
    return names


def _require_columns(source: Path | str, present: Sequence[str], wanted: Iterable[str]) -> None:
    for name in wanted:
        if name not in present:
            raise DataError(f"{source} has no column {name!r}; it has {', '.join(map(repr, present))}")


def _tuple_layout(
    source: Path | str, present: Sequence[str], wanted: TupleLayout, *, by_row: bool = False
) -> TupleLayout:
    """The columns that were asked for, or else those that go by a customary name."""
    asked = [name for name in (wanted.query, *wanted.positives, *wanted.negatives, wanted.score) if name]
    _require_columns(source, present, asked)
    query = wanted.query or next((name for name in _QUERY_NAMES if name in present and name not in asked), None)
    positives = (
        wanted.positives
        or tuple(name for name in _POSITIVE_NAMES if name in present and name != query and name not in asked)[:1]
    )
    if not query or not positives:
        missing, flag = ("query", "--query-column") if not query else ("positive", "--positive-column")
        raise DataError(
            f"{source} has no {missing} column by a customary name among {', '.join(map(repr, present))}; "
            f"name it with {flag}"
        )
    # Columns given by hand mean just those: nothing is added by its name.
    negatives = wanted.negatives
    score = wanted.score
    if not asked:
        negatives = tuple(name for name in present if _NEGATIVE_NAME.fullmatch(name))
        score = None if negatives else next((name for name in _SCORE_NAMES if name in present), None)
    if score and (negatives or len(positives) > 1):
        raise DataError(f"{source}: graded pairs are one query, one passage and a score, without negatives")
    return TupleLayout(query, positives, negatives, score, by_row=by_row and not asked)


def _say_unread(path: Path, present: Sequence[str], layout: TupleLayout, said: set[tuple[str, ...]]) -> None:
    """Of columns with customary names, one is taken for each purpose: the others are named, once for all files."""
    read = (layout.query, *layout.positives, *layout.negatives, layout.score)
    customary = dict.fromkeys((*_QUERY_NAMES, *_POSITIVE_NAMES, *_SCORE_NAMES))
    unread = tuple(name for name in customary if name in present and name not in read)
    if unread and unread not in said:
        said.add(unread)
        logger.warning(
            "%s: queries are %r, positives %r; not read: %s",
            path,
            layout.query,
            ", ".join(layout.positives),
            ", ".join(map(repr, unread)),
        )


# ------------------------------------------------------------------------------------------------------------- reading


def read_documents(inputs: Sequence[str], **options: Any) -> Iterator[Document]:
    """Every document of `inputs`; options as in `plan_documents`."""
    for unit in plan_documents(inputs, **options):
        for _, record in read_unit(unit):
            yield cast(Document, record)


def read_tuples(inputs: Sequence[str], **options: Any) -> Iterator[TupleRecord]:
    """Every tuple of `inputs`; options as in `plan_tuples`."""
    for unit in plan_tuples(inputs, **options):
        for _, record in read_unit(unit):
            yield cast(TupleRecord, record)


def read_unit(unit: Unit, tally: Tally | None = None) -> Iterator[tuple[int, Document | TupleRecord]]:
    """(position, record) of every record of a unit; `place` turns a position into words."""
    tally = tally or Tally()
    records = _id_records(unit, tally) if isinstance(unit.layout, IdLayout) else _records(unit, tally)
    return itertools.islice(records, unit.skip, None if unit.limit is None else unit.skip + unit.limit)


def place(unit: Unit, position: int) -> str:
    """Where a record is, as file:line or the like."""
    if unit.kind == "parquet":
        return f"{unit.path} row {position}"
    if unit.kind == "hub":
        return f"{unit.source} row {position}"
    if is_compressed(unit.path):
        return f"{unit.path}:{position}"
    lines = 1
    with Path(unit.path).open("rb") as file:
        while position > 0 and (block := file.read(min(position, 2**20))):
            lines += block.count(b"\n")
            position -= len(block)
    return f"{unit.path}:{lines}"


def _records(unit: Unit, tally: Tally) -> Iterator[tuple[int, Document | TupleRecord]]:
    if unit.kind == "txt":
        yield from _text_documents(unit, tally)
        return
    skipped = frozenset(unit.skip_rows)
    number = -1
    for number, (position, row) in enumerate(_rows(unit, tally)):
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
        raise DataError(f"row {max(skipped)} is to be skipped, but {unit.path} has {number + 1} rows; mend --skip-rows")


def _document(unit: Unit, position: int, row: Mapping[str, Any], layout: DocumentLayout) -> Document | None:
    text = row.get(layout.text_column)
    if text is None and layout.text_column not in row:
        _require_columns(place(unit, position), tuple(row), [layout.text_column])
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
            _require_columns(place(unit, position), tuple(row), [column])
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
    further = [name for name in row if name not in layout.negatives and _NEGATIVE_NAME.fullmatch(name)]
    if layout.score and any(row[name] for name in further):
        raise DataError(
            f"{place(unit, position)} has negatives, and the first row a score; prepare graded pairs by themselves, or "
            "name the columns to read with --query-column and the like"
        )
    if not layout.score and not layout.negatives and any(row.get(name) is not None for name in _SCORE_NAMES):
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


def join_title(title: str | None, text: str) -> str:
    """A passage as BEIR's and Tevatron's models see it."""
    return f"{title} {text}".strip() if title else text


def _score(unit: Unit, position: int, value: Any) -> float:
    score = _number(value)
    if not math.isfinite(score):
        raise DataError(f"{place(unit, position)}: score {value!r} is not a finite number")
    return score


def _number(value: Any) -> float:
    """A number or its text, as people write it; NaN for everything else."""
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _refuse_empty(unit: Unit, position: int, column: str) -> None:
    if not unit.skip_empty:
        raise DataError(f"{place(unit, position)}: {column} is empty; fill it, or drop such rows with --skip-empty")


def _text_documents(unit: Unit, tally: Tally) -> Iterator[tuple[int, Document]]:
    layout = cast(DocumentLayout, unit.layout)
    pieces: list[str] = []
    first = length = 0
    for position, line in _unit_lines(unit, tally):
        text = _decode(line, lambda at=position: place(unit, at))
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


def _rows(unit: Unit, tally: Tally) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if unit.kind == "parquet":
        yield from _parquet_rows(unit, tally)
    elif unit.kind == "hub":
        yield from enumerate(_hub_rows(unit))
    else:
        for position, line in _unit_lines(unit, tally):
            text = _decode(line, lambda at=position: place(unit, at)).rstrip("\r\n")
            if not text.strip():
                continue
            if unit.kind != "tsv":
                yield position, _json_row(unit, position, text)
                continue
            cells = text.split("\t")
            if len(cells) != len(unit.columns):
                raise DataError(
                    f"{place(unit, position)} has {len(cells)} tab-separated columns instead of {len(unit.columns)} "
                    f"({', '.join(unit.columns)})"
                )
            yield position, dict(zip(unit.columns, cells))


def _unit_lines(unit: Unit, tally: Tally) -> Iterator[tuple[int, bytes]]:
    """The lines of a unit, without the mark that some editors put at a file's beginning."""
    begins = 1 if is_compressed(unit.path) else 0
    for position, line in lines(Path(unit.path), unit.start, unit.stop, tally=tally, longest=unit.longest_line):
        yield position, line.removeprefix(codecs.BOM_UTF8) if position == begins else line


def _json_row(unit: Unit, position: int, text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
        if "\\ud" in text or "\\uD" in text:
            # Half of a surrogate pair is no character: web crawls hold such escapes, tokenizers refuse them.
            row = json.loads(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        what = first_line(error) if isinstance(error, ValueError) else "nested too deep"
        raise DataError(f"{place(unit, position)} is no JSON ({what}); each line must hold one object") from error
    if not isinstance(row, dict):
        raise DataError(f"{place(unit, position)} holds a {type(row).__name__}, not an object with named fields")
    return row


def _parquet_rows(unit: Unit, tally: Tally) -> Iterator[tuple[int, dict[str, Any]]]:
    file = _parquet(Path(unit.path))
    layout = unit.layout
    wanted = (
        [layout.text_column]
        if isinstance(layout, DocumentLayout)
        else [layout.query, *layout.positives, *layout.negatives, *([layout.score] if layout.score else [])]
        if isinstance(layout, TupleLayout)
        else None
    )
    stop = file.metadata.num_row_groups if unit.stop is None else unit.stop
    rows = [file.metadata.row_group(group).num_rows for group in range(stop)]
    position = sum(rows[: unit.start])
    total = max(1, sum(rows[unit.start :]))
    done = 0
    groups = list(range(unit.start, stop))
    with reading(unit.path, what="parquet file", mend="fetch it again"):
        for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=wanted, use_threads=False):
            done += len(batch)
            tally.bytes_read = unit.size * done // total
            for row in batch.to_pylist():
                yield position, row
                position += 1


def _hub_rows(unit: Unit) -> Iterator[dict[str, Any]]:
    dataset = _hub_dataset(unit.path, subset=unit.subset, split=unit.split)
    if unit.stop is not None and unit.stop > 1:
        dataset = dataset.shard(num_shards=unit.stop, index=unit.start)
    try:
        yield from dataset
    except OSError as error:
        raise DataError(
            f"{unit.source} broke off ({first_line(error)}); run the same command again to go on from there"
        ) from error


def _decode(line: bytes, where: Any) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where() if callable(where) else where} is not UTF-8; convert the file") from error


# ----------------------------------------------------------------------------------------------- passages named by id


class TextIndex:
    """Texts of a file by id: sorted 64-bit hashes of the ids and the byte offsets of their lines.

    For collection.tsv (id, tab, text) and corpus.jsonl ({"_id", "title", "text"}); 16 bytes a text, mapped from disk.
    """

    def __init__(self, path: Path, hashes: np.ndarray, offsets: np.ndarray) -> None:
        self.path = path
        self._hashes = hashes  # uint64 [texts], rising
        self._offsets = offsets  # int64 [texts]
        with reading(path), open_regular(path) as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @classmethod
    def build(cls, path: Path) -> TextIndex:
        """Read the file once."""
        hashes, offsets = [], []
        for position, line in lines(path):
            if line.strip():
                hashes.append(_id_hash(cls._parse(path, position, line)[0]))
                offsets.append(position)
        if not hashes:
            raise DataError(f"{path} is empty; fetch it again")
        order = np.argsort(np.asarray(hashes, dtype=np.uint64), kind="stable")
        index = cls(path, np.asarray(hashes, dtype=np.uint64)[order], np.asarray(offsets, dtype=np.int64)[order])
        twins = np.flatnonzero(index._hashes[1:] == index._hashes[:-1])
        if len(twins):
            offset = int(index._offsets[twins[0]])
            raise DataError(f"{path} holds the id {index._at(offset)[0]!r} twice; drop one of the two lines")
        return index

    def save(self, folder: Path) -> None:
        np.save(folder / "hashes.npy", self._hashes)
        np.save(folder / "offsets.npy", self._offsets)
        (folder / "path").write_text(str(self.path), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> TextIndex:
        hashes, offsets = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("hashes", "offsets"))
        return cls(cls.path_in(folder), hashes, offsets)

    @staticmethod
    def path_in(folder: Path) -> Path:
        """The file that a saved index is of."""
        return Path((folder / "path").read_text(encoding="utf-8"))

    def __len__(self) -> int:
        return len(self._hashes)

    def get(self, name: str) -> str | None:
        """The text of an id, with its title before it, or None."""
        wanted = _id_hash(name)
        row = int(np.searchsorted(self._hashes, np.uint64(wanted)))
        if row == len(self._hashes) or int(self._hashes[row]) != wanted:
            return None
        found, text = self._at(int(self._offsets[row]))
        return text if found == name else None

    def _at(self, offset: int) -> tuple[str, str]:
        end = self._map.find(b"\n", offset)
        return self._parse(self.path, offset, self._map[offset : end if end >= 0 else len(self._map)])

    @staticmethod
    def _parse(path: Path, position: int, line: bytes) -> tuple[str, str]:
        unit = Unit(str(path), str(path), "jsonl", IdLayout("", ""), size=0)
        text = _decode(line, lambda: place(unit, position)).rstrip("\r\n")
        if path.suffix == ".tsv":
            name, tab, content = text.partition("\t")
            if not tab:
                raise DataError(f"{place(unit, position)} is not of the form ID, tab, text")
            return name, content
        row = _json_row(unit, position, text)
        key, body, title = row.get("_id"), row.get("text"), row.get("title")
        if not isinstance(key, str | int) or isinstance(key, bool) or not isinstance(body, str):
            raise DataError(f"{place(unit, position)} has no '_id' or no 'text', which a BEIR corpus or query needs")
        if title is not None and not isinstance(title, str):
            raise DataError(f"{place(unit, position)}: the title is a {type(title).__name__}, not a text")
        return str(key), join_title(title, body)


def _id_hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def read_qrels(path: Path) -> dict[str, dict[str, float]]:
    """{query id: {passage id: grade}} of BEIR's three columns with a header, or TREC's four without."""
    if not path.is_file():
        raise DataError(f"file {path} of relevance judgements does not exist; check the folder and --split")
    judged: dict[str, dict[str, float]] = {}
    for number, line in enumerate(read_text(path, mend="fetch it again").split("\n"), start=1):
        cells = [cell.strip() for cell in line.split("\t")] if "\t" in line else line.split()
        if not any(cells) or (number == 1 and cells[-1] in ("score", "relevance", "rel")):
            continue
        query, passage, grade = (
            (cells[0], cells[-2], _number(cells[-1])) if len(cells) in (3, 4) else ("", "", math.nan)
        )
        if not (query and passage and math.isfinite(grade)):
            raise DataError(f"{path}:{number} is not of the form QUERY PASSAGE GRADE or QUERY 0 PASSAGE GRADE")
        if judged.setdefault(query, {}).setdefault(passage, grade) != grade:
            raise DataError(
                f"{path}:{number} judges query {query!r} and passage {passage!r} again, with another grade; drop one"
            )
    if not judged:
        raise DataError(f"{path} holds no judgements; fetch it again")
    return judged


def read_beir_texts(path: Path) -> dict[str, str]:
    """{id: text} of a corpus.jsonl, queries.jsonl or an id-tab-text .tsv, titles put before texts."""
    if not path.is_file():
        raise DataError(f"file {path} does not exist; check the folder and --split")
    texts: dict[str, str] = {}
    for position, line in lines(path):
        if line.strip():
            name, text = TextIndex._parse(path, position, line)
            if name in texts:
                raise DataError(f"{path} holds the id {name!r} twice; drop one of the two lines")
            texts[name] = text
    return texts


def corpus_texts(path: Path, tally: Tally | None = None) -> Iterator[str]:
    """Every text of a corpus.jsonl or an id-tab-text .tsv that is not empty, titles put before texts."""
    if not path.is_file():
        raise DataError(f"file {path} does not exist; give a corpus.jsonl or a collection.tsv")
    for position, line in lines(path, tally=tally):
        if line.strip():
            _, text = TextIndex._parse(path, position, line)
            if text.strip():
                yield text


def corpus_of(name: str, *, format: str = "auto") -> Path | None:
    """The file that holds all passages of an MS MARCO or BEIR folder; None for any other input."""
    found = format if format != "auto" else _folder_format(Path(name))
    files = {"msmarco": "collection.tsv", "beir": "corpus.jsonl"}
    return Path(name) / files[found] if found in files else None


def _folder_format(folder: Path) -> str:
    if (folder / "collection.tsv").is_file():
        return "msmarco"
    if (folder / "corpus.jsonl").is_file() and (folder / "qrels").is_dir():
        return "beir"
    return "columns"


def _id_units(folder: Path, target: Path, format: str, *, split: str, negatives: str | None, most: int) -> list[Unit]:
    """Join queries, judgements and hard negatives by id into one file of `target`, and index the passages."""
    corpus, queries, qrels = (
        (folder / "collection.tsv", folder / f"queries.{split}.tsv", folder / f"qrels.{split}.tsv")
        if format == "msmarco"
        else (folder / "corpus.jsonl", folder / "queries.jsonl", folder / "qrels" / f"{split}.tsv")
    )
    for path in (corpus, queries, qrels):
        if not path.is_file():
            raise DataError(f"{format} folder {folder} has no {path.relative_to(folder)}; check the folder and --split")
    judged = read_qrels(qrels)
    texts = read_beir_texts(queries)
    hard = _read_hard_negatives(Path(negatives), judged, most=most) if negatives else {}
    joined = target / "tuples.jsonl"
    with joined.open("w", encoding="utf-8") as file:
        for query, grades in judged.items():
            positives = [passage for passage, grade in grades.items() if grade > 0]
            if not positives:
                continue
            if query not in texts:
                raise DataError(f"{qrels} judges query {query!r}, which is not in {queries}")
            judged_negative = [passage for passage, grade in grades.items() if grade <= 0]
            row = {"query": texts[query], "pos": positives, "neg": [*judged_negative, *hard.get(query, [])][:most]}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    if not joined.stat().st_size:
        raise DataError(f"{qrels} marks no passage as relevant (grade above 0), so there is nothing to train on")
    TextIndex.build(corpus).save(target)
    layout = IdLayout(str(target), f"{qrels}" + (f" or {negatives}" if negatives else ""))
    unit_bytes = min(max(joined.stat().st_size // UNITS_WANTED, 2**16), 16 * 2**20)
    return _line_units(joined, "ids", layout, unit_bytes=unit_bytes, source=f"{format}:{folder}/{split}")


def _read_hard_negatives(path: Path, judged: Mapping[str, Mapping[str, float]], *, most: int) -> dict[str, list[str]]:
    """{query id: passage ids} of {"qid", "neg": [...]} or {"qid", "neg": {system: [...], ...}} lines.

    Systems take turns, so that each gives its best; judged passages are left out, for they may be relevant.
    """
    if not path.is_file():
        raise DataError(f"hard negatives file {path} does not exist; check the path")
    unit = Unit(str(path), str(path), "jsonl", DocumentLayout(), size=0)
    found: dict[str, list[str]] = {}
    for position, row in _rows(unit, Tally()):
        query, negatives = str(row.get("qid", "")), row.get("neg")
        if not query or not isinstance(negatives, list | dict):
            raise DataError(f'{place(unit, position)} is not of the form {{"qid": ..., "neg": [...]}}')
        if query not in judged:
            continue
        if query in found:
            raise DataError(f"{place(unit, position)} gives negatives of query {query!r} again; drop one of the lines")
        systems = list(negatives.values()) if isinstance(negatives, dict) else [negatives]
        entries = [[_passage_id(entry) for entry in system] if isinstance(system, list) else [""] for system in systems]
        if not all(name for system in entries for name in system):
            raise DataError(f'{place(unit, position)}: "neg" holds what is no passage id nor {{"pid": id}}')
        names = (name for turn in itertools.zip_longest(*entries) for name in turn if name is not None)
        distinct = dict.fromkeys(name for name in names if name not in judged[query])
        found[query] = list(itertools.islice(distinct, most))
    return found


def _passage_id(entry: Any) -> str:
    name = entry.get("pid") if isinstance(entry, Mapping) else entry
    return str(name) if isinstance(name, str | int) and not isinstance(name, bool) else ""


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

    for position, row in _rows(unit, tally):
        positives, negatives = ([text for text in map(text_of, row[side]) if text.strip()] for side in ("pos", "neg"))
        if not row["query"].strip() and not unit.skip_empty:
            raise DataError(f"a query that {layout.names} judges is empty; fill it, or drop it with --skip-empty")
        if positives and row["query"].strip():
            yield position, {"query": row["query"], "positives": positives, "negatives": negatives, "score": None}
