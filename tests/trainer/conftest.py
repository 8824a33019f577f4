"""Small real shards for training tests: documents, tuples with hard negatives, and graded pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from data.shards.writer import SplitWriter, finish_folder
from models.encoder import build_masked_lm
from models.settings import EmbeddingSettings
from models.static_embedding import StaticConfig, StaticModel


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """Figures are composed but left empty, for tests of numbers: to draw one takes a fifth of a second."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **options: Path(path).touch())


def _ids(tokenizer, text: str) -> list[int]:
    tokenizer.backend_tokenizer.no_truncation()  # which an earlier test may have left on
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="session")
def document_shards(tmp_path_factory, docstrings, tiny_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    with SplitWriter(folder, 0, kind="documents", vocabulary_size=len(tiny_tokenizer), chunk_samples=32) as writer:
        for text in docstrings[:400]:
            writer.add_document(_ids(tiny_tokenizer, text))
    finish_folder(folder, 1, tokenizer=tiny_tokenizer)
    return folder


def _pairs(docstrings) -> list[tuple[str, str]]:
    parts = [text.split("\n\n", 1) for text in docstrings if "\n\n" in text]
    return [(first, rest) for first, rest in parts if len(rest.split()) > 5][:300]


@pytest.fixture(scope="session")
def tuple_shards(tmp_path_factory, docstrings, tiny_tokenizer) -> Path:
    """(summary line, rest) pairs with 0 to 3 hard negatives each, the next entries' bodies."""
    folder = tmp_path_factory.mktemp("tuples")
    pairs = _pairs(docstrings)
    with SplitWriter(folder, 0, kind="tuples", vocabulary_size=len(tiny_tokenizer), chunk_samples=32) as writer:
        for index, (query, body) in enumerate(pairs):
            negatives = [pairs[(index + offset) % len(pairs)][1] for offset in range(1, 1 + index % 4)]
            passages = [_ids(tiny_tokenizer, text) for text in (body, *negatives)]
            writer.add_tuple(_ids(tiny_tokenizer, query), passages)
    finish_folder(folder, 1, tokenizer=tiny_tokenizer)
    return folder


@pytest.fixture(scope="session")
def crowded_shards(tmp_path_factory, docstrings, tiny_tokenizer) -> Path:
    """So few texts that every batch holds false negatives: a second positive, and negatives that others are given."""
    folder = tmp_path_factory.mktemp("crowded")
    pairs = _pairs(docstrings)[:16]
    with SplitWriter(folder, 0, kind="tuples", vocabulary_size=len(tiny_tokenizer), chunk_samples=8) as writer:
        for index in range(24):
            query, body = pairs[index % 16]
            other, negative = (pairs[(index + offset) % 16][1] for offset in (1, 2))
            passages = [_ids(tiny_tokenizer, text) for text in (body, other, negative)]
            writer.add_tuple(_ids(tiny_tokenizer, query), passages, num_positives=2)
    finish_folder(folder, 1, tokenizer=tiny_tokenizer)
    return folder


def tuple_file(path: Path, docstrings, *, of: str) -> Path:
    """The texts of `tuple_shards` or of `crowded_shards`, as a file from which they could have been prepared."""
    pairs, rows = _pairs(docstrings), []
    if of == "crowded":
        pairs = pairs[:16]
        for index in range(24):
            others = [pairs[(index + offset) % 16][1] for offset in (1, 2)]
            rows.append({"query": pairs[index % 16][0], "pos": [pairs[index % 16][1], others[0]], "neg": others[1:]})
    else:
        for index, (query, body) in enumerate(pairs):
            negatives = [pairs[(index + offset) % len(pairs)][1] for offset in range(1, 1 + index % 4)]
            rows.append({"query": query, "pos": [body], "neg": negatives})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def weighted_shards(tmp_path_factory, docstrings, tiny_tokenizer) -> Path:
    """Queries with weights of their losses, one or two positives and a hard negative each."""
    folder = tmp_path_factory.mktemp("weighted")
    pairs = _pairs(docstrings)[:60]
    with SplitWriter(folder, 0, kind="tuples", weighted=True, vocabulary_size=len(tiny_tokenizer)) as writer:
        for index, (query, body) in enumerate(pairs):
            count = 1 + index % 2
            texts = [*(body, pairs[(index + 11) % 60][1])[:count], pairs[(index + 7) % 60][1]]
            passages, weight = [_ids(tiny_tokenizer, text) for text in texts], (0.0, 0.25, 1.0, 3.5)[index // 2 % 4]
            writer.add_tuple(_ids(tiny_tokenizer, query), passages, num_positives=count, weight=weight)
    finish_folder(folder, 1, tokenizer=tiny_tokenizer)
    return folder


@pytest.fixture(scope="session")
def graded_shards(tmp_path_factory, docstrings, tiny_tokenizer) -> Path:
    """Pairs with a grade: 5 for a docstring's own body, 0 for the next one's."""
    folder = tmp_path_factory.mktemp("graded")
    pairs = _pairs(docstrings)
    with SplitWriter(folder, 0, kind="tuples", graded=True, vocabulary_size=len(tiny_tokenizer)) as writer:
        for index, (query, body) in enumerate(pairs):
            other = body if index % 2 else pairs[(index + 1) % len(pairs)][1]
            writer.add_tuple(
                _ids(tiny_tokenizer, query), [_ids(tiny_tokenizer, other)], score=5.0 if index % 2 else 0.0
            )
    finish_folder(folder, 1, tokenizer=tiny_tokenizer)
    return folder


@pytest.fixture(scope="session")
def guide_folder(tmp_path_factory, tiny_tokenizer) -> Path:
    """An encoder that guides: narrower than the students and served with shorter texts than they read."""
    folder = tmp_path_factory.mktemp("guide")
    torch.manual_seed(3)
    shape = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = {"model_type": "bert", **shape, "max_position_embeddings": 64, "initializer_range": 0.2}
    build_masked_lm(config, vocab_size=len(tiny_tokenizer), pad_token_id=0).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    ladder = ((1, 8), (2, 24))
    EmbeddingSettings("mean", "cosine", ladder, 10, 20, temperature=0.2).save(folder)
    return folder


@pytest.fixture(scope="session")
def static_guide_folder(tmp_path_factory, tiny_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("static_guide")
    torch.manual_seed(4)
    special_ids = [0, 2, 3, 4]
    config = StaticConfig(vocab_size=len(tiny_tokenizer), hidden_size=16, special_ids=special_ids)
    StaticModel(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    EmbeddingSettings("mean", "cosine", ((1, 12), (1, 16)), 64, 256, temperature=0.1).save(folder)
    return folder
