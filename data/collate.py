"""Collators: lists of samples to typed flat batches.

What is decided here:
- Batches are flat: all tokens in one tensor plus offsets, never padded. Moving a batch from a loader process to the
  trainer costs time per byte, and the trainer cuts micro-batches by length, so padding comes last, in the model
  (models/layout.py).
- The frame of special tokens is added here, because shards hold ids without it: what the shards' tokenizer puts before
  and after a text (data/tokens.py). It is added after cutting, so that a closing token ends long texts too.
- A document longer than the model reads is cut to a random window, drawn anew each epoch (Starbucks §4: "long documents
  cut to a random window"); queries and passages are cut at their end, as they are when a retrieval model is used.
- A prompt stands between the opening tokens and the text and counts towards the length; each source has its own
  (`data.tokens` says when this equals tokenizing the joined text). Hashes are of the cut text, without prompt or
  special tokens.
- A special token that a text spells out, and for which the model has no row, is replaced by the ordinary ids of its
  spelling after that (`data.tokens.SpelledOut`), and the text is cut once more.
- For enhanced decoding the decoder reads and predicts every token but the special ones. The batch has one key for each
  text, from which the model draws on the device what each position sees (models/visibility.py).
- All draws are keyed by (seed, epoch, source, sample), see `data.masking`: a sample's batch entry does not depend on
  the batch it is in, so the texts of a sample are known before the batch is made (`drawn_texts`).
- A curriculum of hard negatives depends on the sample's position in the stream, which is the same for all ranks,
  workers and resumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from data.ground.errors import DataError
from data.keyed_random import Purpose, draws, integers, mix64, purpose_keys, sample_keys
from data.masking import IGNORED, SPECIAL, MaskingTables, check_ratios, corrupt, whole_word_masks
from data.shards.format import Tuple
from data.stream import Sample
from data.tokens import Vocabulary

# A sample's id is source · 2^40 + its number within the source, which is below 2^40.
SOURCE_STRIDE = 2**40


def take(values: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The values [t] of the texts `rows` (int64 [k]), in that order, from flat `values` [T] of all texts."""
    lengths = offsets.diff()[rows]
    starts = offsets[rows] - (lengths.cumsum(0) - lengths)  # [k]: where a text begins, less where it will begin
    count = int(lengths.sum())
    return values[torch.arange(count) + starts.repeat_interleave(lengths, output_size=count)]


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """Where each text begins and the last one ends, int64 [n + 1], from the texts' lengths [n]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


@dataclass(frozen=True)
class Texts:
    """A flat batch of n texts, special tokens included."""

    tokens: torch.Tensor  # int32 [T]
    offsets: torch.Tensor  # int64 [n + 1]
    # int64 [n]: the first tokens of each text that a pooling without the prompt leaves out, fewer than the text has
    # (`data.tokens.prompt_length`). None where no text has a prompt.
    prompt_lengths: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each text, int64 [n]."""
        return self.offsets.diff()

    @property
    def left_out(self) -> torch.Tensor:
        """`prompt_lengths`, with zeros where no text has a prompt."""
        return torch.zeros_like(self.lengths) if self.prompt_lengths is None else self.prompt_lengths

    def take(self, rows: torch.Tensor) -> Texts:
        """The texts `rows` (int64 [k]), in that order."""
        prompts = None if self.prompt_lengths is None else self.prompt_lengths[rows]
        return Texts(take(self.tokens, self.offsets, rows), offsets_of(self.lengths[rows]), prompts)


def concatenate(first: Texts, second: Texts) -> Texts:
    """The texts of both, one after the other."""
    offsets = torch.cat([first.offsets, second.offsets[1:] + first.offsets[-1]])
    prompts = None
    if first.prompt_lengths is not None or second.prompt_lengths is not None:
        prompts = torch.cat([first.left_out, second.left_out])
    return Texts(torch.cat([first.tokens, second.tokens]), offsets, prompts)


@dataclass(frozen=True)
class MaskedBatch:
    """B texts masked for the encoder and for the decoder, if there is one. With `pairs`, a sample has several texts."""

    offsets: torch.Tensor  # int64 [B + 1]
    encoder_input_ids: torch.Tensor  # int32 [T]
    encoder_labels: torch.Tensor  # int32 [T], -100 = ignored
    decoder_input_ids: torch.Tensor | None  # int32 [T]
    decoder_labels: torch.Tensor | None  # int32 [T], -100 = ignored
    sample_ids: torch.Tensor  # int64 [samples]
    visibility_keys: torch.Tensor | None = None  # int64 [B], for enhanced decoding: the decoder's inputs are unmasked
    pairs: PairBatch | None = None  # which texts belong together; the B texts are the pairs' queries, then passages

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.encoder_input_ids)


@dataclass(frozen=True)
class PairBatch:
    """n queries and their m passages in the order: query 0's positive, query 0's negatives, query 1's positive, ...

    Where several positives of a query count, they all stand first, and `target_query` says whose they are.
    """

    queries: Texts  # n
    passages: Texts  # m
    targets: torch.Tensor  # int64 [n], or [r]: the row of each positive in `passages`, query by query
    passage_query: torch.Tensor  # int64 [m]: which query a passage belongs to
    scores: torch.Tensor | None  # float32 [n], graded pairs only
    query_hashes: torch.Tensor  # int64 [n], equal for equal texts
    passage_hashes: torch.Tensor  # int64 [m], equal for equal texts
    known_hashes: torch.Tensor  # int64 [t]: hashes of all known positives of each query, drawn or not
    known_offsets: torch.Tensor  # int64 [n + 1]: where each query's known positives start
    sample_ids: torch.Tensor  # int64 [n]
    weights: torch.Tensor | None = None  # float32 [n], of the queries' losses; None where the shards have none
    target_query: torch.Tensor | None = None  # int64 [r]: the query of each target; None where each has one

    @property
    def hard_negatives(self) -> torch.Tensor:
        """The rows of `passages` that are no query's positive, int64 [m - r], rising."""
        is_negative = torch.ones(len(self.passages), dtype=torch.bool)
        is_negative[self.targets] = False
        return is_negative.nonzero()[:, 0]

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.queries.tokens) + len(self.passages.tokens)


@dataclass(frozen=True)
class TextBatch:
    """n texts as they are, for distillation from a teacher."""

    texts: Texts  # n
    hashes: torch.Tensor  # int64 [n], equal for equal texts
    sample_ids: torch.Tensor  # int64 [n]

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.texts.tokens)


@dataclass(frozen=True, eq=False)
class MaskedCollator:
    """Documents to a MaskedBatch.

    A `decoder_mask_ratio` of None makes no decoder inputs; `enhanced` makes unmasked decoder inputs.
    """

    vocabulary: Vocabulary
    _: KW_ONLY
    max_length: int  # tokens, special ones included
    encoder_mask_ratio: float
    decoder_mask_ratio: float | None
    nested: bool
    seed: int
    enhanced: bool = False  # keys for enhanced decoding instead of the decoder's mask
    mask_probability: float = 0.8
    random_probability: float = 0.1
    tables: MaskingTables = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.vocabulary.before or not self.vocabulary.after:
            raise DataError(
                "masked pre-training needs an opening token, which embeds the text, and a closing one, and this "
                "tokenizer does not put both around a text; take one that does, such as BERT's"
            )
        _check_length("max_length", self.max_length, self.vocabulary)
        check_ratios(self.ratios, nested=self.nested)
        shares = (self.mask_probability, self.random_probability)
        if min(shares) < 0 or sum(shares) > 1 + 1e-9:
            raise DataError(
                f"mask_probability {shares[0]} and random_probability {shares[1]} must be shares of the masked tokens "
                "that together make at most 1"
            )
        object.__setattr__(self, "tables", MaskingTables.of(self.vocabulary))

    @property
    def ratios(self) -> list[float]:
        decoder = None if self.enhanced else self.decoder_mask_ratio
        return [ratio for ratio in (self.encoder_mask_ratio, decoder) if ratio is not None]

    def __call__(self, samples: Sequence[Sample]) -> MaskedBatch:
        keys = _keys(samples, self.seed)  # [B]
        windows = self.windows([sample.payload for sample in samples], keys)
        tokens, offsets = _framed(windows, self.vocabulary, self.max_length)
        return self.mask(tokens, offsets, keys=keys, sample_ids=_sample_ids(samples))

    def windows(self, documents: Sequence[np.ndarray], keys: np.ndarray) -> list[np.ndarray]:
        """The part of each document that the model reads: ids without special tokens. keys: uint64 [n]."""
        lengths = np.asarray([len(document) for document in documents], dtype=np.int64)
        room = self.max_length - self.vocabulary.frame_length
        window_bits = draws(purpose_keys(keys, Purpose.WINDOW), np.zeros(len(documents), dtype=np.uint64))
        starts = integers(window_bits, np.maximum(lengths - room, 0) + 1)
        return [document[start : start + room] for document, start in zip(documents, starts.tolist())]

    def mask(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        *,
        keys: np.ndarray,
        sample_ids: torch.Tensor,
        pairs: PairBatch | None = None,
    ) -> MaskedBatch:
        """The batch of these texts. tokens: int32 [T], offsets: int64 [n + 1], special tokens included; keys: [n]."""
        masks = whole_word_masks(tokens, offsets, tables=self.tables, keys=keys, ratios=self.ratios, nested=self.nested)
        sides: list[torch.Tensor | None] = []
        for mask, purpose in zip(masks, (Purpose.ENCODER_TOKENS, Purpose.DECODER_TOKENS)):
            inputs, labels = corrupt(
                tokens,
                offsets,
                mask=mask,
                tables=self.tables,
                keys=purpose_keys(keys, purpose),
                mask_probability=self.mask_probability,
                random_probability=self.random_probability,
            )
            sides += [torch.from_numpy(inputs), torch.from_numpy(labels)]
        visibility_keys = None
        if self.enhanced:
            labels = np.where(self.tables.roles.take(tokens) == SPECIAL, np.int32(IGNORED), tokens)
            sides += [torch.from_numpy(tokens), torch.from_numpy(labels)]
            visibility_keys = torch.from_numpy(purpose_keys(keys, Purpose.VISIBILITY).view(np.int64))
        encoder_input_ids, encoder_labels, decoder_input_ids, decoder_labels = (*sides, None, None)[:4]
        assert encoder_input_ids is not None and encoder_labels is not None
        return MaskedBatch(
            offsets=torch.from_numpy(offsets),
            encoder_input_ids=encoder_input_ids,
            encoder_labels=encoder_labels,
            decoder_input_ids=decoder_input_ids,
            decoder_labels=decoder_labels,
            sample_ids=sample_ids,
            visibility_keys=visibility_keys,
            pairs=pairs,
        )


@dataclass(frozen=True, eq=False)
class TextCollator:
    """Documents to a TextBatch: each text is cut at its end and has its folder's prompt, as when it is embedded."""

    vocabulary: Vocabulary
    _: KW_ONLY
    max_length: int  # tokens, prompt and special ones included
    prompts: Sequence[np.ndarray] = ()  # ids, one prompt a source; empty: none
    prompt_lengths: Sequence[int] = ()  # one a source, of these prompts and of those in the shards; empty: none

    def __post_init__(self) -> None:
        _check_length("max_length", self.max_length, self.vocabulary, self.prompts, self.prompt_lengths)

    def __call__(self, samples: Sequence[Sample]) -> TextBatch:
        room = self.max_length - self.vocabulary.frame_length
        texts = [sample.payload[: room - _prompt_length(self.prompts, sample.source)] for sample in samples]
        return TextBatch(
            texts=with_prompts(
                texts,
                [sample.source for sample in samples],
                self.prompts,
                self.vocabulary,
                self.prompt_lengths,
                max_length=self.max_length,
            ),
            hashes=torch.from_numpy(text_hashes(texts)),
            sample_ids=_sample_ids(samples),
        )


class _Drawn(NamedTuple):
    """The texts of one training example that its batch holds, cut to the lengths that the model reads."""

    query: np.ndarray
    passages: list[np.ndarray]  # the drawn positives, then the drawn negatives
    num_targets: int  # drawn positives
    positives: list[np.ndarray]  # all known positives, drawn or not


@dataclass(frozen=True, eq=False)
class PairCollator:
    """Training examples (query, positives, negatives) to a PairBatch.

    One positive, or up to `num_positives` of them, and up to `num_negatives` negatives are drawn for each query; the
    numbers of queries may differ.
    """

    vocabulary: Vocabulary
    _: KW_ONLY
    query_max_length: int  # tokens, prompt and special ones included
    passage_max_length: int
    num_negatives: int
    seed: int
    graded: bool = False  # every pair has a score
    num_positives: int = 1
    weighted: bool = False  # some of the sources have weights; the samples of the others have the weight 1
    query_prompts: Sequence[np.ndarray] = ()  # ids, one prompt a source; empty: none
    passage_prompts: Sequence[np.ndarray] = ()
    query_prompt_lengths: Sequence[int] = ()  # one a source, of these prompts and of those in the shards; empty: none
    passage_prompt_lengths: Sequence[int] = ()
    negatives_from: Sequence[int] = ()  # positions in the stream from which the 1st, 2nd, ... negative is drawn

    def __post_init__(self) -> None:
        for side, length, prompts, lengths in (
            ("query", self.query_max_length, self.query_prompts, self.query_prompt_lengths),
            ("passage", self.passage_max_length, self.passage_prompts, self.passage_prompt_lengths),
        ):
            _check_length(f"{side}_max_length", length, self.vocabulary, prompts, lengths)
        if self.num_negatives < 0:
            raise DataError(f"num_negatives is {self.num_negatives}; give 0 or more")
        if self.num_positives < 1:
            raise DataError(f"num_positives is {self.num_positives}; give 1 or more")
        assert len(self.negatives_from) in (0, self.num_negatives)

    def __call__(self, samples: Sequence[Sample]) -> PairBatch:
        drawn = self._draw(samples)
        queries = [item.query for item in drawn]
        passages = [text for item in drawn for text in item.passages]
        known = [text for item in drawn for text in item.positives]
        passages_per_query = np.asarray([len(item.passages) for item in drawn], dtype=np.int64)
        passage_query = np.repeat(np.arange(len(samples)), passages_per_query)
        targets, target_query = self._targets(np.cumsum(passages_per_query) - passages_per_query, drawn)
        sources = [sample.source for sample in samples]
        return PairBatch(
            queries=with_prompts(
                queries,
                sources,
                self.query_prompts,
                self.vocabulary,
                self.query_prompt_lengths,
                max_length=self.query_max_length,
            ),
            passages=with_prompts(
                passages,
                [sources[n] for n in passage_query.tolist()],
                self.passage_prompts,
                self.vocabulary,
                self.passage_prompt_lengths,
                max_length=self.passage_max_length,
            ),
            targets=targets,
            target_query=target_query,
            passage_query=torch.from_numpy(passage_query),
            scores=_scores([sample.payload for sample in samples], graded=self.graded),
            query_hashes=torch.from_numpy(text_hashes(queries)),
            passage_hashes=torch.from_numpy(text_hashes(passages)),
            known_hashes=torch.from_numpy(text_hashes(known)),
            known_offsets=torch.from_numpy(_offsets([len(item.positives) for item in drawn])),
            sample_ids=_sample_ids(samples),
            weights=torch.tensor([sample.payload.weight for sample in samples]) if self.weighted else None,
        )

    def _targets(self, starts: np.ndarray, drawn: Sequence[_Drawn]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The places of the drawn positives, and whose they are. starts: int64 [n], each query's first passage."""
        if self.num_positives == 1:
            return torch.from_numpy(starts), None
        counts = np.asarray([item.num_targets for item in drawn], dtype=np.int64)
        owners = np.repeat(np.arange(len(drawn)), counts)
        within = np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
        return torch.from_numpy(starts[owners] + within), torch.from_numpy(owners)

    def drawn_texts(self, samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
        """Hashes of all texts that each sample adds to its batch: (int64 [t], offsets int64 [n + 1]).

        With a curriculum of negatives these are the hashes of the largest draw, of which every smaller one is a subset.
        """
        drawn = self._draw(samples, at_most=np.full(len(samples), self.num_negatives))
        hashes = text_hashes([text for item in drawn for text in (item.query, *item.passages)])
        return hashes, _offsets([1 + len(item.passages) for item in drawn])

    def _negatives_now(self, samples: Sequence[Sample]) -> np.ndarray:
        """How many negatives each sample may draw at its position in the stream, int64 [n]."""
        if not self.negatives_from:
            return np.full(len(samples), self.num_negatives)
        positions = [sample.position for sample in samples]
        return np.searchsorted(np.asarray(self.negatives_from), positions, side="right")

    def _draw(self, samples: Sequence[Sample], *, at_most: np.ndarray | None = None) -> list[_Drawn]:
        keys = _keys(samples, self.seed)  # [n]
        if at_most is None:
            at_most = self._negatives_now(samples)
        tuples: list[Tuple] = [sample.payload for sample in samples]
        num_positives = np.asarray([item.num_positives for item in tuples], dtype=np.int64)
        num_passages = np.asarray([len(item.passages) for item in tuples], dtype=np.int64)
        if self.num_positives == 1:
            bits = draws(purpose_keys(keys, Purpose.POSITIVE), np.zeros(len(samples), dtype=np.uint64))
            choices = [[choice] for choice in integers(bits, num_positives).tolist()]
        else:
            wanted = np.full(len(samples), self.num_positives)
            choices = _draw_some(purpose_keys(keys, Purpose.POSITIVE), num_positives, wanted)
        negatives = _draw_some(purpose_keys(keys, Purpose.NEGATIVES), num_passages - num_positives, at_most)
        drawn, frame_length = [], self.vocabulary.frame_length
        for sample, item, chosen_positives, chosen in zip(samples, tuples, choices, negatives):
            query_room = self.query_max_length - frame_length - _prompt_length(self.query_prompts, sample.source)
            room = self.passage_max_length - frame_length - _prompt_length(self.passage_prompts, sample.source)
            positives = [text[:room] for text in item.passages[: item.num_positives]]
            others = [item.passages[item.num_positives + index][:room] for index in chosen]
            targets = [positives[number] for number in chosen_positives]
            drawn.append(_Drawn(item.query[:query_room], [*targets, *others], len(targets), positives))
        return drawn


def _draw_some(keys: np.ndarray, num_available: np.ndarray, at_most: np.ndarray) -> list[list[int]]:
    """The numbers of each query's drawn passages, without replacement: those with the smallest random words.

    A smaller draw is therefore a subset of a larger one; `drawn_texts` relies on this. keys: uint64 [n], of the draw.
    """
    chosen = []
    for index, (available, wanted) in enumerate(zip(num_available.tolist(), at_most.tolist())):
        if available <= wanted:
            chosen.append(list(range(available)))
        else:
            order = np.argsort(draws(keys[index : index + 1], np.arange(available)), kind="stable")
            chosen.append(order[:wanted].tolist())
    return chosen


@dataclass(frozen=True, eq=False)
class SpanCollator:
    """Documents to a MaskedBatch with two spans of each document as a pair (coCondenser, Gao and Callan 2021).

    A document is cut in the middle, so that its spans share no token; each span is a random window of its half.
    """

    masked: MaskedCollator

    def __call__(self, samples: Sequence[Sample]) -> MaskedBatch:
        keys = _keys(samples, self.masked.seed)  # [n]
        documents = [sample.payload for sample in samples]
        halves = [document[: (len(document) + 1) // 2] for document in documents]
        halves += [document[(len(document) + 1) // 2 :] for document in documents]
        text_keys = np.concatenate([_text_keys(keys, np.full(len(keys), number)) for number in range(2)])
        spans = self.masked.windows(halves, text_keys)
        tokens, offsets = _framed(spans, self.masked.vocabulary, self.masked.max_length)
        count, hashes = len(samples), torch.from_numpy(text_hashes(spans))
        middle = int(offsets[count])
        flat, places = torch.from_numpy(tokens), torch.from_numpy(offsets)
        pairs = PairBatch(
            queries=Texts(flat[:middle], places[: count + 1]),
            passages=Texts(flat[middle:], places[count:] - middle),
            targets=torch.arange(count),
            passage_query=torch.arange(count),
            scores=None,
            query_hashes=hashes[:count],
            passage_hashes=hashes[count:],
            known_hashes=hashes[count:],
            known_offsets=torch.arange(count + 1),
            sample_ids=_sample_ids(samples),
        )
        return self.masked.mask(tokens, offsets, keys=text_keys, sample_ids=pairs.sample_ids, pairs=pairs)


@dataclass(frozen=True, eq=False)
class MaskedPairCollator:
    """Training examples to a MaskedBatch of queries and passages that stay pairs: SentMAE on labelled pairs (§2.2)."""

    masked: MaskedCollator
    pairs: PairCollator

    def __call__(self, samples: Sequence[Sample]) -> MaskedBatch:
        pairs = self.pairs(samples)
        passages = pairs.passages
        texts = concatenate(pairs.queries, passages)
        keys = _keys(samples, self.masked.seed)  # [n]
        owners = pairs.passage_query
        firsts = torch.searchsorted(owners, torch.arange(len(keys)))  # each query's first passage
        numbers = torch.arange(1, len(passages) + 1) - firsts[owners]  # a query's passages are 1, 2, ...
        text_keys = np.concatenate(
            [_text_keys(keys, np.zeros(len(keys))), _text_keys(keys[owners.numpy()], numbers.numpy())]
        )
        return self.masked.mask(
            texts.tokens.numpy(), texts.offsets.numpy(), keys=text_keys, sample_ids=pairs.sample_ids, pairs=pairs
        )


def _text_keys(keys: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """A key for each text of samples with several: uint64 [n] from the sample's key and the text's number in it."""
    return draws(purpose_keys(keys, Purpose.TEXTS), numbers)


def text_hashes(texts: Sequence[np.ndarray]) -> np.ndarray:
    """A hash of each text's ids: int64 [n]; two different texts collide with a probability of 2^-64.

    The sum over positions of a hash of (position, id), hashed again with the length.
    """
    lengths = np.asarray([len(text) for text in texts], dtype=np.int64)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tokens = np.concatenate([np.empty(0, dtype=np.uint64), *texts]).astype(np.uint64)
    positions = (np.arange(len(tokens)) - np.repeat(offsets[:-1], lengths)).astype(np.uint64)
    parts = mix64(mix64(tokens + np.uint64(1)) + positions * np.uint64(0x9E3779B97F4A7C15))
    # Sums modulo 2^64 as differences of a running total, because np.add.reduceat cannot sum an empty text.
    totals = np.concatenate((np.zeros(1, dtype=np.uint64), np.cumsum(parts, dtype=np.uint64)))
    return mix64((totals[offsets[1:]] - totals[offsets[:-1]]) ^ mix64(lengths.astype(np.uint64))).view(np.int64)


def _check_length(
    name: str,
    value: int,
    vocabulary: Vocabulary,
    prompts: Sequence[np.ndarray] = (),
    prompt_lengths: Sequence[int] = (),
) -> None:
    frame = vocabulary.frame_length
    if value < frame + 1:
        raise DataError(
            f"{name} is {value}, which leaves no room for text beside {frame} special tokens; give {frame + 1} or more"
        )
    longest = _longest_prompt(vocabulary, prompts, prompt_lengths)
    if value < (least := frame + longest + 1):
        raise DataError(
            f"{name} is {value}, which leaves no room for text beside a prompt of {longest} tokens and {frame} special "
            f"tokens; give {least} or more, or shorten the prompt"
        )


def _longest_prompt(vocabulary: Vocabulary, prompts: Sequence[np.ndarray], prompt_lengths: Sequence[int]) -> int:
    """Tokens of the longest prompt, whether its ids are put before texts here or are in the shards."""
    prepared = [max(0, length - len(vocabulary.before)) for length in prompt_lengths]
    if not prompts or not prepared:
        return max([*map(len, prompts), *prepared], default=0)
    return max(len(ids) or length for ids, length in zip(prompts, prepared, strict=True))


def _prompt_length(prompts: Sequence[np.ndarray], source: int) -> int:
    return len(prompts[source]) if prompts else 0


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _keys(samples: Sequence[Sample], seed: int) -> np.ndarray:
    return sample_keys(
        seed,
        epochs=np.asarray([sample.epoch for sample in samples], dtype=np.int64),
        sources=np.asarray([sample.source for sample in samples], dtype=np.int64),
        samples=np.asarray([sample.index for sample in samples], dtype=np.int64),
    )


def samples_of(batch: MaskedBatch | PairBatch | TextBatch) -> list[list[int]]:
    """[source, index within the source] of each sample of a batch."""
    return [list(divmod(number, SOURCE_STRIDE)) for number in batch.sample_ids.tolist()]


def _sample_ids(samples: Sequence[Sample]) -> torch.Tensor:
    return torch.tensor([sample.source * SOURCE_STRIDE + sample.index for sample in samples], dtype=torch.int64)


def with_prompts(
    texts: Sequence[np.ndarray],
    sources: Sequence[int],
    prompts: Sequence[np.ndarray],
    vocabulary: Vocabulary,
    prompt_lengths: Sequence[int] = (),
    *,
    max_length: int | None = None,
) -> Texts:
    """Add the sources' prompts and the frame to texts, which are ids and already cut to length.

    max_length: where a text ends that becomes longer because it spells tokens out; None: nowhere.
    """
    if prompts:
        texts = [np.concatenate((prompts[source], text)) for source, text in zip(sources, texts)]
    tokens, offsets = _framed(texts, vocabulary, max_length)
    lengths = None
    if prompt_lengths:
        # A text of few tokens may be shorter than its prompt is alone.
        found = np.asarray([prompt_lengths[source] for source in sources], dtype=np.int64)
        lengths = torch.from_numpy(np.minimum(found, np.maximum(np.diff(offsets) - 1, 0)))
    return Texts(torch.from_numpy(tokens), torch.from_numpy(offsets), lengths)


def _framed(
    texts: Sequence[np.ndarray], vocabulary: Vocabulary, max_length: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """(int32 tokens [T] of the texts, each within the tokenizer's frame, int64 offsets [n + 1])."""
    if vocabulary.spelled_out is not None and texts:
        whole, ends = vocabulary.spelled_out.replace(np.concatenate(texts), _offsets([len(text) for text in texts]))
        room = None if max_length is None else max_length - vocabulary.frame_length
        texts = [text[:room] for text in np.split(whole, ends[1:-1])]
    offsets = _offsets([len(text) + vocabulary.frame_length for text in texts])
    tokens = np.empty(int(offsets[-1]), dtype=np.int32)
    inside = np.ones(len(tokens), dtype=bool)
    borders = [(offsets[:-1] + number, special) for number, special in enumerate(vocabulary.before)]
    borders += [(offsets[1:] - number, special) for number, special in enumerate(reversed(vocabulary.after), 1)]
    for border, special_id in borders:
        tokens[border] = special_id
        inside[border] = False
    if texts:
        tokens[inside] = np.concatenate(texts)
    return tokens, offsets


def _scores(tuples: Sequence[Tuple], *, graded: bool) -> torch.Tensor | None:
    scores = [item.score for item in tuples if item.score is not None]
    if len(scores) != (len(tuples) if graded else 0):
        raise DataError(
            f"{len(scores)} of {len(tuples)} pairs have a score, but {'all' if graded else 'none'} should; graded and "
            "ungraded pairs have no common loss, so train on them in separate runs"
        )
    return torch.tensor(scores, dtype=torch.float32) if graded else None
