"""Partial results of an evaluation, task by task, kept beside its output until the evaluation is complete.

A part is one method on one task: <name>.raw.jsonl.gz, and <name>.json with its records and with all that decided them.
The JSON file is written last, so its existence means that the part is complete. A part that was computed from other
weights, texts or options is computed again: that is cheap beside the vectors, which have their own store.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.ground import records
from data.ground.errors import UserError
from data.ground.files import file_name, write_atomically
from data.ground.records import read_record
from trainer.evaluation.results.raw import RawResults, read_raw, write_raw
from trainer.evaluation.results.report import Record

log = logging.getLogger(__name__)

PARTS_FOLDER = "parts"
Results = tuple[list[Record], RawResults]


class _Row(records.Record):
    method: str
    task: str
    kind: str
    size: str
    layers: int
    dim: int
    metric: str
    value: float | None
    document_size: str = ""
    document_layers: int = 0
    feed_forward: float = 1.0


class _Part(records.Record):
    """The JSON file of a part: one method on one task."""

    decided_by: dict[str, Any]
    records: tuple[_Row, ...]


@dataclass(frozen=True)
class Parts:
    """The partial results in `folder`; with None, nothing is kept."""

    folder: Path | None

    def load(self, method: str, task: str, decided_by: Mapping[str, Any]) -> Results | None:
        if self.folder is None:
            return None
        stem = _stem(method, task)
        path = self.folder / f"{stem}.json"
        if not path.exists():
            return None
        try:
            kept = read_record(path, _Part, what="part")
            raw = read_raw(self.folder / f"{stem}.raw.jsonl.gz")
        except UserError as error:
            log.warning("%s; it is made again", error)
            return None
        if kept.decided_by != json.loads(json.dumps(decided_by)):
            log.info("%s, %s: what is kept is of another evaluation and made again", method, task)
            return None
        log.info("%s, %s: done before", method, task)
        return [Record(**{**row.model_dump(), "value": _value(row.value)}) for row in kept.records], raw

    def save(
        self, method: str, task: str, decided_by: Mapping[str, Any], records: Sequence[Record], raw: RawResults
    ) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        stem = _stem(method, task)
        (self.folder / f"{stem}.json").unlink(missing_ok=True)
        write_raw(raw, self.folder / f"{stem}.raw.jsonl.gz")
        content = {"decided_by": decided_by, "records": [record.as_json() for record in records]}
        write_atomically(self.folder / f"{stem}.json", json.dumps(content, ensure_ascii=False) + "\n")

    def remove(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _stem(method: str, task: str) -> str:
    return f"{file_name(method)}_{file_name(task)}"


def _value(value: float | None) -> float:
    return math.nan if value is None else value
