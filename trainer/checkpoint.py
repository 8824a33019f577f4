"""Checkpoints that are whole or absent, and the run folder they live in.

All ranks write into `tmp-step_N`; after a barrier rank 0 lists what must be there, renames the folder (the commit) and
moves `latest`. DeepSpeed's own `latest` is written before other ranks have finished, so it is not used. What is not
committed is never loaded. Resume state is the optimizer's and a few global numbers: random draws are derived from
(seed, step, rank) and (seed, epoch, sample), so no generator is stored.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from data.files import sync, write_atomically
from trainer.config import ConfigError, Recipe, build_recipe, read_toml
from trainer.engine import Engine, checkpoint_layout

log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"

# What may change between the parts of one run: how it is watched and kept, and where it runs.
_FREE_SECTIONS = ("engine", "checkpoint", "log", "evaluation")
_FREE_KEYS = (
    "run.output",
    "run.resume",
    "train.stop_at_step",
    "train.micro_batch_size",
    "data.num_workers",
    "model.attention",
    "train.activation_checkpointing",
    "train.logits_memory_mib",
    "train.score_memory_mib",
)


@dataclass
class Checkpointer:
    """Saves every so many steps, keeps the newest few, and finds the newest whole one."""

    folder: Path
    every_steps: int
    keep: int

    def save(self, engine: Engine, state: dict[str, Any]) -> Path:
        """Write a checkpoint of `state["step"]`; all ranks call it, and none returns before it is committed."""
        name = f"step_{state['step']:08d}"
        tmp, final = self.folder / f"tmp-{name}", self.folder / name
        if engine.world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(tmp, ignore_errors=True)
            tmp.mkdir()
        dist.barrier()
        engine.save(self.folder, tmp.name, state)
        dist.barrier()
        if engine.world.is_main:
            files = {
                str(path.relative_to(tmp)): path.stat().st_size for path in sorted(tmp.rglob("*")) if path.is_file()
            }
            for file in files:
                sync(tmp / file)
            write_atomically(
                tmp / _MANIFEST,
                json.dumps(
                    {"step": state["step"], "layout": _layout(engine.ds_config, engine.world.size), "files": files}
                ),
            )
            shutil.rmtree(final, ignore_errors=True)
            tmp.rename(final)
            sync(self.folder)
            write_atomically(self.folder / "latest", name)
            for old in self.complete()[self.keep :]:
                shutil.rmtree(old)
        dist.barrier()
        return final

    def complete(self) -> list[Path]:
        """Whole checkpoints, newest first."""
        if not self.folder.is_dir():
            return []
        return [path for path in sorted(self.folder.glob("step_*"), reverse=True) if _is_complete(path)]

    def load_newest(self, engine: Engine) -> dict[str, Any] | None:
        """Load the newest whole checkpoint into the engine; its state, or None where there is none."""
        whole = self.complete() if engine.world.is_main else []
        found: list[str | None] = [str(whole[0]) if whole else None]
        dist.broadcast_object_list(found, src=0)
        if found[0] is None:
            return None
        path = Path(found[0])
        return engine.load(path.parent, path.name)


def _is_complete(path: Path) -> bool:
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        return all((path / file).stat().st_size == size for file, size in manifest["files"].items())
    except (OSError, ValueError, KeyError):
        log.warning("checkpoint %s is not whole; it is passed over", path)
        return False


def _layout(ds_config: dict[str, Any], world_size: int) -> dict[str, Any]:
    return {"ranks": world_size, **checkpoint_layout(ds_config)}


def check_output_folder(recipe: Recipe, ds_config: dict[str, Any], *, world_size: int) -> None:
    """Refuse to write over another run, or to resume what is not there or was saved by another kind of engine.

    Reads only, so every rank may call it.
    """
    output = Path(recipe.run.output)
    saved = output / "recipe.toml"
    if output.exists() and not output.is_dir():
        raise ConfigError(f"run.output {output} is a file; name a folder")
    if not saved.is_file():
        if recipe.run.resume == "required":
            raise ConfigError(f"run.resume = 'required', but {output} holds no run; check run.output or use 'auto'")
        if output.is_dir() and any(output.iterdir()):
            raise ConfigError(f"run.output {output} holds files that are no run of ours; name another folder")
        return
    if recipe.run.resume == "never":
        raise ConfigError(
            f"run.output {output} holds another run; go on with it by --resume auto, or name another folder"
        )
    checkpoints = Checkpointer(output / "checkpoints", 1, 1).complete()
    if recipe.run.resume == "required" and not checkpoints:
        raise ConfigError(
            f"{output} holds no whole checkpoint to resume; use --resume auto to start from the beginning"
        )
    before = _flat(build_recipe(read_toml(saved)))
    for key, value in _flat(recipe).items():
        free = key.split(".")[0] in _FREE_SECTIONS or key in _FREE_KEYS
        if not free and before[key] != value:
            raise ConfigError(
                f"run.output {output} holds a run with {key} = {before[key]!r}, not {value!r}; "
                "resume with the run's own recipe, or name another folder"
            )
    if checkpoints:
        saved_layout = json.loads((checkpoints[0] / _MANIFEST).read_text(encoding="utf-8"))["layout"]
        for key, ours in _layout(ds_config, world_size).items():
            if saved_layout[key] != ours:
                raise ConfigError(
                    f"checkpoint {checkpoints[0]} was saved with {key} = {saved_layout[key]} and this run has {ours}; "
                    "resume as it was saved"
                )


def _flat(recipe: Recipe) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, table in vars(recipe).items() for key, value in vars(table).items()}
