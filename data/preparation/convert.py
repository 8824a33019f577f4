"""One process tokenizes the texts of an input split and writes them as shards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from data.corpora.read import read_split
from data.corpora.splits import Document, InputSplit, TupleRecord, place
from data.encoding import TextEncoder
from data.ground.errors import DataError
from data.keyed_random import draws, sample_keys
from data.lines import ByteCounter
from data.shards.format import Kind, token_dtype
from data.shards.writer import SplitWriter

# Limits of one tokenizer call: enough texts to amortise the call, few enough that its result stays small.
BATCH_TEXTS = 1024
BATCH_CHARACTERS = 2**20
# Samples are shuffled within blocks of this many tokens, so that an input split of any size fits in memory.
BLOCK_TOKENS = 2**26


@dataclass(frozen=True)
class Job:
    """Everything a process needs to write one input split."""

    number: int
    input_split: InputSplit
    kind: Kind
    output: str
    tokenizer_file: str
    vocabulary_size: int
    graded: bool
    settings: dict[str, Any]
    seed: int
    shard_bytes: int
    chunk_samples: int
    weighted: bool = False
    query_prompt: str = ""
    passage_prompt: str = ""


@dataclass(frozen=True)
class Progress:
    """The work done since the last report."""

    source_bytes: int = 0
    text_bytes: int = 0
    samples: int = 0
    tokens: int = 0


Report = Callable[[Progress], None]


@functools.lru_cache(maxsize=1)
def _encoder(tokenizer_file: str, vocabulary_size: int) -> TextEncoder:
    """The process's only encoder: words cached from one input split are reused in the next."""
    from tokenizers import Tokenizer

    return TextEncoder(Tokenizer.from_file(tokenizer_file), token_dtype(vocabulary_size))


def write_split(job: Job, report: Report) -> None:
    """Read, tokenize, shuffle and write one input split."""
    encode = _encoder(job.tokenizer_file, job.vocabulary_size)
    counter = ByteCounter()
    block: list[_Encoded] = []
    block_tokens = num_blocks = bytes_reported = 0
    with SplitWriter(
        job.output,
        job.number,
        kind=job.kind,
        vocabulary_size=job.vocabulary_size,
        graded=job.graded,
        weighted=job.weighted,
        source=job.input_split.source,
        settings=job.settings,
        shard_bytes=job.shard_bytes,
        chunk_samples=job.chunk_samples,
    ) as writer:
        for batch in _batches(job, counter):
            texts = [text for sample in batch for text in sample.texts]
            ids = iter(encode(texts))
            batch_tokens = batch_samples = 0
            for sample in batch:
                found = [next(ids) for _ in sample.texts]
                kept = _without_empty(job, sample, found)
                if kept is not None:
                    block.append(_Encoded(*kept, sample.score, sample.weight))
                    batch_samples += 1
                    batch_tokens += sum(map(len, kept[0]))
            block_tokens += batch_tokens
            if block_tokens >= BLOCK_TOKENS:
                _write_block(job, writer, block, num_blocks)
                block, block_tokens, num_blocks = [], 0, num_blocks + 1
            text_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
            report(Progress(counter.bytes_read - bytes_reported, text_bytes, batch_samples, batch_tokens))
            bytes_reported = counter.bytes_read
        _write_block(job, writer, block, num_blocks)


@dataclass(frozen=True)
class _Sample:
    texts: list[str]  # a document, or a query and its passages
    num_positives: int
    score: float | None
    position: int
    weight: float = 1.0


class _Encoded(NamedTuple):
    """A sample's ids: of a document, or of a query and its passages."""

    texts: list[np.ndarray]
    num_positives: int
    score: float | None
    weight: float


def _batches(job: Job, counter: ByteCounter) -> Iterator[list[_Sample]]:
    batch: list[_Sample] = []
    num_texts = characters = 0
    for position, record in read_split(job.input_split, counter):
        if job.kind == "documents":
            sample = _Sample([cast(Document, record)["text"]], 0, None, position)
        else:
            row = cast(TupleRecord, record)
            passages = [job.passage_prompt + text for text in (*row["positives"], *row["negatives"])]
            query = job.query_prompt + row["query"]
            weight = row.get("weight", 1.0)
            sample = _Sample([query, *passages], len(row["positives"]), row["score"], position, weight)
        batch.append(sample)
        num_texts += len(sample.texts)
        characters += sum(map(len, sample.texts))
        if num_texts >= BATCH_TEXTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, num_texts, characters = [], 0, 0
    if batch:
        yield batch


def _without_empty(job: Job, sample: _Sample, ids: list[np.ndarray]) -> tuple[list[np.ndarray], int] | None:
    """The sample without texts that have no tokens (control characters, say); None if it must be dropped."""
    if all(map(len, ids)):
        return ids, sample.num_positives
    if not job.input_split.skip_empty:
        raise DataError(
            f"{place(job.input_split, sample.position)} holds a text without any token; "
            "fill it, or drop such texts with --skip-empty"
        )
    if job.kind == "documents" or not len(ids[0]):
        return None
    last_positive = 1 + sample.num_positives
    positives = [text for text in ids[1:last_positive] if len(text)]
    negatives = [text for text in ids[last_positive:] if len(text)]
    return ([ids[0], *positives, *negatives], len(positives)) if positives else None


def _write_block(job: Job, writer: SplitWriter, block: list[_Encoded], number: int) -> None:
    key = sample_keys(job.seed, epochs=np.array([number]), sources=np.array([job.number]), samples=np.array([0]))
    for index in np.argsort(draws(key, np.arange(len(block))), kind="stable").tolist():
        texts, num_positives, score, weight = block[index]
        if job.kind == "documents":
            writer.add_document(texts[0])
        else:
            writer.add_tuple(texts[0], texts[1:], num_positives=num_positives, score=score, weight=weight)
