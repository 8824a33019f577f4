"""What a submission is made of, written beside it: command, versions, the commit, and what was not committed."""

from __future__ import annotations

import getpass
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from launch.options import JobOptions

PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "numpy", "safetensors")


def environment_record(options: JobOptions, *, argv: Sequence[str], folder: Path) -> dict[str, Any]:
    """JSON's values. Versions are those of the job's virtual environment, read without running it."""
    return {
        "submitted": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(argv),
        "folder": str(folder),
        "user": getpass.getuser(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "venv": options.venv or (None if options.container else sys.prefix),
        "modules": options.module,
        "container": options.container or None,
        # A container's, and those of modules, are not known here: the run's own environment.json has them.
        "versions": None if options.container else versions(Path(options.venv or sys.prefix)),
        "git": commit(folder),
    }


def versions(prefix: Path) -> dict[str, str | None]:
    paths = [str(path) for path in prefix.glob("lib*/python*/site-packages")]
    found = {each.metadata["Name"].lower(): each.version for each in metadata.distributions(path=paths)}
    return {name: found.get(name) for name in PACKAGES}


def commit(folder: Path) -> dict[str, Any] | None:
    """The commit of a checkout and the files that differ from it; None where it is no checkout."""
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return None
    changed = (_git(folder, "status", "--porcelain") or "").splitlines()
    return {
        "commit": head.strip(),
        "branch": (_git(folder, "rev-parse", "--abbrev-ref", "HEAD") or "").strip(),
        "dirty": bool(changed),
        "changed": [line[3:] for line in changed],
    }


def uncommitted(folder: Path) -> str:
    """The changes to tracked files, as a patch; empty where there are none."""
    return _git(folder, "diff", "HEAD") or ""


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
