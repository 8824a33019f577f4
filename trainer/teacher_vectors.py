"""Command: a teacher's vectors of all texts, computed once, for a recipe with teacher.vectors = "stored".

    python -m trainer.teacher_vectors --config RECIPE.toml --texts FILE... [--section.key=value ...]

The texts are the files from which the recipe's shards were made. The teacher, teacher.model, may have any tokenizer and
any width: it reads the texts themselves, with its own prompt and length. The store is teacher.store
(trainer/objectives/vector_store.py). Under a launcher, ranks share the work; after a kill the same command goes on.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from data.collate import text_hashes
from data.corpora.options import TEXT_SPLITS, SourceOptions
from data.corpora.plan import plan_documents, plan_tuples
from data.corpora.read import read_split
from data.corpora.splits import Document, DocumentLayout, InputSplit
from data.encoding import TextEncoder
from data.ground.command import log_to_stderr, run_command
from data.ground.errors import ConfigError
from data.ground.files import sha256_of
from data.ground.options import settings_among
from data.ground.records import digest_of
from data.shards.format import NO_PROMPTS
from data.shards.reader import ShardFolder
from data.tokens import frame_of, load_tokenizer, prompt_ids, tokenizer_fingerprint
from trainer.config.load import load_recipe
from trainer.config.schema import Recipe
from trainer.distributed import World, gather_objects, join
from trainer.evaluation.encoding.encode import embedder_of
from trainer.evaluation.search.vectors import weights_digest
from trainer.evaluation.subject import choose_device, load_model
from trainer.objectives.vector_store import StoreRecord, keys_path, read_store_record, write_block, write_store_record

log = logging.getLogger(__name__)

BLOCK_TEXTS = 4_096


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.teacher_vectors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", required=True, metavar="RECIPE.toml", help="the recipe whose shards and teacher these are")
    add("--texts", required=True, nargs="+", metavar="FILE", help="what the shards were made from")
    add("--text-column", default="text", metavar="NAME", help="of documents (%(default)s)")
    add("--text-split", choices=TEXT_SPLITS, default="blank-lines", help="of .txt files (%(default)s)")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # what the deepspeed launcher passes
    args, rest = parser.parse_known_args(argv)
    overrides = settings_among(rest, parser)
    log_to_stderr()
    recipe = load_recipe(args.config, overrides)
    teacher = recipe.teacher
    if not (recipe.is_taught and teacher.vectors == "stored" and teacher.model and teacher.store):
        raise ConfigError(
            f'{args.config} stores no vectors; set teacher.vectors = "stored", teacher.model and teacher.store'
        )
    source = SourceOptions(skip_empty=True)
    with tempfile.TemporaryDirectory() as scratch:
        if recipe.reads_documents:
            units = plan_documents(args.texts, DocumentLayout(args.text_column, args.text_split), source)
        else:
            units = plan_tuples(args.texts, source=source, scratch=Path(scratch))
        store_vectors(recipe, units, join(choose_device("auto")))


def store_vectors(recipe: Recipe, units: Sequence[InputSplit], world: World) -> None:
    """Fill teacher.store with the vectors of all texts of these units. Every rank calls it."""
    folder, source = Path(recipe.teacher.store), recipe.teacher.model
    shards = [ShardFolder(path, verify="size") for path in recipe.data.shards]
    for each in shards:
        if each.manifest.prompts != NO_PROMPTS:
            raise ConfigError(
                f"the texts of {each.path} were prepared with prompts, and stored vectors are found by a text without "
                'one; prepare it without prompts and name them in the recipe, or set teacher.vectors = "live"'
            )
    tokenizer = load_tokenizer(shards[0].tokenizer_path)
    encoder, teachers, settings = load_model(source, pooling=recipe.teacher.pooling or None)
    if settings is None:
        raise ConfigError(f"teacher.model = {source!r} does not say how it pools; give a folder that does")
    full = settings.sizes.full
    if world.is_main:
        record = StoreRecord(
            teacher=digest_of([weights_digest(encoder), tokenizer_fingerprint(teachers), str(settings)]),
            tokenizer=tokenizer_fingerprint(tokenizer),
            texts=_texts_digest(units),
            rooms=tuple(_rooms(recipe, tokenizer)),
            width=full.dim,
        )
        _begin(folder, record)
    gather_objects(None)
    record = cast(StoreRecord, read_store_record(folder))
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    ids_of = TextEncoder(tokenizer.backend_tokenizer, np.dtype(np.int32))
    vectors_of = embedder_of(encoder, teachers, [full], device=world.device)
    blocks = 0
    with tqdm(unit="text", desc="teacher", disable=not (world.is_main and sys.stderr.isatty())) as bar:
        for number, (texts, is_query) in enumerate(_blocks(units)):
            blocks += 1
            bar.update(len(texts))
            if number % world.size != world.rank or keys_path(folder, number).exists():
                continue
            log.info("block %d: %s texts", number, f"{len(texts):,}")
            vectors = np.empty((len(texts), full.dim), np.float16)
            for side, length, prompt in (
                (True, settings.query_max_length, settings.query_prompt),
                (False, settings.passage_max_length, settings.passage_prompt),
            ):
                rows = np.flatnonzero(is_query == side)
                if len(rows):
                    found = vectors_of(
                        [texts[row] for row in rows], similarity="cosine", max_length=length, prompt=prompt
                    )
                    vectors[rows] = found[full]
            ids = ids_of(texts)
            keys = np.stack([text_hashes([each[:room] for each in ids]) for room in record.rooms], axis=1)
            write_block(folder, number, keys, vectors)
    gather_objects(None)
    if world.is_main:
        write_store_record(folder, record.model_copy(update={"blocks": blocks}))
        log.info("%s: %d blocks of vectors", folder, blocks)


def _begin(folder: Path, record: StoreRecord) -> None:
    """Go on with a store of the same teacher and texts, refuse any other, or begin one where there is none."""
    if (before := read_store_record(folder)) is not None:
        then, now = before.model_dump(), record.model_dump()
        if differing := [key for key in now if key != "blocks" and then[key] != now[key]]:
            raise ConfigError(
                f"teacher.store {folder} holds vectors with another {' and '.join(differing)}; name another folder"
            )
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"teacher.store {folder} holds something else; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_store_record(folder, record)


def _texts_digest(units: Sequence[InputSplit]) -> str:
    """The digest of the files, each hashed once, and of which of their records are read."""
    files = {path: sha256_of(path) for path in {unit.path for unit in units if unit.is_file}}
    return digest_of([[unit.source, unit.skip, unit.limit, files.get(unit.path)] for unit in units])


def _rooms(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """How many tokens of a text the recipe's collator keeps, beside prompts and special tokens; each number once."""
    data, (query_prompts, passage_prompts) = recipe.data, recipe.prompts
    if recipe.reads_documents:
        sides = [(data.max_length, passage_prompts)]
    else:
        sides = [(data.query_max_length, query_prompts), (data.passage_max_length, passage_prompts)]
    frame = frame_of(tokenizer)
    rooms = {
        length - len(frame.before) - len(frame.after) - len(prompt_ids(tokenizer, prompt) if prompt else ())
        for length, prompts in sides
        for prompt in (prompts or [""])
    }
    return sorted(rooms)


def _blocks(units: Sequence[InputSplit]) -> Iterator[tuple[list[str], np.ndarray]]:
    """Texts in the order of the files, BLOCK_TEXTS at a time, and which of them are queries."""
    texts: list[str] = []
    queries: list[bool] = []
    for unit in units:
        for _, record in read_split(unit):
            if "text" in record:
                texts.append(cast(Document, record)["text"])
                queries.append(False)
            else:
                mine = [record["query"], *record["positives"], *record["negatives"]]
                texts += mine
                queries += [True] + [False] * (len(mine) - 1)
            while len(texts) >= BLOCK_TEXTS:
                yield texts[:BLOCK_TEXTS], np.asarray(queries[:BLOCK_TEXTS])
                texts, queries = texts[BLOCK_TEXTS:], queries[BLOCK_TEXTS:]
    if texts:
        yield texts, np.asarray(queries)


if __name__ == "__main__":
    run_command(main)
