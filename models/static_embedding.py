"""A token table as an encoder: a text's embedding is the mean of its tokens' rows.

It is a Hugging Face model with the type `static`, so that loading, saving, checkpoints and exports handle one kind of
folder. It has one layer, and its sizes are prefixes of the table's columns. Texts are flat, all tokens in one tensor
with offsets: a table needs no padding, and `EmbeddingBag` computes means without a [tokens, dim] tensor. The model
ignores special tokens, because sentence-transformers' StaticEmbedding tokenizes without them. The embedding of a text
without tokens is all zeros.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

from models.sizes import ModelError

MODEL_TYPE = "static"
_FEW_SPECIALS = 16  # that are compared one by one, which for five takes a sixth of the time of torch.isin


class StaticConfig(PretrainedConfig):
    """`special_ids`: tokens to ignore. `initializer_range`: standard deviation of untrained rows."""

    model_type = MODEL_TYPE

    def __init__(
        self,
        vocab_size: int = 30522,
        hidden_size: int = 1024,
        initializer_range: float = 1.0,
        special_ids: Sequence[int] = (),
        **rest: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.initializer_range = initializer_range
        self.special_ids = list(special_ids)
        self.num_hidden_layers = 1
        super().__init__(**rest)


class StaticModel(PreTrainedModel):
    """The token table. Its only tensor is `embedding.weight` in files, the name that sentence-transformers uses."""

    config_class = StaticConfig
    config: StaticConfig
    base_model_prefix = "static"
    main_input_name = "input_ids"

    def __init__(self, config: StaticConfig) -> None:
        super().__init__(config)
        self.embedding = nn.EmbeddingBag(config.vocab_size, config.hidden_size, mode="mean")
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.EmbeddingBag):
            nn.init.normal_(module.weight, std=self.config.initializer_range)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor, offsets: Tensor) -> Tensor:
        """The means of n flat texts: input_ids [T], offsets int64 [n + 1] -> [n, hidden]."""
        tokens, offsets = self._without_specials(input_ids, offsets)
        return self.embedding(tokens, offsets[:-1])

    def _without_specials(self, tokens: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        if not self.config.special_ids:
            return tokens, offsets
        if len(self.config.special_ids) > _FEW_SPECIALS:
            kept = torch.isin(tokens, tokens.new_tensor(self.config.special_ids), invert=True)
        else:
            kept = torch.ones_like(tokens, dtype=torch.bool)
            for special in self.config.special_ids:
                kept &= tokens != special
        before = torch.cat([offsets.new_zeros(1), kept.cumsum(0)])
        return tokens[kept], before[offsets]


def cut_table(model: StaticModel, dim: int) -> StaticModel:
    """A copy of the table with the first `dim` columns only."""
    config = copy.deepcopy(model.config)
    config.hidden_size = dim
    cut = StaticModel(config)
    with torch.no_grad():
        cut.embedding.weight.copy_(model.embedding.weight[:, :dim])
    return cut


def build_static(config: Mapping[str, Any], *, vocab_size: int, special_ids: Sequence[int]) -> StaticModel:
    """An untrained table. `config`: model_type = "static", hidden_size, and initializer_range (default 1)."""
    values = {key: value for key, value in config.items() if key != "model_type"}
    if unknown := sorted(set(values) - {"hidden_size", "initializer_range"}):
        raise ModelError(
            f"model.config.{unknown[0]} is not a setting of 'static' encoders, which have hidden_size and "
            "initializer_range; remove it"
        )
    if not (isinstance(values.get("hidden_size", 1), int) and values.get("hidden_size", 1) >= 1):
        raise ModelError(f"model.config.hidden_size = {values['hidden_size']!r} must be a whole number above 0")
    return StaticModel(StaticConfig(vocab_size=vocab_size, special_ids=special_ids, **values))


AutoConfig.register(MODEL_TYPE, StaticConfig)
AutoModel.register(StaticConfig, StaticModel)
