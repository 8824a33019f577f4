"""What a user may choose of how an encoder embeds: one list of values for recipes, settings and command lines.

This module does not import torch, so that a login node without a GPU stack can check a recipe.
"""

from __future__ import annotations

from typing import Literal

Pooling = Literal["cls", "mean"]
Similarity = Literal["dot", "cosine"]
