"""Passages and queries that are known, from the texts themselves, to be no negatives of a query."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.losses.tile_settings import Part


def false_negatives(
    query_hashes: Tensor,
    targets: Tensor,
    passage_hashes: Tensor,
    known_query_hashes: Tensor,
    known_hashes: Tensor,
) -> Tensor:
    """Pairs (i, j), j ≠ targets[i], where passage j is no negative of query i, as int64 [e, 2] sorted by query.

    Passage j has the text of query i, of its positive, or of a known positive of a query with the same text as i.
    query_hashes, targets: int64 [n]; passage_hashes: int64 [m]; known_query_hashes, known_hashes: int64 [t], all ranks'
    pairs of a query's text and the text of one of its positives. The function only sorts: its work is linear, up to a
    logarithm, in n, m, t and e.
    """
    rows = torch.arange(len(query_hashes), device=query_hashes.device)
    row, text = _partners(query_hashes, passage_hashes, known_query_hashes, known_hashes)
    wanted = torch.cat([query_hashes, passage_hashes[targets], text])
    return _found(torch.cat([rows, rows, row]), wanted, passage_hashes, targets)


def false_negative_queries(
    query_hashes: Tensor,
    positive_hashes: Tensor,
    own: Tensor,
    all_query_hashes: Tensor,
    known_query_hashes: Tensor,
    known_hashes: Tensor,
) -> Tensor:
    """Pairs (i, j), j ≠ own[i], where query j is no negative of query i, as int64 [e, 2] sorted by i.

    Query j has the text of query i, of its positive, or of another known positive of it; or the positive of i is a
    known positive of j, too. query_hashes, positive_hashes, own: int64 [n], own being each query's place among all
    ranks' queries; all_query_hashes: int64 [N]. The known pairs are those of `false_negatives`.
    """
    rows = torch.arange(len(query_hashes), device=query_hashes.device)
    of_query = _partners(query_hashes, all_query_hashes, known_query_hashes, known_hashes)
    of_positive = _partners(positive_hashes, all_query_hashes, known_hashes, known_query_hashes)
    wanted = torch.cat([query_hashes, positive_hashes, of_query[1], of_positive[1]])
    return _found(torch.cat([rows, rows, of_query[0], of_positive[0]]), wanted, all_query_hashes, own)


def columns_left_out(
    parts: Sequence[Part],
    *,
    targets: Tensor,
    own: Tensor,
    num_passages: int,
    num_queries: int,
    passages: Tensor,
    queries: Tensor,
) -> Tensor:
    """What `passages` and `queries` leave out, in each part of a row's columns: int64 [e, 2], (row, column).

    passages, queries: pairs as `false_negatives` and `false_negative_queries` return them. A query's row and its
    positive's leave out the same texts. Besides, neither is compared with itself, nor are the two with each other a
    second time. num_passages, num_queries: of the global batch.
    """
    rows = torch.arange(len(targets), device=targets.device)
    found, begin = [], 0
    for part in parts:
        pairs, itself = (queries, own) if part.with_queries else (passages, targets)
        if part.of_positives or part.with_queries:
            pairs = torch.cat([pairs, torch.stack([rows, itself], dim=1)])
        found.append(torch.stack([pairs[:, 0], pairs[:, 1] + begin], dim=1))
        begin += num_queries if part.with_queries else num_passages
    return torch.cat(found)


def _partners(texts: Tensor, columns: Tensor, known: Tensor, partners: Tensor) -> tuple[Tensor, Tensor]:
    """(i, text) for each text of `columns` that is a known partner of texts[i].

    known, partners: int64 [t], pairs of texts.
    """
    # First drop the known pairs with a side that is absent here, and repeated pairs, which would multiply below.
    values, column_values = texts.unique(), columns.unique()
    pair, at_value = equal_pairs(known, values)
    among, at_column = equal_pairs(partners[pair], column_values)
    found = (at_value[among] * len(column_values) + at_column).unique()
    row, place = equal_pairs(texts, values[found // max(1, len(column_values))])
    return row, column_values[found[place] % len(column_values)]


def _found(rows: Tensor, texts: Tensor, columns: Tensor, itself: Tensor) -> Tensor:
    """The columns with the text that a row does not want, besides its own column `itself`, as sorted pairs [e, 2]."""
    which, column = equal_pairs(texts, columns)
    row = rows[which]
    others = column != itself[row]
    pairs = (row[others] * len(columns) + column[others]).unique()
    return torch.stack([pairs // len(columns), pairs % len(columns)], dim=1)


def equal_pairs(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """All (a, b) with left[a] == right[b], ordered by a."""
    values, order = right.sort()
    first = torch.searchsorted(values, left)
    count = torch.searchsorted(values, left, right=True) - first
    a = torch.repeat_interleave(count)
    rank = torch.arange(len(a), device=a.device) - (count.cumsum(0) - count)[a]
    return a, order[first[a] + rank]
