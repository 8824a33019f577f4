"""The direction of imports: trainer knows data and models, launch the torch-free parts."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

OURS = ("data", "models", "trainer", "launch", "tests")
# How files are read, what errors are, what is hidden, and how commands end: the ground that every package stands on.
ENDS = ("data.command", "data.errors", "data.files", "data.records", "data.secrets")
ALLOWED = {
    "data": {"data"},
    "models": {"models", *ENDS},
    "trainer": {"data", "models", "trainer"},
    # All torch-free; the counts, so that a plan and a run's metrics cannot disagree about operations.
    "launch": {"launch", "trainer.config", "trainer.counts", "models.sizes", *ENDS},
}


def imported_modules(path: Path) -> set[str]:
    """Absolute names of the modules of ours that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; use absolute imports"
            names.add(node.module or "")
    return {name for name in names if name.split(".")[0] in OURS}


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_run_in_one_direction(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        for name in imported_modules(path):
            inside = any(name == allowed or name.startswith(allowed + ".") for allowed in ALLOWED[package])
            assert inside, f"{path.relative_to(ROOT)} imports {name}"


def test_a_wrong_import_is_noticed(tmp_path):
    """Negative control."""
    (tmp_path / "bad.py").write_text("from trainer.loop import train\nimport numpy\n")
    assert imported_modules(tmp_path / "bad.py") == {"trainer.loop"}


def test_recipes_are_checked_without_torch():
    """Login nodes have no GPU stack: reading and checking a recipe must not import torch or transformers."""
    code = (
        "import sys; from trainer.config import load_recipe; load_recipe('launch/recipes/srl_nli.toml');"
        "heavy = {'torch', 'transformers', 'deepspeed', 'numpy'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
