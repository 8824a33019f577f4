"""Evaluation of every size from one pass: the trainer and the command both call `evaluate_tasks`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from models.settings import EmbeddingSettings
from models.sizes import Size
from trainer.distributed import World
from trainer.evaluation.encoding.across import Searched, SizePair, sides
from trainer.evaluation.encoding.encode import Embedder, encode
from trainer.evaluation.results.raw import RawResults, shape_of
from trainer.evaluation.results.report import Record
from trainer.evaluation.tasks.retrieval import (
    DEFAULT_PASSAGES_PER_BLOCK,
    DEFAULT_SEARCH,
    Block,
    RetrievalData,
    Run,
    RunScores,
    SearchOptions,
    evaluate_retrieval,
    in_blocks,
)
from trainer.evaluation.tasks.sts import STSTask, evaluate_sts


@dataclass(frozen=True)
class Outputs:
    """Where scores go beside the records, and under which name."""

    method: str = "model"
    """What records and raw results call the model."""
    on_run: Callable[[str, Searched, Run], None] | None = None
    """Called with the task's name, the size and the run of every ranking."""
    raw: RawResults | None = None
    """Collects the scores of every query and every sentence pair."""


RECORDS_ALONE = Outputs()


def evaluate_tasks(
    embedder: Embedder,
    searched: Sequence[Searched],
    settings: EmbeddingSettings,
    *,
    sts: Sequence[STSTask] = (),
    retrieval: Sequence[RetrievalData] = (),
    search: SearchOptions = DEFAULT_SEARCH,
    blocks_of: Callable[[RetrievalData], Iterable[Block]] | None = None,
    outputs: Outputs = RECORDS_ALONE,
) -> list[Record]:
    """Score every task at every size.

    All ranks must call this with the same tasks and sizes. Every rank gets the STS records; only rank 0 gets the
    retrieval records.
    `searched`: the sizes to score; `embedder` gives their `encoded_sizes`. Similarity, lengths and prompts come from
    the settings; STS texts take the query prompt and the longer of the two lengths. The caller puts the model into eval
    mode. `blocks_of` gives the vectors of a corpus, in place of encoding them here on all ranks together; for its use
    with `search.merge`, see `retrieve`.
    """
    searched = list(dict.fromkeys(searched))
    results = _evaluate_sts(embedder, searched, settings, sts, outputs) if sts else []
    for data in retrieval:
        encode_documents = partial(
            encode,
            embedder,
            similarity=settings.similarity,
            max_length=settings.passage_max_length,
            prompt=settings.passage_prompt,
        )
        if blocks_of:
            blocks = blocks_of(data)
        else:
            blocks = in_blocks(encode_documents, data.documents, DEFAULT_PASSAGES_PER_BLOCK)
        results += _evaluate_corpus(embedder, searched, settings, data, blocks, search, outputs)
    return results


def _evaluate_sts(
    embedder: Embedder,
    searched: Sequence[Searched],
    settings: EmbeddingSettings,
    tasks: Sequence[STSTask],
    outputs: Outputs,
) -> list[Record]:
    # STS is always scored by cosine, whatever the model's similarity, so vectors need not be normalised here.
    encode_sts = partial(
        encode, embedder, similarity="dot", max_length=settings.max_length, prompt=settings.query_prompt
    )
    on_cosines = partial(outputs.raw.add_sts, outputs.method) if outputs.raw is not None else None
    return [
        record
        for task, by_size in evaluate_sts(encode_sts, tasks, searched=searched, on_cosines=on_cosines).items()
        for each, metrics in by_size.items()
        for record in _records(outputs.method, task, "sts", each, metrics, settings)
    ]


def _evaluate_corpus(
    embedder: Embedder,
    searched: Sequence[Searched],
    settings: EmbeddingSettings,
    data: RetrievalData,
    blocks: Iterable[Block],
    search: SearchOptions,
    outputs: Outputs,
) -> list[Record]:
    # Ranks that each search for themselves need identical query vectors, so each encodes all queries: a share of the
    # texts would be batched differently, and its vectors would differ by rounding.
    alone = replace(embedder, world=World.alone(embedder.world.device))
    encode_queries = partial(
        encode,
        alone if search.merge else embedder,
        similarity=settings.similarity,
        max_length=settings.query_max_length,
        prompt=settings.query_prompt,
    )
    scores = evaluate_retrieval(
        encode_queries,
        blocks,
        data,
        searched=searched,
        options=search,
        world=embedder.world,
        on_run=partial(outputs.on_run, data.name) if outputs.on_run else None,
    )
    results: list[Record] = []
    for each, of_size in scores.items():
        means = known_metrics(of_size, data, search.top_k)
        results += _records(outputs.method, data.name, "retrieval", each, means, settings)
        if outputs.raw is not None:
            outputs.raw.add_retrieval(outputs.method, data.name, shape_of(each), of_size, list(means))
    return results


def _records(
    method: str,
    task: str,
    kind: str,
    searched: Searched,
    metrics: Mapping[str, float],
    settings: EmbeddingSettings,
) -> list[Record]:
    """A record of each metric. Sizes have their names in the ladder, if the settings have one."""

    def name(size: Size) -> str:
        return settings.sizes.name(size) if settings.ladder else str(size)

    size, documents = sides(searched)
    other = (name(documents), documents.layers) if isinstance(searched, SizePair) else ("", 0)
    shape = (name(size), size.layers, size.dim)
    return [
        Record(method, task, kind, *shape, metric, value, *other, size.feed_forward)
        for metric, value in metrics.items()
    ]


def known_metrics(scores: RunScores, data: RetrievalData, top_k: int) -> dict[str, float]:
    """The means, without recall at depths beyond the cut of the ranking."""
    reach = top_k if top_k < len(data.documents) else 10**9
    depth = {"recall_100": 100, "recall_1000": 1_000}
    return {name: value for name, value in scores.means.items() if depth.get(name, 0) <= reach}
