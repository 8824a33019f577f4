"""What a token of a decoder reads: the tokens before it (causal), or all of them (bidirectional).

transformers reads this from a model's configuration, under one of two keys: `is_causal`, for every family that makes
its masks by `create_causal_mask`, and Gemma 3's own switch `use_bidirectional_attention`, which halves the windows of
its sliding layers as well. The configuration is saved with a model, so that plain transformers (5.2 and later) computes
the same from a folder. Whether a model does what its configuration says is tried out when it is loaded, because
transformers ignores both keys in some families without a word.
"""

from __future__ import annotations

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, PretrainedConfig, PreTrainedModel

from models.backbone import some_tokens
from models.choices import Direction
from models.sizes import ModelError

_SWITCH = "use_bidirectional_attention"
# Rounding changes a state by about 1e-6 of its length; another token changes it by 1e-2, even in untrained models.
_CHANGED = 1e-4


def is_decoder(config: PretrainedConfig) -> bool:
    """Whether it is of a decoder of texts alone: a causal language model, and neither an encoder nor a part of one.

    Models with a configuration for each of several parts also read images or sounds.
    """
    masked, causal, alone = (
        auto._model_mapping.get(type(config), None) is not None
        for auto in (AutoModelForMaskedLM, AutoModelForCausalLM, AutoModel)
    )
    has_parts = getattr(config, "is_encoder_decoder", False) or bool(config.sub_configs)
    return causal and alone and not masked and not has_parts


def said_by(config: PretrainedConfig) -> Direction:
    """The direction in which transformers runs a decoder with this configuration; causal if it says nothing."""
    switched = _has_switch(config) and getattr(config, _SWITCH)
    return "bidirectional" if switched or not getattr(config, "is_causal", True) else "causal"


def with_direction(config: PretrainedConfig, direction: Direction) -> PretrainedConfig:
    """The configuration of a decoder that reads in this direction."""
    if said_by(config) == direction:
        return config
    if _has_switch(config):
        # The windows follow from the switch when a configuration is made.
        config = type(config).from_dict({**config.to_dict(), _SWITCH: direction == "bidirectional"})
    if said_by(config) != direction:
        config.is_causal = direction == "causal"
    return config


def _has_switch(config: PretrainedConfig) -> bool:
    """Whether the switch is a plain one. Where it is unset at first, as in Gemma 2, masks are made without it."""
    return isinstance(getattr(type(config), _SWITCH, None), bool)


@torch.no_grad()
def looks_ahead(backbone: PreTrainedModel) -> bool:
    """Whether a later token changes the state of an earlier one. The backbone is in eval mode and in float32."""
    first = some_tokens(backbone.config)
    other = first.clone()
    other[-2:] = first[:2]
    states = backbone(input_ids=torch.stack([first, other]).to(backbone.device)).last_hidden_state[:, :-2]
    return bool((states[0] - states[1]).norm() > _CHANGED * states[0].norm())


def check_direction(backbone: PreTrainedModel, thing: str) -> None:
    """Refuse a decoder that does not read in the direction that its configuration says."""
    said = said_by(backbone.config)
    measured = "bidirectional" if looks_ahead(backbone) else "causal"
    if measured != said:
        raise ModelError(
            f"{thing} is to be {said}, and in transformers {type(backbone).__name__} is {measured} whatever its "
            f'configuration says; choose a model of another family, or the direction "{measured}"'
        )
