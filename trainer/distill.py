"""Command: distillation of a frozen teacher's vectors into every size at once, from texts without labels."""

from __future__ import annotations

from data.ground.command import run_command
from trainer.run import main

if __name__ == "__main__":
    run_command(lambda: main("distill", __doc__ or ""))
