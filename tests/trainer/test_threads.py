"""How many threads a rank has on a CPU, and how they wait."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

REPORT = "import os, sys, trainer; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"


@pytest.mark.processes
@pytest.mark.parametrize(("chosen", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_threads_sleep_unless_the_environment_says_otherwise(chosen: str | None, policy: str) -> None:
    """It is set before torch, whose OpenMP reads it once."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    environment |= {} if chosen is None else {"OMP_WAIT_POLICY": chosen}
    done = subprocess.run([sys.executable, "-c", REPORT], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [policy, "False"]
