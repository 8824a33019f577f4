"""Evaluation: vectors do not depend on batching or ranks; scores and the breaking of ties are trec_eval's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import distributed as dist
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.ground.errors import ConfigError
from data.ground.options import Stated
from models.encoder import Encoder, build_masked_lm, load_encoder
from models.settings import EmbeddingSettings
from models.sizes import ModelError, Size
from tests.beir import write_beir
from tests.ranks import call_on_ranks
from trainer import evaluate
from trainer.distributed import World
from trainer.evaluation import arguments
from trainer.evaluation.encoding.encode import (
    Embedder,
    embedder_of,
    encode,
    encoder_forward,
    token_batches,
)
from trainer.evaluation.results.report import (
    Record,
    markdown_table,
    plot_heat_map,
    plot_records,
    results_markdown,
    size_scores,
)
from trainer.evaluation.run import evaluate_tasks
from trainer.evaluation.sizes_command import bm25_records
from trainer.evaluation.tasks.retrieval import (
    METRICS,
    RunScores,
    SearchOptions,
    _sort_keys,
    bm25_run,
    evaluate_retrieval,
    in_blocks,
    load_beir,
    ranking,
    read_qrels,
    read_run,
    retrieval_data,
    retrieve,
    score_run,
    search,
    write_run,
)
from trainer.evaluation.tasks.sts import STSTask, Subset, evaluate_sts, read_sts, score_sts, spearman

SIZES = [Size(1, 8), Size(2, 16), Size(3, 32)]
CONFIG = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def model_folder(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("model")
    model = build_masked_lm(CONFIG, vocab_size=len(tiny_tokenizer), pad_token_id=tiny_tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    ladder = tuple((size.layers, size.dim) for size in SIZES)
    EmbeddingSettings(pooling="mean", ladder=ladder, query_max_length=24, passage_max_length=48).save(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(model_folder: Path) -> Encoder:
    return load_encoder(model_folder).eval()


@pytest.fixture(scope="module")
def beir_folder(docstrings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Find a docstring by its first words: queries q0.., documents d0.. (and queries named like documents)."""
    texts = [text for text in docstrings if len(text.split()) > 12][:60]
    documents = [{"title": f"Title {i}", "text": text} for i, text in enumerate(texts)]
    queries = [" ".join(text.split()[:8]) for text in texts[:20]]
    return write_beir(tmp_path_factory.mktemp("beir") / "docs", documents, queries, judged=12)


# Encoding


def reference(encoder: Encoder, tokenizer: PreTrainedTokenizerFast, text: str, size: Size, cosine: bool) -> np.ndarray:
    """One text alone, no padding; cut, then normalised."""
    ids = torch.tensor([tokenizer(text, truncation=True, max_length=32)["input_ids"]])
    with torch.no_grad():
        states = encoder.backbone(input_ids=ids, output_hidden_states=True).hidden_states
    vector = states[size.layers][0].mean(0)[: size.dim].double().numpy()
    return vector / np.linalg.norm(vector) if cosine else vector


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("batch_tokens", [1, 100, 10_000])
def test_vectors_are_each_texts_own(
    similarity: str,
    batch_tokens: int,
    encoder: Encoder,
    tiny_tokenizer: PreTrainedTokenizerFast,
    docstrings: list[str],
) -> None:
    texts = [*docstrings[:20], "word", docstrings[3], ""]  # a duplicate and an empty text among them
    embedder = embedder_of(encoder, tiny_tokenizer, SIZES, device="cpu", batch_tokens=batch_tokens)
    vectors = encode(embedder, texts, similarity=similarity, max_length=32)
    assert list(vectors) == SIZES
    for size, rows in vectors.items():
        assert rows.dtype == np.float32 and rows.shape == (len(texts), size.dim)
        expected = np.stack([reference(encoder, tiny_tokenizer, text, size, similarity == "cosine") for text in texts])
        np.testing.assert_allclose(rows, expected, atol=1e-5)
        np.testing.assert_array_equal(rows[3], rows[21])
    # Negative control: order matters to this test.
    assert np.abs(vectors[SIZES[0]][0] - vectors[SIZES[0]][1]).max() > 1e-3


def test_one_pass_serves_all_sizes_within_the_token_budget(
    encoder: Encoder, tiny_tokenizer: PreTrainedTokenizerFast, docstrings: list[str]
) -> None:
    shapes = []
    forward = encoder_forward(encoder, SIZES)

    def counted(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert not torch.is_grad_enabled()
        shapes.append(tuple(input_ids.shape))
        return forward(input_ids, attention_mask)

    texts = docstrings[:50]
    embedder = Embedder(counted, tiny_tokenizer, SIZES, World.alone(), batch_tokens=256)
    encode(embedder, texts, similarity="dot", max_length=32)
    assert sum(rows for rows, _ in shapes) == len(texts)
    assert all(rows * width <= 256 for rows, width in shapes)
    assert [width for _, width in shapes] == sorted((width for _, width in shapes), reverse=True)


def test_prompt_precedes_and_counts(
    encoder: Encoder, tiny_tokenizer: PreTrainedTokenizerFast, docstrings: list[str]
) -> None:
    run = partial(embedder_of(encoder, tiny_tokenizer, SIZES, device="cpu"), similarity="dot", max_length=16)
    with_prompt = run(docstrings[:4], prompt="return the ")
    by_hand = run(["return the " + text for text in docstrings[:4]])
    without = run(docstrings[:4])
    for size in SIZES:
        np.testing.assert_allclose(with_prompt[size], by_hand[size], atol=1e-6)
    assert np.abs(with_prompt[SIZES[2]] - without[SIZES[2]]).max() > 1e-3
    assert {rows.shape for rows in run([]).values()} == {(0, 8), (0, 16), (0, 32)}
    with pytest.raises(ConfigError, match="similarity 'euclid'"):
        run(["a"], similarity="euclid")


def test_token_batches_partition_the_rows() -> None:
    """At most 40 tokens with padding, longest first; a row that is longer than that comes alone."""
    lengths = np.array([5, 30, 1, 12, 30, 7, 0, 100])
    batches = token_batches(lengths, 40)
    assert [batch.tolist() for batch in batches] == [[7], [1], [4], [3, 5, 0], [2, 6]]


def _encode_on_rank(rank: int, folder: str, texts: list[str], out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=2)
    encoder = load_encoder(folder).eval()
    forward, calls = encoder_forward(encoder, SIZES), []

    def counted(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append(1)
        return forward(*tensors)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    embedder = Embedder(counted, tokenizer, SIZES, World(rank, rank, 2, torch.device("cpu")), batch_tokens=96)
    arrays = {}
    # Uneven shares, then a share that is empty on rank 1.
    for name, part in (("many", texts), ("one", texts[:1])):
        vectors = encode(embedder, part, similarity="cosine", max_length=32)
        arrays |= {f"{name}_{size}": rows for size, rows in vectors.items()}
    np.savez(f"{out}/{rank}.npz", calls=np.array(len(calls)), **arrays)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.launch
@pytest.mark.launcher
def test_two_ranks_equal_one(
    model_folder: Path, encoder: Encoder, tiny_tokenizer: PreTrainedTokenizerFast, docstrings: list[str], tmp_path: Path
) -> None:
    texts = docstrings[:33]
    call_on_ranks(_encode_on_rank, str(model_folder), texts, str(tmp_path), ranks=2)
    embedder = embedder_of(encoder, tiny_tokenizer, SIZES, device="cpu", batch_tokens=96)
    alone = encode(embedder, texts, similarity="cosine", max_length=32)
    ranks = [np.load(tmp_path / f"{rank}.npz") for rank in range(2)]
    assert ranks[0]["calls"] == ranks[1]["calls"]  # a ZeRO-3 engine would hang otherwise
    for size in SIZES:
        for arrays in ranks:
            np.testing.assert_allclose(arrays[f"many_{size}"], alone[size], atol=1e-6)
            np.testing.assert_allclose(arrays[f"one_{size}"], alone[size][:1], atol=1e-6)


# STS


def test_spearman_by_its_definition() -> None:
    a, b = np.array([0.1, 0.9, 0.4, 0.4, -1.0]), np.array([1.0, 5.0, 2.0, 3.0, 0.0])
    ranks_a, ranks_b = np.array([2, 5, 3.5, 3.5, 1]), np.array([2, 5, 3, 4, 1])
    assert spearman(a, b) == pytest.approx(np.corrcoef(ranks_a, ranks_b)[0, 1], abs=1e-12)
    assert spearman(b, b**3) == pytest.approx(1)
    assert math.isnan(spearman(np.ones(5), b))


def test_sts_of_every_size_and_subset() -> None:
    rng = np.random.default_rng(0)
    texts: dict[str, np.ndarray] = {}

    def encode_texts(rows: Sequence[str]) -> dict[Size, np.ndarray]:
        full = np.stack([texts.setdefault(row, rng.normal(size=32)) for row in rows]).astype(np.float32)
        return {size: full[:, : size.dim] for size in SIZES}

    def task(name: str, rows: int, **subsets: tuple[int, int]) -> STSTask:
        pairs = tuple((f"{name} {i}", f"{name} other {i}") for i in range(rows))
        parts = tuple(Subset(key, *bounds) for key, bounds in subsets.items())
        return STSTask(name, pairs, tuple(rng.uniform(0, 5, rows).tolist()), parts)

    tasks = [task("one", 30), task("two", 40, first=(0, 10), second=(10, 30))]
    results = evaluate_sts(encode_texts, tasks)
    for one in tasks:
        for size in SIZES:
            cosines = []
            for pair in one.pairs:
                a, b = (texts[text][: size.dim] for text in pair)
                cosines.append(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
            metrics = results[one.name][size]
            assert metrics["spearman"] == pytest.approx(stats.spearmanr(cosines, one.scores).statistic, abs=1e-9)
            assert metrics["pearson"] == pytest.approx(np.corrcoef(cosines, one.scores)[0, 1], abs=1e-6)
            parts = [
                stats.spearmanr(cosines[s.start : s.start + s.rows], one.scores[s.start : s.start + s.rows]).statistic
                for s in one.subsets
            ]
            if parts:
                assert metrics["spearman_mean"] == pytest.approx(np.mean(parts), abs=1e-9)
                assert metrics["spearman/second"] == pytest.approx(parts[1], abs=1e-9)
            else:
                assert "spearman_mean" not in metrics


def test_read_sts(tmp_path: Path) -> None:
    tsv = tmp_path / "mini.tsv"
    tsv.write_text('4.4\tA "quoted word.\tB\u2028b\n0\tc\td\n')
    assert read_sts(tsv) == STSTask("mini", (('A "quoted word.', "B\u2028b"), ("c", "d")), (4.4, 0.0))
    jsonl = tmp_path / "mini.jsonl"
    rows = [{"score": 1, "sentence1": "a", "sentence2": "b"}, {"score": 2.5, "sentence1": "c", "sentence2": "d"}]
    jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_sts(jsonl).scores == (1.0, 2.5)
    for content, message in [
        ("1\ta\n2\tb\tc\n", "line 1 has 2 tab-separated columns"),
        ("score\ta\tb\n", "'score', which is no number"),
        ("1\ta\tb\n2\t \td\n", "line 2 has an empty sentence"),
        ("1\ta\tb\n", "holds 1 sentence pairs"),
    ]:
        tsv.write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_sts(tsv)
    with pytest.raises(ConfigError, match="does not exist"):
        read_sts(tmp_path / "absent.tsv")


def test_official_sts_files(shared_data: Path) -> None:
    task = read_sts(shared_data / "sts" / "sts12.tsv", subsets=shared_data / "sts" / "subsets.tsv")
    assert len(task.pairs) == 3108 and [subset.rows for subset in task.subsets] == [750, 750, 459, 750, 399]
    metrics = score_sts(task, np.asarray(task.scores))
    assert metrics["spearman"] == pytest.approx(1) and metrics["spearman_mean"] == pytest.approx(1)
    assert len(read_sts(shared_data / "sts" / "stsb_test.tsv").pairs) == 1379


# Scores of rankings


def test_metrics_by_their_definitions() -> None:
    qrels = {"q": {"a": 3, "b": 0, "c": 1, "d": 2, "gone": 1}}
    run = {"q": {"b": 9.0, "a": 8.0, "x": 7.0, "c": 6.0, "d": 5.0}}
    gain = 3 / math.log2(3) + 1 / math.log2(5) + 2 / math.log2(6)
    ideal = 3 / math.log2(2) + 2 / math.log2(3) + 1 / math.log2(4) + 1 / math.log2(5)
    means = score_run(run, qrels).means
    assert means["ndcg_cut_10"] == pytest.approx(gain / ideal)
    assert means["recip_rank"] == means["recip_rank_10"] == pytest.approx(1 / 2)
    assert means["map"] == pytest.approx((1 / 2 + 2 / 4 + 3 / 5) / 4)
    assert means["recall_100"] == means["recall_1000"] == pytest.approx(3 / 4)
    strict = score_run(run, qrels, relevance_level=2).means
    assert strict["ndcg_cut_10"] == pytest.approx(gain / ideal)
    assert strict["recall_100"] == 1 and strict["map"] == pytest.approx((1 / 2 + 2 / 5) / 2)


def test_recip_rank_10_stops_at_ten() -> None:
    run = {"q": {f"d{i:02}": 100.0 - i for i in range(30)}}
    assert score_run(run, {"q": {"d09": 1}}).means["recip_rank_10"] == pytest.approx(1 / 10)
    means = score_run(run, {"q": {"d10": 1}}).means
    assert means["recip_rank_10"] == 0 and means["recip_rank"] == pytest.approx(1 / 11)


def expected_means(path: Path) -> dict[str, str]:
    rows = (line.split() for line in path.read_text().splitlines())
    return {name: value for name, query, value in rows if query == "all"}


@pytest.mark.parametrize(
    ("folder", "qrels", "run", "expected", "options"),
    [
        ("ties", "qrels.txt", "run.txt", "expected.txt", []),
        ("ties", "qrels.txt", "run.txt", "expected.c.txt", ["-c"]),
        ("ties", "qrels.txt", "run.txt", "expected.l2.txt", ["--relevance-level", "2"]),
        ("ties", "qrels.txt", "run.txt", "expected.M2.txt", ["-M", "2"]),
        ("trec_eval", "qrels.test", "results.test", "out.test.aq", []),
        ("trec_eval", "qrels.test", "results.trunc", "out.test.aqc", ["-c"]),
        ("trec_eval", "qrels.test", "results.trunc", "out.test.aqcM", ["-c", "-M", "100"]),
        ("trec_eval", "qrels.rel_level", "results.test", "out.test.aql", ["-l", "2"]),
    ],
)
def test_score_prints_trec_evals_numbers(
    folder: str,
    qrels: str,
    run: str,
    expected: str,
    options: list[str],
    shared_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = shared_data / "metrics" / folder
    command = ["score", "--qrels", str(where / qrels), "--run", str(where / run), "--json", str(tmp_path / "out.json")]
    assert evaluate.main([*command, *options]) == 0
    printed = {name: value for name, query, value in (line.split() for line in capsys.readouterr().out.splitlines())}
    assert list(printed) == ["num_q", *METRICS]
    answers = expected_means(where / expected)
    shared = printed.keys() & answers.keys()
    assert {"num_q", "ndcg_cut_10", "recip_rank", "map"} <= shared
    assert {name: printed[name] for name in shared} == {name: answers[name] for name in shared}
    written = json.loads((tmp_path / "out.json").read_text())
    assert {name: f"{written[name]:.4f}" for name in METRICS} == {name: printed[name] for name in METRICS}


def test_every_query_agrees_with_trec_eval(shared_data: Path) -> None:
    where = shared_data / "metrics" / "trec_eval"
    scores = score_run(read_run(where / "results.test"), read_qrels(where / "qrels.test"))
    compared = 0
    for line in (where / "out.test.aq").read_text().splitlines():
        name, query, value = line.split()
        if name in METRICS and query != "all":
            assert f"{scores.per_query[query][name]:.4f}" == value
            compared += 1
    assert compared == 5 * 3


def test_run_files_keep_ties_and_scores(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(size=50).astype(np.float32)
    values[10:20] = values[0]
    run = {"q1": {f"d{i}": float(value) for i, value in enumerate(values)}, "q2": {"é": 1e-9, "z": 1e-9, "a": -0.0}}
    write_run(run, tmp_path / "a.run")
    again = read_run(tmp_path / "a.run")
    assert {q: {d: np.float32(s) for d, s in docs.items()} for q, docs in run.items()} == again
    ranks = [line.split() for line in (tmp_path / "a.run").read_text().splitlines()]
    assert [row[2] for row in ranks if row[0] == "q1"] == ranking(run["q1"])
    assert [row[3] for row in ranks if row[0] == "q2"] == ["1", "2", "3"]
    assert ranking(run["q2"]) == ["é", "z", "a"]  # ids by bytes, descending
    with pytest.raises(ConfigError, match="white space"):
        write_run({"q": {"a b": 1.0}}, tmp_path / "b.run")


def test_damaged_trec_files_are_told_by_line(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for read, content, message in [
        (read_qrels, "q 0 d 1\nq 0 d 2\n", "line 2 judges document 'd' for query 'q' again"),
        (read_qrels, "q 0 d one\n", "line 1 is not a judgement"),
        (read_qrels, "\n", "holds no judgements"),
        (read_run, "q Q0 d 1 0.5 t\nq Q0 d 2 0.4 t\n", "line 2 ranks document 'd'"),
        (read_run, "q Q0 d 1 nan t\n", "line 1 is no line of a run"),
        (read_run, "q Q0 d 1 0.5\n", "line 1 is no line of a run"),
        (read_run, "", "holds no ranking"),
    ]:
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            read(path)
    path.write_text("query-id\tcorpus-id\tscore\nq\td\t2\n")
    assert read_qrels(path) == {"q": {"d": 2}}


# Search


@pytest.mark.parametrize("max_scores", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("top_k", [1, 5, 40, 500])
def test_search_equals_sorting_everything(max_scores: int, top_k: int) -> None:
    # Small integers: exact in any order of summation, and full of ties and of both zeros.
    rng = np.random.default_rng(2)
    queries = rng.integers(-2, 3, (9, 4)).astype(np.float32)
    documents = rng.integers(-2, 3, (61, 4)).astype(np.float32)
    documents[5] = -0.0
    found, places = search(queries, documents, top_k=top_k, max_scores=max_scores)
    scores = queries @ documents.T
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    np.testing.assert_array_equal(places, expected)
    np.testing.assert_array_equal(found, np.take_along_axis(scores, expected, axis=1))


@pytest.mark.parametrize("max_scores", [7, 200, 1 << 20])
def test_search_without_ties(max_scores: int) -> None:
    rng = np.random.default_rng(4)
    queries = rng.normal(size=(9, 4)).astype(np.float32)
    documents = rng.normal(size=(300, 4)).astype(np.float32)
    found, places = search(queries, documents, top_k=10, max_scores=max_scores)
    scores = queries.astype(np.float64) @ documents.T.astype(np.float64)
    expected = np.argsort(-scores, axis=1)[:, :10]
    np.testing.assert_array_equal(places, expected)
    np.testing.assert_allclose(found, np.take_along_axis(scores, expected, axis=1), rtol=1e-5)


def test_keys_order_like_scores_then_positions() -> None:
    scores = torch.tensor([-math.inf, -2.5, -1e-30, 0.0, -0.0, 1e-30, 1e-30, 3.0, math.inf])
    keys = _sort_keys(scores, torch.tensor([0, 1, 2, 9, 4, 7, 6, 0, 0xFFFFFFFF])).tolist()
    assert keys == sorted(keys) and len(set(keys)) == len(keys)


@pytest.mark.parametrize("top_k", [2, 300])
@pytest.mark.parametrize("place", [0, 150, 299])
@pytest.mark.parametrize("max_scores", [100, 1 << 20])
def test_search_refuses_nan(max_scores: int, top_k: int, place: int) -> None:
    queries, documents = np.ones((2, 2), np.float32), np.random.default_rng(0).normal(size=(300, 2)).astype(np.float32)
    search(queries, documents, top_k=top_k, max_scores=max_scores)
    documents[place] = np.nan
    with pytest.raises(ModelError, match="NaN"):
        search(queries, documents, top_k=top_k, max_scores=max_scores)


@pytest.mark.parametrize("block", [1, 3, 1000])
def test_ties_are_broken_as_trec_eval_breaks_them(block: int) -> None:
    """The ranking that search returns is the one that scoring assumes, also where the cut goes through a tie."""
    documents = {name: name for name in ("a", "b", "B", "c", "d10", "d9", "é", "zz")}
    data = retrieval_data("ties", documents, {"q": "?"}, {"q": {"d10": 1}})

    def same(texts: Sequence[str]) -> dict[Size, np.ndarray]:
        return {SIZES[0]: np.ones((len(texts), 8), np.float32)}

    by_bytes = sorted(documents, key=str.encode, reverse=True)
    for top_k in (3, 8):
        blocks, options = in_blocks(same, data.documents, block), SearchOptions(top_k)
        [(size, run)] = retrieve(same, blocks, data, options=options, world=World.alone())
        assert size == SIZES[0] and list(run["q"]) == by_bytes[:top_k] == ranking(run["q"])
    place = by_bytes.index("d10") + 1
    assert score_run(run, data.qrels).means["recip_rank"] == pytest.approx(1 / place)


def test_retrieval_finds_what_is_near(beir_folder: Path) -> None:
    data = load_beir(beir_folder)
    assert len(data.documents) == 60 and len(data.queries) == 12  # judged queries only
    assert data.documents[data.document_ids.index("d7")].startswith("Title 7 ")
    number = {query: float(query[1:]) for query in data.query_ids}
    place = {text: float(name[1:]) for name, text in zip(data.document_ids, data.documents)}
    by_query = dict(zip(data.queries, number.values()))

    # Angles on a circle: query i lies on document i at the larger size; the smaller one sees one coordinate only.
    def at(angle: float) -> np.ndarray:
        return np.array([1.0, np.cos(angle / 10), np.sin(angle / 10)], np.float32)

    def vectors(table: dict[str, float]) -> Callable[[Sequence[str]], dict[Size, np.ndarray]]:
        def encode_texts(texts: Sequence[str]) -> dict[Size, np.ndarray]:
            full = np.stack([at(table[text]) for text in texts])
            return {Size(1, 1): full[:, :1], Size(2, 3): full}

        return encode_texts

    seen = {}
    scores = evaluate_retrieval(
        vectors(by_query),
        in_blocks(vectors(place), data.documents, 7),
        data,
        options=SearchOptions(20),
        world=World.alone(),
        on_run=lambda size, run: seen.update({size: run}),
    )
    assert scores[Size(2, 3)].means["recip_rank"] == 1 and scores[Size(1, 1)].means["recip_rank"] < 0.5
    assert scores[Size(2, 3)].num_queries == 12
    assert all(len(documents) == 20 for documents in seen[Size(2, 3)].values())
    other = World(1, 1, 2, torch.device("cpu"))
    assert not evaluate_retrieval(vectors(by_query), in_blocks(vectors(place), data.documents, 7), data, world=other)


def test_a_part_of_the_corpus_keeps_the_judged(beir_folder: Path) -> None:
    data = load_beir(beir_folder, max_documents=20)
    assert len(data.documents) == 20 and {f"d{i}" for i in range(12)} <= set(data.document_ids)
    assert load_beir(beir_folder, max_documents=20).document_ids == data.document_ids
    assert len(load_beir(beir_folder, max_documents=5).documents) == 12


def test_own_document_can_be_ignored() -> None:
    data = retrieval_data("same", {"1": "a", "2": "b", "3": "c"}, {"1": "a"}, {"1": {"2": 1}})

    def encode_texts(texts: Sequence[str]) -> dict[Size, np.ndarray]:
        return {Size(1, 1): np.array([[{"a": 3.0, "b": 2.0, "c": 1.0}[text]] for text in texts], np.float32)}

    def run(options: SearchOptions) -> dict[Size, RunScores]:
        blocks = in_blocks(encode_texts, data.documents, 2)
        return evaluate_retrieval(encode_texts, blocks, data, options=options, world=World.alone())

    assert run(SearchOptions(1))[Size(1, 1)].means["recip_rank"] == 0
    assert run(SearchOptions(1, ignore_identical_ids=True))[Size(1, 1)].means["recip_rank"] == 1


def test_damaged_collections_are_told(beir_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks qrels/dev\.tsv"):
        load_beir(beir_folder, split="dev")
    with pytest.raises(ConfigError, match=r"lacks corpus\.jsonl"):
        load_beir(tmp_path)
    with pytest.raises(ConfigError, match="query 'nobody'"):
        retrieval_data("x", {"d": "text"}, {"q": "text"}, {"nobody": {"d": 1}})
    with pytest.raises(ConfigError, match="no document of 'x' is judged"):
        retrieval_data("x", {"d": "text"}, {"q": "text"}, {"q": {"other": 1}})


def test_bm25_ranks_by_shared_words() -> None:
    pytest.importorskip("bm25s", reason="needs the package bm25s")
    documents = {"rare": "espresso machine", "common": "machine learning machine", "none": "tea leaves", "empty": ""}
    qrels = {"q": {"rare": 1}, "unknown": {"none": 1}}
    data = retrieval_data("coffee", documents, {"q": "espresso machine?", "unknown": "quux"}, qrels)
    run = bm25_run(data)
    assert list(run["q"]) == ["rare", "common"] and run["unknown"] == {}
    # Lucene's BM25 by hand, without the constant (k1 + 1).
    n, k1, b, mean_length = 4, 1.5, 0.75, 7 / 4

    def term(df: int, tf: int, length: int) -> float:
        idf = math.log(1 + (n - df + 0.5) / (df + 0.5))
        return idf * tf / (tf + k1 * (1 - b + b * length / mean_length))

    assert run["q"]["rare"] == pytest.approx(term(1, 1, 2) + term(2, 1, 2), rel=1e-5)
    assert run["q"]["common"] == pytest.approx(term(2, 2, 3), rel=1e-5)
    assert score_run(run, qrels).means["recip_rank"] == 0.5


def test_bm25_ignores_the_querys_own_document_as_the_model_does() -> None:
    pytest.importorskip("bm25s", reason="needs the package bm25s")
    texts = {"1": "red apples fall", "2": "red apples", "3": "green pears", "4": "blue plums"}
    data = retrieval_data("same", texts, {"1": texts["1"]}, {"1": {"2": 1}})

    def reciprocal_rank(options: SearchOptions) -> float:
        (found,) = (each.value for each in bm25_records(data, options=options) if each.metric == "recip_rank")
        return found

    assert reciprocal_rank(SearchOptions(1, ignore_identical_ids=True)) == 1
    assert reciprocal_rank(SearchOptions(1)) == 0  # negative control: its own document comes first


def test_bm25_on_scifact(shared_data: Path) -> None:
    pytest.importorskip("bm25s", reason="needs the package bm25s")
    data = load_beir(shared_data / "retrieval" / "scifact")
    assert (len(data.documents), len(data.queries)) == (5183, 300)
    ndcg = score_run(bm25_run(data), data.qrels).means["ndcg_cut_10"]
    assert 0.64 < ndcg < 0.70  # BEIR's figure, with stemming, is 0.671


# Everything together


def test_evaluate_tasks_and_reports(
    encoder: Encoder, tiny_tokenizer: PreTrainedTokenizerFast, model_folder: Path, beir_folder: Path, tmp_path: Path
) -> None:
    settings = EmbeddingSettings.load(model_folder)
    assert settings is not None
    rows = [(f"sentence {i} about {word}", f"{word} again {i}") for i, word in enumerate("abcdefgh")]
    task = STSTask("pairs", tuple(rows), tuple(float(i) for i in range(8)))
    grid = [Size(n, d) for n in (1, 3) for d in (8, 32)]
    records = evaluate_tasks(
        embedder_of(encoder, tiny_tokenizer, grid, device="cpu", batch_tokens=512),
        grid,
        settings,
        sts=[task],
        retrieval=[load_beir(beir_folder)],
        search=SearchOptions(50),
    )
    assert {(r.task, r.kind) for r in records} == {("pairs", "sts"), ("docs", "retrieval")}
    retrieval_metrics = {r.metric for r in records if r.kind == "retrieval"}
    assert retrieval_metrics == {"ndcg_cut_10", "recip_rank", "recip_rank_10", "map"}  # a cut at 50 knows no recall_100
    assert len(records) == 4 * (2 + 4)
    (known,) = (r.value for r in records if (r.task, r.metric, r.size) == ("docs", "map", "3x32"))
    assert known == size_scores(records, task="docs", metric="map", method="model")[Size(3, 32)]
    table = results_markdown([*records, Record("BM25", "docs", "retrieval", "", 0, 0, "map", math.nan)])
    assert "### pairs" in table and "| nDCG@10" in table and "| BM25" in table
    figures = plot_records(records, tmp_path)
    assert [path.name for path in figures] == ["pairs_spearman_model_grid.png", "docs_ndcg_cut_10_model_grid.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in figures)
    plot_heat_map(dict.fromkeys(grid, -0.1), tmp_path / "delta.png", title="a − b", label="Δ", difference=True)
    assert Record("m", "t", "sts", "x", 1, 1, "spearman", math.nan).as_json()["value"] is None


def test_tables_align() -> None:
    lines = markdown_table(["size", "nDCG@10"], [["demi", "0.5"], ["a long name", "0.25"]]).splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[1].count(":") == 1


def test_command_writes_results(
    model_folder: Path, beir_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bm25s", reason="needs the package bm25s")
    sts = tmp_path / "tiny.tsv"
    sts.write_text("".join(f"{i}\tthe number {i}\ta number {i * i}\n" for i in range(6)))
    output = tmp_path / "out"
    command = ["sizes", "--model", str(model_folder), "--beir", str(beir_folder), "--sts", str(sts), "--device", "cpu"]
    extra = ["--random-init", "--bm25", "--save-runs", "--output", str(output)]
    assert evaluate.main([*command, *extra]) == 0
    table = capsys.readouterr().out
    results = json.loads((output / "results.json").read_text())
    assert (output / "table.md").read_text() == table
    assert results["sizes"] == [[1, 8], [2, 16], [3, 32]]
    by_method = {record["method"] for record in results["records"]}
    assert by_method == {"trained", "untrained", "BM25"}
    value = {(r["method"], r["task"], r["size"], r["metric"]): r["value"] for r in results["records"]}
    assert value["trained", "docs", "3x32", "map"] != value["untrained", "docs", "3x32", "map"]
    assert value["BM25", "docs", "", "recip_rank_10"] > 0.8
    assert sorted(path.name for path in (output / "figures").iterdir()) == [
        "docs_ndcg_cut_10.png",
        "tiny_spearman.png",
    ]
    # A written run, scored as anybody's run, gives the same numbers.
    run = output / "runs" / "docs_trained_2x16.trec"
    qrels = beir_folder / "qrels" / "test.tsv"
    assert evaluate.main(["score", "--qrels", str(qrels), "--run", str(run), "--json", str(tmp_path / "s.json")]) == 0
    again = json.loads((tmp_path / "s.json").read_text())
    for metric in METRICS:
        assert again[metric] == pytest.approx(value["trained", "docs", "2x16", metric], abs=1e-12)
    # The command repeated into its own folder gives the same results.
    assert evaluate.main([*command, "--random-init", "--bm25", "--json", str(tmp_path / "again.json")]) == 0
    assert json.loads((tmp_path / "again.json").read_text())["records"] == results["records"]


def test_grid_and_lists_of_sizes(model_folder: Path, beir_folder: Path, tmp_path: Path) -> None:
    def sizes(text: str) -> list[list[int]]:
        path = tmp_path / "r.json"
        command = [
            "sizes",
            "--model",
            str(model_folder),
            "--beir",
            str(beir_folder),
            "--sizes",
            text,
            "--device",
            "cpu",
        ]
        assert evaluate.main([*command, "--top-k", "20", "--json", str(path)]) == 0
        return json.loads(path.read_text())["sizes"]

    assert sizes("grid") == [[n, d] for n in (1, 2, 3) for d in (8, 16, 32)]
    assert sizes("3x5, 1x8") == [[3, 5], [1, 8]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there(model_folder: Path, beir_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sizes", "--model", str(model_folder), "--beir", str(beir_folder), "--device", "cuda"]
    assert evaluate.main(words) == 2
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sizes", "--model=m", "--sts", "a.tsv", "--bm25"], "--bm25 is read with --beir alone"),
        (["sizes", "--model=m", "--sts", "a.tsv", "--save-runs"], "--save-runs is read with --beir alone"),
        (["sizes", "--model=m", "--sts", "a.tsv", "--vectors", "v"], "--vectors is read with --beir alone"),
        (["sizes", "--model=m", "--beir", "a", "--save-runs"], "--save-runs writes to OUTPUT/runs; give --output"),
        (["sizes", "--model=m", "--beir", "a", "--sts-subsets", "s"], "--sts-subsets is read with --sts alone"),
        (["sizes", "--model=m", "--sts", "a.tsv", "--split", "test"], "--split is read with --beir alone"),
        (["sizes", "--model=m", "--sts", "a.tsv", "--max-documents=4"], "--max-documents is read with --beir alone"),
        (["sizes", "--model=m", "--sts", "a.tsv", "--top-k", "50"], "--top-k is read with --beir alone"),
        (["sizes", "--model=m", "--beir", "a", "--seed", "3"], "--seed is read with --random-init alone"),
        (["sizes", "--model=m", "--sts=a.tsv", "--ignore-identical-ids"], "--ignore-identical-ids is read with --beir"),
        (["sizes", "--model=m", "--sts=a.tsv", "--passages-per-block=9"], "--passages-per-block is read with --beir"),
        (["sizes", "--model=m", "--sts=a.tsv", "--similarity=cosine"], "--similarity is read with --beir alone"),
        (
            ["sizes", "--model=m", "--sts=a.tsv", "--holm"],
            "--holm is read with --against, --bm25, --random-init or --across-depths alone; give --against, --bm25, "
            "--random-init or --across-depths, or leave --holm out",
        ),
        (["fused", "--model=m", "--sts", "a.tsv", "--top-k", "50"], "--top-k is read with --beir alone"),
        (["fused", "--model=m", "--sts", "a.tsv", "--similarity=dot"], "--similarity is read with --beir alone"),
        (["quantised", "--model=m", "--sts", "a.tsv", "--rescored=5"], "--rescored is read with --beir alone"),
        (["quantised", "--model=m", "--sts", "a.tsv", "--similarity=dot"], "--similarity is read with --beir alone"),
        (["latency", "--model=m", "--sts", "a.tsv", "--split=test"], "--split is read with --beir alone"),
        (["latency", "--model=m", "--sts", "a.tsv", "--beir", "a"], "--sts and --beir are both given"),
        (["compare", "a", "b", "b"], "b is given twice"),
        (["compare", "a", "a/"], "a is given twice"),
        # Negative controls: the next mistake is found.
        (["sizes", "--model=m", "--sts", "a.tsv"], "a.tsv does not exist"),
        (["sizes", "--model=m", "--beir", "a", "--split=dev", "--top-k=50", "--max-documents=4"], "a lacks"),
        (["sizes", "--model=m", "--beir", "a", "--random-init", "--seed", "3"], "a lacks corpus.jsonl"),
        (["sizes", "--model=m", "--beir", "a", "--bm25", "--save-runs", "--output", "o"], "a lacks corpus.jsonl"),
        (
            ["sizes", "--model=m", "--beir=a", "--ignore-identical-ids", "--passages-per-block=9"],
            "a lacks corpus.jsonl",
        ),
        (["sizes", "--model=m", "--beir=a", "--similarity=dot", "--bm25", "--holm"], "a lacks corpus.jsonl"),
        (["sizes", "--model=m", "--sts=a.tsv", "--across-depths", "--holm"], "a.tsv does not exist"),
        (["sizes", "--model=m", "--sts=a.tsv", "--random-init", "--holm"], "a.tsv does not exist"),
        (["fused", "--model=m", "--sts=a.tsv", "--holm", "--queries=9"], "a.tsv does not exist"),
        (["quantised", "--model=m", "--beir=a", "--rescored=5", "--similarity=dot"], "a lacks corpus.jsonl"),
        (["latency", "--model=m", "--beir", "a"], "a lacks corpus.jsonl"),
        (["latency", "--model=m", "--beir", "a", "--split=dev"], "a lacks corpus.jsonl"),
        (["compare", "a", "b"], "a/raw.jsonl.gz does not exist"),
    ],
)
def test_options_that_nothing_would_read(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert evaluate.main([*words]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["latency", "--model=m", "--beir=a", "--similarity", "dot"], "--similarity"),
        (["latency", "--model=m", "--beir=a", "--batch-tokens", "9"], "--batch-tokens"),
        (["transfer", "--model=m", "--data=a", "--similarity", "dot"], "--similarity"),
    ],
)
def test_options_of_models_that_a_command_never_reads(
    words: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        evaluate.main(words)
    assert caught.value.code == 2 and f"unrecognized arguments: {option}" in capsys.readouterr().err


def test_options_with_defaults_are_known_to_be_stated() -> None:
    """Without a default, an option is stated where it has a value."""
    (added,) = arguments.build_parser(evaluate._COMMANDS)._subparsers._group_actions
    checked = ("sizes", "latency", "quantised", "fused")
    options = [each for command in checked for each in added.choices[command]._actions]
    for name in arguments._EMPTY_READ_WITH:
        assert {bool(each.default) for each in options if each.dest == name} == {False}
    for name in arguments._STATED_READ_WITH:
        assert {isinstance(each, Stated) for each in options if each.dest == name} == {True}


def test_user_errors_exit_with_2(
    model_folder: Path, beir_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beir = ["--beir", str(beir_folder), "--device", "cpu"]

    def error(*args: str, model: Path = model_folder) -> str:
        assert evaluate.main(["sizes", "--model", str(model), *args]) == 2
        message = capsys.readouterr().err.splitlines()[-1]
        assert message.startswith("error: ")
        return message

    assert "nothing to evaluate on" in error()
    assert "lacks corpus.jsonl" in error("--beir", str(tmp_path))
    assert "absent.tsv does not exist" in error("--sts", str(tmp_path / "absent.tsv"))
    assert "outgrows the encoder" in error(*beir, "--sizes", "4x8")
    assert "not of the form" in error(*beir, "--sizes", "huge")
    assert "names no size" in error(*beir, "--sizes", ",")
    assert "can take" in error(*beir, "--max-length", "65")
    assert "named 'docs'" in error(*beir[:2], str(beir_folder), "--device", "cpu")
    assert "config.json is missing" in error(*beir, model=tmp_path)
    (tmp_path / "thesis.txt").write_text("mine")
    assert "holds something else (thesis.txt)" in error(*beir, "--output", str(tmp_path))
    assert evaluate.main(["score", "--qrels", str(tmp_path / "no"), "--run", str(tmp_path / "no")]) == 2
    with pytest.raises(SystemExit) as stop:
        evaluate.main(["score", "--qrels", "q", "--run", "r", "--relevance-level", "0"])
    assert stop.value.code == 2
