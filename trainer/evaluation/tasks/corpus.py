"""A corpus' vectors block by block for the command line: over ranks, through a store, and with stops on request.

Every rank encodes and searches blocks of its own, alone; only the best keys are merged, on rank 0. So ranks need not
agree on anything before their blocks are done. Blocks of the same length, and with them the vectors, are the same for
any number of ranks. Evaluation during training works differently: an engine with partitioned weights needs every rank
in every pass, see `encode`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from tqdm import tqdm

from models.sizes import Size
from trainer.distributed import World, gather_objects
from trainer.evaluation.encoding.encode import Forward
from trainer.evaluation.search.vectors import VectorStore, cut
from trainer.evaluation.tasks.retrieval import Block
from trainer.resilience.stopping import Stopped

log = logging.getLogger(__name__)

EncodeWhole = Callable[[Sequence[str]], Mapping[Size, np.ndarray]]
"""Texts to the widest size of every layer count (`vectors.widest`), float32, not normalised, on this rank alone."""

_SECONDS_BETWEEN_LINES = 30.0
_LOWEST_KEY = torch.iinfo(torch.int64).min


class Progress:
    """Progress through this rank's share of the texts: a bar in a terminal, an occasional log line elsewhere."""

    def __init__(self, name: str, *, shown: bool) -> None:
        self._name, self._shown = name, shown
        self._total = self._done = 0
        self._begin = self._said = time.monotonic()
        self._bar = tqdm(disable=True)

    def expect(self, total: int) -> None:
        """Start again at zero, with `total` texts to come."""
        self._total, self._done = total, 0
        self._begin = self._said = time.monotonic()
        if self._shown and sys.stderr.isatty():
            self._bar = tqdm(total=total, desc=self._name, unit="text", leave=False)

    def advance(self, texts: int) -> None:
        self._done += texts
        self._bar.update(texts)
        now = time.monotonic()
        if self._shown and self._bar.disable and now - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = now
            left = (self._total - self._done) * (now - self._begin) / self._done
            log.info("%s: %d of %d texts, %.0f minutes left", self._name, self._done, self._total, max(0.0, left) / 60)

    def close(self) -> None:
        self._bar.close()


def watched(forward: Forward, wanted: Callable[[], str | None]) -> Forward:
    """`forward` that raises Stopped once the process was asked to stop. `wanted` gives the reason."""

    def watching(*inputs: Tensor) -> tuple[Tensor, ...]:
        if reason := wanted():
            raise Stopped(reason)
        return forward(*inputs)

    return watching


def counted(forward: Forward, progress: Progress, *, flat: bool) -> Forward:
    """`forward` that adds its texts to `progress`. `flat`: the input format of `forward`, see `encode`."""

    def counting(input_ids: Tensor, mask_or_offsets: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        vectors = forward(input_ids, mask_or_offsets, *others)
        progress.advance(len(mask_or_offsets) - flat)
        return vectors

    return counting


@contextlib.contextmanager
def leaving_together() -> Iterator[None]:
    """A rank that is stopped inside the block waits for the others at its end; then all ranks raise Stopped."""
    reason = ""
    try:
        yield
    except Stopped as stopped:
        reason = str(stopped)
    reasons = gather_objects(reason)
    if said := next(filter(None, reasons), ""):
        raise Stopped(said)


def encoded_blocks(
    documents: Sequence[str],
    encode_whole: EncodeWhole,
    *,
    rows_per_block: int,
    similarity: str,
    world: World,
    progress: Progress,
) -> Iterator[Block]:
    """This rank's blocks, each encoded when it is asked for and not kept."""
    mine = range(0, len(documents), rows_per_block)[world.rank :: world.size]
    progress.expect(sum(len(documents[start : start + rows_per_block]) for start in mine))
    with leaving_together():
        for start in mine:
            yield start, partial(_cut_of, encode_whole(documents[start : start + rows_per_block]), similarity)
    progress.close()


def stored_blocks(
    documents: Sequence[str],
    encode_whole: EncodeWhole,
    store: VectorStore,
    *,
    similarity: str,
    world: World,
    progress: Progress,
) -> Iterator[Block]:
    """This rank's blocks, read from the store, after all ranks have encoded the blocks that it lacked."""
    # One rank lists the missing blocks before any rank writes, so that all ranks share out the same list.
    missing = gather_objects(store.missing() if world.is_main else [])[0]
    if len(missing) < store.num_blocks:
        log.info("%s: %d of %d blocks are there", store.folder, store.num_blocks - len(missing), store.num_blocks)
    mine = missing[world.rank :: world.size]
    progress.expect(sum(len(store.rows_of(block)) for block in mine))
    with leaving_together():
        for block in mine:
            rows = store.rows_of(block)
            store.write(block, encode_whole(documents[rows.start : rows.stop]))
    progress.close()
    for block in range(store.num_blocks)[world.rank :: world.size]:
        yield store.rows_of(block).start, partial(_stored, store, block, similarity)


def merge_keys(keys: Tensor, k: int, *, world: World) -> Tensor:
    """The best k keys of all ranks on rank 0, int64 [queries, k]; undefined on other ranks.

    `k` is at most the number of documents over all ranks. Every rank must call this.
    """
    if world.size == 1:
        return keys
    collective = world.device if dist.get_backend() == "nccl" else torch.device("cpu")
    mine = torch.full((len(keys), k), _LOWEST_KEY, dtype=torch.int64, device=collective)
    mine[:, : keys.shape[1]] = keys.to(collective)
    gathered = [torch.empty_like(mine) for _ in range(world.size)] if world.is_main else None
    dist.gather(mine, gathered, dst=0)
    return keys if gathered is None else torch.topk(torch.cat(gathered, dim=1), k, dim=1).values


def _cut_of(vectors: Mapping[Size, np.ndarray], similarity: str, size: Size) -> Tensor:
    whole = next(rows for stored, rows in vectors.items() if stored.body == size.body)
    return cut(whole, size, similarity=similarity)


def _stored(store: VectorStore, block: int, similarity: str, size: Size) -> Tensor:
    return cut(store.read(block, size.body), size, similarity=similarity)
