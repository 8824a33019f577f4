"""A rank that is alone watches itself, by its own clock; whole jobs are in test_stopping.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests import ROOT
from trainer.distributed import World
from trainer.resilience import watchdog
from trainer.resilience.processes import Process, ProcessorWaits, numbering
from trainer.resilience.watchdog import NEXT_BATCH, PATIENCE_SECONDS, Watchdog, neighbours_of

ALONE = World(0, 0, 1, torch.device("cpu"))


def at(phase: str, *, patient: bool, hang_seconds: float = 10.0) -> Watchdog:
    found = Watchdog(ALONE, hang_seconds=hang_seconds)
    found.heartbeat(phase, step=5, patient=patient)
    return found


@pytest.mark.parametrize(
    ("phase", "patient", "limit"),
    [
        (NEXT_BATCH, False, 10.0),
        ("forward", False, 10.0),
        (NEXT_BATCH, True, PATIENCE_SECONDS),
        ("evaluation", True, float("inf")),
        ("save", True, float("inf")),
        ("start", True, float("inf")),
        ("end of the run", True, float("inf")),
    ],
)
def test_how_long_a_rank_may_stand_still(phase: str, patient: bool, limit: float) -> None:
    found, now = at(phase, patient=patient), time.monotonic()
    assert found.stuck(now + min(limit, 1e9) - 1.0) is None
    said = found.stuck(now + limit + 1.0)
    if limit == float("inf"):
        assert said is None
    else:
        assert said is not None and f"at {phase!r} of step 5" in said and "has not got on" in said


def test_three_of_the_longest_pauses_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    found = at("forward", patient=False)
    now[0] += 20.0
    found.heartbeat("backward")
    assert found.stuck(now[0] + 59.0) is None and found.stuck(now[0] + 61.0) is not None


def test_only_processes_of_the_same_numbering_are_looked_at() -> None:
    """In containers with a PID namespace each, all ranks may have the number 1."""
    known = [("vm 4026531836", 1, 5.0), ("vm 4026532001", 1, 6.0), ("vm 4026531836", 2, 7.0)]
    assert neighbours_of(0, known) == {2: Process(2, 7.0)} and neighbours_of(1, known) == {}


def test_a_numbering_is_of_a_machine_and_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    own = numbering()
    assert own == numbering()
    with monkeypatch.context() as context:
        context.setattr(Path, "readlink", lambda path: Path("pid:[7]"))
        assert numbering() != own
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert numbering() != own


class LateStore(dict[str, bytes]):
    """A store in which the other rank appears after `SECONDS`: what waits for less than that fails."""

    SECONDS = 600.0

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if timeout.total_seconds() < self.SECONDS:
            raise RuntimeError("wait timeout")
        self.update({key: json.dumps(["elsewhere", 1, 1.0]).encode() for key in keys if key not in self})

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self[key] for key in keys]  # KeyError where nobody has waited for the key


def test_a_rank_that_comes_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining the process group may not wait for all ranks, of which one may still be reading its model."""
    store = LateStore()
    monkeypatch.setattr(watchdog.dist, "TCPStore", lambda *_, **__: None)
    monkeypatch.setattr(watchdog.dist, "PrefixStore", lambda *_: store)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    first = Watchdog(World(0, 0, 2, torch.device("cpu")), hang_seconds=10.0)
    monkeypatch.setattr(first, "_watch", lambda: None)
    first._thread = threading.Thread(target=first._watch)
    with first:
        assert "process/1" in store


class Starved:
    """Waits for a processor: `seconds` since it was last asked."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def since_last(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


@pytest.mark.parametrize(("starved", "ends"), [(0.0, True), (15.0, False)])
def test_time_without_a_processor_does_not_count(starved: float, ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "ProcessorWaits", lambda: Starved(starved))
    found, now = at("forward", patient=False), time.monotonic()
    assert (found.stuck(now + 20.0) is not None) is ends
    # What it waited before the last heartbeat excuses nothing afterwards.
    found.heartbeat("backward")
    assert found.stuck(now + 61.0) is not None


@pytest.mark.processes
def test_a_thread_that_gets_no_processor_is_seen_to_wait() -> None:
    """Two busy threads of different processes share one processor; each has to wait for the other."""
    spin = "import os, time\nos.sched_setaffinity(0, {%d})\nend = time.time() + 60\nwhile time.time() < end: pass"
    before, processor = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", spin % processor]) as other:
        try:
            os.sched_setaffinity(0, {processor})
            waits, waited, end = ProcessorWaits(), 0.0, time.monotonic() + 60
            while waited < 0.1 and time.monotonic() < end:
                waited += waits.since_last()
        finally:
            other.kill()
            os.sched_setaffinity(0, before)
    assert waited >= 0.1


@pytest.mark.processes
def test_it_says_what_is_amiss_with_loader_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    found, late = at(NEXT_BATCH, patient=False), time.monotonic() + 100.0
    said = found.stuck(late)
    assert said is not None and "loader worker" not in said
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as child:
        try:
            os.kill(child.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            said = found.stuck(late)
            assert said is not None and f"process {child.pid}, a loader worker, is stopped" in said
        finally:
            child.kill()
    usage = type("Usage", (), {"free": 3 * 1024})
    monkeypatch.setattr(watchdog.shutil, "disk_usage", lambda path: usage)
    said = found.stuck(late)
    assert said is not None and "/dev/shm" in said and "3 KiB left" in said


STUCK = """
import threading, torch
from trainer.resilience import watchdog
from trainer.distributed import World
watchdog.HEARTBEAT_SECONDS = 0.01
with watchdog.Watchdog(World(0, 0, 1, torch.device("cpu")), hang_seconds={hang_seconds}) as dog:
    dog.heartbeat("next batch", step=3, patient=False)
    if {hang_seconds}:
        threading.Event().wait()
print("left it")
"""


def watched(*, hang_seconds: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", STUCK.format(hang_seconds=hang_seconds)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.processes
def test_it_ends_the_process_by_name() -> None:
    ended = watched(hang_seconds=0.05)
    assert ended.returncode == watchdog.DIED_CODE and not ended.stdout
    assert "error: the run ends: it has not got on for " in ended.stderr


@pytest.mark.processes
def test_it_watches_nothing_where_no_limit_is_set() -> None:
    ended = watched(hang_seconds=0.0)
    assert (ended.returncode, ended.stdout) == (0, "left it\n"), ended.stderr
