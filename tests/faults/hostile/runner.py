"""Runs the cases, a few at a time, each in a fork of this process that keeps it; and counts the figures."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.faults.hostile.assets import Assets
from tests.faults.hostile.builders import keep
from tests.faults.hostile.case import Case, Command
from tests.faults.hostile.process import AMBIENT_SECRETS, Keeper, end_helpers, run_commands
from tests.faults.hostile.rights import Skip, adopt_orphans
from tests.faults.hostile.verdict import Finding, Outcome, judge, snapshot, verdict_of

MUST_BE_0 = ("tracebacks", "silent", "wrong", "left_behind", "leaked_secrets")
_SECONDS_FOR_BUILDING = 240.0
_LOOK_SECONDS = 0.005
_RESULT_FILE = "result.json"


@dataclass(frozen=True)
class Result:
    name: str
    cause: int | str
    code: int | None  # the first command's exit code; None if none ran
    seconds: float
    verdict: str
    kinds: tuple[str, ...]  # the verdicts of all findings, such as a traceback and a process that lives on
    said: str

    def line(self) -> str:
        code = "–" if self.code is None else str(self.code)
        text = f"{self.name:<58} {code:>4} {self.seconds:6.1f}  {self.verdict}"
        return text + (f": {self.said}" if self.said else "")


def run_cases(
    cases: Sequence[Case],
    assets: Assets | None,
    folder: Path,
    *,
    jobs: int = 2,
    keep_folders: bool = False,
    report: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """The results, in the order of the cases. Their folders are made in `folder`, and removed without keep_folders."""
    waiting = list(enumerate(cases))
    waiting.reverse()
    running: dict[int, tuple[int, Path, float]] = {}
    done: dict[int, Result] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, case = waiting.pop()
                place = folder / f"{number:04d}"
                place.mkdir(parents=True)
                running[_fork_keeper(case, assets, place)] = (number, place, time.monotonic())
            ended = [pid for pid in running if _has_ended(pid, running[pid][2], cases[running[pid][0]])]
            if not ended:
                time.sleep(_LOOK_SECONDS)
            for pid in ended:
                number, place, began = running.pop(pid)
                done[number] = _result_of(cases[number], place, time.monotonic() - began)
                report(done[number])
                if not keep_folders:
                    remove(place)
    finally:
        for pid in running:
            end_with_children(pid)
    return [done[number] for number in range(len(cases))]


def _has_ended(pid: int, began: float, case: Case) -> bool:
    if os.waitpid(pid, os.WNOHANG)[0]:
        return True
    if time.monotonic() - began > _SECONDS_FOR_BUILDING + 2 * case.seconds:
        end_with_children(pid)
        return True
    return False


def end_with_children(pid: int) -> None:
    """Kill a child of this process, with all its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(pid).children(recursive=True)
        for process in [psutil.Process(pid), *below]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _result_of(case: Case, place: Path, seconds: float) -> Result:
    try:
        values = json.loads((place / _RESULT_FILE).read_bytes())
    except (OSError, ValueError):
        said = "the case itself never ended; see its build function"
        return Result(case.name, case.cause, None, seconds, "wrong", ("wrong",), said)
    return Result(**{**values, "kinds": tuple(values["kinds"])})


def _fork_keeper(case: Case, assets: Assets | None, place: Path) -> int:
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            adopt_orphans()
            result = _kept(case, assets, place)
            (place / _RESULT_FILE).write_text(json.dumps(asdict(result)))
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(0)
    return child


def _kept(case: Case, assets: Assets | None, place: Path) -> Result:
    keeper = Keeper(place, case.seconds)
    keeper.make_folders()
    keep(keeper)
    code, seconds = None, 0.0
    try:
        outcome = _outcome(case, assets, keeper)
        code, seconds = outcome.first.code, outcome.first.seconds
        found = judge(outcome, case.expect)
    except Skip as reason:
        found = [Finding("skipped", str(reason))]
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        told = f"the case itself fails: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        found = [Finding("wrong", told)]
    finally:
        end_helpers(keeper)
    said = "; ".join(each.said for each in sorted(found, key=lambda each: verdict_of([each])))
    said = " ".join(said.encode(errors="backslashreplace").decode().split())
    kinds = tuple(sorted({each.verdict for each in found}))
    return Result(case.name, case.cause, code, round(seconds, 2), verdict_of(found), kinds, said)


def _outcome(case: Case, assets: Assets | None, keeper: Keeper) -> Outcome:
    built = case.build(keeper.work, assets)  # type: ignore[arg-type]
    commands = [built] if isinstance(built, Command) else list(built)
    shared = assets.root if assets is not None else None
    before, assets_before = snapshot_of(keeper.place), snapshot(shared) if shared else {}
    ended, survivors = run_commands(keeper, commands)
    after, assets_after = snapshot_of(keeper.place), snapshot(shared) if shared else {}
    if assets_after != assets_before:
        changed = [
            path for path in {*assets_after, *assets_before} if assets_after.get(path) != assets_before.get(path)
        ]
        raise AssertionError(f"a case that ran now has changed the assets' {sorted(changed)[0]}")
    return Outcome(
        keeper.place,
        ended,
        before,
        after,
        outputs=tuple(output for command in commands for output in command.outputs),
        survivors=survivors,
        secrets=(*case.secrets, *AMBIENT_SECRETS.values()),
        may_leave=case.may_leave,
        assets=shared or Path(),
    )


def snapshot_of(place: Path) -> dict[str, Any]:
    whole = snapshot(place)
    return {path: entry for path, entry in whole.items() if path.split("/")[0] in ("work", "tmp", "home")}


def remove(folder: Path) -> None:
    """Remove a folder, even if a case took its permissions away."""
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):
                path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def figures(results: Sequence[Result], *, seconds: float) -> dict[str, Any]:
    verdicts = Counter(kind for result in results for kind in result.kinds)
    return {
        "cases": len(results),
        "tracebacks": verdicts["traceback"],
        "silent": verdicts["silent"],
        "wrong": verdicts["wrong"],
        "left_behind": verdicts["left_behind"],
        "leaked_secrets": verdicts["leaked"],
        "skipped": verdicts["skipped"],
        "seconds": round(seconds, 1),
        "results": [{key: value for key, value in asdict(each).items() if key != "kinds"} for each in results],
    }
