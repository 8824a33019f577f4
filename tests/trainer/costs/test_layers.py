"""What a layer keeps, moves and launches, against transformers' layers with an attention that is fused as on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AutoModel, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from tests.trainer.costs.families import FAMILIES, config_of, ids_of
from trainer.costs.layers import kept_by_a_norm, kept_bytes, kernels, moved_elements
from trainer.costs.shapes import Shape

NAME = "fused stand-in"
TEXTS, LENGTH = 2, 30
TOKENS = TEXTS * LENGTH
# MPNet attends in its own code.
FUSED = [name for name in FAMILIES if name != "mpnet"]
DECODERS = ("qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text", "phi3", "eurobert")


class _Attention(torch.autograd.Function):
    """Keeps what a fused attention keeps, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed = query.new_empty(query.shape[0], query.shape[2], query.shape[1], query.shape[3])
        ctx.save_for_backward(query, key, value, mixed)
        return mixed


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    return _Attention.apply(query, key, value), None


@pytest.fixture(autouse=True)
def fused() -> Iterator[None]:
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, lambda **_: None)
    yield
    for each in (AttentionInterface, AttentionMaskInterface):
        each._global_mapping.pop(NAME, None)


def model_of(name: str, layers: int, dtype: torch.dtype) -> PreTrainedModel:
    """Without dropout; two layers with the last one's kind, and more."""
    config = config_of(name)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = list(config.layer_types)[:1] * layers
    model: PreTrainedModel = AutoModel.from_config(config, attn_implementation=NAME, dtype=dtype)
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model.eval()


def kept_by(model: PreTrainedModel) -> float:
    """Bytes that autograd keeps, each storage once, weights left out."""
    kept: dict[int, Tensor] = {}
    with saved_tensors_hooks(lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t) is None or t, lambda t: t):
        out = model(ids_of(TEXTS, LENGTH))
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    assert out.last_hidden_state.requires_grad
    return float(sum(each.untyped_storage().nbytes() for each in kept.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", FUSED)
def test_what_a_layer_keeps_is_as_counted(name: str, dtype: torch.dtype) -> None:
    """Of two layers more; and what is kept outside the layers."""
    two, four = (kept_by(model_of(name, layers, dtype)) for layers in (2, 4))
    shape, width = Shape.of(config_of(name)), float(dtype.itemsize)
    layer = TOKENS * kept_bytes(shape, width=width, drops=False)
    print(f"{name} {dtype}: kept ÷ predicted {(four - two) / 2 / layer:.3f}")
    assert 0.98 < (four - two) / 2 / layer < 1.02
    outside = TOKENS * (2 * shape.hidden * width + kept_by_a_norm(shape, width=width) * shape.vectors.final_norm)
    assert 0.8 < four / (4 * layer + outside) < 1.1


class _Count(TorchDispatchMode):
    """Kernels that run, and the bytes that those beside products read and write."""

    PRODUCTS = ("mm", "addmm", "bmm", "linear")

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in torch.utils._pytree.tree_leaves(out) if isinstance(each, Tensor)]
        storages = {each.untyped_storage().data_ptr() for each in given}
        new = [each for each in made if each.untyped_storage().data_ptr() not in storages]
        if not new:  # a view
            return out
        self.kernels += 1
        name = func.overloadpacket.__name__
        if name not in self.PRODUCTS and not name.startswith(("empty", "new_empty")):
            self.bytes += sum(each.nbytes for each in (*given, *new))
        return out


@pytest.mark.parametrize("name", DECODERS)
def test_what_a_layer_moves_and_launches_is_as_counted(name: str) -> None:
    counts = []
    for layers in (2, 4):
        model = model_of(name, layers, torch.bfloat16)
        with torch.no_grad(), _Count() as count:
            model(ids_of(TEXTS, LENGTH))
        counts.append(count)
    shape = Shape.of(config_of(name))
    moved = (counts[1].bytes - counts[0].bytes) / 2 / TOKENS / 2  # elements of 2 bytes, a layer and token
    launched = (counts[1].kernels - counts[0].kernels) / 2
    print(f"{name}: moved ÷ predicted {moved / moved_elements(shape):.3f}, launched {launched} of {kernels(shape)}")
    assert 0.97 < moved / moved_elements(shape) < 1.08
    assert 0.8 < launched / kernels(shape) < 1.05
