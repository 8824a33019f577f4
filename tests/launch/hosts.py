"""Hosts for tests: network namespaces joined by a bridge, each with its own address, hostname and /etc/hosts.

Nothing of the machine's own network changes: the bridge lives in a namespace too, and each host's /etc/hosts is a file
bound over the machine's inside a mount namespace of the process that runs there. Needs root and `ip` (iproute2); where
they are missing, `made` raises Unavailable and tests skip with its words.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import ROOT
from tests.launcher import environment_of_ranks

DEVICE = "eth0"
TOOLS = ("ip", "nsenter", "unshare", "mount", "hostname")


class Unavailable(RuntimeError):
    """This machine may not make namespaces; the words say why."""


@dataclass(frozen=True)
class Host:
    """A namespace and what runs in it sees: its name, address and hosts file."""

    name: str
    namespace: str
    address: str
    hosts_file: Path

    def command(self, words: Sequence[str]) -> list[str]:
        """The words as a command that runs on this host, in the caller's folder and environment."""
        script = f'mount --bind "{self.hosts_file}" /etc/hosts && hostname {self.name} && exec "$@"'
        inside = ["unshare", "--mount", "--uts", "sh", "-c", script, "sh", *words]
        return ["nsenter", f"--net=/run/netns/{self.namespace}", *inside]

    def bytes_sent(self) -> int:
        """What this host's device has sent since it was made, headers included."""
        words = ["ip", "netns", "exec", self.namespace, "cat", "/proc/net/dev"]
        return sent_by(DEVICE, _output(words))


def sent_by(device: str, table: str) -> int:
    """Bytes that a device has sent, from the text of /proc/net/dev."""
    (line,) = (line for line in table.splitlines() if line.strip().startswith(f"{device}:"))
    return int(line.split(":")[1].split()[8])


@contextlib.contextmanager
def made(count: int, *, rate_mbit: int = 0) -> Iterator[list[Host]]:
    """`count` hosts on one switch; always torn down, with whatever still runs in them.

    rate_mbit: what each host may send a second (a token bucket); 0: no limit.
    """
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"network namespaces need {', '.join(missing)}")
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root")
    _sweep()
    prefix = f"barista{os.getpid()}"
    switch = f"{prefix}s"
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    namespaces: list[str] = []
    try:
        _make_namespace(switch, namespaces)
        _run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge0", "up")
        addresses = [f"10.93.7.{number}" for number in range(1, count + 1)]
        hosts_file = folder / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{address} host{n}" for n, address in enumerate(addresses, 1))]
        hosts_file.write_text("\n".join(lines) + "\n")
        hosts = [Host(f"host{n}", f"{prefix}h{n}", address, hosts_file) for n, address in enumerate(addresses, 1)]
        for number, host in enumerate(hosts, 1):
            _make_namespace(host.namespace, namespaces)
            port, inside = f"port{number}", ("ip", "-n", host.namespace)
            _run(*inside, "link", "add", DEVICE, "type", "veth", "peer", "name", port, "netns", switch)
            _run(*inside, "addr", "add", f"{host.address}/24", "dev", DEVICE)
            _run(*inside, "link", "set", DEVICE, "up")
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge0")
            _run("ip", "-n", switch, "link", "set", port, "up")
            if rate_mbit:
                # A queue long enough that nothing is dropped, which would measure TCP's patience.
                limit = ("rate", f"{rate_mbit}mbit", "burst", "512kb", "latency", "5s")
                _run("tc", "-n", host.namespace, "qdisc", "add", "dev", DEVICE, "root", "tbf", *limit)
        yield hosts
    finally:
        for namespace in namespaces:
            _remove_namespace(namespace)
        shutil.rmtree(folder)


def run_on_all(
    hosts: Sequence[Host], commands: Sequence[Sequence[str]], *, timeout_seconds: float = 900.0
) -> list[subprocess.CompletedProcess[str]]:
    """One command a host, at the same time, each in a process group of its own that ends with the timeout."""
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in hosts]
        processes = [
            subprocess.Popen(
                host.command(command),
                cwd=ROOT,
                env=environment_of_ranks(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for host, command, output in zip(hosts, commands, outputs, strict=True)
        ]
        try:
            for process in processes:
                process.wait(timeout_seconds)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        for output in outputs:
            output.seek(0)
        return [
            subprocess.CompletedProcess(command, process.returncode, output.read(), "")
            for command, process, output in zip(commands, processes, outputs)
        ]


def deepspeed_commands(hosts: Sequence[Host], hostfile: Path, words: Sequence[str], *, port: int) -> list[list[str]]:
    """What each host of a hostfile is given, as docs/cluster.md tells people: the same words but its own rank."""
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--hostfile", str(hostfile), "--no_ssh"]
    launcher += ["--master_addr", hosts[0].address, "--master_port", str(port)]
    return [[*launcher, "--node_rank", str(rank), "--module", *words] for rank in range(len(hosts))]


def rank_commands(hosts: Sequence[Host], words: Sequence[str], *, port: int) -> list[list[str]]:
    """One rank of a module a host, without a launcher: its environment is what a launcher would set."""
    everywhere = {"LOCAL_RANK": 0, "WORLD_SIZE": len(hosts), "LOCAL_SIZE": 1}
    everywhere |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": port}
    return [
        [
            "env",
            *(f"{name}={value}" for name, value in {"RANK": rank, **everywhere}.items()),
            sys.executable,
            "-m",
            *words,
        ]
        for rank in range(len(hosts))
    ]


_REMOTE = """#!{python}
import subprocess, sys
enter = {enter!r}  # host -> the words of a command that enters it
words = sys.argv[1:]
hosts = []
while words[0].startswith("-") or not hosts:
    word = words.pop(0)
    if word == "-w":
        hosts = words.pop(0).split(",")
    elif word in ("-o", "-f"):
        words.pop(0)
    elif not word.startswith("-"):
        hosts = [word]
shells = [[*enter[host], "sh", "-c", " ".join(words).replace("%n", str(n))] for n, host in enumerate(hosts)]
sys.exit(max(process.wait() for process in [subprocess.Popen(shell, cwd="/") for shell in shells]))
"""


def remote_shells(hosts: Sequence[Host], folder: Path) -> None:
    """Write scripts named `ssh` and `pdsh` into a folder, for a PATH on which the real programs would find no hosts.

    A script takes hosts and a command line, and runs the line in a shell on each of these hosts. It understands the
    options that DeepSpeed's launcher gives, and no others.
    """
    script = _REMOTE.format(python=sys.executable, enter={host.name: host.command([]) for host in hosts})
    for name in ("ssh", "pdsh"):
        path = folder / name
        path.write_text(script)
        path.chmod(0o755)


def _make_namespace(name: str, made_so_far: list[str]) -> None:
    _run("ip", "netns", "add", name)
    made_so_far.append(name)
    _run("ip", "-n", name, "link", "set", "lo", "up")


def _remove_namespace(name: str) -> None:
    """And whatever still runs in it."""
    for process in _output(["ip", "netns", "pids", name]).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], check=False)


def _sweep() -> None:
    """Take down the hosts of processes that were killed before they could."""
    for line in _output(["ip", "netns", "list"]).splitlines():
        made_here = re.match(r"barista(\d+)(s|h\d+)\b", line)
        if made_here and not Path(f"/proc/{made_here[1]}").exists():
            _remove_namespace(made_here[0])


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"`{' '.join(words)}` failed: {done.stderr.strip()}")


def _output(words: Sequence[str]) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout
