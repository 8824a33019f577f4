"""The model under evaluation: the model of --model, the sizes of --sizes, and the device they run on."""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModel, PreTrainedTokenizerFast
from transformers.utils import logging as hf_logging

from data.ground.errors import ConfigError
from data.ground.options import listed
from data.tokens import load_tokenizer, rows_needed, tokenizer_fingerprint
from models.backbone import longest_input
from models.choices import Pooling
from models.encoder import Encoder, load_encoder
from models.heads import heads_up_to
from models.nested_feed_forward import check_fractions
from models.settings import EmbeddingSettings
from models.sizes import STARBUCKS_LADDER, Ladder, Size


def load_subject(
    args: argparse.Namespace,
) -> tuple[Encoder, PreTrainedTokenizerFast, EmbeddingSettings, list[Size]]:
    """The model of --model, with the sizes of --sizes."""
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    encoder, tokenizer, own = load_model(args.model, pooling=args.pooling)
    settings = _settings(args, encoder, own)
    if (specials := tokenizer.num_special_tokens_to_add()) >= (length := min_length(settings)):
        raise ConfigError(f"--max-length {length} leaves no room beside {specials} special tokens; give more")
    return encoder, tokenizer, settings, choose_sizes(args.sizes, settings.sizes, encoder)


def load_model(
    source: str | Path, *, pooling: Pooling | None = None
) -> tuple[Encoder, PreTrainedTokenizerFast, EmbeddingSettings | None]:
    """An encoder with its tokenizer and its settings; the tokenizer must be the one the weights were trained with.

    The settings are None if the model has neither barista.json nor the files that sentence-transformers writes.
    """
    settings = EmbeddingSettings.load(source)
    encoder = load_encoder(source, pooling=pooling)
    tokenizer = load_tokenizer(source)
    check_tokenizer(tokenizer, settings, rows=encoder.word_embeddings.num_embeddings, source=source)
    return encoder, tokenizer, settings


def check_tokenizer(
    tokenizer: PreTrainedTokenizerFast, settings: EmbeddingSettings | None, *, rows: int, source: str | Path
) -> None:
    """Refuse a tokenizer that does not belong to the weights. `rows`: rows of the token embedding table."""
    if (ids := rows_needed(tokenizer)) > rows:
        raise ConfigError(
            f"the tokenizer of {source} has {ids} tokens and the model's table {rows}; "
            "give a folder whose tokenizer is the model's own"
        )
    if settings is None:
        return
    if settings.tokenizer is not None and settings.tokenizer != tokenizer_fingerprint(tokenizer):
        raise ConfigError(
            f"the tokenizer of {source} is not the one that its barista.json names, with which it was trained; "
            "put that one back, or copy the model folder again"
        )
    if (specials := tokenizer.num_special_tokens_to_add()) >= (length := min_length(settings)):
        raise ConfigError(
            f"{source} cuts texts at {length} tokens, of which {specials} are special; fix the lengths in its settings"
        )


def min_length(settings: EmbeddingSettings) -> int:
    """The shorter of the two lengths at which texts are cut."""
    return min(settings.query_max_length, settings.passage_max_length)


def _settings(args: argparse.Namespace, encoder: Encoder, own: EmbeddingSettings | None) -> EmbeddingSettings:
    """The model's own settings, overridden by the command line; default lengths shrink to what the model can take."""
    found = own
    full = Size(encoder.num_layers, encoder.embedding_size)
    if found is None and STARBUCKS_LADDER.full == full:
        found = EmbeddingSettings(ladder=tuple(size.numbers for size in STARBUCKS_LADDER))
    if (found is None or not found.ladder) and args.sizes in ("ladder", "grid"):
        raise ConfigError(
            f"{args.model} has no barista.json that gives its ladder; name the sizes, for example --sizes {full}"
        )
    settings = found or EmbeddingSettings()
    limit = longest_input(encoder.backbone)
    lengths = {}
    for key in ("query_max_length", "passage_max_length"):
        length = args.max_length or getattr(settings, key)
        if limit is not None and length > limit:
            if args.max_length or own:
                raise ConfigError(
                    f"{key} {length} is more than the {limit} tokens the model can take; give --max-length"
                )
            length = limit
        lengths[key] = length
    return dataclasses.replace(
        settings,
        pooling=encoder.pooling,
        pool_prompt=encoder.pool_prompt,
        similarity=args.similarity or settings.similarity,
        ladder=settings.ladder or ((full.layers, full.dim),),
        **lengths,
    )


def choose_sizes(text: str, ladder: Ladder, encoder: Encoder) -> list[Size]:
    """The sizes that `--sizes` names: "ladder", "grid" (its bodies × its dims) or a comma-separated list."""
    if text == "ladder":
        sizes = list(ladder)
    elif text == "grid":
        sizes = list(ladder.grid)
    else:
        sizes = [ladder.find(name) for name in listed(text)]
    if not sizes:
        raise ConfigError(f"--sizes {text!r} names no size; use ladder, grid, or a list such as 2x32,4x64")
    check_sizes(sizes, encoder)
    return list(dict.fromkeys(sizes))


def check_sizes(sizes: Iterable[Size], encoder: Encoder) -> None:
    """Refuse sizes that are larger than the encoder, or whose fraction of its feed-forwards is no number of neurons."""
    sizes = list(sizes)
    for size in sizes:
        if not size.fits_in(Size(encoder.num_layers, encoder.embedding_size)):
            raise ConfigError(
                f"size {size} outgrows the encoder of {encoder.num_layers} layers and {encoder.embedding_size} "
                "dimensions; choose a smaller one"
            )
        if not size.has_whole_feed_forwards and encoder.is_static:
            raise ConfigError(
                f"size {size} narrows feed-forwards, and a static model has none; give {size.layers}x{size.dim}"
            )
    if not encoder.is_static:
        check_fractions(encoder.backbone, sizes)


def trained_settings(folder: str | Path) -> EmbeddingSettings:
    """The settings of a model folder that training wrote, or of sentence-transformers; other folders are refused."""
    settings = EmbeddingSettings.load(folder)
    if settings is None or not settings.ladder:
        raise ConfigError(
            f"{folder} has no barista.json with a ladder and is no folder of sentence-transformers; give the model "
            "folder of a trained run"
        )
    return settings


def untrained_encoder(encoder: Encoder, *, seed: int = 0) -> Encoder:
    """The same architecture and pooling with fresh weights: the control that shows what training adds."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = AutoModel.from_config(copy.deepcopy(encoder.config), trust_remote_code=False).float()
        heads = heads_up_to(encoder.heads, encoder.num_layers)
        for parameter in heads.parameters():
            nn.init.normal_(parameter, std=encoder.hidden_size**-0.5)
    return Encoder(fresh, encoder.pooling, heads, pool_prompt=encoder.pool_prompt)


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda was asked for, but PyTorch sees no GPU; use --device cpu or auto")
    return torch.device(name)
