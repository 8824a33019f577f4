"""Cases, and their registration by `case` and `family` in modules named cases_*."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.faults.hostile.verdict import Check

if TYPE_CHECKING:
    from tests.faults.hostile.assets import Assets

Cause = int | str  # the number of a cause, or "own"
CAUSES = range(1, 27)
# Causes that cannot be a case of this program: the tests that cover them.
COVERED_ELSEWHERE = {
    # A study is killed while its training goes on, which takes more than the one process of a case.
    21: "tests/faults/test_orphans.py::test_training_ends_with_the_study_that_started_it",
}
_NAME = re.compile(r"[a-z]+(/[a-z0-9][a-z0-9.=+-]*)+")


@dataclass(frozen=True)
class Command:
    """One process: a module as `python -m` runs it, or any program if `module` is empty."""

    module: str
    arguments: tuple[str, ...] = ()
    # The paths below the working folder that it may write; everything else must stay as it was.
    outputs: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)  # over the case's; None removes
    stdin: bytes = b""
    # Run it like an ordinary user, who may not read and write everything, as root could.
    without_rights: bool = False
    limits: Mapping[int, int] = field(default_factory=dict)  # resource.RLIMIT_… -> its value
    own_process: bool = False
    meanwhile: Callable[[int], None] | None = None

    def but(self, *more: str, **changes: Any) -> Command:
        """The same command with more arguments or other fields."""
        return replace(self, arguments=(*self.arguments, *more), **changes)


Build = Callable[..., Command | Sequence[Command]]


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[Path, Assets], Command | Sequence[Command]]
    expect: tuple[Check, ...]
    cause: Cause = "own"
    quick: bool = False
    secrets: tuple[str, ...] = ()
    may_leave: tuple[str, ...] = ()  # patterns of paths below the working folder
    seconds: float = 60.0  # the time limit of its commands

    def __post_init__(self) -> None:
        assert _NAME.fullmatch(self.name), f"{self.name!r}: use lower-case words with hyphens, such as area/what-is-odd"
        assert self.expect, f"{self.name} expects nothing"


@dataclass(frozen=True)
class Row:
    name: str
    given: tuple[Any, ...]
    changes: Mapping[str, Any]


CASES: dict[str, Case] = {}


def case(name: str, *expect: Check, **fields: Any) -> Callable[[Build], Build]:
    """Register the decorated `build(folder, assets)` as a case. `fields`: further fields of Case."""

    def register(build: Build) -> Build:
        _add(Case(name, build, expect, **fields))
        return build

    return register


def row(name: str, *given: Any, **changes: Any) -> Row:
    """One member of a family: its name, the arguments for `build`, and the fields that differ (expect=, cause=, …)."""
    return Row(name, given, changes)


def family(prefix: str, rows: Iterable[Row], *expect: Check, **fields: Any) -> Callable[[Build], Build]:
    """Register `build(folder, assets, *given)` once per row, as PREFIX/ROW; a row's own fields override `fields`."""

    def register(build: Build) -> Build:
        for each in rows:
            values = {"expect": expect, **fields, **each.changes}
            if isinstance(values["expect"], Check):
                values["expect"] = (values["expect"],)
            _add(Case(f"{prefix}/{each.name}", _bound(build, each.given), **values))
        return build

    return register


def _bound(build: Build, given: tuple[Any, ...]) -> Build:
    return lambda folder, assets: build(folder, assets, *given)


def _add(new: Case) -> None:
    assert new.name not in CASES, f"two cases are named {new.name}"
    CASES[new.name] = new


def load_cases() -> list[Case]:
    """All cases of the package's modules, in their order."""
    package = importlib.import_module(__package__)
    for module in sorted(each.name for each in pkgutil.iter_modules(package.__path__)):
        if module.startswith("cases_"):
            importlib.import_module(f"{__package__}.{module}")
    return list(CASES.values())
