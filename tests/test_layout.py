"""The direction of imports: trainer knows data and models, launch the torch-free parts."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from trainer.config import as_toml, load_recipe

OURS = ("data", "models", "trainer", "launch", "tests")
# How files are read, what errors are, what is hidden, and how commands end: the ground that every package stands on.
ENDS = ("data.command", "data.errors", "data.files", "data.records", "data.secrets")
ALLOWED = {
    "data": {"data"},
    # Where a transformer lies in its folder, for its weights as for its tokenizer.
    "models": {"models", "data.model_folders", *ENDS},
    "trainer": {"data", "models", "trainer"},
    # All torch-free; the counts, so that a plan and a run's metrics cannot disagree about operations.
    "launch": {"launch", "trainer.config", "trainer.counts", "models.sizes", "data.minilm", "data.parent_death", *ENDS},
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


HEAVY = {"torch", "transformers", "deepspeed", "numpy", "tensorboard"}
ON_LOGIN_NODES = {
    "checking a recipe": "from trainer.config import load_recipe; load_recipe('launch/recipes/srl_nli.toml')",
    "planning": "from launch.plan import main; assert main(['launch/recipes/smae_bert_base_fineweb.toml']) == 0",
    "submitting": "import launch.node; from launch.submit import main; assert main(['launch/recipes/srl_nli.toml', "
    "'--after=1', '--nodes=1', '--gpus-per-node=1', '--dry-run']) == 0",
    "status": "from launch.status import main; assert main(['RUN']) == 0",
}


def run_without_heavy_modules(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python of its own, which fails if it imports what only compute nodes have."""
    asked = (
        f"import sys\n{code}\nheavy = set({HEAVY!r}) & set(sys.modules)\nsys.exit(f'imports {{heavy}}' if heavy else 0)"
    )
    return subprocess.run([sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.processes
@pytest.mark.parametrize("what", ON_LOGIN_NODES)
def test_login_nodes_need_no_torch(what, tmp_path):
    (tmp_path / "recipe.toml").write_text(as_toml(load_recipe(ROOT / "launch/recipes/srl_nli.toml")))
    done = run_without_heavy_modules(ON_LOGIN_NODES[what].replace("RUN", str(tmp_path)))
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
def test_a_heavy_import_is_noticed():
    """Negative control."""
    assert "imports {'numpy'}" in run_without_heavy_modules("import numpy").stderr
