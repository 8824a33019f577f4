"""What commands that start others must know of this machine. Torch-free."""

from __future__ import annotations

import shutil
import subprocess

# Environment of commands on machines without a GPU. DeepSpeed would else warn that it had to guess the accelerator.
ON_A_CPU = {"DS_ACCELERATOR": "cpu"}


def count_gpus() -> int:
    """The GPUs that the driver lists; 0 without a driver."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.stdout.count("GPU ") if listed.returncode == 0 else 0
