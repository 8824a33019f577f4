"""One process group a run folder: if two wrote checkpoints into one folder, neither would keep its own.

A launcher that is killed can leave ranks behind that are still saving when the next start comes, so a start waits a
while for the lock. The kernel releases the lock when its holder ends, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path
from typing import TextIO

LOCK = "lock"  # in a run's folder: held by the run that writes there
# What a run that was killed in its first moment leaves in its folder.
BEGUN = (LOCK, "recipe.toml.tmp")
PROBE = ".probe-"  # prefix of a file that exists for a moment, to see whether the folder can be written
WAIT_SECONDS = 90.0

log = logging.getLogger(__name__)


class Locked(RuntimeError):
    """Another process holds the folder; the message names it."""


def lock(folder: Path, *, wait_seconds: float = WAIT_SECONDS) -> TextIO:
    """Hold the folder until the returned file is closed. Raises Locked when it is still held after the wait."""
    file = (folder / LOCK).open("a+", encoding="utf-8", errors="replace")
    deadline = time.monotonic() + wait_seconds
    said = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                log.warning("%s cannot be locked (%s); see that no other run writes there", folder, error)
                return file
        file.seek(0)
        holder = file.read().strip() or "an unknown process"
        if time.monotonic() > deadline:
            file.close()
            raise Locked(f"{folder} is in use by {holder}; wait for that run to end, or end it")
        if not said:
            log.info("%s is in use by %s; waiting up to %.0f s for it", folder, holder, wait_seconds)
            said = True
        time.sleep(0.5)
    try:
        os.truncate(file.fileno(), 0)
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except OSError as error:
        log.warning("%s holds no name of this process (%s)", folder / LOCK, error.strerror)
    return file


def is_begun(name: str) -> bool:
    """Whether a file in a run's folder may be left over from a run that was killed in its first moment."""
    return name in BEGUN or name.startswith(PROBE)
