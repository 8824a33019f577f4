"""The lines of a qualification: what was asked, the verdict, and how figures become one. Torch-free.

A subject is a list of `Asked`: questions, each with a function that measures and returns an `Outcome`. A function that
fails gives a failed line, and the others are measured all the same. Processes write their lines to a file as they have
them (`Lines`), so that a process that dies leaves what it has found, and the questions that it has not answered.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from data.ground.files import first_line

Verdict = Literal["passed", "failed", "not answered"]
VERDICTS: tuple[Verdict, ...] = ("passed", "failed", "not answered")


@dataclass(frozen=True)
class Bound:
    """A figure and where it may lie, ends included. Not a number lies nowhere."""

    value: float
    least: float = float("-inf")
    most: float = float("inf")

    @property
    def holds(self) -> bool:
        return self.least <= self.value <= self.most

    @property
    def tolerance(self) -> str:
        ends = ((self.least, "≥", float("-inf")), (self.most, "≤", float("inf")))
        return " and ".join(f"{sign} {end:.4g}" for end, sign, none in ends if end != none)


@dataclass(frozen=True)
class Outcome:
    """The answer to one question. figure: what was measured; of a question that is not answered, the reason."""

    verdict: Verdict
    figure: str
    tolerance: str = ""
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """One line of the page."""

    subject: str
    asked: str
    outcome: Outcome
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {"subject": self.subject, "asked": self.asked, **asdict(self.outcome), "seconds": round(self.seconds, 3)}

    @classmethod
    def of_json(cls, record: Mapping[str, Any]) -> Line:
        outcome = Outcome(record["verdict"], record["figure"], record["tolerance"], record["values"])
        return cls(record["subject"], record["asked"], outcome, record["seconds"])


def judged(figures: Mapping[str, Bound], *, more: str = "") -> Outcome:
    """Passed if every figure lies within its bounds. more: words that stand after the figures."""
    verdict: Verdict = "passed" if all(each.holds for each in figures.values()) else "failed"
    shown = ", ".join(f"{name} {each.value:.3g}" for name, each in figures.items())
    bounds = ", ".join(f"{name} {each.tolerance}" for name, each in figures.items() if each.tolerance)
    values = {name: each.value for name, each in figures.items()}
    return Outcome(verdict, "; ".join(part for part in (shown, more) if part), bounds, values)


def measured(figure: str, values: Mapping[str, float]) -> Outcome:
    """A figure that has no tolerance: it passes when it has been measured."""
    return Outcome("passed", figure, "none: a figure to read", values)


def not_answered(why: str) -> Outcome:
    return Outcome("not answered", why)


@dataclass(frozen=True)
class Asked:
    """A question, and how it is answered."""

    question: str
    measure: Callable[[], Outcome]


class Lines:
    """A file of lines, one JSON object each: the questions first, then the answers as they are found.

    path: None on ranks that write nothing.
    """

    def __init__(self, path: Path | None, subject: str) -> None:
        self._path, self._subject = path, subject

    def announce(self, asked: Sequence[Asked], about: Mapping[str, Any]) -> None:
        """Write which questions follow. about: what the page says of the machine."""
        self._write({"subject": self._subject, "questions": [each.question for each in asked], "about": dict(about)})

    def add(self, asked: str, outcome: Outcome, seconds: float) -> None:
        self._write(Line(self._subject, asked, outcome, seconds).as_json())

    def tell(self) -> None:
        """Write that the process ends now, and that the last line says why."""
        self._write({"told": True})

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def measure_all(asked: Sequence[Asked], lines: Lines, *, tracebacks: Path, together: bool = False) -> None:
    """Answer the questions one after another. Where measuring raises an exception, the line has failed.

    tracebacks: the file to which the exceptions' tracebacks are added.
    together: whether other ranks answer with this one. They would wait for a rank that has failed, so its exception
    then ends the process after the line is written.
    """
    for each in asked:
        begin = time.monotonic()
        try:
            outcome = each.measure()
        except Exception as error:
            with tracebacks.open("a", encoding="utf-8") as file:
                file.write(f"{each.question}\n{traceback.format_exc()}\n")
            said = f"{type(error).__name__}: {first_line(error)}".rstrip(" .:")
            lines.add(each.question, crashed(f"it ended with {said}", tracebacks), time.monotonic() - begin)
            if together:
                lines.tell()
                raise
        else:
            lines.add(each.question, outcome, time.monotonic() - begin)


def crashed(what: str, details: Path) -> Outcome:
    """A failed line for what has no figure; `details` names the file that says more."""
    return Outcome("failed", f"{what}; {details} has the details")


@dataclass(frozen=True)
class Found:
    """What a file of lines holds. missing: the questions without a line. told: whether a line says how it all ended."""

    lines: tuple[Line, ...] = ()
    missing: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    told: bool = False

    def completed(self, *, subject: str, ended: str, details: Path) -> Found:
        """For a process that ended before its time, as `ended` says: with a line for each question that it left.

        The first of them is where it ended, and has failed, unless another line tells.
        """
        lines, missing = list(self.lines), self.missing
        if not self.told:
            place = missing[0] if missing else f"{subject} runs to its end"
            lines.append(Line(subject, place, crashed(ended, details), 0.0))
            missing = missing[1:]
        reason = not_answered("the processes ended before this")
        lines += [Line(subject, each, reason, 0.0) for each in missing]
        return replace(self, lines=tuple(lines), missing=(), told=True)


def read_lines(path: Path) -> Found:
    """What was written by `Lines`; nothing where there is no file. A record that was cut off is left out."""
    lines: list[Line] = []
    questions: list[str] = []
    about: dict[str, Any] = {}
    told = False
    written = path.read_text(encoding="utf-8") if path.is_file() else ""
    for text in written.splitlines(keepends=True):
        if not text.endswith("\n"):
            break
        record = json.loads(text)
        if "questions" in record:
            questions += record["questions"]
            about |= record["about"]
        elif "told" in record:
            told = True
        else:
            lines.append(Line.of_json(record))
    answered = {line.asked for line in lines}
    return Found(tuple(lines), tuple(each for each in questions if each not in answered), about, told)


def counted(lines: Sequence[Line]) -> dict[str, int]:
    """Verdict -> how many lines have it."""
    return {verdict: sum(line.outcome.verdict == verdict for line in lines) for verdict in VERDICTS}
