"""Several ranks at every ZeRO stage against one plain process: losses and weights after a few steps of SMAE and SRL.

One process trains first, with torch's own backward pass and AdamW and without DeepSpeed (`train_alone`), and leaves its
results in a file. Then all ranks train the same recipe, whose batches are divided among them (`asked`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.build import build_model, build_objective, open_shards, open_stream
from trainer.config.schema import Recipe
from trainer.distributed import World, seed_step, start, sum_over_ranks
from trainer.ds_config import loads_weights, read_ds_config
from trainer.engine import Engine
from trainer.optim import adamw
from trainer.qualification import made_up
from trainer.qualification.lines import Asked, Bound, Outcome, judged, not_answered
from trainer.qualification.passes import Plain, Subject, seconds_of
from trainer.qualification.settings import (
    SHIPPED,
    TASKS,
    TINY,
    Setting,
    float32_ds_config,
    recipe_of,
    recipe_values,
)

STAGES = (0, 1, 2, 3)
STEPS, QUICK_STEPS = 4, 2
# In float32 the ranks add the same numbers in another order. The tolerance of losses is relative, that of weights
# absolute. A step moves a weight by up to 0.02, and an error of a gradient by lr / eps = 2 times the error.
LOSS, WEIGHTS = 1e-5, 5e-5
# In bf16 a loss is rounded as trainer/qualification/precision.py says.
LOSS_IN_BF16 = 1e-2
_SENT_BYTES = 2**28


@dataclass(frozen=True)
class Trained:
    """The loss of each step, and the parameters after the last one, by name, on the CPU."""

    losses: list[float]
    parameters: Mapping[str, Tensor]


def _recipe(setting: Setting, task: str, ds_config: Path) -> Recipe:
    values = recipe_values(
        task, TINY, setting.folder / "data", ds_config=ds_config, output=setting.folder / "run", steps=_steps(setting)
    )
    return recipe_of(values)


def _steps(setting: Setting) -> int:
    return QUICK_STEPS if setting.quick else STEPS


def train_alone(setting: Setting) -> list[Asked]:
    """Write the data set, and the results of one process for each task."""
    made_up.write(setting.folder / "data", TINY)
    for task in TASKS:
        torch.save(_train_alone(_recipe(setting, task, setting.ds_config_in_float32), setting), _file(setting, task))
    return []


def _file(setting: Setting, task: str) -> Path:
    return setting.folder / f"alone_{task}.pt"


def _train_alone(recipe: Recipe, setting: Setting) -> dict[str, object]:
    subject = Subject(recipe)
    engine, optim = Plain(subject.parts.module, setting.device), recipe.optim
    optimizer = adamw(
        engine.module, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=optim.weight_decay
    )
    losses, batch = [], subject.batch
    for step in range(recipe.train.steps):
        seed_step(recipe.run.seed, step, 0)
        report = subject.objective.forward_backward(engine, batch, step)
        nn.utils.clip_grad_norm_(engine.module.parameters(), optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(report.losses["loss"]))
        batch = next(subject.stream)
    return {"losses": losses, "parameters": {n: p.detach().cpu() for n, p in engine.module.named_parameters()}}


def asked(setting: Setting) -> list[Asked]:
    world = start()
    those = f"{world.size} rank{'s' if world.size > 1 else ''}"
    questions = [Asked("collectives run over NCCL", lambda: _collectives(setting, world))]
    for task in TASKS:
        for stage in STAGES:
            answer = partial(_equality, setting, task, float32_ds_config(setting.folder / f"rank{world.rank}", stage))
            questions.append(Asked(f"{task}, {those}, ZeRO {stage} = one process, float32", partial(answer, world)))
    if not setting.quick:
        for task in TASKS:
            for stage in STAGES:
                answer = partial(_equality, setting, task, SHIPPED / f"zero{stage}.json", world, in_bf16=True)
                questions.append(Asked(f"{task}, {those}, zero{stage}.json (bf16) ≈ one process in float32", answer))
    return questions


def _collectives(setting: Setting, world: World) -> Outcome:
    """Every rank adds its number; the sum is known."""
    found = float(sum_over_ranks([world.rank + 1.0], world.device))
    error = abs(found - world.size * (world.size + 1) / 2)
    checked = judged({"error": Bound(error, most=0.0)}, more=f"{world.size} ranks over {dist.get_backend()}")
    if checked.verdict == "failed":
        return checked
    if not setting.cuda:
        return not_answered(f"there is no GPU; {world.size} ranks ran over {dist.get_backend()}, and were right")
    if world.size == 1:
        return not_answered("there is one GPU, and nobody to send to")
    rate = _sent_a_second(world)
    return replace(checked, figure=f"{checked.figure}; {rate / 1e9:.1f} GB/s a rank", values={"link_bytes": rate})


def _sent_a_second(world: World) -> float:
    """Bytes a second that each rank sends in a large all-reduce, in a ring."""
    values = torch.zeros(_SENT_BYTES // 4, device=world.device)
    seconds = seconds_of(lambda: dist.all_reduce(values), world.device, repeats=5)
    return 2 * (world.size - 1) / world.size * _SENT_BYTES / seconds


def _equality(setting: Setting, task: str, ds_config: Path, world: World, *, in_bf16: bool = False) -> Outcome:
    found = train_on_ranks(_recipe(setting, task, ds_config), world)
    saved = torch.load(_file(setting, task), weights_only=True)
    return compared(found, Trained(saved["losses"], saved["parameters"]), in_bf16=in_bf16)


def train_on_ranks(recipe: Recipe, world: World) -> Trained:
    """The trainer's own parts, put together as trainer/run.py does. All ranks call it."""
    sources = open_shards(recipe)
    ds_config = read_ds_config(recipe.engine.ds_config)
    parts = build_model(recipe, sources, ds_config, weights=loads_weights(recipe, ds_config, world.rank))
    engine = Engine(parts.module, recipe, world, ds_config)
    engine.train()
    stream = open_stream(recipe, sources, rank=world.rank, world_size=world.size)
    objective = build_objective(recipe, parts)
    losses = []
    for step in range(recipe.train.steps):
        seed_step(recipe.run.seed, step, world.rank)
        report = objective.forward_backward(engine, next(stream), step)
        engine.step(recipe.optim.lr)
        losses.append(float(sum_over_ranks([float(report.losses["loss"])], world.device)))
    parameters = {name: engine.full_parameter(p).cpu() for name, p in parts.module.named_parameters()}
    engine.deepspeed.destroy()
    return Trained(losses, parameters)


def compared(found: Trained, wanted: Trained, *, in_bf16: bool = False) -> Outcome:
    """In bf16 only losses: AdamW's first steps enlarge what rounding does to small gradients."""
    loss = max(abs(f / w - 1) for f, w in zip(found.losses, wanted.losses, strict=True))
    if in_bf16:
        return judged({"losses": Bound(loss, most=LOSS_IN_BF16)})
    pairs = ((found.parameters[name], value) for name, value in wanted.parameters.items())
    weights = max(float((f - w).abs().max()) for f, w in pairs)
    return judged({"losses": Bound(loss, most=LOSS), "weights": Bound(weights, most=WEIGHTS)})
