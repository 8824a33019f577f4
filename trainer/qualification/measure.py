"""Measures one subject of a qualification on this process' ranks; `launch.qualify` starts it.

    python -m trainer.qualification.measure attention --folder FOLDER --lines FILE [--quick]

The first rank appends to FILE what trainer/qualification/lines.py describes.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from data.ground.command import run_command
from data.ground.options import Parser
from trainer.qualification import attention, cross_entropy, precision, ranks, resume, speeds, steps
from trainer.qualification.lines import Asked, Lines, measure_all
from trainer.qualification.settings import Setting

# What one process answers alone, and what ranks under a launcher answer together.
ALONE: Mapping[str, Callable[[Setting], list[Asked]]] = {
    "attention": attention.asked,
    "precision": precision.asked,
    "cross_entropy": cross_entropy.asked,
    "ranks.alone": ranks.train_alone,
    "steps": lambda setting: [*steps.asked(setting), *speeds.asked(setting)],
}
TOGETHER: Mapping[str, Callable[[Setting], list[Asked]]] = {
    "ranks": ranks.asked,
    "resume_of_smae.killed": partial(resume.train_and_die, task="SMAE"),
    "resume_of_smae": partial(resume.asked, task="SMAE"),
    "resume_of_srl.killed": partial(resume.train_and_die, task="SRL"),
    "resume_of_srl": partial(resume.asked, task="SRL"),
}


def main() -> None:
    parser = Parser(prog="python -m trainer.qualification.measure", description=__doc__)
    parser.add_argument("subject", choices=(*ALONE, *TOGETHER))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--local_rank")
    args = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    setting = Setting(args.folder, args.quick, torch.cuda.is_available())
    lines = Lines(args.lines if rank == 0 else None, args.subject.partition(".")[0].partition("_of_")[0])
    together = args.subject in TOGETHER
    asked = (TOGETHER if together else ALONE)[args.subject](setting)
    lines.announce(asked, about(setting))
    measure_all(asked, lines, tracebacks=args.lines.with_suffix(f".rank{rank}.txt"), together=together)


def about(setting: Setting) -> dict[str, str]:
    """What the page says of the machine."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if setting.cuda:
        return {"device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)} | versions
    return {"device": f"CPU with {torch.get_num_threads()} threads"} | versions


if __name__ == "__main__":
    run_command(main)
