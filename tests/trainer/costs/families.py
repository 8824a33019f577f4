"""Tiny random models of every family whose shape the costs know, as transformers builds them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

_SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "vocab_size": 120}
_BERT = _SIZES | {"num_attention_heads": 4, "max_position_embeddings": 40}
# Heads are wider than hidden / heads, and groups of queries share keys and values.
_GROUPED = _BERT | {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
_WINDOWED = _GROUPED | {"sliding_window": 6}
_QWEN = _GROUPED | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}

# name -> what its config says; where "model_type" is not named, it is the name.
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "roberta": _BERT | {"type_vocab_size": 1},
    "xlm-roberta": _BERT | {"type_vocab_size": 1},
    "distilbert": {"dim": 48, "hidden_dim": 80, "n_layers": 4, "n_heads": 4, "vocab_size": 120}
    | {"max_position_embeddings": 40},
    "mpnet": _BERT,
    "electra": _BERT | {"embedding_size": 24},
    "modernbert": _BERT | {"local_attention": 8, "global_attn_every_n_layers": 3, "pad_token_id": 0},
    "eurobert": _GROUPED,
    "qwen2": _QWEN | {"head_dim": 12},
    "qwen3": _GROUPED,
    "qwen3 with windows": _QWEN | {"model_type": "qwen3"},
    "llama": _GROUPED,
    "llama with biases": _GROUPED | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": _WINDOWED,
    "gemma2": _WINDOWED,
    "gemma3_text": _WINDOWED | {"sliding_window_pattern": 3},
    "gemma3_text, bidirectional": _WINDOWED
    | {"model_type": "gemma3_text", "sliding_window_pattern": 2, "use_bidirectional_attention": True},
    "phi3": _WINDOWED | {"head_dim": 12},
    # In both directions by what transformers reads for any family.
    "qwen3, bidirectional": _GROUPED | {"model_type": "qwen3", "is_causal": False},
    "mistral, bidirectional": _WINDOWED | {"model_type": "mistral", "is_causal": False},
    "gemma2, bidirectional": _WINDOWED | {"model_type": "gemma2", "is_causal": False},
}


def config_of(name: str) -> PretrainedConfig:
    values = dict(FAMILIES[name])
    family = values.pop("model_type", name)
    # A decoder's cache of keys and values would copy them, and training needs none.
    return AutoConfig.for_model(family, **values, bos_token_id=1, eos_token_id=2, use_cache=False)


def model_of(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """In training mode, without a pooler, and with plain products for attention."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModel.from_config(config_of(name), attn_implementation="eager", dtype=dtype)
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model.train()


def ids_of(texts: int, length: int) -> torch.Tensor:
    """int64 [texts, length], without padding."""
    return torch.randint(5, 120, (texts, length), generator=torch.Generator().manual_seed(0))
