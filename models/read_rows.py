"""Economy of the last layer: its feed-forward runs only for the tokens that will be read."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn


class ReadRows:
    """Hooks that run the last layer's feed-forward only for the positions that will be read.

    Nothing attends to the last layer's output, so its feed-forward, two thirds of the layer's products, is needed only
    at positions that a loss or the pooling reads: masked positions and CLS. `read_positions` (bool [batch, seq]) is
    passed as a keyword through the backbone to its layers, so that activation checkpointing repeats it. A call without
    it computes all positions.
    """

    KEYWORD = "read_positions"

    def __init__(self, layer: nn.Module) -> None:
        self.read: Tensor | None = None
        self.shape = torch.Size()
        intermediate, output = cast(nn.Module, layer.intermediate), cast(nn.Module, layer.output)
        layer.register_forward_pre_hook(self._before_layer, with_kwargs=True)
        intermediate.register_forward_pre_hook(self._before_up)
        output.register_forward_pre_hook(self._before_down)
        output.register_forward_hook(self._after_down)

    def _before_layer(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.read = kwargs.get(self.KEYWORD)

    def _before_up(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        self.shape = args[0].shape  # [batch, seq, hidden]
        return args if self.read is None else (args[0][self.read],)

    def _before_down(self, module: nn.Module, args: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return args if self.read is None else (args[0], args[1][self.read])

    def _after_down(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if self.read is None:
            return output
        return output.new_zeros(self.shape).masked_scatter(self.read[..., None], output)
