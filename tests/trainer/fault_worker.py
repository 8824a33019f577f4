"""The ordinary trainer with faults planted; started under the real launcher, or as forked ranks (tests/ranks.py).

    deepspeed --num_gpus 2 --module tests.trainer.fault_worker CASES.json

Each case is {task, arguments, fault}, run one after another; RANK in an argument is the rank's number. A fault is
{kind, step, rank}: it comes on that rank (on all, where there is none) with the batch of that step. One case alone is
the ordinary command, its exit code included.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import unittest.mock
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from data.ground.command import run_command
from tests.launcher import step_clock
from trainer import build, checkpoint, run
from trainer.config.kinds import kind_named
from trainer.distributed import start
from trainer.engine import Engine
from trainer.resilience import stopping, watchdog
from trainer.resilience.processes import Process
from trainer.run import StopRequests

patch = unittest.mock.patch.object


def main() -> None:
    cases = json.loads(Path(sys.argv[-1]).read_text())
    watchdog.SILENT_SECONDS = 10.0  # of a busy machine's patience as much as tests need
    if len(cases) > 1:
        start()
    for case in cases:
        case["arguments"] = [each.replace("RANK", os.environ["RANK"]) for each in case["arguments"]]
        os.environ[stopping.STOP_FILE_VARIABLE] = case.get("stop_file", "")
        with planted(case["fault"]):
            if len(cases) == 1:
                run.main(kind_named(case["task"]).command, "", case["arguments"])
                continue
            with patch(dist, "destroy_process_group"):
                try:
                    run.main(kind_named(case["task"]).command, "", case["arguments"])
                except stopping.Stopped as stopped:
                    print(stopped, flush=True)


@contextmanager
def planted(fault: dict[str, Any] | None) -> Iterator[None]:
    if fault is None or fault.get("rank", int(os.environ["RANK"])) != int(os.environ["RANK"]):
        yield
        return
    kind, original, here = fault["kind"], build.Stream.__next__, [False]

    def next_batch(self: Any) -> Any:
        batch = original(self)
        here[0] = self.samples == fault["step"] * self.global_batch_size
        if kind == "clock":
            index = self.samples // self.global_batch_size - fault["step"]
            if 0 <= index < len(fault["seconds"]):
                step_clock_and_wait(fault["stat"], fault["seconds"][index])
            return batch
        if here[0]:
            strike(kind)
        return batch

    with patch(build.Stream, "__next__", next_batch), numbers(kind, here), saving(kind):
        yield


def strike(kind: str) -> None:
    if kind.startswith("signal SIG"):
        os.kill(os.getpid(), signal.Signals[kind.removeprefix("signal ")])
    elif kind == "two signals":
        stopping.SAME_SIGNAL_SECONDS = 0.0
        seen = threading.Event()
        original = StopRequests._signalled

        def noticed(self: StopRequests, number: int) -> None:
            original(self, number)
            seen.set()

        with patch(StopRequests, "_signalled", noticed):
            os.kill(os.getpid(), signal.SIGTERM)
            seen.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()  # as in a collective that never ends
    elif kind == "raise":
        raise ValueError("a planted fault")
    elif kind == "block":
        threading.Event().wait()
    elif kind == "launcher":
        os.kill(os.getppid(), signal.SIGKILL)
    elif kind == "stop file":
        Path(os.environ[stopping.STOP_FILE_VARIABLE]).touch()


def step_clock_and_wait(stat: str, seconds: float) -> None:
    """The first rank steps the clock; each goes on when its watchers have looked at every process once since."""
    if os.environ["RANK"] == "0":
        before = psutil.Process().create_time()
        step_clock(stat, seconds)
        assert psutil.Process().create_time() == before + seconds
    dist.barrier()
    looked, enough = dict[int, int](), threading.Event()
    lives = Process.lives.fget
    assert lives is not None

    def noted(self: Process) -> bool:
        found = lives(self)
        looked[self.pid] = looked.get(self.pid, 0) + 1
        # The launcher, the `deepspeed` command above it, and the other rank.
        if len(looked) == 3 and min(looked.values()) >= 2:
            enough.set()
        return found

    with patch(Process, "lives", property(noted)):
        assert enough.wait(60), looked
    print("the clock was stepped", file=sys.stderr) if os.environ["RANK"] == "0" else None


class Broken(torch.autograd.Function):
    """The identity, with NaN for a gradient."""

    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        return states.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("nan")


@contextmanager
def numbers(kind: str, here: list[bool]) -> Iterator[None]:
    """In the second layer of the encoder, or in the step itself, with the batches that `here` tells of."""
    if kind not in ("nan", "nan gradient", "skip"):
        yield
        return
    build_model, step = run.build_model, Engine.step

    def broken_model(*args: Any, **options: Any) -> Any:
        parts = build_model(*args, **options)

        def look(_: Any, __: Any, output: Any) -> Any:
            states = output[0] if isinstance(output, tuple) else output
            if not here[0] or not (kind == "nan" or torch.is_grad_enabled()):
                return None
            states = states * float("nan") if kind == "nan" else Broken.apply(states)
            return (states, *output[1:]) if isinstance(output, tuple) else states

        if kind != "skip":
            parts.encoder.backbone.encoder.layer[1].register_forward_hook(look)
        return parts

    def skipping(self: Engine, lr: float, *, skip: bool = False) -> float:
        return step(self, lr, skip=skip or (kind == "skip" and here[0]))

    with patch(run, "build_model", broken_model), patch(Engine, "step", skipping):
        yield


@contextmanager
def saving(kind: str) -> Iterator[None]:
    write, struck = checkpoint.write_fragments, threading.Event()

    def interrupted(*args: Any) -> Any:
        # Once: in the save of the stop it would be a second signal, if the first was long ago.
        if kind == "signal in a save" and not struck.is_set():
            struck.set()
            os.kill(os.getpid(), signal.SIGTERM)
        return write(*args)

    with patch(checkpoint, "write_fragments", interrupted):
        yield


if __name__ == "__main__":
    run_command(main)
