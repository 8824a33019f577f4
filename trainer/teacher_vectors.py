"""Command: a frozen model's vectors of all texts, computed once, for a recipe that reads them from a store.

    python -m trainer.teacher_vectors --config RECIPE.toml --texts FILE... [--section.key=value ...]

The texts are the files from which the recipe's shards were made. The model is teacher.model where teacher.vectors =
"stored", and guide.model where guide.store is named; its vectors go to teacher.store and guide.store
(trainer/objectives/vector_store.py), or to one folder for both. It may have any tokenizer and any width, because it
reads the texts themselves, with its own prompts. Queries and passages are cut as the recipe cuts them and at the
model's own lengths, so a stored vector is the one that the model would compute in training; documents are cut at the
model's own length alone. A text that occurs several times is embedded once. Under a launcher, ranks share the work;
after a kill the same command goes on. Blocks of vectors that are damaged are made anew.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from data.collate import text_hashes, with_prompts
from data.corpora.options import TEXT_SPLITS, SourceOptions
from data.corpora.plan import plan_documents, plan_tuples
from data.corpora.read import read_split
from data.corpora.splits import Document, DocumentLayout, InputSplit
from data.encoding import TextEncoder
from data.ground.command import log_to_stderr, run_command
from data.ground.errors import ConfigError, DataError
from data.ground.files import sha256_of
from data.ground.options import Parser, Stated, settings_among, stated_in
from data.ground.records import digest_of
from data.model_folders import SETTINGS_FILE
from data.shards.reader import ShardFolder
from data.tokens import SpelledOut, Vocabulary, load_tokenizer, prompt_ids, prompt_length, tokenizer_fingerprint
from models.backbone import most_tokens
from models.encoder import Encoder
from models.settings import EmbeddingSettings
from models.sizes import Size
from trainer.config.load import load_recipe
from trainer.config.schema import Recipe
from trainer.distributed import World, gather_objects, join
from trainer.evaluation.encoding.encode import DEFAULT_BATCH_TOKENS, Embedder, embedder_of
from trainer.evaluation.search.vectors import weights_digest
from trainer.evaluation.subject import choose_device, load_model
from trainer.objectives.guide import Guide
from trainer.objectives.stored_texts import Rooms, refuse_prepared_prompts, rooms_of
from trainer.objectives.vector_store import (
    StoreRecord,
    has_block,
    query_keys,
    read_store_record,
    write_block,
    write_store_record,
)

log = logging.getLogger(__name__)

BLOCK_TEXTS = 4_096


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog="python -m trainer.teacher_vectors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", required=True, metavar="RECIPE.toml", help="the recipe whose shards and teacher these are")
    add("--texts", required=True, nargs="+", metavar="FILE", help="what the shards were made from")
    add("--text-column", action=Stated, default="text", metavar="NAME", help="of documents (%(default)s)")
    add("--text-split", action=Stated, choices=TEXT_SPLITS, default="blank-lines", help="of .txt files (%(default)s)")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # what the deepspeed launcher passes
    args, rest = parser.parse_known_args(argv)
    overrides = settings_among(rest)
    log_to_stderr()
    recipe = load_recipe(args.config, overrides)
    sections = _storing_sections(recipe, args.config)
    source = SourceOptions(skip_empty=True, stated=stated_in(args))
    with tempfile.TemporaryDirectory() as scratch:
        if recipe.reads_documents:
            units = plan_documents(args.texts, DocumentLayout(args.text_column, args.text_split), source)
        else:
            units = plan_tuples(args.texts, source=source, scratch=Path(scratch))
        world = join(choose_device("auto"))
        for section in sections:
            store_vectors(recipe, units, world, section=section)


def _storing_sections(recipe: Recipe, named: str) -> list[str]:
    """The sections whose stores are to be filled, one of those that name the same folder. named: the recipe's file."""
    folders: dict[Path, str] = {}
    stored = recipe.is_taught and recipe.teacher.vectors == "stored"
    for section, reads in (("teacher", stored), ("guide", recipe.uses_guide)):
        chosen = getattr(recipe, section)
        if reads and chosen.store and (chosen.model or folders):
            folders.setdefault(Path(chosen.store).resolve(), section)
    if not folders:
        raise ConfigError(
            f'{named} stores no vectors; set teacher.vectors = "stored", teacher.model and teacher.store, or, for a '
            "guide, guide.model and guide.store"
        )
    for folder, section in folders.items():
        if not getattr(recipe, section).model:
            raise ConfigError(
                f"{section}.store {folder} is to hold a model's vectors; name the model in {section}.model"
            )
    return list(folders.values())


def store_vectors(recipe: Recipe, units: Sequence[InputSplit], world: World, *, section: str = "teacher") -> None:
    """Fill the store that a section of the recipe names with the vectors of all texts. Every rank calls it."""
    folder = Path(getattr(recipe, section).store)
    shards = [ShardFolder(path, verify="size") for path in recipe.data.shards]
    refuse_prepared_prompts(shards, section)
    tokenizer = load_tokenizer(shards[0].tokenizer_path)
    model = _StoredModel.of(recipe, section)
    student = _Student.of(recipe, tokenizer)
    if world.is_main:
        settings = model.settings
        paired = not recipe.reads_documents
        own_temperature = paired and (Path(model.source) / SETTINGS_FILE).is_file()
        record = StoreRecord(
            teacher=digest_of([weights_digest(model.encoder), tokenizer_fingerprint(model.tokenizer), str(settings)]),
            tokenizer=tokenizer_fingerprint(tokenizer),
            texts=_texts_digest(units),
            rooms=student.rooms.passages,
            query_rooms=student.rooms.queries,
            similarity=settings.similarity if paired else "cosine",
            temperature=settings.temperature if own_temperature else None,
            width=model.full.dim,
        )
        _begin(folder, record, section)
    gather_objects(None)
    record = cast(StoreRecord, read_store_record(folder))
    if record.format == 1 and record.blocks is not None:
        # Finished by an earlier version, whose blocks hold other texts.
        if not all(has_block(folder, number, record) for number in range(record.blocks)):
            raise ConfigError(
                f"{section}.store {folder} was made by an earlier version and is damaged; name another folder"
            )
        return
    vectors_of = _reader(model, student, record, shards, world.device)
    blocks = 0
    with tqdm(unit="text", desc=section, disable=not (world.is_main and sys.stderr.isatty())) as bar:
        for number, (texts, is_query) in enumerate(_blocks(units)):
            blocks += 1
            bar.update(len(texts))
            if number % world.size != world.rank or has_block(folder, number, record):
                continue
            log.info("block %d: %s texts", number, f"{len(texts):,}")
            block = student.read(texts, is_query)
            vectors = vectors_of(block).astype(np.float16)
            if not np.isfinite(vectors).all():
                raise ConfigError(
                    f"{section}.model = {model.source!r} gives vectors that float16 cannot hold, or none at all; "
                    "choose another"
                )
            write_block(folder, number, block.keys, vectors)
    gather_objects(None)
    if world.is_main:
        write_store_record(folder, record.model_copy(update={"blocks": blocks}))
        log.info("%s: %d blocks of vectors", folder, blocks)


@dataclass(frozen=True)
class _StoredModel:
    """The frozen model whose vectors are stored."""

    source: str
    encoder: Encoder
    tokenizer: PreTrainedTokenizerFast
    settings: EmbeddingSettings

    @property
    def full(self) -> Size:
        return self.settings.sizes.full

    @classmethod
    def of(cls, recipe: Recipe, section: str) -> _StoredModel:
        chosen = getattr(recipe, section)
        encoder, tokenizer, settings = load_model(chosen.model, pooling=chosen.pooling or None)
        if settings is None and chosen.pooling:
            longest = most_tokens(encoder.backbone) or 2**20
            size = encoder.num_layers, encoder.embedding_size
            settings = EmbeddingSettings(
                chosen.pooling, ladder=(size,), query_max_length=longest, passage_max_length=longest
            )
        if settings is None:
            raise ConfigError(
                f"{section}.model = {chosen.model!r} does not say how it pools; set {section}.pooling, or give a "
                "folder that does"
            )
        return cls(chosen.model, encoder, tokenizer, settings)


@dataclass(frozen=True)
class _Block:
    """Texts of a block as the student reads them; a text that it cuts at several lengths occurs as often.

    ids: of each, cut. is_cut: bool [n], whether that left some out. keys: int64 [n, r].
    """

    texts: list[str]
    ids: list[np.ndarray]
    is_cut: np.ndarray
    is_query: np.ndarray
    keys: np.ndarray


@dataclass(frozen=True)
class _Student:
    """How the students' tokenizer and the recipe's lengths read texts."""

    tokenizer: PreTrainedTokenizerFast
    encode: TextEncoder
    rooms: Rooms

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> _Student:
        rooms = rooms_of(recipe, tokenizer)
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        return cls(tokenizer, TextEncoder(tokenizer.backend_tokenizer, np.dtype(np.int32)), rooms)

    def read(self, texts: list[str], is_query: np.ndarray) -> _Block:
        ids = self.encode(texts)
        if not self.rooms.queries:
            keys = np.stack([text_hashes([each[:room] for each in ids]) for room in self.rooms.passages], axis=1)
            return _Block(texts, ids, np.zeros(len(texts), bool), is_query, keys)
        cuts = [  # (text, its length as the student reads it)
            (row, length)
            for row, each in enumerate(ids)
            for length in sorted(
                {min(len(each), room) for room in (self.rooms.queries if is_query[row] else self.rooms.passages)}
            )
        ]
        read = [ids[row][:length] for row, length in cuts]
        rows = np.asarray([row for row, _ in cuts])
        hashes, sides = text_hashes(read), is_query[rows]
        hashes[sides] = query_keys(torch.from_numpy(hashes[sides])).numpy()
        _, first = np.unique(hashes, return_index=True)  # texts that the student cannot tell apart
        first.sort()
        kept = [cuts[place] for place in first.tolist()]
        return _Block(
            [texts[row] for row, _ in kept],
            [ids[row][:length] for row, length in kept],
            np.asarray([length < len(ids[row]) for row, length in kept]),
            sides[first],
            hashes[first, None],
        )

    def cut_text(self, text: str, length: int) -> str:
        """The beginning of a text that its first `length` tokens cover."""
        encoding = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        return text[: encoding.offsets[length - 1][1]]


def _reader(
    model: _StoredModel, student: _Student, record: StoreRecord, shards: Sequence[ShardFolder], device: torch.device
) -> Callable[[_Block], np.ndarray]:
    """The function that gives a block's vectors, float32 [n, width].

    A model with the students' tokenizer reads the students' ids, as it would in training. Their text may have other ids
    where it is cut within a word.
    """
    settings = model.settings
    if record.query_rooms and all(each.reads_alike(model.tokenizer) for each in shards):
        prompts = settings.query_prompt, settings.passage_prompt
        try:
            ids = [prompt_ids(model.tokenizer, prompt) for prompt in prompts]
        except DataError as error:
            log.info("the model reads texts, not the students' ids: %s", error)
        else:
            lengths = [prompt_length(model.tokenizer, prompt) for prompt in prompts]
            rows = model.encoder.word_embeddings.num_embeddings
            vocabulary = replace(shards[0].vocabulary, spelled_out=SpelledOut.of(model.tokenizer, rows))
            guide = _guide_of(model, record, vocabulary)
            return lambda block: _vectors_of_ids(block, guide, list(zip(ids, lengths)), vocabulary, device)
    embedder = embedder_of(model.encoder, model.tokenizer, [model.full], device=device)
    return lambda block: _vectors_of_texts(block, embedder, student, settings, record.similarity)


def _guide_of(model: _StoredModel, record: StoreRecord, vocabulary: Vocabulary) -> Guide:
    """The model as it would read a batch's ids in training."""
    encoder, settings = model.encoder.eval(), model.settings
    longest = most_tokens(encoder.backbone) or 2**31
    return Guide(
        encoder,
        model.full,
        record.similarity,
        1.0,
        query_max_length=min(settings.query_max_length, longest),
        passage_max_length=min(settings.passage_max_length, longest),
        token_budget=DEFAULT_BATCH_TOKENS,
        closing=len(vocabulary.after),
    )


def _vectors_of_ids(
    block: _Block,
    guide: Guide,
    prompts: Sequence[tuple[np.ndarray, int]],
    vocabulary: Vocabulary,
    device: torch.device,
) -> np.ndarray:
    """prompts: of queries and of passages, the ids and how many tokens of a text a pooling without them leaves out."""
    vectors = np.empty((len(block.texts), guide.size.dim), np.float32)
    sides = [np.flatnonzero(block.is_query), np.flatnonzero(~block.is_query)]
    queries, passages = (
        with_prompts([block.ids[row] for row in rows], [0] * len(rows), [ids], vocabulary, [length] if length else ())
        for rows, (ids, length) in zip(sides, prompts)
    )
    for rows, found in zip(sides, guide.vectors(queries, passages, device=device, heartbeat=lambda phase: None)):
        vectors[rows] = found.cpu().numpy()
    return vectors


def _vectors_of_texts(
    block: _Block, embedder: Embedder, student: _Student, settings: EmbeddingSettings, similarity: str
) -> np.ndarray:
    (full,) = embedder.sizes
    vectors = np.empty((len(block.texts), full.dim), np.float32)
    texts = [
        student.cut_text(text, len(ids)) if is_cut else text
        for text, ids, is_cut in zip(block.texts, block.ids, block.is_cut.tolist())
    ]
    for side, length, prompt in (
        (True, settings.query_max_length, settings.query_prompt),
        (False, settings.passage_max_length, settings.passage_prompt),
    ):
        rows = np.flatnonzero(block.is_query == side)
        if len(rows):
            of_side = [texts[row] for row in rows]
            vectors[rows] = embedder(of_side, similarity=similarity, max_length=length, prompt=prompt)[full]
    return vectors


def _begin(folder: Path, record: StoreRecord, section: str) -> None:
    """Go on with a store of the same model and texts, refuse any other, or begin one where there is none."""
    if (before := read_store_record(folder)) is not None:
        then, now = before.model_dump(), record.model_dump()
        free = ("blocks", "format") if before.blocks is not None else ("blocks",)
        if differing := [key for key in now if key not in free and then[key] != now[key]]:
            raise ConfigError(
                f"{section}.store {folder} holds vectors with another {' and '.join(differing)}; name another folder"
            )
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{section}.store {folder} holds something else; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_store_record(folder, record)


def _texts_digest(units: Sequence[InputSplit]) -> str:
    """The digest of the files, each hashed once, and of which of their records are read."""
    files = {path: sha256_of(path) for path in {unit.path for unit in units if unit.is_file}}
    return digest_of([[unit.source, unit.skip, unit.limit, files.get(unit.path)] for unit in units])


def _blocks(units: Sequence[InputSplit]) -> Iterator[tuple[list[str], np.ndarray]]:
    """Distinct texts in the order of the files, BLOCK_TEXTS at a time, and which of them are queries.

    A text that is both a query and a passage comes once as each.
    """
    texts: list[str] = []
    queries: list[bool] = []
    seen, chunk = _Seen(), list[tuple[str, bool]]()
    for unit in units:
        for _, record in read_split(unit):
            if "text" in record:
                chunk.append((cast(Document, record)["text"], False))
            else:
                chunk.append((record["query"], True))
                chunk += [(text, False) for text in (*record["positives"], *record["negatives"])]
            if len(chunk) < BLOCK_TEXTS:
                continue
            _add_new(chunk, seen, texts, queries)
            chunk = []
            while len(texts) >= BLOCK_TEXTS:
                yield texts[:BLOCK_TEXTS], np.asarray(queries[:BLOCK_TEXTS])
                texts, queries = texts[BLOCK_TEXTS:], queries[BLOCK_TEXTS:]
    _add_new(chunk, seen, texts, queries)
    for start in range(0, len(texts), BLOCK_TEXTS):
        yield texts[start : start + BLOCK_TEXTS], np.asarray(queries[start : start + BLOCK_TEXTS])


def _add_new(chunk: Sequence[tuple[str, bool]], seen: _Seen, texts: list[str], queries: list[bool]) -> None:
    digests = b"".join(
        hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8, salt=b"query" if is_query else b"").digest()
        for text, is_query in chunk
    )
    for row in seen.first_seen(np.frombuffer(digests, np.uint64)).tolist():
        text, is_query = chunk[row]
        texts.append(text)
        queries.append(is_query)


class _Seen:
    """The hashes seen so far, eight bytes each, in sorted runs of which each is longer than the next."""

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def first_seen(self, hashes: np.ndarray) -> np.ndarray:
        """The rows at which a hash occurs that was not seen before, in order; they are seen from now on."""
        new, first = np.unique(hashes, return_index=True)
        for run in self._runs:
            places = np.minimum(np.searchsorted(run, new), len(run) - 1)
            fresh = run[places] != new
            new, first = new[fresh], first[fresh]
        run = new
        while self._runs and len(self._runs[-1]) <= len(run):
            run = np.sort(np.concatenate([self._runs.pop(), run]))
        if len(run):
            self._runs.append(run)
        return np.sort(first)


if __name__ == "__main__":
    run_command(main)
