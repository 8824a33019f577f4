"""Which keys of a recipe a run reads, as one table: key -> the conditions under which it has an effect.

A key that is written out but not read misleads its author, because it changes nothing. So
`trainer.config.load.load_recipe` refuses such a key and says what would make it read. A key that nobody wrote, and that
has its default, is not refused, and neither is one that a base wrote. A run takes the default of every key that it does
not read (`as_read`), so that an inherited value has no effect either. Torch-free, like trainer/config/sections.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from models.choices import MEANS
from models.sizes import ModelError
from trainer.config.presets import WITH_PRESETS
from trainer.config.schema import Recipe
from trainer.config.step_sizes import ALONE, FIXED, NARROWED, SEVERAL, WEIGHTED_BY_LAYERS, StepSizes


@dataclass(frozen=True)
class Condition:
    """`words`: what a recipe must say for the condition to hold."""

    words: str
    holds: Callable[[Recipe], bool]


def _trains(recipe: Recipe, asked: Callable[[StepSizes], bool]) -> bool:
    """What is asked of the sizes of a step. A base may leave a sound ladder to its children; then anything may be."""
    try:
        return asked(recipe.step_sizes)
    except ModelError:
        return True


MASKED = Condition('objective.name = "masked"', lambda recipe: recipe.kind.predicts_tokens)
CONTRASTIVE = Condition('objective.name = "contrastive"', lambda recipe: recipe.kind.contrasts)
EMBEDS = Condition('objective.name = "contrastive" or "distill"', lambda recipe: not recipe.kind.predicts_tokens)
DOCUMENTS = Condition(
    'shards of documents (objective.name = "distill", or "masked" without objective.pairs = "tuples")',
    lambda recipe: recipe.reads_documents,
)
TAUGHT = Condition(
    'a teacher (objective.name = "distill", or teacher.model or a store beside objective.name = "contrastive")',
    lambda recipe: recipe.is_taught,
)
LIVE = Condition('teacher.vectors = "live"', lambda recipe: recipe.teacher.vectors == "live")
STORED = Condition('teacher.vectors = "stored"', lambda recipe: recipe.teacher.vectors == "stored")
SIMILARITIES = Condition("teacher.similarity_weight above 0", lambda recipe: recipe.teacher.similarity_weight > 0)
TUPLES = Condition(
    'shards of tuples (objective.name = "contrastive", or objective.pairs = "tuples" beside masked losses)',
    lambda recipe: not recipe.reads_documents,
)
COMPARISONS = Condition(
    'a contrastive term (objective.name = "contrastive", or objective.pairs beside masked losses)',
    lambda recipe: recipe.kind.contrasts or recipe.pairs != "none",
)
NEGATIVES = Condition(
    'objective.loss = "infonce"',
    lambda recipe: not recipe.kind.contrasts or recipe.objective.loss == "infonce",
)
SCORED = Condition(
    'a contrastive term with objective.loss = "infonce", or a teacher with teacher.similarity_weight or order_weight '
    "above 0",
    lambda recipe: (
        (COMPARISONS.holds(recipe) and NEGATIVES.holds(recipe)) or (recipe.is_taught and recipe.teacher.gathers)
    ),
)
CACHES = Condition(
    'a loss that compares a batch\'s texts (objective.name = "contrastive", or relational weights in [teacher])',
    lambda recipe: recipe.compares_texts,
)
CACHED = Condition('objective.backward = "grad_cache"', lambda recipe: recipe.objective.backward == "grad_cache")
KEPT = Condition("train.activation_checkpointing = false", lambda recipe: not recipe.train.activation_checkpointing)
PAIRS = Condition('objective.pairs = "spans" or "tuples"', lambda recipe: recipe.pairs != "none")
SPANS = Condition('objective.pairs = "spans"', lambda recipe: recipe.pairs == "spans")
DECODER = Condition("objective.decoder = true", lambda recipe: recipe.objective.decoder)
BASIC = Condition('objective.decoding = "basic"', lambda recipe: recipe.objective.decoding == "basic")
PUBLISHED = Condition(
    "objective.name = " + " or ".join(f'"{name}"' for name in WITH_PRESETS),
    lambda recipe: recipe.objective.name in WITH_PRESETS,
)
PRESET = Condition("objective.preset", lambda recipe: bool(recipe.objective.preset))
ONE_SIZE = Condition('objective.sizes = "one"', lambda recipe: recipe.objective.sizes == "one")
SEVERAL_SIZES = Condition(
    "several fixed sizes (objective.sizes = "
    + ", ".join(f'"{kind}"' for kind in SEVERAL)
    + ", with several sizes in model.ladder)",
    lambda recipe: recipe.objective.sizes in SEVERAL and _trains(recipe, lambda sizes: sizes.has_several),
)
FIXED_SIZES = Condition(
    "fixed sizes (objective.sizes = " + ", ".join(f'"{kind}"' for kind in FIXED) + ")",
    lambda recipe: recipe.objective.sizes in FIXED,
)
LOWER_LAYERS = Condition(
    "sizes of fewer layers in model.ladder, without weights of their own (objective.sizes = "
    + ", ".join(f'"{kind}"' for kind in WEIGHTED_BY_LAYERS)
    + ")",
    lambda recipe: recipe.objective.sizes in WEIGHTED_BY_LAYERS and _trains(recipe, lambda sizes: sizes.has_shallower),
)
NARROW_SIZES = Condition(
    "sizes in model.ladder narrower than the full one (objective.sizes = "
    + ", ".join(f'"{kind}"' for kind in NARROWED)
    + ")",
    lambda recipe: recipe.objective.sizes in NARROWED and _trains(recipe, lambda sizes: sizes.has_narrower),
)
COMPRESSION = Condition("objective.compression_weight above 0", lambda recipe: recipe.compresses)
KL_WEIGHT = Condition("objective.kl_weight above 0", lambda recipe: recipe.objective.kl_weight > 0)
KL = Condition('objective.kl other than "none"', lambda recipe: recipe.objective.kl != "none")
SCORES = Condition('objective.kl = "scores" or "margins"', lambda recipe: recipe.objective.kl in ("scores", "margins"))
COORDINATES = Condition('objective.kl = "coordinates"', lambda recipe: recipe.objective.kl == "coordinates")
SMALLER_SIZES = Condition(
    "sizes below the full one (objective.sizes other than "
    + " and ".join(f'"{kind}"' for kind in ALONE)
    + ", and smaller sizes in model.ladder)",
    lambda recipe: recipe.objective.sizes not in ALONE and _trains(recipe, lambda sizes: sizes.has_smaller),
)
STUDENTS = Condition(
    f'{SMALLER_SIZES.words}, or objective.kl_teacher = "guide"',
    lambda recipe: SMALLER_SIZES.holds(recipe) or recipe.guide_teaches,
)
STUDENTS_OR_NO_KL = Condition(
    f'{SMALLER_SIZES.words}, or, for kl = "scores" or "margins", objective.kl_teacher = "guide"',
    lambda recipe: recipe.objective.kl == "none" or STUDENTS.holds(recipe),
)
OWN_TEACHER = Condition('objective.kl_teacher = "full"', lambda recipe: not recipe.guide_teaches)
FILTER = Condition("objective.filter_false_negatives = true", lambda recipe: recipe.objective.filter_false_negatives)
GUIDED = Condition(
    'objective.kl_teacher = "guide" with objective.kl = "scores" or "margins" and a weight above 0, or '
    'objective.filter_false_negatives = true with objective.filter_by = "guide" and objective.loss = "infonce"',
    lambda recipe: recipe.guide_filters or recipe.guide_teaches,
)
TAUGHT_BY_GUIDE = Condition('objective.kl_teacher = "guide"', lambda recipe: recipe.guide_teaches)
LAYERS = Condition('an encoder with layers (not model_type = "static")', lambda recipe: not recipe.is_static)
LAYERS_OR_LIVE = Condition(
    f'{LAYERS.words}, a guide without guide.store, or a teacher with teacher.vectors = "live"',
    lambda recipe: (
        LAYERS.holds(recipe)
        or (GUIDED.holds(recipe) and not recipe.guide.store)
        or (TAUGHT.holds(recipe) and LIVE.holds(recipe))
    ),
)
MEAN = Condition(
    "model.pooling = " + " or ".join(f'"{kind}"' for kind in MEANS), lambda recipe: recipe.model.pooling in MEANS
)
ADAPTERS = Condition("model.lora_rank above 0", lambda recipe: recipe.model.lora_rank > 0)
ADAMW = Condition('optim.name = "adamw"', lambda recipe: recipe.optim.name == "adamw")
MUON = Condition('optim.name = "muon"', lambda recipe: recipe.optim.name == "muon")
NO_WEIGHTS = Condition("no data.weights", lambda recipe: not recipe.data.weights)
HARD_NEGATIVES = Condition("data.num_negatives above 0", lambda recipe: recipe.data.num_negatives > 0)
CACHE = Condition(
    'data.verify = "first_read" or remote folders in data.shards',
    lambda recipe: recipe.data.verify == "first_read" or any("://" in folder for folder in recipe.data.shards),
)
REMOTE = Condition("remote folders in data.shards", lambda recipe: any("://" in f for f in recipe.data.shards))
EPOCHS = Condition("train.steps = 0", lambda recipe: recipe.train.steps == 0)
TASKS = Condition(
    "evaluation.sts or evaluation.beir", lambda recipe: bool(recipe.evaluation.sts or recipe.evaluation.beir)
)
BEIR = Condition("evaluation.beir", lambda recipe: bool(recipe.evaluation.beir))

# Such an objective lists the key among its `own_keys`.
OWN = Condition("an objective of another package that reads it", lambda recipe: False)

ALWAYS: tuple[Condition, ...] = ()

# Every key of every section. All conditions of a key must hold for it to be read.
READ_WHEN: Mapping[str, tuple[Condition, ...]] = {
    "run.output": ALWAYS,
    "run.seed": ALWAYS,
    "run.resume": ALWAYS,
    "model.source": ALWAYS,
    "model.config": ALWAYS,
    "model.pooling": ALWAYS,
    "model.pool_prompt": (MEAN, LAYERS),
    "model.direction": (LAYERS,),
    "model.attention": (LAYERS,),
    "model.ladder": ALWAYS,
    "model.trains": (EMBEDS, LAYERS),
    "model.dropout": (LAYERS,),
    "model.output_dim": ALWAYS,
    "model.frozen_layers": (LAYERS,),
    "model.lora_rank": (EMBEDS, LAYERS),
    "model.lora_alpha": (EMBEDS, LAYERS, ADAPTERS),
    "model.lora_dropout": (EMBEDS, LAYERS, ADAPTERS),
    "model.lora_targets": (EMBEDS, LAYERS, ADAPTERS),
    "data.shards": ALWAYS,
    "data.weights": ALWAYS,
    "data.mixture_temperature": (NO_WEIGHTS,),
    "data.batches": ALWAYS,
    "data.no_duplicates": (EMBEDS, TUPLES),
    "data.max_length": (DOCUMENTS,),
    "data.query_max_length": (TUPLES,),
    "data.passage_max_length": (TUPLES,),
    "data.query_prompts": (EMBEDS, TUPLES),
    "data.passage_prompts": (EMBEDS,),
    "data.num_positives": (TUPLES, NEGATIVES),
    "data.num_negatives": (TUPLES, NEGATIVES),
    "data.negatives_from": (TUPLES, NEGATIVES, HARD_NEGATIVES),
    "data.num_workers": ALWAYS,
    "data.shuffle": ALWAYS,
    "data.cache_dir": (CACHE,),
    "data.cache_gib": (REMOTE,),
    "data.verify": ALWAYS,
    "data.bad_shards": ALWAYS,
    "objective.name": ALWAYS,
    "objective.own": (OWN,),
    "objective.sizes": ALWAYS,
    "objective.size": (ONE_SIZE,),
    "objective.preset": (PUBLISHED,),
    "objective.preset_for": (CONTRASTIVE, PRESET),
    "objective.reduction": (SEVERAL_SIZES,),
    "objective.layer_weighting": (LAYERS, LOWER_LAYERS),
    "objective.size_weights": (FIXED_SIZES,),
    "objective.encoder_mask_ratio": (MASKED,),
    "objective.decoder_mask_ratio": (MASKED, DECODER),
    "objective.decoder": (MASKED,),
    "objective.decoding": (MASKED, DECODER),
    "objective.bottleneck": (MASKED, DECODER),
    "objective.nested_masks": (MASKED, DECODER, BASIC),
    "objective.pairs": (MASKED,),
    "objective.symmetric_spans": (MASKED, SPANS),
    "objective.pair_weight": (MASKED, PAIRS),
    "objective.loss_scale": (MASKED,),
    "objective.loss": (CONTRASTIVE,),
    "objective.similarity": ALWAYS,  # also by retrieval with the model
    "objective.temperature": (COMPARISONS,),
    "objective.kl": (CONTRASTIVE, STUDENTS_OR_NO_KL),
    "objective.kl_weight": (CONTRASTIVE, KL, STUDENTS),
    "objective.kl_teacher": (CONTRASTIVE, SCORES, KL_WEIGHT, STUDENTS),
    "objective.kl_size_weights": (CONTRASTIVE, KL, KL_WEIGHT, FIXED_SIZES, STUDENTS),
    "objective.kl_temperature": (CONTRASTIVE, COORDINATES, KL_WEIGHT, SMALLER_SIZES),
    "objective.detach_teacher": (CONTRASTIVE, KL, KL_WEIGHT, OWN_TEACHER, SMALLER_SIZES),
    "objective.asymmetric_weight": (CONTRASTIVE, NEGATIVES, LAYERS, SMALLER_SIZES),
    "objective.spread_weight": (COMPARISONS,),
    "objective.compression_weight": (CONTRASTIVE, NARROW_SIZES),
    "objective.compression_temperature": (CONTRASTIVE, NARROW_SIZES, COMPRESSION),
    "objective.negatives": (COMPARISONS, NEGATIVES),
    "objective.hardness": (TUPLES, NEGATIVES, HARD_NEGATIVES),
    "objective.mask_false_negatives": (COMPARISONS, NEGATIVES),
    "objective.filter_false_negatives": (COMPARISONS, NEGATIVES),
    "objective.filter_by": (COMPARISONS, NEGATIVES, FILTER),
    "objective.false_negative_margin": (COMPARISONS, NEGATIVES, FILTER),
    "objective.backward": (EMBEDS, CACHES, LAYERS),
    "guide.model": (COMPARISONS, GUIDED),
    "guide.store": (COMPARISONS, GUIDED),
    "guide.pooling": (COMPARISONS, GUIDED),
    "guide.temperature": (CONTRASTIVE, SCORES, KL_WEIGHT, TAUGHT_BY_GUIDE),
    "teacher.model": (EMBEDS,),
    "teacher.pooling": (TAUGHT,),
    "teacher.vectors": (TAUGHT,),
    "teacher.store": (EMBEDS, STORED),
    "teacher.vector_weight": (TAUGHT,),
    "teacher.similarity_weight": (TAUGHT,),
    "teacher.gram_weight": (TAUGHT,),
    "teacher.order_weight": (TAUGHT,),
    "teacher.temperature": (TAUGHT, SIMILARITIES),
    "teacher.balance": (TAUGHT, CONTRASTIVE),
    "optim.name": ALWAYS,
    "optim.lr": ALWAYS,
    "optim.muon_lr": (MUON,),
    "optim.muon_momentum": (MUON,),
    "optim.weight_decay": ALWAYS,
    "optim.beta1": ALWAYS,
    "optim.beta2": ALWAYS,
    "optim.eps": ALWAYS,
    "optim.schedule": ALWAYS,
    "optim.warmup_ratio": ALWAYS,
    "optim.max_grad_norm": (ADAMW,),
    "train.steps": ALWAYS,
    "train.epochs": (EPOCHS,),
    "train.stop_at_step": ALWAYS,
    "train.stop_after_minutes": ALWAYS,
    "train.hang_seconds": ALWAYS,
    "train.max_skipped_steps": ALWAYS,
    "train.global_batch_size": ALWAYS,
    "train.micro_batch_size": (LAYERS_OR_LIVE,),
    "train.activation_memory_mib": (EMBEDS, CACHES, LAYERS, CACHED, KEPT),
    "train.activation_checkpointing": (LAYERS,),
    "train.compile": (LAYERS,),
    "train.logits_memory_mib": (MASKED,),
    "train.score_memory_mib": (SCORED,),
    "train.negatives_exchange": (COMPARISONS, NEGATIVES),
    "engine.ds_config": ALWAYS,
    "checkpoint.every_steps": ALWAYS,
    "checkpoint.keep": ALWAYS,
    "checkpoint.keep_every_steps": ALWAYS,
    "checkpoint.overlap": ALWAYS,
    "log.every_steps": ALWAYS,
    "log.tensorboard": ALWAYS,
    "log.wandb": ALWAYS,
    "log.mlflow": ALWAYS,
    "log.spike_deviations": ALWAYS,
    "log.samples": ALWAYS,
    "evaluation.every_steps": (TASKS,),
    "evaluation.sts": ALWAYS,
    "evaluation.beir": ALWAYS,
    "evaluation.split": (BEIR,),
    "evaluation.max_documents": (BEIR,),
    "evaluation.grid": (TASKS,),
    "debug.replay": ALWAYS,
}


def is_read(recipe: Recipe, key: str) -> bool:
    """Whether a run of this recipe reads `section.key`."""
    return key in recipe.kind.own_keys or all(condition.holds(recipe) for condition in READ_WHEN[key])


def as_read(recipe: Recipe) -> Recipe:
    """The recipe as its run reads it: every key that nothing reads has its default."""
    defaults = vars(Recipe())
    sections = {}
    for section, table in vars(recipe).items():
        unread = {
            name: value for name, value in vars(defaults[section]).items() if not is_read(recipe, f"{section}.{name}")
        }
        sections[section] = replace(table, **unread)
    return replace(recipe, **sections)


def why_unread(recipe: Recipe, key: str, value: Any) -> str:
    """One sentence about a key that is written out and not read: its value, and what would make it read."""
    missing = " and ".join(condition.words for condition in READ_WHEN[key] if not condition.holds(recipe))
    written = json.dumps(value, ensure_ascii=False)
    return f"{key} = {written} is read by nothing in this run, which would take {missing}; set that, or remove the key"


def says_nothing(value: Any, default: Any) -> bool:
    """Whether a written value only repeats a default that means "off", which is true of any run."""
    return value == default and (not value or value == "none")
