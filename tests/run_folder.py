"""The contents of a run folder, read back: metrics with or without measured times, weights, and all files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

# The measured values in a step's record, time and memory; all others repeat to the last bit.
CLOCKED = frozenset({"tokens_per_second", "mfu", "data_wait_share", "memory_mib", "seconds"})


def lines_of(run: Path) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl: steps, checkpoints, scores and faults."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The lines of steps; only they have a learning rate."""
    return [line for line in lines_of(run) if "lr" in line]


def records(run: Path) -> list[dict[str, Any]]:
    """The lines of steps without their measured values."""
    return [{key: value for key, value in line.items() if key not in CLOCKED} for line in steps_of(run)]


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The weights of the model that the run wrote at its end."""
    return load_file(run / "model" / "model.safetensors")


def contents(folder: Path) -> dict[str, bytes]:
    """Path -> content of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
