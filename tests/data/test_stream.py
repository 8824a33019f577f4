"""Streams: the same global batches for every topology, exact resume, mixtures, batches of one dataset or without
duplicates, short last batches, and errors that stay one sentence."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from data.collate import PairCollator
from data.ground.errors import DataError
from data.order import EpochOrder, interleave
from data.shards import reader
from data.shards.format import read_manifest
from data.shards.reader import ShardFolder
from data.shards.writer import SplitWriter, finish_folder
from data.stream import WINDOW_BATCHES, Sample, Stream, sample_rng

# Three workers on two cores are what some of these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

B = 12
SEED = 17


@pytest.fixture(scope="module")
def texts(tiny_tokenizer, docstrings) -> list[list[int]]:
    return [ids[:40] for ids in tiny_tokenizer(docstrings[:300], add_special_tokens=False).input_ids]


def make_folder(folder: Path, texts: list[list[int]], tokenizer) -> ShardFolder:
    """Two uneven units, chunks of 8, shards of a few chunks."""
    for unit, part in enumerate((texts[: len(texts) // 3], texts[len(texts) // 3 :])):
        with SplitWriter(
            folder, unit, kind="documents", vocabulary_size=len(tokenizer), chunk_samples=8, shard_bytes=14_336
        ) as writer:
            for ids in part:
                writer.add_document(ids)
    finish_folder(folder, 2, tokenizer=tokenizer)
    return ShardFolder(folder)


@pytest.fixture(scope="module")
def small(tmp_path_factory, tiny_tokenizer, texts) -> ShardFolder:
    return make_folder(tmp_path_factory.mktemp("small"), texts[:101], tiny_tokenizer)


@pytest.fixture(scope="module")
def large(tmp_path_factory, tiny_tokenizer, texts) -> ShardFolder:
    return make_folder(tmp_path_factory.mktemp("large"), texts, tiny_tokenizer)


def as_list(samples: list[Sample]) -> list[tuple]:
    """A collator that keeps everything and makes a draw of its own for each sample."""
    return [
        (s.source, s.index, s.epoch, s.position, s.payload.tolist(), draw(s.epoch, s.source, s.index)) for s in samples
    ]


def draw(epoch: int, source: int, index: int) -> int:
    return int(sample_rng(SEED, epoch, source, index).integers(2**40))


def as_tensors(samples: list[Sample]) -> torch.Tensor:
    return torch.tensor([[s.source, s.index] for s in samples])


def broken_collator(samples: list[Sample]) -> list[Sample]:
    raise RuntimeError("a fault of ours")


def stream(*sources: ShardFolder, **options) -> Stream:
    return Stream(sources, **{"collate": as_list, "seed": SEED, "global_batch_size": B, **options})


def global_batches(steps: int, *sources: ShardFolder, world_size: int = 1, state: dict | None = None, **options):
    """The batches of all ranks, joined."""
    ranks = [stream(*sources, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    for one in ranks:
        if state is not None:
            one.load_state_dict(state)
    batches = [list(itertools.chain.from_iterable(next(one) for one in ranks)) for _ in range(steps)]
    assert len({json.dumps(one.state_dict()) for one in ranks}) == 1, "the state must be equal on all ranks"
    for one in ranks:
        one.close()
    return batches


def by_workers(cases):
    """(ranks, workers) for parametrize: where there are workers, there are processes."""
    return [pytest.param(*case, marks=pytest.mark.processes if case[1] else ()) for case in cases]


TOPOLOGIES = by_workers([(1, 0), (2, 0), (3, 0), (12, 0), (1, 1), (1, 3), (2, 2), (4, 1)])


@pytest.mark.parametrize(("world_size", "num_workers"), TOPOLOGIES)
def test_global_batches_are_the_same_for_every_topology(small, large, world_size, num_workers):
    expected = global_batches(20, small, large, weights=[2, 1])
    batches = global_batches(20, small, large, weights=[2, 1], world_size=world_size, num_workers=num_workers)
    assert batches == expected
    assert [sample[3] for batch in batches for sample in batch] == list(range(20 * B))
    assert global_batches(20, small, large, weights=[2, 1], seed=SEED + 1) != expected


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_every_sample_once_an_epoch_though_batches_straddle_its_end(small, texts, world_size):
    n = small.num_samples
    assert n % B, "batches must straddle the end of an epoch"
    read = list(itertools.chain.from_iterable(global_batches(3 * n // B + 1, small, world_size=world_size)))
    orders = []
    for epoch in range(3):
        chosen = read[epoch * n : (epoch + 1) * n]
        assert {sample[2] for sample in chosen} == {epoch}
        assert sorted(sample[1] for sample in chosen) == list(range(n))
        assert all(sample[4] == texts[sample[1]] for sample in chosen)
        orders.append([sample[1] for sample in chosen])
    assert orders[0] != orders[1] != orders[2], "every epoch has an order of its own"


def test_a_batch_may_span_several_epochs(small):
    (batch,) = global_batches(1, small, global_batch_size=300)
    assert np.bincount([sample[2] for sample in batch]).tolist() == [101, 101, 98]
    for epoch in range(2):
        assert sorted(sample[1] for sample in batch if sample[2] == epoch) == list(range(101))


@pytest.mark.processes
def test_draws_about_a_sample_do_not_depend_on_who_reads_it(small):
    for sample in global_batches(3, small, world_size=2, num_workers=1)[2]:
        assert sample[5] == draw(sample[2], sample[0], sample[1])
        assert sample[5] != draw(sample[2] + 1, sample[0], sample[1])


def test_without_shuffling_samples_come_in_order(small):
    batches = global_batches(10, small, shuffle=False)
    assert [sample[1] for batch in batches for sample in batch] == [i % 101 for i in range(120)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, 0), (2, 0)),
        *(
            pytest.param(*case, marks=pytest.mark.processes)
            for case in (((2, 0), (3, 1)), ((1, 2), (4, 0)), ((3, 1), (1, 3)), ((2, 2), (2, 2)))
        ),
    ],
)
def test_resume_under_another_topology(small, large, before, after):
    undisturbed = global_batches(24, small, large)
    first = stream(small, large, rank=before[0] - 1, world_size=before[0], num_workers=before[1])
    for _ in range(11):
        next(first)
    # Through JSON, as checkpoints keep it. Workers have prefetched beyond step 11: only what was delivered counts.
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    assert state["samples"] == 11 * B
    resumed = global_batches(13, small, large, state=state, world_size=after[0], num_workers=after[1])
    assert resumed == undisturbed[11:]
    assert resumed != undisturbed[10:-1]


@pytest.mark.processes
def test_a_running_stream_can_be_set_back(small):
    one = stream(small, num_workers=2)
    batches = [next(one) for _ in range(3)]
    start = {**one.state_dict(), "samples": B}
    one.load_state_dict(start)
    assert [next(one) for _ in range(2)] == batches[1:]
    one.close()
    assert next(one) == global_batches(4, small)[3]
    one.close()


def test_a_seek_reads_nothing_forward(large, monkeypatch):
    read: list[int] = []
    samples = ShardFolder.samples
    monkeypatch.setattr(ShardFolder, "samples", lambda self, which: (read.extend(which), samples(self, which))[1])
    one = stream(large)
    one.load_state_dict({**one.state_dict(), "samples": 10**15})
    batch = next(one)
    assert read == [sample[1] for sample in batch] and len(read) == B
    assert batch[0][2] == 10**15 // large.num_samples


def test_another_global_batch_size_goes_on_at_the_same_sample(small, caplog):
    one = stream(small)
    for _ in range(4):
        next(one)
    other = stream(small, global_batch_size=B // 2)
    other.load_state_dict(one.state_dict())
    assert next(other) + next(other) == next(one)
    assert "global_batch_size changes" in caplog.text


def test_progress_is_counted_in_epochs(small, large):
    one = stream(small, large)
    assert one.samples_per_epoch == small.num_samples + large.num_samples
    assert one.epoch == 0
    next(one)
    assert one.epoch == B / one.samples_per_epoch
    assert one.samples == B


@pytest.mark.parametrize("weights", [[3, 1], [0.25, 0.75]])
def test_mixtures_hold_their_proportions_in_every_cycle(small, large, weights):
    batches = global_batches(30, small, large, weights=weights)
    expected = np.array(weights) / sum(weights) * B
    for batch in batches:
        assert (np.bincount([sample[0] for sample in batch], minlength=2) == expected).all()


def test_sources_of_a_mixture_keep_their_own_epochs(small, large):
    read = list(itertools.chain.from_iterable(global_batches(60, small, large, weights=[3, 1])))
    for source, folder in enumerate((small, large)):
        mine = [sample for sample in read if sample[0] == source]
        for epoch in range(len(mine) // folder.num_samples):
            chosen = mine[epoch * folder.num_samples : (epoch + 1) * folder.num_samples]
            assert {sample[2] for sample in chosen} == {epoch}
            assert sorted(sample[1] for sample in chosen) == list(range(folder.num_samples))
    assert max(sample[2] for sample in read if sample[0] == 0) > max(sample[2] for sample in read if sample[0] == 1)


def test_without_weights_all_sources_end_their_epochs_together(small, large):
    one = stream(small, large, global_batch_size=small.num_samples + large.num_samples)
    for epoch in range(2):
        batch = next(one)
        assert {sample[2] for sample in batch} == {epoch}
        assert len({sample[:2] for sample in batch}) == len(batch)


def test_the_same_folder_twice_is_read_in_two_orders(small):
    read = list(itertools.chain.from_iterable(global_batches(10, small, small, weights=[1, 1])))
    assert [s[1] for s in read if s[0] == 0] != [s[1] for s in read if s[0] == 1]


@pytest.mark.processes
def test_tensors_travel_from_workers(small):
    with_workers = stream(small, collate=as_tensors, num_workers=2)
    alone = stream(small, collate=as_tensors)
    for _ in range(5):
        batch = next(with_workers)
        assert torch.is_tensor(batch) and torch.equal(batch, next(alone))
    with_workers.close()


@pytest.mark.processes
def test_workers_leave_the_global_generators_alone(small):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    one = stream(small, num_workers=2)
    next(one)
    one.close()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_tuples_stream_too(tmp_path, tiny_tokenizer, texts, num_workers):
    with SplitWriter(tmp_path, 0, kind="tuples", vocabulary_size=len(tiny_tokenizer), chunk_samples=8) as writer:
        for index in range(50):
            writer.add_tuple(texts[index], texts[index + 1 : index + 4], num_positives=1)
    finish_folder(tmp_path, 1, tokenizer=tiny_tokenizer)
    one = stream(ShardFolder(tmp_path), collate=list, num_workers=num_workers)
    for sample in next(one):
        assert sample.payload.query.tolist() == texts[sample.index]
        assert [ids.tolist() for ids in sample.payload.passages] == texts[sample.index + 1 : sample.index + 4]
    one.close()


# ------------------------------------------------------------------------------ one dataset, no duplicates, last batch


def make_tuples(folder: Path, texts: list[list[int]], tokenizer, *, samples: int, queries: int) -> ShardFolder:
    """`samples` tuples of 1 to 3 positives and 0 to 4 negatives, over `queries` different queries."""
    rng = np.random.default_rng(samples)
    with SplitWriter(folder, 0, kind="tuples", vocabulary_size=len(tokenizer), chunk_samples=8) as writer:
        for _ in range(samples):
            positives, negatives = int(rng.integers(1, 4)), int(rng.integers(5))
            passages = [texts[i] for i in rng.choice(len(texts), size=positives + negatives, replace=False)]
            writer.add_tuple(texts[int(rng.integers(queries))], passages, num_positives=positives)
    finish_folder(folder, 1, tokenizer=tokenizer)
    return ShardFolder(folder)


@pytest.fixture(scope="module")
def few_queries(tmp_path_factory, tiny_tokenizer, texts) -> ShardFolder:
    return make_tuples(tmp_path_factory.mktemp("few"), texts, tiny_tokenizer, samples=261, queries=60)


@pytest.fixture(scope="module")
def many_queries(tmp_path_factory, tiny_tokenizer, texts) -> ShardFolder:
    return make_tuples(tmp_path_factory.mktemp("many"), texts, tiny_tokenizer, samples=98, queries=250)


@pytest.fixture(scope="module")
def pairs(few_queries) -> PairCollator:
    return PairCollator(few_queries.vocabulary, query_max_length=20, passage_max_length=30, num_negatives=2, seed=SEED)


def place_of(samples: list[Sample]) -> list[tuple[int, int, int, int]]:
    return [(s.source, s.index, s.epoch, s.position) for s in samples]


def identities(batch: list[tuple]) -> list[tuple]:
    return [sample[:3] for sample in batch]


def naive_batches(steps: int, *sources: ShardFolder, weights: list[int], batches: str, total: int | None = None):
    """(source, index, epoch) of every sample, by counting through the mixture from its start."""
    pattern = itertools.cycle(interleave(weights).tolist())
    endless = [alone(source, number) for number, source in enumerate(sources)]
    found = []
    for step in range(steps):
        size = B if total is None else min(B, total - step * B)
        chosen = [next(pattern)] * size if batches == "one_dataset" else [next(pattern) for _ in range(size)]
        found.append([next(endless[source]) for source in chosen])
    return found


def alone(source: ShardFolder, number: int):
    """One source's own endless sequence, under its number in the mixture."""
    order = EpochOrder(source.chunk_samples, SEED, source=number)
    for epoch in itertools.count():
        for index in order.locate(epoch, np.arange(source.num_samples)).tolist():
            yield number, index, epoch


FEEDS = [
    {"batches": batches, "total_samples": total}
    for batches in ("mixed", "one_dataset")
    for total in (None, 30 * B, 30 * B - 1, 29 * B + 1)
]
UNEVEN_TOPOLOGIES = by_workers([(1, 0), (2, 0), (5, 0), (8, 1), (12, 0), (3, 3)])


@pytest.mark.parametrize("options", FEEDS, ids=str)
def test_streams_equal_counting_through_the_mixture(small, large, options):
    weights = [2, 3]
    expected = naive_batches(
        30, small, large, weights=weights, batches=options["batches"], total=options["total_samples"]
    )
    batches = global_batches(30, small, large, weights=weights, collate=place_of, **options)
    assert [identities(batch) for batch in batches] == expected
    sources = [{sample[0] for sample in batch} for batch in batches]
    if options["batches"] == "one_dataset":
        assert all(len(each) == 1 for each in sources)
        assert [each.pop() for each in sources] == interleave(weights).tolist() * 6
    else:
        assert all(len(each) == 2 for each in sources[:-1]), "negative control: mixed batches hold both"


@pytest.fixture(scope="module", params=FEEDS[1:], ids=str)
def feed_of_one_rank(request, small, large):
    """Options of a feed, and the batches that one rank reads with them."""
    return request.param, global_batches(30, small, large, collate=place_of, **request.param)


@pytest.mark.parametrize(("world_size", "num_workers"), UNEVEN_TOPOLOGIES)
def test_shares_of_any_size_join_to_the_same_batches(small, large, feed_of_one_rank, world_size, num_workers):
    options, expected = feed_of_one_rank
    feed = {**options, "collate": place_of, "num_workers": num_workers, "world_size": world_size}
    assert global_batches(30, small, large, **feed) == expected
    # The same from a later place, and then the end.
    state = {**stream(small, large, **options).state_dict(), "samples": 28 * B}
    ranks = [stream(small, large, rank=rank, **feed) for rank in range(world_size)]
    for one in ranks:
        one.load_state_dict(state)
    for step in (28, 29):
        shares = [next(one) for one in ranks]
        assert list(itertools.chain.from_iterable(shares)) == expected[step]
        sizes = [len(share) for share in shares]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    for one in ranks:
        total = options["total_samples"]
        assert one.samples == one.state_dict()["samples"] == (total or 30 * B)
        assert one.epoch == one.samples / one.samples_per_epoch
        if total:
            assert one.num_steps == 30
            for _ in range(2):
                with pytest.raises(StopIteration):
                    next(one)
            resumed = stream(small, large, **options)
            resumed.load_state_dict(one.state_dict())
            assert list(resumed) == []
        one.close()


def test_an_epoch_of_a_stream_that_ends_is_every_sample_once(small, large):
    total = small.num_samples + large.num_samples
    assert total % B
    for world_size in (1, 5):
        one_epoch = global_batches(-(-total // B), small, large, world_size=world_size, total_samples=total)
        read = [identity for batch in one_epoch for identity in identities(batch)]
        assert sorted(read) == [(0, i, 0) for i in range(small.num_samples)] + [
            (1, i, 0) for i in range(large.num_samples)
        ]
        assert len(one_epoch[-1]) == total % B


def test_weights_follow_the_temperature(small, large):
    sizes = np.array([small.num_samples, large.num_samples])
    for temperature in (1.0, 2.0, 1e9):
        one = stream(small, large, mixture_temperature=temperature)
        shares = np.array(one.weights) / sum(one.weights)
        np.testing.assert_allclose(shares, sizes ** (1 / temperature) / (sizes ** (1 / temperature)).sum(), atol=1e-5)
    assert list(stream(small, large, mixture_temperature=1e9).weights) == [1, 1]


def repeated(batch: list[Sample], pairs: PairCollator) -> int:
    """Samples of a batch that share a text with another of it, by the ids that the model would read."""
    made = pairs(batch)
    texts: list[set[tuple[int, ...]]] = []
    for row in range(len(batch)):
        mine = [made.queries.tokens[made.queries.offsets[row] : made.queries.offsets[row + 1]]]
        for passage in (made.passage_query == row).nonzero()[:, 0].tolist():
            mine.append(made.passages.tokens[made.passages.offsets[passage] : made.passages.offsets[passage + 1]])
        texts.append({tuple(ids.tolist()) for ids in mine})
    return sum(any(texts[i] & texts[j] for j in range(len(texts)) if j != i) for i in range(len(texts)))


@pytest.mark.parametrize("options", FEEDS, ids=str)
def test_no_batch_holds_a_text_twice_and_every_sample_comes_once(few_queries, many_queries, pairs, options):
    sources, steps = (few_queries, many_queries), 30
    plain = global_batches(steps, *sources, collate=list, **options)
    distinct = global_batches(steps, *sources, collate=list, distinct_texts=pairs.drawn_texts, **options)
    assert [len(batch) for batch in distinct] == [len(batch) for batch in plain]
    assert [s.position for batch in distinct for s in batch] == [s.position for batch in plain for s in batch]
    assert sum(repeated(batch, pairs) for batch in plain) > 20, "the plain order must have what is fixed"
    # A substream's last window may be too short to part what it holds; all others must.
    substreams = [batch[0].source if options["batches"] == "one_dataset" else 0 for batch in plain]
    windows: dict[tuple[int, int], list[int]] = {}
    for step, substream in enumerate(substreams):
        windows.setdefault((substream, substreams[:step].count(substream) // WINDOW_BATCHES), []).append(step)
    assert any(len(window) == WINDOW_BATCHES for window in windows.values())
    for steps_of_window in windows.values():
        if len(steps_of_window) == WINDOW_BATCHES:
            assert not any(repeated(distinct[step], pairs) for step in steps_of_window)
        if len(steps_of_window) == WINDOW_BATCHES or options["total_samples"]:
            before, after = (
                sorted(place[:3] for step in steps_of_window for place in place_of(batches[step]))
                for batches in (plain, distinct)
            )
            assert before == after
    if options["total_samples"]:
        assert sorted(identities([p for b in distinct for p in place_of(b)])) == sorted(
            identities([p for b in plain for p in place_of(b)])
        )
    if options["batches"] == "one_dataset":
        assert [batch[0].source for batch in distinct] == substreams
        assert all(len({sample.source for sample in batch}) == 1 for batch in distinct)


@pytest.fixture(scope="module", params=["mixed", "one_dataset"])
def distinct_feed_of_one_rank(request, few_queries, many_queries, pairs):
    """Options of a feed without equal texts in a batch, and the batches that one rank reads with them."""
    options = {
        "batches": request.param,
        "collate": place_of,
        "distinct_texts": pairs.drawn_texts,
        "total_samples": 40 * B - 5,
    }
    expected = global_batches(40, few_queries, many_queries, **options)
    assert expected != global_batches(40, few_queries, many_queries, **{**options, "distinct_texts": None})
    return options, expected


@pytest.mark.parametrize(("world_size", "num_workers"), UNEVEN_TOPOLOGIES)
def test_distinct_batches_are_the_same_for_every_topology_and_seek(
    few_queries, many_queries, distinct_feed_of_one_rank, world_size, num_workers
):
    options, expected = distinct_feed_of_one_rank
    sources = (few_queries, many_queries)
    begin = stream(*sources, **options).state_dict()
    for first in (0, 1, 15, 16, 37):
        steps = min(6, 40 - first)
        found = global_batches(
            steps,
            *sources,
            state={**begin, "samples": first * B},
            world_size=world_size,
            num_workers=num_workers,
            **options,
        )
        assert found == expected[first : first + steps]


def test_a_seek_with_distinct_texts_reads_one_window(few_queries, pairs, monkeypatch):
    read: list[int] = []
    original = ShardFolder.tuples
    monkeypatch.setattr(
        ShardFolder, "tuples", lambda self, indices: (read.append(len(indices)), original(self, indices))[1]
    )
    one = stream(few_queries, collate=place_of, distinct_texts=pairs.drawn_texts)
    one.load_state_dict({**one.state_dict(), "samples": B * 10**12})
    next(one)
    assert sum(read) == WINDOW_BATCHES * B + B


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_what_cannot_be_parted_is_counted_and_said_once(tmp_path, tiny_tokenizer, texts, pairs, num_workers, caplog):
    folder = make_tuples(tmp_path, texts, tiny_tokenizer, samples=100, queries=3)
    steps, options = 20, {"collate": list, "distinct_texts": pairs.drawn_texts, "num_workers": num_workers}
    ranks = [stream(folder, rank=rank, world_size=2, **options) for rank in range(2)]
    expected = 0
    for _ in range(steps):
        batch = [sample for one in ranks for sample in next(one)]
        expected += repeated(batch, pairs)
    assert [one.repeats for one in ranks] == [expected] * 2 and expected > steps
    assert len(caplog.messages) == 1 and "share a text" in caplog.messages[0]
    for one in ranks:
        one.close()
    read = list(itertools.chain.from_iterable(global_batches(WINDOW_BATCHES, folder, **options)))
    plain = list(itertools.chain.from_iterable(global_batches(WINDOW_BATCHES, folder, collate=list)))
    assert sorted(place[:3] for place in place_of(read)) == sorted(place[:3] for place in place_of(plain))


@pytest.mark.parametrize("options", [{"batches": "one_dataset"}, {"distinct_texts": list}], ids=str)
def test_where_batches_decide_the_order_their_size_stays(small, options):
    one = stream(small, **options)
    other = stream(small, global_batch_size=B // 2, **options)
    with pytest.raises(DataError, match=r"global_batch_size is 6, .*resume with the batch size"):
        other.load_state_dict(one.state_dict())


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_a_damaged_shard_is_one_sentence_after_the_batches_before_it(tmp_path, tiny_tokenizer, texts, num_workers):
    folder = make_folder(tmp_path, texts, tiny_tokenizer)
    entry = read_manifest(tmp_path).shards[-1]
    offset, length = entry.chunks[0].members["tok"]
    with (tmp_path / entry.name).open("r+b") as file:
        file.seek(offset + length - 1)
        file.write(b"\xff")
    first_damaged = folder.num_samples - entry.samples
    one = stream(folder, shuffle=False, num_workers=num_workers)
    sound = first_damaged // B
    for _ in range(sound):
        next(one)
    for _ in range(2):  # whoever tries again is told again
        with pytest.raises(DataError, match="is damaged: its sha256") as caught:
            next(one)
        assert "\n" not in str(caught.value)
        assert str(tmp_path / entry.name) in str(caught.value)
        assert one.state_dict()["samples"] == sound * B
    one.close()


@pytest.mark.processes
def test_our_own_faults_keep_their_traceback(small):
    one = stream(small, collate=broken_collator, num_workers=1)
    with pytest.raises(RuntimeError, match="Traceback"):
        next(one)
    with pytest.raises(RuntimeError, match=r"^a fault of ours$"):
        next(stream(small, collate=broken_collator))


def test_states_of_other_data_or_another_order_are_refused(small, large):
    one = stream(small, large, weights=[1, 2])
    state = one.state_dict()
    one.load_state_dict(state)
    for other, words in (
        (stream(small, large, weights=[1, 2], seed=SEED + 1), "seed"),
        (stream(large, small, weights=[1, 2]), "fingerprints"),
        (stream(small, large, weights=[2, 1]), "weights"),
        (stream(small, large, weights=[1, 2], shuffle=False), "shuffle"),
        (stream(small, large, mixture_temperature=3.0), "weights"),
        (stream(small, large, weights=[1, 2], batches="one_dataset"), "batches"),
        (stream(small, large, weights=[1, 2], distinct_texts=lambda samples: None), "no_duplicates"),
        (stream(small, large, weights=[1, 2], total_samples=100), "total_samples"),
    ):
        with pytest.raises(DataError, match=f"stream's {words}") as caught:
            other.load_state_dict(state)
        assert "\n" not in str(caught.value)


def test_streams_that_cannot_be_made(small, tmp_path, tiny_tokenizer, texts):
    with SplitWriter(tmp_path / "t", 0, kind="tuples", vocabulary_size=len(tiny_tokenizer)) as writer:
        writer.add_tuple([5], [[6]])
    finish_folder(tmp_path / "t", 1, tokenizer=tiny_tokenizer)
    other_tokenizer = AutoTokenizer.from_pretrained(small.tokenizer_path)
    other_tokenizer.add_tokens(["latte"])
    other = make_folder(tmp_path / "o", texts[:30], other_tokenizer)
    for make, words in (
        (lambda: stream(), "at least one"),
        (lambda: stream(small, ShardFolder(tmp_path / "t")), "differ in kind"),
        (lambda: stream(small, other), "differ in tokenizer"),
        (lambda: stream(small, global_batch_size=0), "global_batch_size 0"),
        (lambda: stream(small, total_samples=0), "total_samples 0"),
        (lambda: stream(small, small, weights=[1, 2], mixture_temperature=2.0), "give one"),
        (lambda: stream(small, mixture_temperature=0.5), "temperature 0.5"),
        (lambda: stream(small, weights=[1, 2]), "2 weights"),
        (lambda: stream(small, weights=[0]), "positive number"),
        (lambda: stream(small, seed=-1), "seed -1"),
        (lambda: stream(small, num_workers=-1), "num_workers"),
        (lambda: stream(small, rank=1), "rank 1"),
    ):
        with pytest.raises(DataError, match=words):
            make()


def test_a_shard_lost_during_a_run_is_named(tmp_path, tiny_tokenizer, texts, monkeypatch):
    monkeypatch.setattr(reader, "MAX_OPEN_SHARDS", 1)
    folder = make_folder(tmp_path, texts, tiny_tokenizer)
    one = stream(folder)
    next(one)
    lost = tmp_path / folder.manifest.shards[0].name
    lost.unlink()
    with pytest.raises(DataError, match="is missing") as caught:
        for _ in range(100):
            next(one)
    assert str(lost) in str(caught.value)


def test_what_workers_are_given_pickles(small):
    """Where processes are not forked, workers get the source of batches by pickle."""
    one = stream(small)
    expected = next(one)
    again = pickle.loads(pickle.dumps(one._source))
    assert next(iter(again)).batch == expected


def test_samples_pickle(small):
    sample = Sample(0, 1, 2, 3, small.document(1))
    again = pickle.loads(pickle.dumps(sample))
    assert (again.source, again.index, again.epoch, again.position) == (0, 1, 2, 3)
    assert (again.payload == sample.payload).all()
