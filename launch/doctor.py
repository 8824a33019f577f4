"""Command: checks whether this node, or every rank of a job, can train; names each problem and its solution.

    python -m launch.doctor                                            # one node, alone
    python -m launch.doctor --hostfile hosts                           # also checks that hostfile
    deepspeed --hostfile hosts --module launch.doctor --folder /shared/runs
    srun --ntasks-per-node=8 python -m launch.doctor --folder /shared/runs

Started by a launcher or srun, it runs on every rank and also checks the connections between ranks (ports, clocks, a
shared folder, equal versions, a collective); the first rank prints one table. Exit code 0: fit, perhaps with warnings;
1: not fit; 2: an error on the command line. Ranks communicate through the launcher's key-value store, so problems of
gloo or NCCL can be reported. The checks are in launch/checks.py.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.ground.command import exit_code_of, printable
from data.ground.errors import UserError
from data.ground.files import first_line
from data.ground.options import Parser, flag_of
from launch import checks
from launch.checks import BAD, OK, SEVERITY, Finding
from launch.record import commit

# Options and their bounds.
_BOUNDS = {
    "gpus": (0, 10**6),
    "free_gib": (0, 10**9),
    "disk_mib": (1, 2**20),
    "least_mib_s": (0, 10**6),
    "timeout_seconds": (1, 86400),
}


@dataclass(frozen=True)
class Peers:
    """This rank's number, the number of ranks, and the store through which they exchange values; None for one rank."""

    rank: int
    size: int
    store: Any = None

    def exchange(self, name: str, value: Any) -> list[Any]:
        """The values of all ranks, by rank. Waits for all ranks."""
        if self.store is None:
            return [value]
        self.store.set(f"doctor/{name}/{self.rank}", json.dumps(value))
        return [json.loads(self.store.get(f"doctor/{name}/{rank}")) for rank in range(self.size)]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return exit_code_of(lambda: _diagnose(args))


def _diagnose(args: argparse.Namespace) -> int:
    for name, (least, most) in _BOUNDS.items():
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            raise UserError(f"{flag_of(name)} {value} must lie between {least} and {most:,}")
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a hang then raises and becomes a finding
    ranks_from_slurm()
    rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if rank >= size:
        raise UserError(f"RANK={rank} is none of WORLD_SIZE={size} ranks; leave both to the launcher, or unset them")
    findings = [checks.guarded("packages", checks.packages)]
    if findings[0].status == BAD:
        return _report([(socket.gethostname(), findings)], args.json)
    findings += _own_checks(args, rank, size)
    try:
        peers = _meet(rank, size, args.timeout_seconds)
    except Exception as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        hint = "start all ranks; let every node reach the first one at that address and port"
        seen = f"rank {rank} of {size} did not meet the others at {address} ({first_line(error)})"
        findings.append(Finding("meeting", BAD, seen, hint))
        return _report([(socket.gethostname(), findings)], args.json)
    try:
        findings += _joint_checks(args, peers)
        everyone = peers.exchange("findings", [socket.gethostname(), [asdict(each) for each in findings]])
        told = [(host, [Finding(**each) for each in found]) for host, found in everyone]
    except Exception as error:
        hint = "look at that rank's own output; raise --timeout-seconds if it is only slow"
        findings.append(Finding("meeting", BAD, f"a rank went silent ({first_line(error)})", hint))
        return _report([(socket.gethostname(), findings)], args.json)
    code = _report(told, args.json) if rank == 0 else _code(told)
    # A launcher ends all ranks when one of them exits, so all wait until everything is printed.
    peers.exchange("told", rank)
    _leave_last(peers)
    return code


def _leave_last(peers: Peers) -> None:
    """Wait for the other ranks to exit if this is the first rank, which serves the store."""
    if peers.store is None:
        return
    if peers.rank:
        peers.store.set(f"doctor/gone/{peers.rank}", "1")
    else:
        peers.store.wait([f"doctor/gone/{rank}" for rank in range(1, peers.size)])


def _own_checks(args: argparse.Namespace, rank: int, size: int) -> list[Finding]:
    """The checks that a rank can do without the others."""
    run: list[tuple[str, Callable[[], Finding]]] = [
        *([("hostfile", lambda: checks.hostfile(args.hostfile))] if args.hostfile else []),
        ("gpu", lambda: checks.gpus(args.gpus)),
        ("bf16", checks.bf16),
        ("compiler", checks.compiler),
        ("free space", lambda: checks.free_space(args.folder, args.free_gib)),
        ("disk", lambda: checks.disk(args.folder, rank, size_mib=args.disk_mib, least_mib_a_second=args.least_mib_s)),
        ("limits", checks.limits),
        ("shared memory", checks.shared_memory),
        ("host name", lambda: checks.own_name(size if _several_hosts() else 1)),
    ]
    return [checks.guarded(name, check) for name, check in run]


def _joint_checks(args: argparse.Namespace, peers: Peers) -> list[Finding]:
    """The checks between ranks. Every rank makes the same exchanges in the same order, whatever it finds."""
    hosts = peers.exchange("hosts", socket.gethostname())
    found = [checks.judge_same("same versions", peers.exchange("versions", _versions()), hosts)]
    clocks = peers.exchange("clocks", _time_together(peers))
    found.append(checks.judge_clocks(clocks, hosts))
    found.append(_shared_folder(args.folder, peers, hosts))
    found.append(_ports(peers, args.timeout_seconds))
    ready = not any(each.status == BAD for each in found if each.check == "ports")
    if all(peers.exchange("ready", ready)):
        found += _with_group(peers, args.timeout_seconds)
    else:
        found.append(Finding("collective", BAD, "not tried", "fix the ports first"))
    return found


def _with_group(peers: Peers, seconds: float) -> list[Finding]:
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", _number("LOCAL_RANK", 0)) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    store = dist.HashStore() if peers.store is None else dist.PrefixStore("doctor-group", peers.store)
    limit = datetime.timedelta(seconds=seconds)
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    try:
        dist.init_process_group(backend, store=store, rank=peers.rank, world_size=peers.size, timeout=limit)
        found = [checks.collective(dist.group.WORLD, device)]
        import deepspeed
        import deepspeed.ops

        if not cuda:
            # DeepSpeed would compile this operator, which is for inference, at its start.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(backend, verbose=False)
        found.append(checks.guarded("deepspeed", lambda: checks.deepspeed_step(device)))
    except Exception as error:
        hint = f"set {backend.upper()}_SOCKET_IFNAME to the cluster's network device; NCCL_DEBUG=INFO says more"
        return [Finding(backend, BAD, f"{type(error).__name__}: {first_line(error)}", hint)]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return found


def _meet(rank: int, size: int, seconds: float) -> Peers:
    """Join the other ranks through the store that the launcher's variables describe."""
    if size == 1:
        return Peers(0, 1)
    from torch.distributed.rendezvous import rendezvous

    limit = datetime.timedelta(seconds=seconds)
    store, _, _ = next(rendezvous("env://", rank, size, timeout=limit))
    store.set_timeout(limit)
    peers = Peers(rank, size, store)
    peers.exchange("here", rank)
    return peers


def _time_together(peers: Peers) -> float:
    """Read the clock at about the same moment as all other ranks: when the last one has arrived."""
    peers.exchange("before the clocks", peers.rank)
    return time.time()


def _shared_folder(folder: Path, peers: Peers, hosts: list[str]) -> Finding:
    token = peers.exchange("token", f"{os.getpid()}-{time.time_ns()}")[0]
    mine = folder / f".doctor-{token}-{peers.rank}"
    with contextlib.suppress(OSError):  # a failure shows as a missing file
        folder.mkdir(parents=True, exist_ok=True)
        mine.write_text(token, encoding="utf-8")
    peers.exchange("written", peers.rank)
    wanted = {rank: folder / f".doctor-{token}-{rank}" for rank in range(peers.size)}
    missing = sorted({hosts[rank] for rank, path in wanted.items() if not path.is_file()})
    peers.exchange("looked", peers.rank)
    with contextlib.suppress(OSError):
        mine.unlink()
    return checks.judge_shared_folder(folder, missing, alone=peers.size == 1)


def _ports(peers: Peers, seconds: float) -> Finding:
    """Listen on the address that gloo would use, and connect to all other ranks, which do the same."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen(peers.size)
        threading.Thread(target=_answer, args=(listener,), daemon=True).start()
        where = peers.exchange("ports", [_address(), listener.getsockname()[1]])
        others = [(host, port) for rank, (host, port) in enumerate(where) if rank != peers.rank]
        silent = checks.unreached(others, seconds=min(5.0, seconds))
        peers.exchange("called", peers.rank)
    return checks.judge_ports(silent)


def _answer(listener: socket.socket) -> None:
    while True:
        try:
            listener.accept()[0].close()
        except OSError:
            return


def _address() -> str:
    """The address on which gloo would listen: of the device that GLOO_SOCKET_IFNAME names, else of the host name."""
    device = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if device:
        import psutil

        for each in psutil.net_if_addrs().get(device, []):
            if each.family == socket.AF_INET:
                return str(each.address)
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return socket.gethostname()


def _versions() -> str:
    import deepspeed
    import torch
    import transformers

    checkout = commit(Path.cwd())
    revision = checkout.commit[:7] if checkout else "?"
    python = ".".join(map(str, sys.version_info[:3]))
    versions = [f"Python {python}", f"torch {torch.__version__}", f"deepspeed {deepspeed.__version__}"]
    return ", ".join([*versions, f"transformers {transformers.__version__}", f"commit {revision}"])


def _several_hosts() -> bool:
    name = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if os.environ.get(name)), None)
    return name is None or _number(name, 1) < _number("WORLD_SIZE", 1)


def _number(variable: str, default: int) -> int:
    """The whole number in a variable of the launcher or of Slurm."""
    text = os.environ.get(variable, "").strip() or str(default)
    if not re.fullmatch("[0-9]{1,9}", text):
        raise UserError(f"{variable}={text!r} is no number; leave it to the launcher, or unset it")
    return int(text)


def ranks_from_slurm() -> None:
    """Set the variables that launchers set, if this runs under srun without a launcher."""
    if "RANK" in os.environ or _number("SLURM_NTASKS", 1) == 1 or "SLURM_PROCID" not in os.environ:
        return
    given = os.environ
    missing = [name for name in ("SLURM_JOB_NODELIST", "SLURM_JOB_ID", "SLURM_LOCALID") if name not in given]
    if missing:
        raise UserError(f"{missing[0]} is not set, though SLURM_PROCID is; run this by srun in a job, or unset SLURM_*")
    hosts = subprocess.run(
        ["scontrol", "show", "hostnames", given["SLURM_JOB_NODELIST"]], capture_output=True, text=True, check=False
    )
    if hosts.returncode or not hosts.stdout.split():
        raise UserError(f"scontrol does not know the job's hosts ({hosts.stderr.strip()}); run this by srun in a job")
    job = _number("SLURM_JOB_ID", 0)
    given.update(RANK=given["SLURM_PROCID"], WORLD_SIZE=given["SLURM_NTASKS"], LOCAL_RANK=given["SLURM_LOCALID"])
    given.setdefault("MASTER_ADDR", hosts.stdout.split()[0])
    given.setdefault("MASTER_PORT", str(10000 + job % 20000))


def _code(told: Sequence[tuple[str, list[Finding]]]) -> int:
    return int(any(each.status == BAD for _, findings in told for each in findings))


def _report(told: Sequence[tuple[str, list[Finding]]], as_json: bool) -> int:
    """Print one line for each check, with the worst finding of all ranks and its hosts; returns the exit code."""
    if as_json:
        print(json.dumps([{"host": host, "findings": [asdict(each) for each in found]} for host, found in told]))
        return _code(told)
    hosts = sorted({host for host, _ in told})
    print(f"{len(told)} ranks on {len(hosts)} hosts: {', '.join(hosts[:8])}{' …' if len(hosts) > 8 else ''}\n")
    for name in dict.fromkeys(each.check for _, found in told for each in found):
        rows = [(host, each) for host, found in told for each in found if each.check == name]
        worst = max((each.status for _, each in rows), key=SEVERITY.__getitem__)
        shown = dict.fromkeys((host, each) for host, each in rows if each.status == worst)
        for host, each in list(shown)[: 1 if worst == OK else len(shown)]:
            where = "" if worst == OK or len(hosts) == 1 else f"{host}: "
            print(printable(f"{worst:5s} {name:14s} {where}{each.seen}"))
            if each.hint:
                print(printable(f"{'':20s} → {each.hint}"))
    print("\nfit to train" if not _code(told) else "\nnot fit to train: fix what is bad above")
    sys.stdout.flush()
    return _code(told)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m launch.doctor",
        description="Check a node, or every rank of a job, for training; say what is wrong and how to fix it.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs"), help="where runs will be written; all nodes must see it"
    )
    parser.add_argument("--hostfile", type=Path, help="a hostfile, to be checked before DeepSpeed reads it")
    parser.add_argument("--gpus", type=int, help="GPUs that each node should have; default: what the driver lists")
    parser.add_argument("--free-gib", type=float, default=20.0, help="free disk space that runs need")
    parser.add_argument("--disk-mib", type=int, default=64, help="MiB written and read to measure the disk")
    parser.add_argument("--least-mib-s", type=float, default=50.0, help="a disk below this speed is reported as slow")
    parser.add_argument("--timeout-seconds", type=float, default=120.0, help="how long ranks wait for one another")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # what the deepspeed launcher passes
    return parser


if __name__ == "__main__":
    sys.exit(main())
