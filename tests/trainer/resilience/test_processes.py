"""Processes are told apart by what no clock that may be set has a part in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w

from tests.launcher import launch
from tests.trainer.support import float32_ds_config, recipe_values
from trainer.resilience import processes
from trainer.resilience.processes import Process, seconds_since_start, state_in
from trainer.resilience.stopping import StopRequests

IDLE = [sys.executable, "-c", "print('up', flush=True); import sys; sys.stdin.read()"]


@pytest.mark.parametrize("name", ["python", "a b", ") R 1 (", "x) Z 0 0 0", "\n", ""])
def test_a_line_of_proc(name: str) -> None:
    rest = " ".join(["S", *map(str, range(4, 22)), "777", "9000", "1"])
    assert state_in(f"12 ({name}) {rest}\n") == ("S", 777)


@pytest.mark.processes
def test_a_process_lives_until_it_ends_even_if_nobody_waits_for_it() -> None:
    with subprocess.Popen(IDLE, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        found = Process.of(child.pid)
        assert found.lives and Process.me().lives
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and still in the table
        assert Path(f"/proc/{child.pid}/stat").is_file() and not found.lives
        child.wait()
        assert not found.lives
        with pytest.raises(psutil.NoSuchProcess):
            Process.of(child.pid)


def test_another_process_of_that_number_is_another() -> None:
    me = Process.me()
    assert not Process(me.pid, me.started - 1).lives


def test_where_there_is_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "HAS_PROC", False)
    me = Process.me()
    assert me.lives and me.started == psutil.Process().create_time()
    assert not Process(me.pid, me.started - 1).lives
    assert 0 < seconds_since_start() < 24 * 3600


def test_the_age_is_by_the_clock_that_ticks_were_counted_by() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    assert seconds_since_start(lambda: Process.me().started / ticks + 5.0) == pytest.approx(5.0)
    assert 0 < seconds_since_start() < 24 * 3600


def test_minutes_are_counted_by_a_clock_that_nobody_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic()]
    left = 600.0
    stops = StopRequests(after_minutes=(seconds_since_start() + left) / 60.0, clock=lambda: now[0])
    real = time.time
    for jump in (3600.0, -3600.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        assert stops.wanted() is None
    now[0] += left - 5.0
    assert stops.wanted() is None
    now[0] += 10.0
    assert stops.wanted() == "clock"


CLOCK_STEPS = [1.0, -1.0, 3600.0, -3600.0]


def bound_over_proc_stat(file: Path) -> list[str]:
    """A command's first words: what follows sees `file` in place of /proc/stat."""
    unshare = shutil.which("unshare")
    words = [str(unshare), "--mount", "sh", "-c", 'mount --bind "$0" /proc/stat && exec "$@"', str(file)]
    if unshare is None or subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("needs leave to bind a file over /proc/stat in a mount namespace of its own (root)")
    return words


@pytest.mark.processes
def test_a_process_below_a_stepped_clock_lives_on(tmp_path: Path) -> None:
    """Negative control: by psutil's time of creation it becomes another process."""
    file = tmp_path / "stat"
    file.write_text(Path("/proc/stat").read_text())
    code = (
        "import sys, psutil\n"
        "from tests.launcher import step_clock\n"
        "from trainer.resilience.processes import Process, seconds_since_start\n"
        "me, created, age = Process.me(), psutil.Process().create_time(), seconds_since_start()\n"
        "for seconds in map(float, sys.argv[2:]):\n"
        "    step_clock(sys.argv[1], seconds)\n"
        "    assert psutil.Process().create_time() == created + seconds, 'the clock was not stepped'\n"
        "    assert me.lives and Process.me() == me and age <= seconds_since_start() < age + 600\n"
        "    step_clock(sys.argv[1], -seconds)\n"
    )
    command = [*bound_over_proc_stat(file), sys.executable, "-c", code, str(file), *map(str, CLOCK_STEPS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.launcher
def test_a_run_of_two_ranks_goes_on_when_the_clock_is_stepped(tuple_shards: Path, tmp_path: Path) -> None:
    """Under the real launcher; each step of the clock waits until all that watch have looked after it."""
    file = tmp_path / "stat"
    file.write_text(Path("/proc/stat").read_text())
    values = recipe_values(tuple_shards, train={"steps": 2 + len(CLOCK_STEPS)}, run={"output": str(tmp_path / "run")})
    values["engine"] = {"ds_config": str(float32_ds_config(tmp_path, 1))}
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(values))
    fault: dict[str, Any] = {"kind": "clock", "step": 2, "stat": str(file), "seconds": CLOCK_STEPS}
    case = {"task": "contrastive", "arguments": ["--config", str(tmp_path / "recipe.toml")], "fault": fault}
    (tmp_path / "cases.json").write_text(json.dumps([case]))
    done = launch(
        "tests.trainer.fault_worker", str(tmp_path / "cases.json"), ranks=2, before=bound_over_proc_stat(file)
    )
    assert (tmp_path / "run" / "DONE").is_file() and not (tmp_path / "run" / "STOPPED").exists()
    assert done.stderr.count("the clock was stepped") == len(CLOCK_STEPS)
