"""An evaluation checks its output folder before it computes anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.ground.errors import ConfigError
from trainer.evaluation.results.output import RESULT_FILES, output_folder


@pytest.mark.parametrize("name", RESULT_FILES)
def test_a_folder_is_no_file_and_a_file_no_folder(name: str, tmp_path: Path) -> None:
    path = tmp_path / name.rstrip("/")
    path.mkdir() if name.endswith("/") else path.write_text("of an earlier evaluation")
    assert output_folder(tmp_path) == tmp_path
    if path.is_dir():
        path.rmdir()
        path.write_text("mine")
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises(ConfigError, match=rf"holds something else \({path.name}/?\)"):
        output_folder(tmp_path)
