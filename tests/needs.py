"""Many cases in one launch, because a launch takes ten seconds, but only the cases that the selected tests need.

A test names its cases, and the names may contain its parameters: `@pytest.mark.needs("{name}-zero{stage}")`. The
module's fixture that launches asks `needed` for the cases of all selected tests. Each test gets only its `own` cases
from a fixture, so that a case which it forgot to name is missing always, not only when the test runs by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import pytest

Value = TypeVar("Value")


def needs_of(item: pytest.Item) -> set[str]:
    """The names of the cases that a test needs."""
    callspec = getattr(item, "callspec", None)
    parameters = {} if callspec is None else callspec.params
    return {name.format(**parameters) for mark in item.iter_markers("needs") for name in mark.args}


def needed(request: pytest.FixtureRequest) -> set[str]:
    """The cases of all selected tests that use the fixture which asks."""
    users = (
        item
        for item in request.session.items
        if request.node in item.listchain() and request.fixturename in getattr(item, "fixturenames", ())
    )
    return set().union(*map(needs_of, users))


def own(request: pytest.FixtureRequest, cases: Mapping[str, Value]) -> dict[str, Value]:
    """The cases that the test which asks has named."""
    return {name: cases[name] for name in needs_of(request.node)}


class Lazy(dict[str, Value]):
    """A dict that computes a value when it is first asked for."""

    def __init__(self, compute: Callable[[str], Value]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, name: str) -> Value:
        self[name] = value = self._compute(name)
        return value
