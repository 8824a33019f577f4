"""The checks of `launch.doctor`, one function each: what was seen, and what to do if something is wrong.

A check reports a problem in its Finding; it does not raise. The judge_* functions take plain values, so that tests can
show each of them its fault. torch and deepspeed are imported inside functions, because their absence is one of the
problems to find.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.ground.files import first_line, open_regular

GIB, MIB = 2**30, 2**20
OK, WARN, BAD = "ok", "warn", "bad"
SEVERITY = {OK: 0, WARN: 1, BAD: 2}

LEAST_OPEN_FILES = 4096
LEAST_SHARED_MEMORY = 1 * GIB
MOST_SKEW_SECONDS = 2.0
MOST_BF16_SLOWDOWN = 2.0


@dataclass(frozen=True)
class Finding:
    """The result of a check. `hint` is empty if nothing is wrong."""

    check: str
    status: str
    seen: str
    hint: str = ""


def guarded(name: str, check: Callable[[], Finding]) -> Finding:
    """Run a check; an unexpected exception becomes a finding, too."""
    try:
        return check()
    except Exception as error:
        return Finding(
            name, BAD, f"{type(error).__name__}: {first_line(error)}", "the error message says what is wrong"
        )


def packages() -> Finding:
    """Versions of the packages that training imports."""
    import importlib

    versions, missing = [], []
    for name in ("torch", "deepspeed", "transformers", "datasets", "safetensors"):
        try:
            versions.append(f"{name} {importlib.import_module(name).__version__}")
        except Exception as error:
            missing.append(f"{name} ({first_line(error)})")
    if missing:
        return Finding("packages", BAD, f"cannot import {', '.join(missing)}", "install the project: make setup")
    return Finding("packages", OK, ", ".join(versions))


def gpus(wanted: int | None) -> Finding:
    """Compare the GPUs of the driver and of torch with the wanted number (None: all that the driver lists)."""
    listed, complaint = _listed_gpus()
    if complaint:
        return Finding("gpu", BAD, complaint, "fix or reload the NVIDIA driver; nvidia-smi must work first")
    import torch

    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return judge_gpus(listed, seen, wanted, built_for=torch.version.cuda)


def judge_gpus(listed: Sequence[str], seen: int, wanted: int | None, *, built_for: str | None) -> Finding:
    """listed: the driver's names of GPUs. seen: how many torch sees. built_for: torch's CUDA version."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None and seen < wanted and len(listed) < wanted:
        hint = f"expected {wanted}: request them from the scheduler, or look in dmesg for GPUs that fell off the bus"
        return Finding("gpu", BAD, f"{len(listed)} GPUs", hint)
    if listed and not seen and hidden != "":
        build = f"torch is built for CUDA {built_for}" if built_for else "torch is a CPU build"
        hint = "install the torch build that fits the driver (README, Two commands)"
        return Finding("gpu", BAD, f"the driver lists {len(listed)} GPUs and torch sees none; {build}", hint)
    if wanted is not None and seen < wanted:
        hint = f"unset CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else f"expected {wanted}"
        return Finding("gpu", BAD, f"torch sees {seen} of {len(listed)} GPUs", hint)
    if len(set(listed)) > 1:
        return Finding("gpu", WARN, ", ".join(sorted(set(listed))), "different GPUs: all wait for the slowest")
    return Finding("gpu", OK, f"{seen} × {listed[0]}" if seen else "none; training runs on the CPU")


def _listed_gpus() -> tuple[list[str], str]:
    """(names of GPUs by nvidia-smi, its error message if it fails); both empty if nvidia-smi is absent."""
    if shutil.which("nvidia-smi") is None:
        return [], ""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return [], "nvidia-smi does not answer within a minute"
    if done.returncode:
        return [], f"nvidia-smi fails: {first_line(done.stdout or done.stderr)}"
    return [line.strip() for line in done.stdout.splitlines() if line.strip()], ""


def bf16() -> Finding:
    """Compare the speed of a bf16 product with a float32 product on this rank's device."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and torch.cuda.get_device_capability()[0] < 8:
        name = torch.cuda.get_device_name()
        return Finding("bf16", BAD, f"{name} has no bf16 units", "use --engine.ds_config=ds_configs/zero1_float32.json")
    size = 4096 if device.type == "cuda" else 512

    def seconds(dtype: Any) -> float:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        best = float("inf")
        for _ in range(5):
            begin = time.perf_counter()
            (a @ b).float().sum().item()
            best = min(best, time.perf_counter() - begin)
        return best

    return judge_bf16(seconds(torch.float32), seconds(torch.bfloat16), size=size, device=device.type)


def judge_bf16(float32_seconds: float, bf16_seconds: float, *, size: int, device: str) -> Finding:
    ratio = bf16_seconds / float32_seconds
    seen = f"{2 * size**3 / bf16_seconds / 1e12:.3g} Tflop/s on {device}, {1 / ratio:.2g} times float32's"
    if ratio > MOST_BF16_SLOWDOWN:
        return Finding("bf16", WARN, seen, "use --engine.ds_config=ds_configs/zero1_float32.json on this device")
    return Finding("bf16", OK, seen)


def compiler() -> Finding:
    """Look for a C++ compiler, which only train.compile and DeepSpeed's own operators need."""
    found = shutil.which("c++") or shutil.which("g++")
    if found is None:
        return Finding("compiler", WARN, "no c++", "leave train.compile off, or install g++")
    return Finding("compiler", OK, found)


def free_space(folder: Path, need_gib: float) -> Finding:
    usage = shutil.disk_usage(_existing(folder))
    seen = f"{usage.free / GIB:.0f} GiB free at {folder}"
    if usage.free < need_gib * GIB:
        return Finding("free space", BAD, seen, f"{need_gib:g} GiB are wanted: make room, or set run.output elsewhere")
    return Finding("free space", OK, seen)


def disk(folder: Path, rank: int, *, size_mib: int, least_mib_a_second: float) -> Finding:
    """Write a file, flush it to the device, read it back."""
    path = folder / f".doctor-{os.getpid()}-{rank}"
    block = os.urandom(MIB)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(size_mib):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        wrote = time.perf_counter() - begin
        begin = time.perf_counter()
        with path.open("rb") as file:
            while part := file.read(MIB):
                if part != block:
                    return Finding("disk", BAD, f"{folder} returned other bytes than were written", "do not train here")
        read = time.perf_counter() - begin
    except OSError as error:
        hint = "choose a folder you may write to: --folder, and run.output in the recipe"
        return Finding("disk", BAD, f"cannot write to {folder}: {error.strerror}", hint)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return judge_disk(size_mib / wrote, size_mib / read, folder=folder, least=least_mib_a_second)


def judge_disk(write: float, read: float, *, folder: Path, least: float) -> Finding:
    """write, read, least: MiB a second."""
    seen = f"{folder}: writes {write:.0f} MiB/s, reads {read:.0f} MiB/s (perhaps from memory)"
    if min(write, read) < least:
        return Finding("disk", WARN, seen, f"below {least:g} MiB/s checkpoints are slow: use another file system")
    return Finding("disk", OK, seen)


def limits() -> Finding:
    """Check the limit of open files, and of locked memory if there is InfiniBand."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    devices = Path("/sys/class/infiniband")
    return judge_limits(files, locked, infiniband=devices.is_dir() and any(devices.iterdir()))


def judge_limits(files: int, locked: int, *, infiniband: bool) -> Finding:
    unlimited = resource.RLIM_INFINITY
    amount = "unlimited" if locked == unlimited else f"{locked // 1024} KiB"
    seen = f"{'unlimited' if files == unlimited else files} open files, {amount} of locked memory"
    if files != unlimited and files < LEAST_OPEN_FILES:
        hint = f"ulimit -n {LEAST_OPEN_FILES} before the launcher, or in limits.conf or the scheduler's unit"
        return Finding("limits", WARN if files >= 1024 else BAD, seen, hint)
    if infiniband and locked != unlimited:
        hint = "InfiniBand needs ulimit -l unlimited: limits.conf, or LimitMEMLOCK=infinity for slurmd"
        return Finding("limits", BAD, seen, hint)
    return Finding("limits", OK, seen)


def shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding("shared memory", BAD, "/dev/shm is absent", "mount it; loader processes pass batches through it")
    return judge_shared_memory(shutil.disk_usage(path).total)


def judge_shared_memory(total: int) -> Finding:
    seen = f"/dev/shm holds {total / MIB:.0f} MiB"
    if total < LEAST_SHARED_MEMORY:
        hint = "loader processes pass batches through it: docker run --shm-size=8g (or --ipc=host)"
        return Finding("shared memory", BAD, seen, hint)
    return Finding("shared memory", OK, seen)


def hostfile(path: Path) -> Finding:
    """Check a hostfile: DeepSpeed would end in a traceback, or silently ignore a host without slots."""
    hint = "write one host per line, each host once, with at least one slot: node1 slots=8"
    try:
        with open_regular(path) as file:
            lines = file.read().decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        # Without a hostfile, DeepSpeed would silently train on this host alone.
        seen = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        return Finding("hostfile", BAD, f"{path} cannot be read: {seen}", f"name a text file; {hint}")
    slots: dict[str, int] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r"(\S+)\s+slots=([0-9]{1,6})(?:\s+#.*)?", line)
        if match is None:
            return Finding("hostfile", BAD, f"{path}:{number}: {line!r} is no host with its slots", hint)
        if match[1] in slots:
            return Finding("hostfile", BAD, f"{path}:{number}: {match[1]} is there twice", hint)
        if int(match[2]) == 0:
            return Finding("hostfile", BAD, f"{path}:{number}: {match[1]} has no slots", hint)
        slots[match[1]] = int(match[2])
    if not slots:
        return Finding("hostfile", BAD, f"{path} names no host", hint)
    return Finding("hostfile", OK, f"{len(slots)} hosts, {sum(slots.values())} ranks")


def own_name(world_size: int) -> Finding:
    """Check that other hosts can reach the address of this host's name, on which gloo listens."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = ""
    return judge_name(name, address, alone=world_size == 1, interface=os.environ.get("GLOO_SOCKET_IFNAME", ""))


def judge_name(name: str, address: str, *, alone: bool, interface: str) -> Finding:
    seen = f"{name} is {address}" if address else f"{name} has no address"
    if alone or interface or (address and not address.startswith("127.")):
        return Finding("host name", OK, seen + (f"; gloo uses {interface}" if interface else ""))
    hint = "export GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) with the device of the cluster's network, such as eth0"
    return Finding("host name", BAD, seen, hint)


def judge_ports(unreached: Sequence[str]) -> Finding:
    """unreached: "host:port" of ranks that did not answer."""
    if unreached:
        hint = "open the ports between the nodes (all above 1023), or choose the network: GLOO_SOCKET_IFNAME"
        return Finding("ports", BAD, f"no answer from {', '.join(unreached)}", hint)
    return Finding("ports", OK, "every rank is reached")


def unreached(addresses: Sequence[tuple[str, int]], *, seconds: float) -> list[str]:
    """The addresses ("host:port") that accept no connection."""
    silent = []
    for host, port in addresses:
        try:
            socket.create_connection((host, port), timeout=seconds).close()
        except OSError:
            silent.append(f"{host}:{port}")
    return silent


def judge_clocks(clocks: Sequence[float], hosts: Sequence[str]) -> Finding:
    """clocks: seconds since 1970 that the ranks read at about the same moment."""
    skew = max(clocks) - min(clocks)
    seen = f"within {skew:.2f} s"
    if skew > MOST_SKEW_SECONDS:
        ahead, behind = hosts[clocks.index(max(clocks))], hosts[clocks.index(min(clocks))]
        return Finding("clocks", BAD, f"{ahead} is {skew:.1f} s ahead of {behind}", "run chrony or ntpd on every node")
    return Finding("clocks", OK, seen)


def judge_shared_folder(folder: Path, missing: Sequence[str], *, alone: bool) -> Finding:
    """missing: hosts whose files this rank does not see."""
    if missing:
        hint = "run.output and data.shards must be on a file system that all nodes mount at the same path"
        return Finding("shared folder", BAD, f"{folder} here lacks what {', '.join(missing)} wrote", hint)
    return Finding("shared folder", OK, "one rank" if alone else f"every rank sees every rank's file in {folder}")


def judge_same(name: str, values: Sequence[str], hosts: Sequence[str]) -> Finding:
    """Check a value that must be the same on all ranks."""
    if len(set(values)) > 1:
        seen = "; ".join(f"{host}: {value}" for host, value in sorted(set(zip(hosts, values))))
        return Finding(name, BAD, seen, "use one environment and one checkout, on a file system that all nodes share")
    return Finding(name, OK, values[0])


def collective(group: Any, device: Any) -> Finding:
    """Check the result of an all-reduce over all ranks, and measure its rate."""
    import torch
    import torch.distributed as dist

    backend, world_size = dist.get_backend(group), dist.get_world_size(group)
    values = torch.full((2**20,), float(dist.get_rank(group) + 1), device=device)
    expected = world_size * (world_size + 1) / 2
    dist.all_reduce(values.clone(), group=group)  # the first call sets up connections
    begin = time.perf_counter()
    dist.all_reduce(values, group=group)
    got = float(values[0])
    seconds = time.perf_counter() - begin
    if got != expected or float(values.min()) != expected or float(values.max()) != expected:
        return Finding(backend, BAD, f"an all-reduce gave {got}, not {expected}", "a link or its library is broken")
    rate = 2 * (world_size - 1) / world_size * values.nbytes / seconds / 1e9
    seen = f"{world_size} ranks agree" + (f", 4 MiB at {rate:.2g} GB/s a rank" if world_size > 1 else "")
    return Finding(backend, OK, seen)


def deepspeed_step(device: Any) -> Finding:
    """Take one optimizer step of a small model at ZeRO stage 1, as in training. Needs the default process group."""
    import io

    import deepspeed
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    before = model.weight.detach().clone()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    engine.backward(engine(torch.ones(1, 64, device=device)).sum())
    engine.step()
    moved = float((model.weight.detach().cpu() - before).abs().max())
    engine.destroy()
    if not 0.05 < moved < 0.2:
        return Finding("deepspeed", BAD, f"a step of 0.1 moved weights by {moved:.3g}", "reinstall deepspeed")
    return Finding("deepspeed", OK, f"{deepspeed.__version__} takes a step at stage 1; no compiled operators needed")


def _existing(folder: Path) -> Path:
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
