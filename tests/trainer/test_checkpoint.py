"""Checkpoints are whole or absent: every fault of a file, of a disk and of an ill-meaning writer, one test each.

The protocol is tested on a model of two parameters held by ranks that are plain objects; then whole runs of 2 ranks on
a disk that is really full, and with one rank that cannot write.
"""

from __future__ import annotations

import ast
import errno
import hashlib
import io
import json
import logging
import os
import pickle
import shutil
import subprocess
import threading
import unittest.mock
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors import safe_open
from torch import Tensor

from data.ground.errors import ConfigError, DataError
from tests import ROOT
from tests.ranks import run_ranks
from tests.run_folder import lines_of
from tests.trainer.support import float32_ds_config, recipe_values
from trainer import checkpoint
from trainer.checkpoint import Checkpointer, Saves
from trainer.distributed import Refused, World
from trainer.engine import MASTER, MOMENTS, Fragment
from trainer.loop import RunState, TrainState
from trainer.resilience.anomalies import Health

SHAPES = {"layer/weight": [3, 5], "bias": [7]}


class Held:
    """A rank of `size` that holds contiguous parts of everything, `scale` telling one content from another."""

    def __init__(self, scale: float, *, rank: int = 0, size: int = 1) -> None:
        self.world = World(rank, rank, size, torch.device("cpu"))
        self.steps = 3
        self.values = {
            (kind, name): torch.arange(float(torch.Size(shape).numel())) * scale + number
            for number, kind in enumerate((MASTER, *MOMENTS))
            for name, shape in SHAPES.items()
        }

    def shapes(self) -> dict[str, list[int]]:
        return SHAPES

    def kept_beside(self) -> dict[str, tuple[str, ...]]:
        return dict.fromkeys(SHAPES, MOMENTS)

    def optimizer_steps(self) -> int:
        return self.steps

    def fragments_to_save(self) -> list[Fragment]:
        rank, size = self.world.rank, self.world.size
        fragments = [
            Fragment(kind, name, len(values) * rank // size, len(values) * (rank + 1) // size)
            for (kind, name), values in self.values.items()
        ]
        return [fragment for fragment in fragments if self.steps or fragment.kind == MASTER]

    def read(self, fragment: Fragment) -> Tensor:
        return self.values[fragment.kind, fragment.name][fragment.start : fragment.stop]

    def load(self, read: Callable[[Fragment], Tensor], *, optimizer_steps: int) -> None:
        self.steps = optimizer_steps
        for fragment in self.fragments_to_save():
            self.values[fragment.kind, fragment.name][fragment.start : fragment.stop] = read(fragment)


@pytest.fixture
def saved(tmp_path: Path) -> Checkpointer:
    """Checkpoints of steps 1 and 2, whose content is the step's number times the element's."""
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep=2)
    for step in (1, 2):
        assert checkpointer.save(Held(step), {"step": step}) is not None
    return checkpointer


def write(path: Path, held: Held) -> dict[str, Any]:
    return checkpoint.write_fragments(path, held.fragments_to_save(), held.read)


def written_by(ranks: Iterable[int], folder: Path, *, size: int) -> Checkpointer:
    """A checkpoint of step 1 that holds the files of some of `size` ranks."""
    step = folder / "step_00000001"
    step.mkdir()
    files = {}
    for rank in ranks:
        file = step / f"rank_{rank:05d}.safetensors"
        files[file.name] = write(file, Held(3.0, rank=rank, size=size))
    facts = {"format": 1, "ranks": size, "optimizer_steps": 3, "parameters": SHAPES, "state": {"step": 1}}
    checkpoint.write_manifest(step, {**facts, "files": files})
    return Checkpointer(folder, keep=1)


def names(checkpointer: Checkpointer) -> list[str]:
    return sorted(path.name for path in checkpointer.folder.iterdir())


def newest(checkpointer: Checkpointer) -> Path:
    return checkpointer.folder / "step_00000002"


def assert_loads(checkpointer: Checkpointer, step: int) -> None:
    held, want = Held(0.5), Held(step)
    assert checkpointer.load_newest(held) == {"step": step}
    assert held.steps == 3
    for key, values in want.values.items():
        assert torch.equal(held.values[key], values), key


def rewrite_manifest(folder: Path, **changes: Any) -> None:
    """A manifest that agrees with itself, as one who means ill could write it."""
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    manifest.pop("sha256")
    for file in manifest["files"]:
        content = (folder / file).read_bytes()
        manifest["files"][file] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    checkpoint.write_manifest(folder, manifest)


def test_what_is_saved_is_loaded(saved: Checkpointer) -> None:
    assert names(saved) == ["latest", "step_00000001", "step_00000002"]
    assert (saved.folder / "latest").read_text() == "step_00000002"
    assert_loads(saved, 2)


def test_files_are_what_safetensors_reads(saved: Checkpointer) -> None:
    file = newest(saved) / "rank_00000.safetensors"
    with safe_open(file, framework="pt") as opened:
        keys = set(opened.keys())
        assert torch.equal(opened.get_tensor("exp_avg/0/layer/weight"), torch.arange(15.0) * 2 + 1)
    assert keys == {f"{kind}/0/{name}" for kind in (MASTER, *MOMENTS) for name in SHAPES}
    facts = json.loads((newest(saved) / "manifest.json").read_text())["files"][file.name]
    assert facts == {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("readers", [1, 2, 5])
def test_any_ranks_read_what_any_ranks_wrote(ranks: int, readers: int, tmp_path: Path) -> None:
    written, whole = written_by(range(ranks), tmp_path, size=ranks), Held(3.0)
    for rank in range(readers):
        held = Held(0.5, rank=rank, size=readers)
        assert written.load_newest(held) == {"step": 1}
        for fragment in held.fragments_to_save():
            assert torch.equal(held.read(fragment), whole.read(fragment))


def test_a_piece_of_another_rank_that_is_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert written_by([1], tmp_path, size=2).load_newest(Held(0.5)) is None
    assert "is damaged (rank 0: parts of master of layer/weight are missing)" in caplog.text


def test_a_checkpoint_before_any_optimizer_step(tmp_path: Path) -> None:
    checkpointer, held = Checkpointer(tmp_path, keep=1), Held(2.0)
    held.steps = 0
    checkpointer.save(held, {"step": 1})
    other = Held(0.5)
    assert checkpointer.load_newest(other) == {"step": 1}
    assert other.steps == 0 and torch.equal(other.values[MASTER, "bias"], held.values[MASTER, "bias"])


def cut(folder: Path) -> None:
    file = folder / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def flip_a_bit(folder: Path) -> None:
    file = folder / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def cut_the_manifest(folder: Path) -> None:
    file = folder / "manifest.json"
    file.write_text(file.read_text()[:-10])


def change_the_manifest(folder: Path) -> None:
    """As a flipped bit could: still JSON, but another place in the data."""
    file = folder / "manifest.json"
    text = file.read_text()
    assert '"step": 2' in text
    file.write_text(text.replace('"step": 2', '"step": 3'))


def other_shapes(folder: Path) -> None:
    rewrite_manifest(folder, parameters={"layer/weight": [3, 4], "bias": [7]})


def a_file_in_its_place(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("mine")


FACTS = {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}


def forge_files(folder: Path, files: dict[str, Any]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text()) | {"files": files}
    checkpoint.write_manifest(folder, {key: value for key, value in manifest.items() if key != "sha256"})


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing file": (lambda folder: (folder / "rank_00000.safetensors").unlink(), "No such file"),
    "torn file": (cut, "bytes, not"),
    "flipped bit": (flip_a_bit, "sha256 differs"),
    "missing manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json: No such file"),
    "torn manifest": (cut_the_manifest, "manifest is no JSON"),
    "changed manifest": (change_the_manifest, "manifest was changed"),
    "manifest of no format": (lambda folder: (folder / "manifest.json").write_text("{}"), "it has no format"),
    "a deep manifest": (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "nested too deep"),
    "a list": (lambda folder: (folder / "manifest.json").write_text("[1]"), "no JSON object"),
    "no UTF-8": (lambda folder: (folder / "manifest.json").write_bytes(b"\xff"), "not UTF-8"),
    "a file in its place": (a_file_in_its_place, "Not a directory"),
    "no state": (lambda folder: rewrite_manifest(folder, state=None), "state"),
    "a step below 0": (lambda folder: rewrite_manifest(folder, state={"step": -3}), "step"),
    "a step of a text": (lambda folder: rewrite_manifest(folder, state={"step": "2"}), "step"),
    "another's step": (lambda folder: rewrite_manifest(folder, state={"step": 1}), "is of step 1"),
    "optimizer steps below 0": (lambda folder: rewrite_manifest(folder, optimizer_steps=-1), "optimizer_steps"),
    "no files": (lambda folder: forge_files(folder, {}), "files"),
    "a file outside": (lambda folder: forge_files(folder, {"../../recipe.toml": FACTS}), "recipe.toml"),
    "a device": (lambda folder: forge_files(folder, {"/dev/zero": FACTS}), "/dev/zero"),
    "a size below 0": (lambda folder: forge_files(folder, {"rank_00000.safetensors": {**FACTS, "bytes": -1}}), "bytes"),
    "no digest": (lambda folder: forge_files(folder, {"rank_00000.safetensors": {**FACTS, "sha256": ""}}), "sha256"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    fault: str, saved: Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    damage, reason = FAULTS[fault]
    damage(newest(saved))
    with unittest.mock.patch.object(Held, "load", autospec=True, side_effect=Held.load) as loads:
        assert_loads(saved, 1)
    assert loads.call_count == 1  # nothing of the damaged one was loaded
    (warning,) = [record.getMessage() for record in caplog.records]
    assert str(newest(saved)) in warning and reason in warning


def test_a_damaged_one_neither_counts_nor_stays(tmp_path: Path) -> None:
    """A run that went back behind it must not keep it in a good one's place, though its size is right."""
    once = Checkpointer(tmp_path, keep=1)
    for step in (5, 1):
        # As if the one of step 5 had been there before: step 1 was saved by a run that could not know it.
        assert Checkpointer(tmp_path, keep=2).save(Held(step), {"step": step}) is not None
    flip_a_bit(tmp_path / "step_00000005")
    assert once.load_newest(Held(0.5)) == {"step": 1}
    assert once.save(Held(4), {"step": 4}) is not None
    assert names(once) == ["latest", "step_00000004"]
    assert_loads(once, 4)


def of_another_format(folder: Path) -> None:
    rewrite_manifest(folder, format=2)


def linked_to_a_disk_that_is_away(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("/nowhere/at/all")


def file_linked_to_a_disk_that_is_away(folder: Path) -> None:
    file = folder / "rank_00000.safetensors"
    file.unlink()
    file.symlink_to("/nowhere/at/all")


@pytest.fixture
def failing_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Path], None]:
    """Makes the system refuse to read what is below a folder."""

    def fail(number: int, below: Path) -> None:
        opening = io.open

        def refusing(file: Any, *args: Any, **rest: Any) -> Any:
            if isinstance(file, (str, Path)) and Path(file).is_relative_to(below):
                raise OSError(number, os.strerror(number), str(file))
            return opening(file, *args, **rest)

        monkeypatch.setattr(io, "open", refusing)

    return fail


def same_files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_one_that_cannot_be_read_now_ends_the_start(
    number: int, saved: Checkpointer, failing_reads: Callable[[int, Path], None]
) -> None:
    before = same_files(saved.folder)
    failing_reads(number, newest(saved))
    with pytest.raises(Refused, match=r"step_00000002 cannot be read, and may be sound .*" + os.strerror(number)):
        saved.load_newest(Held(0.5))
    with pytest.raises(DataError, match=os.strerror(number)):
        saved.newest()
    assert same_files(saved.folder) == before


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (of_another_format, "format 2, and this version reads format 1"),
        (linked_to_a_disk_that_is_away, "a link to /nowhere/at/all, which is not there"),
        (file_linked_to_a_disk_that_is_away, "a link to /nowhere/at/all, which is not there"),
    ],
)
def test_one_that_may_be_sound_ends_the_start(
    make: Callable[[Path], None], said: str, saved: Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    make(newest(saved))
    before = same_files(saved.folder)
    with pytest.raises(Refused, match=said):
        saved.load_newest(Held(0.5))
    with pytest.raises(DataError, match=said):
        saved.newest()
    assert same_files(saved.folder) == before and not caplog.records


def test_one_of_another_model_ends_the_start(saved: Checkpointer, caplog: pytest.LogCaptureFixture) -> None:
    """Its bytes are those that were written, so the model of this start is the wrong one."""
    other_shapes(newest(saved))
    before = same_files(saved.folder)
    with pytest.raises(Refused, match=r"step_00000002 cannot be read, and may be sound .*not this model's"):
        saved.load_newest(Held(0.5))
    assert same_files(saved.folder) == before and not caplog.records


@pytest.mark.parametrize("make", [of_another_format, linked_to_a_disk_that_is_away, flip_a_bit, cut])
def test_what_was_not_looked_at_is_not_removed(make: Callable[[Path], None], saved: Checkpointer) -> None:
    """Older than the one that is loaded, and newer than what a start from the beginning saves."""
    older, later = saved.folder / "step_00000001", Checkpointer(saved.folder, keep=1)
    make(older)
    content = same_files(saved.folder)[str(older)]
    whole = make is flip_a_bit  # as far as sizes tell
    assert_loads(later, 2)
    assert later.save(Held(3), {"step": 3}) is not None
    assert os.path.lexists(older) is not whole and not newest(saved).exists()
    if not whole:
        assert same_files(saved.folder)[str(older)] == content
    fresh = Checkpointer(saved.folder, keep=1)
    assert fresh.save(Held(2), {"step": 2}) is not None
    assert (saved.folder / "step_00000003").is_dir()


def test_a_checkpoints_folder_that_is_away(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.symlink_to("/nowhere/at/all")
    with pytest.raises(Refused, match="a link to /nowhere/at/all, which is not there"):
        Checkpointer(folder, keep=1).load_newest(Held(0.5))
    folder.unlink()
    folder.write_text("mine")
    with pytest.raises(Refused, match="Not a directory"):
        Checkpointer(folder, keep=1).load_newest(Held(0.5))


def test_pruning_a_link_removes_the_link(saved: Checkpointer, tmp_path: Path) -> None:
    moved = (saved.folder / "step_00000001").rename(tmp_path / "moved")
    (saved.folder / "step_00000001").symlink_to(moved)
    content = same_files(moved)
    for step in (3, 4):
        assert saved.save(Held(step), {"step": step}) is not None
    assert names(saved) == ["latest", "step_00000003", "step_00000004"]
    assert same_files(moved) == content


def test_left_overs_stop_no_save(
    saved: Checkpointer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is busy stays and is named; a link and a file go, and what the link leads to stays."""
    busy = saved.folder / "tmp-step_00000003"
    busy.mkdir()
    (saved.folder / "tmp-link").symlink_to(newest(saved))
    (saved.folder / "tmp-file").write_text("")
    (saved.folder / "tmp-old-step_00000001").mkdir()
    removing = shutil.rmtree

    def refusing(path: Path, *args: Any, **rest: Any) -> None:
        if Path(path) == busy:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        removing(path, *args, **rest)

    monkeypatch.setattr(shutil, "rmtree", refusing)
    for step in (3, 4):
        assert saved.save(Held(step), {"step": step}) is not None
    assert names(saved) == ["latest", "step_00000003", "step_00000004", busy.name]
    assert str(busy) in caplog.text and "could not be saved" not in caplog.text
    assert_loads(saved, 4)


def test_a_link_that_is_in_the_way_is_not_followed(saved: Checkpointer, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (saved.folder / "step_00000003").symlink_to(tmp_path / "mine")
    assert saved.save(Held(3), {"step": 3}) is not None
    assert_loads(saved, 3)
    assert (tmp_path / "mine").is_dir() and not (saved.folder / "step_00000003").is_symlink()


def test_the_run_s_own_state_is_checked(tmp_path: Path) -> None:
    """Its place in the data and its health, too; keys of a later version are left out."""
    good = {"step": 2, "health": {"losses": 2, "loss_mean": 1.5}, "stream": {"samples": 24, "seed": 7}}
    checkpointer = Checkpointer(tmp_path, keep=9, state=RunState)
    later = {**good, "step": 3, "health": {**good["health"], "new_key": 3}, "new": 1}
    for state in (good, later):
        assert checkpointer.save(Held(1), state) is not None
    assert checkpointer.load_newest(Held(0.5)) == later
    taken = TrainState()
    taken.load_state_dict(later)
    assert (taken.step, taken.health) == (3, Health(losses=2, loss_mean=1.5))
    bad: list[dict[str, Any]] = [
        {"stream": None},
        {"stream": {"samples": 10**30}},
        {"stream": {"samples": -5}},
        {"health": {"loss_mean": float("nan")}},
        {"health": {"skipped_steps": -1}},
    ]
    for number, change in enumerate(bad):
        step = 4 + number
        assert checkpointer.save(Held(1), {**good, "step": step, **change}) is not None
        assert checkpointer.newest() == tmp_path / "step_00000003", change
        shutil.rmtree(tmp_path / f"step_{step:08d}")


def test_other_frozen_weights_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Checkpointer(tmp_path, keep=1, frozen="one").save(Held(1), {"step": 1}) is not None
    assert Checkpointer(tmp_path, keep=1, frozen="one").load_newest(Held(0.5)) == {"step": 1}
    held = Held(0.5)
    with pytest.raises(Refused, match="other frozen weights"):
        Checkpointer(tmp_path, keep=1, frozen="two").load_newest(held)
    assert torch.equal(held.values[MASTER, "bias"], Held(0.5).values[MASTER, "bias"]), "something was loaded"
    assert not caplog.records
    # One of an earlier version does not say.
    assert Checkpointer(tmp_path, keep=1).save(Held(2), {"step": 2}) is not None
    assert Checkpointer(tmp_path, keep=1, frozen="two").load_newest(Held(0.5)) == {"step": 2}
    assert "are not compared" in caplog.text


def test_a_damaged_one_is_written_again(saved: Checkpointer) -> None:
    cut(newest(saved))
    assert saved.save(Held(2), {"step": 2}) is not None
    assert_loads(saved, 2)


def test_none_is_whole(saved: Checkpointer) -> None:
    for folder in saved.complete():
        cut(folder)
    held = Held(0.5)
    before = {key: values.clone() for key, values in held.values.items()}
    assert saved.load_newest(held) is None
    assert all(torch.equal(values, before[key]) for key, values in held.values.items())
    assert Checkpointer(saved.folder / "absent", keep=1).load_newest(held) is None


class Bomb:
    """Unpickled, it makes a folder: proof that code ran."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("saves", ["pickle", "torch"])
def test_a_hostile_checkpoint_runs_no_code(
    saves: str, saved: Checkpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its manifest is in order; where a file of tensors should be, there is a pickle."""
    ran = tmp_path / "ran"
    file = newest(saved) / "rank_00000.safetensors"
    with file.open("wb") as opened:
        (torch.save if saves == "torch" else pickle.dump)({"state": Bomb(ran)}, opened)
    rewrite_manifest(newest(saved))
    assert_loads(saved, 1)
    assert not ran.exists()
    assert str(newest(saved)) in caplog.text
    # Negative control: the bomb goes off where it is unpickled.
    if saves == "torch":
        torch.load(file.rename(tmp_path / "bomb.pt"), weights_only=False)
    else:
        pickle.loads(file.read_bytes())
    assert ran.is_dir()


def unsafe_loads(source: str) -> list[str]:
    """Calls in a program that could unpickle anything."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, options = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            if name == "torch.load" and options.get("weights_only") != "True":
                found.append(name)
            if name in ("np.load", "numpy.load") and options.get("allow_pickle", "False") != "False":
                found.append(name)
            if name.split(".")[0] in ("pickle", "cloudpickle", "dill", "joblib") or name.endswith(".load_checkpoint"):
                found.append(name)
    return found


def test_nothing_is_read_by_unrestricted_pickle() -> None:
    for package in ("data", "models", "trainer", "launch"):
        for path in (ROOT / package).rglob("*.py"):
            assert not unsafe_loads(path.read_text("utf-8")), path
    bad = "torch.load(p)\nnp.load(p, allow_pickle=True)\npickle.load(f)\nengine.load_checkpoint(d)\nnp.load(p)"
    assert len(unsafe_loads(bad)) == 4


@pytest.mark.parametrize("number", [0, 2])
def test_a_save_that_fails_leaves_what_was_there(
    number: int, saved: Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    """At the first read of a fragment and in the middle of the file; the next save makes good."""
    reads = iter(range(100))

    class Failing(Held):
        def read(self, fragment: Fragment) -> Tensor:
            if next(reads) == number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().read(fragment)

    assert saved.save(Failing(3), {"step": 3}) is None
    assert "No space left" in caplog.text and "step_00000003" in caplog.text
    assert names(saved) == ["latest", "step_00000001", "step_00000002"]
    assert_loads(saved, 2)
    assert saved.save(Held(4), {"step": 4}) is not None
    assert_loads(saved, 4)


def test_an_unwritable_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file where the folder should be: it stops every user, root included."""
    (tmp_path / "checkpoints").write_text("in the way")
    assert Checkpointer(tmp_path / "checkpoints", keep=1).save(Held(1), {"step": 1}) is None
    assert "could not be saved" in caplog.text and "rank 0" in caplog.text


def test_training_goes_on_while_a_copy_is_written(saved: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved is what was there at the start; until it is committed, the one before it is the newest."""
    go_on, write_fragments = threading.Event(), checkpoint.write_fragments

    def slow(*args: Any) -> dict[str, Any]:
        assert go_on.wait(60)
        return write_fragments(*args)

    monkeypatch.setattr(checkpoint, "write_fragments", slow)
    reported: list[int] = []
    held, state = Held(3), {"step": 3}
    saves = Saves(
        saved,
        held,
        state_of=lambda: dict(state),
        overlap=True,
        report=lambda step, _: reported.append(step),
    )
    saves.begin()
    assert not saves.written
    for values in held.values.values():  # a training step
        values.zero_()
    state["step"] = 4
    assert_loads(saved, 2)
    go_on.set()
    saves.finish()
    assert reported == [3] and not saves.written
    assert_loads(saved, 3)
    saves.finish()  # there is none in the making
    assert reported == [3]


def test_a_copy_is_needed_for_that(saved: Checkpointer) -> None:
    """Negative control: without the copy, a file written later holds later values."""
    held = Held(3)
    pending = saved.begin(held, {"step": 3}, overlap=False)
    copied = saved.begin(Held(3), {"step": 3}, overlap=True)
    assert pending.written and pending.result() is None and copied.result() is None
    zeros = Held(3)
    for values in zeros.values.values():
        values.zero_()
    path = saved.folder / "late.safetensors"
    assert write(path, zeros)["sha256"] != next(iter(copied.files.values()))["sha256"]
    assert next(iter(pending.files.values()))["sha256"] == next(iter(copied.files.values()))["sha256"]


def test_a_thread_that_cannot_write(saved: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    held = Held(3)
    with monkeypatch.context() as context:
        context.setattr(checkpoint, "write_fragments", full)
        pending = saved.begin(held, {"step": 3}, overlap=True)
        assert saved.finish(pending) is None
    assert names(saved) == ["latest", "step_00000001", "step_00000002"]
    assert saved.finish(saved.begin(held, {"step": 3}, overlap=True)) is not None
    assert_loads(saved, 3)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_by_another_error(saved: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its file nothing is committed, and so nothing sound is pruned."""

    def no_memory(*args: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as context:
        context.setattr(checkpoint, "write_fragments", no_memory)
        assert saved.finish(saved.begin(Held(3), {"step": 3}, overlap=True)) is None
    assert_loads(saved, 2)


def test_whether_the_last_save_failed(saved: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    saves = Saves(saved, Held(3), state_of=lambda: {"step": 3}, overlap=True, report=lambda *_: None)
    saves.finish()
    assert not saves.failed, "nothing was to be saved"
    with monkeypatch.context() as context:
        context.setattr(checkpoint, "write_fragments", full)
        saves.begin()
        saves.finish()
    assert saves.failed
    saves.finish()
    assert saves.failed, "there is still no checkpoint"
    saves.begin()
    saves.finish()
    assert not saves.failed


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", ["rename", "fsync", "rmtree", "replace"])
def test_a_kill_at_any_moment_leaves_a_whole_one(moment: str, tmp_path: Path) -> None:
    """Stopped at every call of each kind that changes the disk in turn; then it goes on and saves."""
    owner, name = {
        "rename": (Path, "rename"),
        "fsync": (os, "fsync"),
        "rmtree": (shutil, "rmtree"),
        "replace": (Path, "replace"),
    }[moment]
    reached = 0
    for stop in range(20):
        checkpointer = Checkpointer(tmp_path / f"{stop}", keep=1)
        checkpointer.save(Held(1), {"step": 1})
        original, calls = getattr(owner, name), iter(range(100))

        def until(*args: Any, original: Any = original, calls: Iterator[int] = calls, stop: int = stop, **rest: Any):
            if next(calls) == stop:
                raise Killed
            return original(*args, **rest)

        try:
            with unittest.mock.patch.object(owner, name, until):
                checkpointer.save(Held(2), {"step": 2})
        except Killed:
            reached += 1
        else:
            break
        step = checkpointer.load_newest(Held(0.5))
        assert step in ({"step": 1}, {"step": 2})
        assert_loads(checkpointer, step["step"])
        assert checkpointer.save(Held(3), {"step": 3}) is not None
        assert names(checkpointer) == ["latest", "step_00000003"]
    assert reached >= 1


def test_kept_by_count_and_for_good(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=2, keep_every_steps=4)
    (tmp_path / "step_notes").mkdir()  # not ours
    for step in range(1, 12):
        checkpointer.save(Held(step), {"step": step})
    want = [4, 8, 10, 11]
    assert names(checkpointer) == ["latest", *(f"step_{step:08d}" for step in want), "step_notes"]
    assert [path.name for path in checkpointer.complete()] == [f"step_{step:08d}" for step in reversed(want)]


def test_offload_to_nvme_is_refused(tmp_path: Path) -> None:
    from trainer.ds_config import read_ds_config

    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}))
    with pytest.raises(ConfigError, match="nvme"):
        read_ds_config(path)


def launched(
    folder: Path, shards: Path, output: Path, *, control: str = "", extra: tuple[str, ...] = (), expect: int = 0
) -> str:
    """A run of 2 ranks with four steps and a save after each; what it said."""
    values = recipe_values(
        shards, train={"steps": 4}, checkpoint={"every_steps": 1}, optim={"lr": 1e-3}, run={"output": str(output)}
    )
    values["engine"] = {"ds_config": str(float32_ds_config(folder, 2))}
    (folder / "recipe.toml").write_text(tomli_w.dumps(values))
    arguments = ["--config", str(folder / "recipe.toml"), *extra]
    case = {"task": "contrastive", "arguments": arguments, "ids": str(folder / "ids"), "control": control}
    (folder / "cases.json").write_text(json.dumps([case]))
    done = run_ranks("tests.trainer.elastic_worker", str(folder / "cases.json"), ranks=2, expect=expect)
    return done.stdout + done.stderr


@pytest.mark.launcher
def test_required_and_all_are_damaged(tuple_shards: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    launched(tmp_path, tuple_shards, output, extra=("--train.stop_at_step=1",))
    flip_a_bit(output / "checkpoints" / "step_00000001")
    said = launched(tmp_path, tuple_shards, output, extra=("--resume=required",), expect=2)
    assert "error:" in said and "holds no whole checkpoint" in said and "sha256 differs" in said


def steps_of(output: Path, key: str) -> list[int]:
    return [line["step"] for line in lines_of(output) if key in line]


@pytest.mark.launcher
def test_one_rank_that_cannot_write(tuple_shards: Path, tmp_path: Path) -> None:
    """All ranks go on together, and save again at the next step."""
    output = tmp_path / "run"
    said = launched(tmp_path, tuple_shards, output, control="rank 1 has no room at its second save")
    assert "step_00000002 could not be saved (rank 1: [Errno 28] No space left on device" in " ".join(said.split())
    assert (output / "DONE").is_file()
    assert steps_of(output, "loss") == [1, 2, 3, 4]
    assert steps_of(output, "checkpoint/seconds") == steps_of(output, "checkpoint/mib") == [1, 3, 4]
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == [
        "latest",
        "step_00000003",
        "step_00000004",
    ]


@pytest.mark.launcher
def test_a_full_disk(tuple_shards: Path, tmp_path: Path) -> None:
    """Checkpoints on a real file system with room for one and a half: the second save fails, the first stays."""
    output = tmp_path / "run"
    disk = output / "checkpoints"
    roomy = tmp_path / "roomy"
    launched(tmp_path, tuple_shards, roomy, extra=("--train.stop_at_step=1",))
    # A folder that holds a run, so that the disk can be there before it starts again.
    shutil.copytree(roomy, output)
    shutil.rmtree(disk)
    disk.mkdir()
    # It tells of a checkpoint, without which the run would not start over.
    (output / "metrics.jsonl").unlink()
    size = sum(file.stat().st_size for file in (roomy / "checkpoints").rglob("*") if file.is_file())
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(1.5 * size) // 4096 * 4096}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs leave to mount a small tmpfs")
    try:
        said = launched(tmp_path, tuple_shards, output, extra=("--resume=auto",))
        assert said.count("could not be saved") == 3 and "No space left on device" in said
        assert sorted(path.name for path in disk.iterdir() if path.is_dir()) == ["step_00000001"]
        assert Checkpointer(disk, keep=1).complete() == [disk / "step_00000001"]
        assert (output / "DONE").is_file() and steps_of(output, "loss") == [1, 2, 3, 4]
        again = launched(tmp_path, tuple_shards, output, extra=("--resume=required",))
        assert "going on at step 1 of 4" in again
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture(autouse=True)
def _warnings_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="trainer.checkpoint")
