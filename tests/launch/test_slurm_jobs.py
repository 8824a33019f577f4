"""What surrounds a training run in a Slurm job, on a real cluster of two virtual nodes, with a stand-in for training.

Real training under the same scripts is in test_slurm_training.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.launch.slurm_cluster import Cluster, cluster, until, why_not
from tests.run_folder import lines_of

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


@pytest.fixture(scope="module")
def slurm(launcher, tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


def submit(slurm: Cluster, folder: Path, *options: str, steps: int, **environment: object) -> tuple[str, Path]:
    """Submit a run of the stand-in on two nodes; its job's number and the run's folder."""
    shards = folder / "shards"
    shards.mkdir(exist_ok=True)
    (shards / "manifest.json").write_text("{}")
    recipe, run = folder / "recipe.toml", folder / "run"
    recipe.write_text(
        f'[run]\noutput = "{run}"\n[model]\nsource = "x"\n[data]\nshards = ["{shards}"]\n'
        f'[objective]\nname = "masked"\n[train]\nsteps = {steps}\n'
    )
    command = [sys.executable, "-m", "launch.submit", str(recipe), "--nodes=2", "--gpus-per-node=0"]
    command += ["--venv", sys.prefix, "--container", f"python {ROOT / 'tests/launch/stand_in.py'}", *options]
    command += [f"--env=STAND_IN_{name.upper()}={value}" for name, value in environment.items()]
    done = subprocess.run(command, cwd=ROOT, env=slurm.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((run / "job/001/environment.json").read_text())["job"], run


def steps_of(run: Path) -> list[int]:
    return [line["step"] for line in lines_of(run)] if (run / "metrics.jsonl").exists() else []


def log_of(run: Path) -> str:
    return "".join(path.read_text() for path in sorted(run.glob("job/001/slurm-*.log")))


def test_a_run_on_two_nodes(slurm, tmp_path):
    """Two ranks a node, each with a log of its own, and only the first in the job's log."""
    number, run = submit(slurm, tmp_path, "--ranks-per-node=2", steps=3)
    job = slurm.wait_for(number, "COMPLETED", "FAILED", "CANCELLED")
    assert job["JobState"] == "COMPLETED", log_of(run)
    logs = sorted(path.name for path in (run / "job/001/logs/attempt-000").iterdir())
    assert logs == ["node-000.exit", "node-001.exit", *(f"rank-{rank:05d}.log" for rank in range(4))]
    for rank in range(4):
        text = (run / f"job/001/logs/attempt-000/rank-{rank:05d}.log").read_text()
        assert f"rank {rank} of 4" in text
        assert (f"rank {rank} of 4" in log_of(run)) == (rank == 0)


def test_a_signal_requeues_and_the_job_goes_on(slurm, tmp_path):
    """What `--signal` does at a time limit, by hand; the save may take longer than a launcher's 30 s would allow."""
    number, run = submit(slurm, tmp_path, steps=12, step_seconds=0.4, save_seconds=3)
    until(lambda: len(steps_of(run)) >= 3, what=lambda: log_of(run))
    slurm.call("scancel", "--signal=USR1", number)
    job = slurm.wait_for(number, "COMPLETED", "FAILED", "CANCELLED")
    assert job["JobState"] == "COMPLETED", log_of(run)
    assert job["Restarts"] == "1"
    assert steps_of(run) == list(range(1, 13))


def test_a_preemption_is_no_end(slurm, tmp_path):
    """Its grace tells only the tasks: the script alone can see that a run which ended well was not done."""
    number, run = submit(slurm, tmp_path, steps=15, step_seconds=0.4)
    until(lambda: len(steps_of(run)) >= 3, what=lambda: log_of(run))
    slurm.call("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=hostname")
    job = slurm.wait_for(number, "COMPLETED", "FAILED", "CANCELLED")
    assert job["JobState"] == "COMPLETED", log_of(run)
    assert job["Restarts"] == "1"
    assert steps_of(run) == list(range(1, 16))


def test_scancel_ends_it(slurm, tmp_path):
    """It saves, and stays out of the queue."""
    number, run = submit(slurm, tmp_path, steps=500, step_seconds=0.4)
    until(lambda: len(steps_of(run)) >= 2, what=lambda: log_of(run))
    slurm.call("scancel", number)
    assert slurm.wait_for(number, "CANCELLED")["Restarts"] == "0"
    until(lambda: (run / "STOPPED").exists(), seconds=30)
    assert json.loads((run / "STOPPED").read_text())["step"] == len(steps_of(run))


# A crashed job ends with what srun returns, which may be the signal that ended the other node.
ANY_FAILURE = {str(code) for code in range(1, 256)}


@pytest.mark.parametrize(
    ("code", "attempts", "state", "restarts", "job_codes"),
    [
        (2, 9, "FAILED", "0", {"2"}),  # a user's mistake stays one
        (3, 9, "FAILED", "0", {"3"}),  # given up
        (1, 1, "COMPLETED", "1", {"0"}),  # a crash is tried again
        (1, 9, "FAILED", "1", ANY_FAILURE),  # once, where it does not get further
    ],
)
def test_how_a_rank_ends_decides(slurm, tmp_path, code, attempts, state, restarts, job_codes):
    number, run = submit(slurm, tmp_path, steps=2, exit=code, exit_attempts=attempts)
    job = slurm.wait_for(number, "COMPLETED", "FAILED", "CANCELLED")
    assert (job["JobState"], job["Restarts"]) == (state, restarts), log_of(run)
    assert job["ExitCode"].split(":")[0] in job_codes
    assert "error: as asked" in log_of(run)


def test_requeues_have_an_end(slurm, tmp_path):
    number, run = submit(slurm, tmp_path, "--max-requeues=0", steps=500, step_seconds=0.4)
    until(lambda: len(steps_of(run)) >= 2, what=lambda: log_of(run))
    slurm.call("scancel", "--signal=USR1", number)
    job = slurm.wait_for(number, "COMPLETED", "FAILED", "CANCELLED")
    assert (job["JobState"], job["Restarts"], job["ExitCode"]) == ("FAILED", "0", "75:0"), log_of(run)
