"""Runs commands that end together with this process, whether by Ctrl-C, SIGTERM, SIGHUP or kill -9."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.ground.parent_death import adopt_orphans, signal_at_parents_death

PATIENCE_SECONDS = 30.0  # a command that is asked to end is killed after this time
_WATCH_SECONDS = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class _Signalled(BaseException):
    """One of _SIGNALS arrived. It is raised as an exception so that everything is cleaned up."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextlib.contextmanager
def ends_all_it_started() -> Iterator[None]:
    """On a signal, end the commands that this process started, then exit with 128 plus the number of the signal."""
    adopt_orphans()

    def end(number: int, _frame: object) -> None:
        raise _Signalled(number)

    before = {number: signal.signal(number, end) for number in _SIGNALS}
    try:
        yield
    except _Signalled as signalled:
        raise SystemExit(128 + signalled.number) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def call(
    command: Sequence[object],
    *,
    environment: Mapping[str, str] | None = None,
    quiet: bool = False,
    interactive: bool = False,
) -> None:
    """Print and run one command; end with its exit code if it fails.

    environment: variables in addition to those of this process. quiet: its stdout is dropped, its stderr is not.
    interactive: it may read from the terminal.
    """
    words = [str(word) for word in command]
    shown = [Path(words[0]).name, *words[1:]]
    print(f"$ {shlex.join(shown)}", flush=True)
    output = Output(stdout=subprocess.DEVNULL) if quiet else Output()
    code = _run(words, environment=environment, output=output, interactive=interactive)
    if code:
        print(f"error: this command ended with exit code {code}; its output above says why", file=sys.stderr)
        raise SystemExit(code if code > 0 else 1)


def call_into(
    log: Path,
    command: Sequence[object],
    *,
    environment: Mapping[str, str] | None = None,
    seconds: float,
    watch: Callable[[], None],
) -> int | None:
    """Run one command, whose output goes to a file; returns its exit code, or None if it was ended after `seconds`.

    watch: called twice a second while the command runs.
    """
    with log.open("ab") as file:
        output = Output(file.fileno(), file.fileno())
        words = [str(word) for word in command]
        return _run(words, environment=environment, output=output, seconds=seconds, watch=watch)


@dataclass(frozen=True)
class Output:
    """Where a command's output goes; None: where this process' goes."""

    stdout: int | None = None
    stderr: int | None = None


def _run(
    words: Sequence[str],
    *,
    environment: Mapping[str, str] | None,
    output: Output,
    interactive: bool = False,
    seconds: float | None = None,
    watch: Callable[[], None] = lambda: None,
) -> int | None:
    parent = os.getpid()
    # Signals are blocked until there is a process to end.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_SIGNALS})

    def prepare() -> None:
        signal_at_parents_death(signal.SIGTERM, parent=parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)

    process: subprocess.Popen[bytes] | None = None
    try:
        process = subprocess.Popen(
            words,
            env={**os.environ, **(environment or {})},
            stdout=output.stdout,
            stderr=output.stderr,
            # An interactive command must stay in the terminal's session. Others get a process group, ended as a whole.
            start_new_session=not interactive,
            preexec_fn=prepare,
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        code = process.wait() if seconds is None else _wait(process, seconds, watch)
        if code is None:
            _end(process, alone=interactive)
        return code
    except (KeyboardInterrupt, _Signalled):
        if process is not None:
            _end(process, alone=interactive)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def _wait(process: subprocess.Popen[bytes], seconds: float, watch: Callable[[], None]) -> int | None:
    """The exit code of a process, or None if it still runs after `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_WATCH_SECONDS)
        watch()
    return None


def _end(process: subprocess.Popen[bytes], *, alone: bool) -> None:
    """End a command and wait until all its processes are gone. alone: it has no process group of its own."""
    send = os.kill if alone else os.killpg
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_SIGNALS})
    for number, patience in ((signal.SIGTERM, PATIENCE_SECONDS), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            send(process.pid, number)
        deadline = None if patience is None else time.monotonic() + patience
        if _all_gone(process.pid if alone else -process.pid, deadline):
            return


def _all_gone(whom: int, deadline: float | None) -> bool:
    """Wait for a child, or if `whom` is negative for a whole process group; False if the deadline passes first."""
    while True:
        try:
            ended, _ = os.waitpid(whom, 0 if deadline is None else os.WNOHANG)
        except ChildProcessError:
            return True
        if ended == 0:
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(0.05)
