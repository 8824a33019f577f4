"""Training a part of an encoder: frozen lower layers, and low-rank adapters (LoRA, Hu et al. 2021, §4.1).

An adapter leaves W unchanged and trains A [r, in] and B [out, r] with y = W x + α/r · B A x. `peft` inserts adapters
into the backbone's modules, so the encoder runs as before. A run's result is an ordinary model with W + α/r · B A in
place of W, which can be read without peft, and the adapter itself in peft's format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.backbone import encoder_layers, final_norm
from models.sizes import ModelError

if TYPE_CHECKING:
    from peft import PeftModel

_NAME = "default"  # peft's name of a model's only adapter


# The default covers a layer's attention and feed-forward if linear layers hold most of its weights.
_MOST_WEIGHTS = 0.5


def freeze_lower_layers(backbone: PreTrainedModel, num_layers: int) -> None:
    """Freeze the first `num_layers` layers and all that is not of a layer: tables of tokens, positions and segments,
    their norm, and what all layers share, such as relative positions. 0: freeze nothing, not even the embeddings.

    The norm after the last layer trains.
    """
    if num_layers == 0:
        return
    trained = [*encoder_layers(backbone)[num_layers:], final_norm(backbone)]
    kept = {id(parameter) for part in trained if part is not None for parameter in part.parameters()}
    for parameter in backbone.parameters():
        parameter.requires_grad_(parameter.requires_grad and id(parameter) in kept)


def add_adapters(
    backbone: PreTrainedModel,
    *,
    rank: int,
    alpha: float,
    dropout: float,
    targets: Sequence[str],
    first_layer: int = 0,
) -> PeftModel:
    """Insert trainable adapters into the backbone, in place, and freeze everything else; returns peft's wrapper of it.

    `targets`: name endings of linear layers ("query", "output.dense"); empty: all linear layers in the transformer
    blocks, which are the projections of attention and of the feed-forward. Layers below `first_layer` get no adapters.

    Raises:
        ModelError: a target is the name of no linear layer; or there are no targets, and most weights of the blocks are
            in no linear layer, so that the default would leave out attention or the feed-forward.

    """
    try:
        from peft import LoraConfig, TaskType, get_peft_model
    except ImportError:
        raise ModelError(
            f"model.lora_rank = {rank} needs the package peft; install it with `python -m pip install 'peft>=0.18'`"
        ) from None
    blocks = encoder_layers(backbone)
    inside = {id(module) for block in blocks[first_layer:] for module in block.modules()}
    linear = [name for name, m in backbone.named_modules() if isinstance(m, nn.Linear) and id(m) in inside]
    if not targets:
        _check_default(backbone, blocks[-1])
    for target in targets:
        if not any(_ends_with(name, target) for name in linear):
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise ModelError(
                f"model.lora_targets names {target!r}, and no linear layer of {type(backbone).__name__} is called "
                f"that; they are {', '.join(known)}"
            )
    chosen = [name for name in linear if not targets or any(_ends_with(name, target) for target in targets)]
    adapter = get_peft_model(
        backbone,
        LoraConfig(
            task_type=TaskType.FEATURE_EXTRACTION,
            r=rank,
            lora_alpha=alpha,  # type: ignore[arg-type]  # any number will do
            lora_dropout=dropout,
            target_modules=chosen,
        ),
    )
    adapted = {name.partition(".lora_A.")[0] for name, _ in backbone.named_parameters() if ".lora_A." in name}
    assert adapted == set(chosen), f"peft adapted {sorted(adapted ^ set(chosen))} differently"
    return adapter


def _check_default(backbone: PreTrainedModel, block: nn.Module) -> None:
    """Refuse a family whose attention or feed-forward is made of something else than linear layers.

    Such are the experts of a mixture, whose matrices are one parameter, and GPT-2's layers of transposed weights.
    """
    adapted = {id(module.weight) for module in block.modules() if isinstance(module, nn.Linear)}
    others = {name: each.numel() for name, each in block.named_parameters() if id(each) not in adapted}
    if sum(others.values()) > _MOST_WEIGHTS * sum(each.numel() for each in block.parameters()):
        raise ModelError(
            f"model.lora_targets is empty, and most weights of a layer of {type(backbone).__name__}, such as "
            f"{max(others, key=lambda name: others[name])}, are in no linear layer and would get no adapter; name "
            "linear layers that should get one, or train the weights (model.lora_rank = 0)"
        )


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def merged_tensors(backbone: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the backbone without adapters: W + α/r · B A under W's original name.

    `tensors`: complete values, by the adapted backbone's names of parameters and buffers.
    """
    merged = {}
    for name, value in tensors.items():
        if ".lora_" in name:
            continue
        path, is_adapted, kind = name.partition(".base_layer.")
        if is_adapted and kind == "weight":
            value = value + _change(backbone, tensors, path)
        merged[f"{path}.{kind}" if is_adapted else name] = value
    return merged


def _change(backbone: PreTrainedModel, tensors: Mapping[str, Tensor], path: str) -> Tensor:
    """α/r · B A of the adapter at the linear layer `path`: [out, in]."""
    down = tensors[f"{path}.lora_A.{_NAME}.weight"]  # [r, in]
    up = tensors[f"{path}.lora_B.{_NAME}.weight"]  # [out, r]
    return (up @ down) * backbone.get_submodule(path).scaling[_NAME]  # type: ignore[index,operator]


def merged_change(backbone: PreTrainedModel, tensors: Mapping[str, Tensor]) -> tuple[int, float]:
    """The number of adapted weights W, and ‖ΔW‖ / ‖W‖ over all of them together, in Frobenius norms.

    `tensors`: as for `merged_tensors`. A change of 0 means that the adapters have learnt nothing.
    """
    adapted = [name.removesuffix(".base_layer.weight") for name in tensors if name.endswith(".base_layer.weight")]
    changes = torch.stack([_change(backbone, tensors, path).double().norm() for path in adapted])
    weights = torch.stack([tensors[f"{path}.base_layer.weight"].double().norm() for path in adapted])
    return len(adapted), float(changes.norm() / weights.norm())


def save_adapter(adapter: PeftModel, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write the adapter alone, in peft's format: `PeftModel.from_pretrained(encoder, folder)` reads it.

    `tensors`: as for `merged_tensors`.
    """
    prefixed = {f"base_model.model.{name}": value for name, value in tensors.items()}
    # Adapters are on linear layers only, so peft need not ask the hub whether the vocabulary has grown.
    adapter.save_pretrained(str(folder), state_dict=prefixed, save_embedding_layers=False)
