"""The masked-language-model head that serves every width.

`head(u) = LayerNorm(act(u · W_{1:d} + b))` for u of any width d up to D (Starbucks §3.2, eq. 7; act is gelu unless the
model's config says otherwise), and `logits(z) = z · E^T + c` over the tied word embeddings. Weights and activation are
shared by reference with the backbone's own MLM head: training starts from a checkpoint's pretrained head, and saving
the backbone writes the trained one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS

from models.fused_linear_cross_entropy import fused_linear_cross_entropy, product_dtype, rows_per_chunk
from models.sizes import ModelError

_ACTIVATIONS = cast(
    tuple[type[nn.Module], ...],
    tuple(entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()),
)


class PrefixHead(nn.Module):
    """The head's transform for rows of several widths at once.

    It reads slices of its own parameters in its own forward: ZeRO-3 gathers a module's parameters only around that
    module's forward.
    """

    def __init__(self, dense: nn.Linear, norm: nn.LayerNorm, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation
        self.weight = dense.weight
        self.bias = dense.bias
        self.norm_weight = norm.weight
        self.norm_bias = norm.bias
        self.eps = norm.eps

    def forward(self, rows: Sequence[Tensor]) -> Tensor:
        """Transform the rows of all sizes: [r_k, d_k] for each size k -> [sum of r_k, D], sizes one after another."""
        # W_{1:d} are the paper's first d rows; PyTorch stores the transpose, so they are the first d columns.
        projected = torch.cat([F.linear(part, self.weight[:, : part.shape[1]]) for part in rows])
        if self.bias is not None:
            projected = projected + self.bias
        return F.layer_norm(
            self.activation(projected), (self.weight.shape[0],), self.norm_weight, self.norm_bias, self.eps
        )


class VocabularyLoss(nn.Module):
    """Cross-entropy over the tied vocabulary, without the logits of all rows in memory at once."""

    def __init__(self, embeddings: nn.Parameter, bias: nn.Parameter, *, logits_memory_mib: float) -> None:
        super().__init__()
        self.weight = embeddings
        self.bias = bias
        self.vocab_size = bias.shape[0]
        self.logits_memory_mib = logits_memory_mib

    def forward(self, rows: Tensor, targets: Tensor, row_weights: Tensor) -> tuple[Tensor, Tensor]:
        """(weighted sum of losses, each row's loss detached [R]). rows: [R, D]; targets, row_weights: [R]."""
        return fused_linear_cross_entropy(
            rows,
            self.weight,
            bias=self.bias,
            targets=targets,
            row_weights=row_weights,
            chunk_rows=rows_per_chunk(self.vocab_size, memory_mib=self.logits_memory_mib, dtype=product_dtype(rows)),
        )


def head_of(masked_lm: PreTrainedModel, *, logits_memory_mib: float) -> tuple[PrefixHead, VocabularyLoss]:
    """The backbone's own head, found by shape: one D×D linear layer, one norm and one bias of the vocabulary's size.

    The activation is the module that the head was built with (ACT2FN of BERT's hidden_act, DistilBERT's activation,
    ModernBERT's classifier_activation). RoBERTa's head has no such module: it always calls gelu, whatever its config.
    """
    hidden = int(masked_lm.config.hidden_size)
    vocabulary = int(masked_lm.config.vocab_size)
    inside = {id(module) for module in masked_lm.base_model.modules()}
    outside = [module for module in masked_lm.modules() if id(module) not in inside]
    dense = [m for m in outside if isinstance(m, nn.Linear) and m.weight.shape == (hidden, hidden)]
    norms = [m for m in outside if isinstance(m, nn.LayerNorm) and m.normalized_shape == (hidden,)]
    base = {id(p) for p in masked_lm.base_model.parameters()}
    biases = [p for p in masked_lm.parameters() if p.shape == (vocabulary,) and id(p) not in base]
    activations = [m for m in outside if isinstance(m, _ACTIVATIONS)]
    if len(dense) != 1 or len(norms) != 1 or len(biases) != 1 or len(activations) > 1:
        raise ModelError(
            f"the MLM head of {type(masked_lm).__name__} is not dense + norm + tied decoder with a bias; "
            "pre-train an encoder of the BERT, RoBERTa, DistilBERT or ModernBERT kind"
        )
    embeddings = cast(nn.Parameter, cast(nn.Embedding, masked_lm.get_input_embeddings()).weight)
    if not any(m.weight is embeddings for m in outside if isinstance(m, nn.Linear)):
        raise ModelError(
            f"{type(masked_lm).__name__} does not tie its output to its word embeddings; set tie_word_embeddings"
        )
    head = PrefixHead(dense[0], norms[0], activations[0] if activations else nn.GELU())
    return head, VocabularyLoss(embeddings, biases[0], logits_memory_mib=logits_memory_mib)
