"""Worker processes that write input splits; none of them outlives the command."""

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
from data.preparation.convert import Job, Progress, Report, write_split

logger = logging.getLogger(__name__)


def run_jobs(jobs: Sequence[Job], *, processes: int, report: Report) -> None:
    """Write all input splits; this process calls `report` with the progress of every worker."""
    if processes < 1:
        raise DataError(f"{processes} processes cannot work; give 1 or more")
    # The tokenizer's Rust threads would compete with the worker processes for the CPUs.
    with _environment("TOKENIZERS_PARALLELISM", "false"):
        if min(processes, len(jobs)) <= 1:
            for job in jobs:
                write_split(job, report)
                logger.info("input split %d finished: %s", job.number, job.input_split.source)
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
            # Once our copy of the worker's end is closed, the pipe ends when the worker dies.
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
                        f"the process that wrote {job.input_split.source} was killed, perhaps for lack of memory; "
                        "run the same command again with fewer --processes"
                    ) from None
                if isinstance(message, Progress):
                    report(message)
                elif isinstance(message, CommandEnd):
                    raise message
                elif message is None:
                    logger.info("input split %d finished: %s", job.number, job.input_split.source)
                    connections[connection] = _give(connection, waiting)
                else:
                    raise RuntimeError(f"a worker failed on {job.input_split.source}\n{message}")
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join()


def _give(connection: Connection, waiting: list[Job]) -> Job | None:
    if not waiting:
        return None
    job = waiting.pop()
    with contextlib.suppress(BrokenPipeError):  # the worker died, which the next recv reports
        connection.send(job)
    return job


def work(connection: Connection, parent: int) -> None:
    """The main function of a worker: receives jobs; sends progress, then None when finished, or the failure."""
    # On systems without this signal, the worker notices the parent's death by the broken pipe.
    signal_at_parents_death(signal.SIGKILL, parent=parent)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            write_split(job, connection.send)
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
