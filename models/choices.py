"""What a user may choose of how an encoder embeds: one list of values for recipes, settings and command lines.

This module does not import torch, so that a login node without a GPU stack can check a recipe.
"""

from __future__ import annotations

from typing import Literal

# weighted_mean weighs a text's n tokens 1 to n: in a causal model, the later ones have read more.
Pooling = Literal["cls", "mean", "last", "weighted_mean"]
# Those that take all tokens of a text, and may leave out its prompt's.
MEANS: tuple[Pooling, ...] = ("mean", "weighted_mean")
Similarity = Literal["dot", "cosine"]
# What a token reads: itself and the tokens before it, or all tokens.
Direction = Literal["causal", "bidirectional"]
