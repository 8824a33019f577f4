"""The results of `trainer.resize`, as numbers (resize.json) and as a table for people (table.md)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Literal

from data.ground.records import Record
from models.sizes import Size
from trainer.evaluation.results import report
from trainer.evaluation.tasks.read import digest_of_tasks

# Methods; each is a column of the table.
AS_IT_IS, CLOSED_FORM, RESIZED = "as_it_is", "closed_form", "resized"
TO_WHOLE = "_to_whole"  # suffix of a column that scores queries of the size against documents of the whole model


class Row(Record):
    """A size's scores on a task by each method, its latency, and the size of its files.

    None: not evaluated, or not defined, as a correlation where all scores are equal.
    """

    task: str
    layers: int
    dim: int
    as_it_is: float | None
    as_it_is_to_whole: float | None
    closed_form: float | None
    closed_form_to_whole: float | None
    resized: float | None
    resized_to_whole: float | None
    milliseconds: float  # per query
    megabytes: float
    feed_forward: float = 1.0  # the fraction of the size's feed-forwards

    @property
    def shape(self) -> Size:
        return Size(self.layers, self.dim, self.feed_forward)


class Table(Record):
    """resize.json. Tables of earlier versions lack the digest, so those with other tasks than agreement are remade."""

    format: Literal[1] = 1
    tests_sha256: str = digest_of_tasks((), ())  # of the files of --sts and --beir
    records: tuple[Row, ...]


def scores_of(method: str, records: Iterable[report.Record]) -> dict[tuple[str, Size, str], float | None]:
    """(task, size, column) -> headline metric of an evaluation of all sizes, alone and against the whole model."""
    return {
        (each.task, each.shape, f"{method}{TO_WHOLE}" if each.document_layers else method): (
            each.value if math.isfinite(each.value) else None
        )
        for each in records
        if each.metric == report.HEADLINE_METRICS[each.kind]
    }


def as_markdown(rows: Sequence[Row]) -> str:
    """One table per task, in Markdown."""
    headings = {
        "as it is": AS_IT_IS,
        "closed form": CLOSED_FORM,
        "resized": RESIZED,
        "resized, documents whole": f"{RESIZED}{TO_WHOLE}",
    }
    text = ""
    for task, of_task in itertools.groupby(rows, key=lambda row: row.task):
        lines = []
        for row in of_task:
            scores = (getattr(row, column) for column in headings.values())
            cells = ("–" if score is None else f"{score:.4f}" for score in scores)
            lines.append([str(row.shape), *cells, f"{row.milliseconds:.1f}", f"{row.megabytes:.1f}"])
        text += f"## {task}\n\n{report.markdown_table(['size', *headings, 'ms a query', 'MB'], lines)}\n"
    return text
