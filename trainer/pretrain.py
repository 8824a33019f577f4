"""Command: masked pre-training of all sizes at once (SMAE), its ablations, and plain MLM."""

from __future__ import annotations

from data.ground.command import run_command
from trainer.run import main

if __name__ == "__main__":
    run_command(lambda: main("pretrain", __doc__ or ""))
