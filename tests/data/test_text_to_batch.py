"""What users hold as text, followed to the batch: file -> `data.prepare tuples` -> shards -> stream -> PairBatch.

Every expectation is made from the text and the tokenizer alone.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from data.collate import PairBatch, PairCollator, Texts, text_hashes
from data.prepare import main
from data.shards.reader import ShardFolder
from data.stream import Stream
from tests.padding import pad_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LENGTH = 12
WORDS = ["sort", "open", "copy", "close", "read", "write", "print", "split", "join", "list", "file", "text", "line"]


def phrase(*numbers: int) -> str:
    return " ".join(WORDS[number % len(WORDS)] for number in numbers)


def prepared(source: Path, tokenizer: Path, *options: str) -> ShardFolder:
    output = source.with_suffix(".shards")
    assert main(["tuples", str(source), "--output", str(output), "--tokenizer", str(tokenizer), *options]) == 0
    folder = ShardFolder(output)
    folder.check()
    return folder


def batch_of(folder: ShardFolder, *, num_negatives: int) -> PairBatch:
    """One batch of all samples."""
    collate = PairCollator(
        folder.vocabulary,
        query_max_length=LENGTH,
        passage_max_length=LENGTH,
        num_negatives=num_negatives,
        seed=5,
        graded=folder.graded,
        weighted=folder.weighted,
    )
    return next(Stream([folder], collate=collate, seed=5, global_batch_size=folder.num_samples))


def read(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """What the model must see of each text."""
    return [tuple(ids) for ids in tokenizer(list(texts), truncation=True, max_length=LENGTH).input_ids]


def seen(texts: Texts) -> list[tuple[int, ...]]:
    input_ids, attention_mask = pad_texts(texts, torch.arange(len(texts)), pad_id=0)
    return [tuple(row[mask.bool()].tolist()) for row, mask in zip(input_ids, attention_mask)]


def check(batch: PairBatch, rows: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerFast, *, most: int) -> None:
    """Every row is in the batch once, with one of its positives, up to `most` of its negatives, and its score."""
    queries, passages = seen(batch.queries), seen(batch.passages)
    by_query = {read(tokenizer, [row["query"]])[0]: row for row in rows}
    assert len(by_query) == len(rows) and sorted(queries) == sorted(by_query)
    for number, query in enumerate(queries):
        row = by_query[query]
        mine = [passages[i] for i in (batch.passage_query == number).nonzero()[:, 0].tolist()]
        positives, negatives = (read(tokenizer, row[name]) if row[name] else [] for name in ("positives", "negatives"))
        assert mine[0] == passages[int(batch.targets[number])] and mine[0] in positives
        assert len(mine) == len(set(mine)) == 1 + min(most, len(negatives))
        assert set(mine[1:]) <= set(negatives)
        start, end = batch.known_offsets[number : number + 2].tolist()
        expected = text_hashes([torch.tensor(ids[1:-1]).numpy() for ids in positives]).tolist()
        assert batch.known_hashes[start:end].tolist() == expected
        if batch.scores is not None:
            assert float(batch.scores[number]) == pytest.approx(row["score"])


def row(query: str, positives: list[str], negatives: Sequence[str] = (), score: float | None = None) -> dict[str, Any]:
    return {"query": query, "positives": positives, "negatives": list(negatives), "score": score}


def write_tsv(path: Path, header: list[str] | None, lines: Sequence[Sequence[object]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerows([*([header] if header else []), *lines])
    return path


def test_pairs(tiny_tokenizer_path, tiny_tokenizer, tmp_path):
    rows = [row(phrase(i, i + 1), [phrase(i, 3, i + 2)]) for i in range(12)]
    source = write_tsv(tmp_path / "pairs.tsv", ["query", "positive"], [(r["query"], r["positives"][0]) for r in rows])
    batch = batch_of(prepared(source, tiny_tokenizer_path), num_negatives=4)
    check(batch, rows, tiny_tokenizer, most=4)
    assert batch.scores is None and batch.targets.tolist() == list(range(12))


def test_triplets(tiny_tokenizer_path, tiny_tokenizer, tmp_path):
    rows = [row(phrase(i, i + 1), [phrase(i, 3)], [phrase(i, 5, i)]) for i in range(12)]
    lines = [(r["query"], r["positives"][0], r["negatives"][0]) for r in rows]
    source = write_tsv(tmp_path / "nli.tsv", ["anchor", "entailed", "contradicted"], lines)
    batch = batch_of(prepared(source, tiny_tokenizer_path, "--format", "nli"), num_negatives=1)
    check(batch, rows, tiny_tokenizer, most=1)
    assert batch.targets.tolist() == list(range(0, 24, 2))


def test_tuples_of_many_columns(tiny_tokenizer_path, tiny_tokenizer, tmp_path):
    rows = [row(phrase(i, i + 1), [phrase(i, 3)], [phrase(i, 5, k) for k in range(4)]) for i in range(10)]
    header = ["anchor", "positive", *(f"negative_{k}" for k in range(1, 5))]
    lines = [(r["query"], r["positives"][0], *r["negatives"]) for r in rows]
    folder = prepared(write_tsv(tmp_path / "tuples.tsv", header, lines), tiny_tokenizer_path)
    for most in (0, 2, 4, 9):
        check(batch_of(folder, num_negatives=most), rows, tiny_tokenizer, most=most)


def test_ragged_positives_and_negatives(tiny_tokenizer_path, tiny_tokenizer, tmp_path):
    rows = [
        row(
            phrase(i, i + 1),
            [phrase(i, 3, k) for k in range(1 + i % 3)],
            # Longer than the model reads, so that cutting is seen.
            [phrase(k, i, *range(20)) for k in range(i % 5)],
        )
        for i in range(13)
    ]
    source = tmp_path / "ragged.jsonl"
    keys = ("query", "positives", "negatives")
    source.write_text("".join(json.dumps({key: r[key] for key in keys}) + "\n" for r in rows))
    folder = prepared(source, tiny_tokenizer_path)
    for most in (0, 2, 9):
        batch = batch_of(folder, num_negatives=most)
        check(batch, rows, tiny_tokenizer, most=most)
        counts = torch.bincount(batch.passage_query, minlength=13).tolist()
        assert sorted(counts) == sorted(1 + min(most, i % 5) for i in range(13))
        assert int(batch.passages.lengths.max()) <= LENGTH


def test_graded_pairs(tiny_tokenizer_path, tiny_tokenizer, tmp_path):
    rows = [row(phrase(i, i + 1), [phrase(i, 3)], score=i * 0.25) for i in range(12)]
    lines = [(r["score"], r["query"], r["positives"][0]) for r in rows]
    source = write_tsv(tmp_path / "sts.tsv", None, lines)
    folder = prepared(source, tiny_tokenizer_path, "--format", "sts")
    assert folder.graded
    batch = batch_of(folder, num_negatives=3)
    assert batch.scores is not None
    check(batch, rows, tiny_tokenizer, most=3)
    # Negative control: the check notices scores that stand with the wrong pair.
    with pytest.raises(AssertionError):
        check(batch, [{**r, "score": r["score"] + 0.25} for r in rows], tiny_tokenizer, most=3)


def test_weights_stand_with_their_queries(tiny_tokenizer_path, tiny_tokenizer, tmp_path):
    """One file has weights, the other none; the samples are shuffled on their way."""
    rows = [row(phrase(i, i + 1), [phrase(i, 3)]) for i in range(12)]
    keys = ("query", "positives")
    for name, begin in (("a", 0), ("b", 6)):
        lines = [{key: r[key] for key in keys} for r in rows[begin : begin + 6]]
        lines = [line | ({"weight": i / 4} if name == "a" else {}) for i, line in enumerate(lines)]
        (tmp_path / "both").mkdir(exist_ok=True)
        (tmp_path / "both" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = prepared(tmp_path / "both", tiny_tokenizer_path, "--processes", "1")
    assert folder.weighted and len(folder) == 12
    batch = batch_of(folder, num_negatives=0)
    assert batch.weights is not None and batch.weights.dtype == torch.float32
    expected = {read(tiny_tokenizer, [r["query"]])[0]: i / 4 if i < 6 else 1.0 for i, r in enumerate(rows)}
    assert [expected[query] for query in seen(batch.queries)] == batch.weights.tolist()
    assert batch_of(prepared(tmp_path / "both" / "b.jsonl", tiny_tokenizer_path), num_negatives=0).weights is None
