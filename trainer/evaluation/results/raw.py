"""Raw results on disk: per-query results and every sentence pair's cosine, from which all tables can be made again.

One gzipped file of JSON lines. A task's own line comes first:
    {"task", "kind": "retrieval", "queries": [id, …]}
    {"task", "kind": "sts", "gold": [score, …], "subsets": [[name, first row, rows], …]}
Then comes one line per method and size: {"task", "method", "layers", "dim", "values": {name: [number, …]}}. A retrieval
task has one list for each of trec_eval's names, in the order of `queries`; an STS task has the list "cosine".
Lines of sizes with narrower feed-forwards also have "feed_forward".
Lines of queries against documents of another depth (--across-depths) also have "document_layers". They come before the
other lines: an earlier version ignores this key, and the last line that it reads for a size is then the right one.
Numbers are written so that reading gives the same float64. BM25 has layers 0 and dim 0.
"""

from __future__ import annotations

import gzip
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import pydantic

from data.ground.errors import ConfigError
from data.ground.files import reading, write_atomically
from data.ground.records import Record, parse_record
from models.sizes import ModelError
from trainer.evaluation.encoding.across import Searched, SizePair, sides
from trainer.evaluation.tasks.retrieval import NOT_A_NUMBER, RunScores
from trainer.evaluation.tasks.sts import STSTask, Subset, score_sts

RAW_FILE = "raw.jsonl.gz"
BM25 = "BM25"  # the method that has no size


@dataclass(frozen=True)
class RawTask:
    """A task as all methods share it. `items`: query ids; empty for STS, whose items are the rows of `gold`."""

    name: str
    kind: str  # "sts" | "retrieval"
    items: tuple[str, ...] = ()
    gold: tuple[float, ...] = ()
    subsets: tuple[Subset, ...] = ()

    def as_json(self) -> dict[str, Any]:
        if self.kind == "retrieval":
            return {"task": self.name, "kind": self.kind, "queries": self.items}
        subsets = [[part.name, part.start, part.rows] for part in self.subsets]
        return {"task": self.name, "kind": self.kind, "gold": self.gold, "subsets": subsets}


# Task, method, layers, dim, and the fraction of narrower feed-forwards (Size.numbers).
Key = tuple[str, str, int, int] | tuple[str, str, int, int, float]
# The same, and the documents' layers, whose feed-forwards are whole.
AcrossKey = tuple[str, str, int, int, int] | tuple[str, str, int, int, float, int]


def shape_of(searched: Searched) -> tuple[float, ...]:
    """The part of a key that a size, or a pair of sizes, decides."""
    query, document = sides(searched)
    return (*query.numbers, *((document.layers,) if isinstance(searched, SizePair) else ()))


def is_across(key: tuple[Any, ...]) -> bool:
    """Whether a key ends in the documents' layers, a whole number in the place of a fraction or after it."""
    return len(key) > 4 and isinstance(key[-1], int)


def own_key(key: AcrossKey) -> Key:
    """The key of the same queries against documents of their own size."""
    return key[:-1]


@dataclass
class RawResults:
    """Tasks by name, and `values`: a key -> name -> values, float64 [items].

    `across` holds the same for queries against documents of another depth.
    """

    tasks: dict[str, RawTask] = field(default_factory=dict)
    values: dict[Key, dict[str, np.ndarray]] = field(default_factory=dict)
    across: dict[AcrossKey, dict[str, np.ndarray]] = field(default_factory=dict)

    def add_sts(self, method: str, task: STSTask, size: Searched, cosines: np.ndarray) -> None:
        self.tasks[task.name] = RawTask(task.name, "sts", gold=task.scores, subsets=task.subsets)
        if not np.isfinite(cosines).all():
            raise ModelError(f"{task.name} at {size}: {NOT_A_NUMBER}")
        self.set_columns((task.name, method, *shape_of(size)), {"cosine": np.asarray(cosines, np.float64)})

    def add_retrieval(
        self, method: str, task: str, shape: tuple[float, ...], scores: RunScores, names: Sequence[str]
    ) -> None:
        """Add per-query results. `shape`: `shape_of` a size. `names`: the metrics that the ranking's depth allows."""
        self.tasks[task] = RawTask(task, "retrieval", tuple(scores.per_query))
        columns = {name: np.array(scores.of_queries(name)) for name in names}
        self.set_columns((task, method, *shape), columns)

    def set_columns(self, key: tuple[Any, ...], columns: dict[str, np.ndarray]) -> None:
        places: dict[Any, dict[str, np.ndarray]] = self.across if is_across(key) else self.values
        places[key] = columns

    def columns(self, key: Key | AcrossKey) -> dict[str, np.ndarray]:
        """name -> values, float64 [items]."""
        return self.across[cast(AcrossKey, key)] if is_across(key) else self.values[cast(Key, key)]

    def add(self, other: RawResults) -> None:
        self.tasks |= other.tasks
        self.values |= other.values
        self.across |= other.across

    def of_task(self, task: str) -> RawResults:
        return RawResults(
            {task: self.tasks[task]},
            {key: each for key, each in self.values.items() if key[0] == task},
            {key: each for key, each in self.across.items() if key[0] == task},
        )

    def means(self, key: Key | AcrossKey) -> dict[str, float]:
        """The metrics that tables show: means over queries, or an STS task's correlations."""
        task = self.tasks[key[0]]
        if task.kind == "retrieval":
            return {name: float(column.mean()) for name, column in self.columns(key).items()}
        rows = STSTask(task.name, (("", ""),) * len(task.gold), task.gold, task.subsets)
        return score_sts(rows, self.columns(key)["cosine"])


def write_raw(raw: RawResults, path: str | Path) -> None:
    """Write the whole file at once; the same results give the same bytes."""
    content = io.BytesIO()
    with gzip.GzipFile(fileobj=content, mode="wb", mtime=0, filename="") as lines:
        for task in raw.tasks.values():
            lines.write(_line(task.as_json()))
        for key, values in (*raw.across.items(), *raw.values.items()):
            names = ["task", "method", "layers", "dim"]
            names += ["feed_forward"] * (len(key) - is_across(key) > 4) + ["document_layers"] * is_across(key)
            lists = {metric: [_nan_as_null(value) for value in column.tolist()] for metric, column in values.items()}
            lines.write(_line({**dict(zip(names, key)), "values": lists}))
    write_atomically(Path(path), content.getvalue())


def read_raw(path: str | Path) -> RawResults:
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist; make it by `python -m trainer.evaluate sizes … --output {path.parent}`"
        )
    raw = RawResults()
    hint = "remove it and evaluate again"
    with reading(path, what="raw results", hint=hint), gzip.open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"raw results {path} line {number}"
            row = parse_record(line, _Line, where=where, hint=hint)
            if row.values is None:
                subsets = tuple(Subset(*part) for part in row.subsets)
                raw.tasks[row.task] = RawTask(row.task, row.kind, row.queries, row.gold, subsets)
            else:
                _add_values(raw, row, f"{where} is damaged", hint)
    return raw


class _Line(Record):
    """One line of the file: a method at a size if it has `values`, else a task."""

    task: str
    kind: Literal["sts", "retrieval"] = "sts"
    queries: tuple[str, ...] = ()
    gold: tuple[float, ...] = ()
    subsets: tuple[tuple[str, int, int], ...] = ()
    method: str = ""
    layers: int = 0
    dim: int = 0
    feed_forward: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0
    document_layers: int | None = None
    values: dict[str, list[float | None]] | None = None


def _add_values(raw: RawResults, row: _Line, damaged: str, hint: str) -> None:
    if row.task not in raw.tasks:
        raise ConfigError(f"{damaged} (it has values of {row.task!r}, of which nothing is told before); {hint}")
    task = raw.tasks[row.task]
    count = len(task.items) if task.kind == "retrieval" else len(task.gold)
    columns = {}
    for name, column in (row.values or {}).items():
        if len(column) != count:
            raise ConfigError(f"{damaged} ({task.name} has {count} items and {name} {len(column)} values); {hint}")
        columns[name] = np.array([math.nan if value is None else value for value in column], np.float64)
    fraction = () if row.feed_forward == 1 else (row.feed_forward,)
    documents = () if row.document_layers is None else (row.document_layers,)
    raw.set_columns((row.task, row.method, row.layers, row.dim, *fraction, *documents), columns)


def _nan_as_null(value: float) -> float | None:
    return None if math.isnan(value) else value


def _line(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False) + "\n").encode()
