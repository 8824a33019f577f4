"""The one place where commands end.

An error of the user, a disk or another program prints one sentence and exits with code 2. A run that was asked to stop
or gave up exits with the code of its exception (data/ground/errors.py). Any other exception is a bug: it keeps its
traceback and exits with code 1. The environment variable BARISTA_TRACEBACK names a file for the tracebacks of the
one-sentence errors.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from data.ground.errors import CommandEnd, UserError
from data.ground.files import describe_os_error
from data.ground.secrets import without_secrets

TRACEBACK_VARIABLE = "BARISTA_TRACEBACK"
USER_ERROR_CODE = UserError.exit_code
INTERRUPTED_CODE = 130
READER_GONE_CODE = 141
# The meanings of the exit codes that do not come from a CommandEnd.
OTHER_CODES: Mapping[str, str] = {
    "0": "The command is done.",
    "1": "A crash, with its traceback; a rank that died or hung, named in one sentence; from `launch.doctor`, a "
    "machine that is not fit to train; or, from `launch.qualify`, a line that failed.",
    str(INTERRUPTED_CODE): "Ctrl-C.",
    str(READER_GONE_CODE): "The reader of the output has closed it, as `| head` does.",
    "128 + n": "Signal n ended the process, as shells report it: 137 is a kill, 143 is SIGTERM.",
}

# Enough for the first rank to leave, which takes seconds on a busy machine, and for its launcher, which looks once a
# second, to end the others.
_SECONDS_FOR_FIRST_RANK = 15.0
# Libraries that log every request or cache look-up at INFO.
_TALKATIVE = ("httpx", "filelock", "urllib3", "fsspec", "DeepSpeed")


def run_command(main: Callable[[], object]) -> NoReturn:
    """Log to stderr with the time and the rank, call a command's main, and end the process with its exit code."""
    rank = _rank()
    log_to_stderr(f"%(asctime)s [rank {rank}] %(message)s")
    # DeepSpeed calls collectives by their deprecated names, which warns for every engine.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    sys.exit(exit_code_of(main))


def log_to_stderr(pattern: str = "%(message)s", *, level: int = logging.INFO) -> None:
    """Show the log on stderr: messages from `level` on for the first rank, only warnings and above for the others."""
    level = level if _rank() == "0" else max(level, logging.WARNING)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Discreet(pattern, datefmt="%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler])
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)


def exit_code_of(main: Callable[[], object]) -> int:
    """Call a command's main and return its exit code, 0 if main returns none; errors are printed as one sentence.

    Files that the command creates are never writable by others than their owner and group.
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
    """The CommandEnd for an exception: itself, or a UserError about the system. None if the exception is a bug."""
    if isinstance(error, CommandEnd):
        return error
    if isinstance(error, MemoryError):
        return UserError(f"the memory does not suffice ({error}); ask for less at once, or use a larger machine")
    sentence = describe_os_error(error) if isinstance(error, OSError) else None
    return UserError(sentence) if sentence else None


def tell(end: CommandEnd) -> int:
    """Print what ended a command in one sentence; returns its exit code."""
    _keep_traceback()
    if isinstance(end, UserError):
        # Print once on each node: the other local ranks wait, and the launcher usually ends them first.
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(_SECONDS_FOR_FIRST_RANK)
    elif _rank() != "0":
        # All ranks stop or give up together, so only the first one prints it.
        return end.exit_code
    # One write, so that the sentences of several ranks do not interleave.
    sentence = " ".join(str(end).split())
    sys.stderr.write(f"{end.prefix}{printable(sentence)}\n")
    sys.stderr.flush()
    return end.exit_code


def printable(text: str) -> str:
    """A line as a terminal may show it: without the secrets in its addresses, and with Python's escapes in place of
    characters that control a terminal.
    """
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in without_secrets(text))


class _Discreet(logging.Formatter):
    """Formats log lines without the secrets in their addresses."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


def _keep_traceback() -> None:
    name = os.environ.get(TRACEBACK_VARIABLE)
    if name:
        # The sentence matters more than the traceback, so a file that cannot be written is ignored.
        with contextlib.suppress(OSError), Path(name).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"rank {_rank()}, process {os.getpid()}\n{without_secrets(traceback.format_exc())}\n")


def _reader_gone() -> int:
    """The exit code if the reader of the output has closed it, as `| head` does: no error, but output is missing."""
    # Without this, Python would report an error when it flushes stdout at exit.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return READER_GONE_CODE


def _rank() -> str:
    return os.environ.get("RANK", "0")
