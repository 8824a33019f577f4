"""From a recipe to a finished run: everything is opened and checked first, then the devices start, then the loop.

A run folder holds recipe.toml (resolved), ds_config.json, environment.json, metrics.jsonl, tensorboard/, checkpoints/,
and, when training is done, model/ (an ordinary Hugging Face folder plus barista.json) and DONE.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from data.collate import MaskedCollator, PairCollator
from data.errors import DataError
from data.files import write_atomically
from data.remote import Cache, is_remote
from data.shards import BadShards, ShardFolder, Verify
from data.stream import Batches, Stream
from data.tokens import load_tokenizer, prompt_ids
from models.adapters import add_adapters, freeze_lower_layers, merged_tensors, save_adapter
from models.encoder import (
    EmbeddingSettings,
    Encoder,
    base_of,
    build_masked_lm,
    load_encoder,
    load_masked_lm,
    longest_input,
    truncate_layers,
)
from models.masked_autoencoder import MaskedAutoencoder
from models.packed_attention import check_packs, fast_on, packs
from models.sizes import Ladder
from trainer.checkpoint import Checkpointer, check_output_folder, no_checkpoint
from trainer.config import ConfigError, Recipe, as_toml, check_world, load_recipe
from trainer.distributed import World, start
from trainer.engine import Engine, multiplies_in_bf16, read_ds_config, zero_stage
from trainer.evaluation.during_training import Evaluator
from trainer.flops import Shape, bf16_slowdown
from trainer.loop import Plan, TrainState, train
from trainer.metrics import Metrics
from trainer.objectives import REGISTRY, wanted_layers
from trainer.optim import learning_rate
from trainer.size_schedules import build_schedule

if TYPE_CHECKING:
    from peft import PeftModel

log = logging.getLogger(__name__)


def main(task: str, description: str, argv: Sequence[str] | None = None) -> None:
    """The body of `trainer.pretrain` (task "masked") and `trainer.finetune` (task "contrastive")."""
    parser = argparse.ArgumentParser(
        prog=f"python -m trainer.{'pretrain' if task == 'masked' else 'finetune'}",
        description=description,
        epilog=_describe_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="RECIPE.toml", help="the recipe; see launch/recipes")
    parser.add_argument(
        "--resume",
        choices=("never", "auto", "required"),
        help="never: refuse a folder that holds a run; auto: go on from its newest checkpoint, or start; "
        "required: go on or fail (the same as --run.resume=...)",
    )
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # what the deepspeed launcher passes
    args, rest = parser.parse_known_args(argv)
    overrides = []
    for text in rest:
        if not (text.startswith("--") and "=" in text):
            parser.error(f"{text!r} is not understood; settings are given as --section.key=value")
        overrides.append(text[2:])
    if args.resume:
        overrides.append(f"run.resume={args.resume}")
    recipe = load_recipe(args.config, overrides)
    if recipe.objective.name != task:
        other = {"masked": "trainer.pretrain", "contrastive": "trainer.finetune"}[recipe.objective.name]
        raise ConfigError(
            f"objective.name = {recipe.objective.name!r} in {args.config} is trained by `python -m {other}`"
        )
    execute(recipe)


def execute(recipe: Recipe) -> Path:
    """Train what the recipe says; returns the run folder. Every rank calls it."""
    # Its tables of unused keys (an MLM head that fine-tuning leaves) read like errors.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    check_world(recipe, world_size)
    check_output_folder(recipe)
    if recipe.train.compile and zero_stage(read_ds_config(recipe.engine.ds_config)) == 3:
        raise ConfigError(
            f"train.compile = true does not go with {recipe.engine.ds_config}, whose stage 3 fetches weights layer by "
            "layer; use a stage up to 2, or train.compile = false"
        )
    sources = _open_shards(recipe)
    stream = _open_stream(recipe, sources, rank=rank, world_size=world_size)
    parts = _build_model(recipe, sources)
    evaluator = Evaluator.of(recipe, embedding_settings(recipe))
    world = start()
    _write_run_folder(recipe, world)
    engine = Engine(parts.module, recipe, world)
    if world.is_main and multiplies_in_bf16(engine.ds_config) and (slowdown := bf16_slowdown(world.device)) > 2:
        log.warning(
            "this device takes %.0f times as long for bf16 products as for float32; "
            "--engine.ds_config=ds_configs/zero1_float32.json is faster here",
            slowdown,
        )
    if world.is_main:
        write_atomically(Path(recipe.run.output) / "ds_config.json", json.dumps(engine.ds_config, indent=2) + "\n")

    total_steps = recipe.train.steps or stream.num_steps
    checkpointer = Checkpointer(
        Path(recipe.run.output) / "checkpoints",
        keep=recipe.checkpoint.keep,
        keep_every_steps=recipe.checkpoint.keep_every_steps,
    )
    state = TrainState()
    if recipe.run.resume != "never" and (saved := checkpointer.load_newest(engine)) is not None:
        state.step = saved["step"]
        stream.load_state_dict(saved["stream"])
        log.info("going on at step %d of %d", state.step, total_steps)
    elif recipe.run.resume == "required":
        raise no_checkpoint(recipe.run.output)
    schedule = build_schedule(
        recipe.objective.sizes,
        recipe.ladder,
        reduction=recipe.objective.reduction,
        seed=recipe.run.seed,
        size=recipe.single_size,
        size_weights=recipe.objective.size_weights,
        kl_size_weights=recipe.objective.kl_size_weights,
    )
    objective = REGISTRY[recipe.objective.name](
        recipe,
        schedule,
        shape=Shape.of(parts.encoder.config),
        pad_id=sources[0].vocabulary.pad_id,
        packed=packs(parts.encoder.backbone),
    )
    metrics = Metrics(
        Path(recipe.run.output),
        world,
        every_steps=recipe.log.every_steps,
        total_steps=total_steps,
        start_step=state.step,
        tensorboard=recipe.log.tensorboard,
    )
    metrics.text("recipe", "    " + as_toml(recipe).replace("\n", "\n    "))
    optim = recipe.optim
    plan = Plan(
        seed=recipe.run.seed,
        total_steps=total_steps,
        stop_at_step=recipe.train.stop_at_step or total_steps,
        learning_rate=functools.partial(
            learning_rate,
            peak=optim.lr,
            total_steps=total_steps,
            warmup_ratio=optim.warmup_ratio,
            schedule=optim.schedule,
        ),
        save_every_steps=recipe.checkpoint.every_steps,
        evaluate_every_steps=recipe.evaluation.every_steps,
    )
    evaluate = functools.partial(evaluator.run, engine, parts.tokenizer, world)
    try:
        train(
            engine,
            objective,
            stream,
            state,
            plan=plan,
            metrics=metrics,
            save=lambda: _save(checkpointer, engine, state, stream, metrics),
            evaluate=evaluate,
        )
        if state.step == total_steps:
            if evaluator.has_tasks and not (plan.evaluate_every_steps and total_steps % plan.evaluate_every_steps == 0):
                metrics.evaluation(state.step, evaluate())
            save_model(engine, parts, recipe)
    finally:
        stream.close()
        metrics.close()
    dist.barrier()
    dist.destroy_process_group()
    return Path(recipe.run.output)


@dataclass(frozen=True)
class ModelParts:
    """`module` is what the engine trains; `encoder` the part that embeds; `saved` the Hugging Face model to write.

    `adapter`: peft's view of `saved`, where adapters train.
    """

    module: nn.Module
    encoder: Encoder
    saved: PreTrainedModel
    tokenizer: Any
    adapter: PeftModel | None = None


def _open_shards(recipe: Recipe) -> list[ShardFolder]:
    data = recipe.data
    needs_cache = data.verify == "first_read" or any(map(is_remote, data.shards))
    cache = Cache.at(data.cache_dir, data.cache_gib) if needs_cache else None
    verify, bad_shards = cast(Verify, data.verify), cast(BadShards, data.bad_shards)
    sources = [ShardFolder(path, verify=verify, bad_shards=bad_shards, cache=cache) for path in data.shards]
    kind = "documents" if recipe.objective.name == "masked" else "tuples"
    for source in sources:
        if source.kind != kind:
            raise ConfigError(
                f"data.shards: {source.path} holds {source.kind}, and this objective trains on {kind}; "
                f"make them with `python -m data.prepare {kind}`"
            )
        if recipe.objective.loss == "cosent" and not source.graded:
            raise ConfigError(f"objective.loss = 'cosent' needs graded pairs, and {source.path} has no scores")
    return sources


def _open_stream(recipe: Recipe, sources: Sequence[ShardFolder], *, rank: int, world_size: int) -> Stream:
    data, samples_per_epoch = recipe.data, sum(source.num_samples for source in sources)
    collate = _collator(recipe, sources)
    if rank == 0 and max(len(set(data.query_prompts)), len(set(data.passage_prompts))) > 1:
        log.warning("the folders' prompts differ, so barista.json will name none; write the one to embed with into it")
    return Stream(
        sources,
        collate=collate,
        seed=recipe.run.seed,
        global_batch_size=recipe.train.global_batch_size,
        rank=rank,
        world_size=world_size,
        weights=data.weights or None,
        mixture_temperature=data.mixture_temperature,
        batches=cast(Batches, data.batches),
        distinct_texts=collate.drawn_texts if data.no_duplicates and isinstance(collate, PairCollator) else None,
        total_samples=None if recipe.train.steps else max(1, round(recipe.train.epochs * samples_per_epoch)),
        num_workers=data.num_workers,
        shuffle=data.shuffle,
    )


def _build_model(recipe: Recipe, sources: Sequence[ShardFolder]) -> ModelParts:
    vocabulary = sources[0].vocabulary
    source, tokenizer = recipe.model.source, load_tokenizer(sources[0].tokenizer_path)
    torch.manual_seed(recipe.run.seed)
    masked_lm: PreTrainedModel | None = None
    if source:
        if recipe.objective.name == "masked":
            masked_lm = load_masked_lm(source)
            encoder = Encoder(base_of(masked_lm), recipe.model.pooling)
        else:
            encoder = load_encoder(source, pooling=recipe.model.pooling)
        if not Path(source).is_dir() or any(Path(source).glob("tokenizer*")) or (Path(source) / "vocab.txt").is_file():
            model_tokenizer = load_tokenizer(source)
            for folder in sources:
                folder.check_tokenizer(model_tokenizer)
    else:
        masked_lm = build_masked_lm(recipe.model.config, vocab_size=vocabulary.size, pad_token_id=vocabulary.pad_id)
        encoder = Encoder(base_of(masked_lm), recipe.model.pooling)
    rows = encoder.word_embeddings.weight.shape[0]
    if vocabulary.size > rows:
        raise ConfigError(
            f"the shards in {sources[0].path} hold ids up to {vocabulary.size - 1}, beyond the {rows} of the model "
            f"{source!r}; prepare the data with the model's own tokenizer"
        )
    recipe.ladder.check_against(num_layers=encoder.num_layers, hidden_size=encoder.hidden_size)
    _check_lengths(recipe, encoder)
    truncate_layers(encoder.backbone, wanted_layers(recipe))
    encoder.backbone.set_attn_implementation(_attention(recipe, encoder.backbone))
    adapter = _adapters(recipe, encoder)
    if recipe.train.activation_checkpointing:
        encoder.backbone.activation_checkpointing_enable({"use_reentrant": False})
        # It makes the embeddings' output want a gradient, which would send the backward pass through frozen layers.
        encoder.backbone.disable_input_require_grads()
    if recipe.train.compile:
        # Lengths differ from one micro-batch to the next.
        encoder.backbone.compile(dynamic=True)
    _say_what_stays(recipe)
    if recipe.objective.name == "contrastive":
        freeze_lower_layers(encoder.backbone, recipe.model.frozen_layers)
        return ModelParts(encoder, encoder, encoder.backbone, tokenizer, adapter)
    assert masked_lm is not None
    masked_lm.config.num_hidden_layers = encoder.num_layers
    module = MaskedAutoencoder(
        masked_lm,
        pooling=recipe.model.pooling,
        with_decoder=recipe.objective.decoder,
        logits_memory_mib=recipe.train.logits_memory_mib,
    )
    if not source:
        module.start_from_frequencies(_token_counts(sources, vocabulary.size))
    # Now, because the decoder starts as a copy of the first layer, and it trains.
    freeze_lower_layers(module.encoder.backbone, recipe.model.frozen_layers)
    return ModelParts(module, module.encoder, masked_lm, tokenizer)


def _attention(recipe: Recipe, backbone: PreTrainedModel) -> str:
    """The attention the recipe names, or the fastest that is exact here."""
    if recipe.model.attention == "packed":
        check_packs(backbone)
    if recipe.model.attention != "auto":
        return recipe.model.attention
    half_precision = multiplies_in_bf16(read_ds_config(recipe.engine.ds_config))
    if not torch.cuda.is_available():
        # PyTorch's fused attention saves memory, but in bf16 on a CPU it takes twice the time of plain products.
        return "eager" if half_precision else "sdpa"
    return "packed" if half_precision and fast_on(torch.device("cuda"), backbone) else "sdpa"


def _adapters(recipe: Recipe, encoder: Encoder) -> PeftModel | None:
    chosen = recipe.model
    if not chosen.lora_rank:
        return None
    return add_adapters(
        encoder.backbone,
        rank=chosen.lora_rank,
        alpha=chosen.lora_alpha,
        dropout=chosen.lora_dropout,
        targets=chosen.lora_targets,
        first_layer=chosen.frozen_layers,
    )


def _say_what_stays(recipe: Recipe) -> None:
    """A size with frozen layers alone keeps its embeddings; other sizes train, so it is no mistake."""
    frozen = recipe.model.frozen_layers
    if stay := [recipe.ladder.name(size) for size in recipe.ladder if size.layers <= frozen]:
        log.info("model.frozen_layers = %d leaves nothing to train in the encoder at %s", frozen, ", ".join(stay))


def _token_counts(sources: Sequence[ShardFolder], size: int, *, documents: int = 4096) -> torch.Tensor:
    """How often each token occurs in documents taken at even steps from a few shards a folder; float32 [size]."""
    counts = np.zeros(size, dtype=np.int64)
    for folder in sources:
        counts += np.bincount(np.concatenate(folder.documents(folder.spread(documents))), minlength=size)
    return torch.from_numpy(counts).float()


def _check_lengths(recipe: Recipe, encoder: Encoder) -> None:
    room = longest_input(encoder.backbone) or getattr(encoder.config, "max_position_embeddings", None)
    if room is None:
        return
    used = ("max_length",) if recipe.objective.name == "masked" else ("query_max_length", "passage_max_length")
    for name in used:
        if getattr(recipe.data, name) > room:
            raise ConfigError(f"data.{name} = {getattr(recipe.data, name)} is beyond the encoder's {room} positions")


def _collator(recipe: Recipe, sources: Sequence[ShardFolder]) -> MaskedCollator | PairCollator:
    chosen, vocabulary = recipe.objective, sources[0].vocabulary
    if chosen.name == "masked":
        if vocabulary.mask_id is None:
            raise ConfigError("the shards' tokenizer has no mask token; prepare the data with one that has")
        return MaskedCollator(
            vocabulary,
            max_length=recipe.data.max_length,
            encoder_mask_ratio=chosen.encoder_mask_ratio,
            decoder_mask_ratio=chosen.decoder_mask_ratio if chosen.decoder else None,
            nested=chosen.nested_masks,
            seed=recipe.run.seed,
        )
    return PairCollator(
        vocabulary,
        query_max_length=recipe.data.query_max_length,
        passage_max_length=recipe.data.passage_max_length,
        num_negatives=recipe.data.num_negatives,
        seed=recipe.run.seed,
        graded=sources[0].graded,
        query_prompts=_prompt_ids("query_prompts", recipe.data.query_prompts, sources),
        passage_prompts=_prompt_ids("passage_prompts", recipe.data.passage_prompts, sources),
    )


def _prompt_ids(name: str, prompts: Sequence[str], sources: Sequence[ShardFolder]) -> list[np.ndarray]:
    """The ids of each folder's prompt; none at all where there are no prompts."""
    if not any(prompts):
        return []
    tokenizer = load_tokenizer(sources[0].tokenizer_path)
    try:
        found = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    except DataError as error:
        raise ConfigError(f"data.{name}: {error}") from None
    return found * len(sources) if len(found) == 1 else found


def _save(checkpointer: Checkpointer, engine: Engine, state: TrainState, stream: Stream, metrics: Metrics) -> None:
    saved = checkpointer.save(engine, {"step": state.step, "stream": stream.state_dict()})
    if saved is not None:
        metrics.checkpoint(state.step, seconds=saved.seconds, mib=saved.mib)


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
    return EmbeddingSettings(
        pooling=recipe.model.pooling,
        similarity=recipe.objective.similarity,
        ladder=tuple((size.layers, size.dim) for size in ladder),
        query_max_length=recipe.data.max_length if masked else recipe.data.query_max_length,
        passage_max_length=recipe.data.max_length if masked else recipe.data.passage_max_length,
        query_prompt=_common(recipe.data.query_prompts),
        passage_prompt=_common(recipe.data.passage_prompts),
        temperature=recipe.objective.temperature,
    )


def _common(prompts: Sequence[str]) -> str:
    """The prompt that all folders share, or none."""
    return prompts[0] if len(set(prompts)) == 1 else ""


def _write_run_folder(recipe: Recipe, world: World) -> None:
    output = Path(recipe.run.output)
    # All ranks have looked at the folder before it changes: joining the process group need not wait for them all.
    dist.barrier()
    if world.is_main:
        output.mkdir(parents=True, exist_ok=True)
        (output / "DONE").unlink(missing_ok=True)
        write_atomically(output / "recipe.toml", as_toml(recipe))
        packages = ("torch", "deepspeed", "transformers", "numpy", "tokenizers")
        environment = {
            "command": sys.argv,
            "world_size": world.size,
            "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else platform.processor(),
            "python": platform.python_version(),
            "versions": {name: importlib.metadata.version(name) for name in packages},
        }
        write_atomically(output / "environment.json", json.dumps(environment, indent=2) + "\n")
    dist.barrier()


def _describe_keys() -> str:
    lines = ["settings, each with its default (TOML sections, or --section.key=value):"]
    for section, kind in typing.get_type_hints(Recipe).items():
        defaults = dataclasses.asdict(kind())
        lines.append(f"  [{section}]")
        lines += [f"    {name} = {json.dumps(value)}" for name, value in defaults.items()]
    return "\n".join(lines)
