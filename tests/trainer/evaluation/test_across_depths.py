"""Queries of one depth against documents of another: naive products give the same, and the sizes' own results stay."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.ground.errors import ConfigError
from models.encoder import build_masked_lm, load_encoder
from models.settings import EmbeddingSettings
from models.sizes import Body, Size
from tests.beir import write_beir
from trainer.evaluate import main
from trainer.evaluation import sizes_command
from trainer.evaluation.encoding.across import SizePair, across_depths, encoded_sizes
from trainer.evaluation.encoding.encode import embedder_of, encoder_forward
from trainer.evaluation.results.comparison import across_verdicts, compare, samples_of
from trainer.evaluation.results.parts import Parts
from trainer.evaluation.results.raw import RAW_FILE, RawResults, read_raw, shape_of, write_raw
from trainer.evaluation.results.report import Record, grids_of
from trainer.evaluation.search.vectors import read_store
from trainer.evaluation.tasks.retrieval import RetrievalData, RunScores, load_beir, score_run
from trainer.evaluation.tasks.sts import STSTask, cosine_of_pairs, read_sts

LADDER = [Size(1, 8), Size(2, 16), Size(3, 32)]
PAIRS = [SizePair(size, Size(depth, size.dim)) for size in LADDER for depth in (1, 2, 3) if depth != size.layers]
PROMPT = "find: "
SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
Command = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def model(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("model")
    config = {"model_type": "bert", **SHAPE, "max_position_embeddings": 64}
    build_masked_lm(config, vocab_size=len(tiny_tokenizer), pad_token_id=0).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    ladder = tuple((size.layers, size.dim) for size in LADDER)
    EmbeddingSettings("mean", "cosine", ladder, 24, 48, query_prompt=PROMPT).save(folder)
    return folder


@pytest.fixture(scope="module")
def beir(docstrings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [text for text in docstrings if len(text.split()) > 12][:60]
    queries = [" ".join(text.split()[:8]) for text in texts[:24]]
    return write_beir(tmp_path_factory.mktemp("beir") / "docs", texts, queries)


@pytest.fixture(scope="module")
def sts(docstrings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [" ".join(text.split()) for text in docstrings[:40]]
    path = tmp_path_factory.mktemp("sts") / "pairs.tsv"
    path.write_text("".join(f"{i * 7 % 11}\t{lines[i]}\t{lines[(i * 3 + 1) % 40][:60]}\n" for i in range(40)))
    return path


@pytest.fixture
def command(model: Path, beir: Path, sts: Path, undrawn: None) -> Command:
    def run(output: Path, *options: str) -> dict[str, Any]:
        tasks = ["--beir", str(beir), "--sts", str(sts), "--device", "cpu", "--output", str(output)]
        assert main(["sizes", "--model", str(model), *tasks, *options]) == 0
        return json.loads((output / "results.json").read_text("utf-8"))

    return run


Vectors = Callable[..., np.ndarray]


@pytest.fixture(scope="module")
def vectors(model: Path) -> Vectors:
    """Texts at one size, encoded for it alone."""
    encoder, tokenizer = load_encoder(model), AutoTokenizer.from_pretrained(model)

    def vectors(texts: tuple[str, ...], size: Size, *, max_length: int, prompt: str, similarity: str) -> np.ndarray:
        encode = embedder_of(encoder, tokenizer, [size], device="cpu")
        return encode(texts, max_length=max_length, prompt=prompt, similarity=similarity)[size]

    return vectors


def naive_scores(vectors: Vectors, data: RetrievalData, pair: SizePair) -> RunScores:
    """Every query with every document."""
    queries = vectors(data.queries, pair.query, max_length=24, prompt=PROMPT, similarity="cosine")
    documents = vectors(data.documents, pair.document, max_length=48, prompt="", similarity="cosine")
    products = torch.from_numpy(queries) @ torch.from_numpy(documents).T
    rows = products.tolist()
    run = {query: dict(zip(data.document_ids, row)) for query, row in zip(data.query_ids, rows)}
    return score_run(run, data.qrels)


def test_each_size_meets_every_other_depth_at_its_width() -> None:
    assert across_depths(LADDER) == PAIRS
    assert len(across_depths([Size(n, d) for n in (1, 3) for d in (8, 32)])) == 4
    assert encoded_sizes([*LADDER, *PAIRS])[:3] == LADDER
    assert set(encoded_sizes([*LADDER, *PAIRS])) == {Size(n, d) for n in (1, 2, 3) for d in (8, 16, 32)}
    with pytest.raises(ConfigError, match="needs sizes of several depths, and all have 2"):
        across_depths([Size(2, 8), Size(2, 16)])
    # Documents are encoded with whole feed-forwards.
    narrower = [Size(3, 8, 0.25), Size(3, 16, 0.5), Size(3, 32)]
    assert across_depths(narrower) == [SizePair(size, Size(3, size.dim)) for size in narrower[:2]]
    with pytest.raises(ConfigError, match="no size has them"):
        across_depths(narrower[:2])


def test_a_search_across_depths_equals_the_naive_one(
    vectors: Vectors, beir: Path, command: Command, tmp_path: Path
) -> None:
    results = command(tmp_path / "out", "--across-depths")
    raw, data = read_raw(tmp_path / "out" / RAW_FILE), load_beir(beir)
    by_pair = {}
    for pair in PAIRS:
        expected = naive_scores(vectors, data, pair)
        columns = raw.across["docs", "trained", pair.query.layers, pair.query.dim, pair.document.layers]
        for metric, column in columns.items():
            assert column.tolist() == [values[metric] for values in expected.per_query.values()]
        by_pair[pair] = expected.means
    for record in results["across_depths"]["records"]:
        if record["task"] == "docs":
            pair = SizePair(Size(record["layers"], record["dim"]), Size(record["document_layers"], record["dim"]))
            assert record["value"] == by_pair[pair][record["metric"]]
            assert (record["size"], record["document_size"]) == (str(pair.query), str(pair.document))
    # Negative control: the depths matter to what is compared.
    own = {r["size"]: r["value"] for r in results["records"] if (r["task"], r["metric"]) == ("docs", "map")}
    assert all(means["map"] != own[str(pair.query)] for pair, means in by_pair.items())


def test_pairs_of_sentences_across_depths(vectors: Vectors, sts: Path, command: Command, tmp_path: Path) -> None:
    command(tmp_path / "out", "--across-depths")
    raw, task = read_raw(tmp_path / "out" / RAW_FILE), read_sts(sts)
    texts = tuple(text for both in task.pairs for text in both)
    for pair in PAIRS:
        first, second = (vectors(texts, size, max_length=48, prompt=PROMPT, similarity="dot") for size in pair)
        columns = raw.across["pairs", "trained", pair.query.layers, pair.query.dim, pair.document.layers]
        assert np.array_equal(columns["cosine"], cosine_of_pairs(first[0::2], second[1::2]))
        # Negative control: the sentences' sides matter.
        assert not np.array_equal(columns["cosine"], cosine_of_pairs(second[0::2], first[1::2]))


def symmetric(folder: Path) -> list[dict[str, Any]]:
    """The lines of raw results that a version without --across-depths would keep."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    with gzip.open(folder / RAW_FILE, "rb") as lines:
        for line in lines:
            row = json.loads(line)
            row.pop("document_layers", None)
            kept[row["task"], row.get("method"), row.get("layers"), row.get("dim")] = row
    return sorted(kept.values(), key=str)


def test_the_sizes_own_results_stay_as_they_are(command: Command, tmp_path: Path) -> None:
    """Bit for bit, and also for a reader that does not know the key."""
    plain = command(tmp_path / "plain", "--bm25", "--save-runs")
    across = command(tmp_path / "across", "--bm25", "--save-runs", "--across-depths")
    assert {**across, "across_depths": None} == {**plain, "across_depths": None}
    assert "across_depths" not in plain
    assert symmetric(tmp_path / "across") == symmetric(tmp_path / "plain")
    assert (
        read_raw(tmp_path / "across" / RAW_FILE).values.keys() == read_raw(tmp_path / "plain" / RAW_FILE).values.keys()
    )
    runs = {path.name: path.read_bytes() for path in (tmp_path / "plain" / "runs").iterdir()}
    written = {path.name: path.read_bytes() for path in (tmp_path / "across" / "runs").iterdir()}
    assert runs.items() <= written.items()
    assert "docs_trained_1x8_documents_3x8.trec" in written
    figures = {path.name for path in (tmp_path / "across" / "figures").iterdir()}
    assert {"docs_ndcg_cut_10_trained_across_depths.png", "pairs_spearman_trained_across_depths.png"} <= figures
    table = (tmp_path / "across" / "table.md").read_text("utf-8")
    assert table.startswith((tmp_path / "plain" / "table.md").read_text("utf-8"))
    assert "### docs: trained, nDCG@10, queries (rows) by documents of other depths (columns)" in table


def test_texts_are_encoded_once(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        forward = encoder_forward(*args, **kwargs)

        def counting(input_ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
            rows.append(len(input_ids))
            return forward(input_ids, mask)

        return counting

    monkeypatch.setattr(sizes_command, "encoder_forward", counted)
    counts = []
    for options in ([], ["--across-depths"]):
        rows.clear()
        command(tmp_path / f"out{len(options)}", *options)
        counts.append(list(rows))
    assert counts[0] == counts[1] and sum(counts[0]) > 60


def test_kept_vectors_serve_every_depth(command: Command, tmp_path: Path) -> None:
    options = ["--across-depths", "--vectors", str(tmp_path / "vectors")]
    first = command(tmp_path / "first", *options)
    assert read_store(tmp_path / "vectors" / "docs_trained").widths == {Body(1): 32, Body(2): 32, Body(3): 32}
    assert command(tmp_path / "second", *options) == first


def test_a_ladder_of_one_depth_is_refused(
    command: Command, model: Path, beir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--beir", str(beir), "--sizes", "2x8,2x16", "--across-depths", "--device", "cpu"]
    assert main(["sizes", "--model", str(model), *options]) == 2
    assert "--across-depths needs sizes of several depths" in capsys.readouterr().err


def made_up() -> RawResults:
    """Scores in which queries of the first layer do better against documents of the third than against their own."""
    generator, raw = np.random.default_rng(0), RawResults()
    for size, gain in ((Size(1, 8), 0.0), (SizePair(Size(1, 8), Size(3, 8)), 0.2)):
        values = np.clip(generator.random(40) * 0.5 + gain, 0, 1)
        scores = {f"q{i}": {"ndcg_cut_10": float(value)} for i, value in enumerate(values)}
        raw.add_retrieval("trained", "docs", shape_of(size), RunScores({}, scores, 40), ["ndcg_cut_10"])
    gold = tuple(float(value) for value in generator.random(50))
    task = STSTask("pairs", (("", ""),) * 50, gold)
    for size, noise in ((Size(1, 8), 0.1), (SizePair(Size(1, 8), Size(3, 8)), 2.0)):
        raw.add_sts("trained", task, size, np.array(gold) + noise * generator.standard_normal(50))
    return raw


def test_raw_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    raw = made_up()
    write_raw(raw, tmp_path / RAW_FILE)
    again = read_raw(tmp_path / RAW_FILE)
    assert again.tasks == raw.tasks
    assert again.across.keys() == raw.across.keys() == {(n, "trained", 1, 8, 3) for n in ("docs", "pairs")}
    for key in (*raw.values, *raw.across):
        for name, column in raw.columns(key).items():
            assert np.array_equal(again.columns(key)[name], column)
    assert raw.of_task("docs").across.keys() == {("docs", "trained", 1, 8, 3)}


def test_another_depth_is_tested_against_the_querys_own() -> None:
    raw = made_up()
    docs, pairs = across_verdicts(raw)
    assert (docs.task, docs.layers, docs.dim, docs.document_layers, docs.mark) == ("docs", 1, 8, 3, "†")
    assert (pairs.task, pairs.document_layers, pairs.mark) == ("pairs", 3, "‡")
    assert docs.baseline == "documents of the query's own size"
    own, other = (
        samples_of({0: (raw, key)})["ndcg_cut_10"] for key in (("docs", "trained", 1, 8), ("docs", "trained", 1, 8, 3))
    )
    test = compare(other, own)
    assert (docs.difference, docs.p) == (test.difference, test.p)
    assert docs.as_json()["document_layers"] == 3
    assert "document_layers" not in dataclasses.replace(docs, document_layers=0).as_json()


def test_the_grid_has_the_sizes_own_results_on_its_diagonal() -> None:
    shapes = [("1x8", 1, 8), ("2x16", 2, 16)]
    records = [Record("trained", "docs", "retrieval", *shape, "ndcg_cut_10", 0.1 * shape[1]) for shape in shapes]
    across = [
        Record(
            "trained",
            "docs",
            "retrieval",
            *shape,
            "ndcg_cut_10",
            0.7 + 0.1 * shape[1],
            f"{3 - shape[1]}x{shape[2]}",
            3 - shape[1],
        )
        for shape in shapes
    ]
    [grid] = grids_of([*records, Record("BM25", "docs", "retrieval", "", 0, 0, "ndcg_cut_10", 0.5)], across)
    assert (grid.sizes, grid.depths) == ((Size(1, 8), Size(2, 16)), (1, 2))
    np.testing.assert_allclose(grid.values, [[0.1, 0.8], [0.9, 0.2]])
    assert across[0].as_json()["document_size"] == "2x8"
    assert not {"document_size", "document_layers"} & records[0].as_json().keys()


def test_a_finished_part_is_read_again(tmp_path: Path) -> None:
    record = Record("trained", "docs", "retrieval", "1x8", 1, 8, "ndcg_cut_10", 0.5, "3x8", 3)
    parts, raw = Parts(tmp_path), made_up().of_task("docs")
    parts.save("trained", "docs", {"a": 1}, [record], raw)
    found = parts.load("trained", "docs", {"a": 1})
    assert found is not None
    assert found[0] == [record]
    assert found[1].across.keys() == raw.across.keys()
