"""What one layer keeps, moves and launches, a token: the part of its costs that is no matrix product. Torch-free.

Counted for eager PyTorch with a fused attention, of which no matrix of scores is left. docs/scaling.md derives the
numbers, and tests/trainer/costs/test_layers.py compares them with what a model keeps and runs. Units: elements where a
function does not say bytes.
"""

from __future__ import annotations

from trainer.costs.shapes import Shape

_FLOAT32 = 4.0  # bytes


def kept_bytes(shape: Shape, *, width: float, drops: bool = True) -> float:
    """Bytes that a layer keeps of a token for its backward pass. width: bytes an element.

    Kept are the inputs of the products around attention and of the feed-forward (2h), each norm's input, the queries,
    the keys and values as they are attended to, attention's output, and the feed-forward's wide states. For BERT these
    are 8h + 2i elements (Korthikanti et al. 2022, table 2, without recomputable scores), and two dropout masks of h
    bytes. A gated feed-forward keeps four wide states: gate and up, the activation, and its product with up. An RMS
    norm in eager PyTorch keeps its input in float32, and the normed state before it is weighted. Where one matrix makes
    queries, keys and values, and positions are rotary, its output is kept beside the turned queries and keys, because
    the values are a part of it.
    """
    hidden, vectors = shape.hidden, shape.vectors
    queries, keys = shape.query_width, shape.key_width
    elements = 2 * hidden + 2 * queries + 2 * keys + _wide_states(shape) * shape.inner
    if shape.fused and shape.rotary:
        elements += queries + keys
    normed = vectors.layer_norms * hidden + (queries + keys if vectors.head_norms else 0)
    masks = 2 * hidden if drops and shape.drops else 0
    return elements * width + normed * _norm_bytes(shape, width) + masks


def kept_for_the_feed_forward(shape: Shape, *, width: float) -> float:
    """What of them is not kept of a token for which the feed-forward is not computed: its input and wide states."""
    return (_wide_states(shape) * shape.inner + shape.hidden) * width


def _wide_states(shape: Shape) -> int:
    return 4 if shape.gated else 2


def kept_by_a_norm(shape: Shape, *, width: float) -> float:
    """Bytes that a norm of a token's hidden state keeps if something else keeps its input, too."""
    own = _norm_bytes(shape, width) - (_FLOAT32 if width >= _FLOAT32 else 0.0)
    return shape.hidden * own if shape.vectors.rms else 0.0


def _norm_bytes(shape: Shape, width: float) -> float:
    """Bytes that a norm keeps of an element."""
    if not shape.vectors.rms:
        return width
    return max(_FLOAT32, width) + (max(_FLOAT32, width) if shape.vectors.wide_norms else width)


def wide_gradients(shape: Shape) -> float:
    """Elements of the gradients that are alive at once while a layer is sent back."""
    return (3 if shape.gated else 2) * shape.inner + 4 * shape.hidden


def moved_elements(shape: Shape) -> float:
    """Elements that a layer's forward pass reads and writes outside its products.

    Residuals read 2h and write h, twice; dropout, where there is one, 2h, twice; a fused norm 2h, an RMS norm in eager
    PyTorch 18h (six kernels on h elements, most of them in float32, where an element counts as two), in Gemma 20h;
    turning queries and keys by their positions ten times their width; the activation 2i, and 3i more where it is
    multiplied by up.
    """
    hidden, vectors, turned = shape.hidden, shape.vectors, shape.query_width + shape.key_width
    norm = (20 if vectors.wide_norms else 18) if vectors.rms else 2
    total = 6 * hidden + (4 * hidden if shape.drops else 0) + vectors.layer_norms * norm * hidden
    total += norm * turned if vectors.head_norms else 0
    total += 10 * turned if shape.rotary else 0
    return total + (5 if shape.gated else 2) * shape.inner


def kernels(shape: Shape) -> int:
    """Kernels that a layer's forward pass launches, about: 20 for BERT; RMS norms and rotary positions are unfused."""
    vectors = shape.vectors
    norms = vectors.layer_norms + (2 if vectors.head_norms else 0)
    more = (9 if vectors.wide_norms else 7) * norms if vectors.rms else 0
    return 20 + more + (10 if shape.rotary else 0)
