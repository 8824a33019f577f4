"""The checks of a recipe that need no device, model or data."""

from __future__ import annotations

from data.ground.errors import ConfigError
from data.ground.secrets import HIDDEN
from models.sizes import Ladder, ModelError
from trainer.config.kinds import KINDS
from trainer.config.read_keys import is_read
from trainer.config.schema import Recipe
from trainer.config.step_sizes import EVERY_DEPTH, WITH_BODIES


def check(recipe: Recipe) -> None:
    """Raise ConfigError for whatever can be seen to be wrong without a device, a model or data."""
    if not recipe.objective.name:
        raise ConfigError(f"objective.name = '' is unknown; choose one of {', '.join(KINDS)}")
    ladder: Ladder | None = None
    try:
        ladder = recipe.ladder
        one = recipe.single_size
    except ModelError as error:
        key = "model.ladder" if ladder is None else "objective.size"
        raise ConfigError(f"{key}: {error}") from None
    if one is not None and not one.fits_in(ladder.full):
        raise ConfigError(f"objective.size = {one} outgrows the ladder's last size {ladder.full}")
    _check_feed_forwards(recipe)
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
    if objective.sizes == "two_d_all_widths" and len(ladder) < 2:
        raise ConfigError(
            'objective.sizes = "two_d_all_widths" draws a layer of the ladder below the last, and this ladder has one '
            "size; add smaller ones to model.ladder"
        )
    if objective.sizes in EVERY_DEPTH and len(ladder) < 2:
        raise ConfigError(
            f'objective.sizes = "{objective.sizes}" trains the widths of the ladder below the full one, and this '
            "ladder has one size; add smaller ones to model.ladder"
        )
    _check_negatives(recipe)
    recipe.kind.check(recipe)
    if not recipe.step_sizes.drawn:
        _check_size_weights(recipe)
    _check_exchange(recipe)
    _check_guide(recipe)
    _check_teacher(recipe)
    _check_trained_part(recipe)


def _check_feed_forwards(recipe: Recipe) -> None:
    """Refuse narrower feed-forwards where they are not trained as sizes of one model."""
    one = recipe.single_size
    if one is not None and not one.has_whole_feed_forwards:
        raise ConfigError(
            f"objective.size = {one} has narrower feed-forwards, which train with the whole ones: train a ladder with "
            "this size, or a model that is cut to it (the folder that trainer.export writes)"
        )
    if recipe.ladder.has_whole_feed_forwards:
        return
    narrower = next(size for size in recipe.ladder if not size.has_whole_feed_forwards)
    named = f"model.ladder has {narrower}, whose feed-forwards are narrower"
    if recipe.kind.predicts_tokens:
        raise ConfigError(f"{named}, and masked pre-training has whole ones only; give sizes of two numbers")
    if recipe.objective.sizes not in WITH_BODIES:
        raise ConfigError(
            f'{named}, and objective.sizes = "{recipe.objective.sizes}" trains whole ones only; use "ladder" or '
            '"grid", or sizes of two numbers'
        )
    if recipe.adapter_rank:
        raise ConfigError(
            f"{named}, and adapters (model.lora_rank = {recipe.adapter_rank}) have no such prefix; train the weights "
            "(model.lora_rank = 0), or give sizes of two numbers"
        )
    if recipe.train.compile:
        raise ConfigError(
            f"{named}, and train.compile = true compiles one pass alone; set it to false, or give sizes of two numbers"
        )


def _check_size_weights(recipe: Recipe) -> None:
    """Fixed sizes have one factor each; in the KL, the last size has none where it is the teacher."""
    objective, teaches = recipe.objective, not recipe.guide_teaches
    num_sizes = len(recipe.step_sizes.fixed)
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


def _check_negatives(recipe: Recipe) -> None:
    """What a query is compared with: each part once, with queries against passages among them."""
    chosen = recipe.objective
    if "query_passage" not in chosen.negatives or len(set(chosen.negatives)) < len(chosen.negatives):
        raise ConfigError(
            f'objective.negatives = {chosen.negatives} must hold "query_passage", and nothing twice; add what is to '
            "share its denominator"
        )
    if len(chosen.negatives) > 1 and recipe.pairs == "spans" and chosen.symmetric_spans:
        raise ConfigError(
            f"objective.negatives = {chosen.negatives} says a second time what objective.symmetric_spans = true does, "
            "which compares every span with all others; set one of the two"
        )


def _check_exchange(recipe: Recipe) -> None:
    """No rank holds all vectors in a ring, so nothing else may gather them."""
    gathers = recipe.is_taught and recipe.teacher.gathers
    if recipe.train.negatives_exchange == "ring" and is_read(recipe, "train.negatives_exchange") and gathers:
        raise ConfigError(
            'train.negatives_exchange = "ring" keeps all texts\' vectors from being gathered, which '
            "teacher.similarity_weight and teacher.order_weight need; set these to 0, or the exchange to gather"
        )


def _check_guide(recipe: Recipe) -> None:
    """A guide must be named, and one folder can hold the vectors of one model alone."""
    guide, teacher = recipe.guide, recipe.teacher
    for key, used in (("filter_by", recipe.guide_filters), ("kl_teacher", recipe.guide_teaches)):
        if used and not (guide.model or guide.store):
            raise ConfigError(
                f'objective.{key} = "guide" needs one; name its folder in guide.model, or that of its vectors in '
                "guide.store"
            )
    if recipe.uses_guide and guide.store and recipe.pairs == "spans":
        raise ConfigError(
            f'guide.store = {guide.store!r} holds vectors of whole texts, and objective.pairs = "spans" draws other '
            "spans in every epoch; name the guide in guide.model, without a store"
        )
    shared = recipe.uses_guide and recipe.is_taught and guide.store and guide.store == teacher.store
    if shared and guide.model and teacher.model and guide.model != teacher.model:
        raise ConfigError(
            f"guide.store and teacher.store are one folder, {guide.store}, and guide.model = {guide.model!r} and "
            f"teacher.model = {teacher.model!r} are two models; name a folder for each"
        )


def _check_teacher(recipe: Recipe) -> None:
    """A teacher must be named, teach by a term with a weight, and be compared by cosine."""
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


def _check_trained_part(recipe: Recipe) -> None:
    """Frozen layers and adapters must leave something that can train, and need a trained encoder."""
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
    deepest = recipe.num_layers
    if is_read(recipe, "model.frozen_layers") and model.frozen_layers >= deepest:
        raise ConfigError(
            f"model.frozen_layers = {model.frozen_layers} freezes all of the {deepest} layers that are trained; "
            f"use at most {deepest - 1}"
        )
    if recipe.optim.name == "muon" and recipe.adapter_rank:
        raise ConfigError(
            f'optim.name = "muon" does not go with model.lora_rank = {recipe.adapter_rank}: what is to be orthogonal '
            "is a matrix's step, and an adapter has two factors of one; use adamw, or lora_rank = 0"
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
