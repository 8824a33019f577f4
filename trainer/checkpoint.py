"""Checkpoints that are whole or absent.

A checkpoint is a folder: a safetensors file a rank, and a manifest. A file holds the pieces of float32 parameters and
Adam moments that its rank had, each named `kind/start/parameter`: a run of that parameter's flattened elements. So any
number of ranks at any ZeRO stage and precision can read it, each taking the ranges it needs and no more. The manifest
holds the rest, a few global numbers: random draws are derived from (seed, step, rank) and (seed, epoch, sample), so no
generator is stored. Nothing is pickled, so reading a checkpoint runs no code of whoever wrote it.

Whole or absent: all ranks write into `tmp-step_N` and fsync; each says the size and sha256 of its file or what went
wrong; rank 0 writes the manifest, renames the folder (the commit) and moves `latest`. If any rank failed, all go on
training, and the folder is removed. Before a checkpoint is loaded, every file is hashed; a damaged one is named and
the one before it is used. One that cannot be read at this moment, or that another version wrote, is not damaged: it
ends the start, in one sentence, with nothing changed. What a run has neither written nor looked at it removes only if
it is whole and older than what is kept. `latest` is for people: what is loaded is the newest whole folder.

Training goes on while files are written: each rank copies its pieces to host memory, and a thread writes the copy. The
thread takes part in no collective, which may not mix with those of training: the ranks agree at the end of a later
step, in the sum they take anyway, that all have written, and commit then.
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
from trainer.engine import MASTER, MOMENTS, Piece

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
    """What every checkpoint's state holds; a run's own has more (trainer/loop.py)."""

    step: int = Field(ge=0, le=2**53)


class _Manifest(Record):
    format: Literal[1]
    ranks: int = Field(ge=1)
    optimizer_steps: int = Field(ge=0, le=2**53)
    parameters: dict[str, list[int]]
    state: dict[str, Any]
    # No name of a file leads out of the folder.
    files: dict[Annotated[str, Field(pattern=r"^rank_[0-9]{5,}\.safetensors$")], _FileFacts] = Field(min_length=1)
    frozen: str = ""  # fingerprint of the weights that are not in it; none: all are, or an earlier version wrote it


@dataclass(frozen=True)
class Problem:
    """Why a checkpoint cannot be loaded."""

    text: str
    damaged: bool  # else it may be sound: it cannot be read at this moment, or another version wrote it


class Loadable(Protocol):
    """What takes a checkpoint's values."""

    world: World

    def shapes(self) -> dict[str, list[int]]: ...
    def load(self, read: Callable[[Piece], Tensor], *, optimizer_steps: int) -> None: ...


class Saveable(Loadable, Protocol):
    """What a checkpoint is of (trainer/engine.py)."""

    def optimizer_steps(self) -> int: ...
    def pieces_to_save(self) -> list[Piece]: ...
    def read(self, piece: Piece) -> Tensor: ...


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
    facts: dict[str, Any]  # the manifest but for its files
    error: str | None  # before any rank wrote; the same on all
    begun_at: float
    still_seconds: float = 0.0
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    _failure: str | None = None
    _thread: threading.Thread | None = None

    @property
    def written(self) -> bool:
        """Whether `finish` need not wait for this rank."""
        return self._thread is None or not self._thread.is_alive()

    def write(self, pieces: Sequence[Piece], read: Callable[[Piece], Tensor], *, overlap: bool) -> None:
        def work() -> None:
            file = self.tmp / f"rank_{self.world.rank:05d}.safetensors"
            _, self._failure = _failure(lambda: self.files.update({file.name: write_pieces(file, pieces, read)}))

        if overlap:
            self._thread = threading.Thread(target=work)
            self._thread.start()
        else:
            work()

    def result(self) -> str | None:
        """Why this rank could not write, or None, once it has tried."""
        if self._thread is not None:
            self._thread.join()
        return self._failure


class Saves:
    """The checkpoints of a run, one at a time in the making."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        engine: Saveable,
        *,
        state_of: Callable[[], dict[str, Any]],
        overlap: bool,
        report: Callable[[int, SavedCheckpoint], None],
    ) -> None:
        """state_of: what a checkpoint holds besides the engine's values. report: is told of each that was committed."""
        self._checkpointer, self._engine = checkpointer, engine
        self._state_of, self._overlap, self._report = state_of, overlap, report
        self._pending: Pending | None = None

    @property
    def written(self) -> bool:
        """Whether there is one that this rank has written, and `finish` has yet to commit."""
        return self._pending is not None and self._pending.written

    def begin(self) -> None:
        """Start one, after the last one is finished; all ranks call it."""
        self.finish()
        self._pending = self._checkpointer.begin(self._engine, self._state_of(), overlap=self._overlap)
        if not self._overlap:
            self.finish()

    def finish(self) -> None:
        """Commit the one in the making, if there is one; all ranks call it."""
        pending, self._pending = self._pending, None
        if pending is not None and (saved := self._checkpointer.finish(pending)) is not None:
            self._report(pending.facts["state"]["step"], saved)


@dataclass(frozen=True)
class Checkpointer:
    """Writes checkpoints, keeps the newest few and those of every so many steps, and finds the newest whole one.

    frozen: fingerprint of the weights that belong to the model and are not in its checkpoints.
    """

    folder: Path
    keep: int
    keep_every_steps: int = 0  # 0: none for good
    state: type[Record] = SavedState
    frozen: str = ""
    # Names of checkpoints that this process has seen to be damaged.
    _damaged: set[str] = field(default_factory=set)

    def save(self, engine: Saveable, state: dict[str, Any]) -> SavedCheckpoint | None:
        """Write a checkpoint of `state["step"]`, whose values are JSON's; all ranks call it.

        None, with a warning, where a rank could not write: whatever was saved before is untouched.
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
            pieces = engine.pieces_to_save()
            if overlap:
                copies = {piece: engine.read(piece).to("cpu", copy=True) for piece in pieces}
                pending.write(pieces, copies.__getitem__, overlap=True)
            else:
                pending.write(pieces, engine.read, overlap=False)
        pending.still_seconds = time.perf_counter() - begin
        return pending

    def finish(self, pending: Pending) -> SavedCheckpoint | None:
        """Wait until this rank's file is written, and commit if all are; all ranks call it. As for `save`."""
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
        """A new folder for a checkpoint's files, after clearing up what was left over; what cannot be removed stays."""
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
        """Remove what is not to be kept: whole ones up to `newest`, and those that were seen to be damaged."""
        whole = [path for path in self.complete() if _step(path) <= _step(newest) and path.name not in self._damaged]
        kept = set(whole[: self.keep])
        if self.keep_every_steps:
            kept |= {path for path in whole if _step(path) % self.keep_every_steps == 0}
        for path in self._all():
            if path not in kept and (path in whole or path.name in self._damaged):
                _remove(path)

    def complete(self) -> list[Path]:
        """Checkpoints whose files are all there with the right sizes, newest first. Their bytes are not looked at."""
        return [path for path in self._all() if self._look(path)[1] is None]

    def newest(self) -> Path | None:
        """The newest of them, as `load_newest` would find it but for bytes that changed.

        Raises DataError where one that may be sound, and newer, cannot be read.
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
        """Whether there is anything named as a checkpoint, whole or not."""
        return bool(self._all())

    def _look(self, path: Path, *, hashed: slice = slice(0)) -> tuple[dict[str, Any], Problem | None]:
        """A checkpoint's manifest, and why it cannot be loaded. hashed: which of its files are to be hashed."""
        manifest: dict[str, Any] = {}

        def look() -> None:
            manifest.update(read_manifest(path, self.state))
            _check_files(path, manifest["files"], hashed=sorted(manifest["files"])[hashed])

        return manifest, _problem_of(look)

    def _all(self) -> list[Path]:
        """What is named as a checkpoint, newest first. Raises DataError where the folder cannot be read."""
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

        before_step: of those before that step only.

        Ranks share the hashing of the files, then each reads what it needs of any of them. Raises Refused, on all
        ranks, where one cannot be read that may be sound, or is of other frozen weights than this model's.
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
        """Weights that do not train are not in a checkpoint: those now under it must be those it was trained on."""
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
    """What an action gives, and what the system said no to, such as a full disk; None where it did not."""
    try:
        return action(), None
    except (OSError, DataError) as error:
        return None, str(error)


def _first(problem: str | None) -> str | None:
    """A problem that any rank has, the same on all; None where none has. All ranks call it."""
    problems = gather_objects(problem)
    return next((f"rank {rank}: {each}" for rank, each in enumerate(problems) if each is not None), None)


def _worst(problem: Problem | None) -> Problem | None:
    """A problem that any rank has, the same on all: first one that ends the start. All ranks call it."""
    found = [
        Problem(f"rank {rank}: {each.text}", each.damaged)
        for rank, each in enumerate(gather_objects(problem))
        if each is not None
    ]
    return min(found, key=lambda each: each.damaged, default=None)


def _problem_of(look: Callable[[], object]) -> Problem | None:
    """What is wrong with a checkpoint. What is absent or makes no sense is damage; anything else may be sound."""
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
    """Take a checkpoint away whole: no kill leaves half of one under its name."""
    doomed = _fresh(path.with_name(f"tmp-old-{path.name}"))
    path.rename(doomed)
    _discard(doomed)


def _discard(path: Path) -> None:
    """Remove a folder, a file or a link; what a link leads to is somebody else's."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _fresh(path: Path) -> Path:
    """A name that nothing has: `path`'s own, or with a number behind it."""
    names = itertools.chain([path], (path.with_name(f"{path.name}.{number}") for number in itertools.count(1)))
    return next(each for each in names if not os.path.lexists(each))


def write_pieces(path: Path, pieces: Sequence[Piece], read: Callable[[Piece], Tensor]) -> dict[str, Any]:
    """Write pieces as one safetensors file, asking for them one by one; its size and sha256."""
    header: dict[str, Any] = {}
    end = 0
    for piece in pieces:
        numel = piece.stop - piece.start
        begin, end = end, end + numel * _FLOAT32_BYTES
        header[f"{piece.kind}/{piece.start}/{piece.name}"] = {
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
        for piece in pieces:
            values = read(piece)
            assert values.dtype == torch.float32 and values.shape == (piece.stop - piece.start,), piece
            put(values.cpu().contiguous().numpy().data.cast("B"))
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


class _SavedPieces:
    """A checkpoint's files as one: any range of any parameter, put together from the pieces that hold it."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], list[tuple[int, int, Any]]] = defaultdict(list)

    def open(self, path: Path, files: Sequence[str], stack: ExitStack) -> None:
        """Open the files until `stack` closes. Raises SafetensorError where one is no such file."""
        for file in files:
            opened = stack.enter_context(safe_open(path / file, framework="pt"))
            for key in opened.keys():  # noqa: SIM118, it is no dict
                kind, start, name = key.split("/", 2)
                values = opened.get_slice(key)
                self._runs[kind, name].append((int(start), int(start) + values.get_shape()[0], values))
        for runs in self._runs.values():
            runs.sort(key=lambda run: run[0])

    def lacks(self, kind: str, name: str, numel: int) -> bool:
        """Whether the pieces do not follow on one another from a parameter's first element to its last."""
        reached = 0
        for start, stop, _ in self._runs[kind, name]:
            if start != reached:
                return True
            reached = stop
        return reached != numel

    def read(self, piece: Piece) -> Tensor:
        """float32 [stop - start]."""
        values = torch.empty(piece.stop - piece.start)
        for start, stop, run in self._runs[piece.kind, piece.name]:
            begin, end = max(start, piece.start), min(stop, piece.stop)
            if begin < end:
                values[begin - piece.start : end - piece.start] = run[begin - start : end - start]
        return values


def _open(
    path: Path, manifest: Mapping[str, Any], engine: Loadable, stack: ExitStack
) -> tuple[_SavedPieces, Problem | None]:
    """A checkpoint's pieces, and why they are not those that the engine needs."""
    saved = _SavedPieces()

    def look() -> None:
        saved.open(path, sorted(manifest["files"]), stack)
        shapes = engine.shapes()
        if manifest["parameters"] != shapes:
            raise DataError("its parameters are not this model's")
        kinds = (MASTER, *MOMENTS) if manifest["optimizer_steps"] else (MASTER,)
        for name, shape in shapes.items():
            for kind in kinds:
                if saved.lacks(kind, name, math.prod(shape)):
                    raise DataError(f"parts of {kind} of {name} are missing")

    return saved, _problem_of(look)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_atomically(folder / _MANIFEST, json.dumps({**manifest, "sha256": _digest_of(manifest)}))


def _digest_of(manifest: Mapping[str, Any]) -> str:
    """Of all but the digest itself: a flipped bit can leave valid JSON, with another place in the data."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return digest_of(rest)


def read_manifest(path: Path, state: type[Record] = SavedState) -> dict[str, Any]:
    """A checkpoint's manifest, checked. Raises DataError where it is damaged or of another format, and OSError."""
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
    """Raises DataError for a file of another size or, of those to be hashed, of other bytes; OSError for others."""
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
    """A link that leads nowhere is no damage: the disk that its target was moved to may be there again."""
    if path.is_symlink() and not path.exists():
        raise OSError(errno.ESTALE, f"a link to {path.readlink()}, which is not there", str(path))
