"""Hard negatives that join in the course of training: the same batches on any ranks, workers and after any resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.collate import PairBatch
from data.ground.errors import ConfigError
from tests.trainer.support import loaded, recipe_of, recipe_values
from trainer.build import open_shards, open_stream

STEPS = 10
SHARES = [0.2, 0.4, 0.8]


def values_of(shards: Path, **data: Any) -> dict[str, Any]:
    sections = {"data": {"negatives_from": SHARES, **data}, "train": {"steps": STEPS, "global_batch_size": 30}}
    return recipe_values(shards, **sections)


def global_batches(
    values: dict[str, Any], *, world_size: int = 1, first: int = 0, state: dict | None = None, steps: int = STEPS
) -> tuple[list[tuple[torch.Tensor, ...]], dict]:
    """Of each step from `first` on: what all ranks' batches hold, joined; and the state after `steps` steps."""
    recipe = recipe_of(values)
    sources = open_shards(recipe)
    streams = [open_stream(recipe, sources, rank=rank, world_size=world_size) for rank in range(world_size)]
    joined = []
    for stream in streams:
        if state is not None:
            stream.load_state_dict(state)
    for _ in range(first, steps):
        shares: list[PairBatch] = [next(stream) for stream in streams]
        names = ("sample_ids", "query_hashes", "passage_hashes", "known_hashes")
        counts = torch.cat([torch.bincount(share.passage_query, minlength=share.num_samples) for share in shares])
        joined.append((counts, *(torch.cat([getattr(share, name) for share in shares]) for name in names)))
    after = streams[0].state_dict()
    for stream in streams:
        stream.close()
    return joined, after


def equal(a: list[tuple[torch.Tensor, ...]], b: list[tuple[torch.Tensor, ...]]) -> bool:
    return len(a) == len(b) and all(
        len(x) == len(y) and bool((x == y).all()) for p, q in zip(a, b) for x, y in zip(p, q)
    )


def test_each_negative_joins_at_its_step(tuple_shards: Path) -> None:
    batches, _ = global_batches(values_of(tuple_shards))
    plain, _ = global_batches(values_of(tuple_shards, negatives_from=[]))
    for step, (got, whole) in enumerate(zip(batches, plain)):
        allowed = sum(step >= share * STEPS for share in SHARES)
        # Samples have 0 to 3 negatives; those that are drawn are among those of the run without a curriculum.
        assert (got[0] == torch.clamp(whole[0], max=1 + allowed)).all()
        assert (got[1] == whole[1]).all() and set(got[3].tolist()) <= set(whole[3].tolist())
    assert equal(batches[8:], plain[8:]) and not equal(batches[:8], plain[:8])
    together, _ = global_batches(values_of(tuple_shards, negatives_from=[0.4]))
    assert equal(together[4:], plain[4:]) and [int(batch[0].max()) for batch in together[:4]] == [1] * 4


def test_epochs_count_as_steps_do(tuple_shards: Path) -> None:
    values = values_of(tuple_shards)
    samples = sum(source.num_samples for source in open_shards(recipe_of(values)))
    values["train"] |= {"steps": 0, "epochs": STEPS * 30 / samples}
    assert equal(global_batches(values)[0], global_batches(values_of(tuple_shards))[0])


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(
    ("world_size", "workers"),
    [(2, 0), *(pytest.param(*case, marks=pytest.mark.processes) for case in ((1, 2), (3, 1)))],
)
def test_ranks_workers_and_resumes_change_nothing(world_size: int, workers: int, tuple_shards: Path) -> None:
    want, _ = global_batches(values_of(tuple_shards))
    values = values_of(tuple_shards, num_workers=workers)
    assert equal(global_batches(values, world_size=world_size)[0], want)
    # A third of the way on this topology, the rest on one process, and the other way round.
    begun, state = global_batches(values, world_size=world_size, steps=3)
    assert equal(begun + global_batches(values_of(tuple_shards), first=3, state=state)[0], want)
    begun, state = global_batches(values_of(tuple_shards), steps=3)
    assert equal(begun + global_batches(values, world_size=world_size, first=3, state=state)[0], want)
    # Negative control: one threshold a step later.
    assert not equal(global_batches(values_of(tuple_shards, negatives_from=[0.3, 0.4, 0.8]))[0], want)


def test_batches_without_duplicates_stay_so(crowded_shards: Path) -> None:
    """Samples change places between steps with more and fewer negatives, and are parted by all they may bring."""
    values = values_of(crowded_shards, no_duplicates=True, num_negatives=1, negatives_from=[0.5])
    values["train"]["global_batch_size"] = 3
    alone, _ = global_batches(values)
    assert equal(global_batches(values, world_size=2)[0], alone)
    assert [int(batch[0].max()) for batch in alone] == [1] * 5 + [2] * 5
    repeats = [len(texts) - len(np.unique(texts)) for texts in (torch.cat(batch[2:4]).numpy() for batch in alone)]
    mixed, _ = global_batches({**values, "data": {**values["data"], "no_duplicates": False}})
    as_they_come = [len(t) - len(np.unique(t)) for t in (torch.cat(batch[2:4]).numpy() for batch in mixed)]
    assert sum(repeats) < sum(as_they_come)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        ({"negatives_from": [0.1, 0.2]}, "2 entries"),
        ({"negatives_from": [0.4, 0.2, 0.6]}, "do not fall"),
        ({"negatives_from": [-0.1]}, "from 0"),
        ({"negatives_from": [1.0]}, "no step would see"),
        ({"negatives_from": [0.5], "num_negatives": 0}, "num_negatives above 0"),
    ],
)
def test_schedules_that_mean_nothing_are_refused(data: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=word):
        loaded(values_of(Path("shards"), **data), tmp_path)
    loaded(values_of(Path("shards")), tmp_path)
