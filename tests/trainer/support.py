"""The tiny recipe that the trainer's tests start from, with its ds_config, and how tests read it."""

from __future__ import annotations

import copy
import unittest.mock
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from trainer.config.load import load_recipe
from trainer.config.schema import Recipe
from trainer.qualification.settings import float32_ds_config as float32_ds_config
from trainer.qualification.settings import recipe_of as recipe_of

LADDER = [[1, 16], [2, 32], [3, 48]]
MODEL = {
    "model_type": "bert",
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 80,
    # Larger than BERT's, so that gradients are well above the tolerances.
    "initializer_range": 0.15,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
# A large eps keeps AdamW's first steps near proportional to the gradient: its sign alone would hide a wrong factor.
# Clipping acts on the right gradient of most cases and not on half of it, so that it hides no factor either.
STEEP = {"lr": 0.1, "eps": 1e-2, "weight_decay": 0.1, "max_grad_norm": 1.0, "schedule": "constant", "warmup_ratio": 0.0}


def recipe_values(shards: Path | str, **sections: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A tiny recipe as nested tables, of keys that it reads; `sections` are laid over it key by key."""
    objective = {"name": "contrastive", **sections.get("objective", {})}
    lengths: dict[str, Any] = {"max_length": 32}
    if objective["name"] == "contrastive" or objective.get("pairs") == "tuples":
        lengths = {"query_max_length": 16, "passage_max_length": 32}
        lengths |= {"num_negatives": 3} if objective.get("loss") != "cosent" else {}
    values: dict[str, dict[str, Any]] = {
        "run": {"seed": 7},
        "model": {"config": dict(MODEL), "ladder": LADDER},
        "data": {"shards": [str(shards)], **lengths, "num_workers": 0},
        "objective": {"name": "contrastive"},
        "optim": dict(STEEP),
        "train": {"steps": 6, "global_batch_size": 12, "micro_batch_size": 6},
        "log": {"every_steps": 1, "tensorboard": False},
    }
    for section, table in sections.items():
        values[section] = {**values.get(section, {}), **table}
    return values


def with_dropout(values: dict[str, dict[str, Any]], probability: float = 0.1) -> dict[str, dict[str, Any]]:
    changed = copy.deepcopy(values)
    changed["model"]["config"] |= {
        "hidden_dropout_prob": probability,
        "attention_probs_dropout_prob": probability,
    }
    return changed


def loaded(values: Mapping[str, Any], folder: Path) -> Recipe:
    """As a command reads it from a file: a key that is written out where nothing reads it is refused, too."""
    path = folder / "written.toml"
    path.write_text(tomli_w.dumps(dict(values)))
    return load_recipe(path)


def without_fp16_units() -> None:
    """On any CPU, DeepSpeed's Muon multiplies in float32 from here on, as its restatement does."""
    from deepspeed.accelerator import get_accelerator

    unittest.mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda _self: False).start()
