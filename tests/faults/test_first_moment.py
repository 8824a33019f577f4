"""A run that is killed while it writes its first file starts again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from data.ground.errors import ConfigError
from tests.trainer.support import recipe_of, recipe_values
from trainer import run
from trainer.distributed import World
from trainer.resilience.run_lock import lock
from trainer.run_folder import check_output_folder

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_killed_while_the_recipe_is_written(resume: str, tmp_path: Path) -> None:
    output = tmp_path / "run"
    output.mkdir()
    recipe = recipe_of(recipe_values(tmp_path, run={"output": str(output), "resume": resume}))
    held = lock(output)

    child = os.fork()
    if child == 0:
        try:
            os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
            run.write_run_folder(recipe, {}, World(0, 0, 1, torch.device("cpu")))
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    held.close()
    assert sorted(path.name for path in output.iterdir()) == ["lock", "recipe.toml.tmp"]
    check_output_folder(recipe)
    # Negative control.
    (output / "thesis.txt.tmp").write_text("mine")
    with pytest.raises(ConfigError, match="no run of ours"):
        check_output_folder(recipe)
