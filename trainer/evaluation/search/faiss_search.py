"""Search by FAISS' flat inner-product index, exact like our own, with ties broken as trec_eval breaks them.

FAISS returns any k of the documents that tie at the cut. So one more than k is asked for, and while the last one found
still ties with the k-th, twice as many; the ranking of what is found is then ours (`TopK`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from data.ground.errors import ConfigError
from models.sizes import ModelError

NOT_A_NUMBER = "a score is not a number: the model's embeddings hold NaN or infinity; evaluate another checkpoint"


def load_faiss() -> Any:
    """The package, or one sentence."""
    try:
        import faiss
    except ImportError:
        raise ConfigError("--search faiss needs the package faiss; install it with: pip install faiss-cpu") from None
    return faiss


def faiss_candidates(queries: Tensor, documents: Tensor, *, top_k: int, start: int) -> tuple[Tensor, Tensor]:
    """Scores float32 and positions int64, both [n, c ≥ min(top_k, m)]: every document that could be among the best.

    queries [n, dim], documents [m, dim], the first of which has the position `start`.
    """
    if not (queries.isfinite().all() and documents.isfinite().all()):
        raise ModelError(NOT_A_NUMBER)
    index = load_faiss().IndexFlatIP(documents.shape[1])
    index.add(documents.contiguous().cpu().numpy())
    rows = queries.contiguous().cpu().numpy()
    wanted = min(top_k + 1, len(documents))
    while True:
        scores, places = index.search(rows, wanted)
        if wanted == len(documents) or not (scores[:, top_k - 1] == scores[:, -1]).any():
            break
        wanted = min(2 * wanted, len(documents))
    return torch.from_numpy(scores), torch.from_numpy(places) + start
