"""A run that is killed after a checkpoint and resumed ends with the weights of one that was not, bit by bit.

The ranks train one run to its end, and the same once more, because a resumed run can only be as equal as a repeated
one. They start it a third time, and each kills itself, as `kill -9` would, when the first checkpoint is whole
(`train_and_die`). The next ranks go on from there and compare (`asked`).

Kernels that add in a random order, as atomic additions do, are switched off where PyTorch has others.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from trainer.config.schema import Recipe
from trainer.distributed import start
from trainer.qualification import made_up
from trainer.qualification.lines import Asked, Bound, Outcome, crashed, judged, not_answered
from trainer.qualification.settings import SHIPPED, TINY, Setting, recipe_of, recipe_values
from trainer.run import execute

STEPS, SAVE_EVERY = 12, 3
_POLL_SECONDS = 0.001
WHOLE, REPEATED, KILLED = "whole", "repeated", "killed"


def _ds_config(setting: Setting, task: str) -> Path:
    """SMAE at the default stage, SRL at stage 3; in bf16 on GPUs, as users train there."""
    if task == "SRL":
        return SHIPPED / "zero3.json"
    return SHIPPED / ("zero1.json" if setting.cuda else "zero1_float32.json")


def _recipe(setting: Setting, task: str, run: str, *, resume: str = "never") -> Recipe:
    values = recipe_values(
        task,
        TINY,
        setting.folder / "data",
        ds_config=_ds_config(setting, task),
        output=setting.folder / run,
        steps=STEPS,
    )
    values["run"]["resume"] = resume
    values["model"]["config"]["hidden_dropout_prob"] = 0.1  # its draws must go on where they were
    values["checkpoint"] = {"every_steps": SAVE_EVERY, "keep": 2}
    return recipe_of(values)


def _without_random_order() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)


def train_and_die(setting: Setting, *, task: str) -> list[Asked]:
    """Train twice to the end, and start once more; this process is killed then."""
    _without_random_order()
    world = start()
    if world.is_main:
        made_up.write(setting.folder / "data", TINY)
    dist.barrier()
    for run in (WHOLE, REPEATED):
        execute(_recipe(setting, task, run), last=False)
    die_when_there_is_one(setting.folder / KILLED / "checkpoints")
    execute(_recipe(setting, task, KILLED), last=False)
    return []


def die_when_there_is_one(checkpoints: Path) -> None:
    """Start a thread that kills this process as soon as the folder has a whole checkpoint."""

    def watch() -> None:
        while saved_step(checkpoints) is None:
            threading.Event().wait(_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def saved_step(checkpoints: Path) -> int | None:
    """The step of the newest whole checkpoint; None where there is none. Unfinished ones have other names."""
    steps = [int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*") if path.name[5:].isdigit()]
    return max(steps, default=None)


def asked(setting: Setting, *, task: str) -> list[Asked]:
    _without_random_order()
    start()
    killed = setting.folder / KILLED
    begun, ended = saved_step(killed / "checkpoints"), (killed / "DONE").exists()
    stage = _ds_config(setting, task).stem

    def resumed() -> Outcome:
        if begun is None or ended:
            return crashed("the run came to its end, or to no checkpoint, before it was killed", setting.folder)
        execute(_recipe(setting, task, KILLED, resume="required"), last=False)
        whole, again, other = (_weights(setting.folder / run) for run in (WHOLE, KILLED, REPEATED))
        return compared(again, whole, repeated=other, since=f"killed after step {begun} of {STEPS}")

    return [Asked(f"a killed and resumed run = one that was not, bit by bit ({task}, {stage}.json)", resumed)]


def _weights(run: Path) -> dict[str, Tensor]:
    return {
        f"{path.name} {name}": value
        for path in sorted((run / "model").glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def differing(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> int:
    """How many numbers differ; a tensor that only one of them has differs in all its numbers."""
    count = sum(value.numel() for name, value in {**found, **wanted}.items() if name not in found or name not in wanted)
    return count + sum(int((found[name] != value).sum()) for name, value in wanted.items() if name in found)


def compared(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *, repeated: Mapping[str, Tensor], since: str
) -> Outcome:
    """repeated: the weights of the same run once more. Where those differ, the question has no answer here."""
    if random := differing(repeated, wanted):
        return not_answered(
            f"a run that is only repeated differs in {random:,} numbers, because kernels add in any order"
        )
    total = sum(value.numel() for value in wanted.values())
    return judged({"numbers that differ": Bound(differing(found, wanted), most=0)}, more=f"of {total:,}; {since}")
