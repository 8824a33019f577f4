"""Attention over texts packed one after another, so that nothing is computed on padding.

A batch of texts becomes one row of all their tokens. Linear layers, norms and embeddings work token by token, and
attention, causal or not, keeps the texts apart. This attention is registered with transformers as `packed`, for every
backbone that takes position ids and supports a choice of attention. On CUDA in half precision it is PyTorch's
variable-length flash attention. That kernel cannot drop out attention weights; with such dropout, and on other devices,
each text is computed by itself.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from models.backbone import takes
from models.direction import is_decoder, said_by
from models.sizes import ModelError

log = logging.getLogger(__name__)

NAME = "packed"


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. query: [1, heads, T, width]. Returns [1, T, heads, width].

    key, value: [1, key heads, T, width]; each of their heads serves heads / key heads of the query's. cu_seq_lens_q:
    int32 [texts + 1], the index at which each text begins. is_causal: the configuration's word, where it has one, and
    else the module's, as in transformers.
    """
    assert attention_mask is None and query.shape[0] == 1, "packed texts come in one row, without a mask"
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    groups = query.shape[1] // key.shape[1]
    if query.is_cuda and dropout == 0.0 and query.dtype in (torch.float16, torch.bfloat16):
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))  # [T, heads, width]
        mixed = varlen_attn(
            q,
            k,
            v,
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scaling,
            window_size=(-1, 0) if causal else (-1, -1),
            enable_gqa=groups > 1,
        )
        assert isinstance(mixed, Tensor)
        return mixed[None], None
    # In bf16 on a CPU, PyTorch's fused attention takes twice the time of plain products.
    attend = _plain_attention if query.dtype == torch.bfloat16 and not query.is_cuda else F.scaled_dot_product_attention
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    lengths = cu_seq_lens_q.diff().tolist()
    texts = zip(query.split(lengths, dim=2), key.split(lengths, dim=2), value.split(lengths, dim=2))
    attended = [attend(q, k, v, dropout_p=dropout, scale=scaling, is_causal=causal) for q, k, v in texts]
    return torch.cat(attended, dim=2).transpose(1, 2), None


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return F.dropout(torch.softmax(scores, dim=-1), dropout_p) @ value


def fast_on(device: torch.device, backbone: PreTrainedModel) -> bool:
    """Whether packing is worthwhile: on CUDA, without attention dropout, if the kernel agrees with plain attention."""
    config = backbone.config
    rates = (getattr(config, name, 0.0) for name in ("attention_probs_dropout_prob", "attention_dropout"))
    return (
        device.type == "cuda"
        and not any(rates)
        and why_not_packed(backbone) is None
        and agrees_with_plain(device, backbone)
    )


def agrees_with_plain(device: torch.device, backbone: PreTrainedModel) -> bool:
    """Whether packed attention runs there, and gives what plain attention gives, in bf16.

    It is tried on heads of the backbone's own width and grouping, because the kernel does not take every width.
    """
    config = backbone.config
    generator = torch.Generator(device).manual_seed(0)
    causal = is_decoder(config) and said_by(config) == "causal"
    heads = getattr(config, "num_attention_heads", 1)
    groups = heads // (getattr(config, "num_key_value_heads", None) or heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    q, k, v = (
        torch.randn(1, heads, 48, width, device=device, generator=generator).bfloat16() for heads in (2 * groups, 2, 2)
    )
    offsets = torch.tensor([0, 31, 48], dtype=torch.int32, device=device)
    try:
        packed, _ = packed_attention(backbone, q, k, v, None, cu_seq_lens_q=offsets, max_length_q=31, is_causal=causal)
    except (ImportError, RuntimeError) as error:
        log.warning("variable-length attention does not run on this device (%s): texts are padded", error)
        return False
    k, v = (each.repeat_interleave(groups, dim=1) for each in (k, v))
    texts = (slice(0, 31), slice(31, 48))
    plain = torch.cat(
        [_plain_attention(*(each[:, :, part] for each in (q, k, v)), is_causal=causal) for part in texts], dim=2
    )
    return bool(torch.allclose(packed.transpose(1, 2), plain, atol=2e-2))


def _no_mask(**_: Any) -> None:
    return None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _no_mask)


def packs(backbone: PreTrainedModel) -> bool:
    """Whether texts are packed, that is whether the backbone uses this module's attention."""
    return backbone.config._attn_implementation == NAME


def check_packs(backbone: PreTrainedModel) -> None:
    """Refuse a backbone whose attention or positions would mix packed texts up."""
    if (reason := why_not_packed(backbone)) is not None:
        raise ModelError(f'model.attention = "packed": {type(backbone).__name__} {reason}; use "auto" or "sdpa"')


def why_not_packed(backbone: PreTrainedModel) -> str | None:
    """The reason why this backbone cannot read packed texts; None if it can."""
    config = backbone.config
    if not takes(backbone, "position_ids"):
        return "takes no position ids"
    if not getattr(type(backbone), "_supports_attention_backend", False):
        return "does not let its attention be chosen"
    # Mistral and Phi-3 list no types of layers: with a window, every layer has it.
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"} or (not kinds and getattr(config, "sliding_window", None)):
        return "has layers of sliding attention"
    if getattr(config, "attn_logit_softcapping", None):
        return "caps the scores of its attention"
    return None
