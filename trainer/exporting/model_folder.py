"""The output of a finished run: <run>/model, an ordinary Hugging Face folder with barista.json, and DONE."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from data.ground.files import first_line, write_atomically
from data.ground.whole_folder import written_whole
from data.shards.reader import ShardFolder
from data.tokens import tokenizer_fingerprint
from models.adapters import merged_change, merged_tensors, save_adapter
from models.heads import save_heads
from models.settings import EmbeddingSettings
from models.sizes import Ladder
from trainer.build import ModelParts
from trainer.config.schema import Recipe
from trainer.distributed import gather_objects
from trainer.engine import Engine
from trainer.objectives.prompts import folder_prompts
from trainer.resilience.stopping import NotSaved

log = logging.getLogger(__name__)


def save_model(engine: Engine, parts: ModelParts, recipe: Recipe, settings: EmbeddingSettings) -> None:
    """Write <run>/model, with `settings` as its barista.json, and DONE.

    If an adapter was trained, write <run>/adapter too and merge it into <run>/model. All ranks must call this:
    partitioned parameters are gathered one by one. If the disk is full or cannot be written, every rank raises
    NotSaved, and an earlier model is untouched unless DONE alone could not be written.
    """
    model = parts.saved
    full: dict[int, torch.Tensor] = {}
    for parameter in (*model.parameters(), *parts.encoder.heads.parameters()):
        value = engine.full_parameter(parameter)
        if engine.world.is_main:
            full[id(parameter)] = value.cpu()
    problem = None
    if engine.world.is_main:
        try:
            _write(full, parts, Path(recipe.run.output), settings)
        except Exception as error:
            if not _is_the_disks(error):
                raise
            problem = (
                f"{recipe.run.output}/model cannot be written ({first_line(error)}); training is done and its last "
                "checkpoint is kept: free some space there and go on with --resume auto"
            )
    if (problem := gather_objects(problem)[0]) is not None:
        raise NotSaved(problem)


def _write(full: dict[int, torch.Tensor], parts: ModelParts, output: Path, settings: EmbeddingSettings) -> None:
    """Write the model folder and then DONE. An earlier DONE is removed only when the new folders are complete."""
    model = parts.saved
    tensors = {name: full[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    expected = set(model.state_dict())
    tensors |= {name: value for name, value in model.named_buffers() if name in expected}
    new: dict[str, Path] = {}
    try:
        if parts.adapter is not None:
            new["adapter"] = _empty(output / "tmp-adapter")
            save_adapter(parts.adapter, tensors, new["adapter"])
            _tell_change(*merged_change(model, tensors))
            tensors = merged_tensors(model, tensors)
        new["model"] = tmp = _empty(output / "tmp-model")
        model.save_pretrained(tmp, state_dict=tensors)
        # Saving has set the config to the engine's precision, in which others would load these float32 weights.
        model.config.dtype = torch.float32
        model.config.save_pretrained(tmp)
        heads = {name: full[id(p)] for name, p in parts.encoder.heads.named_parameters()}
        _write_beside(tmp, parts.tokenizer, settings, heads)
    except BaseException:
        for tmp in new.values():
            shutil.rmtree(tmp, ignore_errors=True)
        raise
    (output / "DONE").unlink(missing_ok=True)
    for name, tmp in new.items():
        shutil.rmtree(output / name, ignore_errors=True)
        tmp.rename(output / name)
    write_atomically(output / "DONE", "")
    log.info("the model is in %s", output / "model")


def write_model_folder(
    folder: Path, backbone: PreTrainedModel, tokenizer: Any, settings: EmbeddingSettings, heads: nn.ModuleDict
) -> None:
    """Write a model that no run trained, in the layout of a run's model, whole or not at all."""
    with written_whole(folder) as partial:
        backbone.save_pretrained(partial)
        of_heads = {name: each.detach().float() for name, each in heads.named_parameters()}
        _write_beside(partial, tokenizer, settings, of_heads)


def _write_beside(folder: Path, tokenizer: Any, settings: EmbeddingSettings, heads: Mapping[str, torch.Tensor]) -> None:
    """Write the rest of a model folder: heads, tokenizer, and settings with the tokenizer's fingerprint."""
    save_heads(heads, folder)
    tokenizer.save_pretrained(folder)
    dataclasses.replace(settings, tokenizer=tokenizer_fingerprint(tokenizer)).save(folder)


def _tell_change(count: int, share: float) -> None:
    """Say by how much the adapters change the model: a run whose adapters learn nothing looks like any other."""
    if share:
        log.info("the adapters change %d weights by %.2g of their norm", count, share)
    else:
        log.warning(
            "the adapters change none of their %d weights: the model is what it was; train for longer, or with a "
            "higher optim.lr",
            count,
        )


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def _is_the_disks(error: Exception) -> bool:
    """Whether the disk caused an error; libraries in Rust say so only in the text of their own exceptions."""
    return isinstance(error, OSError) or "(os error" in str(error)


def embedding_settings(recipe: Recipe, sources: Sequence[ShardFolder]) -> EmbeddingSettings:
    """The settings for barista.json. A size that was trained on its own has a ladder of one size."""
    ladder = recipe.ladder if recipe.single_size is None else Ladder((recipe.single_size,))
    alike = recipe.reads_documents  # queries and passages are cut alike
    query_prompts, passage_prompts = folder_prompts(recipe, sources)
    if alike and recipe.is_taught:
        # Documents have no queries, whose prompt stays that of the model which learns.
        start = EmbeddingSettings.load(recipe.model.source) if recipe.model.source else None
        query_prompts = [start.query_prompt if start is not None else ""]
    return EmbeddingSettings(
        pooling=recipe.model.pooling,
        pool_prompt=recipe.pools_prompt,
        direction=recipe.model.direction,
        similarity=recipe.objective.similarity,
        ladder=tuple(size.numbers for size in ladder),
        query_max_length=recipe.data.max_length if alike else recipe.data.query_max_length,
        passage_max_length=recipe.data.max_length if alike else recipe.data.passage_max_length,
        query_prompt=_common(query_prompts),
        passage_prompt=_common(passage_prompts),
        temperature=recipe.objective.temperature,
    )


def _common(prompts: Sequence[str]) -> str:
    """The prompt that all folders share, or an empty text."""
    return prompts[0] if len(set(prompts)) == 1 else ""
