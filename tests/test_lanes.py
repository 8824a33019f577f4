"""Every test is in one lane, and no test starts a process that it does not declare, in whatever way."""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.lanes import COLLECTED, LANES, LAUNCHERS, LaneError, crossed, declared_by, lane_of
from tests.launcher import launcher_command, run_process


def test_every_test_is_in_one_lane(request: pytest.FixtureRequest) -> None:
    """This covers all tests that were collected, including the deselected ones."""
    items = request.config.stash[COLLECTED]
    assert request.node in items
    for item in items:
        lanes = {mark.name for mark in item.iter_markers()} & LANES.keys()
        assert len(lanes) == 1, item.nodeid
        assert not ("fast" in lanes and declared_by(item)), item.nodeid


@pytest.mark.parametrize(
    ("declared", "marks", "lane"),
    [
        ((), (), "fast"),
        ((), ("parametrize", "full"), "full"),
        (("processes",), (), "launch"),
        (("processes",), ("full",), "full"),
        (("launcher",), (), "full"),
        (("processes", "launcher"), (), "full"),
        (("launcher",), ("launch",), "launch"),
    ],
)
def test_the_lane_follows_from_what_is_declared(declared: tuple[str, ...], marks: tuple[str, ...], lane: str) -> None:
    assert lane_of(declared, marks) == lane


@pytest.mark.parametrize(("marks", "reason"), [(("fast",), "fast by hand"), (("full", "launch"), "full and launch")])
def test_marks_that_contradict_are_refused(marks: tuple[str, ...], reason: str) -> None:
    with pytest.raises(LaneError, match=reason):
        lane_of((), marks)


def test_a_product_is_whole_and_its_corners_wait() -> None:
    names, cases = crossed(a=[1, 2], b=["x", "y", "z"], c=[None, True])
    assert names == ["a", "b", "c"] and len({case.values for case in cases}) == len(cases) == 12
    waiting = {case.values for case in cases if case.marks}
    assert waiting == {(2, "y", True), (2, "z", True)}


PLANTED = """
import multiprocessing, os, pathlib, subprocess, threading
import pytest

def fork():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)

def process(way):
    started = multiprocessing.get_context(way).Process(target=os.getpid)
    started.start()
    started.join()

def swallowed():
    try:
        subprocess.run(["true"])
    except BaseException:
        pass

def in_a_thread():
    thread = threading.Thread(target=swallowed)
    thread.start()
    thread.join()

WAYS = {
    "run": lambda: subprocess.run(["true"]),
    "shell": lambda: subprocess.run("true", shell=True),
    "system": lambda: os.system("true"),
    "fork": fork,
    "forked": lambda: process("fork"),
    "spawned": lambda: process("spawn"),
    "posix_spawn": lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0),
    "swallowed": swallowed,
    "in_a_thread": in_a_thread,
}

@pytest.mark.parametrize("way", WAYS)
def test_undeclared(way):
    WAYS[way]()

@pytest.mark.processes
@pytest.mark.parametrize("way", WAYS)
def test_by_mark(way):
    WAYS[way]()

def test_by_fixture(processes):
    WAYS["run"]()

@pytest.fixture(scope="module")
def started():
    WAYS["run"]()

@pytest.fixture(scope="module")
def declared_and_started(processes):
    WAYS["run"]()

def test_undeclared_fixture(started): ...
def test_declared_fixture(declared_and_started): ...

def start_launcher():
    subprocess.run([pathlib.Path(__file__).with_name("deepspeed"), "--num_gpus", "2"])

def test_undeclared_launcher():
    start_launcher()

@pytest.mark.processes
def test_launcher_declared_as_a_process():
    start_launcher()

@pytest.fixture
def launched(launcher):
    start_launcher()

def test_launcher(launched): ...

@pytest.mark.launch
def test_one_of_its_kind(launched): ...

def test_fonts_are_no_processes():
    subprocess.run([pathlib.Path(__file__).with_name("fc-list")])

def test_threads_are_no_processes():
    thread = threading.Thread(target=os.getpid)
    thread.start()
    thread.join()
"""
INNOCENT = {"test_fonts_are_no_processes", "test_threads_are_no_processes"}
WAYS = ("run", "shell", "system", "fork", "forked", "spawned", "posix_spawn", "swallowed", "in_a_thread")
UNDECLARED = {*(f"test_undeclared[{way}]" for way in WAYS), "test_undeclared_fixture", "test_undeclared_launcher"}
DECLARED = {*(f"test_by_mark[{way}]" for way in WAYS), "test_by_fixture", "test_declared_fixture"}


@pytest.fixture
def folder(processes: None, tmp_path: Path) -> Path:
    """A folder with the planted tests, and with programs that have only the names of a launcher and a list of fonts."""
    (tmp_path / "test_planted.py").write_text(PLANTED)
    for name in ("deepspeed", "fc-list"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def outcomes(folder: Path, *options: str) -> dict[str, str]:
    """The outcomes of the planted tests, run by a pytest of their own."""
    words = [sys.executable, "-m", "pytest", "--rootdir", str(folder), "-c", os.devnull, "-p", "no:cacheprovider"]
    words += ["--junitxml", str(folder / "report.xml"), *options, str(folder / "test_planted.py")]
    done = run_process(words, expect=None)
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
    cases = ET.parse(folder / "report.xml").getroot().iter("testcase")
    return {str(case.get("name")): next((child.tag for child in case), "passed") for case in cases}


def test_what_is_not_declared_fails(folder: Path) -> None:
    found = outcomes(folder, "-p", "tests.conftest")
    wrong = {*UNDECLARED, "test_launcher_declared_as_a_process"}
    assert {name for name, outcome in found.items() if outcome != "passed"} == wrong
    assert found.keys() - wrong == DECLARED | INNOCENT | {"test_launcher", "test_one_of_its_kind"}
    # Negative control: without our hooks, and with fixtures that do nothing, all planted tests start and pass.
    (folder / "conftest.py").write_text(
        "import pytest\n@pytest.fixture(scope='module')\ndef processes(): ...\nlauncher = processes"
    )
    control = outcomes(folder)
    assert control.keys() == found.keys() and set(control.values()) == {"passed"}


def test_the_planted_tests_have_their_lanes(folder: Path) -> None:
    """This also shows that `-m` sees the marks that the hook sets."""
    lanes = {
        "fast": UNDECLARED | INNOCENT,
        "launch": {*DECLARED, "test_launcher_declared_as_a_process", "test_one_of_its_kind"},
        "full": {"test_launcher"},
    }
    assert {lane: set(outcomes(folder, "-p", "tests.conftest", "-m", lane)) for lane in LANES} == lanes


def test_our_launcher_is_known_by_its_name() -> None:
    assert Path(launcher_command("a.module", ranks=2)[0]).name in LAUNCHERS
