"""Two sizes' scores together: the sum of two similarities, against a naive ranking of every document in float64."""

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
from tests.beir import write_beir
from trainer.evaluate import main
from trainer.evaluation.fused import (
    Pair,
    corrected,
    fused_markdown,
    fused_retrieval,
    fused_sts,
    measure_pairs,
    pairs_of,
    plot_fused,
)
from trainer.evaluation.results.significance import holm
from trainer.evaluation.tasks.retrieval import RetrievalData, retrieval_data, score_run
from trainer.evaluation.tasks.sts import STSTask

SIZES = [Size(1, 8), Size(2, 24), Size(3, 16)]


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def collection(num_queries: int = 30, num_documents: int = 120) -> RetrievalData:
    return retrieval_data(
        "made",
        {f"d{i:03}": "text" for i in range(num_documents)},
        {f"q{i:02}": "query" for i in range(num_queries)},
        {f"q{i:02}": {f"d{i:03}": 2, f"d{i + 40:03}": 1} for i in range(num_queries)},
    )


def noisy(data: RetrievalData, *, noise: float = 1.8) -> tuple[dict[Size, np.ndarray], dict[Size, np.ndarray]]:
    """Queries near their documents, with noise of its own at every size, so that two sizes together know more."""
    queries, documents = {}, {}
    for seed, size in enumerate(SIZES):
        rng = np.random.default_rng(seed)
        stored = rng.normal(size=(len(data.documents), size.dim))
        places = [data.document_ids.index(f"d{i:03}") for i in range(len(data.queries))]
        queries[size] = unit(stored[places] + noise * rng.normal(size=(len(places), size.dim)))
        documents[size] = unit(stored)
    return queries, documents


def naive_ndcg(data: RetrievalData, queries: dict, documents: dict, sizes: tuple[Size, ...]) -> np.ndarray:
    run = {}
    for i, query in enumerate(data.query_ids):
        run[query] = {
            name: sum(float(queries[s][i].astype(float) @ documents[s][j].astype(float)) for s in sizes)
            for j, name in enumerate(data.document_ids)
        }
    return np.array([each["ndcg_cut_10"] for each in score_run(run, data.qrels).per_query.values()])


def test_pairs_are_every_two_sizes_once() -> None:
    pairs = pairs_of([SIZES[2], SIZES[0], SIZES[1], SIZES[0]])
    assert {str(pair) for pair in pairs} == {"1x8 + 2x24", "1x8 + 3x16", "2x24 + 3x16"}
    assert pairs[0].index_bytes_per_document == 4 * 24


def test_retrieval_is_the_naive_sum_of_two_similarities() -> None:
    data = collection()
    queries, documents = noisy(data)
    rows = fused_retrieval(queries, documents, data, top_k=20)
    assert len(rows) == 3
    alone = {size: naive_ndcg(data, queries, documents, (size,)) for size in SIZES}
    for row in rows:
        expected = naive_ndcg(data, queries, documents, (row.pair.first, row.pair.second))
        assert row.value == pytest.approx(expected.mean(), abs=1e-9)
        assert row.members == pytest.approx((alone[row.pair.first].mean(), alone[row.pair.second].mean()), abs=1e-9)
        # The better member is the baseline, and the test is paired by query.
        better = max((row.pair.first, row.pair.second), key=lambda size: alone[size].mean())
        test = stats.ttest_rel(expected, alone[better])
        assert row.better == better and row.against_better.n == len(data.queries)
        assert row.against_better.p == row.p == pytest.approx(test.pvalue, rel=1e-6)
        assert row.gain == pytest.approx(expected.mean() - alone[better].mean(), abs=1e-9)
    # Independent noise at two sizes partly cancels in their sum.
    assert max(row.gain for row in rows) > 0.05 and min(row.p for row in rows) < 0.05


def test_negative_controls() -> None:
    data = collection()
    queries, documents = noisy(data)
    (row, *_) = fused_retrieval(queries, documents, data, top_k=20)
    # The members' documents must be the same ones: with one member's rows out of step, the sum finds less.
    shifted = documents | {row.pair.second: np.roll(documents[row.pair.second], 1, axis=0)}
    (broken, *_) = fused_retrieval(queries, shifted, data, top_k=20)
    assert broken.value < row.value - 0.1
    # A size that only repeats another adds nothing.
    same, one = Size(2, 8), SIZES[0]
    (twin,) = fused_retrieval(
        {one: queries[one], same: queries[one]}, {one: documents[one], same: documents[one]}, data, top_k=20
    )
    assert twin.gain == 0 and twin.p == 1
    # The sum is not the cosine of the concatenated vectors before each part is scaled to unit length.
    scale = np.linspace(0.1, 3.0, len(data.documents), dtype=np.float32)[:, None]
    (other, *_) = fused_retrieval(
        queries, documents | {row.pair.first: documents[row.pair.first] * scale}, data, top_k=20
    )
    assert abs(other.value - row.value) > 1e-3


def test_sts_is_the_naive_sum_of_two_cosines() -> None:
    rng = np.random.default_rng(0)
    truth = rng.uniform(-1, 1, 300)
    vectors = {}
    for size in SIZES:
        first = unit(rng.normal(size=(300, size.dim)))
        second = unit(truth[:, None] * first + 0.2 * rng.normal(size=(300, size.dim)))
        vectors[size] = np.stack([first, second * 3.0], axis=1).reshape(600, size.dim)  # lengths do not matter
    task = STSTask("toy", (("a", "b"),) * 300, tuple(truth.tolist()))
    rows = fused_sts(vectors, task)

    def cosines(size: Size) -> np.ndarray:
        pairs = zip(vectors[size][0::2].astype(float), vectors[size][1::2].astype(float))
        return np.array([a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in pairs])

    for row in rows:
        a, b = cosines(row.pair.first), cosines(row.pair.second)
        assert row.value == pytest.approx(stats.spearmanr(a + b, truth).statistic, abs=1e-12)
        best = max(stats.spearmanr(each, truth).statistic for each in (a, b))
        assert max(row.members) == pytest.approx(best, abs=1e-12)
        z = (np.arctanh(row.value) - np.arctanh(best)) / np.sqrt(2 / 297)
        assert row.p == pytest.approx(2 * stats.norm.sf(abs(z)), rel=1e-6) and row.search_ms is None
    assert all(row.gain > 0 for row in rows)


def test_a_size_without_a_correlation_is_not_the_better_one() -> None:
    rng = np.random.default_rng(1)
    vectors = {Size(1, 4): np.ones((40, 4), np.float32), Size(2, 4): rng.normal(size=(40, 4)).astype(np.float32)}
    (row,) = fused_sts(vectors, STSTask("toy", (("a", "b"),) * 20, tuple(range(20))))
    assert np.isnan(row.members[0]) and row.better == Size(2, 4)


def test_holm_is_over_the_pairs_of_a_task(tmp_path: Path) -> None:
    data = collection()
    rows = fused_retrieval(*noisy(data), data, top_k=20)
    adjusted = corrected(rows)
    assert [row.p for row in adjusted] == holm([row.against_better.p for row in rows])
    assert any(new.p > old.p for new, old in zip(adjusted, rows))
    written = plot_fused(rows, tmp_path)
    assert sorted(path.name for path in written) == ["made.png", "made_gain.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


@pytest.fixture(scope="module")
def model(tiny_tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    shape = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32)
    config = {"model_type": "bert", **shape, "max_position_embeddings": 64}
    build_masked_lm(config, vocab_size=len(tiny_tokenizer), pad_token_id=tiny_tokenizer.pad_token_id).save_pretrained(
        folder
    )
    tiny_tokenizer.save_pretrained(folder)
    ladder = ((1, 8), (2, 16), (3, 32))
    EmbeddingSettings(pooling="mean", ladder=ladder, query_max_length=16, passage_max_length=32).save(folder)
    return folder


def test_one_pass_serves_both_sizes(model: Path, tiny_tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair's time is of one pass as deep as the deeper size, whatever the widths; two models would take two."""
    encoder, settings = load_encoder(model), EmbeddingSettings.load(model)
    assert settings is not None
    sizes = [Size(1, 8), Size(1, 16), Size(3, 8), Size(3, 32)]
    calls: list[tuple[int, tuple[Size, ...]]] = []
    whole = type(encoder).forward

    def counting(self, input_ids, attention_mask, wanted, **options):
        calls.append((self.num_layers, tuple(wanted)))
        return whole(self, input_ids, attention_mask, wanted, **options)

    monkeypatch.setattr(type(encoder), "forward", counting)
    costs = measure_pairs(encoder, tiny_tokenizer, sizes, settings, ["return a value"])
    assert set(calls) == {
        (1, (Size(1, 16),)),
        (3, (Size(3, 32),)),
        (1, (Size(1, 16), Size(1, 16))),
        (3, (Size(1, 16), Size(3, 32))),
        (3, (Size(3, 32), Size(3, 32))),
    }
    assert len(costs) == 6 and costs[Pair(Size(1, 8), Size(3, 8))] == costs[Pair(Size(1, 16), Size(3, 32))]
    cost = costs[Pair(Size(1, 8), Size(3, 32))]
    assert cost.apart == sum(cost.members) and cost.members[0] == costs[Pair(Size(1, 8), Size(1, 16))].members[0]


def test_the_command(model: Path, docstrings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [" ".join(text.split()) for text in docstrings if len(text.split()) > 12][:40]
    beir = write_beir(tmp_path / "docs", texts, [" ".join(text.split()[:8]) for text in texts[:15]])
    (tmp_path / "pairs.tsv").write_text("".join(f"{i % 6}\t{texts[i][:60]}\t{texts[i + 1][:60]}\n" for i in range(30)))
    words = ["fused", "--model", str(model), "--queries", "2", "--holm"]
    tasks = ["--beir", str(beir), "--sts", str(tmp_path / "pairs.tsv")]
    assert main([*words, *tasks, "--output", str(tmp_path / "out")]) == 0
    table = capsys.readouterr().out
    assert (tmp_path / "out" / "fused.md").read_text() == table and "1×8 + 3×32" in table
    found = json.loads((tmp_path / "out" / "fused.json").read_text())
    assert len(found["rows"]) == 2 * 3 == 2 * len(found["costs"]) and found["holm"]
    assert {"first", "second", "better", "value", "against_better", "search_ms"} <= found["rows"][0].keys()
    names = sorted(path.name for path in (tmp_path / "out" / "figures").iterdir())
    assert names == ["docs.png", "docs_gain.png", "pairs.png", "pairs_gain.png"]
    # The members' own scores are those of `sizes`.
    assert main(["sizes", "--model", str(model), *tasks, "--json", str(tmp_path / "sizes.json")]) == 0
    alone = {
        (record["task"], f"{record['layers']}x{record['dim']}"): record["value"]
        for record in json.loads((tmp_path / "sizes.json").read_text())["records"]
        if record["metric"] in ("ndcg_cut_10", "spearman")
    }
    for row in found["rows"]:
        expected = [alone[row["task"], row[place]] for place in ("first", "second")]
        assert row["members"] == pytest.approx(expected, abs=1e-6)
    capsys.readouterr()
    assert main([*words, *tasks, "--sizes", "2x16"]) == 2
    assert "name two or more" in capsys.readouterr().err
    assert main(words) == 2 and "nothing to evaluate on" in capsys.readouterr().err


def test_the_table_names_the_better_member() -> None:
    data = collection()
    rows = fused_retrieval(*noisy(data), data, top_k=20)
    costs = {row.pair: _Cost for row in rows}
    text = fused_markdown(rows, costs, str)
    best = max(rows, key=lambda row: row.gain)
    line = next(each for each in text.splitlines() if str(best.pair).replace("x", "×") in each)
    assert f"{best.value:.4f}†" in line and f"| {str(best.better).replace('x', '×')}" in line
    assert "### Encoding a query" in text


class _Cost:
    together, members, apart = 2.0, (1.0, 2.0), 3.0
