"""A run that is killed while it writes its first file starts again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.trainer.support import recipe_of, recipe_values
from trainer import run
from trainer.config import ConfigError
from trainer.distributed import World
from trainer.run_folder import check_output_folder
from trainer.run_lock import lock

pytestmark = pytest.mark.processes


class Killed(BaseException):
    pass


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_killed_while_the_recipe_is_written(resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "run"
    output.mkdir()
    recipe = recipe_of(recipe_values(tmp_path, run={"output": str(output), "resume": resume}))
    held = lock(output)

    def kill(handle: int) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", kill)
        with pytest.raises(Killed):
            run._write_run_folder(recipe, World(0, 0, 1, torch.device("cpu")))
    held.close()
    assert sorted(path.name for path in output.iterdir()) == ["lock", "recipe.toml.tmp"]
    check_output_folder(recipe)
    # Negative control.
    (output / "thesis.txt.tmp").write_text("mine")
    with pytest.raises(ConfigError, match="no run of ours"):
        check_output_folder(recipe)
