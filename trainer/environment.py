"""RUN/environment.json: with what a run was made. The run writes it, and exports read it for their model cards."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pydantic
import torch

from data.ground.records import Record
from data.ground.secrets import without_secrets
from trainer.distributed import World

FILE = "environment.json"
_PACKAGES = ("torch", "deepspeed", "transformers", "numpy", "tokenizers")


class Environment(Record):
    """The fields of environment.json in a run's folder. Each start of the run writes the file anew."""

    format: Literal[1] = 1
    command: list[str] = pydantic.Field(default_factory=list)
    commit: str | None = None
    world_size: int = pydantic.Field(default=1, ge=1)
    device: str | None = None
    python: str | None = None
    versions: dict[str, str] = pydantic.Field(default_factory=dict)

    @classmethod
    def of(cls, world: World) -> Environment:
        """The environment of this process, which is one of the ranks of `world`."""
        on_gpu = world.device.type == "cuda"
        return cls(
            command=[without_secrets(word) for word in sys.argv],
            commit=_commit(),
            world_size=world.size,
            device=torch.cuda.get_device_name(world.device) if on_gpu else platform.processor(),
            python=platform.python_version(),
            versions=versions(),
        )


def versions() -> dict[str, str]:
    """The versions of the packages on which a run's numbers depend."""
    return {name: importlib.metadata.version(name) for name in _PACKAGES}


def _commit() -> str | None:
    """The checkout's commit, with a mark where files differ from it; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
