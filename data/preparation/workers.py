"""Units written by several processes, none of which outlives the command."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import cast

from data.documentation import (
    without_interrupts,
)
from data.ground.command import end_for
from data.ground.errors import CommandEnd, DataError
from data.ground.parent_death import signal_at_parents_death
from data.preparation.convert import Job, Progress, Report, write_unit

logger = logging.getLogger(__name__)


def run_jobs(jobs: Sequence[Job], *, processes: int, report: Report) -> None:
    """Write all units; `report` is called here with every process's progress."""
    if processes < 1:
        raise DataError(f"{processes} processes cannot work; give 1 or more")
    # Rust threads beside several processes only get in each other's way.
    with _environment("TOKENIZERS_PARALLELISM", "false"):
        if min(processes, len(jobs)) <= 1:
            for job in jobs:
                write_unit(job, report)
                logger.info("unit %d finished: %s", job.number, job.unit.source)
        else:
            _run_in_processes(jobs, processes=min(processes, len(jobs)), report=report)


def _run_in_processes(jobs: Sequence[Job], *, processes: int, report: Report) -> None:
    context = multiprocessing.get_context("spawn")
    workers: list[SpawnProcess] = []
    connections: dict[Connection, Job | None] = {}
    waiting = list(reversed(jobs))
    try:
        for _ in range(processes):
            ours, theirs = context.Pipe()
            worker = context.Process(target=work, args=(theirs, os.getpid()), daemon=True)
            with without_interrupts():
                worker.start()
            # With our copy of its end closed, a dead worker is seen as the end of the pipe, not as silence.
            theirs.close()
            workers.append(worker)
            connections[ours] = None
        for connection in connections:
            connections[connection] = _give(connection, waiting)
        while any(connections.values()):
            for ready in wait([connection for connection, job in connections.items() if job]):
                connection = cast(Connection, ready)
                job = connections[connection]
                assert job is not None
                try:
                    message = connection.recv()
                except (EOFError, ConnectionResetError):
                    raise DataError(
                        f"the process that wrote {job.unit.source} was killed, perhaps for want of memory; "
                        "run the same command again with fewer --processes"
                    ) from None
                if isinstance(message, Progress):
                    report(message)
                elif isinstance(message, CommandEnd):
                    raise message
                elif message is None:
                    logger.info("unit %d finished: %s", job.number, job.unit.source)
                    connections[connection] = _give(connection, waiting)
                else:
                    raise RuntimeError(f"a worker failed on {job.unit.source}\n{message}")
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join()


def _give(connection: Connection, waiting: list[Job]) -> Job | None:
    if not waiting:
        return None
    job = waiting.pop()
    with contextlib.suppress(BrokenPipeError):  # found out when its answer is read
        connection.send(job)
    return job


def work(connection: Connection, parent: int) -> None:
    """A worker process: jobs in, progress and None (finished) or the failure out."""
    # Where the kernel does not tell, the broken pipe must do.
    signal_at_parents_death(signal.SIGKILL, parent=parent)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            write_unit(job, connection.send)
            connection.send(None)
        except BrokenPipeError:
            return
        except Exception as error:
            connection.send(end_for(error) or traceback.format_exc())


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def default_processes() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
