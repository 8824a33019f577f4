"""How commands end: a sentence and a code for what a user can fix, a traceback for what only we can."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from data.ground.command import INTERRUPTED_CODE, exit_code_of, printable
from data.ground.errors import CommandEnd, ConfigError, DataError
from trainer.resilience.anomalies import GaveUp
from trainer.resilience.stopping import Stopped


def ending(error: BaseException):
    def main() -> None:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (DataError("file a is empty;\n fill it"), 2, "error: file a is empty; fill it\n"),
        (ConfigError("train.steps = -1 must be at least 0"), 2, "error: train.steps = -1 must be at least 0\n"),
        (GaveUp("3 steps in a row were skipped"), 3, "error: 3 steps in a row were skipped\n"),
        (Stopped("stopped after step 4"), 75, "stopped after step 4\n"),
        (CommandEnd("the run failed"), 1, "error: the run failed\n"),
        (KeyboardInterrupt(), INTERRUPTED_CODE, ""),
        (
            PermissionError(errno.EACCES, "Permission denied", "runs/a"),
            2,
            "error: runs/a: Permission denied; give this",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            2,
            "error: a disk: No space left on device; free some space",
        ),
        (MemoryError("8 TiB"), 2, "error: the memory does not suffice (8 TiB)"),
        (DataError("file \x1b[31mred"), 2, "error: file \\x1b[31mred\n"),
        (DataError("shard http://u:s3cr3t@h/a is gone"), 2, "error: shard http://***@h/a is gone\n"),
        (DataError(f"{Path('http://u:s3cr3t@h/a')} is no folder"), 2, "error: http:/***@h/a is no folder\n"),
    ],
)
def test_an_end_is_one_line_and_a_code(error, code, said, capsys):
    assert exit_code_of(ending(error)) == code
    shown = capsys.readouterr().err
    assert shown.startswith(said) and shown.count("\n") == bool(said)


def test_a_line_for_a_terminal_holds_neither_secrets_nor_control_characters():
    assert printable("a\x1b[31m http://u:s3cr3t@h/a") == "a\\x1b[31m http://***@h/a"


@pytest.mark.parametrize(
    "error", [ValueError("ours"), OSError("ours"), ConnectionResetError(errno.ECONNRESET, "reset")]
)
def test_a_fault_of_the_program_keeps_its_traceback(error):
    """Negative control."""
    with pytest.raises(type(error)):
        exit_code_of(ending(error))


def test_a_command_without_a_code_ends_with_0():
    assert exit_code_of(lambda: None) == 0 == exit_code_of(lambda: "a path")
    assert exit_code_of(lambda: 4) == 4


def test_other_ranks_stop_without_a_word(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert exit_code_of(ending(Stopped("stopped"))) == 75
    assert capsys.readouterr().err == ""


def test_a_traceback_is_kept_where_it_is_wanted(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("BARISTA_TRACEBACK", str(tmp_path / "trace"))
    assert exit_code_of(ending(DataError("file a is empty"))) == 2
    assert (
        "Traceback" in (tmp_path / "trace").read_text()
        and "DataError: file a is empty" in (tmp_path / "trace").read_text()
    )
    monkeypatch.setenv("BARISTA_TRACEBACK", str(tmp_path / "absent" / "trace"))
    assert exit_code_of(ending(DataError("file a is empty"))) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.processes
def test_the_log_and_kept_tracebacks_hide_secrets(tmp_path):
    """In a process of its own, as the log is set up once."""
    code = (
        "import logging\nfrom data.ground.command import run_command\nfrom data.ground.errors import DataError\n"
        "def main():\n    logging.getLogger('a').warning('fetching %s', 'http://u:s3cr3t@h/a')\n"
        "    raise DataError('http://u:s3cr3t@h/a cannot be fetched')\nrun_command(main)"
    )
    kept = tmp_path / "tracebacks"
    environment = {**os.environ, "BARISTA_TRACEBACK": str(kept)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2 and "fetching http://***@h/a" in done.stderr
    assert "s3cr3t" not in done.stderr + kept.read_text() and "Traceback" in kept.read_text()


def test_nothing_is_made_that_everybody_may_change(tmp_path):
    before = os.umask(0)
    try:
        assert exit_code_of(lambda: (tmp_path / "a").touch()) == 0
        (tmp_path / "folder").mkdir()
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "folder")] == [0o664, 0o775]
