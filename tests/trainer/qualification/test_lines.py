"""Figures become verdicts, and a question that fails leaves the others alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from trainer.qualification.lines import (
    Asked,
    Bound,
    Line,
    Lines,
    Outcome,
    counted,
    judged,
    measure_all,
    measured,
    not_answered,
    read_lines,
)


@pytest.mark.parametrize(
    ("bound", "holds"),
    [
        (Bound(1e-6, most=1e-5), True),
        (Bound(1e-5, most=1e-5), True),
        (Bound(1.1e-5, most=1e-5), False),
        (Bound(0.9, least=1.0), False),
        (Bound(2.0, least=1.0, most=2.0), True),
        (Bound(math.nan, most=1.0), False),
        (Bound(math.inf, most=1.0), False),
        (Bound(math.nan), False),
    ],
)
def test_a_figure_passes_within_its_bounds(bound: Bound, holds: bool) -> None:
    assert bound.holds is holds
    assert judged({"figure": bound}).verdict == ("passed" if holds else "failed")


def test_one_figure_outside_fails_the_line() -> None:
    outcome = judged({"loss": Bound(1e-7, most=1e-5), "weights": Bound(2e-4, most=5e-5)}, more="on 2 ranks")
    assert outcome.verdict == "failed"
    assert outcome.figure == "loss 1e-07, weights 0.0002; on 2 ranks"
    assert outcome.tolerance == "loss ≤ 1e-05, weights ≤ 5e-05"
    assert outcome.values == {"loss": 1e-7, "weights": 2e-4}
    assert judged({"speed": Bound(3.0, least=0.5, most=2.0)}).tolerance == "speed ≥ 0.5 and ≤ 2"
    assert measured("5 ms", {"seconds": 0.005}).verdict == "passed"


def fails() -> Outcome:
    raise RuntimeError("no kernel image is available\nfor this device")


def test_a_line_that_crashes_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    path, tracebacks = tmp_path / "lines.jsonl", tmp_path / "tracebacks.txt"
    asked = [Asked("first", fails), Asked("second", lambda: measured("1", {"one": 1.0}))]
    lines = Lines(path, "subject")
    lines.announce(asked, {"device": "a device"})
    measure_all(asked, lines, tracebacks=tracebacks)
    found = read_lines(path)
    first, second = found.lines
    assert (first.outcome.verdict, second.outcome.verdict) == ("failed", "passed")
    said = f"it ended with RuntimeError: no kernel image is available; {tracebacks} has the details"
    assert first.outcome.figure == said
    assert "Traceback" in tracebacks.read_text() and "in fails" in tracebacks.read_text()
    assert (found.missing, found.told, found.about) == ((), False, {"device": "a device"})


def test_ranks_that_others_wait_for_end_after_the_line(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    asked = [Asked("first", fails), Asked("second", lambda: not_answered("never asked"))]
    lines = Lines(path, "ranks")
    lines.announce(asked, {})
    with pytest.raises(RuntimeError):
        measure_all(asked, lines, tracebacks=tmp_path / "t.txt", together=True)
    found = read_lines(path)
    assert [line.asked for line in found.lines] == ["first"] and found.told
    completed = found.completed(subject="ranks", ended="it ended with exit code 1", details=tmp_path / "log")
    assert [line.outcome.verdict for line in completed.lines] == ["failed", "not answered"]


def test_a_process_that_dies_has_failed_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = Lines(path, "steps")
    lines.announce([Asked(name, fails) for name in ("a", "b", "c")], {})
    lines.add("a", measured("1", {}), 0.5)
    with path.open("a") as file:
        file.write('{"subject": "steps", "asked": "b", "verd')  # cut off by the end of the process
    found = read_lines(path).completed(subject="steps", ended="the process ended with exit code -11", details=path)
    assert [(line.asked, line.outcome.verdict) for line in found.lines] == [
        ("a", "passed"),
        ("b", "failed"),
        ("c", "not answered"),
    ]
    assert "exit code -11" in found.lines[1].outcome.figure
    # A process that dies before it has asked anything has a line, too.
    (line,) = read_lines(tmp_path / "none").completed(subject="steps", ended="it ended", details=path).lines
    assert (line.asked, line.outcome.verdict) == ("steps runs to its end", "failed")


def test_lines_survive_the_way_through_a_file() -> None:
    line = Line("steps", "a question", judged({"loss": Bound(1.0, most=2.0)}), 1.25)
    assert Line.of_json(line.as_json()) == line
    assert counted([line, line]) == {"passed": 2, "failed": 0, "not answered": 0}
