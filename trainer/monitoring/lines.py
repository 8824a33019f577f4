"""The schema of a line of metrics.jsonl, by which lines are written and read. Torch-free, like launch/status.py.

A line is a JSON object with a step. It is of one of four kinds: a logged step, the scores of an evaluation, the costs
of a saved checkpoint, or a step with a fault. docs/metrics.md says what each name means. A logged step also has losses
at single sizes, FAMILY/SIZE, and an evaluation has its scores, evaluation/TASK/METRIC/SIZE. Their values are numbers
or null.

Every line has its format, because a run that an upgrade interrupts has lines of several versions in one file. Lines
without a format, which earlier versions wrote, are of format 1. A line of an unknown format is not damaged. At such a
line a resume, an export or a selection of seeds ends with one sentence and changes nothing; `launch.status` counts
these lines and shows the others.

The lines of samples/rank_N.jsonl (`log.samples`) have the same schema, with a step and its samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import pydantic
from pydantic_core import PydanticCustomError

from data.ground.errors import DataError, OtherFormat
from data.ground.records import Record, json_of, parse_record
from trainer.monitoring.names import CHECKPOINT, EVALUATION, loss_of
from trainer.resilience.anomalies import Fault

FILE = "metrics.jsonl"
FORMAT: Final = 1
_HINT = "remove that line"
_MOST = 2**53  # of a whole number, beyond which it is no count


def _is_number(value: object) -> bool:
    """Whether a JSON value is a number. Whole numbers in JSON have no bound; those from 2**53 on are refused."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST)


def _checked_number(value: object) -> object:
    if value is None or _is_number(value):
        return value
    raise PydanticCustomError("number", "it should be null or a number, and a whole number below 2**53")


Count = Annotated[int, pydantic.Field(ge=0, lt=_MOST)]
Number = Annotated[float | None, pydantic.BeforeValidator(_checked_number)]  # None: not defined
Sample = Annotated[list[Count], pydantic.Field(min_length=2, max_length=2)]


class Line(Record):
    """The fields of one line."""

    # Earlier versions wrote NaN where a number is not defined.
    model_config = pydantic.ConfigDict(extra="allow", allow_inf_nan=True)

    format: Literal[1] = FORMAT
    step: Count
    epoch: Number = None
    samples: Count | list[Sample] | None = None
    loss: Number = None
    lr: Number = None
    muon_lr: Number = None
    grad_norm: Number = None
    tokens_per_second: Number = None
    mfu: Number = None
    padding_share: Number = None
    data_wait_share: Number = None
    memory_mib: Number = None
    seconds: Number = None
    skipped_steps: Count | None = None
    checkpoint_seconds: Number = pydantic.Field(default=None, alias="checkpoint/seconds")
    checkpoint_still_seconds: Number = pydantic.Field(default=None, alias="checkpoint/still_seconds")
    checkpoint_mib: Number = pydantic.Field(default=None, alias="checkpoint/mib")
    fault: Fault | None = None
    fault_loss: str | None = pydantic.Field(default=None, alias="fault/loss")
    fault_grad_norm: str | None = pydantic.Field(default=None, alias="fault/grad_norm")
    by_rank: list[str] | None = None

    @pydantic.model_validator(mode="after")
    def _check_losses_and_scores(self) -> Line:
        others = (
            name for name, value in (self.model_extra or {}).items() if value is not None and not _is_number(value)
        )
        for name in others:
            if name.startswith((EVALUATION, CHECKPOINT)) or loss_of(name):
                raise PydanticCustomError("number", "{name} should be null or a number", {"name": name})
        return self

    @property
    def scores(self) -> dict[str, Any]:
        """The scores of an evaluation, by their names in the file; other lines have none."""
        return {name: value for name, value in (self.model_extra or {}).items() if name.startswith(EVALUATION)}

    @property
    def is_of_checkpoint(self) -> bool:
        """Whether the line has what a saved checkpoint cost."""
        return any(name.startswith(CHECKPOINT) for name in self.values())

    def values(self) -> dict[str, Any]:
        """All that the line has, by its names in the file, except for the format."""
        return self.model_dump(by_alias=True, exclude_unset=True, exclude={"format"})

    def numbers(self) -> dict[str, float]:
        """The numbers among the values. Null and text are left out."""
        return {name: value for name, value in self.values().items() if _is_number(value)}


class LineInFile(NamedTuple):
    """A line as it stands in a file, and what it says, or why it cannot be read."""

    where: str  # the file and the line's number
    text: bytes  # with its newline, unless the file ends before one
    content: Line | DataError  # OtherFormat: the line is not damaged, but another version wrote it

    @property
    def is_complete(self) -> bool:
        """Whether the line has its end. One without it was cut off, or is being written."""
        return self.text.endswith(b"\n")


def text_of(values: Mapping[str, Any]) -> str:
    """The text of a line with these values, by their names in the file. What is not finite becomes null.

    Raises pydantic.ValidationError if they do not fit the schema, which is a mistake of the caller.
    """
    text = json_of({"format": FORMAT, **values})
    Line.model_validate_json(text)
    return text


def read_lines(path: Path) -> Iterator[LineInFile]:
    """All lines of a file, damaged ones as well. A file that does not exist has none."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            yield _read(text, where=f"{path} line {number}")


def sound_lines(path: Path) -> Iterator[Line]:
    """What the lines of a file say, without damaged ones.

    Raises OtherFormat at a line that another version wrote: without it, a run would seem to have come less far.
    """
    for each in read_lines(path):
        if isinstance(each.content, OtherFormat):
            raise each.content
        if isinstance(each.content, Line):
            yield each.content


def _read(text: bytes, *, where: str) -> LineInFile:
    try:
        return LineInFile(where, text, parse_record(text, Line, where=where, hint=_HINT))
    except DataError as error:
        return LineInFile(where, text, error)
