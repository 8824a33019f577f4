"""The pre-training formulas restated the direct way: what the fused form must equal, and is timed against.

Every size on its own, from transformers' own BERT modules: full logits at every position, one decoder pass a size.
Enhanced decoding goes text by text and row by row, each row attending to the columns it may see and to nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from transformers.models.bert.modeling_bert import BertLayer

from models.masked_autoencoder import MaskedAutoencoder


def naive_head(masked_lm, rows: torch.Tensor) -> torch.Tensor:
    """The head on rows of width d, with the first d input features of its dense layer."""
    transform = masked_lm.cls.predictions.transform
    projected = rows @ transform.dense.weight[:, : rows.shape[-1]].T + transform.dense.bias
    return transform.LayerNorm(F.gelu(projected))


def naive_loss(
    masked_lm, layer: BertLayer | None, sizes, weights, inputs, *, bottleneck: str = "head"
) -> tuple[torch.Tensor, list, list]:
    """(loss, encoder losses, decoder losses). inputs: ids, attention mask, then input ids and labels of both sides.

    bottleneck: whether the decoder reads head(CLS), as in SMAE, or the CLS vector itself, as in RetroMAE.
    """
    _, attention, encoder_ids, encoder_labels, decoder_ids, decoder_labels = inputs
    base = masked_lm.base_model
    hidden = base(encoder_ids, attention_mask=attention, output_hidden_states=True).hidden_states
    table, bias = base.embeddings.word_embeddings.weight, masked_lm.cls.predictions.bias
    bias_mask = (1.0 - attention[:, None, None, :].to(table.dtype)) * torch.finfo(table.dtype).min
    total, encoder_losses, decoder_losses = torch.zeros(()), [], []
    for size, weight in zip(sizes, weights):
        states = naive_head(masked_lm, hidden[size.layers][..., : size.dim])
        encoder_loss = F.cross_entropy((states @ table.T + bias).flatten(0, 1), encoder_labels.flatten())
        total = total + weight * encoder_loss
        encoder_losses.append(encoder_loss.item())
        if layer is not None:
            read = states if bottleneck == "head" else hidden[size.layers]
            decoder_input = torch.cat([read[:, :1], base.embeddings(decoder_ids)[:, 1:]], dim=1)
            decoded = naive_head(masked_lm, layer(decoder_input, attention_mask=bias_mask))
            decoder_loss = F.cross_entropy((decoded @ table.T + bias).flatten(0, 1), decoder_labels.flatten())
            total = total + weight * decoder_loss
            decoder_losses.append(decoder_loss.item())
    return total, encoder_losses, decoder_losses


def naive_visibility(keys: Sequence[int], lengths: Sequence[int], share: float) -> list[list[list[int]]]:
    """The columns that each row of each text sees, in plain whole numbers: [text][row] -> columns, ascending."""

    def mix(value: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            value = (value ^ (value >> shift)) * factor % 2**64
        return value

    def draw(stream: int, number: int) -> int:
        return mix((stream + (number + 1) * 0x9E3779B97F4A7C15) % 2**64)

    texts = []
    for key, length in zip(keys, lengths):
        rows = []
        for row in range(length):
            columns = []
            for column in range(length):
                bits = draw(draw(key % 2**64, row), column // 4) >> 16 * (column % 4) & 0xFFFF
                signed = bits - 2**16 if bits >= 2**15 else bits
                sampled = signed < round(share * 2**16) - 2**15
                if column != row and (sampled or column == 0):
                    columns.append(column)
            rows.append(columns)
        texts.append(rows)
    return texts


def naive_enhanced_loss(
    masked_lm, layer: BertLayer, sizes, weights, inputs, visible: list[list[list[int]]], *, bottleneck: str = "head"
) -> tuple[torch.Tensor, list, list]:
    """As `naive_loss`. inputs: ids, attention mask, the encoder's input ids and labels, the decoder's labels.

    visible: the columns of each text and row, see `naive_visibility`.
    """
    ids, attention, encoder_ids, encoder_labels, decoder_labels = inputs
    base = masked_lm.base_model
    hidden = base(encoder_ids, attention_mask=attention, output_hidden_states=True).hidden_states
    table, bias = base.embeddings.word_embeddings.weight, masked_lm.cls.predictions.bias
    positions = base.embeddings.position_embeddings.weight
    heads = layer.attention.self.num_attention_heads
    total, encoder_losses, decoder_losses = torch.zeros(()), [], []
    for size, weight in zip(sizes, weights):
        states = naive_head(masked_lm, hidden[size.layers][..., : size.dim])
        encoder_loss = F.cross_entropy((states @ table.T + bias).flatten(0, 1), encoder_labels.flatten())
        logits, targets = [], []
        for text in range(len(ids)):
            vector = states[text, 0] if bottleneck == "head" else hidden[size.layers][text, 0]
            content = torch.cat([vector[None], base.embeddings(ids[text : text + 1])[0, 1:]])
            for row in range(1, int(attention[text].sum())):
                if decoder_labels[text, row] == -100:
                    continue
                asking = vector + positions[row]
                seen = content[visible[text][row]]
                query = layer.attention.self.query(asking).view(heads, 1, -1)
                key = layer.attention.self.key(seen).view(len(seen), heads, -1).transpose(0, 1)
                value = layer.attention.self.value(seen).view(len(seen), heads, -1).transpose(0, 1)
                shares = (query @ key.transpose(1, 2) / query.shape[-1] ** 0.5).softmax(-1)
                attended = layer.attention.output((shares @ value).reshape(1, -1), asking[None])
                decoded = layer.output(layer.intermediate(attended), attended)
                logits.append(naive_head(masked_lm, decoded) @ table.T + bias)
                targets.append(decoder_labels[text, row])
        decoder_loss = F.cross_entropy(torch.cat(logits), torch.stack(targets))
        total = total + weight * (encoder_loss + decoder_loss)
        encoder_losses.append(encoder_loss.item())
        decoder_losses.append(decoder_loss.item())
    return total, encoder_losses, decoder_losses


def bert_layer_like(model: MaskedAutoencoder) -> BertLayer:
    """A transformers layer with the decoder's weights, sharing no memory."""
    config = model.encoder.config
    config._attn_implementation = "eager"
    layer = BertLayer(config)
    ours = model.decoder
    pairs = {
        ours.query: layer.attention.self.query,
        ours.key: layer.attention.self.key,
        ours.value: layer.attention.self.value,
        ours.attention_output: layer.attention.output.dense,
        ours.attention_norm: layer.attention.output.LayerNorm,
        ours.up: layer.intermediate.dense,
        ours.down: layer.output.dense,
        ours.output_norm: layer.output.LayerNorm,
    }
    for source, target in pairs.items():
        target.load_state_dict(source.state_dict())
    return layer
