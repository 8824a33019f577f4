"""The bottleneck decoder of masked-autoencoder pre-training, run once for all sizes.

One transformer layer reads [cls_{n,d}, e(x_dec)_1, ..., e(x_dec)_L] and must recover the masked words. It can know most
of them only from the one vector cls_{n,d} (Starbucks §3.2; RetroMAE). The inputs of the |S| sizes differ in position 0
only, and the keys and values of one layer are computed position by position. So the sizes share the queries, keys and
values of all other positions: attention over the common keys runs once and keeps its log-sum-exp, and each size's CLS
key is merged exactly. With c = q·k_cls/√h, the CLS position has the share a = sigmoid(c − lse) of the softmax, hence
out = (1 − a)·out_common + a·v_cls. Queries are computed for masked positions only, because no other output is read.

The layer has BERT's form (attention, residual, norm, feed-forward, residual, norm). With a BERT-like backbone it starts
as a copy of the backbone's first layer. With other families (ModernBERT's rotary, pre-norm layer) it starts from random
weights, with its own position vectors if the backbone's embeddings have none. It is discarded after pre-training.

Enhanced decoding (RetroMAE; SentMAE eq. 4 to 7) uses the same layer with two streams. Queries are [cls_{n,d} + p_i];
keys and values are [cls_{n,d}, e(x)_1, ..., e(x)_L] with no token masked, and each row i reads its own sample of them
(models/visibility.py). The sizes again share the keys and values of all positions but 0. The projection of queries is
affine, so a query is the sum of a part for its text and size and a part for its position; no product is needed for each
(text, position). Attention is PyTorch's fused kernel, one size at a time, recomputed in the backward pass.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from models.backbone import encoder_layers
from models.encoder import float32_einsum

log = logging.getLogger(__name__)

# Module of the decoder -> its path in the backbone's first layer: BERT and RoBERTa, then DistilBERT.
_FIRST_LAYER_PATHS = (
    {
        "query": "attention.self.query",
        "key": "attention.self.key",
        "value": "attention.self.value",
        "attention_output": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "output_norm": "output.LayerNorm",
    },
    {
        "query": "attention.q_lin",
        "key": "attention.k_lin",
        "value": "attention.v_lin",
        "attention_output": "attention.out_lin",
        "attention_norm": "sa_layer_norm",
        "up": "ffn.lin1",
        "down": "ffn.lin2",
        "output_norm": "output_layer_norm",
    },
)


class MultiSizeDecoder(nn.Module):
    """One decoder layer for the CLS vectors of all sizes at once."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        config = backbone.config
        hidden = int(config.hidden_size)
        inner = int(_first(config, "intermediate_size", "hidden_dim"))
        self.num_heads = int(config.num_attention_heads)
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.attention_output = nn.Linear(hidden, hidden)
        eps = float(_first(config, "layer_norm_eps", "norm_eps", default=1e-12))
        self.attention_norm = nn.LayerNorm(hidden, eps=eps)
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)
        self.output_norm = nn.LayerNorm(hidden, eps=eps)
        self.activation = ACT2FN[_first(config, "hidden_act", "activation", "hidden_activation", default="gelu")]
        self.dropout = float(_first(config, "hidden_dropout_prob", "dropout", "mlp_dropout", default=0.0))
        self.attention_dropout = float(
            _first(config, "attention_probs_dropout_prob", "attention_dropout", default=0.0) or 0.0
        )
        std = float(getattr(config, "initializer_range", 0.02))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
                nn.init.zeros_(module.bias)
        has_positions = any("position_embeddings" in name for name, _ in backbone.named_parameters())
        self.positions: nn.Embedding | None = None
        if not has_positions:
            self.positions = nn.Embedding(int(config.max_position_embeddings), hidden)
            nn.init.normal_(self.positions.weight, std=std)
        if not self._copy_first_layer(encoder_layers(backbone)[0]):
            log.info("%s layers are not BERT-like: the decoder starts from fresh weights", type(backbone).__name__)

    def _copy_first_layer(self, layer: nn.Module) -> bool:
        modules: dict[str, Any] = dict(layer.named_modules())
        for paths in _FIRST_LAYER_PATHS:
            if all(path in modules for path in paths.values()):
                for name, path in paths.items():
                    getattr(self, name).load_state_dict(modules[path].state_dict())
                return True
        return False

    def forward(
        self,
        embedded: Tensor,
        attention_mask: Tensor,
        cls: Tensor,
        wanted: Tensor,
        *,
        visible: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Outputs at the wanted positions, for every size.

        embedded: [B, L, D], the decoder's input embeddings; position 0 is not used.
        attention_mask: [B, L], 1 for tokens. cls: [S, B, D], each size's vector for position 0.
        wanted: bool [B, L], the positions to predict; never position 0.
        visible: bool [B, L, L], the columns that each row reads (never padding), for enhanced decoding; None: basic
        decoding. positions: [L, D], the backbone's position vectors, for enhanced decoding; None if it has none.
        Returns [S, M, D], M = wanted.sum(), in row-major order of `wanted`.
        """
        if self.positions is not None:
            positions = self.positions.weight[: embedded.shape[1]]
            embedded = embedded + positions
        if visible is None:
            rows, asked = self._basic(embedded, attention_mask, cls, wanted)
        else:
            assert positions is not None, "enhanced decoding asks by position vectors"
            rows, asked = self._enhanced(embedded, cls, wanted, visible, positions)
        attended = F.dropout(self.attention_output(rows), self.dropout, self.training)
        states = self.attention_norm(attended + asked)
        # These are the widest tensors of the step outside the encoder. Recomputing them costs one more product of `up`.
        inner = checkpoint(self._feed_forward, states, use_reentrant=False)
        return self.output_norm(F.dropout(inner, self.dropout, self.training) + states)

    def _basic(self, embedded: Tensor, attention_mask: Tensor, cls: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """(attention outputs [S, M, D], inputs of the queries [M, D]) of the wanted positions."""
        batch, _, hidden = embedded.shape
        # The masked positions of each text, padded to the largest count.  [B, m]
        counts = wanted.sum(1)
        most = max(int(counts.max()), 1)
        slots = torch.argsort(wanted.to(torch.int8), dim=1, descending=True, stable=True)[:, :most]
        filled = torch.arange(most, device=wanted.device)[None] < counts[:, None]
        asked = embedded.gather(1, slots[..., None].expand(-1, -1, hidden))  # [B, m, D]

        query = self._split(self.query(asked))  # [B, h, m, D/h]
        key = self._split(self.key(embedded))  # [B, h, L, D/h]
        value = self._split(self.value(embedded))
        scale = 1.0 / math.sqrt(hidden // self.num_heads)
        hidden_keys = attention_mask.to(torch.bool).logical_not()
        hidden_keys[:, 0] = True  # position 0 differs between sizes and is merged below
        scores = (query @ key.transpose(-1, -2)).float() * scale  # [B, h, m, L]
        scores = scores.masked_fill(hidden_keys[:, None, None, :], torch.finfo(torch.float32).min)
        log_sum = scores.logsumexp(-1)  # [B, h, m]
        shares = F.dropout((scores - log_sum[..., None]).exp(), self.attention_dropout, self.training)
        common = shares.to(value.dtype) @ value  # [B, h, m, D/h]

        cls_key = self._split(self.key(cls)).transpose(1, 2)  # [S, B, h, D/h]
        cls_value = self._split(self.value(cls)).transpose(1, 2)
        # [S, B, h, m]: how strongly each query attends to this size's CLS.
        cls_scores = float32_einsum("bhmk,sbhk->sbhm", query, cls_key) * scale
        cls_share = torch.sigmoid(cls_scores - log_sum)[..., None]  # [S, B, h, m, 1]
        kept = F.dropout(cls_share, self.attention_dropout, self.training)
        merged = (1.0 - cls_share) * common + kept * cls_value[:, :, :, None, :]  # [S, B, h, m, D/h]
        merged = merged.to(value.dtype).transpose(2, 3).reshape(cls.shape[0], batch, most, hidden)

        return merged[:, filled], asked[filled]

    def _enhanced(
        self, embedded: Tensor, cls: Tensor, wanted: Tensor, visible: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(attention outputs, inputs of the queries) of the wanted positions, both [S, M, D]."""
        num_sizes, batch, hidden = cls.shape
        text, place = wanted.nonzero(as_tuple=True)  # [M]
        asked = cls[:, text] + positions[place]
        # Position 0 predicts nothing, and its row might see no column at all, so queries are those of 1..L-1.
        # W(h + p) + b = (W h + b) + (W p + b) - (W 0 + b).
        parts = self.query(torch.cat([cls.flatten(0, 1), positions[1:], positions.new_zeros(1, hidden)]))
        of_texts = parts[: num_sizes * batch].view(num_sizes, batch, 1, hidden)
        query = of_texts + (parts[num_sizes * batch : -1] - parts[-1])  # [S, B, L - 1, D]
        key, value = self.key(embedded[:, 1:]), self.value(embedded[:, 1:])  # [B, L - 1, D]
        cls_key, cls_value = self.key(cls), self.value(cls)  # [S, B, D]
        rows = visible[:, None, 1:]  # [B, 1, L - 1, L]
        text_rows = wanted[:, 1:]
        attended = [
            checkpoint(
                self._attend, query[size], cls_key[size], key, cls_value[size], value, rows, use_reentrant=False
            )[text_rows]
            for size in range(num_sizes)
        ]
        return torch.stack(attended), asked

    def _attend(
        self, query: Tensor, cls_key: Tensor, key: Tensor, cls_value: Tensor, value: Tensor, visible: Tensor
    ) -> Tensor:
        """Attention of one size: [B, L - 1, D]; visible: bool [B, 1, L - 1, L]."""
        keys = torch.cat([cls_key[:, None], key], dim=1)
        values = torch.cat([cls_value[:, None], value], dim=1)
        mixed = F.scaled_dot_product_attention(
            self._split(query),
            self._split(keys),
            self._split(values),
            attn_mask=visible,
            dropout_p=self.attention_dropout if self.training else 0.0,
        )
        return mixed.transpose(1, 2).reshape(query.shape)

    def _feed_forward(self, states: Tensor) -> Tensor:
        return self.down(self.activation(self.up(states)))

    def _split(self, states: Tensor) -> Tensor:
        """[B, n, D] -> [B, heads, n, D / heads]."""
        first, second, hidden = states.shape
        return states.view(first, second, self.num_heads, hidden // self.num_heads).transpose(1, 2)


def _first(config: Any, *names: str, default: Any = None) -> Any:
    """The first setting that the configuration has: families name the same setting differently."""
    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return value
    return default
