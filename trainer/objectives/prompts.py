"""What stands before the texts of each folder: the recipe's prompt, or the one that preparation put into the shards."""

from __future__ import annotations

from collections.abc import Sequence

from data.ground.errors import ConfigError
from data.shards.reader import ShardFolder
from trainer.config.schema import Recipe


def folder_prompts(recipe: Recipe, sources: Sequence[ShardFolder]) -> tuple[list[str], list[str]]:
    """The prompts of queries and of passages, one for each folder; an empty text where there is none.

    Raises ConfigError if the recipe names a prompt for texts that have one in the shards.
    """
    query_prompts, passage_prompts = recipe.prompts
    held = [source.manifest.prompts for source in sources]
    queries = _prompts("query_prompts", query_prompts, [each.query for each in held], sources)
    return queries, _prompts("passage_prompts", passage_prompts, [each.passage for each in held], sources)


def _prompts(name: str, given: Sequence[str], held: Sequence[str], sources: Sequence[ShardFolder]) -> list[str]:
    named = [*given] * len(sources) if len(given) == 1 else [*given] or [""] * len(sources)
    for prompt, own, source in zip(named, held, sources, strict=True):
        if prompt and own:
            raise ConfigError(
                f"data.{name} names {prompt!r} for {source.path}, whose texts have the prompt {own!r} already, since "
                'they were prepared; leave it out, or give one entry for each folder and "" for this one'
            )
    return [own or prompt for prompt, own in zip(named, held)]
