"""Collators: what a batch holds, keyed draws, and the late padding."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pytest
import torch

from data.collate import (
    SOURCE_STRIDE,
    MaskedBatch,
    MaskedCollator,
    MaskedPairCollator,
    PairCollator,
    SpanCollator,
    Texts,
    text_hashes,
)
from data.ground.errors import DataError
from data.shards.format import Tuple
from data.stream import Sample
from data.tokens import Vocabulary
from tests.padding import pad_flat, pad_texts

CLS, SEP, MASK = 1, 2, 3


@pytest.fixture
def vocabulary() -> Vocabulary:
    return Vocabulary(500, (CLS,), (SEP,), 0, MASK, (0, 1, 2, 3), np.arange(500) % 4 == 3)


def documents(lengths: Sequence[int], *, epoch: int = 0, source: int = 0) -> list[Sample]:
    rng = np.random.default_rng(0)
    payloads = [rng.integers(4, 500, size=length).astype(np.uint16) for length in lengths]
    return [Sample(source, index, epoch, index, payload) for index, payload in enumerate(payloads)]


def tuples(shapes: Sequence[tuple[int, int]], *, score: float | None = None, epoch: int = 0) -> list[Sample]:
    """Queries with (positives, negatives); every text is told by its first id."""
    samples = []
    for index, (positives, negatives) in enumerate(shapes):
        passages = [np.array([100 + index, 10 + number, 9, 9, 9]) for number in range(positives + negatives)]
        samples.append(Sample(0, index, epoch, index, Tuple(np.array([50 + index] * 6), passages, positives, score)))
    return samples


def masked(vocabulary: Vocabulary, **options: object) -> MaskedCollator:
    settings = {"max_length": 32, "encoder_mask_ratio": 0.2, "decoder_mask_ratio": 0.5, "nested": True, "seed": 1}
    return MaskedCollator(vocabulary, **{**settings, **options})  # type: ignore[arg-type]


def equal(left: object, right: object) -> bool:
    """Batches with the same tensors."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if left is None or right is None:
        return left is right
    return all(equal(getattr(left, item.name), getattr(right, item.name)) for item in fields(left))  # type: ignore[arg-type]


def test_masked_batch_holds_the_texts_with_special_tokens(vocabulary: Vocabulary) -> None:
    samples = documents([5, 30, 1, 200], source=2)
    batch = masked(vocabulary)(samples)
    assert batch.offsets.tolist() == [0, 7, 39, 42, 74]
    assert (batch.num_samples, batch.num_tokens) == (4, 74)
    assert batch.sample_ids.tolist() == [2 * SOURCE_STRIDE + index for index in range(4)]
    assert batch.decoder_input_ids is not None and batch.decoder_labels is not None
    for inputs, labels in (
        (batch.encoder_input_ids, batch.encoder_labels),
        (batch.decoder_input_ids, batch.decoder_labels),
    ):
        assert inputs.dtype == labels.dtype == torch.int32
        original = torch.where(labels == -100, inputs, labels)
        for index, (start, end) in enumerate(zip(batch.offsets.tolist(), batch.offsets.tolist()[1:], strict=False)):
            text = original[start:end].tolist()
            assert (text[0], text[-1]) == (CLS, SEP)
            assert ("".join(f",{token}" for token in text[1:-1]) + ",") in (
                "".join(f",{token}" for token in samples[index].payload.tolist()) + ","
            )
    assert not ((batch.encoder_labels != -100) & (batch.decoder_labels == -100)).any()
    assert (batch.encoder_labels != -100).sum() < (batch.decoder_labels != -100).sum()


def test_enhanced_decoding_gets_every_ordinary_token_and_a_key_a_text(vocabulary: Vocabulary) -> None:
    """The encoder's side is what it is without a decoder; the keys depend on epoch and sample, not on the batch."""
    samples = documents([5, 30, 1, 200])
    collate = masked(vocabulary, enhanced=True)
    batch, alone = collate(samples), masked(vocabulary, decoder_mask_ratio=None)(samples)
    assert equal(batch.encoder_labels, alone.encoder_labels)
    assert equal(batch.encoder_input_ids, alone.encoder_input_ids)
    inputs, labels = batch.decoder_input_ids, batch.decoder_labels
    assert inputs is not None and labels is not None and inputs.dtype == labels.dtype == torch.int32
    assert equal(inputs, torch.where(batch.encoder_labels == -100, batch.encoder_input_ids, batch.encoder_labels))
    special = torch.isin(inputs, torch.tensor(vocabulary.special_ids, dtype=torch.int32))
    assert bool((labels[special] == -100).all()) and equal(labels[~special], inputs[~special])
    keys = batch.visibility_keys
    assert keys is not None and len(set(keys.tolist())) == 4
    assert equal(collate(samples[::-1]).visibility_keys, keys.flip(0))
    later = collate(documents([5, 30, 1, 200], epoch=1)).visibility_keys
    assert later is not None and not set(later.tolist()) & set(keys.tolist())
    assert alone.visibility_keys is None and masked(vocabulary)(samples).visibility_keys is None


def unmasked(batch: MaskedBatch) -> list[list[int]]:
    """Each text's own tokens."""
    tokens = torch.where(batch.encoder_labels == -100, batch.encoder_input_ids, batch.encoder_labels).tolist()
    return [tokens[a:b] for a, b in zip(batch.offsets.tolist(), batch.offsets.tolist()[1:], strict=False)]


def test_two_spans_of_a_document_are_a_pair_and_share_nothing(vocabulary: Vocabulary) -> None:
    samples = documents([5, 30, 2, 200], source=1)
    collate = SpanCollator(masked(vocabulary, max_length=16))
    batch = collate(samples)
    assert (batch.num_samples, len(batch.offsets) - 1) == (4, 8)
    texts = unmasked(batch)
    for index, sample in enumerate(samples):
        document = sample.payload.tolist()
        middle = (len(document) + 1) // 2
        for text, half in zip((texts[index], texts[4 + index]), (document[:middle], document[middle:])):
            assert (text[0], text[-1]) == (CLS, SEP) and len(text) == min(16, len(half) + 2)
            places = range(len(half) - len(text) + 3)
            assert any(half[place : place + len(text) - 2] == text[1:-1] for place in places)
    pairs = batch.pairs
    assert pairs is not None and pairs.targets.tolist() == [0, 1, 2, 3]
    own = [*zip(pairs.queries.offsets.tolist(), pairs.queries.offsets.tolist()[1:])]
    assert [pairs.queries.tokens[a:b].tolist() for a, b in own] == texts[:4]
    own = [*zip(pairs.passages.offsets.tolist(), pairs.passages.offsets.tolist()[1:])]
    assert [pairs.passages.tokens[a:b].tolist() for a, b in own] == texts[4:]
    hashes = text_hashes([np.array(text[1:-1]) for text in texts])
    assert torch.cat([pairs.query_hashes, pairs.passage_hashes]).tolist() == hashes.tolist()
    assert equal(pairs.known_hashes, pairs.passage_hashes) and pairs.known_offsets.tolist() == [0, 1, 2, 3, 4]
    # Other texts in the batch change no span and no mask.
    alone = collate(samples[3:])
    start, end = batch.offsets[7:9].tolist()
    assert unmasked(alone) == [texts[3], texts[7]]
    assert alone.encoder_labels[int(alone.offsets[1]) :].tolist() == batch.encoder_labels[start:end].tolist()
    later = unmasked(collate(documents([5, 30, 2, 200], epoch=1, source=1)))
    assert later[3] != texts[3] and later[7] != texts[7]
    assert collate([]).num_samples == 0


def test_tuples_are_masked_text_by_text_and_stay_pairs(vocabulary: Vocabulary) -> None:
    samples = tuples([(1, 2), (2, 0), (1, 5)])
    lengths = {"query_max_length": 8, "passage_max_length": 8, "num_negatives": 2, "seed": 1}
    plain = PairCollator(vocabulary, **lengths)  # type: ignore[arg-type]
    collate = MaskedPairCollator(masked(vocabulary, encoder_mask_ratio=0.3, enhanced=True), plain)
    batch, pairs = collate(samples), plain(samples)
    assert batch.pairs is not None and equal(batch.pairs, pairs)
    assert batch.num_samples == 3 and len(batch.offsets) - 1 == 3 + 7
    tokens = torch.cat([pairs.queries.tokens, pairs.passages.tokens]).tolist()
    assert [token for text in unmasked(batch) for token in text] == tokens
    assert (batch.encoder_labels != -100).any()
    assert batch.visibility_keys is not None and len(set(batch.visibility_keys.tolist())) == 10
    alone = collate(samples[2:])
    assert alone.visibility_keys is not None
    assert alone.visibility_keys.tolist() == [batch.visibility_keys[k].item() for k in (2, 7, 8, 9)]
    assert collate([]).num_samples == 0


def test_without_a_decoder_there_is_no_decoder_side(vocabulary: Vocabulary) -> None:
    alone = masked(vocabulary, decoder_mask_ratio=None)(documents([20] * 3))
    both = masked(vocabulary)(documents([20] * 3))
    assert alone.decoder_input_ids is None and alone.decoder_labels is None
    assert torch.equal(alone.encoder_input_ids, both.encoder_input_ids)


def test_windows_are_uniform_and_drawn_anew_each_epoch(vocabulary: Vocabulary) -> None:
    payload = np.arange(10, 10 + 40).astype(np.uint16)  # 40 ids, 30 fit: 11 windows
    samples = [Sample(0, index, 0, index, payload) for index in range(4000)]
    collate = masked(vocabulary, encoder_mask_ratio=0.0, decoder_mask_ratio=None)
    starts = collate(samples).encoder_input_ids.reshape(4000, 32)[:, 1].numpy() - 10
    counts = np.bincount(starts, minlength=11)
    assert len(counts) == 11
    assert np.abs(counts / 4000 - 1 / 11).max() < 5 * np.sqrt(1 / 11 * 10 / 11 / 4000)
    later = collate([Sample(0, index, 1, index, payload) for index in range(4000)])
    assert (later.encoder_input_ids.reshape(4000, 32)[:, 1].numpy() - 10 != starts).mean() > 0.8


@pytest.mark.parametrize("nested", [True, False])
def test_a_sample_is_the_same_in_any_batch(vocabulary: Vocabulary, nested: bool) -> None:
    samples = documents([5, 90, 33, 70, 12])
    collate = masked(vocabulary, nested=nested)
    whole = collate(samples)
    for index, sample in enumerate(samples):
        alone = collate([sample])
        rows = slice(int(whole.offsets[index]), int(whole.offsets[index + 1]))
        for name in ("encoder_input_ids", "encoder_labels", "decoder_input_ids", "decoder_labels"):
            assert torch.equal(getattr(whole, name)[rows], getattr(alone, name))
    moved = [Sample(sample.source, sample.index, sample.epoch, 77, sample.payload) for sample in samples]
    assert equal(collate(moved), whole)
    assert not equal(collate(documents([5, 90, 33, 70, 12], epoch=1)), whole)
    assert not equal(masked(vocabulary, nested=nested, seed=2)(samples), whole)


def test_padding_equals_a_plain_loop() -> None:
    offsets = torch.tensor([0, 3, 3, 8, 9])
    values = torch.arange(100, 109, dtype=torch.int32)
    rows = torch.tensor([2, 0, 3, 1])
    expected = [[103, 104, 105, 106, 107], [100, 101, 102, -1, -1], [108, -1, -1, -1, -1], [-1, -1, -1, -1, -1]]
    assert pad_flat(values, offsets, rows, fill=-1).tolist() == expected
    input_ids, attention_mask = pad_texts(Texts(values, offsets), rows, pad_id=-1)
    assert input_ids.dtype == attention_mask.dtype == torch.int64
    assert input_ids.tolist() == expected
    assert attention_mask.tolist() == [[int(value != -1) for value in row] for row in expected]
    assert Texts(values, offsets).lengths.tolist() == [3, 0, 5, 1] and len(Texts(values, offsets)) == 4
    assert pad_flat(values, offsets, rows[:0], fill=0).shape == (0, 0)


def test_pairs_stand_positive_first_then_negatives(vocabulary: Vocabulary) -> None:
    samples = tuples([(1, 3), (2, 0), (1, 1), (3, 9)])
    collate = PairCollator(vocabulary, query_max_length=5, passage_max_length=4, num_negatives=2, seed=3)
    batch = collate(samples)
    assert batch.passage_query.tolist() == [0, 0, 0, 1, 2, 2, 3, 3, 3]
    assert batch.targets.tolist() == [0, 3, 4, 6]
    assert batch.scores is None
    queries, _ = pad_texts(batch.queries, torch.arange(4), pad_id=0)
    assert queries.tolist() == [[CLS, 50 + index, 50 + index, 50 + index, SEP] for index in range(4)]
    passages, _ = pad_texts(batch.passages, torch.arange(len(batch.passages)), pad_id=0)
    assert passages[:, 1].tolist() == [100 + query for query in batch.passage_query.tolist()]
    number = passages[:, 2] - 10
    for query, (positives, negatives) in enumerate([(1, 3), (2, 0), (1, 1), (3, 9)]):
        mine = number[batch.passage_query == query].tolist()
        assert 0 <= mine[0] < positives
        assert len(set(mine[1:])) == len(mine) - 1 == min(2, negatives)
        assert all(positives <= other < positives + negatives for other in mine[1:])
    assert batch.num_tokens == len(batch.queries.tokens) + len(batch.passages.tokens)


def test_several_positives_stand_before_the_negatives(vocabulary: Vocabulary) -> None:
    shapes = [(1, 3), (2, 0), (5, 1), (3, 9)]
    settings = {"query_max_length": 5, "passage_max_length": 4, "num_negatives": 2, "seed": 3}
    collate = PairCollator(vocabulary, **settings, num_positives=3)  # type: ignore[arg-type]
    batch = collate(tuples(shapes))
    assert batch.passage_query.tolist() == [0] * 3 + [1] * 2 + [2] * 4 + [3] * 5
    assert batch.target_query is not None and batch.target_query.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3]
    assert batch.targets.tolist() == [0, 3, 4, 5, 6, 7, 9, 10, 11]
    passages, _ = pad_texts(batch.passages, torch.arange(len(batch.passages)), pad_id=0)
    assert passages[:, 1].tolist() == [100 + query for query in batch.passage_query.tolist()]
    number = passages[:, 2] - 10
    for query, (positives, negatives) in enumerate(shapes):
        mine = number[batch.passage_query == query].tolist()
        count = min(3, positives)
        assert len(set(mine)) == len(mine) == count + min(2, negatives)
        assert all(other < positives for other in mine[:count]) and all(other >= positives for other in mine[count:])
    # The negatives are those that are drawn beside one positive; which positives, changes from epoch to epoch.
    one = PairCollator(vocabulary, **settings)(tuples(shapes))  # type: ignore[arg-type]
    assert one.target_query is None
    drawn = [hashes[batch.passage_query == 3][3:].tolist() for hashes in (batch.passage_hashes,)]
    assert drawn == [one.passage_hashes[one.passage_query == 3][1:].tolist()]
    sets = {tuple(collate(tuples(shapes, epoch=epoch)).passage_hashes[5:8].tolist()) for epoch in range(20)}
    assert len({frozenset(each) for each in sets}) > 3
    hashes, offsets = collate.drawn_texts(tuples(shapes))
    assert hashes[offsets[2] : offsets[3]].tolist() == [int(batch.query_hashes[2]), *batch.passage_hashes[5:9].tolist()]
    with pytest.raises(DataError, match="num_positives is 0"):
        PairCollator(vocabulary, **settings, num_positives=0)  # type: ignore[arg-type]


def test_positives_and_negatives_are_drawn_uniformly(vocabulary: Vocabulary) -> None:
    collate = PairCollator(vocabulary, query_max_length=8, passage_max_length=8, num_negatives=2, seed=3)
    batch = collate(tuples([(3, 5)] * 300) + tuples([(3, 5)] * 300, epoch=1) + tuples([(3, 5)] * 300, epoch=2))
    passages, _ = pad_texts(batch.passages, torch.arange(len(batch.passages)), pad_id=0)
    number = (passages[:, 2] - 10).reshape(900, 3).numpy()
    positives = np.bincount(number[:, 0], minlength=3) / 900
    negatives = np.bincount(number[:, 1:].ravel() - 3, minlength=5) / 900
    assert np.abs(positives - 1 / 3).max() < 5 * np.sqrt(2 / 9 / 900)
    assert np.abs(negatives - 2 / 5).max() < 5 * np.sqrt(0.24 / 900)
    alone = collate(tuples([(3, 5)] * 300)[7:8])
    assert alone.passages.tokens.tolist() == batch.passages.tokens[21 * 7 : 21 * 8].tolist()


def test_scores_of_graded_pairs(vocabulary: Vocabulary) -> None:
    settings = {"query_max_length": 8, "passage_max_length": 8, "num_negatives": 0, "seed": 3}
    collate = PairCollator(vocabulary, **settings, graded=True)  # type: ignore[arg-type]
    batch = collate(tuples([(1, 0)] * 2, score=2.5))
    assert batch.scores is not None and batch.scores.dtype == torch.float32
    assert batch.scores.tolist() == [2.5, 2.5]
    for graded in (True, False):
        with pytest.raises(DataError, match="graded and ungraded"):
            mixed = tuples([(1, 0)], score=0.5) + tuples([(1, 0)])
            PairCollator(vocabulary, **settings, graded=graded)(mixed)  # type: ignore[arg-type]


def test_equal_texts_and_only_they_have_equal_hashes() -> None:
    texts = [np.array(ids, dtype=np.uint16) for ids in ([5, 6], [6, 5], [5, 6], [5], [5, 6, 0], [0], [0, 0], [], [])]
    hashes = text_hashes(texts).tolist()
    assert text_hashes(texts[::-1]).tolist() == hashes[::-1]
    assert hashes[0] == hashes[2] and hashes[7] == hashes[8]
    assert len(set(hashes)) == len(texts) - 2
    rng = np.random.default_rng(0)
    many = {tuple(rng.integers(0, 30, size=rng.integers(1, 5))) for _ in range(20_000)}
    assert len(set(text_hashes([np.array(text) for text in many]).tolist())) == len(many)
    assert text_hashes([np.array([5, 6], dtype=np.uint32)]).tolist() == hashes[:1]


def test_hashes_are_those_of_the_text_the_model_sees(vocabulary: Vocabulary) -> None:
    collate = PairCollator(vocabulary, query_max_length=8, passage_max_length=4, num_negatives=0, seed=3)
    samples = [
        Sample(0, index, 0, index, Tuple(np.array([7]), [np.array([8, 9, 100 + index])], 1, None)) for index in range(2)
    ]
    batch = collate(samples)
    assert batch.query_hashes[0] == batch.query_hashes[1]
    assert batch.passage_hashes[0] == batch.passage_hashes[1]
    assert batch.query_hashes[0] != batch.passage_hashes[0]


def test_all_known_positives_are_listed_as_the_model_reads_them(vocabulary: Vocabulary) -> None:
    shapes = [(1, 3), (2, 0), (3, 9), (1, 0)]
    samples = tuples(shapes)
    collate = PairCollator(vocabulary, query_max_length=5, passage_max_length=4, num_negatives=2, seed=3)
    batch = collate(samples)
    assert batch.known_offsets.tolist() == [0, 1, 3, 6, 7]
    assert batch.known_hashes.dtype == batch.known_offsets.dtype == torch.int64
    expected = [text[:2] for sample in samples for text in sample.payload.passages[: sample.payload.num_positives]]
    assert batch.known_hashes.tolist() == text_hashes(expected).tolist()
    # Negative control: uncut, they are other texts.
    uncut = [text for sample in samples for text in sample.payload.passages[: sample.payload.num_positives]]
    assert not set(batch.known_hashes.tolist()) & set(text_hashes(uncut).tolist())
    for query, (start, end) in enumerate(zip(batch.known_offsets.tolist(), batch.known_offsets.tolist()[1:])):
        mine = batch.passage_hashes[batch.passage_query == query].tolist()
        known = batch.known_hashes[start:end].tolist()
        assert mine[0] in known and not set(mine[1:]) & set(known)


def test_drawn_texts_are_those_of_the_batch(vocabulary: Vocabulary) -> None:
    samples = tuples([(1, 3), (2, 0), (3, 9), (1, 1)], epoch=4)
    collate = PairCollator(vocabulary, query_max_length=5, passage_max_length=4, num_negatives=2, seed=3)
    hashes, offsets = collate.drawn_texts(samples)
    batch = collate(samples[::-1])
    assert hashes.dtype == offsets.dtype == np.int64
    for index in range(4):
        row = 3 - index
        mine = [int(batch.query_hashes[row]), *batch.passage_hashes[batch.passage_query == row].tolist()]
        assert hashes[offsets[index] : offsets[index + 1]].tolist() == mine
    later, _ = collate.drawn_texts(tuples([(1, 3), (2, 0), (3, 9), (1, 1)], epoch=5))
    assert later.tolist() != hashes.tolist(), "another epoch draws others"


def test_prompts_stand_after_cls_and_count_towards_the_length(vocabulary: Vocabulary) -> None:
    samples = tuples([(1, 1)] * 2)
    samples[1] = Sample(1, *[getattr(samples[1], name) for name in ("index", "epoch", "position", "payload")])
    settings = {"query_max_length": 7, "passage_max_length": 6, "num_negatives": 1, "seed": 3}
    bare = PairCollator(vocabulary, **settings)(samples)  # type: ignore[arg-type]
    prompts = {
        "query_prompts": [np.array([70, 71]), np.array([], dtype=np.int64)],
        "passage_prompts": [np.array([72]), np.array([73, 74])],
    }
    collate = PairCollator(vocabulary, **settings, **prompts)  # type: ignore[arg-type]
    batch = collate(samples)
    queries, _ = pad_texts(batch.queries, torch.arange(2), pad_id=0)
    assert queries.tolist() == [[CLS, 70, 71, 50, 50, 50, SEP], [CLS, 51, 51, 51, 51, 51, SEP]]
    passages, _ = pad_texts(batch.passages, torch.arange(4), pad_id=0)
    assert passages[:, :3].tolist() == [[CLS, 72, 100]] * 2 + [[CLS, 73, 74]] * 2
    assert passages.shape[1] == 6 and (passages[:, 5] == SEP).all()
    # Hashes are of the text that is left, without its prompt.
    assert batch.query_hashes.tolist() == text_hashes([np.array([50] * 3), np.array([51] * 5)]).tolist()
    assert batch.query_hashes[1] == bare.query_hashes[1] and batch.query_hashes[0] != bare.query_hashes[0]
    rest = [samples[0].payload.passages[0][:3], samples[1].payload.passages[0][:2]]
    assert batch.known_hashes.tolist() == text_hashes(rest).tolist()
    assert collate.drawn_texts(samples)[0][[0, 3]].tolist() == batch.query_hashes.tolist()
    for name, length in (("query", 4), ("passage", 4)):
        with pytest.raises(DataError, match=f"{name}_max_length is {length}.*prompt of 2 tokens.*give 5 or more"):
            PairCollator(vocabulary, **{**settings, f"{name}_max_length": length}, **prompts)  # type: ignore[arg-type]


def test_no_samples_make_an_empty_batch(vocabulary: Vocabulary) -> None:
    """A rank may get none of a run's short last batch; what it gets must fit with the others'."""
    settings = {"query_max_length": 8, "passage_max_length": 8, "num_negatives": 1, "seed": 3}
    prompts = {"query_prompts": [np.array([70])], "passage_prompts": [np.array([72])]}
    for score in (None, 1.0):
        collate = PairCollator(vocabulary, **settings, **prompts, graded=score is not None)  # type: ignore[arg-type]
        assert_empty_like(collate([]), collate(tuples([(1, 2)], score=score)))
    several = PairCollator(vocabulary, **settings, num_positives=2, weighted=True)  # type: ignore[arg-type]
    assert_empty_like(several([]), several(tuples([(3, 2)])))
    hashes, offsets = collate.drawn_texts([])
    assert len(hashes) == 0 and offsets.tolist() == [0] and hashes.dtype == offsets.dtype == np.int64
    for ratio in (0.5, None):
        for nested in (True, False):
            documents_collator = masked(vocabulary, decoder_mask_ratio=ratio, nested=nested)
            assert_empty_like(documents_collator([]), documents_collator(documents([9])))


def assert_empty_like(empty: object, full: object) -> None:
    for item in fields(full):  # type: ignore[arg-type]
        mine, other = getattr(empty, item.name), getattr(full, item.name)
        if isinstance(other, Texts):
            assert_empty_like(mine, other)
        elif other is None:
            assert mine is None
        else:
            assert mine.dtype == other.dtype and mine.ndim == other.ndim == 1, item.name
            assert mine.tolist() == ([0] if item.name.endswith("offsets") else []), item.name
    if not isinstance(full, Texts):
        assert empty.num_samples == empty.num_tokens == 0  # type: ignore[attr-defined]


def test_collators_and_batches_pickle(vocabulary: Vocabulary) -> None:
    collate = masked(vocabulary)
    batch = collate(documents([9, 9]))
    assert isinstance(batch, MaskedBatch)
    assert equal(pickle.loads(pickle.dumps(collate))(documents([9, 9])), batch)
    assert equal(pickle.loads(pickle.dumps(batch)), batch)
    pairs = PairCollator(vocabulary, query_max_length=8, passage_max_length=8, num_negatives=1, seed=3)
    pair_batch = pairs(tuples([(1, 2)]))
    assert equal(pickle.loads(pickle.dumps(pairs))(tuples([(1, 2)])), pickle.loads(pickle.dumps(pair_batch)))


def test_invalid_settings_are_refused(vocabulary: Vocabulary) -> None:
    for options, sentence in (
        ({"max_length": 2}, "max_length is 2"),
        ({"encoder_mask_ratio": 0.6}, "raise the decoder's ratio"),
        ({"encoder_mask_ratio": -0.1}, "between 0 and 1"),
        ({"mask_probability": 0.8, "random_probability": 0.3}, "together make at most 1"),
    ):
        with pytest.raises(DataError, match=sentence):
            masked(vocabulary, **options)
    with pytest.raises(DataError, match="passage_max_length is 1"):
        PairCollator(vocabulary, query_max_length=8, passage_max_length=1, num_negatives=1, seed=0)
    with pytest.raises(DataError, match="num_negatives"):
        PairCollator(vocabulary, query_max_length=8, passage_max_length=8, num_negatives=-1, seed=0)
