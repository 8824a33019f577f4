"""Whole-word masks for masked-language modelling, made for a whole batch of flat tokens at once.

What is decided here:
- A text of L tokens (special tokens counted) has a budget of round(L·ratio) masked tokens, never exceeded. Its words
  are visited in random order; a word that no longer fits is skipped, so that words are masked whole or not at all.
- Encoder and decoder masks (Starbucks §3.2, p_dec > p_enc) are nested or independent. With nested masks, the decoder's
  set is the encoder's set and further words in the same order (the released code, ielab/Starbucks smae/data.py).
- A masked token becomes [MASK], a random ordinary token or itself (BERT: 80/10/10). Special tokens are never masked.
- Every draw is a pure function of (seed, epoch, source, sample, purpose, index): a text gets the same mask in every
  batch, rank and worker (data/keyed_random.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.ground.errors import DataError
from data.keyed_random import Purpose, draws, integers, purpose_keys
from data.tokens import Vocabulary

IGNORED = -100
STARTS, CONTINUES, SPECIAL = 0, 1, 2
_HALF = np.uint64(32)
_LOW_HALF = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class MaskingTables:
    """The facts about a vocabulary that masking needs, by token id."""

    roles: np.ndarray  # uint8 [V]: STARTS a word, CONTINUES the previous token's word, or SPECIAL (never masked)
    replacements: np.ndarray  # int32 [V - specials]: the ids a random replacement is drawn from
    mask_id: int

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> MaskingTables:
        if vocabulary.mask_id is None:
            raise DataError(
                "this tokenizer has no mask token, which masked-language modelling needs; "
                "take another tokenizer, or add one with tokenizer.add_special_tokens({'mask_token': '[MASK]'})"
            )
        roles = np.where(vocabulary.continuation, CONTINUES, STARTS)
        roles[list(vocabulary.special_ids)] = SPECIAL
        replacements = np.flatnonzero(roles != SPECIAL).astype(np.int32)
        if not len(replacements):
            raise DataError("this tokenizer has special tokens only, so nothing can be masked; train it on text")
        return cls(roles.astype(np.uint8), replacements, vocabulary.mask_id)


@dataclass(frozen=True)
class _Words:
    """The words of a batch in text order; a word is a run of tokens that are masked together."""

    starts: np.ndarray  # int64 [W] position of a word's first token
    sizes: np.ndarray  # int64 [W] tokens a word
    first: np.ndarray  # int64 [n + 1] offsets of each text's words
    counts: np.ndarray  # int64 [n] words a text
    num_tokens: int


def _find_words(tokens: np.ndarray, offsets: np.ndarray, tables: MaskingTables) -> _Words:
    roles = tables.roles.take(tokens)  # [T]
    borders = roles != CONTINUES  # [T]: where a word starts, or a special token ends one
    # A window may begin in the middle of a word, and a token after a special token does not continue it.
    borders[offsets[:-1][offsets[1:] > offsets[:-1]]] = True
    borders[1:] |= roles[:-1] == SPECIAL
    positions = np.flatnonzero(borders)
    sizes = np.empty_like(positions)
    np.subtract(positions[1:], positions[:-1], out=sizes[:-1])
    sizes[-1:] = len(tokens) - positions[-1:]
    opens_word = roles.take(positions) != SPECIAL
    starts = positions[opens_word]
    first = np.searchsorted(starts, offsets)
    return _Words(starts, sizes[opens_word], first, first[1:] - first[:-1], len(tokens))


def _random_order(words: _Words, keys: np.ndarray) -> np.ndarray:
    """A permutation of the words that shuffles them within each text: int64 [W].

    It is one sort of (text, draw, word) packed into 64 bits: 32 bits for the draw, so that the order does not depend on
    the batch, and 32 for text and word together. The word's number breaks ties between draws.
    """
    num_texts = len(words.counts)
    text_starts = np.repeat(words.first[:-1], words.counts)  # [W]
    within = np.arange(len(words.sizes)) - text_starts
    bits = draws(np.repeat(keys, words.counts), within)
    word_bits = int(words.counts.max(initial=1) - 1).bit_length()
    texts = np.arange(num_texts)
    if word_bits + max(num_texts - 1, 0).bit_length() > 32:
        return np.lexsort((within, bits >> _HALF, np.repeat(texts, words.counts)))
    shift = np.uint64(word_bits)
    bits &= ~_LOW_HALF
    bits >>= _HALF - shift
    bits |= within.view(np.uint64)
    bits |= np.repeat(texts.astype(np.uint64) << (_HALF + shift), words.counts)
    bits.sort()
    # The words of a text occupy the same range of positions before and after the shuffle.
    bits &= (np.uint64(1) << shift) - np.uint64(1)
    return bits.view(np.int64) + text_starts


def _fill(sizes: np.ndarray, first: np.ndarray, budgets: np.ndarray) -> np.ndarray:
    """Visit words in order and take each that fits into the rest of its text's budget: bool [W].

    sizes: tokens of each word, grouped by text, in visiting order; first: [n + 1] offsets of the texts; budgets: [n].
    For all texts at once, the longest run of words that fits is taken, and the next word is skipped. The rest of the
    budget is then spent in the same way on ever longer stretches of the following words. A skipped word never fits
    later, because budgets only shrink.
    """
    totals = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=totals[1:])
    before = totals[first[:-1]]
    # Totals rise across the whole batch, so one binary search finds the end of each text's first run.
    ends = np.minimum(np.searchsorted(totals, before + budgets, side="right") - 1, first[1:])
    left = budgets - (totals[ends] - before)
    taken = np.arange(len(sizes)) < np.repeat(ends, np.diff(first))
    stops = first[1:]
    stretch = 16
    while True:
        unspent = (left > 0) & (ends < stops)
        left, ends, stops = left[unspent], ends[unspent], stops[unspent]  # [k] texts
        if not len(left):
            return taken
        columns = np.arange(min(stretch, int((stops - ends).max())))
        places = ends[:, None] + columns  # [k, stretch]
        size = sizes.take(places, mode="clip")
        possible = (size <= left[:, None]) & (places < stops[:, None])
        size *= possible
        total = np.cumsum(size, axis=1)
        fits = total <= left[:, None]
        taken[places[fits & possible]] = True
        # Continue after the run: at the first word that no longer fits, or after the stretch.
        run = fits.sum(axis=1)
        left = left - np.where(run > 0, total[np.arange(len(run)), run - 1], 0)
        ends = ends + run
        stretch *= 2


def whole_word_masks(
    tokens: np.ndarray,
    offsets: np.ndarray,
    *,
    tables: MaskingTables,
    keys: np.ndarray,
    ratios: Sequence[float],
    nested: bool = True,
) -> list[np.ndarray]:
    """The masks, bool [T], one for each ratio: the encoder's, then the decoder's if there is one.

    tokens: ids [T] of n texts, special tokens included; offsets: int64 [n + 1]; keys: uint64 [n] from `sample_keys`.
    If `nested`, the second mask contains the first, so the second ratio must not be below the first.
    """
    check_ratios(ratios, nested=nested)
    words = _find_words(tokens, offsets, tables)
    lengths = np.diff(offsets)
    budgets = [np.rint(lengths * ratio).astype(np.int64) for ratio in ratios]  # [n] tokens

    order = _random_order(words, purpose_keys(keys, Purpose.ENCODER_WORDS))
    sizes = words.sizes[order]
    taken = _fill(sizes, words.first, budgets[0])
    masks = [_token_mask(words, order[taken])]
    if len(ratios) == 2 and nested:
        # The encoder's words are already in the decoder's set, so their size counts as 0.
        texts = np.repeat(np.arange(len(lengths)), words.counts)
        spent = np.bincount(texts[taken], weights=sizes[taken], minlength=len(lengths)).astype(np.int64)
        taken = taken | _fill(np.where(taken, 0, sizes), words.first, budgets[1] - spent)
        masks.append(_token_mask(words, order[taken]))
    elif len(ratios) == 2:
        order = _random_order(words, purpose_keys(keys, Purpose.DECODER_WORDS))
        taken = _fill(words.sizes[order], words.first, budgets[1])
        masks.append(_token_mask(words, order[taken]))
    return masks


def _token_mask(words: _Words, chosen: np.ndarray) -> np.ndarray:
    """The tokens of the chosen words: indices [k] -> bool [T]."""
    sizes = words.sizes[chosen]
    skipped = words.starts[chosen] - (np.cumsum(sizes) - sizes)
    mask = np.zeros(words.num_tokens, dtype=bool)
    mask[np.repeat(skipped, sizes) + np.arange(int(sizes.sum()))] = True
    return mask


def check_ratios(ratios: Sequence[float], *, nested: bool) -> None:
    """Refuse mask ratios that are impossible."""
    if not 1 <= len(ratios) <= 2 or not all(0.0 <= ratio <= 1.0 for ratio in ratios):
        raise DataError(f"mask ratios {list(ratios)} must be one or two numbers between 0 and 1")
    if nested and ratios[-1] < ratios[0]:
        raise DataError(
            f"decoder mask ratio {ratios[-1]} is below the encoder's {ratios[0]}, but nested masks grow from the "
            "encoder's; raise the decoder's ratio or choose independent masks"
        )


def corrupt(
    tokens: np.ndarray,
    offsets: np.ndarray,
    *,
    mask: np.ndarray,
    tables: MaskingTables,
    keys: np.ndarray,
    mask_probability: float = 0.8,
    random_probability: float = 0.1,
) -> tuple[np.ndarray, np.ndarray]:
    """Replace the masked tokens: (input ids [T], labels [T] with -100 where nothing is masked), both int32.

    keys: uint64 [n], one stream for each text (`purpose_keys`); a token's draw has the number of its position.
    """
    inputs = tokens.astype(np.int32)
    labels = np.full(len(tokens), IGNORED, dtype=np.int32)
    positions = np.flatnonzero(mask)  # [M]
    labels[positions] = inputs[positions]
    masked_per_text = np.diff(np.searchsorted(positions, offsets))
    index_in_text = positions - np.repeat(offsets[:-1], masked_per_text)
    bits = draws(np.repeat(keys, masked_per_text), index_in_text)
    # The upper 32 bits decide what happens to the token, the lower 32 bits which token replaces it.
    action = bits >> _HALF
    random_from = np.uint64(round(mask_probability * 2**32))
    kept_from = np.uint64(min(round((mask_probability + random_probability) * 2**32), 2**32))
    inputs[positions[action < random_from]] = tables.mask_id
    randomised = (action >= random_from) & (action < kept_from)
    inputs[positions[randomised]] = tables.replacements[integers(bits[randomised], len(tables.replacements))]
    return inputs, labels
