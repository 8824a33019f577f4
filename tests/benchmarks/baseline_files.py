"""Baselines: the figures of a benchmark on one kind of machine, kept as tests/benchmarks/baselines/MACHINE/NAME.json.

NAME is the benchmark's, with ".quick" for a run with --quick. A file also says what the figures depend on: the commit,
the date, the processor and the versions of packages. It names neither a host nor a path.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Literal

from data.ground.errors import ConfigError
from data.ground.files import write_atomically
from data.ground.records import Record, read_record
from launch.record import commit
from tests import ROOT

FOLDER = Path(__file__).with_name("baselines")
PACKAGES = (
    "torch",
    "deepspeed",
    "transformers",
    "tokenizers",
    "sentence-transformers",
    "numpy",
    "datasets",
    "webdataset",
    "faiss-cpu",
)
# The widest of these units that a processor has decides how fast its matrix products are; each has those after it.
UNITS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")


class Machine(Record):
    """A kind of machine: its processor's model, how many cores this process may use, its widest units."""

    cpu: str
    cores: int
    units: str

    @property
    def kind(self) -> str:
        """A name for folders: amd-epyc-2-cores-avx512_bf16."""
        words = f"{self.cpu} {self.cores} cores {self.units}".lower()
        return re.sub(r"[^a-z0-9_]+", "-", words).strip("-")


class Baseline(Record):
    """What a file of the folder holds."""

    format: Literal[1] = 1
    benchmark: str
    quick: bool
    commit: str
    # Whether files differed from that commit, other than baselines.
    changed: bool
    date: str
    # What else is to be known of the run, such as other work on the machine.
    note: str
    machine: Machine
    versions: dict[str, str]
    figures: dict[str, float]

    @property
    def headed(self) -> str:
        """How the run is described above its figures."""
        size = "--quick" if self.quick else "full size"
        return f"{self.benchmark} ({size}), baseline of {self.date}, commit {self.commit[:7]}"


def machine_of(cpuinfo: str, *, cores: int) -> Machine:
    """The kind of a machine with this content of /proc/cpuinfo. Some processors tell it no model, or no units."""
    lines = (line.partition(":")[::2] for line in cpuinfo.splitlines())
    told = {key.strip(): value.strip() for key, value in lines}
    flags = told.get("flags", "").split()
    units = next((each for each in UNITS if each in flags), "plain")
    return Machine(cpu=told.get("model name") or platform.machine(), cores=cores, units=units)


def this_machine() -> Machine:
    path = Path("/proc/cpuinfo")
    return machine_of(path.read_text() if path.is_file() else "", cores=len(os.sched_getaffinity(0)))


def file_of(machine: Machine, benchmark: str, *, quick: bool) -> Path:
    """Where a baseline is, or would be."""
    return FOLDER / machine.kind / f"{benchmark}{'.quick' if quick else ''}.json"


def read_baseline(machine: Machine, benchmark: str, *, quick: bool) -> Baseline:
    """The baseline of a kind of machine.

    Raises:
        ConfigError: there is none.

    """
    path = file_of(machine, benchmark, quick=quick)
    if not path.is_file():
        raise no_baseline(f"{benchmark} has no baseline", machine, quick=quick)
    return read_record(path, Baseline, what="baseline", hint="make it again by --save")


def no_baseline(sentence: str, machine: Machine, *, quick: bool) -> ConfigError:
    """The error that begins with this sentence and says of which runs and machine."""
    size = "with --quick" if quick else "of the full size"
    return ConfigError(f"{sentence} {size} for this kind of machine, {machine.kind}; make one by --save")


def all_baselines() -> Sequence[Baseline]:
    """Those of all kinds of machine, by kind and name."""
    return [read_record(path, Baseline, what="baseline") for path in sorted(FOLDER.glob("*/*.json"))]


def baseline_of(benchmark: str, figures: dict[str, float], *, quick: bool, note: str) -> Baseline:
    """A baseline of figures that were just measured on this machine."""
    checkout = commit(ROOT)
    own = str(FOLDER.relative_to(ROOT))
    return Baseline(
        benchmark=benchmark,
        quick=quick,
        commit=checkout.commit if checkout else "unknown",
        changed=checkout is None or any(not path.startswith(own) for path in checkout.changed),
        date=datetime.now(UTC).date().isoformat(),
        note=note,
        machine=this_machine(),
        versions=installed(),
        # More digits than that are noise.
        figures={name: float(f"{value:.5g}") for name, value in figures.items()},
    )


def installed() -> dict[str, str]:
    """The versions of those of PACKAGES that are installed, and Python's."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_baseline(baseline: Baseline) -> Path:
    """Write a baseline in place of an earlier one, and return where it is."""
    path = file_of(baseline.machine, baseline.benchmark, quick=baseline.quick)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(baseline.model_dump(), indent=2, ensure_ascii=False) + "\n")
    return path
