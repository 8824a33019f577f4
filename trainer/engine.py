"""The one place that knows DeepSpeed: a recipe and a ds_config become an engine.

`ds_configs/*.json` own the engine only (ZeRO stage, precision, offload, communication). Batch sizes, accumulation,
clipping, optimizer and schedule belong to the recipe and are refused in the JSON. What is set here and why:
- clipping always explicitly (an absent key means 1.0 to DeepSpeed);
- accumulation is ours: any number of `backward` calls, then one `step`. Stages 2 and 3 reduce gradients at every
  backward unless told to coalesce, which they can where gradients are float32;
- losses are multiplied by the world size, which undoes DeepSpeed's mean over ranks: our losses are already divided by
  the global batch's counts, so gradients must be summed;
- at stage 0 DeepSpeed reports no gradient norm, so clipping is done here, where the norm is seen.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import ConfigError, Recipe
from trainer.distributed import World
from trainer.optim import adamw

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
    """An engine configuration, refused where it sets what the recipe owns."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"engine.ds_config {path} does not exist; shipped ones are ds_configs/zero{{0,1,2,3}}.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"engine.ds_config {path} is not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"engine.ds_config {path} must hold a JSON object, as ds_configs/zero1.json does")
    for key in ("zero_optimization", "bf16", "fp16", "torch_autocast"):
        if not isinstance(values.get(key, {}), dict):
            raise ConfigError(f"{path}: {key} = {values[key]!r} must be an object, as in ds_configs/zero1.json")
    for key, owner in _OWNED_BY_RECIPE.items():
        if key in values:
            raise ConfigError(f"{path} sets {key!r}, which belongs to the recipe; remove it there and use {owner}")
    stage = values.get("zero_optimization", {}).get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"{path}: zero_optimization.stage = {stage!r} must be 0, 1, 2 or 3")
    if stage == 0 and has_bf16_weights(values):
        raise ConfigError(
            f"{path} asks for bf16 at ZeRO stage 0, where DeepSpeed takes a stray optimizer step at start; "
            "use torch_autocast there, or stage 1"
        )
    if values.get("fp16", {}).get("enabled"):
        raise ConfigError(f"{path} asks for fp16, which these losses do not scale for; use bf16 or torch_autocast")
    return values


def zero_stage(values: dict[str, Any]) -> int:
    return int(values.get("zero_optimization", {}).get("stage", 0))


def multiplies_in_bf16(values: dict[str, Any]) -> bool:
    """Whether matrix products run in bf16, with weights in bf16 or under autocast."""
    return has_bf16_weights(values) or bool(values.get("torch_autocast", {}).get("enabled"))


def has_bf16_weights(values: dict[str, Any]) -> bool:
    return bool(values.get("bf16", {}).get("enabled"))


def checkpoint_layout(values: dict[str, Any]) -> dict[str, Any]:
    """What of an engine configuration decides which files a checkpoint has: it can only be read back by the same."""
    return {"ZeRO stage": zero_stage(values), "bf16": has_bf16_weights(values)}


def full_ds_config(recipe: Recipe, values: dict[str, Any]) -> dict[str, Any]:
    """The JSON handed to DeepSpeed: engine settings plus what follows from the recipe."""
    stage = zero_stage(values)
    coalesce = stage >= 2 and not has_bf16_weights(values)
    # Stage 0's clipping is ours, see Engine.
    clipping = recipe.optim.max_grad_norm if stage > 0 else 0.0
    return {
        **values,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": coalesce,
        "gradient_clipping": clipping,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


class Engine:
    """A model under DeepSpeed: forward, backward (any number of times), one step."""

    def __init__(self, module: nn.Module, recipe: Recipe, world: World) -> None:
        import deepspeed

        self.world = world
        self.device = world.device
        self.ds_config = full_ds_config(recipe, read_ds_config(recipe.engine.ds_config))
        self.stage = zero_stage(self.ds_config)
        self._coalesces = bool(self.ds_config["managed_gradient_accumulation"])
        optim = recipe.optim
        optimizer = adamw(
            module,
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
        )
        self._norm_at_stage_0: float | None = None
        if self.stage == 0:
            limit = optim.max_grad_norm if optim.max_grad_norm > 0 else float("inf")

            def clip(inner: torch.optim.Optimizer, *_: Any) -> None:
                parameters = [p for group in inner.param_groups for p in group["params"]]
                self._norm_at_stage_0 = float(nn.utils.clip_grad_norm_(parameters, limit))

            optimizer.register_step_pre_hook(clip)
        rounds = has_bf16_weights(self.ds_config)
        originals = [p.detach().clone() for p in module.parameters()] if rounds else []
        # DeepSpeed prints memory tables at start, whatever its log level.
        with contextlib.redirect_stdout(io.StringIO()):
            self.deepspeed, self.optimizer, _, _ = deepspeed.initialize(
                model=module, optimizer=optimizer, config=self.ds_config, dist_init_required=False
            )
        self.module = module
        # Frozen parameters have no masters; these are what they were before they were rounded.
        self._frozen = {id(p): value for p, value in zip(module.parameters(), originals) if not p.requires_grad}
        self._restore_masters(originals)

    def _restore_masters(self, originals: list[Tensor]) -> None:
        """Give the float32 masters their full values: DeepSpeed copies them from weights it has rounded to bf16."""
        from deepspeed.utils import safe_set_full_fp32_param

        for parameter, original in zip(self.module.parameters(), originals):
            if parameter.requires_grad:
                safe_set_full_fp32_param(parameter, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.deepspeed(*args, **kwargs)

    @contextlib.contextmanager
    def accumulation(self) -> Iterator[None]:
        """Around all backward calls of a step; gradients are reduced once where the stage allows."""
        with self.deepspeed.coalesce_grad_reduction() if self._coalesces else contextlib.nullcontext():
            yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's part of the global loss; parts of all ranks are summed."""
        self.deepspeed.backward(loss * self.world.size, scale_wrt_gas=False)

    def step(self, lr: float) -> float:
        """One optimizer step. Returns the gradient's norm before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.deepspeed.step()
        norm = self._norm_at_stage_0 if self.stage == 0 else self.deepspeed.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    def train(self, mode: bool = True) -> None:
        self.deepspeed.train(mode)

    def full_parameter(self, parameter: nn.Parameter) -> Tensor:
        """A parameter's whole float32 value on every rank. All ranks must call it, in the same order."""
        from deepspeed.utils import safe_get_full_fp32_param

        if not parameter.requires_grad:
            return self._frozen_parameter(parameter)
        if self.stage == 0:
            return parameter.detach().float()
        value = safe_get_full_fp32_param(parameter)
        assert value is not None, "DeepSpeed holds no float32 value of a trained parameter"
        return value.detach().float()

    def _frozen_parameter(self, parameter: nn.Parameter) -> Tensor:
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        if id(parameter) in self._frozen:
            return self._frozen[id(parameter)]
        with GatheredParameters([parameter], enabled=self.stage == 3):
            return parameter.detach().float().clone()

    def save(self, folder: Path, tag: str, state: dict[str, Any]) -> None:
        """Write this rank's part of a checkpoint; committing it is trainer/checkpoint.py's business."""
        self.deepspeed.save_checkpoint(str(folder), tag=tag, client_state={"trainer": state}, save_latest=False)

    def load(self, folder: Path, tag: str) -> dict[str, Any]:
        """Read parameters and optimizer state back; returns what `save` was given."""
        path, client_state = self.deepspeed.load_checkpoint(str(folder), tag=tag)
        assert path is not None, f"DeepSpeed found no checkpoint {tag} in {folder}"
        return client_state["trainer"]
