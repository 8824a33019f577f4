"""Hub names of models that recipes start from, with what a plan needs of their config.json, as published.

Each is https://huggingface.co/NAME/blob/main/config.json; docs/scaling.md says which of them were compared with a copy.
A login node plans with these without network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BERT = {
    "model_type": "bert",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
_BERT_LARGE = _BERT | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
_ROBERTA = _BERT | {
    "model_type": "roberta",
    "vocab_size": 50265,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
}
_MINILM = _BERT | {"hidden_size": 384, "intermediate_size": 1536}
_MODERNBERT = {
    "model_type": "modernbert",
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "vocab_size": 50368,
    "max_position_embeddings": 8192,
    "global_attn_every_n_layers": 3,
    "local_attention": 128,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
}
_QWEN3_4B = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
_QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}

KNOWN: Mapping[str, Mapping[str, Any]] = {
    "google-bert/bert-base-uncased": _BERT,
    "google-bert/bert-large-uncased": _BERT_LARGE,
    "WhereIsAI/UAE-Large-V1": _BERT_LARGE,
    "FacebookAI/roberta-base": _ROBERTA,
    "FacebookAI/xlm-roberta-base": _ROBERTA | {"model_type": "xlm-roberta", "vocab_size": 250002},
    "microsoft/MiniLM-L12-H384-uncased": _MINILM,
    "sentence-transformers/all-MiniLM-L6-v2": _MINILM | {"num_hidden_layers": 6},
    "answerdotai/ModernBERT-base": _MODERNBERT,
    "answerdotai/ModernBERT-large": _MODERNBERT
    | {"hidden_size": 1024, "intermediate_size": 2624, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen/Qwen3-0.6B": _QWEN3,
    "Qwen/Qwen3-Embedding-0.6B": _QWEN3 | {"vocab_size": 151669, "max_position_embeddings": 32768},
    "Qwen/Qwen3-Embedding-4B": _QWEN3 | _QWEN3_4B | {"vocab_size": 151665},
    "Qwen/Qwen3-Embedding-8B": _QWEN3 | _QWEN3_8B | {"vocab_size": 151665},
    "google/embeddinggemma-300m": {
        "model_type": "gemma3_text",
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 24,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "use_bidirectional_attention": True,
        "sliding_window": 512,
        "_sliding_window_pattern": 6,
    },
    "intfloat/e5-mistral-7b-instruct": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
    },
    "meta-llama/Llama-3.2-1B": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
    },
}
