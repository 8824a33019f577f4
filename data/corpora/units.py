"""What is read from a source file or dataset: units, their layouts, and the records they yield."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from data.inputs import FileKind
from data.lines import LONGEST_LINE, is_compressed
from data.remote import is_remote

NEGATIVE_NAME = re.compile(r"(hard_?)?neg(ative)?s?(_passages)?(_?\d+)?|contradicted")
SCORE_NAMES = ("score",)


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
    # Where it begins: a byte of plain lines, a number of compressed lines, a row group of parquet, a shard of the hub.
    start: int = 0
    stop: int | None = None  # where it ends, exclusive; of the hub, how many shards there are
    columns: tuple[str, ...] = ()  # of a TSV file
    skip_rows: tuple[int, ...] = ()  # 0-based data rows, whole-file units only
    skip_empty: bool = False
    skip: int = 0  # records left out at the start
    limit: int | None = None  # records after them
    subset: str | None = None  # hub
    split: str = "train"  # hub
    longest_line: int = LONGEST_LINE  # bytes

    @property
    def is_file(self) -> bool:
        """Whether it lies on this machine, so that its bytes can be hashed."""
        return self.kind != "hub" and not is_remote(self.path)

    @property
    def graded(self) -> bool:
        return isinstance(self.layout, TupleLayout) and self.layout.score is not None


def place(unit: Unit, position: int) -> str:
    """Where a record is, as file:line or the like."""
    if unit.kind == "parquet":
        return f"{unit.path} row {position}"
    if unit.kind == "hub":
        return f"{unit.source} row {position}"
    if unit.kind == "tar":
        return f"{unit.source} sample {position}"
    if is_compressed(unit.path):
        return f"{unit.path}:{position}"
    lines = 1
    with Path(unit.path).open("rb") as file:
        while position > 0 and (block := file.read(min(position, 2**20))):
            lines += block.count(b"\n")
            position -= len(block)
    return f"{unit.path}:{lines}"


def join_title(title: str | None, text: str) -> str:
    """A passage as BEIR's and Tevatron's models see it."""
    return f"{title} {text}".strip() if title else text
