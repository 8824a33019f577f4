"""Encoding word by word gives the ids of encoding whole texts, and is left alone where it would not."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken, Encoding, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data import encoding
from data.encoding import TextEncoder, spaces_part_words

# What white space, control characters, accents, scripts without spaces and special tokens could break.
ODD_TEXTS = [
    "",
    " ",
    "\n\n two  spaces\tand\r\nbreaks \n",
    "no\xa0break a\u2003b line\u2028line tab\x0bfeed\x0cnext\x85end",
    "sep\x1carator nul\x00l zero\u200bwidth soft\xadhyphen",
    "don't stop!? (it's) [MASK] x[SEP]y [ MASK ] [CLS][PAD] [UNK]",
    "Ünïcödé CAFÉ e\u0301 \u0301lone İstanbul ﬁne ½ ™ ß",
    "日本語 text 中文字 mixed中文words 한국어",
    "a" * 101 + " " + "b" * 300,
    "🙂👍🏽 👨‍👩‍👧 ok\ufffd",
]


def whole(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def random_texts(seed: int) -> list[str]:
    """Characters of all kinds, white space and controls among them."""
    rng = random.Random(seed)
    alphabet = "".join(ODD_TEXTS) + "abc ABC .,- \n\t" * 5
    return ["".join(rng.choices(alphabet, k=rng.randrange(60))) for _ in range(1000)]


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.BertNormalizer(lowercase=True),
        normalizers.BertNormalizer(lowercase=False, clean_text=False, handle_chinese_chars=False),
        normalizers.NFKC(),
        normalizers.NFC(),
        normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]),
        None,
    ],
    ids=str,
)
def test_words_give_the_ids_of_whole_texts(tiny_tokenizer, docstrings, normalizer, monkeypatch):
    tokenizer = Tokenizer.from_str(tiny_tokenizer.backend_tokenizer.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.normalizer = normalizer
    encode = TextEncoder(tokenizer, np.dtype("<u2"))
    assert encode.by_words
    monkeypatch.setattr(encoding, "REMEMBERED_WORDS", 3000)
    for texts in (ODD_TEXTS, docstrings[:250], random_texts(1), docstrings[200:450], random_texts(2)):
        found = encode(texts)
        assert [ids.tolist() for ids in found] == whole(tokenizer, texts)
        assert {ids.dtype for ids in found} == {np.dtype("<u2")}


def test_a_word_is_encoded_once(tiny_tokenizer):
    asked: list[str] = []

    class Asked:
        def __init__(self, tokenizer: Tokenizer) -> None:
            self.tokenizer = tokenizer

        def to_str(self) -> str:
            return self.tokenizer.to_str()

        def encode_batch_fast(self, texts: list[str], **options: bool) -> list[Encoding]:
            asked.extend(texts)
            return self.tokenizer.encode_batch_fast(texts, **options)

    encode = TextEncoder(Asked(tiny_tokenizer.backend_tokenizer), np.dtype("<u2"))
    encode(["open the file", "the list of the file"])
    encode(["the file, the list"])
    assert sorted(asked) == ["", ",", "file", "list", "of", "open", "the"]


def test_where_spaces_belong_to_words_whole_texts_are_encoded(docstrings):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(docstrings[:300], trainers.BpeTrainer(vocab_size=600, show_progress=False))
    encode = TextEncoder(bpe, np.dtype("<u2"))
    assert not encode.by_words
    assert [ids.tolist() for ids in encode(docstrings[:50])] == whole(bpe, docstrings[:50])
    encode.by_words = True
    assert [ids.tolist() for ids in encode(docstrings[:50])] != whole(bpe, docstrings[:50]), "negative control"


def test_what_is_not_certain_is_not_done(tiny_tokenizer):
    def sure(tokenizer: Tokenizer) -> bool:
        return spaces_part_words(json.loads(tokenizer.to_str()))

    def fresh() -> Tokenizer:
        return Tokenizer.from_str(tiny_tokenizer.backend_tokenizer.to_str())

    assert sure(fresh())
    for token in (
        AddedToken("two words"),
        AddedToken("a.b"),
        AddedToken("<l>", lstrip=True),
        AddedToken("<r>", rstrip=True),
        AddedToken("<s>", single_word=True),
    ):
        other = fresh()
        other.add_tokens([token])
        assert not sure(other), token
    other = fresh()
    other.enable_truncation(3)
    assert not sure(other)
    other = fresh()
    other.normalizer = normalizers.Replace(" ", "_")
    assert not sure(other)
    other = fresh()
    other.pre_tokenizer = pre_tokenizers.Metaspace()
    assert not sure(other)
