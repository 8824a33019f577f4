"""What a finished run leaves: <run>/model, an ordinary Hugging Face folder with barista.json, and DONE."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from data.files import write_atomically
from models.adapters import merged_tensors, save_adapter
from models.encoder import EmbeddingSettings
from models.sizes import Ladder
from trainer.build import ModelParts
from trainer.config import Recipe
from trainer.engine import Engine

log = logging.getLogger(__name__)


def save_model(engine: Engine, parts: ModelParts, recipe: Recipe) -> None:
    """Write <run>/model and DONE, and <run>/adapter where adapters were trained; <run>/model then holds both merged.

    All ranks call it: partitioned parameters are gathered one by one.
    """
    model = parts.saved
    full: dict[int, torch.Tensor] = {}
    for parameter in model.parameters():
        value = engine.full_parameter(parameter)
        if engine.world.is_main:
            full[id(parameter)] = value.cpu()
    if not engine.world.is_main:
        return
    tensors = {name: full[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    expected = set(model.state_dict())
    tensors |= {name: value for name, value in model.named_buffers() if name in expected}
    folder = Path(recipe.run.output) / "model"
    if parts.adapter is not None:
        alone = folder.with_name("adapter")
        shutil.rmtree(alone, ignore_errors=True)
        save_adapter(parts.adapter, tensors, alone)
        tensors = merged_tensors(model, tensors)
    tmp = folder.with_name("tmp-model")
    shutil.rmtree(tmp, ignore_errors=True)
    model.save_pretrained(tmp, state_dict=tensors)
    # It has just been set to the engine's precision, in which others would load these float32 weights.
    model.config.dtype = torch.float32
    model.config.save_pretrained(tmp)
    parts.tokenizer.save_pretrained(tmp)
    embedding_settings(recipe).save(tmp)
    shutil.rmtree(folder, ignore_errors=True)
    tmp.rename(folder)
    write_atomically(Path(recipe.run.output) / "DONE", "")
    log.info("the model is in %s", folder)


def embedding_settings(recipe: Recipe) -> EmbeddingSettings:
    """What goes into barista.json. A size trained on its own is a ladder of one."""
    ladder = recipe.ladder if recipe.single_size is None else Ladder((recipe.single_size,))
    masked = recipe.objective.name == "masked"
    query_prompts, passage_prompts = recipe.prompts
    return EmbeddingSettings(
        pooling=recipe.model.pooling,
        similarity=recipe.objective.similarity,
        ladder=tuple((size.layers, size.dim) for size in ladder),
        query_max_length=recipe.data.max_length if masked else recipe.data.query_max_length,
        passage_max_length=recipe.data.max_length if masked else recipe.data.passage_max_length,
        query_prompt=_common(query_prompts),
        passage_prompt=_common(passage_prompts),
        temperature=recipe.objective.temperature,
    )


def _common(prompts: Sequence[str]) -> str:
    """The prompt that all folders share, or none."""
    return prompts[0] if len(set(prompts)) == 1 else ""
