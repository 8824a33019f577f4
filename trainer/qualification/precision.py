"""bf16 against float32: the vectors of all sizes, losses and gradients, of the same weights and the same batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from data.collate import PairBatch, Texts, concatenate
from trainer.config.schema import Recipe
from trainer.qualification import made_up
from trainer.qualification.lines import Asked, Bound, Outcome, judged
from trainer.qualification.passes import Plain, Subject, largest_angle, relative_error
from trainer.qualification.settings import SHIPPED, TASKS, Setting, recipe_of, recipe_values

# bf16 has 8 bits, so a number is off by up to 2⁻⁹ = 0.2 %. What a dozen layers make of it stays below some per cent of
# a vector, of which 1 − cosine is half the square.
ANGLE, LOSS = 2e-3, 1e-2
# SRL's temperature of 0.05 multiplies by 20 what rounding changes in a similarity.
GRADIENT = {"SMAE": 0.1, "SRL": 0.3}
# The shipped engine configurations in which weights, or products alone, are in bf16.
WAYS = {"bf16 weights": "zero1.json", "autocast": "zero0.json"}


def asked(setting: Setting) -> list[Asked]:
    @functools.cache
    def shards() -> Path:
        return made_up.write(setting.folder / "data", setting.scale)

    def recipe(task: str, ds_config: Path) -> Recipe:
        return recipe_of(
            recipe_values(task, setting.scale, shards(), ds_config=ds_config, output=setting.folder / "run")
        )

    def answer(task: str, way: str) -> Outcome:
        exact = Subject(recipe(task, setting.ds_config_in_float32))
        rounded = Subject(recipe(task, SHIPPED / WAYS[way]))
        wanted = _results(exact, Plain(exact.parts.module, setting.device))
        module = rounded.parts.module.bfloat16() if way == "bf16 weights" else rounded.parts.module
        found = _results(rounded, Plain(module, setting.device, autocast=way == "autocast"))
        return compared(found, wanted, task)

    return [
        Asked(f"bf16 = float32, {task}, {way}", functools.partial(answer, task, way)) for task in TASKS for way in WAYS
    ]


Results = tuple[float, Tensor, Sequence[Tensor]]  # loss, gradient, and vectors by size


def _results(subject: Subject, engine: Plain) -> Results:
    loss, gradient = subject.loss_and_gradient(engine)
    texts = _texts_of(subject.batch)
    with torch.no_grad():
        ids, offsets = texts.tokens.to(engine.device), texts.offsets.to(engine.device)
        vectors = engine(ids, None, sizes=list(subject.recipe.ladder), offsets=offsets)
    return loss, gradient, [each.float() for each in vectors]


def _texts_of(batch: object) -> Texts:
    if isinstance(batch, PairBatch):
        return concatenate(batch.queries, batch.passages)
    return Texts(batch.encoder_input_ids, batch.offsets)  # type: ignore[attr-defined]


def compared(found: Results, wanted: Results, task: str) -> Outcome:
    return judged(
        {
            "loss": Bound(abs(found[0] / wanted[0] - 1), most=LOSS),
            "gradient": Bound(relative_error(found[1], wanted[1]), most=GRADIENT[task]),
            "1 − cosine": Bound(largest_angle(found[2], wanted[2]), most=ANGLE),
        }
    )
