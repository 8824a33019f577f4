"""SPEC's pre-training formulas restated the direct way: what the fused form must equal, and is timed against.

Every size on its own, from transformers' own BERT modules: full logits at every position, one decoder pass a size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers.models.bert.modeling_bert import BertLayer

from models.masked_autoencoder import MaskedAutoencoder


def naive_head(masked_lm, rows: torch.Tensor) -> torch.Tensor:
    """The head on rows of width d, with the first d input features of its dense layer."""
    transform = masked_lm.cls.predictions.transform
    projected = rows @ transform.dense.weight[:, : rows.shape[-1]].T + transform.dense.bias
    return transform.LayerNorm(F.gelu(projected))


def naive_loss(masked_lm, layer: BertLayer | None, sizes, weights, inputs) -> tuple[torch.Tensor, list, list]:
    """(loss, encoder losses, decoder losses). inputs: ids, attention mask, then input ids and labels of both sides."""
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
            decoder_input = torch.cat([states[:, :1], base.embeddings(decoder_ids)[:, 1:]], dim=1)
            decoded = naive_head(masked_lm, layer(decoder_input, attention_mask=bias_mask))
            decoder_loss = F.cross_entropy((decoded @ table.T + bias).flatten(0, 1), decoder_labels.flatten())
            total = total + weight * decoder_loss
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
