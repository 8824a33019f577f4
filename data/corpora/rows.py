"""The rows of an input split as mappings: JSON objects, TSV cells by column, parquet rows, rows of the hub."""

from __future__ import annotations

import codecs
import socket
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from data.corpora.splits import DocumentLayout, InputSplit, TupleLayout, place
from data.corpora.tars import tar_rows
from data.ground.errors import DataError
from data.ground.files import first_line, reading
from data.lines import ByteCounter, decoded, is_compressed, json_value, lines


def hub_dataset(name: str, *, subset: str | None, split: str) -> Any:
    """A streaming data set of the hub."""
    hint = (
        f"{name!r} is neither a file or folder here nor a data set that can be reached on the Hugging Face hub; "
        "check the spelling and the network, or download the files and give their paths"
    )
    require_hub(hint)
    import datasets

    try:
        return datasets.load_dataset(name, subset, split=split, streaming=True)
    except ValueError as error:
        raise DataError(
            f"hub data set {name!r} does not load: {first_line(error)}; check --subset and --split"
        ) from error
    except (OSError, RuntimeError) as error:
        raise DataError(hint) from error


def require_hub(hint: str) -> None:
    """Fail at once if the hub's host name does not resolve: the hub's own client would retry for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise DataError(hint)
    host = urlsplit(constants.ENDPOINT).hostname
    if host and not urllib.request.getproxies():
        try:
            socket.getaddrinfo(host, 443)
        except OSError as error:
            raise DataError(hint) from error


def open_parquet(path: Path) -> Any:
    import pyarrow.parquet

    with reading(path, what="parquet file", hint="fetch it again"):
        return pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)


def require_columns(source: Path | str, present: Sequence[str], wanted: Iterable[str]) -> None:
    for name in wanted:
        if name not in present:
            raise DataError(f"{source} has no column {name!r}; it has {', '.join(map(repr, present))}")


def rows_of(input_split: InputSplit, counter: ByteCounter) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if input_split.kind == "parquet":
        yield from _parquet_rows(input_split, counter)
    elif input_split.kind == "hub":
        yield from enumerate(_hub_rows(input_split))
    elif input_split.kind == "tar":
        yield from tar_rows(input_split, counter)
    else:
        for position, line in split_lines(input_split, counter):
            text = decoded(line, partial(place, input_split, position)).rstrip("\r\n")
            if not text.strip():
                continue
            if input_split.kind != "tsv":
                yield position, json_row(input_split, position, text)
                continue
            cells = text.split("\t")
            if len(cells) != len(input_split.columns):
                raise DataError(
                    f"{place(input_split, position)} has {len(cells)} tab-separated columns instead of "
                    f"{len(input_split.columns)} ({', '.join(input_split.columns)})"
                )
            yield position, dict(zip(input_split.columns, cells))


def split_lines(input_split: InputSplit, counter: ByteCounter) -> Iterator[tuple[int, bytes]]:
    """The lines of an input split, without the byte order mark that some editors put at a file's beginning."""
    begins = 1 if is_compressed(input_split.path) else 0
    for position, line in lines(
        Path(input_split.path), input_split.start, input_split.stop, counter=counter, longest=input_split.longest_line
    ):
        yield position, line.removeprefix(codecs.BOM_UTF8) if position == begins else line


def json_row(input_split: InputSplit, position: int, text: str) -> dict[str, Any]:
    row = json_value(text, partial(place, input_split, position), hint="each line must hold one object")
    if not isinstance(row, dict):
        raise DataError(f"{place(input_split, position)} holds a {type(row).__name__}, not an object with named fields")
    return row


def _parquet_rows(input_split: InputSplit, counter: ByteCounter) -> Iterator[tuple[int, dict[str, Any]]]:
    file = open_parquet(Path(input_split.path))
    layout = input_split.layout
    wanted = (
        [layout.text_column]
        if isinstance(layout, DocumentLayout)
        else [layout.query, *layout.positives, *layout.negatives, *filter(None, (layout.score, layout.weight))]
        if isinstance(layout, TupleLayout)
        else None
    )
    stop = file.metadata.num_row_groups if input_split.stop is None else input_split.stop
    rows = [file.metadata.row_group(group).num_rows for group in range(stop)]
    position = sum(rows[: input_split.start])
    total = max(1, sum(rows[input_split.start :]))
    done = 0
    groups = list(range(input_split.start, stop))
    with reading(input_split.path, what="parquet file", hint="fetch it again"):
        for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=wanted, use_threads=False):
            done += len(batch)
            counter.bytes_read = input_split.size * done // total
            for row in batch.to_pylist():
                yield position, row
                position += 1


def _hub_rows(input_split: InputSplit) -> Iterator[dict[str, Any]]:
    dataset = hub_dataset(input_split.path, subset=input_split.subset, split=input_split.split)
    if input_split.stop is not None and input_split.stop > 1:
        dataset = dataset.shard(num_shards=input_split.stop, index=input_split.start)
    try:
        yield from dataset
    except OSError as error:
        raise DataError(
            f"{input_split.source} broke off ({first_line(error)}); run the same command again to continue from there"
        ) from error
