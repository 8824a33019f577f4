"""Kills tiny runs at random moments, resumes them until they are done, and compares them with undisturbed ones.

    python -m tests.faults.kill_matrix [--trials 50] [--seed 0] [--max-minutes M] [--json FILE] [--folder FOLDER]

A trial is a run of tests/faults/tiny_run.py at one of the ZeRO stages, in turn. One or two of its starts get a
`kill -9`: of a rank, of the `deepspeed` command, or of its `deepspeed.launcher.launch`; most often in a save, else at
a step, while it starts or while it ends. The next start comes when all has ended or, after some launchers' deaths, at
once, while ranks are left behind. The seed decides what is drawn, not what the machine makes of it. Figures:
  trials, kills
  kills_in_saves                 just after which a half-written checkpoint was there
  resumes                        starts beyond a trial's first
  lost                           runs that did not come to DONE within MAX_STARTS starts
  mismatched_steps               whose record (loss and its parts, gradient norm, learning rate) or samples are not
                                 those of the undisturbed run, by text; records from before a kill count, too
  mismatched_weights             runs whose final weights differ in any bit
  repeated_documents, missed_documents   in the sample logs of the one epoch
  failed_starts                  that ended without DONE though nothing was killed in them
  unended                        kills after which some process still ran ENDING_SECONDS later
  orphans                        processes left after DONE
  kills_by_target, kills_by_moment
  each_trial                     what was done and seen
  control                        the same figures of one more run, resumed from a checkpoint made wrong by one batch
All from `lost` to `orphans` must be 0 and the control's must not, or the exit code is 1. --max-minutes: no trial
begins after it. --folder: keep the runs there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.faults.comparison import NO_DIFFERENCES, Differences, compare, step_records
from tests.faults.tiny_run import (
    DOCUMENTS,
    GLOBAL_BATCH_SIZE,
    SAVE_EVERY_STEPS,
    STEPS,
    TARGETS,
    Start,
    processes,
    start,
    write_inputs,
)
from tests.run_folder import lines_of
from trainer.checkpoint import Checkpointer, read_manifest, write_manifest

MAX_STARTS = 8
ENDING_SECONDS = 120.0
RUN_SECONDS = 900.0
SECOND_KILL_SHARE = 0.4
# The share of launchers' deaths after which the next start comes at once.
AT_ONCE_SHARE = 0.5
MOMENTS = {"save": 0.6, "step": 0.2, "start": 0.1, "end": 0.1}
_LOOK_SECONDS = 0.001
_FIND_SECONDS = 0.2
MUST_BE_0 = ("lost", *vars(NO_DIFFERENCES), "failed_starts", "unended", "orphans")


@dataclass(frozen=True)
class Pace:
    """Seconds that the parts of an undisturbed run took; random moments are drawn within them."""

    start: float
    step: float
    save: float
    end: float


@dataclass(frozen=True)
class Reference:
    run: Path
    pace: Pace


@dataclass(frozen=True)
class Moment:
    kind: str  # a key of MOMENTS
    step: int  # the moment comes after this step's end, or after the start of its save
    share: float  # how far into that part, as a share of its time in the undisturbed run
    target: str
    at_once: bool  # the next start does not wait


@dataclass
class Trial:
    stage: int
    kills: list[dict[str, Any]] = field(default_factory=list)
    resumes: int = 0
    lost: int = 0
    failed_starts: int = 0
    unended: int = 0
    orphans: int = 0
    differences: Differences = NO_DIFFERENCES
    seconds: float = 0.0


def undisturbed(inputs: Path, folder: Path, stage: int) -> Reference:
    run = folder / f"undisturbed_zero{stage}"
    started = start(inputs, run, stage, mark=str(run))
    try:
        code = started.process.wait(RUN_SECONDS)
    finally:
        _end_all(run, within_seconds=0.0)
    ended = time.time()
    if not (run / "DONE").exists():
        raise RuntimeError(f"the undisturbed run failed with code {code}; see {started.log}")
    lines = lines_of(run)
    pace = Pace(
        start=(run / "ds_config.json").stat().st_mtime - started.began,
        step=statistics.median(line["seconds"] for line in lines if "loss" in line),
        save=statistics.median(line["checkpoint/seconds"] for line in lines if "checkpoint/seconds" in line),
        end=ended - (run / "metrics.jsonl").stat().st_mtime,
    )
    return Reference(run, pace)


def draw_moment(rng: random.Random, *, saved_step: int) -> Moment:
    """Draw a moment in a start that resumes from `saved_step`."""
    saves = range(saved_step + SAVE_EVERY_STEPS - saved_step % SAVE_EVERY_STEPS, STEPS + 1, SAVE_EVERY_STEPS)
    possible = dict(MOMENTS) if saves else {kind: MOMENTS[kind] for kind in ("start", "end")}
    kind = rng.choices(list(possible), list(possible.values()))[0]
    step = {"save": lambda: rng.choice(saves), "step": lambda: rng.randrange(saved_step + 1, STEPS + 1)}
    target = rng.choice(TARGETS)
    return Moment(
        kind=kind,
        step=step[kind]() if kind in step else STEPS,
        share=rng.random(),
        target=target,
        at_once=not target.startswith("rank") and rng.random() < AT_ONCE_SHARE,
    )


def kill_at(moment: Moment, started: Start, run: Path, pace: Pace) -> str | None:
    """Kill the moment's target or, if it is not there, a process above it.

    Returns the name of the killed process, or None if the start ended before the moment.
    """
    came = _sign(moment, started, run)
    victim: psutil.Process | None = None
    found_at = 0.0
    while not came():
        if victim is None and time.monotonic() - found_at > _FIND_SECONDS:
            victim, found_at = started.found(moment.target), time.monotonic()
        if started.process.poll() is not None:
            return None
        time.sleep(_LOOK_SECONDS)
    time.sleep(moment.share * getattr(pace, moment.kind))
    name = moment.target
    if victim is None:
        living = ((each, started.found(each)) for each in (moment.target, "launch", "deepspeed"))
        name, victim = next(((each, process) for each, process in living if process is not None), (name, None))
    if victim is None or started.process.poll() is not None:
        return None
    try:
        victim.kill()
    except psutil.NoSuchProcess:
        return None
    return name


def _sign(moment: Moment, started: Start, run: Path) -> Callable[[], bool]:
    """A function that tells whether the moment's part has begun; files of an earlier start do not count."""

    def is_new(path: Path) -> bool:
        try:
            return path.stat().st_mtime >= started.began
        except FileNotFoundError:
            return False

    if moment.kind == "start":
        return lambda: True
    if moment.kind == "save":
        name = f"step_{moment.step:08d}"
        return lambda: any(is_new(run / "checkpoints" / each) for each in (f"tmp-{name}", name))
    size = -1

    def recorded() -> bool:
        nonlocal size
        metrics = run / "metrics.jsonl"
        if not is_new(metrics) or metrics.stat().st_size == size:
            return False
        size = metrics.stat().st_size
        return any(step >= moment.step for step, _ in step_records(run))

    return recorded


def run_trial(
    run: Path,
    inputs: Path,
    reference: Reference,
    *,
    stage: int,
    rng: random.Random,
    wanted_kills: int,
    first: Moment | None = None,
) -> Trial:
    """Start, kill and resume a run until DONE. first: the moment of the first kill; None: one is drawn."""
    trial = Trial(stage)
    began = time.monotonic()
    records: list[tuple[int, str]] = []
    try:
        for number in range(MAX_STARTS):
            trial.resumes = number
            moment = None
            if len(trial.kills) < wanted_kills:
                is_given = first is not None and not trial.kills
                moment = first if is_given else draw_moment(rng, saved_step=_saved_step(run))
            started = start(inputs, run, stage, mark=str(run))
            killed = kill_at(moment, started, run, reference.pace) if moment else None
            in_save = _is_half_saved(run, since=started.began)
            if moment is None or killed is None:
                code = started.process.wait(RUN_SECONDS)
                if not (run / "DONE").exists():
                    trial.failed_starts += 1
                    print(f"  start {number} ended with code {code}; see {started.log}", flush=True)
            else:
                seconds = 0.0 if moment.at_once else _wait_for_the_end(started, run, trial)
                left = [name for name in ("DONE", "STOPPED") if (run / name).exists()]
                trial.kills.append(
                    {**asdict(moment), "killed": killed, "in_save": in_save, "seconds_to_end": seconds, "left": left}
                )
            records += step_records(run)
            if (run / "DONE").exists():
                break
        trial.orphans = _end_all(run, within_seconds=ENDING_SECONDS)
        trial.lost = int(not (run / "DONE").exists())
        if not trial.lost:
            documents = ((0, index) for index in range(DOCUMENTS))
            trial.differences = compare(run, reference.run, documents=documents, before=records)
    finally:
        _end_all(run, within_seconds=0.0)
    trial.seconds = time.monotonic() - began
    return trial


def _is_half_saved(run: Path, *, since: float) -> bool:
    with contextlib.suppress(FileNotFoundError):  # orphaned ranks may still be finishing the save
        return any(path.stat().st_mtime >= since for path in (run / "checkpoints").glob("tmp-step_*"))
    return True


def _saved_step(run: Path) -> int:
    whole = Checkpointer(run / "checkpoints", keep=1).complete()
    return int(whole[0].name.removeprefix("step_")) if whole else 0


def _wait_for_the_end(started: Start, run: Path, trial: Trial) -> float:
    """Seconds until all processes of the start have ended; after ENDING_SECONDS they are killed."""
    began = time.monotonic()
    trial.unended += bool(_end_all(run, within_seconds=ENDING_SECONDS))
    started.process.wait()
    return time.monotonic() - began


def _end_all(run: Path, *, within_seconds: float) -> int:
    """The number of the run's processes that had not ended within `within_seconds` and had to be killed."""
    deadline = time.monotonic() + within_seconds
    while (left := list(processes(str(run)))) and time.monotonic() < deadline:
        time.sleep(0.2)
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return len(left)


def one_batch_back(run: Path) -> None:
    """Negative control: change the newest checkpoint so that its stream position is one batch too early."""
    newest = Checkpointer(run / "checkpoints", keep=1).complete()[0]
    manifest = read_manifest(newest)
    manifest.pop("sha256")
    manifest["state"]["stream"]["samples"] -= GLOBAL_BATCH_SIZE
    write_manifest(newest, manifest)


def run_control(run: Path, inputs: Path, reference: Reference, *, stage: int) -> Trial:
    """Resume a copy of the undisturbed run from its last checkpoint but one, which is made wrong."""
    shutil.copytree(reference.run, run)
    (run / "DONE").unlink()
    for folder in (run / "model", Checkpointer(run / "checkpoints", keep=1).complete()[0]):
        shutil.rmtree(folder)
    one_batch_back(run)
    return run_trial(run, inputs, reference, stage=stage, rng=random.Random(0), wanted_kills=0)


def figures(trials: list[Trial], control: Trial | None) -> dict[str, Any]:
    kills = [kill for trial in trials for kill in trial.kills]
    differences = sum((trial.differences for trial in trials), NO_DIFFERENCES)
    return {
        "trials": len(trials),
        "kills": len(kills),
        "kills_in_saves": sum(kill["in_save"] for kill in kills),
        "resumes": sum(trial.resumes for trial in trials),
        "lost": sum(trial.lost for trial in trials),
        **asdict(differences),
        "failed_starts": sum(trial.failed_starts for trial in trials),
        "unended": sum(trial.unended for trial in trials),
        "orphans": sum(trial.orphans for trial in trials),
        "kills_by_target": dict(Counter(kill["killed"] for kill in kills)),
        "kills_by_moment": dict(Counter(kill["kind"] for kill in kills)),
        "control": asdict(control.differences) if control else None,
        "each_trial": [asdict(trial) for trial in trials],
    }


def run_matrix(
    folder: Path,
    *,
    trials: int,
    seed: int,
    stages: Sequence[int] = range(4),
    max_minutes: float = float("inf"),
    json_file: Path | None = None,
) -> dict[str, Any]:
    """Run all trials, at the ZeRO stages in turn, and the control; the figures are written after each of them."""
    inputs = folder / "inputs"
    inputs.mkdir(parents=True)
    write_inputs(inputs)
    references: dict[int, Reference] = {}
    done: list[Trial] = []
    control: Trial | None = None
    began = time.monotonic()

    def write() -> None:
        if json_file:
            json_file.write_text(json.dumps(figures(done, control), indent=2) + "\n")

    for number in range(trials):
        if time.monotonic() - began > 60 * max_minutes:
            break
        stage = stages[number % len(stages)]
        if stage not in references:
            references[stage] = undisturbed(inputs, folder, stage)
            print(f"undisturbed run at ZeRO stage {stage}: {references[stage].pace}", flush=True)
        if control is None:
            control = run_control(folder / "control", inputs, references[stage], stage=stage)
            print(f"control: {control.differences}", flush=True)
        run = folder / f"trial_{number:03d}_zero{stage}"
        rng = random.Random(f"{seed}/{number}")
        kills = 1 + (rng.random() < SECOND_KILL_SHARE)
        trial = run_trial(run, inputs, references[stage], stage=stage, rng=rng, wanted_kills=kills)
        while not trial.kills and is_exact(figures([trial], control)):
            # The run was done before the moment came, which tests nothing, so the trial is repeated with another draw.
            run = run.with_name(f"{run.name}_again")
            trial = run_trial(run, inputs, references[stage], stage=stage, rng=rng, wanted_kills=kills)
        done.append(trial)
        write()
        left = (time.monotonic() - began) / len(done) * (trials - len(done)) / 60
        what = ", ".join(f"{kill['killed']} at {kill['kind']} {kill['step']}" for kill in trial.kills)
        print(
            f"trial {len(done)}/{trials}, stage {stage}: killed {what}; {trial.resumes} resumes, "
            f"{trial.seconds:.0f} s; {_sum_up(figures(done, control))}; about {left:.0f} min to go",
            flush=True,
        )
    write()
    return figures(done, control)


def _sum_up(result: dict[str, Any]) -> str:
    wrong = [f"{name} {result[name]}" for name in MUST_BE_0 if result[name]]
    return f"WRONG: {', '.join(wrong)}" if wrong else "all exact"


def is_exact(result: dict[str, Any]) -> bool:
    return not any(result[name] for name in MUST_BE_0)


def is_good(result: dict[str, Any]) -> bool:
    return is_exact(result) and bool(result["control"]) and any(result["control"].values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-minutes", type=float, default=float("inf"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.folder and args.folder.exists():
        parser.error(f"--folder {args.folder} exists; name a new one")
    # On SIGTERM the command exits normally, so that it ends the processes that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as temporary:
        result = run_matrix(
            args.folder or Path(temporary),
            trials=args.trials,
            seed=args.seed,
            max_minutes=args.max_minutes,
            json_file=args.json,
        )
    print(json.dumps({name: value for name, value in result.items() if name != "each_trial"}, indent=2))
    return 0 if is_good(result) else 1


if __name__ == "__main__":
    sys.exit(main())
