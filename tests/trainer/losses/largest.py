"""The largest tensor that is made, for losses whose memory does not grow with the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """`elements`: the most elements of any tensor that an operation makes inside the context."""

    elements = 0

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):  # not the parts of a split, which are views
            self.elements = max(self.elements, made.numel())
        return made
