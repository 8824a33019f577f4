"""Two sizes' scores together: every pair of sizes ranks by the sum of its two similarities.

With s_a and s_b the similarities of a query and a document at two sizes, a pair ranks by s_a + s_b. Starbucks-v2
(arXiv:2410.13230v3) reports that a hybrid of two of its variants gains; how it combines their scores is not known here,
and the plain sum is ours. A sum of dot products is the dot product of the concatenated vectors. So a pair is searched
as one exact index, of as many dimensions as the two sizes have together, and every vector is embedded once a size.

One model contains all sizes, so the forward pass of a pair's deeper size gives the shallower size's vectors too. What
the pair adds to the deeper size alone is one more pooling, one more head where depths have heads, and a wider search.
Two separate models would need two passes.

A pair is tested against the better of its members on the same task (trainer/evaluation/results/significance.py):
retrieval by the paired t-test over queries, STS by Fisher's z.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from data.ground.files import file_name
from models.encoder import Encoder
from models.settings import EmbeddingSettings
from models.sizes import Body, Size
from trainer.evaluation.latency import BYTES_PER_DIMENSION, TimedPass, cut_encoder, time_passes
from trainer.evaluation.rerank import search_milliseconds
from trainer.evaluation.results.comparison import mark
from trainer.evaluation.results.report import (
    METRIC_LABELS,
    NDCG,
    SPEARMAN,
    draw_numbers,
    markdown_table,
    save_figure,
)
from trainer.evaluation.results.significance import TestResult, fisher_z_test, holm, p_text, paired_t_test
from trainer.evaluation.tasks.retrieval import RetrievalData, as_run, score_run, search
from trainer.evaluation.tasks.sts import STSTask, cosine_of_pairs, spearman


@dataclass(frozen=True)
class Pair:
    """Two sizes whose similarities are added; `first` is the smaller one, by layers and then by dimensions."""

    first: Size
    second: Size

    def __str__(self) -> str:
        return f"{self.first} + {self.second}"

    @property
    def bodies(self) -> tuple[Body, Body]:
        return self.first.body, self.second.body

    @property
    def index_bytes_per_document(self) -> int:
        return BYTES_PER_DIMENSION * (self.first.dim + self.second.dim)


def pairs_of(sizes: Iterable[Size]) -> list[Pair]:
    """Every pair of different sizes, once."""
    return [Pair(*sorted(pair)) for pair in combinations(dict.fromkeys(sizes), 2)]


@dataclass(frozen=True)
class Row:
    """A pair on one task, beside its members alone.

    `better`: the member with the higher score, the first where both are equal. `p`: of `against_better`, or corrected
    for the other pairs of the task by `corrected`. `search_ms`: the pair's exact search, and the better member's.
    """

    task: str
    metric: str
    pair: Pair
    value: float
    members: tuple[float, float]
    better: Size
    against_better: TestResult
    p: float
    search_ms: tuple[float, float] | None = None

    @property
    def gain(self) -> float:
        return self.against_better.difference

    def of_better(self, members: tuple[float, float]) -> float:
        """The better member's number, of numbers of both members."""
        return members[0] if self.better == self.pair.first else members[1]

    def as_json(self) -> dict[str, Any]:
        row = asdict(self)
        row["first"], row["second"], row["better"] = str(self.pair.first), str(self.pair.second), str(self.better)
        del row["pair"]
        return row


def concatenated(vectors: Mapping[Size, np.ndarray], pair: Pair) -> np.ndarray:
    """Vectors whose dot products are the sums of the two sizes' dot products: float32 [n, first.dim + second.dim]."""
    return np.concatenate([vectors[pair.first], vectors[pair.second]], axis=1)


def fused_retrieval(
    queries: Mapping[Size, np.ndarray],
    documents: Mapping[Size, np.ndarray],
    data: RetrievalData,
    *,
    top_k: int,
    device: torch.device | str = "cpu",
) -> list[Row]:
    """nDCG@10 of every pair. queries, documents: size -> float32 [n, dim], of unit length where the model is cosine."""

    def measured(asked: np.ndarray, stored: np.ndarray) -> tuple[np.ndarray, float]:
        scores = score_run(as_run(data, *search(asked, stored, top_k=top_k, device=device)), data.qrels)
        of_queries = np.array(scores.of_queries(NDCG))
        return of_queries, search_milliseconds(asked, stored, top_k=top_k, device=device)

    alone = {size: measured(queries[size], documents[size]) for size in queries}
    rows = []
    for pair in pairs_of(queries):
        of_queries, milliseconds = measured(concatenated(queries, pair), concatenated(documents, pair))
        members = (float(alone[pair.first][0].mean()), float(alone[pair.second][0].mean()))
        better = pair.first if members[0] >= members[1] else pair.second
        test = paired_t_test(of_queries, alone[better][0])
        times = (milliseconds, alone[better][1])
        rows.append(Row(data.name, NDCG, pair, float(of_queries.mean()), members, better, test, test.p, times))
    return rows


def fused_sts(vectors: Mapping[Size, np.ndarray], task: STSTask) -> list[Row]:
    """Spearman's correlation of every pair. vectors: size -> [2 · pairs, dim], first and second sentences in turn."""
    gold = np.asarray(task.scores, np.float64)
    cosines = {size: cosine_of_pairs(each[0::2], each[1::2]) for size, each in vectors.items()}
    alone = {size: spearman(each, gold) for size, each in cosines.items()}
    rows = []
    for pair in pairs_of(vectors):
        members = (alone[pair.first], alone[pair.second])
        # A size whose cosines are all equal has no correlation, so the other one is the better.
        known = [-math.inf if math.isnan(value) else value for value in members]
        better = pair.first if known[0] >= known[1] else pair.second
        value = spearman(cosines[pair.first] + cosines[pair.second], gold)
        test = fisher_z_test(value, alone[better], n=len(gold))
        rows.append(Row(task.name, SPEARMAN, pair, value, members, better, test, test.p))
    return rows


def corrected(rows: Sequence[Row]) -> list[Row]:
    """The rows with Holm's correction of p over the pairs of each task."""
    result = []
    for task in dict.fromkeys(row.task for row in rows):
        of_task = [row for row in rows if row.task == task]
        adjusted = holm([row.p for row in of_task])
        result += [dataclasses.replace(row, p=p) for row, p in zip(of_task, adjusted)]
    return result


@dataclass(frozen=True)
class PairCost:
    """Milliseconds to encode a query: by the one call that gives both sizes, by each size's own pass, by both in turn.

    `members`: of each size alone, by an encoder cut to its layers.
    """

    together: float
    members: tuple[float, float]

    @property
    def apart(self) -> float:
        """Two passes, one after the other, which two separate models would need."""
        return sum(self.members)


def measure_pairs(
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerBase,
    sizes: Sequence[Size],
    settings: EmbeddingSettings,
    texts: Sequence[str],
    *,
    device: torch.device | str = "cpu",
) -> dict[Pair, PairCost]:
    """Pair -> costs. One pair is timed for each two bodies, at the widest sizes, because widths hardly change it."""
    pairs = pairs_of(sizes)
    widest = {size.body: size for size in sorted(sizes)}  # of each body, the last, which is the widest
    passes: dict[tuple[Body, ...], TimedPass] = {
        (body,): TimedPass.of(encoder, (size,), device=device) for body, size in widest.items()
    }
    # Both of a pair run in a copy with the deeper one's layers and whole feed-forwards.
    whole = {body.layers: passes[body,].encoder for body in widest if body.feed_forward == 1}
    for pair in pairs:
        if (deeper := max(pair.bodies).layers) not in whole:
            whole[deeper] = cut_encoder(encoder, Size(deeper, encoder.embedding_size)).to(device)
        passes[pair.bodies] = TimedPass(whole[deeper], tuple(widest[body] for body in pair.bodies))
    times = time_passes(passes, tokenizer, settings, texts, device=device)
    return {pair: PairCost(times[pair.bodies], (times[pair.first.body,], times[pair.second.body,])) for pair in pairs}


def fused_markdown(rows: Sequence[Row], costs: Mapping[Pair, PairCost], name_of: Callable[[Size], str]) -> str:
    """One table per task, with p against the better member († above, ‡ below), and a table of what pairs cost."""

    def shown(pair: Pair) -> str:
        return f"{name_of(pair.first)} + {name_of(pair.second)}".replace("x", "×")

    parts = []
    for task in dict.fromkeys(row.task for row in rows):
        of_task = [row for row in rows if row.task == task]
        searches = of_task[0].search_ms is not None
        body = []
        for row in of_task:
            better = row.of_better(row.members)
            cells = [shown(row.pair), name_of(row.better).replace("x", "×")]
            cells += [f"{row.value:.4f}{mark(row.gain, row.p)}", f"{better:.4f}", f"{row.gain:+.4f}", p_text(row.p)]
            if row.search_ms is not None:
                cost = costs[row.pair]
                own = row.of_better(cost.members)
                cells += [f"{cost.together + row.search_ms[0]:.2f}", f"{own + row.search_ms[1]:.2f}"]
            body.append(cells)
        header = ["sizes", "better alone", METRIC_LABELS[of_task[0].metric], "better alone's", "gain", "p"]
        header += ["ms a query", "better alone's ms"] if searches else []
        parts.append(f"### {task}\n\n{markdown_table(header, body, text_columns=2)}")
    body = [
        [
            shown(pair),
            f"{cost.together:.2f}",
            f"{max(cost.members):.2f}",
            f"{cost.apart:.2f}",
            str(pair.index_bytes_per_document),
        ]
        for pair, cost in costs.items()
    ]
    header = ["sizes", "one pass, ms", "deeper size alone, ms", "two passes, ms", "index bytes a document"]
    parts.append(f"### Encoding a query\n\n{markdown_table(header, body)}")
    return "\n".join(parts)


def plot_fused(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Two heat maps per task, size by size: the scores, with each size alone on the diagonal, and the pairs' gains."""
    written = []
    for task in dict.fromkeys(row.task for row in rows):
        of_task = [row for row in rows if row.task == task]
        sizes = sorted({size for row in of_task for size in (row.pair.first, row.pair.second)})
        scores, gains = np.full((2, len(sizes), len(sizes)), math.nan)
        for row in of_task:
            i, j = sizes.index(row.pair.first), sizes.index(row.pair.second)
            scores[i, i], scores[j, j] = row.members
            scores[i, j] = scores[j, i] = row.value
            gains[i, j] = gains[j, i] = row.gain
        label, names = METRIC_LABELS[of_task[0].metric], [f"{size}".replace("x", "×") for size in sizes]
        for suffix, grid, title in (
            ("", scores, f"{task}: two sizes' scores together"),
            ("_gain", gains, f"{task}: gain over the better size alone"),
        ):
            figure = draw_numbers(
                grid,
                rows=names,
                columns=names,
                ylabel="size",
                xlabel="size",
                title=title,
                label=label,
                difference=bool(suffix),
            )
            written.append(save_figure(figure, folder / f"{file_name(task)}{suffix}.png"))
    return written


def costs_json(costs: Mapping[Pair, PairCost]) -> list[dict[str, Any]]:
    return [
        {
            "first": str(pair.first),
            "second": str(pair.second),
            "encode_ms": cost.together,
            "encode_ms_alone": list(cost.members),
            "encode_ms_two_passes": cost.apart,
            "index_bytes_per_document": pair.index_bytes_per_document,
        }
        for pair, cost in costs.items()
    ]
