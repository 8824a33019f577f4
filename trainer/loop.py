"""THE loop. It knows no loss, no model and no data: each step takes a batch, makes gradients, takes one optimizer step.

Order matters for exact resume: what a step draws depends on (seed, step, rank) alone, the stream counts the samples
that it delivered, and a checkpoint is written between steps. Ranks agree once a step, by one small sum, on the loss and
on whether to stop; if one rank's loss is not finite, the sum is not finite on any rank. The same sum says when all
ranks have written a checkpoint, so that it can be committed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Protocol

from pydantic import Field

from data.ground.records import Record
from trainer.checkpoint import SavedState
from trainer.distributed import seed_step, sum_over_ranks
from trainer.engine import Engine
from trainer.monitoring.metrics import Metrics
from trainer.objectives.registry import Objective
from trainer.resilience.anomalies import GaveUp, Health
from trainer.resilience.stopping import REASONS
from trainer.resilience.watchdog import NEXT_BATCH


class ResumableStream(Protocol):
    """A stream of batches whose position can be saved (data/stream.py)."""

    @property
    def epoch(self) -> float: ...
    @property
    def samples(self) -> int: ...
    def __next__(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...


_Count = Annotated[int, Field(ge=0)]


class _SavedHealth(Record):
    """The saved Health of trainer/resilience/anomalies.py; other versions may have other keys."""

    skipped_steps: _Count = 0
    skipped_in_a_row: _Count = 0
    losses: _Count = 0
    loss_mean: float = 0.0
    loss_variance: Annotated[float, Field(ge=0)] = 0.0


class _SavedPlace(Record):
    """The saved position of the stream; data/stream.py checks its other keys."""

    samples: int = Field(ge=0, le=2**62)


class RunState(SavedState):
    """A run's state in a checkpoint."""

    health: _SavedHealth = _SavedHealth()
    stream: _SavedPlace


@dataclass
class TrainState:
    """How far the run is; equal on all ranks."""

    step: int = 0  # optimizer steps taken, skipped ones included
    health: Health = field(default_factory=Health)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        known = {each.name for each in fields(Health)}
        self.health = Health(**{key: value for key, value in state.get("health", {}).items() if key in known})


@dataclass(frozen=True)
class Plan:
    """The settings of a recipe that the loop needs."""

    seed: int
    total_steps: int
    stop_at_step: int  # the last step of this process
    learning_rate: Callable[[int], float]
    save_every_steps: int
    evaluate_every_steps: int  # 0: never
    max_skipped_steps: int  # in a row
    spike_deviations: float  # 0: spikes are not looked for

    def evaluates_at(self, step: int) -> bool:
        return bool(self.evaluate_every_steps and step and step % self.evaluate_every_steps == 0)


class Saving(Protocol):
    """Checkpoints that are written while training goes on (trainer/checkpoint.py)."""

    @property
    def written(self) -> bool: ...
    def begin(self) -> None: ...
    def finish(self) -> None: ...


@dataclass(frozen=True)
class Hooks:
    """What the loop calls between steps."""

    saves: Saving
    evaluate: Callable[[], dict[str, float]]
    stop_wanted: Callable[[], str | None]  # this rank's own view
    # Reports how far the main thread is: a phase, the step, and whether what follows may take long.
    heartbeat: Callable[..., None]


def train(
    engine: Engine,
    objective: Objective,
    stream: ResumableStream,
    state: TrainState,
    *,
    plan: Plan,
    metrics: Metrics,
    hooks: Hooks,
) -> str | None:
    """Run steps until `plan.stop_at_step`, save and evaluate between them, and save at the end.

    Returns why it stopped before that step, or None. Raises GaveUp, without saving another checkpoint.
    """
    engine.train()
    saved_at = first = state.step
    reason = None
    if plan.evaluates_at(first):
        # We save before we evaluate, so a run that was stopped in between still owes this evaluation.
        metrics.evaluation(first, hooks.evaluate())
    for step in range(first, min(plan.stop_at_step, plan.total_steps)):
        begin = time.perf_counter()
        # The first steps may take long, because kernels are chosen, compiled and connected in them.
        hooks.heartbeat(NEXT_BATCH, step=step + 1, patient=step < first + 2)
        seed_step(plan.seed, step, engine.world.rank)
        batch = next(stream)  # this rank's whole share of the global batch
        hooks.heartbeat("loss and gradients")
        wait_seconds = time.perf_counter() - begin
        report = objective.forward_backward(engine, batch, step)
        own_loss = float(report.losses["loss"])
        loss, all_written, reason = _agree(own_loss, hooks.saves.written, hooks.stop_wanted(), engine)
        lr = plan.learning_rate(step)
        grad_norm = engine.step(lr, skip=not math.isfinite(loss))
        state.step = step + 1
        fault = state.health.observe(loss, grad_norm=grad_norm, spike_deviations=plan.spike_deviations)
        metrics.update(
            report,
            batch,
            step=state.step,
            epoch=stream.epoch,
            samples=stream.samples,
            rates=engine.learning_rates(lr),
            grad_norm=grad_norm,
            seconds=time.perf_counter() - begin,
            wait_seconds=wait_seconds,
            skipped_steps=state.health.skipped_steps,
            counts=math.isfinite(loss) and math.isfinite(grad_norm),
        )
        if fault is not None:
            metrics.fault(fault, state.step, loss=loss, own_loss=own_loss, grad_norm=grad_norm, batch=batch)
        if all_written:
            hooks.heartbeat("commit of a checkpoint", patient=True)
            hooks.saves.finish()
        if state.health.skipped_in_a_row >= plan.max_skipped_steps:
            hooks.saves.finish()
            raise GaveUp(
                f"step {state.step} was the last of {plan.max_skipped_steps} in a row with a loss or gradient that is "
                f"not finite; the last checkpoint is as it was: look at the step with --debug.replay={state.step}, "
                "then lower optim.lr, or raise train.max_skipped_steps"
            )
        if state.step % plan.save_every_steps == 0:
            hooks.heartbeat("save", patient=True)
            hooks.saves.begin()
            saved_at = state.step
        if reason is not None:
            break
        if plan.evaluates_at(state.step):
            hooks.heartbeat("evaluation", patient=True)
            metrics.evaluation(state.step, hooks.evaluate())
    hooks.heartbeat("save", patient=True)
    if state.step >= plan.total_steps and state.health.skipped_steps == state.step > 0:
        hooks.saves.finish()
        raise GaveUp(
            f"all {state.step} steps had a loss or gradient that is not finite, so nothing was trained; look at one "
            "with --debug.replay=1, and see that the model and the data are sound"
        )
    if saved_at != state.step:
        hooks.saves.begin()
    hooks.saves.finish()
    return reason


def _agree(own_loss: float, written: bool, wanted: str | None, engine: Engine) -> tuple[float, bool, str | None]:
    """(The global loss, not finite where any rank's is not; whether all ranks have written; why to stop, or None)."""
    asked = [float(reason == wanted) for reason in REASONS]
    loss, written_by, *asked_by = sum_over_ranks([own_loss, float(written), *asked], engine.device).tolist()
    reason = next((reason for reason, ranks in zip(REASONS, asked_by) if ranks), None)
    return loss, written_by == engine.world.size, reason
