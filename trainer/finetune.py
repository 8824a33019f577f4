"""Command: contrastive fine-tuning of all sizes at once (SRL), its baselines and ablations."""

from __future__ import annotations

from data.ground.command import run_command
from trainer.run import main

if __name__ == "__main__":
    run_command(lambda: main("finetune", __doc__ or ""))
