"""Recipes: what a run is, in one place, checked before any device work.

A recipe is a TOML file with the sections below. Values come from the defaults here, then from what `objective.preset`
stands for (trainer/presets.py), then from the recipe's `base` (a file beside it), then the recipe, then the command
line (`--section.key=value`). Unknown keys, wrong types, impossible combinations, and keys that are written out and read
by nothing (trainer/read_keys.py), are refused with one sentence naming the key, its value and what would be right.
Torch-free, because login nodes check and submit recipes without a GPU stack.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from data.errors import UserError
from data.files import is_unicode, reading
from data.secrets import HIDDEN, without_secrets
from models.sizes import Ladder, ModelError, Size
from trainer.presets import PRESETS, PRESETS_FOR, preset_settings
from trainer.read_keys import is_read, says_nothing, why_unread

LOCK = "lock"  # in a run's folder: held by the run that writes there (trainer/run_lock.py)
# What a run that was killed in its first moment leaves in its folder.
BEGUN = (LOCK, "recipe.toml.tmp")
PROBE = ".probe-"  # begins the name of a file that is there for a moment, to see whether the folder can be written


def is_begun(name: str) -> bool:
    """Whether a file in a run's folder may be of a run that was killed in its first moment."""
    return name in BEGUN or name.startswith(PROBE)


class ConfigError(UserError):
    """A user's mistake in a recipe or on the command line: one sentence that names the thing and the mend."""


@dataclass(frozen=True)
class RunConfig:
    output: str = "runs/run"  # the run's folder
    seed: int = 42
    resume: str = "never"  # never: refuse a folder that holds a run | auto: go on if there is a checkpoint | required


@dataclass(frozen=True)
class ModelConfig:
    source: str = ""  # folder or hub name of a Hugging Face encoder; empty: from scratch by `config`
    config: dict[str, Any] = field(default_factory=dict)  # model_type and that family's own keys
    pooling: str = "cls"  # cls | mean
    attention: str = "auto"  # auto | eager | sdpa | flash_attention_2 | packed (no padding, see docs/performance.md)
    ladder: list[list[int]] = field(
        default_factory=lambda: [[2, 32], [4, 64], [6, 128], [8, 256], [10, 512], [12, 768]]
    )
    trains: str = "all"  # all | heads: the linear maps of each depth alone, so that a depth without one stays as it is
    dropout: float = -1.0  # every dropout probability of the encoder; below 0: as its config says
    output_dim: int = 0  # a reduced-dimension model: the ladder ends at so many dimensions; 0: at the encoder's own
    frozen_layers: int = 0  # k > 0: the embeddings and the first k layers do not train
    lora_rank: int = 0  # 0: the weights train; above: adapters of this rank alone (contrastive; needs peft)
    lora_alpha: float = 16.0  # an adapter's product is multiplied by lora_alpha / lora_rank
    lora_dropout: float = 0.0
    lora_targets: list[str] = field(default_factory=list)  # names of linear layers: "query"; empty: all of the blocks


@dataclass(frozen=True)
class DataConfig:
    shards: list[str] = field(default_factory=list)  # folders written by data.prepare
    weights: list[float] = field(default_factory=list)  # of each folder in the mixture; empty: by its sample count
    mixture_temperature: float = 1.0  # without weights: shares ∝ samples^(1/this); 1: by samples, large: all alike
    batches: str = "mixed"  # mixed | one_dataset: every global batch is of one folder, the folders in turn
    no_duplicates: bool = False  # no text twice in a global batch: samples change places with nearby batches
    max_length: int = 512  # tokens of a pre-training text, special tokens included
    query_max_length: int = 64  # of a query, its prompt and special tokens included
    passage_max_length: int = 256
    query_prompts: list[str] = field(default_factory=list)  # before the text: none, one for all folders, or one each
    passage_prompts: list[str] = field(default_factory=list)
    num_negatives: int = 0  # hard negatives a query, drawn from those in the shards
    negatives_from: list[float] = field(default_factory=list)  # share of training at which each joins; empty: at once
    num_workers: int = 1  # loader processes a rank
    shuffle: bool = True
    cache_dir: str = ""  # where remote shards and marks of verified ones are kept; empty: in the temporary folder
    cache_gib: float = 32.0  # of remote shards on this machine; those used longest ago make room
    verify: str = "first_read"  # first_read: hash a shard once a machine, when it is first read | size
    bad_shards: str = "refuse"  # refuse | skip: other samples take the places of those of a missing or damaged shard


@dataclass(frozen=True)
class ObjectiveConfig:
    name: str = ""  # masked | contrastive | distill
    # ladder | grid (each depth of the ladder with each width) | full | one | mrl | adaptive_layers | two_d |
    # two_d_listed | two_d_all_widths
    sizes: str = "ladder"
    size: str = ""  # for sizes = "one": LAYERSxDIM; the encoder is cut to its layers
    preset: str = ""  # paper | released-code: sets what the recipe does not write out, by trainer/presets.py
    preset_for: str = ""  # which fine-tuning the preset is of: retrieval | sts; empty for masked
    reduction: str = "mean"  # over sizes: mean | sum
    size_weights: list[float] = field(default_factory=list)  # of each size's loss, times 1/|S| or 1; empty: 1 each
    # masked
    encoder_mask_ratio: float = 0.2
    decoder_mask_ratio: float = 0.4  # enhanced decoding: of the other tokens, what each position does not see
    decoder: bool = True  # False: MLM at each size, no autoencoder
    decoding: str = "basic"  # basic | enhanced: every token, each from its own sample of the others (RetroMAE)
    bottleneck: str = "head"  # at the decoder's position 0: head(CLS) as in SMAE | cls: itself, as in RetroMAE
    nested_masks: bool = True  # the encoder's masked words are a subset of the decoder's
    pairs: str = "none"  # none | spans | tuples: a contrastive term too, of two spans a document or of tuples' texts
    symmetric_spans: bool = False  # pairs = "spans": each span a query once, against all others (coCondenser)
    pair_weight: float = 1.0  # of that term; its similarity and temperature are those below
    loss_scale: float = 1.0  # the paper's released code halves L_enc + L_dec: 0.5
    # contrastive
    loss: str = "infonce"  # infonce | cosent
    similarity: str = "cosine"  # dot | cosine
    temperature: float = 0.05
    kl: str = "scores"  # scores | coordinates | margins (MarginMSE on hard negatives) | none
    kl_weight: float = 1.0
    kl_teacher: str = "full"  # full | guide: whose scores are learnt; the guide's by every size, the full one too
    kl_size_weights: list[float] = field(default_factory=list)  # of each student's KL; the full size may be the teacher
    kl_temperature: float = 1.0  # kl = "coordinates": divides the coordinates
    detach_teacher: bool = True
    mask_false_negatives: bool = True  # passages that are known not to be negatives of a query are left out for it
    filter_false_negatives: bool = False  # and those that score above its positive less the margin
    filter_by: str = "full"  # full | guide: whose scores; the full size's, or those of [guide]
    false_negative_margin: float = 0.0  # in units of that similarity; below 0 spares fewer passages
    backward: str = "grad_cache"  # grad_cache | direct


@dataclass(frozen=True)
class GuideConfig:
    model: str = ""  # folder or hub name of a frozen encoder, with the shards' tokenizer, that filters or teaches
    pooling: str = ""  # cls | mean; empty: its barista.json's
    temperature: float = 0.0  # divides its scores where it teaches; 0: its barista.json's


@dataclass(frozen=True)
class TeacherConfig:
    model: str = ""  # folder or hub name of a frozen encoder whose vectors are learnt; empty: model.source, as it is
    pooling: str = ""  # cls | mean; empty: what its folder says
    vectors: str = "live"  # live: a forward pass of it a step | stored: read from `store`, any model's
    store: str = ""  # folder written by trainer.teacher_vectors
    vector_weight: float = 1.0  # multiplies 1 minus the cosine to the teacher's vector, cut to the size's width
    similarity_weight: float = 0.0  # multiplies the KL of the similarities within the global batch
    gram_weight: float = 0.0  # multiplies the squared error of the similarities within the global batch
    order_weight: float = 0.0  # multiplies the loss of their order, by triples of the global batch's texts
    temperature: float = 0.05  # divides similarities in the KL

    @property
    def terms(self) -> dict[str, float]:
        """Each term's weight by its name; nothing is computed of a term whose weight is 0."""
        kinds = ("vector", "similarity", "gram", "order")
        return {kind: getattr(self, f"{kind}_weight") for kind in kinds}

    @property
    def compares_texts(self) -> bool:
        """Whether a text's gradient depends on the batch's other texts."""
        return any(weight for kind, weight in self.terms.items() if kind != "vector")

    @property
    def gathers(self) -> bool:
        """Whether every rank needs all texts' vectors; Gram matrices are compared through sums over ranks."""
        return bool(self.similarity_weight or self.order_weight)


@dataclass(frozen=True)
class OptimConfig:
    lr: float = 1e-4
    weight_decay: float = 0.01  # not on biases and norms
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    schedule: str = "linear"  # linear | cosine | constant
    warmup_ratio: float = 0.1  # of all steps
    max_grad_norm: float = 1.0  # 0: no clipping


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 0  # optimizer steps; 0: by epochs
    epochs: float = 1.0
    stop_at_step: int = 0  # end this process early, with a checkpoint, the schedule still set by steps; 0: do not
    stop_after_minutes: float = 0.0  # of this process: finish the step, save, exit with code 75; 0: do not
    hang_seconds: float = 45.0  # without progress of any rank, at least three of the longest pauses: give up; 0: never
    max_skipped_steps: int = 5  # in a row with a loss or gradient that is not finite, then give up
    global_batch_size: int = 128
    micro_batch_size: int = 32  # texts of the longest length a micro-batch, per rank; of shorter ones more fit
    activation_checkpointing: bool = False
    compile: bool = False  # torch.compile of the encoder: minutes at start, pays on long runs; not with ZeRO stage 3
    logits_memory_mib: float = 64.0  # the largest block of vocabulary logits held at once
    score_memory_mib: float = 256.0  # the largest block of query-passage scores held at once


@dataclass(frozen=True)
class EngineConfig:
    ds_config: str = "ds_configs/zero1.json"


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 1000
    keep: int = 2  # the newest ones
    keep_every_steps: int = 0  # and those of these steps for good; 0: none
    overlap: bool = True  # write a copy in host memory while training goes on: 12 bytes a parameter, over all ranks


@dataclass(frozen=True)
class LogConfig:
    every_steps: int = 10
    tensorboard: bool = True
    wandb: bool = False  # Weights & Biases; needs the package wandb
    mlflow: bool = False  # needs the package mlflow, and the server's address in MLFLOW_TRACKING_URI
    spike_deviations: float = 6.0  # a loss so many deviations above the running mean is flagged; 0: none
    samples: bool = False  # write down which samples each step was of, in samples/rank_*.jsonl


@dataclass(frozen=True)
class EvaluationConfig:
    every_steps: int = 0  # 0: never during training
    sts: list[str] = field(default_factory=list)  # STS files
    beir: list[str] = field(default_factory=list)  # BEIR folders
    split: str = "test"
    max_documents: int = 0  # of a BEIR corpus, the judged ones always among them; 0: all
    grid: bool = False  # during training: every pair of the ladder's layers and dimensions, for the heat map


@dataclass(frozen=True)
class DebugConfig:
    replay: int = 0  # look at this step of the run in run.output again, in float32, instead of training; 0: train


@dataclass(frozen=True)
class Recipe:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    guide: GuideConfig = field(default_factory=GuideConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def ladder(self) -> Ladder:
        return Ladder.of(self.model.ladder)

    @property
    def reads_documents(self) -> bool:
        """Whether its shards hold documents; else they hold tuples."""
        name = self.objective.name
        return name == "distill" or (name == "masked" and self.objective.pairs != "tuples")

    @property
    def is_static(self) -> bool:
        """Whether a token table is trained from scratch. One that is read from a folder shows only when it is read."""
        return self.model.config.get("model_type") == "static"

    @property
    def pairs(self) -> str:
        """The kind of pairs beside masked losses, "none" where there are none."""
        return self.objective.pairs if self.objective.name == "masked" else "none"

    @property
    def decodes_enhanced(self) -> bool:
        """Whether there is a decoder that predicts every token."""
        objective = self.objective
        return objective.name == "masked" and objective.decoder and objective.decoding == "enhanced"

    @property
    def adapter_rank(self) -> int:
        """0: the weights train."""
        return self.model.lora_rank if self.objective.name != "masked" else 0

    @property
    def prompts(self) -> tuple[list[str], list[str]]:
        """Before queries and before passages: none, one for all folders, or one each; none in pre-training."""
        name, data = self.objective.name, self.data
        return data.query_prompts if name != "masked" else [], data.passage_prompts if name != "masked" else []

    @property
    def guide_filters(self) -> bool:
        """Whether the guide says what is no negative."""
        objective = self.objective
        negatives = objective.loss == "infonce" if objective.name == "contrastive" else self.pairs != "none"
        return negatives and objective.filter_false_negatives and objective.filter_by == "guide"

    @property
    def guide_teaches(self) -> bool:
        """Whether every size learns the guide's scores."""
        objective = self.objective
        learns = objective.name == "contrastive" and objective.kl in ("scores", "margins")
        return learns and objective.kl_teacher == "guide"

    @property
    def uses_guide(self) -> bool:
        return self.guide_filters or self.guide_teaches

    @property
    def is_taught(self) -> bool:
        """Whether a teacher's vectors are learnt, alone or beside a contrastive loss."""
        objective = self.objective
        return objective.name == "distill" or (
            objective.name == "contrastive" and bool(self.teacher.model or self.teacher.store)
        )

    @property
    def compares_texts(self) -> bool:
        """Whether a text's gradient depends on the other texts of its batch."""
        name = self.objective.name
        return name == "contrastive" or (name == "distill" and self.teacher.compares_texts)

    @property
    def single_size(self) -> Size | None:
        """The size that is trained on its own, for objective.sizes = "one"."""
        return Size.parse(self.objective.size) if self.objective.sizes == "one" else None


_MOST_BASES = 32
# objective.name -> the command `python -m trainer.…` that trains it.
COMMANDS = {"masked": "pretrain", "contrastive": "finetune", "distill": "distill"}
DRAWN_SIZES = ("two_d", "two_d_listed", "two_d_all_widths")  # objective.sizes that draw sizes each step

_CHOICES = {
    "run.resume": ("never", "auto", "required"),
    "model.pooling": ("cls", "mean"),
    "model.trains": ("all", "heads"),
    "model.attention": ("auto", "eager", "sdpa", "flash_attention_2", "packed"),
    "data.batches": ("mixed", "one_dataset"),
    "data.verify": ("first_read", "size"),
    "data.bad_shards": ("refuse", "skip"),
    "objective.name": tuple(COMMANDS),
    "objective.sizes": ("ladder", "grid", "full", "one", "mrl", "adaptive_layers", *DRAWN_SIZES),
    "objective.preset": ("", *PRESETS),
    "objective.preset_for": ("", *PRESETS_FOR),
    "objective.decoding": ("basic", "enhanced"),
    "objective.bottleneck": ("head", "cls"),
    "objective.pairs": ("none", "spans", "tuples"),
    "objective.reduction": ("mean", "sum"),
    "objective.loss": ("infonce", "cosent"),
    "objective.similarity": ("dot", "cosine"),
    "objective.kl": ("scores", "coordinates", "margins", "none"),
    "objective.kl_teacher": ("full", "guide"),
    "objective.filter_by": ("full", "guide"),
    "guide.pooling": ("", "cls", "mean"),
    "teacher.pooling": ("", "cls", "mean"),
    "teacher.vectors": ("live", "stored"),
    "objective.backward": ("grad_cache", "direct"),
    "optim.schedule": ("linear", "cosine", "constant"),
}
LEAST_LENGTH = 4  # tokens of a text, special ones included
_AT_LEAST = {
    "run.seed": 0,
    "model.output_dim": 0,
    "model.frozen_layers": 0,
    "model.lora_rank": 0,
    "data.mixture_temperature": 1,
    "data.max_length": LEAST_LENGTH,
    "data.query_max_length": LEAST_LENGTH,
    "data.passage_max_length": LEAST_LENGTH,
    "data.num_negatives": 0,
    "data.num_workers": 0,
    "train.steps": 0,
    "train.stop_at_step": 0,
    "train.stop_after_minutes": 0,
    "train.hang_seconds": 0,
    "train.max_skipped_steps": 1,
    "log.spike_deviations": 0,
    "debug.replay": 0,
    "train.global_batch_size": 1,
    "train.micro_batch_size": 1,
    "checkpoint.every_steps": 1,
    "checkpoint.keep": 1,
    "checkpoint.keep_every_steps": 0,
    "log.every_steps": 1,
    "evaluation.every_steps": 0,
    "evaluation.max_documents": 0,
    "optim.weight_decay": 0,
    "optim.max_grad_norm": 0,
    "objective.kl_weight": 0,
    "guide.temperature": 0,
    "teacher.vector_weight": 0,
    "teacher.similarity_weight": 0,
    "teacher.gram_weight": 0,
    "teacher.order_weight": 0,
}
_ABOVE_ZERO = (
    "model.lora_alpha",
    "data.cache_gib",
    "optim.lr",
    "optim.eps",
    "objective.temperature",
    "objective.kl_temperature",
    "objective.loss_scale",
    "objective.pair_weight",
    "train.logits_memory_mib",
    "train.score_memory_mib",
)
_STEPS = 10**12
# Far beyond what makes sense, and within what 64-bit counts, float32 and a machine's memory take.
_AT_MOST: dict[str, float] = {
    "run.seed": 2**64 - 1,
    "model.output_dim": 2**20,
    "model.frozen_layers": 2**16,
    "model.lora_rank": 2**16,
    "model.lora_alpha": 1e6,
    "data.mixture_temperature": 1e9,
    "data.max_length": 2**24,
    "data.query_max_length": 2**24,
    "data.passage_max_length": 2**24,
    "data.num_negatives": 2**16,
    "data.num_workers": 1024,
    "data.cache_gib": 2**30,
    "objective.pair_weight": 1e6,
    "objective.loss_scale": 1e6,
    "objective.temperature": 1e6,
    "objective.kl_weight": 1e6,
    "objective.kl_temperature": 1e6,
    "objective.false_negative_margin": 1e6,
    "guide.temperature": 1e6,
    "model.dropout": 0.99,
    "teacher.vector_weight": 1e6,
    "teacher.similarity_weight": 1e6,
    "teacher.gram_weight": 1e6,
    "teacher.order_weight": 1e6,
    "teacher.temperature": 1e6,
    "optim.lr": 1e6,
    "optim.weight_decay": 1e6,
    "optim.eps": 1e6,
    "optim.max_grad_norm": 1e30,
    "train.steps": _STEPS,
    "train.epochs": 1e9,
    "train.stop_at_step": _STEPS,
    "train.stop_after_minutes": 1e9,
    "train.hang_seconds": 1e9,
    "train.max_skipped_steps": _STEPS,
    "train.global_batch_size": 2**24,
    "train.micro_batch_size": 2**24,
    "checkpoint.every_steps": _STEPS,
    "checkpoint.keep": _STEPS,
    "checkpoint.keep_every_steps": _STEPS,
    "log.every_steps": _STEPS,
    "log.spike_deviations": 1e9,
    "evaluation.every_steps": _STEPS,
    "evaluation.max_documents": _STEPS,
    "debug.replay": _STEPS,
}
# What divides, and must not become 0 in float32.
_SMALLEST = {"objective.temperature": 1e-6, "objective.kl_temperature": 1e-6, "teacher.temperature": 1e-6}
_SHARES = ("objective.encoder_mask_ratio", "objective.decoder_mask_ratio")  # in (0, 1)
# Folders and files, which may be addresses. What texts and models are made of is never changed for showing it.
_PLACES = (
    "run.output",
    "model.source",
    "guide.model",
    "teacher.model",
    "teacher.store",
    "data.shards",
    "data.cache_dir",
    "engine.ds_config",
    "evaluation.sts",
    "evaluation.beir",
)
_UNIT = ("model.lora_dropout", "optim.warmup_ratio", "optim.beta1", "optim.beta2")  # in [0, 1)


def load_recipe(path: str | Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """Defaults, then the file and its bases, then `section.key=value` strings; checked.

    Raises ConfigError for whatever is not right.
    """
    layers = _layers(Path(path)) if path is not None else []
    given: dict[str, dict[str, Any]] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not is_unicode(override):
            raise ConfigError(f"{ascii(key)[1:-1]} {text!a} is not UTF-8; use a name that is")
        section, dot, name = key.partition(".")
        if not (equals and dot and name):
            raise ConfigError(f"{override!r} is not of the form --section.key=value")
        hint = _field_type(section, name)
        given.setdefault(section, {})[name] = _parse(key, text, hint)
    layers.append(given)
    recipe = build_recipe(_merged(layers))
    check(recipe)
    _refuse_unread(layers, recipe)
    return recipe


def parse_toml(path: Path, what: str, *, hint: str) -> dict[str, Any]:
    """A TOML file's values. `what` it is and a `hint` to where such files are, for the sentence if there is none."""
    text = _text_of(path, what, hint=hint)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{what} {path} is nested too deep; write it flatter") from None
    except ValueError as error:  # digits beyond what Python converts, too
        raise ConfigError(f"{what} {path} is not valid TOML ({error}); mend that line") from None


def parse_json(path: Path, what: str, *, hint: str) -> dict[str, Any]:
    """A JSON file's object. `what` it is and a `hint` to a right one, for the sentence if there is none."""
    text = _text_of(path, what, hint=hint)
    try:
        values = json.loads(text)
    except RecursionError:
        raise ConfigError(f"{what} {path} is nested too deep; {hint}") from None
    except ValueError as error:
        raise ConfigError(f"{what} {path} is not valid JSON ({error}); {hint}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{what} {path} holds no JSON object; {hint}")
    return values


def _text_of(path: Path, what: str, *, hint: str) -> str:
    with reading(path, what=what, mend=hint):
        if not path.is_file():
            raise ConfigError(f"{what} {path} does not exist; {hint}")
        return path.read_text(encoding="utf-8")


def read_toml(path: Path) -> dict[str, dict[str, Any]]:
    """A recipe file merged over its `base`, which is named relative to it."""
    return _merged(_layers(path))


def _layers(path: Path, _seen: tuple[Path, ...] = ()) -> list[dict[str, Any]]:
    """What a recipe file and its bases write, the outermost base first."""
    values = parse_toml(path, "recipe", hint="shipped recipes are in launch/recipes")
    if path.resolve() in _seen:
        raise ConfigError(f"recipe {path} is its own base; remove the circle")
    if len(_seen) == _MOST_BASES:
        raise ConfigError(f"recipe {path} is the base of {_MOST_BASES} others, one upon another; write them flatter")
    base = values.pop("base", None)
    if base is None:
        return [values]
    if not isinstance(base, str):
        raise ConfigError(f"recipe {path}: base = {base!r} must be the name of one recipe file")
    return [*_layers(path.parent / base, (*_seen, path.resolve())), values]


def _merged(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Later layers win, key by key."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for section, table in layer.items():
            before = merged.get(section)
            if isinstance(table, dict) and isinstance(before, dict):
                merged[section] = {**before, **table}
            else:
                merged[section] = table
    return merged


def _refuse_unread(layers: Sequence[Mapping[str, Any]], recipe: Recipe) -> None:
    """Raises ConfigError for a key that is written out where nothing reads it.

    Each key is judged where it was written last: by the whole recipe and, if that reads nothing of it, by what stood
    before the layers above, because a child may switch off what makes its base's keys read. A resolved recipe, as runs
    write it, has every key and is not judged.
    """
    defaults = flat(Recipe())
    above: set[str] = set()
    for number in reversed(range(len(layers))):
        written = {
            f"{section}.{name}": value for section, table in layers[number].items() for name, value in table.items()
        }
        own = {key: value for key, value in written.items() if key not in above}
        above |= set(written)
        if 2 * len(written) >= len(defaults):
            continue
        unread = [key for key in own if not says_nothing(own[key], defaults[key]) and not is_read(recipe, key)]
        if unread and number + 1 < len(layers):
            name = {"objective": {"name": recipe.objective.name}}  # which a base may leave to its children
            before = build_recipe(_merged([name, *layers[: number + 1]]))
            unread = [key for key in unread if not is_read(before, key)]
        if unread:
            raise ConfigError(why_unread(recipe, unread[0], own[unread[0]]))


def flat(recipe: Recipe) -> dict[str, Any]:
    """Every key, as SECTION.KEY, with its value."""
    return {f"{section}.{key}": value for section, table in vars(recipe).items() for key, value in vars(table).items()}


def build_recipe(values: Mapping[str, Any]) -> Recipe:
    """Nested tables to a Recipe; strict about names and types. A preset fills in what the tables leave out."""
    hints = typing.get_type_hints(Recipe)
    sections: dict[str, dict[str, Any]] = {}
    for section, table in values.items():
        if section not in hints:
            raise ConfigError(f"unknown section [{section}]; the sections are {', '.join(hints)}")
        if not isinstance(table, Mapping):
            raise ConfigError(f"{section} = {table!r} must be a section [{section}] with keys")
        sections[section] = {
            name: _checked(f"{section}.{name}", value, _field_type(section, name)) for name, value in table.items()
        }
    chosen = ObjectiveConfig(**sections.get("objective", {}))
    for key, value in preset_settings(chosen.name, chosen.preset, chosen.preset_for).items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {}).setdefault(name, value)
    return Recipe(**{section: hints[section](**table) for section, table in sections.items()})


def check(recipe: Recipe) -> None:
    """Everything that can be known to be wrong without a device, a model or data."""
    values = flat(recipe)
    for key, choices in _CHOICES.items():
        if values[key] not in choices:
            raise ConfigError(f"{key} = {values[key]!r} is unknown; choose one of {', '.join(choices)}")
    for key, least in _AT_LEAST.items():
        if values[key] < least:
            raise ConfigError(f"{key} = {values[key]} is too small; it must be at least {least}")
    for key in _ABOVE_ZERO:
        if not values[key] > 0:
            raise ConfigError(f"{key} = {values[key]} must be above 0")
    for key, most in _AT_MOST.items():
        if values[key] > most:
            raise ConfigError(f"{key} = {_short(values[key])} is too large; it must be at most {_number(most)}")
    for key, smallest in _SMALLEST.items():
        if values[key] < smallest:
            raise ConfigError(f"{key} = {values[key]} is too small; it must be at least {smallest}")
    for key in _SHARES:
        if not 0 < values[key] < 1:
            raise ConfigError(f"{key} = {values[key]} must lie between 0 and 1")
    for key in _UNIT:
        if not 0 <= values[key] < 1:
            raise ConfigError(f"{key} = {values[key]} must be at least 0 and below 1")
    try:
        ladder = recipe.ladder
        one = recipe.single_size
    except ModelError as error:
        key = "objective.size" if recipe.objective.sizes == "one" and "form" in str(error) else "model.ladder"
        raise ConfigError(f"{key}: {error}") from None
    if one is not None and not one.fits_in(ladder.full):
        raise ConfigError(f"objective.size = {one} outgrows the ladder's last size {ladder.full}")
    if not recipe.data.shards:
        raise ConfigError("data.shards is empty; name at least one folder written by `python -m data.prepare`")
    if hidden := next((each for each in recipe.data.shards if "://" in each and HIDDEN in each), None):
        raise ConfigError(
            f"data.shards: in {hidden} a secret is hidden, as in every file of a run; give the run's own recipe, or "
            "an environment variable in its place, https://user:${BARISTA_PASSWORD}@…"
        )
    if recipe.data.weights and len(recipe.data.weights) != len(recipe.data.shards):
        raise ConfigError(
            f"data.weights has {len(recipe.data.weights)} entries for {len(recipe.data.shards)} folders in "
            "data.shards; give one weight a folder, or none"
        )
    if any(not weight > 0 for weight in recipe.data.weights):
        raise ConfigError(f"data.weights = {recipe.data.weights} must all be above 0")
    _check_feed(recipe)
    if bool(recipe.model.source) == bool(recipe.model.config):
        raise ConfigError("give either model.source (a folder or hub name) or [model.config] (from scratch), not both")
    if recipe.train.steps == 0 and not recipe.train.epochs > 0:
        raise ConfigError(f"train.epochs = {recipe.train.epochs} must be above 0 when train.steps is 0")
    objective = recipe.objective
    nested = objective.nested_masks and is_read(recipe, "objective.nested_masks")
    if nested and objective.decoder_mask_ratio < objective.encoder_mask_ratio:
        raise ConfigError(
            f"objective.decoder_mask_ratio = {objective.decoder_mask_ratio} is below encoder_mask_ratio = "
            f"{objective.encoder_mask_ratio}; nested masks need the decoder's to be the larger"
        )
    as_it_is = objective.bottleneck == "cls" and is_read(recipe, "objective.bottleneck")
    if as_it_is and (objective.sizes != "full" or recipe.model.output_dim):
        raise ConfigError(
            'objective.bottleneck = "cls" hands the decoder a vector of the full width, which only sizes = "full" '
            'without model.output_dim has; use bottleneck = "head" for narrower sizes'
        )
    if recipe.pairs == "tuples" and not recipe.model.source:
        raise ConfigError('objective.pairs = "tuples" is for a second stage; give model.source, a pre-trained encoder')
    if recipe.pairs == "spans" and objective.symmetric_spans and not objective.mask_false_negatives:
        raise ConfigError(
            "objective.symmetric_spans = true needs objective.mask_false_negatives = true, which keeps a span from "
            "being its own negative"
        )
    if objective.name == "masked" and objective.sizes in DRAWN_SIZES:
        raise ConfigError(
            f'objective.sizes = "{objective.sizes}" is a fine-tuning schedule; use "ladder" or "full" for masked'
        )
    if objective.sizes == "two_d_all_widths" and len(ladder) < 2:
        raise ConfigError(
            'objective.sizes = "two_d_all_widths" draws a layer of the ladder below the last, and this ladder has one '
            "size; add smaller ones to model.ladder"
        )
    if objective.kl == "margins" and objective.name == "contrastive" and not recipe.data.num_negatives:
        raise ConfigError('objective.kl = "margins" is of hard negatives; set data.num_negatives, or kl = "scores"')
    if objective.name == "contrastive" and objective.loss == "cosent" and objective.kl in ("scores", "margins"):
        raise ConfigError(
            'objective.loss = "cosent" has no negatives to score; set objective.kl to "none" or "coordinates"'
        )
    _check_preset(objective)
    num_sizes = 1 if objective.sizes in ("full", "one") else len(ladder.grid if objective.sizes == "grid" else ladder)
    _check_size_weights(recipe, num_sizes)
    _check_guide(recipe)
    _check_teacher(recipe)
    _check_trained_part(recipe)


def _check_preset(objective: ObjectiveConfig) -> None:
    if objective.preset and objective.name == "contrastive" and not objective.preset_for:
        raise ConfigError(
            f"objective.preset = {objective.preset!r} differs between fine-tunings; "
            f"set objective.preset_for to one of {', '.join(PRESETS_FOR)}"
        )


def _check_size_weights(recipe: Recipe, num_sizes: int) -> None:
    """Factors a size, where sizes are fixed: one each; of the KL, one each but the last, where it is the teacher."""
    objective, teaches = recipe.objective, not recipe.guide_teaches
    for key, weights, count in (
        ("size_weights", objective.size_weights, num_sizes),
        ("kl_size_weights", objective.kl_size_weights, num_sizes - teaches),
    ):
        if not weights or not is_read(recipe, f"objective.{key}"):
            continue
        if len(weights) != count:
            below = " below the full one" if key == "kl_size_weights" and teaches else ""
            raise ConfigError(
                f"objective.{key} has {len(weights)} entries for the {count} sizes{below} of objective.sizes = "
                f"{objective.sizes!r}; give one a size, or none"
            )
        if min(weights) < 0 or max(weights) == 0:
            raise ConfigError(f"objective.{key} = {weights} must be at least 0 each, and not all 0")


def _check_guide(recipe: Recipe) -> None:
    for key, used in (("filter_by", recipe.guide_filters), ("kl_teacher", recipe.guide_teaches)):
        if used and not recipe.guide.model:
            raise ConfigError(f'objective.{key} = "guide" needs one; name its folder in guide.model')


def _check_teacher(recipe: Recipe) -> None:
    """A teacher that can teach: named, with something to teach, in a space that has only directions."""
    teacher, objective = recipe.teacher, recipe.objective
    if not recipe.is_taught:
        return
    if not any(teacher.terms.values()):
        raise ConfigError("all weights of [teacher] are 0, so nothing is learnt from it; set teacher.vector_weight")
    if objective.similarity != "cosine":
        raise ConfigError(
            f"objective.similarity = {objective.similarity!r}: a teacher's directions are learnt, not its vectors' "
            'lengths; set it to "cosine"'
        )
    if teacher.vectors == "stored" and not teacher.store:
        raise ConfigError(
            'teacher.vectors = "stored" needs the folder of the vectors; make it with `python -m '
            "trainer.teacher_vectors` and name it in teacher.store"
        )
    if teacher.vectors == "live" and not (teacher.model or recipe.model.source):
        raise ConfigError("there is no teacher; name its folder in teacher.model")
    if objective.name == "distill" and objective.sizes in DRAWN_SIZES:
        raise ConfigError(
            f'objective.sizes = "{objective.sizes}" is a schedule of contrastive fine-tuning; use "grid" or "ladder"'
        )


def _check_trained_part(recipe: Recipe) -> None:
    """Frozen layers and adapters must leave something that can train, and stand on trained weights."""
    model = recipe.model
    for key, value in (("lora_rank", model.lora_rank), ("frozen_layers", model.frozen_layers)):
        if value and is_read(recipe, f"model.{key}") and not model.source:
            raise ConfigError(f"model.{key} = {value} would keep random weights; give model.source, a trained encoder")
    if model.trains == "heads" and is_read(recipe, "model.trains"):
        if not model.source:
            raise ConfigError('model.trains = "heads" keeps random weights; give model.source, a trained encoder')
        for key in ("frozen_layers", "lora_rank"):
            if getattr(model, key):
                raise ConfigError(f'model.{key} = {getattr(model, key)} has nothing to do where model.trains = "heads"')
    deepest = (recipe.single_size or recipe.ladder.full).layers
    if is_read(recipe, "model.frozen_layers") and model.frozen_layers >= deepest:
        raise ConfigError(
            f"model.frozen_layers = {model.frozen_layers} freezes all of the {deepest} layers that are trained; "
            f"use at most {deepest - 1}"
        )


def _check_feed(recipe: Recipe) -> None:
    """How folders are read and mixed, and what stands before their texts."""
    data = recipe.data
    if data.bad_shards == "skip" and data.verify == "size":
        raise ConfigError('data.bad_shards = "skip" needs to know which shards are bad; set data.verify = "first_read"')
    for name, prompts in zip(("query_prompts", "passage_prompts"), recipe.prompts):
        if len(prompts) not in (0, 1, len(data.shards)):
            raise ConfigError(
                f"data.{name} has {len(prompts)} entries for {len(data.shards)} folders in data.shards; "
                "give one a folder, one for all, or none"
            )
    if data.negatives_from and is_read(recipe, "data.negatives_from"):
        if len(data.negatives_from) not in (1, data.num_negatives):
            raise ConfigError(
                f"data.negatives_from has {len(data.negatives_from)} entries for data.num_negatives = "
                f"{data.num_negatives} of tuples; give one for all of them, one each, or none"
            )
        if data.negatives_from != sorted(data.negatives_from) or data.negatives_from[0] < 0:
            raise ConfigError(f"data.negatives_from = {data.negatives_from} must be shares from 0 that do not fall")
        if data.negatives_from[-1] >= 1:
            raise ConfigError(
                f"data.negatives_from = {data.negatives_from} leaves negatives that no step would see; give shares "
                "below 1"
            )


def check_world(recipe: Recipe, world_size: int) -> None:
    """Every rank must get samples of a full global batch; shares need not be equal."""
    total = recipe.train.global_batch_size
    if total < world_size:
        raise ConfigError(
            f"train.global_batch_size = {total} leaves some of {world_size} ranks without a sample; "
            f"use {world_size} or more, or fewer ranks"
        )


def as_tables(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Every key with its value, by section, as anybody may see it: secrets of addresses are hidden."""
    tables = dataclasses.asdict(recipe)
    for key in _PLACES:
        section, _, name = key.partition(".")
        value = tables[section][name]
        shown = list(map(without_secrets, value)) if isinstance(value, list) else without_secrets(value)
        tables[section][name] = shown
    return tables


def as_toml(recipe: Recipe) -> str:
    """The resolved recipe, every key written out, but for the secrets of its addresses."""
    return tomli_w.dumps(as_tables(recipe))


def _short(value: float) -> str:
    """A number as a sentence shows it: Python refuses to write whole ones of thousands of digits."""
    try:
        text = str(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 40 else f"{text[:40]}…"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _field_type(section: str, name: str) -> Any:
    sections = typing.get_type_hints(Recipe)
    if section not in sections:
        raise ConfigError(f"unknown section {section!r} in {section}.{name}; the sections are {', '.join(sections)}")
    fields = typing.get_type_hints(sections[section])
    if name not in fields:
        raise ConfigError(f"unknown key {section}.{name}; the keys of [{section}] are {', '.join(fields)}")
    return fields[name]


def _parse(key: str, text: str, hint: Any) -> Any:
    """A command-line value. Strings stand as typed; everything else is written as in TOML, or JSON for tables."""
    if hint is str:
        return text
    for parse in (lambda: tomllib.loads(f"value = {text}")["value"], lambda: json.loads(text)):
        # RecursionError: nested too deep; ValueError: no such text, or digits beyond what Python converts.
        with contextlib.suppress(ValueError, RecursionError):
            return parse()
    if typing.get_origin(hint) is list and typing.get_args(hint)[0] is str:
        return [part for part in text.split(",") if part]
    shown = text if len(text) <= 200 else f"{text[:200]}…"
    raise ConfigError(f"--{key}={shown} is not {_describe(hint)}")


def _checked(key: str, value: Any, hint: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is list and isinstance(value, list):
        return [_checked(key, item, args[0]) for item in value]
    if origin is dict and isinstance(value, Mapping):
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{key} = {_short(value)} is too large") from None
    if hint is float and isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key} = {value} must be a finite number")
    plain = hint if isinstance(hint, type) and not isinstance(hint, types.GenericAlias) else None
    if plain is not None and isinstance(value, plain) and not (plain is int and isinstance(value, bool)):
        return value
    raise ConfigError(f"{key} = {value!r} must be {_describe(hint)}")


def _describe(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    if typing.get_origin(hint) is list:
        return f"a list, each entry {_describe(typing.get_args(hint)[0])}"
    return names.get(hint, "a table")
