"""One node's part of a Slurm job: starts its ranks, turns Slurm's signals into a file, and ends with their exit code.

`srun` starts this once on each node. It is Slurm's own task. With `ProctrackType=proctrack/cgroup`, the usual setting,
Slurm's signals reach Slurm's own tasks only. Ranks below a launcher would learn of a time limit by SIGKILL, and the
launchers of DeepSpeed and torch die of SIGUSR1 and kill their ranks 30 s after SIGTERM. So ranks are started here, with
the environment that those launchers would set. On either signal a file is created, for which every rank looks once a
step (`BARISTA_STOP_FILE`). Ranks then have all the time that Slurm leaves them. The file is in the node's temporary
folder, where looking for it costs nothing; containers need not see that folder, so for them it is among the logs.

Each rank writes to its own log file; rank 0 also writes to the job's log. This module runs outside containers, with
the node's Python, so it imports the standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

STOPPED_EARLY = 75  # the trainer's exit code when it was asked to stop, and saved
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
# A rank whose peer died ends by itself within a minute; after this time it is killed.
SECONDS_FOR_OTHERS = 90.0
_TAIL_LINES = 25
# Errors of a wrong command or folder (user errors): another attempt would not help.
_USER_ERRORS = (
    errno.EACCES,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOEXEC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)


@dataclass(frozen=True)
class Place:
    """This node among the nodes of the job."""

    node: int
    num_nodes: int
    ranks_here: int

    @property
    def first_rank(self) -> int:
        return self.node * self.ranks_here


@dataclass(frozen=True)
class Rank:
    """A rank's process, its log, and for rank 0 the thread that copies its output to the job's log."""

    number: int
    process: subprocess.Popen[bytes]
    log: Path
    copier: threading.Thread | None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.node", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="ranks to start on this node")
    parser.add_argument("--logs", type=Path, required=True, metavar="FOLDER", help="folder of the ranks' log files")
    parser.add_argument(
        "--contained",
        choices=("yes", "no"),
        default="no",
        help="whether the command starts a container, which may not see the node's temporary folder",
    )
    parser.add_argument("command", nargs="+", help="after --: what each rank runs")
    args = parser.parse_args(argv)
    missing = [
        name for name in ("SLURM_NODEID", "SLURM_NNODES", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if missing:
        say(f"error: {missing[0]} is not set; this runs under srun, in a job made by python -m launch.submit")
        return 2
    if args.ranks < 1:
        say(f"error: --ranks {args.ranks} must be at least 1")
        return 2
    numbers = [os.environ["SLURM_NODEID"], os.environ["SLURM_NNODES"]]
    if not all(number.isascii() and number.isdigit() for number in numbers) or int(numbers[0]) >= int(numbers[1]):
        say(f"error: SLURM_NODEID={numbers[0]} of SLURM_NNODES={numbers[1]} is no node of a job; leave both to Slurm")
        return 2
    os.umask(os.umask(0o077) | 0o002)  # others than owner and group must not write logs
    place = Place(int(numbers[0]), int(numbers[1]), args.ranks)
    # A job without GPUs may inherit the variable from the shell in which it was submitted.
    devices = "" if os.environ.get("DS_ACCELERATOR") == "cpu" else os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if devices and len(devices.split(",")) < args.ranks:
        say(f"error: {args.ranks} ranks were asked for and Slurm gave the GPUs {devices}; set --gpus-per-node to match")
        return 2
    try:
        code = run_node(args.command, place=place, logs=args.logs, contained=args.contained == "yes")
    except OSError as error:
        named = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        say(f"error: the ranks cannot be started ({named}{error.strerror}); fix that command or folder")
        code = 2 if error.errno in _USER_ERRORS else 1
    # If a rank fails, srun ends all nodes and returns the code of its own kill, so the real code is written to a file.
    with contextlib.suppress(OSError):
        (args.logs / f"node-{place.node:03d}.exit").write_text(f"{code}\n", encoding="utf-8")
    return 0 if code == STOPPED_EARLY else code


def run_node(
    command: Sequence[str],
    *,
    place: Place,
    logs: Path,
    contained: bool = False,
    seconds_for_others: float = SECONDS_FOR_OTHERS,
) -> int:
    """Run this node's ranks to their end. Returns 0 if all succeeded, 75 if any was stopped, else the first failure.

    contained: the command starts a container, which sees the logs but may not see the node's temporary folder.
    """
    logs.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="barista-stop-"))
    stop_file = (logs if contained else folder) / f"node-{place.node:03d}.stop"
    stop_file.unlink(missing_ok=True)
    ranks: list[Rank] = []
    signalled = False

    def ask_to_stop(number: int, _frame: object) -> None:
        nonlocal signalled
        said = "the ranks are asked to stop"
        try:
            stop_file.touch()
        except OSError as error:  # a full disk, or a site that empties its temporary folders
            said = f"the ranks are signalled, because {stop_file} cannot be made ({error.strerror})"
            # Once: a rank takes a later signal as a request to leave without a checkpoint.
            for rank in () if signalled else ranks:
                rank.process.send_signal(number)
            signalled = True
        os.write(2, f"[node {place.node}] {signal.Signals(number).name}: {said}\n".encode())

    before = {number: signal.signal(number, ask_to_stop) for number in STOP_SIGNALS}
    try:
        for local_rank in range(place.ranks_here):
            environment = {**rank_environment(place, local_rank), "BARISTA_STOP_FILE": str(stop_file)}
            ranks.append(_start(command, place=place, local_rank=local_rank, environment=environment, logs=logs))
        return _wait(ranks, seconds_for_others=seconds_for_others)
    finally:
        for rank in ranks:
            if rank.process.poll() is None:
                rank.process.kill()
                rank.process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
        with contextlib.suppress(OSError):
            stop_file.unlink()
        shutil.rmtree(folder, ignore_errors=True)


def rank_environment(place: Place, local_rank: int) -> Mapping[str, str]:
    """The variables that the launchers of torch and DeepSpeed set."""
    return {
        "RANK": str(place.first_rank + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(place.num_nodes * place.ranks_here),
        "LOCAL_WORLD_SIZE": str(place.ranks_here),
        "LOCAL_SIZE": str(place.ranks_here),
        "CROSS_RANK": str(place.node),
        "CROSS_SIZE": str(place.num_nodes),
    }


def _start(
    command: Sequence[str], *, place: Place, local_rank: int, environment: Mapping[str, str], logs: Path
) -> Rank:
    number = place.first_rank + local_rank
    path = logs / f"rank-{number:05d}.log"
    with path.open("ab") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE if number == 0 else log,
            stderr=subprocess.STDOUT,
            # Some sites signal all processes. A rank without a handler yet must survive this; it will find the file.
            preexec_fn=_ignore_stop_signals,
        )
    copier = None
    if number == 0:
        assert process.stdout is not None
        copier = threading.Thread(target=_copy, args=(process.stdout, path), daemon=True)
        copier.start()
    return Rank(number, process, path, copier)


def _ignore_stop_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _copy(source: IO[bytes], path: Path) -> None:
    """Copy a rank's output to its log and to the job's, and read on where a disk is full: the rank would wait."""
    with path.open("ab", buffering=0) as log:
        for line in source:
            with contextlib.suppress(OSError):
                log.write(line)
            with contextlib.suppress(OSError):
                os.write(1, line)


def _wait(ranks: Sequence[Rank], *, seconds_for_others: float, now: Callable[[], float] = time.monotonic) -> int:
    failed: Rank | None = None
    deadline = float("inf")
    running = list(ranks)
    while running:
        for rank in running:
            code = rank.process.poll()
            if failed is None and code not in (None, 0, STOPPED_EARLY):
                failed, deadline = rank, now() + seconds_for_others
                say(f"rank {rank.number} ended with {describe(code)}")
        running = [rank for rank in running if rank.process.poll() is None]
        if running and now() > deadline:
            say(f"ranks {', '.join(str(rank.number) for rank in running)} did not end by themselves and are killed")
            for rank in running:
                rank.process.kill()
                rank.process.wait()
            break
        if running:
            time.sleep(0.2)
    for rank in ranks:
        # A grandchild may keep the pipe open, so the wait for its output is bounded.
        if rank.copier is not None:
            rank.copier.join(timeout=5.0)
    if failed is None:
        codes = {rank.process.returncode for rank in ranks}
        return 0 if codes == {0} else STOPPED_EARLY
    if failed.number != 0:
        say(f"the end of {failed.log}:\n" + tail(failed.log))
    code = failed.process.returncode
    # A death by signal is reported as in a shell: 128 + the signal's number.
    return code if code > 0 else 128 - code


def describe(code: int | None) -> str:
    assert code is not None
    if code >= 0:
        return f"exit code {code}"
    # signal.Signals lacks most real-time signals.
    return f"signal {signal.Signals(-code).name if -code in list(signal.Signals) else -code}"


def tail(path: Path, lines: int = _TAIL_LINES) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def say(line: str) -> None:
    node = os.environ.get("SLURM_NODEID", "?")
    node = node if node.isascii() and node.isdigit() else "?"
    # One write, so that the lines of several nodes do not interleave.
    os.write(2, f"[node {node}] {line}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
