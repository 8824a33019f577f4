"""Commands end with the process that runs them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from tests import ROOT

pytestmark = pytest.mark.processes

# As the deepspeed command does: it starts a launcher, which starts a rank; all are told apart by what they write.
STARTS = """
import os, signal, subprocess, sys, time
depth = int(sys.argv[1])
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[2], str(depth - 1), sys.argv[2], sys.argv[3]])
elif sys.argv[3] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(2, b".")
time.sleep(600)
"""
CALLS = """
import sys
from launch import calls
from data.ground.command import exit_code_of

depth, more, kind, patience = sys.argv[2:]
calls.PATIENCE_SECONDS = float(patience)
command = [sys.executable, "-c", sys.argv[1], depth, sys.argv[1], more]
with calls.ends_all_it_started():
    code = exit_code_of(lambda: calls.call(command, interactive=kind == "interactive"))
sys.exit(code)
"""


class Started:
    """A process with a command of so many processes below it, which all hold the writing end of a pipe."""

    def __init__(self, processes: int, *, more: str = "", kind: str = "", patience: float = 30.0) -> None:
        self.told, writing = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", CALLS, STARTS, str(processes - 1), more, kind, str(patience)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=writing,
        )
        os.close(writing)
        self.wait_for(processes)

    def wait_for(self, processes: int) -> None:
        said = b""
        while len(said) < processes:
            part = os.read(self.told, processes - len(said))
            assert part, "they ended before they were asked to"
            said += part

    def all_end(self) -> bool:
        """Whether nobody holds the pipe any longer."""
        ready, _, _ = select.select([self.told], [], [], 60)
        return bool(ready) and os.read(self.told, 1) == b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_all_that_was_started(number: signal.Signals) -> None:
    started = Started(3)
    started.process.send_signal(number)
    assert started.process.wait(timeout=60) == 128 + number
    assert started.all_end()


def test_what_does_not_listen_is_killed() -> None:
    started = Started(2, more="deaf", patience=0.1)
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(timeout=60) == 143
    assert started.all_end()


def test_the_part_that_asks_ends_too() -> None:
    """It shares the terminal, and so the group, of the process that asks."""
    started = Started(1, kind="interactive")
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(timeout=60) == 143
    assert started.all_end()


def test_a_command_does_not_outlive_a_killed_process() -> None:
    """Training's ranks see for themselves that their launcher is gone (tests/trainer/resilience/test_stopping.py)."""
    started = Started(1)
    started.process.kill()
    assert started.process.wait(timeout=60) == -signal.SIGKILL
    assert started.all_end()
