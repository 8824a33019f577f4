"""A run that is asked to stop, and ranks that die or hang: whole runs under the real launcher, each with one fault.

What is asked by a signal ends with a checkpoint, STOPPED and code 75, and resumes to the last bit. What breaks ends the
job with the rank and the reason named.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.trainer.support import float32_ds_config, launch, recipe_values, with_dropout
from trainer.run_lock import Locked, lock
from trainer.stopping import STOP_FILE_VARIABLE, STOPPED_CODE

STEPS = 5
CLOCKED = {"tokens_per_second", "mfu", "data_wait_share", "memory_mib", "seconds"}
Run = Callable[..., subprocess.CompletedProcess[str]]


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


@pytest.fixture(scope="module")
def start(folder: Path) -> Run:
    """Run the recipe into folder/<name> on two ranks, with a fault."""

    def run(name: str, fault: dict[str, Any] | None, *more: str, expect: int | None) -> Any:
        arguments = ["--config", str(folder / "recipe.toml"), f"--run.output={folder / name}", *more]
        path = folder / f"{name}.json"
        path.write_text(json.dumps([{"task": "contrastive", "arguments": arguments, "fault": fault}]))
        return launch("tests.trainer.fault_worker", str(path), ranks=2, expect=expect)

    return run


@pytest.fixture(scope="module")
def undisturbed(start: Run, folder: Path) -> list[dict[str, Any]]:
    start("undisturbed", None, expect=0)
    return records(folder / "undisturbed")


def records(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in CLOCKED} for line in found if "lr" in line]


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("*step_*"))


def stopped(run: Path) -> dict[str, Any]:
    return json.loads((run / "STOPPED").read_text())


@pytest.mark.parametrize(
    ("kind", "rank", "reason"),
    [
        ("signal SIGTERM", 1, "SIGTERM"),
        ("signal SIGUSR1", 0, "SIGUSR1"),
        ("stop file", 1, "stop file"),
        ("clock", 0, "clock"),
        ("signal in a save", 0, "SIGTERM"),
    ],
)
def test_stops_with_a_checkpoint_and_goes_on(
    kind: str, rank: int, reason: str, start: Run, folder: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, more, step = kind.replace(" ", "-"), [], 3
    monkeypatch.setenv(STOP_FILE_VARIABLE, str(folder / f"{name}.stop"))
    if kind == "clock":
        more, step = ["--train.stop_after_minutes=0.0001"], 1
    if kind == "signal in a save":
        more = ["--checkpoint.every_steps=2"]
    ended = start(name, {"kind": kind, "step": 3, "rank": rank}, *more, expect=STOPPED_CODE)
    assert f"stopped after step {step} ({reason})" in ended.stderr and "Traceback" not in ended.stderr
    assert stopped(folder / name) == {"step": step, "reason": reason}
    kept = ["step_00000002", "step_00000003"] if kind == "signal in a save" else [f"step_{step:08d}"]
    assert checkpoints(folder / name) == kept
    assert records(folder / name) == undisturbed[:step]
    monkeypatch.delenv(STOP_FILE_VARIABLE)
    start(name, None, "--resume=required", *(["--checkpoint.every_steps=2"] if len(kept) > 1 else []), expect=0)
    assert records(folder / name) == undisturbed
    assert (folder / name / "DONE").is_file() and not (folder / name / "STOPPED").exists()


def test_a_second_signal_ends_at_once(start: Run, folder: Path) -> None:
    """Even where the main thread never comes back to Python's handlers."""
    ended = start("twice", {"kind": "two signals", "step": 3, "rank": 0}, expect=None)
    assert ended.returncode not in (0, STOPPED_CODE)
    assert "a second signal (SIGTERM): leaving without a checkpoint" in ended.stderr
    assert not checkpoints(folder / "twice") and not (folder / "twice" / "STOPPED").exists()


@pytest.mark.parametrize(
    ("kind", "rank", "reason"),
    [
        ("signal SIGKILL", 1, "rank 1 (process "),
        ("signal SIGKILL", 0, "rank 0 (process "),
        ("signal SIGSTOP", 1, "rank 1 gave no sign of life"),
        ("block", 1, "rank 1 at 'next batch' of step 3"),
        ("raise", 1, "failed: ValueError: a planted fault"),
    ],
)
def test_a_rank_that_breaks_ends_the_job_by_name(kind: str, rank: int, reason: str, start: Run, folder: Path) -> None:
    name = f"{kind}-{rank}".replace(" ", "-")
    ended = start(name, {"kind": kind, "step": 3, "rank": rank}, expect=None)
    assert ended.returncode not in (0, STOPPED_CODE)
    others = [
        line for line in ended.stderr.splitlines() if line.startswith(f"error: rank {1 - rank} ends with the job")
    ]
    assert len(others) == 1 and reason in others[0], ended.stderr[-3000:]
    assert not checkpoints(folder / name) and not (folder / name / "DONE").exists()


def test_ranks_do_not_outlive_their_launcher(start: Run, folder: Path, undisturbed: Any) -> None:
    run = folder / "launcher"
    start("launcher", {"kind": "launcher", "step": 3, "rank": 1}, expect=None)
    lock(run).close()  # waits until they have saved and gone
    assert stopped(run)["reason"] == "launcher gone"
    step = stopped(run)["step"]
    assert checkpoints(run) == [f"step_{step:08d}"] and records(run) == undisturbed[:step]


def test_one_run_a_folder(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from trainer.run_lock import lock; held = lock(Path(sys.argv[1]));"
    code += "print('held', flush=True); sys.stdin.read()"
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

    from trainer.stopping import StopRequests

    before = signal.getsignal(signal.SIGTERM)
    with StopRequests(after_minutes=0.0) as stops:
        assert stops.wanted() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        while stops.wanted() is None:  # the thread that reads signals
            pass
        assert stops.wanted() == "SIGUSR1"
    assert signal.getsignal(signal.SIGTERM) is before
