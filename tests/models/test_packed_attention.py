"""Packed attention is tried as the backbone will use it, before texts are packed."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModel

from models import packed_attention
from models.packed_attention import agrees_with_plain, fast_on

SHAPE = dict(vocab_size=50, num_hidden_layers=1, intermediate_size=32)
CPU = torch.device("cpu")
# Each configuration with the (heads, width) of the queries and of the keys that it is tried on: two groups of heads.
BACKBONES = {
    "bert": (SHAPE | dict(hidden_size=60, num_attention_heads=3), (2, 20), (2, 20)),
    "distilbert": (dict(dim=36, n_heads=3, n_layers=1, hidden_dim=32, vocab_size=50), (2, 12), (2, 12)),
    "qwen3": (
        SHAPE | dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=24),
        (4, 24),
        (2, 24),
    ),
}


def backbone_of(model_type):
    settings, *_ = BACKBONES[model_type]
    return AutoModel.from_config(AutoConfig.for_model(model_type, **settings))


@pytest.mark.parametrize("model_type", BACKBONES)
def test_the_kernel_is_tried_on_heads_of_the_backbones_own_width_and_grouping(model_type, monkeypatch):
    seen = []
    honest = packed_attention.packed_attention

    def spy(module, query, key, value, *args, **settings):
        seen.append(((query.shape[1], query.shape[3]), (key.shape[1], key.shape[3])))
        return honest(module, query, key, value, *args, **settings)

    monkeypatch.setattr(packed_attention, "packed_attention", spy)
    assert agrees_with_plain(CPU, backbone_of(model_type))
    assert seen == [BACKBONES[model_type][1:]]


def test_a_kernel_that_is_wrong_or_takes_no_such_heads_does_not_agree(monkeypatch, caplog):
    backbone = backbone_of("bert")
    honest = packed_attention.packed_attention

    def wrong(*args, **settings):
        mixed, weights = honest(*args, **settings)
        return mixed.roll(1, dims=1), weights

    def refusing(*_, **__):
        raise RuntimeError("head_size should be a multiple of 8")

    monkeypatch.setattr(packed_attention, "packed_attention", wrong)
    assert not agrees_with_plain(CPU, backbone)
    monkeypatch.setattr(packed_attention, "packed_attention", refusing)
    assert not agrees_with_plain(CPU, backbone)
    assert "head_size should be a multiple of 8" in caplog.text


def test_texts_are_not_packed_on_a_cpu():
    assert not fast_on(CPU, backbone_of("bert"))
