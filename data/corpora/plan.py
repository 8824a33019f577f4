"""Users' inputs cut into input splits: text files, query/passage files, tars, and data sets of the hub.

What is decided here and in the modules beside it:
- A record is {"text"} or {"query", "positives", "negatives", "score"}; every reader is lazy.
- An `InputSplit` is a byte range of a jsonl or TSV file, row groups of a parquet file, a whole compressed file or tar,
  or a shard of a hub data set. It is small enough to pickle, and one process reads it from start to end. Byte ranges
  need no scan of the file: a line belongs to the range that contains its first byte.
- Every problem with the user's data is a DataError that names file and line. Line numbers are counted when an error
  needs them, not while reading.
- Passages named by id (MS MARCO, BEIR) are fetched through an index of byte offsets, so that no process holds the
  collection in memory.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

from data.corpora.by_id import TextIndex, read_beir_texts, read_hard_negatives, read_qrels
from data.corpora.options import (
    DEFAULT_LAYOUT,
    DEFAULT_SOURCE,
    DEFAULT_TUPLES,
    DOCUMENT_READERS,
    TEXT_SPLITS,
    TUPLE_READERS,
    SourceOptions,
    TupleOptions,
    refuse_unread,
)
from data.corpora.read import read_split
from data.corpora.rows import hub_dataset, open_parquet, require_columns, rows_of
from data.corpora.splits import (
    NEGATIVE_NAME,
    POSITIVE_NAMES,
    QUERY_NAMES,
    SCORE_NAMES,
    WEIGHT_NAME,
    DocumentLayout,
    IdLayout,
    InputSplit,
    TupleLayout,
)
from data.ground.errors import DataError
from data.ground.files import first_line, read_text
from data.ground.secrets import without_secrets
from data.inputs import FileKind, check_name, find_inputs, kind_of
from data.lines import ByteCounter, decoded, is_compressed, lines

logger = logging.getLogger(__name__)
SMALLEST_SPLIT_BYTES = 4 * 2**20
LARGEST_SPLIT_BYTES = 256 * 2**20
SPLITS_WANTED = 16
# Known headers of NLI triplets. Without this check, the first triplet of a file without a header would be lost.
_NLI_NAMES = (
    re.compile(r"anchor|premise|query|sent(ence)?_?[01]|text_?[01]"),
    re.compile(r"entail(ed|ment)|positive|pos|hypothesis|sent(ence)?_?[12]|text_?[12]"),
    re.compile(r"contradict(ed|ion)|(hard_?)?neg(ative)?|sent(ence)?_?[23]|text_?[23]"),
)


def plan_documents(
    inputs: Sequence[str],
    layout: DocumentLayout = DEFAULT_LAYOUT,
    source: SourceOptions = DEFAULT_SOURCE,
    *,
    skip: int = 0,
    output: Path | None = None,
) -> list[InputSplit]:
    """Cut files, globs, folders and hub data sets into input splits of documents.

    The first `skip` records are left out, for example to evaluate on them, and `source.limit` counts only the records
    after them. Files in the folder `output` are no inputs.
    """
    if layout.text_split not in TEXT_SPLITS:
        raise DataError(f"text split {layout.text_split!r} is unknown; use one of {', '.join(TEXT_SPLITS)}")
    paths = find_inputs(inputs, output=output)
    refuse_unread(source.stated, DOCUMENT_READERS, [kind_of(path) for path in paths])
    split_bytes = _split_bytes(paths)
    input_splits = [
        replace(input_split, skip_empty=source.skip_empty, longest_line=source.longest_line)
        for path in paths
        for input_split in _document_splits(path, layout, source, split_bytes=split_bytes)
    ]
    return _limited(_without_first(input_splits, skip), source.limit)


def _document_splits(
    path: Path | str, layout: DocumentLayout, source: SourceOptions, *, split_bytes: int
) -> list[InputSplit]:
    """The input splits of one input of documents."""
    kind = kind_of(path)
    if kind == "hub":
        return _hub_splits(str(path), layout, subset=source.subset, split=source.split)
    if kind == "tar":
        return [_tar_split(path, layout)]
    file = Path(path)
    if kind == "tsv":
        columns, header_size = _header(file, source.longest_line, hint="write one as its first line")
        require_columns(file, columns, [layout.text_column])
        return _line_splits(file, kind, layout, start=header_size, columns=columns, split_bytes=split_bytes)
    if kind == "parquet":
        require_columns(file, _parquet_columns(file), [layout.text_column])
        return _parquet_splits(file, layout, split_bytes=split_bytes)
    whole = kind == "txt" and layout.text_split != "lines"
    return _line_splits(file, kind, layout, split_bytes=None if whole else split_bytes)


def plan_tuples(
    inputs: Sequence[str],
    tuples: TupleOptions = DEFAULT_TUPLES,
    source: SourceOptions = DEFAULT_SOURCE,
    *,
    scratch: Path | None = None,
    output: Path | None = None,
) -> list[InputSplit]:
    """Cut training examples (a query with positives and negatives, or graded pairs) into input splits.

    `scratch` is an empty folder that holds the index of MS MARCO and BEIR passages until the input splits have been
    read. Files in the folder `output` are no inputs.
    """
    folders, paths, skipped = _find_tuples(inputs, tuples, source, scratch=scratch, output=output)
    by_id = [each for folder in folders for each in _id_splits(folder, tuples, split=source.split)]
    # Rows to skip are counted over a whole input, so one process reads it.
    split_bytes = None if skipped else _split_bytes(paths)
    input_splits = [*by_id, *_tuple_splits(paths, tuples, source, split_bytes=split_bytes)]
    if len({input_split.graded for input_split in input_splits}) > 1:
        raise DataError("some inputs have scores and others have none; prepare graded pairs into a folder of their own")
    input_splits = [
        replace(input_split, skip_empty=source.skip_empty, skip_rows=skipped, longest_line=source.longest_line)
        for input_split in input_splits
    ]
    return _limited(input_splits, source.limit)


def check_tuples(inputs: Sequence[str], tuples: TupleOptions, source: SourceOptions) -> None:
    """Raises DataError for inputs and options that `plan_tuples` would refuse before it reads the inputs."""
    _find_tuples(inputs, tuples, source, scratch=Path(), output=None)


def _find_tuples(
    inputs: Sequence[str], tuples: TupleOptions, source: SourceOptions, *, scratch: Path | None, output: Path | None
) -> tuple[list[_FolderById], list[Path | str], tuple[int, ...]]:
    """(The MS MARCO and BEIR folders, all other inputs, the numbers of the rows to skip)."""
    skipped = _read_row_numbers(tuples.skip_rows) if tuples.skip_rows else ()
    if skipped and len(inputs) > 1:
        raise DataError("rows to skip are counted within one file; prepare one input at a time")
    folders, files = _folders_by_id(inputs, tuples, scratch=scratch)
    if tuples.negatives_file and files:
        raise DataError(f"{files[0]} is no MS MARCO or BEIR folder, so the hard negatives file does not apply to it")
    paths = find_inputs(files, output=output)
    if skipped and len(paths) > 1:
        raise DataError("rows to skip are counted within one file; prepare one input at a time")
    of_folders: list[FileKind] = ["ids"] * len(folders)
    refuse_unread(source.stated, TUPLE_READERS, [*of_folders, *map(kind_of, paths)])
    return folders, paths, skipped


class _Columns(NamedTuple):
    """What is known of a file of training examples before its rows are read."""

    names: tuple[str, ...]
    header_bytes: int
    wanted: TupleLayout  # the columns asked for


def _tuple_splits(
    paths: Sequence[Path | str], tuples: TupleOptions, source: SourceOptions, *, split_bytes: int | None
) -> list[InputSplit]:
    """The input splits of all inputs of training examples but folders by id. Without `split_bytes`, each is whole."""
    input_splits: list[InputSplit] = []
    said: set[tuple[str, ...]] = set()
    remote: _Columns | None = None
    for path in paths:
        kind = kind_of(path)
        if tuples.format in ("nli", "sts") and kind != "tsv":
            raise DataError(f"{path} is not a .tsv file, which format {tuples.format} needs; use --format columns")
        if kind == "hub":
            of_hub = _hub_splits(
                str(path), tuples.wanted, subset=source.subset, split=source.split, whole=split_bytes is None
            )
            _say_unread(path, cast(TupleLayout, of_hub[0].layout), said)
            input_splits += of_hub
            continue
        if isinstance(path, str):
            # One remote tar stands for all of them: looking at another means fetching it.
            found = remote = remote or _columns_of(path, kind, tuples, longest=source.longest_line)
        else:
            found = _columns_of(path, kind, tuples, longest=source.longest_line)
        layout = _tuple_layout(path, found.names, found.wanted, by_row=kind in ("jsonl", "tar"))
        _say_unread(path, layout, said)
        if kind == "tar":
            input_splits.append(_tar_split(path, layout))
        elif kind == "parquet":
            input_splits += _parquet_splits(Path(path), layout, split_bytes=split_bytes)
        else:
            columns = found.names if kind == "tsv" else ()  # the rows of other formats name their columns
            input_splits += _line_splits(
                Path(path), kind, layout, start=found.header_bytes, columns=columns, split_bytes=split_bytes
            )
    return input_splits


class _FolderById(NamedTuple):
    """An MS MARCO or BEIR folder, and the folder for the index of its passages, which is not there yet."""

    path: Path
    format: str
    target: Path


def _folders_by_id(
    inputs: Sequence[str], tuples: TupleOptions, *, scratch: Path | None
) -> tuple[list[_FolderById], list[str]]:
    """(the MS MARCO and BEIR folders, the names of all other inputs)."""
    folders: list[_FolderById] = []
    files: list[str] = []
    seen: set[Path] = set()
    for number, name in enumerate(inputs):
        check_name(name, "input")
        found = tuples.format if tuples.format != "auto" else _folder_format(Path(name))
        if found not in ("msmarco", "beir"):
            files.append(name)
            continue
        if tuples.skip_rows:
            raise DataError(
                f"folder {name} names passages by id, so it has no rows to skip; leave out --skip-rows, and take the "
                "queries that are not wanted out of the qrels"
            )
        if Path(name).resolve() in seen:
            raise DataError(f"folder {name} is given twice; name it once")
        seen.add(Path(name).resolve())
        if scratch is None:
            raise DataError(f"folder {name} names passages by id, which takes a scratch folder for their index")
        folders.append(_FolderById(Path(name), found, scratch / f"{number:03d}"))
    return folders, files


def _columns_of(path: Path | str, kind: FileKind, tuples: TupleOptions, *, longest: int) -> _Columns:
    """The columns of a file of training examples. `longest`: bytes of a line at most."""
    wanted = tuples.wanted
    if kind in ("jsonl", "tar"):
        return _Columns(_first_keys(path, kind, longest), 0, wanted)
    path = Path(path)
    if kind == "parquet":
        return _Columns(_parquet_columns(path), 0, wanted)
    if kind != "tsv":
        raise DataError(f"{path} is plain text, which has no queries; give jsonl, TSV or parquet")
    if tuples.format == "sts":
        return _Columns(("score", "sentence1", "sentence2"), 0, wanted)
    if tuples.format == "nli":
        return _nli_header(path, longest)
    if tuples.columns:
        _refuse_header(path, tuples.columns, longest)
        return _Columns(tuples.columns, 0, wanted)
    return _Columns(*_header(path, longest, hint="name the columns with --columns"), wanted)


def _split_bytes(paths: Sequence[Path | str]) -> int:
    """The size of an input split. It decides what is written, so it depends on the inputs, not on the processes."""
    total = sum(path.stat().st_size for path in paths if isinstance(path, Path))
    return min(max(total // SPLITS_WANTED, SMALLEST_SPLIT_BYTES), LARGEST_SPLIT_BYTES)


def _line_splits(
    path: Path,
    kind: FileKind,
    layout: DocumentLayout | TupleLayout | IdLayout,
    *,
    start: int = 0,
    columns: tuple[str, ...] = (),
    split_bytes: int | None,
    source: str | None = None,
) -> list[InputSplit]:
    size = path.stat().st_size
    input_split = InputSplit(source or str(path), str(path), kind, layout, size=size, columns=columns)
    if size <= start:
        raise DataError(f"{path} is empty; leave it out or fill it")
    if is_compressed(path):
        return [replace(input_split, start=1 if start else 0)]
    if split_bytes is None:
        return [replace(input_split, start=start)]
    count = max(1, round((size - start) / split_bytes))
    cuts = [start + (size - start) * number // count for number in range(count + 1)]
    return [
        replace(input_split, source=f"{input_split.source}[{low}:{high}]", start=low, stop=high, size=high - low)
        for low, high in itertools.pairwise(cuts)
    ]


def _tar_split(path: Path | str, layout: DocumentLayout | TupleLayout) -> InputSplit:
    """A whole tar, local or remote."""
    size = path.stat().st_size if isinstance(path, Path) else 0
    return InputSplit(without_secrets(path), str(path), "tar", layout, size=size)


def _parquet_splits(path: Path, layout: DocumentLayout | TupleLayout, *, split_bytes: int | None) -> list[InputSplit]:
    metadata = open_parquet(path).metadata
    if not metadata.num_rows:
        raise DataError(f"{path} has no rows; leave it out or fill it")
    sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    input_splits = []
    first = gathered = 0
    for group, size in enumerate(sizes):
        gathered += size
        if group + 1 == len(sizes) or (split_bytes is not None and gathered >= split_bytes):
            source = f"{path}[{first}:{group + 1}]"
            input_splits.append(
                InputSplit(source, str(path), "parquet", layout, size=gathered, start=first, stop=group + 1)
            )
            first, gathered = group + 1, 0
    return input_splits


def _hub_splits(
    name: str, layout: DocumentLayout | TupleLayout, *, subset: str | None, split: str, whole: bool = False
) -> list[InputSplit]:
    dataset = hub_dataset(name, subset=subset, split=split)
    source = f"hub:{name}" + (f"/{subset}" if subset else "") + f"/{split}"
    try:
        first = next(iter(dataset), None)
    except OSError as error:
        raise DataError(f"hub data set {name!r} cannot be read ({first_line(error)}); check the network") from error
    if first is None:
        raise DataError(f"{source} has no rows; choose another --split or --subset")
    if isinstance(layout, DocumentLayout):
        require_columns(source, tuple(first), [layout.text_column])
    else:
        layout = _tuple_layout(source, tuple(first), layout, by_row=True)
    shards = 1 if whole else max(1, int(dataset.num_shards))
    input_split = InputSplit(source, name, "hub", layout, size=0, stop=shards, subset=subset, split=split)
    return [replace(input_split, source=f"{source}[{shard}/{shards}]", start=shard) for shard in range(shards)]


def _without_first(input_splits: list[InputSplit], skip: int) -> list[InputSplit]:
    """Leave out the first `skip` records; reads just these records once."""
    left = skip
    found = list(input_splits)
    for number, input_split in enumerate(input_splits):
        if not left:
            break
        records = sum(1 for _ in itertools.islice(read_split(input_split), left))
        found[number] = replace(input_split, skip=records)
        left -= records
    if left:
        raise DataError(f"{skip} records are to be skipped, but the inputs have {skip - left}; lower --skip-first")
    return found


def _limited(input_splits: list[InputSplit], limit: int | None) -> list[InputSplit]:
    """Keep the first `limit` records; reads just these records once."""
    if limit is None:
        return input_splits
    if limit < 1:
        raise DataError(f"the limit is {limit}; give 1 or more records")
    limit = min(limit, sys.maxsize)
    kept: list[InputSplit] = []
    left = limit
    for input_split in input_splits:
        counter = ByteCounter()
        records = sum(1 for _ in itertools.islice(read_split(input_split, counter), left))
        left -= records
        if not left:
            return [*kept, replace(input_split, limit=records, size=min(input_split.size, counter.bytes_read))]
        kept.append(input_split)
    return kept


def _read_row_numbers(name: str) -> tuple[int, ...]:
    text = read_text(Path(name), what="file of rows to skip", hint="write it again")
    try:
        numbers = sorted({int(line) for line in text.split()})
    except ValueError as error:
        raise DataError(f"file {name} of rows to skip must hold 0-based row numbers, one a line") from error
    if numbers and numbers[0] < 0:
        raise DataError(f"file {name} of rows to skip holds {numbers[0]}; rows are counted from 0")
    return tuple(numbers)


def _header(path: Path, longest: int, *, hint: str) -> tuple[tuple[str, ...], int]:
    """(column names, bytes of the header line) of a TSV file. `hint` says what to do if it has no header."""
    names, size = _first_cells(path, longest)
    if not size or len(set(names)) < len(names):
        raise DataError(f"{path}:1 is no header of distinct column names; {hint}")
    return names, size


def _first_cells(path: Path, longest: int) -> tuple[tuple[str, ...], int]:
    line = next((line for _, line in lines(path, longest=longest)), b"")
    return tuple(decoded(line, f"{path}:1").removeprefix("\ufeff").rstrip("\r\n").split("\t")), len(line)


def _nli_header(path: Path, longest: int) -> _Columns:
    hint = "put one before the triplets, or name the columns with --columns in place of --format nli"
    names, size = _header(path, longest, hint=hint)
    if len(names) < 3:
        raise DataError(f"{path} has {len(names)} columns, but NLI triplets are anchor, entailed, contradicted")
    if not all(known.fullmatch(name.strip().lower()) for known, name in zip(_NLI_NAMES, names)):
        raise DataError(
            f"{path}:1 is no header of NLI triplets (anchor, entailed, contradicted, or other usual names), but "
            f"{', '.join(map(repr, names[:3]))}; {hint}"
        )
    return _Columns(names, size, TupleLayout(names[0], (names[1],), (names[2],)))


def _refuse_header(path: Path, names: tuple[str, ...], longest: int) -> None:
    """Refuse --columns for a file whose first line is that header, which would be read as a row."""
    if _first_cells(path, longest)[0] == names:
        raise DataError(f"{path}:1 is a header of the columns that --columns names; leave --columns out")


def _first_keys(path: Path | str, kind: FileKind, longest: int) -> tuple[str, ...]:
    input_split = InputSplit(str(path), str(path), kind, DocumentLayout(), size=0, longest_line=longest)
    row = next((row for _, row in rows_of(input_split, ByteCounter())), None)
    if row is None:
        raise DataError(f"{path} is empty; leave it out or fill it")
    return tuple(row)


def _parquet_columns(path: Path) -> tuple[str, ...]:
    names = tuple(open_parquet(path).schema_arrow.names)
    twins = [name for name, count in Counter(names).items() if count > 1]
    if twins:
        raise DataError(f"{path} has several columns {twins[0]!r}; rename all but one")
    return names


def _tuple_layout(
    source: Path | str, present: Sequence[str], wanted: TupleLayout, *, by_row: bool = False
) -> TupleLayout:
    """The columns that were asked for, or else the columns with a usual name."""
    named = (wanted.query, *wanted.positives, *wanted.negatives, wanted.score, wanted.weight)
    asked = [name for name in named if name]
    require_columns(source, present, asked)
    query = wanted.query or next((name for name in QUERY_NAMES if name in present and name not in asked), None)
    positives = (
        wanted.positives
        or tuple(name for name in POSITIVE_NAMES if name in present and name != query and name not in asked)[:1]
    )
    if not query or not positives:
        missing, flag = ("query", "--query-column") if not query else ("positive", "--positive-column")
        raise DataError(
            f"{source} has no {missing} column by a usual name among {', '.join(map(repr, present))}; "
            f"name it with {flag}"
        )
    # If the user names any column, only the named columns are read.
    negatives = wanted.negatives
    score, weight = wanted.score, wanted.weight
    if not asked:
        negatives = tuple(name for name in present if NEGATIVE_NAME.fullmatch(name))
        score = None if negatives else next((name for name in SCORE_NAMES if name in present), None)
        weight = WEIGHT_NAME if WEIGHT_NAME in present else None
    if score and (negatives or len(positives) > 1):
        raise DataError(f"{source}: graded pairs are one query, one passage and a score, without negatives")
    if score and weight:
        raise DataError(
            f"{source}: graded pairs have no weights of their own; rename the column {weight!r}, or name the columns "
            "to read with --score-column and the like"
        )
    read = (query, *positives, *negatives, score, weight)
    customary = dict.fromkeys((*QUERY_NAMES, *POSITIVE_NAMES, *SCORE_NAMES, WEIGHT_NAME))
    usual = [name for name in customary if name in present]
    usual += [name for name in present if NEGATIVE_NAME.fullmatch(name)]
    unread = tuple(name for name in usual if name not in read)
    return TupleLayout(query, positives, negatives, score, weight, by_row=by_row and not asked, unread=unread)


def _say_unread(path: Path | str, layout: TupleLayout, said: set[tuple[str, ...]]) -> None:
    """Warn about columns with usual names that are not read because another column serves; once for all files."""
    if layout.unread and layout.unread not in said:
        said.add(layout.unread)
        logger.warning(
            "%s: queries are %r, positives %r; not read: %s",
            path,
            layout.query,
            ", ".join(layout.positives),
            ", ".join(map(repr, layout.unread)),
        )


def corpus_of(name: str, *, format: str = "auto") -> Path | None:
    """The file with all passages of an MS MARCO or BEIR folder; None for any other input."""
    found = format if format != "auto" else _folder_format(Path(name))
    files = {"msmarco": "collection.tsv", "beir": "corpus.jsonl"}
    return Path(name) / files[found] if found in files else None


def _folder_format(folder: Path) -> str:
    if (folder / "collection.tsv").is_file():
        return "msmarco"
    if (folder / "corpus.jsonl").is_file() and (folder / "qrels").is_dir():
        return "beir"
    return "columns"


def _id_splits(found: _FolderById, tuples: TupleOptions, *, split: str) -> list[InputSplit]:
    """Join queries, judgements and hard negatives by id into one file of the target, and index the passages."""
    folder, format, target = found
    negatives, most = tuples.negatives_file, tuples.max_negatives
    target.mkdir(parents=True)
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
    hard = read_hard_negatives(Path(negatives), judged, most=most) if negatives else {}
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
    split_bytes = min(max(joined.stat().st_size // SPLITS_WANTED, 2**16), 16 * 2**20)
    return _line_splits(joined, "ids", layout, split_bytes=split_bytes, source=f"{format}:{folder}/{split}")
