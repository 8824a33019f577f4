"""What a recipe's model starts as, before any step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModel

from data.ground.errors import UserError
from data.shards.reader import ShardFolder
from models.choices import Direction
from models.direction import looks_ahead
from models.encoder import base_of, build_masked_lm, load_encoder
from models.masked_autoencoder import MaskedAutoencoder
from models.settings import EmbeddingSettings
from tests.trainer.support import LADDER, MODEL, loaded, recipe_of, recipe_values
from trainer.build import build_model, open_shards
from trainer.config.read_keys import as_read
from trainer.exporting.model_folder import embedding_settings, write_model_folder

MORE_ROWS = 7  # Many models pad the word table for speed: it then has more rows than there are tokens.


@pytest.fixture
def sources(tmp_path: Path, tiny_tokenizer: Any) -> dict[str, Path]:
    """The same weights as an encoder alone, and with their MLM head."""
    torch.manual_seed(0)
    rows = len(tiny_tokenizer) + MORE_ROWS
    model = build_masked_lm(MODEL, vocab_size=rows, pad_token_id=tiny_tokenizer.pad_token_id)
    model.save_pretrained(tmp_path / "with_head")
    tiny_tokenizer.save_pretrained(tmp_path / "with_head")
    settings = EmbeddingSettings("mean", ladder=tuple((n, d) for n, d in LADDER))
    write_model_folder(tmp_path / "encoder", base_of(model), tiny_tokenizer, settings, nn.ModuleDict())
    return {name: tmp_path / name for name in ("with_head", "encoder")}


def bias_of(source: Path, shards: Path, folder: Path, **objective: Any) -> torch.Tensor:
    """The output bias with which masked pre-training from this model begins."""
    values = recipe_values(shards, objective={"name": "masked", **objective})
    values["model"] = {"source": str(source), "pooling": "mean", "ladder": LADDER}
    recipe = loaded(values, folder)
    module = build_model(recipe, open_shards(recipe)).module
    assert isinstance(module, MaskedAutoencoder) and module.encoder.pooling == "mean"
    return module.vocabulary_loss.bias.detach()


@pytest.mark.parametrize("kind", ["documents", "tuples"])
def test_a_fresh_head_starts_from_the_frequencies(
    kind: str, sources: dict[str, Path], document_shards: Path, tuple_shards: Path, tmp_path: Path
) -> None:
    """On an encoder that was trained without one, too; a head that is there stays as it is."""
    shards, objective = (document_shards, {}) if kind == "documents" else (tuple_shards, {"pairs": "tuples"})
    folder = ShardFolder(shards)
    everything = range(folder.num_samples)
    if kind == "documents":
        texts = folder.documents(everything)
    else:
        texts = [text for sample in folder.tuples(everything) for text in (sample.query, *sample.passages)]
    bias = bias_of(sources["encoder"], shards, tmp_path, **objective)
    counts = np.bincount(np.concatenate(texts), minlength=len(bias)) + 1.0
    np.testing.assert_allclose(bias.numpy(), np.log(counts / counts.sum()), rtol=1e-5)
    assert not bias_of(sources["with_head"], shards, tmp_path, **objective).any()


DECODER = {
    "model_type": "qwen3",
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 48,
    "max_position_embeddings": 80,
}


@pytest.mark.parametrize(
    ("name", "model", "words"),
    [
        ("contrastive", {"config": DECODER, "pooling": "last"}, "model.direction is not set, and 'qwen3' is a decoder"),
        ("contrastive", {"config": DECODER, "pooling": "cls", "direction": "causal"}, "takes the first token"),
        ("contrastive", {"config": MODEL, "direction": "causal"}, "'bert' is an encoder"),
        ("masked", {"config": MODEL, "direction": "causal"}, "'bert' is an encoder"),
        (
            "masked",
            {"config": DECODER, "direction": "causal"},
            "a decoder and not an encoder with a masked",
        ),
        ("contrastive", {"config": {**DECODER, "is_causal": False}, "direction": "causal"}, "model.direction says it"),
    ],
)
def test_directions_that_cannot_be(
    name: str, model: dict[str, Any], words: str, document_shards: Path, tuple_shards: Path, tmp_path: Path
) -> None:
    values = recipe_values(document_shards if name == "masked" else tuple_shards, objective={"name": name})
    recipe = loaded({**values, "model": {"ladder": LADDER, **model}}, tmp_path)
    with pytest.raises(UserError, match=words):
        build_model(recipe, open_shards(recipe))


def test_a_models_settings_are_what_its_run_reads(document_shards: Path, tuple_shards: Path) -> None:
    """Every model records how retrieval compares its vectors. A temperature is recorded where one was trained with."""
    chosen = {"similarity": "dot", "temperature": 0.5}
    for shards, name, temperature in ((document_shards, "masked", 0.05), (tuple_shards, "contrastive", 0.5)):
        recipe = recipe_of(recipe_values(shards, objective={"name": name, **chosen}))
        settings = embedding_settings(as_read(recipe), open_shards(recipe))
        assert (settings.similarity, settings.temperature) == ("dot", temperature)


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_a_decoder_is_built_saved_and_started_from(
    direction: Direction, tuple_shards: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """Its direction is the recipe's, is written beside it, and is taken from there."""
    values = recipe_values(tuple_shards, objective={"name": "contrastive"})
    model = {"config": DECODER, "ladder": LADDER, "pooling": "last", "direction": direction}
    recipe = loaded({**values, "model": model}, tmp_path)
    sources = open_shards(recipe)
    parts = build_model(recipe, sources)
    assert parts.encoder.pooling == "last" and parts.encoder.backbone.training
    settings = embedding_settings(recipe, sources)
    assert settings.direction == direction
    write_model_folder(tmp_path / "model", parts.saved, tiny_tokenizer, settings, nn.ModuleDict())
    for source in (load_encoder(tmp_path / "model").backbone, AutoModel.from_pretrained(tmp_path / "model")):
        assert looks_ahead(source) == (direction == "bidirectional")
