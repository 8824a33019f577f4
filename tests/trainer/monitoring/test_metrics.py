"""metrics.jsonl on a disk that is full for a while, and what of it a resumed run keeps."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import unittest.mock
from pathlib import Path
from typing import Any

import pytest

from trainer.distributed import World
from trainer.monitoring import metrics
from trainer.monitoring.metrics import Lines, Metrics, forget_after


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
    assert found == {"step": 3, "evaluation/a/spearman/1x16": None, "evaluation/b/spearman/1x16": 0.5}
    assert json.loads(saved, parse_constant=pytest.fail)["checkpoint/seconds"] is None
    assert board.record.call_args_list[0].args == (found,)
    assert "NaN" in json.dumps(scores)
