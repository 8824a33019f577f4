"""What stands before and after a text: training, evaluation and `tokenizer(text)` agree for every kind of tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.collate import MaskedCollator, PairCollator, TextCollator, Texts, concatenate
from data.ground.errors import DataError
from data.shards.format import Tuple
from data.stream import Sample
from data.tokens import Vocabulary, frame_of, prompt_length, vocabulary_of
from models.sizes import Size
from tests.data.frame_tokenizers import FRAMED, byte_level, template
from trainer.distributed import World
from trainer.evaluation.encoding.encode import Embedder, encode

LENGTH = 12


@pytest.fixture(scope="module")
def texts(docstrings: list[str]) -> list[str]:
    return [text for text in docstrings[:300] if text.isprintable() or "\n" in text][:200]


@pytest.fixture(scope="module")
def tokenizers(texts: list[str], tiny_tokenizer: PreTrainedTokenizerFast) -> dict[str, PreTrainedTokenizerFast]:
    return {"bert": tiny_tokenizer, **{name: make(texts) for name, (make, _, _) in FRAMED.items()}}


NAMES = ["bert", *FRAMED]


def alone(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[np.ndarray]:
    """What shards hold: ids without special tokens, uncut."""
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    found = tokenizer.backend_tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [np.asarray(each.ids, dtype=np.uint16) for each in found]


def framed(texts: Texts) -> list[list[int]]:
    return [ids.tolist() for ids in torch.tensor_split(texts.tokens, texts.offsets[1:-1])]


def collated(vocabulary: Vocabulary, ids: Sequence[np.ndarray], *, max_length: int = LENGTH) -> list[list[int]]:
    samples = [Sample(0, index, 0, index, payload) for index, payload in enumerate(ids)]
    return framed(TextCollator(vocabulary, max_length=max_length)(samples).texts)


def evaluated(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], *, max_length: int = LENGTH) -> list[list[int]]:
    """What evaluation hands to the model, text by text."""
    found: list[list[int]] = []

    def forward(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found.extend(row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask))
        return (torch.zeros(len(input_ids), 1),)

    embedder = Embedder(forward, tokenizer, [Size(1, 1)], World.alone("cpu"))
    for text in texts:
        encode(embedder, [text], similarity="dot", max_length=max_length)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_frames_are_what_the_tokenizer_adds(name: str, tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    tokenizer = tokenizers[name]
    before, after = FRAMED[name][1:] if name in FRAMED else (("[CLS]",), ("[SEP]",))
    found = frame_of(tokenizer)
    assert tuple(map(tuple, map(tokenizer.convert_ids_to_tokens, map(list, found)))) == (before, after)
    vocabulary = vocabulary_of(tokenizer)
    assert (vocabulary.before, vocabulary.after) == found
    assert vocabulary.frame_length == len(before) + len(after) == tokenizer.num_special_tokens_to_add()
    assert {*found.before, *found.after} <= set(vocabulary.special_ids)


def test_frames_do_not_depend_on_truncation_and_padding(tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    tokenizer = tokenizers["llama3"]
    plain = frame_of(tokenizer)
    tokenizer("a text", padding="max_length", truncation=True, max_length=1)
    assert tokenizer.backend_tokenizer.padding and tokenizer.backend_tokenizer.truncation
    assert frame_of(tokenizer) == plain == ((1,), ())


@pytest.mark.parametrize("name", NAMES)
def test_training_and_evaluation_read_what_the_tokenizer_gives(
    name: str, tokenizers: dict[str, PreTrainedTokenizerFast], texts: list[str]
) -> None:
    tokenizer = tokenizers[name]
    vocabulary = vocabulary_of(tokenizer)
    some = [*texts[:60], "one", "one two"]
    ids = alone(tokenizer, some)
    for length in (vocabulary.frame_length + 1, LENGTH, 10_000):
        cut = collated(vocabulary, ids, max_length=length)
        assert cut == tokenizer(some, truncation=True, max_length=length).input_ids
        assert cut == evaluated(tokenizer, some, max_length=length)
    whole = collated(vocabulary, ids, max_length=10_000)
    tokenizer.backend_tokenizer.no_truncation()
    assert whole == tokenizer(some).input_ids
    # Negative controls: the closing tokens put on before the cut, or forgotten, are other texts.
    long = [row for row in whole if len(row) > LENGTH]
    assert len(long) > 30
    cut = [row for row, full in zip(collated(vocabulary, ids), whole) if len(full) > LENGTH]
    for row, full in zip(cut, long):
        assert (row == full[:LENGTH]) == (not vocabulary.after)
        assert tuple(row[LENGTH - len(vocabulary.after) :]) == vocabulary.after


@pytest.mark.parametrize("name", NAMES)
def test_pairs_are_framed_and_cut_alike(
    name: str, tokenizers: dict[str, PreTrainedTokenizerFast], texts: list[str]
) -> None:
    tokenizer = tokenizers[name]
    vocabulary = vocabulary_of(tokenizer)
    ids = alone(tokenizer, texts[:40])
    examples = [Tuple(query, [passage], 1, None) for query, passage in zip(ids[::2], ids[1::2])]
    samples = [Sample(0, index, 0, index, example) for index, example in enumerate(examples)]
    collate = PairCollator(vocabulary, query_max_length=6, passage_max_length=LENGTH, num_negatives=0, seed=0)
    batch = collate(samples)
    assert framed(batch.queries) == tokenizer(texts[:40:2], truncation=True, max_length=6).input_ids
    assert framed(batch.passages) == tokenizer(texts[1:40:2], truncation=True, max_length=LENGTH).input_ids
    least = vocabulary.frame_length + 1
    with pytest.raises(DataError, match=rf"query_max_length is {least - 1}.* give {least} or more"):
        PairCollator(vocabulary, query_max_length=least - 1, passage_max_length=9, num_negatives=0, seed=0)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-embedding", "llama3"])
def test_masked_pretraining_needs_a_token_at_both_ends(
    name: str, tokenizers: dict[str, PreTrainedTokenizerFast]
) -> None:
    vocabulary = vocabulary_of(tokenizers[name])
    settings: dict[str, Any] = {"encoder_mask_ratio": 0.2, "decoder_mask_ratio": None, "nested": True, "seed": 1}
    with pytest.raises(DataError, match="needs an opening token, which embeds the text, and a closing one"):
        MaskedCollator(vocabulary, max_length=32, **settings)
    with pytest.raises(DataError, match="no mask token"):
        MaskedCollator(vocabulary_of(tokenizers["modernbert"]), max_length=32, **settings)


def test_an_empty_text_needs_a_frame(tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    assert evaluated(tokenizers["qwen3-embedding"], [""]) == [[4]]
    with pytest.raises(DataError, match=r"an empty text cannot be embedded .* leave empty texts out") as caught:
        evaluated(tokenizers["qwen3"], ["a text", ""])
    assert "\n" not in str(caught.value)


def test_other_post_processors_are_refused(texts: list[str]) -> None:
    twice = byte_level(texts[:20], template("<s> $A </s> $A"))
    with pytest.raises(DataError, match="does more than to put tokens of its vocabulary before and after a text"):
        vocabulary_of(twice)
    strange = byte_level(texts[:20], processors.BertProcessing(("</s>", 70_000), ("<s>", 1)))
    with pytest.raises(DataError, match="does more than to put tokens of its vocabulary"):
        frame_of(strange)


def test_a_model_without_words_has_a_frame_too(tmp_path: Path) -> None:
    """The frame is read without tokenizing a text, which a tokenizer of few words may not be able to do."""
    backend = Tokenizer(models.WordLevel({"[CLS]": 0, "rare": 1}))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 0)])
    PreTrainedTokenizerFast(tokenizer_object=backend, cls_token="[CLS]", pad_token="[CLS]").save_pretrained(tmp_path)
    assert frame_of(AutoTokenizer.from_pretrained(tmp_path)) == ((0,), ())


@pytest.mark.parametrize(
    ("name", "prompt", "expected"),
    [
        ("bert", "query: ", 3),  # [CLS] query :
        ("qwen3-embedding", "Query:", 2),
        ("qwen3", "Query:", 2),
        ("llama3", "Query:", 3),  # <s> Query :
        ("llama3", "Query: ", 4),  # alone, the space is a token
        ("llama3", "", 0),
    ],
)
def test_prompts_are_as_long_as_sentence_transformers_counts_them(
    name: str, prompt: str, expected: int, docstrings: list[str]
) -> None:
    """Their tokens and those before a text: what `tokenizer(prompt)` gives, less a closing token."""
    tokenizer: Any = FRAMED[name][0](["query Query " * 50, *docstrings[:50]]) if name in FRAMED else None
    if tokenizer is None:
        words = {word: number for number, word in enumerate(["[UNK]", "[CLS]", "[SEP]", "query", ":"])}
        backend = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    found = prompt_length(tokenizer, prompt)
    assert found == expected
    if prompt:
        assert found == len(tokenizer(prompt).input_ids) - len(frame_of(tokenizer).after)


def test_batches_know_how_long_prompts_are(tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    vocabulary = vocabulary_of(tokenizers["llama3"])  # <s> before
    prompt = np.array([40, 41, 42])
    examples = [Tuple(np.arange(50, 50 + n), [np.arange(90, 99), np.arange(80, 81)], 1, None) for n in (9, 1, 4)]
    samples = [Sample(index % 2, index, 0, index, example) for index, example in enumerate(examples)]
    settings: dict[str, Any] = {"query_max_length": 8, "passage_max_length": 6, "num_negatives": 1, "seed": 0}
    bare = PairCollator(vocabulary, **settings)(samples)
    assert bare.queries.prompt_lengths is None and bare.passages.prompt_lengths is None
    assert concatenate(bare.queries, bare.passages).prompt_lengths is None
    # The queries of source 0 get their prompt here, and those of source 1 have one of two tokens in their ids.
    collate = PairCollator(vocabulary, **settings, query_prompts=[prompt, prompt[:0]], query_prompt_lengths=[4, 3])
    batch = collate(samples)
    assert batch.queries.prompt_lengths is not None
    assert batch.queries.lengths.tolist() == [8, 2, 8]
    # A text that is shorter than its prompt alone keeps a token.
    assert batch.queries.prompt_lengths.tolist() == [4, 1, 4]
    rest = [row[skip:] for row, skip in zip(framed(batch.queries), batch.queries.prompt_lengths.tolist())]
    assert rest == [[50, 51, 52, 53], [50], [50, 51, 52, 53]]
    assert batch.passages.prompt_lengths is None
    taken = batch.queries.take(torch.tensor([2, 1])).prompt_lengths
    assert taken is not None and taken.tolist() == [4, 1]
    both = concatenate(batch.queries, batch.passages).prompt_lengths
    assert both is not None and both.tolist() == [4, 1, 4, 0, 0, 0, 0, 0, 0]
    texts = TextCollator(vocabulary, max_length=9, prompt_lengths=[2])
    read = texts([Sample(0, 0, 0, 0, np.arange(20))]).texts
    assert read.prompt_lengths is not None and read.prompt_lengths.tolist() == [2]
    # A prompt in the shards takes room, too.
    for length, options in ((4, {"query_prompts": [prompt]}), (4, {"query_prompt_lengths": [4]})):
        with pytest.raises(DataError, match=r"query_max_length is 4, .* beside a prompt of 3 tokens and 1 special"):
            PairCollator(vocabulary, **{**settings, "query_max_length": length}, **options)
    # With a prompt of the recipe its ids count, although the prompt alone may have a token more.
    PairCollator(vocabulary, **{**settings, "query_max_length": 5}, query_prompts=[prompt], query_prompt_lengths=[5])
