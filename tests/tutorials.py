"""Tutorials as programs: the blocks of a page in docs/tutorials, and a folder in which they run as a reader runs them.

A page has blocks of these languages, and only `sh` and `python` are run one after the other:

    sh        commands that end
    python    a program of its own
    console   `$ command`, of a program that serves until it is stopped
    text      what is printed
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests import ROOT
from tests.launcher import run_process

PAGES = ROOT / "docs" / "tutorials"
LANGUAGES = {"sh", "python", "console", "text"}
# What a checkout has in its folder and the commands read.
CHECKOUT = ("data", "ds_configs", "launch", "models", "trainer")

_BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
_NEEDS = re.compile(r"^You need (?:.+\n)+", re.MULTILINE)
_OTHER_PAGE = re.compile(r"\]\((?P<name>\w+)\.md(?:#[\w-]+)?\)")
_OUTPUT = re.compile(r"\bruns/tutorials/[\w./-]*\w(?![\w./-]*\*)")  # a pattern with * is no name
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_LONGEST_SECONDS = 1800.0  # of a page on a busy machine; the pages take one to three minutes of CPU time


@dataclass(frozen=True)
class Block:
    language: str
    code: str


@dataclass(frozen=True)
class Tutorial:
    """One page, by the name of its file."""

    name: str
    page: str

    @classmethod
    def read(cls, name: str) -> Tutorial:
        return cls(name, (PAGES / f"{name}.md").read_text("utf-8"))

    @property
    def blocks(self) -> list[Block]:
        return [Block(found["language"], found["code"]) for found in _BLOCK.finditer(self.page)]

    @property
    def needs(self) -> list[str]:
        """The pages that the paragraph "You need …" links to."""
        paragraph = _NEEDS.search(self.page)
        return [found["name"] for found in _OTHER_PAGE.finditer(paragraph[0])] if paragraph else []

    @property
    def outputs(self) -> set[str]:
        """The files and folders that the page names."""
        return set(_OUTPUT.findall(self.page))

    @property
    def table(self) -> dict[str, list[float]]:
        """The numbers of the page's last table, by the first cell of the row."""
        tables: list[dict[str, list[float]]] = [{}]
        for line in self.page.splitlines():
            if not line.startswith("|"):
                tables += [{}] if tables[-1] else []
            elif cells := [cell.strip() for cell in line.strip("|").split("|")]:
                numbers = [_NUMBER.match(cell) for cell in cells[1:]]
                if any(numbers):
                    tables[-1][cells[0]] = [float(number[0]) for number in numbers if number]
        return next((table for table in reversed(tables) if table), {})

    def script(self, folder: Path) -> str:
        """A bash script of the blocks that are run. Python's go to files in `folder`, read as if they were typed."""
        lines = ["set -euo pipefail"]
        for number, block in enumerate(self.blocks):
            if block.language == "sh":
                lines.append(block.code)
            elif block.language == "python":
                path = folder / f"{self.name}-{number}.py"
                path.write_text(block.code)
                lines.append(f"python - < {shlex.quote(str(path))}")
        return "\n".join(lines) + "\n"


@dataclass
class Workplace:
    """A folder as a fresh checkout is: the code, the environment, and no results."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.checkout.mkdir(parents=True)
        self.scripts.mkdir()
        for name in CHECKOUT:
            (self.checkout / name).symlink_to(ROOT / name)
        (self.checkout / ".venv").symlink_to(sys.prefix)

    @property
    def checkout(self) -> Path:
        return self.folder / "checkout"

    @property
    def scripts(self) -> Path:
        return self.folder / "scripts"

    def run(self, name: str, **environment: str) -> None:
        """Run a page's commands as they are written, after those of the pages that it needs, each page once."""
        if name in self._done:
            return
        tutorial = Tutorial.read(name)
        for other in tutorial.needs:
            self.run(other)
        script = tutorial.script(self.scripts)
        run_process(
            ["bash", "-c", script], cwd=self.checkout, environment=environment, timeout_seconds=_LONGEST_SECONDS
        )
        self._done.add(name)
