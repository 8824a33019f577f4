"""Small retrieval tasks for tests, written as BEIR folders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_beir(
    folder: Path,
    documents: Sequence[str | Mapping[str, str]],
    queries: Sequence[str],
    *,
    split: str = "test",
    judged: int | None = None,
) -> Path:
    """Write a BEIR folder: documents d0, d1, ... (texts, or rows with or without an id), and queries q0, q1, ...

    Each of the first `judged` queries (default: all) has one relevant document: document i for query i.
    """
    (folder / "qrels").mkdir(parents=True)
    bodies = [{"text": each} if isinstance(each, str) else each for each in documents]
    tables = {
        "corpus.jsonl": [{"_id": f"d{i}", **body} for i, body in enumerate(bodies)],
        "queries.jsonl": [{"_id": f"q{i}", "text": text} for i, text in enumerate(queries)],
    }
    for name, rows in tables.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [f"q{i}\td{i}\t1\n" for i in range(len(queries) if judged is None else judged)]
    (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    return folder
