"""What a size costs to serve: milliseconds to encode one query, parameters, bytes a document in the index.

The encoder is cut to the size's layers, as in an export. Queries are encoded one at a time, as a search box sends them.
The sizes are timed in turn, round after round, so that a busy machine slows all of them alike. The time of a size is
its median over all queries.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from data.tokens import left_out_length
from models.backbone import truncate_layers
from models.encoder import Encoder
from models.heads import heads_up_to
from models.settings import EmbeddingSettings
from models.sizes import Size
from models.static_embedding import StaticModel, cut_table

BYTES_PER_DIMENSION = 4  # vectors are searched in float32


@dataclass(frozen=True)
class Cost:
    milliseconds: float
    parameters: int
    index_bytes_per_document: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def cut_encoder(encoder: Encoder, size: Size) -> Encoder:
    """A copy of the encoder with only the size's layers; a static model keeps only the size's columns of its table."""
    if isinstance(encoder.backbone, StaticModel):
        return Encoder(cut_table(encoder.backbone, size.dim), encoder.pooling).eval()
    backbone = truncate_layers(copy.deepcopy(encoder.backbone), size.layers)
    heads = heads_up_to(encoder.heads, size.layers)
    return Encoder(backbone, encoder.pooling, heads, pool_prompt=encoder.pool_prompt).eval()


@torch.no_grad()
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
    encoders = {size: cut_encoder(encoder, size).to(device) for size in sizes}
    left_out = 0 if encoder.pool_prompt else left_out_length(tokenizer, settings.query_prompt)
    prompts = torch.tensor([left_out], device=device)
    seconds: dict[Size, list[float]] = {size: [] for size in sizes}
    for number, text in enumerate([*texts[:warm_up], *texts]):
        for size, cut in encoders.items():
            begin = time.perf_counter()
            ids = tokenizer(
                settings.query_prompt + text, truncation=True, max_length=settings.query_max_length, return_tensors="pt"
            )
            (vector,) = cut(
                ids["input_ids"].to(device), ids["attention_mask"].to(device), [size], prompt_lengths=prompts
            )
            vector.float().cpu()
            if number >= warm_up:
                seconds[size].append(time.perf_counter() - begin)
    return {
        size: Cost(
            float(np.median(seconds[size])) * 1000,
            sum(p.numel() for name, p in cut.backbone.named_parameters() if not name.startswith("pooler.")),
            BYTES_PER_DIMENSION * size.dim,
        )
        for size, cut in encoders.items()
    }
