"""Elements of every parameter of a BERT and of what pre-training puts beside it, from plain numbers. Torch-free."""

from __future__ import annotations

from trainer.costs.counts import Shape


def layer_parameters(shape: Shape) -> list[int]:
    """Of one transformer layer, an encoder's or the decoder's."""
    hidden, inner = shape.hidden, shape.inner
    norm = [hidden, hidden]
    return 4 * [hidden**2, hidden] + norm + [hidden * inner, inner, inner * hidden, hidden] + norm


def encoder_parameters(shape: Shape, *, positions: int) -> list[int]:
    """Of the embeddings and of all layers, without a pooler."""
    hidden = shape.hidden
    embeddings = [shape.vocabulary * hidden, positions * hidden, 2 * hidden, hidden, hidden]
    return embeddings + shape.layers * layer_parameters(shape)


def masked_head_parameters(shape: Shape) -> list[int]:
    """Of the MLM head, whose product with the vocabulary shares the table of the embeddings."""
    hidden = shape.hidden
    return [hidden**2, hidden, hidden, hidden, shape.vocabulary]
