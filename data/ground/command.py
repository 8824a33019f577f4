"""The one place where commands end.

What a user, a disk or another program did wrong is one sentence and exit code 2; a run that was asked to stop or gave
up ends with the code of its exception (data/ground/errors.py); anything else is a fault of the program and keeps its
traceback, with exit code 1. Whoever wants the traceback of a sentence, too, names a file in BARISTA_TRACEBACK.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from data.ground.errors import CommandEnd, UserError
from data.ground.files import describe_os_error
from data.ground.secrets import without_secrets

TRACEBACK_VARIABLE = "BARISTA_TRACEBACK"
MISTAKE_CODE = UserError.exit_code
INTERRUPTED_CODE = 130

# Launchers look at their processes once a second.
_SECONDS_FOR_FIRST_RANK = 5.0
# Libraries that log every request or cache look-up at INFO.
_TALKATIVE = ("httpx", "filelock", "urllib3", "fsspec", "DeepSpeed")


def run_command(main: Callable[[], object]) -> NoReturn:
    """Log to stderr with the time and the rank, call a command's main, and end the process with its exit code."""
    rank = _rank()
    log_to_stderr(f"%(asctime)s [rank {rank}] %(message)s")
    # Repeated for every engine: DeepSpeed's collectives under their former names.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    sys.exit(exit_code_of(main))


def log_to_stderr(pattern: str = "%(message)s", *, level: int = logging.INFO) -> None:
    """Show the log on stderr: of the first rank from `level` on, of others warnings alone."""
    level = level if _rank() == "0" else max(level, logging.WARNING)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Discreet(pattern, datefmt="%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler])
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)


def exit_code_of(main: Callable[[], object]) -> int:
    """Call a command's main; its exit code, after the sentence of whatever ended it. 0 where it returns none.

    Files that it makes can be changed by their owner and group at most.
    """
    os.umask(os.umask(0o077) | stat.S_IWOTH)
    try:
        code = main()
        return code if isinstance(code, int) else 0
    except CommandEnd as end:
        return tell(end)
    except KeyboardInterrupt:
        return INTERRUPTED_CODE
    except BrokenPipeError as error:
        if error.filename is not None:
            raise
        return _reader_gone()
    except (OSError, MemoryError) as error:
        known = end_for(error)
        if known is None:
            raise
        return tell(known)


def end_for(error: Exception) -> CommandEnd | None:
    """How an exception ends a command that meets it: itself, or a sentence about the system. None: a fault of ours."""
    if isinstance(error, CommandEnd):
        return error
    if isinstance(error, MemoryError):
        return UserError(f"the memory does not suffice ({error}); ask for less at once, or use a larger machine")
    sentence = describe_os_error(error) if isinstance(error, OSError) else None
    return UserError(sentence) if sentence else None


def tell(end: CommandEnd) -> int:
    """Say what ended a command in one sentence; its exit code."""
    _keep_traceback()
    if isinstance(end, UserError):
        # Print once on each node: the other local ranks wait, and the launcher usually ends them first.
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(_SECONDS_FOR_FIRST_RANK)
    elif _rank() != "0":
        # All ranks stop and give up together.
        return end.exit_code
    # Written whole, so that the sentences of several ranks do not interleave.
    sentence = " ".join(without_secrets(end).split())
    sys.stderr.write(f"{end.prefix}{printable(sentence)}\n")
    sys.stderr.flush()
    return end.exit_code


def printable(text: str) -> str:
    """A text of one line, with escape codes and other signs that would steer a terminal shown as Python writes them."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


class _Discreet(logging.Formatter):
    """Lines without the secrets of the addresses in them."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


def _keep_traceback() -> None:
    name = os.environ.get(TRACEBACK_VARIABLE)
    if name:
        # The sentence matters more than the traceback, so a file that cannot be written ends nothing.
        with contextlib.suppress(OSError), Path(name).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"rank {_rank()}, process {os.getpid()}\n{without_secrets(traceback.format_exc())}\n")


def _reader_gone() -> int:
    """Whoever read the output has closed it, as `| head` does: no mistake, but not all was said."""
    # Or Python would complain while it flushes at its end.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


def _rank() -> str:
    return os.environ.get("RANK", "0")
