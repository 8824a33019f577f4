"""Economy of the last layer: its feed-forward runs only for the tokens that will be read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# BERT's form of a feed-forward: two modules, of which the second adds what came into the first. Families that are not
# named may do more between them.
_TWO_PARTS = ("bert", "roberta", "xlm-roberta", "camembert", "electra")
_ATTENTIONS = ("attention", "self_attn", "attn")
# Runs of this family were begun without this economy, and would go on with other last digits.
_WHOLE = ("modernbert",)


class ReadRows:
    """Hooks that run the last layer's feed-forward only for the positions that will be read.

    Nothing attends to the last layer's output, so its feed-forward, two thirds of the layer's products, is needed only
    at positions that a loss or the pooling reads: masked positions, and the first or the last one. `read_positions`
    (bool [batch, seq]) is passed as a keyword through the backbone to the layer's attention. It is read there, because
    activation checkpointing repeats what is inside of a layer, so each pass has its own positions again, also where
    several passes come before their backward passes. A call without it computes all positions.
    """

    KEYWORD = "read_positions"

    def __init__(self, attention: nn.Module, first: nn.Module, last: nn.Module) -> None:
        """first, last: the parts of the layer's feed-forward, or twice the module that is all of it."""
        self.read: Tensor | None = None
        self.shape = torch.Size()
        attention.register_forward_pre_hook(self._before_attention, with_kwargs=True)
        first.register_forward_pre_hook(self._before_first)
        if first is not last:
            last.register_forward_pre_hook(self._before_last)
        last.register_forward_hook(self._after_last)

    @classmethod
    def of(cls, layer: nn.Module, family: str) -> ReadRows | None:
        """Attached to a layer; None if the layer's feed-forward is of another form."""
        parts = dict(layer.named_children())
        attention = next((parts[name] for name in _ATTENTIONS if name in parts), None)
        if attention is None or family in _WHOLE:
            return None
        if family in _TWO_PARTS:
            return cls(attention, parts["intermediate"], parts["output"])
        # What is added to the output of an `mlp` is computed outside of it, so its other rows may be zeros.
        if "mlp" in parts and _is_token_by_token(parts["mlp"]):
            return cls(attention, parts["mlp"], parts["mlp"])
        return None

    def _before_attention(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.read = kwargs.get(self.KEYWORD)

    def _before_first(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        self.shape = args[0].shape  # [batch, seq, hidden]
        return args if self.read is None else (args[0][self.read],)

    def _before_last(self, module: nn.Module, args: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return args if self.read is None else (args[0], args[1][self.read])

    def _after_last(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if self.read is None:
            return output
        return output.new_zeros(self.shape).masked_scatter(self.read[..., None], output)


def _is_token_by_token(module: nn.Module) -> bool:
    """Whether it is linear layers, activations and dropout, and no choice among experts."""
    leaves = [each for each in module.modules() if not any(True for _ in each.children())]
    plain = all(isinstance(each, nn.Linear) or not any(True for _ in each.parameters()) for each in leaves)
    return plain and not any(isinstance(each, nn.ModuleList) for each in module.modules())
