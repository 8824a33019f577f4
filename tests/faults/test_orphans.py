"""Ranks stop even if their launcher was killed before they could look for it.

Processes stand in for the launchers and have the names by which `StopRequests` knows them; the rank runs the listener
of a real rank. It begins to listen only after the launcher's death has given it another parent. Negative control: live
launchers ask for nothing, whatever is above them.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import ROOT

pytestmark = pytest.mark.processes

# It waits for its stdin, which closes when the test ends.
RANK = """
import os, sys, time, psutil
from trainer.resilience.stopping import StopRequests
os.environ["RANK"] = "0"
def line(): return [process.pid for process in psutil.Process().parents()]
before = line()
print("up", flush=True)
sys.stdin.readline()
while {orphaned} and line() == before: pass
with StopRequests() as stops:
    deadline = time.monotonic() + {patience_seconds}
    while stops.wanted() is None and time.monotonic() < deadline: time.sleep(0.05)
    print(stops.wanted(), flush=True)
"""
# It prints its name and process id, so that the test can kill it, and starts the code in its further arguments.
PARENT = """
import os, subprocess, sys
name, rest = sys.argv[1], sys.argv[2:]
print(name, os.getpid(), flush=True)
subprocess.run([sys.executable, "-c", *rest])
"""


def listen(kill: str | None, *, parents: list[str], local_rank: bool = True, patience_seconds: float = 1.5) -> str:
    """The request that a rank below `parents` gets if the parent named `kill` was killed before the rank listened."""
    rank = RANK.format(orphaned=kill is not None, patience_seconds=patience_seconds)
    command = [sys.executable, "-c"]
    for name in parents:
        command += [PARENT, name]
    command += [rank, *(["--local_rank=0"] if local_rank else [])]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as top:
        assert top.stdin is not None and top.stdout is not None
        pids = dict(top.stdout.readline().split() for _ in parents)
        assert top.stdout.readline() == "up\n"
        if kill is not None:
            subprocess.run(["kill", "-9", pids[kill]], check=True)
        top.stdin.write("\n")
        top.stdin.flush()
        return top.stdout.readline().strip()


LAUNCH = "deepspeed.launcher.launch"


@pytest.mark.parametrize("killed", ["bin/deepspeed", LAUNCH])
def test_a_launcher_that_died_before_the_rank_listened_is_gone(killed: str) -> None:
    assert listen(killed, parents=["bin/deepspeed", LAUNCH], patience_seconds=60) == "launcher gone"


@pytest.mark.parametrize(
    ("parents", "local_rank"),
    [
        (["bin/deepspeed", LAUNCH], True),
        (["wrapper", LAUNCH], True),  # as over ssh
        ([LAUNCH], True),  # the launcher is the first process of its session
        (["bin/deepspeed", LAUNCH, "wrapper"], True),
        (["srun"], False),
    ],
)
def test_launchers_that_live_ask_for_nothing(parents: list[str], local_rank: bool) -> None:
    assert listen(None, parents=parents, local_rank=local_rank) == "None"


def test_a_shell_that_goes_is_no_launcher() -> None:
    """A shell goes after nohup, when ranks were started by hand."""
    assert listen("shell", parents=["shell"], local_rank=False) == "None"


STARTED = """
import os, subprocess, sys
from trainer.resilience.stopping import started_by_me
print("study", os.getpid(), flush=True)
os.environ.pop("RANK", None)
subprocess.run([sys.executable, "-c", {rank!r}], env=os.environ | started_by_me())
"""


@pytest.mark.parametrize("killed", [True, False])
def test_training_ends_with_the_study_that_started_it(killed: bool) -> None:
    """RANK is unset, so that the run looks for no launcher. Negative control: a study that lives asks for nothing."""
    rank = RANK.format(orphaned=killed, patience_seconds=60 if killed else 1.5)
    rank = rank.replace('os.environ["RANK"] = "0"', "")
    code = STARTED.format(rank=rank)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as top:
        assert top.stdin is not None and top.stdout is not None
        pid = top.stdout.readline().split()[1]
        assert top.stdout.readline() == "up\n"
        if killed:
            subprocess.run(["kill", "-9", pid], check=True)
        top.stdin.write("\n")
        top.stdin.flush()
        assert top.stdout.readline().strip() == ("launcher gone" if killed else "None")
