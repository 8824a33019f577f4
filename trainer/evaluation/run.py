"""Evaluation of every size from one pass: the trainer and the command both call `evaluate_tasks`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from models.settings import EmbeddingSettings
from models.sizes import Size
from trainer.evaluation.encoding.across import Searched, SizePair, encoded_sizes, sides
from trainer.evaluation.encoding.encode import DEFAULT_BATCH_TOKENS, Forward, encode
from trainer.evaluation.results.raw import RawResults, shape_of
from trainer.evaluation.results.report import Record
from trainer.evaluation.tasks.retrieval import (
    DEFAULT_PASSAGES_PER_BLOCK,
    DEFAULT_TOP_K,
    Block,
    MergeKeys,
    RetrievalData,
    Run,
    RunScores,
    evaluate_retrieval,
    in_blocks,
)
from trainer.evaluation.tasks.sts import STSTask, evaluate_sts


def evaluate_tasks(
    forward: Forward,
    tokenizer: PreTrainedTokenizerBase,
    sizes: Sequence[Searched],
    settings: EmbeddingSettings,
    *,
    sts: Sequence[STSTask] = (),
    retrieval: Sequence[RetrievalData] = (),
    device: torch.device | str,
    flat: bool = False,
    method: str = "model",
    top_k: int = DEFAULT_TOP_K,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    passages_per_block: int = DEFAULT_PASSAGES_PER_BLOCK,
    blocks_of: Callable[[RetrievalData], Iterable[Block]] | None = None,
    merge: MergeKeys | None = None,
    ignore_identical_ids: bool = False,
    rank: int = 0,
    world_size: int = 1,
    progress: bool = False,
    on_run: Callable[[str, Searched, Run], None] | None = None,
    raw: RawResults | None = None,
) -> list[Record]:
    """Score every task at every size.

    All ranks must call this with the same tasks and sizes. Every rank gets the STS records; only rank 0 gets the
    retrieval records.
    `sizes`: the sizes to score; `forward` returns their `encoded_sizes`, in that order. Similarity, lengths and prompts
    come from the settings; STS texts take the query prompt and the longer of the two lengths. The caller puts the model
    into eval mode.
    `flat`: the input format of `forward`, see `encode`. `on_run(task name, size, run)` is called with every ranking.
    `raw` collects the scores of every query and every sentence pair. `blocks_of` gives the vectors of a corpus, in
    place of encoding them here on all ranks together; for its use with `merge`, see `retrieve`.
    """
    ladder = settings.sizes if settings.ladder else None
    sizes = list(dict.fromkeys(sizes))
    encode_texts = partial(
        encode,
        forward,
        tokenizer,
        sizes=encoded_sizes(sizes),
        device=device,
        flat=flat,
        batch_tokens=batch_tokens,
        rank=rank,
        world_size=world_size,
        progress=progress,
    )

    def name(size: Size) -> str:
        return ladder.name(size) if ladder else str(size)

    def records(task: str, kind: str, searched: Searched, metrics: dict[str, float]) -> list[Record]:
        size, documents = sides(searched)
        other = (name(documents), documents.layers) if isinstance(searched, SizePair) else ()
        shape = (name(size), size.layers, size.dim)
        return [Record(method, task, kind, *shape, metric, value, *other) for metric, value in metrics.items()]

    results: list[Record] = []
    if sts:
        longest = max(settings.query_max_length, settings.passage_max_length)
        # STS is always scored by cosine, whatever the model's similarity, so vectors need not be normalised here.
        encode_sts = partial(encode_texts, similarity="dot", max_length=longest, prompt=settings.query_prompt)
        on_cosines = partial(raw.add_sts, method) if raw is not None else None
        for task, by_size in evaluate_sts(encode_sts, sts, searched=sizes, on_cosines=on_cosines).items():
            for size, metrics in by_size.items():
                results += records(task, "sts", size, metrics)
    for data in retrieval:
        encode_queries = partial(
            # Ranks that each search for themselves need identical query vectors, so each encodes all queries: a share
            # of the texts would be batched differently, and its vectors would differ by rounding.
            partial(encode_texts, rank=0, world_size=1) if merge else encode_texts,
            similarity=settings.similarity,
            max_length=settings.query_max_length,
            prompt=settings.query_prompt,
        )
        encode_documents = partial(
            encode_texts,
            similarity=settings.similarity,
            max_length=settings.passage_max_length,
            prompt=settings.passage_prompt,
        )
        scores = evaluate_retrieval(
            encode_queries,
            blocks_of(data) if blocks_of else in_blocks(encode_documents, data.documents, passages_per_block),
            data,
            searched=sizes,
            top_k=top_k,
            device=device,
            ignore_identical_ids=ignore_identical_ids,
            primary=rank == 0,
            merge=merge,
            on_run=partial(on_run, data.name) if on_run else None,
        )
        for size, of_size in scores.items():
            means = known_metrics(of_size, data, top_k)
            results += records(data.name, "retrieval", size, means)
            if raw is not None:
                raw.add_retrieval(method, data.name, shape_of(size), of_size, list(means))
    return results


def known_metrics(scores: RunScores, data: RetrievalData, top_k: int) -> dict[str, float]:
    """The means, without recall at depths beyond the cut of the ranking."""
    reach = top_k if top_k < len(data.documents) else 10**9
    depth = {"recall_100": 100, "recall_1000": 1_000}
    return {name: value for name, value in scores.means.items() if depth.get(name, 0) <= reach}
