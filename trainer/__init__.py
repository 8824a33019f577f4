"""The trainer. Before anything here imports torch, waiting threads are told to spin for a tenth of a millisecond.

The threads of OpenMP wait for each other after every operation. By default, a waiting thread spins for milliseconds and
keeps its core busy. If other processes use the same cores, the thread that is waited for may find no free core, and a
step takes up to ten times as long. If a waiting thread sleeps at once, it must be woken for the next operation, which
takes up to half of the step's time in small models. Here a waiting thread spins for as long as short operations take,
and then sleeps. The number of rounds that it spins is a setting of GNU's OpenMP, which torch's builds for Linux use.

OpenMP reads these settings when torch loads it. The environment variable OMP_WAIT_POLICY replaces them: with ACTIVE,
waiting threads spin; with PASSIVE, they sleep at once.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # for other builds of OpenMP
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
