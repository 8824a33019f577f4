"""What resizing is tried on: a tiny BERT, texts, and a training run of a few steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """A plain folder of a BERT with 3 layers × 24, and feed-forwards of 48 neurons."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    shape = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
    config = BertConfig(vocab_size=len(tiny_tokenizer), max_position_embeddings=64, initializer_range=0.2, **shape)
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, docstrings: list[str]) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in docstrings[:120]))
    return path
