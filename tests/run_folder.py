"""What a run left in its folder, read back: metrics with and without what a clock says, weights, and all files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

# Of a step's record, time and memory; the rest repeats to the last bit.
CLOCKED = frozenset({"tokens_per_second", "mfu", "data_wait_share", "memory_mib", "seconds"})


def lines_of(run: Path) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl: steps, checkpoints, scores and faults."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The lines of steps, which alone have a learning rate."""
    return [line for line in lines_of(run) if "lr" in line]


def records(run: Path) -> list[dict[str, Any]]:
    """The lines of steps without what a clock says."""
    return [{key: value for key, value in line.items() if key not in CLOCKED} for line in steps_of(run)]


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The model that the run wrote at its end."""
    return load_file(run / "model" / "model.safetensors")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
