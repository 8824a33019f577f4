"""Commands as processes: forks of a warm one that run a module as `python -m` does, or programs of their own.

Each case has a keeper process that runs its commands. It adopts the processes that they leave behind, and so can see
and end them.
"""

from __future__ import annotations

import atexit
import io
import logging
import multiprocessing.util
import os
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import psutil

from tests.faults.hostile.case import Command
from tests.faults.hostile.rights import Skip, drop_rights
from tests.faults.hostile.verdict import Ended

ROOT = Path(__file__).resolve().parents[3]
# The time that processes may take to end after their command, such as helpers that wait for a pipe to close.
ENDING_SECONDS = 5.0
_LOOK_SECONDS = 0.005
_SKIP_FILE = "skip"
# Every case has these in its environment, as a user's shell may have them. They must appear nowhere.
AMBIENT_SECRETS = {
    "HF_TOKEN": "hf_ambientSecretOfTheShell",
    "WANDB_API_KEY": "ambientKeyOfTheDashboard",
    "AWS_SECRET_ACCESS_KEY": "ambientKeyOfTheBucket",
}
# The variables of the harness' own environment that a case sees.
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "VIRTUAL_ENV", "LD_LIBRARY_PATH")


@dataclass
class Keeper:
    """The place of one case, and its helper processes that are no commands, such as servers."""

    place: Path
    seconds: float = 60.0
    helpers: list[int] = field(default_factory=list)
    started: int = 0

    @property
    def work(self) -> Path:
        return self.place / "work"

    def make_folders(self) -> None:
        for name in ("work", "tmp", "home", "streams"):
            (self.place / name).mkdir(parents=True, exist_ok=True)

    def environment(self) -> dict[str, str]:
        """The environment of the case's commands, without the caller's ranks, tokens and caches."""
        return {
            **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
            **AMBIENT_SECRETS,
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.place / "home"),
            "TMPDIR": str(self.place / "tmp"),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }


def run_commands(keeper: Keeper, commands: Sequence[Command]) -> tuple[list[Ended], tuple[str, ...]]:
    """Run commands at the same time, until they end or reach the time limit.

    Returns how each ended, with its output, and the processes that they left behind.
    """
    began = time.monotonic()
    first = keeper.started
    children = {}
    for number, command in enumerate(commands, first):
        children[_start(keeper, command, number)] = number - first
    keeper.started += len(commands)
    for child, place in children.items():
        if (meanwhile := commands[place].meanwhile) is not None:
            meanwhile(child)
    codes: dict[int, tuple[int, float]] = {}
    deadline = began + keeper.seconds
    while len(codes) < len(children) and time.monotonic() < deadline:
        if not _collect(children, codes, began):
            time.sleep(_LOOK_SECONDS)
    in_time = {place for place in children.values() if place in codes}
    survivors: tuple[str, ...] = ()
    if len(in_time) == len(children):
        survivors = _wait_for_the_last(keeper)
    while _end_all(keeper) or len(codes) < len(children):
        if not _collect(children, codes, began):
            time.sleep(_LOOK_SECONDS)
    if (keeper.place / _SKIP_FILE).exists():
        raise Skip((keeper.place / _SKIP_FILE).read_text())
    ended = [
        Ended(codes[place][0], *_streams(keeper, first + place), codes[place][1], place in in_time)
        for place in range(len(commands))
    ]
    return ended, survivors


def _streams(keeper: Keeper, number: int) -> tuple[str, str]:
    paths = (keeper.place / "streams" / f"{number}.{name}" for name in ("out", "err"))
    out, err = (path.read_text(encoding="utf-8", errors="backslashreplace") for path in paths)
    return out, err


def _collect(children: dict[int, int], codes: dict[int, tuple[int, float]], began: float) -> bool:
    """Reap one child process that has ended; returns whether there was one."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    if pid in children:
        codes[children[pid]] = (os.waitstatus_to_exitcode(status), time.monotonic() - began)
    return pid != 0


def _below(keeper: Keeper) -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        if child.pid not in keeper.helpers:
            try:
                found += [child, *child.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
    return [each for each in found if _lives(each)]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_for_the_last(keeper: Keeper) -> tuple[str, ...]:
    """The processes that still live after they had time to end."""
    deadline = time.monotonic() + ENDING_SECONDS
    while (living := _below(keeper)) and time.monotonic() < deadline:
        _collect({}, {}, 0.0)
        time.sleep(_LOOK_SECONDS)
    told = []
    for process in living:
        try:
            told.append(f"{process.pid} ({' '.join(process.cmdline())[:120]})")
        except psutil.NoSuchProcess:
            continue
    return tuple(told)


def _end_all(keeper: Keeper) -> bool:
    """Kill all remaining processes; returns whether there are children that still have to be reaped."""
    for process in _below(keeper):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return any(child.pid not in keeper.helpers for child in psutil.Process().children())


def end_helpers(keeper: Keeper) -> None:
    for helper in keeper.helpers:
        os.kill(helper, signal.SIGKILL)
        os.waitpid(helper, 0)
    keeper.helpers.clear()


def _start(keeper: Keeper, command: Command, number: int) -> int:
    streams = keeper.place / "streams"
    (streams / f"{number}.in").write_bytes(command.stdin)
    environment = keeper.environment()
    for name, value in command.environment.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            for handle, name, flags in (
                (0, "in", os.O_RDONLY),
                (1, "out", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
                (2, "err", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
            ):
                opened = os.open(streams / f"{number}.{name}", flags, 0o600)
                os.dup2(opened, handle)
                os.close(opened)
            os.chdir(keeper.work)
            _become(keeper, command, environment)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(70)
    return child


def _become(keeper: Keeper, command: Command, environment: dict[str, str]) -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for limit, value in command.limits.items():
        resource.setrlimit(limit, (value, value))
    if command.without_rights:
        try:
            drop_rights(keeper.place)
        except Skip as reason:
            (keeper.place / _SKIP_FILE).write_text(str(reason))
            os._exit(0)
    os.environ.clear()
    os.environ.update(environment)
    if not command.module:
        program = shutil.which(command.arguments[0]) or command.arguments[0]
        os.execve(program, command.arguments, environment)
    if command.own_process:
        os.execve(sys.executable, [sys.executable, "-m", command.module, *command.arguments], environment)
    _run_module(command)


def _run_module(command: Command) -> NoReturn:
    """Run a module as `python -m` would, from its arguments to its exit code."""
    tempfile.tempdir = None
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.argv = [command.module, *command.arguments]
    sys.path[:] = [str(Path.cwd()), str(ROOT), *(each for each in sys.path if each not in ("", str(ROOT)))]
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc] # noqa: SIM115
    sys.stdout = sys.__stdout__ = _stream(1, "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "backslashreplace")  # type: ignore[misc]
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    # The warm process has imported the module, which is now run anew.
    sys.modules.pop(command.module, None)
    _forget_exit_functions()
    code = 0
    try:
        runpy.run_module(command.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = _code_of(end)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    # The interpreter does the same when it ends.
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except Exception:
        traceback.print_exc()
        code = code or 120
    sys.stderr.flush()
    os._exit(code)


def _forget_exit_functions() -> None:
    """Drop the exit functions of the warm process, which are not the command's; register the libraries' own anew."""
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    atexit._clear()
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]


def _stream(handle: int, errors: str) -> io.TextIOWrapper:
    file = open(handle, "w", encoding="utf-8", errors=errors, buffering=1, closefd=False)  # noqa: SIM115
    assert isinstance(file, io.TextIOWrapper)
    return file


def _code_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return 1
