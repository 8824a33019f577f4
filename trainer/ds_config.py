"""What DeepSpeed is given: the engine configuration of a run, checked and completed from the recipe.

`ds_configs/*.json` own the engine only (ZeRO stage, precision, offload, communication). Batch sizes, accumulation,
clipping, optimizer and schedule belong to the recipe and are refused in the JSON. What `full_ds_config` sets, and why:
- Clipping is always set, because DeepSpeed takes an absent key as 1.0. At stage 0 it is off, and the engine clips.
- The caller accumulates: any number of `backward` calls, then one `step`. Stages 2 and 3 reduce gradients at every
  backward pass unless they are told to coalesce, which works where gradients are float32.
- In bf16 DeepSpeed must be told to look for gradients that are not finite.
- Only matrices whose gradient is float32 and whose state is on the device go to DeepSpeed's Muon (`_check_muon`). At
  stage 3 it needs whole gradients on every rank, so `reduce_scatter` is off there. DeepSpeed clips its steps in place
  of its gradients, except at stages 0 and 1 with bf16, so nothing is clipped at any stage.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.ground.errors import ConfigError
from data.ground.files import refused_by
from trainer.config.load import read_json_object
from trainer.config.schema import Recipe

_OWNED_BY_RECIPE = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.micro_batch_size",
    "managed_gradient_accumulation": "train.micro_batch_size",
    "gradient_clipping": "optim.max_grad_norm",
    "optimizer": "[optim]",
    "scheduler": "[optim]",
    "tensorboard": "[log]",
    "activation_checkpointing": "train.activation_checkpointing",
}


def read_ds_config(path: str | Path) -> dict[str, Any]:
    """Read an engine configuration. Raises ConfigError where it sets what the recipe owns, or what cannot work."""
    path = Path(path)
    values = read_json_object(path, "engine.ds_config", hint="shipped ones are ds_configs/zero{0,1,2,3}.json")
    for key in ("zero_optimization", "bf16", "fp16", "torch_autocast"):
        part = values.get(key, {})
        if not isinstance(part, dict):
            raise ConfigError(f"{path}: {key} = {part!r} must be an object, as in ds_configs/zero1.json")
        if not isinstance(part.get("enabled", False), bool):
            raise ConfigError(f"{path}: {key}.enabled = {part['enabled']!r} must be true or false")
    for key, owner in _OWNED_BY_RECIPE.items():
        if key in values:
            raise ConfigError(f"{path} sets {key!r}, which belongs to the recipe; remove it there and use {owner}")
    stage = values.get("zero_optimization", {}).get("stage", 0)
    if isinstance(stage, float) or stage not in (0, 1, 2, 3):
        raise ConfigError(f"{path}: zero_optimization.stage = {stage!r} must be 0, 1, 2 or 3")
    if stage == 0 and has_bf16_weights(values):
        raise ConfigError(
            f"{path} asks for bf16 at ZeRO stage 0, where DeepSpeed takes a stray optimizer step at start; "
            "use torch_autocast there, or stage 1"
        )
    offload = values.get("zero_optimization", {}).get("offload_optimizer") or {}
    if not isinstance(offload, dict):
        raise ConfigError(
            f"{path}: zero_optimization.offload_optimizer = {offload!r} must be an object, as in "
            "ds_configs/zero3_offload.json"
        )
    if offload.get("device") == "nvme":
        raise ConfigError(f"{path} offloads the optimizer to nvme, which checkpoints cannot read back; offload to cpu")
    if values.get("fp16", {}).get("enabled"):
        raise ConfigError(f"{path} asks for fp16, which these losses do not scale for; use bf16 or torch_autocast")
    return values


class _Asked(dict[str, Any]):
    """A dict that keeps a set of the keys that were asked for. Shallow copies of the dict share this set."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[object] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def checked_ds_config(recipe: Recipe) -> dict[str, Any]:
    """Read the engine configuration of a run, and check it with DeepSpeed's own classes.

    This is done before the run writes anything. Only this function reads the file, so that the run checks, compares
    between ranks, trains with and writes down the same values. DeepSpeed ignores top-level keys that its classes do not
    know, so such keys are refused here.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    path = recipe.engine.ds_config
    ds_config = read_ds_config(path)
    if not recipe.ladder.has_whole_feed_forwards and zero_stage(ds_config) == 3:
        raise ConfigError(
            f"model.ladder has sizes with narrower feed-forwards, which {path}, whose stage 3 divides every weight, "
            "cannot take a part of; use a stage from 0 to 2, or sizes of two numbers"
        )
    if recipe.train.compile and zero_stage(ds_config) == 3:
        raise ConfigError(
            f"train.compile = true does not go with {path}, whose stage 3 fetches weights layer by layer; use a stage "
            "up to 2, or train.compile = false"
        )
    with refused_by("DeepSpeed", f"engine.ds_config {path}", hint="fix that setting", kind=ConfigError):
        values = _Asked(full_ds_config(recipe, ds_config))
        DeepSpeedConfig(values)
    if unknown := sorted(set(ds_config) - values.asked):
        raise ConfigError(
            f"engine.ds_config {path} sets {unknown[0]!r}, which this DeepSpeed does not know; remove it, or fix its "
            "name"
        )
    if recipe.optim.name == "muon":
        _check_muon(path, ds_config)
    return ds_config


def _check_muon(path: str, ds_config: Mapping[str, Any]) -> None:
    """Refuse engines under which DeepSpeed's Muon takes another step, or none (docs/objectives.md has the figures)."""
    sent, summed = ds_config.get("communication_data_type"), ds_config.get("data_types", {}).get("grad_accum_dtype")
    is_float32 = sent in (None, "fp32")
    if has_bf16_weights(ds_config):
        is_float32 = zero_stage(ds_config) != 2 and sent == summed == "fp32"
    if not is_float32:
        raise ConfigError(
            f'optim.name = "muon" does not go with {path}, under which DeepSpeed keeps the momentum in bf16; use '
            "ds_configs/zero1.json or zero3.json"
        )
    if ds_config.get("zero_optimization", {}).get("offload_optimizer"):
        raise ConfigError(
            f'optim.name = "muon" does not go with {path}, which offloads the optimizer: that has not been tried '
            "with a GPU; use a configuration that does not offload, or adamw"
        )


def zero_stage(values: Mapping[str, Any]) -> int:
    return int(values.get("zero_optimization", {}).get("stage", 0))


def takes_weights_of_rank_0(recipe: Recipe, ds_config: Mapping[str, Any]) -> bool:
    """Whether the weights of rank 0 replace those of all other ranks: at stage 3, unless a step is only replayed."""
    return zero_stage(ds_config) == 3 and not recipe.debug.replay


def loads_weights(recipe: Recipe, ds_config: Mapping[str, Any], rank: int) -> bool:
    """Whether this rank must load the weights of the model that trains; others may have it on the meta device."""
    return rank == 0 or not takes_weights_of_rank_0(recipe, ds_config)


def multiplies_in_bf16(values: Mapping[str, Any]) -> bool:
    """Whether matrix products run in bf16, with weights in bf16 or under autocast."""
    return has_bf16_weights(values) or bool(values.get("torch_autocast", {}).get("enabled"))


def has_bf16_weights(values: Mapping[str, Any]) -> bool:
    return bool(values.get("bf16", {}).get("enabled"))


def full_ds_config(recipe: Recipe, values: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON handed to DeepSpeed: engine settings plus what follows from the recipe. It shares nothing with them."""
    stage = zero_stage(values)
    coalesce = stage >= 2 and not has_bf16_weights(values)
    # At stage 0, Engine clips.
    limit = clipping(recipe) if stage > 0 else 0.0
    bf16 = {"bf16": {**values["bf16"], "check_grad_overflow": True}} if has_bf16_weights(values) else {}
    given = copy.deepcopy(dict(values))
    if stage == 3 and recipe.optim.name == "muon":
        given["zero_optimization"]["reduce_scatter"] = False
    return {
        **given,
        **bf16,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": coalesce,
        "gradient_clipping": limit,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def clipping(recipe: Recipe) -> float:
    """The norm that gradients are scaled down to; 0: they are not."""
    return recipe.optim.max_grad_norm if recipe.optim.name == "adamw" else 0.0
