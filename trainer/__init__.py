"""The trainer. Before anything here imports torch, waiting threads are told to spin for a tenth of a millisecond.

OpenMP's threads wait for each other after every operation. By itself, one that waits spins for long: where other
processes use the same cores, the awaited thread may have none to run on, and a step takes up to ten times as long. A
thread that sleeps at once must be woken for the next operation, which costs small models up to half of their time. So a
thread spins as long as short operations need (10,000 rounds in GNU's OpenMP, which the builds of torch for Linux have)
and then sleeps. OpenMP reads these settings when torch loads it. OMP_WAIT_POLICY in the environment decides otherwise:
ACTIVE spins, PASSIVE sleeps.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # for other builds of OpenMP
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
