"""The plan's counts against what the trainer does: parameters, products, stored activations, bytes held and sent.

What data sheets and assumptions add (seconds on GPUs) cannot be tested here; docs/scaling.md says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from launch import plan, scaling
from launch.scaling import FLOAT32, Model, Stage, Texts
from tests.launch.hosts import Unavailable, deepspeed_commands, made, run_on_all
from tests.trainer.support import MODEL, ROOT, recipe_of, recipe_values
from trainer import build, objectives
from trainer.config import ConfigError, Recipe
from trainer.counts import Shape
from trainer.distributed import World
from trainer.size_schedules import build_schedule

RECIPE = "launch/recipes/smae_bert_base_fineweb.toml"
# Large enough for stage 3 to divide some parameters and leave others whole under DeepSpeed's own threshold.
WIDER = MODEL | {"hidden_size": 256, "num_hidden_layers": 3, "intermediate_size": 1024, "initializer_range": 0.02}
LADDER = [[1, 64], [2, 128], [3, 256]]


def wider_values(shards: Path, name: str, **train: Any) -> dict[str, Any]:
    train = {"global_batch_size": 24, "micro_batch_size": 4} | train
    model = {"config": dict(WIDER), "ladder": LADDER}
    return recipe_values(shards, model=model, objective={"name": name}, train=train, optim={"lr": 1e-4})


def planned_model(recipe: Recipe, vocabulary: int) -> Model:
    shape = Shape(WIDER["hidden_size"], WIDER["intermediate_size"], WIDER["num_hidden_layers"], vocabulary)
    return Model.of(recipe, shape, positions=WIDER["max_position_embeddings"])


@dataclasses.dataclass
class PlainEngine:
    """The trainer's engine without DeepSpeed, for one process that counts."""

    module: torch.nn.Module
    device = torch.device("cpu")
    world = World(0, 0, 1, torch.device("cpu"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def accumulation(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


@pytest.mark.parametrize("name", ["masked", "contrastive"])
@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": True}])
def test_products_are_those_computed(
    name: str, changes: dict[str, Any], document_shards: Path, tuple_shards: Path
) -> None:
    """Counted by PyTorch while a step runs; texts of one length, so that there is no padding to compute."""
    shards = document_shards if name == "masked" else tuple_shards
    values = wider_values(shards, name, **changes)
    values["data"] |= {"max_length": 16, "query_max_length": 8, "passage_max_length": 8, "num_negatives": 1}
    recipe = recipe_of(values)
    sources = build.open_shards(recipe)
    parts = build.build_model(recipe, sources)
    objective = objectives.REGISTRY[name](
        recipe,
        build_schedule("ladder", recipe.ladder, reduction="mean", seed=1),
        shape=Shape.of(parts.encoder.config),
        pad_id=sources[0].vocabulary.pad_id,
        packed=False,
    )
    stream = build.open_stream(recipe, sources, rank=0, world_size=1)
    batch = next(stream)
    stream.close()
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _in_place_product}) as counter:
        report = objective.forward_backward(PlainEngine(parts.module.train()), batch, 0)
    texts = _texts_of(batch)
    recipe = _with_real_masks(recipe, batch)
    passages = len(getattr(batch, "passages", ()))
    shape = planned_model(recipe, sources[0].vocabulary.size).shape
    computed, padding = counter.get_total_flops(), report.padded_tokens / report.tokens - 1
    ratio = computed / scaling.computed_flops(recipe, shape, texts, all_passages=passages)
    print(f"{name} {changes}: computed ÷ predicted {ratio:.3f}, padding {padding:.1%}")
    assert 0.97 < ratio < 1.03 + padding
    # The metrics' count, by which MFU is predicted, is another: it counts no repetition, and nothing as skipped.
    model_flops = scaling.model_flops(recipe, shape, texts)
    assert model_flops == pytest.approx(report.flops, rel=1e-6)
    assert not 0.97 < computed / model_flops < 1.03 + padding


def _in_place_product(
    into: torch.Size, left: torch.Size, right: torch.Size, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """PyTorch's counter knows addmm, and not addmm_, with which losses add to gradients."""
    return 2 * left[0] * left[1] * right[1]


def _with_real_masks(recipe: Recipe, batch: Any) -> Recipe:
    """Mask ratios as they came out: whole words that do not fit the budget are left."""
    if recipe.objective.name != "masked":
        return recipe
    sides = {"encoder_mask_ratio": batch.encoder_labels, "decoder_mask_ratio": batch.decoder_labels}
    ratios = {name: float((labels != -100).sum()) / len(labels) for name, labels in sides.items()}
    return dataclasses.replace(recipe, objective=dataclasses.replace(recipe.objective, **ratios))


def _texts_of(batch: Any) -> Texts:
    if hasattr(batch, "offsets"):
        parts = [batch.offsets.diff()]
    else:
        parts = [batch.queries.lengths, batch.passages.lengths]
    lengths = torch.cat(parts).double()
    return Texts(len(lengths), float(lengths.sum()), float((lengths**2).sum()))
