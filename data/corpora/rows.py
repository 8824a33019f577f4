"""Rows of a unit as its file or dataset has them: JSON objects, cells by column, parquet rows, rows of the hub."""

from __future__ import annotations

import codecs
import socket
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from data.corpora.tars import tar_rows
from data.corpora.units import DocumentLayout, TupleLayout, Unit, place
from data.ground.errors import DataError
from data.ground.files import first_line, reading
from data.lines import Tally, decoded, is_compressed, json_value, lines


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
    """Fail at once where the hub's name does not resolve: the hub's own client retries for half a minute."""
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


def rows_of(unit: Unit, tally: Tally) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if unit.kind == "parquet":
        yield from _parquet_rows(unit, tally)
    elif unit.kind == "hub":
        yield from enumerate(_hub_rows(unit))
    elif unit.kind == "tar":
        yield from tar_rows(unit, tally)
    else:
        for position, line in unit_lines(unit, tally):
            text = decoded(line, partial(place, unit, position)).rstrip("\r\n")
            if not text.strip():
                continue
            if unit.kind != "tsv":
                yield position, json_row(unit, position, text)
                continue
            cells = text.split("\t")
            if len(cells) != len(unit.columns):
                raise DataError(
                    f"{place(unit, position)} has {len(cells)} tab-separated columns instead of {len(unit.columns)} "
                    f"({', '.join(unit.columns)})"
                )
            yield position, dict(zip(unit.columns, cells))


def unit_lines(unit: Unit, tally: Tally) -> Iterator[tuple[int, bytes]]:
    """The lines of a unit, without the mark that some editors put at a file's beginning."""
    begins = 1 if is_compressed(unit.path) else 0
    for position, line in lines(Path(unit.path), unit.start, unit.stop, tally=tally, longest=unit.longest_line):
        yield position, line.removeprefix(codecs.BOM_UTF8) if position == begins else line


def json_row(unit: Unit, position: int, text: str) -> dict[str, Any]:
    row = json_value(text, partial(place, unit, position), hint="each line must hold one object")
    if not isinstance(row, dict):
        raise DataError(f"{place(unit, position)} holds a {type(row).__name__}, not an object with named fields")
    return row


def _parquet_rows(unit: Unit, tally: Tally) -> Iterator[tuple[int, dict[str, Any]]]:
    file = open_parquet(Path(unit.path))
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
    with reading(unit.path, what="parquet file", hint="fetch it again"):
        for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=wanted, use_threads=False):
            done += len(batch)
            tally.bytes_read = unit.size * done // total
            for row in batch.to_pylist():
                yield position, row
                position += 1


def _hub_rows(unit: Unit) -> Iterator[dict[str, Any]]:
    dataset = hub_dataset(unit.path, subset=unit.subset, split=unit.split)
    if unit.stop is not None and unit.stop > 1:
        dataset = dataset.shard(num_shards=unit.stop, index=unit.start)
    try:
        yield from dataset
    except OSError as error:
        raise DataError(
            f"{unit.source} broke off ({first_line(error)}); run the same command again to go on from there"
        ) from error
