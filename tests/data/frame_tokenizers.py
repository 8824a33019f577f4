"""Tiny tokenizers that frame texts as the families people train do; each is trained on the texts that it is given.

Families differ in frames more than in vocabularies, so a vocabulary is trained once for the families that share it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_SPECIALS = ["<unk>", "<s>", "</s>", "<pad>", "<|endoftext|>", "<|im_end|>"]
# How Qwen splits texts before byte-level BPE: a space belongs to the word after it, a line break to the mark before it.
_WORDS = r"""[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""


def byte_level(texts: Sequence[str], post_processor: Any) -> PreTrainedTokenizerFast:
    """Byte-level BPE as in Qwen and Llama 3. Ids: those of _SPECIALS from 0."""
    return _wrapped(_byte_level(tuple(texts)), post_processor)


@lru_cache(maxsize=4)
def _byte_level(texts: tuple[str, ...]) -> str:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=_SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return backend.to_str()


def metaspace(texts: Sequence[str], post_processor: Any, *, unigram: bool = False) -> PreTrainedTokenizerFast:
    """SentencePiece-like BPE (Llama 2, Mistral) or Unigram (T5), which mark the beginnings of words with ▁."""
    return _wrapped(_metaspace(tuple(texts), unigram), post_processor)


@lru_cache(maxsize=4)
def _metaspace(texts: tuple[str, ...], unigram: bool) -> str:
    backend = Tokenizer(models.Unigram() if unigram else models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    options: dict[str, Any] = {"vocab_size": 600, "special_tokens": _SPECIALS, "show_progress": False}
    trainer: Any = trainers.BpeTrainer(**options)
    if unigram:
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **options)
    backend.train_from_iterator(texts, trainer)
    return backend.to_str()


def _wrapped(trained: str, post_processor: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(trained)
    if post_processor is not None:
        backend.post_processor = post_processor
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<pad>")


def template(single: str) -> Any:
    """A post-processor from a template such as "<s> $A </s>"."""
    tokens = [token for token in single.split() if token != "$A"]
    return processors.TemplateProcessing(
        single=single, special_tokens=[(each, _SPECIALS.index(each)) for each in tokens]
    )


def _trims() -> Any:
    return processors.ByteLevel(trim_offsets=False)


Maker = Callable[[Sequence[str]], PreTrainedTokenizerFast]
# Name -> (maker, the tokens before a text, the tokens after it).
FRAMED: dict[str, tuple[Maker, tuple[str, ...], tuple[str, ...]]] = {
    "roberta": (
        lambda texts: byte_level(texts, processors.RobertaProcessing(("</s>", 2), ("<s>", 1))),
        ("<s>",),
        ("</s>",),
    ),
    "modernbert": (lambda texts: byte_level(texts, template("<s> $A </s>")), ("<s>",), ("</s>",)),
    "qwen3": (lambda texts: byte_level(texts, _trims()), (), ()),
    "qwen3-embedding": (
        lambda texts: byte_level(texts, processors.Sequence([_trims(), template("$A <|endoftext|>")])),
        (),
        ("<|endoftext|>",),
    ),
    "llama3": (
        lambda texts: byte_level(texts, processors.Sequence([_trims(), template("<s> $A")])),
        ("<s>",),
        (),
    ),
    "llama2": (lambda texts: metaspace(texts, template("<s> $A")), ("<s>",), ()),
    "bare": (lambda texts: metaspace(texts, None), (), ()),
    "t5": (lambda texts: metaspace(texts, template("$A </s>"), unigram=True), (), ("</s>",)),
    "two-and-two": (
        lambda texts: byte_level(texts, template("<s> <unk> $A </s> <|endoftext|>")),
        ("<s>", "<unk>"),
        ("</s>", "<|endoftext|>"),
    ),
}
