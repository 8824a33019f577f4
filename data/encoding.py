"""Texts to ids by the tokenizer, with a cache of words.

A WordPiece tokenizer such as BERT's normalises character by character, and no token crosses a space or a punctuation
mark. A text's ids are therefore the ids of its words and marks, one after the other. Words repeat (Zipf), and looking
up a word is much cheaper than normalising, splitting and matching it. Byte-level BPE and SentencePiece make the space a
part of a word; with them, and wherever the property is not certain, whole texts are encoded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Number of words that a process caches, some 100 bytes each.
REMEMBERED_WORDS = 2**19
# White space that separates words under every normalizer, and marks that stay marks under every normalizer.
SPACES = "\n\t"
MARKS = ',.;:!?()"'
_LOCAL_NORMALIZERS = (None, "BertNormalizer", "Lowercase", "StripAccents", "NFD", "NFKD", "NFC", "NFKC")


class TextEncoder:
    """Encodes batches of texts, without special tokens, as arrays of `dtype`."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.by_words = spaces_part_words(json.loads(tokenizer.to_str()))
        self._tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text."""
        if not self.by_words:
            return [np.asarray(ids, dtype=self.dtype) for ids in self._encode(texts)]
        words_of = [_words(text) for text in texts]
        if len(self._ids) > REMEMBERED_WORDS:
            self._ids.clear()
        unknown = list(set(chain.from_iterable(words_of)).difference(self._ids))
        self._ids.update(zip(unknown, self._encode(unknown)))
        find = self._ids.__getitem__
        return [np.array(list(chain.from_iterable(map(find, words))), dtype=self.dtype) for words in words_of]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _words(text: str) -> list[str]:
    # A few passes of str.replace are faster than one pass of a regular expression.
    for space in SPACES:
        text = text.replace(space, " ")
    for mark in MARKS:
        text = text.replace(mark, f" {mark} ")
    return text.split(" ")


def spaces_part_words(tokenizer: dict[str, Any]) -> bool:
    """Whether a tokenizer's JSON guarantees that words between spaces are encoded independently of each other."""

    def kinds(part: dict[str, Any] | None, inner: str) -> list[str | None]:
        if part is None:
            return [None]
        return [kind for one in part[inner] for kind in kinds(one, inner)] if inner in part else [part["type"]]

    parting = set(" " + SPACES + MARKS)
    return (
        tokenizer["model"]["type"] == "WordPiece"
        and kinds(tokenizer["pre_tokenizer"], "pretokenizers") == ["BertPreTokenizer"]
        and all(kind in _LOCAL_NORMALIZERS for kind in kinds(tokenizer["normalizer"], "normalizers"))
        and tokenizer["truncation"] is None
        and tokenizer["padding"] is None
        and not any(
            token["lstrip"] or token["rstrip"] or token["single_word"] or parting & set(token["content"])
            for token in tokenizer["added_tokens"]
        )
    )
