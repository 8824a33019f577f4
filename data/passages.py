"""Tuples as a collection to search: their queries, and each distinct passage once, on disk.

What is decided here:
- Texts lie in one file each for queries and passages, in the order in which they were read; memory holds 8 bytes a
  query and some 50 a mention of a passage, never a text.
- Two passages are one where they differ in white space and case alone (64-bit hashes, so a chance of n² / 2^65 that two
  others are taken for one).
- A query's known positives are those of all rows with its text, and nothing that equals the query itself is a negative.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from data.corpora.by_id import corpus_texts
from data.corpora.read import read_unit
from data.corpora.units import TupleRecord, Unit, place
from data.ground.errors import DataError
from data.ground.files import sync
from data.lines import Tally

QUERIES, PASSAGES, TABLES = "queries.bin", "passages.bin", "tables.npz"
_RECORDS_PER_REPORT = 4096


class Passages:
    """What `build` has written: `num_rows` tuples in their order, `num_passages` distinct passages."""

    def __init__(self, folder: Path) -> None:
        with np.load(folder / TABLES) as tables:
            self._query_offsets: np.ndarray = tables["query_offsets"]  # int64 [rows + 1], bytes
            self._starts: np.ndarray = tables["starts"]  # int64 [passages], bytes
            self._lengths: np.ndarray = tables["lengths"]  # int64 [passages], bytes
            self._mention_offsets: np.ndarray = tables["mention_offsets"]  # int64 [rows + 1]
            self._mentions: np.ndarray = tables["mentions"]  # int64: positives of a row, then its negatives
            self._num_positives: np.ndarray = tables["num_positives"]  # int64 [rows]
            self._groups: np.ndarray = tables["groups"]  # int64 [rows]: rows of one query are one group
            self._known_offsets: np.ndarray = tables["known_offsets"]  # int64 [groups + 1]
            self._known: np.ndarray = tables["known"]  # int64, rising within a group
            self._same: np.ndarray = tables["same"]  # int64 [groups]: the passage that equals the query, or -1
        self._queries = (folder / QUERIES).open("rb")
        self._passages = (folder / PASSAGES).open("rb")

    @property
    def num_rows(self) -> int:
        return len(self._groups)

    @property
    def num_passages(self) -> int:
        return len(self._starts)

    def queries(self, rows: Iterable[int]) -> list[str]:
        spans = ((int(self._query_offsets[row]), int(self._query_offsets[row + 1])) for row in rows)
        return [_text(os.pread(self._queries.fileno(), end - start, start)) for start, end in spans]

    def passages(self, ids: Iterable[int]) -> list[str]:
        return [
            _text(os.pread(self._passages.fileno(), int(self._lengths[number]), int(self._starts[number])))
            for number in ids
        ]

    def positives(self, row: int) -> np.ndarray:
        start = int(self._mention_offsets[row])
        return self._mentions[start : start + int(self._num_positives[row])]

    def negatives(self, row: int) -> np.ndarray:
        """Those that the input gives."""
        start = int(self._mention_offsets[row]) + int(self._num_positives[row])
        return self._mentions[start : int(self._mention_offsets[row + 1])]

    def known(self, row: int) -> np.ndarray:
        """All positives of the row's query, in whichever row, rising."""
        group = int(self._groups[row])
        return self._known[int(self._known_offsets[group]) : int(self._known_offsets[group + 1])]

    def excluded(self, row: int) -> np.ndarray:
        """What must not be a negative of the row: its known positives, and a passage that equals the query."""
        same = int(self._same[self._groups[row]])
        return self.known(row) if same < 0 else np.append(self.known(row), same)


def is_built(folder: Path) -> bool:
    return (folder / TABLES).is_file()


def build(
    folder: Path,
    units: Sequence[Unit],
    corpora: Sequence[Path] = (),
    *,
    report: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Read tuples, then further passages to search among, into an empty folder.

    `report` gets the bytes read since its last call, now and then; what it raises ends the reading.
    """
    query_keys, query_offsets = array("Q"), array("q", [0])
    keys, offsets = array("Q"), array("q", [0])
    mention_offsets, num_positives = array("q", [0]), array("q")
    with (folder / QUERIES).open("wb") as queries, (folder / PASSAGES).open("wb") as passages:

        def mention(text: str) -> None:
            keys.append(text_key(text))
            offsets.append(offsets[-1] + passages.write(_bytes(text)))

        for unit in units:
            if unit.graded:
                raise DataError(f"{unit.source} holds graded pairs, which have no negatives; give pairs without scores")
            tally, seen = Tally(), 0
            for number, (position, record) in enumerate(read_unit(unit, tally), 1):
                row = cast(TupleRecord, record)
                if row["score"] is not None:
                    raise DataError(f"{place(unit, position)} has a score; give pairs without scores")
                query_keys.append(text_key(row["query"]))
                query_offsets.append(query_offsets[-1] + queries.write(_bytes(row["query"])))
                for text in (*row["positives"], *row["negatives"]):
                    mention(text)
                num_positives.append(len(row["positives"]))
                mention_offsets.append(len(keys))
                if number % _RECORDS_PER_REPORT == 0:
                    report(tally.bytes_read - seen)
                    seen = tally.bytes_read
            report(tally.bytes_read - seen)
        for path in corpora:
            tally, seen = Tally(), 0
            for number, text in enumerate(corpus_texts(path, tally), 1):
                mention(text)
                if number % _RECORDS_PER_REPORT == 0:
                    report(tally.bytes_read - seen)
                    seen = tally.bytes_read
            report(tally.bytes_read - seen)
    if not len(query_keys):
        raise DataError("the input holds no tuples; give queries with their positives")
    _write_tables(
        folder / TABLES,
        query_keys=np.frombuffer(query_keys, np.uint64),
        query_offsets=np.frombuffer(query_offsets, np.int64),
        keys=np.frombuffer(keys, np.uint64),
        offsets=np.frombuffer(offsets, np.int64),
        mention_offsets=np.frombuffer(mention_offsets, np.int64),
        num_positives=np.frombuffer(num_positives, np.int64),
    )


def _write_tables(
    path: Path,
    *,
    query_keys: np.ndarray,
    query_offsets: np.ndarray,
    keys: np.ndarray,
    offsets: np.ndarray,
    mention_offsets: np.ndarray,
    num_positives: np.ndarray,
) -> None:
    """Number the distinct passages by first mention, and gather each query's known positives."""
    distinct, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    number_of = np.empty(len(distinct), np.int64)
    number_of[np.argsort(first)] = np.arange(len(distinct))
    mentions = number_of[inverse.reshape(-1)]  # [mentions]
    first = np.sort(first)

    group_keys, groups = np.unique(query_keys, return_inverse=True)
    groups = groups.reshape(-1).astype(np.int64)  # [rows]
    positions = np.arange(len(num_positives))
    row_of = np.repeat(positions, np.diff(mention_offsets))  # of each mention in a row
    in_rows = mentions[: len(row_of)]
    is_positive = np.arange(len(row_of)) - mention_offsets[:-1][row_of] < num_positives[row_of]
    pairs = np.unique(np.stack([groups[row_of[is_positive]], in_rows[is_positive]], axis=1), axis=0)
    known_offsets = np.zeros(len(group_keys) + 1, np.int64)
    np.cumsum(np.bincount(pairs[:, 0], minlength=len(group_keys)), out=known_offsets[1:])

    places = np.minimum(np.searchsorted(distinct, group_keys), len(distinct) - 1)
    same = np.where(distinct[places] == group_keys, number_of[places], -1)
    temporary = path.with_suffix(".tmp.npz")
    np.savez(
        temporary,
        query_offsets=query_offsets,
        starts=offsets[:-1][first],
        lengths=np.diff(offsets)[first],
        mention_offsets=mention_offsets,
        mentions=in_rows,
        num_positives=num_positives,
        groups=groups,
        known_offsets=known_offsets,
        known=pairs[:, 1],
        same=same,
    )
    for name in (path.with_name(QUERIES), path.with_name(PASSAGES), temporary):
        sync(name)
    temporary.replace(path)
    sync(path.parent)


def text_key(text: str) -> int:
    """64 bits, equal for texts that differ in white space and case alone."""
    plain = " ".join(text.split()).casefold()
    return int.from_bytes(hashlib.blake2b(_bytes(plain), digest_size=8).digest(), "little")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _text(content: bytes) -> str:
    return content.decode()
