"""The lanes of the tests: which test runs in which, and what keeps processes out of the tests that declare none.

    fast     starts no process
    launch   starts processes of its own, or is the one real launch of its kind
    full     the products: under the real launcher, or too long to wait for

A test declares what it starts by a fixture, its own or one that its fixtures use, or by the mark of the same name:
`processes`, or `launcher` for the real launchers of several ranks. Its lane follows from that.
`@pytest.mark.launch` and `@pytest.mark.full` move a test to another lane, but none can be marked `fast`.
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

LANES = {
    "fast": "starts no process (set by the fixtures that a test uses, never by hand)",
    "launch": "starts processes, or is the one real launch of its kind",
    "full": "the products: under the real launcher, or too long to wait for",
}
# What a test may declare that it starts: fixtures of these names, and marks.
DECLARATIONS = {
    "processes": "starts processes of its own",
    "launcher": "starts the real launcher of several ranks, a Slurm cluster, or hosts",
}
# Not those of Slurm: its commands are stand-ins in most tests, and a real cluster is a fixture that declares itself.
LAUNCHERS = {"deepspeed", "torchrun"}
# What Python tells its audit hooks when it starts a process. multiprocessing's spawn alone tells nothing.
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"}


def crossed(**factors: Sequence[Any]) -> tuple[list[str], list[Any]]:
    """Names and cases of a product, for parametrize: `@pytest.mark.parametrize(*crossed(size=[1, 2], way=["a", "b"]))`.

    The case of all first values, and those that differ from it in one factor or two, stay in the test's own lane; where
    three factors must meet, which is rarely what breaks, is left to the lane `full`. So the values that reach most of
    the code come first.
    """
    cases = []
    for values in product(*factors.values()):
        apart = sum(value is not first[0] for value, first in zip(values, factors.values(), strict=True))
        marks = pytest.mark.full if apart > 2 else ()
        cases.append(pytest.param(*values, id="-".join(map(str, values)), marks=marks))
    return list(factors), cases


# Every test that was collected, the deselected ones too.
COLLECTED = pytest.StashKey[list[pytest.Item]]()


def declared_by(item: pytest.Item) -> set[str]:
    """What a test declares that it starts."""
    names = {*getattr(item, "fixturenames", ()), *(mark.name for mark in item.iter_markers())}
    return names & DECLARATIONS.keys()


class LaneError(ValueError):
    """A test is marked for a lane that is not its own."""


def lane_of(declared: Collection[str], marks: Collection[str]) -> str:
    """The one lane of a test that declares this and has these marks."""
    by_hand = sorted(LANES.keys() & set(marks))
    if "fast" in by_hand:
        raise LaneError("is marked fast by hand: a test is in that lane when it declares no process")
    if len(by_hand) > 1:
        raise LaneError(f"is marked {' and '.join(by_hand)}: a test is in one lane")
    if by_hand:
        return by_hand[0]
    return "full" if "launcher" in declared else "launch" if "processes" in declared else "fast"


class Guard:
    """Fails the test that starts what it does not declare, wherever it starts it."""

    def __init__(self) -> None:
        self._declared: frozenset[str] | None = None
        self._refused: str | None = None

    def install(self) -> None:
        """For the rest of this process: an audit hook cannot be taken back."""
        sys.addaudithook(self._on_event)
        spawn = util.spawnv_passfds

        def told(path: Any, arguments: Any, handles: Any) -> int:
            self._on_event("subprocess.Popen", (path, arguments))
            return spawn(path, arguments, handles)

        util.spawnv_passfds = told

    @contextmanager
    def watching(self, declared: Collection[str]) -> Iterator[None]:
        """While it lasts, what is not declared fails, even where the failure itself is swallowed."""
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
        needed = "processes"
        if event == "subprocess.Popen":
            words = arguments[1] if isinstance(arguments[1], (list, tuple)) else [arguments[1]]
            if LAUNCHERS & {Path(os.fsdecode(word)).name for word in words[:2]}:
                needed = "launcher"
        if not self._declared & {needed, "launcher"}:
            self._refused = f"this test starts a process that it does not declare by `{needed}`: {event} {arguments}"
            pytest.fail(self._refused)
