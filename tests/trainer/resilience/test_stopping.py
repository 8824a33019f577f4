"""A run that is asked to stop, and ranks that die or hang: whole runs of two ranks, each with one fault.

What is asked by a signal ends with a checkpoint, STOPPED and, under the real launcher, code 75; it resumes to the last
bit. What breaks ends the job with the rank and the reason named.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.launcher import launch
from tests.needs import needed
from tests.ranks import run_ranks
from tests.run_folder import records
from tests.trainer.support import float32_ds_config, recipe_values, with_dropout
from trainer.resilience.run_lock import Locked, lock
from trainer.resilience.stopping import STOPPED_CODE

pytestmark = pytest.mark.long

STEPS = 5
# Name of a run -> why it stopped, after which step, and the steps of its checkpoints then.
STOPS = {
    "SIGTERM": ("SIGTERM", 3, [3]),
    "SIGUSR1": ("SIGUSR1", 3, [3]),
    "file": ("stop file", 3, [3]),
    "clock": ("clock", 1, [1]),
    "save": ("SIGTERM", 3, [2, 3]),
}


@pytest.fixture(scope="module")
def folder(tuple_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopping")
    values = with_dropout(
        recipe_values(
            tuple_shards,
            data={"num_workers": 1},
            optim={"lr": 1e-3, "eps": 1e-8},
            train={"steps": STEPS},
            checkpoint={"every_steps": 100},
            engine={"ds_config": str(float32_ds_config(folder, 1))},
        )
    )
    (folder / "recipe.toml").write_text(tomli_w.dumps(values))
    return folder


def case(folder: Path, name: str, fault: dict[str, Any] | None, *more: str) -> dict[str, Any]:
    """The recipe into folder/<name>."""
    arguments = ["--config", str(folder / "recipe.toml"), f"--run.output={folder / name}", *more]
    stop_file = str(folder / f"{name}.stop")
    return {"name": name, "task": "contrastive", "arguments": arguments, "fault": fault, "stop_file": stop_file}


def start(folder: Path, name: str, cases: list[dict[str, Any]], *, expect: int | None, by: Any = launch) -> Any:
    """By the real launcher, or forked by `run_ranks`."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(cases))
    return by("tests.trainer.fault_worker", str(path), ranks=2, expect=expect)


@pytest.fixture(scope="module")
def stops(request: pytest.FixtureRequest, launcher: None, folder: Path) -> str:
    """The runs <name> that are needed: stopped, copied to <name>-stopped and gone on with; and `undisturbed`.

    Gives what was said of a SIGTERM, which has a launch of its own, for it is the launcher's exit code that counts.
    """
    wanted, every_2 = needed(request), ["--checkpoint.every_steps=2"]
    assert wanted <= {*STOPS, "undisturbed"}
    said = ""
    if "SIGTERM" in wanted:
        cases = [case(folder, "SIGTERM", fault("signal SIGTERM", 1))]
        said = start(folder, "first", cases, expect=STOPPED_CODE).stderr
    others = [
        case(folder, "undisturbed", None),
        case(folder, "SIGUSR1", fault("signal SIGUSR1", 0)),
        case(folder, "file", fault("stop file", 1)),
        case(folder, "clock", None, "--train.stop_after_minutes=0.0001"),
        case(folder, "save", fault("signal in a save", 0), *every_2),
    ]
    others = [each for each in others if each["name"] in wanted]
    if others:
        start(folder, "others", others, expect=0, by=run_ranks)
    stopped = [name for name in STOPS if name in wanted]
    for name in stopped:
        shutil.copytree(folder / name, folder / f"{name}-stopped")
        (folder / f"{name}.stop").unlink(missing_ok=True)
    more = {"save": every_2}
    again = [case(folder, name, None, "--resume=required", *more.get(name, [])) for name in stopped]
    if again:
        start(folder, "resumed", again, expect=0, by=run_ranks)
    return said


def fault(kind: str, rank: int) -> dict[str, Any]:
    return {"kind": kind, "step": 3, "rank": rank}


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("*step_*"))


def stopped(run: Path) -> dict[str, Any]:
    return json.loads((run / "STOPPED").read_text())


@pytest.mark.parametrize("name", STOPS)
@pytest.mark.needs("{name}", "undisturbed")
def test_stops_with_a_checkpoint_and_goes_on(name: str, stops: str, folder: Path) -> None:
    reason, step, kept = STOPS[name]
    run, want = folder / f"{name}-stopped", records(folder / "undisturbed")
    assert stopped(run) == {"step": step, "reason": reason}
    assert checkpoints(run) == [f"step_{each:08d}" for each in kept]
    assert not (run / "DONE").exists()
    assert len(want) == STEPS and records(run) == want[:step]
    assert records(folder / name) == want
    assert (folder / name / "DONE").is_file() and not (folder / name / "STOPPED").exists()


@pytest.mark.needs("SIGTERM")
def test_what_is_said(stops: str) -> None:
    """Under the real launcher it comes with code 75, which the fixture asks for."""
    assert "stopped after step 3 (SIGTERM); go on with --resume auto" in stops and "Traceback" not in stops


@pytest.mark.launcher
def test_a_second_signal_ends_at_once(folder: Path) -> None:
    """Even where the main thread never comes back to Python's handlers."""
    ended = start(folder, "twice", [case(folder, "twice", fault("two signals", 0))], expect=None, by=run_ranks)
    assert ended.returncode not in (0, STOPPED_CODE)
    assert "a second signal (SIGTERM): leaving without a checkpoint" in ended.stderr
    assert not checkpoints(folder / "twice") and not (folder / "twice" / "STOPPED").exists()


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("kind", "rank", "reason", "by"),
    [
        ("signal SIGKILL", 0, "rank 0 (process ", launch),
        ("signal SIGSTOP", 1, "rank 1 gave no sign of life", launch),
        # These ranks end by themselves, so the launcher sees what it sees of the first.
        ("block", 1, "rank 1 at 'next batch' of step 3", run_ranks),
        ("raise", 1, "failed: ValueError: a planted fault", run_ranks),
    ],
)
def test_a_rank_that_breaks_ends_the_job_by_name(kind: str, rank: int, reason: str, by: Any, folder: Path) -> None:
    name = f"{kind}-{rank}".replace(" ", "-")
    hang = ["--train.hang_seconds=8"] if kind == "block" else []
    ended = start(folder, name, [case(folder, name, fault(kind, rank), *hang)], expect=None, by=by)
    assert ended.returncode not in (0, STOPPED_CODE)
    other = f"error: rank {1 - rank} ends with the job"
    others = [line for line in ended.stderr.splitlines() if line.startswith(other)]
    assert len(others) == 1 and reason in others[0], ended.stderr[-3000:]
    assert not checkpoints(folder / name) and not (folder / name / "DONE").exists()


@pytest.mark.launcher
@pytest.mark.needs("undisturbed")
def test_ranks_do_not_outlive_their_launcher(stops: str, folder: Path) -> None:
    run = folder / "launcher"
    start(folder, "launcher", [case(folder, "launcher", fault("launcher", 1))], expect=None)
    lock(run).close()  # waits until they have saved and gone
    assert stopped(run)["reason"] == "launcher gone"
    step = stopped(run)["step"]
    assert checkpoints(run) == [f"step_{step:08d}"] and records(run) == records(folder / "undisturbed")[:step]


@pytest.mark.processes
def test_one_run_a_folder(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from trainer.resilience.run_lock import lock; "
    code += "held = lock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Locked, match=f"process {holder.pid} on "):
            lock(tmp_path, wait_seconds=0.0)
        holder.kill()
        holder.wait()
        lock(tmp_path, wait_seconds=0.0).close()


def test_the_wakeup_file_and_handlers_are_given_back() -> None:
    import signal

    from trainer.resilience.stopping import StopRequests

    before = signal.getsignal(signal.SIGTERM)
    with StopRequests(after_minutes=0.0) as stops:
        assert stops.wanted() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        while stops.wanted() is None:  # the thread that reads signals
            pass
        assert stops.wanted() == "SIGUSR1"
    assert signal.getsignal(signal.SIGTERM) is before
