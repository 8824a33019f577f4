"""A Slurm cluster of two virtual nodes on this machine: Debian's own slurmctld, slurmd and munged, started by hand.

Needs root and `apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge`. Each node has a host
name and /etc/hosts of its own (mount and UTS namespaces); nothing under /etc is written, and everything that was
started ends with the fixture. proctrack/cgroup, as in production: with proctrack/linuxproc signals reach every process
of a job, which hides what these tests are about.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data.ground.ports import free_port

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "unshare")
FREEZER = Path("/sys/fs/cgroup/freezer")

_CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits for its credential to expire: two minutes, but for this.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=30
MinJobAge=600
SlurmctldTimeout=30
SlurmdTimeout=30
MessageTimeout=30
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Why there can be no cluster here; None where there can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"needs Slurm ({', '.join(missing)} absent): apt-get install slurmctld slurmd slurm-client munge"
    if os.geteuid() != 0:
        return "needs root, to start Slurm's daemons in namespaces"
    if not FREEZER.is_dir():
        return "needs the freezer cgroup (version 1) of proctrack/cgroup in Debian's Slurm 22.05"
    return None


@dataclass(frozen=True)
class Cluster:
    folder: Path
    nodes: tuple[str, str]  # names of this cluster alone: Slurm's cgroups are named by them

    def call(self, *command: str) -> str:
        return subprocess.run(
            command, check=True, capture_output=True, text=True, env=self.environment, timeout=60
        ).stdout.strip()

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job: JobState, Restarts, ExitCode, Reason …"""
        text = self.call("scontrol", "--oneliner", "show", "job", number)
        return dict(part.split("=", 1) for part in text.split(" ") if "=" in part)

    def wait_for(self, number: str, *states: str, seconds: float = 240.0) -> dict[str, str]:
        def reached() -> dict[str, str] | None:
            job = self.job(number)
            return job if job["JobState"] in states else None

        return until(reached, seconds=seconds, what=lambda: f"job {number} to be {states}: {self.job(number)}")

    def start_node(self, name: str) -> None:
        hosts, conf = self.folder / "hosts", self.folder / "slurm.conf"
        script = f"mount --bind {hosts} /etc/hosts && hostname {name} && exec slurmd -N {name} -f {conf}"
        subprocess.run(["unshare", "--mount", "--uts", "sh", "-c", script], check=True, env=self.environment)

    def kill_node(self, name: str) -> None:
        """As a power cut: the daemon, Slurm's step processes and everything of theirs, at once."""
        daemon = int((self.folder / f"slurmd.{name}.pid").read_text())
        tree = _descendants(daemon)
        for folder in FREEZER.glob(f"**/slurm_{name}/**/cgroup.procs"):
            tree |= {int(line) for line in folder.read_text().split()}
        for pid in (daemon, *tree):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def until(probe: Callable, *, seconds: float = 120.0, what: Callable[[], str] | str = "it") -> object:
    """Poll what another program does; fails when the time is up."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (found := probe()) is not None and found is not False:
            return found
        time.sleep(0.2)
    raise AssertionError(f"waited {seconds:.0f} s for {what if isinstance(what, str) else what()}")


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start the daemons, wait until both nodes are idle, and end them and their jobs afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(3)
    here = Cluster(folder, (f"n{token}-1", f"n{token}-2"))
    for name in ("state", *(f"spool.{node}" for node in here.nodes)):
        (folder / name).mkdir()
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 "
        "RealMemory=2000 State=UNKNOWN"
        for name in here.nodes
    )
    (folder / "slurm.conf").write_text(_CONF.format(folder=folder, port=free_port(), nodes=nodes))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "hosts").write_text(f"127.0.0.1 localhost {' '.join(here.nodes)} {socket.gethostname()}\n")
    (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge.key").chmod(0o600)
    munge = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "seed", "log")]
    try:
        subprocess.run(["munged", "--force", f"--socket={folder}/munge.socket", *munge], check=True)
        subprocess.run(["slurmctld", "-c", "-f", str(folder / "slurm.conf")], check=True, env=here.environment)
        for name in here.nodes:
            here.start_node(name)
        until(
            lambda: here.call("sinfo", "--noheader", "--format=%t", "--partition=low") == "idle",
            seconds=60,
            what=lambda: here.call("sinfo", "-N", "-l"),
        )
        yield here
    finally:
        with contextlib.suppress(subprocess.SubprocessError):
            here.call("scancel", "--user=root")
            until(lambda: here.call("squeue", "--noheader") == "", seconds=60, what="jobs to end")
        for name in (*(f"slurmd.{node}.pid" for node in here.nodes), "slurmctld.pid", "munge.pid"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
                pid = int((folder / name).read_text())
                os.kill(pid, signal.SIGTERM)
                until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), seconds=30, what=f"{name} to end")
        for left_over in sorted(
            (each for node in here.nodes for each in FREEZER.glob(f"**/slurm_{node}/**/")), reverse=True
        ):
            with contextlib.suppress(OSError):
                left_over.rmdir()


def _descendants(pid: int) -> set[int]:
    children: dict[int, set[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            children.setdefault(int(fields[1]), set()).add(int(stat.parent.name))
    found, front = set(), {pid}
    while front:
        front = {child for each in front for child in children.get(each, ())} - found
        found |= front
    return found
