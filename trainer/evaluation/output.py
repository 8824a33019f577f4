"""Where a command's results go: its own folder, which holds nothing else, and JSON files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.evaluation.parts import PARTS_FOLDER
from trainer.evaluation.raw import RAW_FILE

RESULT_FILES = ("results.json", "table.md", "figures", "runs", RAW_FILE, f"{RAW_FILE}.partial", PARTS_FOLDER)


def output_folder(path: Path | None, ours: Sequence[str] = RESULT_FILES) -> Path | None:
    if path is None:
        return None
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--output {path} is a file; give a folder")
    if path.is_dir() and (strangers := sorted({entry.name for entry in path.iterdir()} - set(ours))):
        raise ConfigError(f"--output {path} holds something else ({strangers[0]}); give a new or an empty folder")
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
