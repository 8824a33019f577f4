"""What the tests of exports start from: small random models of each family as trained folders, and our own vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from models.encoder import build_masked_lm, load_encoder
from models.heads import save_heads
from models.settings import EmbeddingSettings
from models.sizes import Size
from trainer.evaluation.encoding.encode import embedder_of

LADDER = ((1, 8), (2, 12), (4, 32))
CONFIGS = {
    "bert": {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    },
    "distilbert": {"dim": 32, "n_layers": 4, "n_heads": 2, "hidden_dim": 48, "max_position_embeddings": 64},
    "modernbert": {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "local_attention": 8,
    },
}
CONFIGS["roberta"] = {**CONFIGS["bert"], "max_position_embeddings": 66}


def write_model(
    folder: Path,
    vocabulary: PreTrainedTokenizerFast,
    family: str,
    pooling: str = "cls",
    similarity: str = "cosine",
    *,
    heads: Sequence[int | str] = (),
    **settings: object,
) -> Path:
    """A trained folder with random weights: an MLM checkpoint, a tokenizer, barista.json, and heads of these names."""
    torch.manual_seed(7)
    model = build_masked_lm(
        {"model_type": family, **CONFIGS[family]}, vocab_size=len(vocabulary), pad_token_id=vocabulary.pad_token_id
    )
    # Fresh norms and biases are ones and zeros, which would hide a norm that is left out or applied twice.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    vocabulary.save_pretrained(folder)
    shapes = {f"{depth}.{name}": shape for depth in heads for name, shape in (("weight", (32, 32)), ("bias", (32,)))}
    save_heads({name: torch.randn(shape) for name, shape in shapes.items()}, folder)
    lengths = {"query_max_length": 16, "passage_max_length": 48}
    values = {"pooling": pooling, "similarity": similarity, "ladder": LADDER, **lengths, **settings}
    EmbeddingSettings(**values).save(folder)  # type: ignore[arg-type]
    return folder


def our_vectors(
    model: Path, texts: list[str], sizes: list[Size], prompt: str = "", *, max_length: int = 48
) -> dict[Size, np.ndarray]:
    """What our own encoder gives, size -> [n, dim]."""
    encoder = load_encoder(model)
    settings = EmbeddingSettings.load(model)
    assert settings is not None
    encode = embedder_of(encoder, AutoTokenizer.from_pretrained(model), sizes, device="cpu")
    return encode(texts, similarity=settings.similarity, max_length=max_length, prompt=prompt)
