"""The lanes of the tests, and the guard that fails a test which starts a process without declaring it.

    fast     starts no process
    launch   starts processes of its own, or is the one real launch of its kind
    full     the full products of cases: on several ranks, or too long to wait for

A test declares what it starts by a fixture or by the mark of the same name: `processes`, or `launcher` for several
ranks, forked or under a real launcher. A fixture that one of its fixtures uses counts too. The lane follows from the
declarations.
`@pytest.mark.launch` and `@pytest.mark.full` move a test to another lane, but no test can be marked `fast`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest

RANKS_START = "tests.ranks"  # the audit event by which tests/ranks.py tells of its start

LANES = {
    "fast": "starts no process (set by the fixtures that a test uses, never by hand)",
    "launch": "starts processes, or is the one real launch of its kind",
    "full": "the products: on several ranks, or too long to wait for",
}
# The names of the fixtures and marks by which a test declares what it starts.
DECLARATIONS = {
    "processes": "starts processes of its own",
    "launcher": "starts several ranks, the real launcher, a Slurm cluster, or hosts",
}
# Slurm's commands are left out: most tests use stand-ins, and the fixture of a real cluster declares itself.
LAUNCHERS = {"deepspeed", "torchrun"}
# What matplotlib asks once on each machine for its fonts, in whichever test imports it first.
FONT_LISTS = {"fc-list", "system_profiler"}
# The audit events that Python raises when it starts a process. Only multiprocessing's spawn raises none.
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", RANKS_START}


def crossed(**factors: Sequence[Any]) -> tuple[list[str], list[Any]]:
    """Names and cases of a product, for parametrize: `@pytest.mark.parametrize(*crossed(size=[1, 2], way=["a", "b"]))`.

    The case of all first values stays in the test's own lane, with the cases that differ from it in one or two factors.
    Cases that differ in three or more factors go to the lane `full`, because a mistake rarely needs so many at once. So
    give the values that reach most of the code first.
    """
    cases = []
    for values in product(*factors.values()):
        apart = sum(value is not first[0] for value, first in zip(values, factors.values(), strict=True))
        marks = pytest.mark.full if apart > 2 else ()
        cases.append(pytest.param(*values, id="-".join(map(str, values)), marks=marks))
    return list(factors), cases


# Every test that was collected, including the deselected ones.
COLLECTED = pytest.StashKey[list[pytest.Item]]()


def declared_by(item: pytest.Item) -> set[str]:
    """The declarations of a test, by its fixtures and marks."""
    names = {*getattr(item, "fixturenames", ()), *(mark.name for mark in item.iter_markers())}
    return names & DECLARATIONS.keys()


class LaneError(ValueError):
    """A test is marked for a lane that is not its own."""


def lane_of(declared: Collection[str], marks: Collection[str]) -> str:
    """The one lane of a test with these declarations and marks."""
    by_hand = sorted(LANES.keys() & set(marks))
    if "fast" in by_hand:
        raise LaneError("is marked fast by hand: a test is in that lane when it declares no process")
    if len(by_hand) > 1:
        raise LaneError(f"is marked {' and '.join(by_hand)}: a test is in one lane")
    if by_hand:
        return by_hand[0]
    return "full" if "launcher" in declared else "launch" if "processes" in declared else "fast"


class Guard:
    """Fails a test that starts a process which it does not declare, wherever in the code it is started."""

    def __init__(self) -> None:
        self._declared: frozenset[str] | None = None
        self._refused: str | None = None

    def install(self) -> None:
        """Watch for the rest of this process: an audit hook cannot be removed."""
        sys.addaudithook(self._on_event)
        spawn = util.spawnv_passfds

        def told(path: Any, arguments: Any, handles: Any) -> int:
            self._on_event("subprocess.Popen", (path, arguments))
            return spawn(path, arguments, handles)

        util.spawnv_passfds = told

    @contextmanager
    def watching(self, declared: Collection[str]) -> Iterator[None]:
        """While it lasts, starting what is not declared fails the test, even if the test catches the error itself."""
        self._declared, self._refused = frozenset(declared), None
        try:
            yield
        finally:
            self._declared = None
        if self._refused is not None:
            pytest.fail(self._refused)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._declared is None or event not in STARTS:
            return
        needed = "launcher" if event == RANKS_START else "processes"
        if event == "subprocess.Popen":
            words = arguments[1] if isinstance(arguments[1], (list, tuple)) else [arguments[1]]
            names = [Path(os.fsdecode(word)).name for word in words[:2]]
            if names[0] in FONT_LISTS:
                return
            if LAUNCHERS & set(names):
                needed = "launcher"
        if not self._declared & {needed, "launcher"}:
            self._refused = f"this test starts a process that it does not declare by `{needed}`: {event} {arguments}"
            pytest.fail(self._refused)
