"""Benchmark: exact search, ours against FAISS' flat index and sentence-transformers' `semantic_search`, one thread.

    python -m tests.benchmarks.search [--quick] [--json FILE]

Vectors of unit length drawn at random, 500 queries against 100,000 documents of 384 dimensions, the best 100 and the
best 1,000, both sides with the vectors in memory; FAISS' time contains adding them. Taken in turn. Figures:
  faiss_ratio_100, faiss_ratio_1000         theirs ÷ ours, CPU seconds, the best of the turns
  semantic_ratio_100, semantic_ratio_1000   the same for `semantic_search` (blocks of 100 queries and 500,000 texts)
  faiss_same_100, semantic_same_100, …      share of the answers that both give
  seconds_100, seconds_1000                 ours
--quick: 200 queries against 50,000 documents of the same dimensions; half a minute.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

import faiss
import numpy as np
import torch
from sentence_transformers.util import dot_score, semantic_search

from tests.benchmarks.support import Figures, alternate
from trainer.evaluation.tasks.retrieval import search


def unit_vectors(count: int, dim: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def by_faiss(queries: np.ndarray, documents: np.ndarray, top_k: int) -> np.ndarray:
    index = faiss.IndexFlatIP(documents.shape[1])
    index.add(documents)
    return index.search(queries, top_k)[1]


def by_semantic_search(queries: np.ndarray, documents: np.ndarray, top_k: int) -> np.ndarray:
    tensors = torch.from_numpy(queries), torch.from_numpy(documents)
    found = semantic_search(*tensors, top_k=top_k, score_function=dot_score)
    return np.array([[answer["corpus_id"] for answer in row] for row in found])


def same(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.mean([len(set(a) & set(b)) / len(a) for a, b in zip(first.tolist(), second.tolist())]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    num_queries, num_documents, dim = (200, 50_000, 384) if args.quick else (500, 100_000, 384)
    queries, documents = unit_vectors(num_queries, dim, 0), unit_vectors(num_documents, dim, 1)
    figures = Figures()
    for top_k in (100, 1_000):
        ours = partial(search, queries, documents, top_k=top_k)
        answers = ours()[1]
        for name, peer in (("faiss", by_faiss), ("semantic", by_semantic_search)):
            theirs, own = alternate(partial(peer, queries, documents, top_k), ours, args.repeats)
            figures.show(**{f"{name}_ratio_{top_k}": theirs / own, f"seconds_{top_k}": own})
            figures.show(**{f"{name}_same_{top_k}": same(answers, peer(queries, documents, top_k))})
    figures.write(args.json)


if __name__ == "__main__":
    main()
