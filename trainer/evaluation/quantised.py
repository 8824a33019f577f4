"""What int8 and binary embeddings lose against float32, size by size.

Retrieval: documents are quantised, because they are stored.
- int8: full-precision queries search int8 documents; the ranges come from the collection's own documents.
- binary: the bits of queries search the bits of documents, by Hamming distance.
- "binary, then int8": full-precision queries score the best of the binary ranking again, against int8 documents.
STS: both sentences are quantised alike; int8 takes the ranges of the task's own sentences.
A static model has one more row, its int8 token table: the embeddings are computed from the quantised table and stay in
full precision. Each row is tested against float32 (trainer/evaluation/results/significance.py).

A task's front are its rows that no other row beats, with at most as many bytes and at least the same quality: the
choices among layers, dimensions and bits that are worth storing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.ground.files import file_name
from models.encoder import Encoder
from models.quantisation import from_int8, int8_ranges, int8_table, to_int8, to_signs
from models.sizes import Size
from trainer.evaluation.encoding.encode import EncodeTexts
from trainer.evaluation.rerank import pareto_front, rerank
from trainer.evaluation.results.comparison import mark
from trainer.evaluation.results.raw import RawResults, shape_of
from trainer.evaluation.results.report import (
    METRIC_LABELS,
    NDCG,
    SPEARMAN,
    add_legend,
    markdown_table,
    new_axes,
    save_figure,
)
from trainer.evaluation.results.significance import TestResult, fisher_z_test, p_text, paired_t_test
from trainer.evaluation.run import known_metrics
from trainer.evaluation.tasks.retrieval import RetrievalData, as_run, score_run, search
from trainer.evaluation.tasks.sts import STSTask, cosine_of_pairs, spearman

FLOAT32, INT8, BINARY, RESCORED, TABLE = "float32", "int8", "binary", "binary, then int8", "int8 table"
# Where each precision's raw results are written, so that `compare` can test it against another model's.
RAW_FOLDERS = {
    FLOAT32: "float32",
    INT8: "int8",
    BINARY: "binary",
    RESCORED: "binary_then_int8",
    TABLE: "int8_table",
}
_METHOD = "trained"  # the method's name in raw results, as `sizes` writes it
_LINES = {FLOAT32: ("o", "-"), INT8: ("s", "--"), BINARY: ("^", ":"), RESCORED: ("D", "-."), TABLE: ("v", "-")}

Raws = dict[str, RawResults]
"""Precision -> the scores of every query and every sentence pair at every size."""


@dataclass(frozen=True)
class Row:
    """One task at one size and precision. `metric`: ndcg_cut_10 or spearman. `bytes`: size of a stored embedding."""

    task: str
    metric: str
    size: Size
    precision: str
    bytes: int
    value: float
    against_float32: TestResult | None
    on_front: bool = False

    @property
    def bits(self) -> int:
        """Bits of a stored dimension."""
        return {INT8: 8, BINARY: 1, RESCORED: 9}.get(self.precision, 32)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "size": str(self.size), "bits": self.bits}


def embedding_bytes(size: Size, precision: str) -> int:
    """Bytes of one stored embedding. Bits are packed; "binary, then int8" stores the int8 vector beside the bits."""
    bits = -(-size.dim // 8)
    return {INT8: size.dim, BINARY: bits, RESCORED: bits + size.dim}.get(precision, 4 * size.dim)


def retrieval_rows(
    encode_queries: EncodeTexts,
    encode_documents: EncodeTexts,
    data: RetrievalData,
    *,
    top_k: int,
    rescored: int = 100,
    device: torch.device | str = "cpu",
    table_variant: tuple[EncodeTexts, EncodeTexts] | None = None,
    raws: Raws | None = None,
) -> tuple[list[Row], dict[Size, np.ndarray]]:
    """Rows of nDCG@10, and each size's int8 ranges [2, d].

    `rescored`: how many documents per query are scored again in int8. `table_variant`: the two encoding functions of
    the same model with an int8 token table. `raws` collects the scores of every query.
    """
    queries, documents = encode_queries(data.queries), encode_documents(data.documents)
    variant = (table_variant[0](data.queries), table_variant[1](data.documents)) if table_variant else None
    rows, ranges = [], {}
    for size, asked in queries.items():
        stored = documents[size]
        ranges[size] = int8_ranges(stored)
        in_int8 = from_int8(to_int8(stored, ranges[size]), ranges[size])
        by_bits = search(to_signs(asked), to_signs(stored), top_k=top_k, device=device)
        found = {
            FLOAT32: search(asked, stored, top_k=top_k, device=device),
            INT8: search(asked, in_int8, top_k=top_k, device=device),
            BINARY: by_bits,
            RESCORED: rerank(by_bits[1], asked, in_int8, depth=rescored),
        }
        if variant is not None:
            found[TABLE] = search(variant[0][size], variant[1][size], top_k=top_k, device=device)
        scores = {name: score_run(as_run(data, *ranking), data.qrels) for name, ranking in found.items()}
        rows += [
            Row(
                data.name, NDCG, size, name, embedding_bytes(size, name), of_one.means[NDCG],
                None if name == FLOAT32 else paired_t_test(of_one.of_queries(NDCG), scores[FLOAT32].of_queries(NDCG)),
            )
            for name, of_one in scores.items()
        ]  # fmt: skip
        if raws is not None:
            for name, of_one in scores.items():
                shape, metrics = shape_of(size), list(known_metrics(of_one, data, top_k))
                raws.setdefault(name, RawResults()).add_retrieval(_METHOD, data.name, shape, of_one, metrics)
    return rows, ranges


def sts_rows(
    encode_texts: EncodeTexts, task: STSTask, *, table_variant: EncodeTexts | None = None, raws: Raws | None = None
) -> list[Row]:
    """Rows of Spearman's correlation. `raws` collects every pair's cosine."""
    texts = [text for pair in task.pairs for text in pair]
    variant = table_variant(texts) if table_variant else None
    gold, rows = np.asarray(task.scores, np.float64), []
    for size, vectors in encode_texts(texts).items():
        ranges = int8_ranges(vectors)
        forms = {FLOAT32: vectors, INT8: from_int8(to_int8(vectors, ranges), ranges), BINARY: to_signs(vectors)}
        if variant is not None:
            forms[TABLE] = variant[size]
        cosines = {name: cosine_of_pairs(form[0::2], form[1::2]) for name, form in forms.items()}
        values = {name: spearman(each, gold) for name, each in cosines.items()}
        if raws is not None:
            for name, each in cosines.items():
                raws.setdefault(name, RawResults()).add_sts(_METHOD, task, size, each)
        rows += [
            Row(
                task.name, SPEARMAN, size, name, embedding_bytes(size, name), value,
                None if name == FLOAT32 else fisher_z_test(value, values[FLOAT32], n=len(gold)),
            )
            for name, value in values.items()
        ]  # fmt: skip
    return rows


def with_int8_table(encoder: Encoder) -> Encoder:
    """A copy of a static encoder whose token table has been through int8."""
    quantised = copy.deepcopy(encoder)
    codes, scales = int8_table(encoder.word_embeddings.weight)
    with torch.no_grad():
        quantised.word_embeddings.weight.copy_(codes * scales[:, None])
    return quantised


def with_fronts(rows: Sequence[Row]) -> list[Row]:
    """The rows, each told whether it is on its task's front of quality over bytes."""
    result = []
    for of_task in _by_task(rows).values():
        known = [row for row in of_task if not math.isnan(row.value)]
        front = pareto_front([(row.bytes, row.value) for row in known])
        chosen = {id(known[place]) for place in front}
        result += [replace(row, on_front=id(row) in chosen) for row in of_task]
    return result


def precision_markdown(rows: Sequence[Row], name_of: Callable[[Size], str]) -> str:
    """One table per task: the value, its percentage of float32's, and p against float32 († above, ‡ below)."""
    parts = []
    for task, of_task in _by_task(rows).items():
        body = []
        for row in of_task:
            test, kept = row.against_float32, "100.0 %"
            sign = ""
            if test is not None:
                whole = row.value - test.difference
                kept = f"{100 * row.value / whole:.1f} %" if whole > 0 else "–"
                sign = mark(test.difference, test.p)
            p = "–" if test is None else p_text(test.p)
            size = f"{name_of(row.size)} ({row.size})" if name_of(row.size) != str(row.size) else str(row.size)
            value, front = f"{row.value:.4f}{sign}", "yes" if row.on_front else ""
            body.append([size, row.precision, f"{row.bytes:,}", value, kept, p, front])
        header = ["size", "precision", "bytes", METRIC_LABELS[of_task[0].metric], "of float32", "p", "front"]
        parts.append(f"### {task}\n\n{markdown_table(header, body, text_columns=2)}")
    return "\n".join(parts)


def plot_precisions(rows: Sequence[Row], folder: Path) -> list[Path]:
    """One figure per task: quality over the bytes of a stored embedding, one point per size and precision.

    A line joins the widths of one depth in one precision. Where every depth has a single width, as on a ladder, a line
    joins the sizes of one precision.
    """
    written = []
    for task, of_task in _by_task(rows).items():
        figure, axes = new_axes()
        depths = sorted({row.size.body for row in of_task})
        by_depth = len({row.size for row in of_task}) > len(depths)
        precisions = list(dict.fromkeys(row.precision for row in of_task))
        lines: dict[tuple[int, str], list[tuple[int, float]]] = {}
        for row in of_task:
            colour = depths.index(row.size.body) if by_depth else precisions.index(row.precision)
            lines.setdefault((colour, row.precision), []).append((row.bytes, row.value))
        for (colour, precision), points in lines.items():
            marker, style = _LINES[precision]
            axes.plot(*zip(*sorted(points)), color=f"C{colour}", marker=marker, linestyle=style, markersize=4.5)
        front = sorted((row.bytes, row.value) for row in of_task if row.on_front)
        if front:
            axes.plot(*zip(*front), color="0.6", linewidth=5, alpha=0.35, zorder=0, label="front")
        for place, precision in enumerate(precisions):  # entries of the legend, without points
            marker, style = _LINES[precision]
            shade = "0.3" if by_depth else f"C{place}"
            axes.plot([], [], color=shade, marker=marker, linestyle=style, markersize=4.5, label=precision)
        for place, depth in enumerate(depths if by_depth else ()):
            axes.plot([], [], color=f"C{place}", linewidth=4, label=depth.described)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("bytes of a stored embedding")
        axes.set_ylabel(METRIC_LABELS[of_task[0].metric])
        axes.set_title(task)
        add_legend(axes)
        written.append(save_figure(figure, folder / f"{file_name(task)}.png"))
    return written


def _by_task(rows: Sequence[Row]) -> dict[str, list[Row]]:
    tasks: dict[str, list[Row]] = {}
    for row in rows:
        tasks.setdefault(row.task, []).append(row)
    return tasks


def ranges_json(ranges: Mapping[Size, np.ndarray]) -> dict[str, list[list[float]]]:
    """Size -> [least values, largest values], for `quantize_embeddings(ranges=np.array(…))`."""
    return {str(size): [[float(value) for value in row] for row in values] for size, values in ranges.items()}
