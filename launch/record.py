"""The record written beside a submission: command, versions, the commit, and uncommitted changes."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated

import pydantic

from data.ground.records import Record
from data.ground.secrets import HIDDEN, without_secrets
from launch.options import JobOptions

PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "numpy", "safetensors")


class Checkout(Record):
    """A commit, and the files that differ from it."""

    commit: str
    branch: str
    dirty: bool
    changed: list[str]


JobNumber = Annotated[str, pydantic.StringConstraints(pattern=r"^[0-9]{1,18}$")]


class Submission(Record):
    """The fields of environment.json in a job's folder."""

    job: JobNumber
    submitted: str
    command: list[str]
    folder: str
    user: str
    host: str
    python: str
    venv: str | None
    modules: list[str]
    container: str | None
    # Versions inside a container or from modules are not known here; the run's own environment.json has them.
    versions: dict[str, str | None] | None
    git: Checkout | None


class Submitted(Record):
    """The field of environment.json that a later submission needs, of any version. A run's own file has no job."""

    job: JobNumber | None = None


def submission(job: str, options: JobOptions, *, argv: Sequence[str], folder: Path) -> Submission:
    """The record of a job. Versions are read from the job's virtual environment without running it."""
    return Submission(
        job=job,
        submitted=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shown_command(argv),
        folder=str(folder),
        user=_user(),
        host=socket.gethostname(),
        python=platform.python_version(),
        venv=options.venv or (None if options.container else sys.prefix),
        modules=options.module,
        container=options.container or None,
        versions=None if options.container else versions(Path(options.venv or sys.prefix)),
        git=commit(folder),
    )


def shown_command(argv: Sequence[str]) -> list[str]:
    """The command with the values of `--env`, and the passwords in addresses, hidden."""
    shown = []
    for before, word in zip(["", *argv], argv):
        own = re.fullmatch(r"(--env=)?([^=]*)=.*", word, re.DOTALL)
        if own is not None and (own[1] or before == "--env"):
            shown.append(f"{own[1] or ''}{own[2]}={HIDDEN}")
        else:
            shown.append(without_secrets(word))
    # Words of a command line may be any bytes, not only UTF-8.
    return [word.encode(errors="backslashreplace").decode() for word in shown]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # user ids without a name, as in containers
        return str(os.getuid())


def versions(prefix: Path) -> dict[str, str | None]:
    paths = [str(path) for path in prefix.glob("lib*/python*/site-packages")]
    # A partly removed package has no name.
    found = {(each.metadata["Name"] or "").lower(): each.version for each in metadata.distributions(path=paths)}
    return {name: found.get(name) for name in PACKAGES}


def commit(folder: Path) -> Checkout | None:
    """The commit of a checkout and the files that differ from it; None if the folder is no checkout."""
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return None
    changed = _text(_git(folder, "status", "--porcelain")).splitlines()
    return Checkout(
        commit=_text(head).strip(),
        branch=_text(_git(folder, "rev-parse", "--abbrev-ref", "HEAD")).strip(),
        dirty=bool(changed),
        changed=[line[3:] for line in changed],
    )


def uncommitted(folder: Path) -> bytes:
    """The changes to tracked files, as a patch; empty if there are none."""
    return _git(folder, "diff", "--no-ext-diff", "--no-textconv", "HEAD") or b""


def _text(output: bytes | None) -> str:
    return (output or b"").decode(errors="replace")


def _git(folder: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *arguments], capture_output=True, check=False
        )
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
