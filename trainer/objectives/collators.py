"""Builds the collator that makes batches of a recipe's samples, with one function for each kind of batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from data.collate import MaskedCollator, MaskedPairCollator, PairCollator, SpanCollator, TextCollator
from data.ground.errors import ConfigError, DataError
from data.shards.reader import ShardFolder
from data.tokens import SpelledOut, Vocabulary, left_out_length, load_tokenizer, prompt_ids, prompt_length
from models.loading import load_config
from models.sizes import ModelError
from trainer.config.schema import Recipe
from trainer.objectives.prompts import folder_prompts


def text_collator(recipe: Recipe, sources: Sequence[ShardFolder]) -> TextCollator:
    """The collator of documents without masks, each after its folder's prompt."""
    return TextCollator(
        _vocabulary(recipe, sources),
        max_length=recipe.data.max_length,
        prompts=_prompt_ids("passage_prompts", recipe.prompts[1], sources),
        prompt_lengths=_prompt_lengths(recipe, folder_prompts(recipe, sources)[1], sources),
    )


def masked_collator(
    recipe: Recipe, sources: Sequence[ShardFolder]
) -> MaskedCollator | SpanCollator | MaskedPairCollator:
    """The collator of masked texts. Where the recipe has pairs, batches also hold spans or training examples.

    Raises ConfigError where the shards' tokenizer has no mask token.
    """
    chosen, vocabulary = recipe.objective, _vocabulary(recipe, sources)
    if vocabulary.mask_id is None:
        raise ConfigError("the shards' tokenizer has no mask token; prepare the data with one that has")
    masked = MaskedCollator(
        vocabulary,
        max_length=recipe.data.max_length,
        encoder_mask_ratio=chosen.encoder_mask_ratio,
        decoder_mask_ratio=chosen.decoder_mask_ratio if chosen.decoder else None,
        nested=chosen.nested_masks,
        seed=recipe.run.seed,
        enhanced=recipe.decodes_enhanced,
    )
    if chosen.pairs == "tuples":
        return MaskedPairCollator(masked, pair_collator(recipe, sources))
    return SpanCollator(masked) if chosen.pairs == "spans" else masked


def pair_collator(recipe: Recipe, sources: Sequence[ShardFolder]) -> PairCollator:
    """The collator of queries with their positives and hard negatives, or of graded pairs."""
    query_prompts, passage_prompts = recipe.prompts
    of_queries, of_passages = folder_prompts(recipe, sources)
    return PairCollator(
        _vocabulary(recipe, sources),
        query_max_length=recipe.data.query_max_length,
        passage_max_length=recipe.data.passage_max_length,
        num_positives=recipe.data.num_positives,
        num_negatives=recipe.data.num_negatives,
        seed=recipe.run.seed,
        graded=sources[0].graded,
        weighted=any(source.weighted for source in sources),
        query_prompts=_prompt_ids("query_prompts", query_prompts, sources),
        passage_prompts=_prompt_ids("passage_prompts", passage_prompts, sources),
        query_prompt_lengths=_prompt_lengths(recipe, of_queries, sources),
        passage_prompt_lengths=_prompt_lengths(recipe, of_passages, sources),
        negatives_from=_negatives_from(recipe, sources),
    )


def _negatives_from(recipe: Recipe, sources: Sequence[ShardFolder]) -> list[int]:
    """The stream position, in samples, from which on each negative is drawn; it is the beginning of a step."""
    if not recipe.data.negatives_from:
        return []
    shares, batch = recipe.data.negatives_from, recipe.train.global_batch_size
    steps = total_steps(recipe, sources)
    return [round(share * steps) * batch for share in shares] * (recipe.data.num_negatives if len(shares) == 1 else 1)


def total_steps(recipe: Recipe, sources: Sequence[ShardFolder]) -> int:
    """The steps of a whole run, whether its length is set in steps or in epochs."""
    return recipe.train.steps or -(-total_samples(recipe, sources) // recipe.train.global_batch_size)


def total_samples(recipe: Recipe, sources: Sequence[ShardFolder]) -> int:
    """The samples of a run whose length is set in epochs."""
    return max(1, round(recipe.train.epochs * sum(source.num_samples for source in sources)))


def _vocabulary(recipe: Recipe, sources: Sequence[ShardFolder]) -> Vocabulary:
    """The shards' vocabulary, which also says how the models that read the batch's ids read those without a row.

    All models read the same batch, so the smallest table decides.
    """
    vocabulary = sources[0].vocabulary
    if not vocabulary.spelled_only:
        return vocabulary
    models = {"model.source": recipe.model.source}
    if recipe.uses_guide and not recipe.guide.store:
        models["guide.model"] = recipe.guide.model
    if recipe.is_taught and recipe.teacher.vectors == "live":
        models["teacher.model"] = recipe.teacher.model
    # A model of model.config has a row for every id.
    rows = min((_rows_of(key, name) for key, name in models.items() if name), default=vocabulary.size)
    tokenizer = load_tokenizer(sources[0].tokenizer_path)
    if vocabulary.rows_needed > rows or (spelled_out := SpelledOut.of(tokenizer, rows)) is None:
        return vocabulary  # a table that is too small is refused where its model is loaded
    for side, prompts in zip(("query", "passage"), folder_prompts(recipe, sources), strict=True):
        for prompt in dict.fromkeys(prompts):
            try:
                spelled_out.check_prompt(tokenizer, prompt)
            except DataError as error:
                raise ConfigError(f"data.{side}_prompts: {error}") from None
    return replace(vocabulary, spelled_out=spelled_out)


def _rows_of(key: str, name: str) -> int:
    """How many rows the token table of the model that a recipe's key names has."""
    try:
        return int(load_config(name).vocab_size)
    except ModelError as error:
        raise ConfigError(f"{key} = {name!r}: {error}") from None


def _prompt_ids(name: str, prompts: Sequence[str], sources: Sequence[ShardFolder]) -> list[np.ndarray]:
    """The token ids of each folder's prompt; an empty list where there are no prompts."""
    if not any(prompts):
        return []
    tokenizer = load_tokenizer(sources[0].tokenizer_path)
    try:
        found = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    except DataError as error:
        raise ConfigError(f"data.{name}: {error}") from None
    return found * len(sources) if len(found) == 1 else found


def _prompt_lengths(recipe: Recipe, prompts: Sequence[str], sources: Sequence[ShardFolder]) -> list[int]:
    """What a pooling without prompts leaves out in each folder; an empty list where there are no prompts."""
    if not any(prompts):
        return []
    tokenizer = load_tokenizer(sources[0].tokenizer_path)
    if recipe.pools_prompt:
        return [prompt_length(tokenizer, prompt) for prompt in prompts]
    try:
        return [left_out_length(tokenizer, prompt) for prompt in prompts]
    except DataError as error:
        raise ConfigError(f"model.pool_prompt = false: {error}") from None
