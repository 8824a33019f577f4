"""Checkpoints that are whole or absent.

A checkpoint is a folder with one safetensors file for each rank, and a manifest. A file holds its rank's fragments:
ranges of the flattened elements of float32 parameters and of the optimizer's state, each named `kind/start/parameter`.
So any number of ranks at any ZeRO stage and precision can read a checkpoint, and each rank reads only the ranges that
it needs. The manifest holds the rest, a few global numbers: random draws are derived from (seed, step, rank) and (seed,
epoch, sample), so no generator is stored. Nothing is pickled, so a checkpoint cannot run code when it is read.

Whole or absent: all ranks write into `tmp-step_N` and fsync. Each rank reports the size and sha256 of its file, or what
went wrong. Rank 0 writes the manifest, renames the folder (the commit) and moves `latest`. If any rank failed, the
folder is removed and all ranks go on training. Before a checkpoint is loaded, every file is hashed; a damaged
checkpoint is named in a warning, and the one before it is used. A checkpoint that cannot be read at this moment, or
that another version wrote, is not damaged: the start ends with one sentence and changes nothing. A run removes
checkpoints that it has neither written nor looked at only if they are whole and older than what is kept. The file
`latest` only informs readers; a resumed run loads the newest undamaged checkpoint.

Training goes on while files are written: each rank copies its fragments to host memory, and a thread writes the copy.
The thread takes part in no collective, because its collectives could mix with those of training. Instead, the ranks
agree that all have written in the sum that they take anyway at the end of a later step, and commit then.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import re
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data.ground.errors import DataError, OtherFormat
from data.ground.files import sync, write_atomically
from data.ground.records import Record, check_record, digest_of, parse_json
from trainer.distributed import Refused, World, gather_objects
from trainer.engine import MASTER, MOMENTS, MOMENTUM, Fragment

log = logging.getLogger(__name__)

_FORMAT = 1
_MANIFEST = "manifest.json"
_FLOAT32_BYTES = 4
_RESTORE = "restore it"
_NAME = re.compile(r"step_[0-9]+")

T = TypeVar("T")


class _FileFacts(Record):
    bytes: int = Field(ge=0, lt=2**63)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class SavedState(Record):
    """The part of the state that every checkpoint has; a run's state has more (trainer/loop.py)."""

    step: int = Field(ge=0, le=2**53)


class _Manifest(Record):
    format: Literal[1]
    ranks: int = Field(ge=1)
    optimizer_steps: int = Field(ge=0, le=2**53)
    parameters: dict[str, list[int]]
    state: dict[str, Any]
    # The pattern keeps every file's name inside the folder.
    files: dict[Annotated[str, Field(pattern=r"^rank_[0-9]{5,}\.safetensors$")], _FileFacts] = Field(min_length=1)
    frozen: str = ""  # fingerprint of weights that are not saved; "": all are saved, or an earlier version wrote it


@dataclass(frozen=True)
class Problem:
    """Why a checkpoint cannot be loaded."""

    text: str
    damaged: bool  # False: it may be sound, but cannot be read at this moment, or another version wrote it


class Loadable(Protocol):
    """Something that can load a checkpoint's values."""

    world: World

    def shapes(self) -> dict[str, list[int]]: ...
    def kept_beside(self) -> Mapping[str, tuple[str, ...]]: ...
    def load(self, read: Callable[[Fragment], Tensor], *, optimizer_steps: int) -> None: ...


class Saveable(Loadable, Protocol):
    """Something whose values a checkpoint can save (trainer/engine.py)."""

    def optimizer_steps(self) -> int: ...
    def fragments_to_save(self) -> list[Fragment]: ...
    def read(self, fragment: Fragment) -> Tensor: ...


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint and what it cost."""

    path: Path
    still_seconds: float  # that training stood still
    seconds: float  # from its start to its commit
    mib: float  # over all ranks


@dataclass
class Pending:
    """A checkpoint between its start and its commit, on one rank."""

    world: World
    tmp: Path
    final: Path
    facts: dict[str, Any]  # the manifest without its files
    error: str | None  # from before any rank wrote; the same on all ranks
    begun_at: float
    still_seconds: float = 0.0
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    _failure: str | None = None
    _thread: threading.Thread | None = None

    @property
    def written(self) -> bool:
        """Whether this rank's file is written, so that `finish` does not wait for it."""
        return self._thread is None or not self._thread.is_alive()

    def write(self, fragments: Sequence[Fragment], read: Callable[[Fragment], Tensor], *, overlap: bool) -> None:
        def work() -> None:
            file = self.tmp / f"rank_{self.world.rank:05d}.safetensors"
            _, self._failure = _failure(lambda: self.files.update({file.name: write_fragments(file, fragments, read)}))

        if overlap:
            self._thread = threading.Thread(target=work)
            self._thread.start()
        else:
            work()

    def result(self) -> str | None:
        """Wait until this rank has tried to write. Returns why it could not, or None."""
        if self._thread is not None:
            self._thread.join()
        # Whatever ended the thread: without this rank's file there must be no commit, which would remove sound ones.
        return self._failure or (None if self.files else "its file was not written")


class Saves:
    """Writes the checkpoints of a run, one at a time."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        engine: Saveable,
        *,
        state_of: Callable[[], dict[str, Any]],
        overlap: bool,
        report: Callable[[int, SavedCheckpoint], None],
    ) -> None:
        """state_of: what a checkpoint holds besides the engine's values. report: called after each commit."""
        self._checkpointer, self._engine = checkpointer, engine
        self._state_of, self._overlap, self._report = state_of, overlap, report
        self._pending: Pending | None = None
        self.failed = False  # whether the last checkpoint that was to be committed could not be saved; on all ranks

    @property
    def written(self) -> bool:
        """Whether this rank has written its file of a checkpoint that `finish` has yet to commit."""
        return self._pending is not None and self._pending.written

    def begin(self) -> None:
        """Finish the last checkpoint and start the next one; all ranks call it."""
        self.finish()
        self._pending = self._checkpointer.begin(self._engine, self._state_of(), overlap=self._overlap)
        if not self._overlap:
            self.finish()

    def finish(self) -> None:
        """Commit the checkpoint that was started, if there is one; all ranks call it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        saved = self._checkpointer.finish(pending)
        self.failed = saved is None
        if saved is not None:
            self._report(pending.facts["state"]["step"], saved)


@dataclass(frozen=True)
class Checkpointer:
    """Writes checkpoints, keeps the newest and those at every `keep_every_steps`, and finds the newest whole one.

    frozen: fingerprint of the weights that belong to the model and are not in its checkpoints.
    """

    folder: Path
    keep: int
    keep_every_steps: int = 0  # 0: none is kept for good
    state: type[Record] = SavedState
    frozen: str = ""
    # Names of checkpoints that this process has found damaged.
    _damaged: set[str] = field(default_factory=set)

    def save(self, engine: Saveable, state: dict[str, Any]) -> SavedCheckpoint | None:
        """Write the checkpoint of step `state["step"]`; all ranks call it. state: JSON values.

        Returns None, with a warning, where a rank could not write; earlier checkpoints are untouched.
        """
        return self.finish(self.begin(engine, state, overlap=False))

    def begin(self, engine: Saveable, state: dict[str, Any], *, overlap: bool) -> Pending:
        """Start to write a checkpoint; all ranks call it, and later `finish`. `overlap`: a thread writes a copy."""
        begin = time.perf_counter()
        final = self.folder / f"step_{state['step']:08d}"
        world = engine.world
        tmp, error = None, None
        if world.is_main:
            tmp, error = _failure(lambda: self._make_room(final))
        tmp, error = gather_objects((tmp, error and f"rank 0: {error}"))[0]
        facts = {
            "format": _FORMAT,
            "ranks": world.size,
            "optimizer_steps": engine.optimizer_steps(),
            "parameters": engine.shapes(),
            "state": state,
            **({"frozen": self.frozen} if self.frozen else {}),
        }
        pending = Pending(world, tmp or final, final, facts, error, begin)
        if error is None:
            fragments = engine.fragments_to_save()
            if overlap:
                copies = {fragment: engine.read(fragment).to("cpu", copy=True) for fragment in fragments}
                pending.write(fragments, copies.__getitem__, overlap=True)
            else:
                pending.write(fragments, engine.read, overlap=False)
        pending.still_seconds = time.perf_counter() - begin
        return pending

    def finish(self, pending: Pending) -> SavedCheckpoint | None:
        """Wait for this rank's file, and commit if all ranks have written; all ranks call it. Returns as `save`."""
        begin = time.perf_counter()
        error = pending.error
        if error is None:
            error = _first(pending.result())
        if error is None:
            files = {file: facts for each in gather_objects(pending.files) for file, facts in each.items()}
            mib = sum(facts["bytes"] for facts in files.values()) / 2**20
            manifest = {**pending.facts, "files": files}
            commit = functools.partial(self._commit, pending.tmp, pending.final, manifest)
            error = _first(_failure(commit)[1] if pending.world.is_main else None)
        if error is not None:
            if pending.world.is_main:
                if pending.tmp != pending.final:
                    shutil.rmtree(pending.tmp, ignore_errors=True)
                log.warning(
                    "checkpoint %s could not be saved (%s); the run goes on and tries again at the next save",
                    pending.final,
                    error,
                )
            return None
        now = time.perf_counter()
        saved = SavedCheckpoint(pending.final, pending.still_seconds + now - begin, now - pending.begun_at, mib)
        if pending.world.is_main:
            log.info(
                "checkpoint %s: %.1f MiB in %.2f s, of which training stood still for %.2f s",
                *(saved.path, saved.mib, saved.seconds, saved.still_seconds),
            )
            name = pending.final.name
            for tidy in (lambda: write_atomically(self.folder / "latest", name), lambda: self._prune(pending.final)):
                if error := _failure(tidy)[1]:
                    log.warning("%s could not be tidied up (%s)", self.folder, error)
        return saved

    def _make_room(self, final: Path) -> Path:
        """Remove left-over folders, as far as possible, and make a new folder for a checkpoint's files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left_over in self.folder.glob("tmp-*"):
            if error := _failure(functools.partial(_discard, left_over))[1]:
                log.warning("%s is left over and cannot be removed (%s)", left_over, error)
        tmp = _fresh(final.with_name(f"tmp-{final.name}"))
        tmp.mkdir()
        return tmp

    def _commit(self, tmp: Path, final: Path, manifest: dict[str, Any]) -> None:
        write_manifest(tmp, manifest)
        if os.path.lexists(final):
            # A run reaches a step whose folder exists only where that folder was found to be damaged.
            _remove(final)
        tmp.rename(final)
        self._damaged.discard(final.name)
        sync(self.folder)

    def _prune(self, newest: Path) -> None:
        """Remove checkpoints that are not to be kept: whole ones up to `newest`, and those found damaged."""
        whole = [path for path in self.complete() if _step(path) <= _step(newest) and path.name not in self._damaged]
        kept = set(whole[: self.keep])
        if self.keep_every_steps:
            kept |= {path for path in whole if _step(path) % self.keep_every_steps == 0}
        for path in self._all():
            if path not in kept and (path in whole or path.name in self._damaged):
                _remove(path)

    def complete(self) -> list[Path]:
        """Checkpoints whose files are all there with the right sizes, newest first. Files are not hashed."""
        return [path for path in self._all() if self._look(path)[1] is None]

    def newest(self) -> Path | None:
        """The newest of the complete checkpoints. `load_newest` finds the same one, unless bytes of it have changed.

        Raises DataError where a newer checkpoint cannot be read and may be sound.
        """
        for path in self._all():
            problem = self._look(path)[1]
            if problem is None:
                return path
            if not problem.damaged:
                raise DataError(_sentence(path, problem))
        return None

    @property
    def anything(self) -> bool:
        """Whether anything has a checkpoint's name, whole or not."""
        return bool(self._all())

    def _look(self, path: Path, *, hashed: slice = slice(0)) -> tuple[dict[str, Any], Problem | None]:
        """A checkpoint's manifest, and why it cannot be loaded. hashed: which of its files are hashed."""
        manifest: dict[str, Any] = {}

        def look() -> None:
            manifest.update(read_manifest(path, self.state))
            _check_files(path, manifest["files"], hashed=sorted(manifest["files"])[hashed])

        return manifest, _problem_of(look)

    def _all(self) -> list[Path]:
        """Everything with a checkpoint's name, newest first. Raises DataError where the folder cannot be read."""
        try:
            names = [entry.name for entry in os.scandir(self.folder)]
        except FileNotFoundError:
            if self.folder.is_symlink():
                raise DataError(
                    f"{self.folder} is a link to {self.folder.readlink()}, which is not there; see that its disk is "
                    "mounted, or remove the link"
                ) from None
            return []
        except OSError as error:
            raise DataError(f"{self.folder} cannot be read ({error.strerror}); fix that and start again") from error
        return sorted((self.folder / name for name in names if _NAME.fullmatch(name)), key=_step, reverse=True)

    def load_newest(self, engine: Loadable, *, before_step: int | None = None) -> dict[str, Any] | None:
        """Load the newest whole checkpoint into the engine; its state, or None where there is none. All ranks call it.

        before_step: only checkpoints before that step are considered.

        Ranks share the hashing of the files; then each rank reads what it needs from any of them. Raises Refused, on
        all ranks, for a checkpoint that cannot be read but may be sound, or that has other frozen weights than this
        model.
        """
        world = engine.world
        found: list[str] = []
        listing = _problem_of(lambda: found.extend(path.name for path in self._all()))
        if (listing := _worst(listing and Problem(listing.text, damaged=False))) is not None:
            raise Refused(listing.text)
        for name in gather_objects(found)[0]:
            path = self.folder / name
            if before_step is not None and _step(path) >= before_step:
                continue
            manifest, problem = self._look(path, hashed=slice(world.rank, None, world.size))
            problem = _worst(problem)
            with ExitStack() as stack:
                if problem is None:
                    saved, problem = _open(path, manifest, engine, stack)
                    problem = _worst(problem)
                if problem is None:
                    self._compare_frozen(path, manifest, world)
                    engine.load(saved.read, optimizer_steps=manifest["optimizer_steps"])
                    return manifest["state"]
            if not problem.damaged:
                raise Refused(_sentence(path, problem))
            self._damaged.add(name)
            if world.is_main:
                log.warning(
                    "checkpoint %s is damaged (%s); it is passed over for the one before it", path, problem.text
                )
        return None

    def _compare_frozen(self, path: Path, manifest: Mapping[str, Any], world: World) -> None:
        """Raise Refused if the model's frozen weights, which are not saved, differ from those of the checkpoint."""
        saved = manifest.get("frozen", "")
        if self.frozen and not saved and world.is_main:
            log.warning("checkpoint %s does not say which frozen weights it belongs to; they are not compared", path)
        if any(gather_objects(bool(saved) and saved != self.frozen)):
            raise Refused(
                f"checkpoint {path} was trained over other frozen weights than those that model.source now gives; "
                "bring back the model folder that the run began with"
            )


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _failure(action: Callable[[], T]) -> tuple[T | None, str | None]:
    """An action's result and None, or None and the error that prevented it, such as a full disk."""
    try:
        return action(), None
    except (OSError, DataError) as error:
        return None, str(error)


def _first(problem: str | None) -> str | None:
    """The first rank's problem, the same on all ranks; None where no rank has one. All ranks call it."""
    problems = gather_objects(problem)
    return next((f"rank {rank}: {each}" for rank, each in enumerate(problems) if each is not None), None)


def _worst(problem: Problem | None) -> Problem | None:
    """One of the ranks' problems, the same on all ranks; one that is no damage comes first. All ranks call it."""
    found = [
        Problem(f"rank {rank}: {each.text}", each.damaged)
        for rank, each in enumerate(gather_objects(problem))
        if each is not None
    ]
    return min(found, key=lambda each: each.damaged, default=None)


def _problem_of(look: Callable[[], object]) -> Problem | None:
    """What is wrong with a checkpoint, or None. Missing or senseless content is damage; else it may be sound."""
    try:
        look()
    except OtherFormat as error:
        return Problem(str(error), damaged=False)
    except OSError as error:
        absent = isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError))
        return Problem(f"{error.filename}: {error.strerror}" if error.filename else str(error), damaged=absent)
    except SafetensorError as error:
        return Problem(str(error), damaged="(os error" not in str(error))
    except (DataError, ValueError, IndexError) as error:
        return Problem(str(error), damaged=True)
    return None


def _sentence(path: Path, problem: Problem) -> str:
    return (
        f"checkpoint {path} cannot be read, and may be sound ({problem.text}); nothing was changed: fix that and "
        "start again, or move that checkpoint away to go on from the one before it"
    )


def _remove(path: Path) -> None:
    """Rename a checkpoint, then remove it, so that no kill leaves half of it under its own name."""
    doomed = _fresh(path.with_name(f"tmp-old-{path.name}"))
    path.rename(doomed)
    _discard(doomed)


def _discard(path: Path) -> None:
    """Remove a folder, a file or a link. A link's target stays, because it belongs to somebody else."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _fresh(path: Path) -> Path:
    """A path that does not exist: `path` itself, or `path` with a number after it."""
    names = itertools.chain([path], (path.with_name(f"{path.name}.{number}") for number in itertools.count(1)))
    return next(each for each in names if not os.path.lexists(each))


def write_fragments(path: Path, fragments: Sequence[Fragment], read: Callable[[Fragment], Tensor]) -> dict[str, Any]:
    """Write fragments as one safetensors file, reading them one by one. Returns the file's size and sha256."""
    header: dict[str, Any] = {}
    end = 0
    for fragment in fragments:
        numel = fragment.stop - fragment.start
        begin, end = end, end + numel * _FLOAT32_BYTES
        header[f"{fragment.kind}/{fragment.start}/{fragment.name}"] = {
            "dtype": "F32",
            "shape": [numel],
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:

        def put(block: bytes | memoryview) -> None:
            file.write(block)
            digest.update(block)

        put(len(text).to_bytes(8, "little"))
        put(text)
        for fragment in fragments:
            values = read(fragment)
            assert values.dtype == torch.float32 and values.shape == (fragment.stop - fragment.start,), fragment
            put(values.cpu().contiguous().numpy().data.cast("B"))
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


class _SavedFragments:
    """A checkpoint's files as one: any range of any parameter, put together from the fragments that hold it."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], list[tuple[int, int, Any]]] = defaultdict(list)

    def open(self, path: Path, files: Sequence[str], stack: ExitStack) -> None:
        """Open the files until `stack` closes. Raises SafetensorError for a file of another format."""
        for file in files:
            opened = stack.enter_context(safe_open(path / file, framework="pt"))
            for key in opened.keys():  # noqa: SIM118, it is no dict
                kind, start, name = key.split("/", 2)
                values = opened.get_slice(key)
                self._runs[kind, name].append((int(start), int(start) + values.get_shape()[0], values))
        for runs in self._runs.values():
            runs.sort(key=lambda run: run[0])

    def lacks(self, kind: str, name: str, numel: int) -> bool:
        """Whether the fragments fail to cover a parameter's elements from first to last, each exactly once."""
        reached = 0
        for start, stop, _ in self._runs[kind, name]:
            if start != reached:
                return True
            reached = stop
        return reached != numel

    def has(self, name: str, kinds: Sequence[str]) -> bool:
        """Whether there are values of any of these kinds of a parameter."""
        return any(self._runs.get((kind, name)) for kind in kinds)

    def read(self, fragment: Fragment) -> Tensor:
        """float32 [stop - start]."""
        values = torch.empty(fragment.stop - fragment.start)
        for start, stop, run in self._runs[fragment.kind, fragment.name]:
            begin, end = max(start, fragment.start), min(stop, fragment.stop)
            if begin < end:
                values[begin - fragment.start : end - fragment.start] = run[begin - start : end - start]
        return values


def _open(
    path: Path, manifest: Mapping[str, Any], engine: Loadable, stack: ExitStack
) -> tuple[_SavedFragments, Problem | None]:
    """A checkpoint's fragments, and the problem where they are not the fragments that the engine needs."""
    saved = _SavedFragments()

    def look() -> None:
        saved.open(path, sorted(manifest["files"]), stack)
        shapes = engine.shapes()
        if manifest["parameters"] != shapes:
            raise OtherFormat("its parameters are not this model's")
        beside = engine.kept_beside() if manifest["optimizer_steps"] else {}
        for name, shape in shapes.items():
            for kind in (MASTER, *beside.get(name, ())):
                if saved.lacks(kind, name, math.prod(shape)):
                    if kind != MASTER and saved.has(name, {MOMENTS: MOMENTUM, MOMENTUM: MOMENTS}[beside[name]]):
                        raise OtherFormat(f"{name} was trained with another optimizer than this run's optim.name")
                    raise DataError(f"parts of {kind} of {name} are missing")

    return saved, _problem_of(look)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_atomically(folder / _MANIFEST, json.dumps({**manifest, "sha256": _digest_of(manifest)}))


def _digest_of(manifest: Mapping[str, Any]) -> str:
    """The digest of all other keys. A flipped bit can leave valid JSON, with another place in the data."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return digest_of(rest)


def read_manifest(path: Path, state: type[Record] = SavedState) -> dict[str, Any]:
    """A checkpoint's manifest, checked. Raises DataError where it is damaged or of another format, or OSError."""
    _refuse_dangling(path)
    manifest = parse_json((path / _MANIFEST).read_bytes(), where="its manifest", hint=_RESTORE)
    if not isinstance(manifest, dict):
        raise DataError("its manifest holds no JSON object")
    check_record(manifest, _Manifest, where="its manifest", hint=_RESTORE)
    if manifest.get("sha256") != _digest_of(manifest):
        raise DataError("its manifest was changed since it was written")
    check_record(manifest["state"], state, where="the state in its manifest", hint=_RESTORE)
    if manifest["state"]["step"] != _step(path):
        raise DataError(f"its manifest is of step {manifest['state']['step']}")
    return manifest


def _check_files(path: Path, files: Mapping[str, Mapping[str, Any]], *, hashed: Sequence[str]) -> None:
    """Raises DataError for a wrong size or, in a file of `hashed`, a wrong sha256; OSError for an unreadable file."""
    for file, facts in files.items():
        _refuse_dangling(path / file)
        size = (path / file).stat().st_size
        if size != facts["bytes"]:
            raise DataError(f"{file} has {size} bytes, not {facts['bytes']}")
        if file in hashed:
            with (path / file).open("rb") as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != facts["sha256"]:
                    raise DataError(f"{file} is not what was written: its sha256 differs")


def _refuse_dangling(path: Path) -> None:
    """Raise OSError for a link without a target. It is no damage, because the target's disk may come back."""
    if path.is_symlink() and not path.exists():
        raise OSError(errno.ESTALE, f"a link to {path.readlink()}, which is not there", str(path))
