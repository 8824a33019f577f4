"""Fewer bits: the codes are sentence-transformers' own, and what is measured is what a user of them gets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data.ground.errors import ConfigError
from models.encoder import build_masked_lm, load_encoder
from models.quantisation import from_int8, int8_ranges, int8_table, to_int8, to_signs
from models.settings import EmbeddingSettings
from models.sizes import Size
from models.static_embedding import StaticConfig, StaticModel
from tests.beir import write_beir
from tests.trainer.support import MODEL
from trainer.distributed import World
from trainer.evaluate import main
from trainer.evaluation.quantised import (
    BINARY,
    FLOAT32,
    INT8,
    RAW_FOLDERS,
    RESCORED,
    TABLE,
    Row,
    embedding_bytes,
    plot_precisions,
    precision_markdown,
    ranges_json,
    retrieval_rows,
    sts_rows,
    with_fronts,
    with_int8_table,
)
from trainer.evaluation.results.output import write_json
from trainer.evaluation.results.raw import read_raw
from trainer.evaluation.results.significance import p_text
from trainer.evaluation.tasks.retrieval import SearchOptions, evaluate_retrieval, in_blocks, retrieval_data
from trainer.evaluation.tasks.sts import STSTask
from trainer.exporting.model_folder import write_model_folder
from trainer.exporting.sizes import export_sizes

SIZES = [Size(1, 8), Size(1, 32)]


def unit_vectors(rows: int, dim: int, *, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(rows, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_codes_are_those_of_sentence_transformers() -> None:
    quantize_embeddings = pytest.importorskip("sentence_transformers.util.quantization").quantize_embeddings
    vectors, others = unit_vectors(200, 24, seed=1), unit_vectors(50, 24, seed=2) * 1.5  # some beyond the ranges
    ranges = int8_ranges(vectors)
    for each in (vectors, others):
        theirs = quantize_embeddings(each, precision="int8", ranges=ranges)
        np.testing.assert_array_equal(to_int8(each, ranges), theirs)
        bits = np.unpackbits(quantize_embeddings(each, precision="ubinary"), axis=1)
        np.testing.assert_array_equal(to_signs(each), bits * 2.0 - 1.0)
    assert (to_int8(others, int8_ranges(others)) != to_int8(others, ranges)).any()  # negative control: ranges matter


def test_codes_stand_for_what_they_came_from() -> None:
    vectors = unit_vectors(300, 16, seed=3)
    vectors[:, 5] = 0.25  # a dimension that never changes
    ranges = int8_ranges(vectors)
    steps = (ranges[1] - ranges[0]) / 255
    error = np.abs(from_int8(to_int8(vectors, ranges), ranges) - vectors)
    assert (error <= steps * 0.5 + 1e-6).all() and error[:, 5].max() == 0
    beyond = from_int8(to_int8(vectors * 3, ranges), ranges)  # negative control: those are cut off
    assert np.abs(beyond - vectors * 3).max() > steps.max()
    signs = to_signs(vectors)
    hamming = (signs[:1] != signs).sum(1)
    np.testing.assert_array_equal(signs @ signs[0], 16 - 2 * hamming)


def test_a_tables_codes(tmp_path: Path) -> None:
    table = torch.randn(50, 12, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 50)[:, None]
    table[7] = 0.0
    codes, scales = int8_table(table)
    assert codes.dtype == torch.int8 and codes.abs().max() == 127
    assert ((codes * scales[:, None] - table).abs() <= scales[:, None] * 0.5 + 1e-6 * table.abs()).all()
    # Negative control: one scale for all rows loses the small ones.
    shared = (table / scales.max()).round() * scales.max()
    assert ((shared - table).abs() > scales[:, None]).any()


@pytest.fixture
def static_folder(tmp_path: Path, tiny_tokenizer) -> Path:
    torch.manual_seed(0)
    folder = tmp_path / "model"
    StaticModel(StaticConfig(len(tiny_tokenizer), 32, special_ids=[0, 2, 3])).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    EmbeddingSettings(pooling="mean", ladder=tuple((s.layers, s.dim) for s in SIZES)).save(folder)
    return folder


def test_an_int8_export_is_a_static_embedding_of_a_quarter(
    static_folder: Path, docstrings: list[str], tmp_path: Path
) -> None:
    SentenceTransformer = pytest.importorskip("sentence_transformers").SentenceTransformer
    texts = [text[:80] for text in docstrings[:20]]
    whole = export_sizes(static_folder, tmp_path / "whole")
    small = export_sizes(static_folder, tmp_path / "small", table="int8")
    for name, folder in small.items():
        files = [path / "model.safetensors" for path in (folder, whole[name])]
        assert files[0].stat().st_size < 0.4 * files[1].stat().st_size
        model, reference = SentenceTransformer(str(folder)), SentenceTransformer(str(whole[name]))
        assert type(model[0]).__name__ == "StaticEmbedding"
        dim = model[0].embedding_dim
        # What is measured as the "int8 table" is what a user loads.
        expected = with_int8_table(load_encoder(static_folder)).word_embeddings.weight[:, :dim]
        torch.testing.assert_close(model[0].embedding.weight.data, expected.data)
        assert (expected - reference[0].embedding.weight).abs().max() < 0.05
        cosines = (model.encode(texts) * reference.encode(texts)).sum(1)
        assert cosines.min() > 0.999 and not np.array_equal(model.encode(texts), reference.encode(texts))
        assert "int8 codes and a scale each" in (folder / "README.md").read_text()
        assert "## Limits" in (folder / "README.md").read_text()


def test_an_encoder_has_no_int8_table(tiny_tokenizer, tmp_path: Path) -> None:
    config = {"model_type": MODEL["model_type"], **MODEL}
    build_masked_lm(config, vocab_size=len(tiny_tokenizer), pad_token_id=0).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    EmbeddingSettings(pooling="mean", ladder=((3, 48),)).save(tmp_path / "model")
    with pytest.raises(ConfigError, match="no static model"):
        export_sizes(tmp_path / "model", tmp_path / "export", table="int8")
    assert not (tmp_path / "export").exists()


def collection(documents: int):
    ids = [f"d{i:03d}" for i in range(documents)]
    qrels = {f"q{i}": {ids[i]: 1} for i in range(20)}
    return retrieval_data("toy", dict(zip(ids, ids)), {f"q{i}": ids[i] for i in range(20)}, qrels)


def test_rows_are_what_a_search_with_those_vectors_scores() -> None:
    data = collection(200)
    stored = dict(zip(sorted(data.documents), unit_vectors(200, 32, seed=5)))
    noise = dict(zip(data.queries, unit_vectors(20, 32, seed=6)))

    def documents(texts):
        return {size: np.stack([stored[text][: size.dim] for text in texts]) for size in SIZES}

    def queries(texts):
        return {size: np.stack([(stored[text] + noise[text])[: size.dim] for text in texts]) for size in SIZES}

    rows, ranges = retrieval_rows(queries, documents, data, top_k=50, rescored=20)
    value = {(row.size, row.precision): row.value for row in rows}
    assert [row.precision for row in rows if row.size == SIZES[0]] == [FLOAT32, INT8, BINARY, RESCORED]

    def scored(encode_queries, encode_documents) -> dict[Size, float]:
        blocks = in_blocks(encode_documents, data.documents, 60)
        found = evaluate_retrieval(encode_queries, blocks, data, options=SearchOptions(50), world=World.alone())
        return {size: scores.means["ndcg_cut_10"] for size, scores in found.items()}

    def changed(change):
        return lambda texts: {size: change(size, rows) for size, rows in documents(texts).items()}

    whole = scored(queries, documents)
    int8 = scored(queries, changed(lambda size, rows: from_int8(to_int8(rows, ranges[size]), ranges[size])))
    signs = scored(
        lambda texts: {size: to_signs(rows) for size, rows in queries(texts).items()},
        changed(lambda size, rows: to_signs(rows)),
    )
    for size in SIZES:
        assert (value[size, FLOAT32], value[size, INT8], value[size, BINARY]) == (whole[size], int8[size], signs[size])
    # A bit a dimension loses much, scoring again wins some of it back, and int8 loses next to nothing.
    full = SIZES[-1]
    assert value[full, BINARY] < value[full, RESCORED] <= value[full, FLOAT32]
    assert abs(value[full, INT8] - value[full, FLOAT32]) < 0.02
    tests = {row.precision: row.against_float32 for row in rows if row.size == full}
    assert tests[FLOAT32] is None and tests[BINARY].difference == pytest.approx(
        value[full, BINARY] - value[full, FLOAT32]
    )
    assert np.array(ranges_json(ranges)["1x8"]).shape == (2, 8)


def test_sts_rows_and_the_table_of_them() -> None:
    texts = [f"t{i}" for i in range(400)]
    vectors = dict(zip(texts, unit_vectors(400, 32, seed=7)))
    pairs = tuple(zip(texts[::2], texts[1::2]))
    gold = tuple(float(vectors[a] @ vectors[b]) for a, b in pairs)
    task = STSTask("toy", pairs, gold, ())

    def encode(texts):
        return {size: np.stack([vectors[text][: size.dim] for text in texts]) for size in SIZES}

    rows = sts_rows(encode, task, table_variant=encode)
    value = {(row.size, row.precision): row.value for row in rows}
    full = SIZES[-1]
    assert value[full, FLOAT32] == pytest.approx(1.0) == value[full, TABLE]
    assert 0.3 < value[full, BINARY] < 0.95 < value[full, INT8] < 1.0
    text = precision_markdown(rows, str)
    assert "### toy" in text and "‡" in text and "100.0 %" in text


def test_bytes_of_an_embedding() -> None:
    size = Size(2, 30)
    precisions = (FLOAT32, INT8, BINARY, RESCORED, TABLE)
    assert [embedding_bytes(size, precision) for precision in precisions] == [120, 30, 4, 34, 120]
    bits = [Row("a", "spearman", size, precision, 1, 0.5, None).as_json()["bits"] for precision in precisions]
    assert bits == [32, 8, 1, 9, 32]
    assert Row("a", "spearman", size, INT8, 30, 0.5, None).as_json()["size"] == "2x30"


def test_the_front_is_what_no_other_row_beats(tmp_path: Path) -> None:
    """Over layers, dimensions and bits, against the definition, pair by pair."""
    rng = np.random.default_rng(0)
    rows = [
        Row(task, "spearman", Size(layers, dim), precision, embedding_bytes(Size(layers, dim), precision), value, None)
        for task in ("a", "b")
        for layers in (1, 2, 4)
        for dim in (8, 32, 128)
        for precision, kept in ((FLOAT32, 1.0), (INT8, 0.99), (BINARY, 0.9))
        for value in [float(kept * (layers * dim) ** 0.1 + 0.05 * rng.normal())]
    ]
    rows.append(Row("b", "spearman", Size(1, 4), BINARY, 1, float("nan"), None))  # no correlation: not on the front
    marked = with_fronts(rows)
    assert [replace(row, on_front=False) for row in marked] == rows
    for row in marked:
        beaten = any(
            other.bytes <= row.bytes
            and other.value >= row.value
            and (other.bytes, other.value) != (row.bytes, row.value)
            for other in marked
            if other.task == row.task
        )
        assert row.on_front == (not beaten and not np.isnan(row.value))
    assert 0 < sum(row.on_front for row in marked) < len(marked)
    # A front of both tasks together would be another one.
    together = with_fronts([replace(row, task="a") for row in rows])
    assert [row.on_front for row in together] != [row.on_front for row in marked]
    assert [path.name for path in plot_precisions(marked, tmp_path)] == ["a.png", "b.png"]
    assert precision_markdown(marked, str).count(" yes |") == sum(row.on_front for row in marked)


def test_the_command(
    static_folder: Path, docstrings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [" ".join(text.split()) for text in docstrings if len(text.split()) > 12][:40]
    beir = write_beir(tmp_path / "docs", texts, [" ".join(text.split()[:8]) for text in texts[:15]])
    (tmp_path / "pairs.tsv").write_text("".join(f"{i % 6}\t{texts[i][:60]}\t{texts[i + 1][:60]}\n" for i in range(30)))
    words = ["quantised", "--model", str(static_folder)]
    tasks = ["--beir", str(beir), "--sts", str(tmp_path / "pairs.tsv")]
    assert main([*words, *tasks, "--output", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "quantised.json").read_text())
    value = {(row["task"], row["size"], row["precision"]): row["value"] for row in found["rows"]}
    assert len(value) == len(SIZES) * (5 + 4)
    assert np.array(found["int8_ranges"]["docs"]["1x32"]).shape == (2, 32)
    assert (tmp_path / "out" / "quantised.md").read_text() == capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out" / "figures").iterdir()) == ["docs.png", "pairs.png"]
    # Each precision's raw results have its scores, and `compare` tests one against another, query by query.
    for precision, folder in RAW_FOLDERS.items():
        raw = read_raw(tmp_path / "out" / folder / "raw.jsonl.gz")
        for task, method, layers, dim in raw.values:
            metric = "spearman" if task == "pairs" else "ndcg_cut_10"
            mean = raw.means((task, method, layers, dim))[metric]
            assert mean == pytest.approx(value[task, f"{layers}x{dim}", precision], abs=1e-12)
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "out" / "float32"), str(tmp_path / "out" / "binary")]) == 0
    p = next(
        row["against_float32"]["p"]
        for row in found["rows"]
        if (row["task"], row["size"], row["precision"]) == ("docs", "1x8", BINARY)
    )
    of_docs = capsys.readouterr().out.split("### docs")[1].splitlines()
    line = next(each for each in of_docs if "binary" in each and "1x8" in each)
    assert p_text(p) in line
    # float32 is what `sizes` gives.
    assert main(["sizes", *words[1:], *tasks, "--json", str(tmp_path / "sizes.json")]) == 0
    whole = json.loads((tmp_path / "sizes.json").read_text())["records"]
    for record in whole:
        if record["metric"] in ("ndcg_cut_10", "spearman"):
            size = f"{record['layers']}x{record['dim']}"
            assert value[record["task"], size, FLOAT32] == pytest.approx(record["value"], abs=1e-6)
    capsys.readouterr()
    assert main(words) == 2 and "nothing to evaluate on" in capsys.readouterr().err


def test_the_encoder_may_multiply_in_bf16(tiny_tokenizer, docstrings: list[str], tmp_path: Path) -> None:
    """The scores of whole embeddings are then those of `sizes --dtype bfloat16`, and others than without it."""
    torch.manual_seed(0)
    model = build_masked_lm(MODEL, vocab_size=len(tiny_tokenizer), pad_token_id=0).base_model
    settings = EmbeddingSettings("mean", ladder=((3, 48),), query_max_length=32, passage_max_length=32)
    write_model_folder(tmp_path / "model", model, tiny_tokenizer, settings, torch.nn.ModuleDict())
    texts = [" ".join(text.split()[:12]) for text in docstrings[:31]]
    (tmp_path / "pairs.tsv").write_text("".join(f"{i % 6}\t{texts[i]}\t{texts[i + 1]}\n" for i in range(30)))

    def cosines(command: str, dtype: str) -> np.ndarray:
        output = tmp_path / f"{command}_{dtype}"
        words = ["--model", str(tmp_path / "model"), "--sts", str(tmp_path / "pairs.tsv"), "--dtype", dtype]
        assert main([command, *words, "--output", str(output)]) == 0
        folder = output / RAW_FOLDERS[FLOAT32] if command == "quantised" else output
        ((_, columns),) = read_raw(folder / "raw.jsonl.gz").values.items()
        return columns["cosine"]

    in_bf16 = cosines("quantised", "bfloat16")
    np.testing.assert_allclose(in_bf16, cosines("sizes", "bfloat16"), atol=1e-6)
    assert np.abs(in_bf16 - cosines("quantised", "float32")).max() > 1e-4  # negative control


def test_tasks_too_small_for_a_test_have_none(tmp_path: Path) -> None:
    def encode_texts(texts: Sequence[str]) -> dict[Size, np.ndarray]:
        return {size: unit_vectors(len(texts), size.dim, seed=size.dim) for size in SIZES}

    data = retrieval_data("one", {"a": "x", "b": "y"}, {"q": "x"}, {"q": {"a": 1}})
    rows, _ = retrieval_rows(encode_texts, encode_texts, data, top_k=10)
    rows += sts_rows(encode_texts, STSTask("few", (("x", "y"), ("y", "z"), ("z", "x")), (1.0, 2.0, 3.0)))
    for row in rows:
        assert (row.against_float32 is None) == (row.precision == FLOAT32)
        assert row.against_float32 is None or np.isnan(row.against_float32.p)
    assert "†" not in (table := precision_markdown(rows, str)) and "‡" not in table
    write_json(tmp_path / "rows.json", {"rows": [row.as_json() for row in rows]})
    written = json.loads((tmp_path / "rows.json").read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    assert {row["against_float32"]["p"] for row in written["rows"] if row["against_float32"]} == {None}
