"""Shapes read from configs, against transformers' models: parameters, products, and what each token attends to."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from data.ground.errors import ConfigError
from models.choices import Direction
from models.direction import with_direction
from models.encoder import Encoder
from tests.trainer.costs.families import FAMILIES, config_of, ids_of, model_of
from trainer.costs import flops
from trainer.costs.counts import Texts, encoder_flops
from trainer.costs.layers import kept_bytes, moved_elements
from trainer.costs.parameters import encoder_parameters
from trainer.costs.shapes import Shape

BERT = Shape(768, 3072, 12, 30522)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_of_the_model(name: str) -> None:
    """One by one, so that what ZeRO leaves whole is known, too."""
    counts = sorted(parameter.numel() for parameter in model_of(name).parameters())
    assert sorted(encoder_parameters(Shape.of(config_of(name)))) == counts


@pytest.mark.parametrize("name", FAMILIES)
def test_products_are_those_of_the_model(name: str) -> None:
    """Eager attention computes the pairs that a mask hides, too: that is what the count without masks says."""
    model, shape = model_of(name).eval(), Shape.of(config_of(name))
    ids = ids_of(3, 20)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(ids)
    by_module = counter.get_flop_counts()
    # The angles of rotary positions come from a product of positions and frequencies, once a pass.
    angles = sum(by_module.get(f"{type(model).__name__}.rotary_emb", {}).values())
    texts = Texts.alike(3, 20)
    unmasked = dataclasses.replace(shape, causal=False, reaches=())
    assert encoder_flops(unmasked, texts) == counter.get_total_flops() - angles
    # Of a mask's half or window, exactly the pairs that the mask hides are missing.
    hidden = sum(20 * 20 - int((weights[0, 0] > 0).sum()) for weights in attention_of(name))
    missing = 4 * shape.query_width * 3 * hidden
    assert encoder_flops(shape, texts) == encoder_flops(unmasked, texts) - missing


def attention_of(name: str) -> list[torch.Tensor]:
    """Each layer's attention weights, [texts, heads, length, length]."""
    with torch.no_grad():
        weights = model_of(name).eval()(ids_of(3, 20), output_attentions=True).attentions
    assert len(weights) == 4
    return list(weights)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_pairs_attended_to_are_the_models(name: str) -> None:
    shape = Shape.of(config_of(name))
    layers = attention_of(name)
    for weights, reach in zip(layers, shape.reaches or [None] * len(layers), strict=True):
        seen = Texts.alike(1, 20).attended(causal=shape.causal, reach=reach)
        assert seen == (weights[0, 0] > 0).sum()


def test_what_is_masked_is_known() -> None:
    """Negative control: the families differ in what they hide, as they are known to."""
    shapes = {name: Shape.of(config_of(name)) for name in FAMILIES}
    assert {name for name, shape in shapes.items() if shape.causal} == {
        *("qwen2", "qwen3", "qwen3 with windows", "llama", "llama with biases"),
        *("mistral", "gemma2", "gemma3_text", "phi3"),
    }
    assert shapes["modernbert"].reaches == (None, 4, 4, None)
    assert shapes["qwen2"].reaches == (None, None, None, 4)
    assert shapes["mistral"].reaches == (5, 5, 5, 5)
    assert shapes["gemma2"].reaches == (5, None, 5, None)
    assert shapes["gemma3_text"].reaches == (5, 5, None, 5)
    assert shapes["gemma3_text, bidirectional"].reaches == (3, None, 3, None)
    assert shapes["llama"].reaches == () == shapes["qwen3"].reaches
    assert shapes["mistral, bidirectional"].reaches == (6, 6, 6, 6)


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2", "gemma3_text"])
def test_the_recipes_direction_is_that_of_the_model(name: str) -> None:
    """As the trainer tells it to the model (models/direction.py)."""
    values = json.loads(config_of(name).to_json_string(use_diff=False))
    for direction in get_args(Direction):
        expected = Shape.of(with_direction(config_of(name), direction))
        assert Shape.of(values, direction=direction) == expected
        assert expected.causal is (direction == "causal")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_written_config_says_the_same(name: str, tmp_path: Path) -> None:
    config_of(name).save_pretrained(tmp_path)
    assert Shape.of(json.loads((tmp_path / "config.json").read_text())) == Shape.of(config_of(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_layers_economy_is_planned_where_it_is(name: str) -> None:
    assert Shape.of(config_of(name)).reads_rows is Encoder(model_of(name))._last_layer_skips


@pytest.mark.parametrize(("causal", "reach"), [(True, None), (True, 3), (False, 3), (False, 0), (True, 40)])
def test_pairs_of_texts_of_many_lengths(causal: bool, reach: int | None) -> None:
    """Against a mask that is written out; and of the metrics' tensors."""
    lengths = torch.tensor([1, 2, 3, 4, 5, 9, 9, 17])
    expected = 0
    for length in lengths.tolist():
        near = torch.arange(length)[:, None] - torch.arange(length)
        mask = (near >= 0) | torch.tensor(not causal)
        expected += int((mask & (near.abs() <= (length if reach is None else reach))).sum())
    texts = Texts(0, 0, 0)
    for length in lengths.tolist():
        texts = texts + Texts.alike(1, length)
    assert texts.attended(causal=causal, reach=reach) == expected
    shape = Shape(16, 32, 2, 100, causal=causal, reaches=(reach, reach))
    assert flops.encoder_flops(shape, lengths) == encoder_flops(shape, texts)
    assert texts.part(0.5).attended(causal=causal, reach=reach) == expected / 2


def test_what_is_counted_of_bert_has_not_changed() -> None:
    """By the formulas of docs/scaling.md, written out."""
    texts = Texts(8, 800, 90_000)
    hidden, inner = 768, 3072
    assert encoder_flops(BERT, texts) == 12 * (800 * (8 * hidden**2 + 4 * hidden * inner) + 4 * hidden * 90_000)
    layer = 4 * (hidden**2 + hidden) + 2 * hidden * inner + inner + hidden + 4 * hidden
    assert sum(encoder_parameters(BERT)) == (30522 + 512 + 2 + 2) * hidden + 12 * layer == 108_891_648
    assert kept_bytes(BERT, width=2.0) == 34 * hidden  # Korthikanti et al. 2022
    assert moved_elements(BERT) == 14 * hidden + 2 * inner


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hidden_size": 0}, "hidden_size = 0"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads = '8'"),
        ({"head_dim": 1.5}, "head_dim = 1.5"),
        ({"layer_types": ["sliding_attention"]}, "layer_types must list the kinds of 12 layers"),
    ],
)
def test_a_wrong_number_is_one_sentence(values: dict[str, Any], said: str) -> None:
    sound = {"hidden_size": 64, "num_hidden_layers": 12, "rms_norm_eps": 1e-6, "sliding_window": 8}
    with pytest.raises(ConfigError, match=r"^x: ") as error:
        Shape.of(sound | values, said="x")
    assert said in str(error.value)
