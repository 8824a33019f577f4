"""Queries of one depth against documents of another: small queries, large documents.

Where depths share one space, as heads and a teacher's prefixes make them, a query of size (l, d) can search the first d
dimensions of documents that were encoded at another depth L: an index of the full model then serves every size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from data.ground.errors import ConfigError
from models.sizes import Size


class SizePair(NamedTuple):
    """The sizes of queries and of documents, equally wide. Of sentence pairs, those of the first and the second."""

    query: Size
    document: Size

    def __str__(self) -> str:
        return f"{self.query}_documents_{self.document}"


Searched = Size | SizePair
"""What is scored: a size, or a pair of sizes."""


def sides(searched: Searched) -> SizePair:
    """The sizes of the two sides."""
    return searched if isinstance(searched, SizePair) else SizePair(searched, searched)


def across_depths(sizes: Sequence[Size]) -> list[SizePair]:
    """Each size of queries with documents of each other depth among `sizes`, cut to the query's width."""
    depths = sorted({size.layers for size in sizes})
    if len(depths) < 2:
        raise ConfigError(
            f"--across-depths needs sizes of several depths, and all have {depths[0]}; name more by --sizes"
        )
    return [SizePair(size, Size(depth, size.dim)) for size in sizes for depth in depths if depth != size.layers]


def encoded_sizes(searched: Iterable[Searched]) -> list[Size]:
    """All sizes that must be encoded, those of queries first."""
    pairs = [sides(each) for each in searched]
    return list(dict.fromkeys([*(pair.query for pair in pairs), *(pair.document for pair in pairs)]))
