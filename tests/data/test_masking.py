"""Whole-word masks: against a naive restatement per text, statistics, and independence of the batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from data.ground.errors import DataError
from data.keyed_random import Purpose, draws, integers, mix64, purpose_keys, sample_keys
from data.masking import IGNORED, MaskingTables, corrupt, whole_word_masks
from data.tokens import Vocabulary, vocabulary_of

CLS, SEP, MASK, UNK, PAD = 1, 2, 3, 4, 0
SIZE = 1000


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    continuation = np.random.default_rng(5).random(SIZE) < 0.35
    continuation[:5] = False
    return Vocabulary(SIZE, (CLS,), (SEP,), PAD, MASK, (PAD, CLS, SEP, MASK, UNK), continuation)


def batch_of(lengths: Sequence[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random texts with CLS and SEP around them, an occasional UNK within: (tokens, offsets)."""
    rng = np.random.default_rng(seed)
    texts = []
    for length in lengths:
        text = rng.integers(4 if rng.random() < 0.5 else 5, SIZE, size=length)
        text[rng.random(length) < 0.02] = UNK
        texts.append(np.concatenate(([CLS], text, [SEP])))
    offsets = np.concatenate(([0], np.cumsum([len(text) for text in texts])))
    return np.concatenate(texts).astype(np.int32), offsets


def keys_of(num: int, *, seed: int = 7, epoch: int = 0, first: int = 0) -> np.ndarray:
    zeros = np.zeros(num, dtype=np.int64)
    return sample_keys(seed, epochs=zeros + epoch, sources=zeros, samples=first + np.arange(num))


def words_of(tokens: Sequence[int], vocabulary: Vocabulary) -> list[list[int]]:
    """Positions of each word of one text, as a plain loop finds them."""
    words: list[list[int]] = []
    inside = False
    for position, token in enumerate(tokens):
        if token in vocabulary.special_ids:
            inside = False
            continue
        if inside and vocabulary.continuation[token]:
            words[-1].append(position)
        else:
            words.append([position])
        inside = True
    return words


def order_of(num_words: int, key: np.ndarray, purpose: Purpose) -> list[int]:
    """The word order the module documents: by the upper half of each word's draw, then by the word."""
    bits = draws(purpose_keys(key, purpose), np.arange(num_words)) >> np.uint64(32)
    return sorted(range(num_words), key=lambda word: (int(bits[word]), word))


def naive_mask(words: list[list[int]], order: list[int], budget: int, taken: frozenset[int] = frozenset()) -> set[int]:
    """Visit words in order, take what fits; `taken` are words that are in already."""
    chosen = set(taken)
    used = sum(len(words[word]) for word in chosen)
    for word in order:
        if word not in chosen and used + len(words[word]) <= budget:
            chosen.add(word)
            used += len(words[word])
    return chosen


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("ratios", [(0.15, 0.5), (0.3, 0.31), (0.2, 0.2), (0.0, 1.0)])
def test_masks_equal_a_naive_restatement_per_text(
    vocabulary: Vocabulary, ratios: tuple[float, float], nested: bool
) -> None:
    lengths = [0, 1, 2, 3, 5, 8, 13, *np.random.default_rng(1).integers(1, 200, size=60).tolist()]
    tokens, offsets = batch_of(lengths)
    keys = keys_of(len(lengths))
    tables = MaskingTables.of(vocabulary)
    masks = whole_word_masks(tokens, offsets, tables=tables, keys=keys, ratios=ratios, nested=nested)
    for text, (start, end) in enumerate(itertools.pairwise(offsets)):
        words = words_of(tokens[start:end].tolist(), vocabulary)
        key = keys[text : text + 1]
        order = order_of(len(words), key, Purpose.ENCODER_WORDS)
        encoder = naive_mask(words, order, round(float((end - start) * ratios[0])))
        decoder_budget = round(float((end - start) * ratios[1]))
        if nested:
            decoder = naive_mask(words, order, decoder_budget, frozenset(encoder))
        else:
            decoder = naive_mask(words, order_of(len(words), key, Purpose.DECODER_WORDS), decoder_budget)
        for mask, chosen in zip(masks, (encoder, decoder)):
            expected = sorted(position for word in chosen for position in words[word])
            assert np.flatnonzero(mask[start:end]).tolist() == expected


def test_naive_restatement_tells_masks_apart(vocabulary: Vocabulary) -> None:
    """Negative control: another word order or budget gives other masks."""
    tokens, offsets = batch_of([120] * 8)
    tables = MaskingTables.of(vocabulary)
    mask = whole_word_masks(tokens, offsets, tables=tables, keys=keys_of(8), ratios=[0.3])[0]
    for keys, ratio in ((keys_of(8, seed=8), 0.3), (keys_of(8, epoch=1), 0.3), (keys_of(8), 0.29)):
        other = whole_word_masks(tokens, offsets, tables=tables, keys=keys, ratios=[ratio])[0]
        assert (other != mask).any()


@pytest.mark.parametrize("nested", [True, False])
def test_budget_whole_words_and_special_tokens(vocabulary: Vocabulary, nested: bool) -> None:
    lengths = np.random.default_rng(2).integers(1, 300, size=200).tolist()
    tokens, offsets = batch_of(lengths, seed=3)
    tables = MaskingTables.of(vocabulary)
    encoder, decoder = whole_word_masks(
        tokens, offsets, tables=tables, keys=keys_of(200), ratios=(0.2, 0.45), nested=nested
    )
    for mask, ratio in ((encoder, 0.2), (decoder, 0.45)):
        assert not mask[np.isin(tokens, vocabulary.special_ids)].any()
        counts = np.add.reduceat(mask, offsets[:-1], dtype=np.int64)
        budgets = np.asarray([round(float(length)) for length in np.diff(offsets) * ratio])
        assert (counts <= budgets).all()
        # With words of one to few tokens nearly the whole budget is spent.
        assert counts.sum() > 0.98 * budgets.sum()
        for start, end in itertools.pairwise(offsets):
            for word in words_of(tokens[start:end].tolist(), vocabulary):
                assert len({bool(mask[start + position]) for position in word}) == 1
    assert not (encoder & ~decoder).any() if nested else (encoder & ~decoder).any()


def test_every_word_is_equally_likely(vocabulary: Vocabulary) -> None:
    tokens = np.tile(np.array([CLS, *range(5, 25), SEP], dtype=np.int32), 4000)
    single = Vocabulary(SIZE, (CLS,), (SEP,), PAD, MASK, vocabulary.special_ids, np.zeros(SIZE, dtype=bool))
    offsets = np.arange(4001) * 22
    mask = whole_word_masks(tokens, offsets, tables=MaskingTables.of(single), keys=keys_of(4000), ratios=[0.25])[0]
    shares = mask.reshape(4000, 22).mean(axis=0)[1:-1]
    # round(22 * 0.25) = 6 (half to even) of 20 words; five standard errors of a share of 0.3 over 4,000 texts
    assert abs(shares.mean() - 6 / 20) < 1e-9
    assert np.abs(shares - 0.3).max() < 5 * np.sqrt(0.3 * 0.7 / 4000)


def test_a_draw_depends_on_its_sample_only(vocabulary: Vocabulary) -> None:
    """The same texts alone, in another order, and in another batch get the same masks and replacements."""
    lengths = np.random.default_rng(4).integers(1, 90, size=40).tolist()
    tokens, offsets = batch_of(lengths, seed=6)
    keys = keys_of(40)
    tables = MaskingTables.of(vocabulary)

    def masked(rows: Sequence[int]) -> list[list[list[int]]]:
        texts = [tokens[offsets[row] : offsets[row + 1]] for row in rows]
        cuts = np.concatenate(([0], np.cumsum([len(text) for text in texts])))
        flat, chosen = np.concatenate(texts), keys[list(rows)]
        masks = whole_word_masks(flat, cuts, tables=tables, keys=chosen, ratios=(0.2, 0.5))
        inputs, _ = corrupt(flat, cuts, mask=masks[1], tables=tables, keys=chosen)
        return [
            [masks[0][a:b].tolist(), masks[1][a:b].tolist(), inputs[a:b].tolist()] for a, b in itertools.pairwise(cuts)
        ]

    whole = masked(range(40))
    backwards = masked(range(39, -1, -1))
    assert backwards[::-1] == whole
    assert [masked([row])[0] for row in range(40)] == whole


def test_large_batches_sort_without_packing(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """More texts and words than 32 bits number: the slower sort gives the same order."""
    lengths = [200_000] + [0] * 20_000
    tokens, offsets = batch_of(lengths)
    tables = MaskingTables.of(vocabulary)
    large = whole_word_masks(tokens, offsets, tables=tables, keys=keys_of(len(lengths)), ratios=[0.3])[0]
    alone = whole_word_masks(tokens[:200_002], offsets[:2], tables=tables, keys=keys_of(1), ratios=[0.3])[0]
    assert (large[:200_002] == alone).all()
    assert not large[200_002:].any()


def test_eighty_ten_ten(vocabulary: Vocabulary) -> None:
    tokens, offsets = batch_of([500] * 200, seed=8)
    tables = MaskingTables.of(vocabulary)
    keys = keys_of(200)
    mask = whole_word_masks(tokens, offsets, tables=tables, keys=keys, ratios=[0.4])[0]
    inputs, labels = corrupt(tokens, offsets, mask=mask, tables=tables, keys=purpose_keys(keys, Purpose.ENCODER_TOKENS))
    assert (labels[mask] == tokens[mask]).all() and (labels[~mask] == IGNORED).all()
    assert (inputs[~mask] == tokens[~mask]).all()
    total = int(mask.sum())
    became_mask = (inputs[mask] == MASK).sum() / total
    replaced = inputs[mask][(inputs[mask] != MASK) & (inputs[mask] != tokens[mask])]
    # A random token is the same one in 1 of 995 draws.
    error = 5 * np.sqrt(0.25 / total)
    assert abs(became_mask - 0.8) < error
    assert abs(len(replaced) / total - 0.1 * 994 / 995) < error
    assert not np.isin(replaced, vocabulary.special_ids).any()
    # Replacements are uniform: a chi-square of 994 degrees of freedom has mean 994 and deviation 44.6.
    counts = np.bincount(replaced, minlength=SIZE)[5:]
    expected = len(replaced) / 995
    assert abs(((counts - expected) ** 2 / expected).sum() - 994) < 5 * 44.6


@pytest.mark.parametrize(("share", "expected"), [((1.0, 0.0), "mask"), ((0.0, 1.0), "random"), ((0.0, 0.0), "kept")])
def test_probabilities_are_parameters(vocabulary: Vocabulary, share: tuple[float, float], expected: str) -> None:
    tokens, offsets = batch_of([100] * 4)
    tables = MaskingTables.of(vocabulary)
    mask = whole_word_masks(tokens, offsets, tables=tables, keys=keys_of(4), ratios=[0.5])[0]
    inputs, _ = corrupt(
        tokens,
        offsets,
        mask=mask,
        tables=tables,
        keys=keys_of(4),
        mask_probability=share[0],
        random_probability=share[1],
    )
    if expected == "mask":
        assert (inputs[mask] == MASK).all()
    else:
        assert (inputs[mask] != MASK).all()
        assert (inputs == tokens).all() == (expected == "kept")


def test_draws_look_random() -> None:
    """Uniform bits, no correlation between neighbouring keys, indices and purposes, and avalanche."""
    keys = keys_of(2000)
    bits = draws(keys[:, None], np.arange(50)[None, :])
    ones = (bits[..., None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(ones.mean(axis=(0, 1)) - 0.5).max() < 5 * 0.5 / np.sqrt(bits.size)
    numbers = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    for left, right in ((numbers[:, 1:], numbers[:, :-1]), (numbers[1:], numbers[:-1])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 5 / np.sqrt(left.size)
    other = draws(purpose_keys(keys, Purpose.POSITIVE)[:, None], np.arange(50)[None, :])
    agreeing = np.bitwise_count(~(bits ^ other)).mean() / 64
    assert abs(agreeing - 0.5) < 5 * 0.5 / np.sqrt(bits.size * 64)
    flipped = mix64(keys[:, None] ^ (np.uint64(1) << np.arange(64, dtype=np.uint64)))
    changed = np.bitwise_count(flipped ^ mix64(keys)[:, None]).mean(axis=0)
    assert np.abs(changed - 32).max() < 1
    thirds = np.bincount(integers(bits.ravel(), 3), minlength=3) / bits.size
    assert np.abs(thirds - 1 / 3).max() < 5 * np.sqrt(2 / 9 / bits.size)


def test_every_part_of_a_key_counts() -> None:
    zeros = np.zeros(1, dtype=np.int64)
    keys = {
        int(sample_keys(seed, epochs=zeros + epoch, sources=zeros + source, samples=zeros + sample)[0])
        for seed in (0, 1, 2**64 - 1)
        for epoch in range(4)
        for source in range(4)
        for sample in range(4)
    }
    assert len(keys) == 3 * 4**3


def test_wordpiece_and_byte_level_words(tiny_tokenizer: object) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    text = "Unbelievable tokenizations, isn't it: extraordinarily incomprehensible wordpieces everywhere"
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    specials = ["<pad>", "<s>", "</s>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text], trainer)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1))
    byte_level = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", mask_token="<mask>"
    )
    for tokenizer in (tiny_tokenizer, byte_level):
        vocabulary = vocabulary_of(tokenizer)  # type: ignore[arg-type]
        encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)  # type: ignore[attr-defined]
        tokens = np.array([*vocabulary.before, *encoding.ids, *vocabulary.after], dtype=np.int32)
        tables = MaskingTables.of(vocabulary)
        # A token that opens at white space, or at the text's start, opens a word.
        pieces: dict[int, list[int]] = {}
        word = -1
        for position, (start, _) in enumerate(encoding.offsets, start=1):
            is_punctuation = tokenizer is tiny_tokenizer and not text[start].isalnum()
            after_punctuation = tokenizer is tiny_tokenizer and start and not text[start - 1].isalnum()
            if start == 0 or text[start] == " " or text[start - 1] == " " or is_punctuation or after_punctuation:
                word += 1
            pieces.setdefault(word, []).append(position)
        assert max(map(len, pieces.values())) > 1
        seen = set()
        for sample in range(40):
            mask = whole_word_masks(
                tokens, np.array([0, len(tokens)]), tables=tables, keys=keys_of(1, first=sample), ratios=[0.5]
            )[0]
            for members in pieces.values():
                assert len({bool(mask[position]) for position in members}) == 1
                seen.update(position for position in members if mask[position])
        assert seen == set(range(1, len(tokens) - 1))


def test_a_text_in_which_no_word_fits_stays_as_it_is(vocabulary: Vocabulary) -> None:
    continuing = int(np.flatnonzero(vocabulary.continuation)[0])
    tokens = np.array([CLS, 5, *[continuing] * 7, SEP], dtype=np.int32)
    tables = MaskingTables.of(vocabulary)
    mask = whole_word_masks(tokens, np.array([0, len(tokens)]), tables=tables, keys=keys_of(1), ratios=[0.5])[0]
    assert not mask.any()
    inputs, labels = corrupt(tokens, np.array([0, len(tokens)]), mask=mask, tables=tables, keys=keys_of(1))
    assert (inputs == tokens).all() and (labels == IGNORED).all()


def test_invalid_settings_are_refused(vocabulary: Vocabulary) -> None:
    tokens, offsets = batch_of([10])
    tables = MaskingTables.of(vocabulary)
    with pytest.raises(DataError, match="between 0 and 1"):
        whole_word_masks(tokens, offsets, tables=tables, keys=keys_of(1), ratios=[1.5])
    with pytest.raises(DataError, match="raise the decoder's ratio"):
        whole_word_masks(tokens, offsets, tables=tables, keys=keys_of(1), ratios=[0.5, 0.2])
    without = Vocabulary(SIZE, (CLS,), (SEP,), PAD, None, (PAD, CLS, SEP), np.zeros(SIZE, dtype=bool))
    with pytest.raises(DataError, match="no mask token"):
        MaskingTables.of(without)
