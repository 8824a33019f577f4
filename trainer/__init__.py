"""The trainer. Before anything here imports torch, waiting threads are told to sleep.

A thread of OpenMP that waits for another one spins. Where other processes use the same cores, the awaited thread may
have none to run on, and a step takes up to ten times as long. OpenMP reads the setting when torch loads it.
OMP_WAIT_POLICY=ACTIVE in the environment switches it back.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
