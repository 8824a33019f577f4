"""Element counts of the parameters of an encoder and of its pre-training head and decoder, from plain numbers.

Each function returns one count for each parameter. Torch-free.
"""

from __future__ import annotations

from trainer.costs.shapes import Shape


def layer_parameters(shape: Shape, *, norms: int | None = None) -> list[int]:
    """The parameters of one transformer layer. norms: how many it has, where they are not as many as the shape says."""
    vectors, counts = shape.vectors, []
    for linear in (*shape.attention, *shape.feed_forward):
        counts += [linear.weights, linear.outputs] if linear.bias else [linear.weights]
    counts += (vectors.layer_norms if norms is None else norms) * _norm(shape)
    return counts + (2 * [shape.width_of_a_head] if vectors.head_norms else [])


def layer_matrices(shape: Shape) -> list[int]:
    """Of these the matrices, which Muon takes where it is chosen (trainer/optim.py)."""
    return [linear.weights for linear in (*shape.attention, *shape.feed_forward)]


def embedding_parameters(shape: Shape) -> list[int]:
    """The parameters before the first layer, and those that all layers share."""
    width, vectors = shape.embedding_width, shape.vectors
    rows = (shape.vocabulary, 0 if shape.rotary else shape.positions, shape.token_types)
    counts = [each * width for each in rows if each]
    counts += vectors.of_a_norm * [width] if vectors.embedding_norm else []
    counts += [width * shape.hidden, shape.hidden] if shape.table_width else []
    return counts + ([shape.relative_positions * shape.heads] if shape.relative_positions else [])


def stem_parameters(shape: Shape) -> list[int]:
    """The parameters of the embeddings and of all layers, without the norm after them."""
    first = shape.vectors.layer_norms - shape.vectors.no_first_norm
    counts = embedding_parameters(shape)
    for layer in range(shape.layers):
        counts += layer_parameters(shape, norms=None if layer else first)
    return counts


def encoder_parameters(shape: Shape) -> list[int]:
    """The parameters of the embeddings, of all layers and of the norm after them, without a pooler."""
    return stem_parameters(shape) + (_norm(shape) if shape.vectors.final_norm else [])


def decoder_parameters(shape: Shape) -> list[int]:
    """The parameters of pre-training's decoder (models/mae_decoder.py): a layer of BERT's form, whatever the encoder's,
    and a table of positions where the encoder has none."""
    positions = [shape.positions * shape.hidden] if shape.rotary else []
    return layer_parameters(Shape(shape.hidden, shape.inner, 1, shape.vocabulary)) + positions


def masked_head_parameters(shape: Shape) -> list[int]:
    """The parameters of the MLM head, whose product with the vocabulary shares the embedding table."""
    hidden, biases = shape.hidden, shape.vectors.norm_bias
    return [hidden**2, *([hidden] if biases else []), *(_norm(shape)), shape.vocabulary]


def _norm(shape: Shape) -> list[int]:
    return shape.vectors.of_a_norm * [shape.hidden]
