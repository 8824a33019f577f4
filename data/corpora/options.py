"""What a user asks for when inputs are cut into input splits, and which kinds of inputs read it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from data.corpora.splits import DocumentLayout, TupleLayout
from data.ground.errors import DataError
from data.ground.options import flag_of
from data.inputs import FileKind
from data.lines import LONGEST_LINE

MOST_NEGATIVES = 2**16
TEXT_SPLITS = ("blank-lines", "lines", "file")
TUPLE_FORMATS = ("auto", "columns", "nli", "sts", "msmarco", "beir")
ANY_COLUMNS = TupleLayout("", ())


@dataclass(frozen=True)
class SourceOptions:
    """Which records are read, of documents and of training examples alike."""

    limit: int | None = None  # records to take; None takes all
    longest_line: int = LONGEST_LINE  # bytes; longer lines are refused
    skip_empty: bool = False  # drop empty texts instead of refusing them
    subset: str | None = None  # the configuration of a hub data set
    split: str = "train"  # of a hub data set, or of the judgements of an MS MARCO or BEIR folder
    stated: Collection[str] = ()  # the options of any table below that the user states: they must be read


@dataclass(frozen=True)
class TupleOptions:
    """How training examples are read.

    Formats: "columns" reads jsonl, TSV and parquet by column name; "nli" reads a TSV with a header whose columns are
    anchor, entailed, contradicted; "sts" a TSV without a header whose columns are score, sentence1, sentence2;
    "msmarco" and "beir" read folders. "auto" recognises these folders by their files and reads everything else as
    "columns".

    Raises:
        DataError: the format is unknown or does not read the columns asked for, the names of `columns` are not
            distinct, or `max_negatives` is out of bounds.

    """

    format: str = "auto"
    wanted: TupleLayout = ANY_COLUMNS
    """The columns asked for. Empty ones are found by their usual names."""
    columns: tuple[str, ...] = ()
    """The names of the columns of a TSV file without a header."""
    negatives_file: str | None = None
    """Hard negatives by id, for MS MARCO and BEIR folders."""
    max_negatives: int = 50
    """How many negatives a query of such a folder keeps; passages judged irrelevant come first."""
    skip_rows: str | None = None
    """A file of 0-based data rows to leave out, one number a line."""

    def __post_init__(self) -> None:
        if self.format not in TUPLE_FORMATS:
            raise DataError(f"format {self.format!r} is unknown; use one of {', '.join(TUPLE_FORMATS)}")
        if len(set(self.columns)) < len(self.columns) or not all(self.columns):
            raise DataError(f"the columns {', '.join(self.columns)} are not distinct names; name each column once")
        if self.columns and self.format in ("nli", "sts"):
            raise DataError(f"format {self.format} has columns of its own; leave out --columns or the format")
        if self.wanted != ANY_COLUMNS and self.format == "nli":
            raise DataError(
                "format nli reads the first three columns and no others; leave out --query-column and the like, or the "
                "format"
            )
        if not 0 <= self.max_negatives <= MOST_NEGATIVES:
            raise DataError(
                f"{self.max_negatives} negatives a query cannot be kept; give between 0 and {MOST_NEGATIVES}"
            )


@dataclass(frozen=True)
class Readers:
    """The kinds of inputs that read an option, and what a message calls them."""

    kinds: tuple[FileKind, ...]
    name: str


_HUB = Readers(("hub",), "data sets of the Hugging Face hub")
_COLUMNS = Readers(("jsonl", "tsv", "parquet", "tar", "hub"), "inputs with columns")
_BY_ID = Readers(("ids",), "MS MARCO and BEIR folders")
_LINES: tuple[FileKind, ...] = ("jsonl", "tsv", "txt", "tar")  # what has lines, or members that are read whole
_DOCUMENTS = Readers((), "documents, and these are training examples")

# Of each option that some inputs do not read: the inputs that do. Every input reads the options that are not named.
DOCUMENT_READERS: Mapping[str, Readers] = {
    "subset": _HUB,
    "split": _HUB,
    "text_column": _COLUMNS,
    "text_split": Readers(("txt",), ".txt files"),
    "longest_line": Readers(_LINES, "jsonl, TSV and .txt files and tars"),
}
TUPLE_READERS: Mapping[str, Readers] = {
    "subset": _HUB,
    "split": Readers(("hub", "ids"), "data sets of the Hugging Face hub, MS MARCO folders and BEIR folders"),
    "columns": Readers(("tsv",), "TSV files"),
    "query_column": _COLUMNS,
    "positive_column": _COLUMNS,
    "negative_column": _COLUMNS,
    "score_column": _COLUMNS,
    "weight_column": _COLUMNS,
    "max_negatives": _BY_ID,
    "text_column": _DOCUMENTS,
    "text_split": _DOCUMENTS,
    "longest_line": Readers((*_LINES, "ids"), "jsonl and TSV files, tars, MS MARCO folders and BEIR folders"),
}


def refuse_unread(stated: Collection[str], readers: Mapping[str, Readers], kinds: Collection[FileKind]) -> None:
    """Refuse an option that the user states and that no input reads. kinds: those of all inputs."""
    for option, read_by in readers.items():
        if option in stated and not any(kind in read_by.kinds for kind in kinds):
            flag = flag_of(option)
            raise DataError(f"no input reads {flag}, which is for {read_by.name}; leave {flag} out")


DEFAULT_LAYOUT = DocumentLayout()
DEFAULT_SOURCE = SourceOptions()
DEFAULT_TUPLES = TupleOptions()
