"""Packed attention against padded attention: vectors, gradients, and which kernel ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from data.collate import offsets_of
from models.encoder import Encoder, base_of, build_decoder, build_masked_lm
from models.packed_attention import fast_on
from models.sizes import Ladder
from trainer.qualification.lines import Asked, Bound, Outcome, judged, not_answered
from trainer.qualification.passes import gradient_of, relative_error
from trainer.qualification.settings import SEED, Setting

# Relative errors of all numbers together. In float32 only the order of sums differs. In bf16 both ways round at other
# places, by 2⁻⁹ a product.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
_SHORTEST = 5  # tokens


@dataclass(frozen=True)
class Texts:
    """Flat texts: ids [T] and offsets [B + 1]."""

    ids: Tensor
    offsets: Tensor


def asked(setting: Setting) -> list[Asked]:
    texts = texts_of(setting)
    questions = []
    for family in ("BERT", "a causal decoder with grouped heads"):
        for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bf16")):
            question = f"packed = padded attention, {family}, {name}"
            questions.append(Asked(question, partial(equality, setting, family, dtype, texts)))
    questions.append(Asked("packed attention runs in a fused kernel", partial(kernel, setting, texts)))
    return questions


def texts_of(setting: Setting) -> Texts:
    """Random texts of all lengths from a few tokens to the longest."""
    generator = torch.Generator().manual_seed(SEED)
    scale = setting.scale
    lengths = torch.randint(_SHORTEST, scale.length + 1, (scale.documents,), generator=generator)
    lengths[:2] = torch.tensor([_SHORTEST, scale.length])
    ids = torch.randint(5, scale.vocabulary, (int(lengths.sum()),), generator=generator)
    return Texts(ids.to(setting.device), offsets_of(lengths).to(setting.device))


def encoder_of(setting: Setting, family: str) -> Encoder:
    scale = setting.scale
    ids = {"vocab_size": scale.vocabulary, "pad_token_id": 0}
    torch.manual_seed(SEED)
    if family == "BERT":
        encoder = Encoder(base_of(build_masked_lm(scale.config, **ids)), "mean")
    else:
        config = {
            "model_type": "qwen3",
            "hidden_size": scale.hidden,
            "num_hidden_layers": scale.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": min(64, scale.hidden // 4),
            "intermediate_size": 2 * scale.hidden,
            "max_position_embeddings": scale.length,
        }
        encoder = Encoder(build_decoder(config, "causal", **ids), "last")
    return encoder.to(setting.device).train()


def equality(setting: Setting, family: str, dtype: torch.dtype, texts: Texts) -> Outcome:
    encoder = encoder_of(setting, family).to(dtype)
    sizes = Ladder.of(setting.scale.ladder)
    packed = vectors_and_gradient(encoder, texts, "packed", sizes)
    padded = vectors_and_gradient(encoder, texts, "sdpa", sizes)
    return compared(packed, padded, TOLERANCES[dtype])


def vectors_and_gradient(encoder: Encoder, texts: Texts, attention: str, sizes: Ladder) -> tuple[Tensor, Tensor]:
    """(The vectors of all sizes as one, and the gradient of a fixed random sum of them)."""
    encoder.backbone.set_attn_implementation(attention)
    encoder.zero_grad()
    vectors = torch.cat(encoder(texts.ids, None, list(sizes), offsets=texts.offsets), dim=1)
    generator = torch.Generator().manual_seed(SEED)
    weights = torch.randn(vectors.shape, generator=generator).to(vectors.device)
    (vectors.float() * weights).sum().backward()
    return vectors.detach().float(), gradient_of(encoder)


def compared(packed: Sequence[Tensor], padded: Sequence[Tensor], tolerance: float) -> Outcome:
    """packed, padded: vectors and gradient."""
    errors = [relative_error(found, wanted) for found, wanted in zip(packed, padded, strict=True)]
    return judged({name: Bound(error, most=tolerance) for name, error in zip(("vectors", "gradient"), errors)})


def kernel(setting: Setting, texts: Texts) -> Outcome:
    if not setting.cuda:
        return not_answered("there is no GPU; on a CPU each text is computed by itself")
    if torch.cuda.get_device_capability()[0] < 8:
        return not_answered("this GPU is older than flash attention's (compute capability 8.0), so texts are padded")
    encoder = encoder_of(setting, "BERT").bfloat16()
    if not fast_on(setting.device, encoder.backbone):
        return Outcome("failed", "the kernel does not run here, or is wrong, so the trainer pads texts", "it runs")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        vectors_and_gradient(encoder, texts, "packed", Ladder.of(setting.scale.ladder))
    return judged_kernels({event.key for event in profile.key_averages()})


def judged_kernels(names: set[str]) -> Outcome:
    """names: what a profile saw, operators and kernels."""
    fused = sorted(name for name in names if any(word in name.lower() for word in ("flash", "fmha", "varlen")))
    shown = ", ".join(name[:60] for name in fused[:4])
    ran = any("flash" in name.lower() for name in fused)
    return Outcome("passed" if ran else "failed", shown or "none was seen", "flash attention ran")
