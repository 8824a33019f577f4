"""How many threads a rank has on a CPU, and how they wait."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
REPORT = f"import os, sys, trainer; print(*map(os.environ.get, {NAMES}), 'torch' in sys.modules)"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ({}, ["PASSIVE", "10000"]),
        ({"GOMP_SPINCOUNT": "7"}, ["PASSIVE", "7"]),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ["ACTIVE", "None"]),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, ["PASSIVE", "None"]),
    ],
)
def test_waiting_threads_soon_sleep_unless_the_environment_says_otherwise(
    chosen: dict[str, str], found: list[str]
) -> None:
    """It is set before torch, whose OpenMP reads it once."""
    environment = {key: value for key, value in os.environ.items() if key not in NAMES} | chosen
    done = subprocess.run([sys.executable, "-c", REPORT], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [*found, "False"]
