"""Comparison of a run's folder with the undisturbed run's, to the last digit.

Numbers are compared as the texts in the files. A step's samples are compared by rank and in order.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.run_folder import CLOCKED

Document = tuple[int, int]  # (source, index within it)
Facts = dict[int, str]  # step -> fact


@dataclass(frozen=True)
class Differences:
    """All zeros if a run equals the undisturbed run."""

    mismatched_steps: int  # steps whose record or samples differ, are missing, or came more than once
    mismatched_weights: int  # 1 if the final weights differ in any bit
    repeated_documents: int  # samples beyond a document's first, and samples that are no document of the epoch
    missed_documents: int

    def __add__(self, other: Differences) -> Differences:
        return Differences(*(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values())))


NO_DIFFERENCES = Differences(0, 0, 0, 0)


def step_records(run: Path) -> list[tuple[int, str]]:
    """(step, its record without measured values) for each line of a step in metrics.jsonl, in the file's order.

    A truncated last line is left out.
    """
    try:
        text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    whole = (json.loads(line, parse_float=str, parse_int=str) for line in text.split("\n")[:-1])
    steps = (record for record in whole if "loss" in record)
    return [(int(record["step"]), _text_of(record)) for record in steps]


def compare(
    run: Path, undisturbed: Path, *, documents: Iterable[Document], before: Iterable[tuple[int, str]] = ()
) -> Differences:
    """The differences of two runs. `documents`: of the epoch. `before`: records that `run` had before its end."""
    wanted, wanted_samples = dict(step_records(undisturbed)), _samples_by_step(undisturbed)
    assert wanted and set(wanted) == set(wanted_samples), f"{undisturbed} lacks records"
    got = step_records(run)
    times = Counter(step for step, _ in got)
    wrong = {step for step in {*wanted, *times} if times[step] != 1}
    wrong |= {step for step, record in (*got, *before) if wanted.get(step) != record}
    samples = _samples_by_step(run)
    wrong |= {step for step in {*wanted, *samples} if samples.get(step) != wanted_samples.get(step)}
    seen = Counter((source, index) for _, _, drawn in _samples(run) for source, index in drawn)
    expected = set(documents)
    return Differences(
        mismatched_steps=len(wrong),
        mismatched_weights=int(_weights(run) != _weights(undisturbed)),
        repeated_documents=seen.total() - len(expected & set(seen)),
        missed_documents=len(expected - set(seen)),
    )


def _text_of(record: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in record.items() if key not in CLOCKED}, sort_keys=True)


def _samples(run: Path) -> list[tuple[int, str, list[list[int]]]]:
    """(step, the rank's file, the samples) of each line of the sample logs."""
    found = []
    for path in sorted((run / "samples").glob("rank_*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # a truncated line; its documents count as missed
                record = json.loads(line)
                found.append((record["step"], path.name, record["samples"]))
    return found


def _samples_by_step(run: Path) -> Facts:
    by_step: dict[int, list[Any]] = {}
    for step, rank, drawn in _samples(run):
        by_step.setdefault(step, []).append([rank, drawn])
    return {step: json.dumps(lines) for step, lines in by_step.items()}


def _weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()
