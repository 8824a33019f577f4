"""Resizing into narrower feed-forwards: the start is the same model, its neurons sorted; every body gets a head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.encoder import load_encoder
from models.nested_feed_forward import NestedFeedForwards
from models.settings import EmbeddingSettings
from models.sizes import Size
from tests.ranks import run_ranks
from tests.run_folder import steps_of
from trainer import resize
from trainer.config.load import load_recipe
from trainer.evaluation.encoding.encode import embedder_of
from trainer.evaluation.subject import load_model
from trainer.resizing.neurons import sort_neurons
from trainer.resizing.resize import CLOSED_FORM, START, TRAINING

SIZES = "2x8x0.25,3x16x0.5,3x24"
FAST = ("--train.steps=4", "--train.global_batch_size=8", "--train.micro_batch_size=4", "--log.tensorboard=false")


@pytest.fixture(scope="module")
def model_folder(bert_folder: Path) -> Path:
    lengths = {"query_max_length": 48, "passage_max_length": 48}
    EmbeddingSettings("mean", ladder=((3, 24),), **lengths).save(bert_folder)
    return bert_folder


def vectors_of(folder: Path, texts: list[str], sizes: list[Size]) -> dict[Size, np.ndarray]:
    encoder, tokenizer, _ = load_model(folder)
    return dict(
        embedder_of(encoder, tokenizer, sizes, device="cpu")(texts, similarity="cosine", max_length=48, prompt="")
    )


def naive_importance(encoder: Any, tokenizer: Any, texts: list[str]) -> np.ndarray:
    """Of the second layer: text by text, and so without padding."""
    layer, total = encoder.backbone.encoder.layer[1], torch.zeros(48)
    seen: list[torch.Tensor] = []
    handle = layer.intermediate.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    with torch.no_grad():
        for text in texts:
            encoder.backbone(**tokenizer(text, truncation=True, max_length=48, return_tensors="pt"))
            total += seen.pop().abs().sum(0)
    handle.remove()
    return (total * layer.output.dense.weight.norm(dim=0)).detach().numpy()


def test_neurons_are_sorted_by_importance(model_folder: Path, docstrings: list[str]) -> None:
    encoder, tokenizer, settings = load_model(model_folder)
    assert settings is not None
    before = naive_importance(encoder, tokenizer, docstrings[:40])
    sort_neurons(encoder, tokenizer, docstrings[:40], settings, device=torch.device("cpu"))
    after = naive_importance(encoder, tokenizer, docstrings[:40])
    np.testing.assert_allclose(after, np.sort(before)[::-1], rtol=1e-4)
    assert not np.allclose(before, after, rtol=1e-2)


def test_the_start_is_the_same_model_and_every_body_has_a_head(
    model_folder: Path, texts: Path, docstrings: list[str], tmp_path: Path
) -> None:
    run, full = tmp_path / "run", Size(3, 24)
    resize.main([str(model_folder), "--texts", str(texts), "--output", str(run), "--sizes", SIZES, "--prepare-only"])
    given, start = (vectors_of(folder, docstrings[:8], [full])[full] for folder in (model_folder, run / START))
    np.testing.assert_allclose(start, given, atol=1e-6)
    half = Size(3, 24, 0.5)
    changed = [vectors_of(folder, docstrings[:8], [half])[half] for folder in (model_folder, run / START)]
    assert np.abs(changed[0] - changed[1]).max() > 1e-2  # a prefix of sorted neurons is another
    assert set(load_encoder(run / CLOSED_FORM).heads) == {"2x0_25", "3x0_5"}
    assert load_recipe(run / f"{TRAINING}.toml").model.ladder == [[2, 8, 0.25], [3, 16, 0.5], [3, 24]]


def test_whole_feed_forwards_keep_their_order(model_folder: Path, texts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    resize.main([str(model_folder), "--texts", str(texts), "--output", str(run), "--prepare-only"])
    given, start = (NestedFeedForwards.of(load_encoder(folder).backbone) for folder in (model_folder, run / START))
    for one, other in zip(given.layers, start.layers):
        assert torch.equal(one.out.weight, other.out.weight)


def test_a_fraction_without_whole_neurons_is_refused(model_folder: Path, texts: Path, tmp_path: Path) -> None:
    command = [str(model_folder), "--texts", str(texts), "--output", str(tmp_path / "run"), "--sizes", "3x8x0.3,3x24"]
    with pytest.raises(Exception, match="whole number from 1 on"):
        resize.main(command)


def test_the_command_leaves_every_size(
    launcher: None, model_folder: Path, texts: Path, docstrings: list[str], tmp_path: Path
) -> None:
    """Two ranks learn, the heads among them; every export is what the model gives, loaded by sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    run = tmp_path / "run"
    command = [str(model_folder), "--texts", str(texts), "--output", str(run), "--sizes", SIZES, *FAST]
    run_ranks("trainer.resize", *command, ranks=2)
    step = steps_of(run / TRAINING)[-1]
    assert {"distill/2x8x0.25", "distill/3x24x0.5", "distill/3x24"} <= step.keys()
    sizes = [Size.parse(text) for text in SIZES.split(",")]
    ours = vectors_of(run / TRAINING / "model", docstrings[:6], sizes)
    for size in sizes:
        theirs = SentenceTransformer(str(run / "export" / str(size)), device="cpu").encode(docstrings[:6])
        np.testing.assert_allclose(theirs, ours[size], atol=2e-6)
    records = json.loads((run / "resize.json").read_text())["records"]
    assert [(r["layers"], r["dim"], r["feed_forward"]) for r in records] == [(2, 8, 0.25), (3, 16, 0.5), (3, 24, 1.0)]
    assert records[0]["megabytes"] < records[1]["megabytes"] < records[2]["megabytes"]
    assert "| 2x8x0.25 " in (run / "table.md").read_text()
