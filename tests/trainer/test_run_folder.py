"""A run's folder before the run: proven to be writable with nothing left in it, and what its metrics tell."""

from __future__ import annotations

import errno
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.ground.errors import ConfigError, OtherFormat
from tests.run_folder import contents
from tests.trainer.support import recipe_of, recipe_values
from trainer import run_folder
from trainer.config.load import as_toml
from trainer.resilience.run_lock import is_begun
from trainer.run_folder import check_output_folder, prove_writable, steps_trained


@pytest.mark.parametrize("there", [False, True])
def test_nothing_is_left_of_the_proof(there: bool, tmp_path: Path) -> None:
    output = tmp_path / "a" / "b" / "run"
    if there:
        output.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    prove_writable(output)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_what_the_disk_says_no_to(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(ConfigError, match=f"run.output {tmp_path}/run cannot be used: .*{os.strerror(number)}") as told:
        prove_writable(tmp_path / "run")
    assert run_folder.PROBE not in str(told.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
@pytest.mark.parametrize("kib", [0, 8])
def test_a_disk_that_is_full(kib: int, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={max(kib, 4)}k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs leave to mount a small tmpfs")
    try:
        if not kib:
            (disk / "full").write_bytes(b"x" * 4096)
        before = sorted(disk.iterdir())
        with pytest.raises(ConfigError, match="No space left on device"):
            prove_writable(disk / "run")
        assert sorted(disk.iterdir()) == before
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_files_of_a_first_moment() -> None:
    assert is_begun("lock") and is_begun(f"{run_folder.PROBE}x1") and not is_begun("thesis.txt")


@pytest.mark.parametrize(
    ("content", "steps", "saved"),
    [
        (b"", 0, 0),
        (b'{"step": 3, "loss": 1}\n{"step": 2, "checkpoint/mib": 1}\n', 3, 2),
        (b'{"step": 3}\n\xff\xfe\n7\n[]\n{"step": "9"}\n{}\n{"st', 3, 0),
        (b"[" * 100_000 + b'\n{"step": 1}\n', 1, 0),
    ],
)
def test_how_far_a_run_came(content: bytes, steps: int, saved: int, tmp_path: Path) -> None:
    path: Any = tmp_path / "metrics.jsonl"
    assert steps_trained(path) == 0
    path.write_bytes(content)
    assert (steps_trained(path), steps_trained(path, saved=True)) == (steps, saved)


def test_steps_of_a_later_version_are_not_overlooked(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 3}\n{"format": 2, "step": 5, "checkpoint/mib": 1}\n')
    for saved in (False, True):
        with pytest.raises(OtherFormat, match=r"metrics\.jsonl line 2 is of format 2"):
            steps_trained(path, saved=saved)


@pytest.mark.parametrize("resume", ["auto", "required"])
@pytest.mark.parametrize("steps", ["", '{"step": 3}\n'])
def test_metrics_that_a_later_version_wrote(resume: str, steps: str, tmp_path: Path) -> None:
    """Refused before anything is changed: a resumed run could neither keep such lines nor drop them."""
    output = tmp_path / "run"
    output.mkdir()
    recipe = recipe_of(recipe_values("shards", run={"output": str(output), "resume": resume}))
    (output / "recipe.toml").write_text(as_toml(recipe))
    (output / "metrics.jsonl").write_text(steps + '{"format": 2, "step": 5}\n')
    before = contents(output)
    with pytest.raises(OtherFormat, match=r"run/metrics\.jsonl line \d is of format 2, .*; use the version that wrote"):
        check_output_folder(recipe)
    assert contents(output) == before
    # A replay does not touch them.
    check_output_folder(replace(recipe, debug=replace(recipe.debug, replay=1)))


def test_metrics_that_this_version_and_earlier_ones_wrote(tmp_path: Path) -> None:
    """Negative control."""
    output = tmp_path / "run"
    output.mkdir()
    recipe = recipe_of(recipe_values("shards", run={"output": str(output), "resume": "auto"}))
    (output / "recipe.toml").write_text(as_toml(recipe))
    (output / "metrics.jsonl").write_text('{"step": 3}\n{"format": 1, "step": 5}\n{"step": 7, "lo')
    check_output_folder(recipe)


def test_a_recipe_that_another_version_wrote(tmp_path: Path) -> None:
    """The message names that file, for the user's own recipe is sound."""
    output = tmp_path / "run"
    output.mkdir()
    recipe = recipe_of(recipe_values("shards", run={"output": str(output), "resume": "auto"}))
    (output / "recipe.toml").write_text(as_toml(recipe).replace("hang_seconds", "hang_minutes"))
    with pytest.raises(ConfigError, match=r"run/recipe\.toml, .*unknown key train\.hang_minutes"):
        check_output_folder(recipe)
