"""The steps of SMAE and SRL the direct way: a pass of the cut encoder for each size, padded texts, whole matrices.

It shares the module's weights and none of its methods. Each size's loss is sent back by itself, so that only one size's
graph is kept, which is the least memory that the direct way needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from data.collate import MaskedBatch, PairBatch, Texts
from data.masking import IGNORED
from models.sizes import Size
from trainer.config.schema import Recipe


def padded(values: Tensor, offsets: Tensor, device: torch.device, *, fill: int = 0) -> Tensor:
    """Flat values [T] as [B, L], filled at the right."""
    parts = values.long().split(offsets.diff().tolist())
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True, padding_value=fill).to(device)


def mask_of(offsets: Tensor, device: torch.device) -> Tensor:
    """bool [B, L], true at tokens."""
    return padded(torch.ones(int(offsets[-1])), offsets, device).bool()


@contextlib.contextmanager
def cut_to(backbone: Any, layers: int) -> Iterator[None]:
    """A BERT of its first layers alone."""
    whole = backbone.encoder.layer
    backbone.encoder.layer = whole[:layers]
    try:
        yield
    finally:
        backbone.encoder.layer = whole


def states_of(backbone: Any, ids: Tensor, mask: Tensor, size: Size) -> Tensor:
    """[B, L, hidden] after the size's last layer."""
    with cut_to(backbone, size.layers):
        return backbone(input_ids=ids, attention_mask=mask.long()).last_hidden_state


def train_masked(module: Any, batch: MaskedBatch, recipe: Recipe, *, autocast: bool = False) -> float:
    """SMAE's loss of a batch; adds its gradient to the module's. module: models/masked_autoencoder.py's."""
    sizes, lm = list(recipe.ladder), module.masked_lm
    table = lm.base_model.embeddings.word_embeddings.weight
    device = table.device
    mask = mask_of(batch.offsets, device)
    assert batch.decoder_input_ids is not None and batch.decoder_labels is not None
    encoder_ids, decoder_ids = (
        padded(v, batch.offsets, device) for v in (batch.encoder_input_ids, batch.decoder_input_ids)
    )
    encoder_labels, decoder_labels = (
        padded(v, batch.offsets, device, fill=IGNORED) for v in (batch.encoder_labels, batch.decoder_labels)
    )

    def cross_entropy(states: Tensor, labels: Tensor) -> Tensor:
        logits = states @ table.T + lm.cls.predictions.bias
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)

    total = 0.0
    for size in sizes:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            states = _head(lm, states_of(lm.base_model, encoder_ids, mask, size)[..., : size.dim])
            embedded = lm.base_model.embeddings(input_ids=decoder_ids)
            read = torch.cat([states[:, :1], embedded[:, 1:].to(states.dtype)], dim=1)
            decoded = _head(lm, _decoded(module.decoder, read, mask))
            loss = (cross_entropy(states, encoder_labels) + cross_entropy(decoded, decoder_labels)) / len(sizes)
        loss.backward()
        total += float(loss.detach())
    return total


def _head(lm: Any, states: Tensor) -> Tensor:
    """The head of BERT's masked language model on states of the first d dimensions."""
    transform = lm.cls.predictions.transform
    weight = transform.dense.weight[:, : states.shape[-1]]
    return transform.LayerNorm(F.gelu(F.linear(states, weight, transform.dense.bias)))


def _decoded(decoder: Any, read: Tensor, mask: Tensor) -> Tensor:
    """One layer like BERT's with the decoder's weights, over whole texts [B, L, D]."""

    def heads(states: Tensor) -> Tensor:
        return states.unflatten(-1, (decoder.num_heads, -1)).transpose(1, 2)

    q, k, v = (heads(each(read)) for each in (decoder.query, decoder.key, decoder.value))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
    states = decoder.attention_norm(decoder.attention_output(mixed.transpose(1, 2).flatten(2)) + read)
    return decoder.output_norm(decoder.down(F.gelu(decoder.up(states))) + states)


def train_contrastive(module: Any, batch: PairBatch, recipe: Recipe, *, autocast: bool = False) -> float:
    """SRL's loss of a batch, InfoNCE and the KL to the full size; adds its gradient. module: models/encoder.py's."""
    device, sizes = module.word_embeddings.weight.device, list(recipe.ladder)
    targets = batch.targets.to(device)
    total, teacher = 0.0, torch.empty(0)
    for size in reversed(sizes):  # the full size first, from which the others learn
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            queries, passages = (_vectors(module.backbone, texts, size) for texts in (batch.queries, batch.passages))
        scores = queries @ passages.T / recipe.objective.temperature
        loss = F.cross_entropy(scores, targets)
        if size == sizes[-1]:
            teacher = scores.detach().log_softmax(1)
        else:
            loss = loss + F.kl_div(scores.log_softmax(1), teacher, reduction="batchmean", log_target=True)
        loss = loss / len(sizes)
        loss.backward()
        total += float(loss.detach())
    return total


def _vectors(backbone: Any, texts: Texts, size: Size) -> Tensor:
    """Unit vectors [n, d] in float32: the means of the tokens' states."""
    device = backbone.embeddings.word_embeddings.weight.device
    mask = mask_of(texts.offsets, device)
    states = states_of(backbone, padded(texts.tokens, texts.offsets, device), mask, size).float()
    means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return F.normalize(means[:, : size.dim], dim=1)


def columns_of(batch: PairBatch) -> Sequence[dict[str, Tensor]]:
    """Anchors, positives and negatives as sentence-transformers takes them, each padded to its longest text."""
    per_query = len(batch.passages) // len(batch.queries)
    columns = [(batch.queries, torch.arange(len(batch.queries)))]
    columns += [(batch.passages, batch.targets + place) for place in range(per_query)]
    found = []
    for texts, rows in columns:
        taken, cpu = texts.take(rows), torch.device("cpu")
        ids = padded(taken.tokens, taken.offsets, cpu)
        found.append({"input_ids": ids, "attention_mask": mask_of(taken.offsets, cpu).long()})
    return found
