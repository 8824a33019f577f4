"""A guide: a frozen model whose scores filter out false negatives, or are learnt by every size.

Filtering by a guide is GISTEmbed's method (Solatorio 2024, arXiv:2402.16829). What is decided here:
- The guide reads the batch's token ids, so it must have the shards' tokenizer. Texts have the recipe's prompts, which
  the guide leaves out of its pooling if its settings say so.
- The guide reads a text as it would in use: cut to the guide's own lengths, with the last token, [SEP], kept. It
  compares texts by its own similarity. A static guide leaves special tokens out itself, as it always does; an encoder
  gets them from the batch, whatever the student does with them.
- The guide is outside the engine: each rank holds all of it and embeds its own texts, in micro-batches that need not
  match other ranks'. It has no dropout, draws no random numbers and gets no gradient, and no checkpoint holds it.
- A stored guide makes no passes: the vectors that it would compute were computed once, for each text with the guide's
  own prompts (trainer/objectives/vector_store.py). It may have any tokenizer, since the texts themselves were read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from data.collate import PairBatch, Texts, offsets_of
from data.ground.errors import ConfigError, DataError
from data.model_folders import SETTINGS_FILE
from data.shards.reader import ShardFolder
from data.tokens import left_out_length, load_tokenizer, tokenizer_fingerprint
from models.backbone import most_tokens, truncate_layers
from models.choices import Pooling
from models.encoder import Encoder, load_encoder
from models.packed_attention import packs
from models.settings import EmbeddingSettings
from models.sizes import ModelError, Size
from trainer.config.schema import Recipe
from trainer.losses.unit_vectors import normalize_
from trainer.objectives.backward import micro_batches
from trainer.objectives.prompts import folder_prompts
from trainer.objectives.stored_texts import open_store
from trainer.objectives.vector_store import VectorStore

log = logging.getLogger(__name__)


class PairGuide(Protocol):
    """A source of the vectors by whose scores negatives are filtered, or which are learnt."""

    @property
    def temperature(self) -> float: ...
    def pair_vectors(
        self, batch: PairBatch, *, device: torch.device, heartbeat: Callable[[str], None]
    ) -> tuple[Tensor, Tensor]:
        """The vectors of a batch's queries [n, g] and passages [m, g], float32; unit vectors for cosine."""
        ...


@dataclass(frozen=True)
class StoredGuide:
    """Looks up vectors that were computed once, by the hash of each text. temperature: as of `Guide`."""

    store: VectorStore
    temperature: float

    def pair_vectors(
        self, batch: PairBatch, *, device: torch.device, heartbeat: Callable[[str], None]
    ) -> tuple[Tensor, Tensor]:
        queries, passages = (each.to(device) for each in self.store.find_pairs(batch))
        if self.store.record.similarity == "cosine":  # float16 has rounded their lengths, too
            normalize_(queries)
            normalize_(passages)
        return queries, passages


@dataclass(frozen=True)
class Guide:
    """A frozen model and how it reads texts.

    temperature: divides the model's scores where it teaches. Lengths and the budget are in tokens, special ones
    included.
    """

    encoder: Encoder
    size: Size
    similarity: str
    temperature: float
    query_max_length: int
    passage_max_length: int
    token_budget: int
    closing: int  # tokens that end every text, which cutting keeps

    def pair_vectors(
        self, batch: PairBatch, *, device: torch.device, heartbeat: Callable[[str], None]
    ) -> tuple[Tensor, Tensor]:
        return self.vectors(batch.queries, batch.passages, device=device, heartbeat=heartbeat)

    def vectors(
        self, queries: Texts, passages: Texts, *, device: torch.device, heartbeat: Callable[[str], None]
    ) -> tuple[Tensor, Tensor]:
        """The vectors of these queries [n, g] and passages [m, g], float32; unit vectors for cosine."""
        limits = self.query_max_length, self.passage_max_length
        first, second = (
            self.embed(cut(texts, limit, closing=self.closing), device=device, heartbeat=heartbeat)
            for texts, limit in zip((queries, passages), limits)
        )
        return first, second

    @torch.no_grad()
    def embed(self, texts: Texts, *, device: torch.device, heartbeat: Callable[[str], None]) -> Tensor:
        """The vectors of these texts without cutting them, float32 [n, g]; unit vectors for cosine."""
        self.encoder.to(device)
        vectors = torch.empty(len(texts), self.size.dim, device=device)
        if self.encoder.is_static and len(texts):
            heartbeat("guide")
            tokens, offsets = texts.tokens.to(device), texts.offsets.to(device)
            (vectors,) = self.encoder(tokens, None, (self.size,), offsets=offsets)
        elif len(texts):
            packed = packs(self.encoder.backbone)
            for rows in micro_batches(texts.lengths, token_budget=self.token_budget, packed=packed):
                heartbeat("guide")
                read = texts.take(rows)
                tokens, offsets, prompts = (each.to(device) for each in (read.tokens, read.offsets, read.left_out))
                (part,) = self.encoder(tokens, None, (self.size,), offsets=offsets, prompt_lengths=prompts)
                vectors[rows.to(device)] = part.float()
        if self.similarity == "cosine":
            normalize_(vectors)
        return vectors


def cut(texts: Texts, longest: int, *, closing: int) -> Texts:
    """Texts of at most `longest` tokens. A longer text keeps its first ones and the last `closing`, which end it."""
    lengths = texts.lengths
    if not len(texts) or int(lengths.max()) <= longest:
        return texts
    ends = torch.arange(len(texts.tokens)) - texts.offsets[:-1].repeat_interleave(lengths)  # place within the text
    left = lengths.repeat_interleave(lengths)
    kept = (ends < longest - closing) | (ends >= left - closing)
    offsets = offsets_of(lengths.clamp(max=longest))
    prompts = None if texts.prompt_lengths is None else texts.prompt_lengths.clamp(max=longest - 1)
    return Texts(texts.tokens[kept], offsets, prompts)


def load_guide(recipe: Recipe, sources: Sequence[ShardFolder]) -> Guide | StoredGuide | None:
    """The recipe's guide, in eval mode without gradients, or None. Raises ConfigError for whatever is wrong with it."""
    chosen = recipe.guide
    if not recipe.uses_guide:
        return None
    if chosen.store:
        store = open_store(recipe, sources, section="guide")
        temperature = chosen.temperature or store.record.temperature
        if recipe.guide_teaches and not temperature:
            raise ConfigError(
                f"{store.named} is of a model without a barista.json that names its temperature; set guide.temperature"
            )
        return StoredGuide(store, temperature or 1.0)
    return load_frozen(
        recipe,
        sources,
        section="guide",
        source=chosen.model,
        pooling=chosen.pooling or None,
        temperature=chosen.temperature,
        needs_temperature=recipe.guide_teaches,
    )


def load_frozen(
    recipe: Recipe,
    sources: Sequence[ShardFolder],
    *,
    section: str,
    source: str,
    pooling: Pooling | None,
    temperature: float,
    needs_temperature: bool = False,
) -> Guide:
    """A frozen model that reads the batch's token ids, in eval mode. Raises ConfigError for whatever is wrong with it.

    section: the recipe's section that names the model, such as "guide". temperature: 0 means the model's own.
    """
    named = f"{section}.model = {source!r}"
    try:
        tokenizer = load_tokenizer(source)
        settings = EmbeddingSettings.load(source)
    except (DataError, ModelError) as error:
        raise ConfigError(f"{named}: {error}") from None
    fingerprint = tokenizer_fingerprint(tokenizer)
    for folder in sources:
        if not folder.reads_alike(tokenizer):
            raise ConfigError(
                f"{named} has another tokenizer than the shards in {folder.path}, whose ids it would read; choose a "
                f"{section} with theirs, or make the shards again with its own"
            )
    if settings is not None and settings.tokenizer not in (None, fingerprint):
        raise ConfigError(
            f"{named} was trained with another tokenizer than the one in its folder, as its barista.json says; copy "
            "the model folder again"
        )
    if settings is None and not pooling:
        raise ConfigError(f"{named} does not say how it pools; set {section}.pooling")
    if needs_temperature and not temperature and not (Path(source) / SETTINGS_FILE).is_file():
        raise ConfigError(f"{named} has no barista.json with a temperature; set {section}.temperature")
    try:
        encoder = load_encoder(source, pooling=pooling).requires_grad_(False).eval()
        if not encoder.pool_prompt:
            for prompt in {*chain(*folder_prompts(recipe, sources))}:
                left_out_length(tokenizer, prompt)
    except (DataError, ModelError) as error:
        raise ConfigError(f"{named}: {error}") from None
    if (rows := encoder.word_embeddings.weight.shape[0]) < (needed := sources[0].vocabulary.rows_needed):
        raise ConfigError(
            f"{named} has {rows} token embeddings for the {needed} ids of the shards' tokenizer; choose another"
        )
    size = settings.sizes.full if settings and settings.ladder else Size(encoder.num_layers, encoder.embedding_size)
    if not encoder.is_static:
        truncate_layers(encoder.backbone, size.layers)
    if settings is None:
        settings = EmbeddingSettings(query_max_length=2**31, passage_max_length=2**31)
    else:
        _say_if_prompts_differ(recipe, sources, settings, section)
    positions = most_tokens(encoder.backbone) or 2**31
    longest = min(recipe.longest_text, settings.max_length, positions)
    return Guide(
        encoder,
        size,
        settings.similarity,
        temperature or settings.temperature,
        query_max_length=min(settings.query_max_length, positions),
        passage_max_length=min(settings.passage_max_length, positions),
        token_budget=recipe.train.micro_batch_size * longest,
        closing=len(sources[0].vocabulary.after),
    )


def _say_if_prompts_differ(
    recipe: Recipe, sources: Sequence[ShardFolder], settings: EmbeddingSettings, section: str
) -> None:
    query_prompts, passage_prompts = folder_prompts(recipe, sources)
    for name, own, given in (
        ("query", settings.query_prompt, query_prompts),
        ("passage", settings.passage_prompt, passage_prompts),
    ):
        if recipe.reads_documents and name == "query":
            continue
        if set(given) != {own}:
            log.warning(
                "the %s was trained with the %s prompt %r, and reads this recipe's texts with %s",
                section,
                name,
                own,
                " or ".join(map(repr, sorted(set(given)))),
            )
