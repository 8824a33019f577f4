"""Starting the real programs: the `deepspeed` launcher and single commands, each in a session of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from data.ground.ports import free_port
from tests import ROOT


def environment_of_ranks() -> dict[str, str]:
    """The environment for programs that train: the venv's programs, CPU, no network, one thread per rank."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def launcher_command(module: str, *arguments: str, ranks: int) -> list[str]:
    """The `deepspeed` command that runs a module on that many ranks of this machine."""
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(ranks)]
    return [*launcher, "--master_port", str(free_port()), "--module", module, *arguments]


def launch(
    module: str,
    *arguments: str,
    ranks: int,
    timeout_seconds: float = 900.0,
    expect: int | None = 0,
    before: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a module under the real `deepspeed` launcher on `ranks` ranks; a timeout ends the whole process group.

    before: a command that runs the launcher, such as `env NAME=VALUE`.
    """
    command = [*before, *launcher_command(module, *arguments, ranks=ranks)]
    return run_process(command, timeout_seconds=timeout_seconds, expect=expect)


def run_process(
    command: Sequence[str],
    *,
    timeout_seconds: float = 900.0,
    expect: int | None = 0,
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in a session of its own; a timeout ends all of it.

    environment: variables in addition to those of `environment_of_ranks`.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**environment_of_ranks(), **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_seconds)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    done = subprocess.CompletedProcess(list(command), process.returncode, out, err)
    if expect is not None:
        assert done.returncode == expect, f"exit code {done.returncode}\n{out[-4000:]}\n{err[-8000:]}"
    return done


def step_clock(stat: str, seconds: float) -> None:
    """Move `btime` in a stand-in for /proc/stat by `seconds`, as setting the wall clock would."""
    lines = Path(stat).read_text().splitlines()
    moved = [f"btime {int(line.split()[1]) + int(seconds)}" if line.startswith("btime") else line for line in lines]
    with Path(stat).open("r+") as file:  # rewritten in place, because this very file is bind-mounted
        file.write("\n".join(moved) + "\n")
        file.truncate()
