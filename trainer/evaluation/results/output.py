"""The output of a command: its own output folder, which holds nothing else, and JSON files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.ground.errors import ConfigError
from data.ground.files import write_atomically
from data.ground.records import json_of
from data.ground.whole_folder import check_place
from models.settings import EmbeddingSettings
from models.sizes import Size
from trainer.evaluation.results.parts import PARTS_FOLDER
from trainer.evaluation.results.raw import RAW_FILE
from trainer.evaluation.results.report import Record, Verdict

# What a command writes into its output; the names of folders end with a slash.
RESULT_FILES = ("results.json", "table.md", "figures/", "runs/", RAW_FILE, f"{RAW_FILE}.partial", f"{PARTS_FOLDER}/")


def output_folder(path: Path | None, ours: Sequence[str] = RESULT_FILES) -> Path | None:
    """The checked output folder; the first file written creates it.

    A folder that cannot be created, or that holds anything not named in `ours`, is refused. The names of folders in
    `ours` end with a slash.
    """
    if path is None:
        return None
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--output {path} is a file; give a folder")
    check_place(path, link=True)
    entries = path.iterdir() if path.is_dir() else ()
    found = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries)
    if strangers := [name for name in found if name not in ours]:
        raise ConfigError(f"--output {path} holds something else ({strangers[0]}); give a new or an empty folder")
    return path


def results_content(
    model: Path | str,
    sizes: Sequence[Size],
    settings: EmbeddingSettings,
    records: Sequence[Record],
    verdicts: Sequence[Verdict],
) -> dict[str, Any]:
    """The content of results.json for one model at these sizes."""
    return {
        "format": 1,
        "model": str(model),
        "sizes": [size.numbers for size in sizes],
        "settings": dataclasses.asdict(settings),
        "records": [record.as_json() for record in records],
        "significance": [verdict.as_json() for verdict in verdicts],
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON. What is not defined, such as the p of an undefined test, becomes null."""
    write_text(path, json_of(content, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, and make its folder. A path such as /dev/stdout is written to directly."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
    else:
        write_atomically(path.resolve(), text)
