"""Input splits of a source file or data set, the layouts of their rows, and the records that they yield."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

from data.inputs import FileKind
from data.lines import LONGEST_LINE, is_compressed
from data.remote import is_remote

NEGATIVE_NAME = re.compile(r"(hard_?)?neg(ative)?s?(_passages)?(_?\d+)?|contradicted")
QUERY_NAMES = ("query", "anchor", "question", "sentence1")
POSITIVE_NAMES = ("positive", "positives", "pos", "positive_passages", "answer", "entailed", "sentence2")
SCORE_NAMES = ("score",)
WEIGHT_NAME = "weight"


class Document(TypedDict):
    text: str


class TupleRecord(TypedDict):
    query: str
    positives: list[str]
    negatives: list[str]
    score: float | None
    weight: NotRequired[float]  # of its loss; absent means 1


@dataclass(frozen=True)
class DocumentLayout:
    """Which column holds a row's text, and how a plain text file is divided into documents."""

    text_column: str = "text"
    text_split: str = "blank-lines"


@dataclass(frozen=True)
class TupleLayout:
    """The columns of the query, positives, negatives, score and weight.

    A column may hold one text, a list, or {"title", "text"} passages.
    """

    query: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...] = ()
    score: str | None = None
    weight: str | None = None
    by_row: bool = False  # columns were found by name, and rows may differ: one may have negatives that others lack
    unread: tuple[str, ...] = ()  # columns with usual names that the first row has and that are not read


@dataclass(frozen=True)
class IdLayout:
    """Rows name passages by id; `index` is the folder of a saved TextIndex."""

    index: str
    names: str  # the files that the ids come from, for error messages


@dataclass(frozen=True)
class InputSplit:
    """A part of the input that one process reads from start to end."""

    source: str  # its name in messages
    path: str  # of the file, or the hub data set's name
    kind: FileKind
    layout: DocumentLayout | TupleLayout | IdLayout
    size: int  # bytes to read, 0 if unknown: for progress only
    # Where it begins: at a byte (plain lines), line (compressed lines), row group (parquet) or shard (hub).
    start: int = 0
    stop: int | None = None  # end position, exclusive; for a hub data set, its number of shards
    columns: tuple[str, ...] = ()  # of a TSV file
    skip_rows: tuple[int, ...] = ()  # 0-based data rows; only where one input split is the whole file
    skip_empty: bool = False
    skip: int = 0  # records left out at the start
    limit: int | None = None  # records to read after the skipped ones; None reads all
    subset: str | None = None  # of a hub data set
    split: str = "train"  # of a hub data set
    longest_line: int = LONGEST_LINE  # bytes

    @property
    def is_file(self) -> bool:
        """Whether it is a file on this machine, so that its bytes can be hashed."""
        return self.kind != "hub" and not is_remote(self.path)

    @property
    def graded(self) -> bool:
        return isinstance(self.layout, TupleLayout) and self.layout.score is not None

    @property
    def weighted(self) -> bool:
        return isinstance(self.layout, TupleLayout) and self.layout.weight is not None


def place(input_split: InputSplit, position: int) -> str:
    """The place of a record for messages: file and line, row or sample number, or the query in a folder by id."""
    if input_split.kind == "parquet":
        return f"{input_split.path} row {position}"
    if input_split.kind == "hub":
        return f"{input_split.source} row {position}"
    if input_split.kind == "tar":
        return f"{input_split.source} sample {position}"
    if input_split.kind == "ids":
        # The file of joined rows is the command's own, and is removed when the command ends.
        with Path(input_split.path).open("rb") as file:
            file.seek(position)
            query = json.loads(file.readline())["query"]
        return f"{input_split.source.rpartition('[')[0]}, the query {query[:80]!r} or one of its passages,"
    if is_compressed(input_split.path):
        return f"{input_split.path}:{position}"
    lines = 1
    with Path(input_split.path).open("rb") as file:
        while position > 0 and (block := file.read(min(position, 2**20))):
            lines += block.count(b"\n")
            position -= len(block)
    return f"{input_split.path}:{lines}"


def join_title(title: str | None, text: str) -> str:
    """A passage with its title in front, as BEIR and Tevatron give it to models."""
    return f"{title} {text}".strip() if title else text
