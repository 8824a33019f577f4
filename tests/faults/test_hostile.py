"""Each command must end with one sentence or a result, and leave clean folders; the short form has every cause."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.hostile.case import CAUSES, COVERED_ELSEWHERE, load_cases
from tests.faults.hostile.process import ROOT
from tests.faults.hostile.runner import MUST_BE_0

pytestmark = pytest.mark.processes


def test_no_hostile_input_ends_in_a_traceback_in_silence_or_in_litter(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.faults.hostile", "--quick", "--json", str(figures)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert figures.exists(), ended.stdout + ended.stderr
    values = json.loads(figures.read_bytes())
    assert {name: values[name] for name in MUST_BE_0} == dict.fromkeys(MUST_BE_0, 0), ended.stdout
    assert ended.returncode == 0 and values["cases"] == sum(each.quick for each in load_cases())


def test_the_short_form_has_a_case_of_every_area() -> None:
    cases = load_cases()
    assert {each.name.split("/")[0] for each in cases if each.quick} == {each.name.split("/")[0] for each in cases}


def test_the_short_form_and_the_tests_named_cover_every_cause() -> None:
    quick = {each.cause for each in load_cases() if each.quick}
    assert (quick | COVERED_ELSEWHERE.keys()) - {"own"} == set(CAUSES)
    for named in COVERED_ELSEWHERE.values():
        file, name = named.split("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}, f"no test is {named}"
