"""What the tests of launch/ share: the trainer's small real shards, and a checkout in which nothing has run."""

from pathlib import Path

import pytest

from tests import ROOT
from tests.trainer.conftest import crowded_shards, document_shards, tuple_shards

__all__ = ["bare_checkout", "crowded_shards", "document_shards", "tuple_shards"]


@pytest.fixture
def bare_checkout(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's working folder: the recipes and the engine's files of this checkout, without anyone's runs/."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("launch", "ds_configs"):
        (folder / name).symlink_to(ROOT / name)
    monkeypatch.chdir(folder)
    return folder
