"""Every check of launch.doctor finds the fault that it is for, and finds nothing on a sound node.

Faults are planted for real where a process can have them to itself: an environment, limits, a folder, a host name, a
file system that two hosts do not share. Where it cannot (a clock, memory, GPUs), the judgement is given the values.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from data.ground.ports import free_port
from launch import checks
from launch.checks import BAD, OK, WARN, Finding
from launch.doctor import main, ranks_from_slurm
from tests import ROOT
from tests.launch.hosts import Host, Unavailable, deepspeed_commands, made, run_on_all


def doctor(*arguments: str, shell: str = "", **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and findings by check, of the command in a process of its own; `shell` goes before it."""
    words = [sys.executable, "-m", "launch.doctor", "--json", "--disk-mib", "4", "--free-gib", "0.1", *arguments]
    if shell:
        words = ["sh", "-c", f'{shell}; exec "$@"', "sh", *words]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    (told,) = json.loads(done.stdout.splitlines()[-1])
    return done.returncode, {each["check"]: each for each in told["findings"]}


@pytest.mark.processes
def test_a_sound_node_is_fit(tmp_path: Path) -> None:
    code, found = doctor("--folder", str(tmp_path / "runs"))
    bad = {name: each for name, each in found.items() if each["status"] == BAD}
    assert not bad and code == 0
    assert {"packages", "gpu", "bf16", "disk", "clocks", "ports", "gloo", "deepspeed"} <= found.keys()
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.processes
def test_planted_faults_are_found_together(tmp_path: Path) -> None:
    """A file where the folder should be, a driver that lists a GPU, few open files, too little room."""
    (tmp_path / "file").write_text("")
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3'\n")
    smi.chmod(0o755)
    code, found = doctor(
        *("--folder", str(tmp_path / "file"), "--free-gib", "1e9"),
        shell="ulimit -n 512",
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        CUDA_VISIBLE_DEVICES="0",
    )
    assert code == 1
    assert {name for name, each in found.items() if each["status"] == BAD} == {
        *("gpu", "disk", "free space", "limits", "shared folder")
    }
    assert "torch sees none" in found["gpu"]["seen"] and "driver" in found["gpu"]["hint"]
    assert "512 open files" in found["limits"]["seen"] and "ulimit -n" in found["limits"]["hint"]
    assert all(each["hint"] for each in found.values() if each["status"] != OK)


@pytest.mark.processes
def test_packages_that_do_not_import_are_found(tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("raise ImportError('libcudart.so.12 is absent')\n")
    code, found = doctor(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert code == 1 and found.keys() == {"packages"}
    assert "libcudart.so.12" in found["packages"]["seen"]


@pytest.mark.processes
def test_a_driver_that_fails_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = checks.gpus(None)
    assert found.status == BAD and "version mismatch" in found.seen and "driver" in found.hint


@pytest.mark.processes
def test_a_rank_that_does_not_come_is_found(tmp_path: Path) -> None:
    port = str(free_port())
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    code, found = doctor("--folder", str(tmp_path), "--timeout-seconds", "3", **ranks)
    assert code == 1 and found["meeting"]["status"] == BAD
    assert f"127.0.0.1:{port}" in found["meeting"]["seen"] and "start all ranks" in found["meeting"]["hint"]


@pytest.mark.processes
@pytest.mark.parametrize("tasks", ["16", "1"])
def test_srun_without_a_launcher_gives_ranks(tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[3-4]" ] && printf "n3\\nn4\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setattr(os, "environ", {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"})
    os.environ.update(SLURM_NTASKS=tasks, SLURM_PROCID="9", SLURM_LOCALID="1", SLURM_JOB_ID="123456")
    os.environ["SLURM_JOB_NODELIST"] = "n[3-4]"
    before = dict(os.environ)
    ranks_from_slurm()
    given = {name: value for name, value in os.environ.items() if name not in before}
    ranks = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": "n3", "MASTER_PORT": "13456"}
    assert given == (ranks if tasks == "16" else {})


def test_a_closed_port_is_found() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        open_port, closed = listener.getsockname()[1], free_port()
        silent = checks.unreached([("127.0.0.1", open_port), ("127.0.0.1", closed)], seconds=1)
    assert silent == [f"127.0.0.1:{closed}"]
    assert checks.judge_ports(silent).status == BAD and checks.judge_ports([]).status == OK


A100, UNLIMITED = "NVIDIA A100", -1


@pytest.mark.parametrize(
    ("sound", "faulty", "status", "said"),
    [
        (
            checks.judge_gpus([A100] * 8, 8, 8, built_for="12.6"),
            checks.judge_gpus([A100] * 7, 7, 8, built_for="12.6"),
            BAD,
            "7 GPUs",
        ),
        (
            checks.judge_gpus([], 0, None, built_for=None),
            checks.judge_gpus([A100], 0, None, built_for=None),
            BAD,
            "CPU build",
        ),
        (
            checks.judge_gpus([A100] * 2, 2, None, built_for="12.6"),
            checks.judge_gpus([A100, "NVIDIA H100"], 2, None, built_for="12.6"),
            WARN,
            "NVIDIA H100",
        ),
        (
            checks.judge_bf16(1.0, 0.5, size=512, device="cpu"),
            checks.judge_bf16(1.0, 50.0, size=512, device="cpu"),
            WARN,
            "0.02 times",
        ),
        (
            checks.judge_disk(900, 900, folder=Path("runs"), least=50),
            checks.judge_disk(20, 900, folder=Path("runs"), least=50),
            WARN,
            "writes 20 MiB/s",
        ),
        (
            checks.judge_limits(65536, UNLIMITED, infiniband=True),
            checks.judge_limits(65536, 2**16, infiniband=True),
            BAD,
            "64 KiB of locked memory",
        ),
        (
            checks.judge_limits(65536, 2**16, infiniband=False),
            checks.judge_limits(2048, UNLIMITED, infiniband=False),
            WARN,
            "2048 open files",
        ),
        (checks.judge_shared_memory(2**33), checks.judge_shared_memory(64 * 2**20), BAD, "64 MiB"),
        (
            checks.judge_name("n1", "10.0.0.1", alone=False, interface=""),
            checks.judge_name("n1", "127.0.1.1", alone=False, interface=""),
            BAD,
            "127.0.1.1",
        ),
        (
            checks.judge_name("n1", "127.0.1.1", alone=False, interface="eth0"),
            checks.judge_name("n1", "", alone=False, interface=""),
            BAD,
            "no address",
        ),
        (
            checks.judge_clocks([100.0, 100.4], ["n1", "n2"]),
            checks.judge_clocks([100.0, 160.0], ["n1", "n2"]),
            BAD,
            "n2 is 60.0 s ahead of n1",
        ),
        (
            checks.judge_same("same versions", ["torch 2.13", "torch 2.13"], ["n1", "n2"]),
            checks.judge_same("same versions", ["torch 2.13", "torch 2.6"], ["n1", "n2"]),
            BAD,
            "n2: torch 2.6",
        ),
    ],
)
def test_a_judgement_knows_sound_from_faulty(sound: Finding, faulty: Finding, status: str, said: str) -> None:
    assert sound.status == OK and not sound.hint
    assert faulty.status == status and said in faulty.seen and faulty.hint


# --- between hosts -----------------------------------------------------------------------------------------------


def on_hosts(hosts: Sequence[Host], folder: Path, arguments: Sequence[str], *, port: int, before: Sequence[str] = ()):
    """The doctor under the real launcher on every host; `before`: a line of shell for each host."""
    hostfile = folder / "hostfile"
    hostfile.write_text("".join(f"{host.name} slots=1\n" for host in hosts))
    words = ["launch.doctor", "--json", "--disk-mib", "4", "--free-gib", "0.1", "--timeout-seconds", "60", *arguments]
    commands = deepspeed_commands(hosts, hostfile, words, port=port)
    if before:
        commands = [
            ["sh", "-c", f'{line}; exec "$@"', "sh", *each] for line, each in zip(before, commands, strict=True)
        ]
    first, *others = run_on_all(hosts, commands)
    lines = [line for line in first.stdout.splitlines() if line.startswith("[{")]
    assert len(lines) == 1, first.stdout + "".join(each.stdout for each in others)
    told = json.loads(lines[0])
    return first.returncode, {each["host"]: {found["check"]: found for found in each["findings"]} for each in told}


@pytest.mark.parametrize(
    ("arguments", "changes", "said"),
    [
        (["--disk-mib=0"], {}, "--disk-mib 0 must lie between 1 and"),
        (["--timeout-seconds=nan"], {}, "--timeout-seconds nan must lie between"),
        (["--timeout-seconds=inf"], {}, "--timeout-seconds inf must lie between"),
        (["--free-gib=nan"], {}, "--free-gib nan must lie between"),
        (["--least-mib-s=-inf"], {}, "--least-mib-s -inf must lie between"),
        (["--gpus=-1"], {}, "--gpus -1 must lie between"),
        ([], {"WORLD_SIZE": "x"}, "WORLD_SIZE='x' is no number"),
        ([], {"RANK": "\u00b2", "WORLD_SIZE": "4"}, "is no number"),
        ([], {"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is none of WORLD_SIZE=2 ranks"),
        ([], {"SLURM_NTASKS": "2(x2)", "SLURM_PROCID": "0"}, "SLURM_NTASKS='2(x2)' is no number"),
        ([], {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "SLURM_JOB_NODELIST is not set"),
    ],
)
def test_user_errors_are_refused_before_anything_is_looked_at(
    arguments: list[str],
    changes: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        (b"# ours\n\nnode1 slots=8\n  node2   slots=4  \n", OK, "2 hosts, 12 ranks"),
        (b"node1 slots=8 # the fast one\nnode2 slots=4\t#\n", OK, "2 hosts, 12 ranks"),
        (b"", BAD, "names no host"),
        (b"# node1 slots=8\n", BAD, "names no host"),
        (b"node1 slots=two\n", BAD, ":1: 'node1 slots=two' is no host with its slots"),
        (b"node1\n", BAD, "is no host with its slots"),
        (b"node1 slots=-1\n", BAD, "is no host with its slots"),
        (b"node1 slots=8#\n", BAD, "is no host with its slots"),
        (b"node1 slots=8 x\n", BAD, "is no host with its slots"),
        ("node1 slots=\u00b2\n".encode(), BAD, "is no host with its slots"),
        (b"node1 slots=8\nnode1 slots=8\n", BAD, ":2: node1 is there twice"),
        (b"node1 slots=0\n", BAD, "node1 has no slots"),
        (b"n\xe9 slots=1\n", BAD, "is not UTF-8"),
        (None, BAD, "No such file"),
    ],
)
def test_a_hostfile_is_read_before_deepspeed_reads_it(
    tmp_path: Path, content: bytes | None, status: str, said: str
) -> None:
    path = tmp_path / "hosts"
    if content is not None:
        path.write_bytes(content)
    found = checks.hostfile(path)
    assert found.status == status and said in found.seen and bool(found.hint) == (status == BAD)


def test_a_hostfile_is_a_regular_file(tmp_path: Path) -> None:
    """A device stands for a pipe here, for which an ordinary read would wait for ever."""
    path = tmp_path / "hosts"
    path.symlink_to("/dev/null")
    found = checks.hostfile(path)
    assert found.status == BAD and "cannot be read: it is no regular file" in found.seen and found.hint


@pytest.mark.launcher
def test_hosts_that_fit_together_and_hosts_that_do_not(tmp_path: Path) -> None:
    """Sound; then the loopback trap in /etc/hosts of the first, and the second has a shared folder of its own."""
    try:
        with made(2) as hosts:
            shared = tmp_path / "shared"
            shared.mkdir()
            code, sound = on_hosts(hosts, tmp_path, ["--folder", str(shared)], port=29500)
            assert code == 0 and sound.keys() == {"host1", "host2"}
            assert "2 ranks agree" in sound["host2"]["gloo"]["seen"]
            assert {each["status"] for found in sound.values() for each in found.values()} <= {OK, WARN}

            trap = tmp_path / "trap"
            trap.write_text("127.0.0.1 localhost\n127.0.1.1 host1\n10.93.7.2 host2\n")
            faults = (f"mount --bind {trap} /etc/hosts", f"mount -t tmpfs none {shared}")
            code, faulty = on_hosts(hosts, tmp_path, ["--folder", str(shared)], port=29501, before=faults)
            assert code == 1
            assert faulty["host1"]["shared folder"]["status"] == BAD
            assert "host2" in faulty["host1"]["shared folder"]["seen"]
            assert faulty["host1"]["host name"]["status"] == BAD
            assert "GLOO_SOCKET_IFNAME" in faulty["host1"]["host name"]["hint"]
            assert faulty["host2"]["ports"]["status"] == BAD and "127.0.1.1" in faulty["host2"]["ports"]["seen"]
    except Unavailable as reason:
        pytest.skip(str(reason))
