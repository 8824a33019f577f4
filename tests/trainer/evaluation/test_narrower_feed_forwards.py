"""Evaluation of sizes with narrower feed-forwards: each has its own scores, files and costs, and none a whole one's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from models.encoder import build_masked_lm, load_encoder
from models.heads import save_heads
from models.settings import EmbeddingSettings
from models.sizes import Body, Size
from tests.beir import write_beir
from trainer.evaluate import main
from trainer.evaluation.encoding.across import SizePair
from trainer.evaluation.encoding.encode import embedder_of
from trainer.evaluation.fused import Pair, measure_pairs
from trainer.evaluation.latency import TimedPass, cut_encoder, measure_costs
from trainer.evaluation.results.raw import RAW_FILE, RawResults, own_key, read_raw, shape_of, write_raw
from trainer.evaluation.search.vectors import read_store
from trainer.evaluation.tasks.retrieval import RunScores
from trainer.evaluation.tasks.sts import cosine_of_pairs, read_sts, spearman

LADDER = [Size(2, 8, 0.25), Size(3, 16, 0.25), Size(3, 24, 0.5), Size(3, 32)]


@pytest.fixture(scope="module")
def model(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads for 2 layers and for 3 layers of a quarter."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    config = {"model_type": "bert", **shape, "max_position_embeddings": 64, "initializer_range": 0.3}
    build_masked_lm(config, vocab_size=len(tiny_tokenizer), pad_token_id=0).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    heads = nn.ModuleDict({key: nn.Linear(32, 32) for key in ("2", "3x0_25")})
    save_heads(heads.state_dict(), folder)
    EmbeddingSettings("mean", ladder=tuple(s.numbers for s in LADDER), query_max_length=24, passage_max_length=48).save(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def tasks(docstrings: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("tasks")
    texts = [text for text in docstrings if len(text.split()) > 12][:40]
    beir = write_beir(folder / "docs", texts, [" ".join(text.split()[:8]) for text in texts[:12]])
    lines = [" ".join(text.split()) for text in docstrings[:30]]
    pairs = folder / "pairs.tsv"
    pairs.write_text("".join(f"{i * 7 % 11}\t{lines[i]}\t{lines[(i * 3 + 1) % 30][:60]}\n" for i in range(30)))
    return ["--beir", str(beir), "--sts", str(pairs), "--device", "cpu"]


@pytest.mark.usefixtures("undrawn")
def test_each_size_has_its_own_scores(
    model: Path, tasks: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--across-depths", "--vectors", str(tmp_path / "vectors"), "--random-init"]
    command = ["sizes", "--model", str(model), *tasks, "--output", str(tmp_path / "out"), *options]
    assert main(command) == 0
    table = capsys.readouterr().out
    assert "| feed-forward |" in table and "2x8x0.25" in table
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["sizes"] == [[2, 8, 0.25], [3, 16, 0.25], [3, 24, 0.5], [3, 32]]
    found = {
        (r["layers"], r["dim"], r.get("feed_forward", 1.0)): r["value"]
        for r in results["records"]
        if (r["method"], r["task"], r["metric"]) == ("trained", "pairs", "spearman")
    }
    encoder, tokenizer = load_encoder(model), AutoTokenizer.from_pretrained(model)
    task = read_sts(tasks[3])
    sentences = [text for pair in task.pairs for text in pair]
    for size in LADDER:
        encode = embedder_of(encoder, tokenizer, [size], device="cpu")
        each = encode(sentences, similarity="dot", max_length=48, prompt="")[size]
        expected = spearman(cosine_of_pairs(each[0::2], each[1::2]), np.array(task.scores))
        assert found[size.layers, size.dim, size.feed_forward] == pytest.approx(expected, abs=1e-6)
    assert len(set(found.values())) == len(LADDER)
    # Documents of the whole body alone; what is whole has no fraction in its files.
    across = results["across_depths"]["records"]
    assert {(r["size"], r["document_size"]) for r in across} == {(str(s), f"3x{s.dim}") for s in LADDER[:3]}
    assert not any("feed_forward" in r for r in results["records"] if r["dim"] == 32)
    raw = read_raw(tmp_path / "out" / RAW_FILE)
    assert ("docs", "trained", 3, 16, 0.25) in raw.values and ("docs", "trained", 3, 16, 0.25, 3) in raw.across
    store = read_store(tmp_path / "vectors" / "docs_trained")
    assert list(store.widths.items()) == [(Body(2, 0.25), 8), (Body(3, 0.25), 16), (Body(3, 0.5), 24), (Body(3), 32)]
    # The vectors on disk give the same scores again.
    again = tmp_path / "again"
    assert main([*command[:-5], str(again), *options]) == 0
    assert json.loads((again / "results.json").read_text()) == results


def test_a_grid_has_a_row_for_each_body(model: Path, tasks: list[str], tmp_path: Path) -> None:
    assert main(["sizes", "--model", str(model), *tasks, "--sizes", "grid", "--output", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(results["sizes"]) == 16 and [3, 8, 0.5] in results["sizes"]
    assert (tmp_path / "out" / "figures" / "pairs_spearman_trained_grid.png").is_file()


def test_a_fraction_without_whole_neurons_is_refused(
    model: Path, tasks: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sizes", "--model", str(model), *tasks, "--sizes", "3x16x0.3"]) == 2
    assert "whole number from 1 on; give a fraction such as" in capsys.readouterr().err


@pytest.mark.parametrize("size", LADDER, ids=str)
@torch.no_grad()
def test_a_cut_encoder_gives_the_sizes_vectors(
    size: Size, model: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    encoder = load_encoder(model).eval()
    ids = tiny_tokenizer(["return a value", "a list of names"], padding=True, return_tensors="pt")
    inputs = ids["input_ids"], ids["attention_mask"]
    (expected,) = encoder(*inputs, [size])
    cut = cut_encoder(encoder, size)
    torch.testing.assert_close(cut(*inputs, [Size(size.layers, size.dim)])[0], expected)
    assert cut.config.intermediate_size == 64 * size.feed_forward and encoder.config.intermediate_size == 64
    sizes = (size, Size(3, 24, 0.5))
    timed = TimedPass.of(encoder, sizes, device="cpu")
    for found, wanted in zip(timed.encoder(*inputs, timed.sizes), encoder(*inputs, sizes), strict=True):
        torch.testing.assert_close(found, wanted)


def test_costs_are_those_of_the_cut_model(model: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    encoder, settings = load_encoder(model), EmbeddingSettings.load(model)
    assert settings is not None
    costs = measure_costs(encoder, tiny_tokenizer, LADDER, settings, ["return a value"], warm_up=0)
    whole, quarter = costs[Size(3, 32)].parameters, costs[Size(3, 16, 0.25)].parameters
    assert whole - quarter == 3 * 48 * (2 * 32 + 1)
    pairs = measure_pairs(encoder, tiny_tokenizer, LADDER, settings, ["return a value"])
    assert len(pairs) == 6 and pairs[Pair(LADDER[1], LADDER[2])].apart > 0


def test_raw_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    raw = RawResults()
    sizes = [
        Size(3, 16),
        Size(3, 16, 0.25),
        SizePair(Size(3, 16, 0.25), Size(3, 16)),
        SizePair(Size(2, 16), Size(3, 16)),
    ]
    for number, size in enumerate(sizes):
        scores = RunScores({}, {"q": {"map": number / 8}}, 1)
        raw.add_retrieval("trained", "docs", shape_of(size), scores, ["map"])
    write_raw(raw, tmp_path / RAW_FILE)
    again = read_raw(tmp_path / RAW_FILE)
    assert list(again.values) == [("docs", "trained", 3, 16), ("docs", "trained", 3, 16, 0.25)]
    assert list(again.across) == [("docs", "trained", 3, 16, 0.25, 3), ("docs", "trained", 2, 16, 3)]
    assert own_key(("docs", "trained", 3, 16, 0.25, 3)) in again.values
    assert all(again.columns(key)["map"] == raw.columns(key)["map"] for key in (*raw.values, *raw.across))
