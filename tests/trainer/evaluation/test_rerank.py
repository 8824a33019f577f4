"""Shortlist and rerank, latency, and evaluations compared with each other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from models.encoder import build_masked_lm, load_encoder
from models.settings import EmbeddingSettings
from models.sizes import Size
from models.static_embedding import StaticConfig, StaticModel
from tests.beir import write_beir
from trainer import evaluate
from trainer.evaluation.latency import Cost, cut_encoder
from trainer.evaluation.rerank import compare_ways, pareto_front, rerank
from trainer.evaluation.results.raw import read_raw
from trainer.evaluation.tasks.retrieval import as_run, ranking, retrieval_data, search

SMALL, LARGE = Size(1, 4), Size(2, 16)


@pytest.fixture(scope="module")
def make_model(tiny_tokenizer, tmp_path_factory: pytest.TempPathFactory):
    def make(seed: int) -> Path:
        torch.manual_seed(seed)
        folder = tmp_path_factory.mktemp("model")
        shape = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
        model = build_masked_lm(
            {"model_type": "bert", **shape, "max_position_embeddings": 64},
            vocab_size=len(tiny_tokenizer),
            pad_token_id=tiny_tokenizer.pad_token_id,
        )
        model.save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        ladder = ((1, 4), (2, 16))
        EmbeddingSettings(pooling="mean", ladder=ladder, query_max_length=16, passage_max_length=32).save(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def beir_folder(docstrings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [text for text in docstrings if len(text.split()) > 12][:60]
    queries = [" ".join(text.split()[:8]) for text in texts[:20]]
    return write_beir(tmp_path_factory.mktemp("beir") / "docs", texts, queries)


def test_a_static_model_reranks(
    tiny_tokenizer, beir_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes texts without padding; its way with the large size alone is what `sizes` scores."""
    torch.manual_seed(0)
    folder = tmp_path / "model"
    StaticModel(StaticConfig(len(tiny_tokenizer), 16, special_ids=[0, 2, 3])).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    EmbeddingSettings(pooling="mean", ladder=((1, 4), (1, 16)), query_max_length=16, passage_max_length=32).save(folder)
    words = ["--model", str(folder), "--beir", str(beir_folder)]
    assert evaluate.main(["rerank", *words, "--depth", "5", "--output", str(tmp_path / "out")]) == 0
    assert evaluate.main(["sizes", *words, "--json", str(tmp_path / "sizes.json")]) == 0
    capsys.readouterr()
    ways = {way["name"]: way["scores"] for way in json.loads((tmp_path / "out" / "rerank.json").read_text())["ways"]}
    for record in json.loads((tmp_path / "sizes.json").read_text())["records"]:
        size = f"{record['layers']}x{record['dim']}"
        assert ways[size][record["metric"]] == pytest.approx(record["value"], abs=1e-6)
    assert ways["1x4"] != ways["1x16"]  # negative control


def vectors(seed: int, rows: int, dim: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, dim)).astype(np.float32)


def collection(num_queries: int, num_documents: int):
    return retrieval_data(
        "made",
        {f"d{i:03}": "text" for i in range(num_documents)},
        {f"q{i}": "query" for i in range(num_queries)},
        {f"q{i}": {f"d{i:03}": 1} for i in range(num_queries)},
    )


@pytest.mark.parametrize(("depth", "changes"), [(1, False), (7, True), (40, True), (1000, True)])
def test_rerank_by_brute_force(depth: int, changes: bool) -> None:
    data = collection(5, 40)
    queries, documents = vectors(1, 5, 16), vectors(2, 40, 16)
    _, positions = search(queries[:, :4].copy(), documents[:, :4].copy(), top_k=30)
    new_scores, new_positions = rerank(positions, queries, documents, depth=depth)
    run = as_run(data, new_scores, new_positions)
    for row in range(5):
        small = [float(queries[row, :4] @ documents[place, :4]) for place in range(40)]
        order = sorted(range(40), key=lambda place: -small[place])[:30]
        large = [float(queries[row] @ documents[place]) for place in range(40)]
        expected = sorted(order[:depth], key=lambda place: -large[place]) + order[depth:]
        # What a scorer sees, which orders by score in single precision.
        assert ranking(run[f"q{row}"]) == [data.document_ids[place] for place in expected]
    # Negative control: reranking changes something, but where there is one document to rerank.
    assert (new_positions != positions).any() == changes


def test_rerank_of_everything_is_the_large_search() -> None:
    queries, documents = vectors(3, 6, 16), vectors(4, 50, 16)
    small = search(queries[:, :4].copy(), documents[:, :4].copy(), top_k=50)
    _, positions = rerank(small[1], queries, documents, depth=50)
    np.testing.assert_array_equal(positions, search(queries, documents, top_k=50)[1])
    assert (rerank(small[1], queries, documents, depth=5)[1] != positions).any()


def test_ways_and_their_costs() -> None:
    data = collection(12, 50)
    documents = vectors(6, 50, 16)
    # A query is its document and noise, so that more dimensions find it more often.
    places = [data.document_ids.index(f"d{i:03}") for i in range(12)]
    queries = documents[places] + 0.8 * vectors(7, 12, 16)
    costs = {SMALL: Cost(1.0, 10, 16), LARGE: Cost(4.0, 20, 64)}
    by_size = {SMALL: (queries[:, :4].copy(), documents[:, :4].copy()), LARGE: (queries, documents)}
    ways = compare_ways(
        data,
        {size: pair[0] for size, pair in by_size.items()},
        {size: pair[1] for size, pair in by_size.items()},
        costs,
        small=SMALL,
        large=LARGE,
        depths=[5, 50],
        top_k=50,
    )
    small, large, short, deep = ways
    assert small.scores["ndcg_cut_10"] < short.scores["ndcg_cut_10"] <= deep.scores["ndcg_cut_10"]
    assert deep.scores == large.scores and deep.against_full is not None and deep.against_full.p == 1
    assert small.against_full is not None and small.against_full.p < 0.05 and small.against_full.difference < 0
    assert large.against_full is None
    # The query is encoded once, by the large size; the small index is searched, the large one looked up.
    assert (short.encode_ms, small.encode_ms) == (4.0, 1.0)
    assert short.index_mib == small.index_mib == 50 * 4 * 4 / 2**20
    assert short.store_mib == large.index_mib == 50 * 16 * 4 / 2**20
    assert any(way.on_front for way in ways)


def test_pareto_front_by_hand() -> None:
    points = [(1.0, 0.2), (2.0, 0.5), (3.0, 0.4), (3.0, 0.7), (1.0, 0.1), (3.0, 0.7)]
    assert pareto_front(points) == {0, 1, 3, 5}


def test_a_cut_encoder_gives_the_sizes_vectors(make_model, tiny_tokenizer) -> None:
    encoder = load_encoder(make_model(1)).eval()
    ids = tiny_tokenizer(["return a value"], return_tensors="pt")
    with torch.no_grad():
        (whole,) = encoder(ids["input_ids"], ids["attention_mask"], [SMALL])
        (cut,) = cut_encoder(encoder, SMALL)(ids["input_ids"], ids["attention_mask"], [SMALL])
        (deep,) = encoder(ids["input_ids"], ids["attention_mask"], [Size(2, 4)])
    torch.testing.assert_close(cut, whole)
    assert (deep - whole).abs().max() > 1e-3 and encoder.num_layers == 2


def test_commands(make_model, beir_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = make_model(1), make_model(2)
    beir = ["--beir", str(beir_folder), "--device", "cpu"]
    output = tmp_path / "reranked"
    command = ["rerank", "--model", str(first), *beir, "--depth", "5", "60", "--queries", "3"]
    assert evaluate.main([*command, "--output", str(output)]) == 0
    table = capsys.readouterr().out
    assert "1×4 → 2×16, 5" in table and (output / "rerank.md").read_text() == table
    ways = {way["name"]: way for way in json.loads((output / "rerank.json").read_text())["ways"]}
    # Reranking the whole collection is the large size's own search.
    assert ways["1x4 → 2x16, 60"]["scores"] == ways["2x16"]["scores"] != ways["1x4"]["scores"]
    assert (output / "rerank.png").read_bytes().startswith(b"\x89PNG")

    costs = tmp_path / "latency.json"
    assert evaluate.main(["latency", "--model", str(first), *beir, "--queries", "3", "--json", str(costs)]) == 0
    sizes = json.loads(costs.read_text())["sizes"]
    assert sizes["1x4"]["parameters"] < sizes["2x16"]["parameters"]
    assert sizes["2x16"]["index_bytes_per_document"] == 64 and sizes["1x4"]["milliseconds"] > 0

    folders = []
    for name, model in (("one", first), ("two", second)):
        folders.append(tmp_path / name)
        assert evaluate.main(["sizes", "--model", str(model), *beir, "--output", str(folders[-1])]) == 0
    capsys.readouterr()
    assert evaluate.main(["compare", *map(str, folders)]) == 0
    table = capsys.readouterr().out
    raws = [read_raw(folder / "raw.jsonl.gz") for folder in folders]
    a, b = (raw.values["docs", "trained", 2, 16]["ndcg_cut_10"] for raw in raws)
    row = next(line for line in table.splitlines() if str(folders[1]) in line and "2x16" in line)
    assert f"{stats.ttest_rel(b, a).pvalue:.4f}" in row and f"{b.mean() - a.mean():+.4f}" in row
    assert evaluate.main(["compare", str(folders[0]), str(folders[0].parent)]) == 2
    # The raw results are those of the table.
    records = json.loads((folders[0] / "results.json").read_text())["records"]
    value = next(r["value"] for r in records if (r["size"], r["metric"]) == ("2x16", "ndcg_cut_10"))
    assert raws[0].means(("docs", "trained", 2, 16))["ndcg_cut_10"] == pytest.approx(value, abs=1e-12)

    for extra, message in (
        (["--shortlist", "2x16"], "both 2x16"),
        (["--shortlist", "2x16", "--rerank", "1x4"], "not part of"),
        (["--top-k", "12"], "more than the --top-k 12"),
    ):
        assert evaluate.main([*command, *extra]) == 2
        assert message in capsys.readouterr().err


def test_scoring_a_run_against_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    qrels, first, second, short = (tmp_path / name for name in ("qrels", "first", "second", "short"))
    qrels.write_text("".join(f"q{i} 0 d 1\n" for i in range(6)))
    ranks = {first: [1, 1, 2, 1, 1, 3], second: [2, 1, 3, 2, 4, 3]}
    for path, places in ranks.items():
        path.write_text(
            "".join(
                f"q{query} Q0 {'d' if place == rank else f'x{place}'} 0 {-place} run\n"
                for query, rank in enumerate(places)
                for place in range(1, 6)
            )
        )
    found = tmp_path / "scores.json"
    command = ["score", "--qrels", str(qrels), "--run", str(first)]
    assert evaluate.main([*command, "--baseline", str(second), "--json", str(found)]) == 0
    a, b = (1 / np.array(ranks[path]) for path in (first, second))
    expected = stats.ttest_rel(a, b)
    test = json.loads(found.read_text())["against_baseline"]["recip_rank"]
    assert (test["p"], test["statistic"]) == pytest.approx((expected.pvalue, expected.statistic), rel=1e-5)
    assert test["difference"] == pytest.approx(a.mean() - b.mean()) and test["n"] == 6
    assert f"recip_rank            \tp\t{expected.pvalue:.4f}" in capsys.readouterr().out
    short.write_text("q0 Q0 d 0 1 run\n")
    assert evaluate.main([*command, "--baseline", str(short)]) == 2
    assert "count missing ones 0" in capsys.readouterr().err
    assert evaluate.main([*command, "--baseline", str(short), "--complete"]) == 0
