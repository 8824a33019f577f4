"""Checks of a run's folder before the run begins: whose it is, whether its run can go on, and whether it is writable.

All checks are made before a device starts, and a folder that is refused is left as it was.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

from data.ground.errors import ConfigError
from data.ground.files import describe_os_error, is_unicode
from data.ground.secrets import without_variables
from trainer.checkpoint import Checkpointer
from trainer.config.load import build_recipe, read_toml
from trainer.config.read_keys import is_read
from trainer.config.schema import Recipe, flat
from trainer.monitoring.lines import FILE as METRICS_FILE
from trainer.monitoring.lines import sound_lines
from trainer.resilience.run_lock import LOCK, PROBE, is_begun

# Sections and keys that may change when a run is resumed: how it is watched and kept, and where it runs.
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
    "data.bad_shards",  # so that a run that a bad shard has ended can go on without it
    "model.attention",
    "train.compile",
    "train.activation_memory_mib",
    "train.activation_checkpointing",
    "train.logits_memory_mib",
    "train.score_memory_mib",
    "train.negatives_exchange",
)

# About the bytes that a run writes before its first step: recipe.toml, environment.json, ds_config.json and the lock.
_FIRST_BYTES = 12 * 1024


def check_output_folder(recipe: Recipe) -> None:
    """Refuse to overwrite another run, or to resume a run that is missing, cannot be loaded, or has another recipe.

    It only reads, so every rank may call it.
    """
    output = Path(recipe.run.output)
    _check_name(recipe.run.output)
    try:
        _check_folder(recipe, output)
    except OSError as error:
        raise _unusable(output, error) from error


def _check_name(name: str) -> None:
    if not name:
        raise ConfigError("run.output is empty; name the run's folder")
    if "\0" in name or not is_unicode(name):
        raise ConfigError(f"run.output {name!a} is no name that a folder can have; use UTF-8 without NUL")


def _check_folder(recipe: Recipe, output: Path) -> None:
    saved = output / "recipe.toml"
    if output.is_symlink() and not output.exists():
        raise ConfigError(
            f"run.output {output} is a link to {output.readlink()}, which is not there; see that its disk is mounted, "
            "or remove the link"
        )
    if output.exists() and not output.is_dir():
        raise ConfigError(f"run.output {output} is a file; name a folder")
    if not saved.is_file():
        if recipe.debug.replay:
            raise ConfigError(
                f"debug.replay = {recipe.debug.replay} is a step of a run, and {output} holds none; check run.output"
            )
        if recipe.run.resume == "required":
            raise ConfigError(f"run.resume = 'required', but {output} holds no run; check run.output or use 'auto'")
        if output.is_dir() and any(not is_begun(path.name) for path in output.iterdir()):
            raise ConfigError(f"run.output {output} holds files that are no run of ours; name another folder")
        return
    if recipe.run.resume == "never":
        raise ConfigError(
            f"run.output {output} holds another run; go on with it by --resume auto, or name another folder"
        )
    check_same_recipe(recipe)
    if not recipe.debug.replay:
        _check_metrics(output / METRICS_FILE)
    if Checkpointer(output / "checkpoints", keep=1).newest() is None and not recipe.replays_from_start:
        if recipe.run.resume == "required":
            raise ConfigError(no_checkpoint(output))
        if (lost := lost_training(output)) is not None:
            raise ConfigError(lost)


def _check_metrics(path: Path) -> None:
    """Raise OtherFormat for a line that another version wrote: a resumed run could neither keep nor drop it."""
    for _ in sound_lines(path):
        pass


def check_same_recipe(recipe: Recipe) -> None:
    """Refuse a recipe that differs from that of the run in its folder. That run is resumed, or is done.

    Keys that neither of them reads may differ: earlier versions accepted such keys, which are refused now, and may be
    removed from the recipe of a run that was begun with one.
    """
    output = Path(recipe.run.output)
    written = read_toml(output / "recipe.toml")
    try:
        before = build_recipe(written)
    except ConfigError as error:
        raise ConfigError(
            f"{output / 'recipe.toml'}, with which the run in that folder was started: {error}"
        ) from error
    old = flat(before)
    for key, value in flat(recipe).items():
        free = key.split(".")[0] in _FREE_SECTIONS or key in _FREE_KEYS
        idle = not is_read(before, key) and not is_read(recipe, key)
        # The folder's recipe lacks passwords, and they may change.
        if not free and not idle and _compared(key, old[key]) != _compared(key, value):
            raise ConfigError(
                f"run.output {output} holds a run with {key} = {old[key]!r}, not {value!r}; "
                "resume with the run's own recipe, or name another folder"
            )


def no_checkpoint(output: str | Path) -> str:
    return (
        f"{output} holds no whole checkpoint to resume; bring one back, or name another run.output to start from the "
        "beginning"
    )


def lost_training(output: Path) -> str | None:
    """Why a run without a loadable checkpoint must not start over unasked; None where nothing was saved."""
    signs = [name for name in ("DONE", "STOPPED") if (output / name).is_file()]
    steps = steps_trained(output / METRICS_FILE, saved=True)
    if steps:
        signs.append(f"a checkpoint of step {steps} in its {METRICS_FILE}")
    if Checkpointer(output / "checkpoints", keep=1).anything:
        signs.append("damaged checkpoints")
    if not signs:
        return None
    return (
        f"{output} has trained before ({', '.join(signs)}) and holds no whole checkpoint; bring one back, or name "
        "another run.output to start from the beginning"
    )


def steps_trained(metrics: Path, *, saved: bool = False) -> int:
    """The last step in metrics.jsonl; 0 where there is none. saved: count only steps with a checkpoint.

    Raises OtherFormat if another version wrote one of its lines.
    """
    return max((line.step for line in sound_lines(metrics) if not saved or line.is_of_checkpoint), default=0)


def prove_writable(output: Path) -> None:
    """Refuse a folder that cannot be made, or in which a run's first files cannot be written. Leaves nothing behind."""
    made = [folder for folder in (output, *output.parents) if not folder.exists()]
    try:
        output.mkdir(parents=True, exist_ok=True)
        handle, probe = tempfile.mkstemp(prefix=PROBE, dir=output)
        try:
            with os.fdopen(handle, "wb", buffering=0) as file:
                file.write(b"\0" * _FIRST_BYTES)
                file.write(b"\0")  # raises if the disk became full during the first write
                os.fsync(handle)
        finally:
            Path(probe).unlink()
        with contextlib.suppress(FileNotFoundError), (output / LOCK).open("r+b"):
            pass  # raises for a lock of another user
    except OSError as error:
        raise _unusable(output, error) from error
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _unusable(output: Path, error: OSError) -> ConfigError:
    name = error.filename if error.filename and PROBE not in os.fsdecode(error.filename) else str(output)
    sentence = describe_os_error(OSError(error.errno, error.strerror, name)) or f"{error}; name another folder"
    return ConfigError(f"run.output {output} cannot be used: {sentence}")


def _compared(key: str, value: Any) -> Any:
    return [without_variables(each) for each in value] if key == "data.shards" else value
