"""What a size costs to serve: milliseconds to encode one query, parameters, bytes a document in the index.

The encoder is cut to the size's layers, as in an export. Queries are encoded one at a time, as a search box sends them.
The sizes are timed in turn, round after round, so that a busy machine slows all of them alike. The time of a size is
its median over all queries.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from data.tokens import SpelledOut, left_out_length
from models.backbone import truncate_layers
from models.encoder import Encoder
from models.heads import heads_of_narrowed, heads_up_to
from models.nested_feed_forward import narrow
from models.settings import EmbeddingSettings
from models.sizes import Size
from models.static_embedding import StaticModel, cut_table
from trainer.evaluation.encoding.encode import tokenized

Key = TypeVar("Key", bound=Hashable)

BYTES_PER_DIMENSION = 4  # vectors are searched in float32


@dataclass(frozen=True)
class Cost:
    milliseconds: float
    parameters: int
    index_bytes_per_document: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def cut_encoder(encoder: Encoder, size: Size) -> Encoder:
    """A copy of the encoder with the size's body alone, which is the copy's whole body.

    A static model keeps only the size's columns of its table.
    """
    if isinstance(encoder.backbone, StaticModel):
        return Encoder(cut_table(encoder.backbone, size.dim), encoder.pooling).eval()
    backbone = truncate_layers(copy.deepcopy(encoder.backbone), size.layers)
    if size.has_whole_feed_forwards:
        heads = heads_up_to(encoder.heads, size.layers)
    else:
        heads = heads_of_narrowed(encoder.heads, size.feed_forward, size.layers)
        narrow(backbone, size.feed_forward)
    return Encoder(backbone, encoder.pooling, heads, pool_prompt=encoder.pool_prompt).eval()


def measure_costs(
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerBase,
    sizes: Sequence[Size],
    settings: EmbeddingSettings,
    texts: Sequence[str],
    *,
    device: torch.device | str = "cpu",
    warm_up: int = 3,
) -> dict[Size, Cost]:
    """Size -> cost. The time covers tokenizing, the encoder and the cut."""
    passes = {size: TimedPass.of(encoder, (size,), device=device) for size in sizes}
    milliseconds = time_passes(passes, tokenizer, settings, texts, device=device, warm_up=warm_up)
    return {
        size: Cost(
            milliseconds[size],
            sum(p.numel() for name, p in each.encoder.backbone.named_parameters() if not name.startswith("pooler.")),
            BYTES_PER_DIMENSION * size.dim,
        )
        for size, each in passes.items()
    }


@dataclass(frozen=True)
class TimedPass:
    """One call that gives the vectors of `sizes`, which are sizes of `encoder`, an encoder cut to what these need."""

    encoder: Encoder
    sizes: tuple[Size, ...]

    @classmethod
    def of(cls, encoder: Encoder, sizes: tuple[Size, ...], *, device: torch.device | str) -> TimedPass:
        layers, dim = max(size.layers for size in sizes), max(size.dim for size in sizes)
        if len(fractions := {size.feed_forward for size in sizes}) == 1:
            cut = cut_encoder(encoder, Size(layers, dim, *fractions))
            # The cut encoder has only the neurons of the fraction, so its sizes take all of them.
            sizes = tuple(Size(size.layers, size.dim) for size in sizes)
        else:
            cut = cut_encoder(encoder, Size(layers, dim))
        return cls(cut.to(device), sizes)


@torch.no_grad()
def time_passes(
    passes: Mapping[Key, TimedPass],
    tokenizer: PreTrainedTokenizerBase,
    settings: EmbeddingSettings,
    texts: Sequence[str],
    *,
    device: torch.device | str = "cpu",
    warm_up: int = 3,
) -> dict[Key, float]:
    """The median milliseconds of each pass over the texts, one text at a time, with tokenizing and the cuts."""
    seconds: dict[Key, list[float]] = {key: [] for key in passes}
    warm_up = min(warm_up, len(texts))
    reads_length = any(not each.encoder.pool_prompt for each in passes.values())
    length = left_out_length(tokenizer, settings.query_prompt) if reads_length else 0
    prompt_lengths = torch.tensor([length], device=device)
    spelled_out = {
        key: SpelledOut.of(tokenizer, each.encoder.word_embeddings.num_embeddings) for key, each in passes.items()
    }
    for number, text in enumerate([*texts[:warm_up], *texts]):
        for key, each in passes.items():
            begin = time.perf_counter()
            ids = tokenized(tokenizer, [settings.query_prompt + text], settings.query_max_length, spelled_out[key])
            input_ids = torch.from_numpy(ids.tokens).long()[None].to(device)
            inputs = input_ids, torch.ones_like(input_ids)
            vectors = each.encoder(*inputs, list(each.sizes), prompt_lengths=prompt_lengths)
            for vector in vectors:
                vector.float().cpu()
            if number >= warm_up:
                seconds[key].append(time.perf_counter() - begin)
    return {key: float(np.median(of_pass)) * 1000 for key, of_pass in seconds.items()}
