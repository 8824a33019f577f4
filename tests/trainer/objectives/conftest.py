"""A frozen model whose tokenizer is not the students'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from data import prepare
from models.settings import EmbeddingSettings
from trainer.exporting.model_folder import write_model_folder

TEACHER_WIDTH = 20


@pytest.fixture(scope="session")
def other_tokenizer(tmp_path_factory: pytest.TempPathFactory, docstrings: list[str]) -> PreTrainedTokenizerFast:
    """Of another vocabulary than the students'."""
    folder = tmp_path_factory.mktemp("other_tokenizer")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in docstrings[500:900]))
    output = str(folder / "made")
    prepare.run(["tokenizer", str(folder / "texts.jsonl"), "--output", output, "--vocab-size", "700", "--keep-case"])
    return PreTrainedTokenizerFast.from_pretrained(output)


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory, other_tokenizer: PreTrainedTokenizerFast) -> Path:
    torch.manual_seed(3)
    shape = {"hidden_size": TEACHER_WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40}
    config = BertConfig(vocab_size=len(other_tokenizer), max_position_embeddings=64, initializer_range=0.2, **shape)
    folder = tmp_path_factory.mktemp("teacher") / "model"
    settings = EmbeddingSettings("mean", ladder=((2, TEACHER_WIDTH),), passage_max_length=40, passage_prompt="text: ")
    write_model_folder(folder, BertModel(config), other_tokenizer, settings, nn.ModuleDict())
    return folder
