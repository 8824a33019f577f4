"""Queries of one depth against documents of another, for example small queries against large documents.

If all depths share one embedding space, which heads and a teacher's prefixes achieve, a query of size (l, d) can search
the first d dimensions of documents that were encoded at another depth L. One index of the full model then serves every
size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from data.ground.errors import ConfigError
from models.sizes import Body, Size


class SizePair(NamedTuple):
    """The size of queries and the size of documents, equally wide; for STS, of first and of second sentences."""

    query: Size
    document: Size

    def __str__(self) -> str:
        return f"{self.query}_documents_{self.document}"


Searched = Size | SizePair
"""What is scored: a size, or a pair of sizes."""


def sides(searched: Searched) -> SizePair:
    """The sizes of queries and documents; a single size stands for both."""
    return searched if isinstance(searched, SizePair) else SizePair(searched, searched)


def across_depths(sizes: Sequence[Size]) -> list[SizePair]:
    """Pairs of each size for queries with every other depth among `sizes` for documents, at the query's width.

    Documents are encoded with whole feed-forwards, whatever the queries'.
    """
    depths = sorted({size.layers for size in sizes if size.has_whole_feed_forwards})
    pairs = [SizePair(size, Size(depth, size.dim)) for size in sizes for depth in depths if Body(depth) != size.body]
    if not depths:
        raise ConfigError(
            "--across-depths encodes documents with whole feed-forwards, and no size has them; name one by --sizes"
        )
    if not pairs:
        raise ConfigError(
            f"--across-depths needs sizes of several depths, and all have {depths[0]}; name more by --sizes"
        )
    return pairs


def encoded_sizes(searched: Iterable[Searched]) -> list[Size]:
    """All sizes that must be encoded: the sizes of queries first, then the sizes of documents."""
    pairs = [sides(each) for each in searched]
    return list(dict.fromkeys([*(pair.query for pair in pairs), *(pair.document for pair in pairs)]))
