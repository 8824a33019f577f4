"""Linear heads: a map for each depth from its pooled states into the model's embedding space.

The lower layers of a trained encoder contain much of the information of its last layer, but in other coordinates. A
head maps a depth's pooled states into the last layer's space, where every prefix of dimensions is an embedding: that of
size (l, d) is head_l(pool(h_l))[:d]. At a depth without a head, the pooled states are the embedding, with the encoder's
width. Heads are stored beside the weights in `heads.safetensors`, under the names LAYERS.weight and LAYERS.bias.

States that were computed with narrower feed-forwards may have a head of their own, under LAYERSxFRACTION with "_" for
the decimal point, as in 6x0_25.weight. Without one, they go through the head of their depth.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from data.ground.files import refused_by
from models.sizes import Body, ModelError

HEADS_FILE = "heads.safetensors"


def head_key(body: Body) -> str:
    """The name of a body's head: "6", or "6x0_25", because a module's name has no points."""
    return str(body).replace(".", "_")


def body_of_key(key: str) -> Body:
    """The body that a head is named by; ModelError for a name that is none's."""
    return Body.parse(key.replace("_", "."))


def head_of(heads: nn.ModuleDict, body: Body) -> nn.Linear | None:
    """The head of a body: its own, else its depth's; None without either."""
    for key in (head_key(body), str(body.layers)):
        if key in heads:
            return cast(nn.Linear, heads[key])
    return None


def linear_head(weight: Tensor, bias: Tensor) -> nn.Linear:
    """A linear layer with copies of `weight`, float [out, hidden], and `bias`, [out]."""
    head = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    return head


def save_heads(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write `heads.safetensors` into a new folder; writes nothing if there are no heads."""
    if tensors:
        save_file(dict(tensors), folder / HEADS_FILE, metadata={"format": "pt"})


def load_heads(folder: str | Path) -> nn.ModuleDict:
    """The heads beside a model; empty if there are none. Raises ModelError if the file does not hold heads."""
    path = Path(folder) / HEADS_FILE
    if not path.is_file():
        return nn.ModuleDict()
    hint = "export the model again, or copy its folder again"
    with refused_by("safetensors", f"heads file {path}", hint=hint, kind=ModelError):
        tensors = load_file(path)
    heads = {}
    for depth in sorted({name.partition(".")[0] for name in tensors}):
        weight, bias = tensors.pop(f"{depth}.weight", None), tensors.pop(f"{depth}.bias", None)
        if (
            not _names_a_body(depth)
            or weight is None
            or bias is None
            or weight.shape[:1] != bias.shape
            or weight.ndim != 2
        ):
            raise ModelError(f"heads file {path} has no weight and bias that fit each other for {depth!r}; {hint}")
        heads[depth] = linear_head(weight, bias)
    if tensors:
        raise ModelError(f"heads file {path} holds {min(tensors)!r}, which is no part of a head; {hint}")
    return nn.ModuleDict(heads)


def _names_a_body(key: str) -> bool:
    try:
        return head_key(body_of_key(key)) == key
    except ModelError:
        return False


def heads_up_to(heads: nn.ModuleDict, num_layers: int) -> nn.ModuleDict:
    """Copies of the heads for depths up to `num_layers`."""
    chosen = {key: head for key, head in heads.items() if body_of_key(key).layers <= num_layers}
    return nn.ModuleDict({key: copy.deepcopy(head) for key, head in chosen.items()})


def heads_of_narrowed(heads: nn.ModuleDict, fraction: float, num_layers: int) -> nn.ModuleDict:
    """Copies of the heads for depths up to `num_layers`, of a model that is cut to a fraction and is then whole."""
    found = {str(layers): head_of(heads, Body(layers, fraction)) for layers in range(1, num_layers + 1)}
    return nn.ModuleDict({key: copy.deepcopy(head) for key, head in found.items() if head is not None})


def embedding_size(heads: nn.ModuleDict, *, hidden_size: int) -> int:
    """The width of the space that heads map into; without heads, the encoder's width."""
    outs = _widths(heads.values())
    return outs.pop() if outs else hidden_size


def check_heads(heads: nn.ModuleDict, *, num_layers: int, hidden_size: int, thing: str) -> None:
    """Raise ModelError if heads do not fit the encoder or do not map into one space."""
    for key, head in heads.items():
        depth = body_of_key(key).layers
        if not 1 <= depth <= num_layers:
            raise ModelError(f"{thing} has a head for {depth} layers, and the encoder has {num_layers}; remove it")
        if head.in_features != hidden_size:
            raise ModelError(
                f"{thing} has a head that reads {head.in_features} dimensions, and the encoder has {hidden_size}; "
                "take the heads that belong to these weights"
            )
    if len(outs := _widths(heads.values())) > 1:
        raise ModelError(f"{thing} has heads into spaces of {sorted(outs)} dimensions; all must share one")
    missing = next((depth for depth in range(1, num_layers + 1) if str(depth) not in heads), None)
    if outs and outs != {hidden_size} and missing is not None:
        raise ModelError(
            f"{thing} maps into {outs.pop()} dimensions, and {missing} layers, of {hidden_size}, have no head; "
            "fit heads for all depths"
        )


def _widths(heads: Iterable[nn.Module]) -> set[int]:
    return {int(head.out_features) for head in heads if isinstance(head, nn.Linear)}
