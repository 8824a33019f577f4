"""Training examples (query, positives, negatives) as a collection to search, on disk: queries and distinct passages.

What is decided here:
- One file holds the texts of the queries and one those of the passages, in the order in which they were read. Memory
  holds 8 bytes a query and some 50 bytes a mention of a passage, but no text.
- Passages that differ in white space and case only count as one (64-bit hashes, so the probability that two different
  passages among n are taken for one is n² / 2^65). Where it is found, it has the text of its first mention; a row's own
  positives and negatives keep theirs.
- A query's known positives are the positives of all rows with its text. A passage that equals the query is never a
  negative.
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
from data.corpora.read import read_split
from data.corpora.splits import InputSplit, TupleRecord, place
from data.ground.errors import DataError
from data.ground.files import sync
from data.lines import ByteCounter

QUERIES, PASSAGES, TABLES = "queries.bin", "passages.bin", "index.npz"
_RECORDS_PER_REPORT = 4096


class Passages:
    """The collection that `build` wrote: `num_rows` training examples in order, `num_passages` distinct passages."""

    def __init__(self, folder: Path) -> None:
        with np.load(folder / TABLES) as tables:
            self._query_offsets: np.ndarray = tables["query_offsets"]  # int64 [rows + 1], bytes
            self._starts: np.ndarray = tables["starts"]  # int64 [passages], bytes
            self._lengths: np.ndarray = tables["lengths"]  # int64 [passages], bytes
            self._mention_offsets: np.ndarray = tables["mention_offsets"]  # int64 [rows + 1]
            self._mentions: np.ndarray = tables["mentions"]  # int64: positives of a row, then its negatives
            self._mention_bytes: np.ndarray = tables["mention_bytes"]  # int64 [mentions of rows + 1]: where each begins
            self._num_positives: np.ndarray = tables["num_positives"]  # int64 [rows]
            self._groups: np.ndarray = tables["groups"]  # int64 [rows]: rows of one query are one group
            self._known_offsets: np.ndarray = tables["known_offsets"]  # int64 [groups + 1]
            self._known: np.ndarray = tables["known"]  # int64, rising within a group
            self._same: np.ndarray = tables["same"]  # int64 [groups]: the passage that equals the query, or -1
            # float64 [rows]: the rows' weights; empty where the input has none
            self._weights: np.ndarray = tables.get("weights", np.empty(0))
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
        return self._mentions[self._positive_mentions(row)]

    def positive_texts(self, row: int) -> list[str]:
        """The row's positives as the input has them."""
        places = self._positive_mentions(row)
        return [self._mention(number) for number in range(places.start, places.stop)]

    def negative_texts(self, row: int) -> list[str]:
        """The row's negatives as the input has them, each passage once."""
        places = self._negative_mentions(row)
        texts: dict[int, str] = {}
        for number in range(places.start, places.stop):
            texts.setdefault(int(self._mentions[number]), self._mention(number))
        return list(texts.values())

    def _positive_mentions(self, row: int) -> slice:
        start = int(self._mention_offsets[row])
        return slice(start, start + int(self._num_positives[row]))

    def _negative_mentions(self, row: int) -> slice:
        return slice(self._positive_mentions(row).stop, int(self._mention_offsets[row + 1]))

    def _mention(self, number: int) -> str:
        start, end = (int(each) for each in self._mention_bytes[number : number + 2])
        return _text(os.pread(self._passages.fileno(), end - start, start))

    def weight(self, row: int) -> float | None:
        """The weight of the row's loss; None where the input has no weights."""
        return float(self._weights[row]) if len(self._weights) else None

    def negatives(self, row: int) -> np.ndarray:
        """The row's negatives in the input."""
        return self._mentions[self._negative_mentions(row)]

    def known(self, row: int) -> np.ndarray:
        """All positives of the row's query from all rows, in ascending order."""
        group = int(self._groups[row])
        return self._known[int(self._known_offsets[group]) : int(self._known_offsets[group + 1])]

    def excluded(self, row: int) -> np.ndarray:
        """Passages that must not be negatives of the row: its known positives, and a passage that equals the query."""
        same = int(self._same[self._groups[row]])
        return self.known(row) if same < 0 else np.append(self.known(row), same)


def is_built(folder: Path) -> bool:
    return (folder / TABLES).is_file()


def build(
    folder: Path,
    input_splits: Sequence[InputSplit],
    corpora: Sequence[Path] = (),
    *,
    report: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Read training examples, then further passages to search among, into an empty folder.

    `report` is called from time to time with the bytes read since its last call; an exception in it ends the reading.
    """
    query_keys, query_offsets = array("Q"), array("q", [0])
    keys, offsets = array("Q"), array("q", [0])
    mention_offsets, num_positives, weights = array("q", [0]), array("q"), array("d")
    with (folder / QUERIES).open("wb") as queries, (folder / PASSAGES).open("wb") as passages:

        def mention(text: str) -> None:
            keys.append(text_key(text))
            offsets.append(offsets[-1] + passages.write(_bytes(text)))

        for input_split in input_splits:
            if input_split.graded:
                raise DataError(
                    f"{input_split.source} holds graded pairs, which have no negatives; give pairs without scores"
                )
            counter, seen = ByteCounter(), 0
            for number, (position, record) in enumerate(read_split(input_split, counter), 1):
                row = cast(TupleRecord, record)
                if row["score"] is not None:
                    raise DataError(f"{place(input_split, position)} has a score; give pairs without scores")
                query_keys.append(text_key(row["query"]))
                query_offsets.append(query_offsets[-1] + queries.write(_bytes(row["query"])))
                for text in (*row["positives"], *row["negatives"]):
                    mention(text)
                num_positives.append(len(row["positives"]))
                weights.append(row.get("weight", 1.0))
                mention_offsets.append(len(keys))
                if number % _RECORDS_PER_REPORT == 0:
                    report(counter.bytes_read - seen)
                    seen = counter.bytes_read
            report(counter.bytes_read - seen)
        for path in corpora:
            counter, seen = ByteCounter(), 0
            for number, text in enumerate(corpus_texts(path, counter), 1):
                mention(text)
                if number % _RECORDS_PER_REPORT == 0:
                    report(counter.bytes_read - seen)
                    seen = counter.bytes_read
            report(counter.bytes_read - seen)
    if not len(query_keys):
        raise DataError("the input holds no training examples; give queries with their positives")
    _write_tables(
        folder / TABLES,
        query_keys=np.frombuffer(query_keys, np.uint64),
        query_offsets=np.frombuffer(query_offsets, np.int64),
        keys=np.frombuffer(keys, np.uint64),
        offsets=np.frombuffer(offsets, np.int64),
        mention_offsets=np.frombuffer(mention_offsets, np.int64),
        num_positives=np.frombuffer(num_positives, np.int64),
        weights=np.frombuffer(weights, np.float64) if any(each.weighted for each in input_splits) else np.empty(0),
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
    weights: np.ndarray,
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
        mention_bytes=offsets[: len(in_rows) + 1],
        num_positives=num_positives,
        groups=groups,
        known_offsets=known_offsets,
        known=pairs[:, 1],
        same=same,
        weights=weights,
    )
    for name in (path.with_name(QUERIES), path.with_name(PASSAGES), temporary):
        sync(name)
    temporary.replace(path)
    sync(path.parent)


def text_key(text: str) -> int:
    """A 64-bit hash that is equal for texts that differ in white space and case only."""
    plain = " ".join(text.split()).casefold()
    return int.from_bytes(hashlib.blake2b(_bytes(plain), digest_size=8).digest(), "little")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _text(content: bytes) -> str:
    return content.decode()
