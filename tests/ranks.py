"""Ranks without a launcher: forked from a process that has imported the trainer once.

The deepspeed command, its launcher and the imports of two ranks cost some twenty seconds of a core, whatever a test
then computes. Tests that ask what ranks compute fork them here instead. Each rank gets the environment that a launcher
would give it, and a rank that fails ends the others. Tests about the launcher, its signals and its exit codes start the
real one (tests/launcher.py).
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import start_processes

from data.ground.ports import free_port
from tests import ROOT
from tests.lanes import RANKS_START
from tests.launcher import environment_of_ranks

_PRELOADED = "tests.preloaded"
_PATIENCE_SECONDS = 30.0  # for a rank to end after SIGTERM


def run_ranks(
    module: str, *arguments: str, ranks: int, timeout_seconds: float = 900.0, expect: int | None = 0
) -> subprocess.CompletedProcess[str]:
    """Run a module on `ranks` ranks of this machine; the result has the exit code of the first rank that failed.

    Raises subprocess.TimeoutExpired if the ranks take longer, and AssertionError if the exit code is not `expect`.
    """
    sys.audit(RANKS_START, module)
    context = _forkserver()
    port, everywhere = free_port(), environment_of_ranks()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [(Path(folder) / f"{rank}.out", Path(folder) / f"{rank}.err") for rank in range(ranks)]
        processes = []
        try:
            for rank, output in enumerate(outputs):
                own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_SIZE": ranks}
                own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                environment = everywhere | {name: str(value) for name, value in own.items()}
                processes.append(context.Process(target=_be_rank, args=([module, *arguments], environment, output)))
                processes[-1].start()
            code = _ended(processes, timeout_seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()
        out, err = ("".join(map(_text, paths)) for paths in zip(*outputs))
    if code is None:
        raise subprocess.TimeoutExpired([module, *arguments], timeout_seconds, out, err)
    if expect is not None:
        assert code == expect, f"exit code {code}\n{out[-4000:]}\n{err[-8000:]}"
    return subprocess.CompletedProcess([module, *arguments], code, out, err)


def call_on_ranks(function: Callable[..., None], *arguments: Any, ranks: int) -> None:
    """Call function(rank, *arguments) in `ranks` processes, which find each other by themselves.

    Raises the traceback of the first that fails.
    """
    sys.audit(RANKS_START, function.__name__)
    _forkserver()
    start_processes(function, arguments, nprocs=ranks, start_method="forkserver")


def _forkserver() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOADED])
    return context


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _ended(processes: list[multiprocessing.context.ForkServerProcess], seconds: float) -> int | None:
    """The first exit code other than 0, or 0; None after `seconds`. A rank that fails ends the others."""
    until, running, code = time.monotonic() + seconds, set(processes), 0
    while running:
        if not wait([process.sentinel for process in running], timeout=max(0.0, until - time.monotonic())):
            return code or None
        for process in [each for each in running if not each.is_alive()]:
            running.remove(process)
            if process.exitcode and not code:
                code, until = process.exitcode, time.monotonic() + _PATIENCE_SECONDS
                for other in running:
                    other.terminate()
    return code


def _be_rank(words: list[str], environment: Mapping[str, str], outputs: tuple[Path, Path]) -> None:
    """In the forked process: run words[0] as `python -m` would."""
    for stream, path in enumerate(outputs, start=1):  # stdout and stderr
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
