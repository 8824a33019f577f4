"""export.json: the files that an export wrote, so that a later export replaces them and never a user's files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from data.ground.errors import ConfigError
from data.ground.files import write_atomically
from data.ground.records import Record, read_record
from data.ground.whole_folder import check_place

MANIFEST_FILE = "export.json"


class ExportManifest(Record):
    """export.json: the sizes by name, and the size in bytes of every other file by its path in the export.

    A further key holds the measurements of the ONNX files (trainer/exporting/onnx_files.py); nothing here reads it.
    """

    format: Literal[1] = 1
    sizes: dict[str, tuple[int, int] | tuple[int, int, float]]
    # Exports of earlier versions have no list, so their files cannot be told from a user's.
    files: dict[str, int] | None = None


def write_manifest(export: Path, content: Mapping[str, Any]) -> None:
    """Write export.json: its format, `content`, and a list of all files that are now in the folder."""
    record = {"format": 1, **content, "files": _files_in(export)}
    write_atomically(export / MANIFEST_FILE, json.dumps(record, indent=2) + "\n")


def check_output(output: Path) -> None:
    """Refuse a folder with files that no export wrote, or in which no export can be written."""
    check_place(output)
    if not output.exists():
        return
    if not output.is_dir():
        raise ConfigError(f"output {output} is a file; give a new folder")
    check_place(output.absolute().parent)
    present = _files_in(output)
    if not any(output.iterdir()):
        return
    hint = "give a new or an empty folder"
    if not (output / MANIFEST_FILE).is_file():
        raise ConfigError(
            f"output {output} holds something else ({min(path.name for path in output.iterdir())}); {hint}"
        )
    manifest = read_record(output / MANIFEST_FILE, ExportManifest, what="export record", hint=hint)
    if manifest.files is None:
        raise ConfigError(
            f"output {output} is an export of an earlier version, which kept no list of its files; {hint}"
        )
    del present[MANIFEST_FILE]
    for name, size in sorted(present.items()):
        if name not in manifest.files:
            raise ConfigError(f"output {output} holds something else ({name}); {hint}")
        if size != manifest.files[name]:
            raise ConfigError(f"output {output} holds a file that was changed after the export ({name}); {hint}")


def _files_in(folder: Path) -> dict[str, int]:
    """Path -> size in bytes, for every file below a folder. A link is not followed; it counts as a file itself."""
    found = {}
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            if path.is_symlink() or not path.is_dir():
                found[path.relative_to(folder).as_posix()] = path.lstat().st_size
    return found
