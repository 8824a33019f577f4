"""A study's commands: started in order, several at once if asked, timed, and stopped together.

Every job is a command that a user would type, in a process group of its own. A job starts when the jobs that it needs
are complete and a place is free. `jobs` places share the machine: each has `ranks` GPUs, or its share of the cores if
there are no GPUs. A request to stop (a signal, the stop file, the clock) goes to all commands in progress, which then
save. The failure of one command stops the others in the same way.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from data.ground.command import USER_ERROR_CODE
from data.ground.errors import CommandEnd, ConfigError, DataError
from data.ground.ports import free_port
from data.ground.records import Record, parse_record
from data.ground.secrets import without_secrets
from trainer.resilience.stopping import STOP_FILE_VARIABLE, STOPPED_CODE, Stopped, started_by_me

log = logging.getLogger(__name__)

TIMINGS_FILE = "timings.jsonl"
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class RunFailed(CommandEnd):
    """A run that ended without DONE, though the user made no mistake and nobody asked it to stop."""


class _Timing(Record):
    name: str
    kind: str
    seconds: float
    complete: bool


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Job:
    """One command. `kind`: jobs of one kind take about the same time. `needs`: names of jobs to complete before it."""

    name: str
    kind: str
    command: Callable[[], Sequence[object]]  # gives the module and its arguments; called when the job starts
    needs: frozenset[str] = frozenset()
    ranks: int = 1
    before: Callable[[], None] = _nothing
    after: Callable[[], None] = _nothing  # called when the job is complete
    # These decide by the files that the job wrote, for jobs whose exit code does not tell.
    done: Callable[[], bool] | None = None
    stopped: Callable[[], bool] | None = None


@dataclass
class Work:
    """Carries jobs out and listens for requests to stop.

    output: the folder of logs and timings. gpus: this machine's GPUs, as CUDA_VISIBLE_DEVICES names them; if there are
    none, places share the cores.
    """

    output: Path
    stop_after_minutes: float = 0.0
    places: int = 1
    gpus: Sequence[str] = ()
    _begin: float = field(default_factory=time.monotonic)
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _stopping: str = ""
    _failed: str = ""
    _todo: dict[str, str] = field(default_factory=dict)  # name -> kind
    _total: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def minutes_left(self) -> float | None:
        """Minutes until this process should stop; None: no limit."""
        if not self.stop_after_minutes:
            return None
        return self.stop_after_minutes - (time.monotonic() - self._begin) / 60

    @contextlib.contextmanager
    def listening(self) -> Iterator[Work]:
        before = {number: signal.signal(number, self._on_signal) for number in _STOP_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping = signal.Signals(number).name
        self._stop_all()

    def _stop_all(self) -> None:
        for process in list(self._processes.values()):
            _terminate(process)

    def carry_out(self, jobs: Sequence[Job]) -> None:
        """Run all jobs. Raises Stopped; or, once the other jobs have saved and ended, the first failure."""
        self._todo = {job.name: job.kind for job in jobs}
        self._total = len(jobs)
        waiting, running, free = list(jobs), dict[Future[None], int](), list(range(self.places))
        failures: list[BaseException] = []
        with ThreadPoolExecutor(self.places) as pool:
            while waiting or running:
                ready = [] if failures else [job for job in waiting if not job.needs & self._todo.keys()]
                for job in ready[: len(free)]:
                    waiting.remove(job)
                    place = free.pop(0)
                    running[pool.submit(self._carry_out, job, place)] = place
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    free = sorted([*free, running.pop(future)])
                    if (error := future.exception()) is not None:
                        failures.append(error)
                        self._failed = self._failed or str(error)
                        self._stop_all()
        # A failure says more than the stops that it caused, so it comes first.
        failures.sort(key=lambda error: isinstance(error, Stopped))
        if failures:
            raise failures[0]
        assert not waiting, f"{waiting[0].name} waits for {sorted(waiting[0].needs)}, which nobody makes"

    def _carry_out(self, job: Job, place: int) -> None:
        name = job.name
        if reason := self._stopping or self._failed or self._asked_to_stop():
            raise Stopped(f"stopped before {name} ({reason}); the same command goes on")
        job.before()
        module, *arguments = map(str, job.command())
        words = [sys.executable, "-m", module, *arguments]
        if job.ranks > 1:
            launcher = [str(Path(sys.executable).with_name("deepspeed")), *self._launched_on(place, job.ranks)]
            words = [*launcher, "--master_port", str(free_port()), "--module", module, *arguments]
        # In the folders of its name: with "_" in place of "/", the logs of a/b_c and a_b/c would be one file.
        path = self.output / "logs" / f"{name.replace(' ', '_')}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        with path.open("ab") as file:
            file.write(f"$ {shlex.join(map(without_secrets, words))}\n".encode())
            file.flush()
            with self._lock:
                at = self._total - len(self._todo) + len(self._processes) + 1
                log.info("[%d/%d] %s%s", min(at, self._total), self._total, name, self._eta())
                process = self._processes[name] = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self._environment(place, job.ranks), **started_by_me()},
                    # A launcher does not pass signals on, so all its processes form one group, which is signalled.
                    start_new_session=True,
                )
            if self._stopping or self._failed:  # the request came while the command was being started
                _terminate(process)
            code = process.wait()
        complete = job.done() if job.done else code == 0
        with self._lock:
            del self._processes[name]
            self._note(name, job.kind, seconds=time.monotonic() - begin, complete=complete)
        if complete:
            job.after()
            with self._lock:
                del self._todo[name]
            return
        if self._stopping or self._failed or code == STOPPED_CODE or (job.stopped is not None and job.stopped()):
            reason = self._stopping or self._failed or "the run was asked to stop"
            raise Stopped(f"stopped in {name} ({reason}); the same command goes on")
        said = _last_error(path)
        if code == USER_ERROR_CODE and said:
            raise ConfigError(f"{name}: {said}")
        raise RunFailed(f"{name} ended with code {code} and is not complete; its own words are in {path}")

    def _launched_on(self, place: int, ranks: int) -> list[str]:
        if self.places == 1 or not self.gpus:
            return ["--num_gpus", str(ranks)]
        return ["--include", f"localhost:{','.join(self.gpus[place * ranks : (place + 1) * ranks])}"]

    def _environment(self, place: int, ranks: int) -> dict[str, str]:
        """The environment variables that give a place its own share of the machine."""
        if shutil.which("nvidia-smi") is None:
            changes = {"DS_ACCELERATOR": "cpu"}
            if self.places > 1 and "OMP_NUM_THREADS" not in os.environ:
                changes["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // (self.places * ranks)))
            return changes
        if self.places == 1 or ranks > 1:
            return {}
        return {"CUDA_VISIBLE_DEVICES": self.gpus[place]}

    def _asked_to_stop(self) -> str:
        """Why no further command should start: the stop file or the clock, which training in progress checks itself."""
        stop_file = os.environ.get(STOP_FILE_VARIABLE)
        if stop_file and Path(stop_file).exists():
            return "stop file"
        return "its minutes are over" if self.minutes_left is not None and self.minutes_left <= 0 else ""

    def _note(self, name: str, kind: str, *, seconds: float, complete: bool) -> None:
        line = {"name": name, "kind": kind, "seconds": round(seconds, 1), "complete": complete}
        with (self.output / TIMINGS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _eta(self) -> str:
        """The time left, estimated from jobs of the same kind or else of the same stage.

        The text is empty until the first job of a stage has ended.
        """
        path = self.output / TIMINGS_FILE
        if not path.is_file() or not self._todo:
            return ""
        seconds: dict[str, dict[str, float]] = {}  # kind -> name -> seconds, interrupted tries included
        complete = set()
        for entry in _timings(path):
            of_kind = seconds.setdefault(entry["kind"], {})
            of_kind[entry["name"]] = of_kind.get(entry["name"], 0.0) + entry["seconds"]
            complete |= {entry["name"]} if entry["complete"] else set()
        whole = {kind: [s for name, s in named.items() if name in complete] for kind, named in seconds.items()}
        total, unknown = 0.0, 0
        for kind in self._todo.values():
            times = whole.get(kind) or [
                s for other, values in whole.items() if other.split("/")[0] == kind.split("/")[0] for s in values
            ]
            total += sum(times) / len(times) if times else 0.0
            unknown += not times
        open_end = f" and {unknown} of unknown length" if unknown else ""
        return f", about {_duration(total / self.places)} left{open_end}" if total else ""


def check_settings(settings: Sequence[str]) -> None:
    """Refuse secrets in the settings of runs: launchers write their commands into logs, and other users see them."""
    for setting in settings:
        if (shown := without_secrets(setting)) != setting:
            raise ConfigError(
                f"{shown} holds a password, and the commands of runs are logged; name a variable in its place, as in "
                "https://user:${BARISTA_PASSWORD}@…, and export it, or write the address into the recipe"
            )


def training_job(
    name: str,
    kind: str,
    module: str,
    recipe_file: Path,
    settings: Sequence[str],
    folder: Path,
    work: Work,
    *,
    ranks: int,
    done: Callable[[], bool],
) -> Job:
    """A job for a training run in `folder`; the run is told how many of the work's minutes are left when it starts."""
    stopped = folder / "STOPPED"

    def command() -> list[str]:
        left = [] if work.minutes_left is None else [f"train.stop_after_minutes={max(0.02, work.minutes_left):.3f}"]
        return [module, "--config", str(recipe_file), *(f"--{setting}" for setting in (*settings, *left))]

    return Job(
        name,
        kind,
        command,
        ranks=ranks,
        before=lambda: stopped.unlink(missing_ok=True),
        done=done,
        stopped=stopped.is_file,
    )


def _terminate(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended, and its thread has not yet noted it
            os.killpg(process.pid, signal.SIGTERM)


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def _timings(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of timings.jsonl without a truncated one: they only serve to estimate the time left."""
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(DataError):
            yield parse_record(line, _Timing, where=str(path)).model_dump()


def _last_error(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), "")
