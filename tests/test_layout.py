"""The direction of imports: trainer may import data and models; launch may import only torch-free parts."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from trainer.config.load import as_toml, load_recipe

OURS = ("data", "models", "trainer", "launch", "tests")
GROUND = "data.ground"
ALLOWED = {
    "data": {"data"},
    # data.model_folders knows a transformer's place in its folder, which weights and tokenizer share.
    "models": {"models", "data.model_folders", GROUND},
    "trainer": {"data", "models", "trainer"},
    # All of these are torch-free. The costs are shared so that a plan and a run's metrics count the same operations.
    "launch": {
        "launch",
        "trainer.config",
        "trainer.costs.counts",
        "trainer.costs.exchange",
        "trainer.monitoring.lines",
        "trainer.monitoring.names",
        "trainer.costs.gpus",
        "trainer.costs.layers",
        "trainer.costs.objective_costs",
        "trainer.costs.parameters",
        "trainer.costs.shapes",
        "trainer.qualification.lines",
        "trainer.resilience.run_lock",
        "models.sizes",
        "data.minilm",
        GROUND,
    },
}
# Nobody finds anything in a folder with more modules than this.
MOST_MODULES = 26


def imported_modules(path: Path) -> set[str]:
    """Absolute names of our own modules that a file imports."""
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


def rooms_and_arrows(folder: Path) -> dict[str, set[str]]:
    """Room -> the other rooms that it imports from, for all rooms of a checkout.

    A room is a folder below a package; a module at a package's own level is a room by itself.
    """
    modules = {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): path
        for package in ALLOWED
        for path in sorted((folder / package).rglob("*.py"))
    }

    def room(module: str) -> str:
        parts = module.split(".")
        return module if len(parts) <= 2 else ".".join(parts[:-1])

    arrows: dict[str, set[str]] = {room(module): set() for module in modules}
    for module, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                named = {f"{node.module}.{each.name}" for each in node.names}
                targets = (named & modules.keys()) | ({node.module} & modules.keys())
                arrows[room(module)] |= {room(target) for target in targets} - {room(module)}
    return arrows


def circle_in(arrows: dict[str, set[str]]) -> list[str]:
    """The rooms that import each other in a circle; empty if there is no circle."""
    left = {room: set(others) for room, others in arrows.items()}
    while ends := [room for room, others in left.items() if not others & left.keys()]:
        for room in ends:
            del left[room]
    return sorted(left)


def test_no_rooms_import_each_other_in_a_circle():
    arrows = rooms_and_arrows(ROOT)
    assert "trainer.losses" in arrows["trainer.objectives"], "arrows between rooms are seen"
    assert circle_in(arrows) == []


def test_a_circle_is_noticed(tmp_path):
    """Negative control."""
    for package in ALLOWED:
        (tmp_path / package / "room").mkdir(parents=True)
    (tmp_path / "data" / "a.py").write_text("def late():\n    from data.room.b import B\n")
    (tmp_path / "data" / "room" / "b.py").write_text("from data import a\n")
    assert circle_in(rooms_and_arrows(tmp_path)) == ["data.a", "data.room"]


def test_no_import_of_ours_is_hidden():
    """Imports stand at the top of a file, where everybody sees them; `if TYPE_CHECKING` and functions hide them."""
    # mteb takes seconds to import, and most installations lack it.
    allowed = {("trainer/evaluate.py", "trainer.evaluation.mteb_model")}
    hidden = set()
    for package in ALLOWED:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text("utf-8"))
            for node in ast.walk(tree):
                ours = isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS
                if ours and node not in tree.body:
                    hidden.add((str(path.relative_to(ROOT)), node.module))
    assert hidden == allowed


def test_no_folder_is_an_attic():
    folders = {path.parent for package in ALLOWED for path in (ROOT / package).rglob("*.py")}
    counted = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders}
    assert max(counted.values()) <= MOST_MODULES, counted


def test_a_wrong_import_is_noticed(tmp_path):
    """Negative control."""
    (tmp_path / "bad.py").write_text("from trainer.loop import train\nimport numpy\n")
    assert imported_modules(tmp_path / "bad.py") == {"trainer.loop"}


HEAVY = {"torch", "transformers", "deepspeed", "numpy", "tensorboard"}
ON_LOGIN_NODES = {
    "checking a recipe": "from trainer.config.load import load_recipe; load_recipe('launch/recipes/srl_nli.toml')",
    "planning": "from launch.plan import main; assert main(['launch/recipes/smae_bert_base_fineweb.toml']) == 0",
    "submitting": "import launch.node; from launch.submit import main; assert main(['launch/recipes/srl_nli.toml', "
    "'--after=1', '--nodes=1', '--gpus-per-node=1', '--dry-run']) == 0",
    "status": "from launch.status import main; assert main(['RUN']) == 0",
}


def run_without_heavy_modules(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new Python process, which fails if the code imports modules that only compute nodes have."""
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
