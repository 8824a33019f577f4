"""Checkpoints that are whole or absent, and the run folder they live in.

A checkpoint is a folder: a safetensors file a rank, and a manifest. A file holds the pieces of float32 parameters and
Adam moments that its rank had, each named `kind/start/parameter`: a run of that parameter's flattened elements. So any
number of ranks at any ZeRO stage and precision can read it, each taking the ranges it needs and no more. The manifest
holds the rest, a few global numbers: random draws are derived from (seed, step, rank) and (seed, epoch, sample), so no
generator is stored. Nothing is pickled, so reading a checkpoint runs no code of whoever wrote it.

Whole or absent: all ranks write into `tmp-step_N` and fsync; each says the size and sha256 of its file or what went
wrong; rank 0 writes the manifest, renames the folder (the commit) and moves `latest`. If any rank failed, all go on
training, and the folder is removed. Before a checkpoint is loaded, every file is hashed; a damaged one is named and
the one before it is used. `latest` is for people: what is loaded is the newest whole folder.

Training goes on while files are written: each rank copies its pieces to host memory, and a thread writes the copy. The
thread takes part in no collective, which may not mix with those of training: the ranks agree at the end of a later
step, in the sum they take anyway, that all have written, and commit then.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data.files import sync, write_atomically
from data.secrets import without_variables
from trainer.config import BEGUN, ConfigError, Recipe, build_recipe, read_toml
from trainer.distributed import World, gather_objects
from trainer.engine import MASTER, MOMENTS, Piece

log = logging.getLogger(__name__)

_FORMAT = 1
_MANIFEST = "manifest.json"
_FLOAT32_BYTES = 4

# What may change between the parts of one run: how it is watched and kept, and where it runs.
_FREE_SECTIONS = ("engine", "checkpoint", "log", "evaluation", "debug")
_FREE_KEYS = (
    "run.output",
    "run.resume",
    "train.stop_at_step",
    "train.stop_after_minutes",
    "train.hang_seconds",
    "train.max_skipped_steps",
    "train.micro_batch_size",
    "data.num_workers",
    "data.cache_dir",
    "data.cache_gib",
    "data.verify",
    "model.attention",
    "train.compile",
    "train.activation_checkpointing",
    "train.logits_memory_mib",
    "train.score_memory_mib",
)


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
            self._failure = _failure(lambda: self.files.update({file.name: _write_pieces(file, pieces, read)}))

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
    """Writes checkpoints, keeps the newest few and those of every so many steps, and finds the newest whole one."""

    folder: Path
    keep: int
    keep_every_steps: int = 0  # 0: none for good

    def save(self, engine: Saveable, state: dict[str, Any]) -> SavedCheckpoint | None:
        """Write a checkpoint of `state["step"]`, whose values are JSON's; all ranks call it.

        None, with a warning, where a rank could not write: whatever was saved before is untouched.
        """
        return self.finish(self.begin(engine, state, overlap=False))

    def begin(self, engine: Saveable, state: dict[str, Any], *, overlap: bool) -> Pending:
        """Start to write a checkpoint; all ranks call it, and later `finish`. `overlap`: a thread writes a copy."""
        begin = time.perf_counter()
        tmp = self.folder / f"tmp-step_{state['step']:08d}"
        world = engine.world
        error = _first(_failure(lambda: self._make_room(tmp)) if world.is_main else None)
        facts = {
            "format": _FORMAT,
            "ranks": world.size,
            "optimizer_steps": engine.optimizer_steps(),
            "parameters": engine.shapes(),
            "state": state,
        }
        pending = Pending(world, tmp, tmp.with_name(tmp.name.removeprefix("tmp-")), facts, error, begin)
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
            error = _first(_failure(commit) if pending.world.is_main else None)
        if error is not None:
            if pending.world.is_main:
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
                if error := _failure(tidy):
                    log.warning("%s could not be tidied up (%s)", self.folder, error)
        return saved

    def _make_room(self, tmp: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for left_over in self.folder.glob("tmp-*"):
            shutil.rmtree(left_over)
        tmp.mkdir()

    def _commit(self, tmp: Path, final: Path, manifest: dict[str, Any]) -> None:
        _write_manifest(tmp, manifest)
        if final.exists():  # damaged, or the run would not be at this step again
            _remove(final)
        tmp.rename(final)
        sync(self.folder)

    def _prune(self, newest: Path) -> None:
        """Remove what is not to be kept. What is later than `newest` was damaged, or it would have been loaded."""
        whole = [path for path in self.complete() if _step(path) <= _step(newest)]
        kept = set(whole[: self.keep])
        if self.keep_every_steps:
            kept |= {path for path in whole if _step(path) % self.keep_every_steps == 0}
        for path in self._all():
            if path not in kept:
                _remove(path)

    def complete(self) -> list[Path]:
        """Checkpoints whose files are all there with the right sizes, newest first. Their bytes are not looked at."""
        whole = []
        for path in self._all():
            manifest, problem = _read_manifest(path)
            if (problem or _damage(path, manifest, hashed=())) is None:
                whole.append(path)
        return whole

    def _all(self) -> list[Path]:
        found = [path for path in self.folder.glob("step_*") if path.name.removeprefix("step_").isdigit()]
        return sorted(found, key=_step, reverse=True)

    def load_newest(self, engine: Loadable, *, before_step: int | None = None) -> dict[str, Any] | None:
        """Load the newest whole checkpoint into the engine; its state, or None where there is none. All ranks call it.

        before_step: of those before that step only.

        Ranks share the hashing of the files, then each reads what it needs of any of them.
        """
        world = engine.world
        found = [path.name for path in self._all() if before_step is None or _step(path) < before_step]
        for name in gather_objects(found)[0]:
            path = self.folder / name
            manifest, problem = _read_manifest(path)
            if problem is None:
                problem = _damage(path, manifest, hashed=sorted(manifest["files"])[world.rank :: world.size])
            problem = _first(problem)
            with ExitStack() as stack:
                if problem is None:
                    saved, problem = _open(path, manifest, engine, stack)
                    problem = _first(problem)
                if problem is None:
                    engine.load(saved.read, optimizer_steps=manifest["optimizer_steps"])
                    return manifest["state"]
            if world.is_main:
                log.warning("checkpoint %s is damaged (%s); it is passed over for the one before it", path, problem)
        return None


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _failure(action: Callable[[], None]) -> str | None:
    """What the system said no to, such as a full disk; None where it did not."""
    try:
        action()
    except OSError as error:
        return str(error)
    return None


def _first(problem: str | None) -> str | None:
    """A problem that any rank has, the same on all; None where none has. All ranks call it."""
    problems = gather_objects(problem)
    return next((f"rank {rank}: {each}" for rank, each in enumerate(problems) if each is not None), None)


def _remove(path: Path) -> None:
    """Take a checkpoint away whole: no kill leaves half of one under its name."""
    doomed = path.with_name(f"tmp-old-{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _write_pieces(path: Path, pieces: Sequence[Piece], read: Callable[[Piece], Tensor]) -> dict[str, Any]:
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

    def __init__(self, path: Path, files: Sequence[str], stack: ExitStack) -> None:
        """Opens the files until `stack` closes. Raises SafetensorError where one is no such file."""
        self._runs: dict[tuple[str, str], list[tuple[int, int, Any]]] = defaultdict(list)
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


def _open(path: Path, manifest: Mapping[str, Any], engine: Loadable, stack: ExitStack) -> tuple[Any, str | None]:
    """A checkpoint's pieces, or why they are not those that the engine needs."""
    try:
        saved = _SavedPieces(path, sorted(manifest["files"]), stack)
    except (SafetensorError, OSError, ValueError, IndexError) as error:
        return None, str(error)
    shapes = engine.shapes()
    if manifest["parameters"] != shapes:
        return None, "its parameters are not this model's"
    kinds = (MASTER, *MOMENTS) if manifest["optimizer_steps"] else (MASTER,)
    for name, shape in shapes.items():
        for kind in kinds:
            if saved.lacks(kind, name, math.prod(shape)):
                return None, f"parts of {kind} of {name} are missing"
    return saved, None


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_atomically(folder / _MANIFEST, json.dumps({**manifest, "sha256": _digest_of(manifest)}))


def _digest_of(manifest: Mapping[str, Any]) -> str:
    """Of all but the digest itself: a flipped bit can leave valid JSON, with another place in the data."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _read_manifest(path: Path) -> tuple[dict[str, Any], str | None]:
    """A checkpoint's manifest, or what is wrong with it."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {}, f"its manifest cannot be read: {error}"
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        return {}, f"its manifest is not of format {_FORMAT}"
    if manifest.get("sha256") != _digest_of(manifest):
        return {}, "its manifest was changed since it was written"
    return manifest, None


def _damage(path: Path, manifest: Mapping[str, Any], *, hashed: Sequence[str]) -> str | None:
    """Which file of a checkpoint is missing, of another size or, of those to be hashed, of other bytes; None: none."""
    for file, facts in manifest["files"].items():
        try:
            size = (path / file).stat().st_size
            if size != facts["bytes"]:
                return f"{file} has {size} bytes, not {facts['bytes']}"
            if file in hashed:
                with (path / file).open("rb") as opened:
                    if hashlib.file_digest(opened, "sha256").hexdigest() != facts["sha256"]:
                        return f"{file} is not what was written: its sha256 differs"
        except OSError as error:
            return str(error)
    return None


def no_checkpoint(output: str | Path) -> ConfigError:
    return ConfigError(f"{output} holds no whole checkpoint to resume; use --resume auto to start from the beginning")


def check_output_folder(recipe: Recipe) -> None:
    """Refuse to write over another run, or to resume what is not there or is another run.

    Reads only, so every rank may call it.
    """
    output = Path(recipe.run.output)
    saved = output / "recipe.toml"
    if output.exists() and not output.is_dir():
        raise ConfigError(f"run.output {output} is a file; name a folder")
    if not saved.is_file():
        if recipe.run.resume == "required":
            raise ConfigError(f"run.resume = 'required', but {output} holds no run; check run.output or use 'auto'")
        if output.is_dir() and any(path.name not in BEGUN for path in output.iterdir()):
            raise ConfigError(f"run.output {output} holds files that are no run of ours; name another folder")
        return
    if recipe.run.resume == "never":
        raise ConfigError(
            f"run.output {output} holds another run; go on with it by --resume auto, or name another folder"
        )
    if recipe.run.resume == "required" and not Checkpointer(output / "checkpoints", keep=1).complete():
        raise no_checkpoint(output)
    before = _flat(build_recipe(read_toml(saved)))
    for key, value in _flat(recipe).items():
        free = key.split(".")[0] in _FREE_SECTIONS or key in _FREE_KEYS
        # The folder's recipe lacks passwords, and they may change.
        if not free and _compared(key, before[key]) != _compared(key, value):
            raise ConfigError(
                f"run.output {output} holds a run with {key} = {before[key]!r}, not {value!r}; "
                "resume with the run's own recipe, or name another folder"
            )


def _compared(key: str, value: Any) -> Any:
    return [without_variables(each) for each in value] if key == "data.shards" else value


def _flat(recipe: Recipe) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, table in vars(recipe).items() for key, value in vars(table).items()}
