"""What a qualification measures with: the models' shapes, and the recipes that are made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.config.checks import check
from trainer.config.load import build_recipe
from trainer.config.schema import Recipe

SHIPPED = Path(__file__).resolve().parents[2] / "ds_configs"
SEED = 7
TASKS = {"SMAE": "masked", "SRL": "contrastive"}


@dataclass(frozen=True)
class Scale:
    """A BERT, its sizes, and how many texts of which length a step takes."""

    hidden: int
    layers: int
    heads: int
    ladder: tuple[tuple[int, int], ...]
    vocabulary: int
    documents: int  # of a step of SMAE
    pairs: int  # of a step of SRL, each with a hard negative
    length: int  # tokens of the longest text

    @property
    def config(self) -> dict[str, Any]:
        """Without dropout, so that two ways of computing a step have the same result."""
        return {
            "model_type": "bert",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": 4 * self.hidden,
            "max_position_embeddings": max(64, self.length),
            # Larger than BERT's 0.02, with which all texts of an untrained model have nearly the same vector: their
            # differences, from which gradients come, would be mostly rounding.
            "initializer_range": self.hidden**-0.5,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        }


SIX = ((1, 32), (2, 64), (3, 128), (4, 192), (5, 256), (6, 384))
STARBUCKS = ((2, 32), (4, 64), (6, 128), (8, 256), (10, 512), (12, 768))
# Heads are 16 wide, because flash attention takes multiples of 8.
TINY = Scale(64, 3, 4, ((1, 16), (2, 32), (3, 64)), 1000, 12, 12, 32)
QUICK_ON_CPU = Scale(192, 6, 6, ((1, 32), (2, 64), (3, 96), (4, 128), (5, 160), (6, 192)), 2000, 8, 8, 64)
ON_CPU = Scale(384, 6, 6, SIX, 4000, 8, 8, 96)
QUICK_ON_GPU = Scale(384, 6, 6, SIX, 30522, 32, 64, 256)
ON_GPU = Scale(768, 12, 12, STARBUCKS, 30522, 16, 32, 512)


@dataclass(frozen=True)
class Setting:
    """Where and how a process measures. folder: of its own files, seen by all ranks."""

    folder: Path
    quick: bool
    cuda: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.cuda else "cpu")

    @property
    def scale(self) -> Scale:
        """Of measurements on one GPU, or on the CPU."""
        if self.cuda:
            return QUICK_ON_GPU if self.quick else ON_GPU
        return QUICK_ON_CPU if self.quick else ON_CPU

    @property
    def ds_config_in_bf16(self) -> Path:
        """ZeRO stage 0 under autocast."""
        return SHIPPED / "zero0.json"

    @property
    def ds_config_in_float32(self) -> Path:
        return SHIPPED / "zero0_float32.json"


def recipe_values(task: str, scale: Scale, shards: Path, *, ds_config: Path, output: Path, **train: Any) -> Tables:
    """A recipe as tables. task: a key of TASKS. shards: the folder that `made_up.write` has made."""
    masked = task == "SMAE"
    lengths = {"max_length": scale.length}
    if not masked:
        lengths = {"query_max_length": scale.length // 2, "passage_max_length": scale.length, "num_negatives": 1}
    samples = scale.documents if masked else scale.pairs
    sizes = {"global_batch_size": samples, "micro_batch_size": max(1, samples // 2)}
    return {
        "run": {"seed": SEED, "output": str(output)},
        "model": {
            "config": scale.config,
            "ladder": [list(size) for size in scale.ladder],
            "pooling": "cls" if masked else "mean",
        },
        "data": {"shards": [str(shards / ("documents" if masked else "tuples"))], **lengths, "num_workers": 0},
        "objective": {"name": TASKS[task]},
        # The first steps of AdamW with a small eps follow the sign of the gradient alone, which hides a wrong factor
        # and makes whole steps of rounding.
        "optim": {"lr": 0.02, "eps": 1e-2, "schedule": "constant", "warmup_ratio": 0.0, "max_grad_norm": 1.0},
        "train": {"steps": 4, **sizes, **train},
        "engine": {"ds_config": str(ds_config)},
        "log": {"every_steps": 1, "tensorboard": False},
    }


Tables = dict[str, dict[str, Any]]


def recipe_of(values: Mapping[str, Any]) -> Recipe:
    recipe = build_recipe(values)
    check(recipe)
    return recipe


def float32_ds_config(folder: Path, stage: int) -> Path:
    """A ds_config in float32, with thresholds so small that even a tiny model is cut into pieces at every stage."""
    zero: dict[str, Any] = {"stage": stage}
    if stage > 0:
        zero |= {"reduce_bucket_size": 3000, "allgather_bucket_size": 3000}
    if stage == 3:
        zero |= {
            "memory_efficient_linear": False,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 3000,
            "stage3_max_live_parameters": 10000,
            "sub_group_size": 20000,
        }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"float32_zero{stage}.json"
    path.write_text(json.dumps({"zero_optimization": zero}), encoding="utf-8")
    return path
