"""What int8 and binary embeddings lose against float32, size by size.

Retrieval: documents are quantised, because they are stored.
- int8: full-precision queries search int8 documents; the ranges come from the collection's own documents.
- binary: the bits of queries search the bits of documents, by Hamming distance.
- "binary, then int8": full-precision queries score the best of the binary ranking again, against int8 documents.
STS: both sentences are quantised alike; int8 takes the ranges of the task's own sentences.
A static model has one more row, its int8 token table: the embeddings are computed from the quantised table and stay in
full precision. Each row is tested against float32 (trainer/evaluation/results/significance.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.encoder import Encoder
from models.quantisation import from_int8, int8_ranges, int8_table, to_int8, to_signs
from models.sizes import Size
from trainer.evaluation.encoding.encode import EncodeTexts
from trainer.evaluation.rerank import rerank
from trainer.evaluation.results.comparison import mark
from trainer.evaluation.results.report import METRIC_LABELS, add_legend, markdown_table, new_axes, save_figure
from trainer.evaluation.results.significance import TestResult, fisher_z_test, p_text, paired_t_test
from trainer.evaluation.tasks.retrieval import RetrievalData, RunScores, as_run, score_run, search
from trainer.evaluation.tasks.sts import STSTask, cosine_of_pairs, spearman

FLOAT32, INT8, BINARY, RESCORED, TABLE = "float32", "int8", "binary", "binary, then int8", "int8 table"


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

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "size": str(self.size)}


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
) -> tuple[list[Row], dict[Size, np.ndarray]]:
    """Rows of nDCG@10, and each size's int8 ranges [2, d].

    `rescored`: how many documents per query are scored again in int8. `table_variant`: the two encoding functions of
    the same model with an int8 token table.
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
            RESCORED: rerank(*by_bits, asked, in_int8, depth=rescored),
        }
        if variant is not None:
            found[TABLE] = search(variant[0][size], variant[1][size], top_k=top_k, device=device)
        scores = {name: score_run(as_run(data, *ranking), data.qrels) for name, ranking in found.items()}
        rows += [
            Row(
                data.name, "ndcg_cut_10", size, name, embedding_bytes(size, name), of_one.means["ndcg_cut_10"],
                None if name == FLOAT32 else paired_t_test(_ndcg(of_one), _ndcg(scores[FLOAT32])),
            )
            for name, of_one in scores.items()
        ]  # fmt: skip
    return rows, ranges


def sts_rows(encode_texts: EncodeTexts, task: STSTask, *, table_variant: EncodeTexts | None = None) -> list[Row]:
    """Rows of Spearman's correlation."""
    texts = [text for pair in task.pairs for text in pair]
    variant = table_variant(texts) if table_variant else None
    gold, rows = np.asarray(task.scores, np.float64), []
    for size, vectors in encode_texts(texts).items():
        ranges = int8_ranges(vectors)
        forms = {FLOAT32: vectors, INT8: from_int8(to_int8(vectors, ranges), ranges), BINARY: to_signs(vectors)}
        if variant is not None:
            forms[TABLE] = variant[size]
        values = {name: spearman(cosine_of_pairs(form[0::2], form[1::2]), gold) for name, form in forms.items()}
        rows += [
            Row(
                task.name, "spearman", size, name, embedding_bytes(size, name), value,
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


def precision_markdown(rows: Sequence[Row], name_of: Callable[[Size], str]) -> str:
    """One table per task: the value, its percentage of float32's, and p against float32 († above, ‡ below)."""
    parts = []
    for task in dict.fromkeys(row.task for row in rows):
        of_task = [row for row in rows if row.task == task]
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
            body.append([size, row.precision, f"{row.bytes:,}", f"{row.value:.4f}{sign}", kept, p])
        header = ["size", "precision", "bytes", METRIC_LABELS[of_task[0].metric], "of float32", "p"]
        parts.append(f"### {task}\n\n{markdown_table(header, body, text_columns=2)}")
    return "\n".join(parts)


def plot_precisions(rows: Sequence[Row], folder: Path) -> list[Path]:
    """One figure per task: quality over the bytes of a stored embedding, one line per precision, one point per size."""
    written = []
    for task in dict.fromkeys(row.task for row in rows):
        figure, axes = new_axes()
        of_task = [row for row in rows if row.task == task]
        for precision in dict.fromkeys(row.precision for row in of_task):
            points = sorted((row.bytes, row.value) for row in of_task if row.precision == precision)
            axes.plot(*zip(*points), marker="o", markersize=5, linewidth=1.4, label=precision)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("bytes of a stored embedding")
        axes.set_ylabel(METRIC_LABELS[of_task[0].metric])
        axes.set_title(task)
        add_legend(axes)
        written.append(save_figure(figure, folder / f"{task}.png"))
    return written


def ranges_json(ranges: Mapping[Size, np.ndarray]) -> dict[str, list[list[float]]]:
    """Size -> [least values, largest values], for `quantize_embeddings(ranges=np.array(…))`."""
    return {str(size): [[float(value) for value in row] for row in values] for size, values in ranges.items()}


def _ndcg(scores: RunScores) -> list[float]:
    return [values["ndcg_cut_10"] for values in scores.per_query.values()]
