"""metrics.jsonl on a disk that is full for a while, and what of it a resumed run keeps."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import unittest.mock
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from data.collate import SOURCE_STRIDE
from data.ground.errors import OtherFormat
from trainer.distributed import World
from trainer.monitoring import metrics
from trainer.monitoring.lines import FORMAT, sound_lines
from trainer.monitoring.metrics import Lines, Metrics, forget_after
from trainer.objectives.backward import StepReport
from trainer.resilience.anomalies import Fault


class Disk:
    """Takes so many bytes more, in place of the file that `Lines` opened."""

    def __init__(self, file: Any) -> None:
        self.file, self.room = file, 0

    def write(self, content: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = content[: self.room]
        self.room -= len(taken)
        return self.file.write(taken)

    def close(self) -> None:
        self.file.close()


@pytest.fixture
def lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.WARNING, logger=metrics.__name__)
    return Lines(tmp_path / "metrics.jsonl")


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk((tmp_path / "metrics.jsonl").open("ab", buffering=0))


@pytest.fixture
def lines_on_disk(disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.WARNING, logger=metrics.__name__)
    with monkeypatch.context() as context:
        context.setattr(Path, "open", lambda *_, **__: disk)
        return Lines(Path("metrics.jsonl"))


def test_no_line_is_lost_or_torn_while_a_disk_is_full(
    disk: Disk, lines_on_disk: Lines, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once when it begins, and once when it is over."""
    written = []
    for number, room in enumerate([9, 3, 0, 0, 1, 100, 100, 0, 100]):
        disk.room = room
        written.append(f"line {number}")
        lines_on_disk.write(written[-1])
    said = [record.getMessage() for record in caplog.records]
    assert ["cannot be written" in each for each in said] == [True, False, True, False]
    assert "No space left on device" in said[0] and "is written again" in said[1]
    lines_on_disk.close()
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(f"{each}\n" for each in written)
    assert len(caplog.records) == 4


def test_what_never_found_room_is_told(
    disk: Disk, lines_on_disk: Lines, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk.room = 2
    for number in range(3):
        lines_on_disk.write(str(number))
    lines_on_disk.close()
    assert "lacks its last 2 lines" in caplog.records[-1].getMessage()
    assert (tmp_path / "metrics.jsonl").read_text() == "0\n"


def test_a_write_that_works_says_nothing(lines: Lines, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines.write("a")
    assert (tmp_path / "metrics.jsonl").read_text() == "a\n"
    lines.close()
    assert not caplog.records


KEPT = b'{"step": 1}\n{"step": 2, "evaluation/x": 1}\n{"step": 3}\n'


@pytest.mark.parametrize(
    ("after", "dropped"),
    [
        (b"", 0),
        (b'{"step": 3, "evaluation/x": 1}\n{"step": 4}\n', 0),
        (b'{"step": 3, "lo', 1),
        (b'{"step": 3}', 1),  # without its end it may be cut off
        (b"\xff\xfe\x00\n7\n[]\n{}\nnull\n", 5),
        (b'{"step": "3"}\n{"step": true}\n{"step": 1e999}\n', 3),
        (b"[" * 100_000 + b"\n", 1),
    ],
)
@pytest.mark.parametrize("in_the_middle", [False, True])
def test_what_a_resumed_run_keeps(
    after: bytes, dropped: int, in_the_middle: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if in_the_middle and after and not after.endswith(b"\n"):
        after += b"\n"
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(after + KEPT if in_the_middle else KEPT + after)
    forget_after(path, 3)
    left = path.read_bytes()
    if after == b'{"step": 3}\n':  # whole again
        dropped, left = 0, left.removeprefix(after)
    assert left == KEPT
    assert ("dropped" in caplog.text) == bool(dropped)
    if dropped:
        assert f"dropped {dropped} line" in caplog.text


@pytest.mark.parametrize("repeats", [True, False])
def test_an_evaluation_is_dropped_only_where_it_is_repeated(repeats: bool, tmp_path: Path) -> None:
    """A run may be resumed with another `evaluation.every_steps`, as the best of several seeds is."""
    path = tmp_path / "metrics.jsonl"
    scores = b'{"step": 3, "evaluation/x": 1}\n'
    path.write_bytes(KEPT + scores + b'{"step": 4, "evaluation/x": 1}\n')
    forget_after(path, 3, repeats_evaluation=repeats)
    assert path.read_bytes() == KEPT + scores * (not repeats)


def test_cutting_its_end_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(metrics, "write_atomically", full)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(KEPT + b'{"step": 7}\n{"st')
    forget_after(path, 3)
    assert path.read_bytes() == KEPT


def test_lines_are_json(tmp_path: Path) -> None:
    """Python's own writer has a word for NaN that JSON lacks. Null is what is not defined, also where it is drawn."""
    board = unittest.mock.Mock()
    options: dict[str, Any] = {"every_steps": 1, "total_steps": 9, "start_step": 0}
    lines = Metrics(tmp_path, World.alone(), dashboard=board, **options)
    scores = {"a/spearman/1x16": math.nan, "b/spearman/1x16": 0.5}
    lines.evaluation(3, scores)
    lines.checkpoint(4, seconds=math.inf, still_seconds=0.0, mib=1.0)
    lines.close()
    evaluation, saved = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = json.loads(evaluation, parse_constant=pytest.fail)
    values = {"step": 3, "evaluation/a/spearman/1x16": None, "evaluation/b/spearman/1x16": 0.5}
    assert found == {"format": FORMAT, **values} and next(iter(found)) == "format"
    assert json.loads(saved, parse_constant=pytest.fail)["checkpoint/seconds"] is None
    assert board.record.call_args_list[0].args == (values,)  # the format is no curve
    assert "NaN" in json.dumps(scores)


LATER = b'{"format": 2, "step": 2, "loss": 1.0}\n'


@pytest.mark.parametrize("name", ["metrics.jsonl", "rank_00000.jsonl"])
@pytest.mark.parametrize("content", [LATER + KEPT, KEPT + LATER, KEPT + b'{"step": 9}\n' + LATER + b'{"st'])
def test_lines_of_a_later_version_are_neither_dropped_nor_kept(content: bytes, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(OtherFormat, match=rf"{name} line \d is of format 2, .*; use the version that wrote it"):
        forget_after(path, 3)
    assert path.read_bytes() == content
    path.write_bytes(content.replace(LATER, LATER.replace(b"2", b"1", 1)))  # negative control
    forget_after(path, 3)
    assert path.read_bytes().count(b'"format": 1') == 1


def test_lines_of_two_versions_in_one_file(tmp_path: Path) -> None:
    """A run that earlier versions began goes on in the same file."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(KEPT + b'{"step": 4}\n')
    lines = Metrics(tmp_path, World.alone(), dashboard=None, every_steps=1, total_steps=9, start_step=3)
    lines.checkpoint(3, seconds=1.0, still_seconds=0.5, mib=2.0)
    lines.close()
    assert path.read_bytes().startswith(KEPT + b'{"format": 1, "step": 3, "checkpoint/seconds": 1.0')


def test_every_kind_of_line_has_the_schema(tmp_path: Path) -> None:
    """The lines are those that a run writes: of a step, of each kind of fault, and of the samples of a step."""
    batch = unittest.mock.Mock(sample_ids=torch.tensor([5, 2 * SOURCE_STRIDE + 1]))
    report = StepReport({"loss": torch.tensor(2.0), "loss/demi": torch.tensor(1.0)}, 10, 12, 100.0)
    board = unittest.mock.Mock()
    options: dict[str, Any] = {"every_steps": 1, "total_steps": 9, "start_step": 0}
    lines = Metrics(tmp_path, World.alone(), dashboard=board, samples=True, **options)
    kind: Any
    for kind in get_args(Fault):
        lines.fault(kind, 1, loss=math.nan, own_loss=math.inf, grad_norm=1.0, batch=batch)
    counted: dict[str, Any] = {"epoch": 0.5, "samples": 2, "rates": {"lr": 0.1}, "grad_norm": 1.0}
    lines.update(report, batch, step=1, seconds=2.0, wait_seconds=1.0, **counted)
    lines.close()
    drawn = [[0, 5], [2, 1]]
    *faults, step = [line.values() for line in sound_lines(tmp_path / "metrics.jsonl")]
    told = {"fault/loss": "nan", "fault/grad_norm": "1.0", "by_rank": ["inf"], "samples": drawn}
    assert faults == [{"step": 1, "fault": kind, **told} for kind in get_args(Fault)]
    assert (step["loss"], step["loss/demi"], step["samples"], step["lr"]) == (2.0, 1.0, 2, 0.1)
    path = tmp_path / "samples" / "rank_00000.jsonl"
    assert [line.values() for line in sound_lines(path)] == [{"step": 1, "samples": drawn}]
    text = (tmp_path / "metrics.jsonl").read_text() + path.read_text()
    assert len(text.splitlines()) == 5 and all(line.startswith('{"format": 1, ') for line in text.splitlines())
    ((shown,), _) = board.record.call_args
    assert shown["loss"] == 2.0 and "format" not in shown
