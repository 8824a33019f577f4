"""The console script: a map of all commands, and each of them the module that `python -m` runs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from launch.barista import COMMANDS, GROUPS, main, overview
from tests import ROOT

MARK = 'if __name__ == "__main__":'
# Started by other commands, or by whoever develops barista.
INNER = {"launch.node", "launch.barista", "launch.reference", "trainer.config.reference"}
INNER |= {"trainer.qualification.measure"}


def test_every_command_is_on_the_map() -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in ("data", "models", "trainer", "launch")
        for path in (ROOT / package).rglob("*.py")
        if MARK in path.read_text().splitlines()
    }
    assert modules - INNER == {command.module for command in COMMANDS.values()}
    assert len(COMMANDS) == sum(map(len, GROUPS.values()))


def test_the_map_names_and_explains_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown == overview() + "\n"
    assert max(map(len, shown.splitlines())) <= 100
    for name, command in COMMANDS.items():
        assert f"  {name} " in shown and command.help in shown


def test_without_a_command_the_map_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (overview() + "\n", "")


@pytest.mark.parametrize("name", ["finetun", "x" * 5000])
def test_an_unknown_command_is_a_user_error(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert f"no command '{name[:40]}'" in shown.err and "barista --help" in shown.err and len(shown.err) < 200


def test_the_script_is_installed_under_this_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"barista": "launch.barista:main"}


@pytest.mark.processes
def test_a_command_ends_as_its_module_does(tmp_path: Path) -> None:
    """The same output and exit code, of a run folder that is none, and of a table of no runs."""
    for arguments in (["status", str(tmp_path)], ["status", "--help"], ["plan", "no-such-recipe.toml"]):
        module = COMMANDS[arguments[0]].module
        ends = [
            subprocess.run(
                [sys.executable, "-m", *command, *arguments[1:]], cwd=ROOT, capture_output=True, text=True, check=False
            )
            for command in (["launch.barista", arguments[0]], [module])
        ]
        assert ends[0].returncode == ends[1].returncode
        assert (ends[0].stdout, ends[0].stderr) == (ends[1].stdout, ends[1].stderr)
