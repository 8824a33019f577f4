"""What inputs hold, read to their ends without being prepared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from data.corpora.plan import plan_documents, plan_tuples
from data.corpora.read import read_split
from data.corpora.splits import Document, TupleRecord


def read_documents(inputs: Sequence[str], **options: Any) -> Iterator[Document]:
    """Every document; options as in `plan_documents`."""
    for split in plan_documents(inputs, **options):
        for _, record in read_split(split):
            yield cast(Document, record)


def read_tuples(inputs: Sequence[str], **options: Any) -> Iterator[TupleRecord]:
    """Every training example; options as in `plan_tuples`."""
    for split in plan_tuples(inputs, **options):
        for _, record in read_split(split):
            yield cast(TupleRecord, record)
