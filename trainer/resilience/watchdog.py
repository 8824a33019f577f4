"""Ends the job when a rank dies or hangs, and says which rank and where, instead of an endless wait in a collective.

Each rank has a thread that writes a heartbeat once a second, its main thread's progress, into the key-value store at
the process group's address, and reads the heartbeats of others. A verdict ends the job where
- a process of this machine, and of this container, is gone (every rank checks, and notices at once);
- a rank's thread is silent for SILENT_SECONDS, because its process or its machine is gone or stands still (rank 0
  checks all ranks, the others check rank 0);
- no rank makes progress until a timeout, because some rank has not joined a collective (rank 0 checks). The timeout is
  `hang_seconds`, or three times the longest pause of this run's steps if that is longer. First steps, evaluations and
  saves may take PATIENCE_SECONDS. Time in which a rank is ready to compute and other programs have the processors does
  not count.
A rank that is alone watches itself: it ends where a step makes no progress until the same timeout, by its own clock.
Evaluations, saves and the run's beginning and end then have no timeout, because no other rank waits for them.
The first verdict counts. It goes into the store; each rank prints it and leaves by `os._exit`, because its main thread
may never return from a collective. An exception that ends one rank is a verdict, too.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, Self

import psutil
import torch.distributed as dist

from data.ground.secrets import without_secrets
from trainer.distributed import World, named_ranks
from trainer.resilience.processes import Process, ProcessorWaits, numbering

DIED_CODE = 1
SILENT_SECONDS = 30.0
PATIENCE_SECONDS = 900.0
HEARTBEAT_SECONDS = 1.0
_PAUSES = 3.0
NEXT_BATCH = "next batch"  # the phase in which the loop waits for data
_LITTLE_SHARED_MEMORY = 2**20
_FINISHED = "finished"
_VERDICT = "verdict"


class _State(NamedTuple):
    """A rank's heartbeat. waited: seconds so far in which it was ready to compute and had no processor."""

    beats: int
    progress: int
    phase: str
    step: int
    patient: bool
    waited: float


@dataclass
class _Seen:
    """What was last seen of a rank. Times are of this process' clock, because the clocks of machines differ.

    progress_at: when it made progress, plus what it has waited for a processor since.
    """

    heartbeat: str
    beat_at: float
    progress: int
    progress_at: float
    waited: float


class Watchdog:
    """A context for as long as ranks depend on each other. `heartbeat` says that the main thread makes progress."""

    def __init__(self, world: World, *, hang_seconds: float) -> None:
        """hang_seconds: 0 means no timeout for progress; dead and silent ranks are still noticed."""
        self._world = world
        self._hang_seconds = hang_seconds
        self._progress, self._phase, self._step, self._patient = 0, "start", 0, True
        self._beat_at, self._longest_pause = time.monotonic(), 0.0
        self._waits, self._waited, self._waited_at_beat = ProcessorWaits(), 0.0, 0.0
        self._seen: dict[int, _Seen] = {}
        self._neighbours: dict[int, Process] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        if self._world.size == 1:
            if self._hang_seconds:
                self._thread.start()
            return self
        # The thread needs its own connection, because the process group's belongs to the main thread.
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=SILENT_SECONDS),
        )
        # torchrun's store outlives its ranks, so each restart has a prefix of its own.
        self._store = dist.PrefixStore(f"watchdog/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        me = Process.me()
        self._put(f"process/{self._world.rank}", [numbering(), me.pid, me.started])
        self._put(f"beat/{self._world.rank}", self._state(0))
        keys = [f"process/{rank}" for rank in range(self._world.size)]
        # Joining the process group may not wait for all ranks, of which one may still be reading its model.
        self._store.wait(keys, timedelta(seconds=PATIENCE_SECONDS))
        known = [json.loads(each) for each in self._store.multi_get(keys)]
        self._neighbours = neighbours_of(self._world.rank, known)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._world.size == 1:
            self._closed.set()
            if self._hang_seconds:
                self._thread.join()
            return
        if error is not None and _is_a_consequence(error):
            # The thread will see the cause, print it, and leave.
            self._thread.join(SILENT_SECONDS + 5.0)
        self._closed.set()
        self._thread.join()
        self._phase = _FINISHED
        self._put(f"beat/{self._world.rank}", self._state(0))

    def report(self, error: Exception, code: int) -> None:
        """Say that this rank ends by `error`. Unless another ended first, all ranks print it and leave with `code`."""
        if self._world.size > 1 and not _is_a_consequence(error):
            sentence = " ".join(f"{type(error).__name__}: {error}".split())
            self._decide(f"rank {self._world.rank} on {socket.gethostname()} failed: {sentence}", code)
            self._let_others_read()

    def heartbeat(self, phase: str, *, step: int | None = None, patient: bool | None = None) -> None:
        """Note that the main thread reached `phase`. `patient`: what follows may take long; None: as before."""
        now = time.monotonic()
        if not self._patient:
            self._longest_pause = max(self._longest_pause, now - self._beat_at)
        self._progress, self._phase, self._beat_at = self._progress + 1, phase, now
        self._waited_at_beat = self._waited
        self._step = self._step if step is None else step
        self._patient = self._patient if patient is None else patient

    def _state(self, count: int) -> _State:
        return _State(count, self._progress, self._phase, self._step, self._patient, round(self._waited, 1))

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _watch(self) -> None:
        if self._world.size == 1:
            self._watch_alone()
            return
        count = 0
        while not self._closed.wait(HEARTBEAT_SECONDS):
            count += 1
            self._waited += self._waits.since_last()
            try:
                self._put(f"beat/{self._world.rank}", self._state(count))
                if (verdict := self._look()) is not None and not self._closed.is_set():
                    self._leave(*verdict)
            except (RuntimeError, OSError):
                if not self._closed.is_set():
                    self._leave(f"{self._dead_neighbour() or 'rank 0'} is gone: its store answers no more", DIED_CODE)

    def _watch_alone(self) -> None:
        while not self._closed.wait(HEARTBEAT_SECONDS):
            if (reason := self.stuck(time.monotonic())) is not None and not self._closed.is_set():
                self._leave(reason, DIED_CODE)

    def stuck(self, now: float) -> str | None:
        """Why a rank that is alone should end, or None. To be asked once a second."""
        self._waited += self._waits.since_last()
        phase, still = self._phase, now - self._beat_at - (self._waited - self._waited_at_beat)
        limit = max(self._hang_seconds, _PAUSES * self._longest_pause)
        if self._patient:
            # Among the phases that may take long, only the wait for loader workers can last for ever.
            limit = max(limit, PATIENCE_SECONDS) if phase == NEXT_BATCH else math.inf
        if still <= limit:
            return None
        return f"it has not got on for {still:.0f} s: at {phase!r} of step {self._step}{_about_loaders(phase)}"

    def _look(self) -> tuple[str, int] | None:
        """(Why the job must end, its exit code), or None."""
        if self._store.check([_VERDICT]):
            reason, code = json.loads(self._store.get(_VERDICT))
            return reason, code
        if (dead := self._dead_neighbour()) is not None:
            return self._decide(f"{dead} is gone: the process ended without a word", DIED_CODE)
        watched = range(self._world.size) if self._world.is_main else [0]
        now = time.monotonic()
        states = {}
        for rank, heartbeat in zip(watched, self._store.multi_get([f"beat/{rank}" for rank in watched])):
            text = heartbeat.decode()
            states[rank] = state = _State(*json.loads(text))
            seen = self._seen.setdefault(rank, _Seen(text, now, state.progress, now, state.waited))
            if text != seen.heartbeat:
                seen.heartbeat, seen.beat_at = text, now
            seen.progress_at += state.waited - seen.waited
            seen.waited = state.waited
            if state.progress != seen.progress:
                seen.progress, seen.progress_at = state.progress, now
            silent = now - seen.beat_at
            if silent > SILENT_SECONDS and state.phase != _FINISHED:
                where = f"at {state.phase!r} of step {state.step}"
                return self._decide(f"rank {rank} gave no sign of life for {silent:.0f} s, last {where}", DIED_CODE)
        if self._world.is_main and self._hang_seconds:
            return self._hung(states, now)
        return None

    def _hung(self, states: dict[int, _State], now: float) -> tuple[str, int] | None:
        still = now - max(seen.progress_at for seen in self._seen.values())
        limit = max(self._hang_seconds, _PAUSES * self._longest_pause)
        if any(state.patient for state in states.values()):
            limit = max(limit, PATIENCE_SECONDS)
        if still <= limit:
            return None
        places: dict[str, list[int]] = {}
        for rank, state in states.items():
            places.setdefault(f"{state.phase!r} of step {state.step}", []).append(rank)
        # The rank for which all others wait is usually in the phase that has the fewest ranks.
        rarest_first = sorted(places.items(), key=lambda item: len(item[1]))
        where = "; ".join(f"{named_ranks(ranks)} at {place}" for place, ranks in rarest_first) + _about_loaders(
            self._phase
        )
        return self._decide(f"no rank has got on for {still:.0f} s: {where}", DIED_CODE)

    def _dead_neighbour(self) -> str | None:
        for rank, process in self._neighbours.items():
            if not process.lives:
                try:
                    state = _State(*json.loads(self._store.get(f"beat/{rank}")))
                    phase, step = state.phase, state.step
                except (RuntimeError, OSError):
                    phase, step = "an unknown place", self._step
                if phase != _FINISHED:
                    where = f"process {process.pid} on {socket.gethostname()}, last at {phase!r} of step {step}"
                    return f"rank {rank} ({where})"
        return None

    def _decide(self, reason: str, code: int) -> tuple[str, int]:
        """Give this verdict, and return the one that counts: this one, or another rank's that came first."""
        reason, code = json.loads(self._store.compare_set(_VERDICT, "", json.dumps([reason, code])))
        return reason, code

    def _leave(self, reason: str, code: int) -> None:
        # The message begins a new line, because a progress bar may be on this one.
        whose = "the run ends" if self._world.size == 1 else f"rank {self._world.rank} ends with the job"
        os.write(2, f"\nerror: {whose}: {without_secrets(reason)}\n".encode())
        self._let_others_read()
        os._exit(code)

    def _let_others_read(self) -> None:
        """Let the other ranks read the verdict before rank 0 ends, because the store usually ends with rank 0."""
        if self._world.is_main and self._world.size > 1:
            time.sleep(2.5 * HEARTBEAT_SECONDS)


def neighbours_of(rank: int, known: Sequence[tuple[str, int, float]]) -> dict[int, Process]:
    """The other ranks whose processes this rank can look at. known: `numbering()`, PID and start of each rank."""
    mine = known[rank][0]
    return {
        other: Process(pid, started)
        for other, (numbered, pid, started) in enumerate(known)
        if numbered == mine and other != rank
    }


def _about_loaders(phase: str) -> str:
    """What is wrong with this rank's loader workers, where the rank waits for them."""
    if phase != NEXT_BATCH:
        return ""
    found = []
    with contextlib.suppress(psutil.Error, OSError):
        stopped = [each.pid for each in psutil.Process().children() if each.status() == psutil.STATUS_STOPPED]
        if stopped:
            found.append(f"process {stopped[0]}, a loader worker, is stopped (SIGSTOP)")
    with contextlib.suppress(OSError):
        if (free := shutil.disk_usage("/dev/shm").free) < _LITTLE_SHARED_MEMORY:
            found.append(f"/dev/shm, through which loader workers hand over batches, has {free // 1024} KiB left")
    return "".join(f"; {each}" for each in found)


def _is_a_consequence(error: BaseException) -> bool:
    """Whether the error is a failed collective, as happens where another rank is gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
