"""Passages that are known, from the texts themselves, to be no negatives of a query."""

from __future__ import annotations

import torch
from torch import Tensor


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
    # First drop the known pairs with a side that is absent here, and repeated pairs, which would multiply below.
    query_values, passage_values = query_hashes.unique(), passage_hashes.unique()
    known_query, at_query = _equal_pairs(known_query_hashes, query_values)
    among, at_passage = _equal_pairs(known_hashes[known_query], passage_values)
    known = (at_query[among] * len(passage_values) + at_passage).unique()
    row, place = _equal_pairs(query_hashes, query_values[known // max(1, len(passage_values))])
    wanted = torch.cat([query_hashes, passage_hashes[targets], passage_values[known[place] % len(passage_values)]])
    which, column = _equal_pairs(wanted, passage_hashes)
    query = torch.cat([rows, rows, row])[which]
    others = column != targets[query]
    pairs = (query[others] * len(passage_hashes) + column[others]).unique()
    return torch.stack([pairs // len(passage_hashes), pairs % len(passage_hashes)], dim=1)


def _equal_pairs(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """All (a, b) with left[a] == right[b], ordered by a."""
    values, order = right.sort()
    first = torch.searchsorted(values, left)
    count = torch.searchsorted(values, left, right=True) - first
    a = torch.repeat_interleave(count)
    rank = torch.arange(len(a), device=a.device) - (count.cumsum(0) - count)[a]
    return a, order[first[a] + rank]
