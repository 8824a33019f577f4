"""Folders that appear whole or not at all, and places that are refused before anything is computed."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from data.ground.errors import UserError
from data.ground.options import count, real
from data.ground.whole_folder import check_file, check_place, written_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_whole_or_absent(tmp_path: Path) -> None:
    output = tmp_path / "above" / "out"
    with written_whole(output) as partial:
        (partial / "a").write_text("1")
        assert not output.exists()
    assert names(output) == ["a"] and output.stat().st_mode & 0o777 == 0o755
    with pytest.raises(ZeroDivisionError), written_whole(output) as partial:
        (partial / "b").write_text("2")
        _ = 1 / 0
    assert names(output) == ["a"] and names(output.parent) == ["out"]
    with written_whole(output) as partial:
        (partial / "b").write_text("2")
    assert names(output) == ["b"] and names(output.parent) == ["out"]


def test_what_the_disk_refuses_is_one_sentence(tmp_path: Path) -> None:
    sentence = r"out cannot be written \(No space left on device\); free"
    with pytest.raises(UserError, match=sentence), written_whole(tmp_path / "out"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not names(tmp_path)


def test_folders_of_killed_commands_are_removed_and_no_others(tmp_path: Path) -> None:
    for name in (".out.abcd1234.partial", ".out.abcd1234.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("half")
    others = [".other.abcd1234.partial", ".out.abcd1234.partial.txt", ".out.ABCD1234.partial", ".out.partial"]
    for name in others:
        (tmp_path / name).mkdir()
    with written_whole(tmp_path / "out"):
        pass
    assert names(tmp_path) == sorted([*others, "out"])


def test_a_command_that_still_writes_is_not_disturbed(tmp_path: Path) -> None:
    held = tmp_path / ".out.abcd1234.partial"
    held.mkdir()
    handle = os.open(held, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="being written by another command"), written_whole(tmp_path / "out"):
            pass
    finally:
        os.close(handle)
    assert names(tmp_path) == [held.name]


def test_places(tmp_path: Path) -> None:
    check_place(tmp_path / "new" / "deeper")
    check_file(tmp_path / "new" / "file.json", "--json")
    check_file(None, "--json")
    check_file(Path("/dev/stdout"), "--json")
    assert not names(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "round").symlink_to("round")
    for path in ("file/out", "file/deeper/out", "link", "round", "x" * 300):
        with pytest.raises(UserError, match="--output"):
            check_place(tmp_path / path)
    for path in ("", "file/a.json", "link/a.json", "round"):
        with pytest.raises(UserError, match="--json"):
            check_file(tmp_path / path, "--json")


def test_numbers_have_bounds() -> None:
    assert [count()("7"), count(least=0)("0"), count(least=-3)("-3")] == [7, 0, -3]
    for text in ("0", "-1", "²", "٣", "1.0", "", "1_000", "9" * 30, "nan"):
        with pytest.raises(Exception, match="whole number"):
            count()(text)
    assert [real()("-1e3"), real(least=0)("0"), real(above=0, below=1)("0.5")] == [-1000, 0, 0.5]
    for text, type_ in (("nan", real()), ("inf", real()), ("x", real()), ("0", real(above=0)), ("1", real(below=1))):
        with pytest.raises(Exception, match="finite number"):
            type_(text)
