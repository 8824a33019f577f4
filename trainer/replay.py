"""Repeats one step of a run in float32 with anomaly detection, to find where a number became NaN or infinite.

The weights come from the nearest checkpoint before the step. For a step before the first save, they are those that the
run began with. So they are the step's own weights only if a checkpoint was saved right before it; the report says from
which step they are. The batch and all random draws are those of the step.

The model runs without an engine, so that one rank can find its fault while no other rank waits for it in a reduction.
Nothing is trained, and only replay_step_<n>.json is written, in the run folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data.collate import samples_of
from data.ground.errors import ConfigError
from data.ground.files import write_atomically
from data.stream import Stream
from trainer.agreement import frozen_fingerprint
from trainer.build import ModelParts, build_objective
from trainer.checkpoint import Checkpointer
from trainer.config.schema import Recipe
from trainer.distributed import Refused, World, gather_objects, seed_step, sum_over_ranks
from trainer.engine import MASTER, Fragment
from trainer.loop import RunState, TrainState

log = logging.getLogger(__name__)

# How many of a rank's parameters with gradients that are not finite are named.
_NAMED = 5


class PlainEngine:
    """Takes the engine's place: runs the module itself in float32, for this rank's part of the gradient alone."""

    def __init__(self, module: nn.Module, world: World) -> None:
        self.module, self.world, self.device = module.float().to(world.device), world, world.device
        self.anomalies: list[str] = []
        self.heartbeat: Callable[[str], None] = lambda phase: None  # called at each pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.heartbeat("forward")
        return self.module(*args, **kwargs)

    def accumulation(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.heartbeat("backward")
        try:
            loss.backward()
        except RuntimeError as error:
            # Anomaly detection raises this error. The rank goes on, so that later collectives still match.
            if "returned nan values" not in str(error):
                raise
            self.anomalies.append(str(error))

    def shapes(self) -> dict[str, list[int]]:
        return {name: list(p.shape) for name, p in self.module.named_parameters() if p.requires_grad}

    def kept_beside(self) -> dict[str, tuple[str, ...]]:
        return {}  # there is no optimizer

    def load(self, read: Callable[[Fragment], Tensor], *, optimizer_steps: int) -> None:
        """Load only the weights, because there is no optimizer that needs its moments."""
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                if parameter.requires_grad:
                    fragment = Fragment(MASTER, name, 0, parameter.numel())
                    parameter.copy_(read(fragment).view(parameter.shape))


def check_replay(recipe: Recipe, total_steps: int) -> None:
    """Raises ConfigError for a step that the run does not have."""
    if recipe.debug.replay > total_steps:
        raise ConfigError(
            f"debug.replay = {recipe.debug.replay} is beyond the run's {total_steps} steps; name one of them"
        )


def replay(
    recipe: Recipe, parts: ModelParts, stream: Stream, world: World, *, heartbeat: Callable[[str], None]
) -> dict[str, Any]:
    """Compute the gradient of step `debug.replay` again. Returns the report, which rank 0 writes. All ranks call it.

    Raises Refused where no checkpoint before that step is left, and the step is not one before the first save.
    """
    step, output = recipe.debug.replay, Path(recipe.run.output)
    engine = PlainEngine(parts.module, world)
    engine.heartbeat = heartbeat
    frozen = frozen_fingerprint(parts.module)
    checkpointer = Checkpointer(output / "checkpoints", keep=1, state=RunState, frozen=frozen)
    saved = checkpointer.load_newest(engine, before_step=step)
    if saved is None and not recipe.replays_from_start:
        raise Refused(
            f"debug.replay = {step} needs a whole checkpoint before that step, and {output}/checkpoints holds none; "
            "keep more with checkpoint.keep or checkpoint.keep_every_steps, or replay a later step"
        )
    state = TrainState()
    place = stream.state_dict()
    if saved is not None:
        state.load_state_dict(saved)
        place = saved["stream"]
    stream.load_state_dict(place | {"samples": (step - 1) * recipe.train.global_batch_size})
    engine.module.train()
    seed_step(recipe.run.seed, step - 1, world.rank)
    batch = next(stream)
    objective = build_objective(recipe, parts)
    with first_non_finite_output(engine.module) as found, torch.autograd.set_detect_anomaly(True):
        report = objective.forward_backward(engine, batch, step - 1)
    own = {name: float(value) for name, value in report.losses.items()}
    gradients = [(n, p.grad) for n, p in engine.module.named_parameters() if p.requires_grad and p.grad is not None]
    broken = [name for name, gradient in gradients if not gradient.isfinite().all()]
    facts = {
        "rank": world.rank,
        "losses": {name: repr(value) for name, value in own.items()},
        "first_non_finite_output": found[0] if found else None,
        "anomaly": engine.anomalies[0] if engine.anomalies else None,
        "non_finite_gradients": {"count": len(broken), "first": broken[:_NAMED]},
        "samples": samples_of(batch),
    }
    losses = {name: repr(float(sum_over_ranks([value], world.device))) for name, value in own.items()}
    # After an anomaly the norm is NaN, because the backward pass ended there and part of the gradient is missing.
    squares = sum_over_ranks([math.nan if engine.anomalies else 0.0], world.device)
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            squares += sum_over_ranks(gradient, world.device).square().sum()
    summary = {
        "step": step,
        "weights_of_step": state.step,
        "losses": losses,
        "grad_norm": repr(math.sqrt(float(squares)) if squares.isfinite() else float(squares)),
        "ranks": gather_objects(facts),
    }
    if world.is_main:
        path = output / f"replay_step_{step}.json"
        write_atomically(path, json.dumps(summary, indent=2) + "\n")
        _say(summary, path)
    return summary


@contextlib.contextmanager
def first_non_finite_output(module: nn.Module) -> Iterator[list[str]]:
    """A list that gets the name of the first submodule, in the order of computing, whose output is not finite."""
    found: list[str] = []

    def looker(name: str) -> Callable[..., None]:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            tensors = output if isinstance(output, tuple | list) else [output]
            if not found and not all(t.isfinite().all() for t in tensors if isinstance(t, Tensor)):
                found.append(name or type(module).__name__)

        return look

    handles = [each.register_forward_hook(looker(name)) for name, each in module.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _say(summary: dict[str, Any], path: Path) -> None:
    step, weights = summary["step"], summary["weights_of_step"]
    log.info("step %d with the weights after step %d: loss %s", step, weights, summary["losses"]["loss"])
    log.info("gradient norm %s; all of it in %s", summary["grad_norm"], path)
    for facts in summary["ranks"]:
        if facts["first_non_finite_output"] or facts["anomaly"] or facts["non_finite_gradients"]["count"]:
            log.warning(
                "rank %d: first output that is not finite: %s; backward pass: %s; gradients of %d parameters (%s)",
                facts["rank"],
                facts["first_non_finite_output"] or "none",
                facts["anomaly"] or "none",
                facts["non_finite_gradients"]["count"],
                ", ".join(facts["non_finite_gradients"]["first"]) or "none",
            )
