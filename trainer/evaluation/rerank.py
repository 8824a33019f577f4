"""Shortlist and rerank across sizes: a small size searches, and a large size scores the best documents again.

One model contains both sizes, so the query is encoded once: the large size's forward pass includes the small size's.
The saving is in the search, whose time and whose index in memory grow with the small size's dimensions. The large
vectors are looked up for only `depth` documents per query and may lie on a disk; `store_mib` is their size.
Documents below the shortlist keep their order and stay below all reranked ones, so recall deeper than `depth` is
unchanged.

The same table holds the alternatives: each size searching alone, with the query encoded by its own layers only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.sizes import Size
from trainer.evaluation.latency import Cost
from trainer.evaluation.results.comparison import mark
from trainer.evaluation.results.report import METRIC_LABELS, NDCG, markdown_table, new_axes, save_figure
from trainer.evaluation.results.significance import TestResult, p_text, paired_t_test
from trainer.evaluation.tasks.retrieval import RetrievalData, as_run, score_run, search

MIB = 1 << 20
_TIMED_QUERIES = 50


@dataclass(frozen=True)
class Way:
    """One way to answer a query: `small` searches, and `large`, if given, reranks `depth` documents.

    Milliseconds are per query. The index of `index_mib` is searched whole and must be in memory; the store of
    `store_mib` is only looked up.
    """

    small: Size
    large: Size | None
    depth: int
    scores: dict[str, float]
    encode_ms: float
    search_ms: float
    rerank_ms: float
    index_mib: float
    store_mib: float
    against_full: TestResult | None = None  # of nDCG@10, against the largest size searching alone
    on_front: bool = False

    @property
    def milliseconds(self) -> float:
        return self.encode_ms + self.search_ms + self.rerank_ms

    @property
    def name(self) -> str:
        return f"{self.small}" if self.large is None else f"{self.small} → {self.large}, {self.depth}"

    def as_json(self) -> dict[str, Any]:
        row = asdict(self)
        row["small"], row["large"] = str(self.small), str(self.large) if self.large else None
        return {"name": self.name, "milliseconds": self.milliseconds, **row}


def rerank(
    positions: np.ndarray, queries: np.ndarray, documents: np.ndarray, *, depth: int
) -> tuple[np.ndarray, np.ndarray]:
    """Reorder the first `depth` documents of every ranking by the large size's dot products; the rest stay below.

    positions: [queries, k], best first, from the small size. queries [queries, dim] and documents [documents, dim]: the
    large size's vectors. Ties go to the lower position, as in `search`. Returns the new scores and positions, both
    [queries, k].
    """
    depth = min(depth, positions.shape[1])
    head = positions[:, :depth]
    again = np.einsum("qd,qkd->qk", queries, documents[head]).astype(np.float32)
    order = np.lexsort((head, -again), axis=1)
    new_positions = np.concatenate([np.take_along_axis(head, order, 1), positions[:, depth:]], axis=1)
    best = np.take_along_axis(again, order, 1)
    # Below the shortlist only the order matters, so the scores there descend in steps from the shortlist's worst.
    steps = np.arange(1, positions.shape[1] - depth + 1, dtype=np.float32)
    # The step is relative to the score's magnitude, so that single precision keeps the steps apart.
    unit = np.maximum(np.abs(best[:, -1:]), 1.0) * 1e-3
    return np.concatenate([best, best[:, -1:] - steps * unit], axis=1), new_positions


def compare_ways(
    data: RetrievalData,
    queries: Mapping[Size, np.ndarray],
    documents: Mapping[Size, np.ndarray],
    costs: Mapping[Size, Cost],
    *,
    small: Size,
    large: Size,
    depths: Sequence[int],
    top_k: int,
    device: torch.device | str = "cpu",
) -> list[Way]:
    """Every size alone, then small → large at each depth. queries, documents: size -> float32 [n, dim]."""
    ways, per_query = [], {}
    found = {}
    for size in queries:
        found[size] = search(queries[size], documents[size], top_k=top_k, device=device)
        ways.append(
            Way(
                size, None, 0, {}, costs[size].milliseconds,
                search_milliseconds(queries[size], documents[size], top_k=top_k, device=device), 0.0,
                documents[size].nbytes / MIB, 0.0,
            )
        )  # fmt: skip
        per_query[ways[-1].name] = score_run(as_run(data, *found[size]), data.qrels)
    search_ms = next(way.search_ms for way in ways if way.small == small)
    for depth in depths:
        begin = time.perf_counter()
        scores, positions = rerank(found[small][1], queries[large], documents[large], depth=depth)
        rerank_ms = (time.perf_counter() - begin) * 1000 / max(1, len(data.queries))
        way = Way(
            small, large, depth, {}, costs[large].milliseconds, search_ms, rerank_ms,
            documents[small].nbytes / MIB, documents[large].nbytes / MIB,
        )  # fmt: skip
        ways.append(way)
        per_query[way.name] = score_run(as_run(data, scores, positions), data.qrels)
    full = per_query[str(large)].of_queries(NDCG)
    tested = [
        replace(
            way,
            scores=per_query[way.name].means,
            against_full=None if way.name == str(large) else paired_t_test(per_query[way.name].of_queries(NDCG), full),
        )
        for way in ways
    ]
    front = pareto_front([(way.milliseconds, way.scores[NDCG]) for way in tested])
    return [replace(way, on_front=i in front) for i, way in enumerate(tested)]


def pareto_front(points: Sequence[tuple[float, float]]) -> set[int]:
    """Indices of the (cost, quality) points that no other point beats.

    A point beats another if it is at least as cheap and at least as good, and strictly better in one of the two.
    """

    def beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
        return a[0] <= b[0] and a[1] >= b[1] and a != b

    return {i for i, point in enumerate(points) if not any(beats(other, point) for other in points)}


def ways_markdown(ways: Sequence[Way]) -> str:
    header = ["way", "nDCG@10", "p", "MRR@10", "Recall@100", "encode ms", "search ms", "rerank ms", "total ms"]
    header += ["index MiB", "store MiB", "front"]
    rows = []
    for way in ways:
        scores = [way.scores.get(name) for name in ("recip_rank_10", "recall_100")]
        test = way.against_full
        sign = mark(test.difference, test.p) if test else ""
        rows.append(
            [
                way.name.replace("x", "×"),
                f"{way.scores[NDCG]:.4f}{sign}",
                p_text(test.p) if test else "–",
                *(f"{score:.4f}" if score is not None else "–" for score in scores),
                *(f"{ms:.3f}" for ms in (way.encode_ms, way.search_ms, way.rerank_ms, way.milliseconds)),
                f"{way.index_mib:.2f}",
                f"{way.store_mib:.2f}",
                "yes" if way.on_front else "",
            ]
        )
    return markdown_table(header, rows)


def plot_ways(ways: Sequence[Way], path: Path, *, title: str) -> Path:
    """Quality over milliseconds per query; the marker's area grows with the index in memory."""
    figure, axes = new_axes()
    largest = max(way.index_mib for way in ways)
    for label, chosen, colour in (
        ("one size alone", [w for w in ways if w.large is None], "C0"),
        ("shortlist and rerank", [w for w in ways if w.large is not None], "C1"),
    ):
        areas = [30 + 250 * way.index_mib / largest for way in chosen]
        xs, ys = [way.milliseconds for way in chosen], [way.scores[NDCG] for way in chosen]
        axes.scatter(xs, ys, s=areas, color=colour, alpha=0.65, label=label)
    for way in ways:
        place = (way.milliseconds, way.scores[NDCG])
        axes.annotate(way.name.replace("x", "×"), place, fontsize=7, xytext=(4, 4), textcoords="offset points")
    front = sorted((way.milliseconds, way.scores[NDCG]) for way in ways if way.on_front)
    axes.plot(*zip(*front), linestyle="--", linewidth=1, color="0.35", label="Pareto front")
    axes.set_xlabel("milliseconds a query (area: index in memory)")
    axes.set_ylabel(METRIC_LABELS[NDCG])
    axes.set_title(title)
    axes.legend(frameon=False, fontsize=8)
    return save_figure(figure, path)


def search_milliseconds(queries: np.ndarray, documents: np.ndarray, *, top_k: int, device: torch.device | str) -> float:
    """Median time of one query's exact search: a matrix-vector product and the top k."""
    index = torch.from_numpy(documents).to(device)
    seconds = []
    for row in queries[:_TIMED_QUERIES]:
        begin = time.perf_counter()
        scores: Tensor = index @ torch.from_numpy(row).to(device)
        scores.topk(min(top_k, len(scores))).values.cpu()
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds)) * 1000
