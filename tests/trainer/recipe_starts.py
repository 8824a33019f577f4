"""What recipes of named models start from in tests: a tiny random model of the family, its tokenizer and its shards.

Each folder is like the published one: of the same classes, with the same frame and modules, so that a recipe is trained
as it stands.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import GemmaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from data.prepare import main as prepare
from data.tokens import append_token
from models.encoder import build_decoder, build_masked_lm
from tests.data.frame_tokenizers import byte_level, metaspace, template

END = "<|endoftext|>"
INSTRUCT = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
SIMILARITY = "task: sentence similarity | query: "
QUERY_LENGTH = 64  # tokens, for the tiny tokenizers cut prompts into many
SHAPE = {
    "hidden_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 96,
}
_GROUPED = {**SHAPE, "num_key_value_heads": 2, "head_dim": 12}


@dataclass(frozen=True)
class Start:
    """A model's folder, and shards for it."""

    model: Path
    shards: Path


def qwen3(root: Path, texts: Sequence[str]) -> Start:
    """The language model, whose tokenizer puts nothing around a text."""
    folder = _qwen3_model(root, _qwen_tokenizer(texts))
    options = ["--append-token", END, "--query-prompt", INSTRUCT]
    return Start(folder, _prepared(root, "tuples", folder, texts, *options))


def qwen3_embedding(root: Path, texts: Sequence[str]) -> Start:
    """The embedding model: its tokenizer ends every text, and its folder is of sentence-transformers."""
    tokenizer = _qwen_tokenizer(texts)
    append_token(tokenizer, END)
    folder = _qwen3_model(root, tokenizer)
    _write_modules(folder, "lasttoken", query=INSTRUCT)
    return Start(folder, _prepared(root, "documents", folder, texts))


def embeddinggemma(root: Path, texts: Sequence[str]) -> Start:
    """With a window in most layers, a token at both ends, one without a row in the table, and two Dense modules."""
    tokenizer = GemmaTokenizer(
        **_vocabulary(metaspace([*texts, SIMILARITY], None)),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        mask_token="<|im_end|>",
    )
    tokenizer.backend_tokenizer.post_processor = template("<s> $A </s>")
    config = {**_GROUPED, "query_pre_attn_scalar": 12, "sliding_window": 16}
    config["layer_types"] = [*["sliding_attention"] * 2, "full_attention"] * 2
    torch.manual_seed(5)
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    model = build_decoder({"model_type": "gemma3_text", **config}, "bidirectional", **ids)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})  # its family's, which it does not embed
    folder = root / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _write_modules(folder, "mean", (48, 64, 48), query="task: search result | query: ", document="title: none | text: ")
    prompts = ["--query-prompt", SIMILARITY, "--passage-prompt", SIMILARITY]
    return Start(folder, _prepared(root, "tuples", folder, texts, *prompts))


def modernbert(root: Path, texts: Sequence[str]) -> Start:
    tokenizer = byte_level(texts, template("<s> $A </s>"))
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    config = {**SHAPE, "local_attention": 16, "layer_types": ["full_attention", *["sliding_attention"] * 2] * 2}
    torch.manual_seed(5)
    folder = root / "model"
    build_masked_lm({"model_type": "modernbert", **config}, **ids).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Start(folder, _prepared(root, "tuples", folder, texts))


# model.source of a recipe -> what stands for it.
STARTS = {
    "Qwen/Qwen3-0.6B": qwen3,
    "Qwen/Qwen3-Embedding-0.6B": qwen3_embedding,
    "google/embeddinggemma-300m": embeddinggemma,
    "answerdotai/ModernBERT-base": modernbert,
}


def _qwen_tokenizer(texts: Sequence[str]) -> Qwen2Tokenizer:
    """Of the class that transformers takes beside this family; another's may give other ids there."""
    return Qwen2Tokenizer(**_vocabulary(byte_level([*texts, INSTRUCT], None)))


def _vocabulary(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(each) for each in model["merges"]]}


def _qwen3_model(root: Path, tokenizer: Qwen2Tokenizer) -> Path:
    torch.manual_seed(5)
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    model = build_decoder({"model_type": "qwen3", **_GROUPED}, "causal", **ids)
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    return root / "model"


def _write_modules(folder: Path, pooling: str, widths: Sequence[int] = (), **prompts: str) -> None:
    """Add the files of sentence-transformers. widths: those between which its Dense modules map."""
    paths = ["", "1_Pooling", *(f"{number}_Dense" for number in range(2, 1 + len(widths))), "9_Normalize"]
    for path in paths[1:]:
        (folder / path).mkdir()
    kinds = [path.partition("_")[2] or "Transformer" for path in paths]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(zip(paths, kinds))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{_FLAGS[pooling]}": True}))
    for path, before, after in zip(paths[2:], widths, widths[1:]):
        dense = {"in_features": before, "out_features": after, "bias": False}
        dense["activation_function"] = "torch.nn.modules.linear.Identity"
        (folder / path / "config.json").write_text(json.dumps(dense))
        save_file({"linear.weight": torch.randn(after, before) / 7}, folder / path / "model.safetensors")
    settings = {"prompts": prompts, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


_FLAGS = {"lasttoken": "lasttoken", "mean": "mean_tokens"}


def _prepared(root: Path, kind: str, tokenizer: Path, texts: Sequence[str], *options: str) -> Path:
    """Shards of texts; as tuples, of a text, the next one, and the one after as a hard negative."""
    rows: list[dict[str, Any]] = [{"text": text} for text in texts]
    if kind == "tuples":
        triples = zip(texts, texts[1:], texts[2:])
        rows = [{"query": first, "positive": second, "negative": third} for first, second, third in triples]
    (root / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fixed = ["--output", str(root / "shards"), "--tokenizer", str(tokenizer), "--processes", "1"]
    assert prepare([kind, str(root / "texts.jsonl"), *fixed, *options]) == 0
    return root / "shards"
