"""What transformers says of a backbone: its layers, its final norm, its positions, and what cutting layers changes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from models.read_rows import ReadRows
from models.sizes import ModelError

# A norm of these names beside or above the list of layers is the last thing that a backbone computes. Other norms stand
# there, too: DeBERTa's "LayerNorm" is that of its relative positions. So names decide, and `check_cuts` tries them.
_FINAL_NORM_NAMES = ("norm", "final_norm", "final_layer_norm", "final_layernorm", "ln_f", "norm_f")
_TRIED_TOKENS = 6


def encoder_layers(backbone: PreTrainedModel) -> nn.ModuleList:
    """The backbone's list of transformer layers, whose name differs between families."""
    found = _layer_list(backbone)
    if found is None:
        raise ModelError(
            f"{type(backbone).__name__} has no list of its {backbone.config.num_hidden_layers} layers; use a model of "
            "the BERT, RoBERTa, DistilBERT, ModernBERT, Qwen, Llama or Gemma kind"
        )
    return found[1]


def _layer_list(backbone: PreTrainedModel) -> tuple[str, nn.ModuleList] | None:
    """The path and the list of the layers; None where they are in no list of their own, as ALBERT's shared ones."""
    wanted = int(backbone.config.num_hidden_layers)
    for name, module in backbone.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return name, module
    return None


def final_norm(backbone: PreTrainedModel) -> nn.Module | None:
    """The norm after the last layer, which stands beside the list of layers or in a module around it."""
    path = (_layer_list(backbone) or ("", None))[0]
    while path:
        path = path.rpartition(".")[0]
        around = backbone.get_submodule(path)
        for name in _FINAL_NORM_NAMES:
            if isinstance(norm := getattr(around, name, None), nn.Module):
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


def most_tokens(backbone: PreTrainedModel) -> int | None:
    """The longest text in tokens that the backbone was made for, special tokens included; None if nothing says it.

    Where positions are computed, this is the length that the configuration names.
    """
    return longest_input(backbone) or getattr(backbone.config, "max_position_embeddings", None)


def takes(backbone: nn.Module, argument: str) -> bool:
    """Whether the backbone's forward has an argument of this name."""
    return argument in inspect.signature(type(backbone).forward).parameters


def truncate_layers(backbone: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """Cut the backbone to its first layers, in place, and set the count in its config."""
    have = int(backbone.config.num_hidden_layers)
    if not 1 <= num_layers <= have:
        raise ModelError(f"cannot keep {num_layers} layers of an encoder that has {have}; choose 1 to {have}")
    layers = encoder_layers(backbone)
    del layers[num_layers:]
    for name, value in cut_values(backbone.config, num_layers).items():
        setattr(backbone.config, name, value)
    let_last_layer_skip(backbone)
    return backbone


def cut_values(config: PretrainedConfig, num_layers: int) -> dict[str, Any]:
    """The values of a configuration that change when the model is cut to its first `num_layers` layers.

    Lists with an entry for each layer (ModernBERT's and Gemma's layer_types, SmolLM's no_rope_layers) are cut, because
    a list of the old length could not be loaded. max_window_layers (Qwen) is the first layer with a window.
    """
    have = int(config.num_hidden_layers)
    values: dict[str, Any] = {"num_hidden_layers": num_layers}
    for name, value in vars(config).items():
        if "layer" in name and isinstance(value, list | tuple) and len(value) == have:
            values[name] = list(value)[:num_layers]
    if isinstance(first := getattr(config, "max_window_layers", None), int):
        values["max_window_layers"] = min(first, num_layers)
    return values


@torch.no_grad()
def check_cuts(backbone: PreTrainedModel, thing: str) -> None:
    """Refuse a model whose state after its last layer but one is not what a model without the last layer returns.

    It is tried with a few tokens. What else a family may compute after its layers would be missing at every smaller
    size. Models of one layer have no smaller size, and layers that are in no list cannot be cut.
    """
    count = int(backbone.config.num_hidden_layers)
    if count < 2 or _layer_list(backbone) is None:
        return
    layers, norm = encoder_layers(backbone), final_norm(backbone)
    tokens = some_tokens(backbone.config)[None, : longest_input(backbone)]
    state = backbone(input_ids=tokens, output_hidden_states=True).hidden_states[count - 1]
    state = state if norm is None else norm(state)
    whole = {name: getattr(backbone.config, name) for name in cut_values(backbone.config, count - 1)}
    last = layers.pop(-1)
    try:
        for name, value in cut_values(backbone.config, count - 1).items():
            setattr(backbone.config, name, value)
        cut = backbone(input_ids=tokens).last_hidden_state
    finally:
        layers.append(last)
        for name, value in whole.items():
            setattr(backbone.config, name, value)
    # Weights far from any trained model's may overflow; such a model is no better understood.
    if cut.isfinite().all() and not torch.allclose(state, cut, rtol=1e-3, atol=1e-3 * float(cut.abs().max())):
        raise ModelError(
            f"{thing}: {type(backbone).__name__} computes something after its layers that this program does not know, "
            "so it cannot be cut to fewer layers; choose a model of another family"
        )


def some_tokens(config: PretrainedConfig) -> Tensor:
    """A few ids, int64 [6]. They are from the middle of the vocabulary, where no family keeps its special tokens."""
    return (torch.arange(_TRIED_TOKENS) + int(config.vocab_size) // 2) % int(config.vocab_size)


def set_dropout(backbone: PreTrainedModel, probability: float) -> None:
    """Set the probability of every dropout of the backbone, also in its config; below 0: change nothing."""
    if probability < 0:
        return
    for module in backbone.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability
        # The attention of some families (ModernBERT, decoders) keeps its own probability.
        for name in ("attention_dropout", "dropout_prob"):
            if _is_number(getattr(module, name, None)):
                setattr(module, name, probability)
    for name, value in backbone.config.to_dict().items():
        if ("dropout" in name or name.endswith("pdrop")) and _is_number(value):
            setattr(backbone.config, name, probability)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def let_last_layer_skip(backbone: PreTrainedModel) -> bool:
    """Attach ReadRows to the last layer, once; False for families whose layers have another structure."""
    # These families hand unknown keywords on to their layers and attention.
    if not getattr(type(backbone), "_supports_attention_backend", False) or _layer_list(backbone) is None:
        return False
    layer: Any = encoder_layers(backbone)[-1]
    if hasattr(layer, "read_rows"):
        return True
    found = ReadRows.of(layer, backbone.config.model_type)
    if found is not None:
        layer.read_rows = found
    return found is not None
