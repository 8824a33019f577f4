"""What a job's script does when its ranks have ended, with stand-ins for srun and scontrol.

tests/launch/test_slurm_jobs.py has the same on a real cluster, where there is one.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from launch.job import Job, training_job
from launch.options import job_options
from tests import ROOT
from trainer.config.load import load_recipe

pytestmark = pytest.mark.processes

CRASH = "exit 1"
SAVED = "mkdir -p {run}/checkpoints; echo step_{step} > {run}/checkpoints/latest"
STOP = SAVED + """; echo '{{"step": {step}, "reason": "stop file"}}' > {run}/STOPPED"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """The job of a run in tmp_path, and programs that stand in for Slurm's."""
    (tmp_path / "bin").mkdir()
    # A requeue that Slurm refuses ends the script at once; where it is granted, Slurm ends the script.
    scontrol = f'[ "$1" = show ] && echo node1 || {{ echo >> {tmp_path}/requeues; exit 1; }}'
    for name, body in (("srun", f"source {tmp_path}/attempt"), ("scontrol", scontrol)):
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    settings = [f"run.output={tmp_path / 'run'}", "model.source=m", 'data.shards=["s"]', "objective.name=masked"]
    options = job_options({"gpus_per_node": 1}, where="here")
    return training_job(load_recipe(None, settings), options, where="r.toml", resume=False, chdir=ROOT)


def attempt(job: Job, number: int, does: str, **values: object) -> tuple[int, str, bool]:
    """(the script's exit code, its output, whether it asked for a requeue) of an attempt in which the ranks do that."""
    run = job.folder.parents[1]
    place = run.parent
    (place / "attempt").write_text(does.format(run=run, **values))
    (place / "requeues").unlink(missing_ok=True)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_RESTART_COUNT": str(number)}
    done = subprocess.run(
        ["bash", "-c", job.script],
        env={**os.environ, **slurm, "PATH": f"{place / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr
    return done.returncode, done.stdout, (place / "requeues").exists()


def test_crashes_in_a_row(job):
    """Two crashes without a new checkpoint between them end the job. An attempt may save and then crash."""
    assert attempt(job, 0, CRASH)[2]
    code, said, requeued = attempt(job, 1, CRASH)
    assert (code, requeued) == (1, False) and "crashed (srun: 1)" in said
    assert attempt(job, 2, f"{SAVED}; {CRASH}", step=3)[2]
    assert not attempt(job, 3, CRASH)[2]


def test_crashes_that_are_not_in_a_row(job):
    """An attempt that went well lies between them, and saved."""
    assert attempt(job, 0, CRASH)[2]
    assert attempt(job, 1, STOP, step=3)[2]
    _, said, requeued = attempt(job, 2, CRASH)
    assert requeued and "crash 1 since the last new checkpoint" in said
    assert not attempt(job, 3, CRASH)[2]


def test_a_run_that_ends_at_stop_at_step(job):
    """It is neither done nor crashed; code 75 keeps the chain's next stage from starting without a model."""
    code, said, requeued = attempt(job, 0, SAVED, step=3)
    assert (code, requeued) == (75, False)
    assert "train.stop_at_step" in said and "crashed" not in said


def test_the_same_stop_twice(job):
    assert attempt(job, 0, STOP, step=3)[2]
    code, said, requeued = attempt(job, 1, STOP, step=3)
    assert (code, requeued) == (75, False) and "give it more --time" in said


def test_a_run_that_is_done(job):
    assert attempt(job, 0, "touch {run}/DONE; exit 1")[::2] == (0, False)
    code, said, _ = attempt(job, 1, CRASH)
    assert code == 0 and "is done already" in said
