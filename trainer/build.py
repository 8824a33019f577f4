"""Builds a recipe's parts: a stream from its shards, and from its model the module that the engine trains.

Whatever is wrong with data and model is found here, before a device starts.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from data.collate import PairCollator
from data.ground.errors import ConfigError
from data.ground.files import refused_by
from data.model_folders import transformer_folder
from data.remote import Cache, is_remote
from data.shards.reader import ShardFolder
from data.stream import Stream
from data.tokens import ids_beside_text, load_tokenizer
from models.adapters import add_adapters, freeze_lower_layers
from models.backbone import most_tokens, set_dropout, truncate_layers
from models.choices import MEANS, Direction
from models.direction import is_decoder
from models.encoder import (
    Encoder,
    base_of,
    build_decoder,
    build_masked_lm,
    load_encoder,
    load_masked_lm,
    untrained_family,
)
from models.heads import HEADS_FILE, heads_up_to
from models.loading import load_config
from models.masked_autoencoder import MaskedAutoencoder
from models.nested_feed_forward import NestedFeedForwards, check_fractions
from models.packed_attention import check_packs, fast_on, packs
from models.sentence_transformers import read_sentence_model
from models.settings import EmbeddingSettings
from models.sizes import ModelError
from models.static_embedding import MODEL_TYPE, build_static
from trainer.config.read_keys import is_read, says_nothing, why_unread
from trainer.config.schema import Recipe, flat
from trainer.config.step_sizes import DRAWN, EVERY_DEPTH
from trainer.costs.flops import Shape
from trainer.ds_config import multiplies_in_bf16, read_ds_config
from trainer.objectives.collators import total_samples
from trainer.objectives.guide import Guide, StoredGuide, load_guide
from trainer.objectives.materials import Materials
from trainer.objectives.prompts import folder_prompts
from trainer.objectives.registry import Objective, maker_of
from trainer.objectives.size_schedules import build_schedule
from trainer.objectives.teacher import LiveTeacher, Teacher, Teaching, load_teacher

if TYPE_CHECKING:
    from peft import PeftModel

log = logging.getLogger(__name__)

_DECIDED_ELSEWHERE = {
    "is_causal": "model.direction says it",
    "use_bidirectional_attention": "model.direction says it",
    "is_decoder": "an encoder looks both ways",
    "add_cross_attention": "an encoder has none",
    "chunk_size_feed_forward": "lengths differ from batch to batch",
    "torch_dtype": "training starts from float32, and engine.ds_config says what it runs in",
    "dtype": "training starts from float32, and engine.ds_config says what it runs in",
}
_SHARED_MEMORY = Path("/dev/shm")
# Any real run keeps more than this ready per worker.
_SHARED_BYTES_A_WORKER = 2**20


@dataclass(frozen=True)
class ModelParts:
    """`module` is what the engine trains; `encoder` the part that embeds; `saved` the Hugging Face model to write.

    `adapter`: peft's view of `saved`, where adapters train. `guide`, `teacher`: frozen models beside it, which are not
    saved.
    """

    module: nn.Module
    encoder: Encoder
    saved: PreTrainedModel
    tokenizer: Any
    adapter: PeftModel | None = None
    guide: Guide | StoredGuide | None = None
    teacher: Teacher | None = None


def open_shards(recipe: Recipe) -> list[ShardFolder]:
    data = recipe.data
    needs_cache = data.verify == "first_read" or any(map(is_remote, data.shards))
    cache = Cache.at(data.cache_dir, data.cache_gib) if needs_cache else None
    sources = [ShardFolder(path, verify=data.verify, bad_shards=data.bad_shards, cache=cache) for path in data.shards]
    for number, source in enumerate(sources):
        for other in sources[:number]:
            if other.fingerprint == source.fingerprint:
                raise ConfigError(
                    f"data.shards: {other.path} and {source.path} hold the same shards, of which every sample would be "
                    "read twice; name one of them, and weigh it with data.weights"
                )
    kind = "documents" if recipe.reads_documents else "tuples"
    for source in sources:
        if source.kind != kind:
            raise ConfigError(
                f"data.shards: {source.path} holds {source.kind}, and this objective trains on {kind}; "
                f"make them with `python -m data.prepare {kind}`"
            )
        if recipe.kind.grades_pairs(recipe) and not source.graded:
            raise ConfigError(f"objective.loss = 'cosent' needs graded pairs, and {source.path} has no scores")
    return sources


def check_shared_memory(num_workers: int) -> None:
    """Refuse too little room in /dev/shm. Loader workers hand over batches through it, and would fail without it."""
    if not num_workers or not _SHARED_MEMORY.is_dir():
        return
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if free < num_workers * _SHARED_BYTES_A_WORKER:
        raise ConfigError(
            f"data.num_workers = {num_workers} needs shared memory, and {_SHARED_MEMORY} has {free // 1024} KiB free; "
            "allow more (in a container: --shm-size=1g), or set data.num_workers = 0"
        )


def open_stream(recipe: Recipe, sources: Sequence[ShardFolder], *, rank: int, world_size: int) -> Stream:
    data = recipe.data
    collate = maker_of(recipe).collator(recipe, sources)
    prompts_of_sides = folder_prompts(recipe, sources)
    if rank == 0 and not recipe.pools_prompt and not any(map(any, prompts_of_sides)):
        log.warning("model.pool_prompt = false leaves nothing out, because no text has a prompt")
    if rank == 0 and max(len(set(prompts)) for prompts in prompts_of_sides) > 1:
        log.warning("the folders' prompts differ, so barista.json will name none; write the one to embed with into it")
    return Stream(
        sources,
        collate=collate,
        seed=recipe.run.seed,
        global_batch_size=recipe.train.global_batch_size,
        rank=rank,
        world_size=world_size,
        weights=data.weights or None,
        mixture_temperature=1.0 if data.weights else data.mixture_temperature,
        batches=data.batches,
        distinct_texts=collate.drawn_texts if data.no_duplicates and isinstance(collate, PairCollator) else None,
        total_samples=None if recipe.train.steps else total_samples(recipe, sources),
        num_workers=data.num_workers,
        shuffle=data.shuffle,
    )


def build_model(
    recipe: Recipe,
    sources: Sequence[ShardFolder],
    ds_config: Mapping[str, Any] | None = None,
    *,
    weights: bool = True,
) -> ModelParts:
    """The model that trains, and the frozen ones beside it. ds_config: the engine's; None: read for this alone.

    weights: whether this rank loads the weights of model.source. On a rank that does not, they are on the meta device
    until an engine of stage 3 gives the rank its share (`trainer.ds_config.loads_weights`). It is so for encoders and
    decoders that are fine-tuned or distilled; masked pre-training and model.config make a whole model on every rank.
    """
    ds_config = read_ds_config(recipe.engine.ds_config) if ds_config is None else ds_config
    half_precision = multiplies_in_bf16(ds_config)
    parts = _build_trained(recipe, sources, half_precision=half_precision, weights=weights)
    guide = load_guide(recipe, sources)
    teacher = load_teacher(recipe, sources, guide=guide)
    for frozen in (guide, teacher.frozen if isinstance(teacher, LiveTeacher) else None):
        if isinstance(frozen, Guide) and not frozen.encoder.is_static:
            backbone = frozen.encoder.to(torch.bfloat16 if half_precision else torch.float32).backbone
            backbone.set_attn_implementation(_fastest_attention(backbone, half_precision=half_precision))
    if teacher is not None and teacher.width < (dim := parts.encoder.embedding_size):
        raise ConfigError(
            f"the teacher's vectors have {teacher.width} dimensions, and the student's {dim}; fit heads into the "
            "teacher's space first (python -m trainer.resize --prepare-only), or choose a wider teacher"
        )
    return replace(parts, guide=guide, teacher=teacher)


def _build_trained(
    recipe: Recipe, sources: Sequence[ShardFolder], *, half_precision: bool, weights: bool
) -> ModelParts:
    tokenizer = load_tokenizer(sources[0].tokenizer_path)
    torch.manual_seed(recipe.run.seed)
    start = _start_of(recipe, sources, tokenizer, weights=weights)
    encoder = start.encoder
    _check_encoder(recipe, encoder, sources[0])
    if encoder.is_static:
        _check_static(recipe)
        return ModelParts(encoder, encoder, encoder.backbone, tokenizer)
    _check_lengths(recipe, encoder)
    _set_up_backbone(recipe, encoder, half_precision=half_precision)
    adapter = _adapters(recipe, encoder)
    _set_up_passes(recipe, encoder.backbone)
    _say_what_stays(recipe)
    if recipe.kind.predicts_tokens:
        return _with_masked_losses(recipe, sources, start, tokenizer)
    _freeze(recipe, encoder)
    return ModelParts(encoder, encoder, encoder.backbone, tokenizer, adapter)


@dataclass(frozen=True)
class _Start:
    """The encoder from which training starts, and the masked language model that it is part of, unless it came alone.

    head_is_fresh: whether that model's head has never been trained.
    """

    encoder: Encoder
    masked_lm: PreTrainedModel | None = None
    head_is_fresh: bool = True


def _start_of(recipe: Recipe, sources: Sequence[ShardFolder], tokenizer: Any, *, weights: bool) -> _Start:
    """The encoder of model.source, or one of random weights from model.config."""
    if recipe.model.source:
        return _loaded(recipe, sources, weights=weights)
    vocabulary = sources[0].vocabulary
    if recipe.model.config.get("model_type") == MODEL_TYPE:
        ignored = ids_beside_text(tokenizer)
        with _made_of_config():
            table = build_static(recipe.model.config, vocab_size=vocabulary.size, special_ids=ignored)
        return _Start(Encoder(table, recipe.model.pooling))
    _check_model_config(recipe.model.config)
    ids = {"vocab_size": vocabulary.size, "pad_token_id": vocabulary.pad_id}
    with _made_of_config():
        family = untrained_family(recipe.model.config)
        if is_decoder(family) and not recipe.kind.predicts_tokens:
            decoder = build_decoder(recipe.model.config, _check_direction(recipe, family), **ids)
            return _Start(Encoder(decoder, recipe.model.pooling, pool_prompt=recipe.pools_prompt))
        masked_lm = build_masked_lm(recipe.model.config, **ids)
        _check_direction(recipe, family)
    return _Start(Encoder(base_of(masked_lm), recipe.model.pooling, pool_prompt=recipe.pools_prompt), masked_lm)


def _loaded(recipe: Recipe, sources: Sequence[ShardFolder], *, weights: bool) -> _Start:
    """The encoder of model.source, which must have the shards' tokenizer."""
    source = recipe.model.source
    _check_source_pooling(recipe)
    if recipe.kind.predicts_tokens:
        refuse_heads(source)
        masked_lm, head_is_fresh = load_masked_lm(source)
        _check_direction(recipe, masked_lm.config)
        start = _Start(
            Encoder(base_of(masked_lm), recipe.model.pooling, pool_prompt=recipe.pools_prompt), masked_lm, head_is_fresh
        )
    else:
        _check_direction(recipe, load_config(source))
        direction = recipe.model.direction or None
        pooling, pool_prompt = recipe.model.pooling, recipe.pools_prompt
        encoder = load_encoder(source, pooling=pooling, pool_prompt=pool_prompt, direction=direction, weights=weights)
        start = _Start(encoder)
    folder = transformer_folder(Path(source))
    if not folder.is_dir() or any(folder.glob("tokenizer*")) or (folder / "vocab.txt").is_file():
        model_tokenizer = load_tokenizer(source)
        for shards in sources:
            shards.check_model_tokenizer(model_tokenizer)
    _check_own_tokenizer(source, sources)
    return start


def _check_source_pooling(recipe: Recipe) -> None:
    """Refuse to pool the prompt, which is the default, where the model to start from leaves it out."""
    settings = EmbeddingSettings.load(recipe.model.source)
    if settings is not None and not settings.pool_prompt and recipe.model.pooling in MEANS and recipe.pools_prompt:
        raise ConfigError(
            f"model.source = {recipe.model.source!r} leaves the prompt out of its pooling, and model.pool_prompt = "
            "true would take it; set model.pool_prompt = false, or say otherwise in a copy of the folder"
        )


def _check_encoder(recipe: Recipe, encoder: Encoder, shards: ShardFolder) -> None:
    """Refuse an encoder that is too small for the shards' ids or for the recipe's sizes."""
    if empty := [name for name, parameter in encoder.named_parameters() if not parameter.numel()]:
        raise ConfigError(f"model.config gives {empty[0]} no elements; fix its sizes")
    rows = encoder.word_embeddings.weight.shape[0]
    if (needed := shards.vocabulary.rows_needed) > rows:
        raise ConfigError(
            f"the shards in {shards.path} hold ids up to {needed - 1}, beyond the {rows} of the model "
            f"{recipe.model.source!r}; prepare the data with the model's own tokenizer"
        )
    width = recipe.model.output_dim or encoder.embedding_size
    if width > encoder.embedding_size:
        raise ConfigError(f"model.output_dim = {width} is more than the encoder's {encoder.embedding_size}; lower it")
    recipe.ladder.check_against(num_layers=encoder.num_layers, hidden_size=width)
    if not encoder.is_static:
        check_fractions(encoder.backbone, recipe.ladder)


def _set_up_backbone(recipe: Recipe, encoder: Encoder, *, half_precision: bool) -> None:
    """Set the recipe's dropout, depth and attention."""
    set_dropout(encoder.backbone, recipe.model.dropout)
    truncate_layers(encoder.backbone, recipe.num_layers)
    encoder.heads = heads_up_to(encoder.heads, recipe.num_layers)
    attention = _attention(recipe, encoder.backbone, half_precision=half_precision)
    encoder.backbone.set_attn_implementation(attention)


def _set_up_passes(recipe: Recipe, backbone: PreTrainedModel) -> None:
    """Let the backbone keep fewer activations, or compile it, where the recipe says so."""
    if recipe.train.activation_checkpointing:
        how: dict[str, Any] = {"use_reentrant": False}
        if not recipe.ladder.has_whole_feed_forwards:
            how["context_fn"] = NestedFeedForwards.of(backbone).contexts
        backbone.activation_checkpointing_enable(how)
        # Enabling it makes the embeddings' output require a gradient, which would send the backward pass through
        # frozen layers.
        backbone.disable_input_require_grads()
    if recipe.train.compile:
        # Dynamic, because lengths differ from one micro-batch to the next.
        backbone.compile(dynamic=True)


def _freeze(recipe: Recipe, encoder: Encoder) -> None:
    """Leave trainable what model.frozen_layers and model.trains say."""
    freeze_lower_layers(encoder.backbone, recipe.model.frozen_layers)
    if recipe.trains_heads_alone:
        if not len(encoder.heads):
            raise ConfigError(
                f'model.trains = "heads", and {recipe.model.source} has none; fit them first '
                "(python -m trainer.resize --prepare-only)"
            )
        encoder.backbone.requires_grad_(False)


def _with_masked_losses(recipe: Recipe, sources: Sequence[ShardFolder], start: _Start, tokenizer: Any) -> ModelParts:
    """The encoder with its head and, where the recipe has one, a decoder."""
    masked_lm = start.masked_lm
    assert masked_lm is not None
    masked_lm.config.num_hidden_layers = start.encoder.num_layers
    module = MaskedAutoencoder(
        masked_lm,
        pooling=recipe.model.pooling,
        pool_prompt=recipe.pools_prompt,
        with_decoder=recipe.objective.decoder,
        bottleneck=recipe.objective.bottleneck,
        logits_memory_mib=recipe.train.logits_memory_mib,
    )
    if start.head_is_fresh:
        module.start_from_frequencies(_token_counts(sources, len(module.vocabulary_loss.bias)))
    # Layers are frozen only now, because the decoder starts as a copy of the first layer, and the decoder trains.
    freeze_lower_layers(module.encoder.backbone, recipe.model.frozen_layers)
    return ModelParts(module, module.encoder, masked_lm, tokenizer)


def refuse_heads(source: str) -> None:
    """Refuse a model with heads, because masked pre-training works on the encoder alone and would lose them."""
    found = read_sentence_model(source)
    if (Path(source) / HEADS_FILE).exists() or (found is not None and found.dense):
        raise ConfigError(
            f"model.source = {source!r} has heads ({HEADS_FILE}, or Dense modules), which pre-training would lose; "
            "fine-tune it, or pre-train the model from which it was made"
        )


def _check_own_tokenizer(source: str, sources: Sequence[ShardFolder]) -> None:
    """Refuse shards of another tokenizer than the one that the model's barista.json names."""
    settings = EmbeddingSettings.load(source)
    if settings is None or settings.tokenizer is None:
        return
    for folder in sources:
        if folder.manifest.tokenizer["fingerprint"] != settings.tokenizer:
            raise ConfigError(
                f"the shards in {folder.path} were made with another tokenizer than the one {source} was trained with, "
                "as its barista.json says; make the shards again with the model's own"
            )


def build_objective(recipe: Recipe, parts: ModelParts) -> Objective:
    schedule = build_schedule(
        recipe.step_sizes,
        reduction=recipe.objective.reduction,
        seed=recipe.run.seed,
        layer_weighting=recipe.objective.layer_weighting,
        size_weights=recipe.objective.size_weights,
        kl_size_weights=recipe.objective.kl_size_weights,
        teacher_outside=recipe.guide_teaches,
        whole_vectors=recipe.compresses,
    )
    teaching: Teaching | None = None
    if parts.teacher is not None:
        teaching = Teaching(parts.teacher, recipe.teacher, recipe.train.score_memory_mib)
    materials = Materials(
        schedule,
        Shape.of(parts.encoder.config),
        packed=packs(parts.encoder.backbone),
        static=parts.encoder.is_static,
        guide=parts.guide,
        teaching=teaching,
    )
    return maker_of(recipe).objective(recipe, materials)


def _made_of_config() -> contextlib.AbstractContextManager[None]:
    return refused_by("transformers", "model.config", hint="fix that setting", kind=ModelError)


def _check_direction(recipe: Recipe, config: PretrainedConfig) -> Direction:
    """The direction in which the model reads. A decoder may read in either, so its recipe must say it."""
    direction, family = recipe.model.direction, config.model_type
    if not is_decoder(config):
        if direction == "causal":
            raise ConfigError(
                f'model.direction = "causal" is for decoders, and {family!r} is an encoder, which reads in both '
                "directions; remove it"
            )
        return "bidirectional"
    if not direction:
        raise ConfigError(
            f'model.direction is not set, and {family!r} is a decoder; set it to "causal", as decoders are '
            'pre-trained, or to "bidirectional"'
        )
    if direction == "causal" and recipe.model.pooling == "cls":
        raise ConfigError(
            'model.pooling = "cls" takes the first token, which has read no other with model.direction = "causal"; use '
            '"last" or "mean"'
        )
    return direction


def _check_model_config(config: Mapping[str, Any]) -> None:
    """Refuse settings that transformers would take, but that no encoder here can have or that are set elsewhere."""
    for key, owner in _DECIDED_ELSEWHERE.items():
        if key in config:
            raise ConfigError(f"model.config.{key} = {config[key]!r} is not the recipe's to say: {owner}; remove it")


def _check_static(recipe: Recipe) -> None:
    """Refuse settings that a token table cannot use, instead of ignoring them."""
    chosen = recipe.model
    if not recipe.kind.contrasts:
        raise ConfigError('model_type = "static" has no layers to pre-train; set objective.name to "contrastive"')
    if chosen.pooling != "mean":
        raise ConfigError(f'model.pooling = {chosen.pooling!r} is not what a static encoder does; set it to "mean"')
    if recipe.objective.sizes in (*DRAWN, *EVERY_DEPTH):
        raise ConfigError(
            f"objective.sizes = {recipe.objective.sizes!r} is of several layers, and a static encoder has one; use "
            '"ladder"'
        )
    if recipe.optim.name == "muon":
        raise ConfigError(
            'optim.name = "muon" is for matrices between hidden states, and a static encoder is a table; use "adamw"'
        )
    if not recipe.ladder.has_whole_feed_forwards:
        raise ConfigError(
            "model.ladder has sizes with narrower feed-forwards, and a static encoder has none; give sizes of two "
            "numbers"
        )
    _refuse_what_needs_layers(recipe)


def _refuse_what_needs_layers(recipe: Recipe) -> None:
    """Refuse keys that a table does not read, by the conditions of trainer/config/read_keys.py.

    A table in model.source is known only here. One of model.config was known when the recipe was loaded, which judged
    what was written; what it inherited is refused if it switches something on.
    """
    known, unknown = (
        replace(recipe, model=replace(recipe.model, config=config)) for config in ({"model_type": MODEL_TYPE}, {})
    )
    defaults = flat(Recipe())
    for key, value in flat(recipe).items():
        needs_layers = is_read(unknown, key) and not is_read(known, key)
        judged = not recipe.is_static or says_nothing(defaults[key], defaults[key])
        if value != defaults[key] and needs_layers and judged:
            raise ConfigError(f"the model is a static token table, so {why_unread(known, key, value)}")


def _attention(recipe: Recipe, backbone: PreTrainedModel, *, half_precision: bool) -> str:
    """The attention the recipe names, or the fastest that is exact here."""
    if recipe.model.attention == "packed":
        check_packs(backbone)
    if recipe.model.attention != "auto":
        named = f'model.attention = "{recipe.model.attention}"'
        with refused_by("transformers", named, hint='use "auto"', kind=ConfigError):
            backbone.set_attn_implementation(recipe.model.attention)
        return recipe.model.attention
    return _fastest_attention(backbone, half_precision=half_precision)


def _fastest_attention(backbone: PreTrainedModel, *, half_precision: bool) -> str:
    # Gemma 2 caps its scores, and DeBERTa and MPNet add to them, which fused attention does not.
    fused = "sdpa" if getattr(type(backbone), "_supports_sdpa", False) else "eager"
    if not torch.cuda.is_available():
        # PyTorch's fused attention saves memory, but in bf16 on a CPU it takes twice the time of plain products.
        return "eager" if half_precision else fused
    return "packed" if half_precision and fast_on(torch.device("cuda"), backbone) else fused


def _adapters(recipe: Recipe, encoder: Encoder) -> PeftModel | None:
    chosen = recipe.model
    if not recipe.adapter_rank:
        return None
    return add_adapters(
        encoder.backbone,
        rank=recipe.adapter_rank,
        alpha=chosen.lora_alpha,
        dropout=chosen.lora_dropout,
        targets=chosen.lora_targets,
        first_layer=chosen.frozen_layers,
    )


def _say_what_stays(recipe: Recipe) -> None:
    """Report sizes whose layers are all frozen and do not train. It is no error, because other sizes train."""
    frozen = recipe.model.frozen_layers
    if stay := [recipe.ladder.name(size) for size in recipe.ladder if size.layers <= frozen]:
        log.info("model.frozen_layers = %d leaves nothing to train in the encoder at %s", frozen, ", ".join(stay))


def _token_counts(sources: Sequence[ShardFolder], size: int, *, samples: int = 4096) -> torch.Tensor:
    """How often each token occurs in samples taken at even steps from a few shards a folder; float32 [size].

    Tokens from `size` on do not count: the model has no rows for them.
    """
    counts = np.zeros(size, dtype=np.int64)
    for folder in sources:
        chosen = folder.spread(samples)
        if folder.kind == "documents":
            texts = folder.documents(chosen)
        else:
            texts = [text for sample in folder.tuples(chosen) for text in (sample.query, *sample.passages)]
        counts += np.bincount(np.concatenate(texts), minlength=size)[:size]
    return torch.from_numpy(counts).float()


def _check_lengths(recipe: Recipe, encoder: Encoder) -> None:
    room = most_tokens(encoder.backbone)
    if room is None:
        return
    used = ("max_length",) if recipe.reads_documents else ("query_max_length", "passage_max_length")
    for name in used:
        if getattr(recipe.data, name) > room:
            raise ConfigError(f"data.{name} = {getattr(recipe.data, name)} is beyond the encoder's {room} positions")
