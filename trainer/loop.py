"""THE loop. It knows no loss, no model and no data: each step takes a batch, makes gradients, takes one optimizer step.

Order matters for exact resume: what a step draws depends on (seed, step, rank) alone, the stream counts what was
delivered, and a checkpoint is written between steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.distributed import seed_step
from trainer.engine import Engine
from trainer.metrics import Metrics
from trainer.objectives import Objective


class ResumableStream(Protocol):
    """Batches with a place that can be saved (data/stream.py)."""

    @property
    def epoch(self) -> float: ...
    @property
    def samples(self) -> int: ...
    def __next__(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...


@dataclass
class TrainState:
    """How far the run is; equal on all ranks."""

    step: int = 0  # optimizer steps taken


@dataclass(frozen=True)
class Plan:
    """What the loop must know of a recipe."""

    seed: int
    total_steps: int
    stop_at_step: int  # the last step of this process
    learning_rate: Callable[[int], float]
    save_every_steps: int
    evaluate_every_steps: int  # 0: never


def train(
    engine: Engine,
    objective: Objective,
    stream: ResumableStream,
    state: TrainState,
    *,
    plan: Plan,
    metrics: Metrics,
    save: Callable[[], None],
    evaluate: Callable[[], dict[str, float]],
) -> None:
    """Run steps until `plan.stop_at_step`, saving and evaluating between them; saved at the end."""
    engine.train()
    saved_at = state.step
    for step in range(state.step, min(plan.stop_at_step, plan.total_steps)):
        begin = time.perf_counter()
        seed_step(plan.seed, step, engine.world.rank)
        batch = next(stream)  # this rank's whole share of the global batch
        wait_seconds = time.perf_counter() - begin
        report = objective.forward_backward(engine, batch, step)
        lr = plan.learning_rate(step)
        grad_norm = engine.step(lr)
        state.step = step + 1
        metrics.update(
            report,
            step=state.step,
            epoch=stream.epoch,
            samples=stream.samples,
            lr=lr,
            grad_norm=grad_norm,
            seconds=time.perf_counter() - begin,
            wait_seconds=wait_seconds,
        )
        if state.step % plan.save_every_steps == 0:
            save()
            saved_at = state.step
        if plan.evaluate_every_steps and state.step % plan.evaluate_every_steps == 0:
            metrics.evaluation(state.step, evaluate())
    if saved_at != state.step:
        save()
