"""Straight-through quantisation: what int8 and binary embeddings hold of unit vectors, and the gradient through it.

A stored embedding hard(u) is a step function of the vector u, so its gradient is 0 almost everywhere. The gradient is
therefore taken through a soft(u) beside it (pplx-embed, arXiv:2602.11151):

    y = hard(u) + soft(u) − stop_gradient(soft(u)),    scores are cosines of y.

hard is what an evaluation and a search use (models/quantisation.py), and soft is as follows:

- binary: hard(u) = 1 where u > 0, else −1, and soft(u) = tanh(√d · u), for d dimensions. pplx-embed takes tanh of the
  vector before normalising. Its sign is the same, but its tanh depends on the length, which cosines leave to chance and
  which differs from model to model and from size to size. A unit vector of 384 dimensions has entries of about 0.05,
  where tanh is a straight line and would treat all of them alike. Multiplied by √d, they have a mean square of 1 at
  every size. The slope, relative to √d, is then 1 for an entry near 0, which may still change its sign, and 0.07 for
  one of twice the root mean square.
- int8: hard(u) is the middle of one of 255 equal steps between the dimension's smallest and largest value, and soft(u)
  = u, because equal steps follow a straight line. The ranges are those of the global batch's texts, in place of the
  collection's. pplx-embed rounds 127 · tanh(x) instead, which needs no ranges; nothing here stores such codes, and a
  tanh would train for scores that no search computes.

hard and soft have one scale. In pplx-embed's published code, the hard values of int8 have a scale of 127 and the soft
ones a scale of 1, which makes the gradient of cosines 127 times smaller.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 255


def extremes(vectors: Tensor) -> Tensor:
    """Minus the smallest and the largest value of each dimension: [n, d] -> [2, d]. Of no vectors: −infinity.

    The element-wise maximum of the extremes of several ranks is that of their vectors together.
    """
    if not len(vectors):
        return vectors.new_full((2, vectors.shape[1]), -torch.inf)
    return torch.stack([-vectors.amin(0), vectors.amax(0)])


def to_steps(vectors: Tensor, of_all: Tensor) -> Tensor:
    """The middles of the vectors' steps, [n, d]. of_all: `extremes` of all vectors.

    The largest value of a dimension lies on the edge of a step, where rounding would decide. It always gets the step
    below, whose middle is as near as that of the step above. A dimension that is the same everywhere keeps its value.
    """
    start, step = -of_all[0], (of_all[0] + of_all[1]) / STEPS
    places = (vectors - start).div_(torch.where(step > 0, step, 1.0)).floor_().clamp_(max=STEPS - 1)
    return places.add_(0.5).mul_(step).add_(start)


def to_signs(vectors: Tensor) -> Tensor:
    """The vectors' bits as ±1, [n, d]."""
    return (vectors > 0).to(vectors.dtype).mul_(2).sub_(1)


def sign_slopes(unit: Tensor) -> Tensor:
    """The derivative of soft(u) of the signs, √d (1 − tanh²(√d · u)), at unit vectors [n, d]."""
    scale = unit.shape[1] ** 0.5
    return (unit * scale).tanh_().square_().neg_().add_(1.0).mul_(scale)
