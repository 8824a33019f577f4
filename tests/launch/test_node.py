"""One node's ranks, without Slurm: signals become a file, failures end the others, every rank has a log."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.node import Place, _copy, describe, main, rank_environment, run_node
from tests import ROOT

# As the trainer does: it looks at the file once a step, and ends with 75.
WAITS = """
import os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "waits", flush=True)
while not os.path.exists(os.environ["BARISTA_STOP_FILE"]):
    time.sleep(0.02)
sys.exit(75)
"""
# Asked by a signal.
HANDLES = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
print("waits", flush=True)
while True:
    time.sleep(0.02)
"""
FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("why it failed"); sys.exit(5)
time.sleep(600)
"""


def start(tmp_path: Path, code: str, **changes: str) -> subprocess.Popen[str]:
    slurm = {"SLURM_NODEID": "0", "SLURM_NNODES": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1", **changes}
    command = [sys.executable, "-m", "launch.node", "--ranks=2", f"--logs={tmp_path / 'logs'}", "--"]
    return subprocess.Popen(
        [*command, sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **slurm, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def logs_of_waiting_ranks(tmp_path: Path) -> list[Path]:
    logs = [tmp_path / f"logs/rank-{rank:05d}.log" for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(log.exists() and "waits" in log.read_text() for log in logs) and time.monotonic() < deadline:
        time.sleep(0.02)
    return logs


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_asks_the_ranks_to_stop(tmp_path, number):
    node = start(tmp_path, WAITS)
    logs = logs_of_waiting_ranks(tmp_path)
    assert node.poll() is None
    node.send_signal(number)
    out, err = node.communicate(timeout=60)
    # srun ends all nodes where one fails, and to be asked to stop is no failure; the true code is in the file.
    assert node.returncode == 0 and f"{number.name}: the ranks are asked to stop" in err
    assert (tmp_path / "logs/node-000.exit").read_text() == "75\n"
    assert out == "rank 0 of 2 waits\n"
    assert [log.read_text() for log in logs] == [f"rank {rank} of 2 waits\n" for rank in range(2)]
    assert not list(tmp_path.glob("barista-stop-*"))


@pytest.mark.processes
def test_a_signal_reaches_the_ranks_though_the_temporary_folder_is_gone(tmp_path):
    """As where a site removes old folders from /tmp: the run must still save before its time limit."""
    node = start(tmp_path, HANDLES)
    logs_of_waiting_ranks(tmp_path)
    (folder,) = tmp_path.glob("barista-stop-*")
    shutil.rmtree(folder)
    node.send_signal(signal.SIGUSR1)
    _, err = node.communicate(timeout=60)
    assert node.returncode == 0 and "SIGUSR1: the ranks are signalled" in err
    assert (tmp_path / "logs/node-000.exit").read_text() == "75\n"


@pytest.mark.processes
@pytest.mark.parametrize("contained", [False, True])
def test_where_the_ranks_of_a_container_look(tmp_path, contained):
    """Among the logs, because a container need not see the folder that TMPDIR names."""
    command = [sys.executable, "-c", "import os; print(os.environ['BARISTA_STOP_FILE'])"]
    assert run_node(command, place=Place(0, 1, 1), logs=tmp_path, contained=contained) == 0
    looked = Path((tmp_path / "rank-00000.log").read_text().strip())
    assert (looked.parent == tmp_path) == contained and not looked.exists()


def test_a_rank_does_not_wait_for_a_full_disk(capfd):
    """Its output is read to the end: a rank whose output nobody reads would wait forever, and all others for it."""
    output = io.BytesIO(b"one\ntwo\n")
    _copy(output, Path("/dev/full"))
    assert output.read() == b"" and capfd.readouterr().out == "one\ntwo\n"


@pytest.mark.processes
def test_ranks_outlive_signals_that_reach_them_before_they_have_handlers(tmp_path):
    """As with proctrack/linuxproc, where all processes of a job are signalled."""
    stubborn = "import os, signal, sys\nfor n in (signal.SIGUSR1, signal.SIGTERM): os.kill(os.getpid(), n)\nsys.exit(0)"
    node = start(tmp_path, stubborn)
    assert node.wait(timeout=60) == 0
    alone = subprocess.run([sys.executable, "-c", stubborn], check=False)
    assert alone.returncode == -signal.SIGUSR1, "the control: without that, the first signal is the end"


@pytest.mark.processes
def test_a_failing_rank_ends_the_others(tmp_path, capfd):
    command = [sys.executable, "-c", FAILS]
    assert run_node(command, place=Place(0, 1, 3), logs=tmp_path, seconds_for_others=0.5) == 5
    said = capfd.readouterr().err
    assert "rank 1 ended with exit code 5" in said and "why it failed" in said
    assert "ranks 0, 2 did not end by themselves" in said


@pytest.mark.processes
def test_a_killed_rank_is_no_success(tmp_path, capfd):
    command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    assert run_node(command, place=Place(0, 1, 1), logs=tmp_path) == 128 + signal.SIGKILL
    assert "signal SIGKILL" in capfd.readouterr().err


def test_ranks_over_nodes():
    places = [rank_environment(Place(node, 3, 2), local) for node in range(3) for local in range(2)]
    assert [each["RANK"] for each in places] == list("012345")
    assert [each["LOCAL_RANK"] for each in places] == list("010101")
    assert {each["WORLD_SIZE"] for each in places} == {"6"}


@pytest.mark.processes
def test_a_job_without_gpus_is_not_counted_by_them(tmp_path, monkeypatch, capfd):
    """The shell of the submission may have hidden GPUs, and its variables reach the job."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    said = told(tmp_path, monkeypatch, capfd, "--ranks=4", devices="0")
    assert "/no/such: No such file or directory" in said
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    said = told(tmp_path, monkeypatch, capfd, "--ranks=4", devices="0")
    assert "4 ranks were asked for and Slurm gave the GPUs 0" in said


@pytest.mark.processes
def test_refusals(tmp_path):
    node = start(tmp_path, WAITS, CUDA_VISIBLE_DEVICES="3", DS_ACCELERATOR="cuda")
    assert node.wait(timeout=60) == 2
    assert "2 ranks were asked for and Slurm gave the GPUs 3" in node.stderr.read()
    assert not (tmp_path / "logs").exists()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "changes", "words"),
    [
        (("--ranks=0",), {}, "--ranks 0 must be at least 1"),
        (("--ranks=-3",), {}, "--ranks -3 must be at least 1"),
        (("--ranks=1",), {"SLURM_NODEID": "x"}, "SLURM_NODEID=x of SLURM_NNODES=1 is no node"),
        (("--ranks=1",), {"SLURM_NODEID": "\u00b2"}, "is no node of a job"),
        (("--ranks=1",), {"SLURM_NNODES": "1,2"}, "is no node of a job"),
        (("--ranks=1",), {"SLURM_NODEID": "1"}, "SLURM_NODEID=1 of SLURM_NNODES=1 is no node"),
        (("--ranks=1", "--logs=file/x"), {}, "file/x: Not a directory"),
        (("--ranks=1", f"--logs={'x' * 300}"), {}, "File name too long"),
    ],
)
def test_user_errors_are_one_sentence(tmp_path, monkeypatch, capfd, arguments, changes, words):
    assert words in told(tmp_path, monkeypatch, capfd, *arguments, **changes)


@pytest.mark.processes
def test_a_missing_command_is_a_user_error(tmp_path, monkeypatch, capfd):
    said = told(tmp_path, monkeypatch, capfd, "--ranks=1")
    assert "/no/such: No such file or directory" in said
    assert (tmp_path / "logs/node-000.exit").read_text() == "2\n", "what the job's script decides by"


def told(tmp_path, monkeypatch, capfd, *arguments, devices="", **changes):
    """The one sentence of a node that is asked to run /no/such."""
    slurm = {"SLURM_NODEID": "0", "SLURM_NNODES": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1", **changes}
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main(["--logs=logs", *arguments, "--", "/no/such"]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    return said


def test_signals_without_a_name():
    assert [describe(-9), describe(-40), describe(3)] == ["signal SIGKILL", "signal 40", "exit code 3"]
