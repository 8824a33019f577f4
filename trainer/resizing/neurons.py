"""The neurons of a trained model, numbered by importance, so that prefixes of its feed-forwards keep what matters most.

A model that was not trained with nested feed-forwards has its neurons in no order. Numbering them anew changes no
output (models/nested_feed_forward.py), and makes the start from which fractions learn.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from data.tokens import SpelledOut
from models.encoder import Encoder
from models.layout import Layout
from models.nested_feed_forward import NestedFeedForwards
from models.settings import EmbeddingSettings
from trainer.evaluation.encoding.encode import tokenized

log = logging.getLogger(__name__)

WEIGHED_TEXTS = 512
_TEXTS_AT_ONCE = 32


@torch.no_grad()
def sort_neurons(
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[str],
    settings: EmbeddingSettings,
    *,
    device: torch.device,
) -> None:
    """Number the neurons of every feed-forward from the most important on, in place, by how they react to the texts."""
    nested = NestedFeedForwards.of(encoder.backbone)
    layout = Layout(torch.zeros(1, dtype=torch.int64))

    def of_real_tokens(activations: Tensor) -> Tensor:
        """Padded activations [B, L, m] or packed ones [1, T, m] -> [T, m]."""
        if activations.shape[:2] == layout.mask.shape:
            return activations[layout.mask.bool()]
        return activations.flatten(0, -2)

    encoder.to(device).eval()
    spelled_out = SpelledOut.of(tokenizer, encoder.word_embeddings.num_embeddings)
    with nested.weighing(of_real_tokens) as importance:
        for first in range(0, len(texts), _TEXTS_AT_ONCE):
            read = [settings.passage_prompt + text for text in texts[first : first + _TEXTS_AT_ONCE]]
            ids = tokenized(tokenizer, read, settings.passage_max_length, spelled_out)
            layout = Layout(torch.from_numpy(ids.offsets).to(device))
            tokens = torch.from_numpy(ids.tokens).to(device)
            encoder.hidden_states(tokens, layout, [encoder.num_layers])
    nested.sort(importance)
    log.info("neurons of %d feed-forwards are numbered by importance, from %d texts", encoder.num_layers, len(texts))
