"""Which texts a recipe looks up in a store of vectors: where it cuts them, and whether a store fits it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from data.ground.errors import ConfigError
from data.shards.format import NO_PROMPTS
from data.shards.reader import ShardFolder
from data.tokens import frame_of, load_tokenizer, prompt_ids
from trainer.config.schema import Recipe
from trainer.objectives.vector_store import MAKE_AGAIN, VectorStore


@dataclass(frozen=True)
class Rooms:
    """How many tokens of a text a recipe's collators keep, beside prompts and special tokens; each number once.

    passages: of documents where there are no queries.
    """

    queries: tuple[int, ...]
    passages: tuple[int, ...]


def rooms_of(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Rooms:
    """tokenizer: the shards'. A recipe has several rooms where its folders' prompts differ in length."""
    data, (query_prompts, passage_prompts) = recipe.data, recipe.prompts
    frame = frame_of(tokenizer)

    def rooms(length: int, prompts: Iterable[str]) -> tuple[int, ...]:
        room = length - len(frame.before) - len(frame.after)
        return tuple(sorted({room - len(prompt_ids(tokenizer, prompt)) for prompt in prompts or [""]}))

    if recipe.reads_documents:
        return Rooms((), rooms(data.max_length, passage_prompts))
    return Rooms(rooms(data.query_max_length, query_prompts), rooms(data.passage_max_length, passage_prompts))


def refuse_prepared_prompts(sources: Sequence[ShardFolder], section: str) -> None:
    """Refuse shards whose texts hold prompts. section: the recipe's section that names the store."""
    live = 'set teacher.vectors = "live"' if section == "teacher" else "remove guide.store"
    for each in sources:
        if each.manifest.prompts != NO_PROMPTS:
            raise ConfigError(
                f"the texts of {each.path} were prepared with prompts, and stored vectors are found by a text without "
                f"one; prepare it without prompts and name them in the recipe, or {live}"
            )


def open_store(recipe: Recipe, sources: Sequence[ShardFolder], *, section: str) -> VectorStore:
    """The store that a section names, guide or teacher. Raises ConfigError if it does not fit the recipe."""
    fingerprint = sources[0].manifest.tokenizer["fingerprint"]
    store = VectorStore.open(getattr(recipe, section).store, tokenizer=fingerprint, section=section)
    refuse_prepared_prompts(sources, section)
    record = store.record
    if recipe.reads_documents:
        if record.query_rooms:
            raise ConfigError(
                f"{store.named} is of queries and passages, and this recipe reads documents; {MAKE_AGAIN}"
            )
        return store
    if not record.query_rooms:
        raise ConfigError(
            f"{store.named} is of documents, or of an earlier version, and has no vectors of queries; {MAKE_AGAIN}, "
            "from this recipe, in a new folder"
        )
    rooms = rooms_of(recipe, load_tokenizer(sources[0].tokenizer_path))
    for side, wanted, held in (
        ("query", rooms.queries, record.query_rooms),
        ("passage", rooms.passages, record.rooms),
    ):
        if missing := [room for room in wanted if room not in held]:
            raise ConfigError(
                f"{store.named} is of texts cut at other lengths: data.{side}_max_length and the prompts leave "
                f"{missing[0]} tokens, and its vectors are of {' or '.join(map(str, held))}; set the lengths with "
                f"which it was made, or {MAKE_AGAIN}, from this recipe, in a new folder"
            )
    return store
