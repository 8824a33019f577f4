"""What transformers says of a backbone: its layers, its final norm, its positions, and what cutting layers changes."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from models.read_rows import ReadRows
from models.sizes import ModelError

_FINAL_NORM_NAMES = ("final_norm", "final_layer_norm", "ln_f")
_READ_FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert", "electra")


def encoder_layers(backbone: PreTrainedModel) -> nn.ModuleList:
    """The backbone's list of transformer layers, whose name differs between families."""
    wanted = int(backbone.config.num_hidden_layers)
    lists = [m for m in backbone.modules() if isinstance(m, nn.ModuleList) and len(m) == wanted]
    if not lists:
        raise ModelError(
            f"{type(backbone).__name__} has no list of its {wanted} layers; use an encoder of the BERT, RoBERTa, "
            "DistilBERT, MiniLM or ModernBERT kind"
        )
    return lists[0]


def final_norm(backbone: nn.Module) -> nn.Module | None:
    for name in _FINAL_NORM_NAMES:
        if isinstance(norm := getattr(backbone, name, None), nn.Module):
            return norm
    return None


def position_table(backbone: nn.Module) -> nn.Embedding | None:
    for name, module in backbone.named_modules():
        if name.rpartition(".")[2] == "position_embeddings" and isinstance(module, nn.Embedding):
            return module
    return None


def longest_input(backbone: nn.Module) -> int | None:
    """The number of tokens that the position table allows; None if positions are computed (rotary)."""
    table = position_table(backbone)
    if table is None:
        return None
    # RoBERTa counts positions from the padding index on.
    return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)


def truncate_layers(backbone: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """Cut the backbone to its first layers, in place, and set the count in its config."""
    have = int(backbone.config.num_hidden_layers)
    if not 1 <= num_layers <= have:
        raise ModelError(f"cannot keep {num_layers} layers of an encoder that has {have}; choose 1 to {have}")
    layers = encoder_layers(backbone)
    del layers[num_layers:]
    backbone.config.num_hidden_layers = num_layers
    let_last_layer_skip(backbone)
    # ModernBERT's config lists the kind of every layer; a list of the old length could not be loaded.
    if getattr(backbone.config, "layer_types", None):
        backbone.config.layer_types = list(backbone.config.layer_types)[:num_layers]
    return backbone


def set_dropout(backbone: PreTrainedModel, probability: float) -> None:
    """Set the probability of every dropout of the backbone, also in its config; below 0: change nothing."""
    if probability < 0:
        return
    for module in backbone.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability
        # The attention of some families (ModernBERT) keeps its own probability.
        for name in ("attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, probability)
    for name, value in backbone.config.to_dict().items():
        if "dropout" in name and isinstance(value, float):
            setattr(backbone.config, name, probability)


def let_last_layer_skip(backbone: PreTrainedModel) -> bool:
    """Attach ReadRows to the last layer, once; False for families whose layers have another structure."""
    if backbone.config.model_type not in _READ_FAMILIES:
        return False
    layer: Any = encoder_layers(backbone)[-1]
    if not hasattr(layer, "read_rows"):
        layer.read_rows = ReadRows(layer)
    return True
