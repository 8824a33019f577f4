"""Element counts of the parameters of a BERT and of its pre-training head and decoder, from plain numbers. Torch-free.

Each function returns one count for each parameter.
"""

from __future__ import annotations

from trainer.costs.counts import Shape


def layer_parameters(shape: Shape) -> list[int]:
    """The parameters of one transformer layer, of the encoder or of the decoder."""
    hidden, inner = shape.hidden, shape.inner
    norm = [hidden, hidden]
    return 4 * [hidden**2, hidden] + norm + [hidden * inner, inner, inner * hidden, hidden] + norm


def encoder_parameters(shape: Shape, *, positions: int) -> list[int]:
    """The parameters of the embeddings and of all layers, without a pooler."""
    hidden = shape.hidden
    embeddings = [shape.vocabulary * hidden, positions * hidden, 2 * hidden, hidden, hidden]
    return embeddings + shape.layers * layer_parameters(shape)


def masked_head_parameters(shape: Shape) -> list[int]:
    """The parameters of the MLM head, whose product with the vocabulary shares the embedding table."""
    hidden = shape.hidden
    return [hidden**2, hidden, hidden, hidden, shape.vocabulary]
