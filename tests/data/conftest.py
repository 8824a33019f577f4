"""What tests of shard folders share; each module has a `folder` of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The module's folder of shards, as a copy that a test may damage."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def mapped(folder: Path) -> set[str]:
    """The files below a folder that this process maps; one that was unlinked meanwhile ends with "(deleted)"."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {f"/{line.partition('/')[2]}" for line in maps if f" {folder}/" in line}
