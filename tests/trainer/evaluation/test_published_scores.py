"""A model that everybody knows scores here what MTEB publishes for it, within 0.001, and what its own library finds.

Published: the repository embeddings-benchmark/results at commit f4cc6c8b3, all-MiniLM-L6-v2 at revision 8b3219a: the
cosine's Spearman of the STS benchmark's test. The protocol is the model's own: 256 tokens, the mean of the tokens'
vectors, cosine, title and text with a space between, no prompts. The command itself evaluates, on the model's folder as
it is. docs/evaluation.md has other tasks, too.

The published nDCG@10 of SciFact needs ten minutes of a core. Here a part of SciFact is evaluated by the command and by
sentence-transformers, with which MTEB encodes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.evaluate import main

pytestmark = pytest.mark.long

PUBLISHED = 0.82032  # of the STS benchmark's test
TOLERANCE = 0.001
# Our name of a metric -> that of sentence-transformers, of at most so many documents.
METRICS = {"ndcg_cut_10": "ndcg@10", "recip_rank_10": "mrr@10", "map": "map@1000"}
NUM_QUERIES, NUM_OTHER_DOCUMENTS = 24, 24


def records_of(model: Path, tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    """The results of the full size, by the command."""
    results = tmp_path / "results.json"
    assert main(["sizes", "--model", str(model), "--device", "cpu", "--json", str(results), *options]) == 0
    return [each for each in json.loads(results.read_text("utf-8"))["records"] if each["size"] == "6x384"]


def scores_of(model: Path, tmp_path: Path, *options: str) -> dict[str, float]:
    """Task -> Spearman."""
    return {r["task"]: r["value"] for r in records_of(model, tmp_path, *options) if r["metric"] == "spearman"}


@pytest.mark.launch  # some 15 seconds
def test_sts(minilm: Path, shared_data: Path, tmp_path: Path) -> None:
    found = scores_of(minilm, tmp_path, "--sts", str(shared_data / "sts" / "stsb_test.tsv"))
    assert found == {"stsb_test": pytest.approx(PUBLISHED, abs=TOLERANCE)}


@pytest.mark.full
def test_another_protocol_is_noticed(minilm: Path, shared_data: Path, tmp_path: Path) -> None:
    """Negative control: pooling by the first token. Retrieval has a control of its own, which cuts the texts."""
    found = scores_of(minilm, tmp_path, "--sts", str(shared_data / "sts" / "stsb_test.tsv"), "--pooling", "cls")
    assert abs(found["stsb_test"] - PUBLISHED) > 2 * TOLERANCE


def rows_of(path: Path) -> dict[str, dict[str, str]]:
    return {row["_id"]: row for row in map(json.loads, path.read_text("utf-8").splitlines())}


@pytest.fixture
def part_of_scifact(shared_data: Path, tmp_path: Path) -> Path:
    """The first queries that are judged, with their documents among others: a folder in the form of BEIR."""
    whole, part = shared_data / "retrieval" / "scifact", tmp_path / "scifact"
    head, *judgements = (whole / "qrels" / "test.tsv").read_text("utf-8").splitlines()
    chosen = list(dict.fromkeys(line.split("\t")[0] for line in judgements))[:NUM_QUERIES]
    judgements = [line for line in judgements if line.split("\t")[0] in chosen]
    corpus, queries = rows_of(whole / "corpus.jsonl"), rows_of(whole / "queries.jsonl")
    others = list(corpus)[:: len(corpus) // NUM_OTHER_DOCUMENTS]
    kept = {line.split("\t")[1] for line in judgements} | set(others)
    (part / "qrels").mkdir(parents=True)
    (part / "qrels" / "test.tsv").write_text("\n".join([head, *judgements]) + "\n", "utf-8")
    for name, rows in (
        ("corpus", [corpus[key] for key in sorted(kept)]),
        ("queries", [queries[key] for key in chosen]),
    ):
        (part / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return part


def as_sentence_transformers_scores(model: Path, folder: Path) -> dict[str, float]:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.evaluation import InformationRetrievalEvaluator

    relevant: dict[str, set[str]] = {}
    for line in (folder / "qrels" / "test.tsv").read_text("utf-8").splitlines()[1:]:
        query, document, _ = line.split("\t")  # every judgement of SciFact is 1
        relevant.setdefault(query, set()).add(document)
    evaluate = InformationRetrievalEvaluator(
        {key: row["text"] for key, row in rows_of(folder / "queries.jsonl").items()},
        {key: f"{row['title']} {row['text']}" for key, row in rows_of(folder / "corpus.jsonl").items()},
        relevant,
        name=folder.name,
        map_at_k=[1000],
    )
    found = evaluate(SentenceTransformer(str(model), device="cpu"))
    return {metric: found[f"{folder.name}_cosine_{theirs}"] for metric, theirs in METRICS.items()}


@pytest.mark.full  # a quarter of a minute
def test_retrieval_is_that_of_sentence_transformers(minilm: Path, part_of_scifact: Path, tmp_path: Path) -> None:
    expected = as_sentence_transformers_scores(minilm, part_of_scifact)

    def scores(*options: str) -> dict[str, float]:
        records = records_of(minilm, tmp_path, "--beir", str(part_of_scifact), *options)
        return {each["metric"]: each["value"] for each in records if each["metric"] in METRICS}

    assert scores() == pytest.approx(expected, rel=0, abs=1e-9)
    # Negative control: documents cut at 24 tokens.
    shorter = scores("--max-length", "24")
    assert all(abs(shorter[metric] - expected[metric]) > TOLERANCE for metric in METRICS)
