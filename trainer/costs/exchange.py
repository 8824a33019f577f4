"""How all ranks' vectors reach a rank that compares its queries with them: gathered, or in a ring (trainer/ring.py).

Both give the same loss and gradients. The gather sends less, and computes each score once where memory allows it. Its
memory grows with the global batch, while the ring's grows with a rank's share of it. Torch-free: `launch.plan` chooses
and counts by the same rules as training.
"""

from __future__ import annotations

# By `auto`, all ranks' vectors are gathered while they and their gradients take no more bytes than this.
MOST_GATHERED_BYTES = 2 * 2**30
# A rank's vectors travel in so many chunks, so that one can be sent while the next is used.
RING_CHUNKS = 4
# What a rank holds of others' vectors at once, in shares of its own: one chunk more, which comes while another leaves.
RING_SHARE_HELD = (RING_CHUNKS + 1) / RING_CHUNKS


def chosen_exchange(setting: str, gathered_bytes: float) -> str:
    """ "gather" or "ring". gathered_bytes: of all ranks' vectors and of their gradients, if they were gathered."""
    if setting == "auto":
        return "ring" if gathered_bytes > MOST_GATHERED_BYTES else "gather"
    return setting


def ring_vectors_sent(ranks: int) -> int:
    """How many times its own vectors' bytes each rank sends in a ring: in two rounds, less what is there already."""
    return max(0, 2 * ranks - 3)


def ring_gradients_sent(ranks: int) -> int:
    """The same of their gradients: from the first rank that adds to them until they are home."""
    return ranks - 1
