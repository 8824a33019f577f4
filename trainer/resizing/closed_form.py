"""Heads without training: each body's pooled states are mapped into the teacher's space by ridge regression.

The shallow layers of a finished model contain much of what the whole model's embedding says, and a linear map can
extract it. The same holds for narrower feed-forwards (a body is a number of layers and a fraction of their
feed-forwards, models/sizes.py). For a body with standardised pooled states Z [n, h], with a column of ones added, and
the teacher's unit vectors Y [n, D]:
    W = (ZᵀZ + λ I)⁻¹ ZᵀY
λ is chosen among RIDGES by the mean cosine on held-out texts. Every prefix of dimensions shares one W, because the
columns of Y are fitted one by one. The fit takes one pass over some thousand texts, without labels or gradients. It is
the baseline that training must beat, and the start of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from models.encoder import Encoder
from models.heads import linear_head
from models.sizes import Body
from trainer.evaluation.encoding.encode import embedder_of

RIDGES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
FITTED_TEXTS, HELD_OUT_TEXTS = 6_500, 1_000


@dataclass(frozen=True)
class ClosedForm:
    """A head, its λ, and its mean cosine to the teacher on the held-out texts."""

    head: nn.Linear
    ridge: float
    cosine: float


def fit_heads(states: Mapping[Body, Tensor], targets: Tensor, *, held_out: int) -> dict[Body, ClosedForm]:
    """Body -> its head.

    states: body -> float32 [n, h]. targets: unit vectors [n, D]. λ is chosen on the last `held_out` texts.
    """
    return {body: _fit(each, targets, held_out=held_out) for body, each in states.items()}


def _fit(states: Tensor, targets: Tensor, *, held_out: int) -> ClosedForm:
    count = len(states) - held_out
    assert count > 0 < held_out, "texts to fit and texts to choose by"
    fitted, wanted = states[:count].double(), targets[:count].double()
    mean, deviation = fitted.mean(0), fitted.std(0, correction=0).clamp(min=1e-8)
    # Z has mean 0, so the coefficient of the column of ones is the mean of Y; it is not shrunk.
    scaled, middle = (fitted - mean) / deviation, wanted.mean(0)
    values, vectors = torch.linalg.eigh(scaled.T @ scaled)
    rotated = vectors.T @ (scaled.T @ (wanted - middle))  # [h, D]
    others = (states[count:].double() - mean) / deviation
    best: tuple[float, float, Tensor] | None = None
    for ridge in RIDGES:
        solution = vectors @ (rotated / (values + ridge)[:, None])  # [h, D]
        predicted = others @ solution + middle
        cosine = float(torch.cosine_similarity(predicted, targets[count:].double(), dim=1).mean())
        if best is None or cosine > best[0]:
            best = cosine, ridge, solution
    assert best is not None
    cosine, ridge, solution = best
    weight = (solution / deviation[:, None]).T  # [D, h]
    return ClosedForm(linear_head(weight.float(), (middle - weight @ mean).float()), ridge, cosine)


def depth_states(
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[str],
    bodies: Sequence[Body],
    *,
    max_length: int,
    prompt: str,
    device: torch.device,
) -> dict[Body, Tensor]:
    """Body -> pooled states of the texts before any head, float32 [n, h]."""
    bare = Encoder(encoder.backbone, encoder.pooling, pool_prompt=encoder.pool_prompt)
    sizes = [body.of_dim(encoder.hidden_size) for body in bodies]
    found = embedder_of(bare, tokenizer, sizes, device=device)(
        texts, similarity="dot", max_length=max_length, prompt=prompt
    )
    return {size.body: torch.from_numpy(vectors) for size, vectors in found.items()}
