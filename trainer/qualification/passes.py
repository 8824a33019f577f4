"""Steps without DeepSpeed, and how two results are compared."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.build import ModelParts, build_model, build_objective, open_shards, open_stream
from trainer.config.schema import Recipe
from trainer.distributed import World
from trainer.ds_config import read_ds_config


class Plain:
    """Takes the engine's place on one process: runs a module as it is, under autocast to bf16 where asked."""

    def __init__(self, module: nn.Module, device: torch.device, *, autocast: bool = False) -> None:
        self.module = module.to(device).train()
        self.world, self.device = World.alone(device), device
        self.heartbeat: Callable[[str], None] = lambda phase: None
        self._autocast = autocast

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            return self.module(*args, **kwargs)

    def accumulation(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class Subject:
    """A recipe's model, first batch and objective, as trainer/run.py builds them for one process."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        sources = open_shards(recipe)
        self.parts: ModelParts = build_model(recipe, sources, read_ds_config(recipe.engine.ds_config))
        self.stream = open_stream(recipe, sources, rank=0, world_size=1)
        self.objective = build_objective(recipe, self.parts)
        self.batch = next(self.stream)

    def loss_and_gradient(self, engine: Plain) -> tuple[float, Tensor]:
        """(The first batch's loss, its gradient as one float32 vector), of the engine's module."""
        engine.module.zero_grad()
        report = self.objective.forward_backward(engine, self.batch, 0)
        return float(report.losses["loss"]), gradient_of(engine.module)


def gradient_of(module: nn.Module) -> Tensor:
    """The gradients of all parameters, one after another, in float32; zeros where there is none."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
    return torch.cat([each.detach().float().flatten() for each in gradients])


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """|found − wanted| / |wanted|, of all elements as one vector."""
    found, wanted = found.double().flatten(), wanted.double().flatten()
    return float((found - wanted).norm() / wanted.norm())


def largest_angle(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    """1 − cosine of the two vectors of a text that differ most, over all texts and sizes. Each: [texts, dimensions]."""
    pairs = zip(found, wanted, strict=True)
    return max(float(1 - nn.functional.cosine_similarity(a.double(), b.double()).min()) for a, b in pairs)


def wait_for(device: torch.device) -> None:
    """Until the device has computed everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(action: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """The shortest time of an action, which has run once before."""
    action()
    best = float("inf")
    for _ in range(repeats):
        wait_for(device)
        begin = time.perf_counter()
        action()
        wait_for(device)
        best = min(best, time.perf_counter() - begin)
    return best


def peak_bytes(action: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """(The most bytes of a GPU's memory that tensors held during an action, those that they held before it)."""
    wait_for(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    action()
    wait_for(device)
    return torch.cuda.max_memory_allocated(device), before
