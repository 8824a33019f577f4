"""The models that a recipe may name before they exist: public ones, and those that another recipe makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w

from data.ground.errors import ConfigError
from launch.known_models import KNOWN
from launch.sources import config_of
from trainer.costs.parameters import encoder_parameters
from trainer.costs.shapes import Shape

# Elements as published: BERT's without its pooler of 768² + 768; keras-hub's presets for Qwen3-Embedding (pull request
# 2455); Llama's, Mistral's and Gemma's by their safetensors, without an untied head.
PUBLISHED = {
    "google-bert/bert-base-uncased": 109_482_240 - 768 * 769,
    "sentence-transformers/all-MiniLM-L6-v2": 22_713_216 - 384 * 385,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-Embedding-0.6B": 595_776_512,
    "Qwen/Qwen3-Embedding-4B": 4_021_774_336,
    "Qwen/Qwen3-Embedding-8B": 8_188_515_328 - 151_665 * 4096,
    "intfloat/e5-mistral-7b-instruct": 7_110_660_096,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "google/embeddinggemma-300m": 302_863_104,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_models_have_as_many_parameters_as_published(name: str) -> None:
    assert sum(encoder_parameters(Shape.of(KNOWN[name]))) == PUBLISHED[name]


@pytest.mark.parametrize("name", KNOWN)
def test_every_known_model_says_its_shape(name: str) -> None:
    shape = Shape.of(config_of(name, "--model")[0], said=name)
    assert shape.hidden and shape.layers and shape.vocabulary and shape.heads > 1


def write(path: Path, source: str, *, config: dict[str, object] | None = None, **objective: object) -> None:
    model: dict[str, object] = {"config": config} if config else {"source": source}
    values = {
        "run": {"output": f"runs/{path.stem}"},
        "model": model | {"ladder": [[3, 32], [6, 384]]},
        "data": {"shards": ["shards/a"]},
        "objective": {"name": "masked"} | objective,
        "train": {"steps": 3},
    }
    path.write_text(tomli_w.dumps(values))


def test_a_model_that_is_not_there_yet_has_the_shape_of_its_start(tmp_path: Path) -> None:
    write(tmp_path / "first.toml", "sentence-transformers/all-MiniLM-L6-v2")
    write(tmp_path / "second.toml", "runs/first/model")
    values, said = config_of("runs/second/model", "--model", tmp_path)
    assert values == KNOWN["sentence-transformers/all-MiniLM-L6-v2"]
    assert said == f"runs/second/model, as {tmp_path}/second.toml makes it"
    # A run that trains one size leaves no more layers than that size has.
    write(tmp_path / "single.toml", "runs/first/model", sizes="one", size="3x32")
    assert config_of("runs/single/model", "--model", tmp_path)[0]["num_hidden_layers"] == 3
    # One from random weights has its config's shape.
    write(tmp_path / "fresh.toml", "", config={"model_type": "bert", "num_attention_heads": 12})
    values = config_of("runs/fresh/model", "--model", tmp_path)[0]
    assert (values["hidden_size"], values["num_hidden_layers"]) == (384, 6)


def test_a_model_that_no_recipe_makes_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "first.toml", "runs/second/model")
    write(tmp_path / "second.toml", "runs/first/model")
    (tmp_path / "broken.toml").write_text("[run\noutput = 3")
    with pytest.raises(ConfigError, match="no recipe beside this one makes it; give --model"):
        config_of("runs/third/model", "--model", tmp_path)
    with pytest.raises(ConfigError, match="made from itself"):
        config_of("runs/first/model", "--model", tmp_path)
    (tmp_path / "twice.toml").write_text((tmp_path / "first.toml").read_text())
    with pytest.raises(ConfigError, match=r"is made by .*first\.toml and by .*twice\.toml"):
        config_of("runs/first/model", "--model", tmp_path)


@pytest.mark.usefixtures("bare_checkout")
def test_the_shipped_chains_are_followed() -> None:
    recipes = Path("launch/recipes")
    for name in ("runs/smae_bert_base_fineweb/model", "runs/srl_msmarco/model", "runs/srl_nli/model"):
        assert config_of(name, "--model", recipes)[0] == KNOWN["google-bert/bert-base-uncased"], name
