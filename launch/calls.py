"""Commands that end with the process that runs them, whatever ends it: Ctrl-C, SIGTERM, SIGHUP, or kill -9."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from data.ground.parent_death import adopt_orphans, signal_at_parents_death

PATIENCE_SECONDS = 30.0  # of a command that is asked to end, before it is killed
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class _Signalled(BaseException):
    """One of _SIGNALS came; as an exception, so that whatever goes on is cleared up."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextlib.contextmanager
def ends_all_it_started() -> Iterator[None]:
    """A signal ends the commands below this one too, and then this one, as a shell would say it: 128 and the number."""
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

    environment: variables beside those of this process. quiet: what it prints is left out, but for errors.
    interactive: it may read from the terminal.
    """
    words = [str(word) for word in command]
    shown = [Path(words[0]).name, *words[1:]]
    print(f"$ {shlex.join(shown)}", flush=True)
    parent = os.getpid()
    # A signal waits until there is a process to end.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_SIGNALS})

    def prepare() -> None:
        signal_at_parents_death(signal.SIGTERM, parent=parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)

    process: subprocess.Popen[bytes] | None = None
    try:
        process = subprocess.Popen(
            words,
            env={**os.environ, **(environment or {})},
            stdout=subprocess.DEVNULL if quiet else None,
            # A terminal's question needs the terminal; all else gets a process group of its own, ended as one.
            start_new_session=not interactive,
            preexec_fn=prepare,
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        code = process.wait()
    except (KeyboardInterrupt, _Signalled):
        if process is not None:
            _end(process, alone=interactive)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    if code:
        print(f"error: this command ended with exit code {code}; its own words above say why", file=sys.stderr)
        raise SystemExit(code if code > 0 else 1)


def _end(process: subprocess.Popen[bytes], *, alone: bool) -> None:
    """End a command and wait until nothing of it is left. alone: without a group of its own."""
    send = os.kill if alone else os.killpg
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_SIGNALS})
    for number, patience in ((signal.SIGTERM, PATIENCE_SECONDS), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            send(process.pid, number)
        deadline = None if patience is None else time.monotonic() + patience
        if _all_gone(process.pid if alone else -process.pid, deadline):
            return


def _all_gone(whom: int, deadline: float | None) -> bool:
    """Wait for a child, or below 0 for all of a group, orphans included; False where the deadline comes first."""
    while True:
        try:
            ended, _ = os.waitpid(whom, 0 if deadline is None else os.WNOHANG)
        except ChildProcessError:
            return True
        if ended == 0:
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(0.05)
