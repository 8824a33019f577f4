"""The schema of a line of metrics.jsonl: what is written fits it, and what is read is a line, damaged, or of others."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import pydantic
import pytest

from data.ground.errors import DataError, OtherFormat
from trainer.monitoring.lines import FORMAT, Line, read_lines, sound_lines, text_of
from trainer.monitoring.names import FAULTY, SAVED, STEP
from trainer.resilience.anomalies import Fault

SAMPLES = [[0, 4], [1, 7]]
LINES: dict[str, dict[str, Any]] = {
    "a logged step": {"step": 3, "epoch": 0.5, "samples": 24, "loss": 1.5, "encoder/demi": 1, "skipped_steps": 0},
    "an evaluation": {"step": 3, "evaluation/a/b/spearman/demi": 0.5, "evaluation/a/b/spearman/2x8": None},
    "a checkpoint": {"step": 3, "checkpoint/seconds": 1.0, "checkpoint/still_seconds": 0.5, "checkpoint/mib": 2.0},
    **{
        kind: {"step": 3, "fault": kind, "fault/loss": "nan", "by_rank": ["nan", "1.0"], "samples": SAMPLES}
        for kind in get_args(Fault)
    },
    "samples": {"step": 3, "samples": SAMPLES},
    "a step alone": {"step": 0},
}
DAMAGED: dict[str, tuple[str, str]] = {
    "no object": ("[]", "no JSON object"),
    "cut off": ('{"step": 1', "no JSON"),
    "no UTF-8": ("\udcff", "not UTF-8"),
    "nested too deep": ("[" * 100_000, "nested too deep"),
    "empty": ("", "no JSON"),
    "without a step": ('{"loss": 1.0}', "it has no step"),
    "a step below 0": ('{"step": -1}', "step = -1"),
    "a step of a text": ('{"step": "1"}', "step = '1'"),
    "a step that is true": ('{"step": true}', "step = True"),
    "a step with a fraction": ('{"step": 1.5}', "step = 1.5"),
    "a step beyond all counts": ('{"step": 9007199254740992}', "step = 9007199254740992"),
    "a loss of a text": ('{"step": 1, "loss": "x"}', "loss = 'x'"),
    "a rate that is true": ('{"step": 1, "lr": true}', "lr = True"),
    "a loss of 400 digits": ('{"step": 1, "loss": 1' + "0" * 400 + "}", "loss = 1000"),
    "a size's loss of 400 digits": ('{"step": 1, "kl/demi": 1' + "0" * 400 + "}", "kl/demi should be null or a number"),
    "a size's loss of a list": ('{"step": 1, "kl/demi": [1]}', "(kl/demi should be null or a number)"),
    "a score of a text": ('{"step": 1, "evaluation/a/mrr/demi": "x"}', "evaluation/a/mrr/demi should be"),
    "a new cost of a text": ('{"step": 1, "checkpoint/new": "x"}', "checkpoint/new should be"),
    "MiB of a text": ('{"step": 1, "checkpoint/mib": "x"}', "checkpoint/mib = 'x'"),
    "an unknown fault": ('{"step": 1, "fault": "x"}', "fault = 'x'"),
    "a part of the loss that is no text": ('{"step": 1, "by_rank": [1.0]}', "by_rank[0] = 1.0"),
    "a sample without an index": ('{"step": 1, "samples": [[1]]}', "samples"),
    "samples below 0": ('{"step": 1, "samples": -1}', "samples"),
    "skipped steps with a fraction": ('{"step": 1, "skipped_steps": 0.5}', "skipped_steps = 0.5"),
    "a format of a text": ('{"step": 1, "format": "1"}', "format = '1'"),
}


def file_of(folder: Path, *lines: str) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", errors="surrogateescape")
    return path


def test_the_fields_are_the_names_that_the_page_explains() -> None:
    fields = {field.alias or name for name, field in Line.model_fields.items()}
    assert fields == {"format", *STEP, *SAVED, *FAULTY}


@pytest.mark.parametrize("name", LINES)
def test_a_line_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    text = text_of(LINES[name])
    assert text == json.dumps({"format": FORMAT, **LINES[name]})
    (found,) = read_lines(file_of(tmp_path, text))
    assert isinstance(found.content, Line), found.content
    assert found.content.format == FORMAT and found.content.values() == LINES[name]


@pytest.mark.parametrize("name", LINES)
def test_earlier_versions_wrote_no_format(name: str, tmp_path: Path) -> None:
    (line,) = sound_lines(file_of(tmp_path, json.dumps(LINES[name])))
    assert line.format == 1 and line.values() == LINES[name]


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_damaged(name: str, tmp_path: Path) -> None:
    text, said = DAMAGED[name]
    path = file_of(tmp_path, json.dumps({"step": 1}), text)
    before, found = read_lines(path)
    assert isinstance(before.content, Line)
    assert isinstance(found.content, DataError) and not isinstance(found.content, OtherFormat)
    sentence = str(found.content)
    assert sentence.startswith(f"{path} line 2 is ") and said in sentence and sentence.endswith("; remove that line")
    assert [line.step for line in sound_lines(path)] == [1]


@pytest.mark.parametrize(
    "text",
    [
        '{"step": 1, "a new name": "of a later version", "another": {"a": [1]}}',
        '{"step": 1, "loss": NaN, "seconds": Infinity, "kl/demi": NaN}',  # by earlier versions
        '{"step": 1, "loss": 1e400, "epoch": 1, "lr": null, "kl/demi": null}',
    ],
)
def test_what_is_not_damaged(text: str, tmp_path: Path) -> None:
    assert [line.step for line in sound_lines(file_of(tmp_path, text))] == [1]


@pytest.mark.parametrize(
    "text",
    [
        '{"format": 2, "step": 1}',
        '{"step": 1, "format": 2}',
        '{"format": 2, "steps": [1, 2]}',  # nothing is known of what it has
        '{"format": 0, "step": 1}',
    ],
)
def test_an_unknown_format_is_no_damage(text: str, tmp_path: Path) -> None:
    path = file_of(tmp_path, text_of({"step": 1}), "damaged", text, text_of({"step": 2}))
    found = [each.content for each in read_lines(path)]
    assert [type(content) for content in found] == [Line, DataError, OtherFormat, Line]
    number = json.loads(text)["format"]
    sentence = f"{path} line 3 is of format {number}, and this version reads format 1; use the version that wrote it"
    assert str(found[2]) == sentence
    read = []
    with pytest.raises(OtherFormat) as told:
        read.extend(line.step for line in sound_lines(path))
    assert str(told.value) == sentence


@pytest.mark.parametrize(
    "values",
    [{"loss": 1.0}, {"step": -1}, {"step": 1, "loss": "x"}, {"step": 1, "kl/demi": "x"}, {"step": 1, "fault": "x"}],
)
def test_what_is_no_line_is_not_written(values: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        text_of(values)


def test_what_is_not_finite_is_written_as_null() -> None:
    values = {"step": 1, "loss": math.nan, "kl/demi": math.inf}
    assert text_of(values) == '{"format": 1, "step": 1, "loss": null, "kl/demi": null}'


def test_lines_keep_their_text(tmp_path: Path) -> None:
    """A resume keeps lines as they are, to the last byte."""
    path = tmp_path / "metrics.jsonl"
    assert list(read_lines(path)) == [] and list(sound_lines(path)) == []
    content = b'{"step": 1 ,"loss":1.50}\r\n\n\xff\x00\n{"step":2}'
    path.write_bytes(content)
    found = list(read_lines(path))
    assert b"".join(each.text for each in found) == content
    assert [each.where for each in found] == [f"{path} line {number}" for number in (1, 2, 3, 4)]
    assert [each.is_complete for each in found] == [True, True, True, False]
    assert [isinstance(each.content, Line) for each in found] == [True, False, False, True]


def test_what_a_line_tells(tmp_path: Path) -> None:
    lines = {name: next(sound_lines(file_of(tmp_path, text_of(values)))) for name, values in LINES.items()}
    assert lines["a logged step"].numbers() == LINES["a logged step"]  # without the format
    assert lines["an evaluation"].numbers() == {"step": 3, "evaluation/a/b/spearman/demi": 0.5}
    assert lines["spike"].numbers() == {"step": 3}
    assert [name for name, line in lines.items() if line.scores] == ["an evaluation"]
    assert [name for name, line in lines.items() if line.is_of_checkpoint] == ["a checkpoint"]
